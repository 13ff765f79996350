"""Launch configurations as frozen values, and where they come from."""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax

from lutjax.kernels.registry import Device

Sizes = dict[str, int]
"""What a launch is chosen by: sizes of a call by name, e.g. ``{"samples": 4096, "detectors": 16, ...}``."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is cut into programs.

    A program works on a tile of `rows` reads (samples of a look-up, keys of attention) times `outputs`, of
    `detectors` detectors one after the other.

    Attributes:
      rows: power of two. outputs: power of two; the kernel takes fewer where there are fewer.
      detectors: of one program; 0: all.
      warps: of one program, a power of two up to 32.

    Raises:
      ValueError: a value breaks its rule.

    Example:
      >>> from lutjax import tuning
      >>> tuning.Launch(rows=32, outputs=64, detectors=4, warps=2)
      Launch(rows=32, outputs=64, detectors=4, warps=2)
    """

    rows: int
    outputs: int
    detectors: int = 0
    warps: int = 4

    def __post_init__(self) -> None:
        for name, most in (("rows", 2**16), ("outputs", 2**16), ("warps", 32)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most or value & (value - 1):
                raise ValueError(f"Launch: {name} is {value!r}; expected a power of two from 1 to {most}.")
        if not isinstance(self.detectors, int) or self.detectors < 0:
            raise ValueError(f"Launch: detectors is {self.detectors!r}; expected a whole number, 0 for all.")
        if self.rows * self.outputs > 2**20:
            raise ValueError(
                f"Launch: a tile of rows * outputs = {self.rows} * {self.outputs} values; at most 2**20."
            )


Choice = tuple[tuple[str, Launch], ...]
_EXPLICIT = jax.make_user_context(default_value=None)  # part of jit's cache key


@contextlib.contextmanager
def use(launches: Mapping[str, Launch]) -> Iterator[None]:
    """Calls in this block launch these kernels so, whatever their sizes; other kernels and calls are not affected.

    Args:
      launches: by the name of the kernel, e.g. ``{"lookup.forward": Launch(...)}``; `lutjax tune` lists the names.

    Raises:
      TypeError: a value is not a `Launch`.

    Example:
      >>> from lutjax import tuning
      >>> with tuning.use({"lookup.forward": tuning.Launch(rows=64, outputs=32)}):
      ...     pass
    """
    for name, launch in launches.items():
        if not isinstance(launch, Launch):
            raise TypeError(f"tuning.use: {name!r} is {launch!r}; expected a tuning.Launch.")
    inherited = dict(_EXPLICIT.value or ())
    with _EXPLICIT(tuple(sorted({**inherited, **launches}.items(), key=lambda item: item[0]))):
        yield


def launch_of(kernel: str, sizes: Sizes, device: Device, rule: Callable[[Sizes], Launch]) -> Launch:
    """The launch of a kernel: what `use` says, else what was measured on such a device at like sizes, else the rule's."""
    explicit = dict(_EXPLICIT.value or ()).get(kernel)
    if explicit is not None:
        return explicit
    return measured(device.kind).get((kernel, bucket(sizes))) or rule(sizes)


def bucket(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    """Sizes that one measurement stands for: each rounded to the nearest power of two."""
    return tuple((name, round_to_power(size)) for name, size in sorted(sizes.items()))


def round_to_power(size: int) -> int:
    """The nearest power of two, the larger of equals; 0 for 0."""
    if size <= 0:
        return 0
    below = 1 << (size.bit_length() - 1)
    return below if size - below < 2 * below - size else 2 * below


@functools.cache
def measured(device_kind: str) -> dict[Any, Launch]:
    """What was measured on such a device, shipped with the package: by kernel and sizes. Empty for others."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    file = resources.files("lutjax.tuning").joinpath("data", f"{name}.json")
    return _parsed(json.loads(file.read_text())) if file.is_file() else {}


def load(path: str | Path) -> dict[Any, Launch]:
    """What `lutjax tune` wrote to a file."""
    return _parsed(json.loads(Path(path).read_text()))


def _parsed(document: dict[str, Any]) -> dict[Any, Launch]:
    return {
        (entry["kernel"], bucket(entry["sizes"])): Launch(**entry["launch"]) for entry in document["launches"]
    }

"""Values for the layer argument `wiring`: wirings by name, and wirings with their own sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.wiring._gates import balanced, butterfly, random, unique_pairs
from lutjax.wiring._images import windows
from lutjax.wiring._sizes import Size, as_image, require, shape_of

Wiring = Callable[[Any, int, int, int], Any]
"""Function that samples wires ``[gates, inputs per gate]``.

It takes a key and the numbers of inputs, gates, and inputs per gate.
"""


@dataclasses.dataclass(frozen=True)
class Windows:
    """Wiring whose gates each read one image window, for the first gate layer.

    Windows have all positions in the image. Gate counts per window differ by at most one.

    Args:
      image_shape: height, width and, if there are several, channels in the flattened image: a
        pixel's bits are channels.
      kernel: window height and width.
      channels: channels per gate, sampled for each gate. None: all.

    Raises:
      ValueError: the window is larger than the image, or there are fewer channels; on use: the
        image size differs from the number of inputs.

    Source: docs/logic.md, section 9.

    Example:
      >>> import jax
      >>> from lutjax import wiring
      >>> wires = wiring.Windows((8, 8), kernel=3)(jax.random.key(0), 64, 100, 2)
      >>> rows, columns = wires // 8, wires % 8
      >>> int(abs(rows[:, 0] - rows[:, 1]).max()), int(abs(columns[:, 0] - columns[:, 1]).max())
      (2, 2)
    """

    image_shape: tuple[int, ...]
    kernel: Size = 5
    channels: int | None = None

    def __post_init__(self) -> None:
        n_channels = self._shape[2]
        # Raises for an impossible kernel, before any layer is made.
        windows(self._shape, self.kernel)
        if self.channels is not None and not 0 < self.channels <= n_channels:
            raise ValueError(
                f"Windows: channels is {self.channels}, but the image has {n_channels}; "
                f"expected 1 to {n_channels}."
            )

    @property
    def _shape(self) -> tuple[int, int, int]:
        return as_image(shape_of("Windows", "image_shape", self.image_shape, (2, 3)))

    def __call__(self, key: Any, n_inputs: int, n_gates: int, arity: int = 2) -> jax.Array:
        height, width, n_channels = self._shape
        if height * width * n_channels != n_inputs:
            raise ValueError(
                f"Windows: image_shape is {self.image_shape}, with {height * width * n_channels} "
                f"values, but there are {n_inputs} inputs; bits of a pixel count as channels."
            )
        ids_by_window = windows(self._shape, self.kernel)
        ids = jnp.asarray(ids_by_window.reshape(-1, ids_by_window.shape[-1]))
        window_key, value_key, channel_key = jax.random.split(key, 3)
        window = balanced(window_key, len(ids), n_gates, 1)
        # Each gate reads a balanced choice of `own` channels, and balanced values among them.
        own = n_channels if self.channels is None else self.channels
        value = balanced(value_key, ids.shape[1] // n_channels * own, n_gates, arity)
        if self.channels is not None:
            channel = balanced(channel_key, n_channels, n_gates, own)
            value = value // own * n_channels + jnp.take_along_axis(channel, value % own, 1)
        wires: jax.Array = ids[window, value]
        return wires


@dataclasses.dataclass(frozen=True)
class Groups:
    """Wiring in which each gate group reads one input group, such as leading channels.

    Inputs and gates are divided into the same number of contiguous groups. A group's gates read its
    inputs, balanced.

    Args:
      n_groups: number of groups; must divide inputs and gates.

    Raises:
      ValueError: there are no groups; on use: groups do not divide inputs or gates.

    Source: docs/logic.md, section 9.

    Example:
      >>> import jax
      >>> from lutjax import wiring
      >>> wires = wiring.Groups(3)(jax.random.key(0), 12, 30, 2)
      >>> (wires // 4).reshape(3, 10, 2).min((1, 2)), (wires // 4).reshape(3, 10, 2).max((1, 2))
      (Array([0, 1, 2], dtype=int32), Array([0, 1, 2], dtype=int32))
    """

    n_groups: int

    def __post_init__(self) -> None:
        require("Groups", n_groups=self.n_groups)

    def __call__(self, key: Any, n_inputs: int, n_gates: int, arity: int = 2) -> jax.Array:
        for name, size in (("inputs", n_inputs), ("gates", n_gates)):
            if size % self.n_groups:
                raise ValueError(
                    f"Groups: n_groups is {self.n_groups}, which does not divide {size} {name}; "
                    f"use {-(-size // self.n_groups) * self.n_groups} {name}, "
                    "or another number of groups."
                )
        size, each = n_inputs // self.n_groups, n_gates // self.n_groups
        keys = jax.random.split(key, self.n_groups)
        wires = jax.vmap(lambda key: balanced(key, size, each, arity))(keys)
        first = jnp.arange(self.n_groups, dtype=jnp.int32) * size
        return (wires + first[:, None, None]).reshape(n_gates, arity)


def _sample_unique(key: Any, n_inputs: int, n_gates: int, arity: int = 2) -> jax.Array:
    if arity != 2:
        raise ValueError(
            f"unique_pairs: draws pairs, but a gate has {arity} inputs; use balanced wiring."
        )
    return unique_pairs(key, n_inputs, n_gates)


FIXED: dict[str, Wiring] = {
    "balanced": balanced,
    "random": random,
    "unique": _sample_unique,
    "butterfly": butterfly,
}
"""Fixed wirings by name."""

LEARNED = ("top-k", "full", "learnable")  # names of the wirings with scores

EVEN = ("balanced", "unique", "butterfly", "learnable")
"""Names of the wirings with fan-outs that differ by at most one."""


def sample_wires(
    wiring: str | Wiring, key: Any, n_inputs: int, n_gates: int, arity: int
) -> jax.Array:
    """Return the wires for a fixed wiring: int32 ``[n_gates, arity]``.

    Raises:
      ValueError: the wiring does not support these sizes, or returns another shape.
    """
    draw = FIXED[wiring] if isinstance(wiring, str) else wiring
    wires = jnp.asarray(draw(key, n_inputs, n_gates, arity))
    if wires.shape != (n_gates, arity) or not jnp.issubdtype(wires.dtype, jnp.integer):
        raise ValueError(
            f"wiring returned {wires.dtype}{list(wires.shape)} for {n_inputs} inputs; expected "
            f"int32 [{n_gates}, {arity}], the inputs per gate."
        )
    return wires.astype(jnp.int32)

"""Choice of the launch of a call."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from lutjax._jit_key import LAUNCHES, RECORDER
from lutjax.dispatch.registry import Device, Launched, kernel_registry, names_of
from lutjax.tuning._files import Key, load, measured
from lutjax.tuning._launch import Launch, Sizes, bucket


class _Explicit:
    """The launches of `use`: of kernels at some sizes, and of kernels whatever their sizes.

    Part of jit's cache key, which is looked at in every call of a jitted function: so it knows its hash.
    """

    def __init__(self, launches: Mapping[Any, Launch]):
        self._launches = dict(launches)
        self._hash = hash(frozenset(self._launches.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Explicit) and self._launches == other._launches

    def __repr__(self) -> str:
        return repr(self._launches)

    def __reduce__(self) -> Any:  # hashes of texts differ by process
        return _Explicit, (self._launches,)

    def given(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which they count, and those of blocks around it for other kernels."""
        around: _Explicit | None = LAUNCHES.value
        block: contextlib.AbstractContextManager[Any] = LAUNCHES(
            self if around is None else around.within(self._launches)
        )
        return block

    def of(self, kernel: str, sizes: Sizes) -> Launch | None:
        return self._launches.get((kernel, bucket(sizes))) or self._launches.get(kernel)

    def within(self, launches: Mapping[Any, Launch]) -> "_Explicit":
        """Return the launches with those of an inner block; a kernel that it launches whatever its sizes forgets those at some sizes."""
        kept = {
            key: launch
            for key, launch in self._launches.items()
            if isinstance(key, str) or key[0] not in launches
        }
        return _Explicit({**kept, **launches})


@dataclasses.dataclass(frozen=True)
class Asked:
    """A kernel that a traced call launches.

    Attributes:
      kernel: its name, e.g. ``"lookup.forward"``.
      sizes: what its launch was chosen by.
      launch: that was chosen.
      source: of the launch: ``"use"`` where the call or a block gave it, what was measured on such devices, or the rule beside the kernel.
      rule: the launch of that rule.
    """

    kernel: str
    sizes: Sizes
    launch: Launch
    source: Literal["use", "measured", "rule"]
    rule: Launch


class _Recorder:
    """A list with an identity."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []


@contextlib.contextmanager
def use(launches: Mapping[str, Launch] | Mapping[Key, Launch] | str | os.PathLike[str]) -> Iterator[None]:
    """Launch these kernels so in this block; other kernels and calls are not affected.

    Also inside functions under `jax.jit`, which are traced anew for it. Of nested blocks the inner one counts.

    Args:
      launches: by the name of the kernel, whatever its sizes, e.g. ``{"lookup.forward": Launch(...)}``; or a file that
        ``lutjax tune`` wrote, or what `load` returned for it: these count at the sizes for which they were measured.
        `recorded` and ``lutjax tune`` tell the names.

    Raises:
      TypeError: a value is not a `Launch`.
      OSError, ValueError: see `load`.

    Example:
      >>> from lutjax import tuning
      >>> with tuning.use({"lookup.forward": tuning.Launch(rows=64, outputs=32)}):
      ...     pass
    """
    with _Explicit(_checked("use", launches)).given():
        yield


def launched(
    implementation: str | tuple[str, ...],
    launches: Mapping[str, Launch] | Mapping[Key, Launch] | str | os.PathLike[str],
) -> Launched:
    """Return an implementation with launches of its kernels, to be passed to one call as ``implementation=``.

    They hold for that call in every direction, and for no other, under all transformations: they are a part of what jit keeps its function
    by. `use` is for all calls of a block, and gives way to them.

    Args:
      implementation: its name, or several in order of preference, as ops take it.
      launches: as `use` takes them. Kernels that the call does not launch may be among them.

    Raises:
      TypeError: a value is not a `Launch`, or the implementation no name.
      ValueError: an unknown implementation, or a kernel that it does not have. OSError: see `load`.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax import tuning
      >>> how = tuning.launched(("triton", "xla"), {"lookup.forward": tuning.Launch(rows=64, outputs=32)})
      >>> d = lutjax.detect_signs(jnp.array([[0.5, -0.25]]))
      >>> lutjax.lookup(jnp.ones((1, 4, 3)), d, implementation=how).shape  # here by "xla", where nothing is launched
      (3,)
    """
    if not implementation or not isinstance(implementation, str | tuple):
        raise TypeError(
            f"tuning.launched: implementation is {implementation!r}; expected a name, such as 'triton', or a tuple of names."
        )
    names, wanted = names_of(implementation), _checked("launched", launches)
    known = {
        kernel: [name for spec in specs for name in spec.names]
        for kernel, specs in kernel_registry.launchable().items()
    }
    own = sorted(kernel for kernel, of in known.items() if set(names) & set(of))
    for key in wanted:
        kernel = key if isinstance(key, str) else key[0]
        if kernel not in own:
            asked = " or ".join(names)
            rule = f"the kernels of {asked} that take a launch are {', '.join(own)}"
            if not own:
                others = dict.fromkeys(name for of in known.values() for name in of)
                rule = f"{asked} has no kernels that take a launch; those have {', '.join(others)}"
            raise ValueError(f"tuning.launched: launches has {kernel!r}; {rule}.")
    return Launched(names, _Explicit(wanted))


def _checked(function: str, launches: Any) -> Mapping[Any, Launch]:
    """Return launches by kernel, or by kernel and sizes."""
    wanted: Mapping[Any, Launch] = launches if isinstance(launches, Mapping) else load(launches)
    for name, launch in wanted.items():
        if not isinstance(launch, Launch):
            raise TypeError(f"tuning.{function}: {name!r} is {launch!r}; expected a tuning.Launch.")
    return wanted


@contextlib.contextmanager
def recorded() -> Iterator[list[Asked]]:
    """Collect the kernels that calls in this block launch, in the order of their tracing.

    Everything in it is traced anew; with `jax.eval_shape` nothing needs to run. An inner block has its own list.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax import tuning
      >>> with tuning.recorded() as asked:
      ...     _ = jax.eval_shape(lambda p: lutjax.detect_signs(p), jnp.zeros((4, 3)))
      >>> [a.kernel for a in asked]  # plain JAX has no launches
      []
    """
    recorder = _Recorder()
    with RECORDER(recorder):
        yield recorder.asked


def launch_of(kernel: str, sizes: Sizes, device: Device, rule: Callable[[Sizes], Launch]) -> Launch:
    """Return the launch of a kernel: that which its call was given, else that of `use`, else what was measured on such devices at like sizes, else the rule's."""
    explicit, recorder = LAUNCHES.value, RECORDER.value
    source: Literal["use", "measured", "rule"] = "use"
    launch = None if explicit is None else explicit.of(kernel, sizes)
    if launch is None:
        source, launch = "measured", measured(device.kind).get((kernel, bucket(sizes)))
    if launch is None:
        source, launch = "rule", rule(sizes)
    if recorder is not None:
        recorder.asked.append(Asked(kernel, sizes, launch, source, rule(sizes)))
    return launch

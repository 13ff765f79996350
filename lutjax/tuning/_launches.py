"""Selection of a call's kernel config."""

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
    """Configs from `use`, for kernels at some sizes or at all sizes.

    They are part of jit's cache key, which every call of a jitted function reads, so the hash is
    precomputed.
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

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block with these configs, and outer blocks' configs for other kernels."""
        around: _Explicit | None = LAUNCHES.value
        block: contextlib.AbstractContextManager[Any] = LAUNCHES(
            self if around is None else around.merge_inner(self._launches)
        )
        return block

    def find(self, kernel: str, sizes: Sizes) -> Launch | None:
        # A config at similar sizes is more specific than one for all sizes.
        return self._launches.get((kernel, bucket(sizes))) or self._launches.get(kernel)

    def merge_inner(self, launches: Mapping[Any, Launch]) -> "_Explicit":
        """Return the configs merged with an inner block's.

        If the inner block configures a kernel at all sizes, its configs at single sizes are
        dropped.
        """
        kept = {
            key: launch
            for key, launch in self._launches.items()
            if isinstance(key, str) or key[0] not in launches
        }
        return _Explicit({**kept, **launches})


@dataclasses.dataclass(frozen=True)
class Asked:
    """Kernel launched by a traced call.

    Attributes:
      kernel: its name, e.g. ``"lookup.forward"``.
      sizes: sizes that selected its config.
      launch: the selected config.
      source: origin of the config: ``"use"`` for a call or a block, a measurement on such devices,
          or the kernel's rule.
      rule: the config from that rule.
    """

    kernel: str
    sizes: Sizes
    launch: Launch
    source: Literal["use", "measured", "rule"]
    rule: Launch


class _Recorder:
    """List with an identity."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []


@contextlib.contextmanager
def use(
    launches: Mapping[str, Launch] | Mapping[Key, Launch] | str | os.PathLike[str],
) -> Iterator[None]:
    """Use these kernel configs in this block; other kernels and calls are not affected.

    They also apply inside functions under `jax.jit`, which are traced again for them. The innermost
    block takes precedence.

    Args:
      launches: configs by kernel name, for all sizes, e.g. ``{"lookup.forward": Launch(...)}``; or
          a ``lutjax tune`` file, or the result of `load` for it: these apply at their measured
          sizes. `recorded` and ``lutjax tune`` report the names.

    Raises:
      TypeError: a value is not a `Launch`.
      OSError, ValueError: see `load`.

    Example:
      >>> from lutjax import tuning
      >>> with tuning.use({"lookup.forward": tuning.Launch(rows=64, outputs=32)}):
      ...     pass
    """
    with _Explicit(_validate_launches("use", launches)).activate():
        yield


def launched(
    implementation: str | tuple[str, ...],
    launches: Mapping[str, Launch] | Mapping[Key, Launch] | str | os.PathLike[str],
) -> Launched:
    """Return an implementation with kernel configs, for one call's ``implementation=``.

    The configs apply to that call only, in every direction and under all transformations: they are
    part of jit's cache key. `use` applies to all calls in a block, with lower precedence.

    Args:
      implementation: its name, or several in order of preference, as ops take it.
      launches: as `use` takes them. They may include kernels that the call does not launch.

    Raises:
      TypeError: a value is not a `Launch`, or the implementation is not a name.
      ValueError: an unknown implementation, or a kernel that it lacks. OSError: see `load`.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax import tuning
      >>> config = {"lookup.forward": tuning.Launch(rows=64, outputs=32)}
      >>> how = tuning.launched(("triton", "xla"), config)
      >>> d = lutjax.detect_signs(jnp.array([[0.5, -0.25]]))
      >>> lutjax.lookup(jnp.ones((1, 4, 3)), d, implementation=how).shape  # "xla" launches nothing
      (3,)
    """
    if not implementation or not isinstance(implementation, str | tuple):
        raise TypeError(
            f"tuning.launched: implementation is {implementation!r}; expected a name, such as "
            "'triton', or a tuple of names."
        )
    names, wanted = names_of(implementation), _validate_launches("launched", launches)
    known = {
        kernel: [name for spec in specs for name in spec.names]
        for kernel, specs in kernel_registry.launchable().items()
    }
    # Configs of kernels that no requested implementation has would be ignored silently.
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


def _validate_launches(function: str, launches: Any) -> Mapping[Any, Launch]:
    """Return configs by kernel, or by kernel and sizes."""
    wanted: Mapping[Any, Launch] = launches if isinstance(launches, Mapping) else load(launches)
    for name, launch in wanted.items():
        if not isinstance(launch, Launch):
            raise TypeError(f"tuning.{function}: {name!r} is {launch!r}; expected a tuning.Launch.")
    return wanted


@contextlib.contextmanager
def recorded() -> Iterator[list[Asked]]:
    """Collect the kernels launched by calls in this block, in trace order.

    Calls inside are traced again; with `jax.eval_shape` nothing needs to run. An inner block has
    its own list.

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
    """Return a kernel's config.

    The call's own config comes first, then `use`, then a measurement on such devices at similar
    sizes, then the rule.
    """
    # Both are part of jit's cache key, so a config read while tracing stays valid for the trace.
    explicit, recorder = LAUNCHES.value, RECORDER.value
    source: Literal["use", "measured", "rule"] = "use"
    launch = None if explicit is None else explicit.find(kernel, sizes)
    if launch is None:
        source, launch = "measured", measured(device.kind).get((kernel, bucket(sizes)))
    if launch is None:
        source, launch = "rule", rule(sizes)
    if recorder is not None:
        recorder.asked.append(Asked(kernel, sizes, launch, source, rule(sizes)))
    return launch

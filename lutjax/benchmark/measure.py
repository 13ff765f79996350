"""Device time of a function, from many calls inside one jitted loop."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_STATIC_BELOW = 2e-3  # seconds of a call
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time per call.

    Attributes:
      p20, p50, p80: percentiles over all loops, in seconds per call.
      calls: calls per loop.
      loops: number of timed loops.
      peak_bytes: planned peak memory, including arguments; None if the compiler does not report it.
    """

    p20: float
    p50: float
    p80: float
    calls: int
    loops: int
    peak_bytes: int | None


def device_time(
    f: Callable[..., Any],
    *args: Any,
    in_place: bool = False,
    repeats: int = 20,
    loop_seconds: float = 0.03,
    budget: float = 3.0,
) -> Timing:
    """Measure the device time per call.

    Calls run sequentially inside one jitted loop with about `loop_seconds`, which excludes launch
    overhead. The loop is compiled, warmed up, and timed `repeats` times. The calls form a chain, so
    the compiler cannot drop, hoist or merge any call. All outputs are computed. Every call has the
    same arguments, so cached data stays cached.

    Args:
      f: a function that `jax.jit` supports. Pass all its arrays as arguments: the compiler may
        fold computations on captured arrays.
      args: its arguments.
      in_place: ``f(state, ...)`` returns ``(state, outputs)``: each call receives the previous
        state, in the same memory. The first argument is consumed.
      repeats: number of timed loops.
      loop_seconds: target loop time. A longer call is its own loop.
      budget: after this many seconds and three timed loops, no other loop starts.

    Returns:
      `Timing`.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.benchmark.measure import device_time
      >>> time = device_time(jnp.cumsum, jnp.ones(1000), repeats=3, loop_seconds=0.001)
      >>> 0 < time.p20 <= time.p50 <= time.p80 < 1
      True
    """
    state, args = (args[0], args[1:]) if in_place else ((), args)
    compiled = _any_count(f, in_place, state, args)

    def run(state: Any, count: int) -> tuple[Any, float]:
        number = () if static else (jnp.int32(count),)
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state, args, *number))[0]
        return state, time.perf_counter() - start

    # `run` looks up `static` and `compiled` at every call; both may change below.
    static, calls = False, 1
    state, _ = run(state, calls)  # the first run also loads the program
    state, seconds = run(state, calls)
    while seconds < loop_seconds / 2:
        # At most 16 times as many calls: a first loop may be too short to measure.
        calls = math.ceil(calls * min(loop_seconds / seconds, 16))
        state, seconds = run(state, calls)
    if jax.default_backend() != "cpu" and seconds / calls < _STATIC_BELOW:
        # With a dynamic trip count, an accelerator asks the host after every call whether to
        # continue.
        static, compiled = True, _loop(f, in_place, calls).lower(state, args).compile()
        state, _ = run(state, calls)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < repeats and (len(times) < 3 or time.perf_counter() - begin < budget):
        state, seconds = run(state, calls)
        times.append(seconds / calls)
    p20, p50, p80 = (float(p) for p in np.percentile(times, [20, 50, 80]))
    return Timing(p20, p50, p80, calls, len(times), planned_bytes(compiled))


def peak_bytes(f: Callable[..., Any], *args: Any, in_place: bool = False) -> int | None:
    """Return `Timing.peak_bytes` without running anything; arguments may be abstract."""
    state, args = (args[0], args[1:]) if in_place else ((), args)
    return planned_bytes(_any_count(f, in_place, state, args))


def copy_bandwidth(n_bytes: int | None = None) -> float:
    """Measure the copy bandwidth in bytes per second, reads plus writes.

    Args:
      n_bytes: array size, larger than any cache: by default 1 GiB, or 256 MiB on a CPU.
    """
    n_bytes = n_bytes or (256 * _MIB if jax.default_backend() == "cpu" else 1024 * _MIB)
    array = jnp.ones(n_bytes // 4, jnp.float32)
    timing = device_time(lambda a: (a + 1, ()), array, in_place=True)
    # In place, so that no second array is allocated; each element is read and written.
    return 2 * array.size * 4 / timing.p50


def _any_count(f: Callable[..., Any], in_place: bool, state: Any, args: Any) -> jax.stages.Compiled:
    return (
        _loop(f, in_place, None).lower(state, args, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    )


def _loop(f: Callable[..., Any], in_place: bool, count: int | None) -> Any:
    """Return a jitted loop ``(state, args, count) -> (state, outputs)``; no known ``count``."""

    def call(state: Any, args: Any) -> tuple[Any, Any]:
        return f(state, *args) if in_place else (state, f(*args))

    def calls(state: Any, args: Any, number: Any = count) -> tuple[Any, Any]:
        def body(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            token, state, _ = carry
            # The barrier makes the compiler treat the arguments as new in every call. The carried
            # token keeps the barrier alive.
            token, now = jax.lax.optimization_barrier((token, args))
            return token, *call(state, now)

        outputs = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype),
            jax.eval_shape(lambda s, a: call(s, a)[1], state, args),
        )
        return jax.lax.fori_loop(0, number, body, (jnp.int32(0), state, outputs))[1:]

    return jax.jit(calls, donate_argnums=0)


def planned_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Return the planned memory in bytes; None if XLA does not report it."""
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    # Donated arguments are outputs as well, and count once.
    arguments = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return arguments + plan.temp_size_in_bytes

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
    """Time of one call.

    Attributes:
      p20, p50, p80: percentiles over the loops, in seconds of one call.
      calls: calls in a loop.
      loops: loops that were timed.
      peak_bytes: memory that the loop needs in all, its arguments included, as the compiler plans it; None if
        it does not say.
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
    """Percentiles of the time of one call of a function.

    Calls run one after the other inside one jitted loop that takes about `loop_seconds`, so the time to launch a
    program is not in the figure; the loop is compiled, warmed up, and timed `repeats` times. The calls are a chain:
    the compiler can neither drop a call, nor take anything out of the loop, nor join two of them. All that
    `f` returns is computed. Every call has the same arguments, so what fits a cache stays there.

    Args:
      f: a function that can be jitted, of arrays or pytrees of them. Its arrays have to be its arguments: the
        compiler may fold what depends only on arrays that it closes over.
      args: its arguments.
      in_place: ``f(state, ...)`` returns ``(state, outputs)``: the next call gets the state that the last one
        returned, in the same memory. The first argument is consumed.
      repeats: loops that are timed.
      loop_seconds: what a loop should take. A call that takes longer is a loop of its own.
      budget: seconds after which no further loop is started, once three have been timed.

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

    static, calls = False, 1
    state, _ = run(state, calls)  # the first run also loads the program
    state, seconds = run(state, calls)
    while seconds < loop_seconds / 2:
        calls = math.ceil(calls * min(loop_seconds / seconds, 16))
        state, seconds = run(state, calls)
    if jax.default_backend() != "cpu" and seconds / calls < _STATIC_BELOW:
        # An accelerator asks the host after every call whether to go on, unless it knows how many there are.
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
    """`Timing.peak_bytes`, without running anything: arguments may be `jax.ShapeDtypeStruct`."""
    state, args = (args[0], args[1:]) if in_place else ((), args)
    return planned_bytes(_any_count(f, in_place, state, args))


def copy_bandwidth(n_bytes: int | None = None) -> float:
    """Bytes per second that the device reads and writes when it copies a large array.

    Args:
      n_bytes: of the array, which is read once and written once; by default 1 GiB, on a CPU 256 MiB: more than caches
        hold.
    """
    n_bytes = n_bytes or (256 * _MIB if jax.default_backend() == "cpu" else 1024 * _MIB)
    array = jnp.ones(n_bytes // 4, jnp.float32)
    timing = device_time(lambda a: (a + 1, ()), array, in_place=True)
    return 2 * array.size * 4 / timing.p50


def _any_count(f: Callable[..., Any], in_place: bool, state: Any, args: Any) -> jax.stages.Compiled:
    return _loop(f, in_place, None).lower(state, args, jax.ShapeDtypeStruct((), jnp.int32)).compile()


def _loop(f: Callable[..., Any], in_place: bool, count: int | None) -> Any:
    """``(state, args, count) -> (state, outputs)`` of so many calls; without the last argument if it is known."""

    def call(state: Any, args: Any) -> tuple[Any, Any]:
        return f(state, *args) if in_place else (state, f(*args))

    def calls(state: Any, args: Any, number: Any = count) -> tuple[Any, Any]:
        def body(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            token, state, _ = carry
            # The token is another one in every call, for all that the compiler knows, and so are the arguments that
            # come with it. It has to be used afterward, or the compiler takes it out again: so it is carried on.
            token, now = jax.lax.optimization_barrier((token, args))
            return token, *call(state, now)

        outputs = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(lambda s, a: call(s, a)[1], state, args)
        )
        return jax.lax.fori_loop(0, number, body, (jnp.int32(0), state, outputs))[1:]

    return jax.jit(calls, donate_argnums=0)


def planned_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Return the memory that a compiled program allocates, in bytes; None where XLA does not report it."""
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    arguments = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return arguments + plan.temp_size_in_bytes

"""Training loop for any model: steps in jitted chunks, with hooks between them."""

import dataclasses
import functools
import importlib
import math
import signal
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.training import meshes
from lutjax.values import Array

T = TypeVar("T")

State = Any  # a pytree of all trained and updated arrays

Step = Callable[[State, Array, Any], tuple[State, Array]]
"""Pure function from state, step number (int32, from 0) and constant data to state and loss."""

Advance = Callable[[State, int, int], tuple[State, Array]]
"""Function that runs `count` steps from step `first`, and returns the state and mean loss.

It may consume the state.
"""

CALL = 0.1
"""Target seconds for a call of several logging intervals.

It is short enough to stop a run quickly, and long compared to the call overhead.
"""

MOST = 128  # maximum number of logging intervals per call


def import_pallas() -> None:
    """Import Pallas if kernels may use it.

    Since jax 0.11 importing Pallas adds a setting to the jit cache key. Kernels import it during
    tracing, so the next call of the step would compile again.
    """
    if jax.default_backend() != "cpu":
        importlib.import_module("jax.experimental.pallas.tpu")  # adds the setting, also on GPUs


def compiler_options() -> dict[str, Any]:
    """Return the XLA options of training and evaluation programs.

    On a GPU, XLA compiles and times many Triton kernels for each matrix product. In measured models
    these kernels are no faster than cuBLAS, and the search takes most of the compilation time
    (docs/appendix/feed-forward.md).
    """
    return {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}


@dataclasses.dataclass(frozen=True)
class Hook:
    """Callback every `every` steps, and after the last one.

    `call` gets the number of completed steps, the mean training loss since the previous stop, and
    the state. It must not keep the state: the next step reuses its memory.
    """

    every: int
    call: Callable[[int, float, State], None]


@dataclasses.dataclass(frozen=True)
class Log:
    """Training loss log every `every` steps, and for the last ones.

    `call` gets step counts, each with the mean loss since the previous count or hook; short steps
    come several counts at once.
    """

    every: int
    call: Callable[[Sequence[tuple[int, float]]], None]


class Repeated:
    """Many steps in one jitted call that donates the state: an `Advance`.

    The number of steps is dynamic: one program serves every chunk, so chunk boundaries do not
    affect results.

    Args:
      step: one step.
      data: pytree of arrays passed to every step; transferred to devices at first use.
      of_state, of_data: shardings of the state and data on a mesh; by default a single device.
    """

    def __init__(self, step: Step, data: Any = None, *, of_state: Any = None, of_data: Any = None):
        def advance(
            state: State, first: Array, ends: Array, data: Any
        ) -> tuple[State, Array, Array]:
            # Ends are padded to `MOST` by repeating the last one: parts of the padding are empty.
            starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])

            def body(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
                state, totals = carry
                state, loss = step(state, first + i, data)
                is_in = (starts <= i) & (i < ends)
                return state, totals + jnp.where(is_in, loss.astype(jnp.float32), jnp.float32(0))

            state, totals = jax.lax.fori_loop(
                0, ends[-1], body, (state, jnp.zeros(MOST, jnp.float32))
            )
            means = totals / jnp.maximum(ends - starts, 1).astype(jnp.float32)
            return state, means[0], means

        self.step, self._data, self._of_data = step, data, of_data
        options: dict[str, Any] = {"compiler_options": compiler_options()}
        if of_state is not None:
            everywhere = meshes.replicated_sharding(jax.tree.leaves(of_state)[0].mesh)
            options["out_shardings"] = (of_state, everywhere, everywhere)
        self._jitted = jax.jit(advance, donate_argnums=0, **options)

    @functools.cached_property
    def data(self) -> Any:
        """Data on devices."""
        if self._of_data is None:
            return jax.tree.map(jnp.asarray, self._data)
        return jax.tree.map(meshes.put, self._data, self._of_data)

    def __call__(self, state: State, first: int, count: int) -> tuple[State, Array]:
        """Run `count` steps, consuming the state; return the state and mean loss."""
        state, loss, _ = self._call(self._jitted, state, first, [count])
        return state, loss

    def run_parts(self, state: State, first: int, ends: Sequence[int]) -> tuple[State, Array]:
        """Run steps, consuming the state; return the state and each part's mean loss, ``[MOST]``.

        `ends` has, for each of at most `MOST` parts, the number of steps from `first` to its end.
        """
        state, _, losses = self._call(self._jitted, state, first, ends)
        return state, losses

    def trace(self, state: State) -> None:
        """Trace the program for the state's shapes and dtypes; calls reuse this trace."""
        self._call(self._jitted.trace, state, 0, [1])

    def _call(self, program: Callable[..., T], state: State, first: int, ends: Sequence[int]) -> T:
        import_pallas()
        padded = np.full(MOST, ends[-1], np.int32)
        padded[: len(ends)] = ends
        return program(state, np.int32(first), padded, self.data)

    @property
    def programs(self) -> int:
        """Number of programs compiled for calls; 1 as long as all states have the same types."""
        n: int = self._jitted._cache_size()  # type: ignore[attr-defined]
        return n

    def compile_program(self, state: State) -> tuple[jax.stages.Compiled, Advance]:
        """Return the compiled program for the state's shapes and dtypes, and its call function."""
        number, ends = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (MOST,)))
        program = self._jitted.lower(state, number, ends, self.data).compile()

        def advance(state: State, first: int, count: int) -> tuple[State, Array]:
            state, loss, _ = self._call(program, state, first, [count])
            return state, loss

        return program, advance


def run(
    advance: Repeated,
    state: State,
    *,
    first: int,
    steps: int,
    log: Log | None = None,
    hooks: Sequence[Hook] = (),
    stopped: Callable[[], bool] = lambda: False,
    slowest: Callable[[float], float] = float,
) -> tuple[State, int]:
    """Run steps `first` to ``steps - 1``, and log losses and call hooks between chunks of steps.

    A chunk ends wherever a hook is due, so chunk boundaries do not depend on resumption. A chunk of
    several logging intervals takes about `CALL` seconds; their number does not affect results.

    Args:
      advance: runs some steps.
      state: consumed.
      first: the first step.
      steps: total number of steps.
      log: receives losses before hooks are called.
      hooks: called in order between chunks of steps.
      stopped: called after every chunk; true ends the run early.
      slowest: returns the maximum of a number over all training processes, which must all call it.

    Returns:
      State and completed steps; raises FloatingPointError before a hook gets a non-finite loss.
    """
    done, n_parts = first, 1
    while done < steps and not stopped():
        start, until = done, min([steps, *(_next_multiple(done, hook.every) for hook in hooks)])
        ends = [until] if log is None else _ends(start, until, log.every, n_parts)
        began, done = time.perf_counter(), ends[-1]
        state, means = advance.run_parts(state, start, [end - start for end in ends])
        losses = list(zip(ends, np.asarray(means)[: len(ends)].tolist(), strict=True))
        seconds = slowest(time.perf_counter() - began) / (done - start)
        spoilt = next(
            (i for i, (_, loss) in enumerate(losses) if not math.isfinite(loss)), len(losses)
        )
        if log is not None:
            # The slowest process decides, so that all processes end their next call at one step.
            n_parts = min(max(int(CALL / (seconds * log.every)), 1), MOST)
            due = [(n, loss) for n, loss in losses[:spoilt] if n % log.every == 0 or n == steps]
            if due:
                log.call(due)
        if spoilt < len(losses):  # before any hook: a checkpoint must not get such a state
            raise FloatingPointError(
                f"the training loss is {losses[spoilt][1]} after {losses[spoilt][0]} steps."
            )
        for hook in hooks:
            if done % hook.every == 0 or done == steps:
                hook.call(done, losses[-1][1], state)
    return state, done


def _next_multiple(done: int, every: int) -> int:
    return (done // every + 1) * every


def _ends(start: int, until: int, every: int, n_parts: int) -> list[int]:
    """Return the next logging interval ends, clipped to the last step."""
    first = _next_multiple(start, every)
    return [
        min(end, until)
        for end in range(first, first + n_parts * every, every)
        if end - every < until
    ]


def interrupt() -> NoReturn:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


class Stop:
    """Callable that returns True after a signal to stop the run.

    Args:
      second: called on Ctrl-C after the first signal, but not on other signals, which may arrive
        twice when a terminal closes.
    """

    def __init__(self, second: Callable[[], object] = interrupt):
        self._asked, self._at_once, self._second = False, False, second

    def __call__(self) -> bool:
        """Return True if a signal has arrived."""
        return self._asked

    @contextmanager
    def allow_interrupt(self) -> Iterator[None]:
        """Let the first signal interrupt a block that does not poll.

        JAX and other code may swallow the KeyboardInterrupt or replace it; the end of the block
        then raises it.
        """
        if self._asked:
            raise KeyboardInterrupt
        self._at_once = True
        try:
            yield
        except Exception:
            if not self._asked:
                raise
        finally:
            self._at_once = False
        if self._asked:
            raise KeyboardInterrupt

    def handle(self, number: int, frame: types.FrameType | None) -> None:
        """Handle a signal."""
        asked, self._asked = self._asked, True
        # Set the flag first: an exception may be swallowed where the handler interrupts.
        if asked and number == signal.SIGINT:
            self._second()
        elif self._at_once and not asked:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signal(second: Callable[[], object] = interrupt) -> Iterator[Stop]:
    """Convert the first Ctrl-C, SIGTERM or hangup to a flag for `run`; another Ctrl-C interrupts.

    Only the main thread may use it. An ignored hangup, as with ``nohup``, remains ignored.
    """
    stop = Stop(second)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

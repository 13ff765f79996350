"""The training loop, of any model: steps in jitted chunks, with hooks between them."""

import dataclasses
import functools
import math
import signal
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import _compat
from lutjax._typing import Array
from lutjax.training import meshes

State = Any
"""A pytree of arrays: everything that training changes."""

Step = Callable[[State, Array, Any], tuple[State, Array]]
"""A pure function of the state, the number of the step (int32, from 0) and constant data: next state and loss."""

Advance = Callable[[State, int, int], tuple[State, Array]]
"""Runs `count` steps from step `first`: the state after them and their mean loss. May consume the state."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """Something to do whenever `every` more steps are done, and after the last one.

    `call` gets the number of steps done, the mean training loss since the previous stop, and the state, which
    it must not keep: the next step reuses its memory.
    """

    every: int
    call: Callable[[int, float, State], None]


class Repeated:
    """Many steps in one jitted call, in the state's own memory: an `Advance`.

    The number of steps is not static: one program serves every chunk, so where chunks begin and end changes
    nothing in the result.

    Args:
      step: one step.
      data: pytree of arrays that is passed to every step; put on devices when it is used first.
      of_state, of_data: where the arrays of the state, and of the data, lie on a mesh; by default all are on one device.
    """

    def __init__(self, step: Step, data: Any = None, *, of_state: Any = None, of_data: Any = None):
        def advance(state: State, first: Array, count: Array, data: Any) -> tuple[State, Array]:
            def body(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
                state, total = carry
                state, loss = step(state, first + i, data)
                return state, total + loss.astype(jnp.float32)

            state, total = jax.lax.fori_loop(0, count, body, (state, jnp.float32(0)))
            return state, total / count.astype(jnp.float32)

        self.step, self._data, self._of_data = step, data, of_data
        options: dict[str, Any] = {}
        if of_state is not None:
            mesh = jax.tree.leaves(of_state)[0].mesh
            options["out_shardings"] = (of_state, meshes.everywhere(mesh))
        self._jitted = jax.jit(advance, donate_argnums=0, **options)

    @functools.cached_property
    def data(self) -> Any:
        """The data, on devices."""
        if self._of_data is None:
            return jax.tree.map(jnp.asarray, self._data)
        return jax.tree.map(meshes.put, self._data, self._of_data)

    def __call__(self, state: State, first: int, count: int) -> tuple[State, Array]:
        """Runs `count` steps from step `first`: the state after them and their mean loss. Consumes the state."""
        _compat.import_pallas()
        result: tuple[State, Array] = self._jitted(state, np.int32(first), np.int32(count), self.data)
        return result

    @property
    def programs(self) -> int:
        """The number of programs that were compiled for calls so far; it is 1 as long as all states are alike."""
        n: int = self._jitted._cache_size()  # type: ignore[attr-defined]
        return n

    def compiled(self, state: State) -> tuple[jax.stages.Compiled, Advance]:
        """The program for states of these shapes and dtypes, and how to call it."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        program = self._jitted.lower(state, number, number, self.data).compile()

        def advance(state: State, first: int, count: int) -> tuple[State, Array]:
            result: tuple[State, Array] = program(state, np.int32(first), np.int32(count), self.data)
            return result

        return program, advance


def run(
    advance: Advance,
    state: State,
    *,
    first: int,
    steps: int,
    hooks: Sequence[Hook] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[State, int]:
    """Runs steps `first` to ``steps - 1`` and calls hooks, in their order, between chunks of steps.

    A chunk ends wherever a hook is due, so where chunks end does not depend on where a run was resumed.

    Args:
      advance: runs some steps; `Repeated` makes one of a pure step.
      state: consumed.
      stopped: asked after every chunk; true ends the run early.

    Returns:
      the state, and the number of steps done in all: `steps`, or fewer if the run was stopped.

    Raises:
      FloatingPointError: the training loss is not finite any more; no hook sees such a state.
    """
    done = first
    while done < steps and not stopped():
        until = min([steps, *((done // hook.every + 1) * hook.every for hook in hooks)])
        state, loss = advance(state, done, until - done)
        done = until
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(f"the training loss is {value} after {done} steps.")
        for hook in hooks:
            if done % hook.every == 0 or done == steps:
                hook.call(done, value, state)
    return state, done


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C (or SIGTERM) into a question that `run` can ask; a second one interrupts at once.

    Only the main thread may use it.
    """
    received = False

    def handle(number: int, frame: types.FrameType | None) -> None:
        nonlocal received
        received = True
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""Coroutines and threads choose implementations for their own calls only."""

import asyncio
import concurrent.futures
import contextlib
import threading
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from marked_lookup import MARK

import lutjax


@pytest.fixture
def marked():
    """Calls that ask for Pallas run `marked_lookup`; nobody else does."""
    registry = lutjax.kernel_registry
    registry.register("lookup", "pallas", "cpu", "marked_lookup", priority=-1)
    yield
    registry.unregister("lookup", "pallas", "cpu")
    jax.clear_caches()


CHOICES: tuple[Any, ...] = (None, "xla", "pallas", {"lookup": "pallas"}, ("pallas", "xla"))
WEIGHTS = np.ones((1, 2, 1), np.float32)


def look_up(weights: Any) -> jax.Array:
    none = jnp.zeros((1, 1), jnp.int32)
    return lutjax.lookup(weights, lutjax.Detection(none, none, none.astype(jnp.float32), 1))[0, 0]


JITTED = jax.jit(look_up)


def marks() -> list[float]:
    """Excess of two calls over the right number; one of them is jitted."""
    return [float(f(WEIGHTS)) - 1 for f in (look_up, JITTED)]


def expected_marks(choice: Any) -> list[float]:
    return [MARK if "pallas" in str(choice) else 0.0] * 2


def in_turns(choices: list[Any], turns: list[int]) -> list[list[float]]:
    """Coroutines that each call within a block of their own, in turns."""

    async def one(choice: Any, turn: asyncio.Queue[None], done: asyncio.Queue[None]) -> list[float]:
        async def next_turn() -> None:
            done.put_nowait(None)
            await turn.get()

        found: list[float] = []
        await turn.get()
        with contextlib.nullcontext() if choice is None else lutjax.use_implementation(choice):
            await next_turn()
            found += marks()
            await next_turn()
            found += marks()
        await next_turn()
        assert marks() == [0.0, 0.0], "after the block"
        done.put_nowait(None)
        return found

    async def every() -> list[list[float]]:
        of_turns: list[asyncio.Queue[None]] = [asyncio.Queue() for _ in choices]
        done: asyncio.Queue[None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(one(choice, turn, done))
            for choice, turn in zip(choices, of_turns, strict=True)
        ]
        for i in turns:
            of_turns[i].put_nowait(None)
            waiting = asyncio.create_task(done.get())
            await asyncio.wait([waiting, tasks[i]], return_when=asyncio.FIRST_COMPLETED)
            if tasks[i].done():
                waiting.cancel()
                tasks[i].result()  # raises what it raised
        return await asyncio.gather(*tasks)

    return asyncio.run(every())


@st.composite
def turns_of(draw: Any) -> tuple[list[Any], list[int]]:
    choices = draw(st.lists(st.sampled_from(CHOICES), min_size=2, max_size=3))
    return choices, draw(st.permutations([i for i in range(len(choices)) for _ in range(4)]))


@settings(settings.get_profile("quick"), max_examples=20)
@given(turns_of())
def _coroutines(drawn: tuple[list[Any], list[int]]) -> None:
    choices, turns = drawn
    assert in_turns(choices, turns) == [2 * expected_marks(c) for c in choices]


@pytest.mark.usefixtures("marked")
def test_coroutines_do_not_see_each_others_implementation():
    _coroutines()


@pytest.mark.usefixtures("marked")
def test_threads_do_not_see_each_others_implementation():
    barrier = threading.Barrier(len(CHOICES))

    def one(choice: Any) -> list[float]:
        with contextlib.nullcontext() if choice is None else lutjax.use_implementation(choice):
            barrier.wait()
            found = marks()
            barrier.wait()
        return found

    with concurrent.futures.ThreadPoolExecutor(len(CHOICES)) as pool:
        assert list(pool.map(one, CHOICES)) == [expected_marks(c) for c in CHOICES]

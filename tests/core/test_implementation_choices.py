"""Coroutines and threads choose implementations for their own calls only."""

import concurrent.futures
import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marked_lookup import MARK

import lutjax


@pytest.fixture
def marked():
    """Only calls requesting Pallas run `marked_lookup`."""
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
    """Return the excess of two calls over the correct result; one call is jitted."""
    return [float(f(WEIGHTS)) - 1 for f in (look_up, JITTED)]


def expected_marks(choice: Any) -> list[float]:
    return [MARK if "pallas" in str(choice) else 0.0] * 2


@pytest.mark.usefixtures("marked")
def test_threads_do_not_see_each_others_implementation():
    barrier = threading.Barrier(len(CHOICES), timeout=120)

    def one(choice: Any) -> list[float]:
        with contextlib.nullcontext() if choice is None else lutjax.use_implementation(choice):
            barrier.wait()
            result = marks()
            barrier.wait()
        return result

    with concurrent.futures.ThreadPoolExecutor(len(CHOICES)) as pool:
        assert list(pool.map(one, CHOICES)) == [expected_marks(c) for c in CHOICES]

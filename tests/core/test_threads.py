"""Ops in several threads and in other processes, and table handling in compiled programs."""

import concurrent.futures
import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import implementations

import lutjax
from lutjax import reads

SECONDS = 240
"""Longest time for calls with a bounded wait."""

TABLES, ROWS, OUTPUTS, INPUTS = 24, 32, 40, 16  # sizes that nothing else has
READ = reads.Confidence()
ANCHORS = (
    np.random.default_rng(0)
    .permuted(np.tile(np.arange(10, dtype=np.int32) + 3, (TABLES, 1)), axis=1)
    .reshape(TABLES, 5, 2)
)


LAYERS = {
    "lut": lambda x, w, **how: lutjax.lut(x, w, ANCHORS, **how),
    "scored_lut": lambda x, w, **how: lutjax.scored_lut(
        x, w, ANCHORS, READ.initial(), read=READ, **how
    ),
}


def arguments(n):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(n, INPUTS)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(TABLES, ROWS, OUTPUTS)), jnp.float32)
    return x, weights


IMPLEMENTATIONS = [name for name in implementations("lookup") if name in ("xla", "native")]


# ------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["lut"])
def test_threads_that_call_at_the_same_time(name, implementation):
    """All match one thread's bits, and none waits forever for another: they outnumber the pool's threads."""
    x, weights = arguments(300)
    run = jax.jit(lambda x, w: LAYERS[name](x, w, implementation=implementation))
    expected = np.asarray(run(x, weights))
    barrier = threading.Barrier(6)

    def calls():
        barrier.wait(SECONDS)
        return all(np.asarray(run(x, weights)).tobytes() == expected.tobytes() for _ in range(20))

    pool = concurrent.futures.ThreadPoolExecutor(6)
    actual = [pool.submit(calls) for _ in range(6)]
    assert all(future.result(SECONDS) for future in actual)
    pool.shutdown()


@dataclasses.dataclass(frozen=True)
class Slow(reads.Blend):
    """A read that pauses its trace in one thread until another thread continues."""

    begun: threading.Event
    goes_on: threading.Event

    def select(self, u, scalars):
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.goes_on.wait(SECONDS)
        return super().select(u, scalars)


def test_a_pullback_while_another_thread_traces_the_forward_rule():
    """JAX stores the structure saved by a rule with the function's trace: this thread's structure still exists."""
    read, (x, weights) = Slow(threading.Event(), threading.Event()), arguments(4)

    def layer(x, w):
        return lutjax.scored_lut(x, w, ANCHORS, {}, read=read, implementation="xla")

    y, pull = jax.vjp(layer, x, weights)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: jax.vjp(lambda x: layer(x, weights), x)[1](jnp.ones_like(y)))
        assert read.begun.wait(SECONDS)
        try:
            result = pull(jnp.ones_like(y))
        finally:
            read.goes_on.set()
        np.testing.assert_array_equal(other.result(SECONDS)[0], result[0])


@pytest.mark.slow
def test_threads_that_trace_gradients_at_the_same_time():
    x, weights = arguments(4)

    def loss(x, w):
        return (lutjax.lut(x, w, ANCHORS, implementation="xla") ** 2).sum()

    functions = [jax.grad(loss), jax.grad(loss, argnums=1), jax.vmap(jax.grad(loss), (0, None))]
    expected, barrier = [f(x, weights) for f in functions], threading.Barrier(2 * len(functions))
    jax.clear_caches()

    def calls(f):
        barrier.wait(SECONDS)
        return [f(x, weights) for _ in range(3)][-1]

    with concurrent.futures.ThreadPoolExecutor(2 * len(functions)) as pool:
        found = [
            future.result(SECONDS) for future in [pool.submit(calls, f) for f in 2 * functions]
        ]
    for actual, e in zip(found, 2 * expected, strict=True):
        np.testing.assert_array_equal(actual, e)


# ------------------------------------------------------------------------------------- processes


# ------------------------------------------------------------------------------------- memory
FREE = ("parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "call")
HOW = {
    "jit": lambda f: f,
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, w: f(x, w).sum()), (0, None)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "how"),
    [("lut", "jit"), ("lut", "vmap of grad"), ("scored_lut", "vmap of grad")],
)
def test_tables_are_not_copied(name, how, implementation):
    x, weights = arguments(3)
    run = HOW[how](lambda x, w: LAYERS[name](x, w, implementation=implementation))
    x = x if how == "jit" else jnp.stack([x, x])
    compiled = jax.jit(run).lower(x, weights).compile()
    of_tables = re.compile(rf"= [a-z0-9]+\[(?:\d+,)*{TABLES},{ROWS},{OUTPUTS}\]\S* ([a-z-]+)\(")
    made = [
        line
        for line in compiled.as_text().splitlines()
        if (m := of_tables.search(line)) and m[1] not in FREE
    ]
    assert not made, made[0][:200]
    if implementation == "native":
        n_bytes = sum(a.nbytes for a in jax.tree.leaves(weights))
        assert compiled.memory_analysis().temp_size_in_bytes < n_bytes

"""Ops in several threads and in other processes, and what a compiled program makes of its tables."""

import concurrent.futures
import dataclasses
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import implementations, slow, slow_except

import lutjax
from lutjax import reads

SECONDS = 240
"""Longest time of what must not wait without end."""

TABLES, ROWS, OUTPUTS, INPUTS = 24, 32, 40, 16  # sizes that nothing else has
READ, INTEGER_READ = reads.Confidence(), reads.PowersOfTwo()
ANCHORS = (
    np.random.default_rng(0)
    .permuted(np.tile(np.arange(10, dtype=np.int32) + 3, (TABLES, 1)), axis=1)
    .reshape(TABLES, 5, 2)
)


def repeated(x, *sizes):
    """Inputs at all positions of a sequence or an image."""
    *batch, n = x.shape
    return jnp.broadcast_to(x.reshape(*batch, *(1 for _ in sizes), n), (*batch, *sizes, n))


LAYERS = {
    "lut": lambda x, w, **how: lutjax.lut(x, w, ANCHORS, **how),
    "sparse_lut": lambda x, w, **how: lutjax.sparse_lut(
        x, w, ANCHORS, jnp.arange(OUTPUTS)[None, None] % 7, 7, **how
    ),
    "scored_lut": lambda x, w, **how: lutjax.scored_lut(x, w, ANCHORS, READ.initial(), read=READ, **how),
    "int8": lambda x, w, **how: lutjax.scored_lut(
        x, w, ANCHORS, INTEGER_READ.initial(), read=INTEGER_READ, **how
    ),
    "weighted_lookup": lambda x, w, **how: lutjax.weighted_lookup(
        w, *READ(lutjax.margins(x, ANCHORS, **how), READ.initial()), **how
    ),
    "lut_attention": lambda x, w, **how: lutjax.lut_attention(
        repeated(x, 5), w, ANCHORS[:, :2], jnp.ones((4, 1, 1)), **how
    ),
    "lut_pair_attention": lambda x, w, **how: lutjax.lut_pair_attention(repeated(x, 5), w, ANCHORS, **how),
    "conv_lut": lambda x, w, **how: lutjax.conv_lut(repeated(x, 3, 3), w, ANCHORS, kernel=1, **how),
}


def arguments(name, n):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(n, INPUTS)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(TABLES, ROWS, OUTPUTS)), jnp.float32)
    return x, lutjax.quantize_tables(weights) if name == "int8" else weights


IMPLEMENTATIONS = [name for name in implementations("lookup") if name in ("xla", "native")]


# ------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name", slow_except(["lut", "int8", *map(slow, [n for n in LAYERS if n not in ("lut", "int8")])], "lut")
)
def test_threads_that_call_at_the_same_time(name, implementation):
    """All have the bits of one thread, and none waits for another without end: there are more of them than the pool has threads."""
    x, weights = arguments(name, 300)
    run = jax.jit(lambda x, w: LAYERS[name](x, w, implementation=implementation))
    expected = np.asarray(run(x, weights))
    barrier = threading.Barrier(6)

    def calls():
        barrier.wait(SECONDS)
        return all(np.asarray(run(x, weights)).tobytes() == expected.tobytes() for _ in range(20))

    pool = concurrent.futures.ThreadPoolExecutor(6)
    found = [pool.submit(calls) for _ in range(6)]
    assert all(future.result(SECONDS) for future in found)
    pool.shutdown()


@dataclasses.dataclass(frozen=True)
class Slow(reads.Blend):
    """A read that one thread stops to trace until another one goes on."""

    begun: threading.Event
    goes_on: threading.Event

    def select(self, u, scalars):
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.goes_on.wait(SECONDS)
        return super().select(u, scalars)


@pytest.mark.slow
def test_a_pullback_while_another_thread_traces_the_forward_rule():
    """JAX keeps the structure of what a rule saves with the trace of a function: that of this thread is still there."""
    read, (x, weights) = Slow(threading.Event(), threading.Event()), arguments("lut", 4)

    def layer(x, w):
        return lutjax.scored_lut(x, w, ANCHORS, {}, read=read, implementation="xla")

    y, pull = jax.vjp(layer, x, weights)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: jax.vjp(lambda x: layer(x, weights), x)[1](jnp.ones_like(y)))
        assert read.begun.wait(SECONDS)
        try:
            found = pull(jnp.ones_like(y))
        finally:
            read.goes_on.set()
        np.testing.assert_array_equal(other.result(SECONDS)[0], found[0])


@pytest.mark.slow
def test_threads_that_trace_gradients_at_the_same_time():
    x, weights = arguments("lut", 4)

    def loss(x, w):
        return (lutjax.lut(x, w, ANCHORS, implementation="xla") ** 2).sum()

    functions = [jax.grad(loss), jax.grad(loss, argnums=1), jax.vmap(jax.grad(loss), (0, None))]
    expected, barrier = [f(x, weights) for f in functions], threading.Barrier(2 * len(functions))
    jax.clear_caches()

    def calls(f):
        barrier.wait(SECONDS)
        return [f(x, weights) for _ in range(3)][-1]

    with concurrent.futures.ThreadPoolExecutor(2 * len(functions)) as pool:
        found = [future.result(SECONDS) for future in [pool.submit(calls, f) for f in 2 * functions]]
    for actual, e in zip(found, 2 * expected, strict=True):
        np.testing.assert_array_equal(actual, e)


# ------------------------------------------------------------------------------------- processes
PROGRAM = """
import multiprocessing, os, signal, sys, warnings

warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX's own

import jax, jax.numpy as jnp, numpy as np, lutjax

anchors = jnp.asarray(np.random.default_rng(0).permutation(64)[:48].reshape(8, 3, 2))
weights, x = jnp.arange(8 * 8 * 16, dtype=jnp.float32).reshape(8, 8, 16), jnp.linspace(-1, 1, 1000 * 64).reshape(1000, 64)


def layer(x=x):
    return np.asarray(lutjax.lut(x, weights, anchors)).sum()


def refused(_=0):
    try:
        layer()
    except RuntimeError as error:
        return str(error)
    return "ran"


def status(child):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    signal.alarm(60)  # what waits without end
    os._exit(0 if child() else 1)


if __name__ == "__main__":
    once = jax.jit(lambda x: lutjax.lut(x, weights, anchors))
    expected = np.asarray(once(x))
    if "(lutjax_cpu.kernels.lookup): chosen" in lutjax.explain("lookup", weights, lutjax.detect(x, anchors)):
        assert status(lambda: np.array_equal(once(x), expected)) == 0, "what was compiled runs without the threads of the pool"
    assert status(lambda: "lookup: this process was forked" in refused() or "detect: this process was forked" in refused()) == 0
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "multiprocessing's method 'spawn'" in pool.map(refused, [0])[0]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(layer, [x])[0] == expected.sum()
    assert layer() == expected.sum()
    print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_that_are_forked(tmp_path):
    """They run what was compiled, by native kernels, or say what is wrong; those that are spawned are as any other."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


# ------------------------------------------------------------------------------------- memory
FREE = ("parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "call")
FAST = ("lut", "scored_lut", "int8", "lut_pair_attention")
HOW = {
    "jit": lambda f: f,
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, w: f(x, w).sum()), (0, None)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "how"),
    slow_except(
        [
            (name, how) if name in FAST and how != "vmap" else slow(name, how)
            for name in LAYERS
            for how in HOW
            if (name, how) != ("int8", "vmap of grad")
        ],
        "lut-jit",
        "lut-vmap of grad",
        "scored_lut-vmap of grad",
    ),
)
def test_tables_are_not_copied(name, how, implementation):
    """Nothing in a compiled program makes an array of the size of the tables, however often they are mapped over."""
    x, weights = arguments(name, 3)
    run = HOW[how](lambda x, w: LAYERS[name](x, w, implementation=implementation))
    x = x if how == "jit" else jnp.stack([x, x])
    compiled = jax.jit(run).lower(x, weights).compile()
    of_tables = re.compile(rf"= [a-z0-9]+\[(?:\d+,)*{TABLES},{ROWS},{OUTPUTS}\]\S* ([a-z-]+)\(")
    made = [
        line for line in compiled.as_text().splitlines() if (m := of_tables.search(line)) and m[1] not in FREE
    ]
    assert not made, made[0][:200]
    if implementation == "native":
        n_bytes = sum(a.nbytes for a in jax.tree.leaves(weights))
        assert compiled.memory_analysis().temp_size_in_bytes < n_bytes

"""TensorCore kernels that compare pairs of inputs, interpreted: several blocks, wild ids, values that are no numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import slow

import lutjax
from lutjax import testing
from lutjax.kernels._pallas.tpu import _limits, _shifts, detect, lut_pair_attention
from lutjax.ops.detect import Detect
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.optim import SGD, RowAdagrad

pytestmark = pytest.mark.usefixtures("interpreted")


def values(rng, *shape, wild=True):
    """Numbers of a coarse grid, with ties; `wild`: some are infinite or none."""
    a = rng.integers(-4, 5, shape) / 4
    if wild:
        a[rng.random(shape) < 0.02] = np.nan
        a[rng.random(shape) < 0.02] = np.inf
    return jnp.asarray(a, jnp.float32)


def both(f, *arguments):
    """Return the result of `f(implementation, ...)` and its cotangents, in Pallas and in plain JAX."""
    results = []
    for implementation in ("pallas", "xla"):

        def run(*arguments, implementation=implementation):
            y, pullback = jax.vjp(lambda *a: f(implementation, *a), *arguments)
            return y, pullback(
                jax.tree.map(lambda a: jnp.round(jnp.cos(jnp.arange(a.size)) * 4).reshape(a.shape), y)
            )

        results.append(jax.jit(run)(*arguments))
    return results


def assert_equal(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=5e-6, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [130, 1100])
def test_detect_in_blocks(batch, monkeypatch):
    monkeypatch.setattr(
        detect, "vmem_budget", lambda _: 4 * 2 * _limits.LANES * 4 * 6 * 2
    )  # two detectors at a time
    rng = np.random.default_rng(0)
    x = values(rng, batch, 3)
    anchors = jnp.asarray(rng.integers(-9, 9, (3, 2, 2)), jnp.int32).at[0, 0, 0].set(2**31 - 1)

    def f(implementation, x):
        return lutjax.detect(x, anchors, implementation=implementation, epsilon=0.5).margin

    actual, expected = both(f, x)
    assert_equal(actual, expected)
    for name in ("index", "flip"):
        d = [getattr(lutjax.detect(x, anchors, implementation=i), name) for i in ("pallas", "xla")]
        np.testing.assert_array_equal(*d)


def test_detect_signs_in_blocks():
    x = values(np.random.default_rng(1), 2100, 2)
    assert_equal(*both(lambda i, x: lutjax.detect_signs(x, implementation=i).margin, x))
    np.testing.assert_array_equal(
        *(lutjax.detect_signs(x, implementation=i).index for i in ("pallas", "xla"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "window", "segments"),
    [(0, None, False), slow(3, 4, True), slow(-2, 3, False),
     slow(2**31 - 9, None, True), slow(-(2**30), None, False)],
)  # fmt: skip
def test_pairs_in_blocks(start, window, segments, monkeypatch):
    """Two blocks of samples, two slices of rows, several turns of the loop."""
    monkeypatch.setattr(_shifts, "TARGET", 128)
    monkeypatch.setattr(lut_pair_attention, "_CHUNK", 1024)
    rng = np.random.default_rng(2)
    x, keys = values(rng, 20, 7, 3), values(rng, 20, 6, 3)
    weights, positions = values(rng, 2, 16, 5, wild=False), values(rng, 6, 1, 2)
    anchors = jnp.asarray(rng.integers(-3, 12, (2, 4, 2)), jnp.int32).at[0, 0, 0].set(-(2**31))
    more = {}
    if segments:
        ids = [jnp.asarray(rng.integers(-1, 2, shape), jnp.int32) for shape in ((20, 7), (20, 6))]
        more = dict(zip(("segments", "key_segments"), ids, strict=True))

    def f(implementation, x, keys, weights, positions):
        options = {**more, "window": window, "epsilon": 0.25, "implementation": implementation}
        if start:
            options |= {"keys": keys, "query_start": place}
        return lutjax.lut_pair_attention(x, weights, anchors, positions, **options)

    place = None  # traced: what is known to be too far is refused

    def of_place(at):
        nonlocal place
        place = at
        return both(f, x, keys, weights, positions)

    assert_equal(*jax.jit(of_place)(jnp.int32(start)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decay_moves_the_rows_that_were_read(dtype, monkeypatch):
    monkeypatch.setattr(_shifts, "TARGET", 128)
    case = testing.case("lut_pair_attention", "primes", dtype, batch=20, detectors=2)
    testing.check_update(case, "pallas", SGD(weight_decay=0.25))


def pairs(n_queries, n_keys, bits=4, n_outputs=5):
    x, keys, weights = ((2, n_queries, 8), (2, n_keys, 8), (3, 2**bits, n_outputs))
    x, keys, weights = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x, keys, weights))
    anchors, start = (jax.ShapeDtypeStruct(shape, "int32") for shape in ((3, bits, 2), ()))
    start = None if n_keys == n_queries else start
    return pallas_interpreter.outline(LutPairAttention, x, keys, weights, anchors, None, start)


def reason(call, direction="forward", kind="TPU v6e", rule=None):
    device = lutjax.dispatch.registry.Device(lutjax.Backend.TPU, kind)
    output = jax.ShapeDtypeStruct((2, 5, 5), "float32")
    return pallas_interpreter.reason("tpu", device, call, direction, output, rule)


@pytest.mark.parametrize("direction", ["forward", "backward", "update"])
def test_what_does_not_fit(direction):
    def of_pairs(places, bits, n_outputs):
        return reason(pairs(places, places, bits, n_outputs), direction, "TPU v4")

    assert "weights has 8192 rows: each lookup is compared with every row" in of_pairs(32, 13, 32)
    assert "x or keys has 4000 places: a sample has to fit in 2048 lanes" in of_pairs(4000, 6, 32)
    assert "with 2000 places a detector's table and sums need 2048 lanes" in of_pairs(2000, 10, 32)
    if direction != "update":
        x, anchors = (jax.ShapeDtypeStruct(*a) for a in (((4096, 5000), "float32"), ((3, 2, 2), "int32")))
        inputs = reason(pallas_interpreter.outline(Detect, x, anchors, n_inputs=5000), direction, "TPU v4")
        assert "x has 5000 inputs: a block of samples with all of them does not fit" in inputs


@pytest.mark.parametrize("direction", ["forward", "backward", "update"])
def test_few_queries_of_many_keys_are_left_to_xla(direction):
    assert "1 queries of 64 keys would leave most lanes idle" in reason(pairs(1, 64), direction)
    assert reason(pairs(64, 64), direction) is None


def test_which_rules_move_rows():
    assert reason(pairs(64, 64), "update", rule=SGD(weight_decay=0.5)) is None
    assert "moves rows by SGD only" in reason(pairs(64, 64), "update", rule=RowAdagrad())

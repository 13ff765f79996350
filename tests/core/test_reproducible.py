"""Floats for fixed-point addends: the same bits in every program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from machine import needs_gpu

import lutjax
from lutjax import FixedPoint, reads
from lutjax.values._reproducible import make_reproducible

FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "exp2": (jnp.exp2, np.exp2),
    "expm1": (jnp.expm1, np.expm1),
    "log": (jnp.log, np.log),
    "log1p": (jnp.log1p, np.log1p),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (jnp.tanh, np.tanh),
}


@pytest.mark.parametrize("name", ["exp", "log1p"])
def test_functions_that_are_the_same_in_every_program(name):
    """Correct within rounding, with the same bits for other array lengths, for which compilers generate separate versions."""
    function, exact = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=300) * s for s in (1e-6, 0.1, 1.0, 10.0)])
    x = np.concatenate([x, [0, np.inf, -np.inf, np.nan, 88.8, -104, 129, -127]]).astype(np.float32)
    run = jax.jit(make_reproducible(function))
    y = np.asarray(run(x))
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.float64)).astype(np.float32)
    expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)
    np.testing.assert_allclose(y, expected, rtol=5e-7)
    np.testing.assert_array_equal(run(x[3:10]), y[3:10])
    np.testing.assert_array_equal(make_reproducible(function)(x), y)


def test_quotients_that_are_the_same_in_every_program():
    """Bits match the functions, and are also correct for zeros, infinities, and quotients outside the float range."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=300) * 10.0 ** rng.integers(-30, 30, 300) for _ in range(2))
    special = [(0, 1), (1, 0), (-1, 0), (np.inf, 2), (1, -np.inf), (np.inf, np.inf), (3, 1e-39), (1e38, 1e-5), (-0.0, 3), (1e-30, 1e30), (2e-38, 1), (3e38, 1.5), (-3e38, 0.9), (1.2e-38, 0.7)]  # fmt: skip
    a, b = (
        np.concatenate(x).astype(np.float32)
        for x in zip((a, b), np.transpose(special), strict=True)
    )
    run = jax.jit(make_reproducible(lambda a, b: (a / b, 3 / b, a / 3)))
    with np.errstate(all="ignore"):
        none = np.abs(b) < np.finfo(np.float32).tiny
        expected = [
            x.astype(np.float32)
            for x in (a / np.where(none, 0, b).astype(np.float64), 3 / b, a / 3)
        ]
    for y, want in zip(run(a, b), expected, strict=True):
        want = np.where(np.abs(want) < np.finfo(np.float32).tiny, 0, want)
        np.testing.assert_allclose(y, want, rtol=5e-7)
    for y, part in zip(run(a, b), run(a[3:10], b[3:10]), strict=True):
        np.testing.assert_array_equal(part, y[3:10])


@pytest.mark.gpu
@needs_gpu
def test_functions_that_are_the_same_on_every_device():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=30_000) * s for s in (1e-6, 0.1, 1.0, 10.0, 40.0)]).astype(
        np.float32
    )
    functions = {**FUNCTIONS, "quotient": (lambda x: jnp.roll(x, 1) / x, None)}
    for name, (function, _) in functions.items():
        on_each = [
            make_reproducible(function)(jax.device_put(x, jax.devices(d)[0]))
            for d in ("cpu", "gpu")
        ]
        np.testing.assert_array_equal(*map(np.asarray, on_each), err_msg=name)


def results_of(read, fixed, anchors):
    """Return functions from samples, tables and scalars to gradients and outputs: by `scored_lut`, and by its component ops."""

    def by_one_op(x, weights, scalars):
        return lutjax.scored_lut(x, weights, anchors, scalars, read=read, accumulate=fixed)

    def by_ops(x, weights, scalars):
        ways = read(lutjax.margins(x, anchors, accumulate=fixed), scalars, accumulate=fixed)
        return lutjax.weighted_lookup(weights, *ways, accumulate=fixed, valued=read.valued)

    def results(op, *arguments):
        def loss(*arguments):
            y = op(*arguments)
            return jnp.sum(y * jnp.round(4 * y)), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*arguments)

    return functools.partial(results, by_one_op), functools.partial(results, by_ops)


@pytest.mark.parametrize(
    ("read", "program"),
    [(reads.Confidence(), "of ops"), slow(reads.SoftSign(hard=True), "each sample")],
)
def test_a_scored_read_is_the_same_in_every_program(read, program):
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 6), (4, 8, 5)))
    anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=6, n_detectors=4, n_anchors=3)
    results, results_of_ops = results_of(read, FixedPoint(2.0**20), anchors)
    arguments = (x, weights, read.initial())
    expected = jax.jit(results)(*arguments)
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)

    def of_samples(actual):
        (dx, *_), y = actual
        return dx, y

    if program == "of ops":
        same(jax.jit(results_of_ops)(*arguments), expected)
    else:
        each = jax.jit(jax.vmap(lambda x: of_samples(results(x[None], *arguments[1:]))))(x)
        same(jax.tree.map(lambda a: a[:, 0], each), of_samples(expected))


def test_the_reference_adds_the_same_addends():
    """Bits also match where tables have factors: their products with coefficients are rounded in one way, too."""
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 6), (4, 8, 5)))
    anchors = jnp.asarray(rng.integers(0, 6, (4, 3, 2)), jnp.int32)
    keep = jnp.asarray(rng.choice([0, 1 / 0.7], (16, 4)), jnp.float32)
    read = reads.Confidence()

    def run(op):
        y = op(
            x,
            weights,
            anchors,
            read.initial(),
            read=read,
            keep=keep,
            accumulate=FixedPoint(2.0**24),
        )
        return y

    y = run(functools.partial(lutjax.scored_lut, implementation="xla"))
    expected = jax.jit(lambda: run(lutjax.reference.scored_lut))()
    np.testing.assert_array_equal(expected, y)

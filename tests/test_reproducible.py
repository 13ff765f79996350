"""Floats of which addends in fixed point are made: the same bits in every program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow

import lutjax
from lutjax import FixedPoint, reads
from lutjax._reproducible import reproducible

FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "exp2": (jnp.exp2, np.exp2),
    "expm1": (jnp.expm1, np.expm1),
    "log": (jnp.log, np.log),
    "log1p": (jnp.log1p, np.log1p),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (jnp.tanh, np.tanh),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_the_same_in_every_program(name):
    """Right within rounding, and the same bits for arrays of other lengths, of which compilers have versions of their own."""
    function, exact = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=300) * s for s in (1e-6, 0.1, 1.0, 10.0)])
    x = np.concatenate([x, [0, np.inf, -np.inf, np.nan, 88.8, -104, 129, -127]]).astype(np.float32)
    run = jax.jit(reproducible(function))
    y = np.asarray(run(x))
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.float64)).astype(np.float32)
    expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)
    np.testing.assert_allclose(y, expected, rtol=5e-7)
    np.testing.assert_array_equal(run(x[3:10]), y[3:10])
    np.testing.assert_array_equal(reproducible(function)(x), y)


@pytest.mark.parametrize("read", [reads.Confidence(), slow(reads.SoftSign(hard=True))])
def test_a_scored_read_is_the_same_in_every_program(read):
    """Alone, in a program that knows its arguments or holds other expressions of them, for each sample, and for some samples."""
    fixed, rng = FixedPoint(2.0**20), np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 6), (4, 8, 5)))
    anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=6, n_detectors=4, n_anchors=3)

    def results(x, weights, scalars):
        def loss(x, weights, scalars):
            y = lutjax.scored_lut(x, weights, anchors, scalars, read=read, accumulate=fixed)
            return jnp.sum(y * jnp.round(4 * y)), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, scalars)

    def of_samples(found):
        (dx, *_), y = found
        return dx, y

    def apart(x, weights, scalars):
        """The same, of ops that the fused one is made of."""

        def loss(x, weights, scalars):
            u = lutjax.margins(x, anchors, accumulate=fixed)
            ways = read(u, scalars, accumulate=fixed)
            y = lutjax.weighted_lookup(weights, *ways, accumulate=fixed, valued=read.valued)
            return jnp.sum(y * jnp.round(4 * y)), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, scalars)

    scalars = read.initial()
    expected = results(x, weights, scalars)
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    same(jax.jit(lambda: results(x, weights, scalars))(), expected)
    same(jax.jit(lambda *args: (jnp.exp(args[0] * 3) + 1, results(*args))[1])(x, weights, scalars), expected)
    same(jax.jit(apart)(x, weights, scalars), expected)
    each = jax.jit(jax.vmap(lambda x: of_samples(results(x[None], weights, scalars))))(x)
    same(jax.tree.map(lambda a: a[:, 0], each), of_samples(expected))
    some = of_samples(jax.jit(results)(x[3:10], weights, scalars))
    same(some, jax.tree.map(lambda a: a[3:10], of_samples(expected)))


def test_a_read_whose_derivative_is_rounded_is_that_of_its_formula():
    read, fixed = reads.Confidence(), FixedPoint(2.0**20)
    u = jnp.asarray(np.random.default_rng(1).normal(size=(7, 3)), jnp.float32)

    def gradients(accumulate):
        def loss(u, scalars):
            return jnp.sum(jnp.sin(read(u, scalars, accumulate=accumulate)[1]))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(u, read.initial())

    for a, b in zip(jax.tree.leaves(gradients(fixed)), jax.tree.leaves(gradients(None)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)

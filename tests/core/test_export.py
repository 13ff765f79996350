"""Exported functions whose batch is a symbolic dimension: one program for batches of any size."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow

import lutjax
from lutjax.testing import _ahead_of_time, assert_close
from lutjax.training import tables

# Sizes are annotated as ints, which symbolic ones are not: as a user calls the package.
pytestmark = pytest.mark.usefixtures("without_typechecking")

INPUTS = 6
ANCHORS = np.array([[[2, 4], [0, 3]], [[5, 1], [4, 2]], [[3, 0], [1, 5]]], np.int32)
WIRES = np.array([[0, 1], [2, 3], [4, 5], [0, 5]], np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention(x, weights, positions, **options):
    return lutjax.lut_attention(x, weights, ANCHORS, positions, **options)


def pairs(x, weights, positions, **options):
    return lutjax.lut_pair_attention(x, weights, ANCHORS, positions, **options)


def cross_attention(x, weights):
    d = lutjax.detect(x, ANCHORS)
    segments = jnp.zeros(x.shape[:-1], jnp.int32)
    return lutjax.lookup_attention(
        weights, d, d, query_start=2, query_segments=segments, key_segments=segments
    )


def windows(x, weights, positions):
    """More than a tile of pairs."""
    return attention(x, weights, positions, window=17)


TABLE = (normal(0, 3, 4, 5),)
ATTENTION = (normal(0, 3, 32, 5), normal(1, 80, 1, 1))
FUNCTIONS = {  # of the inputs, of their shape without the batch, and what else is differentiated
    "lut": (lambda x, w: lutjax.lut(x, w, ANCHORS), (INPUTS,), TABLE),
    "sparse_lut": (
        lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, jnp.arange(5, dtype=jnp.int32)[None, None], 7),
        (INPUTS,),
        TABLE,
    ),
    "attention": (attention, (7, INPUTS), ATTENTION),
    "attention in windows": (windows, (80, INPUTS), ATTENTION),
    "attention with starts": (cross_attention, (7, INPUTS), (normal(0, 3, 16, 5),)),
    "pairs": (pairs, (7, INPUTS), (normal(0, 3, 4, 5), ATTENTION[1])),
    "gates": (lambda x, w: lutjax.logic_gates(x, w, WIRES), (INPUTS,), (normal(0, 4, 16),)),
    "tables of bits": (lambda x, w: lutjax.soft_lut(x, w, WIRES), (INPUTS,), (normal(0, 4, 4),)),
    "tables of signs": (lambda x, w: lutjax.binary_lut(x, w, WIRES), (INPUTS,), (normal(0, 4, 4),)),
}


def exported(f, *arguments, shape):
    (batch,) = jax.export.symbolic_shape("batch")
    export = jax.export.export(jax.jit(f), disabled_checks=_ahead_of_time.KERNELS)
    whole = export(jax.ShapeDtypeStruct((batch, *shape), jnp.float32), *arguments)
    return jax.export.deserialize(whole.serialize()).call


@pytest.mark.fast("attention", "gates")
@pytest.mark.parametrize("name", [n if n in ("attention", "pairs", "gates") else slow(n) for n in FUNCTIONS])
def test_batches_of_any_size(name):
    function, shape, trained = FUNCTIONS[name]

    def f(x, *trained):
        y, back = jax.vjp(function, x, *trained)
        return y, back(jnp.cos(y))

    call = exported(f, *trained, shape=shape)
    x = normal(5, 3, *shape)
    got, want = (jax.tree.leaves(g(x, *trained)) for g in (call, jax.jit(f)))
    for a, b in zip(got, want, strict=True):
        assert_close(name, a, b)
    assert call(x[:1], *trained)[0].shape == (1, *got[0].shape[1:])


@pytest.mark.parametrize("rule", [slow(tables.SGD()), tables.RowAdagrad()], ids=str)
def test_a_step_of_batches_of_any_size(rule):
    optimizer = tables.Optimizer(rule, 0.5, tables={"weights"})

    def step(x, weights):
        params = {"weights": weights}
        _, gradients = tables.value_and_grad(
            lambda p: jnp.sum(jnp.sin(lutjax.lut(x, p["weights"], ANCHORS)))
        )(params)
        clipped = tables.clip_by_global_norm(gradients, 0.5)
        return optimizer.apply(params, clipped, optimizer.init(params))[0]["weights"]

    call = exported(step, *TABLE, shape=(INPUTS,))
    x = normal(5, 3, INPUTS)
    assert_close("table", call(x, *TABLE), jax.jit(step)(x, *TABLE))

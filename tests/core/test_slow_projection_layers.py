"""`ProjectionLUT` in training, in stacked blocks, and with integer tables."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layer_libraries import Case, nnx_layer, variables_of

import lutjax
from lutjax import optim as parameters, optim as tables, reads
from lutjax.layers import nnx as layers
from lutjax.optim import nnx as nnx_training
from lutjax.testing import assert_close

SIZES = {"heads": 3, "tables": 2, "bits": 2}


class Block(nnx.Module):
    """Residual block with a norm and tables, as in a transformer."""

    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.tables = layers.ProjectionLUT(
            8, 8, heads=2, tables=2, bits=2, **DENSE, **options, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.tables(self.norm(x)).astype(x.dtype)


DENSE = {
    name: jax.nn.initializers.normal(1.0)
    for name in ("weights_init", "compress_init", "decompress_init")
}


X = np.random.default_rng(7).normal(size=(6, 8)).astype(np.float32)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def test_weight_decay_leaves_tables_alone():
    case = Case("ProjectionLUT", SIZES, (2, 3, 7))
    layer = nnx_layer(case, variables_of(case))
    before = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    optimizer = nnx.Optimizer(
        layer,
        optax.adamw(
            0.5,
            weight_decay=0.5,
            mask=functools.partial(parameters.decayed, tables=layers.tables_of(layer)),
        ),
        wrt=nnx.Param,
    )
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        optimizer.update(layer, jax.tree.map(jnp.zeros_like, nnx.state(layer, nnx.Param)))
    for name, after in nnx.to_pure_dict(nnx.state(layer, nnx.Param)).items():
        factor = 0.75 if name.endswith("kernel") else 1.0
        np.testing.assert_allclose(after, factor * before[name], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_factored_gradients_are_those_of_dense_ones(dtype):
    """Table rows updated by a rule, all other parameters by optax; with dropout, and in bfloat16 around float32 tables."""
    model, same = (Block(nnx.Rngs(0), table_dropout=0.25, dtype=dtype) for _ in range(2))
    tx = tables.Optimizer(tables.SGD(), 0.5, rest=optax.sgd(0.25))
    optimizer = nnx_training.Optimizer(model, tx)

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = nnx_training.value_and_grad(loss_of)(model, x)
        assert isinstance(gradients["tables"]["weights"], tables.TableGradient)
        optimizer.update(model, gradients)
        return loss

    @nnx.jit
    def dense_step(model, x):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        rates = jax.tree.map(
            lambda kind: 0.5 if kind == "table" else 0.25,
            parameters.kinds(gradients, {"tables/weights"}),
        )
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, rate, g: p - rate * g, params, rates, gradients))
        return loss

    for _ in range(2):
        assert_close("loss", step(model, optimizer, X), dense_step(same, X), 1e-5)
    actual, want = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, same))
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(want), strict=True):
        assert_close(jax.tree_util.keystr(path), a, b, 1e-5 if dtype == jnp.float32 else 1e-2)
    assert model.tables.weights.dtype == model.tables.log_tau.dtype == jnp.float32


def test_scan_and_remat_over_blocks():
    n = 2

    @nnx.split_rngs(splits=n)
    @nnx.vmap
    def stack(rngs):
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def run(block, x):
        return block(x)

    blocks = stack(nnx.Rngs(0))
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda blocks, x: jnp.mean(run(blocks, x) ** 2)))(
        blocks, X
    )
    graph, state = nnx.split(blocks)
    each = nnx.List([nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state)) for i in range(n)])

    def in_order(blocks, x):
        for block in blocks:
            x = block(x)
        return jnp.mean(x**2)

    want, of_each = nnx.jit(nnx.value_and_grad(in_order))(each, X)
    assert_close("loss", loss, want)
    joined = jax.tree.map(
        lambda *parts: jnp.stack(parts),
        *(nnx.to_pure_dict(g) for g in map(of_each.__getitem__, range(n))),
    )
    assert np.any(joined["tables"]["weights"])
    for (path, a), b in zip(
        jax.tree.leaves_with_path(nnx.to_pure_dict(gradients)), jax.tree.leaves(joined), strict=True
    ):
        assert_close(jax.tree_util.keystr(path), a, b)


def test_tables_of_integers_in_nnx():
    """The deployed model has the trained model's values, a quarter of its tables, and no other data."""
    model = Block(nnx.Rngs(0), read=reads.PowersOfTwo(), table_dropout=0.5)
    deployed = layers.quantize(model)
    run = nnx.jit(lambda model, x: model(x))
    want = run(nnx.view(model, deterministic=True), X)
    assert_close("values", run(deployed, X), want)
    assert np.any(want != X)
    assert deployed.tables.weights.dtype == jnp.int8
    assert isinstance(deployed.tables.weights, layers.Quantized)
    assert model.tables.weights.dtype == jnp.float32, "the model itself is what it was"
    held = jax.tree.leaves(nnx.state(deployed))
    assert (
        sum(a.nbytes for a in held if a.dtype == jnp.int8) * 4
        == model.tables.weights.get_value().nbytes
    )
    assert not [a for a in held if a.ndim == 3 and a.dtype == jnp.float32]
    assert deployed.norm.scale.get_value() is model.norm.scale.get_value()
    assert not jax.tree.leaves(nnx.state(deployed, layers.Tables))
    layers.check(deployed)
    built = Block(nnx.Rngs(1), read=reads.PowersOfTwo(), table_dropout=0.5, quantized=True)
    nnx.update(built, nnx.state(deployed))
    np.testing.assert_array_equal(run(built, X), run(deployed, X))
    assert (
        layers.quantize(deployed).tables.weights.get_value() is deployed.tables.weights.get_value()
    )


def test_tables_of_integers_of_stacked_blocks():
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(rngs, read=reads.PowersOfTwo())))
    blocks = make(nnx.Rngs(0))
    deployed = layers.quantize(blocks)
    for i in range(2):
        want = lutjax.quantize_tables(blocks.tables.weights[i], groups=2)
        np.testing.assert_array_equal(deployed.tables.weights[i], want.values)
        np.testing.assert_array_equal(deployed.tables.exponents[i], want.exponents)

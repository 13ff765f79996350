"""`ProjectionLUT` of the three libraries: its definition, kinds of variables, dropout, transformations, tables of integers."""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import called_weights
from flax import nnx
from layer_libraries import (
    Case,
    by_kind,
    inputs_of,
    nnx_layer,
)

import lutjax
from lutjax import optim as parameters, optim as tables, reads
from lutjax.layers import haiku as lutjax_haiku, linen, nnx as layers
from lutjax.layers._spec import QUANTIZED
from lutjax.optim import nnx as nnx_training
from lutjax.testing import assert_close

SIZES = {"heads": 3, "tables": 2, "bits": 2}
CASES = {
    "default": Case("ProjectionLUT", SIZES, (2, 3, 7)),
    "shared": Case(
        "ProjectionLUT",
        {**SIZES, "share_input": True, "sum_heads": True, "read": reads.Confidence(ways=1), "width": 4},
        (5, 7),
    ),
    "one_projection": Case("ProjectionLUT", {**SIZES, "compress": False, "read": reads.Hard()}, (5, 9)),
    "other_projection": Case(
        "ProjectionLUT", {**SIZES, "decompress": False, "read": reads.SoftSign(), "outputs": 2}, (5, 7)
    ),
    "tables_alone": Case("ProjectionLUT", {**SIZES, "compress": False, "decompress": False}, (5, 9), (9, 9)),
    "powers_of_two": Case("ProjectionLUT", {**SIZES, "read": reads.PowersOfTwo()}, (5, 7)),
    "bfloat16": Case("ProjectionLUT", {**SIZES, "dtype": jnp.bfloat16}, (5, 7)),
}


def variables_of(case: Case) -> dict[str, jax.Array]:
    """Variables whose numbers are all drawn: those of a new layer are zeros in part."""
    arrays = {}
    for i, v in enumerate(case.spec.variables()):
        key = jax.random.key(10 + i)
        arrays[v.name] = jax.random.normal(key, v.shape, v.dtype) if v.collection == "params" else v.init(key)
    return arrays








def test_sizes_of_heads_follow_from_features():
    spec = Case("ProjectionLUT", {"heads": 4}, (2, 384), (384, 100)).spec
    assert (spec.width, spec.outputs) == (96, 25)
    spec = Case(
        "ProjectionLUT", {"heads": 4, "share_input": True, "sum_heads": True}, (2, 384), (384, 100)
    ).spec
    assert (spec.width, spec.outputs) == (384, 100)






class Named(reads.Hard):
    def initial(self):
        return {"weights": jnp.float32(0)}


def test_wrong_calls():
    with pytest.raises(ValueError, match=r"ProjectionLUT: Named.* has scalars called \['weights'\]"):
        _ = Case("ProjectionLUT", {**SIZES, "read": Named()}, (2, 7)).spec
    layer = nnx_layer(CASES["default"])
    with pytest.raises(ValueError, match=r"ProjectionLUT: x has shape \[2, 6\]; expected \[\.\.\., 7\]"):
        layer(jnp.zeros((2, 6)))
    layer.log_beta = jnp.float32(jnp.nan)
    with pytest.raises(ValueError, match="ProjectionLUT: log_beta is nan; it must be finite"):
        layer.check()
    with pytest.raises(ValueError, match=r"ProjectionLUT: scored_lut: scalars\['log_beta'\] is nan"):
        layer(jnp.zeros((2, 7)))
    arrays = variables_of(CASES["default"])
    layer.weights, layer.anchors = arrays["weights"][:3], arrays["anchors"][:3]
    assert layer.tables == 1


# ------------------------------------------------------------------------------------- kinds of variables
def test_kinds_of_parameters():
    """Layers say which parameters are tables, and names tell the others apart, also in blocks that are stacked."""
    case = CASES["default"]
    layer, arrays = nnx_layer(case), by_kind(case, variables_of(case))["params"]
    assert set(nnx.to_pure_dict(nnx.state(layer, layers.Tables))) == {"weights"}
    assert set(nnx.to_pure_dict(nnx.state(layer, layers.Scalars))) == set(reads.Confidence().initial())
    want = dict.fromkeys(("compress_bias", "decompress_bias"), "vector")
    want |= dict.fromkeys(("compress_kernel", "decompress_kernel"), "matrix")
    want |= dict.fromkeys(reads.Confidence().initial(), "scalar") | {"weights": "table"}
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), arrays)
    for params in (arrays, {"block": {"layer": arrays}}, stacked):
        assert parameters.kinds(params, called_weights) in (want, {"block": {"layer": want}})
    state = nnx.state(layer, nnx.Param)
    assert nnx.to_pure_dict(parameters.kinds(state, layers.tables_of(layer))) == want
    norms = {"norm": {"scale": jnp.ones(3), "bias": jnp.ones(3)}, "out": {"kernel": jnp.ones((3, 3))}}
    assert parameters.decayed(norms, ()) == {"norm": {"scale": False, "bias": False}, "out": {"kernel": True}}


@pytest.mark.slow
def test_weight_decay_leaves_tables_alone():
    layer = nnx_layer(CASES["default"], variables_of(CASES["default"]))
    before = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    optimizer = nnx.Optimizer(
        layer,
        optax.adamw(
            0.5, weight_decay=0.5, mask=functools.partial(parameters.decayed, tables=layers.tables_of(layer))
        ),
        wrt=nnx.Param,
    )
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        optimizer.update(layer, jax.tree.map(jnp.zeros_like, nnx.state(layer, nnx.Param)))
    for name, after in nnx.to_pure_dict(nnx.state(layer, nnx.Param)).items():
        factor = 0.75 if name.endswith("kernel") else 1.0
        np.testing.assert_allclose(after, factor * before[name], rtol=1e-6)


@pytest.mark.slow
def test_cell_total_variation_of_a_model():
    weights = [jax.random.normal(jax.random.key(i), (2, 4, 3)) for i in range(3)]
    one, two, three = map(lutjax.cell_total_variation, weights)
    trees = {"nested": {"weights": weights[0]}, "blocks": {"weights": jnp.stack(weights[1:])}}
    assert_close("trees", parameters.cell_total_variation(trees, called_weights), (one + two + three) / 3)
    layer = nnx_layer(CASES["default"])
    want = lutjax.cell_total_variation(layer.weights[...])
    np.testing.assert_array_equal(
        parameters.cell_total_variation(nnx.state(layer, nnx.Param), layers.tables_of(layer)), want
    )
    assert parameters.cell_total_variation({"kernel": jnp.ones((2, 2))}, ()) == 0


# ------------------------------------------------------------------------------------- dropout
DROPOUT = Case("ProjectionLUT", {**SIZES, "table_dropout": 0.5}, (4, 7))


@pytest.mark.slow
def test_dropout_of_tables():
    """Rows of a dropped table have no gradient; others count twice; the mean is the layer without dropout."""
    arrays, x = variables_of(DROPOUT), inputs_of(DROPOUT)
    layer = nnx_layer(DROPOUT, arrays)
    calm = DROPOUT.spec(arrays, x, deterministic=True)
    np.testing.assert_array_equal(nnx.view(layer, deterministic=True)(x), calm)
    np.testing.assert_array_equal(layer(x, deterministic=True), calm)
    layer.eval()
    np.testing.assert_array_equal(layer(x), calm)
    layer.train()
    assert np.any(layer(x) != layer(x)), "each call draws"
    np.testing.assert_array_equal(layer(x, rngs=nnx.Rngs(1)), layer(x, rngs=nnx.Rngs(1)))

    key = jax.random.key(0)
    gradient = jax.jit(jax.grad(lambda w: DROPOUT.spec({**arrays, "weights": w}, x[:1], key=key).sum()))(
        arrays["weights"]
    )
    kept = jax.random.bernoulli(key, 0.5, (1, 6))[0]
    assert 0 < kept.sum() < 6
    np.testing.assert_array_equal(np.any(np.asarray(gradient) != 0, (1, 2)), kept)
    many = jax.jit(jax.vmap(lambda key: DROPOUT.spec(arrays, x, key=key)))(jax.random.split(key, 2000))
    spread = np.std(many, axis=0) / np.sqrt(2000)
    assert np.all(np.abs(np.mean(many, axis=0) - calm) < 5 * spread)
    with pytest.raises(ValueError, match=r"ProjectionLUT: table_dropout is 0\.5, which needs rngs"):
        DROPOUT.spec(arrays, x)
    layer.rngs = nnx.data(None)
    with pytest.raises(ValueError, match=r"ProjectionLUT: table_dropout is 0\.5, which needs rngs"):
        layer(x)




# ------------------------------------------------------------------------------------- training, transformations
class Block(nnx.Module):
    """Residual block of a norm and tables, as in a transformer."""

    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.tables = layers.ProjectionLUT(8, 8, heads=2, tables=2, bits=2, **DENSE, **options, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.tables(self.norm(x)).astype(x.dtype)


DENSE = {
    name: jax.nn.initializers.normal(1.0) for name in ("weights_init", "compress_init", "decompress_init")
}
X = np.random.default_rng(7).normal(size=(6, 8)).astype(np.float32)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_factored_gradients_are_those_of_dense_ones(dtype):
    """Rows of tables by a rule, the rest by optax; with dropout, and in bfloat16 around float32 tables."""
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
            lambda kind: 0.5 if kind == "table" else 0.25, parameters.kinds(gradients, {"tables/weights"})
        )
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, rate, g: p - rate * g, params, rates, gradients))
        return loss

    for _ in range(2):
        assert_close("loss", step(model, optimizer, X), dense_step(same, X), 1e-5)
    found, want = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, same))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(want), strict=True):
        assert_close(jax.tree_util.keystr(path), a, b, 1e-5 if dtype == jnp.float32 else 1e-2)
    assert model.tables.weights.dtype == model.tables.log_tau.dtype == jnp.float32


@pytest.mark.slow
def test_scan_and_remat_over_blocks():
    """Blocks that are stacked, scanned and computed again in the backward pass are blocks one after the other."""
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
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda blocks, x: jnp.mean(run(blocks, x) ** 2)))(blocks, X)
    graph, state = nnx.split(blocks)
    each = nnx.List([nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state)) for i in range(n)])

    def in_order(blocks, x):
        for block in blocks:
            x = block(x)
        return jnp.mean(x**2)

    want, of_each = nnx.jit(nnx.value_and_grad(in_order))(each, X)
    assert_close("loss", loss, want)
    joined = jax.tree.map(
        lambda *parts: jnp.stack(parts), *(nnx.to_pure_dict(g) for g in map(of_each.__getitem__, range(n)))
    )
    assert np.any(joined["tables"]["weights"])
    for (path, a), b in zip(
        jax.tree.leaves_with_path(nnx.to_pure_dict(gradients)), jax.tree.leaves(joined), strict=True
    ):
        assert_close(jax.tree_util.keystr(path), a, b)


def test_vmap_over_samples():
    model = Block(nnx.Rngs(0))
    each = nnx.jit(nnx.vmap(lambda model, x: model(x), in_axes=(None, 0)))(model, X)
    assert_close("vmap", each, nnx.jit(lambda model, x: model(x))(model, X))


# ------------------------------------------------------------------------------------- tables of integers
@pytest.mark.slow
def test_tables_of_integers_in_nnx():
    """The deployed model has the values of the trained one, a quarter of its tables, and nothing else of its own."""
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
    assert sum(a.nbytes for a in held if a.dtype == jnp.int8) * 4 == model.tables.weights.get_value().nbytes
    assert not [a for a in held if a.ndim == 3 and a.dtype == jnp.float32]
    assert deployed.norm.scale.get_value() is model.norm.scale.get_value()
    assert not jax.tree.leaves(nnx.state(deployed, layers.Tables))
    layers.check(deployed)
    built = Block(nnx.Rngs(1), read=reads.PowersOfTwo(), table_dropout=0.5, quantized=True)
    nnx.update(built, nnx.state(deployed))
    np.testing.assert_array_equal(run(built, X), run(deployed, X))
    assert layers.quantize(deployed).tables.weights.get_value() is deployed.tables.weights.get_value()


@pytest.mark.slow
def test_tables_of_integers_of_stacked_blocks():
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(rngs, read=reads.PowersOfTwo())))
    blocks = make(nnx.Rngs(0))
    deployed = layers.quantize(blocks)
    for i in range(2):
        want = lutjax.quantize_tables(blocks.tables.weights[i], groups=2)
        np.testing.assert_array_equal(deployed.tables.weights[i], want.values)
        np.testing.assert_array_equal(deployed.tables.exponents[i], want.exponents)


@pytest.mark.slow
def test_tables_of_integers_in_linen_and_haiku():
    case = CASES["powers_of_two"]
    arrays, x = variables_of(case), inputs_of(case)
    kinds, want = by_kind(case, arrays), jax.jit(case.spec)(arrays, x)
    params = dict(kinds["params"])
    quantized = lutjax.quantize_tables(params.pop("weights"), groups=3)
    integers = {"weights": quantized.values, "exponents": quantized.exponents}
    module = linen.ProjectionLUT(*case.sizes, **case.options, quantized=True)
    variables = {**kinds, "params": params, QUANTIZED: integers}
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), variables) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    assert_close("linen", module.apply(variables, x), want)
    f = hk.transform_with_state(
        lambda x: lutjax_haiku.ProjectionLUT(*case.sizes, **case.options, quantized=True, name="layer")(x)
    )
    assert_close(
        "haiku", f.apply({"layer": params}, {"layer": {**kinds["anchors"], **integers}}, None, x)[0], want
    )


def test_models_without_a_form_of_integers():
    with pytest.raises(ValueError, match="quantize: Linear has no ProjectionLUT"):
        layers.quantize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="ProjectionLUT: quantized is True but read is Confidence"):
        layers.quantize(nnx_layer(CASES["default"]))

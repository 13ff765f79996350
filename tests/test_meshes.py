"""Meshes with explicit axes, as `jax.make_mesh` makes them: the same results, and outputs lie as inputs do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from layer_libraries import LIBRARIES, Case, by_kind, function
from machine import needs_devices

import lutjax
from lutjax import sharding
from lutjax.models import (
    GPT,
    GPTConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.training import tables

pytestmark = needs_devices(2)

RNG = np.random.default_rng(0)
ANCHORS = RNG.permuted(np.tile(np.arange(8, dtype=np.int32), (6, 1)), axis=1)[:, :4].reshape(6, 2, 2)
TARGETS = RNG.integers(-1, 5, (6, 4, 3), np.int32)
WIRES = RNG.integers(0, 8, (6, 2), np.int32)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X = array(4, 6, 8)
OPS = {
    "lut": (lambda x, w: lutjax.lut(x, w, ANCHORS), array(6, 4, 4)),
    "sparse_lut": (lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, TARGETS, 5), array(6, 4, 3)),
    "lut_attention": (lambda x, w: lutjax.lut_attention(x, w, ANCHORS), array(6, 16, 4)),
    "lut_pair_attention": (lambda x, w: lutjax.lut_pair_attention(x, w, ANCHORS), array(6, 4, 4)),
    "bilinear_gates": (lambda x, c: lutjax.bilinear_gates(x, c, WIRES), array(4, 6)),
    "soft_lut": (lambda x, t: lutjax.soft_lut(x, t, WIRES), array(6, 4)),
    "binary_lut": (lambda x, t: lutjax.binary_lut(x, t, WIRES), array(6, 4)),
}
LAYOUTS = {
    "the batch": (P("shards"), P()),
    "the second axis": (P(None, "shards"), P()),
    "detectors": (P(), P("shards")),
    "nothing": (P(), P()),
}


@pytest.fixture(scope="module")
def mesh():
    found = jax.make_mesh((2,), ("shards",), devices=jax.devices()[:2])
    assert found.axis_types == (jax.sharding.AxisType.Explicit,)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", [slow(n) if n in ("lut_attention", "sparse_lut", "soft_lut") else n for n in OPS]
)
def test_results_are_those_of_one_device(name, layout, mesh):
    op, parameter = OPS[name]

    def loss(x, parameter):
        y = op(x, parameter)
        return jnp.sum(jnp.sin(y)), y

    def both(x, parameter):
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, parameter)

    (expected, y), gradients = jax.jit(both)(X, parameter)
    of_x, of_parameter = LAYOUTS[layout]
    x = jax.device_put(X, NamedSharding(mesh, of_x))
    parameter = jax.device_put(parameter, NamedSharding(mesh, of_parameter))
    (value, on_mesh), of_mesh = jax.jit(both)(x, parameter)
    for a, b in zip((value, on_mesh, *of_mesh), (expected, y, *gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert jax.typeof(on_mesh).sharding.spec[:2] == (*of_x, None, None)[:2]
    assert jax.typeof(of_mesh[0]).sharding.spec[:2] == (*of_x, None, None)[:2]
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(op(x, parameter), y, atol=2e-5)


def test_outside_of_jit_and_under_vmap(mesh):
    op, weights = OPS["lut"]
    gradient = jax.grad(lambda weights, x: jnp.sum(jnp.sin(op(x, weights))))
    expected, y = gradient(weights, X), op(X, weights)
    x = jax.device_put(X, NamedSharding(mesh, P("shards")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(gradient(weights, x), expected, atol=2e-5)
        np.testing.assert_allclose(jax.vmap(op, (0, None))(x, weights), y, atol=2e-5)
        in_scope = jax.sharding.auto_axes(op, out_sharding=P("shards"))
        np.testing.assert_allclose(jax.jit(in_scope)(x, weights), y, atol=2e-5)


@pytest.mark.parametrize("layout", ["the batch", "detectors"])
def test_a_step_of_a_table_optimizer(layout, mesh):
    """A step in microbatches, clipped, and with a penalty on neighbouring rows of the other table."""
    optimizer = tables.Optimizer(tables.RowAdagrad(), rate=0.1)

    def step(params, state, x):
        def loss(params, x):
            penalty = lutjax.cell_total_variation(params["dense"])
            y = lutjax.lut(x, params["weights"], ANCHORS) + lutjax.lut(x, params["dense"], ANCHORS)
            return jnp.mean(y**2) + penalty

        value_and_grad = tables.microbatched(tables.value_and_grad(loss), 2)
        value, gradients = value_and_grad(params, x)
        gradients = tables.clip_by_global_norm(gradients, 0.01)
        return *optimizer.apply(params, gradients, state), value

    params = {"weights": OPS["lut"][1], "dense": OPS["lut"][1] / 2}
    expected = jax.jit(step)(params, optimizer.init(params), X)
    of_x, of_weights = (NamedSharding(mesh, spec) for spec in LAYOUTS[layout])
    with jax.set_mesh(mesh):
        params = jax.device_put(params, of_weights)
        actual = jax.jit(step)(params, optimizer.init(params), jax.device_put(X, of_x))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    spec = tuple(jax.typeof(actual[0]["weights"]).sharding.spec)
    assert spec == (*of_weights.spec, None, None, None)[:3]


LANGUAGE = {"vocab_size": 16, "features": 8, "context": 4, "n_layers": 1}
DETECTORS = {
    "n_heads": 1,
    "n_detectors": 4,
    "n_anchors": 2,
    "n_position_bits": 2,
    "ffn_detectors": 4,
    "ffn_anchors": 3,
}
SCORED = {"n_heads": 2, "lut_heads": 2, "lut_tables": 4, "lut_bits": 3}
MODELS = {
    "lut": lambda rngs: LUTTransformer(LUTTransformerConfig(**LANGUAGE, **DETECTORS, dropout=0.0), rngs=rngs),
    "pair": lambda rngs: LUTTransformer(
        LUTTransformerConfig(**LANGUAGE, **DETECTORS, dropout=0.0, attention="pair"), rngs=rngs
    ),
    "projection_lut": lambda rngs: GPT(GPTConfig(**LANGUAGE, **SCORED), rngs=rngs),
    "scored_lut": lambda rngs: GPT(GPTConfig(**LANGUAGE, **SCORED, feed_forward="scored_lut"), rngs=rngs),
    "gates": lambda rngs: LogicClassifier(
        LogicClassifierConfig(in_features=8, n_classes=3, layers=(8, 12)), rngs=rngs
    ),
}


@pytest.fixture(scope="module")
def mesh_of_both():
    if jax.device_count() < 4:
        pytest.skip("the mesh has four devices, and this machine has fewer")
    return jax.make_mesh((2, 2), ("data", "detectors"), devices=jax.devices()[:4])


@pytest.mark.parametrize("name", ["lut", "gates", *map(slow, ("pair", "projection_lut", "scored_lut"))])
def test_a_step_of_a_model(name, mesh_of_both):
    """Parameters and state lie as `sharding.specs` says, before and after, and the batch by samples."""
    graph, params, others = nnx.split(MODELS[name](nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(lambda a: array(*a.shape) / 4, nnx.to_pure_dict(params))
    optimizer = tables.Optimizer(tables.RowAdagrad(), 0.1, rest=optax.sgd(0.1))
    inputs = array(4, 8) if name == "gates" else jax.random.randint(jax.random.key(1), (4, 4), 0, 16)

    def step(params, state, inputs):
        def loss(params):
            y = nnx.merge(graph, nnx.State(params), others)(inputs, deterministic=name != "gates" or None)
            return jnp.mean(jnp.sin(y))

        value, gradients = tables.value_and_grad(loss)(params)
        return *optimizer.apply(params, gradients, state), value

    state = optimizer.init(params)
    expected = jax.jit(step)(params, state, inputs)
    specs = sharding.specs((params, state), mesh_of_both)
    place = jax.tree.map(lambda spec: NamedSharding(mesh_of_both, spec), specs)
    with jax.set_mesh(mesh_of_both):
        params, state = jax.device_put((params, state), place)
        actual = jax.jit(step)(params, state, jax.device_put(inputs, P("data")))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, spec in zip(jax.tree.leaves(actual[:2]), jax.tree.leaves(specs), strict=True):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh_of_both, spec), a.ndim)


LAYERS = {
    "groups": Case("LUT", {"n_detectors": 4, "n_anchors": 2, "groups": 2}, (4, 8)),
    "sparse": Case("SparseLUT", {"n_detectors": 4, "n_anchors": 2, "n_targets": 6, "targets_per": "layer"}, (4, 8)),
    "pair": Case(
        "LUTPairAttention",
        {"n_detectors": 4, "n_anchors": 2, "n_positions": 4, "n_position_bits": 8, "interleave": True},
        (2, 4, 8),
    ),
    "powers of two": Case(
        "ProjectionLUT", {"heads": 2, "tables": 4, "bits": 3, "read": lutjax.reads.PowersOfTwo()}, (4, 8)
    ),
    "tables over bits": Case("SoftLUT", {"n_inputs": 3}, (4, 8)),
    "signs": Case("BinaryLUT", {"n_inputs": 3}, (4, 8)),
    "trees": Case("LogicConv", {"kernel": 2, "depth": 2, "padding": 1, "pool": 2}, (2, 5, 3, 2), ((5, 3, 2), 2)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("library", "name"),
    [("linen", "groups"), ("haiku", "signs"), ("nnx", "trees")]
    + [
        slow(library, name)
        for library in LIBRARIES
        for name in LAYERS
        if (library, name) not in (("linen", "groups"), ("haiku", "signs"), ("nnx", "trees"))
    ],
)
def test_layers_of_all_libraries(library, name, mesh_of_both):
    case, arrays = LAYERS[name], {}
    for i, v in enumerate(case.spec.variables()):
        drawn = v.make(lambda: jax.random.key(0), arrays)
        trained = (
            jax.random.normal(jax.random.key(i), v.shape, v.dtype) if v.collection == "params" else drawn
        )
        arrays[v.name] = trained
    layer, x = function(library, case, arrays), array(*case.shape)
    params = by_kind(case, arrays)["params"]
    both = jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(jnp.sin(layer(params, x))), (0, 1)))
    expected = both(params, x)
    specs = sharding.specs({"layer": params}, mesh_of_both)["layer"]
    with jax.set_mesh(mesh_of_both):
        actual = both(jax.device_put(params, specs), jax.device_put(x, P("data")))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)

"""Meshes with explicit axes, as `jax.make_mesh` makes them: the same results, and outputs lie as inputs do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import lutjax
from lutjax.training import tables

pytestmark = pytest.mark.skipif(
    jax.device_count() < 2, reason="a mesh needs two devices, and this machine has one"
)

RNG = np.random.default_rng(0)
ANCHORS = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=6, n_anchors=2)
TARGETS = jnp.asarray(RNG.integers(-1, 5, (6, 4, 3)), jnp.int32)
WIRES = jnp.asarray(RNG.integers(0, 8, (6, 2)), jnp.int32)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


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
@pytest.mark.parametrize("name", OPS)
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
    of_y = of_x[:1] if "attention" in name else of_x  # queries are not a leading axis
    assert jax.typeof(on_mesh).sharding.spec[:2] == (*of_y, None, None)[:2]
    assert jax.typeof(of_mesh[0]).sharding.spec[:2] == (*of_x, None, None)[:2]
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(op(x, parameter), y, atol=2e-5)


@pytest.mark.parametrize("layout", ["the batch", "detectors"])
def test_a_step_of_a_table_optimizer(layout, mesh):
    optimizer = tables.Optimizer(tables.RowAdagrad(), rate=0.1)

    def step(params, state, x):
        loss = lambda params: jnp.mean(lutjax.lut(x, params["weights"], ANCHORS) ** 2)  # noqa: E731
        value, gradients = tables.value_and_grad(loss)(params)
        return *optimizer.apply(params, gradients, state), value

    params = {"weights": OPS["lut"][1]}
    expected = jax.jit(step)(params, optimizer.init(params), X)
    of_x, of_weights = (NamedSharding(mesh, spec) for spec in LAYOUTS[layout])
    with jax.set_mesh(mesh):
        params = jax.device_put(params, of_weights)
        actual = jax.jit(step)(params, optimizer.init(params), jax.device_put(X, of_x))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    spec = tuple(jax.typeof(actual[0]["weights"]).sharding.spec)
    assert spec == (*of_weights.spec, None, None, None)[:3]

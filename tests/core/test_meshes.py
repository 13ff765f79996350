"""Meshes with explicit axes, as created by `jax.make_mesh`: the same results, and outputs keep the input sharding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytrees
from cases import ops, slow_except
from jax.sharding import NamedSharding, PartitionSpec as P
from machine import needs_devices
from meshes import check_layer, four_device_mesh

import lutjax
from lutjax import testing
from lutjax.cases import Tag

pytestmark = needs_devices(2)

RNG = np.random.default_rng(0)
ANCHORS = RNG.permuted(np.tile(np.arange(8, dtype=np.int32), (6, 1)), axis=1)[:, :4].reshape(
    6, 2, 2
)
TARGETS = RNG.integers(-1, 5, (6, 4, 3), np.int32)
WIRES = RNG.integers(0, 8, (6, 2), np.int32)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X = array(4, 6, 8)
OPS = {
    "lut": (lambda x, w: lutjax.lut(x, w, ANCHORS), array(6, 4, 4)),
    "sparse_lut": (lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, TARGETS, 5), array(6, 4, 3)),
}
LAYOUTS = {
    "the batch": (P("shards"), P()),
    "detectors": (P(), P("shards")),
}


@pytest.fixture(scope="module")
def mesh():
    result = jax.make_mesh((2,), ("shards",), devices=jax.devices()[:2])
    assert result.axis_types == (jax.sharding.AxisType.Explicit,)
    return result


@pytest.mark.parametrize(("name", "layout"), [
    ("lut", "the batch"),
    ("lut", "detectors"),
])  # fmt: skip
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


@pytest.mark.parametrize(("mapped", "samples", "n_outputs"), [(4, 2, 5), (0, 2, 5), (4, 2, 0)])
def test_vmap_over_one_axis_of_the_mesh_and_the_batch_over_the_other(mapped, samples, n_outputs):
    """No `jax.shard_map` takes empty arrays: the jaxlib 0.11.2 compiler may crash its process there."""

    def value_and_gradients(weights, detection):
        def total(weights, detection):
            y = jax.vmap(lambda d: lutjax.sparse_lookup(weights, d, TARGETS, n_outputs))(detection)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(total, (0, 1), has_aux=True, allow_int=True)(weights, detection)

    weights, detection = OPS["sparse_lut"][1], lutjax.detect(X[:mapped, :samples], ANCHORS)
    (value, y), (of_weights, of_detection) = value_and_gradients(weights, detection)
    with four_device_mesh("explicit") as mesh:
        over = P("data", "detectors") if samples else P("data")
        given = jax.device_put(detection, NamedSharding(mesh, over))
        program = jax.jit(value_and_gradients).trace(weights, given)
        (on_mesh, z), (each, of_each) = program.lower().compile()(weights, given)
        assert ("shard_map" in str(program.jaxpr)) == bool(samples and n_outputs)
        assert jax.typeof(z).sharding.spec[:2] == (*over, None)[:2]
    result = (on_mesh, z, each, of_each.margin)
    for a, b in zip(result, (value, y, of_weights, of_detection.margin), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


# ------------------------------------------------------------------------------------- layers and models, on both kinds of meshes
FAST_LAYERS = [
    ("nnx", "NgramMemory", "explicit"),
    ("linen", "SparseLUT, targets of tables", "explicit"),
]


@pytest.mark.parametrize(("library", "name", "kind"), FAST_LAYERS)
def test_layers_of_all_libraries(library, name, kind):
    check_layer(library, name, kind)


# ------------------------------------------------------------------------------------- the reference
REFERENCES = {
    "conv_lut": lambda r, x: r.conv_lut(
        jnp.expand_dims(x, 1), array_of(6, 4, 4), ANCHORS, kernel=1
    ),
    "lut, groups": lambda r, x: r.lut(x, array_of(6, 4, 4), ANCHORS, groups=6),
    "scale_gradient": lambda r, x: r.scale_gradient(x, array_of(4, 6, 8)),
}


def array_of(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def derivatives(f, arguments):
    """Values, and derivatives: forward, forward and backward, and second-order."""
    floats = lambda a: [v for v in jax.tree.leaves(f(a)) if jnp.issubdtype(v.dtype, jnp.floating)]  # noqa: E731
    if not floats(arguments):
        return f(arguments), (), ()
    tangents = jax.linearize(floats, arguments)[1](arguments)
    total = lambda a: sum(jnp.sum(jnp.sin(v)) for v in jax.jvp(floats, (a,), (a,))[1])  # noqa: E731
    return f(arguments), tangents, jax.grad(total)(arguments)


@pytest.mark.parametrize(
    ("op", "axis"),
    slow_except(
        itertools.product(ops(), ["batch", "detector"]),
        *("lookup-batch", "lookup-detector", "bilinear_gates-batch"),
    ),
)
def test_reference_of_every_op(op, axis, mesh):
    case = testing.case(
        op, next(name for name, size in testing.shapes(op).items() if Tag.FAST in size.tags)
    )

    def laid_out(name, a):
        at = getattr(case.axes[name], axis)
        divides = at is not None and a.shape[at] % 2 == 0
        return jax.device_put(a, NamedSharding(mesh, P(*[None] * at, "shards") if divides else P()))

    fixed = {name: a for name, a in case.fixed.items() if isinstance(a, jax.Array)}
    fixed = {name: laid_out(name, a) for name, a in fixed.items()}
    on_mesh = {name: laid_out(name, a) for name, a in case.differentiable.items()}

    def called(function, others):
        return lambda a: case.call(function, {**case.fixed, **others, **a})

    reference = getattr(lutjax.reference, op)
    want = jax.jit(lambda a: derivatives(called(reference, {}), a))(case.differentiable)
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda a, others: derivatives(called(reference, others), a))(
            on_mesh, fixed
        )
        pytrees.assert_close(op, actual, want, 2e-5)
        if axis == "batch":
            function = lutjax.kernel_registry.function(op)
            of_op = jax.jit(lambda a, others: called(function, others)(a))(on_mesh, fixed)
            for name, a in of_op.items():
                assert jax.typeof(actual[0][name]).sharding.spec == jax.typeof(a).sharding.spec


@pytest.mark.parametrize("name", REFERENCES)
def test_other_functions_of_the_reference(name, mesh):
    call = REFERENCES[name]
    f = lambda x: call(lutjax.reference, x)  # noqa: E731
    want = jax.jit(lambda x: derivatives(f, x))(X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("shards")))
        actual = jax.jit(lambda x: derivatives(f, x))(x)
    pytrees.assert_close(name, actual, want, 2e-5)
    spec = jax.typeof(actual[0]).sharding.spec
    assert spec[0] == "shards"


def test_reference_of_packed_bits(mesh):
    bits = np.random.default_rng(0).integers(0, 2, (6, 64)).astype(bool)
    words = lutjax.reference.pack_bits(bits)
    for spec in (P("shards"), P(None, "shards")):
        on_mesh = jax.device_put(jnp.asarray(bits), NamedSharding(mesh, spec))
        result = jax.jit(lutjax.reference.pack_bits)(on_mesh)
        np.testing.assert_array_equal(result, words)
        again = jax.jit(lambda words: lutjax.reference.unpack_bits(words, 64))(
            jax.device_put(words, NamedSharding(mesh, spec))
        )
        np.testing.assert_array_equal(again, bits)

"""Gate trees and their pools in one op: in the layer, on meshes, and compiled for GPUs. The parity suite covers their values."""

import dataclasses
import re

import fused_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import largest_collective
from flax import nnx
from machine import needs_devices

import lutjax
from lutjax import testing
from lutjax.dispatch.registry import Request, devices_of
from lutjax.kernels._triton import logic_trees as logic_trees_in_triton
from lutjax.layers.nnx import LogicConv
from lutjax.ops.logic_trees import LogicTrees, Places, logic_trees

PLACES = Places((6, 5), (2, 3), (1, 1), (1, 0), (1, 3))


def arguments(n_trees=4, n_channels=3, n_leaves=2, batch=4):
    """Trees on a grid, where sums are exact in any order."""
    rng = np.random.default_rng(0)
    leaves = jnp.asarray(rng.integers(0, 6 * n_channels, (n_trees, n_leaves)), jnp.int32)
    x = jnp.asarray(rng.integers(0, 3, (30 * n_channels, batch)) / 2, jnp.float32)
    coefficients = jnp.asarray(rng.integers(-2, 3, (4, n_trees, n_leaves - 1)) / 2, jnp.float32)
    return x, coefficients, leaves, lutjax.readers(leaves % n_channels, n_channels)


def with_gradients(x, coefficients, leaves, readers):
    def op(x, coefficients):
        return logic_trees(x, coefficients, leaves, places=PLACES, readers=readers)

    y, pull = jax.vjp(op, x, coefficients)
    return y, *pull(jnp.ones_like(y))


@needs_devices(8)
@pytest.mark.parametrize("kind", ["Auto"])
def test_trees_and_samples_over_devices(kind):
    with fused_kernels.on_cpu("logic_trees"):
        check_on_mesh(arguments(), kind)


def check_on_mesh(given, kind):
    expected = with_gradients(*given)
    axis = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh(
        (2, 2), ("data", "trees"), axis_types=(axis, axis), devices=jax.devices()[:4]
    )
    specs = (jax.P(None, "data"), jax.P(None, "trees"), jax.P("trees"), jax.P())
    placed = jax.device_put(given, tuple(jax.NamedSharding(mesh, spec) for spec in specs))
    compiled = jax.jit(with_gradients).lower(*placed).compile()
    actual = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert actual[0].sharding.is_equivalent_to(
        jax.NamedSharding(mesh, jax.P("trees", None, "data")), 3
    )
    assert largest_collective(compiled) <= given[0].nbytes / 2
    assert not re.findall(r" (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())


@needs_devices(2)
@pytest.mark.parametrize("kind", ["Explicit"])
def test_a_layer_evaluates_whole_trees_or_levels(kind):
    layer = LogicConv(
        (3, 3, 2), 2, kernel=2, depth=2, padding=1, pool=2, feature_axis=0, rngs=nnx.Rngs(0)
    )
    graph, params, others = nnx.split(layer, nnx.Param, ...)
    x = jnp.asarray(np.random.default_rng(0).random((2, 3, 3, 4)), jnp.float32)

    def loss(params, others, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, params, others)(x)))

    gradient = jax.value_and_grad(loss, argnums=(0, 2))
    expected = jax.jit(gradient)(params, others, x)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, None, None, "data")))
    params, others = jax.device_put((params, others), jax.NamedSharding(mesh, jax.P()))
    with fused_kernels.on_cpu("logic_trees"):
        actual = jax.jit(lambda *a: gradient(*a))(params, others, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leaves": np.zeros((4, 3), np.int32)}, r"leaves .*expected \[trees, leaves\] with at least 2 leaves, a power of two"),
        ({"coefficients": np.zeros((4, 4, 2), np.float32)}, r"coefficients .*expected \[4, 4, 1\]: 1, a, b and ab"),
        ({"x": np.zeros((31, 4), np.float32)}, r"x is float32\[31, 4\]; expected \[channels \* 30, \.\.\.\].* 6 rows and 5 columns"),
        ({"readers": np.zeros((2, 3), np.int32)}, r"readers .*expected \[3, fan_out\]: the readers of each channel"),
        ({"places": Places((6, 5), (7, 3))}, "the window is larger than the image with its padding"),
        (
            {"places": dataclasses.replace(PLACES, pool_padding=(1, 0))},
            "pool_padding must be less than pool, or a group could have no place",
        ),
    ],
)  # fmt: skip
def test_other_sizes_are_refused(changes, message):
    given = dict(zip(("x", "coefficients", "leaves", "readers"), arguments(), strict=True))
    with pytest.raises(ValueError, match=f"^logic_trees: .*{message}"):
        logic_trees(**{**given, "places": PLACES, **changes})


def test_large_groups_are_left_to_other_kernels():
    """A kernel writing out hundreds of leaves would compile for minutes."""
    places = Places((16, 16), pool=(16, 16))
    call = LogicTrees(
        jnp.zeros((256, 1)), jnp.zeros((4, 4, 3)), jnp.zeros((4, 4), jnp.int32), places=places
    )
    assert "at most 256, here 1024" in str(
        logic_trees_in_triton.SPEC.supports(Request("forward", call, devices_of([call.x])[0]))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["apart", "pools"])  # without and with readers
def test_gradients_have_the_same_bits_in_every_run(shape):
    if jax.default_backend() != "gpu":
        pytest.skip("plain JAX on a CPU adds in one order")
    case = testing.case("logic_trees", shape, batch=130, channels=2, trees=60)
    noise = np.random.default_rng(0)
    x, coefficients = (
        jnp.asarray(noise.normal(size=a.shape), jnp.float32) for a in case.differentiable.values()
    )

    @jax.jit
    def gradients(x, coefficients):
        def loss(x, coefficients):
            op = lutjax.kernel_registry.function("logic_trees")
            return jnp.sum(
                jnp.sin(case.call(op, {"x": x, "coefficients": coefficients, **case.fixed})["y"])
            )

        return jax.grad(loss, argnums=(0, 1))(x, coefficients)

    first = gradients(x, coefficients)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, gradients(x, coefficients), first)

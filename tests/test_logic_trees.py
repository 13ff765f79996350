"""Trees of gates and their pools in one op: against gates level by level, in Triton's interpreter, and compiled for GPUs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow

from lutjax.layers._logic_images import first_maximum
from lutjax.ops.logic_trees import Places, logic_trees

ONE = Places(width=3, stride=(1, 1), places=(1, 1))
GROUPS = Places(width=5, stride=(1, 1), places=(2, 4), pool=(2, 2))
APART = Places(width=9, stride=(3, 2), places=(2, 4), pool=(1, 2))
AROUND = Places(width=5, stride=(1, 1), places=(2, 4), pool=(2, 2), pool_padding=(1, 1))
SIZES = {  # channels, height, trees, leaves, samples
    "one": (ONE, 1, 3, 1, 2, 1),
    "groups": (GROUPS, 2, 3, 3, 4, 5),
    "apart": (APART, 1, 6, 2, 4, 37),
    "around": (AROUND, 3, 3, 2, 4, 3),
    "deep": (GROUPS, 1, 3, 2, 16, 2),
    "no_samples": (GROUPS, 2, 3, 3, 4, 0),
}


def arguments(size, dtype=jnp.float32):
    """Inputs on a grid, on which sums are exact in any order and values of places are equal often."""
    places, channels, height, n_trees, n_leaves, batch = SIZES[size]
    rng = np.random.default_rng(len(size))
    window = (
        height - (places.places[0] - 1) * places.stride[0],
        places.width - (places.places[1] - 1) * places.stride[1],
    )
    at = [rng.integers(0, n, (n_trees, n_leaves)) for n in (channels, *window)]
    leaves = jnp.asarray((at[0] * height + at[1]) * places.width + at[2], jnp.int32)
    x = jnp.asarray(rng.integers(0, 3, (channels * height * places.width, batch)) / 2, dtype)
    coefficients = jnp.asarray(rng.integers(-2, 3, (4, n_trees * (n_leaves - 1))) / 2, jnp.float32)
    dy = jnp.asarray(rng.integers(-2, 3, (n_trees * math.prod(places.groups), batch)), dtype)
    return places, leaves, x, coefficients, dy


def level_by_level(x, coefficients, leaves, places):
    """Return the same by an array of all places for each level, and loops over groups."""
    n_trees = len(leaves)
    order = [(row, column) for row in range(places.places[0]) for column in range(places.places[1])]
    shifts = [(row * places.width * places.stride[0]) + column * places.stride[1] for row, column in order]
    y, first = (
        x[leaves[:, :, None] + np.array(shifts, np.int32)[None, None]],
        0,
    )  # [trees, leaves, places, samples]
    while y.shape[1] > 1:
        n = y.shape[1] // 2
        c0, c1, c2, c3 = coefficients[:, first : first + n * n_trees].reshape(4, n_trees, n, 1, 1)
        a, b = y[:, ::2], y[:, 1::2]
        y, first = c0 + c1 * a + c2 * b + c3 * a * b, first + n * n_trees
    found = []
    for top in range(-places.pool_padding[0], places.places[0] + places.pool_padding[0], places.pool[0]):
        for left in range(-places.pool_padding[1], places.places[1] + places.pool_padding[1], places.pool[1]):
            inside = [(top + i, left + j) for i in range(places.pool[0]) for j in range(places.pool[1])]
            found.append(first_maximum([y[:, 0, order.index(place)] for place in inside if place in order]))
    return jnp.stack(found, 1).reshape(n_trees * len(found), x.shape[1])


def with_gradient(f, x, coefficients, dy):
    y, pull = jax.vjp(f, x, coefficients)
    return y, *pull(dy)


def check(size, implementation, dtype=jnp.float32):
    places, leaves, x, coefficients, dy = arguments(size, dtype)
    op = functools.partial(logic_trees, leaves=leaves, places=places, implementation=implementation)
    found = jax.jit(functools.partial(with_gradient, op))(x, coefficients, dy)
    plain = functools.partial(level_by_level, leaves=leaves, places=places)
    wide = jax.jit(functools.partial(with_gradient, plain))(
        x.astype(jnp.float32), coefficients, dy.astype(jnp.float32)
    )
    for one, expected, argument in zip(found, wide, (x, x, coefficients), strict=True):
        assert one.dtype == argument.dtype
        np.testing.assert_allclose(
            one.astype(jnp.float32), expected.astype(argument.dtype).astype(jnp.float32), rtol=2e-6, atol=1e-6
        )


@pytest.mark.parametrize("size", [slow(size) if size == "deep" else size for size in SIZES])
def test_plain_jax(size):
    check(size, "xla")


def test_samples_over_devices_and_mapped():
    """The samples may lie on several devices, and be mapped."""
    places, leaves, x, coefficients, dy = arguments("apart")
    x, dy = x[:, :32], dy[:, :32]

    def op(x, coefficients):
        return logic_trees(x, coefficients, leaves, places=places, implementation="xla")

    expected = with_gradient(op, x, coefficients, dy)
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.NamedSharding(mesh, jax.P(None, "devices"))
    placed = jax.device_put(x, divided), coefficients, jax.device_put(dy, divided)
    found = jax.jit(functools.partial(with_gradient, op))(*placed)
    assert found[0].sharding.is_equivalent_to(divided, 2)
    jax.tree.map(np.testing.assert_array_equal, found, expected)

    apart = jax.vmap(op, in_axes=(2, None), out_axes=2)(x.reshape(len(x), 4, 8), coefficients)
    np.testing.assert_array_equal(apart.reshape(expected[0].shape), expected[0])


def test_other_sizes_are_refused():
    places, leaves, x, coefficients, _ = arguments("groups")
    with pytest.raises(
        ValueError, match=r"leaves .*expected \[trees, leaves\] with 2 to 16 leaves, a power of two"
    ):
        logic_trees(x, coefficients, leaves[:, :3], places=places)
    with pytest.raises(ValueError, match=r"coefficients .*expected \[4, 9\]"):
        logic_trees(x, coefficients[:, 1:], leaves, places=places)


# ------------------------------------------------------------------------------------- Triton
triton_interpreter = pytest.importorskip("triton_interpreter")


@pytest.mark.parametrize("size", [slow(size) if size == "deep" else size for size in SIZES])
def test_triton(size):
    with triton_interpreter.interpreted():
        check(size, "triton")


def test_triton_in_bfloat16():
    with triton_interpreter.interpreted():
        check("around", "triton", jnp.bfloat16)

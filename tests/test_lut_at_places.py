"""Detection and look-up of all places in one op: against the reference, in Triton's interpreter, and compiled for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow

import lutjax
from lutjax.ops.lut_at_places import Windows, lut_at_places

ONE = Windows.whole(7)
PADDED = Windows((4, 3, 2), (3, 2), (1, 1), (1, 1), 2)
APART = Windows((7, 9, 4), (2, 2), (3, 4), (0, 1), 2)  # strides beyond the window, channels in two groups
WIDE = Windows((5, 6, 3), (5, 3), (1, 2), (4, 0), 3)
SIZES = {  # samples, detectors, pairs, outputs, groups, targets, dead zone
    "one": (ONE, 5, 6, 3, 4, 2, 0, 0.0),
    "padded": (PADDED, 3, 3, 2, 5, 1, 0, 0.0),
    "apart": (APART, 2, 8, 3, 3, 2, 0, 0.6),
    "wide": (WIDE, 2, 4, 1, 2, 1, 0, 0.0),
    "many_outputs": (PADDED, 2, 2, 2, 70, 2, 0, 0.0),
    "targets": (ONE, 6, 6, 2, 3, 3, 4, 0.0),
}


def arguments(size, dtype=jnp.float32):
    """Images on a grid, where pairs are often equally close, and numbers whose sums are exact in any order."""
    windows, batch, n_detectors, n_pairs, n_outputs, groups, n_targets, epsilon = SIZES[size]
    rng = np.random.default_rng(len(size))
    images = jnp.asarray(rng.integers(-4, 5, (batch, *windows.image)) / 2, dtype)
    weights = jnp.asarray(rng.integers(-8, 9, (n_detectors, 2**n_pairs, n_outputs)) / 4, dtype)
    n_values = windows.size[0] * windows.size[1] * windows.channels
    anchors = jnp.asarray(rng.integers(-1, n_values + 1, (n_detectors, n_pairs, 2)), jnp.int32)
    targets = (
        jnp.asarray(rng.integers(-1, n_targets + 1, (groups, n_outputs)), jnp.int32) if n_targets else None
    )
    options = {"windows": windows, "groups": groups, "epsilon": epsilon}
    return images, weights, anchors, (targets, n_targets or None), options


def reference(images, weights, anchors, targets, n_outputs, *, windows, groups, epsilon):
    """Return the same by `lutjax.reference`, which copies windows."""
    if targets is not None:
        each = jnp.repeat(targets[:, None], len(anchors) // groups, 0)
        x = images.reshape(len(images), -1)
        y = lutjax.reference.sparse_lut(x, weights, anchors, each, n_outputs)
        return y.reshape(len(images), *windows.places, n_outputs)
    if windows.channels == windows.image[2] and groups > 1:  # groups share the window
        found = [
            lutjax.reference.conv_lut(images, w, a, **of_window(windows), epsilon=epsilon)
            for w, a in zip(jnp.split(weights, groups), jnp.split(anchors, groups), strict=True)
        ]
        return jnp.concatenate(found, -1)
    return lutjax.reference.conv_lut(
        images, weights, anchors, **of_window(windows), groups=groups, epsilon=epsilon
    )


def of_window(windows):
    return {"kernel": windows.size, "stride": windows.stride, "padding": windows.padding}


def with_gradient(f, images, weights):
    y, pull = jax.vjp(f, images, weights)
    dy = jnp.round(4 * jax.random.normal(jax.random.key(5), y.shape)).astype(y.dtype)
    return y, *pull(dy)


def check(size, implementation, dtype=jnp.float32):
    images, weights, anchors, targets, options = arguments(size, dtype)

    def run(f, *of):
        return jax.jit(functools.partial(with_gradient, lambda x, w: f(x, w, anchors, *targets, **options)))(
            *of
        )

    found = run(functools.partial(lut_at_places, implementation=implementation), images, weights)
    wide = run(reference, images.astype(jnp.float32), weights.astype(jnp.float32))
    for name, one, expected in zip(("y", "images", "weights"), found, wide, strict=True):
        assert one.dtype == dtype
        assert np.any(expected), name
        rounded = np.asarray(expected.astype(dtype).astype(jnp.float32))
        tolerance = 2e-2 if dtype == jnp.bfloat16 and name == "images" else 2e-6
        np.testing.assert_allclose(
            one.astype(jnp.float32), rounded, rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("size", [size if size == "apart" else slow(size) for size in SIZES])
def test_plain_jax(size):
    check(size, "xla")


@pytest.mark.slow
def test_samples_over_devices_and_mapped():
    """Images may lie on several devices, and be mapped."""
    windows = Windows((3, 3, 1), (2, 2), (1, 1), (0, 0), 1)
    keys = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(keys[0], (8, 3, 3, 1))
    weights = jax.random.normal(keys[1], (2, 4, 2))
    anchors = lutjax.sample_anchors(keys[2], n_inputs=4, n_detectors=2, n_anchors=2)

    def op(images, weights):
        return lut_at_places(images, weights, anchors, windows=windows, implementation="xla")

    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.NamedSharding(mesh, jax.P("devices"))
    found = jax.jit(op)(jax.device_put(images, divided), weights)
    assert found.sharding.is_equivalent_to(divided, 4)
    expected = lutjax.reference.conv_lut(images, weights, anchors, kernel=2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(jax.vmap(op, in_axes=(0, None))(images, weights), found)


def test_no_images_no_gradient():
    windows = Windows((3, 3, 1), (2, 2), (1, 1), (0, 0), 1)
    images, weights = jnp.zeros((0, 3, 3, 1)), jnp.ones((2, 4, 2))
    anchors = jnp.zeros((2, 2, 2), jnp.int32)
    f = functools.partial(lut_at_places, anchors=anchors, windows=windows)
    y, pull = jax.vjp(f, images, weights)
    assert y.shape == (0, 2, 2, 2)
    np.testing.assert_array_equal(pull(y)[1], jnp.zeros_like(weights))


# ------------------------------------------------------------------------------------- Triton
triton_interpreter = pytest.importorskip("triton_interpreter")


@pytest.mark.parametrize("size", [size if size in ("padded", "targets") else slow(size) for size in SIZES])
def test_triton(size):
    with triton_interpreter.interpreted():
        check(size, "triton")


@pytest.mark.slow
def test_triton_in_bfloat16():
    with triton_interpreter.interpreted():
        check("padded", "triton", jnp.bfloat16)


# ------------------------------------------------------------------------------------- on GPUs
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU, and JAX sees none"),
]


@pytest.mark.parametrize("size", [pytest.param(size, marks=on_gpu) for size in SIZES])
def test_triton_on_a_gpu(size):
    check(size, "triton")
    check(size, "triton", jnp.bfloat16)


@pytest.mark.parametrize("implementation", [pytest.param("triton", marks=on_gpu)])
def test_the_gradient_of_images_has_the_same_bits_in_every_run(implementation):
    keys = jax.random.split(jax.random.key(0), 4)
    images, weights = jax.random.normal(keys[0], (8, 16, 16, 3)), jax.random.normal(keys[1], (16, 64, 64))
    anchors = lutjax.sample_anchors(keys[2], n_inputs=27, n_detectors=16, n_anchors=6)
    dy = jax.random.normal(keys[3], (8, 16, 16, 64))

    @jax.jit
    def of_images(images):
        f = functools.partial(
            lutjax.conv_lut,
            weights=weights,
            anchors=anchors,
            kernel=3,
            padding=1,
            implementation=implementation,
        )
        return jax.vjp(f, images)[1](dy)[0]

    first = of_images(images)
    for _ in range(4):
        np.testing.assert_array_equal(of_images(images), first)

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


@pytest.mark.parametrize("size", [size if size in ("apart", "targets") else slow(size) for size in SIZES])
def test_plain_jax(size):
    check(size, "xla")


# ------------------------------------------------------------------------------------- Triton
triton_interpreter = pytest.importorskip("triton_interpreter")


@pytest.mark.parametrize("size", [slow(size) if size in ("wide",) else size for size in SIZES])
def test_triton(size):
    with triton_interpreter.interpreted():
        check(size, "triton")


@pytest.mark.slow
def test_triton_in_bfloat16():
    with triton_interpreter.interpreted():
        check("padded", "triton", jnp.bfloat16)

"""Lookup-table convolutions: memory, wrong arguments and pictures; test_definitions.py covers their values."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_libraries import (
    Case,
    nnx_layer,
)

import lutjax
from lutjax import reads, wiring
from lutjax.layers import _images

KEY = np.zeros(2, np.uint32)  # the bits of jax.random.key(0)


def arguments(shape, kernel, groups, n_images=2, n_detectors=4, n_anchors=3, n_outputs=3):
    n_values = kernel[0] * kernel[1] * shape[2] // groups
    keys = jax.random.split(KEY, 3)
    return (
        jax.random.randint(keys[0], (n_images, *shape), -4, 5) / 4,
        jax.random.normal(keys[1], (n_detectors, 2**n_anchors, n_outputs)),
        lutjax.sample_anchors(keys[2], n_values, n_detectors, n_anchors),
    )


def test_leading_axes_and_dtypes():
    images, weights, anchors = arguments((5, 4, 2), (2, 2), 1, n_images=6)
    f = jax.jit(functools.partial(lutjax.conv_lut, kernel=2, stride=2, padding=1))
    y = f(images, weights, anchors)
    np.testing.assert_array_equal(
        f(images.reshape(3, 1, 2, 5, 4, 2), weights, anchors).reshape(y.shape), y
    )
    np.testing.assert_array_equal(f(images[0], weights, anchors), y[0])
    half = f(images.astype(jnp.bfloat16), weights.astype(jnp.bfloat16), anchors)
    rounded = f(images, weights.astype(jnp.bfloat16).astype(jnp.float32), anchors)
    np.testing.assert_array_equal(half, rounded.astype(jnp.bfloat16))
    assert f(images[:0], weights, anchors).shape == (0, 3, 3, 3)


def test_wild_ids_are_clamped():
    images, weights, anchors = arguments((5, 4, 2), (2, 2), 1)
    wild = anchors.at[0, 0].set(jnp.array([-9, 99])).at[3, 1].set(jnp.array([8, 0]))
    tame = anchors.at[0, 0].set(jnp.array([0, 7])).at[3, 1].set(jnp.array([7, 0]))
    f = jax.jit(functools.partial(lutjax.conv_lut, kernel=2))
    np.testing.assert_array_equal(f(images, weights, wild), f(images, weights, tame))


def largest_array(compiled):
    return max(
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"\w\d+\[([\d,]+)\]", compiled)
    )


@pytest.mark.parametrize("read", [None, reads.Confidence()], ids=str)
def test_windows_are_not_copied(read):
    """Training-step arrays have fewer elements than all windows together; window copies would have as many."""
    images, weights, anchors = arguments((12, 12, 4), (5, 5), 1, n_images=8)
    scalars = None if read is None else read.initial()
    n_copied = 8 * 8 * 8 * 5 * 5 * 4

    def compiled(module):
        def loss(images, weights):
            return module.conv_lut(images, weights, anchors, scalars, kernel=5, read=read).sum()

        return jax.jit(jax.grad(loss, (0, 1))).lower(images, weights).compile().as_text()

    assert largest_array(compiled(lutjax.reference)) >= n_copied
    assert largest_array(compiled(lutjax)) < n_copied / 4


NO_PAIRS = {"anchors": np.zeros((4, 0, 2), np.int32), "weights": np.ones((4, 1, 2), np.float32)}
WRONG = {
    "channels": ({"groups": 3}, ValueError,
        "groups is int 3; it must divide the number of detectors, 4"),
    "detectors": ({"groups": 4}, ValueError,
        "groups is int 4; it must divide the number of channels, 2"),
    "vector": ({"images": np.ones((5, 4), np.float32)}, ValueError,
        r"images is float32\[5, 4\]; expected shape"),
    "integers": ({"images": np.ones((5, 4, 2), np.uint8)}, TypeError,
        r"images is uint8\[5, 4, 2\]"),
    "kernel": ({"kernel": (6, 2)}, ValueError,
        r"kernel is \(6, 2\), larger than an image of 5 by 4\."),
    "padding": ({"padding": 2}, ValueError,
        "padding is 2 and kernel is 2; a window could be outside"),
    "stride": ({"stride": 0}, ValueError, "stride is 0; it must be at least 1"),
    "table": ({"weights": np.ones((4, 4, 2), np.float32)}, ValueError,
        r"weights is .*; anchors has 3"),
    "read": ({"read": "soft"}, TypeError, "read is str 'soft'; expected one of lutjax.reads"),
    "no_scalars": ({"read": reads.Confidence()}, ValueError,
        r"scalars is NoneType None; .* needs \['log_"),
    "scalars": ({"scalars": {}}, ValueError,
        "scalars is dict {}; they are those of a read, and read is None"),
    "epsilon": ({"read": reads.Hard(), "epsilon": 0.5}, ValueError,
        "epsilon is float 0.5; read is Hard"),
    "no_comparison": ({"read": reads.Hard(), **NO_PAIRS}, ValueError,
        "a score needs at least one comparison"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("without_typechecking")
def test_wrong_arguments(name):
    changes, error, message = WRONG[name]
    images, weights, anchors = arguments((5, 4, 2), (2, 2), 1)
    given = {"images": images, "weights": weights, "anchors": anchors, "kernel": 2} | changes
    with pytest.raises(error, match=f"^conv_lut: .*{message}"):
        lutjax.conv_lut(**given)


TABLES = {"n_detectors": 4, "n_anchors": 3}
CASES = {
    "conv": Case("ConvLUT", {**TABLES, "kernel": 3, "padding": 1, "stride": (2, 1)}, (3, 5, 4),
        ((5, 4), 6)),
    "channels": Case("ConvLUT", {**TABLES, "kernel": (2, 3), "groups": 2, "pool": (2, 1),
        "read": reads.Confidence()}, (2, 3, 6, 5, 4), ((6, 5, 4), 6)),
    "all": Case("ConvLUT", {**TABLES, "kernel": 2, "pool": "all", "epsilon": 0.5}, (5, 6, 2),
        ((5, 6, 2), 3)),
}  # fmt: skip


def variables_of(case: Case) -> dict[str, Any]:
    arrays = {}
    for i, v in enumerate(case.spec.variables()):
        key = jax.random.key(10 + i)
        arrays[v.name] = (
            jax.random.normal(key, v.shape, v.dtype) if v.kind == "tables" else v.init(key)
        )
    return arrays


def test_averages_are_made_in_float32():
    """The sum of 2048 and fifteen ones: bfloat16 has no number between 2048 and 2064."""
    y = jnp.asarray([2048.0] + [1.0] * 15, jnp.bfloat16).reshape(4, 4, 1)
    assert _images._average_blocks(y, (4, 4)).ravel().tolist() == [129.0]


def test_tables_of_a_layer_are_for_images_of_any_size():
    layer = nnx_layer(CASES["conv"], variables_of(CASES["conv"]))
    arrays = {name: getattr(layer, name).get_value() for name in ("weights", "anchors")}
    large = jax.random.normal(KEY, (2, 9, 7, 1))
    y = lutjax.conv_lut(large, **arrays, kernel=3, padding=1)
    part = lutjax.conv_lut(large[:, 2:7, 1:5], **arrays, kernel=3)
    np.testing.assert_array_equal(y[:, 3:6, 2:4], part)


def test_picture_of_a_window():
    """Plot a detector in its window, with the second channel group below the first."""
    layer = nnx_layer(CASES["channels"])
    figure = wiring.show(layer, groups=[0, 3])
    images = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    assert [image.shape for image in images] == [(4, 3)] * 3
    pixels = [np.unique(np.asarray(layer.anchors[...][t]) // 2) for t in (0, 3)]
    assert np.flatnonzero(images[0]).tolist() == pixels[0].tolist()
    assert np.flatnonzero(images[1]).tolist() == (6 + pixels[1]).tolist()

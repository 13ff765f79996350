"""Convolutions of look-up tables: against loops over pixels, and against the same tables on copied windows."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow, slow_except
from flax import nnx
from layer_libraries import (
    Case,
    assert_drawn,
    assert_refused,
    inputs_of,
    nnx_layer,
    options_of,
)

import lutjax
from lutjax import optim as tables, reads, wiring
from lutjax.layers import _images, linen, nnx as layers
from lutjax.testing import assert_close

KEY = np.zeros(2, np.uint32)  # the bits of jax.random.key(0)


# ------------------------------------------------------------------------------------- the op
def by_loops(images, weights, anchors, kernel, stride, padding, groups, epsilon=0.0):
    """The sum of rows at every place, comparison by comparison; a pixel outside of the image is 0."""
    n_images, height, width, channels = images.shape
    each, per_group = channels // groups, len(anchors) // groups
    starts = [
        [p for p in range(-pad, n + pad - k + 1) if (p + pad) % s == 0]
        for n, k, s, pad in zip((height, width), kernel, stride, padding, strict=True)
    ]
    y = np.zeros((n_images, len(starts[0]), len(starts[1]), groups * weights.shape[2]), np.float64)

    def value(image, top, left, group, i):
        row, column, channel = i // (kernel[1] * each), i // each % kernel[1], i % each
        r, c = top + row, left + column
        return image[r, c, group * each + channel] if 0 <= r < height and 0 <= c < width else 0.0

    for n, (i, top), (j, left) in itertools.product(
        range(n_images), enumerate(starts[0]), enumerate(starts[1])
    ):
        for t, pairs in enumerate(anchors):
            read = functools.partial(value, images[n], top, left, t // per_group)
            delta = [read(a) - read(b) for a, b in pairs.tolist()]
            row = sum((d > 0 and abs(d) >= epsilon) << bit for bit, d in enumerate(delta))
            first = t // per_group * weights.shape[2]
            y[n, i, j, first : first + weights.shape[2]] += weights[t, row]
    return y


GEOMETRY = {
    "odd": ((5, 7, 1), (3, 2), (1, 1), (0, 0), 1),
    "beyond_the_window": ((7, 5, 3), (2, 3), (3, 4), (0, 0), 1),
    "padded": ((5, 3, 2), (3, 3), (2, 1), (1, 2), 1),
    "one_row": ((1, 9, 2), (1, 4), (1, 2), (0, 3), 2),
    "one_place": ((4, 4, 2), (4, 4), (9, 9), (0, 0), 1),
    "larger_than_the_image": ((2, 3, 4), (5, 4), (1, 1), (2, 1), 2),
    "channels": ((3, 4, 6), (1, 1), (1, 2), (0, 0), 2),
}


def arguments(shape, kernel, groups, n_images=2, n_detectors=4, n_anchors=3, n_outputs=3):
    n_values = kernel[0] * kernel[1] * shape[2] // groups
    keys = jax.random.split(KEY, 3)
    return (
        jax.random.randint(keys[0], (n_images, *shape), -4, 5) / 4,
        jax.random.normal(keys[1], (n_detectors, 2**n_anchors, n_outputs)),
        lutjax.sample_anchors(keys[2], n_values, n_detectors, n_anchors),
    )


FAST = ("beyond_the_window", "padded", "larger_than_the_image")


@pytest.mark.parametrize("name", slow_except(GEOMETRY, "beyond_the_window", "padded"))
def test_values_by_loops(name):
    shape, kernel, stride, padding, groups = GEOMETRY[name]
    images, weights, anchors = arguments(shape, kernel, groups)
    options = {"kernel": kernel, "stride": stride, "padding": padding, "groups": groups}
    want = by_loops(*map(np.asarray, (images, weights, anchors)), **options, epsilon=0.6)
    got = jax.jit(functools.partial(lutjax.conv_lut, **options, epsilon=0.6))(images, weights, anchors)
    assert_close(name, got, want.astype(np.float32))
    assert got.shape[1:3] == wiring.windows(shape, kernel, stride, padding=padding).shape[:2]
    assert np.abs(want).max() > 0.1


def vjp_of(f, *primals):
    """Return outputs and cotangents of a function, for a cotangent that depends on the shape alone."""

    def run(*primals):
        y, back = jax.vjp(f, *primals)
        return y, back(jax.random.normal(jax.random.key(5), y.shape, y.dtype))

    return jax.jit(run)(*primals)


READS = {
    "rows": (None, {}),
    "dead_zone": (None, {"epsilon": 0.6}),
    "fixed_point": (None, {"accumulate": lutjax.FixedPoint(2.0**16)}),
    "hard": (reads.Hard(), {}),
    "confidence": (reads.Confidence(ways=2), {}),
    "integers": (reads.PowersOfTwo(2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("rows", "padded"),
        ("confidence", "larger_than_the_image"),
        ("integers", "padded"),
        ("hard", "channels"),
        ("dead_zone", "one_row"),
        ("fixed_point", "padded"),
        ("rows", "beyond_the_window"),
        ("confidence", "one_place"),
    ],
)
def test_gradients_are_those_of_copied_windows(name, geometry):
    """Outputs, and gradients of images, tables and scalars."""
    shape, kernel, stride, padding, groups = GEOMETRY[geometry]
    images, weights, anchors = arguments(shape, kernel, groups)
    images += 0.01 * jax.random.normal(KEY, images.shape)  # scores have kinks at 0
    read, more = READS[name]
    scalars = None if read is None else read.initial()
    options = {"kernel": kernel, "stride": stride, "padding": padding, "groups": groups, "read": read, **more}

    def run(module):
        def f(images, weights, scalars):
            return module.conv_lut(images, weights, anchors, scalars, **options)

        return vjp_of(f, images, weights, scalars)

    got, want = run(lutjax), run(lutjax.reference)
    tolerance = 2e-4 if name == "fixed_point" else None  # of derivatives, which the reference makes of floats
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.any(b), path
        assert_close(f"{name} {jax.tree_util.keystr(path)}", a, b, tolerance)


@pytest.mark.slow
def test_leading_axes_and_dtypes():
    """Leading axes are samples, 16-bit tables are summed in float32, and `vmap` and integers of NumPy work."""
    images, weights, anchors = arguments((5, 4, 2), (2, 2), 1, n_images=6)
    f = functools.partial(lutjax.conv_lut, kernel=2, stride=2, padding=1)
    y = f(images, weights, anchors)
    np.testing.assert_array_equal(f(images.reshape(3, 1, 2, 5, 4, 2), weights, anchors).reshape(y.shape), y)
    np.testing.assert_array_equal(f(images[0], weights, anchors), y[0])
    np.testing.assert_array_equal(jax.vmap(f, (0, None, None))(images, weights, np.asarray(anchors)), y)
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
    """Return the most elements of an array that a program names."""
    return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\d+\[([\d,]+)\]", compiled))


@pytest.mark.parametrize("read", [None, slow(reads.Confidence())], ids=str)
def test_windows_are_not_copied(read):
    """No array of a training step has as many elements as all windows together; copies of these would have."""
    images, weights, anchors = arguments((12, 12, 4), (5, 5), 1, n_images=8)
    scalars = None if read is None else read.initial()
    n_copied = 8 * 8 * 8 * 5 * 5 * 4

    def compiled(module):
        def loss(images, weights):
            return module.conv_lut(images, weights, anchors, scalars, kernel=5, read=read).sum()

        return jax.jit(jax.grad(loss, (0, 1))).lower(images, weights).compile().as_text()

    assert largest_array(compiled(lutjax.reference)) >= n_copied
    assert largest_array(compiled(lutjax)) < n_copied / 4


@pytest.mark.slow
@pytest.mark.parametrize("read", [None, reads.Confidence()], ids=str)
def test_gradients_of_tables_in_factors(read):
    """A table of a convolution reaches one look-up, so that an optimizer can update the rows that were read."""
    images, weights, anchors = arguments((5, 4, 2), (2, 2), 1)
    params = {"weights": weights, **({} if read is None else read.initial())}

    def loss(p):
        scalars = {name: value for name, value in p.items() if name != "weights"}
        y = lutjax.conv_lut(images, p["weights"], anchors, scalars or None, kernel=2, read=read)
        return (y**2).sum()

    _, gradients = tables.value_and_grad(loss)(params)
    new, _ = lutjax.update_table(weights, gradients.pop("weights"), 0.5, tables.SGD())
    dense = jax.grad(loss)(params)
    assert_close("table", new, weights - 0.5 * dense.pop("weights"))
    for name, gradient in gradients.items():
        assert_close(name, gradient, dense[name])


WRONG = {
    "channels": ({"groups": 3}, ValueError, "groups is int 3; it must divide the number of detectors, 4"),
    "detectors": (
        {"groups": 4, "images": np.ones((5, 4, 2), np.float32)},
        ValueError,
        "groups is int 4; it must divide the number of channels, 2",
    ),
    "vector": (
        {"images": np.ones((5, 4), np.float32)},
        ValueError,
        r"images is float32\[5, 4\]; expected shape",
    ),
    "integers": ({"images": np.ones((5, 4, 2), np.uint8)}, TypeError, r"images is uint8\[5, 4, 2\]"),
    "kernel": ({"kernel": (6, 2)}, ValueError, r"kernel is \(6, 2\), larger than an image of 5 by 4\."),
    "padding": ({"padding": 2}, ValueError, "padding is 2 and kernel is 2, so a window could lie outside"),
    "stride": ({"stride": 0}, ValueError, "stride is 0; it must be at least 1"),
    "table": (
        {"weights": np.ones((4, 4, 2), np.float32)},
        ValueError,
        r"weights is float32\[4, 4, 2\]; anchors has 3",
    ),
    "read": ({"read": "soft"}, TypeError, "read is str 'soft'; expected one of lutjax.reads"),
    "no_scalars": (
        {"read": reads.Confidence()},
        ValueError,
        r"scalars is NoneType None; Confidence.* needs \['log_",
    ),
    "scalars": (
        {"scalars": {}},
        ValueError,
        "scalars is dict {}; they are those of a read, and read is None",
    ),
    "epsilon": (
        {"read": reads.Hard(), "epsilon": 0.5},
        ValueError,
        "epsilon is float 0.5; read is Hard.*, whose scores have no dead zone",
    ),
    "no_comparison": (
        {
            "read": reads.Hard(),
            "anchors": np.zeros((4, 0, 2), np.int32),
            "weights": np.ones((4, 1, 2), np.float32),
        },
        ValueError,
        "read is Hard .*; a score needs at least one comparison",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("without_typechecking")
def test_wrong_arguments(name):
    changes, error, message = WRONG[name]
    images, weights, anchors = arguments((5, 4, 2), (2, 2), 1)
    given = {"images": images, "weights": weights, "anchors": anchors, "kernel": 2} | changes
    with pytest.raises(error, match=f"^conv_lut: {message}"):
        lutjax.conv_lut(**given)


# ------------------------------------------------------------------------------------- the layer
TABLES = {"n_detectors": 4, "n_anchors": 3}
CASES = {
    "conv": Case("ConvLUT", {**TABLES, "kernel": 3, "padding": 1, "stride": (2, 1)}, (3, 5, 4), ((5, 4), 6)),
    "channels": Case(
        "ConvLUT",
        {**TABLES, "kernel": (2, 3), "groups": 2, "pool": (2, 1), "read": reads.Confidence()},
        (2, 3, 6, 5, 4),
        ((6, 5, 4), 6),
    ),
    "all": Case("ConvLUT", {**TABLES, "kernel": 2, "pool": "all", "epsilon": 0.5}, (5, 6, 2), ((5, 6, 2), 3)),
}
SHAPES = {"conv": (3, 4, 6), "channels": (2, 3, 6), "all": (3,)}


def variables_of(case: Case) -> dict[str, Any]:
    arrays = {}
    for i, v in enumerate(case.spec.variables()):
        key = jax.random.key(10 + i)
        arrays[v.name] = jax.random.normal(key, v.shape, v.dtype) if v.kind == "tables" else v.init(key)
    return arrays


@pytest.mark.parametrize("name", ["conv", slow("channels")])
def test_variables_drawn(name):
    """Detectors compare values of the window of their group."""
    case = CASES[name]
    n_values = {"conv": 9, "channels": 2 * 3 * 2}[name]
    for arrays in assert_drawn(case, inputs_of(case)):
        assert not np.any(arrays["weights"])
        ids = np.asarray(arrays["anchors"])
        assert ids.min() >= 0
        assert n_values / 2 < ids.max() < n_values


@pytest.mark.parametrize(("name", "block"), [("all", (4, 5)), slow("conv", (1, 1)), slow("channels", (2, 1))])
def test_layers_are_convolutions(name, block):
    """Images without channels, averages of blocks of places, and of all places."""
    case = CASES[name]
    arrays, x = variables_of(case), inputs_of(case)
    images = np.asarray(x.reshape(-1, *(*case.sizes[0], 1)[:3]))
    o = {"stride": 1, "padding": 0, "groups": 1, "epsilon": 0.0} | case.options
    pairs = [(v, v) if isinstance(v, int) else v for v in (o["kernel"], o["stride"], o["padding"])]
    weights, anchors = (np.asarray(arrays[n]) for n in ("weights", "anchors"))
    if "read" in o:
        scalars = {n: arrays[n] for n in o["read"].initial()}
        f = functools.partial(lutjax.reference.conv_lut, kernel=pairs[0], groups=2, read=o["read"])
        every = np.asarray(jax.jit(f)(images, weights, anchors, scalars), np.float64)
    else:
        every = by_loops(images, weights, anchors, *pairs, o["groups"], o["epsilon"])
    n, rows, columns, outputs = every.shape
    down, across = rows // block[0], columns // block[1]
    want = np.zeros((n, down, across, outputs), np.float32)
    for i, j in itertools.product(range(down), range(across)):
        part = every[:, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        want[:, i, j] = part.mean((1, 2))
    got = nnx.jit(lambda layer, x: layer(x))(nnx_layer(case, arrays), x)
    assert got.shape == (*case.shape[: len(case.shape) - len(case.sizes[0])], *SHAPES[name])
    assert_close(name, np.asarray(got).reshape(want.shape), want)


def test_averages_are_made_in_float32():
    """The sum of 2048 and fifteen ones: bfloat16 has no number between 2048 and 2064."""
    y = jnp.asarray([2048.0] + [1.0] * 15, jnp.bfloat16).reshape(4, 4, 1)
    assert _images._averaged(y, (4, 4)).ravel().tolist() == [129.0]


@pytest.mark.slow
def test_layers_are_values():
    """Sizes follow the arrays, options are attributes, and lists of sizes are tuples."""
    layer = nnx_layer(CASES["channels"])
    assert (layer.in_shape, layer.kernel, layer.pool, layer.out_channels) == ((6, 5, 4), (2, 3), (2, 1), 6)
    made = layers.ConvLUT((6, 5, 4), 6, **CASES["channels"].options | {"kernel": [2, 3]}, rngs=nnx.Rngs(0))
    assert hash(made.spec) == hash(layer.spec)
    linen.ConvLUT(*CASES["channels"].sizes, **CASES["channels"].options).__hash__()
    layer.weights = layer.weights[...][::2]
    with pytest.raises(ValueError, match="ConvLUT: anchors has shape"):
        layer.check()
    layer.anchors = layer.anchors[...][::2]
    layer.check()
    assert (layer.n_detectors, layer(inputs_of(CASES["channels"])).shape) == (2, (2, 3, 2, 3, 6))
    assert options_of(linen.ConvLUT) == options_of(_images.ConvLUTSpec)


def test_tables_of_a_layer_are_for_images_of_any_size():
    layer = nnx_layer(CASES["conv"], variables_of(CASES["conv"]))
    arrays = {name: getattr(layer, name).get_value() for name in ("weights", "anchors")}
    large = jax.random.normal(KEY, (2, 9, 7, 1))
    y = lutjax.conv_lut(large, **arrays, kernel=3, padding=1)
    part = lutjax.conv_lut(large[:, 2:7, 1:5], **arrays, kernel=3)
    np.testing.assert_array_equal(y[:, 3:6, 2:4], part)


def test_picture_of_a_window():
    """A detector is drawn in its window, those of a second group of channels below the others."""
    layer = nnx_layer(CASES["channels"])
    figure = wiring.show(layer, groups=[0, 3])
    images = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    assert [image.shape for image in images] == [(4, 3)] * 3
    pixels = [np.unique(np.asarray(layer.anchors[...][t]) // 2) for t in (0, 3)]
    assert np.flatnonzero(images[0]).tolist() == pixels[0].tolist()
    assert np.flatnonzero(images[1]).tolist() == (6 + pixels[1]).tolist()


@pytest.mark.slow
def test_layer_learns():
    """A convolution and the average of all places: which images have a horizontal edge, wherever it is."""
    noise, at = np.random.default_rng(0).normal(size=(128, 8, 8)), np.random.default_rng(1)
    labels = np.arange(128) % 2
    images = 0.1 * noise
    for image, label in zip(images, labels, strict=True):
        row, column = at.integers(0, 5, 2)
        patch = np.outer([1, 1, -1, -1], [1, 1, 1, 1])
        image[row : row + 4, column : column + 4] += patch if label else patch.T
    x, y = jnp.asarray(images, jnp.float32), jnp.asarray(labels)
    layer = layers.ConvLUT((8, 8), 2, kernel=3, n_detectors=16, n_anchors=4, pool="all", rngs=nnx.Rngs(0))
    anchors = np.asarray(layer.anchors[...])
    optimizer = nnx.Optimizer(layer, optax.sgd(3.0), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        def loss(layer):
            return optax.softmax_cross_entropy_with_integer_labels(layer(x[:96]), y[:96]).mean()

        value, gradient = nnx.value_and_grad(loss)(layer)
        optimizer.update(layer, gradient)
        return value

    for _ in range(60):
        step(layer, optimizer)
    assert (layer(x[96:]).argmax(-1) == y[96:]).mean() > 0.9
    np.testing.assert_array_equal(layer.anchors[...], anchors)


REFUSED = {
    "one_value": ({"kernel": 1}, r"kernel is 1 and in_shape is \(5, 6\), so a window has one value"),
    "kernel": ({"kernel": (2, 7)}, r"kernel is \(2, 7\), larger than an image of 5 by 6"),
    "padding": ({"padding": 3}, "padding is 3 and kernel is 3"),
    "stride": ({"stride": (0, 1)}, r"stride is \(0, 1\); it must be at least 1"),
    "groups": ({"groups": 0}, "groups is 0; it must be at least 1"),
    "channels": ({"groups": 2}, r"groups is 2; it must divide the channels of in_shape \(5, 6\), 1"),
    "pool": ({"pool": (4, 1)}, r"pool is \(4, 1\), larger than the 3 by 4 places of the window"),
    "pool_name": ({"pool": "max"}, "pool is 'max'; expected rows and columns of places"),
    "pool_sizes": ({"pool": (1, 2, 3)}, r"pool is \(1, 2, 3\); expected a whole number, or two"),
    "detectors": ({"n_detectors": 0}, "n_detectors is 0; it must be at least 1"),
    "read": ({"read": "soft"}, "read is 'soft'; expected one of lutjax.reads"),
    "dead_zone": ({"read": reads.Hard(), "epsilon": 0.5}, "epsilon is 0.5 and read is Hard"),
    "anchors": ({"anchors": np.full((4, 3, 2), 9)}, "anchors holds ids from 9 to 9; inputs are 0 to 8"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("without_typechecking")
def test_impossible_layers(name):
    changes, message = REFUSED[name]
    options = {**TABLES, "kernel": 3, **changes}
    assert_refused(Case("ConvLUT", options, (5, 6), ((5, 6), 4)), f"ConvLUT: {message}")


@pytest.mark.usefixtures("without_typechecking")
def test_wrong_calls():
    layer = nnx_layer(CASES["channels"])
    for shape in ((6, 5), (6, 5, 3), (5, 6, 4)):
        with pytest.raises(ValueError, match=r"ConvLUT: x has shape .*; expected \[\.\.\., 6, 5, 4\]"):
            layer(jnp.zeros(shape))
    with pytest.raises(TypeError, match=r"^ConvLUT: conv_lut: images is uint8"):
        layer(jnp.zeros((6, 5, 4), jnp.uint8))

"""Images: builder geometry compared with pixel loops, pictures, and image layers."""

import itertools
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from folders import GOLDEN

from lutjax import reads, wiring
from lutjax.layers import nnx as layers

KEY = np.zeros(2, np.uint32)  # the bits of jax.random.key(0)


def places_of(n: int, kernel: int, stride: int, padding: int) -> list[int]:
    return [p for p in range(-padding, n + padding - kernel + 1) if (p + padding) % stride == 0]


def windows_by_loops(shape, kernel, stride, padding):
    height, width, channels = (*shape, 1)[:3]
    rows, columns = (
        places_of(*sizes) for sizes in zip((height, width), kernel, stride, padding, strict=True)
    )
    windows = []
    for top, left in itertools.product(rows, columns):
        ids = []
        for row, column, channel in itertools.product(
            range(kernel[0]), range(kernel[1]), range(channels)
        ):
            r, c = top + row, left + column
            inside = 0 <= r < height and 0 <= c < width
            ids.append((r * width + c) * channels + channel if inside else -1)
        windows.append(ids)
    return np.array(windows).reshape(len(rows), len(columns), -1)


WINDOWS = [
    ((5, 7), (3, 2), (1, 1), (0, 0)),
    ((7, 5, 3), (2, 3), (3, 4), (0, 0)),  # strides beyond the window
    ((5, 3, 2), (3, 3), (2, 1), (1, 2)),
    ((1, 9), (1, 4), (1, 2), (0, 3)),
    ((4, 4), (4, 4), (9, 9), (0, 0)),
    ((2, 3), (5, 4), (1, 1), (2, 1)),  # larger than the image, not than the padded one
]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), WINDOWS)
def test_windows(shape, kernel, stride, padding):
    want = windows_by_loops(shape, kernel, stride, padding)
    got = wiring.windows(shape, kernel, stride, padding=padding)
    assert (got.dtype, got.tolist()) == (np.int32, want.tolist())
    c = wiring.window_groups(shape, kernel, stride, padding=padding, outputs=2)
    assert (c.in_shape, c.out_shape) == (shape, (*want.shape[:2], 2))
    for g, ids in enumerate(want.reshape(c.n_groups, -1)):
        used = c.candidates[g][c.candidates[g] >= 0]
        assert used.tolist() == [i for i in ids if i >= 0]
        assert (c.candidates[g][len(used) :] == -1).all()
        assert c.targets[g].tolist() == [2 * g, 2 * g + 1]
    assert c.candidates.shape[1] == (want >= 0).sum(-1).max(), "no slot is unused by all"
    rows, columns = (places_of(*s) for s in zip(shape[:2], kernel, stride, padding, strict=True))
    middles = [
        [r + (kernel[0] - 1) / 2, c + (kernel[1] - 1) / 2]
        for r, c in itertools.product(rows, columns)
    ]
    assert c.centers.tolist() == middles


def test_one_number_is_for_both_axes():
    np.testing.assert_array_equal(
        wiring.windows((7, 6), 3, 2, padding=1),
        wiring.windows((7, 6), (3, 3), (2, 2), padding=(1, 1)),
    )
    kept = wiring.projections(None, (7, 6), (3, 4), groups=2, receptive=3, projective=2)
    assert kept == wiring.projections(
        None, (7, 6), (3, 4), groups=(2, 2), receptive=(3, 3), projective=(2, 2)
    )


def values_near(point, size, shape, mask):
    """Ids of the values around a point, pixel by pixel in exact arithmetic."""
    height, width, channels = (*shape, 1)[:3]
    if size is None:
        size, point = (
            (2 * height + 1, 2 * width + 1),
            (Fraction(height - 1, 2), Fraction(width - 1, 2)),
        )
    ids = []
    for row, column in itertools.product(range(height), range(width)):
        near = all(
            abs(a - p) <= Fraction(s - 1, 2)
            for a, p, s in zip((row, column), point, size, strict=True)
        )
        if near and (mask is None or mask[row, column]):
            ids += [(row * width + column) * channels + c for c in range(channels)]
    return ids


def assert_projected(c, receptive, projective, input_mask=None, output_mask=None):
    """Each group has its candidates and targets around its center, the center of a whole window."""
    for g, center in enumerate(c.centers.tolist()):
        exact = [Fraction(a) for a in center]
        size = c.in_shape[:2] if receptive is None else receptive
        for a, s, n in zip(exact, size, c.in_shape, strict=False):
            first = a - Fraction(s - 1, 2)
            assert first.denominator == 1
            assert 0 <= first <= n - s
        read = values_near(exact, receptive, c.in_shape, input_mask)
        point = [
            a * Fraction(o, i) for a, i, o in zip(exact, c.in_shape, c.out_shape, strict=False)
        ]
        reached = values_near(point, projective, c.out_shape, output_mask)
        assert c.candidates[g][c.candidates[g] >= 0].tolist() == read
        assert c.targets[g][c.targets[g] >= 0].tolist() == reached
    for ids in (c.candidates, c.targets):
        assert ids.dtype == np.int32
        used = ids >= 0
        assert (np.sort(~used, 1) == ~used).all(), "unused slots come last"
        assert used.sum(1).max() == ids.shape[1]


PROJECTIONS = {
    "growing": ((8, 8), (10, 12), {"groups": (3, 3)}, (3, 3), (4, 4)),
    "odd": ((7, 5, 2), (3, 9), {"groups": (2, 4)}, (4, 1), (2, 5)),
    "shrinking": ((9, 11), (4, 3, 2), {"groups": (5, 1)}, (2, 5), (3, 2)),
    "all_inputs": ((3, 4), (7, 6), {"groups": (2, 2)}, None, (3, 2)),
    "all_outputs": ((6, 7), (3, 2), {"groups": 2}, (6, 3), None),
    "uniform": ((9, 6), (5, 7), {"groups": 40, "centers": "uniform"}, (3, 4), (2, 3)),
    "normal": ((9, 6), (5, 7), {"groups": (4, 5), "centers": "normal", "deviation": 0.5}, (2, 5),
        (3, 3)),
    "own": ((9, 6), (5, 7), {"centers": [[-3, 2.5], [4.2, 99]]}, (3, 2), (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections(name):
    in_shape, out_shape, options, receptive, projective = PROJECTIONS[name]
    sizes = {"receptive": receptive, "projective": projective}
    c = wiring.projections(KEY, in_shape, out_shape, **options, **sizes)
    assert (c.in_shape, c.out_shape) == (in_shape, out_shape)
    assert_projected(c, receptive, projective)


def test_masks_and_probability():
    draw = np.random.default_rng(3)
    masks = {"input_mask": draw.random((8, 8)) < 0.6, "output_mask": draw.random((10, 12)) < 0.5}
    sizes = {"groups": (3, 3), "receptive": (5, 4), "projective": (5, 6)}
    c = wiring.projections(KEY, (8, 8), (10, 12), **sizes, **masks)
    assert_projected(c, (5, 4), (5, 6), **masks)
    sizes = ((40, 40), (40, 40, 2)), {"groups": 20, "receptive": 5, "projective": 7}

    def drawn(key, **options):
        return wiring.projections(key, *sizes[0], **sizes[1], **options)

    dense, some = drawn(None), drawn(KEY, probability=0.3)
    n_all, n_some = ((c.targets >= 0).sum() for c in (dense, some))
    assert abs(n_some / n_all - 0.3) < 5 * (0.3 * 0.7 / n_all) ** 0.5
    for kept, possible in zip(some.targets, dense.targets, strict=True):
        assert set(kept[kept >= 0]) <= set(possible)
    assert some == drawn(KEY, probability=0.3)
    assert some != drawn(jax.random.key(1), probability=0.3)


def test_centers():
    def centers(**options):
        return wiring.projections(
            KEY, (21, 41), (21, 41), receptive=(5, 9), projective=1, **options
        ).centers

    grid = centers(groups=(3, 5)).reshape(3, 5, 2)
    assert grid[:, 0, 0].tolist() == [2, 10, 18]
    assert grid[0, :, 1].tolist() == [4, 12, 20, 28, 36]
    assert centers(groups=1).tolist() == [[10, 20]]
    for name, inner in (("uniform", 0.25), ("normal", 0.47)):
        drawn = centers(groups=800, centers=name)
        assert drawn.min(0).tolist() == [2, 4]
        assert drawn.max(0).tolist() == [18, 36]
        near = (np.abs(drawn - [10, 20]) < [21 / 4, 41 / 4]).all(1).mean()
        assert abs(near - inner) < 0.09
        at_border = (drawn[:, 1] == 4).mean()
        assert abs(at_border - {"uniform": 4.5 / 41, "normal": 0.065}[name]) < 0.05


def test_recorded_windows():
    with np.load(GOLDEN / "ext_projection_grid.npz") as z:
        at = list(itertools.product((1, 3, 5), (1, 3, 5)))
        shapes, sizes = (
            [tuple(z[n].tolist()) for n in ("input_shape", "output_shape")],
            z["receptive"].tolist(),
        )
        c = wiring.projections(None, *shapes, centers=at, receptive=sizes, projective=4)
        for t, pairs in enumerate(z["anchors"]):
            assert set(pairs.ravel().tolist()) <= set(c.candidates[t // 2].tolist())


def connectivity(shape=(2, 2), candidates=((0, 1),), targets=((0,),)):
    return wiring.Connectivity(shape, (3,), [[0, 0]], candidates, targets)


IMPOSSIBLE = {
    "kernel": (lambda: wiring.windows((5, 4), (3, 5)),
        r"kernel is \(3, 5\), larger than .* 5 by 4\."),
    "padded": (lambda: wiring.windows((2, 2), 5, padding=1),
        "kernel is 5, .* of 2 by 2 with padding 1"),
    "padding": (lambda: wiring.windows((5, 5), 2, padding=2),
        "padding is 2 and kernel is 2; .* outside"),
    "stride": (lambda: wiring.windows((5, 5), 2, (1, 0)),
        r"stride is \(1, 0\); it must be at least 1"),
    "sizes": (lambda: wiring.windows((5, 5), (2, 2, 2)),
        r"kernel is \(2, 2, 2\); expected an integer"),
    "fraction": (lambda: wiring.windows((5, 5), 1.5), r"kernel is 1\.5; expected an integer"),
    "image": (lambda: wiring.windows((5,), 1),
        r"image_shape is \(5,\); expected \(height, width\)"),
    "outputs": (lambda: wiring.window_groups((5, 5), 2, outputs=0), "window_groups: outputs is 0"),
    "empty_map": (lambda: wiring.full((3, 0), 2), r"full: in_shape is \(3, 0\); expected"),
    "receptive": ({"receptive": (3, 9)},
        r"receptive is \(3, 9\), larger than the input map, 8 by 8"),
    "projective": ({"projective": 0}, "projective is 0; it must be at least 1"),
    "no_groups": ({"groups": None}, "groups is None; give their number"),
    "groups": ({"groups": 0, "centers": "uniform"}, "groups is 0; it must be at least 1"),
    "two_counts": ({"centers": [[1, 1]]}, "groups is 2, but the number of centers"),
    "centers": ({"centers": "corners"}, "centers is 'corners'; expected one of"),
    "points": ({"centers": [1.0, 2.0], "groups": None},
        r"centers has shape \[2\]; expected finite numbers"),
    "deviation": ({"centers": "normal", "deviation": 0.0},
        r"deviation is 0\.0; it must be positive"),
    "probability": ({"probability": 0}, "probability is 0; it must be above 0"),
    "no_key": ({"key": None, "centers": "uniform"}, "key is None, but centers is 'uniform'"),
    "no_key_of_targets": ({"key": None, "probability": 0.5}, "key is None, but probability is 0.5"),
    "mask": ({"input_mask": np.ones((8, 9), bool)},
        r"input_mask is bool\[8, 9\]; expected bool \[8, 8\]"),
    "numbers": ({"output_mask": np.ones((4, 4))}, r"output_mask is float64\[4, 4\]; expected bool"),
    "one_input": ({"receptive": (1, 1)},
        r"group 0, .* at \(0, 0\), has too few inputs, 1; .* larger"),
    "no_output": ({"projective": 1, "receptive": (2, 4)},
        r"group 0 .* no output: .* \(0\.25, 0\.75\)"),
    "all_masked": ({"output_mask": np.zeros((4, 4), bool)}, "group 0 reaches no output"),
    "ids": (lambda: connectivity(candidates=[[0, 4]]),
        "candidates holds ids from 0 to 4; inputs are 0 to 3"),
    "targets": (lambda: connectivity(targets=[[-2]]),
        "targets holds ids from -2 to -2; outputs are 0 to 2"),
    "lists": (lambda: connectivity(candidates=[[0, 1], [1, 2]]),
        r"shapes \[1, 2\], \[2, 2\], \[1, 1\];"),
    "floats": (lambda: connectivity(candidates=[[0.0, 1.0]]),
        r"candidates is float64\[1, 2\]; expected int32"),
    "own_group": (lambda: connectivity(candidates=[[0, -1]]).sample_anchors(KEY, 2, 3),
        "Connectivity: group 0, .* has too few inputs, 1;"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.usefixtures("without_typechecking")
def test_impossible_geometry(name):
    make, message = IMPOSSIBLE[name]
    if isinstance(make, dict):
        options = {"key": KEY, "groups": 2, "receptive": 3, "projective": 2} | make

        def make():
            return wiring.projections(options.pop("key"), (8, 8), (4, 4), **options)

    with pytest.raises(ValueError, match=message):
        make()


def test_inside_of_a_program():
    def targets(key):
        options = {"groups": 3, "receptive": 2, "centers": "normal", "probability": 0.5}
        return jnp.asarray(wiring.projections(key, (4, 4), (2, 2), **options).targets)

    np.testing.assert_array_equal(jax.jit(lambda: targets(KEY))(), targets(KEY))
    with pytest.raises(ValueError, match="key is traced; connectivity must be known"):
        jax.jit(targets)(KEY)


FIELDS = wiring.projections(
    None, (5, 6), (4, 3), groups=(2, 3), receptive=(3, 4), projective=(4, 3)
)


def test_connectivity_is_a_value():
    same = pickle.loads(pickle.dumps(FIELDS))
    other = wiring.projections(
        None, (5, 6), (4, 3), groups=(2, 3), receptive=(3, 3), projective=(4, 3)
    )
    assert same is not FIELDS
    assert (same == FIELDS, hash(same) == hash(FIELDS)) == (True, True)
    assert (other == FIELDS, FIELDS == 3) == (False, False)
    for c in (FIELDS, same):
        with pytest.raises(ValueError, match="read-only"):
            c.targets[0, 0] = 1
    assert repr(FIELDS) == "Connectivity((5, 6) to (4, 3), groups=6, inputs=12, outputs=6)"


@pytest.mark.parametrize("distinct", [False, True])
def test_anchors_are_candidates_of_their_group(distinct):
    mask = np.ones((5, 6), bool)
    mask[1, 1:3] = False
    c = wiring.projections(
        None, (5, 6), (4, 3), groups=2, receptive=3, projective=3, input_mask=mask
    )
    anchors = np.asarray(c.sample_anchors(KEY, n_detectors=3, n_anchors=20, distinct=distinct))
    assert anchors.shape == (12, 20, 2)
    assert (anchors[..., 0] != anchors[..., 1]).all()
    for g, of_group in enumerate(anchors.reshape(4, -1)):
        assert set(of_group) == set(c.candidates[g][c.candidates[g] >= 0])


def drawn_images(figure):
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def lines_of(axes):
    return {
        tuple(map(tuple, np.transpose(line.get_data()).astype(int).tolist())) for line in axes.lines
    }


def test_picture_of_a_layer():
    layer = layers.SpatialLUT(FIELDS, n_detectors=2, n_anchors=2, rngs=nnx.Rngs(0))
    figure = wiring.show(layer, groups=[1, 4])
    images = drawn_images(figure)
    assert len(images) == 6
    for ids, shape, row in (
        (FIELDS.candidates, (5, 6), images[:3]),
        (FIELDS.targets, (4, 3), images[3:]),
    ):
        fields = [np.isin(np.arange(np.prod(shape)), of_group).reshape(shape) for of_group in ids]
        for image, g in zip(row, (1, 4), strict=False):
            np.testing.assert_array_equal(image, fields[g])
        np.testing.assert_array_equal(row[2], sum(f.astype(int) for f in fields))
    pairs = np.asarray(layer.anchors[...])[2:4].reshape(-1, 2)
    want = {tuple((int(i) % 6, int(i) // 6) for i in pair) for pair in pairs}
    assert want <= lines_of(figure.axes[0])
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    names = ("group 1", "group 4", "groups that")
    assert titles == [
        *(f"{n} {verb}" for n, verb in zip(names, ("reads", "reads", "read a pixel"), strict=True)),
        *(
            f"{n} {verb}"
            for n, verb in zip(names, ("reaches", "reaches", "reach a pixel"), strict=True)
        ),
    ]


@pytest.mark.slow
def test_pictures_of_ids(tmp_path):
    sizes = {"n_detectors": 4, "n_anchors": 2, "groups": 2, "n_targets": 2, "targets_per": "table"}
    layer = layers.SparseLUT(24, 12, **sizes, rngs=nnx.Rngs(0))
    figure = wiring.show(layer, in_shape=(3, 4, 2), out_shape=(3, 4), groups=4)
    images, anchors, targets = drawn_images(figure), layer.anchors[...], layer.targets[...]
    of_group = np.asarray(anchors[3]).ravel() + 12  # ids of the second group
    want = np.isin(np.arange(24), of_group).reshape(3, 4, 2).mean(-1)
    np.testing.assert_array_equal(images[3], want)
    np.testing.assert_array_equal(
        images[8].ravel(), np.isin(np.arange(12), np.asarray(targets[3]) + 6)
    )
    variables = {"anchors": {"anchors": anchors}, "params": {"weights": layer.weights[...]}}
    assert len(drawn_images(wiring.show(variables, in_shape=(3, 4), groups=2))) == 3
    assert drawn_images(wiring.show(np.asarray(anchors)))[0].shape == (1, int(anchors.max()) + 1)
    gates = layers.LogicGates(12, 5, rngs=nnx.Rngs(0))
    drawn = drawn_images(wiring.show(gates, in_shape=(3, 4), groups=3))[3]
    np.testing.assert_array_equal(
        drawn.ravel(), np.bincount(np.ravel(gates.wires[...]), minlength=12)
    )
    spatial = {
        "anchors": FIELDS.sample_anchors(KEY, 2, 3),
        "targets": jnp.asarray(FIELDS.targets)[:, None],
    }
    images = drawn_images(wiring.show(spatial, in_shape=(5, 6), out_shape=(4, 3), groups=[7]))
    np.testing.assert_array_equal(images[2].ravel(), np.isin(np.arange(12), FIELDS.targets[3]))
    windows = wiring.windows((4, 4), 2, padding=1).reshape(25, -1)
    figure = wiring.show(windows, in_shape=(4, 4))
    assert drawn_images(figure)[-1].sum() == (windows >= 0).sum()
    figure.savefig(tmp_path / "windows.png")
    assert (tmp_path / "windows.png").read_bytes().startswith(b"\x89PNG")
    for source, options, message in (
        (
            layer,
            {"in_shape": (5, 5)},
            "in_shape is .5, 5., a map of 25 values; there are 24 inputs",
        ),
        (layer, {"groups": [9]}, r"groups is \[9\]; there are 4 detectors, from 0 to 3"),
        (FIELDS, {"in_shape": (5, 6)}, "in_shape and out_shape are those of the connectivity"),
        ({"weights": np.ones(3)}, {}, "neither anchors nor wires"),
        (np.ones((2, 2)), {}, r"source is float64\[2, 2\]; expected a Connectivity"),
    ):
        with pytest.raises(ValueError, match=message):
            wiring.show(source, **options)


def test_groups_are_added_in_float32():
    """Groups with one output: bfloat16 has no number between 256 and 258."""
    c = wiring.Connectivity((1, 2), (1,), [[0, 0]] * 9, [[0, 1]] * 9, [[0]] * 9)
    options = {"n_detectors": 1, "n_anchors": 1, "read": reads.Hard(), "param_dtype": jnp.bfloat16}
    layer = layers.SpatialLUT(c, **options, rngs=nnx.Rngs(0))
    layer.weights = (jnp.asarray([256.0] + [1.0] * 8)[:, None, None] * jnp.ones((9, 2, 1))).astype(
        jnp.bfloat16
    )
    y = layer(jnp.asarray([[2.0, 1.0]]))
    assert (y.dtype, y.tolist()) == (jnp.bfloat16, [264.0])

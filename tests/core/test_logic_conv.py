"""Trees of gates over images: against loops over pixels, with gradients, memory and the packed form."""

import itertools
import math
import re
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_except
from flax import nnx
from layer_libraries import Case, assert_drawn, assert_libraries_agree, assert_refused, by_kind, nnx_layer

import lutjax
from lutjax import wiring
from lutjax.layers import haiku as lutjax_haiku, linen
from lutjax.ops.logic_trees import _readers_of_image, _wires_of_image, first_maximum

NORMAL = jax.nn.initializers.normal(1.0)
# Name: height, width and channels of the image, kernels, options.
GEOMETRIES: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "plain": ((5, 4, 2), 3, {"kernel": 2, "depth": 2}),
    "rectangular": ((7, 5, 1), 2, {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "pool": (1, 2)}),
    "strides_beyond_the_window": ((9, 8, 2), 2, {"kernel": (2, 3), "stride": (3, 4), "depth": 1}),
    "pools": ((6, 6, 1), 2, {"kernel": 3, "padding": 1, "pool": (2, 3), "depth": 2}),
    "padded_pools": ((5, 7, 2), 2, {"kernel": (3, 2), "pool": (3, 2), "pool_padding": (0, 1), "depth": 1}),
    "larger_than_the_image": ((1, 3, 2), 3, {"kernel": (3, 4), "padding": (2, 3), "depth": 2}),
    "random_leaves": ((4, 3, 2), 3, {"kernel": 2, "padding": 1, "wiring": "random", "depth": 2}),
    "random_leaves_of_few_channels": (
        (4, 3, 5),
        4,
        {"kernel": 2, "channels_per_kernel": 2, "depth": 2, "wiring": "random"},
    ),
    "few_channels": ((4, 3, 5), 4, {"kernel": 2, "channels_per_kernel": 2, "depth": 2}),
    "tables": ((4, 5, 2), 2, {"kernel": 2, "depth": 2, "n_inputs": 3, "parameterization": "light"}),
    "features_first": ((4, 5, 3), 2, {"kernel": 2, "padding": 1, "feature_axis": 0, "depth": 2}),
}


def case_of(name: str, **options: Any) -> Case:
    in_shape, n_kernels, given = GEOMETRIES[name]
    height, width, channels = in_shape
    shape = (channels, height, width, 3) if given.get("feature_axis") == 0 else (3, *in_shape)
    return Case("LogicConv", {**given, **options}, shape, (in_shape, n_kernels))


_drawn: dict[str, dict[str, jax.Array]] = {}


def arrays_of(case: Case) -> dict[str, jax.Array]:
    """Gates far from where they start, drawn once for each case."""
    arrays = _drawn.setdefault(repr(case), {})
    if arrays:
        return {**arrays}
    for i, v in enumerate(case.spec.variables()):
        if v.kind == "params":
            arrays[v.name] = jnp.asarray(np.random.default_rng(i).normal(size=v.shape), jnp.float32)
        else:
            arrays[v.name] = v.make(lambda: jax.random.key(3), arrays)
    return {**arrays}


def inputs_of(case: Case, bits: bool = False) -> jax.Array:
    x = np.random.default_rng(7).uniform(size=case.shape)
    return jnp.asarray(x > 0.5 if bits else x, jnp.float32)


def channels_last(case: Case, x: Any) -> np.ndarray:
    return (
        np.moveaxis(np.asarray(x), (3, 1, 2, 0), (0, 1, 2, 3))
        if "feature_axis" in case.options
        else np.asarray(x)
    )


def corners_of(arrays: dict[str, jax.Array], hard: bool) -> np.ndarray:
    """Return for each node what it answers at each address, ``[nodes, 2**n]``."""
    if "table" in arrays:
        logits = np.asarray(arrays["table"], np.float64)
        return (logits > 0) * 1.0 if hard else 1 / (1 + np.exp(-logits))
    logits = np.asarray(arrays["logits"], np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if hard:
        shares = np.eye(16)[logits.argmax(1)]
    answers = np.array([[g >> bit & 1 for bit in (3, 1, 2, 0)] for g in range(16)])  # addresses 0, a, b, ab
    return shares @ answers


def interpolated(table: np.ndarray, inputs: list[Any]) -> Any:
    total = 0.0
    for address, answer in enumerate(table):
        share = answer
        for bit, value in enumerate(inputs):
            share = share * (value if address >> bit & 1 else 1 - value)
        total = total + share
    return total


def by_loops(case: Case, arrays: dict[str, jax.Array], x: Any, hard: bool) -> np.ndarray:
    """Return the outputs of the layer, place by place and node by node: ``[batch, rows, columns, kernels]``."""

    def both(name: str, default: int) -> tuple[int, int]:
        size = case.options.get(name, default)
        return size if isinstance(size, tuple) else (size, size)

    (height, width, channels), n_kernels = case.sizes
    kernel, stride, padding = both("kernel", 3), both("stride", 1), both("padding", 0)
    pool, around = both("pool", 1), both("pool_padding", 0)
    n, depth = case.options.get("n_inputs", 2), case.options.get("depth", 3)
    corners, leaves = corners_of(arrays, hard), np.asarray(arrays["wires"]).reshape(n_kernels, -1)
    image = channels_last(case, x).astype(np.float64)

    def value(top: int, left: int, leaf: int) -> Any:
        pixel, channel = divmod(leaf, channels)
        row, column = top + pixel // kernel[1], left + pixel % kernel[1]
        inside = 0 <= row < height and 0 <= column < width
        return image[:, row, column, channel] if inside else np.zeros(len(image))

    def tree(top: int, left: int, k: int) -> Any:
        values, first = [value(top, left, leaf) for leaf in leaves[k]], 0
        for level in range(depth):
            size = n ** (depth - 1 - level)
            own = corners[first + k * size : first + (k + 1) * size]
            values = [interpolated(table, values[n * g : n * g + n]) for g, table in enumerate(own)]
            first += n_kernels * size
        return values[0]

    tops, lefts = (
        range(-p, s + p - k + 1, step)
        for s, k, step, p in zip((height, width), kernel, stride, padding, strict=True)
    )
    places = {
        (i, j): np.stack([tree(top, left, k) for k in range(n_kernels)], -1)
        for (i, top), (j, left) in itertools.product(enumerate(tops), enumerate(lefts))
    }
    rows, columns = (
        range(-p, s + p, step) for s, p, step in zip((len(tops), len(lefts)), around, pool, strict=True)
    )
    return np.stack(
        [
            np.stack(
                [
                    np.max(
                        [
                            places[p]
                            for p in itertools.product(range(i, i + pool[0]), range(j, j + pool[1]))
                            if p in places
                        ],
                        0,
                    )
                    for j in columns
                ],
                1,
            )
            for i in rows
        ],
        1,
    )


FAST = ("rectangular", "padded_pools", "few_channels", "tables", "features_first")


@pytest.mark.parametrize("name", slow_except(GEOMETRIES, "padded_pools", "few_channels", "tables"))
def test_against_loops(name):
    case = case_of(name)
    arrays, soft, bits = arrays_of(case), inputs_of(case), inputs_of(case, bits=True)
    height, width, channels = case.sizes[0]
    first = np.moveaxis(channels_last(case, bits), (3, 1, 2, 0), (0, 1, 2, 3))

    @jax.jit
    def run(arrays, soft, bits, first):
        words = lutjax.pack_bits(first.reshape(-1, 3)).reshape(channels, height, width, 1)
        packed = case.spec.from_words(arrays, words)
        unpacked = lutjax.unpack_bits(packed.reshape(-1, 1), 3).reshape(*packed.shape[:3], 3)
        return case.spec(arrays, soft), case.spec(arrays, bits, deterministic=True), unpacked

    got, hard, unpacked = run(arrays, soft, bits, first)
    want = by_loops(case, arrays, soft, hard=False)
    assert want.shape[1:] == case.spec.out_shape
    np.testing.assert_allclose(channels_last(case, got), want, rtol=2e-5, atol=1e-6)
    want = by_loops(case, arrays, bits, hard=True)
    np.testing.assert_array_equal(channels_last(case, hard), want)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(unpacked), (3, 1, 2, 0), (0, 1, 2, 3)), want)


# ------------------------------------------------------------------------------------- gradients
def with_copies(case: Case, arrays: Any, x: jax.Array) -> jax.Array:
    """Return soft outputs by arrays of all windows, which JAX differentiates by itself; channels last, gates alone."""
    spec = case.spec
    around = [(p, p) for p in spec.geometry[2]]
    x = jnp.pad(x, ((0, 0), *around, (0, 0)))
    windows = wiring.windows(spec.padded, *spec.geometry[:2])
    values = x.reshape(len(x), -1)[:, jnp.asarray(windows)[..., arrays["wires"].reshape(-1)]]
    c0, c1, c2, c3 = lutjax.gate_coefficients(arrays["logits"])[:, None, None, None]
    first = 0
    for n in spec.levels:
        a, b, part = values[..., ::2], values[..., 1::2], slice(first, first + n)
        values = c0[..., part] + c1[..., part] * a + c2[..., part] * b + c3[..., part] * a * b
        first += n
    (height, width), _ = spec.pooling
    rows, columns, kernels = spec.out_shape
    groups = values.reshape(len(x), rows, height, columns, width, kernels).transpose(0, 1, 3, 5, 2, 4)
    groups = groups.reshape(len(x), rows, columns, kernels, -1)
    return jnp.take_along_axis(groups, jnp.argmax(groups, -1)[..., None], -1)[..., 0]


@pytest.mark.parametrize(
    ("name", "bits"),
    slow_except(
        [
            ("rectangular", False),
            ("pools", True),
            slow("plain", False),
            slow("strides_beyond_the_window", False),
            slow("few_channels", False),
            slow("rectangular", True),
        ],
        "pools-True",
    ),
)
def test_gradients(name, bits):
    """Places tie where inputs are bits and gates are sure of themselves."""
    case = case_of(name)
    arrays, x = arrays_of(case), inputs_of(case, bits)
    if bits:
        chosen = np.random.default_rng(2).integers(0, 16, len(arrays["logits"]))
        arrays["logits"] = 200.0 * jax.nn.one_hot(chosen, 16)
    assert "readers" in arrays
    kept = [arrays, {"wires": arrays["wires"]}]
    functions = [lambda trained, x, kept=kept: case.spec({**kept, **trained}, x) for kept in kept]
    functions.append(lambda trained, x: with_copies(case, {**arrays, **trained}, x))
    cotangent = np.random.default_rng(5).normal(size=(3, *case.spec.out_shape)).astype(np.float32)

    @jax.jit
    def gradients(trained, x):
        return [jax.vjp(f, trained, x)[1](cotangent) for f in functions]

    *found, want = gradients({"logits": arrays["logits"]}, x)
    assert np.any(want[1])
    for got in found:
        np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[0]["logits"], want[0]["logits"], rtol=1e-4, atol=1e-5)


def test_readers_are_those_of_all_places():
    cases = [case_of(name) for name in ("rectangular", "strides_beyond_the_window", "tables")]
    given = [arrays_of(case) for case in cases]

    @jax.jit
    def of_images(given):
        return [
            (
                _wires_of_image(case.spec._places, case.spec.in_shape[2], a["wires"]),
                _readers_of_image(case.spec._places, case.spec.in_shape[2], a["readers"], a["wires"]),
            )
            for case, a in zip(cases, given, strict=True)
        ]

    for case, (wires, readers) in zip(cases, of_images(given), strict=True):
        want = np.asarray(lutjax.readers(np.asarray(wires), math.prod(case.spec.padded)))
        for a, b in zip(np.asarray(readers).tolist(), want.tolist(), strict=True):
            assert sorted(i for i in a if i >= 0) == [i for i in b if i >= 0]


def test_first_maximum():
    x = jnp.asarray([[1.0, 1.0, 0.0, jnp.nan], [1.0, 0.0, 0.0, 5.0], [0.0, 2.0, 0.0, 7.0]])
    y, back = jax.vjp(lambda x: first_maximum(list(x)), x)
    np.testing.assert_array_equal(y, [1, 2, 0, jnp.nan])
    np.testing.assert_array_equal(
        back(jnp.asarray([3.0, 4, 5, 6]))[0], [[3, 0, 5, 6], [0, 0, 0, 0], [0, 4, 0, 0]]
    )
    _, along = jax.jvp(lambda x: first_maximum(list(x)), (x,), (jnp.arange(12.0).reshape(3, 4),))
    np.testing.assert_array_equal(along, [0, 9, 2, 3])


def test_pooled_bits_give_the_gradient_to_one_place():
    """All places tie, and padding has no part in it."""
    case = Case(
        "LogicConv", {"kernel": 1, "depth": 1, "pool": 2, "pool_padding": 1}, (1, 2, 2, 1), ((2, 2, 1), 1)
    )
    arrays = {**arrays_of(case), "logits": jnp.zeros((1, 16)).at[0, 3].set(200.0)}
    whole = case._replace(options={"kernel": 1, "depth": 1, "pool": 2})

    @jax.jit
    def slopes(x):
        return [jax.grad(lambda x, spec=c.spec: spec(arrays, x).sum())(x)[0, :, :, 0] for c in (case, whole)]

    for x in (0.0, 1.0):
        padded, alone = slopes(jnp.full((1, 2, 2, 1), x))
        np.testing.assert_array_equal(padded, np.ones((2, 2)))
        np.testing.assert_array_equal(alone, [[1, 0], [0, 0]])


# ------------------------------------------------------------------------------------- memory
def test_no_array_holds_all_windows():
    """The largest array of a compiled training step is what the leaves give, or their wires."""
    case = Case("LogicConv", {"padding": 1, "depth": 2, "feature_axis": 0}, (16, 8, 8, 32), ((8, 8, 16), 8))
    arrays, x = arrays_of(case), inputs_of(case)

    def loss(logits, x):
        return jnp.sum(jnp.sin(case.spec({**arrays, "logits": logits}, x)))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(arrays["logits"], x).compile()
    shapes = re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    windows, places, batch = case.spec.window, 64, 32
    assert windows == 9 * 16
    assert largest < windows * places * batch / 4
    assert largest >= 16 * places * batch  # leaves


# ------------------------------------------------------------------------------------- wires and options
def test_trees_read_some_channels():
    case = Case("LogicConv", {"channels_per_kernel": 2, "kernel": (3, 2)}, (1, 5, 5, 5), ((5, 5, 5), 10))
    spec, arrays = case.spec, arrays_of(case)
    channels = np.asarray(arrays["wires"]).reshape(10, 8) % 5
    assert all(len(set(tree)) == 2 for tree in channels.tolist())
    n_trees = [sum(c in tree for tree in channels.tolist()) for c in range(5)]
    assert n_trees == [4] * 5
    leaves = np.asarray(arrays["wires"]).reshape(10, 8)
    assert all(len(set(tree)) == 8 for tree in leaves.tolist())
    assert set(np.ravel(leaves // 5)) == set(range(6))
    spec.check(arrays)


@pytest.mark.parametrize(
    "options",
    [
        slow({"channels_per_kernel": 2}),
        {"n_inputs": 4, "parameterization": "walsh", "depth": 2},
        {"kernel": 1, "depth": 1},
    ],
)
def test_there_is_room_for_all_readers(options):
    """The width of the list is known before wires are: they may be drawn under jit."""
    for key in range(10):
        spec = Case("LogicConv", options, (1, 5, 5, 5), ((5, 5, 5), 7)).spec
        wires, readers = spec.variables()[:2]
        arrays = {"wires": wires.init(jax.random.key(key))}
        arrays["readers"] = readers.derive(arrays)
        assert arrays["readers"].shape == readers.shape
        spec.check(arrays)


@pytest.mark.slow
def test_libraries_agree_on_tables():
    case = case_of("tables", pool=(3, 2), estimator="straight_through")
    arrays, x = arrays_of(case), inputs_of(case)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(3, *case.spec.out_shape)), jnp.float32)
    assert_libraries_agree(case, arrays, x, cotangent)
    assert_drawn(case_of("few_channels"), inputs_of(case_of("few_channels")))


def test_words_in_all_libraries():
    case = case_of("plain")
    arrays = arrays_of(case)
    words = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (2, 5, 4, 2), dtype=np.uint32))
    want = case.spec.from_words(arrays, words)
    np.testing.assert_array_equal(nnx_layer(case, arrays).from_words(words), want)
    module = linen.LogicConv(*case.sizes, **case.options)
    np.testing.assert_array_equal(module.from_words(by_kind(case, arrays), words), want)
    f = hk.transform_with_state(
        lambda w: lutjax_haiku.LogicConv(*case.sizes, **case.options, name="layer").from_words(w)
    )
    state = {"layer": {name: arrays[name] for name in ("wires", "readers")}}
    got, _ = f.apply({"layer": {"logits": arrays["logits"]}}, state, None, words)
    np.testing.assert_array_equal(got, want)


def test_gumbel_and_views():
    case = case_of("plain", estimator="gumbel")
    layer, x = nnx_layer(case, arrays_of(case)), inputs_of(case, bits=True)
    run = nnx.jit(lambda layer, x: layer(x))
    assert np.any(run(layer, x) != run(layer, x))
    want = jax.jit(lambda x: case.spec(arrays_of(case), x, deterministic=True))(x)
    np.testing.assert_array_equal(run(nnx.view(layer, deterministic=True), x), want)
    with pytest.raises(ValueError, match="LogicConv: estimator is 'gumbel', which needs rngs"):
        case.spec(arrays_of(case), x)


def test_residual_trees_pass_on_their_first_leaf():
    case = case_of("tables")
    layer, x = nnx_layer(case), inputs_of(case, bits=True)
    leaves = np.asarray(layer.wires[...]).reshape(2, -1)[:, 0]
    windows = np.asarray(x).reshape(3, -1)[:, wiring.windows((4, 5, 2), 2)]
    hard = nnx.jit(lambda layer, x: layer(x, deterministic=True))(layer, x)
    np.testing.assert_array_equal(hard, windows[..., leaves])


def test_hard_trees_of_one_window():
    """Node by node, as `lutjax.packed_lut` would run them one after the other."""
    case = Case(
        "LogicConv", {"depth": 2, "n_inputs": 3, "parameterization": "light"}, (1, 3, 3, 1), ((3, 3, 1), 2)
    )
    layer = nnx_layer(case, arrays_of(case))
    wires, tables = layer.truth_tables()
    assert (wires.shape, tables.shape) == ((8, 3), (8, 8))
    images = np.random.default_rng(4).integers(0, 2, (5, 3, 3, 1))
    hard = nnx.jit(lambda layer, x: layer(x, deterministic=True))(layer, images)
    for x, y in zip(images, np.asarray(hard), strict=True):
        values = x.ravel().tolist()
        for ids, table in zip(np.asarray(wires).tolist(), np.asarray(tables).tolist(), strict=True):
            values.append(int(table[sum(values[i] << bit for bit, i in enumerate(ids))]))
        np.testing.assert_array_equal(y[0, 0], values[-2:])
    inputs, any_input = layer.expected_needs()
    assert inputs.shape == any_input.shape == (8,)


def test_fields_can_be_drawn():
    case = Case("LogicConv", {"padding": (1, 0), "depth": 1}, (1, 4, 3, 2), ((4, 3, 2), 2))
    spec, arrays = case.spec, {"wires": np.array([[0, 9], [5, 17]], np.int32)}
    assert spec.connectivity.out_shape == (4, 1, 2)
    # The first row of the window is outside of the image at the first place, and inside at the second.
    assert spec.compared(arrays)[:2].tolist() == [[[3, 3], [11, 11]], [[0, 9], [5, 17]]]
    figure = wiring.show(nnx_layer(case, arrays), groups=[0, 1])
    assert [axes.get_title() for axes in figure.axes[:2]] == ["group 0 reads", "group 1 reads"]


# ------------------------------------------------------------------------------------- bad input
IMPOSSIBLE = {
    "a pool with no place": ({"pool": 2, "pool_padding": 2}, "LogicConv: pool_padding is 2 and pool is 2"),
    "pools of other sizes": (
        {"pool": (1, 2), "pool_padding": (0, 1)},
        r"LogicConv: pool is \(1, 2\), which does not divide the \(3, 1\) places of windows with pool_padding \(0, 1\)",
    ),
    "padding beyond the window": ({"kernel": 2, "padding": 2}, "LogicConv: padding is 2 and kernel is 2"),
    "more channels than there are": (
        {"channels_per_kernel": 3},
        "LogicConv: channels_per_kernel is 3, but the image has 2 channels",
    ),
    "gates of three inputs": ({"n_inputs": 3}, "LogicConv: parameterization is 'gates', .* use 'light'"),
    "large tables": (
        {"n_inputs": 9, "parameterization": "raw"},
        "LogicConv: n_inputs is 9; a table has at most 8",
    ),
    "noise on raw tables": (
        {"estimator": "gumbel", "parameterization": "raw"},
        "LogicConv: parameterization is 'raw', which has no logits",
    ),
    "no levels": ({"depth": 0}, "LogicConv: depth is 0; it must be at least 1"),
    "three sizes": (
        {"kernel": (1, 2, 3)},
        r"LogicConv: kernel is \(1, 2, 3\); expected a whole number, or two",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.usefixtures("without_typechecking")
def test_impossible(name):
    options, message = IMPOSSIBLE[name]
    assert_refused(Case("LogicConv", options, (2, 5, 3, 2), ((5, 3, 2), 3)), message)


@pytest.mark.usefixtures("without_typechecking")
def test_words_of_other_sizes():
    case = case_of("plain")
    with pytest.raises(
        ValueError, match=r"LogicConv: words is uint32\[5, 4, 2, 1\]; expected uint32 \[2, 5, 4, ...\]"
    ):
        case.spec.from_words(arrays_of(case), jnp.zeros((5, 4, 2, 1), jnp.uint32))

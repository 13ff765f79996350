"""Gate trees over images: compared with pixel loops, with gradients, memory and the packed form."""

import math
import re
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_libraries import Case, by_kind, nnx_layer

import lutjax
from lutjax import wiring
from lutjax.layers import haiku as lutjax_haiku, linen
from lutjax.ops.logic_trees import _readers_of_image, _wires_of_image, first_maximum

NORMAL = jax.nn.initializers.normal(1.0)
# Name: height, width and channels of the image, kernels, options.
GEOMETRIES: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "plain": ((5, 4, 2), 3, {"kernel": 2, "depth": 2}),
    "rectangular": (
        (7, 5, 1),
        2,
        {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "pool": (1, 2)},
    ),
    "strides_beyond_the_window": ((9, 8, 2), 2, {"kernel": (2, 3), "stride": (3, 4), "depth": 1}),
    "tables": ((4, 5, 2), 2, {"kernel": 2, "depth": 2, "n_inputs": 3, "parameterization": "light"}),
}


def case_of(name: str, **options: Any) -> Case:
    in_shape, n_kernels, given = GEOMETRIES[name]
    return Case("LogicConv", {**given, **options}, (3, *in_shape), (in_shape, n_kernels))


_drawn: dict[str, dict[str, jax.Array]] = {}


def arrays_of(case: Case) -> dict[str, jax.Array]:
    """Gates far from their initial values, drawn once for each case."""
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


def test_readers_are_those_of_all_places():
    cases = [case_of(name) for name in ("rectangular", "strides_beyond_the_window", "tables")]
    given = [arrays_of(case) for case in cases]

    @jax.jit
    def of_images(given):
        return [
            (
                _wires_of_image(case.spec._positions, case.spec.in_shape[2], a["wires"]),
                _readers_of_image(
                    case.spec._positions, case.spec.in_shape[2], a["readers"], a["wires"]
                ),
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
    case = Case(
        "LogicConv",
        {"kernel": 1, "depth": 1, "pool": 2, "pool_padding": 1},
        (1, 2, 2, 1),
        ((2, 2, 1), 1),
    )
    arrays = {**arrays_of(case), "logits": jnp.zeros((1, 16)).at[0, 3].set(200.0)}
    whole = case._replace(options={"kernel": 1, "depth": 1, "pool": 2})

    @jax.jit
    def slopes(x):
        return [
            jax.grad(lambda x, spec=c.spec: spec(arrays, x).sum())(x)[0, :, :, 0]
            for c in (case, whole)
        ]

    for x in (0.0, 1.0):
        padded, alone = slopes(jnp.full((1, 2, 2, 1), x))
        np.testing.assert_array_equal(padded, np.ones((2, 2)))
        np.testing.assert_array_equal(alone, [[1, 0], [0, 0]])


def test_no_array_holds_all_windows():
    case = Case(
        "LogicConv", {"padding": 1, "depth": 2, "feature_axis": 0}, (16, 8, 8, 32), ((8, 8, 16), 8)
    )
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


def test_trees_read_some_channels():
    case = Case(
        "LogicConv", {"channels_per_kernel": 2, "kernel": (3, 2)}, (1, 5, 5, 5), ((5, 5, 5), 10)
    )
    spec, arrays = case.spec, arrays_of(case)
    channels = np.asarray(arrays["wires"]).reshape(10, 8) % 5
    assert all(len(set(tree)) == 2 for tree in channels.tolist())
    n_trees = [sum(c in tree for tree in channels.tolist()) for c in range(5)]
    assert n_trees == [4] * 5
    leaves = np.asarray(arrays["wires"]).reshape(10, 8)
    assert all(len(set(tree)) == 8 for tree in leaves.tolist())
    assert set(np.ravel(leaves // 5)) == set(range(6))
    spec.check(arrays)


@pytest.mark.parametrize("options", [
    {"channels_per_kernel": 2, "depth": 2},
    {"n_inputs": 4, "parameterization": "walsh", "depth": 2},
    {"kernel": 1, "depth": 1},
])  # fmt: skip
def test_there_is_room_for_all_readers(options):
    """The list width is known before the wires are: they may be drawn under jit."""
    for key in range(4):
        spec = Case("LogicConv", options, (1, 5, 5, 5), ((5, 5, 5), 7)).spec
        wires, readers = spec.variables()[:2]
        arrays = {"wires": wires.init(jax.random.key(key))}
        arrays["readers"] = readers.derive(arrays)
        assert arrays["readers"].shape == readers.shape
        spec.check(arrays)


def test_words_in_all_libraries():
    case = case_of("plain", pool=(2, 1))
    arrays, images = arrays_of(case), np.random.default_rng(0).integers(0, 2, (40, 5, 4, 2))
    bits = np.transpose(images, (3, 1, 2, 0)).reshape(-1, 40)
    words = lutjax.pack_bits(bits).reshape(2, 5, 4, 2)
    want = jax.jit(case.spec.from_words)(arrays, words)
    hard = jax.jit(lambda x: case.spec(arrays, x, deterministic=True))(images.astype(np.float32))
    actual = lutjax.unpack_bits(want.reshape(-1, 2), 40).reshape(*want.shape[:3], 40)
    np.testing.assert_array_equal(np.transpose(actual, (3, 1, 2, 0)), hard)
    np.testing.assert_array_equal(nnx_layer(case, arrays).from_words(words), want)
    module = linen.LogicConv(*case.sizes, **case.options)
    np.testing.assert_array_equal(module.from_words(by_kind(case, arrays), words), want)
    f = hk.transform_with_state(
        lambda w: lutjax_haiku.LogicConv(*case.sizes, **case.options, name="layer").from_words(w)
    )
    state = {"layer": {name: arrays[name] for name in ("wires", "readers")}}
    got, _ = f.apply({"layer": {"logits": arrays["logits"]}}, state, None, words)
    np.testing.assert_array_equal(got, want)
    message = r"LogicConv: words is uint32\[5, 4, 2, 1\]; expected uint32 \[2, 5, 4, ...\]"
    with pytest.raises(ValueError, match=message):
        case.spec.from_words(arrays, jnp.zeros((5, 4, 2, 1), jnp.uint32))


def test_hard_trees_of_one_window():
    case = Case(
        "LogicConv",
        {"depth": 2, "n_inputs": 3, "parameterization": "light"},
        (1, 3, 3, 1),
        ((3, 3, 1), 2),
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
    assert spec.compared_pairs(arrays)[:2].tolist() == [[[3, 3], [11, 11]], [[0, 9], [5, 17]]]
    figure = wiring.show(nnx_layer(case, arrays), groups=[0, 1])
    assert [axes.get_title() for axes in figure.axes[:2]] == ["group 0 reads", "group 1 reads"]

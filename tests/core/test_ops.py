"""Op guarantees beyond the parity suite: errors, special values, laziness, user-provided shapes."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lutjax
from lutjax import testing
from lutjax.cases import Tag
from lutjax.layers import nnx as of_nnx
from lutjax.ops.gate_network import gate_network

ANCHORS = np.array([[[0, 1], [1, 2]], [[2, 0], [0, 1]]], np.int32)
X = np.float32([[0.5, 0.25, 2.0], [1.0, 1.0, -1.0]])


def detection(*shape, bits=2):
    return lutjax.detect_signs(jnp.ones((*shape, bits)))


BAD = {
    "rank of weights": (lambda: lutjax.lookup(jnp.ones((4, 3)), detection(2, 5)), ValueError,
        r"lookup: weights is float32\[4, 3\]; expected shape \[detectors, rows, outputs\]"),
    "rows that do not fit the bits": (
        lambda: lutjax.lookup(jnp.ones((5, 8, 3)), detection(2, 5)),
        ValueError,
        r"lookup: weights is float32\[5, 8, 3\]; detection has 2 bits, so each table must have 2\*\*2 = 4 rows",
    ),
    "detectors": (lambda: lutjax.lookup(jnp.ones((6, 4, 3)), detection(2, 5)), ValueError,
        r"its first axis must have size 5, the number of detectors of detection"),
    "dtype of weights": (lambda: lutjax.lookup(jnp.ones((5, 4, 3), jnp.int32), detection(2, 5)), TypeError,
        r"lookup: weights is int32\[5, 4, 3\]; its dtype must be one of float32, bfloat16, float16, float64"),
    "not a detection": (lambda: lutjax.lookup(jnp.ones((5, 4, 3)), jnp.ones((2, 5))), TypeError,
        r"lookup: detection is float32\[2, 5\]; expected a lutjax.Detection"),
    "a list": (lambda: lutjax.detect([1.0, 2.0], ANCHORS), TypeError,
        r"detect: x is list .*expected a JAX or numpy"),
    "rows that do not fit two detections": (
        lambda: lutjax.lookup_attention(jnp.ones((5, 8, 3)), detection(4, 5), detection(4, 5), None),
        ValueError, r"a query with its key has 4 bits, so each table must have 2\*\*4 = 16 rows"),
    "text as a factor": (lambda: lutjax.scale_gradient(X, "2"), TypeError,
        r"scale_gradient: factor is str '2'; expected a number"),
    "a number to count in": (lambda: lutjax.usage(3), TypeError,
        r"usage: function is 3; expected a function or a model"),
    "float anchors": (lambda: lutjax.detect(X, ANCHORS.astype(jnp.float32)), TypeError,
        r"detect: anchors is float32\[2, 2, 2\]; its dtype must be int32"),
    "triples of anchors": (lambda: lutjax.detect(X, jnp.zeros((2, 2, 3), jnp.int32)), ValueError,
        r"its last axis must have size 2, the inputs of a pair"),
    "no inputs": (lambda: lutjax.detect(jnp.ones((2, 0)), ANCHORS), ValueError,
        r"detectors need at least 2 inputs"),
    "epsilon": (lambda: lutjax.detect(X, ANCHORS, epsilon=-1.0), ValueError, r"epsilon is float -1.0"),
    "parts of a detection": (
        lambda: lutjax.lookup(
            jnp.ones((5, 4, 3)),
            lutjax.Detection(jnp.zeros((2, 5), int), jnp.zeros((1, 5), int), jnp.ones((2, 5)), 2),
        ),
        ValueError,
        r"the three must have the same shape",
    ),
    "margin of a detection": (
        lambda: lutjax.lookup(
            jnp.ones((5, 4, 3)),
            lutjax.Detection(jnp.zeros((2, 5), int), jnp.zeros((2, 5), int), jnp.ones((1, 5)), 2),
        ),
        ValueError,
        r"the three must have the same shape",
    ),
    "targets": (
        lambda: lutjax.sparse_lookup(jnp.ones((5, 4, 3)), detection(2, 5), jnp.zeros((5, 4, 2), int), 7),
        ValueError, r"sparse_lookup: targets is int32\[5, 4, 2\]; expected \[5 or 1, 4 or 1, 3\]"),
    "nothing to compare": (lambda: lutjax.lut_pair_attention(jnp.ones((3, 0)), jnp.ones((2, 4, 3)), ANCHORS),
        ValueError,
        r"lut_pair_attention: x is float32\[3, 0\]; detectors need inputs or position bits to compare"),
    "segments beyond int32": (
        lambda: lutjax.lookup_attention(
            jnp.ones((1, 16, 1)),
            detection(2, 1),
            detection(2, 1),
            query_segments=np.array([1, 2**32 + 1]),
            key_segments=np.array([1, 1]),
        ),
        ValueError,
        r"query_segments is int64\[2\]; its ids from 1 to 4294967297 do not fit in int32",
    ),
    "outputs": (
        lambda: lutjax.sparse_lookup(jnp.ones((5, 4, 3)), detection(2, 5), jnp.zeros((5, 4, 3), int), -7),
        ValueError, r"n_outputs is int -7; it must not be negative"),
    "longer than the positions": (
        lambda: lutjax.lut_attention(jnp.ones((2, 9, 3)), jnp.ones((2, 64, 4)), ANCHORS, jnp.ones((7, 2, 2))),
        ValueError,
        r"position is a Detection of shape \[7, 2\] and 2 bits; it holds 7 distances, but these lengths need 8",
    ),
    "no positions at all": (
        lambda: lutjax.lut_attention(jnp.ones((2, 2, 3)), jnp.ones((2, 64, 4)), ANCHORS, jnp.ones((0, 2, 2))),
        ValueError, r"it holds 0 distances, but these lengths need 1"),
    "width of positions": (
        lambda: lutjax.lut_attention(jnp.ones((2, 9, 3)), jnp.ones((2, 64, 4)), ANCHORS, jnp.ones((8, 3, 2))),
        ValueError,
        r"positions is float32\[8, 3, 2\]; its second axis must have size 2, the number of detectors, or 1"),
    "one of two segments": (
        lambda: lutjax.lookup_attention(
            jnp.ones((5, 16, 3)),
            detection(2, 4, 5),
            detection(2, 4, 5),
            query_segments=jnp.zeros((2, 4), int),
        ),
        ValueError,
        r"query_segments and key_segments go together",
    ),
    "segments of another length": (
        lambda: lutjax.lut_attention(
            jnp.ones((2, 3, 3)), jnp.ones((2, 16, 4)), ANCHORS, segments=jnp.zeros((2, 4), int)
        ),
        ValueError,
        r"query_segments is int32\[2, 4\]; expected \[2, 3\]",
    ),
    "keys of another batch": (
        lambda: lutjax.lookup_attention(jnp.ones((5, 16, 3)), detection(2, 4, 5), detection(3, 4, 5)),
        ValueError, r"key is a Detection of shape \[3, 4, 5\] and 2 bits; expected shape \[2, keys, 5\]"),
    "window": (lambda: lutjax.lut_attention(jnp.ones((2, 3, 3)), jnp.ones((2, 16, 4)), ANCHORS, window=-1),
        ValueError, r"window is int -1; it must not be negative"),
    "fractional window": (
        lambda: lutjax.lut_attention(jnp.ones((2, 3, 3)), jnp.ones((2, 16, 4)), ANCHORS, window=1.5),
        TypeError, r"window is float 1.5; expected None or a Python int"),
    "window without causal order": (
        lambda: lutjax.lut_attention(jnp.ones((3, 3)), jnp.ones((2, 16, 4)), ANCHORS, causal=False, window=2),
        ValueError, r"window is int 2; .*every query sees every key"),
    "start without causal order": (
        lambda: lutjax.lookup_attention(
            jnp.ones((5, 16, 3)), detection(4, 5), detection(4, 5), causal=False, query_start=1
        ),
        ValueError,
        r"query_start is int 1; ",
    ),
    "distances without causal order": (
        lambda: lutjax.lut_attention(
            jnp.ones((4, 3)), jnp.ones((2, 64, 4)), ANCHORS, jnp.ones((6, 2, 2)), causal=False
        ),
        ValueError,
        r"6 distances, but these lengths need 7",
    ),
    "start": (
        lambda: lutjax.lookup_attention(
            jnp.ones((5, 16, 3)), detection(2, 4, 5), detection(2, 4, 5), query_start=0.5
        ),
        TypeError,
        r"query_start is float 0.5; expected an integer",
    ),
    "interleaved without positions": (
        lambda: lutjax.lut_pair_attention(jnp.ones((2, 3, 3)), jnp.ones((2, 4, 4)), ANCHORS, interleave=True),
        ValueError, r"interleave=True needs as many position bits as inputs, 3"),
    "too many bits": (lambda: lutjax.detect(X, jnp.zeros((1, 31, 2), jnp.int32)), ValueError,
        r"a detector has at most 30 pairs"),
    "sample_anchors, one input": (lambda: lutjax.sample_anchors(jax.random.key(0), 1, 2, 3), ValueError,
        r"n_inputs is 1; every detector compares two different inputs"),
    "sample_anchors, one candidate": (
        lambda: lutjax.sample_anchors(jax.random.key(0), 9, 2, 3, candidates=np.array([[1, 2], [3, -1]])),
        ValueError, r"detector 1 has 1 candidate inputs"),
    "sample_anchors, unknown candidate": (
        lambda: lutjax.sample_anchors(jax.random.key(0), 9, 2, 3, candidates=np.array([[1, 9]])),
        ValueError, r"inputs are 0 to 8"),
    "masked array": (
        lambda: lutjax.detect(np.ma.masked_greater(np.ones((2, 3), np.float32), 2), ANCHORS),
        TypeError, r"detect: x is a masked array, float32\[2, 3\]; .*a.filled\(0\)"),
    "fractional feature axis": (
        lambda: lutjax.soft_lut(X, jnp.ones((1, 4)), jnp.array([[0, 1]]), feature_axis=-1.0),
        ValueError, r"feature_axis is float -1.0; expected -1"),
    "traced feature axis": (
        lambda: lutjax.soft_lut(X, jnp.ones((1, 4)), jnp.array([[0, 1]]), feature_axis=X.sum()),
        ValueError, r"feature_axis is float32\[\]; expected -1"),
    "causal is an array": (
        lambda: lutjax.lut_attention(X, jnp.ones((2, 16, 4)), ANCHORS, causal=X > 0),
        TypeError, r"lookup_attention: causal is bool\[.*\]; expected True or False"),
    "positions of a pair as a list": (
        lambda: lutjax.lut_pair_attention(X, jnp.ones((2, 4, 4)), ANCHORS, [1, 2]),
        TypeError, r"lut_pair_attention: positions is list \[1, 2\]; expected a JAX or numpy array"),
    "interleave is an array": (
        lambda: lutjax.lut_pair_attention(X, jnp.ones((2, 4, 4)), ANCHORS, interleave=X > 0),
        TypeError, r"lut_pair_attention: interleave is bool\[.*\]; expected True or False"),
    "hard is a list": (
        lambda: lutjax.gate_coefficients(jnp.ones((1, 16)), hard=[1]),
        TypeError, r"gate_coefficients: hard is list \[1\]; expected True or False"),
    "sizes is a number": (
        lambda: gate_network(X, jnp.ones((4, 1)), jnp.array([[0, 1]]), sizes=1),
        TypeError, r"sizes is int 1; expected a sequence"),
    "readers is an array": (
        lambda: gate_network(X, jnp.ones((4, 1)), jnp.array([[0, 1]]), sizes=(1,), readers=X),
        TypeError, r"readers is .*; expected a list with one array, or None, for each layer"),
    "no number of outputs": (
        lambda: lutjax.sparse_lut(X, jnp.ones((2, 4, 1)), ANCHORS, jnp.zeros((1, 1, 1), int), None),
        TypeError, r"sparse_lookup: n_outputs is NoneType None; expected a Python int"),
    "readers of a list": (lambda: lutjax.readers([[0, 1]], 2), TypeError,
        r"readers: wires is \[\[0, 1\]\]; expected a JAX or numpy array"),
    "readers, fractional number of inputs": (
        lambda: lutjax.readers(np.array([[0, 1]]), 2.5), TypeError, r"readers: n_inputs is 2.5; "),
    "readers, negative fan-out": (
        lambda: lutjax.readers(np.array([[0, 1]]), 2, fan_out=-1), ValueError,
        r"readers: fan_out is -1; expected a number from 0"),
    "unpack_bits, fractional number of samples": (
        lambda: lutjax.unpack_bits(np.ones((1, 1), np.uint32), 1.5), TypeError,
        r"unpack_bits: n_samples is float 1.5; expected a Python int"),
    "thresholds of a list": (lambda: lutjax.thermometer_thresholds([1.0, 2.0], 1), TypeError,
        r"thermometer_thresholds: data is \[1.0, 2.0\]; expected a JAX or numpy array"),
    "fractional number of thresholds": (lambda: lutjax.thermometer_thresholds(X, 1.5), TypeError,
        r"thermometer_thresholds: n_thresholds is 1.5; expected a whole number"),
    "sample_anchors, fractional number of inputs": (
        lambda: lutjax.sample_anchors(jax.random.key(0), 3.5, 2, 3), TypeError,
        r"sample_anchors: n_inputs is 3.5; expected a whole number"),
    "sample_anchors, groups by name": (
        lambda: lutjax.sample_anchors(jax.random.key(0), 3, 2, 3, groups="two"), TypeError,
        r"sample_anchors: groups is 'two'; expected a whole number"),
    "sample_anchors, a huge number": (
        lambda: lutjax.sample_anchors(jax.random.key(0), 2**70, 2, 3), ValueError,
        r"sample_anchors: n_inputs is 1180591620717411303424; it must be less than"),
    "scale_gradient of text": (lambda: lutjax.scale_gradient("x", 2.0), TypeError,
        r"scale_gradient: x is str 'x'; expected a JAX or numpy array"),
    "scale_gradient by text": (
        lambda: lutjax.scale_gradient(jnp.ones(3), np.array("x")), TypeError,
        r"scale_gradient: factor is <U1\[\]; expected a number"),
    "scale_gradient of ints": (lambda: lutjax.scale_gradient(jnp.ones(3, int), 2.0), TypeError,
        r"x is int32\[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("without_typechecking")
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
    with pytest.raises(error, match=message):  # also while tracing
        jax.jit(call)() if "sample" not in name else call()


@pytest.mark.usefixtures("without_typechecking")
def test_groups_may_be_an_integer_array_inside_jit():
    def shape(groups):
        detection = lutjax.Detection(*jnp.zeros((2, 3, 4), int), jnp.ones((3, 4)), bits=1)
        return jax.eval_shape(lambda: lutjax.lookup(jnp.ones((4, 2, 5)), detection, groups=groups))

    assert shape(jnp.int32(2)) == shape(np.int64(2)) == shape(2)


def test_iterating_a_detection_ends():
    d = lutjax.Detection(*jnp.arange(12).reshape(2, 3, 2), jnp.ones((3, 2)), bits=4)
    rows = list(itertools.islice(d, 9))
    assert [r.index.tolist() for r in rows] == d.index.tolist()
    with pytest.raises(TypeError, match=r"iteration over a detection of shape \[\]"):
        iter(d[0, 0])


def test_the_type_checker_sees_shapes():
    import jaxtyping

    with pytest.raises(jaxtyping.TypeCheckError):
        lutjax.detect(X, jnp.zeros((2, 2, 2, 2), jnp.int32))


def test_nan_gives_bit_zero_and_a_nan_margin():
    d = lutjax.detect(
        jnp.array([jnp.nan, 1.0, 0.5]),
        jnp.array([[[1, 2], [0, 1], [1, 0]], [[1, 2], [2, 1], [1, 2]]]),
    )
    np.testing.assert_array_equal(d.index, [1, 5])
    np.testing.assert_array_equal(d.flip, [2, 1])
    np.testing.assert_array_equal(jnp.isnan(d.margin), [True, False])


@pytest.mark.parametrize("op", ["lut"])
def test_nan_reaches_the_gradient_and_nothing_else(op):
    """NaN for only the two inputs compared with the NaN, and the same values as the reference."""
    key = jax.random.key(1)
    x = jax.random.normal(key, (2, 5, 6)).at[1, 2, 3].set(jnp.nan)
    anchors = lutjax.sample_anchors(key, 6, 4, 3)
    rows = 2**6 if op == "lut_attention" else 2**3
    weights = jax.random.normal(key, (4, rows, 3))

    def value_and_gradient(module):
        f = jax.value_and_grad(lambda x: getattr(module, op)(x, weights, anchors).sum())
        return jax.jit(f)(x)

    (y, dx), (expected_y, expected_dx) = map(value_and_gradient, (lutjax, lutjax.reference))
    testing.assert_close("y", y, expected_y)
    assert np.isfinite(y)
    testing.assert_close("dx", dx, expected_dx)
    assert np.isnan(dx).any()
    assert np.isfinite(dx[0]).all()


def test_zero_and_negative_zero_are_ties():
    d = lutjax.detect_signs(jnp.array([0.0, -0.0, 0.0]))
    assert (int(d.index), int(d.flip), float(d.margin)) == (0, 1, 0.0)
    # s(0) = -1: a margin of zero still has a slope.
    slope = jax.grad(
        lambda m: lutjax.lookup(jnp.array([[[0.0], [1.0]]]), lutjax.Detection(*_bits(m), 1))[0]
    )(0.0)
    assert float(slope) == 0.5


def _bits(margin):
    return jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), jnp.reshape(margin, 1)


def test_dead_zone():
    x = jnp.array([0.5, 0.4, 2.0])
    near, far = (lutjax.detect(x, jnp.array([[[0, 1], [2, 0]]]), epsilon=e) for e in (0.2, 0.0))
    assert (int(near.index[0]), int(far.index[0])) == (2, 3)
    np.testing.assert_array_equal(near.margin, far.margin)
    np.testing.assert_array_equal(near.flip, far.flip)


def test_ids_out_of_range_are_clamped_when_traced():
    weights = jnp.arange(8.0).reshape(1, 4, 2)
    d = lutjax.Detection(jnp.array([99]), jnp.array([1 << 20]), jnp.array([0.5]), 2)
    np.testing.assert_array_equal(lutjax.lookup(weights, d), weights[0, 3])
    np.testing.assert_array_equal(
        jax.grad(lambda w: lutjax.lookup(w, d).sum())(weights)[0, 3], [1, 1]
    )
    detect = jax.jit(lambda anchors: lutjax.detect(X, anchors).margin)
    far, near = (jnp.asarray(ANCHORS).at[0, 0].set(jnp.array(pair)) for pair in ([99, -5], [2, 0]))
    np.testing.assert_array_equal(detect(far), detect(near))
    y = jax.jit(lambda targets: lutjax.sparse_lookup(weights, d, targets, 3))(
        jnp.array([[[99, -5]]])
    )
    np.testing.assert_array_equal(y, [0, 0, 6])


WILD = np.array(
    [-(2**40), -(2**31) - 1, -1, 1, 2**31, 2**32 + 1, 2**40]
)  # wrapped, some would be ids that exist


@pytest.mark.parametrize("module", [lutjax, lutjax.reference], ids=["ops", "reference"])
def test_ids_beyond_int32_do_not_wrap(module, without_typechecking):
    """Known ids are refused, computed ones saturate, and so do all in the reference."""
    tame = np.clip(WILD, -1, 2).astype(np.int32)
    x = jnp.array([0.5, 0.25, 2.0])

    def anchors(ids):
        return np.stack([ids, np.zeros_like(ids)], -1)[:, None]

    d, weights, gates = detection(7, bits=1), jnp.ones((7, 2, 1)), jnp.ones((4, 7))
    for f in (
        lambda ids: module.detect(x, anchors(ids)).margin,
        lambda ids: module.sparse_lookup(weights, d, ids[:, None, None], 3),
        lambda ids: module.bilinear_gates(x, gates, anchors(ids)[:, 0]),
    ):
        if module is lutjax.reference:
            np.testing.assert_array_equal(f(WILD), f(tame))
        else:
            with pytest.raises(ValueError, match=f"holds ids from {WILD.min()} to {WILD.max()}"):
                f(WILD)
    ids = jnp.clip(jnp.asarray(tame), 0, 1)
    expected = lutjax.Detection(ids, jnp.zeros_like(ids), jnp.ones(7), 1)
    wild = jax.tree.unflatten(
        jax.tree.structure(expected), [WILD, np.zeros_like(WILD), np.ones(7, np.float32)]
    )
    rows = jnp.arange(14.0).reshape(7, 2, 1)
    np.testing.assert_array_equal(module.lookup(rows, wild), module.lookup(rows, expected))


@pytest.mark.parametrize("module", [lutjax, lutjax.reference], ids=["ops", "reference"])
def test_starts_far_apart_saturate(module):
    d, table = detection(3, 2, bits=1), jnp.ones((2, 4, 1))
    farthest = 2**31 - 1
    for start in (farthest, jnp.int32(farthest)):
        y = module.lookup_attention(table, d, d, query_start=start, key_start=-(2**31))
        np.testing.assert_array_equal(y, 6.0)
        y = module.lookup_attention(table, d, d, query_start=-(2**31), key_start=start)
        np.testing.assert_array_equal(y, 0.0)
        y = module.lookup_attention(
            table, d, d, query_start=start, key_start=np.int64(farthest - 1)
        )
        np.testing.assert_array_equal(y[:, 0], [2.0, 4.0, 6.0])


EMPTY = {
    "no detectors": lambda op: op.lookup(jnp.ones((0, 4, 3)), detection(2, 0)),
    "no detectors with targets": lambda op: op.sparse_lookup(jnp.ones((0, 4, 2)), detection(2, 0),
        jnp.zeros((1, 1, 2), int), 3),
    "attention of no detectors": lambda op: op.lookup_attention(jnp.ones((0, 16, 3)),
        detection(2, 0), detection(2, 0), query_start=1),
    "pair attention of no detectors": lambda op: op.lut_pair_attention(jnp.ones((2, 5)),
        jnp.ones((0, 4, 3)), jnp.zeros((0, 2, 2), int)),
    "an empty cache with a start": lambda op: op.lookup_attention(jnp.ones((1, 32, 3)),
        detection(2, 1), detection(0, 1), detection(0, 1, bits=1), query_start=5),
    "an empty cache with a traced start": lambda op: jax.jit(
        lambda start: op.lookup_attention(
            jnp.ones((1, 32, 3)),
            detection(2, 1),
            detection(0, 1),
            detection(0, 1, bits=1),
            query_start=start,
        )
    )(5),
    "an empty cache of pair attention": lambda op: op.lut_pair_attention(jnp.ones((2, 5)),
        jnp.ones((1, 4, 3)), jnp.zeros((1, 2, 2), int), keys=jnp.ones((0, 5)), query_start=5),
    "no distances within a window of none": lambda op: op.lookup_attention(jnp.ones((1, 32, 3)),
        detection(2, 1), detection(2, 1), detection(0, 1, bits=1), query_start=5, window=0),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_sums_of_nothing_are_zero(name):
    y = EMPTY[name](lutjax)
    assert y.shape == (2, 3)
    np.testing.assert_array_equal(y, 0)


def test_tables_of_no_detectors_have_gradients():
    d = detection(2, 0)
    gradient = jax.grad(lambda w: lutjax.lookup(w, d).sum())(jnp.ones((0, 4, 3)))
    assert gradient.shape == (0, 4, 3)
    x = jnp.ones((2, 5))
    gradient = jax.grad(
        lambda x: lutjax.lut(x, jnp.ones((0, 4, 3)), jnp.zeros((0, 2, 2), int)).sum()
    )(x)
    np.testing.assert_array_equal(gradient, jnp.zeros_like(x))


def test_pair_attention_with_a_start_where_integers_are_int64():
    with jax.enable_x64(True):
        x, keys = (
            jnp.linspace(-1, 1, 40 * 3).reshape(40, 3),
            jnp.linspace(1, -2, 9 * 3).reshape(9, 3),
        )
        weights = jnp.linspace(-1, 1, 2 * 4 * 2).reshape(2, 4, 2)

        def loss(x, weights, module):
            options = {"keys": keys, "query_start": jnp.int64(4), "window": 5}
            return jnp.sum(
                jnp.sin(module.lut_pair_attention(x, weights, jnp.asarray(ANCHORS), **options))
            )

        gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        for a, b in zip(
            gradients(x, weights, lutjax), gradients(x, weights, lutjax.reference), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_any_leading_axes():
    weights = jax.random.normal(jax.random.key(0), (2, 4, 3))
    x = jax.random.normal(jax.random.key(1), (2, 1, 5, 3))
    y = lutjax.lut(x, weights, ANCHORS)
    assert y.shape == (2, 1, 5, 3)
    np.testing.assert_array_equal(y.reshape(10, 3), lutjax.lut(x.reshape(10, 3), weights, ANCHORS))
    np.testing.assert_array_equal(y[1, 0, 2], lutjax.lut(x[1, 0, 2], weights, ANCHORS))
    assert lutjax.lut(x[:0], weights, ANCHORS).shape == (0, 1, 5, 3)


def test_numpy_arguments_and_their_gradients():
    weights = np.ones((2, 4, 3), np.float32)
    y, pullback = jax.vjp(
        lambda x, w: lutjax.lut(x, w, np.asarray(ANCHORS)), np.asarray(X), weights
    )
    dx, dw = pullback(jnp.ones_like(y))
    assert dx.shape == X.shape
    assert float(dw.sum()) == 2 * 2 * 3


@pytest.mark.parametrize("length", [0, 1])
def test_sequences_without_pairs(length):
    x = jnp.ones((2, length, 3))
    for y in (
        lutjax.lut_attention(x, jnp.ones((2, 64, 4)), ANCHORS, jnp.ones((0, 2, 2))),
        lutjax.lut_pair_attention(x, jnp.ones((2, 4, 4)), ANCHORS, jnp.ones((0, 2, 2))),
    ):
        np.testing.assert_array_equal(y, np.zeros((2, length, 4)))


def test_distances_beyond_the_positions_are_clamped_where_they_are_not_known():
    q, k, e = detection(1, 5), detection(8, 5), detection(3, 5, bits=1)
    weights = jnp.arange(5 * 32 * 2, dtype=jnp.float32).reshape(5, 32, 2)

    def attend(module, start):
        return jax.jit(lambda s: module.lookup_attention(weights, q, k, e, query_start=s))(start)

    actual, expected = attend(lutjax, 8), attend(lutjax.reference, 8)
    np.testing.assert_array_equal(actual, expected)


def test_an_unused_gradient_is_never_computed():
    weights, d = jnp.ones((5, 4, 3)), detection(2, 5)

    def compiled(argument):
        def loss(w, m):
            return lutjax.lookup(w, lutjax.Detection(d.index, d.flip, m, d.bits)).sum()

        return str(jax.make_jaxpr(jax.grad(loss, argument))(weights, d.margin))

    assert "scatter" in compiled(0)
    assert "scatter" not in compiled(1)
    products = r":f32\[[\d,]*\] = (mul|dot_general)"  # of integers there are some: places in loops
    assert re.search(products, compiled(1))
    assert not re.search(products, compiled(0))


def test_nothing_of_the_size_of_all_pairs_or_rows_is_kept():
    batch, length, n_inputs, n_detectors = 2, 64, 8, 4
    x = jnp.ones((batch, length, n_inputs))
    anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs, n_detectors, 3)
    weights, positions = jnp.ones((n_detectors, 2**8, 5)), jnp.ones((length - 1, n_detectors, 2))
    pair_anchors = lutjax.sample_anchors(jax.random.key(0), 2 * n_inputs + 2, n_detectors, 3)
    for f, arguments in (
        (lambda x, w: lutjax.lut(x, w, anchors), (x, jnp.ones((n_detectors, 2**3, 5)))),
        (lambda x, w, p: lutjax.lut_attention(x, w, anchors, p), (x, weights, positions)),
        (
            lambda x, w, p: lutjax.lut_pair_attention(x, w, pair_anchors, p),
            (x, weights[:, :8], positions),
        ),
    ):
        _, pullback = jax.vjp(f, *arguments)
        given = {id(a) for a in arguments}
        kept = [
            a.size
            for a in jax.tree.leaves(pullback)
            if id(a) not in given and a.shape != weights.shape
        ]
        assert max(kept) <= batch * length * max(n_detectors, n_inputs), kept


def test_scale_gradient():
    x = jnp.array([1.0, -2.0])
    np.testing.assert_array_equal(lutjax.scale_gradient(x, 0.25), x)
    np.testing.assert_array_equal(
        jax.grad(lambda x: (lutjax.scale_gradient(x, 0.25) * x).sum())(x), 1.25 * x
    )
    _, tangent = jax.jvp(lambda x: lutjax.scale_gradient(x, jnp.float32(0.25)), (x,), (x,))
    np.testing.assert_array_equal(tangent, 0.25 * x)


def test_sample_anchors():
    pairs = lutjax.sample_anchors(jax.random.key(0), 3, 2000, 3)
    assert pairs.shape == (2000, 3, 2)
    counts = np.zeros((3, 3))
    np.add.at(counts, tuple(np.asarray(pairs).reshape(-1, 2).T), 1)
    assert not counts.diagonal().any()
    assert abs(counts[counts > 0] / 1000 - 1).max() < 0.15  # uniform over the 6 ordered pairs
    candidates = np.array([[0, -1, 5], [7, 8, 9]])
    drawn = np.asarray(lutjax.sample_anchors(jax.random.key(1), 10, 2, 50, candidates=candidates))
    assert set(drawn[0].ravel()) == {0, 5}
    assert set(drawn[1].ravel()) == {7, 8, 9}
    shared = np.asarray(
        lutjax.sample_anchors(jax.random.key(1), 10, 2, 50, candidates=candidates[1:])
    )
    assert set(shared[0].ravel()) == {7, 8, 9}


def test_forward_mode_and_second_derivatives_name_the_reference():
    weights = jnp.ones((2, 4, 3))

    def loss(x):
        return jnp.sum(lutjax.lut(x, weights, ANCHORS) ** 2)

    with pytest.raises(
        TypeError, match=r"detect: .*no forward mode .*use lutjax\.reference\.detect"
    ):
        jax.jvp(loss, (X,), (X,))
    with pytest.raises(TypeError, match=r"no forward mode"):
        jax.jacfwd(loss)(X)
    for second in (jax.hessian(loss), jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))):
        with pytest.raises(
            TypeError, match=r"detect: .*no second derivative; use lutjax\.reference\.detect"
        ):
            second(X)
        with pytest.raises(TypeError, match="no second derivative"):
            jax.jit(second)(X)


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
}
SECOND = {"hessian": lambda f: jax.hessian(lambda x: f(x).sum())(X)}
INSIDE = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])).sum(0),
    "vmap of jit": lambda f: lambda x: jax.vmap(jax.jit(f))(jnp.stack([x, x])).sum(0),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1].sum(0),
    "scan of a carry": lambda f: (
        lambda x: jax.lax.scan(lambda c, _: (c + f(c.sum() * x), None), f(x), None, length=2)[0]
    ),
    "map": lambda f: lambda x: jax.lax.map(lambda _: f(x), jnp.arange(2)).sum(0),
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: f(-x), x),
    "fori_loop": lambda f: (
        lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + f(x), jnp.zeros_like(f(x)))
    ),
}


@pytest.mark.parametrize(("mode", "inside"), [
    *(("jvp", inside) for inside in INSIDE),
    ("linearize", "jit"),
    ("jacfwd", "nothing"),
    ("hessian", "scan of a carry"),
])  # fmt: skip
def test_every_forward_mode_names_the_reference(mode, inside):
    """Outside and inside a jit, which detects forward mode when lowering a program."""
    derivative = {**FORWARD, **SECOND}[mode]
    weights = jnp.ones((2, 4, 3))
    f = INSIDE[inside](lambda x: lutjax.lut(x, weights, ANCHORS))
    why = "no forward mode" if mode in FORWARD else "no (forward mode|second derivative)"
    for run in (lambda: derivative(f), jax.jit(lambda: derivative(f))):
        with pytest.raises(
            TypeError, match=rf"^detect: .*{why}.*use lutjax\.reference\.detect"
        ) as raised:
            run()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("op", ["lookup", "bilinear_gates"])
def test_forward_mode_of_every_op(op):
    case = testing.case(
        op, next(name for name, size in testing.shapes(op).items() if Tag.FAST in size.tags)
    )

    def outputs(differentiable):
        y = case.call(
            lutjax.kernel_registry.function(op),
            {**case.differentiable, **case.fixed, **differentiable},
        )
        return [a for a in y.values() if jnp.issubdtype(a.dtype, jnp.floating)]

    for name, array in case.differentiable.items():
        with pytest.raises(TypeError, match=r"no forward mode .*use lutjax\.reference\."):
            jax.jit(lambda a: jax.linearize(outputs, a)[1](a))({name: array})


def test_forward_mode_beside_ops():
    wires = of_nnx.LogicGates(6, 4, wiring="top-k", candidates=2, rngs=nnx.Rngs(0))
    raw = of_nnx.SoftLUT(6, 4, n_inputs=2, parameterization="raw", rngs=nnx.Rngs(0))

    def called(layer, name):
        spec, arrays = (
            layer.spec,
            {v.name: getattr(layer, v.name)[...] for v in layer.spec.variables()},
        )
        return lambda a: spec({**arrays, name: a}, jnp.ones((2, 6))), arrays[name]

    for message, (f, at) in {
        "scores of wires have gradients and no forward mode": called(wires, "scores"),
        "SoftLUT: a table has gradients and no forward mode": called(raw, "table"),
    }.items():
        with pytest.raises(TypeError, match=message):
            jax.jit(lambda a: jax.linearize(f, a)[1](a))(at)  # noqa: B023


def test_reference_has_forward_mode():
    weights = jax.random.normal(jax.random.key(0), (2, 4, 3))

    def f(x):
        return lutjax.reference.lut(x, weights, ANCHORS).sum()

    @jax.jit
    def modes(x):
        return jax.jvp(f, (x,), (jnp.ones_like(x),))[1], jax.grad(f)(x).sum(), jax.hessian(f)(x)

    forward, reverse, second = modes(X)
    np.testing.assert_allclose(forward, reverse, atol=1e-6)
    assert np.isfinite(second).all()

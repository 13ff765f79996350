"""Values and every cotangent of every op, as defined, on drawn arguments.

Sizes come from a pool by name, so that each is tried in every run; values are drawn. ``pytest -m slow`` draws sizes too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from hypothesis import given, settings, strategies as st

import lutjax
from properties import checking, definitions as D
from properties.strategies import FINITE, LARGE, POOLS, SIZES, Values, calls, is_float64, several

FORMULATIONS = ("accelerator", "tpu")
EVERYWHERE = {  # what plain JAX computes in another way on accelerators
    "lookup": ("primes", "bfloat16", "fixed point"),
    "weighted_lookup": ("groups",),
    "sparse_lookup": ("primes", "one list", "fixed point"),
    "lookup_attention": ("self, positions", "fewer keys", "traced, window, segments", "fixed point"),
    "lut_pair_attention": ("self, positions", "decoding"),
    "bilinear_gates": ("primes",),
}


# Sizes whose property another op with the same kernels, or another size of the op, shows too.
LEFT_TO_SLOW = {
    "detect": (
        "no comparisons", "no inputs, no detectors", "one of each", "more samples than rows", "float16 inputs", "float16 tables",
        "float64 tables", "fixed point of bfloat16",
    ),
    "lookup": (
        "several leading axes, one of 1", "no inputs, no detectors", "one of each", "float16 inputs", "float64 tables",
        "fixed point of bfloat16",
    ),
    "weighted_lookup": ("bfloat16", "float64, no leading axes"),
    "lut": ("bfloat16", "float64", "fixed point"),
    "sparse_lut": ("fixed point",),
    "sparse_lookup": (
        "several leading axes, one of 1", "float16 inputs", "bfloat16", "float64", "fixed point of bfloat16", "no comparisons", "no outputs",
    ),
    "lookup_attention": (
        "one key", "equal starts", "more keys", "traced, float64", "window beyond all", "positions without bits", "window", "segments",
        "several leading axes", "no leading axes", "no comparisons", "float16 inputs", "float64", "fewer keys", "more keys, segments",
        "queries later", "queries earlier", "traced, fixed point",
    ),
    "lut_pair_attention": (
        "fewer keys", "equal starts", "no keys", "traced, float64", "no detectors", "window", "no places", "no leading axes",
        "float16 inputs", "queries earlier", "queries before all keys", "fewer keys, window", "shared positions, more than needed",
        "no comparisons", "bfloat16", "float64", "dead zone", "segments", "more keys, segments",
    ),
    "lut_attention": ("shared positions, more than needed", "window", "segments", "float16 inputs", "fixed point"),
    "logic_trees": ("float64", "one place", "no trees", "strides, no samples", "groups beyond the places, bfloat16"),
    "gate_network": ("float64", "several leading axes", "no outputs", "one layer, empty batch"),
    "lut_at_places": (
        "targets", "padding, groups with channels of their own", "strides, no samples", "bfloat16, groups share windows", "float64", "no detectors",
    ),
    "scored_lut": ("hard sign, factors", "powers, float64"),
    "conv_lut": ("groups, fixed point", "powers", "soft sign, no samples, float64"),
    "bilinear_gates": ("float64", "several leading axes"),
    "logic_gates": ("float64", "features first, readers"),
    "soft_lut": (
        "several leading axes", "one input", "float16, float32 parameters", "readers", "eight bits", "beyond a block", "float64",
        "no gates, six bits",
    ),
    "binary_lut": (
        "several leading axes", "one input", "no inputs, no gates", "float16, float32 parameters", "float64", "readers", "eight bits",
        "beyond a block", "no gates, six bits",
    ),
}  # fmt: skip


def _sizes(op, name):
    marks = pytest.mark.slow if name in LEFT_TO_SLOW.get(op, ()) else ()
    return pytest.param(op, name, id=f"{op}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("op", "name"),
    slow_except(
        [_sizes(op, name) for op, pool in POOLS.items() for name in pool],
        "detect-primes",
        "detect-several leading axes, one of 1",
        "detect-no leading axes, dead zone",
        "detect-empty batch",
        "detect-no detectors",
        "detect-bfloat16",
        "detect-float64",
        "detect_signs-primes",
        "detect_signs-several leading axes, one of 1",
        "detect_signs-no leading axes, dead zone",
        "detect_signs-empty batch",
        "detect_signs-no comparisons",
        "detect_signs-bfloat16",
        "detect_signs-float64",
        "lookup-primes",
        "lookup-no leading axes, dead zone",
        "lookup-empty batch",
        "lookup-no comparisons",
        "lookup-no detectors",
        "lookup-more samples than rows",
        "lookup-bfloat16",
        "lookup-float16 tables",
        "lookup-float64",
        "lookup-no outputs",
        "margins-primes",
        "margins-a shared input, bfloat16",
        "margins-single probes",
        "margins-empty batch",
        "weighted_lookup-primes",
        "weighted_lookup-groups",
        "weighted_lookup-some ways have values",
        "weighted_lookup-no ways",
        "scored_lut-confidence, groups",
        "scored_lut-hard, single probes, factors",
        "scored_lut-integers, groups",
        "conv_lut-confidence, factors",
        "conv_lut-integers, groups",
        "cell_total_variation-primes",
        "cell_total_variation-one row",
        "cell_total_variation-bfloat16",
        "lut-primes",
        "lut-no leading axes, dead zone",
        "sparse_lookup-primes",
        "sparse_lookup-empty batch",
        "sparse_lookup-no detectors",
        "sparse_lookup-edges",
        "sparse_lookup-edges, bfloat16, no outputs",
        "sparse_lookup-no edges",
        "sparse_lookup-a list for each table",
        "sparse_lookup-one list",
        "sparse_lookup-no slots",
        "sparse_lookup-more slots than outputs",
        "sparse_lut-primes",
        "lookup_attention-self, positions",
        "lookup_attention-shared positions, more than needed",
        "lookup_attention-segments shared, window",
        "lut_attention-self, positions",
        "lut_pair_attention-interleaved",
        "bilinear_gates-primes",
        "bilinear_gates-readers",
        "logic_gates-primes",
        "logic_gates-hard",
        "logic_gates-hard, bfloat16",
        "gate_network-three layers",
        "gate_network-features first",
        "logic_trees-pools, padding, readers",
        "lut_at_places-places, groups, targets, dead zone",
        "soft_lut-primes",
        "binary_lut-primes",
        "gate_coefficients-soft",
        "gate_coefficients-sixteen first",
        "gate_coefficients-hard",
        "gate_coefficients-no gates",
        "gate_coefficients-bfloat16",
        "gate_coefficients-float64",
        "packed_lut-primes",
        "scale_gradient-float32",
        "scale_gradient-bfloat16",
        "scale_gradient-scalar",
        "scale_gradient-nothing",
        "scale_gradient-float64",
    ),
)
def test_values_and_cotangents(op, name):
    _check_all(calls(op, POOLS[op][name]), is_float64(POOLS[op][name]), "cpu")


@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize(
    ("op", "name"),
    slow_except(
        [pytest.param(op, name, id=f"{op}-{name}") for op, names in EVERYWHERE.items() for name in names],
        "lookup-primes",
        "lookup-bfloat16",
        "lookup-fixed point",
        "sparse_lookup-one list",
        "lookup_attention-traced, window, segments",
        "lut_pair_attention-decoding",
        "bilinear_gates-primes",
    ),
)
def test_formulations_for_accelerators(op, name, formulation, request):
    request.getfixturevalue(f"{formulation}_formulation")
    sizes = POOLS[op][name]
    if formulation == "tpu":  # a product with a one-hot matrix meets every row, infinite ones too
        sizes = {**sizes, "kinds": FINITE}
    _check_all(calls(op, sizes), is_float64(sizes), formulation)


def _check_all(strategy, x64, formulation):
    @given(strategy)
    def check(call):
        checking.check(call, formulation)

    with jax.enable_x64(x64):
        check()


@pytest.mark.slow
@pytest.mark.parametrize("formulation", ["cpu", *FORMULATIONS])
@pytest.mark.parametrize("op", SIZES)
def test_drawn_sizes(op, formulation, request):
    if formulation != "cpu":
        if op not in EVERYWHERE:
            pytest.skip("this op has one formulation in plain JAX, tested as that of CPUs")
        request.getfixturevalue(f"{formulation}_formulation")
    sizes = SIZES[op]
    if formulation == "tpu":
        sizes = sizes.map(lambda s: {**s, "kinds": FINITE})

    @settings(settings.get_profile("long"))
    @given(several(op, sizes, 10))
    def check(drawn):
        sizes, of_sizes = drawn
        with jax.enable_x64(is_float64(sizes)):
            for call in of_sizes:
                checking.check(call, formulation)

    check()
    jax.clear_caches()


# ------------------------------------------------------------------------------------- ids that do not fit int32
def _assert_same(found, wanted):
    problems = [
        differs for n, want in wanted.items() if (differs := checking.differs(n, found[n], want, np.float32))
    ]
    assert not problems, "\n".join(problems)


def _assert_refused_or_same(ids, least, n, found, wanted):
    """Known ids of n things, from `least` on, are an error where one is out of range; else results are those of the definition."""
    if ids.min() < least or ids.max() >= n:
        with pytest.raises(ValueError, match=rf"holds ids from {ids.min()} to {ids.max()}"):
            found()
    elif (y := found()).dtype == np.uint32:
        np.testing.assert_array_equal(y, wanted())
    else:
        _assert_same({"y": y}, {"y": wanted()})


@given(st.data())
def test_ids_beyond_int32_are_refused(data):
    """Ids in NumPy arrays of int64, as a checkpoint may hold them: no id becomes another by losing its upper bits."""
    v = Values(data.draw, FINITE)
    x = v.floats((3, 5), "float32")
    anchors = v.far_ids((2, 3, 2), 5)
    _assert_refused_or_same(
        anchors,
        0,
        5,
        lambda: lutjax.detect(x, anchors).margin,
        lambda: D.exactly(D.detect(x, anchors).margin),
    )

    weights = v.floats((2, 8, 4), "float32")
    targets, existing = v.far_ids((2, 1, 4), 4), v.ids((2, 3, 2), 5, wild=False)
    _assert_refused_or_same(
        targets,
        -1,
        4,
        lambda: lutjax.sparse_lookup(weights, lutjax.detect(x, existing), targets, 4),
        lambda: D.sparse_lookup(weights, D.detect(x, existing), targets, 4),
    )

    wires, truth = v.far_ids((3, 2), 5), v.integers(0, 1, (3, 4)).astype(bool)
    coefficients, table = v.floats((4, 3), "float32"), v.floats((3, 4), "float32")
    words = v.integers(0, 2**31 - 1, (5, 2)).astype(np.uint32)
    for op, values, parameter in (
        (lutjax.bilinear_gates, x, coefficients),
        (lutjax.soft_lut, x, table),
        (lutjax.binary_lut, x, table),
        (lutjax.packed_lut, words, truth),
    ):
        wanted = getattr(D, op.__name__)
        _assert_refused_or_same(
            wires,
            0,
            5,
            lambda op=op, values=values, parameter=parameter: op(values, parameter, wires),
            lambda op=wanted, values=values, parameter=parameter: op(values, parameter, wires),
        )

    of_pairs = v.far_ids((2, 3, 2), 10)
    _assert_refused_or_same(
        of_pairs,
        0,
        10,
        lambda: lutjax.lut_pair_attention(x, weights, of_pairs),
        lambda: D.lut_pair_attention(x, x, weights, of_pairs),
    )


# ------------------------------------------------------------------------------------- around the ops
@given(st.data())
def test_tables_as_integers(data):
    """Beside normal tables large ones, halves between two integers, powers of two, and outputs that are 0."""
    groups, dtype = data.draw(st.sampled_from((None, 2))), data.draw(st.sampled_from(("float32", "bfloat16")))
    v = Values(data.draw, (*FINITE, LARGE))
    weights = v.table((4, 4, 3), dtype)
    weights[..., data.draw(st.integers(0, 2))] = 0
    tables = lutjax.quantize_tables(weights, groups=groups)
    assert tables.values.dtype == jnp.int8
    whole, exponents = D.quantized(weights, groups or 1)
    np.testing.assert_array_equal(tables.exponents, exponents)
    np.testing.assert_array_equal(tables.values, whole)


_COUNT = st.sampled_from((0, 1, 2, 31, 32, 33, 64, 65))


@given(
    st.sampled_from((0, 1, 3)), _COUNT, st.integers(0, 2**16), st.sampled_from((bool, np.float32, np.int32))
)
def test_packing_bits(n_features, n_samples, seed, dtype):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2, (n_features, n_samples)).astype(dtype)
    words = np.asarray(lutjax.pack_bits(bits))
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(words, D.pack_bits(bits))
    full = rng.integers(0, 2**32, words.shape, dtype=np.uint32)
    for of in (words, full):
        np.testing.assert_array_equal(lutjax.unpack_bits(of, n_samples), D.unpack_bits(of, n_samples))


@given(st.data())
def test_readers_are_all_places_that_read(data):
    n_inputs, shape = data.draw(st.sampled_from(((5, (7, 2)), (1, (3, 2)), (9, (0, 3)), (3, (5, 4)))))
    wires = Values(data.draw, FINITE).ids(shape, n_inputs, wild=False)
    wanted = D.readers(wires, n_inputs)
    np.testing.assert_array_equal(lutjax.readers(wires, n_inputs), wanted)
    room = wires.size + 1
    wanted = D.readers(wires, n_inputs, room)
    np.testing.assert_array_equal(lutjax.readers(wires, n_inputs, fan_out=room), wanted)
    traced = jax.jit(lambda w: lutjax.readers(w, n_inputs, fan_out=room))(wires)
    np.testing.assert_array_equal(traced, wanted)


@pytest.mark.parametrize("n_candidates", [None, 2, 3, 5])
def test_anchors_are_drawn_uniformly_from_the_ordered_pairs(n_candidates):
    """Each pair as often as the others: the number of one of n pairs lies within 6 standard deviations, in all of 100
    comparisons with a probability beyond 1 - 1e-6."""
    n_inputs, n_draws = 6, 3000
    lists = None
    if n_candidates is not None:
        rng = np.random.default_rng(n_candidates)
        lists = np.stack([rng.permutation(n_inputs)[:n_candidates] for _ in range(2)])
        lists = np.concatenate(
            [lists[:, :1], np.full((2, 2), -1), lists[:, 1:]], 1
        )  # unused slots among them
    anchors = np.asarray(lutjax.sample_anchors(jax.random.key(3), n_inputs, 2, n_draws, candidates=lists))
    assert anchors.dtype == np.int32
    assert anchors.shape == (2, n_draws, 2)
    for t in range(2):
        legal = D.ordered_pairs(range(n_inputs) if lists is None else lists[t])
        found, times = np.unique(anchors[t], axis=0, return_counts=True)
        assert {tuple(map(int, pair)) for pair in found} == legal
        mean = n_draws / len(legal)
        assert np.all(np.abs(times - mean) < 6 * np.sqrt(mean))
    assert not np.array_equal(*anchors)  # detectors are drawn independently


# ------------------------------------------------------------------------------------- updates of tables
_RULES = {
    "SGD": {},
    "SGD, decay": {"weight_decay": 0.25},
    "RowAdagrad": {"eps": 2.0**-10},
    "RowMomentum": {"momentum": 0.5},
    "RowAdam": {"b2": 0.75, "eps": 2.0**-10},
    "RowAdam, b1": {"b1": 0.5, "b2": 0.75, "eps": 2.0**-10, "weight_decay": 0.25},
}
_UPDATES = [
    *(("lookup", "primes", rule) for rule in _RULES),
    ("lookup", "bfloat16", "SGD"),
    ("lookup", "bfloat16", "RowAdam, b1"),
    ("lookup", "empty batch", "RowMomentum"),
    ("lookup", "more samples than rows", "RowMomentum"),  # whose gradient is made whole
    ("sparse_lookup", "primes", "SGD"),
    ("sparse_lookup", "one list", "RowAdam, b1"),
    *(("sparse_lookup", "edges", rule) for rule in _RULES),
    ("lookup_attention", "fewer keys", "SGD"),
    ("lookup_attention", "traced, window, segments", "RowMomentum"),
    ("lut_pair_attention", "fewer keys", "SGD"),
    ("lut_pair_attention", "segments", "RowAdam"),
]


@pytest.mark.parametrize(
    ("op", "name", "rule"),
    slow_except(
        _UPDATES,
        "lookup-primes-SGD",
        "lookup-primes-SGD, decay",
        "lookup-primes-RowAdagrad",
        "lookup-primes-RowMomentum",
        "lookup-primes-RowAdam",
        "lookup-primes-RowAdam, b1",
        "lookup-empty batch-RowMomentum",
    ),
)
def test_updates_of_tables(op, name, rule):
    @given(calls(op, {**POOLS[op][name], "kinds": ("grid",)}), st.integers(0, 2**16))
    def check(call, seed):
        checking.check_update(call, rule.partition(",")[0], _RULES[rule], np.random.default_rng(seed))

    check()

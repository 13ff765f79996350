"""Implementations in Triton on machines without a GPU: run by Triton's interpreter, and compiled for NVIDIA GPUs."""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import operator
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    RATES,
    case_of,
    fast_size,
    ops,
    ops_that_add,
    rates_of,
    slow,
    slow_except,
    slow_op,
    slow_where,
    split,
    typed_size,
)
from flax import nnx

import lutjax
from lutjax import optim as tables, reads, testing, tuning, wiring
from lutjax.dispatch.registry import Backend, Device, Request
from lutjax.kernels import _nvidia, _triton
from lutjax.layers import nnx as nnx_layers
from lutjax.layers.nnx import LogicConv
from lutjax.models import LogicCA, LogicCAConfig
from lutjax.ops.gate_network import gate_network
from lutjax.ops.lookup import Lookup
from lutjax.tables import _registered, host
from lutjax.testing import _ahead_of_time

for package in lutjax.kernel_registry.get("lookup", platform="triton", backend="gpu").requires:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"Triton kernels need {package}, which is not installed", allow_module_level=True)

import triton  # noqa: E402
import triton_interpreter  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from lutjax.dispatch import _transforms  # noqa: E402
from lutjax.kernels._triton import _owned_columns, _row_additions, _triton_launch  # noqa: E402

IMPLEMENTED = {
    op
    for op in lutjax.kernel_registry.ops()
    if any(spec.platform == "triton" for spec in lutjax.kernel_registry.candidates(op))
}
OPS = [op for op in ops() if op in IMPLEMENTED]
UPDATED = [
    op
    for op in OPS
    if "update" in lutjax.kernel_registry.get(op, platform="triton", backend="gpu").directions
]

OF_PLAIN_JAX = {"bilinear_gates", "soft_lut", "binary_lut"}  # in fixed point
SUMMED = [op for op in OPS if op in ops_that_add() and op not in OF_PLAIN_JAX]
GPUS = {80: "NVIDIA A100", 90: "NVIDIA H200", 100: "NVIDIA B200"}  # by compute capability


def compiled_size(op):
    """Return a size at which the kernels of readers run, where an op has any."""
    return next(
        (shape for shape, sizes in testing.shapes(op, "triton").items() if "readers" in sizes), fast_size(op)
    )


@pytest.fixture
def interpreted():
    with triton_interpreter.interpreted():
        yield


# ------------------------------------------------------------------------------------- in the interpreter
@pytest.mark.parametrize(
    ("op", "shape"),
    slow_where(
        [(op, shape) for op in OPS for shape in testing.shapes(op, "triton")],
        lambda op, shape: (
            shape != "split" and f"{op}-{shape}" not in ("lookup-empty_batch", "sparse_lookup-one_list")
        ),
    ),
)
@pytest.mark.usefixtures("interpreted")
def test_shapes(op, shape):
    testing.check(case_of(op, shape), "triton", transformation="jit")


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), slow("float64")])
@pytest.mark.parametrize(
    "op", slow_except([slow_op(op) for op in OPS], "lookup", "sparse_lookup", "bilinear_gates")
)
@pytest.mark.usefixtures("interpreted")
def test_dtypes(op, dtype):
    with jax.enable_x64(dtype == "float64"):
        testing.check(testing.case(op, typed_size(op), dtype), "triton", transformation="jit")


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float64")])
@pytest.mark.parametrize("op", slow_except(SUMMED, "lookup", "sparse_lookup"))
@pytest.mark.usefixtures("interpreted")
def test_fixed_point(op, dtype):
    with jax.enable_x64(dtype == "float64"):
        testing.check(
            testing.case(op, typed_size(op), dtype),
            "triton",
            transformation="jit",
            accumulate=lutjax.FixedPoint(2.0**20),
            tolerance=max(2.0**-10, 1.01 * testing.TOLERANCE[dtype]),
        )


@pytest.mark.parametrize(
    ("op", "transformation"),
    slow_except(
        [
            (op, transformation)
            if transformation in ("shard_map, sharded table", "vmap of grad")
            and op in ("lookup", "sparse_lookup", "bilinear_gates")
            else slow(op, transformation)
            for op in OPS
            for transformation in testing.TRANSFORMATIONS
            if transformation != "export"  # what the interpreter runs cannot be
        ],
        "lookup-vmap of grad",
        "lookup-shard_map, sharded table",
        "bilinear_gates-vmap of grad",
        "bilinear_gates-shard_map, sharded table",
    ),
)
@pytest.mark.usefixtures("interpreted")
def test_transformations(op, transformation):
    testing.check(split(op), "triton", transformation=transformation)


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (op, shape) if (op, shape) == ("lookup", "primes") else slow(op, shape)
        for op in UPDATED
        for shape in testing.shapes(op, "triton")
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_updates(op, shape):
    testing.check_update(testing.case(op, shape), "triton")


@pytest.mark.parametrize(
    ("dtype", "weight_decay"),
    [("bfloat16", 0.0), slow("float32", 0.5), slow("float16", 0.0), slow("float64", 0.0)],
)
@pytest.mark.parametrize("op", [op if op == "lookup" else slow(op) for op in UPDATED])
@pytest.mark.usefixtures("interpreted")
def test_updates_in_other_arithmetic(op, dtype, weight_decay):
    """Rows that move by the sum over their look-ups, and float64."""
    with jax.enable_x64(dtype == "float64"):
        testing.check_update(split(op, dtype), "triton", tables.SGD(weight_decay=weight_decay))


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (op, kind) if (op, kind) == ("lookup", "edge") else slow(op, kind)
        for op in UPDATED
        for kind in (RATES if op == "lookup" else ("table", "edge"))
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_updates_at_rates_that_differ(op, kind):
    case = split(op)
    testing.check_update(case, "triton", tables.SGD(weight_decay=0.5), rates=rates_of(case, kind))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_updates_by_factors_that_differ(monkeypatch):
    """Factors of a gradient, and groups of detectors that move one after the other."""
    monkeypatch.setattr(_row_additions, "_SUMS", 2 * 8 * 5)
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(7, 6), (5, 8, 5)]))
    anchors = lutjax.sample_anchors(jax.random.key(2), 6, 5, 3)
    factor = jnp.linspace(0.5, 2, 5).reshape(5, 1, 1)

    def loss(params):
        return jnp.sum(lutjax.lut(x, lutjax.scale_gradient(params["weights"], factor), anchors) ** 2)

    @jax.jit
    def moved(weights):
        _, gradients = tables.value_and_grad(loss)({"weights": weights})
        return [
            lutjax.update_table(weights, gradients["weights"], 0.25, implementation=name)[0]
            for name in ("triton", "xla")
        ]

    testing.assert_close("factors", *moved(weights))


@pytest.fixture
def always_counted(monkeypatch):
    """Count always, with several blocks, groups and products."""
    from lutjax.kernels._triton import _histograms

    triton_interpreter.count_always(monkeypatch)
    monkeypatch.setattr(_histograms, "_BYTES", 256)
    monkeypatch.setitem(_histograms._COUNT, "rows", 32)
    monkeypatch.setitem(_histograms._COUNT, "keys", 16)
    for tile in (_histograms._SUM, _histograms._ADD, _histograms._PRODUCTS):
        monkeypatch.setitem(tile, "rows", 16)
        monkeypatch.setitem(tile, "cells", 16)


COUNTED = {"batch": 1, "queries": 6, "detectors": 2}


@pytest.mark.parametrize(
    ("shape", "sizes", "dtype"),
    [
        ("ties", COUNTED, "float32"),
        *(
            slow(shape, {}, "float32")
            for shape in testing.shapes("lookup_attention", "triton")
            if not shape.startswith("tiles")
        ),
        slow("tiles", {"batch": 1, "queries": 40, "detectors": 1}, "float32"),
        slow("ties", {}, "bfloat16"),
        slow("ties", {}, "float64"),
    ],
)
@pytest.mark.usefixtures("interpreted", "always_counted")
def test_counted_attention(shape, sizes, dtype):
    with jax.enable_x64(dtype == "float64"):
        testing.check(testing.case("lookup_attention", shape, dtype, **sizes), "triton", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**10, 2.0**30])  # addends of every digit; sums that wrap
@pytest.mark.usefixtures("interpreted", "always_counted")
def test_counted_attention_in_fixed_point(scale):
    """Sums of integers have the same bits, however they are made."""
    case, accumulate = testing.case("lookup_attention", "ties", **COUNTED), lutjax.FixedPoint(scale)
    found = []
    for implementation in ("triton", "xla"):
        program = testing.program(case, implementation, accumulate=accumulate)
        found.append(jax.tree.leaves(jax.jit(program.function)(*program.arguments)))
    for actual, expected in zip(*found, strict=True):
        assert np.any(expected)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", ["primes", "cross"])
@pytest.mark.usefixtures("interpreted", "always_counted")
def test_updates_of_counted_attention(shape, weight_decay):
    testing.check_update(
        testing.case("lookup_attention", shape), "triton", tables.SGD(weight_decay=weight_decay)
    )


@pytest.mark.slow
@pytest.mark.parametrize("transformation", [t for t in testing.TRANSFORMATIONS if t != "export"])
@pytest.mark.usefixtures("interpreted", "always_counted")
def test_transformations_of_counted_attention(transformation):
    testing.check(split("lookup_attention"), "triton", transformation=transformation)


def same_as_plain_jax(f, *arguments):
    """`f` takes the implementation and these arguments, whose gradients are compared too."""

    def run(implementation):
        outputs, pullback = jax.vjp(functools.partial(f, implementation), *arguments)
        return outputs, pullback(jnp.ones_like(outputs))

    for actual, expected in zip(*(jax.tree.leaves(run(i)) for i in ("triton", "xla")), strict=True):
        testing.assert_close(f.__name__, actual, expected)


@pytest.mark.parametrize("compared", [slow(True), False])
@pytest.mark.usefixtures("interpreted")
def test_detect_of_any_input(monkeypatch, compared):
    """NaN, infinities, both zeros and ids beyond the inputs; cotangents by comparisons and by atomics."""
    from lutjax.kernels._triton import detect

    monkeypatch.setattr(detect, "_COMPARED", 2**14 if compared else 0)
    rng = np.random.default_rng(0)
    values = np.array([0.0, -0.0, 0.25, -0.25, 0.5, 3.0, np.inf, -np.inf, np.nan])
    x = jnp.asarray(rng.choice(values, (37, 6)), jnp.float32)
    anchors = jnp.asarray(rng.integers(-3, 9, (5, 4, 2)), jnp.int32)
    for epsilon in (0.0, 0.375):
        options = {"epsilon": epsilon, "implementation": "triton"}
        actual = lutjax.detect(x, anchors, **options)
        expected = lutjax.detect(x, anchors, **{**options, "implementation": "xla"})
        for name in ("index", "flip", "margin"):
            testing.assert_close(name, getattr(actual, name), getattr(expected, name))

    def margins(implementation, x):
        return lutjax.detect(x, anchors, implementation=implementation).margin

    same_as_plain_jax(margins, x)


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.usefixtures("interpreted")
def test_sparse_lookup_of_any_ids(monkeypatch, compared):
    from lutjax.kernels._triton import sparse_lookup

    monkeypatch.setattr(sparse_lookup, "_COMPARED", 2**13 if compared else 0)
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.integers(-4, 5, (3, 4, 5)) / 4, jnp.float32)
    margin = jnp.asarray(rng.integers(-4, 5, (37, 3)) / 4, jnp.float32)
    index, flip = (jnp.asarray(rng.integers(-3, 9, margin.shape), jnp.int32) for _ in range(2))
    targets = jnp.asarray(rng.integers(-3, 9, (1, 4, 5)), jnp.int32)

    def look_up(implementation, weights, margin):
        d = lutjax.Detection(index, flip, margin, 2)
        return lutjax.sparse_lookup(weights, d, targets, 6, implementation=implementation)

    same_as_plain_jax(look_up, weights, margin)


def ways_of_rows(dtype, coefficient_dtype):
    """Return tables of 2 groups, two ways to read them, and cotangents: some coefficients are 0, and their rows infinite."""
    rng = np.random.default_rng(0)
    weights, dy = (jnp.asarray(rng.integers(-8, 9, shape), dtype) for shape in ((6, 5, 7), (13, 14)))
    if jnp.issubdtype(dtype, jnp.floating):
        weights = weights.at[:, -1].set(jnp.inf)
    ways = []
    for _ in range(2):
        index = rng.integers(-3, 9, (6, 13))
        coefficients = np.where(index >= 4, 0, rng.integers(-2, 3, index.shape))
        ways.append((jnp.asarray(index, jnp.int32), jnp.asarray(coefficients, coefficient_dtype)))
    return weights, ways, dy


@pytest.mark.parametrize("accumulate", [None, slow(lutjax.FixedPoint(2.0**8))])
@pytest.mark.usefixtures("interpreted")
def test_rows_in_ways(accumulate):
    """Functions that have the signatures of those in plain JAX, for reads that users write themselves."""
    from lutjax.kernels._triton import _weighted_rows as in_triton
    from lutjax.kernels._xla import _row_gathers as in_plain_jax

    weights, ways, dy = ways_of_rows(jnp.float32, jnp.float32)
    device = Device(lutjax.Backend.CPU, "cpu")
    finite = jnp.where(jnp.isinf(weights), 9, weights)
    total = jnp.ones(weights.shape, jnp.float32 if accumulate is None else jnp.int32)

    def results(rows):
        index = tuple(index for index, _ in ways)
        first, second = rows.products(finite, index, dy, device, accumulate, 2)
        assert rows.products(finite, (), dy, device, accumulate, 2) == ()
        return {
            "sums": rows.sum_ways(weights, ways, device, accumulate, 2),
            "products of the first way": first,
            "products of the second way": second,
            "additions": rows.add_ways(total, ways, dy, device, accumulate, 2),
        }

    actual, expected = (jax.jit(functools.partial(results, rows))() for rows in (in_triton, in_plain_jax))
    assert jnp.isfinite(expected["sums"]).all()
    testing.assert_all_close("rows in ways", actual, expected)


@pytest.mark.usefixtures("interpreted")
def test_rows_of_integers():
    from lutjax.kernels._triton import _weighted_rows as in_triton
    from lutjax.kernels._xla import _row_gathers as in_plain_jax

    weights, ways, _ = ways_of_rows(jnp.int8, jnp.int32)
    device = Device(lutjax.Backend.CPU, "cpu")
    actual, expected = (rows.sum_ways(weights, ways, device, None, 2) for rows in (in_triton, in_plain_jax))
    assert actual.dtype == expected.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_blocks_of_detectors_in_several_groups(monkeypatch):
    """Sums of updates that begin in the middle of a group, launches that own detectors of two groups, a last block alone."""
    from lutjax.kernels._triton import _row_additions, _weighted_rows

    case = testing.case("weighted_lookup", "groups", detectors=9)
    n_rows, n_outputs = case.differentiable["weights"].shape[1:]
    monkeypatch.setattr(_row_additions, "_SUMS", 4 * n_rows * n_outputs)
    monkeypatch.setattr(_weighted_rows, "_TOGETHER", 4 * 4 * n_rows * n_outputs)
    launch = tuning.Launch(rows=4, outputs=4, detectors=2, warps=1)
    with tuning.use(
        dict.fromkeys(
            ("weighted_lookup.forward", "weighted_lookup.products", "weighted_lookup.table"), launch
        )
    ):
        testing.check(case, "triton", transformation="jit")
        testing.check_update(case, "triton", tables.SGD(weight_decay=0.25))


@pytest.mark.parametrize(
    ("shape", "launch"),
    [
        ("funnel", tuning.Launch(rows=2, outputs=4, detectors=2, warps=1)),
        slow("funnel", tuning.Launch(rows=4, outputs=8, detectors=0, warps=1)),
        slow("primes", tuning.Launch(rows=4, outputs=4, detectors=3, warps=1)),
        slow("large_fan_out", tuning.Launch(rows=1, outputs=32, detectors=2, warps=1)),
        slow("one", tuning.Launch(rows=1, outputs=1, detectors=0, warps=1)),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_networks_in_tiles_and_blocks(shape, launch):
    """Programs with several blocks of samples, and layers of several tiles of gates."""
    with tuning.use(dict.fromkeys(("gate_network.forward", "gate_network.backward"), launch)):
        testing.check(testing.case("gate_network", shape), "triton", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("with_readers", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.usefixtures("interpreted")
def test_networks_side_by_side(with_readers, nested):
    """Networks that are mapped with all that is theirs run in one launch, and are those that run one by one."""
    sizes, n_inputs, n_calls = (6, 4, 3), 5, 4
    random = np.random.default_rng(0)
    layers = list(zip((n_inputs, *sizes[:-1]), sizes, strict=True))
    wires = [random.integers(0, before, (n_calls, n, 2)) for before, n in layers]
    readers = [
        jnp.stack([lutjax.readers(jnp.asarray(w), before, fan_out=2 * n) for w in of_layer])
        for of_layer, (before, n) in zip(wires, layers, strict=True)
    ]
    x = jnp.asarray(random.integers(0, 9, (n_calls, n_inputs, 7)) / 8, jnp.float32)
    coefficients = jnp.asarray(random.integers(-2, 3, (4, sum(sizes))) / 2, jnp.float32)  # of all
    dy = jnp.asarray(random.integers(-4, 5, (n_calls, sizes[-1], 7)) / 4, jnp.float32)

    def both(x, coefficients, wires, readers, dy):
        def run(x, coefficients):
            lists = readers if with_readers else None
            options = {"sizes": sizes, "feature_axis": 0, "implementation": "triton"}
            return gate_network(x, coefficients, wires, readers=lists, **options)

        y, pull = jax.vjp(run, x, coefficients)
        return y, *pull(dy)

    own = (x, jnp.asarray(np.concatenate(wires, 1)), readers, dy)
    expected = [
        both(one[0], coefficients, *one[1:])
        for one in (jax.tree.map(operator.itemgetter(i), own) for i in range(n_calls))
    ]
    mapped, axes = both, (0, None, 0, 0, 0)
    if nested:
        own, mapped = (
            jax.tree.map(lambda a: a.reshape(2, n_calls // 2, *a.shape[1:]), own),
            jax.vmap(both, axes),
        )
    mapped = jax.vmap(mapped, axes)
    assert "scan" not in str(jax.make_jaxpr(mapped)(own[0], coefficients, *own[1:]))
    found = mapped(own[0], coefficients, *own[1:])
    for actual, *ones in zip(found, *expected, strict=True):
        np.testing.assert_array_equal(actual.reshape(n_calls, *ones[0].shape), np.stack(ones))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_samples_that_do_not_exist_add_nothing():
    """An infinite coefficient times the inputs of such a sample, which are 0, would be NaN in all sums."""
    wires = np.array([[0, 1], [1, 2], [0, 1], [1, 0], [0, 1]])
    readers = [lutjax.readers(w, n) for w, n in zip(np.split(wires, (2, 4)), (3, 2, 2), strict=True)]
    coefficients = jnp.full((4, 5), 0.5).at[1, 0].set(jnp.inf).at[3, 2].set(jnp.inf)

    def run(implementation, x, coefficients):
        options = {"sizes": (2, 2, 1), "feature_axis": 0, "implementation": implementation}
        return gate_network(x, coefficients, wires, readers=readers, **options)

    x = jnp.ones((3, 3))
    found = [
        (y, *pull(jnp.ones_like(y)))
        for y, pull in (jax.vjp(functools.partial(run, name), x, coefficients) for name in ("triton", "xla"))
    ]
    for actual, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert np.isposinf(found[0][0]).any()


ONE_PROGRAM = {
    f"scored_lut.{kernel}": tuning.Launch(rows=16, outputs=16, warps=1) for kernel in ("forward", "backward")
}
"""All tables of a group, whose 11 outputs are in two tiles; by rule a program takes one of so few tables."""


def scored_arrays(read, dtype=jnp.float32):
    """Return inputs with both zeros and ties, tables, anchors with ids beyond the inputs, and scalars."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.choice([0.0, -0.0, 0.25, -0.25, 0.5, 3.0, -2.0], (13, 2, 6)), jnp.float32)
    weights = jnp.asarray(rng.integers(-8, 9, (6, 8, 11)) / 4, dtype)
    anchors = jnp.asarray(rng.integers(-3, 9, (6, 3, 2)), jnp.int32)
    return x, weights, anchors, read.initial()


@pytest.mark.parametrize(
    "read",
    [
        reads.Confidence(),
        reads.Hard(),
        *(
            slow(r)
            for r in (
                reads.Confidence(1),
                reads.Blend(),
                reads.SoftSign(),
                reads.PowersOfTwo(),
                reads.PowersOfTwo(1),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("interpreted")
def test_scored_reads_of_any_input(read):
    """Zeros, ties, ids beyond the inputs, NaN and infinities; rows that are infinite where they are not read."""
    x, weights, anchors, scalars = scored_arrays(read)

    def run(implementation, x, weights, scalars):
        return lutjax.scored_lut(
            x, weights, anchors, scalars, read=read, groups=2, implementation=implementation
        )

    with tuning.use(ONE_PROGRAM):
        same_as_plain_jax(run, x, weights, scalars)
        x = x.at[3, 0, 2].set(jnp.nan).at[5, 1, 4].set(jnp.inf).at[7].set(0)
        if not read.rounds_tables:
            # All margins of sample 7 are 0: of scores nothing is read.
            weights = weights.at[:, 0, 0].set(jnp.inf)
        actual, expected = (run(implementation, x, weights, scalars) for implementation in ("triton", "xla"))
        testing.assert_close("y", actual, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_constants_are_those_of_the_read(monkeypatch):
    read = reads.PowersOfTwo()
    x, weights, anchors, scalars = scored_arrays(read)

    def run(implementation, x, weights, scalars):
        return lutjax.scored_lut(
            x, weights, anchors, scalars, read=read, groups=2, implementation=implementation
        )

    ours = run("triton", x, weights, scalars)
    other = reads.Rounding(-2, 2, 2, negligible=1, most_shift=8, least_exact=1.0, most_ratio=2.0)
    monkeypatch.setattr(reads.PowersOfTwo, "rounding", other)
    _transforms.forget()
    try:
        same_as_plain_jax(run, x, weights, scalars)
        assert np.any(run("triton", x, weights, scalars) != ours)
    finally:
        _transforms.forget()


@pytest.mark.slow
@pytest.mark.parametrize("sum_groups", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.usefixtures("interpreted")
def test_scored_reads_of_integers(parts, sum_groups):
    """Outputs are those of plain JAX and of the form that is trained, to the last bit; NaN where an input is NaN."""
    read = reads.PowersOfTwo()
    x, weights, anchors, scalars = scored_arrays(read)
    x = x.at[3, 0].set(jnp.nan)
    tables = lutjax.quantize_tables(weights, groups=2)

    def run(implementation, weights):
        options = {"groups": 2, "sum_groups": sum_groups, "implementation": implementation}
        return lutjax.scored_lut(x, weights, anchors, scalars, read=read, **options)

    with tuning.use({"scored_lut.forward": tuning.Launch(rows=16, outputs=8, detectors=3 // parts, warps=1)}):
        actual, trained, expected = run("triton", tables), run("triton", weights), run("xla", tables)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual, trained)
    assert np.isnan(actual[3, 0]).all()
    assert np.isfinite(actual).any()


@pytest.mark.parametrize("needed", [slow("x"), "weights", slow("keep"), slow("scalars")])
@pytest.mark.usefixtures("interpreted")
def test_one_cotangent_of_scored_reads(needed):
    read = reads.Confidence()
    x, weights, anchors, scalars = scored_arrays(read, jnp.bfloat16)
    arrays = {"x": x, "weights": weights, "scalars": scalars, "keep": jnp.ones((13, 6)).at[::2].set(0)}

    def run(implementation, array):
        a = {**arrays, needed: array}
        return lutjax.scored_lut(
            a["x"],
            a["weights"],
            anchors,
            a["scalars"],
            read=read,
            groups=2,
            keep=a["keep"],
            implementation=implementation,
        )

    same_as_plain_jax(run, arrays[needed])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("primes", "float32"),
        slow("hard", "bfloat16"),
        slow("sum_groups", "float32"),
        slow("powers", "float32"),
        slow("powers_one_way", "float32"),
        slow("groups", "bfloat16"),
        slow("shared_input", "float16"),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_scored_reads_whose_tables_are_summed_by_owners(monkeypatch, shape, dtype):
    triton_interpreter.own_always(monkeypatch)
    testing.check(testing.case("scored_lut", shape, dtype), "triton", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype"), [slow("primes", "float32"), ("sum_groups", "bfloat16")])
@pytest.mark.usefixtures("interpreted")
def test_samples_of_owners_in_parts(monkeypatch, shape, dtype):
    """Rows and factors of all samples do not fit the memory that they may have."""
    triton_interpreter.own_always(monkeypatch)
    monkeypatch.setattr(_owned_columns, "_MOST_SCRATCH", 256)
    case = testing.case("scored_lut", shape, dtype)
    assert _owned_columns.parts(case.differentiable["weights"].shape, groups=1, ways=2, n_samples=5) > 1
    testing.check(case, "triton", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("transformation", [t for t in testing.TRANSFORMATIONS if t != "export"])
@pytest.mark.usefixtures("interpreted")
def test_transformations_of_sums_of_owners(monkeypatch, transformation):
    triton_interpreter.own_always(monkeypatch)
    testing.check(split("scored_lut"), "triton", transformation=transformation)


@pytest.mark.parametrize(
    ("ways", "dtype", "n", "groups", "each", "n_rows", "n_outputs"),
    [
        (2, "float32", 83, 1, 3, 4, 20),
        (1, "bfloat16", 99, 2, 2, 2, 16),
        slow(2, "bfloat16", 99, 2, 1, 256, 5),
        slow(1, "float32", 16, 1, 4, 8, 33),
        slow(2, "float32", 5, 2, 2, 2, 16),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_sums_of_owners(ways, dtype, n, groups, each, n_rows, n_outputs):
    """Samples of all rows, odd numbers of everything, rows that meet; what is not added, or not a number, goes where it should."""
    rng = np.random.default_rng(n)
    n_tables = groups * each
    first = rng.integers(0, n_rows, (n_tables, n))
    row = np.stack([first, first ^ (1 << rng.integers(0, n_rows.bit_length() - 1, first.shape))])[:ways]
    factors = rng.normal(size=(ways, n_tables, n)).astype(np.float32)
    factors[rng.random(factors.shape) < 0.3] = 0
    dy = np.array(jnp.asarray(rng.normal(size=(n, groups, n_outputs)), dtype).astype(jnp.float32))
    if n > 16:
        factors[:, :, 7], dy[7] = 0, np.inf  # adds nothing
        factors[0, 0, 8], factors[-1, -1, 9] = np.nan, np.inf
    expected = np.zeros((n_tables, n_rows, n_outputs))
    with np.errstate(all="ignore"):
        for k, t, b in np.argwhere(factors != 0):
            expected[t, row[k, t, b]] += factors[k, t, b] * dy[b, t // each].astype(np.float64)
    actual = _owned_columns.sums(
        jnp.asarray(_owned_columns.places.fn(row[0], row[-1]), jnp.int32),
        jnp.asarray(factors),
        jnp.asarray(dy, dtype),
        expected.shape,
        groups,
        Device(Backend.GPU, GPUS[90]),
    )
    testing.assert_close("sums", actual, expected.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class Closest(reads.Read):
    """A read that lutjax does not have."""

    def initial(self):
        return {"log_scale": jnp.float32(0.5)}

    def select(self, u, scalars):
        index, flip, closest = reads.address(u)
        return [(index, closest * jnp.exp(scalars["log_scale"])), (index ^ flip, closest)]


@pytest.mark.slow
@pytest.mark.parametrize("read", [Closest(), slow(type("Derived", (reads.Hard,), {})())], ids=str)
@pytest.mark.usefixtures("interpreted")
def test_scored_reads_that_users_write(read):
    x, weights, anchors, scalars = scored_arrays(read)

    def run(implementation, x, weights, scalars):
        return lutjax.scored_lut(
            x, weights, anchors, scalars, read=read, groups=2, implementation=implementation
        )

    same_as_plain_jax(run, x, weights, scalars)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interleave", "window", "start", "epsilon"),
    [(False, None, 3, 0.375), slow(True, 2, -2, 0.0), slow(False, 0, 0, 0.0), slow(False, None, 2**30, 0.0)],
)
@pytest.mark.usefixtures("interpreted")
def test_pair_attention_of_any_place(interleave, window, start, epsilon):
    """Ids beyond the inputs, places that only the run knows, distances beyond the positions."""
    rng = np.random.default_rng(0)

    def grid(*shape):
        return jnp.asarray(rng.integers(-8, 9, shape) / 4, jnp.float32)

    x, keys, weights, positions = grid(2, 6, 3), grid(2, 9, 3), grid(3, 8, 5), grid(4, 3, 3)
    anchors = jnp.asarray(rng.integers(-3, 14, (3, 3, 2)), jnp.int32)

    def attend(implementation, x, keys, weights, positions):
        return lutjax.lut_pair_attention(
            x,
            weights,
            anchors,
            positions,
            keys=keys,
            interleave=interleave,
            window=window,
            query_start=jnp.int32(start),
            epsilon=epsilon,
            implementation=implementation,
        )

    same_as_plain_jax(attend, x, keys, weights, positions)


@pytest.mark.parametrize("op", ["bilinear_gates", slow("binary_lut")])
@pytest.mark.usefixtures("interpreted")
def test_gates_of_any_ids(op):
    """Wires and readers that do not exist, lists of readers with room, NaN, both zeros."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (5, 21)) / 4
    x[0, :3] = [0.0, -0.0, np.nan] if op == "binary_lut" else 0.0
    x = jnp.asarray(x, jnp.float32)
    shape = (4, 6) if op == "bilinear_gates" else (6, 4)
    parameter = jnp.asarray(rng.integers(-8, 9, shape) / 4, jnp.float32)
    wires = jnp.asarray(rng.integers(-3, 9, (6, 2)), jnp.int32)

    def gates(implementation, x, parameter):
        f = getattr(lutjax, op)
        return f(x, parameter, wires, feature_axis=0, implementation=implementation)

    same_as_plain_jax(gates, x, parameter)

    def gathered(implementation, x):
        readers = jnp.asarray(np.random.default_rng(1).integers(-9, 20, (5, 7)), jnp.int32)
        f = getattr(lutjax, op)
        return f(x, parameter, wires, readers=readers, feature_axis=0, implementation=implementation)

    same_as_plain_jax(gathered, x)


# ------------------------------------------------------------------------------------- compiled
@pytest.fixture
def launches(monkeypatch):
    """Return the kernels that would run: ``{(kernel, types of arrays): arguments of the launch}``."""
    recorded = {}

    def record(inputs, outputs, zeroed, in_place, common):
        arrays = (*inputs, *in_place, *outputs, *zeroed, *in_place)
        recorded[common["kernel"], tuple("*" + triton_interpreter.NAMES[a.dtype.name] for a in arrays)] = (
            common
        )
        return tuple(jnp.zeros(a.shape, a.dtype) for a in (*outputs, *zeroed, *in_place))

    monkeypatch.setattr(_triton_launch, "_run", record)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    _transforms.forget()
    yield recorded
    _transforms.forget()


@pytest.fixture
def kernel_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def run_on(device_kind, case, accumulate=None):
    """Traces an op, its gradient and the update of its table for a device that need not be here."""
    testing.check_lowering(case, "triton", platform="cuda", device_kind=device_kind, accumulate=accumulate)
    if case.op not in UPDATED:
        return

    def update(differentiable, ct):
        f = functools.partial(testing._call, case, lutjax, "triton", accumulate=accumulate)
        _, gradients = testing._factored(f, differentiable, ct)
        weights = differentiable["weights"]
        return lutjax.update_table(weights, gradients["weights"], 0.25, implementation="triton")

    y = jax.eval_shape(functools.partial(testing._call, case, lutjax.reference, None), case.differentiable)
    with _ahead_of_time.tracing_for("cuda", device_kind):
        jax.eval_shape(update, case.differentiable, y)


def compiled(common, types, capability):
    constants = dict(common)
    kernel = constants.pop("kernel")
    n_arrays, names = len(types), kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={**dict(zip(names, types, strict=False)), **dict.fromkeys(names[n_arrays:], "constexpr")},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if i >= n_arrays},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(n_arrays)},
    )
    options = {"num_warps": common["num_warps"], "num_stages": common["num_stages"], "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def check_compilation(launches, capability):
    assert launches
    for (kernel, types), common in launches.items():
        binary = compiled(common, types, capability)
        assert f".target sm_{capability}" in binary.asm["ptx"], kernel
        assert binary.metadata.shared <= 1024 * _nvidia._SHARED_MEMORY[capability], kernel


@pytest.mark.parametrize(
    ("op", "capability"),
    slow_except(itertools.product(OPS, GPUS), "lookup-90", "bilinear_gates-90"),
)
@pytest.mark.usefixtures("kernel_cache")
def test_compiles(op, capability, launches):
    run_on(GPUS[capability], testing.case(op, compiled_size(op)))
    check_compilation(launches, capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "shape"),  # with and without readers
    [
        ("logic_trees", "pools"),
        ("logic_trees", "apart"),
        ("gate_network", "readers"),
        ("gate_network", "deep"),
    ],
)
@pytest.mark.usefixtures("kernel_cache")
def test_gates_add_without_atomics(op, shape, launches):
    run_on(GPUS[90], testing.case(op, shape))
    for (kernel, types), common in launches.items():
        assert "atomic" not in compiled(common, types, 90).asm["ttir"], kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80, 100])
@pytest.mark.usefixtures("kernel_cache")
def test_counted_attention_compiles(monkeypatch, capability, launches):
    """Compile at the sizes of blocks that run."""
    triton_interpreter.count_always(monkeypatch)
    sizes = {"batch": 2, "queries": 300, "detectors": 2, "bits": 6, "position_bits": 4, "outputs": 32}
    run_on(GPUS[capability], testing.case("lookup_attention", "tiles", **sizes))
    check_compilation(launches, capability)
    assert "_add_counted" in {kernel.fn.__name__ for kernel, _ in launches}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80, 100])
@pytest.mark.usefixtures("kernel_cache")
def test_sums_of_owners_compile(capability, launches):
    """Kernels fit shared memory and registers at sizes that they are chosen for."""
    case = testing.case("scored_lut", "split", batch=4096, inputs=64, detectors=256, bits=8, outputs=48)
    testing.check_lowering(case, "triton", platform="cuda", device_kind=GPUS[capability])
    owned = {
        key: common for key, common in launches.items() if key[0].fn.__name__ in ("_rotate", "_add_owned")
    }
    assert len(owned) == 2
    check_compilation(owned, capability)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_cache")
def test_all_of_sums_of_owners_compiles(monkeypatch, launches):
    triton_interpreter.own_always(monkeypatch)
    for shape, dtype in (("split", "bfloat16"), ("hard", "float32")):
        run_on(GPUS[90], testing.case("scored_lut", shape, dtype, outputs=48))
    assert "_add_owned" in {kernel.fn.__name__ for kernel, _ in launches}
    check_compilation(launches, 90)


@pytest.mark.usefixtures("kernel_cache")
def test_products_of_both_ways_leave_their_loop(launches):
    """Triton leaves a variable out of a loop if it ends with the value that another began with; Python does not."""
    run_on(GPUS[90], testing.case("scored_lut", "split"))
    ((types, common),) = (
        (types, common)
        for (kernel, types), common in launches.items()
        if kernel.fn.__name__ == "_differentiate"
    )
    ir = compiled(common, types, 90).asm["ttir"]
    (carried,) = re.findall(r"scf.for %way = .* iter_args\(([^)]*)\)", ir)
    assert {"%main", "%other"} <= set(re.findall(r"%[a-z]+", carried))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype", "accumulate"),
    [
        *((op, dtype, None) for op in OPS for dtype in ("bfloat16", "float16", "float64")),
        *((op, "float32", lutjax.FixedPoint(2.0**16)) for op in SUMMED),
    ],
)
@pytest.mark.usefixtures("kernel_cache")
def test_compiles_in_other_arithmetic(op, dtype, accumulate, launches):
    with jax.enable_x64(dtype == "float64"):
        run_on(GPUS[90], split(op, dtype), accumulate)
    check_compilation(launches, 90)


@pytest.fixture
def jax_triton(monkeypatch):
    """The package itself, with a stand-in for the part that jaxlib has with CUDA alone: what takes compiled kernels."""
    why_not = _triton.unfit_packages()
    if why_not:
        try:
            importlib.import_module("jax_triton")
        except ImportError:
            pytest.skip(f"jax-triton cannot be imported here: {why_not}")
        compiled_kernel = SimpleNamespace(to_proto=lambda *_: b"a kernel")
        library = importlib.import_module("jaxlib.gpu_triton")
        for name in ("TritonKernel", "TritonKernelCall", "create_array_parameter", "create_scalar_parameter"):
            monkeypatch.setattr(library, name, lambda *_: compiled_kernel, raising=False)
        monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
        monkeypatch.setattr(lutjax.kernel_registry, "_resolved", {})
        _transforms.forget()


@pytest.mark.usefixtures("jax_triton", "kernel_cache")
@pytest.mark.parametrize("op", slow_except(OPS, "lookup", "lookup_attention", "binary_lut"))
def test_lowers_through_jax_triton(op):
    """Lower with the package itself, and its kernels in the lowered module."""
    testing.check_lowering(split(op), "triton", platform="cuda", device_kind=GPUS[90])


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32"), slow("float16")])
@pytest.mark.parametrize("op", slow_except(OPS, "lookup", "bilinear_gates"))
@pytest.mark.usefixtures("launches")
def test_several_backends_in_one_process(op, dtype, monkeypatch):
    """Trace kernels of GPU and CPU, where both are there: they give the same shapes and dtypes."""
    devices = (Device(Backend.GPU, GPUS[90]), Device(Backend.CPU, "cpu"))
    monkeypatch.setattr("lutjax.dispatch.registry._default_devices", lambda: devices)
    of_op = testing.program(testing.case(op, typed_size(op), dtype), ("triton", "xla"))
    traced = jax.jit(of_op.function).trace(*of_op.shapes())
    assert "platform_index" in str(traced.jaxpr)
    assert traced.out_info == jax.eval_shape(of_op.expected, *of_op.shapes())


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_cache")
def test_layers_of_trees_compile(launches):
    """The layer chooses one kernel for whole trees and their pools on a GPU."""
    with _ahead_of_time.tracing_for("cuda", GPUS[90]):
        layer = nnx.eval_shape(
            lambda: LogicConv((6, 6, 2), 3, padding=1, pool=2, feature_axis=0, rngs=nnx.Rngs(0))
        )
        graph, params, others = nnx.split(layer, nnx.Param, ...)

        def loss(params, others, x):
            return nnx.merge(graph, params, others)(x).sum()

        jax.eval_shape(
            jax.grad(loss, argnums=(0, 2)), params, others, jax.ShapeDtypeStruct((2, 6, 6, 32), jnp.float32)
        )
    assert {kernel.fn.__name__ for kernel, _ in launches} == {"_apply", "_reduce", "_add"}
    check_compilation(launches, 90)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_cache")
def test_a_step_of_the_automaton_is_two_networks(launches):
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 4, 2), update=(520, 40, 2))
    with _ahead_of_time.tracing_for("cuda", GPUS[90]):
        graph, params, others = nnx.split(
            nnx.eval_shape(lambda: LogicCA(config, rngs=nnx.Rngs(0))), nnx.Param, ...
        )

        def loss(params, others, x):
            return nnx.merge(graph, params, others)(x, 3).sum()

        grids = jax.ShapeDtypeStruct((3, 8, 8, 2), jnp.float32)
        jax.eval_shape(jax.grad(loss, argnums=(0, 2)), params, others, grids)
    found = [
        (kernel.fn.__name__, vars(common["c"])["LAYERS"].value) for (kernel, _), common in launches.items()
    ]
    assert set(found) == {(kernel, 3) for kernel in ("_apply", "_reduce")}
    check_compilation(launches, 90)


IMAGE_LAYERS = {
    "conv": lambda rngs: nnx_layers.ConvLUT(
        (6, 6, 4), 6, kernel=3, padding=1, stride=2, groups=2, n_detectors=8, n_anchors=3, rngs=rngs
    ),
    "windows": lambda rngs: nnx_layers.WindowLUT(
        (6, 6, 4), 6, kernel=3, stride=3, n_detectors=8, n_anchors=3, rngs=rngs
    ),
    "fields": lambda rngs: nnx_layers.SpatialLUT(
        wiring.projections(None, (6, 6, 4), (3, 3), groups=(2, 2), receptive=3, projective=2),
        n_detectors=8,
        n_anchors=3,
        rngs=rngs,
    ),
}


@pytest.mark.parametrize(
    ("name", "compiles"), [("conv", False), *(slow(name, True) for name in IMAGE_LAYERS)]
)
@pytest.mark.usefixtures("kernel_cache")
def test_layers_over_images_detect_and_look_up_in_one_kernel(name, compiles, launches):
    with _ahead_of_time.tracing_for("cuda", GPUS[90]):
        layer = nnx.eval_shape(lambda: IMAGE_LAYERS[name](nnx.Rngs(0)))
        graph, params, others = nnx.split(layer, nnx.Param, ...)

        def loss(params, others, x):
            return nnx.merge(graph, params, others)(x).sum()

        images = jax.ShapeDtypeStruct((512, 6, 6, 4), jnp.float32)
        jax.eval_shape(jax.grad(loss, argnums=(0, 2)), params, others, images)
    found = {kernel.fn.__name__ for kernel, _ in launches}
    assert found == {"_sum_rows", "_multiply_and_add_rows", "_sort", "_collect"}
    if compiles:
        check_compilation(launches, 90)


@pytest.mark.usefixtures("jax_triton", "kernel_cache")
def test_updates_lower_in_place():
    d = jax.eval_shape(lutjax.detect_signs, jax.ShapeDtypeStruct((16, 4, 2), jnp.float32))
    weights = jax.ShapeDtypeStruct((4, 4, 8), jnp.float32)

    def step(weights, d):
        def loss(params):
            return jnp.sum(lutjax.lookup(params["weights"], d, implementation="triton"))

        _, gradients = tables.value_and_grad(loss)({"weights": weights})
        return lutjax.update_table(weights, gradients["weights"], 0.5, implementation="triton")[0]

    lowered = _ahead_of_time.lower(step, weights, d, platform="cuda", device_kind=GPUS[90])
    (call,) = (line for line in lowered.mlir_module().splitlines() if "output_operand_aliases = [#" in line)
    # The target that CUDA graphs record, whatever version of jax-triton.
    operands = re.search(r"@triton_kernel_call_ffi\(([^)]*)\)", call).group(1).split(", ")
    table = re.search(r"output_tuple_indices = \[0\], operand_index = (\d+)", call).group(1)
    assert operands[int(table)] == "%arg0"


def on_gpu(function, *arguments):
    """Traces a function for an H200."""
    with _ahead_of_time.tracing_for("cuda", GPUS[90]):
        return jax.eval_shape(function, *arguments)


def wide_look_up(implementation=None):
    d = jax.eval_shape(lutjax.detect_signs, jax.ShapeDtypeStruct((4096, 4, 2), jnp.float32))
    weights = jax.ShapeDtypeStruct((4, 4, 1024), jnp.float32)
    return functools.partial(lutjax.lookup, implementation=implementation), weights, d


@pytest.mark.usefixtures("launches")
def test_a_launch_that_does_not_fit_shared_memory():
    launch = tuning.Launch(rows=512, outputs=512)
    with (
        tuning.use({"lookup.forward": launch}),
        pytest.raises(
            ValueError,
            match=r"a tile of 512 rows and 512 outputs takes 1048576 bytes; the shared memory of NVIDIA H200",
        ),
    ):
        on_gpu(*wide_look_up("triton"))
    assert on_gpu(*wide_look_up("triton")).shape == (4096, 1024)  # the launch was that of one block of calls


def test_why_not_triton(monkeypatch):
    look_up, weights, d = wide_look_up("triton")
    with pytest.raises(lutjax.NoImplementationError, match=r"runs on gpu, the call runs on cpu"):
        jax.eval_shape(look_up, weights, d)
    registry = lutjax.kernel_registry
    monkeypatch.setattr(_triton, "unfit_packages", lambda: "needs jax-triton 0.3.1 or newer, found 0.2.0")
    monkeypatch.setattr(registry, "_resolved", {})  # what was chosen with other packages
    with pytest.raises(
        lutjax.NoImplementationError, match=r"needs jax-triton 0\.3\.1 or newer, found 0\.2\.0"
    ):
        on_gpu(look_up, weights, d)
    assert on_gpu(functools.partial(look_up, implementation=None), weights, d).shape == (4096, 1024)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    monkeypatch.setattr(registry, "_resolved", {})
    for kind, reason in (
        ("NVIDIA Something", "whose compute capability is known, not NVIDIA Something"),
        ("AMD Instinct MI300X", "needs an NVIDIA GPU"),
    ):
        device = Device(lutjax.Backend.GPU, kind)
        with pytest.raises(lutjax.NoImplementationError, match=reason):
            registry.resolve("lookup", weights, d, device=device, implementation="triton")
    device = Device(lutjax.Backend.GPU, GPUS[90])
    d = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype if a.dtype != "int32" else "int16"), d)
    request = Request("forward", Lookup.of((weights, d), {"accumulate": None}.items()), device)
    with pytest.raises(lutjax.NoImplementationError, match="has no kernel for int16"):
        registry.resolve_request(request, ("triton",))


@pytest.mark.parametrize(
    ("dtype", "inputs", "gates", "platform"),
    [("float32", 800, 8000, "xla"), ("float32", 800, 80_000, "triton"), ("bfloat16", 800, 8000, "triton")],
)
@pytest.mark.usefixtures("launches")
def test_few_gates_are_left_to_plain_jax(dtype, inputs, gates, platform):
    """This holds for float32 values."""
    shape = jax.ShapeDtypeStruct
    call = (
        shape((128, inputs), dtype),
        shape((4, gates), jnp.float32),
        shape((gates, 2), jnp.int32),
    )
    device = Device(Backend.GPU, GPUS[90])
    spec = lutjax.kernel_registry.resolve("bilinear_gates", *call, device=device)
    assert spec.platform == platform


@pytest.mark.parametrize(
    ("sizes", "platform", "reason"),
    [
        ((512, 512, 128), "triton", None),
        ((512,), "xla", "has one layer, which is bilinear_gates"),
        (
            (8000,) * 6,
            "xla",
            "keeps values of all gates in the caches, at most 8192 of a sample, here 80000",
        ),
    ],
)
@pytest.mark.usefixtures("launches")
def test_networks_whose_values_no_cache_holds_run_layer_by_layer(sizes, platform, reason):
    shape, n_gates = jax.ShapeDtypeStruct, sum(sizes)
    call = (
        shape((128, 800), jnp.float32),
        shape((4, n_gates), jnp.float32),
        shape((n_gates, 2), jnp.int32),
    )
    device = Device(Backend.GPU, GPUS[90])
    spec = lutjax.kernel_registry.resolve("gate_network", *call, sizes=sizes, device=device)
    assert spec.platform == platform
    with _ahead_of_time.tracing_for("cuda", GPUS[90]):
        assert (reason or ": chosen") in lutjax.explain("gate_network", *call, sizes=sizes)


@pytest.mark.usefixtures("launches")
def test_small_updates_are_left_to_plain_jax():
    _, weights, d = wide_look_up()

    def resolve(batch, **options):
        at = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype), d)
        device = Device(lutjax.Backend.GPU, GPUS[90])
        return lutjax.kernel_registry.resolve(
            "lookup", weights, at, direction="update", device=device, **options
        )

    assert resolve(4096).platform == "xla"
    assert resolve(4097).platform == "triton"
    assert resolve(4096, implementation="triton").platform == "triton"
    assert resolve(4097, rule=tables.RowAdagrad()).platform == "xla"


@pytest.mark.usefixtures("launches")
def test_numbers_of_an_update_are_counted_in_ways_and_groups():
    """2048 samples of one way with a value are 2**24 numbers, in one group as in two."""
    device = Device(lutjax.Backend.GPU, GPUS[90])
    weights = jax.ShapeDtypeStruct((4, 4, 2048), jnp.float32)

    def resolve(batch, **options):
        index, coefficients = (jax.ShapeDtypeStruct((batch, 4, 2), d) for d in (jnp.int32, jnp.float32))
        return lutjax.kernel_registry.resolve(
            "weighted_lookup", weights, index, coefficients, direction="update", device=device, **options
        ).platform

    for groups in (1, 2):
        assert resolve(2048, groups=groups, valued=1) == "xla"
        assert resolve(2049, groups=groups, valued=1) == "triton"
        assert resolve(1024, groups=groups) == "xla"
        assert resolve(1025, groups=groups) == "triton"


# ------------------------------------------------------------------------------------- tables in the memory of the host
class NoDriver:
    """A driver of a GPU that is not here: nothing is locked."""

    def register(self, address, n_bytes): ...

    def unregister(self, address): ...

    def wait(self): ...

    def copy_out(self, array, out): ...

    def copy_in(self, array, out): ...


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """A host beside a GPU whose kernels the interpreter runs: they read the memory of this process."""
    driver = NoDriver()
    monkeypatch.setattr(_registered, "driver", lambda: driver)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    monkeypatch.setattr(host, "devices_of", lambda _: (Device(Backend.GPU, GPUS[90]),))


def host_table(shape, dtype=np.float32):
    table = host.HostTable(shape, dtype, host.Normal(1.0))
    table.draw(jax.random.key(0))
    return table


@pytest.mark.parametrize(
    ("shape", "dtype", "n"),
    [
        ((3, 9, 5), "float32", 1),
        slow((2, 50, 128), "float16", 300),  # several tiles for a program
        slow((1, 7, 700), "float32", 3),
        slow((2, 40, 8), "bfloat16", 1100),
    ],
    ids=str,
)
@pytest.mark.usefixtures("interpreted", "beside_a_gpu")
def test_rows_of_the_host(shape, dtype, n):
    table = host_table(shape, jnp.dtype(dtype))
    index = np.random.default_rng(0).integers(-3, shape[1] + 3, (n, shape[0], 2)).astype(np.int32)
    read = jax.jit(lambda index: table.read(index)[0])
    np.testing.assert_array_equal(read(index), table.gather(index))
    before = np.asarray(read(index))
    table.draw(jax.random.key(1))
    np.testing.assert_array_equal(read(index), table.gather(index))
    assert (np.asarray(read(index)) != before).any()
    if n == 3:
        several = np.stack([index, index + 1, index, index - 1]).reshape(2, 2, *index.shape)
        mapped = jax.jit(jax.vmap(jax.vmap(lambda index: table.read(index)[0])))(several)
        np.testing.assert_array_equal(mapped[1, 1], table.gather(index - 1))
        np.testing.assert_array_equal(mapped[0, 1], table.gather(index + 1))
        assert read(index[:0]).shape == (1, 0, 700)
    table.weights = None
    assert np.isnan(np.asarray(read(index), np.float32)).all()


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted", "beside_a_gpu")
def test_layers_whose_rows_lie_in_the_host():
    layer = nnx_layers.ProductKeyMemory(6, 6, n_keys=5, heads=2, k=3, placement="host", rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    gradients = jax.jit(jax.grad(lambda x: layer(x).sum()))
    found = gradients(x), nnx.jit(lambda layer: layer(x))(layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_registered, "driver", lambda: None)
        jax.clear_caches()
        jax.tree.map(
            np.testing.assert_array_equal, found, (gradients(x), nnx.jit(lambda layer: layer(x))(layer))
        )


@pytest.mark.usefixtures("kernel_cache", "beside_a_gpu")
def test_rows_of_the_host_compile(launches):
    for n in (1, 3000):
        table = host_table((2, 50, 128))
        jax.eval_shape(table.read, jax.ShapeDtypeStruct((n, 2, 1), jnp.int32))
    check_compilation(launches, 90)
    for (_, types), common in launches.items():
        # Whole rows are on their way in few instructions.
        assert "ld.global.v4.b32" in compiled(common, types, 90).asm["ptx"]


@pytest.mark.usefixtures("interpreted", "beside_a_gpu")
def test_programs_of_tables_differ():
    """The address of its cell is a number of a program, and so a part of its key in a cache of compiled programs."""
    tables_there = [host_table((2, 50, 128)) for _ in range(2)]
    for table in tables_there:
        text = (
            jax.jit(lambda index, table=table: table.read(index)[0])
            .lower(np.zeros((1, 2, 1), np.int32))
            .as_text()
        )
        low, high = np.array([table._cell.address], np.uint64).view(np.int32)
        values = low if low == high else f"[{low}, {high}]"
        assert f"dense<{values}> : tensor<2xi32>" in text
    assert len({table._cell.address for table in tables_there}) == 2

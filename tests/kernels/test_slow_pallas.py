"""Further Pallas kernel tests without devices: several blocks along every axis, transformations, and non-finite values."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import RATES, fast_size, rates_of, split, typed_size
from pallas_interpreter import ON_TENSOR_CORES, WITHOUT_MOSAIC, attend, mosaic_gpu

import lutjax
from lutjax import reads, testing
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import (
    _attention_blocks,
    _gate_blocks,
    _limits,
    _shifts,
    _tables,
    detect,
    lut_pair_attention,
)
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.binary_lut import BinaryLut
from lutjax.ops.soft_lut import SoftLut
from lutjax.values._row_rules import SGD

interpreted = pytest.mark.usefixtures("interpreted")
CPU, H200 = Device(lutjax.Backend.CPU, "cpu"), Device(lutjax.Backend.GPU, "NVIDIA H200")
GATES = {call.op: call for call in (BilinearGates, SoftLut, BinaryLut)}
mosaic = pytest.mark.skipif(WITHOUT_MOSAIC is not None, reason=str(WITHOUT_MOSAIC))
gpu_interpreter = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "force_gpu_interpret_mode"),
    reason=WITHOUT_MOSAIC
    or f"jax {jax.__version__} has no interpreter of Mosaic GPU kernels; jax 0.12 has",
)


# ------------------------------------------------------------------------------------- cases
@pytest.mark.parametrize(
    "op", [op for op in ON_TENSOR_CORES if "bfloat16" in testing.cases_of(op).dtypes]
)
@interpreted
def test_bfloat16(op):
    testing.check(testing.case(op, typed_size(op), "bfloat16"), "pallas", transformation="jit")


@pytest.mark.parametrize(
    "transformation",
    # Interpreted kernels call back, which neither remat nor exported programs can.
    [t for t in testing.TRANSFORMATIONS if t not in ("remat", "export", "jit")],
)
@pytest.mark.parametrize("op", ON_TENSOR_CORES)
@interpreted
def test_transformations(op, transformation):
    testing.check(split(op), "pallas", transformation=transformation)


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("op", pallas_interpreter.implemented("tpu", "update"))
@interpreted
def test_updates_at_rates_that_differ(op, kind):
    case = split(op)
    rates = rates_of(case, kind)
    if op in ("lookup_attention", "lut_pair_attention"):
        with pytest.raises(
            lutjax.NoImplementationError, match="adds pairs to rows at one rate for all"
        ):
            testing.check_update(case, "pallas", rates=rates)
    else:
        testing.check_update(case, "pallas", rates=rates)


@mosaic
@pytest.mark.parametrize("op", ["lookup", "sparse_lookup", "lookup_attention"])
def test_lowers_for_gpus_in_fixed_point(monkeypatch, op):
    pallas_interpreter.pretend_triton_runs(monkeypatch)
    options = {
        "platform": "cuda",
        "device_kind": H200.kind,
        "accumulate": lutjax.FixedPoint(2.0**10),
    }
    implementation = ("pallas/gpu", "triton")
    testing.check_lowering(testing.case(op, fast_size(op)), implementation, **options)


def test_lowers_with_some_outputs_at_a_time():
    """Lower a table too large for vector memory."""
    case = testing.case("lookup", "primes", bits=10, detectors=128, outputs=256)
    testing.check_lowering(
        case, "pallas/tpu", platform="tpu", device_kind=_tpus.find_generation("v6e").device_kind
    )


# ------------------------------------------------------------------------------------- look-ups in several blocks
@pytest.mark.parametrize(
    ("bits", "many_rows"), [(1, 64), (4, 64), (3, 2)], ids=["groups", "parts", "resident"]
)
@interpreted
def test_look_ups_in_blocks(monkeypatch, bits, many_rows):
    pallas_interpreter.use_small_blocks(monkeypatch)
    monkeypatch.setattr(_tables, "MANY_ROWS", many_rows)
    sizes = {"batch": 130, "detectors": 3, "outputs": 130} if many_rows > 2 else {"outputs": 130}
    case = testing.case("lookup", "primes", bits=bits, **sizes)
    testing.check(case, "pallas", transformation="jit")
    testing.check_update(case, "pallas")


MANY = {"batch": 130, "detectors": 33, "bits": 3, "outputs": 130}


@pytest.mark.parametrize(("op", "size", "sizes"), [
    ("weighted_lookup", "groups", {"batch": 130, "detectors": 9, "outputs": 130}),
    ("weighted_lookup", "primes", {"rows": 20, "outputs": 130}),
    ("lookup", "groups", {"batch": 130, "detectors": 9, "outputs": 130}),
    ("scored_lut", "groups", MANY),
    ("scored_lut", "sum_groups", MANY),
    ("scored_lut", "shared_input", {"batch": 130, "detectors": 33}),
    ("scored_lut", "powers", {"batch": 130, "detectors": 22}),
])  # fmt: skip
@interpreted
def test_weighted_rows_in_blocks(monkeypatch, op, size, sizes):
    pallas_interpreter.use_small_blocks(monkeypatch, reads=False)
    testing.check(testing.case(op, size, **sizes), "pallas", transformation="jit")


@pytest.mark.parametrize("op", ["weighted_lookup", "lookup", "scored_lut"])
@interpreted
def test_updates_in_blocks(monkeypatch, op):
    pallas_interpreter.use_small_blocks(monkeypatch, reads=False)
    testing.check_update(testing.case(op, "groups", batch=130, detectors=9, outputs=130), "pallas")


@interpreted
def test_only_rows_that_were_read_decay():
    testing.check_update(testing.case("scored_lut", "sum_groups"), "pallas", SGD(weight_decay=0.5))


# ------------------------------------------------------------------------------------- pairs of inputs
def values(rng, *shape, wild=True):
    """Return multiples of 1/4 with ties; with `wild`, include infinities and NaN."""
    a = rng.integers(-4, 5, shape) / 4
    if wild:
        a[rng.random(shape) < 0.02] = np.nan
        a[rng.random(shape) < 0.02] = np.inf
    return jnp.asarray(a, jnp.float32)


def check_plain_jax(f, *arguments, fixed=()):
    """Compare `f(implementation, *arguments, *fixed)` and its cotangents in Pallas and in plain JAX."""

    def run(implementation):
        def result(arguments, fixed):
            y, pullback = jax.vjp(lambda *a: f(implementation, *a, *fixed), *arguments)
            return y, pullback(jnp.round(jnp.cos(jnp.arange(y.size)) * 4).reshape(y.shape))

        return jax.jit(result)(arguments, fixed)

    for a, e in zip(*(jax.tree.leaves(run(i)) for i in ("pallas", "xla")), strict=True):
        np.testing.assert_allclose(a, e, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("batch", [130, 1100])
@interpreted
def test_detect_in_blocks(batch, monkeypatch):
    two_detectors = 4 * 2 * _limits.LANES * 4 * 6 * 2  # at a time
    monkeypatch.setattr(detect, "vmem_budget", lambda _: two_detectors)
    rng = np.random.default_rng(0)
    x = values(rng, batch, 3)
    anchors = jnp.asarray(rng.integers(-9, 9, (3, 2, 2)), jnp.int32).at[0, 0, 0].set(2**31 - 1)
    check_plain_jax(lambda i, x: lutjax.detect(x, anchors, implementation=i, epsilon=0.5).margin, x)
    actual, expected = (lutjax.detect(x, anchors, implementation=i) for i in ("pallas", "xla"))
    np.testing.assert_array_equal(actual.index, expected.index)
    np.testing.assert_array_equal(actual.flip, expected.flip)


@pytest.mark.parametrize(("start", "window", "segments"), [
    (0, None, False),
    (3, 4, True),
    (-2, 3, False),
    (2**31 - 9, None, True),
    (-(2**30), None, False),
])  # fmt: skip
@interpreted
def test_pairs_in_blocks(start, window, segments, monkeypatch):
    """Two sample blocks, two row slices, several loop iterations."""
    monkeypatch.setattr(_shifts, "TARGET", 128)
    monkeypatch.setattr(lut_pair_attention, "_CHUNK", 1024)
    rng = np.random.default_rng(2)
    x, keys = values(rng, 20, 7, 3), values(rng, 20, 6, 3)
    weights, positions = values(rng, 2, 16, 5, wild=False), values(rng, 6, 1, 2)
    anchors = jnp.asarray(rng.integers(-3, 12, (2, 4, 2)), jnp.int32).at[0, 0, 0].set(-(2**31))
    options = {"window": window, "epsilon": 0.25}
    if segments:
        options["segments"] = jnp.asarray(rng.integers(-1, 2, (20, 7)), jnp.int32)
        options["key_segments"] = jnp.asarray(rng.integers(-1, 2, (20, 6)), jnp.int32)

    def attend_pairs(implementation, x, keys, weights, positions, place):
        of_keys = {"keys": keys, "query_start": place} if start else {}
        return lutjax.lut_pair_attention(
            x, weights, anchors, positions, **options, **of_keys, implementation=implementation
        )

    # The place is traced: what is known to be too far is refused.
    check_plain_jax(attend_pairs, x, keys, weights, positions, fixed=(jnp.int32(start),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@interpreted
def test_decay_moves_the_rows_that_were_read(dtype, monkeypatch):
    monkeypatch.setattr(_shifts, "TARGET", 128)
    case = testing.case("lut_pair_attention", "primes", dtype, batch=20, detectors=2)
    testing.check_update(case, "pallas", SGD(weight_decay=0.25))


# ------------------------------------------------------------------------------------- attention


@interpreted
def test_attention_in_several_blocks(monkeypatch):
    """Blocks with few queries, keys and samples: every grid axis has several steps."""
    rng = np.random.default_rng(1)
    ids = tuple(rng.integers(0, 4, shape) for shape in ((2, 21, 2), (2, 21, 2), (20, 1)))
    wanted = attend("xla", ids)
    for name, size in (("_QUERIES", 8), ("_KEYS", 8), ("_BLOCKS", 1)):
        monkeypatch.setattr(_attention_blocks, name, size)
    for actual, expected in zip(attend("pallas", ids), wanted, strict=True):
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=5e-6 * max(1, np.abs(expected).max())
        )


# ------------------------------------------------------------------------------------- gates
def check_gates(op, n_inputs, n_gates, n_samples, bits=2, dtype="float32", alone=True):
    """Compare kernels with plain JAX: far out-of-range wires, NaN samples, both zeros."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (n_inputs, n_samples)) / 4
    x[0, :3] = [0.0, -0.0, np.nan] if op == "binary_lut" else 0.0
    parameter = (
        rng.integers(-8, 9, (4, n_gates) if op == "bilinear_gates" else (n_gates, 2**bits)) / 4
    )
    wires = rng.integers(-3, n_inputs + 4, (n_gates, bits))
    wires[0], wires[-1] = 2**31 - 1, -(2**31)
    call = GATES[op](
        jnp.asarray(x, dtype), jnp.asarray(parameter, "float32"), jnp.asarray(wires, jnp.int32)
    )
    both = {"x", GATES[op].arrays()[1]}
    dy = jnp.asarray(rng.integers(-8, 9, (n_gates, n_samples)) / 4, dtype)
    pallas, plain = (
        importlib.import_module(f"lutjax.kernels.{of}.{op}") for of in ("_pallas.tpu", "_xla")
    )
    found, expected = (
        {"y": k.forward(call, device=CPU), **k.backward(call, dy, frozenset(both), device=CPU)}
        for k in (pallas, plain)
    )
    assert set(found) == {"y", *both}
    for name, actual in found.items():
        testing.assert_close(f"{op}: {name}", actual, expected[name])
    for need in both if alone else ():
        of_one = pallas.backward(call, dy, frozenset({need}), device=CPU)
        assert set(of_one) == {need}
        np.testing.assert_array_equal(of_one[need], found[need])


@pytest.mark.parametrize("op", GATES)
@interpreted
def test_gates_in_several_blocks(op, monkeypatch):
    monkeypatch.setattr(_gate_blocks, "_MOST_GATES", 16)
    monkeypatch.setattr(_gate_blocks, "_MOST_SAMPLES", 128)
    check_gates(op, 5, 19, 130, alone=op != "bilinear_gates")


@pytest.mark.parametrize("op", GATES)
@interpreted
def test_gates_in_wide_blocks(op):
    check_gates(op, 9, 33, 1500, dtype="bfloat16")


@interpreted
def test_tables_of_many_slots():
    """Fewer samples at a time, and slots beyond one lane row."""
    check_gates("soft_lut", 11, 5, 260, bits=8)
    check_gates("binary_lut", 11, 5, 260, bits=7)


# ------------------------------------------------------------------------------------- Mosaic GPU
@gpu_interpreter
def test_sums_of_rows_interpreted_for_gpus():
    """Out-of-range ids are clamped. The other kernels use features missing from the interpreter: first tensor-core operands in
    registers, and warp exchanges."""
    from lutjax.kernels._pallas.gpu import _shared_tables

    index = jax.random.randint(jax.random.key(0), (3, 130), -5, 12)
    index = index.at[0, 0].set(2**31 - 1).at[1, 129].set(-(2**31))
    weights = jnp.round(8 * jax.random.normal(jax.random.key(1), (3, 8, 130)))
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        y = jax.jit(_shared_tables.sum_rows)(weights, index)
    np.testing.assert_array_equal(y, weights[jnp.arange(3)[:, None], jnp.clip(index, 0, 7)].sum(0))


@gpu_interpreter
@pytest.mark.parametrize("start", [None, 2])
@pytest.mark.parametrize("positions", [0, 1, 2])
def test_counts_interpreted_for_gpus(monkeypatch, positions, start):
    """Out-of-range ids are clamped. The interpreter does not model concurrent additions to shared memory."""
    pytest.importorskip("triton")
    from lutjax.kernels._pallas.gpu import _counts, _mosaic_launch
    from lutjax.kernels._triton._detected_pairs import DetectedPairs

    def add_ones(table, cells):
        places = jax.lax.broadcasted_iota(jnp.int32, (cells.shape[0], table.shape[0]), 1)
        actual = (cells[:, None] == places).astype(jnp.int32)
        table[...] = table[...] + jnp.sum(actual, 0, dtype=jnp.int32)

    monkeypatch.setattr(_counts, "_add_ones", add_ones)
    monkeypatch.setattr(_mosaic_launch, "load", lambda reference, layout: reference[...])
    rng = np.random.default_rng(0)
    samples, length, window = 2, 9, 4
    of_keys = rng.integers(-3, 9, (2, samples, length))
    of_distances = rng.integers(-2, 6, (positions, 7)) if positions else None
    segments = rng.integers(0, 2, (samples, length))
    shift = 2 if positions else 0
    pairs = DetectedPairs(
        weights=jnp.zeros((2, 4 << (2 + shift), 3)),
        query=jnp.zeros((2, samples, length), jnp.int32),
        key=jnp.asarray(of_keys << shift, jnp.int32),
        position=None if of_distances is None else jnp.asarray(of_distances, jnp.int32),
        start=None if start is None else jnp.int32(start),
        segments=(jnp.asarray(segments, jnp.int32),) * 2,
        window=window,
        query_shift=2 + shift,
        key_shift=shift,
    )
    expected = np.zeros((2, samples, length, 4 << shift), np.int16)
    for t, b, j, i in np.ndindex(2, samples, length, length):
        distance = j + (start or 0) - 1 - i
        if 0 <= distance < window and segments[b, i] == segments[b, j]:
            cell = np.clip(of_keys[t, b, i], 0, 3) << shift
            if of_distances is not None:
                cell |= np.clip(of_distances[min(t, positions - 1), min(distance, 6)], 0, 3)
            expected[t, b, j, cell] += 1
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        counts = jax.jit(lambda first: _counts.COUNTER.count(pairs, first, 2, H200))(jnp.int32(0))
    assert expected.sum() > 0
    np.testing.assert_array_equal(counts.reshape(expected.shape), expected)


# ------------------------------------------------------------------------------------- scored reads in Mosaic GPU
@pytest.fixture
def scored_interpreted():
    triton_interpreter = pytest.importorskip("triton_interpreter", reason="Triton is not installed")
    with triton_interpreter.interpreted(), triton_interpreter.scored_rows_in_numpy():
        yield triton_interpreter


@mosaic
@pytest.mark.parametrize(("shape", "dtype", "transformation"), [
    *((shape, "float32", "jit") for shape in testing.shapes("scored_lut")
      if not shape.startswith(("empty", "powers"))),
    *(("groups", dtype, "jit") for dtype in ("bfloat16", "float16")),
    *(("split", "float32", t) for t in testing.TRANSFORMATIONS if t not in ("export", "jit")),
])  # fmt: skip
@pytest.mark.usefixtures("scored_interpreted")
def test_scored_lut_on_gpus(shape, dtype, transformation):
    testing.check(testing.case("scored_lut", shape, dtype), "pallas", transformation=transformation)


@mosaic
def test_samples_in_parts(monkeypatch, scored_interpreted):
    """Rows, factors and products for all samples exceed the memory limit."""
    from lutjax.kernels._pallas.gpu import scored_lut

    scored_interpreted.own_always(monkeypatch)
    monkeypatch.setattr(scored_lut, "_MOST_SCRATCH", 210)  # of 7 samples, 3 tables and 5 numbers
    testing.check(testing.case("scored_lut", "hard"), "pallas", transformation="jit")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("sum_groups", [False, True])
@pytest.mark.usefixtures("interpreted")
def test_tables_of_integers_are_read_exactly(sum_groups):
    tables = lutjax.quantize_tables(normal(0, 6, 8, 5), groups=2)
    anchors = jax.random.randint(jax.random.key(1), (6, 3, 2), 0, 7)
    x, read = normal(2, 12, 2, 7).at[3, 1].set(jnp.nan), reads.PowersOfTwo()
    options = {"read": read, "groups": 2, "sum_groups": sum_groups}

    def run(implementation):
        return np.asarray(
            lutjax.scored_lut(
                x, tables, anchors, read.initial(), **options, implementation=implementation
            )
        )

    y = run("pallas")
    np.testing.assert_array_equal(y, run("xla"))
    assert np.isnan(y[3, -1]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()

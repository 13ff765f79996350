"""Pallas implementations without TPUs: interpretation, lowering for every generation, and kernel selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import case_of, detections, fast_size, slow_except, slow_where, split
from pallas_interpreter import (
    ON_GPUS,
    ON_TENSOR_CORES,
    WITHOUT_MOSAIC,
    mosaic_for,
    outline,
    pretend_triton_runs,
)

import lutjax
from lutjax import reads, testing
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _row_blocks
from lutjax.kernels._xla import _row_gathers, _slot_polynomials, lookup as plain
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.binary_lut import BinaryLut
from lutjax.ops.detect import Detect
from lutjax.ops.lookup import Lookup
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.ops.scored_lut import ScoredLut
from lutjax.ops.soft_lut import SoftLut
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.testing import _ahead_of_time
from lutjax.values._row_rules import SGD, RowAdagrad

V6E, H200 = Device(lutjax.Backend.TPU, "TPU v6e"), Device(lutjax.Backend.GPU, "NVIDIA H200")
mosaic = pytest.mark.skipif(WITHOUT_MOSAIC is not None, reason=str(WITHOUT_MOSAIC))


FAST = ("detect", "lookup", "scored_lut", "soft_lut")
"""Ops with fast TPU kernel tests."""


def interpretable(direction="forward"):
    """Return ``op, shape`` values for every size."""
    ops = pallas_interpreter.implemented("tpu", direction)
    return [(op, shape) for op in ops for shape in testing.shapes(op, "pallas")]


@pytest.mark.parametrize(
    ("op", "shape"),
    slow_where(interpretable(), lambda op, shape: op not in FAST or shape != fast_size(op)),
)
@pytest.mark.usefixtures("interpreted")
def test_shapes(op, shape):
    testing.check(case_of(op, shape), "pallas", transformation="jit")


@pytest.mark.parametrize(
    ("op", "shape"),
    slow_except(
        interpretable("update"),
        *(f"{op}-split" for op in ("lookup", "sparse_lookup", "weighted_lookup")),
    ),
)
@pytest.mark.usefixtures("interpreted")
def test_updates(op, shape):
    testing.check_update(testing.case(op, shape), "pallas")


@pytest.mark.usefixtures("interpreted")
def test_detect_signs_in_blocks():
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (2100, 2)) / 4
    x[rng.random(x.shape) < 0.02], x[rng.random(x.shape) < 0.02] = np.nan, np.inf
    x, dy = jnp.asarray(x, jnp.float32), jnp.asarray(rng.integers(-4, 5, (2100,)), jnp.float32)

    def run(implementation):
        def signs(x):
            d = lutjax.detect_signs(x, implementation=implementation)
            return d.margin, d.index

        margin, pullback, index = jax.vjp(signs, x, has_aux=True)
        return index, margin, pullback(dy)[0]

    for actual, expected in zip(run("pallas"), run("xla"), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.usefixtures("interpreted")
def test_packed_words_on_tensor_cores():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 2**32, (5, 3), dtype=np.uint32))
    truth = jnp.asarray(rng.integers(0, 2, (21, 4)).astype(bool))
    wires = jnp.asarray(rng.integers(-3, 9, (21, 2)), jnp.int32)
    actual, expected = (
        lutjax.packed_lut(x, truth, wires, implementation=i) for i in ("pallas", "xla")
    )
    np.testing.assert_array_equal(actual, expected)


# ------------------------------------------------------------------------------------- lowered
@pytest.mark.parametrize(
    ("op", "tpu"),
    slow_where(
        [(op, tpu.name) for op in ON_TENSOR_CORES for tpu in _tpus.TPUS],
        lambda op, tpu: tpu != "v6e" or op not in FAST,
    ),
)
def test_lowers_for_tensor_cores(op, tpu):
    kind = _tpus.find_generation(tpu).device_kind
    testing.check_lowering(split(op), "pallas/tpu", platform="tpu", device_kind=kind)


LEFT_TO_TRITON = ("empty", "no_", "powers")
"""Beginnings of the names of sizes without a Mosaic GPU kernel."""


@mosaic
@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    # Kernels for tables in shared memory are written out sample by sample: seconds to lower.
    slow_except(
        [
            *(
                (op, shape, "float32")
                for op in ON_GPUS
                for shape, size in testing.shapes(op, "pallas").items()
                if "groups" not in size and not shape.startswith(LEFT_TO_TRITON)
            ),
            *((op, fast_size(op), dtype) for op in ON_GPUS for dtype in ("bfloat16", "float16")),
        ],
        "binary_lut-readers-float32",
    ),
)
def test_lowers_for_gpus(monkeypatch, op, shape, dtype):
    pretend_triton_runs(monkeypatch)
    case = testing.case(op, shape, dtype)
    testing.check_lowering(case, mosaic_for(op), platform="cuda", device_kind=H200.kind)


@pytest.mark.parametrize(
    ("platform", "op", "transformation"),
    slow_except(
        [
            (platform, op, f"shard_map, {how} table")
            for platform, ops in (("tpu", ON_TENSOR_CORES), ("gpu", ON_GPUS))
            for op in ops
            for how in ("replicated", "sharded")
        ],
        f"tpu-{ON_TENSOR_CORES[0]}-shard_map, sharded table",
        f"gpu-{ON_GPUS[0]}-shard_map, sharded table",
    ),
)
def test_lowers_on_shards(monkeypatch, platform, op, transformation):
    """Arrays varying over mesh devices, without the actual devices."""
    if platform == "gpu" and WITHOUT_MOSAIC:
        pytest.skip(WITHOUT_MOSAIC)
    pretend_triton_runs(monkeypatch)
    of = (
        ("tpu", _tpus.find_generation("v6e").device_kind)
        if platform == "tpu"
        else ("cuda", H200.kind)
    )
    options = dict(zip(("platform", "device_kind"), of, strict=True), transformation=transformation)
    implementation = "pallas/tpu" if platform == "tpu" else mosaic_for(op)
    testing.check_lowering(split(op), implementation, **options)


@mosaic
@pytest.mark.parametrize(("rows", "dtype"), [(8, "float32"), (100, "bfloat16")])
def test_products_of_one_hot_rows_lower_for_gpus(rows, dtype):
    """Several programs along each axis: tables, outputs, and samples for large batches."""
    from lutjax.kernels._pallas.gpu import _one_hot

    def add_rows(index, dy):
        return _one_hot.add_rows(index, dy, rows)

    index, dy = array(9, 20_000, dtype="int32"), array(20_000, 200, dtype=dtype)
    exported = _ahead_of_time.lower(add_rows, index, dy, platform="cuda", device_kind=H200.kind)
    assert [(a.shape, a.dtype) for a in exported.out_avals] == [((9, rows, 200), "float32")]


@mosaic
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_terms_of_bfloat16_are_exact(dtype):
    from lutjax.kernels._pallas.gpu import _one_hot

    a = jax.random.normal(jax.random.key(0), (1000,)).astype(dtype)
    a = jnp.concatenate([a, a * jnp.asarray(2.0**-10, dtype), jnp.asarray([0.0, 1.0, -3.0], dtype)])
    terms = jax.jit(_one_hot.terms)(a)
    assert {t.dtype for t in terms} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(
        sum(np.asarray(t, np.float64) for t in terms), np.asarray(a, np.float64)
    )


@mosaic
def test_update_on_gpus(monkeypatch):
    """Lower the update; with portable row sums, it updates rows like plain JAX."""
    from lutjax.kernels._pallas.gpu import _one_hot, lookup

    d = lutjax.detect_signs(jax.random.normal(jax.random.key(0), (20, 3, 4)))
    weights = jnp.round(8 * jax.random.normal(jax.random.key(1), (3, 16, 5)))
    dy = jnp.round(8 * jax.random.normal(jax.random.key(2), (20, 5)))

    def add_rows(index, dy, n_rows):
        return _row_gathers.add_rows(jnp.zeros((len(index), n_rows, dy.shape[1])), index, dy, H200)

    for factor in (None, jnp.float32(0.5)):

        def update(weights, dy, kernels=lookup, step=Step(jnp.float32(0.25), factor)):  # noqa: B008
            return kernels.update(Lookup(weights, d), dy, step, device=H200)

        exported = _ahead_of_time.lower(update, weights, dy, platform="cuda", device_kind=H200.kind)
        assert [(a.shape, a.dtype) for a in exported.out_avals] == [(weights.shape, weights.dtype)]
        with monkeypatch.context() as patch:
            patch.setattr(_one_hot, "add_rows", add_rows)
            moved, _ = jax.jit(update)(weights, dy)
        np.testing.assert_array_equal(moved, update(weights, dy, plain)[0])
        assert not np.array_equal(moved, weights)


@mosaic
@pytest.mark.parametrize(("bits", "samples"), [(6, 83), (8, 513), (1, 1)])
def test_addresses_packed_for_gpus(bits, samples):
    """Whole sample blocks, four addresses per word; far out-of-range wires, and NaN."""
    from lutjax.kernels._pallas.gpu import _by_address

    rng = np.random.default_rng(0)
    x = np.where(rng.random((9, samples)) < 0.1, np.nan, rng.integers(-1, 2, (9, samples))).astype(
        "float32"
    )
    wires = rng.integers(-20, 20, (5, bits)).astype("int32")
    packed = np.asarray(_by_address.pack_addresses(jnp.asarray(x), jnp.asarray(wires)))
    expected = np.sum((x[np.clip(wires, 0, 8)] > 0) << np.arange(bits)[None, :, None], 1)
    addresses = packed.view(np.uint8)  # the first of four in the lowest byte
    assert packed.shape == (5, 128 * -(-samples // 512))
    np.testing.assert_array_equal(addresses[:, :samples], expected)
    assert not addresses[:, samples:].any()


def test_slopes_at_addresses():
    """Half the interpolation's derivatives at softened bits."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    set_bits = np.arange(8)[None] >> np.arange(3)[:, None] & 1
    softened = [jnp.tile(jnp.where(b == 1, 0.75, 0.25)[None], (3, 1)) for b in set_bits]
    expected = jnp.stack(_slot_polynomials.slopes(table, softened), 1) / 2
    actual = _slot_polynomials.slopes_at_addresses(table).reshape(expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------- which calls
def test_names_of_devices():
    kinds = {
        "TPU v4": "v4",
        "TPU v5e": "v5e",
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
    }
    kinds |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU v7x": "v7x", "TPU7x": "v7x"}
    result = {kind: _tpus.generation(Device(lutjax.Backend.TPU, kind)).name for kind in kinds}
    assert result == kinds
    assert _tpus.generation(Device(lutjax.Backend.TPU, "TPU v3")) is None
    assert _tpus.generation(Device(lutjax.Backend.CPU, "cpu")) is None


@pytest.mark.parametrize(("device", "why"), [
    (Device(lutjax.Backend.TPU, "TPU v3"), "needs a TPU v4, v5e, v5p, v6e or v7x, not TPU v3"),
    (Device(lutjax.Backend.CPU, "cpu"), r"pallas/tpu \(.*\): runs on tpu, the call runs on cpu"),
])  # fmt: skip
def test_why_not_on_tensor_cores(device, why):
    call = lookups()[0]
    with pytest.raises(lutjax.NoImplementationError, match=why):
        lutjax.kernel_registry.resolve(
            "lookup", call.weights, call.detection, device=device, implementation="pallas"
        )


def test_mosaic_comes_before_triton():
    call = lookups()[0]
    considered = lutjax.kernel_registry.consider(
        "lookup", call.weights, call.detection, device=H200
    )
    first = next(candidate for candidate in considered if candidate.spec.backend == "gpu")
    assert (first.spec.names[1], first.reason) == ("pallas/gpu", None)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def lookups(batch=16384, detectors=64, bits=6, outputs=512, dtype="float32", accumulate=None):
    """Return a call and its output, like the functions below."""
    weights, d = (
        array(detectors, 2**bits, outputs, dtype=dtype),
        detections(batch, detectors, bits=bits),
    )
    return outline(Lookup, weights, d, accumulate=accumulate), array(batch, outputs)


def sparse(n_outputs, batch=8, slots=3, detectors=64, bits=6):
    targets = array(detectors, 2**bits, slots, dtype="int32")
    d = detections(batch, detectors, bits=bits)
    call = outline(SparseLookup, array(*targets.shape), d, targets, n_outputs=n_outputs)
    return call, array(batch, n_outputs)


def attentions(
    batch=4,
    length=1024,
    bits=6,
    position_bits=4,
    detectors=3,
    dtype="float32",
    window=None,
    accumulate=None,
):
    d = detections(batch, length, detectors, bits=bits)
    e = detections(max(length - 1, 1), detectors, bits=position_bits)
    weights = array(detectors, 2 ** (2 * bits + position_bits), 32, dtype=dtype)
    call = outline(LookupAttention, weights, d, d, e, window=window, accumulate=accumulate)
    return call, array(batch, length, 32)


def gates(call, n_inputs, n_samples, n_gates, bits=2, fan_out=None, dtype="float32"):
    tables = array(*((4, n_gates) if call is BilinearGates else (n_gates, 2**bits)), dtype=dtype)
    wires = array(n_gates, bits, dtype="int32")
    readers = () if fan_out is None else (array(n_inputs, fan_out, dtype="int32"),)
    return outline(call, array(n_inputs, n_samples, dtype=dtype), tables, wires, *readers), None


def binary(samples=1024, bits=6, fan_out=6, dtype="float32"):
    return gates(BinaryLut, 4096, samples, 4096, bits, fan_out, dtype)


def pairs(n_queries, n_keys=None, bits=4, n_outputs=5):
    n_keys, start = n_keys or n_queries, array(dtype="int32") if n_keys else None
    x, keys, weights = array(2, n_queries, 8), array(2, n_keys, 8), array(3, 2**bits, n_outputs)
    call = outline(
        LutPairAttention, x, keys, weights, array(3, bits, 2, dtype="int32"), None, start
    )
    return call, array(2, n_queries, n_outputs)


def scored(
    batch=24576, n_groups=8, n_tables=512, bits=8, inputs=48, outputs=48, dtype="float32", **options
):
    options = {"read": reads.Confidence(), "groups": n_groups, "accumulate": None} | options
    rounded = [array(batch, n_tables), array(n_groups, outputs, dtype="int32")] * options[
        "read"
    ].rounds_tables
    x, weights = (
        array(batch, n_groups, inputs, dtype=dtype),
        array(n_tables, 2**bits, outputs, dtype=dtype),
    )
    call = outline(
        ScoredLut,
        x,
        weights,
        array(n_tables, bits, 2, dtype="int32"),
        array(3),
        *rounded,
        **options,
    )
    return call, array(batch, n_groups, outputs)


def scored_on_gpu(batch=2**14, **options):
    return scored(
        batch, **{"n_groups": 2, "n_tables": 6, "bits": 3, "inputs": 5, "outputs": 4} | options
    )


def weighted(rows=256, ways=2):
    index, coefficients = array(1024, 64, ways, dtype="int32"), array(1024, 64, ways)
    return outline(WeightedLookup, array(64, rows, 48), index, coefficients, valued=ways), None


def grouped(bits):
    return outline(Lookup, array(64, 2**bits, 128), detections(1024, 64, bits=bits), groups=8), None


FIXED = lutjax.FixedPoint(2.0**10)
DIRECTIONS = ("forward", "backward", SGD())
DECAY, FAST = SGD(weight_decay=0.5), "was measured faster than Triton"
ONE_HOT = "plain JAX multiplies with one-hot matrices too"
DETECT = (outline(Detect, array(8, 50), array(4, 3, 2, dtype="int32"), n_inputs=50), None)
WIDE = (outline(Detect, array(4096, 5000), array(3, 2, 2, dtype="int32"), n_inputs=5000), None)
TPU_CALLS = [
    (lookups(), "forward", f"{ONE_HOT} for at most 512 rows"),
    (lookups(), "backward", ONE_HOT),
    (lookups(), SGD(), ONE_HOT),
    (lookups(), DECAY, None),
    (lookups(dtype="bfloat16"), SGD(), None),
    (lookups(), RowAdagrad(), "moves rows by SGD only, not by RowAdagrad"),
    (lookups(dtype="float16"), "forward", "has no kernel for float16"),
    (lookups(accumulate=FIXED), "backward", "adds in float32, not in fixed point"),
    (lookups(bits=10, outputs=128), "forward", None),
    (lookups(bits=10, outputs=128), SGD(), None),
    (lookups(bits=16), "backward", "gathers are faster: tables of [64, 65536, 512] do not fit"),
    (sparse(512), SGD(), None),
    (sparse(512), "forward", "plain JAX multiplies"),
    (sparse(2**13), "forward", "reads the whole table, zeros too: [64, 64, 8192] is larger"),
    (sparse(2**13), SGD(), "reads the whole table, zeros too: [64, 64, 8192] is larger"),
    (DETECT, "backward", None),
    (gates(SoftLut, 7, 4096, 7), "forward", "plain JAX gathers the rows of at most 4 wires"),
    (gates(SoftLut, 16384, 4096, 16384), "forward", None),
    (gates(SoftLut, 7, 4096, 7), "backward", None),
    (gates(BinaryLut, 7, 4096, 7), "forward", None),
    (attentions(batch=128, length=32, detectors=1), "forward", None),
    (attentions(batch=128, length=32, detectors=1), "backward", None),
    (attentions(batch=128, length=32, detectors=1), SGD(), None),
    (attentions(batch=128, length=32, detectors=1), DECAY, "without weight decay"),
    (attentions(batch=128, length=32, detectors=1), RowAdagrad(), "moves rows by SGD only"),
    (attentions(batch=1, length=2**15, detectors=1), "forward", "have too many distances"),
    (attentions(batch=1, length=2, detectors=1), "forward", "plain JAX is faster: 0 us against"),
    (attentions(batch=1, length=2, detectors=1), SGD(), "plain JAX is faster: 0 us against"),
    (attentions(batch=0, length=2, detectors=1), "backward", "there is nothing to compute"),
    *(
        (pairs(1, 64), direction, "1 queries of 64 keys would leave most lanes idle")
        for direction in DIRECTIONS
    ),
    *((pairs(64), direction, None) for direction in (*DIRECTIONS, DECAY)),
    (pairs(64), RowAdagrad(), "moves rows by SGD only"),
    (scored(), "forward", None),
    (scored(), DECAY, None),
    (scored(), RowAdagrad(), "moves rows by SGD only, not by RowAdagrad"),
    (scored(bits=10), "forward", "compared with every row, up to 512"),
    (scored(inputs=2**16), "forward", "x has 65536 inputs: a block of samples"),
    (scored(dtype="float16"), "forward", "has no kernel for float16"),
    (scored(accumulate=FIXED), "forward", "adds in float32, not in fixed point"),
    (weighted(rows=1024), "forward", "gathers are faster: matrices of coefficients of 1024 rows"),
    (weighted(ways=2**17), "forward", "index has 131072 ways: a block of samples"),
    (grouped(6), "forward", ONE_HOT),
    (grouped(10), "forward", "groups are multiplied with them only"),
]
GPU_CALLS = [
    (lookups(), "forward", None),
    (lookups(), "backward", None),
    (lookups(bits=5, detectors=16), "forward", None),
    (lookups(bits=5, detectors=16), "backward", None),
    *(
        (lookups(**sizes), direction, FAST)
        for direction in ("forward", "backward")
        for sizes in ({"bits": 7}, {"bits": 4}, {"detectors": 8}, {"outputs": 64}, {"batch": 2048}, {"dtype": "bfloat16"})
    ),
    (lookups(batch=4096), "forward", FAST),
    (lookups(batch=4096), "backward", None),
    (lookups(bits=8), "forward", "at most 128 rows, here 256"),
    (lookups(batch=2**22), "forward", "2^31 numbers"),
    (lookups(dtype="float64"), "forward", "no kernel for float64"),
    (lookups(), SGD(), None),
    (lookups(batch=8192), SGD(), f"{FAST} from 8388608 numbers in the outputs on, here 4194304"),
    (lookups(), DECAY, "moves rows by SGD without weight decay only"),
    (lookups(), RowAdagrad(), "moves rows by SGD without weight decay only"),
    (lookups(accumulate=FIXED), "backward", None),
    (lookups(accumulate=FIXED, bits=12), "backward", None),
    (lookups(accumulate=FIXED), "forward", "has no forward kernel for sums of integers"),
    (lookups(accumulate=FIXED, bits=13), "backward", "at most 4096 rows, here 8192"),
    (lookups(accumulate=FIXED, bits=10, batch=512), "backward", "from 1 look-ups of each row in fixed point on, here 0"),
    (sparse(512, 4096, 32), "forward", None),
    (sparse(512, 4096, 32), "backward", None),
    (sparse(512, 4096), "forward", "from 32 slots on, here 3"),
    (sparse(512, 100, 32), "backward", "from 512 samples on, here 100"),
    (sparse(2**14), "forward", "at most 8192, here 16384"),
    (binary(), "backward", None),
    (binary(bits=4), "backward", "from 5 bits on, here 4"),
    (binary(samples=512), "backward", "from 4194304 inputs on, here 2097152"),
    (binary(samples=1025), "backward", "for multiples of 512 samples, here 1025"),
    (binary(dtype="bfloat16"), "backward", "for float32 only, not bfloat16"),
    (binary(dtype="float64"), "backward", "has no kernel for float64"),
    (binary(fan_out=None), "backward", "the call gives no readers"),
    (binary(fan_out=10), "backward", "reads every entry of the lists of readers: 40960, of 24576 wires"),
    (binary(samples=2**19), "backward", "fewer than 2^31 numbers"),
    (attentions(), "forward", None),
    (attentions(), "backward", None),
    (attentions(), DECAY, None),
    (attentions(batch=16, length=256), "backward", None),
    (attentions(batch=16, length=256), "forward", f"{FAST} from 512 keys on, here 256"),
    (attentions(window=100), "forward", "from 512 keys on, here 100"),
    (attentions(batch=1, length=900), "forward", "from 16 queries for each of their ids on, here 14"),
    (attentions(bits=7), "forward", "up to 1024 rows for each id of a query, here 2048"),
    (attentions(bits=9), "forward", "at most 4096 rows for each id of a query, here 8192"),
    (attentions(batch=1, length=2**15), "forward", "at most 32767 keys, here 32768"),
    (attentions(batch=512), "forward", "268435456 counts of a detector in memory, here 536870912"),
    (attentions(), RowAdagrad(), "moves rows by SGD only"),
    (attentions(accumulate=FIXED), "forward", "for sums of floats only"),
    (attentions(accumulate=FIXED), "backward", None),
    (attentions(dtype="float64"), "forward", "no kernel for float64"),
    (scored_on_gpu(), "forward", None),
    (scored_on_gpu(2**13), "backward", None),
    (scored_on_gpu(2**13), "forward", "from 32768 samples of all groups on, here 16384"),
    (scored_on_gpu(outputs=65), "forward", "at most 256 rows and 64 outputs, here 8 and 65"),
    (scored_on_gpu(bits=9), "forward", "at most 256 rows and 64 outputs, here 512 and 4"),
    (scored_on_gpu(inputs=400), "forward", "at most 384 inputs, here 400"),
    (scored_on_gpu(read=reads.PowersOfTwo()), "forward", "sums floats only"),
    (scored_on_gpu(accumulate=lutjax.FixedPoint(1.0)), "forward", "sums floats only"),
]  # fmt: skip
OTHER_DEVICES = [
    ("TPU v4", attentions(batch=128, length=32, detectors=1), "forward", "of which a TPU v4 has 16"),
    ("TPU v4", scored(), "backward", None),
    ("TPU v4", weighted(), "backward", None),
    *(
        ("TPU v4", call, direction, why)
        for direction in DIRECTIONS
        for call, why in (
            (pairs(32, bits=13, n_outputs=32), "weights has 8192 rows: each lookup is compared with every row"),
            (pairs(4000, bits=6, n_outputs=32), "x or keys has 4000 places: a sample has to fit in 2048 lanes"),
            (pairs(2000, bits=10, n_outputs=32), "with 2000 places a detector's table and sums need 2048 lanes"),
        )
    ),
    *(("TPU v4", WIDE, d, "x has 5000 inputs: a block of samples with all of them does not fit") for d in DIRECTIONS[:2]),
    ("TPU7x", gates(SoftLut, 40_000, 128, 7), "backward", "40000 inputs do not fit 64 MiB"),
    ("NVIDIA A100", lookups(), "forward", "needs compute capability 9.0 or newer, NVIDIA A100 has 8.0"),
    ("NVIDIA B200", lookups(), "backward", "wgmma"),
    ("NVIDIA B200", lookups(), SGD(), "wgmma"),
    ("NVIDIA B200", lookups(), "forward", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "call", "direction", "why"),
    [*(("TPU v6e", *row) for row in TPU_CALLS), *(("NVIDIA H200", *row) for row in GPU_CALLS), *OTHER_DEVICES],
)  # fmt: skip
def test_which_calls_come_first(monkeypatch, kind, call, direction, why):
    pretend_triton_runs(monkeypatch)
    result = reason(kind, *call, direction)
    assert result is None if why is None else why in result


def reason(kind, call, output, direction="forward"):
    backend = "tpu" if "TPU" in kind else "gpu"
    direction, rule = (direction, None) if isinstance(direction, str) else ("update", direction)
    return pallas_interpreter.reason(
        backend, Device(lutjax.Backend(backend), kind), call, direction, output, rule
    )


def test_integers_are_summed_by_triton(monkeypatch):
    monkeypatch.setattr("lutjax.kernels._triton.unfit_packages", lambda: "is missing")
    why = reason("NVIDIA H200", *lookups(accumulate=FIXED), "backward")
    assert "sums integers by Triton kernels, and Triton is missing" in why


def test_forward_pass_of_gates_needs_less_memory():
    assert "do not fit" not in str(reason("TPU7x", *gates(SoftLut, 40_000, 128, 7)))


def test_gates_that_do_not_fit():
    """The input count decides, regardless of its axis."""
    few, many = 50, 40_000

    def lower(shape, feature_axis, kind="TPU v4"):
        def f(x, c, w):
            return lutjax.bilinear_gates(
                x, c, w, feature_axis=feature_axis, implementation="pallas/tpu"
            )

        arrays = array(*shape), array(4, 7), array(7, 2, dtype="int32")
        _ahead_of_time.lower(f, *arrays, platform="tpu", device_kind=kind)

    lower((few, many), 0)
    lower((many, few), -1)
    lower((2, many // 2, few), -1)
    lower((many, few), 0, "TPU v6e")
    for shape, feature_axis in (((many, few), 0), ((few, many), -1)):
        with pytest.raises(lutjax.NoImplementationError, match="40000 inputs do not fit 16 MiB"):
            lower(shape, feature_axis)


def test_blocks_of_a_layer_fit_every_generation():
    """Blocks shrink on the smallest memory; tables fill whole registers, and products have 512 rows."""
    small, large = (
        _row_blocks.blocks_for_scored(scored()[0], Device(lutjax.Backend.TPU, f"TPU {name}"))
        for name in ("v4", "v6e")
    )
    assert (large.tables, large.together, large.samples, large.outputs) == (8, 2, 256, 128)
    assert (small.tables, small.together) == (8, 2)
    assert small.samples <= large.samples

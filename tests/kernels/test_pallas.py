"""Implementations in Pallas on machines without TPUs: interpreted, and lowered for every generation."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import RATES, case_of, detections, fast_size, rates_of, slow, split
from machine import needs_gpu
from pallas_interpreter import WITHOUT_MOSAIC, mosaic_gpu, outline

import lutjax
from lutjax import testing
from lutjax.cases import Tag
from lutjax.dispatch.contract import Step
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _attention_blocks, _gate_blocks, _tables
from lutjax.kernels._xla import _slot_polynomials
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.binary_lut import BinaryLut
from lutjax.ops.detect import Detect
from lutjax.ops.lookup import Lookup
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.soft_lut import SoftLut
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.testing import _ahead_of_time
from lutjax.values._row_rules import SGD, RowAdagrad

ON_TENSOR_CORES, ON_GPUS = (pallas_interpreter.implemented(backend) for backend in ("tpu", "gpu"))


def device(kind, backend="tpu"):
    return lutjax.dispatch.registry.Device(lutjax.Backend(backend), kind)


def interpretable(direction="forward", is_slow=lambda op: False):
    """Return values ``op, shape`` of every size; the fast suite has one of each kernel, because interpretation is slow."""
    return [
        slow(op, shape) if shape != fast_size(op) or is_slow(op) else (op, shape)
        for op in pallas_interpreter.implemented("tpu", direction)
        for shape in testing.shapes(op, "pallas")
    ]


@pytest.mark.parametrize(("op", "shape"), interpretable())
@pytest.mark.usefixtures("interpreted")
def test_shapes(op, shape):
    testing.check(case_of(op, shape), "pallas", transformation="jit")


@pytest.fixture
def small_blocks(monkeypatch):
    """Look-ups in several blocks along every axis, of tables read row by row: as of far larger ones."""
    from lutjax.kernels._pallas.tpu import _resident, _row_blocks

    for name in ("_ROWS", "_SAMPLES", "_OUTPUTS"):
        monkeypatch.setattr(_row_blocks, name, 128 if name != "_ROWS" else 8)
    monkeypatch.setattr(_resident, "resident_outputs", lambda shape, device: 128)
    monkeypatch.setattr(_resident, "_READS", 16)
    monkeypatch.setattr(_resident, "_TOGETHER", 2)
    return lambda rows: monkeypatch.setattr(_tables, "MANY_ROWS", rows)


@pytest.mark.parametrize(
    ("bits", "many_rows"), [slow(1, 64), slow(4, 64), slow(3, 2)], ids=["groups", "parts", "resident"]
)
@pytest.mark.usefixtures("interpreted")
def test_look_ups_in_blocks(small_blocks, bits, many_rows):
    small_blocks(many_rows)
    sizes = {"batch": 130, "detectors": 3, "outputs": 130} if many_rows > 2 else {"outputs": 130}
    case = testing.case("lookup", "primes", bits=bits, **sizes)
    testing.check(case, "pallas", transformation="jit")
    testing.check_update(case, "pallas")


@pytest.mark.parametrize("many_rows", [64, slow(2)], ids=["products", "resident"])
@pytest.mark.usefixtures("interpreted")
def test_wild_ids_of_look_ups(small_blocks, many_rows):
    small_blocks(many_rows)
    far = jnp.asarray([[-(2**31), 2**31 - 1, 9], [-1, 3, 8]], jnp.int32)
    d = lutjax.Detection(far, far, jnp.ones((2, 3), jnp.float32), 3)
    weights = jnp.arange(3 * 8 * 2, dtype=jnp.float32).reshape(3, 8, 2)
    dy = jnp.asarray([[1, 2], [3, -1]], jnp.float32)

    def run(implementation):
        def f(weights, margin):
            at = lutjax.Detection(d.index, d.flip, margin, d.bits)
            return lutjax.lookup(weights, at, implementation=implementation)

        y, pullback = jax.vjp(f, weights, d.margin)
        return y, *pullback(dy)

    for actual, expected in zip(run("pallas"), run("xla"), strict=True):
        testing.assert_close("wild ids", actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in ON_TENSOR_CORES if "bfloat16" in testing.cases_of(op).dtypes])
@pytest.mark.usefixtures("interpreted")
def test_bfloat16(op):
    testing.check(
        testing.case(op, testing.cases_of(op).tagged(Tag.DTYPES)[0], "bfloat16"),
        "pallas",
        transformation="jit",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "transformation",
    # Interpreted kernels call back, which neither remat nor exported programs can.
    [t for t in testing.TRANSFORMATIONS if t not in ("remat", "export", "jit")],
)
@pytest.mark.parametrize("op", ON_TENSOR_CORES)
@pytest.mark.usefixtures("interpreted")
def test_transformations(op, transformation):
    testing.check(split(op), "pallas", transformation=transformation)


@pytest.mark.parametrize(
    ("op", "shape"), interpretable("update", is_slow=lambda op: "lookup" not in op or "attention" in op)
)
@pytest.mark.usefixtures("interpreted")
def test_updates(op, shape):
    testing.check_update(testing.case(op, shape), "pallas")


@pytest.mark.slow
@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("op", pallas_interpreter.implemented("tpu", "update"))
@pytest.mark.usefixtures("interpreted")
def test_updates_at_rates_that_differ(op, kind):
    case = split(op)
    rates = rates_of(case, kind)
    if op in ("lookup_attention", "lut_pair_attention"):
        with pytest.raises(lutjax.NoImplementationError, match="adds pairs to rows at one rate for all"):
            testing.check_update(case, "pallas", rates=rates)
    else:
        testing.check_update(case, "pallas", rates=rates)


@pytest.mark.parametrize(
    ("op", "tpu"),
    [
        (op, tpu.name) if tpu.name == "v6e" else slow(op, tpu.name)
        for op in ON_TENSOR_CORES
        for tpu in _tpus.TPUS
    ],
)
def test_lowers_for_tensor_cores(op, tpu):
    kind = _tpus.named(tpu).device_kind
    testing.check_lowering(split(op), "pallas/tpu", platform="tpu", device_kind=kind)


@pytest.mark.slow
def test_lowers_with_some_outputs_at_a_time():
    """Lower a table that does not fit whole in vector memory."""
    case = testing.case("lookup", "primes", bits=10, detectors=128, outputs=256)
    testing.check_lowering(case, "pallas/tpu", platform="tpu", device_kind=_tpus.named("v6e").device_kind)


def test_names_of_devices():
    kinds = {"TPU v4": "v4", "TPU v5e": "v5e", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
    kinds |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU v7x": "v7x", "TPU7x": "v7x"}
    for kind, name in kinds.items():
        tpu = _tpus.generation(device(kind))
        assert tpu is not None, kind
        assert tpu.name == name
    assert _tpus.generation(device("TPU v3")) is None
    assert _tpus.generation(device("cpu", "cpu")) is None


def test_why_not_on_tensor_cores():
    for kind, backend, why in (
        ("TPU v3", "tpu", "needs a TPU v4, v5e, v5p, v6e or v7x, not TPU v3"),
        ("cpu", "cpu", r"pallas/tpu \(.*\): runs on tpu, the call runs on cpu"),
    ):
        with pytest.raises(lutjax.NoImplementationError, match=why):
            lutjax.kernel_registry.resolve(
                "lookup", *lookups().values(), device=device(kind, backend), implementation="pallas"
            )


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def lookups(batch=16384, detectors=64, bits=6, outputs=512, dtype="float32", accumulate=None):
    weights = array(detectors, 2**bits, outputs, dtype=dtype)
    d = detections(batch, detectors, bits=bits)
    return outline(Lookup, weights, d, accumulate=accumulate)


def sparse(n_outputs, detectors=64, bits=6, slots=3, batch=8):
    targets = array(detectors, 2**bits, slots, dtype="int32")
    weights = array(*targets.shape)
    d = detections(batch, detectors, bits=bits)
    return outline(SparseLookup, weights, d, targets, n_outputs=n_outputs)


V6E = device("TPU v6e")
FIXED = lutjax.FixedPoint(2.0**10)


@pytest.mark.parametrize(
    ("call", "direction", "rule", "why"),
    [
        (lookups(), "forward", None, "plain JAX multiplies with one-hot matrices too for at most 512 rows"),
        (lookups(), "backward", None, "plain JAX multiplies with one-hot matrices too"),
        (lookups(), "update", SGD(), "plain JAX multiplies with one-hot matrices too"),
        (lookups(), "update", SGD(weight_decay=0.5), None),
        (lookups(dtype="bfloat16"), "update", SGD(), None),
        (lookups(), "update", RowAdagrad(), "moves rows by SGD only, not by RowAdagrad"),
        (lookups(dtype="float16"), "forward", None, "has no kernel for float16"),
        (lookups(accumulate=FIXED), "backward", None, "adds in float32, not in fixed point"),
        (lookups(bits=10, outputs=128), "forward", None, None),
        (lookups(bits=10, outputs=128), "update", SGD(), None),
        (lookups(bits=16), "backward", None, "gathers are faster: tables of [64, 65536, 512] do not fit"),
        (sparse(512), "update", SGD(), None),
        (sparse(512), "forward", None, "plain JAX multiplies"),
        (sparse(2**13), "forward", None, "reads the whole table, zeros too: [64, 64, 8192] is larger"),
        (sparse(2**13), "update", SGD(), "reads the whole table, zeros too: [64, 64, 8192] is larger"),
        (outline(Detect, array(8, 50), array(4, 3, 2, dtype="int32"), n_inputs=50), "backward", None, None),
    ],
)
def test_when_look_ups_come_first_on_tensor_cores(call, direction, rule, why):
    output = array(call.detection.shape[0], 1) if rule else None
    found = pallas_interpreter.reason("tpu", V6E, call, direction, output, rule)
    assert found is None if why is None else why in found


# ------------------------------------------------------------------------------------- Mosaic GPU
H200 = device("NVIDIA H200", "gpu")


gpu_interpreter = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "force_gpu_interpret_mode"),
    reason=WITHOUT_MOSAIC
    or f"jax {jax.__version__} has no interpreter of Mosaic GPU kernels; jax 0.12 has one",
)

mosaic = pytest.mark.skipif(WITHOUT_MOSAIC is not None, reason=str(WITHOUT_MOSAIC))


def pretend_triton_runs(monkeypatch):
    """Replace the results of Triton kernels where kernels in Pallas use them."""
    from lutjax.kernels import _triton

    def run(inputs, outputs, zeroed, in_place, common):
        return tuple(jnp.zeros(a.shape, a.dtype) for a in (*outputs, *zeroed, *in_place))

    monkeypatch.setattr("lutjax.kernels._triton._triton_launch._run", run)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)


@mosaic
@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    # Kernels for tables in shared memory are written out sample by sample: seconds to lower.
    [
        (op, shape, "float32") if (op, shape) == ("binary_lut", "readers") else slow(op, shape, "float32")
        for op in ON_GPUS
        for shape, size in testing.shapes(op, "pallas").items()
        if "groups" not in size  # refused
    ]
    + [slow(op, fast_size(op), dtype) for op in ON_GPUS for dtype in ("bfloat16", "float16")],
)
def test_lowers_for_gpus(monkeypatch, op, shape, dtype):
    pretend_triton_runs(monkeypatch)
    case = testing.case(op, shape, dtype)
    testing.check_lowering(case, "pallas/gpu", platform="cuda", device_kind=H200.kind)


ON_SHARDS = [
    ("pallas/tpu", "tpu", _tpus.named("v6e").device_kind, ON_TENSOR_CORES),
    ("pallas/gpu", "cuda", H200.kind, ON_GPUS),
]


@pytest.mark.parametrize("transformation", [slow("shard_map, replicated table"), "shard_map, sharded table"])
@pytest.mark.parametrize(
    ("implementation", "platform", "kind", "op"),
    [(*on, op) if op == ops[0] else slow(*on, op) for *on, ops in ON_SHARDS for op in ops],
)
def test_lowers_on_shards(monkeypatch, implementation, platform, kind, op, transformation):
    """Arrays that vary over the devices of a mesh, which need not be here."""
    if implementation == "pallas/gpu" and WITHOUT_MOSAIC:
        pytest.skip(WITHOUT_MOSAIC)
    pretend_triton_runs(monkeypatch)
    testing.check_lowering(
        split(op), implementation, platform=platform, device_kind=kind, transformation=transformation
    )


@mosaic
@pytest.mark.parametrize(("rows", "dtype"), [(8, "float32"), (100, "bfloat16")])
def test_products_of_one_hot_rows_lower_for_gpus(rows, dtype):
    """Several programs along each axis: tables, outputs, and samples where there are many."""
    from lutjax.kernels._pallas.gpu import _one_hot

    index, dy = jax.ShapeDtypeStruct((9, 20_000), "int32"), jax.ShapeDtypeStruct((20_000, 200), dtype)
    exported = _ahead_of_time.lower(
        lambda index, dy: _one_hot.add_rows(index, dy, rows),
        index,
        dy,
        platform="cuda",
        device_kind=H200.kind,
    )
    assert [(a.shape, a.dtype) for a in exported.out_avals] == [((9, rows, 200), "float32")]


@mosaic
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_terms_of_bfloat16_are_exact(dtype):
    from lutjax.kernels._pallas.gpu import _one_hot

    a = jax.random.normal(jax.random.key(0), (1000,)).astype(dtype)
    a = jnp.concatenate([a, a * jnp.asarray(2.0**-10, dtype), jnp.asarray([0.0, 1.0, -3.0], dtype)])
    terms = jax.jit(_one_hot.terms)(a)
    assert {t.dtype for t in terms} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(sum(np.asarray(t, np.float64) for t in terms), np.asarray(a, np.float64))


@mosaic
@pytest.mark.parametrize("factor", [slow(False), True])
def test_update_on_gpus(monkeypatch, factor):
    """Lowers; and with sums of rows that any machine can make, moves rows as plain JAX does."""
    from lutjax.kernels._pallas.gpu import _one_hot, lookup
    from lutjax.kernels._xla import _row_gathers, lookup as plain

    d = lutjax.detect_signs(jax.random.normal(jax.random.key(0), (20, 3, 4)))
    weights = jnp.round(8 * jax.random.normal(jax.random.key(1), (3, 16, 5)))
    dy = jnp.round(8 * jax.random.normal(jax.random.key(2), (20, 5)))
    arguments = (Lookup(weights, d), dy, Step(jnp.float32(0.25), jnp.float32(0.5) if factor else None))

    def update(*arguments):
        return lookup.update(*arguments, device=H200)

    exported = _ahead_of_time.lower(
        lambda weights, dy: update(Lookup(weights, d), dy, arguments[2]),
        weights,
        dy,
        platform="cuda",
        device_kind=H200.kind,
    )
    assert [(a.shape, a.dtype) for a in exported.out_avals] == [(weights.shape, weights.dtype)]

    def add_rows(index, dy, n_rows):
        return _row_gathers.add_rows(jnp.zeros((len(index), n_rows, dy.shape[1])), index, dy, H200)

    monkeypatch.setattr(_one_hot, "add_rows", add_rows)
    (moved, _), (expected, _) = jax.jit(update)(*arguments), plain.update(*arguments, device=H200)
    np.testing.assert_array_equal(moved, expected)
    assert not np.array_equal(moved, weights)


@gpu_interpreter
@pytest.mark.slow
def test_sums_of_rows_interpreted_for_gpus():
    """Ids that no table has count as the nearest. The other kernels hold what the interpreter does not know: first operands of
    tensor cores in registers, and exchanges of a warp."""
    from lutjax.kernels._pallas.gpu import _shared_tables

    index = jax.random.randint(jax.random.key(0), (3, 130), -5, 12)
    index = index.at[0, 0].set(2**31 - 1).at[1, 129].set(-(2**31))
    weights = jnp.round(8 * jax.random.normal(jax.random.key(1), (3, 8, 130)))
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        y = jax.jit(_shared_tables.sum_rows)(weights, index)
    np.testing.assert_array_equal(y, weights[jnp.arange(3)[:, None], jnp.clip(index, 0, 7)].sum(0))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("batch", "detectors", "bits", "outputs", "dtype"),
    [(1000, 37, 6, 300, "float32"), (129, 5, 7, 130, "float32"), (500, 9, 6, 700, "bfloat16")],
)
def test_lookup_of_any_ids_on_gpus(batch, detectors, bits, outputs, dtype):
    """Sizes that fill no block; of the ids a third are of no row."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = jax.random.normal(keys[0], (detectors, 2**bits, outputs)).astype(dtype)
    d = lutjax.detect_signs(jax.random.normal(keys[1], (batch, detectors, bits)))
    noise = jax.random.randint(keys[2], d.index.shape, -(2**31), 2**31 - 1)
    index = jnp.where(noise % 3 == 0, noise, d.index)
    flip = jnp.where(noise % 5 == 0, noise, d.flip)
    dy = jax.random.normal(keys[3], (batch, outputs)).astype(dtype)

    def results(implementation):
        def f(weights, margin):
            any_ids = dataclasses.replace(d, index=index, flip=flip, margin=margin)
            return lutjax.lookup(weights, any_ids, implementation=implementation)

        y, pullback = jax.vjp(f, weights, d.margin)
        return y, *pullback(dy)

    for name, a, e in zip(("y", "weights", "margin"), *(results(i) for i in ("pallas", "xla")), strict=True):
        testing.assert_close(name, a, e)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("batch", "gates", "bits", "dtype"),
    [(83, 21, 6, "float32"), (1037, 13, 3, "bfloat16"), (515, 5, 8, "float32"), (2048, 9, 1, "float16")],
)
def test_binary_lut_of_any_ids_on_gpus(batch, gates, bits, dtype):
    """Wires and readers far out of range, more readers than are read together, and NaN."""
    generator = np.random.default_rng(0)

    def numbers(*shape):
        return jnp.asarray(generator.integers(-8, 9, shape) / 4, dtype)

    x, table, dy = numbers(7, batch).at[0, 0].set(np.nan), numbers(gates, 2**bits), numbers(gates, batch)
    wires = jnp.asarray(generator.integers(-99, 99, (gates, bits)), jnp.int32)
    readers = jnp.asarray(generator.integers(-99, 999, (7, 13)), jnp.int32)

    def run(implementation):
        def f(x, table):
            return lutjax.binary_lut(
                x, table, wires, readers=readers, feature_axis=0, implementation=implementation
            )

        y, pullback = jax.vjp(f, x, table)
        return y, pullback(dy)

    for actual, expected in zip(*(jax.tree.leaves(run(i)) for i in ("pallas", "xla")), strict=True):
        testing.assert_close("binary_lut", actual, expected)


def reason_on(device, direction="forward", rule=None, **sizes):
    """Return the reason why a look-up is not for Mosaic GPU, or left to the next implementation; None if it comes first."""
    call = lookups(**sizes)
    output = array(call.detection.shape[0], call.weights.shape[2])
    return pallas_interpreter.reason("gpu", device, call, direction, output, rule)


def test_why_not_on_gpus():
    assert "needs compute capability 9.0 or newer, NVIDIA A100 has 8.0" in reason_on(
        device("NVIDIA A100", "gpu")
    )
    b200 = device("NVIDIA B200", "gpu")
    for direction in ("backward", "update"):
        assert "wgmma" in reason_on(b200, direction)
    assert reason_on(b200) is None
    assert "at most 128 rows, here 256" in reason_on(H200, bits=8)
    assert "2^31 numbers" in reason_on(H200, batch=2**22)
    assert "no kernel for float64" in reason_on(H200, dtype="float64")
    assert "sums integers by Triton kernels, and Triton" in reason_on(H200, accumulate=FIXED)


@pytest.mark.parametrize(
    ("sizes", "direction", "reason"),
    [
        ({}, "backward", None),
        ({"bits": 12}, "backward", None),
        ({}, "forward", "by Triton's kernels"),
        ({"bits": 13}, "backward", "at most 4096 rows, here 8192"),
        ({"bits": 10, "batch": 512}, "backward", "from 1 look-ups of each row in fixed point on, here 0"),
    ],
)
def test_which_integers_are_summed_in_shared_memory(monkeypatch, sizes, direction, reason):
    pretend_triton_runs(monkeypatch)
    found = reason_on(H200, direction, accumulate=FIXED, **sizes)
    assert found is None if reason is None else reason in found


@mosaic
@pytest.mark.slow
@pytest.mark.parametrize("op", ["lookup", "sparse_lookup", "lookup_attention"])
def test_lowers_for_gpus_in_fixed_point(monkeypatch, op):
    pretend_triton_runs(monkeypatch)
    case = testing.case(op, fast_size(op))
    testing.check_lowering(case, "pallas/gpu", platform="cuda", device_kind=H200.kind, accumulate=FIXED)


@pytest.mark.parametrize(
    ("slots", "batch", "direction", "reason"),
    [
        (32, 4096, "forward", None),
        (32, 4096, "backward", None),
        (32, 4096, "update", "by Triton's kernels"),
        (3, 4096, "forward", "from 32 slots on, here 3"),
        (32, 100, "backward", "from 512 samples on, here 100"),
    ],
)
def test_which_sparse_rows_come_first_on_gpus(monkeypatch, slots, batch, direction, reason):
    pretend_triton_runs(monkeypatch)
    call = sparse(512, slots=slots, batch=batch)
    rule = SGD() if direction == "update" else None
    found = pallas_interpreter.reason("gpu", H200, call, direction, array(batch, 512), rule)
    assert found is None if reason is None else reason in found
    wide = pallas_interpreter.reason("gpu", H200, sparse(2**14), "forward", array(8, 2**14), None)
    assert "at most 8192, here 16384" in wide


def test_mosaic_comes_before_triton():
    considered = lutjax.kernel_registry.consider("lookup", *lookups().values(), device=H200)
    first = next(candidate for candidate in considered if candidate.spec.backend == "gpu")
    assert (first.spec.names[1], first.reason) == ("pallas/gpu", None)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_comes_first_on_gpus_where_it_was_measured_faster(direction):
    assert reason_on(H200, direction) is None
    assert reason_on(H200, direction, bits=5, detectors=16) is None
    for sizes in (
        {"bits": 7},
        {"bits": 4},
        {"detectors": 8},
        {"outputs": 64},
        {"batch": 2048},
        {"dtype": "bfloat16"},
    ):
        assert "was measured faster than Triton" in reason_on(H200, direction, **sizes)
    few = reason_on(H200, direction, batch=4096)
    assert (few is None) == (direction == "backward")


@mosaic
@pytest.mark.parametrize(("bits", "samples"), [(6, 83), (8, 513), (1, 1)])
def test_addresses_packed_for_gpus(bits, samples):
    """Whole blocks of samples, four addresses to a word; wires far outside, and NaN."""
    from lutjax.kernels._pallas.gpu import _by_address

    rng = np.random.default_rng(0)
    x = np.where(rng.random((9, samples)) < 0.1, np.nan, rng.integers(-1, 2, (9, samples))).astype("float32")
    wires = rng.integers(-20, 20, (5, bits)).astype("int32")
    packed = np.asarray(_by_address.pack_addresses(jnp.asarray(x), jnp.asarray(wires)))
    expected = np.sum((x[np.clip(wires, 0, 8)] > 0) << np.arange(bits)[None, :, None], 1)
    addresses = packed.view(np.uint8)  # the first of four in the lowest byte
    assert packed.shape == (5, 128 * -(-samples // 512))
    np.testing.assert_array_equal(addresses[:, :samples], expected)
    assert not addresses[:, samples:].any()


@pytest.mark.parametrize("bits", [2, slow(6)])
def test_slopes_at_addresses(bits):
    """Half of the derivatives of the interpolation where bits are softened."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2**bits)), jnp.float32)
    set_bits = np.arange(2**bits)[None] >> np.arange(bits)[:, None] & 1
    softened = [jnp.tile(jnp.where(b == 1, 0.75, 0.25)[None], (3, 1)) for b in set_bits]
    expected = jnp.stack(_slot_polynomials.slopes(table, softened), 1) / 2
    np.testing.assert_allclose(
        _slot_polynomials.slopes_at_addresses(table).reshape(expected.shape), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("direction", "sizes", "reason"),
    [
        ("backward", {}, None),
        ("forward", {}, "was measured slower than Triton forward"),
        ("backward", {"bits": 4}, "from 5 bits on, here 4"),
        ("backward", {"samples": 512}, "from 4194304 inputs on, here 2097152"),
        ("backward", {"samples": 1025}, "for multiples of 512 samples, here 1025"),
        ("backward", {"dtype": "bfloat16"}, "for float32 only, not bfloat16"),
        ("backward", {"dtype": "float64"}, "has no kernel for float64"),
        ("backward", {"fan_out": None}, "the call gives no readers"),
        ("backward", {"fan_out": 10}, "reads every entry of the lists of readers: 40960, of 24576 wires"),
        ("backward", {"samples": 2**19}, "fewer than 2^31 numbers"),
    ],
)
def test_when_binary_tables_come_first_on_gpus(direction, sizes, reason):
    sizes = {"samples": 1024, "bits": 6, "fan_out": 6, "dtype": "float32", **sizes}
    n, dtype, fan_out = sizes["bits"], sizes["dtype"], sizes["fan_out"]
    call = outline(
        BinaryLut,
        array(4096, sizes["samples"], dtype=dtype),
        array(4096, 2**n, dtype=dtype),
        array(4096, n, dtype="int32"),
        None if fan_out is None else array(4096, fan_out, dtype="int32"),
    )
    found = pallas_interpreter.reason("gpu", H200, call, direction)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("rule", "batch", "reason"),
    [
        (SGD(), 16384, None),
        (SGD(), 8192, "was measured faster than Triton from 8388608 numbers in the outputs on, here 4194304"),
        (SGD(weight_decay=0.5), 16384, "moves rows by SGD without weight decay only"),
        (RowAdagrad(), 16384, "moves rows by SGD without weight decay only"),
    ],
)
def test_which_updates_come_first_on_gpus(rule, batch, reason):
    found = reason_on(H200, "update", rule, batch=batch)
    assert found is None if reason is None else reason in found


def attentions(
    batch=4, length=1024, bits=6, position_bits=4, detectors=3, dtype="float32", window=None, accumulate=None
):
    d = detections(batch, length, detectors, bits=bits)
    e = detections(max(length - 1, 1), detectors, bits=position_bits)
    weights = array(detectors, 2 ** (2 * bits + position_bits), 32, dtype=dtype)
    return outline(LookupAttention, weights, d, d, e, window=window, accumulate=accumulate)


@pytest.mark.parametrize(
    ("sizes", "direction", "reason"),
    [
        ({}, "forward", None),
        ({}, "backward", None),
        ({"rule": SGD(weight_decay=0.5)}, "update", None),
        ({"batch": 16, "length": 256}, "backward", None),
        (
            {"batch": 16, "length": 256},
            "forward",
            "was measured faster than Triton from 512 keys on, here 256",
        ),
        ({"window": 100}, "forward", "from 512 keys on, here 100"),
        ({"batch": 1, "length": 900}, "forward", "from 16 queries for each of their ids on, here 14"),
        ({"bits": 7}, "forward", "up to 1024 rows for each id of a query, here 2048"),
        ({"bits": 9}, "forward", "at most 4096 rows for each id of a query, here 8192"),
        ({"batch": 1, "length": 2**15}, "forward", "at most 32767 keys, here 32768"),
        ({"batch": 512}, "forward", "268435456 counts of a detector in memory, here 536870912"),
        ({"rule": RowAdagrad()}, "update", "moves rows by SGD only"),
        ({"accumulate": FIXED}, "forward", "for sums of floats only"),
        ({"accumulate": FIXED}, "backward", None),
        ({"dtype": "float64"}, "forward", "no kernel for float64"),
    ],
)
def test_which_attention_comes_first_on_gpus(monkeypatch, sizes, direction, reason):
    pretend_triton_runs(monkeypatch)
    sizes = dict(sizes)
    rule = sizes.pop("rule", None)
    call = attentions(**sizes)
    found = pallas_interpreter.reason("gpu", H200, call, direction, array(*call.query.shape[:2], 32), rule)
    assert found is None if reason is None else reason in found


@gpu_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("start", [None, 2])
@pytest.mark.parametrize("positions", [0, 1, 2])
def test_counts_interpreted_for_gpus(monkeypatch, positions, start):
    """Ids that are none count as the nearest. That threads add to shared memory the interpreter does not know."""
    pytest.importorskip("triton")
    from lutjax.kernels._pallas.gpu import _counts, _mosaic_launch
    from lutjax.kernels._triton._detected_pairs import DetectedPairs

    def add_ones(table, cells):
        places = jax.lax.broadcasted_iota(jnp.int32, (cells.shape[0], table.shape[0]), 1)
        found = (cells[:, None] == places).astype(jnp.int32)
        table[...] = table[...] + jnp.sum(found, 0, dtype=jnp.int32)

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


@pytest.mark.gpu
@needs_gpu
def test_attention_of_any_ids_on_gpus():
    """Ids that are none read no memory that is not the tables', and counts of more than a byte are right."""
    wild = np.random.default_rng(0).choice([0, 1, 2, 3, -1, 9, 2**31 - 1, -(2**31)], (2, 2, 21, 2))
    for name in ("pallas", "triton"):
        assert all(np.isfinite(np.asarray(a)).all() for a in attend(name, (*wild, wild[0, 0, :20, :1])))
    sizes = {"batch": 1, "queries": 700, "detectors": 2, "bits": 1, "position_bits": 1, "outputs": 5}
    case = testing.case("lookup_attention", "tiles", **sizes)
    testing.check(case, "pallas/gpu", transformation="jit")
    testing.check_update(case, "pallas/gpu")


# ------------------------------------------------------------------------------------- gates on TensorCores
CPU = device("cpu", "cpu")
CALLS = {call.op: call for call in (BilinearGates, SoftLut, BinaryLut)}


def kernels_of(op):
    return [importlib.import_module(f"lutjax.kernels.{where}.{op}") for where in ("_pallas.tpu", "_xla")]


def same_gates(op, n_inputs, n_gates, n_samples, bits=2, dtype="float32", alone=True):
    """Kernels against those of plain JAX: wires far outside, NaN among samples, both zeros."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (n_inputs, n_samples)) / 4
    x[0, :3] = [0.0, -0.0, np.nan] if op == "binary_lut" else 0.0
    parameter = rng.integers(-8, 9, (4, n_gates) if op == "bilinear_gates" else (n_gates, 2**bits)) / 4
    x, parameter = jnp.asarray(x, dtype), jnp.asarray(parameter, "float32")
    wires = rng.integers(-3, n_inputs + 4, (n_gates, bits))
    wires[0], wires[-1] = 2**31 - 1, -(2**31)
    wires = jnp.asarray(wires, jnp.int32)
    call = CALLS[op](x, parameter, wires)
    both = {"x", CALLS[op].arrays()[1]}
    dy = jnp.asarray(rng.integers(-8, 9, (n_gates, n_samples)) / 4, dtype)
    (found, expected) = (
        {
            "y": kernels.forward(call, device=CPU),
            **kernels.backward(call, dy, frozenset(both), device=CPU),
        }
        for kernels in kernels_of(op)
    )
    assert set(found) == {"y", *both}
    for name, actual in found.items():
        testing.assert_close(f"{op}: {name}", actual, expected[name])
    for need in both if alone else ():
        of_one = kernels_of(op)[0].backward(call, dy, frozenset({need}), device=CPU)
        assert set(of_one) == {need}
        np.testing.assert_array_equal(of_one[need], found[need])


@pytest.mark.parametrize("op", [slow("bilinear_gates"), slow("soft_lut"), slow("binary_lut")])
@pytest.mark.usefixtures("interpreted")
def test_gates_in_several_blocks(op, monkeypatch):
    monkeypatch.setattr(_gate_blocks, "_MOST_GATES", 16)
    monkeypatch.setattr(_gate_blocks, "_MOST_SAMPLES", 128)
    same_gates(op, 5, 19, 130, alone=op != "bilinear_gates")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["bilinear_gates", "soft_lut", "binary_lut"])
@pytest.mark.usefixtures("interpreted")
def test_gates_in_wide_blocks(op):
    same_gates(op, 9, 33, 1500, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_tables_of_many_slots():
    """Fewer samples at a time, and slots beyond one row of lanes."""
    same_gates("soft_lut", 11, 5, 260, bits=8)
    same_gates("binary_lut", 11, 5, 260, bits=7)


@pytest.mark.parametrize(("bits", "words"), [(2, 3), slow(6, 150)])
@pytest.mark.usefixtures("interpreted")
def test_packed_words_on_tensor_cores(bits, words):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 2**32, (5, words), dtype=np.uint32))
    truth = jnp.asarray(rng.integers(0, 2, (21, 2**bits)).astype(bool))
    wires = jnp.asarray(rng.integers(-3, 9, (21, bits)), jnp.int32)
    y = lutjax.packed_lut(x, truth, wires, implementation="pallas")
    np.testing.assert_array_equal(y, lutjax.packed_lut(x, truth, wires, implementation="xla"))


def test_gates_that_do_not_fit():
    """The number of inputs decides, whichever axis they are."""
    wires = jax.ShapeDtypeStruct((7, 2), "int32")
    coefficients = jax.ShapeDtypeStruct((4, 7), "float32")
    few, many = 50, 40_000

    def lower(shape, feature_axis, kind="TPU v4"):
        def f(x, c, w):
            return lutjax.bilinear_gates(x, c, w, feature_axis=feature_axis, implementation="pallas/tpu")

        x = jax.ShapeDtypeStruct(shape, "float32")
        _ahead_of_time.lower(f, x, coefficients, wires, platform="tpu", device_kind=kind)

    lower((few, many), 0)
    lower((many, few), -1)
    lower((2, many // 2, few), -1)
    lower((many, few), 0, "TPU v6e")
    for shape, feature_axis in (((many, few), 0), ((few, many), -1)):
        with pytest.raises(lutjax.NoImplementationError, match="40000 inputs do not fit 16 MiB"):
            lower(shape, feature_axis)


@pytest.mark.parametrize(
    ("gates", "n_gates", "direction", "comes_first"),
    [
        (SoftLut, 7, "forward", False),
        (SoftLut, 16384, "forward", True),
        (SoftLut, 7, "backward", True),
        (BinaryLut, 7, "forward", True),
    ],
)
def test_where_plain_jax_gathers_faster(gates, n_gates, direction, comes_first):
    call = outline(gates, array(n_gates, 4096), array(n_gates, 4), array(n_gates, 2, dtype="int32"))
    found = pallas_interpreter.reason("tpu", V6E, call, direction)
    assert found is None if comes_first else "plain JAX gathers the rows of at most 4 wires" in found


def test_backward_pass_of_gates_needs_more_memory():
    call = outline(SoftLut, array(40_000, 128), array(7, 4), array(7, 2, dtype="int32"))
    v7x = device("TPU7x")
    assert "do not fit" not in str(pallas_interpreter.reason("tpu", v7x, call))
    assert "40000 inputs do not fit 64 MiB" in pallas_interpreter.reason("tpu", v7x, call, "backward")


def attend(implementation, index, n_queries=21):
    """Return look-up attention and its gradient for some ids of queries, keys and positions, far out of range or not."""
    rng = np.random.default_rng(0)

    def detection(ids, shape, bits):
        margin = jnp.asarray(rng.integers(-8, 8, shape) / 4, jnp.float32)
        flip = jnp.asarray(1 << rng.integers(0, bits, shape), jnp.int32)
        return lutjax.Detection(jnp.broadcast_to(jnp.asarray(ids, jnp.int32), shape), flip, margin, bits)

    q, k, e = index
    weights = jnp.asarray(rng.integers(-8, 8, (2, 64, 3)), jnp.float32)
    query, key = detection(q, (2, n_queries, 2), 2), detection(k, (2, n_queries, 2), 2)
    position = detection(e, (n_queries - 1, 1), 2)
    dy = jnp.asarray(rng.integers(-4, 4, (2, n_queries, 3)), jnp.float32)

    def f(weights, *margins):
        of = zip((query, key, position), margins, strict=True)
        query_, key_, position_ = (dataclasses.replace(d, margin=m) for d, m in of)
        return lutjax.lookup_attention(weights, query_, key_, position_, implementation=implementation)

    y, vjp = jax.vjp(f, weights, query.margin, key.margin, position.margin)
    return y, *vjp(dy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wild", "clamped"),
    [
        ((10**6, 2, 1), (3, 2, 1)),
        ((-(10**6), 2, 1), (0, 2, 1)),
        ((1, 77, 3), (1, 3, 3)),
        ((1, -77, 3), (1, 0, 3)),
        ((2, 1, 10**6), (2, 1, 3)),
        ((2, 1, -1), (2, 1, 0)),
    ],
)
def test_attention_clamps_each_id(wild, clamped):
    with pallas_interpreter.interpreted():
        found = attend("pallas", wild)
    for actual, wanted in zip(found[:1], attend("xla", clamped)[:1], strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert all(np.isfinite(np.asarray(a)).all() for a in found)


@pytest.mark.slow
def test_attention_in_several_blocks(monkeypatch):
    """Blocks of few queries, keys and samples: every axis of the grids has several steps."""
    rng = np.random.default_rng(1)
    ids = tuple(rng.integers(0, 4, shape) for shape in ((2, 21, 2), (2, 21, 2), (20, 1)))
    wanted = attend("xla", ids)
    for name, size in (("_QUERIES", 8), ("_KEYS", 8), ("_BLOCKS", 1)):
        monkeypatch.setattr(_attention_blocks, name, size)
    with pallas_interpreter.interpreted():
        found = attend("pallas", ids)
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("sizes", "kind", "direction", "rule", "why"),
    [
        ({"batch": 128, "length": 32}, "TPU v6e", "forward", None, None),
        ({"batch": 128, "length": 32}, "TPU v6e", "backward", None, None),
        ({"batch": 128, "length": 32}, "TPU v6e", "update", SGD(), None),
        ({"batch": 128, "length": 32}, "TPU v6e", "update", SGD(weight_decay=0.5), "without weight decay"),
        ({"batch": 128, "length": 32}, "TPU v6e", "update", RowAdagrad(), "moves rows by SGD only"),
        ({"batch": 128, "length": 32}, "TPU v4", "forward", None, "of which a TPU v4 has 16"),
        ({"batch": 1, "length": 2**15}, "TPU v6e", "forward", None, "have too many distances"),
        ({"batch": 1, "length": 2}, "TPU v6e", "forward", None, "plain JAX is faster: 0 us against"),
        ({"batch": 1, "length": 2}, "TPU v6e", "update", SGD(), "plain JAX is faster: 0 us against"),
        ({"batch": 0, "length": 2}, "TPU v6e", "backward", None, "there is nothing to compute"),
    ],
)
def test_when_attention_comes_first_on_tensor_cores(sizes, kind, direction, rule, why):
    call = attentions(detectors=1, **sizes)
    output = array(*call.query.shape[:2], 32)
    found = pallas_interpreter.reason("tpu", device(kind), call, direction, output, rule)
    assert found is None if why is None else why in found

"""Implementations in Pallas on machines without TPUs: interpreted, and lowered for every generation."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest

import lutjax
from lutjax import _ahead_of_time, testing
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _gate_blocks


def implemented(backend):
    """Ops that have an implementation in Pallas for a backend."""
    return {
        op
        for op in lutjax.kernel_registry.ops()
        for spec in lutjax.kernel_registry.candidates(op)
        if (spec.platform, spec.backend) == ("pallas", backend)
    }


ON_TENSOR_CORES = [op for op in testing.OPS if op in implemented("tpu")]
ON_SPARSE_CORES = [op for op in testing.OPS if op in implemented("sparsecore")]
UPDATED = [op for op in testing.LOOK_UPS if f"{op}_update" in implemented("tpu")]

# A size that can be split in two along the batch and the detectors.
SPLIT = {
    "detect": ("primes", {"batch": 6, "detectors": 4}),
    "detect_signs": ("primes", {"batch": 6}),
    "lookup": ("primes", {"batch": 6, "detectors": 4}),
    "sparse_lookup": ("primes", {"batch": 6, "detectors": 4}),
    "lookup_attention": ("segments", {"batch": 2, "queries": 5, "detectors": 2, "outputs": 3}),
    "lut_pair_attention": ("primes", {"batch": 2, "queries": 5, "detectors": 2, "outputs": 3}),
    "bilinear_gates": ("primes", {"batch": 6, "gates": 4}),
    "soft_lut": ("primes", {"batch": 6, "gates": 4, "bits": 2}),
    "binary_lut": ("primes", {"batch": 6, "gates": 4, "bits": 2}),
}
FAST = ("primes", "ties", "empty_batch")  # shapes that show most in least time: interpretation is slow


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def interpreted():
    with pallas_interpreter.interpreted():
        yield


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (op, shape) if shape in FAST else slow(op, shape)
        for op in ON_TENSOR_CORES
        for shape in testing.shapes(op)
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_shapes(op, shape):
    testing.check(testing.case(op, shape), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("op", ON_TENSOR_CORES)
@pytest.mark.usefixtures("interpreted")
def test_bfloat16(op):
    testing.check(testing.case(op, SPLIT[op][0], "bfloat16"), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "transformation",
    # What is interpreted calls back, which neither remat nor exported programs can.
    [t for t in testing.TRANSFORMATIONS if t not in ("remat", "export", "jit")],
)
@pytest.mark.parametrize("op", ON_TENSOR_CORES)
@pytest.mark.usefixtures("interpreted")
def test_transformations(op, transformation):
    shape, sizes = SPLIT[op]
    testing.check(testing.case(op, shape, **sizes), "pallas", transformation=transformation)


@pytest.mark.parametrize(
    ("op", "shape"),
    [(op, shape) if shape == "primes" else slow(op, shape) for op in UPDATED for shape in testing.shapes(op)],
)
@pytest.mark.usefixtures("interpreted")
def test_updates(op, shape):
    testing.check_update(testing.case(op, shape), "pallas")


@pytest.mark.parametrize(
    ("op", "tpu"),
    [
        (op, tpu.name) if tpu.name == "v6e" else slow(op, tpu.name)
        for op in ON_TENSOR_CORES
        for tpu in _tpus.TPUS
    ],
)
def test_lowers_for_tensor_cores(op, tpu):
    shape, sizes = SPLIT[op]
    kind = _tpus.named(tpu).device_kind
    testing.check_lowering(testing.case(op, shape, **sizes), "pallas/tpu", platform="tpu", device_kind=kind)


@pytest.mark.parametrize("tpu", [slow("v5p"), "v6e", slow("v7x")])
@pytest.mark.parametrize("op", ON_SPARSE_CORES)
def test_lowers_for_sparse_cores(op, tpu):
    shape, sizes = SPLIT[op]
    kind = _tpus.named(tpu).device_kind
    case = testing.case(op, shape, **sizes)
    testing.check_lowering(case, "pallas/sparsecore", platform="tpu", device_kind=kind)


def test_names_of_devices():
    device = lutjax.kernels.registry.Device
    kinds = {"TPU v4": "v4", "TPU v5e": "v5e", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
    kinds |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU v7x": "v7x", "TPU7x": "v7x"}
    for kind, name in kinds.items():
        tpu = _tpus.generation(device(lutjax.Backend.TPU, kind))
        assert tpu is not None, kind
        assert tpu.name == name
    assert _tpus.generation(device(lutjax.Backend.TPU, "TPU v3")) is None
    assert _tpus.generation(device(lutjax.Backend.CPU, "cpu")) is None


def test_why_not_on_tensor_cores():
    d = jax.eval_shape(lutjax.detect_signs, jax.ShapeDtypeStruct((4, 2, 3), "float32"))
    weights = jax.ShapeDtypeStruct((2, 8, 5), "float32")
    resolve = lutjax.kernel_registry.resolve
    for kind, backend, reason in (
        ("TPU v3", "tpu", "needs a TPU v4, v5e, v5p, v6e or v7x, not TPU v3"),
        ("cpu", "cpu", r"pallas/tpu \(.*\): runs on tpu, the call runs on cpu"),
    ):
        device = lutjax.kernels.registry.Device(lutjax.Backend(backend), kind)
        with pytest.raises(lutjax.NoImplementationError, match=reason):
            resolve("lookup", weights, d, device=device, implementation="pallas", accumulate=None)


# ------------------------------------------------------------------------------------- gates on TensorCores
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
    device = lutjax.kernels.registry.Device(lutjax.Backend.CPU, "cpu")
    dy = jnp.asarray(rng.integers(-8, 9, (n_gates, n_samples)) / 4, dtype)
    (y, dx, sums), expected = (
        (
            kernels.forward(x, parameter, wires, None, device=device),
            *kernels.backward((x, parameter, wires, None), dy, (True, True, False, False), device=device)[:2],
        )
        for kernels in kernels_of(op)
    )
    for name, actual, wanted in zip(("y", "dx", "sums"), (y, dx, sums), expected, strict=True):
        testing.assert_close(f"{op}: {name}", actual, wanted)
    for needs in ((True, False, False, False), (False, True, False, False)):
        if not alone:
            return
        of_one = kernels_of(op)[0].backward((x, parameter, wires, None), dy, needs, device=device)
        for need, a, wanted in zip(needs, of_one, (dx, sums, None, None), strict=True):
            assert (a is not None) == need
            if need:
                np.testing.assert_array_equal(a, wanted)


@pytest.mark.parametrize("op", ["bilinear_gates", slow("soft_lut"), slow("binary_lut")])
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
    """What decides is the number of inputs, whichever axis they are."""
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


def test_where_plain_jax_gathers_faster():
    device = lutjax.kernels.registry.Device(lutjax.Backend.TPU, "TPU v6e")
    for op, n_gates, direction, platform in (
        ("soft_lut", 7, "forward", "xla"),
        ("soft_lut", 16384, "forward", "pallas"),
        ("soft_lut", 7, "backward", "pallas"),
        ("binary_lut", 7, "forward", "pallas"),
    ):
        shapes = (((n_gates, 4096), "float32"), ((n_gates, 4), "float32"), ((n_gates, 2), "int32"))
        args = [jax.ShapeDtypeStruct(*s) for s in shapes]
        spec = lutjax.kernel_registry.resolve(op, *args, None, device=device, direction=direction)
        assert spec.platform == platform, (op, n_gates, direction)

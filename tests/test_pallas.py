"""Implementations in Pallas on machines without TPUs: interpreted, and lowered for every generation."""

import jax
import pallas_interpreter
import pytest

import lutjax
from lutjax import testing
from lutjax.kernels._pallas import _tpus


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


# ------------------------------------------------------------------------------------- Mosaic GPU
ON_GPUS = [op for op in testing.OPS if op in implemented("gpu")]
# Kernels for tables in shared memory are written out sample by sample: seconds to lower.
GPU_CASES = [
    *(slow(op, shape, "float32") for op in ON_GPUS for shape in testing.shapes(op)),
    *(slow(op, SPLIT[op][0], dtype) for op in ON_GPUS for dtype in ("bfloat16", "float16")),
]


@pytest.mark.parametrize(("op", "shape", "dtype"), GPU_CASES)
def test_lowers_for_gpus(op, shape, dtype):
    case = testing.case(op, shape, dtype)
    testing.check_lowering(case, "pallas/gpu", platform="cuda", device_kind="NVIDIA H200")

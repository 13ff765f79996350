"""Implementations in Pallas on machines without TPUs: interpreted, and lowered for every generation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest

import lutjax
from lutjax import testing
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _attention, _support


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


def attend(implementation, index, n_queries=21):
    """What look-up attention and its gradient are for some ids of queries, keys and positions, far out of range or not."""
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
        monkeypatch.setattr(_attention, name, size)
    with pallas_interpreter.interpreted():
        found = attend("pallas", ids)
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6 * max(1, np.abs(expected).max()))


def test_why_attention_is_not_on_tensor_cores():
    def call(shape, distances, op="lookup_attention", kind="TPU v6e"):
        d = jax.eval_shape(lutjax.detect_signs, jax.ShapeDtypeStruct((*shape, 1, 6), "float32"))
        e = jax.eval_shape(lutjax.detect_signs, jax.ShapeDtypeStruct((distances, 1, 4), "float32"))
        weights = jax.ShapeDtypeStruct((1, 2**16, 32), "float32")
        device = lutjax.kernels.registry.Device(lutjax.Backend.TPU, kind)
        return lutjax.kernels.registry.Call(
            op, "forward", (weights, d, d, e, None, None, None), {"window": None, "accumulate": None}, device
        )

    assert _support.unsupported(call((128, 32), 31)) is None
    assert _support.slower(call((128, 32), 31)) is None
    assert "16" in _support.unsupported(call((128, 32), 31, kind="TPU v4"))
    assert "distances" in _support.unsupported(call((1, 2**15), 2**15))
    assert "us against" in _support.slower(call((1, 2), 31))

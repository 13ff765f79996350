"""Every (op, implementation) against the reference: each output and each cotangent by its name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPLIT, slow

import lutjax
from lutjax import testing
from lutjax.training import tables

pytestmark = pytest.mark.gpu  # worth running wherever implementations run


# Sizes at which every dtype is tried.
TYPED = {
    "detect": ("primes", "ties"),
    "detect_signs": ("primes", "ties"),
    "lookup": ("primes", "repeats"),
    "sparse_lookup": ("primes", "one_list"),
    "lookup_attention": ("ties", "tiles"),
    "lut_pair_attention": ("ties", "tiles"),
    "bilinear_gates": ("primes", "readers"),
    "soft_lut": ("primes", "readers"),
    "binary_lut": ("primes", "readers"),
}


SLOW_TO_COMPILE = (("binary_lut", "primes"), ("lut_pair_attention", "ties"))


def implementations(op: str) -> list[str]:
    """Those that can run on the device of this machine."""
    backend = lutjax.Backend(jax.default_backend())
    return [
        spec.names[0] if spec.platform != "pallas" else spec.names[1]
        for spec in lutjax.kernel_registry.candidates(op)
        if spec.backend.of_device in (lutjax.Backend.ANY, backend)
    ]


def skip_without(dtype, implementation):
    if implementation.startswith("pallas") and dtype == "float64":
        pytest.skip("Pallas has no kernels for float64, and says so")


IMPLEMENTED = [(op, i) for op in testing.OPS for i in implementations(op)]


def test_every_op_has_an_implementation_here():
    forward_only = {*(f"{op}_update" for op in testing.LOOK_UPS), "packed_lut"}
    assert (
        {op for op, _ in IMPLEMENTED} == set(testing.OPS) == set(lutjax.kernel_registry.ops()) - forward_only
    )
    assert forward_only < set(lutjax.kernel_registry.ops())


# Shapes and transformations that wait for `pytest -m slow`: another shape of the op, or the op named, goes the same way.
REPEATED = {
    "lookup_attention": ("tiles_cross", "tiles_window", "window", "none", "jit", "remat", "scan"),
    "lut_pair_attention": (
        "ties",
        "no_positions",
        "tiles",
        "tiles_cross",
        "tiles_window",
        "window",
        "window_segments",
        "shared_positions",
        "cross",
        "none",
        "jit",
        "remat",
        "scan",
        "vmap of grad",
        "grad of vmap",
        "shard_map, replicated table",
        "shard_map, sharded table",
        "export",
    ),
    "binary_lut": (
        "six_inputs",
        "eight_inputs",
        "large_fan_out",
        "none",
        "remat",
        "scan",
        "grad of vmap",
        "export",
    ),
    "soft_lut": ("features_first", "eight_inputs", "none", "remat", "grad of vmap"),
}


def mostly_fast(op, implementation, what):
    one = (op, implementation, what)
    return slow(*one) if what in REPEATED.get(op, ("none", "remat") if op != "lookup" else ()) else one


@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    [mostly_fast(o, i, s) for o, i in IMPLEMENTED for s in testing.shapes(o)],
)
def test_shapes(op, implementation, shape):
    testing.check(testing.case(op, shape), implementation, transformation="jit")


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), "float64"])
@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    [
        slow(o, i, s) if s in ("tiles", "repeats", "one_list") or (o, s) in SLOW_TO_COMPILE else (o, i, s)
        for o, i in IMPLEMENTED
        for s in TYPED[o]
    ],
)
def test_dtypes(op, implementation, shape, dtype):
    skip_without(dtype, implementation)
    with jax.enable_x64(dtype == "float64"):
        testing.check(testing.case(op, shape, dtype), implementation, transformation="jit")


@pytest.mark.parametrize(
    ("op", "implementation", "transformation"),
    [mostly_fast(o, i, t) for o, i in IMPLEMENTED for t in testing.TRANSFORMATIONS],
)
def test_transformations(op, implementation, transformation):
    if "shard_map" in transformation and jax.device_count() < 2:
        pytest.skip("shard_map needs two devices, and this machine has one")
    shape, sizes = SPLIT[op]
    testing.check(testing.case(op, shape, **sizes), implementation, transformation=transformation)


@pytest.mark.parametrize(("platform", "device_kind"), [("cuda", "NVIDIA H200"), ("tpu", "TPU v6e")])
@pytest.mark.parametrize(("op", "implementation"), [pair for pair in IMPLEMENTED if pair[1] == "xla"])
def test_lowers_for_every_platform(op, implementation, platform, device_kind):
    """Forward and backward, on a machine that has none of these."""
    shape, sizes = SPLIT[op]
    case = testing.case(op, shape, **sizes)
    testing.check_lowering(case, implementation, platform=platform, device_kind=device_kind)


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("lookup", "primes"),
        ("lookup", "one_row"),
        ("lookup", "empty_batch"),
        ("lookup_attention", "primes"),
        slow("lookup_attention", "cross"),
        slow("lookup_attention", "tiles"),
        ("lookup_attention", "tiles_cross"),
        slow("lut_pair_attention", "primes"),
        slow("lut_pair_attention", "tiles"),
        ("bilinear_gates", "readers"),
        ("bilinear_gates", "empty_batch"),
    ],
)
@pytest.mark.usefixtures("accelerator_formulation")
def test_formulation_for_accelerators(op, shape):
    testing.check(testing.case(op, shape), "xla", transformation="jit")


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("lookup", "primes"),
        slow("lookup", "one_row"),
        slow("lookup", "empty_batch"),
        ("sparse_lookup", "primes"),
        slow("sparse_lookup", "one_list"),
        slow("sparse_lookup", "no_slots"),
        slow("sparse_lookup", "empty_batch"),
        slow("sparse_lookup", "more_slots_than_outputs"),
        slow("lookup", "many_detectors"),
        slow("lookup_attention", "primes"),
        slow("lut_pair_attention", "primes"),
    ],
)
@pytest.mark.usefixtures("tpu_formulation")
def test_formulation_for_tpus(op, shape):
    testing.check(testing.case(op, shape), "xla", transformation="jit")
    if op != "lut_pair_attention":
        testing.check_update(testing.case(op, shape), "xla")


@pytest.mark.parametrize("transformation", ["vmap of grad", "shard_map, sharded table", "scan"])
@pytest.mark.parametrize("op", ["lookup", "sparse_lookup"])
@pytest.mark.usefixtures("tpu_formulation")
@pytest.mark.slow
def test_formulation_for_tpus_under_transformations(op, transformation):
    if "shard_map" in transformation and jax.device_count() < 2:
        pytest.skip("shard_map needs two devices, and this machine has one")
    shape, sizes = SPLIT[op]
    testing.check(testing.case(op, shape, **sizes), "xla", transformation=transformation)


@pytest.mark.usefixtures("tpu_formulation")
def test_products_keep_every_digit():
    """Tables of full precision, which products in bfloat16 would round, and ids that no row has."""
    generator = np.random.default_rng(0)
    weights = jnp.asarray(generator.normal(size=(3, 8, 5)), jnp.float32)
    index = jnp.asarray(generator.integers(-9, 17, (1, 3)), jnp.int32)
    d = lutjax.Detection(index, jnp.ones_like(index), jnp.ones((1, 3), jnp.float32), 3)
    clamped = dataclasses.replace(d, index=jnp.clip(index, 0, 7))
    y, pullback = jax.vjp(lambda w: lutjax.lookup(w, d, implementation="xla"), weights)
    expected, expected_pullback = jax.vjp(lambda w: lutjax.reference.lookup(w, clamped), weights)
    np.testing.assert_allclose(y, expected, rtol=3e-7, atol=1e-7)
    np.testing.assert_array_equal(pullback(y)[0], expected_pullback(y)[0])


LOOK_UPS = [(op, i) for op in testing.LOOK_UPS for i in implementations(f"{op}_update")]
# The others have updates by SGD alone, and say so.
ANY_RULE = [(op, i) for op, i in LOOK_UPS if i == "xla"]
# The op that takes longest to compile waits for `pytest -m slow` where another one goes the same way.
MOSTLY_FAST = [slow(op, i) if op == "lut_pair_attention" else (op, i) for op, i in LOOK_UPS]
# Sizes of attention whose updates are tried each time; those of all others are slow to compile.
UPDATED = {
    "lookup_attention": ("primes", "empty_batch", "window_segments", "cross"),
    "lut_pair_attention": ("empty_batch",),
}
RULES = [
    tables.SGD(),
    tables.SGD(weight_decay=0.5),
    tables.RowAdagrad(weight_decay=0.25),
    tables.RowMomentum(),
    tables.RowAdam(),
    tables.RowAdam(b1=0.9),
]


@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    [slow(o, i, s) if s == "tiles" else (o, i, s) for o, i in LOOK_UPS for s in TYPED[o]],
)
def test_factored_gradients(op, implementation, shape):
    testing.check_factored(testing.case(op, shape), implementation, transformation="jit")


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), "float64"])
@pytest.mark.parametrize(("op", "implementation"), MOSTLY_FAST)
def test_factored_gradients_in_other_dtypes(op, implementation, dtype):
    skip_without(dtype, implementation)
    with jax.enable_x64(dtype == "float64"):
        case = testing.case(op, TYPED[op][0], dtype)
        testing.check_factored(case, implementation, transformation="jit")


@pytest.mark.parametrize(
    "transformation",
    [slow(t) if t in ("none", "remat", "scan") else t for t in testing.FACTORED_TRANSFORMATIONS],
)
@pytest.mark.parametrize(("op", "implementation"), MOSTLY_FAST)
def test_factored_gradients_under_transformations(op, implementation, transformation):
    if "shard_map" in transformation and jax.device_count() < 2:
        pytest.skip("shard_map needs two devices, and this machine has one")
    shape, sizes = SPLIT[op]
    testing.check_factored(testing.case(op, shape, **sizes), implementation, transformation=transformation)


@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    [
        (o, i, s) if s in UPDATED.get(o, (s,)) else slow(o, i, s)
        for o, i in ANY_RULE
        for s in testing.shapes(o)
    ],
)
def test_updates(op, implementation, shape):
    """From the factored gradient; a rule that needs the sums of each row, and which rows were looked up."""
    testing.check_update(testing.case(op, shape), implementation, tables.RowMomentum(weight_decay=0.25))


@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    [slow(o, i, s) if o == "lut_pair_attention" else (o, i, s) for o, i in LOOK_UPS for s in TYPED[o]],
)
def test_updates_without_sums_of_rows(op, implementation, shape):
    testing.check_update(testing.case(op, shape), implementation, tables.SGD())


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), "float64"])
@pytest.mark.parametrize(("op", "implementation"), MOSTLY_FAST)
def test_updates_in_other_dtypes(op, implementation, dtype):
    skip_without(dtype, implementation)
    with jax.enable_x64(dtype == "float64"):
        testing.check_update(testing.case(op, TYPED[op][0], dtype), implementation, tables.SGD())


@pytest.mark.parametrize("shape", ["primes", "repeats"])  # fewer hits than rows, and more
@pytest.mark.parametrize(
    ("implementation", "rule"),
    [
        pytest.param(i, rule, id=f"{i}-{rule}")
        for op, i in LOOK_UPS
        for rule in RULES
        if op == "lookup" and ((op, i) in ANY_RULE or isinstance(rule, tables.SGD))
        if not (i.startswith("pallas") and rule == tables.SGD(weight_decay=0.5))  # without weight decay only
    ],
)
def test_update_rules(implementation, rule, shape):
    bits = 5 if shape == "primes" else 1
    testing.check_update(testing.case("lookup", shape, bits=bits), implementation, rule)

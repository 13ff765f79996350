"""Every (op, implementation) against the reference: each output and each cotangent by its name."""

import dataclasses

import forgotten
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    at_sizes,
    case_of,
    fast_size,
    implementations,
    in_dtypes,
    ops,
    skipping_what_is_left_to_others,
    slow,
    slow_except,
    slow_where,
    split,
    values_of,
)
from jax.extend.core import jaxprs_in_params

import lutjax
from lutjax import optim as tables, testing
from lutjax.cases import Tag

pytestmark = pytest.mark.gpu  # worth running wherever implementations run

IMPLEMENTED = [(op, i) for op in ops() for i in implementations(op)]


def skip_without_two_devices(transformation):
    if "shard_map" in transformation and jax.device_count() < 2:
        pytest.skip("shard_map needs two devices, and this machine has one")


def test_every_op_and_direction_has_an_implementation_here():
    assert sorted(ops()) == sorted(lutjax.kernel_registry.ops())
    for op in ops():
        assert all(implementations(op, direction) for direction in lutjax.kernel_registry.directions(op))


def test_small_arrays_are_compared():
    """Each by its own magnitude: what is small beside other arrays, or everywhere, is not zero, and zeros are."""
    one, tiny = np.ones(3, np.float32), np.float32([1e-9, 2e-9, 0])
    testing.assert_all_close("same", {"x": 1e6 * one, "w": tiny}, {"x": 1e6 * one, "w": tiny * (1 + 1e-6)})
    for wrong in (np.zeros_like(tiny), tiny[::-1], -tiny, tiny * np.float32(1.001)):
        with pytest.raises(AssertionError, match="wrong: w"):
            testing.assert_all_close("wrong", {"x": 1e6 * one, "w": wrong}, {"x": 1e6 * one, "w": tiny})
    with pytest.raises(AssertionError, match="zeros"):
        testing.assert_close("zeros", tiny, np.zeros_like(tiny))
    testing.assert_close("no finite number", np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]))


SUMS = ("add", "add_any", "sub", "reduce_sum", "scatter-add", "dot_general", "cumsum")


@pytest.mark.parametrize("of", [slow("the reference"), "plain JAX"])
@pytest.mark.parametrize("op", [op for op in ops() if "bfloat16" in testing.cases_of(op).dtypes])
def test_results_are_rounded_once(op, of):
    """Whatever is added has 32 bits at least, forward and backward: sums of rounded numbers depend on their order."""
    for name in testing.cases_of(op).tagged(Tag.DTYPES):
        program = testing.program(testing.case(op, name, "bfloat16"), "xla")
        function = program.expected if of == "the reference" else program.function
        found = equations(jax.make_jaxpr(function)(*program.arguments).jaxpr)
        rounded = [str(eqn) for eqn in found if adds(eqn) and eqn.outvars[0].aval.dtype == jnp.bfloat16]
        assert not rounded, f"{name}: {rounded}"


def adds(eqn):
    """Return whether a primitive adds numbers: the sum over an axis of one element does not."""
    of_one = eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return eqn.primitive.name in SUMS and not of_one


def equations(jaxpr):
    """All equations of a jaxpr, also those of the functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize("name", ["weights", "detection_margin"])
def test_a_small_wrong_cotangent_shows(name, monkeypatch):
    """A cotangent that is off by a thousandth, beside outputs that are millions of times larger."""
    from lutjax.kernels._xla import lookup

    right = lookup.backward

    def wrong(call, cotangent, needs, *, device):
        found = right(call, cotangent, needs, device=device)
        array = name.removesuffix("_margin")
        return {**found, array: found[array] * jnp.asarray(1.001, found[array].dtype)}

    monkeypatch.setattr(lookup, "backward", wrong)
    forgotten.compiled()
    case = split("lookup")
    case = dataclasses.replace(
        case, differentiable={**case.differentiable, "weights": 1e-7 * case.differentiable["weights"]}
    )
    with pytest.raises(AssertionError, match=f"cotangent: {name}"):
        testing.check(case, "xla", transformation="jit")
    forgotten.compiled()


def test_every_op_has_sizes_for_every_purpose():
    for op in ops():
        module = testing.cases_of(op)
        assert all(set(module.tagged(tag)) & set(module.sizes) for tag in (Tag.FAST, Tag.DTYPES)), op
        assert not any(Tag.SLOW in module.sizes[name].tags for name in module.tagged(Tag.FAST)), op


def sizes_of_kernels():
    """All sizes but the one that can be split; of plain JAX only one is fast: test_definitions.py has small sizes of all options."""
    for values in at_sizes(lambda module: [n for n in module.sizes if n not in module.tagged(Tag.FAST)]):
        (op, implementation, shape), is_slow = values_of(values)
        left = implementation == "xla" and shape != fast_size_of_plain_jax(op)
        yield slow(op, implementation, shape) if is_slow or left else (op, implementation, shape)


def fast_size_of_plain_jax(op):
    module = testing.cases_of(op)
    names = [n for n, size in module.sizes.items() if not size.tags & {Tag.FAST, Tag.SLOW}]
    return (
        "primes"
        if "primes" in names
        else next((n for n in module.tagged(Tag.DTYPES) if n in names), names[0])
    )


# The size that can be split is tried under `jax.jit` as under all transformations.
@pytest.mark.parametrize(("op", "implementation", "shape"), list(sizes_of_kernels()))
def test_shapes(op, implementation, shape):
    with skipping_what_is_left_to_others(implementation):
        testing.check(case_of(op, shape), implementation, transformation="jit")


# Where every op does the same, one that reads tables and one of gates stay fast.
FOR_ALL = ("lookup", "bilinear_gates")


def dtypes_of_kernels():
    """All dtypes but the first; of plain JAX only two ops are fast: test_drawn_calls.py draws dtypes."""
    for values in in_dtypes():
        (op, implementation, *rest), is_slow = values_of(values)
        left = implementation == "xla" and op not in FOR_ALL
        yield slow(op, implementation, *rest) if is_slow or left else (op, implementation, *rest)


@pytest.mark.parametrize(("op", "implementation", "shape", "dtype"), list(dtypes_of_kernels()))
def test_dtypes(op, implementation, shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        testing.check(testing.case(op, shape, dtype), implementation, transformation="jit")


# `test_shapes` has every op under `jax.jit`.
WITH_EVERY_OP = ("vmap of grad", "shard_map, sharded table", "export")
TRANSFORMED = [
    (op, implementation, transformation)
    if op in FOR_ALL or transformation in WITH_EVERY_OP
    else slow(op, implementation, transformation)
    for op, implementation in IMPLEMENTED
    for transformation in testing.TRANSFORMATIONS
]


@pytest.mark.parametrize(("op", "implementation", "transformation"), TRANSFORMED)
def test_transformations(op, implementation, transformation):
    skip_without_two_devices(transformation)
    testing.check(split(op), implementation, transformation=transformation)


@pytest.mark.parametrize(
    ("platform", "device_kind"),
    [("cuda", "NVIDIA H200"), ("tpu", "TPU v6e"), slow("rocm", "AMD Instinct MI300X")],
)
@pytest.mark.parametrize(("op", "implementation"), [pair for pair in IMPLEMENTED if pair[1] == "xla"])
def test_lowers_for_every_platform(op, implementation, platform, device_kind):
    """Forward and backward, on a machine that has none of these."""
    testing.check_lowering(split(op), implementation, platform=platform, device_kind=device_kind)


# Look-ups have formulations of their own; each is tried at one size each time.
OF_LOOK_UPS = [
    (op, shape) if shape == fast_size(op) and not testing.cases_of(op).is_slow else slow(op, shape)
    for op in ops("update")
    for shape in testing.shapes(op)
]


@pytest.mark.parametrize(("op", "shape"), slow_except(OF_LOOK_UPS, "lookup-split"))
@pytest.mark.usefixtures("accelerator_formulation")
def test_formulation_for_accelerators(op, shape):
    testing.check(testing.case(op, shape), "xla", transformation="jit")


@pytest.mark.parametrize("shape", ["readers", "empty_batch"])
@pytest.mark.usefixtures("accelerator_formulation")
def test_formulation_of_gates_for_accelerators(shape):
    testing.check(testing.case("bilinear_gates", shape), "xla", transformation="jit")


@pytest.mark.parametrize(("op", "shape"), slow_except(OF_LOOK_UPS, "lookup-split"))
@pytest.mark.usefixtures("tpu_formulation")
def test_formulation_for_tpus(op, shape):
    testing.check(testing.case(op, shape), "xla", transformation="jit")
    testing.check_update(testing.case(op, shape), "xla")


@pytest.mark.parametrize("transformation", ["vmap of grad", "shard_map, sharded table", "scan"])
@pytest.mark.parametrize("op", ops("update"))
@pytest.mark.usefixtures("tpu_formulation")
@pytest.mark.slow
def test_formulation_for_tpus_under_transformations(op, transformation):
    skip_without_two_devices(transformation)
    testing.check(split(op), "xla", transformation=transformation)


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


UPDATED = [(op, i) for op in ops("update") for i in implementations(op, "update")]
RULES = [
    tables.SGD(),
    tables.SGD(weight_decay=0.5),
    tables.RowAdagrad(weight_decay=0.25),
    tables.RowAdagrad(weight_decay=0.25, decay="every"),
    tables.RowMomentum(),
    tables.RowAdam(),
    tables.RowAdam(b1=0.9),
]


def has_rule(implementation, rule):
    """Return whether it moves rows by a rule: Triton by SGD alone, Pallas by SGD without weight decay, native kernels by any without a count."""
    if rule.counts_decay:
        return implementation == "xla"
    if implementation.startswith("pallas"):
        return rule == tables.SGD()
    return implementation in ("xla", "native") or isinstance(rule, tables.SGD)


@pytest.mark.parametrize(
    ("op", "implementation", "shape"), at_sizes(lambda module: module.tagged(Tag.DTYPES), "update")
)
def test_factored_gradients(op, implementation, shape):
    testing.check_factored(testing.case(op, shape), implementation, transformation="jit")


@pytest.mark.parametrize(
    ("op", "implementation", "shape", "dtype"),
    slow_where(in_dtypes("update", first_only=True), lambda op, *_: op != "lookup"),
)
def test_factored_gradients_in_other_dtypes(op, implementation, shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        testing.check_factored(testing.case(op, shape, dtype), implementation, transformation="jit")


@pytest.mark.parametrize(
    ("op", "implementation", "transformation"),
    slow_where(
        [(*pair, transformation) for pair in UPDATED for transformation in testing.FACTORED_TRANSFORMATIONS],
        lambda op, implementation, transformation: (
            testing.cases_of(op).is_slow
            or transformation in ("none", "remat", "scan")
            or (op != "lookup" and transformation != "shard_map, sharded table")
        ),
    ),
)
def test_factored_gradients_under_transformations(op, implementation, transformation):
    skip_without_two_devices(transformation)
    testing.check_factored(split(op), implementation, transformation=transformation)


@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    [
        values
        for values in at_sizes(
            direction="update",
            is_slow=lambda size: Tag.DTYPES not in size.tags or Tag.SLOW in size.tags,
        )
        if has_rule(values_of(values)[0][1], tables.RowMomentum())
    ],
)
def test_updates(op, implementation, shape):
    """Update from the factored gradient; a rule that needs the sums of each row, and which rows were looked up."""
    testing.check_update(testing.case(op, shape), implementation, tables.RowMomentum(weight_decay=0.25))


@pytest.mark.parametrize(
    ("op", "implementation", "shape"),
    slow_where(
        at_sizes(lambda module: module.tagged(Tag.DTYPES), "update"),
        lambda op, *_: op not in ("lookup", "scored_lut"),
    ),
)
def test_updates_without_sums_of_rows(op, implementation, shape):
    testing.check_update(testing.case(op, shape), implementation, tables.SGD())


@pytest.mark.parametrize(
    ("op", "implementation", "shape", "dtype"),
    slow_where(in_dtypes("update", first_only=True), lambda op, *_: op != "lookup"),
)
def test_updates_in_other_dtypes(op, implementation, shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        testing.check_update(testing.case(op, shape, dtype), implementation, tables.SGD())


@pytest.mark.parametrize(
    ("implementation", "rule", "shape"),
    slow_where(
        [
            pytest.param(i, rule, shape, id=f"{i}-{rule}-{shape}")
            for i in implementations("lookup", "update")
            for rule in RULES
            if has_rule(i, rule)
            for shape in ("primes", "repeats")  # fewer hits than rows, and more
        ],
        lambda _, rule, shape: shape == "repeats" and not getattr(rule, "b1", 0),
    ),
)
def test_update_rules(implementation, rule, shape):
    bits = 5 if shape == "primes" else 1
    testing.check_update(testing.case("lookup", shape, bits=bits), implementation, rule)

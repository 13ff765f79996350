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
    implementations,
    in_dtypes,
    ops,
    skipping_what_is_left_to_others,
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
UPDATED = [(op, i) for op in ops("update") for i in implementations(op, "update")]
FOR_ALL = ("lookup", "bilinear_gates")
"""A table op and a gate op: fast where every op behaves alike."""


def test_every_op_and_direction_has_an_implementation_here():
    assert sorted(ops()) == sorted(lutjax.kernel_registry.ops())
    for op in ops():
        assert all(
            implementations(op, direction) for direction in lutjax.kernel_registry.directions(op)
        )


def test_every_op_has_sizes_for_every_purpose():
    for op in ops():
        module = testing.cases_of(op)
        assert all(set(module.tagged(tag)) & set(module.sizes) for tag in (Tag.FAST, Tag.DTYPES)), (
            op
        )
        assert not any(Tag.SLOW in module.sizes[name].tags for name in module.tagged(Tag.FAST)), op


# ------------------------------------------------------------------------------------- the comparison itself
def test_small_arrays_are_compared():
    """Compare each array by its own magnitude: small values are not zero next to large arrays or throughout, and zeros are."""
    one, tiny = np.ones(3, np.float32), np.float32([1e-9, 2e-9, 0])
    testing.assert_all_close(
        "same", {"x": 1e6 * one, "w": tiny}, {"x": 1e6 * one, "w": tiny * (1 + 1e-6)}
    )
    for wrong in (np.zeros_like(tiny), tiny[::-1], -tiny, tiny * np.float32(1.001)):
        with pytest.raises(AssertionError, match="wrong: w"):
            testing.assert_all_close(
                "wrong", {"x": 1e6 * one, "w": wrong}, {"x": 1e6 * one, "w": tiny}
            )
    with pytest.raises(AssertionError, match="zeros"):
        testing.assert_close("zeros", tiny, np.zeros_like(tiny))
    testing.assert_close(
        "no finite number", np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf])
    )


@pytest.mark.parametrize("name", ["weights", "detection_margin"])
def test_small_wrong_lookup_cotangent_is_found(name, monkeypatch):
    from lutjax.kernels._xla import lookup

    right, array = lookup.backward, name.removesuffix("_margin")

    def wrong(call, cotangent, needs, *, device):
        result = right(call, cotangent, needs, device=device)
        return {**result, array: result[array] * jnp.asarray(1.001, result[array].dtype)}

    monkeypatch.setattr(lookup, "backward", wrong)
    forgotten.compiled()
    case = split("lookup")
    small = {**case.differentiable, "weights": 1e-7 * case.differentiable["weights"]}
    with pytest.raises(AssertionError, match=f"cotangent: {name}"):
        testing.check(dataclasses.replace(case, differentiable=small), "xla", transformation="jit")
    forgotten.compiled()


SUMS = ("add", "add_any", "sub", "reduce_sum", "scatter-add", "dot_general", "cumsum")


@pytest.mark.parametrize(
    "op",
    slow_except(
        [op for op in ops() if "bfloat16" in testing.cases_of(op).dtypes],
        *("lookup", "sparse_lookup", "scored_lut", "lookup_attention", "bilinear_gates"),
    ),
)
def test_results_are_rounded_once(op):
    """All sums have at least 32 bits, forward and backward: sums of rounded numbers depend on their order."""
    for name in testing.cases_of(op).tagged(Tag.DTYPES):
        program = testing.program(testing.case(op, name, "bfloat16"), "xla")
        result = equations(jax.make_jaxpr(program.function)(*program.arguments).jaxpr)
        rounded = [
            str(eqn) for eqn in result if adds(eqn) and eqn.outvars[0].aval.dtype == jnp.bfloat16
        ]
        assert not rounded, f"{name}: {rounded}"


def adds(eqn):
    """Return True if a primitive adds numbers; a sum over a one-element axis does not."""
    of_one = (
        eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    )
    return eqn.primitive.name in SUMS and not of_one


def equations(jaxpr):
    """Yield all equations in a jaxpr, including equations in called functions."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


# ------------------------------------------------------------------------------------- outputs and cotangents
def sizes_and_dtypes():
    """Return ``op, implementation, size, dtype``: sizes in the first dtype, and other dtypes at some sizes.

    `test_transformations` tries the splittable size.
    """
    result = at_sizes(lambda module: [n for n in module.sizes if n not in module.tagged(Tag.FAST)])
    result = [(values_of(values)[0], values_of(values)[1]) for values in result]
    return [((*values, None), is_slow) for values, is_slow in result] + list(
        map(values_of, in_dtypes())
    )


def is_slow_size(op, implementation, size, dtype):
    """Plain JAX runs one size in the fast suite: test_definitions.py covers small sizes for all options, and draws dtypes."""
    return implementation == "xla" and (
        size != fast_size_of_plain_jax(op) if dtype is None else op not in FOR_ALL
    )


def fast_size_of_plain_jax(op):
    module = testing.cases_of(op)
    names = [n for n, size in module.sizes.items() if not size.tags & {Tag.FAST, Tag.SLOW}]
    return next((n for n in ("primes", *module.tagged(Tag.DTYPES)) if n in names), names[0])


SLOW_SIZES = {values for values, is_slow in sizes_and_dtypes() if is_slow or is_slow_size(*values)}


@pytest.mark.parametrize(
    ("op", "implementation", "size", "dtype"),
    slow_where([values for values, _ in sizes_and_dtypes()], lambda *values: values in SLOW_SIZES),
)
def test_sizes_and_dtypes(op, implementation, size, dtype):
    with jax.enable_x64(dtype == "float64"), skipping_what_is_left_to_others(implementation):
        case = case_of(op, size) if dtype is None else testing.case(op, size, dtype)
        testing.check(case, implementation, transformation="jit")


# `test_sizes_and_dtypes` has every op under `jax.jit`.


@pytest.mark.parametrize(
    ("op", "implementation", "transformation"),
    slow_where(
        [
            (*pair, transformation)
            for pair in IMPLEMENTED
            for transformation in testing.TRANSFORMATIONS
        ],
        lambda op, implementation, transformation: (
            op not in FOR_ALL and (implementation, transformation) != ("xla", "vmap of grad")
        ),
    ),
)
def test_transformations(op, implementation, transformation):
    skip_without_two_devices(transformation)
    testing.check(split(op), implementation, transformation=transformation)


def skip_without_two_devices(transformation):
    if "shard_map" in transformation and jax.device_count() < 2:
        pytest.skip("shard_map needs two devices, and this machine has one")


DEVICES = {"cuda": "NVIDIA H200", "tpu": "TPU v6e", "rocm": "AMD Instinct MI300X"}
LOWERED = [
    *((op, "cuda") for op in ops()),
    *((op, "tpu") for op in ops("update")),
    ("lookup", "rocm"),
]


@pytest.mark.parametrize(
    ("op", "platform"),
    slow_where(
        LOWERED, lambda op, _: op not in ("lookup", "scored_lut", "lookup_attention", "logic_trees")
    ),
)
def test_plain_jax_lowers_for_other_platforms(op, platform):
    testing.check_lowering(split(op), "xla", platform=platform, device_kind=DEVICES[platform])


@pytest.mark.usefixtures("tpu_formulation")
def test_updates_in_the_formulation_for_tpus():
    testing.check_update(testing.case("lookup", "split"), "xla")


@pytest.mark.usefixtures("tpu_formulation")
def test_products_keep_every_digit():
    """Full-precision tables, which bfloat16 products would round, and out-of-range ids."""
    generator = np.random.default_rng(0)
    weights = jnp.asarray(generator.normal(size=(3, 8, 5)), jnp.float32)
    index = jnp.asarray(generator.integers(-9, 17, (1, 3)), jnp.int32)
    d = lutjax.Detection(index, jnp.ones_like(index), jnp.ones((1, 3), jnp.float32), 3)
    clamped = dataclasses.replace(d, index=jnp.clip(index, 0, 7))
    y, pullback = jax.vjp(lambda w: lutjax.lookup(w, d, implementation="xla"), weights)
    expected, expected_pullback = jax.vjp(lambda w: lutjax.reference.lookup(w, clamped), weights)
    np.testing.assert_allclose(y, expected, rtol=3e-7, atol=1e-7)
    np.testing.assert_array_equal(pullback(y)[0], expected_pullback(y)[0])


# ------------------------------------------------------------------------------------- gradients in factors, and updates
def in_first_and_other_dtypes():
    """Return ``op, implementation, size, dtype`` for ops with tables; None stands for the first dtype."""
    sizes = at_sizes(lambda module: module.tagged(Tag.DTYPES), "update")
    first = [(*values_of(values)[0], None) for values in sizes]
    return first + [values_of(values)[0] for values in in_dtypes("update", first_only=True)]


FACTORED = [(*values, "jit") for values in in_first_and_other_dtypes()] + [
    (*pair, "split", None, transformation)
    for pair in UPDATED
    for transformation in testing.FACTORED_TRANSFORMATIONS
]
FAST_FACTORED = ("jit", "vmap of grad", "shard_map, replicated table", "export")


def is_slow_gradient(op, implementation, size, dtype, transformation):
    if transformation == "shard_map, sharded table":
        return testing.cases_of(op).is_slow
    if op == "lookup":
        return dtype == "float16" or transformation not in FAST_FACTORED
    fast = ("sparse_lookup", "scored_lut", "lookup_attention")
    return op not in fast or dtype is not None or size in ("split", "tiles", "ties")


@pytest.mark.parametrize(
    ("op", "implementation", "size", "dtype", "transformation"),
    slow_where(FACTORED, is_slow_gradient),
)
def test_factored_gradients(op, implementation, size, dtype, transformation):
    skip_without_two_devices(transformation)
    with jax.enable_x64(dtype == "float64"):
        testing.check_factored(
            testing.case(op, size, dtype), implementation, transformation=transformation
        )


SGD, MOMENTUM = tables.SGD(), tables.RowMomentum(weight_decay=0.25)
RULES = (
    tables.SGD(weight_decay=0.5),
    tables.RowAdagrad(weight_decay=0.25),
    tables.RowAdagrad(weight_decay=0.25, decay="every"),
    tables.RowAdam(b1=0.9),
)


def has_rule(implementation, rule):
    """Return True if it updates rows by a rule.

    Triton supports SGD, Pallas SGD without weight decay, native kernels any rule without a count.
    """
    if rule.counts_decay:
        return implementation == "xla"
    if implementation.startswith("pallas"):
        return rule == tables.SGD()
    return implementation in ("xla", "native") or isinstance(rule, tables.SGD)


UPDATES = [
    *((*values, SGD) for values in in_first_and_other_dtypes()),
    *((*values_of(values)[0], None, MOMENTUM) for values in at_sizes(direction="update")),
    *(
        ("lookup", i, "primes", None, rule)
        for i in implementations("lookup", "update")
        for rule in RULES
    ),
    *(("lookup", i, "repeats", None, RULES[-1]) for i in implementations("lookup", "update")),
]  # of "primes" fewer hits than rows, of "repeats" more


def is_slow_update(op, implementation, size, dtype, rule):
    if rule == MOMENTUM:  # needs the sums of each row, and which rows were looked up
        module = testing.cases_of(op)
        sizes = set(module.tagged(Tag.DTYPES)) - {"tiles", "targets_of_tables"}
        return module.is_slow or size not in sizes
    return (
        dtype == "float16"
        or op not in ("lookup", "scored_lut")
        or (dtype is not None and op != "lookup")
    )


@pytest.mark.parametrize(
    ("op", "implementation", "size", "dtype", "rule"),
    slow_where([each for each in UPDATES if has_rule(each[1], each[-1])], is_slow_update),
    ids=str,
)
def test_updates(op, implementation, size, dtype, rule):
    bits = {"primes": {"bits": 5}, "repeats": {"bits": 1}}.get(size, {}) if rule in RULES else {}
    with jax.enable_x64(dtype == "float64"):
        testing.check_update(testing.case(op, size, dtype, **bits), implementation, rule)

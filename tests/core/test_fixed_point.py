"""Fixed-point accumulation: the same bits in any order, and the right ones."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import fast_size, ops_that_add, slow_except, split
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from machine import needs_devices

import lutjax
from lutjax import FixedPoint, testing

pytestmark = pytest.mark.gpu

FINE = FixedPoint(
    2.0**24
)  # totals of more bits than a float32 has: sums of floats would show their order

# Ops that add up, at the size that can be split, with samples and detectors for four devices, and enough of them that sums of
# floats show their order on every device.
SUMS = ops_that_add()
MANY = {"batch": 8, "detectors": 8}


@pytest.fixture(scope="module", params=slow_except(SUMS, "detect", "lookup"))
def op(request):
    """Op at module scope, so all tests for one op run together and share compiled functions."""
    return request.param


@functools.cache
def case_of(op, dtype="float32", shape=None):
    """A parity-suite case with off-grid values and output cotangents."""
    case = split(op, dtype, **MANY) if shape is None else testing.case(op, shape, dtype)
    rng = np.random.default_rng(0)

    def normal(a):
        return jnp.asarray(rng.normal(size=a.shape), a.dtype)

    case = dataclasses.replace(case, differentiable=jax.tree.map(normal, case.differentiable))
    reference = functools.partial(testing._call, case, lutjax.reference, None)
    outputs = testing._with_gradient(jax.eval_shape(reference, case.differentiable))
    return case, {name: normal(a) for name, a in outputs.items()}


@functools.cache
def compiled(op, accumulate, module=lutjax, dtype="float32", shape=None, implementation=None):
    case, _ = case_of(op, dtype, shape)

    def run(differentiable, fixed, ct):
        of = dataclasses.replace(case, fixed=fixed)
        f = functools.partial(testing._call, of, module, implementation, accumulate=accumulate)
        outputs, cotangents = testing._value_and_cotangents(f, differentiable, ct)
        return testing._with_gradient(outputs), cotangents

    return jax.jit(run)


def result(op, accumulate, module=lutjax, dtype="float32", shape=None, implementation=None):
    case, ct = case_of(op, dtype, shape)
    run = compiled(op, accumulate, module, dtype, shape, implementation)
    return run(case.differentiable, case.fixed, ct)


def assert_equal(actual, expected, which=("output", "cotangent")):
    for kind, a, e in zip(("output", "cotangent"), actual, expected, strict=True):
        for name in e if kind in which else ():
            assert np.any(e[name]), f"{kind} {name} is zero: nothing is compared"
            np.testing.assert_array_equal(a[name], e[name], err_msg=f"{kind} {name}")


def along(arrays, axes, axis, change):
    """`change(array, its axis)` for every array with the axis."""

    def one(name, a):
        at = getattr(axes[name], axis)
        return a if at is None else change(a, at)

    return {name: one(name, a) for name, a in arrays.items()}


def permuted(op, accumulate, axis):
    """The result for a permuted batch or permuted detectors, in the old order."""
    case, ct = case_of(op)
    arrays = {**case.fixed, **case.differentiable}
    (n,) = {
        a.shape[at]
        for a, at in ((a, getattr(case.axes[n], axis)) for n, a in arrays.items())
        if at is not None
    }
    order = np.random.default_rng(1).permutation(n)
    there, back = (
        functools.partial(jnp.take, indices=jnp.asarray(i)) for i in (order, np.argsort(order))
    )
    there, back = (lambda a, at, f=f: f(a, axis=at) for f in (there, back))
    outputs, cotangents = compiled(op, accumulate)(
        along(case.differentiable, case.axes, axis, there),
        along(case.fixed, case.axes, axis, there),
        along(ct, case.output_axes, axis, there),
    )
    return along(outputs, case.output_axes, axis, back), along(cotangents, case.axes, axis, back)


# ------------------------------------------------------------------------------------- any order
def test_any_order_of_samples_and_detectors(op):
    for axis in ("batch", "detector"):
        assert_equal(permuted(op, FINE, axis), result(op, FINE))


def test_floating_point_sums_depend_on_the_order():
    """Show that the test above can fail."""
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_equal(permuted("lookup", None, "batch"), result("lookup", None))


@needs_devices(4)
def test_any_order_of_devices(op):
    """shard_map with replicated tables, and with sharded ones; replicated arrays sum their cotangents over devices."""
    case, ct = case_of(op)
    f = functools.partial(testing._call, case, lutjax, None, accumulate=FINE)
    for axis in ("batch", "detector"):
        run = functools.partial(testing._run_sharded, axis=axis, mesh=testing._mesh(4))
        outputs, cotangents = testing._run_jitted(run, f, case, ct)
        # Outputs of sharded detectors are summed by the caller, in floating point.
        which = ("output", "cotangent") if axis == "batch" or op == "detect" else ("cotangent",)
        assert_equal((testing._with_gradient(outputs), cotangents), result(op, FINE), which)


@needs_devices(4)
def test_sharded_arrays_under_jit(op):
    case, ct = case_of(op)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "detector"))

    def place(arrays, axes):
        def spec(name, a):
            at = {getattr(axes[name], axis): axis for axis in ("batch", "detector")}
            return NamedSharding(mesh, PartitionSpec(*[at.get(i) for i in range(a.ndim)]))

        return {name: jax.device_put(a, spec(name, a)) for name, a in arrays.items()}

    actual = compiled(op, FINE)(
        place(case.differentiable, case.axes),
        place(case.fixed, case.axes),
        place(ct, case.output_axes),
    )
    assert_equal(actual, result(op, FINE))


def test_both_formulations_have_the_same_bits(op, request):
    expected = result(op, FINE)
    request.getfixturevalue("accelerator_formulation")
    assert_equal(compiled.__wrapped__(op, FINE)(*_arguments(op)), expected)


def _arguments(op):
    case, ct = case_of(op)
    return case.differentiable, case.fixed, ct


# ------------------------------------------------------------------------------------- the right values
@pytest.mark.parametrize(
    ("op", "dtype", "shape"),
    [("lookup", "bfloat16", None), ("sparse_lookup", "float16", "more_slots_than_outputs")],
)
def test_values_of_other_dtypes_and_shapes(op, dtype, shape):
    check_values(op, dtype, shape)


def test_values(op):
    check_values(op, "float32", None)


# Native kernels score by arithmetic of their own (docs/semantics.md, section 7), which tests/kernels/test_native_scored.py compares.
SCORED_BY_PLAIN_JAX = {"scored_lut": ("triton", "xla")}


def check_values(op, dtype, shape):
    """Outputs match the reference; cotangents differ by at most one resolution step per addend."""
    with jax.enable_x64(dtype == "float64"):
        case, _ = case_of(op, dtype, shape)
        outputs, cotangents = result(op, FINE, lutjax, dtype, shape, SCORED_BY_PLAIN_JAX.get(op))
        expected, of_floats = result(op, FINE, lutjax.reference, dtype, shape)
        for name in expected:
            np.testing.assert_array_equal(outputs[name], expected[name], err_msg=name)
        sizes = testing.shapes(op)[fast_size(op) if shape is None else shape]
        sizes = {**sizes, **(MANY if shape is None else {})}
        pairs = sizes.get("queries", 1) * sizes.get("keys", sizes.get("queries", 1))
        addends = sizes["batch"] * pairs * sizes["detectors"] * sizes.get("outputs", 1)
        for name in of_floats:
            rounding = testing.TOLERANCE[of_floats[name].dtype.name]
            atol = addends * FINE.resolution + rounding * float(jnp.max(jnp.abs(of_floats[name])))
            actual, wanted = (np.asarray(a[name], np.float64) for a in (cotangents, of_floats))
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol, err_msg=name)
            assert cotangents[name].dtype == case.differentiable[name].dtype


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.7, 0.5),
        (-0.7, -0.5),  # toward zero
        (0.2, 0.0),
        (1e30, (2**31 - 128) / 4),
        (-1e30, -(2**31 - 128) / 4),
        (np.inf, (2**31 - 128) / 4),
        (np.nan, 0.0),
    ],
)
def test_one_addend(value, expected):
    table = jnp.array([[[value], [0.0]]], jnp.float32)
    d = lutjax.Detection(jnp.array([0]), jnp.array([1]), jnp.array([0.5]), 1)
    for module in (lutjax, lutjax.reference):
        assert float(module.lookup(table, d, accumulate=FixedPoint(4))[0]) == expected


def test_the_largest_addend_of_float64():
    with jax.enable_x64(True):
        table = jnp.array([[[1e300]]], jnp.float64)
        d = lutjax.Detection(jnp.array([0]), jnp.array([0]), jnp.array([np.inf]), 0)
        assert float(lutjax.lookup(table, d, accumulate=FixedPoint(1))[0]) == 2**31 - 1


@pytest.mark.parametrize("transformation", ["vmap of grad", "scan", "export"])
def test_transformations(transformation):
    case = split("lookup")
    testing.check(
        case, transformation=transformation, accumulate=FixedPoint(2.0**20), tolerance=1e-4
    )


@pytest.mark.parametrize("module", [lutjax, lutjax.reference], ids=["ops", "reference"])
def test_compositions_pass_it_on(module):
    key = jax.random.key(0)
    x = jax.random.normal(key, (2, 5, 6))
    anchors = lutjax.sample_anchors(key, 6, 3, 2)
    weights, targets = jax.random.normal(key, (3, 16, 4)), jnp.array([[[0, 1, 1, 2]]])
    half = FixedPoint(2)

    @jax.jit
    def all_of_them(x):
        return (
            module.lut(x, weights[:, :4], anchors, accumulate=half),
            module.sparse_lut(x, weights[:, :4], anchors, targets, 3, accumulate=half),
            module.lut_attention(x, weights, anchors, accumulate=half),
        )

    for y in all_of_them(x):
        np.testing.assert_array_equal(2 * y, np.rint(2 * y))
        assert np.any(y)
    if module is lutjax:  # the gradient of the detection too
        gradient = jax.grad(
            lambda x: lutjax.lut(x, weights[:, :4], anchors, accumulate=FixedPoint(64)).sum()
        )(x)
        np.testing.assert_array_equal(64 * gradient, np.rint(64 * gradient))
        assert np.any(gradient)


def test_the_reference_has_the_derivative_of_the_sum_of_floats():
    key = jax.random.key(0)
    x, weights = jax.random.normal(key, (4, 6)), jax.random.normal(key, (3, 4, 5))
    anchors = lutjax.sample_anchors(key, 6, 3, 2)

    def f(x, weights, accumulate=None):
        return lutjax.reference.lut(x, weights, anchors, accumulate=accumulate)

    fixed = functools.partial(f, accumulate=FixedPoint(8))
    expected, actual = (
        jax.jit(lambda *a, f=f: jax.jvp(f, a, a)[1])(x, weights) for f in (f, fixed)
    )
    np.testing.assert_array_equal(actual, expected)
    jax.eval_shape(jax.hessian(lambda x: fixed(x, weights).sum()), x)  # any mode, of any order


@pytest.mark.parametrize("op", ["lookup", "lut_pair_attention"])
def test_integers_are_summed_before_they_are_numbers(op):
    """Regardless of any later addition: compilers may not merge both float sums over devices."""
    case, ct = case_of(op)
    text = compiled(op, FINE).lower(case.differentiable, case.fixed, ct).as_text()
    to_floats = re.findall(
        r"stablehlo.convert (%\S+) : \(tensor<\S*xi32>\) -> tensor<\S*xf32>", text
    )
    sums = set(re.findall(r"(%\S+) = stablehlo.optimization_barrier", text))
    assert to_floats
    assert set(to_floats) <= sums


# ------------------------------------------------------------------------------------- the mode itself
def test_it_is_a_value():
    assert FixedPoint(8) == FixedPoint(8.0) == FixedPoint(np.float64(8))
    assert hash(FixedPoint(8)) == hash(FixedPoint(8.0))
    assert (FixedPoint(8).resolution, FixedPoint(8).range) == (0.125, 2.0**28)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FixedPoint(8).scale = 2.0


@pytest.mark.parametrize(("bound", "terms", "scale"), [
    (1.0, 1, 2.0**30),
    (1.0, 1000, 2.0**21),
    (0.3, 7, 2.0**29),
    (3e9, 1, 0.5),
    (1e-30, 1, 2.0**127),
])  # fmt: skip
def test_for_bound(bound, terms, scale):
    sums = FixedPoint.for_bound(bound, terms=terms)
    assert sums == FixedPoint(scale)
    if scale < 2.0**127:
        sums.check(bound, terms)
        with pytest.raises(ValueError, match="beyond the range"):
            FixedPoint(2 * scale).check(bound, terms)
    assert FixedPoint.for_bound(bound, terms=terms, resolution=1 / scale) == sums


BAD = {
    "zero": (lambda: FixedPoint(0), ValueError, r"FixedPoint: scale is 0; expected a finite number > 0"),
    "negative": (lambda: FixedPoint(-2.0), ValueError, r"scale is -2.0"),
    "infinite": (lambda: FixedPoint(np.inf), ValueError, r"scale is inf"),
    "NaN": (lambda: FixedPoint(np.nan), ValueError, r"scale is nan"),
    "beyond float32": (lambda: FixedPoint(1e300), ValueError,
        r"scale is 1e\+300; .* in the range of float32"),
    "text": (lambda: FixedPoint("8"), ValueError, r"scale is '8'"),
    "bound": (lambda: FixedPoint.for_bound(-1.0), ValueError, r"for_bound: bound is -1.0"),
    "terms": (lambda: FixedPoint.for_bound(1.0, terms=0), ValueError, r"terms is 0; .* at least 1"),
    "fractional terms": (lambda: FixedPoint(8).check(1.0, 1.5), ValueError, r"check: terms is 1.5"),
    "resolution": (lambda: FixedPoint.for_bound(100.0, terms=1000, resolution=1e-6), ValueError,
        r"sums of 1000 addends up to 100 fit int32 at a resolution of 6.1\S+ only"),
    "no resolution": (lambda: FixedPoint.for_bound(1.0, resolution=0), ValueError, r"resolution is 0"),
    "range": (
        lambda: FixedPoint(2.0**20).check(1.0, 4096),
        ValueError,
        r"4096 addends up to 1 sum to 4096, beyond the range 2048 of FixedPoint\(scale=1048576.0\); "
        r"FixedPoint.for_bound\(1, terms=4096\) has a scale that fits",
    ),
    "too coarse": (lambda: FixedPoint(8).check(0.1), ValueError, r"below the resolution 0.125"),
    "detect": (lambda: lutjax.detect(jnp.ones(3), jnp.array([[[0, 1]]]), accumulate=8.0), TypeError,
        r"detect: accumulate is float 8.0; expected None or a lutjax.FixedPoint"),
    "attention": (
        lambda: lutjax.lut_pair_attention(
            jnp.ones((3, 2)), jnp.ones((1, 2, 1)), jnp.array([[[0, 1]]]), accumulate=8.0
        ),
        TypeError,
        r"lut_pair_attention: accumulate is float 8.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("without_typechecking")
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("without_typechecking")
def test_every_op_checks_its_type(op):
    case, _ = case_of(op)
    with pytest.raises(
        TypeError, match=f"{op}: accumulate is int 8; expected None or a lutjax.FixedPoint"
    ):
        testing._call(case, lutjax, None, case.differentiable, accumulate=8)


CHECKED = lutjax.FixedPoint(2.0**20, checked=True)


@needs_devices(2)
def test_checked_sums_over_devices():
    transformation = "shard_map, replicated table"
    testing.check(
        split("lookup"), "xla", transformation=transformation, accumulate=CHECKED, tolerance=1e-4
    )


def test_checked_sums_that_fit_are_the_same_bits(op):
    case = split(op)
    values = [
        testing.program(case, "xla", accumulate=accumulate)
        for accumulate in (CHECKED, lutjax.FixedPoint(2.0**20))
    ]
    checked, unchecked = (program.function(*program.arguments) for program in values)
    for a, b in zip(jax.tree.leaves(checked), jax.tree.leaves(unchecked), strict=True):
        np.testing.assert_array_equal(a, b)


def test_checked_sums_that_wrap_are_nan():
    d = lutjax.detect_signs(jnp.ones((3, 4, 1)))
    weights = jnp.ones((4, 2, 2)).at[:, :, 1].set(0.25)

    def both(scale, checked, cotangent):
        accumulate = lutjax.FixedPoint(scale, checked=checked)
        y, pullback = jax.vjp(lambda w: lutjax.lookup(w, d, accumulate=accumulate), weights)
        return y, pullback(jnp.full_like(y, cotangent))[0][:, 1]

    fits = 2.0**28  # 4 rows of 1; 3 cotangents of 1
    for a, b in zip(both(fits, True, 1.0), both(fits, False, 1.0), strict=True):
        np.testing.assert_array_equal(a, b)
    y, gradient = both(
        2.0**29, True, 1.5
    )  # 4 * 2**29 wraps, 4 * 2**27 does not; 3 * 1.5 * 2**29 does
    np.testing.assert_array_equal(y, jnp.broadcast_to(jnp.array([[jnp.nan, 1.0]]), (3, 2)))
    assert jnp.isnan(gradient).all()
    wrapped, _ = both(2.0**29, False, 1.5)
    np.testing.assert_array_equal(wrapped[:, 0], -4.0)


def test_a_checked_nan_shows():
    d = lutjax.detect_signs(jnp.ones((3, 4, 1)))
    weights = jnp.ones((4, 2, 2)).at[1, 1, 0].set(jnp.nan)
    y = lutjax.lookup(weights, d, accumulate=CHECKED)
    np.testing.assert_array_equal(
        jnp.isnan(y), jnp.broadcast_to(jnp.array([[True, False]]), (3, 2))
    )


def test_updates_in_place_are_not_checked():
    from lutjax import optim as tables

    d = lutjax.detect_signs(jnp.ones((3, 4, 1)))
    params = {"weights": jnp.ones((4, 2, 2))}
    _, gradients = tables.value_and_grad(
        lambda p: lutjax.lookup(p["weights"], d, accumulate=CHECKED).sum()
    )(params)
    np.testing.assert_array_equal(gradients["weights"].to_dense()[:, 1], 3.0)
    with pytest.raises(ValueError, match=r"cannot be checked\. Use checked=False to train"):
        lutjax.update_table(params["weights"], gradients["weights"], 0.1)

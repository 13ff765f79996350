"""Each op's docstring defines the `lutjax.reference` computation: values and every cotangent, by name.

tests/core/test_slow_drawn_calls.py and tests/core/test_parity.py compare implementations with the reference.
"""

import dataclasses
import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import drawn_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_where
from definitions import definition, evaluate, read_margins, run
from drawn_cases import Spec
from hypothesis import given, settings

import lutjax
from lutjax import ops, optim as tables, reads, tables as factored_tables, testing, wiring
from lutjax.values import _row_rules

Arrays = dict[str, Any]
pytestmark = pytest.mark.usefixtures(
    "without_typechecking"
)  # definitions read detections of NumPy arrays

# ------------------------------------------------------------------------------------- ops in NumPy
COMPOSED = ("scored_lut", "gate_network", "lut_at_places")
"""Ops defined by other ops."""
IN_NUMPY = [op for op in drawn_cases.REPRESENTATIVES if op not in COMPOSED]


def compare(spec: Spec, code: str | None = None, implementations: Sequence[str] = ()) -> None:
    """Compare the reference with an op's definition, and implementations with the reference.

    Output cotangents are drawn, too.
    """
    with spec.context():
        for case in spec.cases():
            reference = drawn_cases.results(spec, case)
            if spec.op in IN_NUMPY:
                expected = evaluate(case, drawn_cases.cotangents(case, reference[0]), code)
                drawn_cases.compare(f"{spec}, {case.shape}", reference, expected)
            for implementation in implementations:
                drawn_cases.compare_implementation(spec, case, implementation, reference)


@pytest.mark.parametrize(
    ("op", "number"),
    slow_where(
        [(op, i) for op, specs in drawn_cases.REPRESENTATIVES.items() for i in range(len(specs))],
        lambda op, number: number and op not in ("lookup_attention", "margins"),
    ),
)
def test_ops_compute_their_definitions(op, number):
    compare(drawn_cases.REPRESENTATIVES[op][number], implementations=drawn_cases.implemented(op))


def is_comparable(spec: Spec) -> bool:
    """Return True if a definition can index and reshape its arrays, and 16-bit rounding does not decide the comparison."""
    sizes = dict(spec.sizes)
    is_empty = sizes.get("outputs", 1) == 0 or (spec.op in COMPOSED and sizes["batch"] == 0)
    return not is_empty and spec.dtype != "bfloat16"


@pytest.mark.parametrize(("name", "right", "wrong"), [
    ("lookup", "margin > 0", "margin >= 0"),
    ("lookup_attention", "abs(of_query) < abs(of_key)", "abs(of_query) <= abs(of_key)"),
    ("binary_lut", "table, -table", "-table, table"),
    ("logic_trees", "max(found", "max(found[::-1]"),
])  # fmt: skip
def test_a_wrong_definition_is_found(name, right, wrong):
    code = definition(lutjax.kernel_registry.function(name))
    assert right in code

    def compare_all() -> None:
        for spec in drawn_cases.REPRESENTATIVES[name]:
            compare(spec, code.replace(right, wrong))

    with pytest.raises(AssertionError, match=name):
        compare_all()


def test_every_op_is_here():
    assert set(drawn_cases.REPRESENTATIVES) == set(lutjax.kernel_registry.ops())


# ------------------------------------------------------------------------------------- ops that call other ops
MODULE = SimpleNamespace(
    **{name: getattr(lutjax.reference, name) for name in lutjax.reference.__all__},
    quantize_tables=lutjax.quantize_tables,
    reads=reads,
    wiring=wiring,
)
"""Stand-in for ``lutjax`` in definitions with op calls: provides the reference ops, which `IN_NUMPY` compares with NumPy."""


def composed(op: Callable[..., Any], module: Any = MODULE) -> Callable[..., Any]:
    """Return an op's definition as a differentiable function of the op's arguments."""

    def evaluate(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(op).bind(*args, **options)
        bound.apply_defaults()
        a = dict(bound.arguments)
        padding = a["windows"].padding if "windows" in a else a.get("padding", 0)
        if padding:
            around = (padding, padding) if isinstance(padding, int) else padding
            width = [(0, 0)] * (a["images"].ndim - 3) + [(n, n) for n in (*around, 0)]
            a["images"] = jnp.pad(a["images"], width)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return run(definition(op), a, module)["y"]

    return evaluate


def compare_composed(spec: Spec) -> None:
    function = lutjax.kernel_registry.function(spec.op)

    def check(case: Any) -> None:
        outputs, actual = drawn_cases.results(spec, case)
        ct = drawn_cases.cotangents(case, outputs)["y"]

        @jax.jit
        def wanted(differentiable: Arrays, fixed: Arrays) -> Arrays:
            def f(d: Arrays) -> jax.Array:
                return case.call(composed(function), {**d, **fixed})["y"].astype(ct.dtype)

            y, pull = jax.vjp(f, differentiable)
            return {"y": y, **pull(ct)[0]}

        expected = wanted(case.differentiable, case.fixed)
        testing.assert_all_close(f"{spec}", {"y": outputs["y"], **actual}, expected, 2e-5)

    with spec.context():
        for case in spec.cases():
            check(case)


def test_keys_may_have_their_own_segments():
    """In self-attention key segments default to those of queries; given ones differ."""
    sizes = testing.cases_of("lut_pair_attention").sizes["window_segments"]
    (case,) = drawn_cases.spec("lut_pair_attention", kinds=("grid",), **sizes).cases()
    arrays = {**case.differentiable, **case.fixed}
    assert np.any(arrays["query_segments"] != arrays["key_segments"])
    y = jax.jit(lambda a: case.call(lutjax.reference.lut_pair_attention, a))(arrays)["y"]
    expected, _ = evaluate(case, {"y": np.zeros_like(y)})
    np.testing.assert_allclose(y, expected["y"], atol=1e-6)
    actual = case.call(lutjax.lut_pair_attention, arrays)["y"]
    np.testing.assert_allclose(actual, expected["y"], atol=1e-6)


@pytest.mark.parametrize("op", COMPOSED)
def test_the_reference_calls_the_ops_of_its_definition(op):
    compare_composed(dataclasses.replace(drawn_cases.REPRESENTATIVES[op][0], kinds=("normal",)))


@pytest.mark.slow
@pytest.mark.parametrize("op", [*IN_NUMPY, *COMPOSED])
def test_the_reference_follows_its_definition_at_drawn_sizes(op):
    @settings(settings.get_profile("quick"), max_examples=25)
    @given(drawn_cases.specs(op, most={"queries": 9, "keys": 9, "batch": 3}).filter(is_comparable))
    def check(spec):
        if op in IN_NUMPY:
            compare(spec)
        else:
            compare_composed(dataclasses.replace(spec, seeds=1, kinds=("grid", "normal")))

    check()
    jax.clear_caches()


def compositions(name: str) -> tuple[Arrays, Arrays, Arrays]:
    pairs, targets, wires = anchors(4, 3, 2), ids(-1, 5, 3, 4, 2), ids(0, 4, 6, 2)
    of_windows = {"anchors": anchors(6, 4, 2)}
    window = {"kernel": (3, 2), "stride": (1, 2), "padding": (1, 0), "groups": 2}
    of_targets = {"anchors": pairs, "targets": targets, "n_outputs": 5}
    return {
        "lut": ({"x": grid(5, 3, 4), "weights": grid(3, 4, 3)}, {"anchors": pairs}, {"epsilon": 0.5, "groups": 3}),
        "sparse_lut": ({"x": grid(5, 4), "weights": grid(3, 4, 2)}, of_targets, {"epsilon": 0.5}),
        "conv_lut": (
            {"images": grid(2, 5, 4, 2), "weights": grid(4, 4, 3)}, of_windows, {**window, "epsilon": 0.5}
        ),
        "lut_attention": (
            {"x": grid(2, 6, 4), "weights": grid(3, 2**5, 3), "positions": grid(11, 3, 1)},
            {"anchors": pairs},
            {"epsilon": 0.5, "causal": False, "segments": ids(0, 2, 2, 6)},
        ),
        "logic_gates": ({"x": grid(5, 4), "logits": grid(6, 16)}, {"wires": wires}, {}),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["lut", "sparse_lut", "conv_lut", "lut_attention", "logic_gates"])
def test_compositions_are_their_definitions(name):
    differentiable, fixed, keywords = compositions(name)
    differentiable = jax.tree.map(jnp.float32, differentiable)
    functions = [
        getattr(lutjax.reference, name),
        getattr(lutjax, name),
        composed(getattr(lutjax, name)),
    ]
    shape = jax.eval_shape(lambda a: functions[0](**a, **fixed, **keywords), differentiable).shape
    dy = jnp.asarray(grid(*shape), jnp.float32)

    @jax.jit
    def results(a: Arrays, dy: jax.Array) -> Any:
        every = [jax.vjp(lambda a, f=f: f(**a, **fixed, **keywords), a) for f in functions]
        return [(y, pull(dy)[0]) for y, pull in every]

    *found, wanted = results(differentiable, dy)
    for actual in found:
        for (path, a), e in zip(
            jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True
        ):
            testing.assert_close(f"{name}: {jax.tree_util.keystr(path)}", a, e, 1e-5)


# ------------------------------------------------------------------------------------- reads
READS = (
    reads.Hard(), reads.Blend(), reads.SoftSign(), reads.SoftSign(hard=True),
    reads.Confidence(ways=1), reads.Confidence(ways=2), reads.PowersOfTwo(ways=1),
    reads.PowersOfTwo(ways=2),
)  # fmt: skip


def test_every_read_is_here():
    every = {
        getattr(reads, name) for name in reads.__all__ if inspect.isclass(getattr(reads, name))
    }
    assert {type(read) for read in READS} == every - {reads.Read}


@pytest.mark.parametrize("read", READS, ids=str)
def test_reads_follow_their_definitions(read):
    """Values, including ties and zeros, and gradients: finite differences where the definition is smooth."""
    scalars = {name: float(DRAW.normal() / 2) for name in read.initial()}
    with jax.enable_x64(True):
        u = np.concatenate([grid(20, 3, steps=4), grid(20, 3, steps=16), DRAW.normal(size=(40, 3))])
        smooth = u[40:]  # no ties
        dc = DRAW.normal(size=(len(smooth), getattr(read, "ways", 2)))

        @jax.jit
        def results(u: jax.Array, smooth: jax.Array, scalars: Arrays, dc: jax.Array) -> Any:
            return read(u, scalars), jax.vjp(lambda u, s: read(u, s)[1], smooth, scalars)[1](dc)

        of_scalars = {n: jnp.float64(v) for n, v in scalars.items()}
        (index, coefficients), (du, dscalars) = results(
            *map(jnp.asarray, (u, smooth)), of_scalars, jnp.asarray(dc)
        )
        expected = [read_margins(read, row, scalars) for row in u]
        np.testing.assert_array_equal(index, [e["index"] for e in expected])
        np.testing.assert_allclose(
            coefficients, [e["coefficients"] for e in expected], rtol=1e-12, atol=1e-300
        )

    def value(row: np.ndarray, scalars: Arrays, ratio: Any) -> Any:
        """Return the function whose ordinary gradient is the read's gradient."""
        actual = read_margins(read, row, scalars)
        return (
            ratio * actual["exact"]
            if "ratio" in actual
            else actual.get("smooth", actual["coefficients"])
        )

    ratios = [e.get("ratio", 1.0) for e in expected[40:]]
    step = 1e-6

    def slopes(
        change: Callable[[np.ndarray, Arrays, float], tuple[np.ndarray, Arrays]],
    ) -> np.ndarray:
        ends = [
            [
                value(*change(row, scalars, sign * step), ratio)
                for row, ratio in zip(smooth, ratios, strict=True)
            ]
            for sign in (1, -1)
        ]
        return ((np.array(ends[0]) - np.array(ends[1])) / (2 * step) * dc).sum(-1)

    for c in range(smooth.shape[1]):
        actual = slopes(lambda row, s, by, c=c: (row + by * np.eye(3)[c], s))
        np.testing.assert_allclose(du[:, c], actual, rtol=1e-6, atol=1e-8)
    for name, of_scalar in dscalars.items():
        actual = slopes(lambda row, s, by, name=name: (row, {**s, name: s[name] + by})).sum()
        np.testing.assert_allclose(of_scalar, actual, rtol=1e-6, atol=1e-8, err_msg=name)
    assert np.abs(du).max() > 0.01


def test_a_distance_of_zero_has_the_slope_of_its_bit():
    """As `np.where(u > 0, u, -u)` in the definitions: -1 at 0."""
    u = jnp.array([[0.0, 1.0]])
    slope = jax.grad(
        lambda u: reads.Confidence(ways=1)(u, {"log_beta": 0.0, "log_gamma": -50.0})[1].sum()
    )(u)
    np.testing.assert_allclose(slope, [[-1.0, 1.0]], rtol=1e-6)


# ------------------------------------------------------------------------------------- without cases
DRAW: np.random.Generator


@pytest.fixture(autouse=True)
def draw() -> None:
    """Start each test with the same random numbers, regardless of earlier tests."""
    global DRAW
    DRAW = np.random.default_rng(1)


def grid(*shape: int, steps: int = 8) -> np.ndarray:
    """Return multiples of 1/4, exact in float32, so ties and zeros occur."""
    return DRAW.integers(-steps, steps + 1, shape) / 4


def ids(low: int, high: int, *shape: int) -> np.ndarray:
    return DRAW.integers(low, high, shape).astype(np.int32)


def anchors(n_inputs: int, n_detectors: int, n_pairs: int) -> np.ndarray:
    a = ids(0, n_inputs, n_detectors, n_pairs)
    return np.stack([a, (a + ids(1, n_inputs, *a.shape)) % n_inputs], -1)


@pytest.mark.parametrize(("op", "output", "argument", "shape", "options"), [
    ("gate_coefficients", "coefficients", "logits", (5, 16), {}),
    ("cell_total_variation", "y", "weights", (2, 8, 3), {}),
    ("scale_gradient", "y", "x", (3, 4), {"factor": -0.75}),
])  # fmt: skip
def test_ops_of_one_argument_follow_their_definitions(op, output, argument, shape, options):
    value = grid(*shape)
    functions = [getattr(m, op) for m in (lutjax.reference, lutjax) if hasattr(m, op)]
    for function in functions:
        f = jax.jit(functools.partial(function, **options))
        y, pull = jax.vjp(f, jnp.asarray(value, jnp.float32))
        dy = grid(*y.shape)
        expected = run(
            definition(getattr(lutjax, op)), {argument: value, f"d{output}": dy, **options}
        )
        (actual,) = pull(jnp.asarray(dy, y.dtype))
        np.testing.assert_allclose(y, expected[output], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(actual, expected[f"d{argument}"], rtol=1e-5, atol=1e-5)


def test_the_first_of_the_likeliest_gates_is_hard():
    logits = jnp.zeros((2, 16)).at[:, jnp.array([3, 6])].set(1.0)
    for m in (lutjax.reference, lutjax):
        y, pull = jax.vjp(lambda x, m=m: m.gate_coefficients(x, hard=True), logits)
        np.testing.assert_array_equal(y, [[0, 0], [1, 1], [0, 0], [0, 0]])  # gate 3 is a
        first = m.gate_coefficients(logits.T, hard=True, axis=0)
        np.testing.assert_array_equal(first, y)
        assert not np.any(pull(jnp.ones_like(y))[0])


def test_a_detection_without_comparisons():
    for m in (lutjax.reference, lutjax):
        d = m.detect(jnp.ones((2, 3)), jnp.zeros((4, 0, 2), jnp.int32))
        np.testing.assert_array_equal(d.index, np.zeros((2, 4)))
        np.testing.assert_array_equal(d.flip, np.zeros((2, 4)))
        np.testing.assert_array_equal(d.margin, np.full((2, 4), np.inf))


# ------------------------------------------------------------------------------------- without a gradient
def test_packed_ops_compute_their_definitions():
    bits, wires = ids(0, 2, 4, 70), ids(0, 4, 5, 3)
    truth = ids(0, 2, 5, 8).astype(bool)
    words = np.asarray(lutjax.pack_bits(jnp.asarray(bits)))
    for op, arguments in (
        ("pack_bits", {"bits": bits}),
        ("unpack_bits", {"words": words, "n_samples": 70}),
        ("packed_lut", {"words": words, "truth": truth, "wires": wires}),
    ):
        expected = run(definition(getattr(lutjax, op)), arguments)["y"]
        for m in (lutjax, lutjax.reference):
            np.testing.assert_array_equal(getattr(m, op)(**arguments), expected, err_msg=op)


def test_quantized_tables_are_their_definition():
    weights = grid(4, 8, 3) * np.float32([0.03, 1, 0])
    weights[2, 1, 1] = 2.0  # a power of two is clamped
    tables = lutjax.quantize_tables(jnp.asarray(weights), groups=2)
    expected = run(definition(lutjax.quantize_tables), {"weights": weights, "groups": 2})
    np.testing.assert_array_equal(tables.values, expected["values"])
    np.testing.assert_array_equal(tables.exponents, expected["exponents"])
    assert tables.values.max() == 127


def test_fixed_point_is_its_definition():
    values = grid(9, 4) + 0.3
    d = lutjax.Detection(*(np.zeros(9, np.int32),) * 2, np.ones(9), 0)
    y = lutjax.lookup(jnp.asarray(values[:, None]), d, accumulate=lutjax.FixedPoint(16.0))
    expected = run(definition(lutjax.FixedPoint), {"values": values, "scale": 16.0})["y"]
    np.testing.assert_array_equal(y, expected)
    assert np.abs(expected - values.sum(0)).max() > 1 / 16


RULES = (
    tables.SGD(weight_decay=0.25),
    tables.RowAdagrad(eps=0.5, weight_decay=0.25),
    tables.RowMomentum(momentum=0.75, weight_decay=0.25),
    tables.RowAdam(b1=0.5, b2=0.75, eps=0.125, weight_decay=0.25),
    tables.RowAdam(eps=0.125),
)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_are_their_definitions(rule):
    code = definition(type(rule))
    row, state = grid(4), {name: np.zeros(n) for name, n in rule.state_sizes(4).items()}
    actual, actual_state = jnp.asarray(row), jax.tree.map(jnp.asarray, state)
    expected = {
        "row": row,
        "first_moment": np.zeros(4),
        **state,
        **dataclasses.asdict(rule),
        "rate": 0.5,
    }
    for _ in range(3):
        gradient = grid(4)
        actual, actual_state = rule.step(
            actual, jnp.asarray(gradient), actual_state, jnp.asarray(0.5)
        )
        expected = run(code, {**expected, "gradient": gradient})
        np.testing.assert_allclose(actual, expected["row"], rtol=1e-5, err_msg="row")
        for name, value in actual_state.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


def test_every_rule_has_a_definition():
    rules = [
        r
        for r in vars(_row_rules).values()
        if inspect.isclass(r) and issubclass(r, tables.SGD.__base__)
    ]
    assert {type(rule) for rule in RULES} == {r for r in rules if r is not tables.SGD.__base__}


@pytest.mark.parametrize("sizes", [None, (2,), (1, 4, 3)])
def test_update_table_is_its_definition(sizes):
    rates = None if sizes is None else jnp.asarray(1 + grid(*sizes))
    rule = tables.RowAdagrad(eps=0.5, weight_decay=0.25)
    weights = jnp.asarray(grid(2, 4, 3), jnp.float32)
    d = lutjax.detect_signs(jnp.asarray(grid(3, 2, 2), jnp.float32))
    state = {"sum_of_squares": jnp.asarray(np.abs(grid(2, 4, 1)))}
    dy = jnp.asarray(grid(3, 3))

    def loss(p: Arrays) -> jax.Array:
        return jnp.vdot(lutjax.lookup(p["weights"], d), dy)

    gradient = tables.value_and_grad(loss)({"weights": weights})[1]["weights"]
    new, new_state = lutjax.update_table(weights, gradient, 0.5, rule, state, rates=rates)
    touched = np.zeros((2, 4, 1), bool)
    touched[np.arange(2), d.index] = True
    assert not touched.all()
    arguments = {"weights": weights, "gradient": gradient, "rate": jnp.asarray(0.5), "rule": rule}
    arguments["rates"] = rates
    expected = run(
        definition(lutjax.update_table), {**arguments, "state": state, "touched": touched}
    )
    np.testing.assert_allclose(new, expected["new_weights"], rtol=1e-5)
    np.testing.assert_allclose(new_state["sum_of_squares"], expected["new_state"]["sum_of_squares"])


def test_every_public_op_has_a_definition():
    of_ops = {
        name
        for room in (ops, factored_tables)
        for module in pkgutil.iter_modules(room.__path__)
        if not module.name.startswith("_")
        for name, value in vars(__import__(f"{room.__name__}.{module.name}", fromlist=[""])).items()
        if name in lutjax.__all__ and inspect.isfunction(value)
    }
    assert {"lookup", "lut", "packed_lut", "update_table"} <= of_ops
    for name in of_ops:
        definition(getattr(lutjax, name))

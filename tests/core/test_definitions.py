"""The definition in the docstring of each public op is what the op computes: values and every cotangent.

A definition is the NumPy of a block "Definition ...::". It reads the op's arguments under their names, for one sample
where it says so, and makes the results under theirs; ``da`` is the cotangent of ``a``.
"""

import dataclasses
import functools
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_among

import lutjax
from lutjax import ops, tables as factored
from lutjax.tables import _row_rules
from lutjax.training import tables

Arrays = dict[str, Any]
pytestmark = pytest.mark.usefixtures("without_typechecking")  # definitions read detections of NumPy arrays


def definition(documented: Any) -> str:
    """The code of a docstring's definition."""
    blocks = re.findall(r"^Definition[^:]*::\n\n((?:    .*\n|\n)+)", inspect.getdoc(documented) + "\n", re.M)
    assert len(blocks) == 1, f"{documented}: {len(blocks)} definitions"
    return textwrap.dedent(blocks[0])


def run(code: str, arguments: Mapping[str, Any]) -> Arrays:
    namespace = {"np": np, "lutjax": lutjax, **arguments}
    exec(compile(code, "definition", "exec"), namespace)
    return namespace


@dataclasses.dataclass
class Example:
    """Arguments of an op, and what its definition makes of each sample.

    Attributes:
      samples, shared: differentiable arguments, which have a leading axis of samples, and which have none.
      call: the op on them; its outputs by the definition's names.
      arguments: what the definition reads, of the differentiable ones of one sample (arrays of NumPy).
      cotangents: the definition's name of the cotangent of each differentiable argument.
    """

    samples: Arrays
    shared: Arrays
    call: Callable[[Arrays], Arrays]
    arguments: Callable[[Arrays], Arrays]
    cotangents: Mapping[str, str]


DRAW: np.random.Generator


@pytest.fixture(autouse=True)
def draw() -> None:
    """Begin each test with the same numbers, whichever tests ran before it."""
    global DRAW
    DRAW = np.random.default_rng(1)


def grid(*shape: int, steps: int = 8) -> np.ndarray:
    """Multiples of 1/4, so that there are ties and zeros, exact in float32."""
    return DRAW.integers(-steps, steps + 1, shape) / 4


def ids(low: int, high: int, *shape: int) -> np.ndarray:
    return DRAW.integers(low, high, shape).astype(np.int32)


def anchors(n_inputs: int, n_detectors: int, n_pairs: int) -> np.ndarray:
    a = ids(0, n_inputs, n_detectors, n_pairs)
    return np.stack([a, (a + ids(1, n_inputs, *a.shape)) % n_inputs], -1)


def detected(*shape: int) -> tuple[lutjax.Detection, np.ndarray]:
    """A detection, and its margin."""
    d = jax.tree.map(np.asarray, lutjax.detect_signs(jnp.asarray(grid(*shape))))
    return d, d.margin


def with_margin(d: lutjax.Detection, margin: Any, at: Any = ...) -> lutjax.Detection:
    return lutjax.Detection(d.index[at], d.flip[at], margin, d.bits)


def detect() -> Example:
    pairs = anchors(5, 3, 4)
    fixed = {"anchors": pairs, "epsilon": 0.5}

    def call(a: Arrays) -> Arrays:
        d = lutjax.detect(a["x"], pairs, epsilon=0.5)
        return {"index": d.index, "flip": d.flip, "margin": d.margin}

    return Example({"x": grid(6, 5)}, {}, call, lambda a: {**a, **fixed}, {"x": "dx"})


def detect_signs() -> Example:
    def call(a: Arrays) -> Arrays:
        d = lutjax.detect_signs(a["positions"], epsilon=0.5)
        return {"index": d.index, "flip": d.flip, "margin": d.margin}

    values = {"positions": grid(6, 4)}
    return Example(values, {}, call, lambda a: {**a, "epsilon": 0.5}, {"positions": "dpositions"})


def of_samples(d: lutjax.Detection) -> Arrays:
    """Return the margin of each sample, with the number of the sample."""
    return {"margin": d.margin, "sample": np.arange(len(d.margin))}


def lookup() -> Example:
    d, _ = detected(7, 4, 2)
    return Example(
        of_samples(d),
        {"weights": grid(4, 4, 5)},
        lambda a: {"y": lutjax.lookup(a["weights"], with_margin(d, a["margin"]), groups=2)},
        lambda a: {
            "weights": a["weights"],
            "detection": with_margin(d, a["margin"], a["sample"]),
            "groups": 2,
        },
        {"margin": "dmargin", "weights": "dweights"},
    )


def sparse_lookup() -> Example:
    d, _ = detected(7, 4, 2)
    targets = ids(-1, 5, 4, 1, 6)
    return Example(
        of_samples(d),
        {"weights": grid(4, 4, 6)},
        lambda a: {
            "y": lutjax.sparse_lookup(a["weights"], with_margin(d, a["margin"]), targets, 5, groups=2)
        },
        lambda a: {
            "weights": a["weights"],
            "detection": with_margin(d, a["margin"], a["sample"]),
            "targets": targets,
            "n_outputs": 5,
            "groups": 2,
        },
        {"margin": "dmargin", "weights": "dweights"},
    )


def margins(single: bool) -> Callable[[], Example]:
    def example() -> Example:
        ends = ids(0, 5, 3, 4) if single else anchors(5, 3, 4)
        return Example(
            {"x": grid(6, 5)},
            {},
            lambda a: {"u": lutjax.margins(a["x"], ends)},
            lambda a: {**a, "anchors": ends},
            {"x": "dx"},
        )

    return example


def weighted_lookup() -> Example:
    index, options = ids(0, 4, 7, 4, 3), {"groups": 2, "valued": 2}
    return Example(
        {"coefficients": grid(7, 4, 3, steps=4), "sample": np.arange(7)},
        {"weights": grid(4, 4, 5)},
        lambda a: {"y": lutjax.weighted_lookup(a["weights"], index, a["coefficients"], **options)},
        lambda a: {**a, **options, "index": index[a["sample"]]},
        {"coefficients": "dcoefficients", "weights": "dweights"},
    )


def lookup_attention() -> Example:
    (query, q), (key, k), (position, p) = detected(2, 5, 3, 2), detected(2, 7, 3, 1), detected(4, 1, 2)
    query_segments, key_segments = ids(0, 2, 2, 5), ids(0, 2, 2, 7)
    starts, window = {"query_start": 4, "key_start": 1}, {"window": 6}

    def call(a: Arrays) -> Arrays:
        parts = (with_margin(d, a[name]) for d, name in ((query, "q"), (key, "k"), (position, "p")))
        segments = {"query_segments": query_segments, "key_segments": key_segments}
        op = functools.partial(lutjax.lookup_attention, a["weights"], *parts, **window, **segments)
        # Traced: distances beyond the positions are then clamped, not refused.
        return {"y": jax.jit(lambda starts: op(**starts))(starts)}

    def arguments(a: Arrays) -> Arrays:
        return {
            "weights": a["weights"],
            "query": with_margin(query, a["q"], a["sample"]),
            "key": with_margin(key, a["k"], a["sample"]),
            "position": with_margin(position, a["p"]),
            "query_segments": query_segments[a["sample"]],
            "key_segments": key_segments[a["sample"]],
            **starts,
            **window,
        }

    return Example(
        {"q": q, "k": k, "sample": np.arange(2)},
        {"weights": grid(3, 2**5, 3), "p": p},
        call,
        arguments,
        {"q": "dquery", "k": "dkey", "p": "dposition", "weights": "dweights"},
    )


def lut_pair_attention(interleave: bool) -> Callable[[], Example]:
    def example() -> Example:
        pairs = anchors(9, 2, 3)
        segments, key_segments = ids(0, 2, 2, 5), ids(0, 2, 2, 6)
        fixed = {"window": 5, "interleave": interleave, "epsilon": 0.5}
        starts = {"query_start": 3, "key_start": 1}

        def call(a: Arrays) -> Arrays:
            rest = {"keys": a["keys"], "segments": segments, "key_segments": key_segments}
            of_arguments = (a["x"], a["weights"], pairs, a["positions"])
            op = functools.partial(lutjax.lut_pair_attention, *of_arguments, **fixed, **rest)
            return {"y": jax.jit(lambda starts: op(**starts))(starts)}

        def arguments(a: Arrays) -> Arrays:
            at = a["sample"]
            return {
                **a, **fixed, **starts, "anchors": pairs, "segments": segments[at], "key_segments": key_segments[at],
            }  # fmt: skip

        return Example(
            {"x": grid(2, 5, 3), "keys": grid(2, 6, 3), "sample": np.arange(2)},
            {"weights": grid(2, 2**3, 4), "positions": grid(4, 2, 3)},
            call,
            arguments,
            {name: f"d{name}" for name in ("x", "keys", "weights", "positions")},
        )

    return example


def gates(name: str) -> Callable[[], Example]:
    def example() -> Example:
        n, table = {
            "bilinear_gates": (2, grid(4, 6)),
            "soft_lut": (3, grid(6, 8)),
            "binary_lut": (3, grid(6, 8)),
        }[name]
        wires = ids(0, 4, 6, n)  # some read an input twice
        of_gates = "coefficients" if name == "bilinear_gates" else "table"
        return Example(
            {"x": grid(5, 4, steps=4)},
            {of_gates: table},
            lambda a: {"y": getattr(lutjax, name)(a["x"], a[of_gates], wires)},
            lambda a: {**a, "wires": wires},
            {"x": "dx", of_gates: f"d{of_gates}"},
        )

    return example


def gate_coefficients() -> Example:
    return Example(
        {},
        {"logits": grid(5, 16)},
        lambda a: {"coefficients": lutjax.gate_coefficients(a["logits"])},
        lambda a: a,
        {"logits": "dlogits"},
    )


def cell_total_variation() -> Example:
    return Example(
        {},
        {"weights": grid(2, 8, 3)},
        lambda a: {"y": lutjax.cell_total_variation(a["weights"])},
        lambda a: a,
        {"weights": "dweights"},
    )


def scale_gradient() -> Example:
    return Example(
        {},
        {"x": grid(3, 4)},
        lambda a: {"y": lutjax.scale_gradient(a["x"], -0.75)},
        lambda a: {**a, "factor": -0.75},
        {"x": "dx"},
    )


EXAMPLES = {
    "detect": detect,
    "detect_signs": detect_signs,
    "lookup": lookup,
    "sparse_lookup": sparse_lookup,
    "lookup_attention": lookup_attention,
    "lut_pair_attention": lut_pair_attention(interleave=False),
    "lut_pair_attention, interleaved": lut_pair_attention(interleave=True),
    **{name: gates(name) for name in ("bilinear_gates", "soft_lut", "binary_lut")},
    "gate_coefficients": gate_coefficients,
    "scale_gradient": scale_gradient,
    "margins": margins(single=False),
    "margins, single": margins(single=True),
    "weighted_lookup": weighted_lookup,
    "cell_total_variation": cell_total_variation,
}


def compare(name: str, code: str, example: Example) -> None:
    differentiable = {**example.samples, **example.shared}
    differentiable.pop("sample", None)
    traced = {k: jnp.asarray(v) for k, v in differentiable.items()}
    outputs, pullback = jax.vjp(lambda a: example.call({**a, "sample": None}), traced)

    def cotangent(output: jax.Array) -> np.ndarray:
        if jnp.issubdtype(output.dtype, jnp.floating):
            return grid(*output.shape)
        return np.zeros(output.shape, jax.dtypes.float0)

    given = {key: cotangent(output) for key, output in outputs.items()}
    (found,) = pullback(given)

    n_samples = len(next(iter(example.samples.values()))) if example.samples else None
    for_samples, for_shared = {}, dict.fromkeys(example.shared, 0.0)
    parts = []
    for b in range(n_samples or 1):
        of_sample = {k: v[b] for k, v in example.samples.items()}
        of_outputs = {f"d{k}": v if n_samples is None else v[b] for k, v in given.items()}
        arguments = {**example.arguments({**of_sample, **example.shared}), **of_outputs}
        parts.append(run(code, arguments))
        for key in example.shared:
            for_shared[key] = for_shared[key] + parts[-1][example.cotangents[key]]
    for key, output in outputs.items():
        expected = parts[0][key] if n_samples is None else np.stack([part[key] for part in parts])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {key}")
    for key in example.samples:
        if key != "sample":
            for_samples[key] = np.stack([part[example.cotangents[key]] for part in parts])
    for key, expected in {**for_samples, **for_shared}.items():
        assert np.abs(expected).max() > 0.01, f"{name}: the cotangent of {key} is 0 everywhere"
        np.testing.assert_allclose(
            found[key], expected, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {example.cotangents[key]}"
        )


@pytest.mark.parametrize("name", slow_among(list(EXAMPLES), "lut_pair_attention, interleaved"))
def test_ops_compute_their_definitions(name):
    documented = getattr(lutjax, name.split(",")[0])
    compare(name, definition(documented), EXAMPLES[name]())


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("lookup", "np.where(margin > 0, 1, -1)", "np.where(margin > 0, -1, 1)"),
        ("lookup", "margin > 0", "margin >= 0"),
        ("sparse_lookup", "np.where(margin > 0, 1, -1)", "np.where(margin > 0, -1, 1)"),
        slow("lookup_attention", "(1 if margin > 0 else -1)", "(-1 if margin > 0 else 1)"),
        slow("lookup_attention", "abs(of_query) < abs(of_key)", "abs(of_query) <= abs(of_key)"),
        slow("lut_pair_attention", "(1 if margin > 0 else -1)", "(-1 if margin > 0 else 1)"),
        ("detect", "np.subtract", "np.add"),
        ("binary_lut", "table, -table", "-table, table"),
        ("weighted_lookup", "< valued", "<= valued"),
        ("margins", "np.subtract", "np.add"),
    ],
)
def test_a_wrong_definition_is_found(name, right, wrong):
    code = definition(getattr(lutjax, name))
    assert right in code
    with pytest.raises(AssertionError, match=name):
        compare(name, code.replace(right, wrong), EXAMPLES[name]())


# ------------------------------------------------------------------------------------- made of other ops
def compositions() -> dict[str, tuple[Arrays, Arrays, Callable[..., Any]]]:
    """Differentiable and other arguments by name, and those that come as keywords."""
    pairs, targets, wires = anchors(4, 3, 2), ids(-1, 5, 3, 4, 2), ids(0, 4, 6, 2)
    epsilon, segments = {"epsilon": 0.5}, ids(0, 2, 2, 6)
    attention = {**epsilon, "window": 3, "segments": segments}
    window = {"kernel": (3, 2), "stride": (1, 2), "groups": 2}
    return {
        "lut": ({"x": grid(5, 4), "weights": grid(3, 4, 3)}, {"anchors": pairs}, {**epsilon, "groups": None}),
        "lut, groups": (
            {"x": grid(5, 3, 4), "weights": grid(3, 4, 3)},
            {"anchors": pairs},
            {**epsilon, "groups": 3},
        ),
        "sparse_lut": (
            {"x": grid(5, 4), "weights": grid(3, 4, 2)},
            {"anchors": pairs, "targets": targets, "n_outputs": 5},
            {**epsilon, "groups": None},
        ),
        "sparse_lut, shared input": (
            {"x": grid(5, 1, 4), "weights": grid(3, 4, 2)},
            {"anchors": pairs, "targets": targets, "n_outputs": 5},
            {**epsilon, "groups": 3},
        ),
        "scored_lut": (
            {
                "x": grid(5, 3, 4),
                "weights": grid(3, 4, 3),
                "keep": grid(5, 3),
                "scalars": {"log_beta": 0.25, "log_gamma": 0.5, "log_tau": -0.5},
            },
            {"anchors": pairs, "read": lutjax.reads.Confidence()},
            {"groups": 3, "sum_groups": True},
        ),
        "conv_lut": (
            {"images": grid(2, 5, 4, 2), "weights": grid(4, 4, 3)},
            {"anchors": anchors(6, 4, 2)},
            {**window, "read": None, "scalars": None, "keep": None, **epsilon},
        ),
        "conv_lut, scored": (
            {
                "images": grid(2, 5, 4, 2),
                "weights": grid(4, 4, 3),
                "scalars": {"log_beta": 0.25, "log_gamma": 0.5, "log_tau": -0.5},
            },
            {"anchors": anchors(6, 4, 2)},
            {**window, "read": lutjax.reads.Confidence(ways=2), "keep": 1 + grid(2, 4)},
        ),
        "lut_attention": (
            {"x": grid(2, 6, 4), "weights": grid(3, 2**5, 3), "positions": grid(3, 3, 1)},
            {"anchors": pairs},
            attention,
        ),
        "logic_gates": ({"x": grid(5, 4), "logits": grid(6, 16)}, {"wires": wires}, {}),
    }


@pytest.mark.parametrize(
    "name",
    slow_among(
        [
            *("lut", "lut, groups", "sparse_lut", "sparse_lut, shared input", "lut_attention", "logic_gates"),
            *("scored_lut", "conv_lut", "conv_lut, scored"),
        ],
        "lut, groups",
        "sparse_lut, shared input",
        "lut_attention",
        "conv_lut, scored",
    ),
)
def test_compositions_are_their_definitions(name):
    op = getattr(lutjax, name.split(",")[0])
    code = definition(op)
    differentiable, fixed, keywords = compositions()[name]
    differentiable = jax.tree.map(jnp.asarray, differentiable)
    actual = jax.vjp(lambda a: op(**a, **fixed, **keywords), differentiable)
    expected = jax.vjp(lambda a: run(code, {**a, **fixed, **keywords})["y"], differentiable)
    # The same kernels in the same order, but of a read or of windows: other programs, which add in another order.
    apart = name.split(",")[0] in ("scored_lut", "conv_lut")
    rounding = {"rtol": 1e-5, "atol": 1e-5} if apart else {"rtol": 0, "atol": 0}
    np.testing.assert_allclose(actual[0], expected[0], **rounding)
    dy = jnp.asarray(grid(*actual[0].shape), actual[0].dtype)
    for (path, found), wanted in zip(
        jax.tree.leaves_with_path(actual[1](dy)[0]), jax.tree.leaves(expected[1](dy)[0]), strict=True
    ):
        np.testing.assert_allclose(found, wanted, err_msg=jax.tree_util.keystr(path), **rounding)


# ------------------------------------------------------------------------------------- without a gradient
def test_packed_ops_compute_their_definitions():
    bits, wires = ids(0, 2, 4, 70), ids(0, 4, 5, 3)
    truth = ids(0, 2, 5, 8).astype(bool)
    words = np.asarray(lutjax.pack_bits(jnp.asarray(bits)))
    for op, arguments in (
        (lutjax.pack_bits, {"bits": bits}),
        (lutjax.unpack_bits, {"words": words, "n_samples": 70}),
        (lutjax.packed_lut, {"words": words, "truth": truth, "wires": wires}),
    ):
        expected = run(definition(op), arguments)["y"]
        np.testing.assert_array_equal(op(**arguments), expected, err_msg=op.__name__)


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
    """Three steps of one row, which `lutjax.update_table` moves by the same `step`."""
    code = definition(type(rule))
    row, state = grid(4), {name: np.zeros(n) for name, n in rule.state_sizes(4).items()}
    actual, actual_state = jnp.asarray(row), jax.tree.map(jnp.asarray, state)
    expected = {"row": row, "first_moment": np.zeros(4), **state, **dataclasses.asdict(rule), "rate": 0.5}
    for _ in range(3):
        gradient = grid(4)
        actual, actual_state = rule.step(actual, jnp.asarray(gradient), actual_state, jnp.asarray(0.5))
        expected = run(code, {**expected, "gradient": gradient})
        np.testing.assert_allclose(actual, expected["row"], rtol=1e-5, err_msg="row")
        for name, value in actual_state.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


def test_every_rule_has_a_definition():
    rules = [
        r for r in vars(_row_rules).values() if inspect.isclass(r) and issubclass(r, tables.SGD.__base__)
    ]
    assert {type(rule) for rule in RULES} == {r for r in rules if r is not tables.SGD.__base__}


@pytest.mark.parametrize("sizes", [None, slow((2,)), slow((1, 4, 3))])
def test_update_table_is_its_definition(sizes):
    rates = None if sizes is None else jnp.asarray(1 + grid(*sizes))
    rule = tables.RowAdagrad(eps=0.5, weight_decay=0.25)
    weights, (d, _) = jnp.asarray(grid(2, 4, 3)), detected(3, 2, 2)
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
    expected = run(definition(lutjax.update_table), {**arguments, "state": state, "touched": touched})
    np.testing.assert_allclose(new, expected["new_weights"], rtol=1e-5)
    np.testing.assert_allclose(new_state["sum_of_squares"], expected["new_state"]["sum_of_squares"])


def test_every_public_op_has_a_definition():
    of_ops = {
        name
        for room in (ops, factored)
        for module in pkgutil.iter_modules(room.__path__)
        if not module.name.startswith("_")
        for name, value in vars(__import__(f"{room.__name__}.{module.name}", fromlist=[""])).items()
        if name in lutjax.__all__ and inspect.isfunction(value)
    }
    assert {"lookup", "lut", "packed_lut", "update_table"} <= of_ops
    for name in of_ops:
        definition(getattr(lutjax, name))

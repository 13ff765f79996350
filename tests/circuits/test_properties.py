"""Robustness, monotonicity and independence proofs, compared with exhaustive answers."""

import itertools
import json

import numpy as np
import pytest
from commands import command, output, refusal
from example_circuits import random_circuit
from exports import write
from tools import require_tool

from lutjax.circuits import (
    Builder,
    Circuit,
    Format,
    Port,
    abc,
    arithmetic,
    columns,
    deployment,
    properties,
)
from lutjax.circuits._rows import bits_of_rows
from lutjax.circuits.circuit import walk_literals

OR = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1110,), (2 * 3,))
DIFFERENT = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b0110,), (2 * 3,))


@pytest.fixture(scope="module", autouse=True)
def _abc():
    require_tool("abc")


@pytest.fixture(scope="module")
def voters():
    """Circuit with votes for three classes over 3 signed 3-bit numbers, with all inputs and answers."""
    draw = np.random.default_rng(1)
    builder = Builder()
    numbers = builder.input("x", 3, Format(3, signed=True))
    bits = [bit for number in numbers for bit in number]
    gates = [
        builder.gate([bits[i] for i in draw.permutation(7)[:2]], int(draw.choice([6, 8, 14, 2, 9])))
        for _ in range(9)
    ]  # bits 7 and 8, of the last number, have no reader
    builder.output("y", [arithmetic.popcount(builder, gates[k::3]) for k in range(3)])
    circuit = builder.circuit({"kind": "classifier", "n_classes": 3})
    inputs = np.array(list(itertools.product(range(-4, 4), repeat=3)))
    return circuit, inputs, circuit(inputs).argmax(1)


def bits_of(numbers):
    return (np.asarray(numbers)[..., None] >> np.arange(3) & 1).reshape(*np.shape(numbers)[:-1], -1)


def test_robustness_is_that_of_all_inputs(voters):
    circuit, inputs, classes = voters
    statuses = set()
    for k, flips in itertools.product((0, 100, 301), (1, 2, 3)):
        near = (bits_of(inputs) != bits_of(inputs[k])).sum(1) <= flips
        expected = "proved" if (classes[near] == classes[k]).all() else "refuted"
        for method in (*properties.METHODS, None):
            actual = properties.prove_robustness(circuit, {"x": inputs[k]}, flips, method=method)
            assert actual.status == expected, (k, flips, method)
            statuses.add(expected)
            if not actual:
                first, second = (sample["x"] for sample in actual.samples)
                assert (first == inputs[k]).all()
                assert 0 < (bits_of(first) != bits_of(second)).sum() <= flips
                assert actual.answers == tuple(
                    circuit(x[None]).argmax(1)[0] for x in (first, second)
                )
    assert statuses == {"proved", "refuted"}


def test_monotonicity_and_independence_are_those_of_all_inputs(voters):
    circuit, _, classes = voters
    for k in range(3):
        table = np.moveaxis(classes.reshape(8, 8, 8), k, 0)
        expected = {
            False: (np.diff(table, axis=0) >= 0).all(),
            True: (np.diff(table, axis=0) <= 0).all(),
        }
        name = f"x[{k}]"
        for decreasing, good in expected.items():
            actual = properties.prove_monotonicity(circuit, name, decreasing=decreasing)
            assert actual.status == ("proved" if good else "refuted")
            if not actual:
                first, second = (sample["x"] for sample in actual.samples)
                assert first[k] < second[k]
                assert (np.delete(first, k) == np.delete(second, k)).all()
        actual = properties.prove_independence(circuit, name)
        assert actual.status == ("proved" if (table == table[:1]).all() else "refuted")


@pytest.mark.parametrize(("circuit", "prove", "status", "detail"), [
    (OR, lambda c: properties.prove_monotonicity(c, "x[0]"), "proved", "ABC"),
    (OR, lambda c: properties.prove_monotonicity(c, "x[0]", decreasing=True), "refuted", "ABC"),
    (DIFFERENT, lambda c: properties.prove_monotonicity(c, "x[0]"), "refuted", "ABC"),
    (OR, lambda c: properties.prove_independence(c, "x[1]"), "refuted", "ABC"),
])  # fmt: skip
def test_two_inputs(circuit, prove, status, detail):
    result = prove(circuit)
    assert (result.status, result.detail) == (status, detail)
    assert bool(result) == (status == "proved")


def test_gates_that_cancel_are_independent_by_proof():
    """The input has a path to the output, and gate simplification cannot remove it."""
    circuit, k = random_circuit(0, 6, 30, arities=(2, 3)), 6
    builder = Builder(simplify=False)
    bits = [bit for (bit,) in builder.input("x", k + 1)]
    one = walk_literals(circuit, [0, *bits[:k]], builder.gate)[3]
    masked = builder.gate([one, bits[k]], 0b1000)
    rest = builder.gate([one, bits[k]], 0b0010)  # one and not x[k]
    builder.output("y", [[builder.gate([masked, rest], 0b1110)]])
    result = properties.prove_independence(builder.circuit(), f"x[{k}]")
    assert result.status == "proved"


def test_a_time_limit(monkeypatch):
    def late(*arguments, seconds, **options):
        raise TimeoutError

    monkeypatch.setattr(abc, "run", late)
    result = properties.prove_monotonicity(OR, "x[0]", seconds=2)
    assert (result.status, result.detail) == ("undecided", "no proof in 2 s")
    monkeypatch.setattr(properties.time, "perf_counter", itertools.count(0.0, 100.0).__next__)
    result = properties.prove_robustness(OR, {"x": [1, 1]}, 1)
    assert (result.status, result.detail) == ("undecided", "0 of 2 inputs")


def test_a_wrong_counterexample_is_no_result(monkeypatch):
    monkeypatch.setattr(
        properties, "_ask_abc", lambda *_: ("refuted", np.zeros(3, np.uint8), "ABC")
    )
    with pytest.raises(RuntimeError, match="does not violate"):
        properties.prove_monotonicity(OR, "x[0]")


AGE = columns.number("age", "age", [30.5, 50.0], 40.0, True, decimals=0, least=18.0, largest=80.0)
JOB = columns.category("job", "job", ["clerk", "farmer"], False)


@pytest.fixture(scope="module")
def table():
    """Class 1: clerks above 30, everyone else above 50, and missing ages."""
    taken = columns.Columns((AGE, JOB), ((0, 0), (0, 1), (0, columns.MISSING), (1, 0)))
    builder = Builder()
    numbers = [bits for port in taken.ports for bits in builder.input(port.name, 1, port.format)]
    above, far, missing, clerk = bits_of_rows(builder, taken, numbers)
    young = builder.gate([above, clerk], 0b1000)
    builder.output("y", [[builder.gate([young, far, missing], 0b11111110)]])
    about = {
        "kind": "classifier",
        "n_classes": 2,
        "classes": ["low", "high"],
        "columns": taken.facts(),
    }
    return builder.circuit(about)


def test_columns_of_a_table(table):
    assert properties.prove_monotonicity(table, "age").status == "proved"
    result = properties.prove_monotonicity(table, "age", decreasing=True, in_range=True)
    lines = properties.describe(table, result)
    ages = [int(AGE.value(int(sample["age"][0]))) for sample in result.samples]
    assert 18 <= ages[0] < ages[1] <= 80
    assert lines[0] == f"  age {ages[0]} -> {ages[1]}: answer low -> high"
    assert lines[1].startswith(f"  from age {ages[0]}, job ")
    result = properties.prove_independence(table, "job")
    assert result.status == "refuted"
    with pytest.raises(ValueError, match="has categories, which have no order"):
        properties.prove_monotonicity(table, "job")


# ------------------------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Read-only export with two gates."""
    return write(tmp_path_factory.mktemp("or") / "out", "either", ("json", "aiger"), circuit=OR)


def test_the_command_proves_and_refutes(folder, tmp_path):
    text = output("prove", folder, "--monotone", "x[0]", "--monotone", "x[1]")
    assert text.startswith("either.aig: Circuit(x: 2 x uint1 -> y: 1 x uint1; 1 gates)\n")
    assert text.endswith("2 proved, 0 refuted, 0 undecided.\n")
    out = tmp_path / "results.json"
    words = ("--robust", 1, "--samples", 3, "--unused", "x[0]", "--antitone", "x[1]", "--out", out)
    result = command("prove", folder, *words)
    assert result.exit_code == 1
    actual = json.loads(out.read_text())
    assert [one["about"] for one in actual] == ["x[1]", "x[0]", "sample 0", "sample 1", "sample 2"]
    for one in actual:
        if one["status"] == "refuted":
            assert [int(OR([sample["x"]])[0]) for sample in one["samples"]] == one["answers"]
            assert f"answer {one['answers'][0]} -> {one['answers'][1]}" in result.output


@pytest.mark.parametrize(("words", "message"), [
    ([], "name a property: --robust, --monotone, --antitone or --unused."),
    (["--unused", "age"], 'column is "age"; the inputs are "x[0]", "x[1]".'),
    (["--robust", "0"], "must be at least 1"),
    (["--robust", "1", "--sample", "8"], "8 is too large; "),
    (["--unused", "x[0]", "--out", "nowhere/x.json"], "nowhere"),
])  # fmt: skip
def test_what_the_command_refuses(folder, words, message):
    assert message in refusal("prove", folder, *words)


def test_the_command_without_abc(folder, monkeypatch):
    monkeypatch.setattr(abc, "find", lambda: None)
    assert "ABC is not installed: pip install pyosys" in refusal(
        "prove", folder, "--unused", "x[0]"
    )
    assert command("prove", folder, "--robust", 1).exit_code in (0, 1)  # few inputs need no ABC


def test_the_command_is_interrupted(folder, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(properties, "prove_robustness", stop)
    result = command("prove", folder, "--monotone", "x[0]", "--robust", 1, "--sample", 0)
    assert result.exit_code == 130
    assert result.output.endswith("Stopped after 1 of 2 proofs.\n")


def test_damaged_exports(folder, tmp_path):
    other = write(tmp_path / "out", "other", ("json", "aiger"))
    (other / "other.aig").write_bytes((folder / "either.aig").read_bytes())
    with pytest.raises(deployment.DeploymentError, match=r"other\.aig has other ports"):
        properties.read_export(other)
    (other / "other.aig").write_bytes(b"aig")
    with pytest.raises(deployment.DeploymentError, match="is damaged"):
        properties.read_export(other)
    assert "is not an export" in refusal("prove", tmp_path, "--robust", 1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: properties.prove_robustness(OR, {"x": [0, 1]}, 0), "flips is 0"),
    (lambda: properties.prove_robustness(OR, {"x": [0, 1]}, 1, method="sat"), "method is 'sat'"),
    (lambda: properties.prove_robustness(OR, {"x": [0, 1, 1]}, 1), "x has 3 values; expected 2"),
    (lambda: properties.prove_robustness(OR, {"y": [0, 1]}, 1), "sample has"),
    (lambda: properties.prove_independence(OR, "x[0]", seconds=0), "seconds is 0"),
    (lambda: properties.prove_monotonicity(Circuit((Port("x", 2),), (Port("y", 2),), (), (),
        (2, 4)), "x[0]"), "expected a class or one number"),
])  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

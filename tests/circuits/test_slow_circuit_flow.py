"""Command-line flow from training to proved circuits and programs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tools
from commands import command, output, refusal
from exported_runs import images, message, write_classifier
from flax import nnx
from tools import require_tool

import lutjax
from lutjax import circuits
from lutjax.circuits import ands, deployment, proofs
from lutjax.circuits.deployment import MANIFEST, VECTORS, Vectors
from lutjax.models import LogicClassifierConfig
from lutjax.training import classifier, export as exporting
from lutjax.training.samples import samples

pytestmark = pytest.mark.usefixtures("usable_tools")


def vectors_of(folder):
    return Vectors.from_json((folder / VECTORS).read_text())


def check_proofs(folder):
    assert not [
        proof for proof in proofs.verify(folder, oracle=exporting.oracle) if proof.passed is False
    ]


def test_export_refuses_what_is_not_exact(tmp_path):
    x, y = images()
    out, words = (
        tmp_path / "out",
        ("export", "--run", write_classifier(tmp_path, x / 3, y), "--out", tmp_path / "out"),
    )
    fixed = "circuits have no floating-point numbers. Choose a fixed-point format by --inputs, such as fixed12.4"
    for more, expected in (
        ((), fixed),
        (("--inputs", "float32"), "a circuit has no floating-point numbers"),
        (("--inputs", "uint1"), "inputs is uint1, with a range of 0 to 1; the samples"),
        (("--inputs", "fixed8"), "text is 'fixed8'"),
    ):
        result = command(*words, *more)
        assert (result.exit_code, out.exists()) == (1, False)
        assert expected in message(result), result.output
    more = ("--inputs", "fixed12.4", "--outputs", "votes", "--format", "blif,dot", "--name", "vote")
    assert "numbers of the test part are rounded to fixed12.4" in message(command(*words, *more))
    others = {VECTORS, MANIFEST, "Makefile"}
    assert {path.name for path in out.iterdir()} == {"vote.json", "vote.blif", "vote.dot", *others}
    check_proofs(out)
    vectors = vectors_of(out)
    assert vectors.outputs["y"].shape == (10, 3)
    assert (vectors.inputs["x"] * 16 % 1 == 0).all()
    text = output(*words, "--inputs", "bits", "--outputs", "bits", "--format", "json")
    assert "The export that was in" in text
    assert {path.name for path in out.iterdir()} == {"digits.json", *others}
    check_proofs(out)


def test_trees_are_exported(trees, tmp_path):
    out = tmp_path / "out"
    output("export", "--run", trees[0], "--out", out, "--format", "c,verilog")
    assert len(np.unique(vectors_of(out).outputs["y"])) == 3
    check_proofs(out)
    circuit = circuits.netlist_json.read((out / "digits.json").read_text())
    assert [name for name, _ in circuit.parts] == [
        "encoder",
        "layer 1",
        "layer 2",
        "votes",
        "argmax",
    ]
    assert circuit.inputs[0].count == 32


def test_trees_with_too_many_gates_are_refused(trees, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "MOST_GATES", 100)
    said = refusal("export", "--run", trees[0], "--out", tmp_path / "out")
    assert "36 trained gates, 216 over all image positions" in said
    assert "circuits have at most 100. Train fewer trees (--kernels)" in said


def test_circuits_of_trees_from_numbers_and_from_bits(trees):
    """Rows, columns and channels follow the orders in `LogicTreeNet.circuit`, the model's own orders."""
    run, x = trees
    model = lutjax.load(run)
    logits = nnx.jit(lambda model, x: model(x, deterministic=True))(
        model, jnp.asarray(x, jnp.float32)
    )
    votes = np.round(np.asarray(logits) * model.config.tau)
    of_numbers = model.circuit(inputs="uint8", outputs="bits")(x.reshape(len(x), -1))
    np.testing.assert_array_equal(of_numbers.reshape(len(x), 3, -1).sum(-1), votes)
    bits = (x[..., None] > np.asarray(model.encoder.thresholds[...])).transpose(0, 3, 4, 1, 2)
    of_bits = exporting.source_of(run, inputs="bits", outputs="votes")
    np.testing.assert_array_equal(of_bits.circuit(bits.reshape(len(x), -1).astype(np.uint8)), votes)
    np.testing.assert_array_equal(of_bits.circuit(of_bits.samples), of_bits.answer(of_bits.samples))


def test_trees_from_training_to_every_format(tmp_path):
    """Digits with 8 x 8 pixels, proved by the available tools."""
    out, kernels = tmp_path / "trees", ("--kernels", "8,16", "--layers", "160,80", "--tau", 2)
    more = ("--n-thresholds", 1, "--steps", 300, "--learning-rate", 0.05, "--out", out)
    output("train", "classify", "--model", "tree", *kernels, *more)
    output("export", "--run", out)
    assert deployment.read_manifest(out / "circuit")["about"]["image"] == [8, 8]
    assert len(np.unique(vectors_of(out / "circuit").outputs["y"])) == 10
    assert " 0 failed" in output("verify", out / "circuit")


def test_a_cost_of_gates_makes_circuits_smaller():
    actual = {}
    config = LogicClassifierConfig(6, 3, layers=(30, 30), n_thresholds=2)
    training = classifier.TrainingConfig(steps=30, batch_size=20, learning_rate=0.1)
    for cost in (0.0, 5.0):
        run = classifier.Run(
            config, dataclasses.replace(training, gate_cost=cost), samples(*images(), name="images")
        )
        first = run.init()
        expected = float(classifier.expected_gates(run.structure.model(first.params, first.others)))
        state, loss = run.advance(run.init(), 0, 1)
        state, _ = run.advance(state, 1, 29)
        model = run.structure.model(state.params, state.others)
        size = len(circuits.from_model(model, inputs="bits", outputs="votes"))
        actual[cost] = np.array([float(loss), float(classifier.expected_gates(model)), size])
    assert actual[5.0][0] == pytest.approx(actual[0.0][0] + 5.0 * expected / 1000, rel=1e-5)
    assert (actual[5.0][1:] < [0.8, 0.9] * actual[0.0][1:]).all()


@pytest.mark.parametrize("goal", ["ands", "gates", "lut6"])
def test_an_optimized_export_is_proved(goal, folders, tmp_path):
    require_tool("abc")
    run, out = folders["automaton run"], tmp_path / "out"
    output("export", "--run", run, "--out", out, "--optimize", goal, "--format", "blif")
    both = [
        circuits.netlist_json.read((f / "automaton.json").read_text())
        for f in (folders["automaton"], out)
    ]
    count = {"ands": ands.and_graph, "gates": ands.operations}.get(goal, lambda c: [c.fanins])
    before, after = (len(count(circuit)[0]) for circuit in both)
    assert after <= before
    assert max(map(len, both[1].fanins)) <= (6 if goal == "lut6" else 2)
    result = proofs.verify(out, oracle=exporting.oracle)
    assert [proof.passed for proof in result] == [True] * 6, result


def test_life_from_training_to_a_proved_circuit(tmp_path):
    out, circuit = tmp_path / "run", tmp_path / "circuit"
    output("train", "ca", "--out", out, "--no-pictures")
    words = () if tools.missing("abc") else ("--optimize", "ands")
    output("export", "--run", out, "--out", circuit, *words)
    result = proofs.verify(circuit, oracle=exporting.oracle)
    assert not [proof for proof in result if proof.passed is False]
    assert any(proof.passed and "the Game of Life" in proof.name for proof in result)
    if words:
        assert deployment.read_manifest(circuit)["statistics"]["ands"] <= 45


def test_a_language_model_becomes_a_program(tmp_path):
    require_tool("cc")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    sizes = ("--features=8", "--context=8", "--n-layers=1", "--n-detectors=4", "--n-anchors=3")
    more = ("--ffn-detectors=4", "--ffn-anchors=3", "--batch-size=4", "--steps=2")
    run, out = tmp_path / "run", tmp_path / "out"
    output(
        "train", "lm", "--model", "lut", "--text", tmp_path / "text", "--out", run, *sizes, *more
    )
    for tables in (
        "int8",
        "int16",
    ):  # the second in the place of the first, and of what make has written
        output("export", "--run", run, "--out", out, "--integers", tables)
        (out / "language_model").write_text("compiled")
    assert [proof.passed for proof in proofs.verify(out)] == [True, True, True]
    tables = (out / "tables.c").read_text()
    changed = tables.replace(" 0,", " 1,", 1)
    assert changed != tables
    (out / "tables.c").write_text(changed)
    assert next(proof.passed for proof in proofs.verify(out)) is False

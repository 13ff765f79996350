"""Run exports, proofs for exported folders, and training with gate counts."""

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from cases import slow, slow_where
from commands import command, output
from exported_runs import images, message, write_automaton
from folders import ROOT
from tools import require_tool

from lutjax import circuits
from lutjax.circuits import abc, deployment, proofs
from lutjax.circuits.deployment import MANIFEST, VECTORS, Vectors
from lutjax.models import LogicClassifierConfig
from lutjax.training import classifier, export as exporting
from lutjax.training.classifier_runs import Classifier
from lutjax.training.samples import samples

pytestmark = pytest.mark.usefixtures("usable_tools")


def vectors_of(folder):
    return Vectors.from_json((folder / VECTORS).read_text())


@pytest.mark.parametrize("kind", ["digits", "automaton"])
def test_export_writes_every_format(kind, folders):
    folder = folders[kind]
    endings = (".v", "_testbench.v", ".blif", ".aig", ".aag", ".json", "_alkaid.json", ".c", ".h", "_test.c",
               ".html", ".dot")  # fmt: skip
    names = {f"{kind}{ending}" for ending in endings} | {VECTORS, "Makefile"}
    assert {path.name for path in folder.iterdir()} == names | {MANIFEST}
    manifest = deployment.read_manifest(folder)
    assert set(manifest["files"]) == names
    assert manifest["run"]["folder"] == str(folders[f"{kind} run"].absolute())
    assert manifest["registers"] == (3 if kind == "digits" else 0)
    circuit = circuits.netlist_json.read((folder / f"{kind}.json").read_text())
    assert manifest["inputs"] == deployment.interface(circuit.inputs)
    assert manifest["statistics"]["gates"] == len(circuit) > 5
    assert manifest["latency"] == (-(-circuit.depth // 3) if kind == "digits" else 0)
    vectors = vectors_of(folder)
    assert len(vectors) == (10 if kind == "digits" else 512)
    assert len(np.unique(vectors.outputs["y"])) > 1


@pytest.mark.parametrize("kind", [slow("digits"), "automaton"])
def test_every_proof_of_an_export_passes(kind, folders):
    text = output("verify", folders[kind])
    passed = [line for line in text.splitlines() if line.startswith("PASS")]
    assert text.splitlines()[-1].startswith(f"{len(passed)} passed, 0 failed")
    for name in (
        "digests",
        f"{kind}.json in NumPy = {VECTORS}",
        "the model in JAX",
        f"{kind}.aag in NumPy",
    ):
        assert any(name in line for line in passed), name
    if kind == "automaton":
        assert any("all 2^9 inputs" in line for line in passed)
        assert "the Game of Life" not in text  # its gates are random


# ------------------------------------------------------------------------------------- what proofs find
@functools.cache
def with_a_flipped_entry(folder, name):
    """Return an exported circuit with one flipped table entry and at least one changed vector answer."""
    circuit, vectors = (
        circuits.netlist_json.read((folder / f"{name}.json").read_text()),
        vectors_of(folder),
    )
    inputs = [vectors.inputs[port.name] for port in circuit.inputs]
    for gate, table in enumerate(circuit.tables):
        for entry in range(1 << len(circuit.fanins[gate])):
            tables = (*circuit.tables[:gate], table ^ 1 << entry, *circuit.tables[gate + 1 :])
            changed = dataclasses.replace(circuit, tables=tables)
            result = deployment.evaluate_ports(changed, inputs)
            if any((result[port] != answers).any() for port, answers in vectors.outputs.items()):
                return changed
    raise AssertionError("no entry matters")


def replaced(folder, target, contents):
    """Copy an export with replaced file contents and a matching manifest."""
    shutil.copytree(folder, target)
    manifest = deployment.read_manifest(folder)
    files = {
        name: (of["format"], (folder / name).read_bytes()) for name, of in manifest["files"].items()
    }
    files |= {name: (files[name][0], content) for name, content in contents.items()}
    known = deployment.manifest_of("circuit", files, {}, None)["files"]
    for name, content in contents.items():
        (target / name).write_bytes(content)
    (target / MANIFEST).write_text(json.dumps({**manifest, "files": known}))
    return target


def failures(folder, words, needed=None):
    """Return the names of failed checks, limited to names with one of the given words.

    Skip unavailable checks; skip the whole test if the needed check is unavailable.
    """
    failed = set()
    for name, run, _ in proofs.checks_of(
        folder, deployment.read_manifest(folder), exporting.oracle
    ):
        if any(word in name for word in words):
            try:
                run()
            except proofs.FailedError:
                failed.add(name)
            except proofs.SkippedError as error:
                if name == needed:
                    pytest.skip(f"{name}: {error}")
    return failed


IN_NUMPY = ("in NumPy", "in JAX", "digests")


FLIPPED = [
    ("digits_alkaid.json", "digits_alkaid.json in NumPy = digits.json", ()),
    ("digits.aag", "digits.aag in NumPy = digits.json", ()),
    ("digits.c", "C, compiled = vectors.json", ("cc",)),
    ("digits.blif", "digits.blif = digits.json, by ABC", ("abc",)),
    ("digits.v", "Verilog, simulated = vectors.json", ("iverilog",)),
    ("digits.html", "digits.html, its script = vectors.json", ("node",)),
    ("digits.aig", "digits.aig = digits.json, by ABC", ("abc",)),
    ("automaton.v", "automaton.v = automaton.json, by ABC", ("abc", "yosys")),
]


@pytest.mark.parametrize(
    ("name", "where", "required"),
    slow_where(FLIPPED, lambda name, *_: name.endswith((".v", ".html", ".aig"))),
)
def test_a_flipped_entry_is_found(name, where, required, folders, tmp_path):
    for tool in required:
        require_tool(tool)
    kind = name.partition(".")[0].partition("_")[0]
    folder = folders[kind]
    manifest, changed = deployment.read_manifest(folder), with_a_flipped_entry(folder, kind)
    format = manifest["files"][name]["format"]
    options = deployment.Options((format,), kind, registers=manifest["registers"])
    content = deployment.FORMATS[format].write(
        deployment.Request(changed, vectors_of(folder), options)
    )[name]
    content = content if isinstance(content, bytes) else content.encode()
    assert content != (folder / name).read_bytes()
    result = failures(
        replaced(folder, tmp_path / "out", {name: content}), (where, *IN_NUMPY), needed=where
    )
    read_in_numpy = Path(name).suffix in (".blif", ".aig", ".aag", ".html", ".json")
    assert result == {where} | ({f"{name} in NumPy = {kind}.json"} if read_in_numpy else set())


def test_a_flipped_entry_of_the_circuit_is_found(folders, tmp_path):
    changed = circuits.netlist_json.write(
        with_a_flipped_entry(folders["digits"], "digits")
    ).encode()
    result = failures(
        replaced(folders["digits"], tmp_path / "out", {"digits.json": changed}), IN_NUMPY
    )
    ends = (".blif", ".aig", ".aag", ".html", "_alkaid.json")
    others = {f"digits{end} in NumPy = digits.json" for end in ends}
    assert result == {
        "digits.json in NumPy = vectors.json",
        "digits.json = the model in JAX",
        *others,
    }


def test_a_wrong_answer_among_the_vectors_is_found(folders, tmp_path):
    vectors = vectors_of(folders["automaton"])
    vectors.outputs["y"][77] ^= 1
    changed = {VECTORS: vectors.to_json().encode()}
    result = failures(replaced(folders["automaton"], tmp_path / "out", changed), IN_NUMPY)
    assert result == {"automaton.json in NumPy = vectors.json"}


def test_a_changed_byte_of_any_file_is_found(folders, tmp_path):
    folder = shutil.copytree(folders["automaton"], tmp_path / "out")
    manifest = deployment.read_manifest(folder)
    digests = proofs.checks_of(folder, manifest, None)[0]
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(proofs.FailedError, match=f"{name} is not what was written"):
            digests.run()
        (folder / name).unlink()
        with pytest.raises(proofs.FailedError, match=f"{name} is missing"):
            digests.run()
        (folder / name).write_bytes(content)


def test_a_failed_proof_is_the_status_of_the_command(folders, tmp_path):
    folder = shutil.copytree(folders["automaton"], tmp_path / "out")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / "automaton.dot").write_text("digraph {}")
    quick = ("json", "vectors", "dot", "make")  # what needs no tool
    kept = {name: facts for name, facts in manifest["files"].items() if facts["format"] in quick}
    for name in set(manifest["files"]) - set(kept):
        (folder / name).unlink()
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": kept}))
    result = command("verify", folder)
    assert result.exit_code == 1
    files = (
        "4 files: 2 proved; 1 failed (automaton.dot); 1 compared with its digest alone (Makefile)."
    )
    for words in ("FAIL     digests of all files", "3 passed, 1 failed, 0 skipped", files):
        assert words in result.output


def test_proofs_without_the_run_are_skipped(folders, tmp_path):
    manifest = deployment.read_manifest(folders["automaton"])
    for change, *other, why in (
        ({"folder": str(tmp_path / "moved")}, "the model is not in"),
        ({"digest": "0"}, "is not that of step 1"),
        ({}, folders["digits run"], "is not that of step 1"),
    ):
        with pytest.raises(proofs.SkippedError, match=why):
            exporting.oracle({**manifest, "run": {**manifest["run"], **change}}, *other)


def test_programs_that_cannot_be_run_prove_nothing(folders, tmp_path, monkeypatch):
    """Temporary folder mounted noexec, and tools built for another machine."""
    # Writes a file that may not be run, as every file of such a folder.
    compiler = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    for name in ("gcc", "node", "iverilog", "vvp", "abc"):
        (tmp_path / name).write_text(compiler if name == "gcc" else "no program", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    monkeypatch.setattr(abc, "find", lambda: str(tmp_path / "abc"))
    actual = {proof.name: proof for proof in proofs.verify(folders["automaton"])}
    refused = {name: proof.detail for name, proof in actual.items() if proof.passed is None}
    tools = {
        "Verilog, simulated = vectors.json": "iverilog",
        "automaton.html, its script = vectors.json": "node",
    }
    files = ("automaton.blif", "automaton.aig", "automaton_alkaid.json", "automaton.v")
    tools |= {f"{file} = automaton.json, by ABC": "abc" for file in files}
    why = f"{{}} cannot be run: {os.strerror(errno.ENOEXEC)}"
    expected = {name: why.format(tmp_path / tool) for name, tool in tools.items()}
    folder = tempfile.gettempdir()
    expected["C, compiled = vectors.json"] = (
        f"no program can be run in {folder}; set TMPDIR to a folder that is not mounted noexec"
    )
    if not importlib.util.find_spec("pyosys"):
        expected["automaton.v = automaton.json, by ABC"] = "pyosys is not installed"
    assert refused == expected
    assert all(proof.passed for name, proof in actual.items() if name not in refused)


def test_the_rule_of_life_is_proved():
    boards = (np.arange(512)[:, None] >> np.arange(9) & 1).astype(np.uint8)
    assert (
        proofs.life(boards).sum() == 140
    )  # 56 neighborhoods of three, dead or alive, and 28 of two, alive
    builder = circuits.Builder()
    bits = [number[0] for number in builder.input("x", 9)]
    votes = circuits.arithmetic.popcount(builder, bits[:8])
    two_or_three = builder.gate([votes[1], votes[2], votes[3]], 0b00000010)
    builder.output("y", [[builder.gate([two_or_three, votes[0], bits[8]], 0b10101000)]])
    result = deployment.evaluate_ports(builder.circuit(), [boards])["y"]
    np.testing.assert_array_equal(result, proofs.life(boards))


# ------------------------------------------------------------------------------------- what export refuses
def test_export_refuses_other_models(folders, tmp_path, monkeypatch):
    digits, automaton = folders["digits run"], folders["automaton run"]
    drifting = write_automaton(tmp_path, channels=2, update_rate=0.5)

    def refused(run, *words, expected):
        result = command("export", "--run", run, "--out", tmp_path / "out", *words)
        assert result.exit_code
        assert expected in message(result), result.output

    refused(drifting, expected="update_rate is 0.5")
    refused(automaton, "--inputs", "uint8", expected="inputs is 'uint8'")
    refused(
        digits,
        "--format",
        "edif",
        expected="value for '--format': 'edif' is not one of verilog, blif",
    )
    refused(digits, "--name", "module", expected="name is 'module'; it is a keyword of Verilog")
    refused(folders["digits"], expected="holds no checkpoint")
    refused(tmp_path / "none", expected="does not exist")
    refused(automaton, "--integers", "int8", expected="Omit --integers")
    monkeypatch.setattr(exporting.runs, "kind", lambda folder: "lm")
    refused(automaton, "--format", "verilog", expected="only export format is c, not verilog")
    refused(automaton, "--registers", 2, expected="which has no option --registers")


def test_nothing_is_lost_by_an_export(folders, tmp_path):
    def export(out):
        result = command(
            "export", "--run", folders["automaton run"], "--out", out, "--format", "json"
        )
        assert result.exit_code == 1
        return message(result)

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plan.txt").write_text("mine")
    assert "has other files, such as plan.txt" in export(tmp_path / "notes")
    assert "is a file; choose another folder" in export(tmp_path / "notes" / "plan.txt")
    mixed = shutil.copytree(folders["automaton"], tmp_path / "mixed")
    (mixed / "build").mkdir()
    (mixed / "mine.v").write_text("")
    assert "an export and other files, such as mine.v" in export(mixed)
    assert (mixed / "automaton.v").exists()
    result = command("verify", tmp_path / "notes")
    assert result.exit_code == 1
    assert "is not an export: it has no manifest.json" in message(result)
    (mixed / MANIFEST).write_text("{")
    assert "is damaged" in message(command("verify", mixed))


def test_a_failed_write_leaves_the_export_before_it(folders, tmp_path, monkeypatch):
    folder = shutil.copytree(folders["automaton"], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(
        Path, "write_bytes", lambda path, content: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full"):
        deployment.write(folder, {"a": ("json", b"")}, {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_stopped_verify_says_what_was_done(folders, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(proofs, "evaluate_ports", stop)
    result = command("verify", folders["automaton"])
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == "Stopped after 2 proofs."


def test_the_table_of_the_page_is_that_of_the_rows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import circuits as benchmark

    page = pages.read(ROOT / "docs" / "appendix" / "circuits.md")
    assert benchmark.table(benchmark.read(benchmark.ROWS)) in page


# ------------------------------------------------------------------------------------- a cost of gates
TRAINING = classifier.TrainingConfig(steps=30, batch_size=20, learning_rate=0.1)


def run_of(**fields):
    config = LogicClassifierConfig(6, 3, layers=(30, 30), n_thresholds=2)
    return classifier.Run(
        config, dataclasses.replace(TRAINING, **fields), samples(*images(), name="images")
    )


def test_without_a_cost_nothing_is_counted(monkeypatch):
    def refuse(model, temperature):
        raise AssertionError

    monkeypatch.setattr(classifier, "expected_gates", refuse)
    data = (np.ones((20, 6), np.float32), np.ones(20, np.int32))
    for cost in (0.0, 0.1):
        run = run_of(gate_cost=cost)
        with pytest.raises(AssertionError) if cost else contextlib.nullcontext():
            jax.eval_shape(run.step, run.abstract(), jnp.int32(0), data)


def test_expected_gates_of_a_sure_network_are_those_that_it_needs():
    run = run_of()
    params, others = run.structure.init(0)
    model = run.structure.model(jax.tree.map(lambda logits: 1e5 * logits, params), others)
    needs = []
    for truth in map(np.asarray, model.packed().truth):
        a = (truth[:, [0, 2]] != truth[:, [1, 3]]).any(1)
        b = (truth[:, [0, 1]] != truth[:, [2, 3]]).any(1)
        needs.append(a.astype(int) + b)
    gates = sum(int((n == 2).sum()) for n in needs) + int((needs[-1] > 0).sum())
    assert float(classifier.expected_gates(model)) == pytest.approx(gates, abs=0.01)


def test_tests_of_a_run_with_a_cost_say_how_many_gates_survive(tmp_path):
    x, y = images()
    np.savez(tmp_path / "digits.npz", x=x, y=y)
    remarks = []
    for cost in (0.0, 0.5):
        options = {"layers": (30, 30), "n_thresholds": 2, "gate_cost": cost}
        experiment = Classifier.create(options, tmp_path / "digits.npz")
        state = experiment.run.init()
        remarks.append(experiment.remark(state))
    circuit = circuits.from_model(
        experiment.run.structure.model(state.params, state.others), outputs="bits"
    )
    assert remarks[0] == ""
    assert remarks[1].endswith(f"gates that survive {len(circuit)}")
    with pytest.raises(ValueError, match="gate_cost is -1; it must not be negative"):
        dataclasses.replace(TRAINING, gate_cost=-1)

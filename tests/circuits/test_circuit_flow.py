"""Exports of trained runs, proofs of exported folders, and training that counts gates."""

import contextlib
import dataclasses
import errno
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
import tools
from cases import slow
from click.testing import Result
from commands import command
from flax import nnx
from folders import ROOT
from tools import require_tool

import lutjax
from lutjax import circuits
from lutjax.circuits import abc, ands, deployment, proofs
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.deployment import MANIFEST, VECTORS, Vectors
from lutjax.models import LogicClassifierConfig
from lutjax.training import classifier, export as exporting, models
from lutjax.training.automaton_runs import Automaton
from lutjax.training.classifier_runs import Classifier
from lutjax.training.samples import samples


@pytest.fixture(autouse=True)
def _usable_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs are made with those tools of the machine that can be used."""
    tools.hide_unusable(monkeypatch)


def message(result: Result) -> str:
    return " ".join(result.output.replace("│", "").split())


def images(n: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Images of 2 x 3 whole numbers, of three classes."""
    y = np.arange(n) % 3
    x = np.random.default_rng(0).integers(0, 5, (n, 2, 3))
    x[np.arange(n), 0, y] += 7
    return x, y


def write_classifier(folder: Path, x: np.ndarray, y: np.ndarray, **fields: Any) -> Path:
    """Write the run of a classifier as it is before the first step; return its folder."""
    np.savez(folder / "digits.npz", x=x, y=y)
    options = {"layers": (24, 24), "n_thresholds": 2, "steps": 1, "noise": 2.0, **fields}
    experiment = Classifier.new(options, folder / "digits.npz")
    models.save(folder / "digits", 1, experiment.run.init(), experiment.record)
    return folder / "digits"


def write_trees(folder: Path, x: np.ndarray, y: np.ndarray, **fields: Any) -> Path:
    """Write the run of trees whose gates are random, on images; return its folder."""
    np.savez(folder / "digits.npz", x=x, y=y)
    sizes = {"kernels": (4,), "layers": (24,), "depth": 2, "kernel": 3, "padding": 1, "pool": 2}
    experiment = Classifier.new(
        {**sizes, "n_thresholds": 2, "steps": 1, **fields}, folder / "digits.npz", model="tree"
    )
    state = experiment.run.init()
    draw = np.random.default_rng(20).normal
    state = state._replace(
        params=jax.tree.map(lambda a: jnp.asarray(draw(size=a.shape), a.dtype), state.params)
    )
    models.save(folder / "digits", 1, state, experiment.record)
    return folder / "digits"


def write_automaton(folder: Path, *, channels: int = 1, **fields: Any) -> Path:
    """Write the run of an automaton whose gates are random; return its folder."""
    options = {
        "runs": 1,
        "kernels": 2,
        "perception": (8, 2),
        "update": (12, 6, channels),
        "channels": channels,
        **fields,
    }
    experiment = Automaton.new(options, "life" if channels == 1 else "checkerboard")
    state = experiment.run.init()
    gates = np.random.default_rng(7).choice([1, 6, 7, 9, 14], state.params["logits"].shape[1])
    params = {"logits": jnp.eye(16)[:, gates]}
    state = state._replace(params=params, optimizer=state.optimizer._replace(best=params))
    models.save(folder / "run", 1, state, experiment.record)
    return folder / "run"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs, and the folders that they were exported to. Not to be changed."""
    found = {}
    for kind in ("digits", "automaton"):
        folder = tmp_path_factory.mktemp(kind)
        run = write_classifier(folder, *images()) if kind == "digits" else write_automaton(folder)
        registers = 3 if kind == "digits" else 0
        result = command("export", "--run", run, "--out", folder / "out", "--registers", registers)
        assert result.exit_code == 0, result.output
        assert f"lutjax verify {folder / 'out'}" in result.output
        found |= {f"{kind} run": run, kind: folder / "out"}
    return found


@pytest.mark.parametrize("kind", [slow("digits"), "automaton"])
def test_export_writes_every_format(kind: str, folders: dict[str, Path]) -> None:
    folder = folders[kind]
    endings = (
        ".v",
        "_testbench.v",
        ".blif",
        ".aig",
        ".aag",
        ".json",
        "_alkaid.json",
        ".c",
        ".h",
        "_test.c",
        ".html",
        ".dot",
    )
    names = {f"{kind}{ending}" for ending in endings} | {VECTORS, "Makefile"}
    assert {path.name for path in folder.iterdir()} == names | {MANIFEST}
    manifest = deployment.read_manifest(folder)
    assert set(manifest["files"]) == names
    assert manifest["run"]["folder"] == str(folders[f"{kind} run"].absolute())
    registers = 3 if kind == "digits" else 0
    assert manifest["registers"] == registers
    circuit = circuits.netlist_json.read((folder / f"{kind}.json").read_text())
    assert manifest["inputs"] == deployment.interface(circuit.inputs)
    assert manifest["statistics"]["gates"] == len(circuit) > 5
    assert manifest["latency"] == (-(-circuit.depth // 3) if registers else 0)
    vectors = Vectors.from_json((folder / VECTORS).read_text())
    assert len(vectors) == (10 if kind == "digits" else 512)
    assert len(np.unique(vectors.outputs["y"])) > 1


@pytest.mark.parametrize("kind", ["digits", slow("automaton")])
def test_every_proof_of_an_export_passes(kind: str, folders: dict[str, Path]) -> None:
    result = command("verify", folders[kind])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[-1].startswith(f"{sum(line.startswith('PASS') for line in lines)} passed, 0 failed")
    for name in ("digests", f"{kind}.json in NumPy = {VECTORS}", "the model in JAX", f"{kind}.aag in NumPy"):
        assert any(line.startswith("PASS") and name in line for line in lines), name
    if kind == "automaton":
        assert any("all 2^9 inputs" in line for line in lines)
        assert "the Game of Life" not in result.output  # its gates are random


# ------------------------------------------------------------------------------------- what proofs find
def with_a_flipped_entry(folder: Path, name: str) -> Circuit:
    """Return the circuit of an export with one entry of one table flipped, so that an answer to a vector changes."""
    circuit = circuits.netlist_json.read((folder / f"{name}.json").read_text())
    vectors = Vectors.from_json((folder / VECTORS).read_text())
    inputs = [vectors.inputs[port.name] for port in circuit.inputs]
    for gate, table in enumerate(circuit.tables):
        for entry in range(1 << len(circuit.fanins[gate])):
            tables = (*circuit.tables[:gate], table ^ 1 << entry, *circuit.tables[gate + 1 :])
            changed = dataclasses.replace(circuit, tables=tables)
            found = deployment.evaluated(changed, inputs)
            if any((found[port] != answers).any() for port, answers in vectors.outputs.items()):
                return changed
    raise AssertionError("no entry matters")


def replaced(folder: Path, target: Path, contents: dict[str, bytes]) -> Path:
    """Copy an export with other contents of some files, of which its manifest knows."""
    shutil.copytree(folder, target)
    manifest = deployment.read_manifest(folder)
    files = {
        name: (facts["format"], (folder / name).read_bytes()) for name, facts in manifest["files"].items()
    }
    files |= {name: (files[name][0], content) for name, content in contents.items()}
    known = deployment.manifest_of("circuit", files, {}, None)["files"]
    for name, content in contents.items():
        (target / name).write_bytes(content)
    (target / MANIFEST).write_text(json.dumps({**manifest, "files": known}))
    return target


def failures(folder: Path, words: tuple[str, ...] = ("",), needed: str | None = None) -> set[str]:
    """Return the names of the checks that fail, of those whose names have one of these words.

    Checks that cannot be made here are left out; without the needed one the test is skipped.
    """
    failed = set()
    for name, run, _ in proofs.checks_of(folder, deployment.read_manifest(folder), exporting.oracle):
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


@pytest.mark.parametrize(
    ("name", "where", "required"),
    [
        ("digits.blif", "digits.blif in NumPy = digits.json", ()),
        ("digits.aig", "digits.aig in NumPy = digits.json", ()),
        ("digits.aag", "digits.aag in NumPy = digits.json", ()),
        ("digits_alkaid.json", "digits_alkaid.json in NumPy = digits.json", ()),
        ("digits.c", "C, compiled = vectors.json", ("cc",)),
        ("digits.v", "Verilog, simulated = vectors.json", ("iverilog",)),
        ("digits.html", "digits.html, its script = vectors.json", ("node",)),
        ("digits.blif", "digits.blif = digits.json, by ABC", ("abc",)),
        ("digits.aig", "digits.aig = digits.json, by ABC", ("abc",)),
        ("automaton.v", "automaton.v = automaton.json, by ABC", ("abc", "yosys")),
    ],
)
def test_a_flipped_entry_is_found(
    name: str, where: str, required: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    for tool in required:
        require_tool(tool)
    kind = name.partition(".")[0].partition("_")[0]
    folder = folders[kind]
    changed = with_a_flipped_entry(folder, kind)
    vectors = Vectors.from_json((folder / VECTORS).read_text())
    manifest = deployment.read_manifest(folder)
    format = manifest["files"][name]["format"]
    options = deployment.Options((format,), kind, registers=manifest["registers"])
    content = deployment.FORMATS[format](deployment.Request(changed, vectors, options))[name]
    content = content if isinstance(content, bytes) else content.encode()
    assert content != (folder / name).read_bytes()
    found = failures(replaced(folder, tmp_path / "out", {name: content}), (where, *IN_NUMPY), needed=where)
    in_numpy = (
        {f"{name} in NumPy = {kind}.json"}
        if Path(name).suffix in (".blif", ".aig", ".aag", ".html", ".json")
        else set()
    )
    assert found == {where, *in_numpy}


def test_a_flipped_entry_of_the_circuit_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    changed = circuits.netlist_json.write(with_a_flipped_entry(folders["digits"], "digits")).encode()
    found = failures(replaced(folders["digits"], tmp_path / "out", {"digits.json": changed}), IN_NUMPY)
    ends = (".blif", ".aig", ".aag", ".html", "_alkaid.json")
    others = {f"digits{end} in NumPy = digits.json" for end in ends}
    assert found == {"digits.json in NumPy = vectors.json", "digits.json = the model in JAX", *others}


def test_a_wrong_answer_among_the_vectors_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["automaton"]
    vectors = Vectors.from_json((folder / VECTORS).read_text())
    vectors.outputs["y"][77] ^= 1
    text = vectors.to_json().encode()
    found = failures(replaced(folder, tmp_path / "out", {VECTORS: text}), IN_NUMPY)
    assert found == {"automaton.json in NumPy = vectors.json"}


def test_a_changed_byte_of_any_file_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    manifest = deployment.read_manifest(folders["automaton"])
    for name in manifest["files"]:
        folder = shutil.copytree(folders["automaton"], tmp_path / name)
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        digests = proofs.checks_of(folder, manifest, None)[0]
        with pytest.raises(proofs.FailedError, match=f"{name} is not what was written"):
            digests.run()
        (folder / name).unlink()
        with pytest.raises(proofs.FailedError, match=f"{name} is missing"):
            digests.run()


def test_a_failed_proof_is_the_status_of_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["automaton"], tmp_path / "out")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / "automaton.dot").write_text("digraph {}")
    # Only what needs no tool, to be quick.
    kept = {
        name: facts
        for name, facts in manifest["files"].items()
        if facts["format"] in ("json", "vectors", "dot", "make")
    }
    for name in set(manifest["files"]) - set(kept):
        (folder / name).unlink()
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": kept}))
    result = command("verify", folder)
    assert result.exit_code == 1
    assert "FAIL     digests of all files" in result.output
    assert "3 passed, 1 failed, 0 skipped" in result.output
    assert (
        "4 files: 2 proved; 1 failed (automaton.dot); 1 compared with its digest alone (Makefile)."
        in result.output
    )


def test_proofs_without_the_run_are_skipped(folders: dict[str, Path], tmp_path: Path) -> None:
    manifest = deployment.read_manifest(folders["automaton"])
    with pytest.raises(proofs.SkippedError, match="the model is not in"):
        exporting.oracle({**manifest, "run": {**manifest["run"], "folder": str(tmp_path / "moved")}})
    with pytest.raises(proofs.SkippedError, match="is not that of step 1"):
        exporting.oracle({**manifest, "run": {**manifest["run"], "digest": "0"}})
    with pytest.raises(proofs.SkippedError, match="is not that of step 1"):
        exporting.oracle(manifest, folders["digits run"])


def test_programs_that_cannot_be_run_prove_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder that is mounted noexec, and tools of another machine."""
    # Writes a file that may not be run, as every file of such a folder.
    compiler = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    for name in ("gcc", "node", "iverilog", "vvp", "abc"):
        (tmp_path / name).write_text(compiler if name == "gcc" else "no program", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    monkeypatch.setattr(abc, "find", lambda: str(tmp_path / "abc"))
    found = {proof.name: proof for proof in proofs.verify(folders["automaton"])}
    refused = {name: proof.detail for name, proof in found.items() if proof.passed is None}
    noexec = (
        f"no program can be run in {tempfile.gettempdir()}; set TMPDIR to a folder that is not mounted noexec"
    )
    assert refused == {
        "C, compiled = vectors.json": noexec,
        **{
            name: f"{tmp_path / tool} cannot be run: {os.strerror(errno.ENOEXEC)}"
            for name, tool in (
                ("Verilog, simulated = vectors.json", "iverilog"),
                ("automaton.html, its script = vectors.json", "node"),
                ("automaton.blif = automaton.json, by ABC", "abc"),
                ("automaton.aig = automaton.json, by ABC", "abc"),
                ("automaton_alkaid.json = automaton.json, by ABC", "abc"),
                ("automaton.v = automaton.json, by ABC", "abc"),
            )
        },
    } | (
        {}
        if importlib.util.find_spec("pyosys")
        else {"automaton.v = automaton.json, by ABC": "pyosys is not installed"}
    )
    assert all(proof.passed for name, proof in found.items() if name not in refused)


def test_the_rule_of_life_is_proved() -> None:
    boards = (np.arange(512)[:, None] >> np.arange(9) & 1).astype(np.uint8)
    assert proofs.life(boards).sum() == 140  # 56 neighborhoods of three, dead or alive, and 28 of two, alive
    builder = circuits.Builder()
    bits = [number[0] for number in builder.input("x", 9)]
    votes = circuits.arithmetic.popcount(builder, bits[:8])
    two_or_three = builder.gate([votes[1], votes[2], votes[3]], 0b00000010)
    builder.output("y", [[builder.gate([two_or_three, votes[0], bits[8]], 0b10101000)]])
    circuit = builder.circuit()
    np.testing.assert_array_equal(deployment.evaluated(circuit, [boards])["y"], proofs.life(boards))


# ------------------------------------------------------------------------------------- what export refuses
@pytest.mark.slow
def test_export_refuses_what_is_not_exact(tmp_path: Path) -> None:
    x, y = images()
    floats = write_classifier(tmp_path, x / 3, y)

    def export(*words: object) -> Result:
        return command("export", "--run", floats, "--out", tmp_path / "out", *words)

    for words, expected in (
        (
            (),
            "a circuit has no floating-point numbers: name a fixed-point format by --inputs, such as fixed12.4",
        ),
        (("--inputs", "float32"), "a circuit has no floating-point numbers"),
        (("--inputs", "uint1"), "inputs is uint1, which has numbers from 0 to 1; the samples"),
        (("--inputs", "fixed8"), "text is 'fixed8'"),
    ):
        result = export(*words)
        assert result.exit_code == 1
        assert expected in message(result), result.output
        assert not (tmp_path / "out").exists()
    result = export("--inputs", "fixed12.4", "--outputs", "votes", "--format", "blif,dot", "--name", "vote")
    assert result.exit_code == 0, result.output
    assert "numbers of the test part are rounded to fixed12.4" in message(result)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("vote.json", "vote.blif", "vote.dot"),
        *(VECTORS, MANIFEST, "Makefile"),
    }
    assert not failures(tmp_path / "out")
    vectors = Vectors.from_json((tmp_path / "out" / VECTORS).read_text())
    assert vectors.outputs["y"].shape == (10, 3)
    assert (vectors.inputs["x"] * 16 % 1 == 0).all()
    result = export("--inputs", "bits", "--outputs", "bits", "--format", "json")
    assert "The export that was in" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "digits.json",
        VECTORS,
        MANIFEST,
        "Makefile",
    }
    assert not failures(tmp_path / "out")


def test_export_refuses_other_models(folders: dict[str, Path], tmp_path: Path) -> None:
    drifting = write_automaton(tmp_path, channels=2, update_rate=0.5)
    for run, words, expected in (
        (drifting, (), "update_rate is 0.5"),
        (folders["automaton run"], ("--inputs", "uint8"), "inputs is 'uint8'"),
        (
            folders["digits run"],
            ("--format", "edif"),
            "Invalid value for '--format': 'edif' is not one of verilog, blif",
        ),
        (folders["digits run"], ("--name", "module"), "name is 'module'; it is a keyword of Verilog"),
        (folders["digits"], (), "holds no checkpoint"),
        (tmp_path / "none", (), "does not exist"),
    ):
        result = command("export", "--run", run, "--out", tmp_path / "out", *words)
        assert result.exit_code
        assert expected in message(result), result.output


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A run of trees, and its images of two channels."""
    x, y = images()
    x = np.pad(x, ((0, 0), (1, 1), (0, 1)))
    x = np.stack([x, x[:, ::-1] // 2], -1)
    return write_trees(tmp_path_factory.mktemp("trees"), x, y), x


@pytest.mark.slow
def test_trees_are_exported(trees: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    run, _ = trees
    out = tmp_path / "out"
    result = command("export", "--run", run, "--out", out, "--format", "c,verilog")
    assert result.exit_code == 0, result.output
    vectors = Vectors.from_json((out / VECTORS).read_text())
    assert len(np.unique(vectors.outputs["y"])) == 3
    assert not failures(out)
    circuit = circuits.netlist_json.read((out / "digits.json").read_text())
    assert [name for name, _ in circuit.parts] == ["encoder", "layer 1", "layer 2", "votes", "argmax"]
    assert circuit.inputs[0].count == 32


@pytest.mark.slow
def test_circuits_of_trees_from_numbers_and_from_bits(trees: tuple[Path, np.ndarray]) -> None:
    """Rows, columns and channels in the orders that `LogicTreeNet.circuit` names: those of the model itself."""
    run, x = trees
    model = lutjax.load(run)
    logits = nnx.jit(lambda model, x: model(x, deterministic=True))(model, jnp.asarray(x, jnp.float32))
    votes = np.round(np.asarray(logits) * model.config.tau)
    of_numbers = model.circuit(inputs="uint8", outputs="bits")(x.reshape(len(x), -1))
    np.testing.assert_array_equal(of_numbers.reshape(len(x), 3, -1).sum(-1), votes)
    bits = (x[..., None] > np.asarray(model.encoder.thresholds[...])).transpose(0, 3, 4, 1, 2)
    of_bits = exporting.source_of(run, inputs="bits", outputs="votes")
    np.testing.assert_array_equal(of_bits.circuit(bits.reshape(len(x), -1).astype(np.uint8)), votes)
    np.testing.assert_array_equal(of_bits.circuit(of_bits.samples), of_bits.answer(of_bits.samples))


def test_a_network_with_too_many_places_is_not_exported(
    trees: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MOST_GATES", 100)
    result = command("export", "--run", trees[0], "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "36 trained gates, which are 216 with those of trees at each place" in message(result)
    assert "more than 100 no circuit is written. Train fewer trees (--kernels)" in message(result)


@pytest.mark.slow
def test_trees_from_training_to_every_format(tmp_path: Path) -> None:
    """Digits of 8 x 8 pixels, by the command line; proved by the tools that are here."""
    out = tmp_path / "trees"
    sizes = ("--kernels", "8,16", "--layers", "160,80", "--tau", 2, "--n-thresholds", 1)
    result = command(
        "train", "classify", "--model", "tree", *sizes, "--steps", 300, "--learning-rate", 0.05, "--out", out
    )
    assert result.exit_code == 0, result.output
    result = command("export", "--run", out)
    assert result.exit_code == 0, result.output
    manifest = deployment.read_manifest(out / "circuit")
    assert manifest["about"]["image"] == [8, 8]
    vectors = Vectors.from_json((out / "circuit" / VECTORS).read_text())
    assert len(np.unique(vectors.outputs["y"])) == 10
    result = command("verify", out / "circuit")
    assert result.exit_code == 0, result.output
    assert " 0 failed" in result.output


def test_nothing_is_lost_by_an_export(folders: dict[str, Path], tmp_path: Path) -> None:
    def export(out: Path) -> str:
        result = command("export", "--run", folders["automaton run"], "--out", out, "--format", "json")
        assert result.exit_code == 1
        return message(result)

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plan.txt").write_text("mine")
    assert "holds files that are no export, such as plan.txt" in export(tmp_path / "notes")
    assert "is a file; choose another folder" in export(tmp_path / "notes" / "plan.txt")
    mixed = shutil.copytree(folders["automaton"], tmp_path / "mixed")
    (mixed / "build").mkdir()
    (mixed / "mine.v").write_text("")
    assert "an export and other files, such as mine.v" in export(mixed)
    assert (mixed / "automaton.v").exists()
    result = command("verify", tmp_path / "notes")
    assert result.exit_code == 1
    assert "is no export: it has no manifest.json" in message(result)
    (mixed / MANIFEST).write_text("{")
    assert "is damaged" in message(command("verify", mixed))


def test_a_failed_write_leaves_the_export_before_it(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folders["automaton"], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        deployment.write(folder, {"a": ("json", b"")}, {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ------------------------------------------------------------------------------------- a cost of gates
TRAINING = classifier.TrainingConfig(steps=30, batch_size=20, learning_rate=0.1)
CONFIG = LogicClassifierConfig(6, 3, layers=(30, 30), n_thresholds=2)


def run_of(**fields: Any) -> classifier.Run:
    return classifier.Run(CONFIG, dataclasses.replace(TRAINING, **fields), samples(*images(), name="images"))


def test_without_a_cost_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: object, temperature: object) -> None:
        raise AssertionError

    monkeypatch.setattr(classifier, "expected_gates", refuse)
    data = (np.ones((20, 6), np.float32), np.ones(20, np.int32))
    for cost in (0.0, 0.1):
        run = run_of(gate_cost=cost)
        with pytest.raises(AssertionError) if cost else contextlib.nullcontext():
            jax.eval_shape(run.step, run.abstract(), jnp.int32(0), data)


@pytest.mark.slow
def test_a_cost_of_gates_makes_circuits_smaller() -> None:
    found = {}
    for cost in (0.0, 5.0):
        run = run_of(gate_cost=cost)
        first = run.init()
        expected = float(classifier.expected_gates(run.structure.model(first.params, first.others)))
        state, loss = run.advance(run.init(), 0, 1)
        found[cost, "loss"] = float(loss)
        state, _ = run.advance(state, 1, 29)
        model = run.structure.model(state.params, state.others)
        found[cost, "expected"] = float(classifier.expected_gates(model))
        found[cost, "circuit"] = len(circuits.from_model(model, inputs="bits", outputs="votes"))
    assert found[5.0, "loss"] == pytest.approx(found[0.0, "loss"] + 5.0 * expected / 1000, rel=1e-5)
    assert found[5.0, "expected"] < 0.8 * found[0.0, "expected"]
    assert found[5.0, "circuit"] < 0.9 * found[0.0, "circuit"]


def test_expected_gates_of_a_sure_network_are_those_that_it_needs() -> None:
    run = run_of()
    params, others = run.structure.init(0)
    sure = jax.tree.map(lambda logits: 1e5 * logits, params)
    packed = run.structure.model(sure, others).packed()
    needs = []
    for truth in map(np.asarray, packed.truth):
        a = (truth[:, [0, 2]] != truth[:, [1, 3]]).any(1)
        b = (truth[:, [0, 1]] != truth[:, [2, 3]]).any(1)
        needs.append(a.astype(int) + b)
    gates = sum(int((n == 2).sum()) for n in needs) + int((needs[-1] > 0).sum())
    assert float(classifier.expected_gates(run.structure.model(sure, others))) == pytest.approx(
        gates, abs=0.01
    )


def test_tests_of_a_run_with_a_cost_say_how_many_gates_survive(tmp_path: Path) -> None:
    x, y = images()
    np.savez(tmp_path / "digits.npz", x=x, y=y)
    fields = {"layers": (30, 30), "n_thresholds": 2}
    for cost in (0.0, 0.5):
        experiment = Classifier.new({**fields, "gate_cost": cost}, tmp_path / "digits.npz")
        state = experiment.run.init()
        remark = experiment.remark(state)
        if not cost:
            assert remark == ""
            continue
        n_gates = len(
            circuits.from_model(experiment.run.structure.model(state.params, state.others), outputs="bits")
        )
        assert remark.endswith(f"gates that survive {n_gates}")
    with pytest.raises(ValueError, match="gate_cost is -1; it must not be negative"):
        dataclasses.replace(TRAINING, gate_cost=-1)


# ------------------------------------------------------------------------------------- the commands
def test_a_stopped_verify_says_what_was_done(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proofs, "evaluated", stop)
    result = command("verify", folders["automaton"])
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == "Stopped after 2 proofs."


def test_language_models_are_programs_alone(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting.runs, "kind", lambda folder: "lm")
    for words, expected in (
        (("--format", "verilog"), "it is exported as c, not as verilog"),
        (("--registers", 2), "which has no option --registers"),
    ):
        result = command("export", "--run", folders["automaton run"], "--out", tmp_path / "out", *words)
        assert result.exit_code == 1
        assert expected in message(result)


def test_circuits_have_no_tables_of_integers(folders: dict[str, Path], tmp_path: Path) -> None:
    words = ("--run", folders["automaton run"], "--out", tmp_path / "out", "--integers", "int8")
    result = command("export", *words)
    assert result.exit_code == 1
    assert "leave --integers out" in message(result)


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["ands", "gates", "lut6"])
def test_an_optimized_export_is_proved(goal: str, folders: dict[str, Path], tmp_path: Path) -> None:
    require_tool("abc")
    run, out = folders["automaton run"], tmp_path / "out"
    result = command("export", "--run", run, "--out", out, "--optimize", goal, "--format", "blif")
    assert result.exit_code == 0, result.output
    before, after = (
        circuits.netlist_json.read((f / "automaton.json").read_text()) for f in (folders["automaton"], out)
    )
    sizes = [
        {"ands": circuits.statistics.of(c, lut6=False).ands, "gates": len(ands.operations(c)[0])}.get(
            goal, len(c)
        )
        for c in (before, after)
    ]
    assert sizes[1] <= sizes[0]
    assert max(map(len, after.fanins)) <= (6 if goal == "lut6" else 2)
    found = proofs.verify(out, oracle=exporting.oracle)
    assert [proof.passed for proof in found] == [True] * 6, found


def test_the_table_of_the_page_is_that_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import circuits as benchmark

    assert benchmark.table(benchmark.read(benchmark.ROWS)) in pages.read(
        ROOT / "docs" / "appendix" / "circuits.md"
    )


@pytest.mark.slow
def test_life_from_training_to_a_proved_circuit(tmp_path: Path) -> None:
    out, circuit = tmp_path / "run", tmp_path / "circuit"
    assert command("train", "ca", "--out", out, "--no-pictures").exit_code == 0
    words = () if tools.missing("abc") else ("--optimize", "ands")
    assert command("export", "--run", out, "--out", circuit, *words).exit_code == 0
    found = proofs.verify(circuit, oracle=exporting.oracle)
    assert not [proof for proof in found if proof.passed is False]
    assert any(proof.passed and "the Game of Life" in proof.name for proof in found)
    if words:
        assert deployment.read_manifest(circuit)["statistics"]["ands"] <= 45


@pytest.mark.slow
def test_a_language_model_becomes_a_program(tmp_path: Path) -> None:
    require_tool("cc")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    sizes = ("--features=8", "--context=8", "--n-layers=1", "--n-detectors=4", "--n-anchors=3")
    more = ("--ffn-detectors=4", "--ffn-anchors=3", "--batch-size=4", "--steps=2")
    words = ("--text", tmp_path / "text", "--out", tmp_path / "run", *sizes, *more)
    assert command("train", "lm", "--model", "lut", *words).exit_code == 0
    for tables in ("int8", "int16"):  # the second in the place of the first, and of what make has written
        words = ("--run", tmp_path / "run", "--out", tmp_path / "out", "--integers", tables)
        result = command("export", *words)
        assert result.exit_code == 0, result.output
        (tmp_path / "out" / "language_model").write_text("compiled")
    assert [proof.passed for proof in proofs.verify(tmp_path / "out")] == [True, True]
    tables = (tmp_path / "out" / "tables.c").read_text()
    changed = tables.replace(" 0,", " 1,", 1).encode()
    assert changed != tables.encode()
    (tmp_path / "out" / "tables.c").write_bytes(changed)
    assert next(proof.passed for proof in proofs.verify(tmp_path / "out")) is False

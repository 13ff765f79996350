"""Overwrite checks: commands replace only their own output."""

import shutil

import pytest
from commands import refusal
from example_circuits import life_circuit
from exports import write
from folders import contents

from lutjax.circuits import c, deployment
from lutjax.circuits.deployment import MANIFEST
from lutjax.cli import _measuring, _status
from lutjax.files import atomic as _files
from lutjax.status import matrix as _matrix, report as _report, results as _records
from lutjax.training import checkpoints, experiments, quantize, runs
from lutjax.training.automaton_runs import Automaton
from lutjax.training.classifier_runs import Classifier
from lutjax.training.errors import InUseError, RunError
from lutjax.training.lm_runs import LanguageModel

KINDS = {"digits": Classifier, "classify": Classifier, "lm": LanguageModel, "ca": Automaton}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_writes_over_nothing(kind, tmp_path):
    for name in (
        *KINDS[kind].files,
        *["curves.csv", "finished.json", "checkpoints", "checkpoints/notes.txt", ".lock"],
    ):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
        (folder / "others.txt").write_text("mine, too")
        before = contents(folder)
        said = refusal("train", kind, "--out", folder, "--steps", 1, "--log-every", 0)
        assert f"holds no run, but a run would overwrite {name}" in said
        assert contents(folder) == before
    stopped = tmp_path / "stopped"  # what a stopped run left is no obstacle
    (stopped / "checkpoints" / ".50.tmp" / "model").mkdir(parents=True)
    with runs.lock(stopped):
        pass
    (stopped / "notes.txt").write_text("mine")
    experiments.check_new(stopped, KINDS[kind])


def test_locks_and_checkpoints_leave_what_they_did_not_write(tmp_path):
    (tmp_path / ".lock").write_text("of my editor")
    with pytest.raises(InUseError, match="is not a lutjax lock file"), runs.lock(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "of my editor"
    (tmp_path / ".lock").unlink()
    others = (".notes.tmp", "best.damaged", "notes")
    for name in others:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, step, {}, {})
    assert {path.name for path in tmp_path.iterdir()} == {*others, "2", "3"}
    assert [path.name for path in checkpoints.foreign_entries(tmp_path)] == sorted(others)


@pytest.mark.parametrize(
    "name", ["build/notes.txt", "build/life_test/notes.txt", "notes/", "build", "life.v", ".hidden"]
)
def test_files_beside_an_export_are_not_lost(name, tmp_path):
    folder = tmp_path / "out"
    write(folder)
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        place.mkdir()
    else:
        place.write_text("mine")
    before = contents(folder)
    with pytest.raises(
        deployment.DeploymentError, match=f"and other files, such as {name}, which would be"
    ):
        write(folder)
    assert contents(folder) == before


def test_what_make_made_goes_with_its_export(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    folder = tmp_path / "out"
    write(folder)
    (folder / "life.dot").write_text("digraph mine {}")
    with pytest.raises(deployment.DeploymentError, match=r"with changes to life.dot, which would"):
        write(folder)
    assert (folder / "life.dot").read_text() == "digraph mine {}"
    for name in ("life_test", "life.vvp", "verilog.log"):
        (folder / "build").mkdir(exist_ok=True)
        (folder / "build" / name).write_text("")
    (folder / "life.dot").unlink()
    write(folder, "again")
    files = {"again.json", "again.dot", "vectors.json", "Makefile", MANIFEST}
    assert {path.name for path in folder.iterdir()} == files
    (folder / "build").mkdir()
    write(folder)
    assert (tmp_path / "real" / "life.dot").is_file()
    assert folder.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vectors", "name is 'vectors', but exports use vectors.json"),
        ("manifest", "name is 'manifest', but exports use manifest.json"),
        (
            "Manifest",
            "name is 'Manifest', but exports use Manifest.json",
        ),  # one file on some disks
        ("stdint", "c.write: --name is 'stdint'"),
        ("_x", "c.write: --name is '_x'"),
        ("int", "name is 'int'; it is a keyword of Verilog"),
        ("a b", "a name has letters, digits and underscores"),
    ],
)
def test_names_that_make_two_files_of_one(name, reason, tmp_path):
    assert reason in refusal("export", "--run", tmp_path / "none", "--name", name)
    ports = (deployment.Port("predict", 9), deployment.Port("y"))
    with pytest.raises(ValueError, match="name is 'input', which uses 'input_predict' twice"):
        c.check_name("input", ports)
    c.check_name("circuit", ports)
    assert c.write(life_circuit(), "input")


def test_every_format_has_its_names(tmp_path):
    write(tmp_path / "out", "some_test", ())
    manifest = deployment.read_manifest(tmp_path / "out")
    own = {deployment.MAKEFILE: "make", deployment.VECTORS: "vectors"}
    named = {
        f"some_test{end}": format
        for format, files in deployment.FORMATS.items()
        for end in files.endings
    }
    assert {name: facts["format"] for name, facts in manifest["files"].items()} == {**own, **named}


def test_a_deployed_model_replaces_one_alone(tmp_path):
    quantize.check_place(tmp_path / "none")
    folder = tmp_path / "quantized"
    checkpoints.save(folder / "checkpoints", 3, {}, {})
    with runs.lock(folder):
        pass
    quantize.check_place(folder)
    for name in ("notes.txt", "checkpoints/notes.txt", "checkpoints/3/notes.txt"):
        (folder / name).write_text("mine")
        with pytest.raises(
            RunError, match=f"holds {name}, which does not belong to a deployed model"
        ):
            quantize.check_place(folder)
        (folder / name).unlink()
    shutil.rmtree(folder)
    folder.write_text("mine")
    with pytest.raises(RunError, match="is no folder, and would be replaced"):
        quantize.check_place(folder)


@pytest.mark.parametrize("words", [
    "bench --shape fc:8,8,8,2,8 --csv",
    "bench --shape fc:8,8,8,2,8 --markdown",
    "bench --shape fc:8,8,8,2,8 --png",
    "status --recorded --markdown",
    "status --op packed_lut --record",
    "tune --update --output",
    "tune --output",
])  # fmt: skip
def test_files_of_others_are_refused(words, tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    said = refusal(*words.split(), path)
    assert "notes' exists" in said or "notes is not JSON" in said, said
    assert path.read_text() == "mine"


def test_own_files_are_written_again(tmp_path):
    page, record, empty = tmp_path / "status.md", tmp_path / "record.json", tmp_path / "empty"
    page.write_text(_report.markdown([]))
    _records.write(
        [_matrix.Cell("lut", "forward", "xla/cpu", "float32", _matrix.State.RUNS, jax="1")],
        record,
        "cpu",
    )
    empty.touch()
    _measuring.check_file("--markdown", page, _status.MARKS["--markdown"])
    for path in (record, empty, tmp_path / "new"):
        _measuring.check_file("--record", path, _status.MARKS["--record"])


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "no folder" / "réponses.csv"
    with pytest.raises(FileNotFoundError) as result, _files.write_atomically(path) as unfinished:
        unfinished.write_text("x")
    assert result.value.filename == str(path)

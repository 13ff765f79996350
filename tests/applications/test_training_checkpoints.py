"""Checkpoints: restored completely or rejected."""

import errno
import json
import subprocess

import jax
import numpy as np
import pytest

from lutjax.training import automaton, checkpoints, lm_runs, runs
from lutjax.training.errors import CheckpointError, DamagedError

TREES = {
    "model": {"layers": {0: {"weights": np.ones((4, 3), np.float32),
        "anchors": np.arange(6, dtype=np.int32)}}},
    "optimizer": (np.int32(3), [np.zeros((4, 1), np.float32)]),
}  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    checkpoints.save(directory, 5, TREES, {"name": "first"})
    checkpoints.save(directory, 10, TREES, {"name": "second"})
    return directory


def test_round_trip(directory):
    step, meta = checkpoints.read_meta(directory)
    assert (step, meta) == (10, {"name": "second"})
    assert checkpoints.read_meta(directory, 5) == (5, {"name": "first"})
    for name, tree in TREES.items():
        abstract = jax.eval_shape(lambda tree=tree: tree)
        restored = checkpoints.restore(directory, step, name, abstract)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored, tree))


def test_a_directory_is_a_path_or_its_text(tmp_path):
    text = str(tmp_path / "of text")
    checkpoints.save(text, 5, TREES, {"name": "first"})
    assert checkpoints.steps(text) == [5]
    assert checkpoints.read_meta(text) == (5, checkpoints.peek(text)[1])
    name, tree = next(iter(TREES.items()))
    assert jax.tree.structure(checkpoints.restore(text, 5, name, tree)) == jax.tree.structure(tree)


def test_the_last_ones_stay_and_nothing_else(directory):
    (directory / ".15.tmp").mkdir()  # of a run that was killed while it wrote
    checkpoints.save(directory, 20, TREES, {})
    assert checkpoints.steps(directory) == [10, 20]
    assert sorted(p.name for p in directory.iterdir()) == ["10", "20"]


def test_never_overwritten(directory):
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpoints.save(directory, 10, TREES, {})


def test_a_damaged_one_is_written_again(directory):
    (directory / "10" / "checkpoint.json").unlink()
    checkpoints.save(directory, 10, TREES, {"name": "again"})
    assert checkpoints.read_meta(directory) == (10, {"name": "again"})
    assert sorted(p.name for p in directory.iterdir()) == ["10", "5"]
    checkpoints.set_aside(directory, 10)
    assert checkpoints.steps(directory) == [5]
    assert (directory / "10.damaged").exists()  # until the next one is complete
    checkpoints.save(directory, 7, TREES, {})
    assert sorted(p.name for p in directory.iterdir()) == ["5", "7"]


def test_all_are_damaged(directory):
    for step in (5, 10):
        (directory / str(step) / "checkpoint.json").write_text("{")
    with pytest.raises(
        DamagedError, match=r"every checkpoint in .*10 is damaged: .*5 is damaged: "
    ):
        checkpoints.read_meta(directory)
    checkpoints.set_aside(directory, 10)
    with pytest.raises(
        DamagedError, match=r"5 is damaged: checkpoint.json is not JSON. There is no other"
    ):
        checkpoints.read_meta(directory)


def test_a_renamed_one_is_not_taken_for_another_step(directory):
    (directory / "10").rename(directory / "11")
    with pytest.raises(CheckpointError, match=r"11 is from step 10: rename it to .*/10"):
        checkpoints.read_meta(directory)


@pytest.mark.parametrize("path", ["missing", "."])
def test_not_a_checkpoint(tmp_path, path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.read_meta(tmp_path / path)


def test_every_damaged_file_is_noticed(directory):
    files = sorted(p for p in (directory / "10").rglob("*") if p.is_file())
    assert len(files) > 6
    for path in files:
        data = path.read_bytes()
        for broken in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1]) if data else b"x"):
            if broken == data:
                continue
            path.write_bytes(broken)
            with pytest.warns(match=r"10 is damaged: .* The one of step 5 takes its place"):
                assert checkpoints.read_meta(directory) == (5, {"name": "first"})
            with pytest.raises(DamagedError, match="10 is damaged"):
                checkpoints.read_meta(directory, 10)
        path.unlink()
        messages = []
        assert checkpoints.read_meta(directory, on_damage=messages.append)[0] == 5
        assert len(messages) == 1
        path.write_bytes(data)
    assert checkpoints.read_meta(directory)[0] == 10


def test_edited_metadata_is_noticed(directory):
    path = directory / "10" / "checkpoint.json"
    content = json.loads(path.read_text())
    content["meta"]["name"] = "third"
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedError, match="has changed since it was written"):
        checkpoints.read_meta(directory, 10)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"weights": np.ones((4, 2), np.float32), "anchors": np.arange(6, dtype=np.int32)}, r"weights is float32\[4, 3\], not float32\[4, 2\]"),
        ({"weights": np.ones((4, 3), np.float32)}, r"anchors is int32\[6\], not missing"),
    ],
)  # fmt: skip
def test_other_arrays(directory, template, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(directory, 10, "model", {"layers": {0: template}})


def test_differences():
    assert checkpoints.differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5}) == [
        "b is 2 in the checkpoint, not 5"
    ]


@pytest.mark.parametrize("kind", runs.KINDS)
def test_the_kind_of_a_run(tmp_path, kind):
    meta = {"lutjax": "0.1", runs.KINDS[kind]: {}, "model": {}}
    for step, more in ((1, {"kind": kind}), (2, {})):  # with, and as older versions wrote it
        checkpoints.save(tmp_path / runs.FOLDER, step, TREES, {**meta, **more})
        assert runs.kind(tmp_path) == kind
        record = next(r for r in (lm_runs.Record, automaton.Record) if r.kind != kind)
        with pytest.raises(CheckpointError, match=f"is a run of {runs.COMMANDS[kind]}, not of"):
            runs.read(tmp_path, record)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*9"):
        checkpoints.restore(tmp_path / runs.FOLDER, 9, "model", {})
    checkpoints.save(tmp_path / runs.FOLDER, 3, TREES, {"kind": "sound"})
    with pytest.raises(
        CheckpointError, match=r"a run of the kind sound; lutjax .* supports lm, digits, ca"
    ):
        runs.kind(tmp_path)


def test_a_full_disk_leaves_whole_checkpoints(tmp_path, caplog, capfd):
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        made = False
    if not (made and tmp_path.is_mount()):
        pytest.skip("mount makes no file system here")
    small, large = ({"model": {"w": np.random.default_rng(0).random(n)}} for n in (100, 10**6))
    try:
        checkpoints.save(tmp_path, 1, small, {})
        with pytest.raises(OSError, match="No space left on device") as refused:
            checkpoints.save(tmp_path, 2, large, {})
        assert refused.value.errno == errno.ENOSPC
        assert "Traceback" not in capfd.readouterr().err + caplog.text
        assert [p.name for p in tmp_path.iterdir()] == ["1"]
        checkpoints.save(tmp_path, 2, small, {})
        assert checkpoints.read_meta(tmp_path)[0] == 2
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)

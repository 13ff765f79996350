"""Complete runs at minimal size: stopped, finished, extended, solved."""

import csv
import dataclasses
import errno
import json
import os
import re
import shutil
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx

from lutjax.training import checkpoints, configs, experiments, loop, models, runs
from lutjax.training.errors import CheckpointError, InUseError, RunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(configs.Training):
    steps: int = 12
    batch_size: int = 1
    learning_rate: float = 0.5
    cooldown: float = 0.0

    def rate(self):
        return self.scheduled(cooldown=self.cooldown)


@dataclasses.dataclass(frozen=True)
class Size:
    features: int = 2


@dataclasses.dataclass
class Record(runs.Record):
    kind: ClassVar[str] = "ca"

    model: Size
    training: Training
    options: dict[str, Any]
    history: runs.History


@dataclasses.dataclass(frozen=True)
class Options(configs.Intervals):
    log_every: int = 2
    eval_every: int = 4
    checkpoint_every: int = 3
    stop_below: float = 0.0
    picture: bool = True


class Weights(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2,)))


class Descent(experiments.Experiment):
    """Experiment with weights converging to zero."""

    configs = configs.Configs(Size, Training, Options)
    kept = Record
    curves = ("training loss", "size")
    ends_early = "--stop-below"

    def __init__(self, record):
        self.record = record
        structure = models.Structure(lambda rngs: Weights(rngs))
        self.run = models.ModelRun(structure, lambda params: (jnp.int32(0),), record.training.seed)
        rate = record.training.rate()

        def step(state, number, data):
            params = jax.tree.map(lambda w: w * (1 - 0.1 * rate(number)), state.params)
            return models.State(params, state.others, (state.optimizer[0] + 1,)), jnp.sum(
                params["w"] ** 2
            )

        self.run.advance = loop.Repeated(step)

    @classmethod
    def create(cls, fields):
        model, training, options = cls.make_configs(fields)
        return cls(Record(model, training, dataclasses.asdict(options), runs.History()))

    @classmethod
    def from_record(cls, record):
        return cls(record)

    def describe(self):
        return f"{self.record.training.steps} steps"

    def evaluate(self, state):
        return float(jnp.abs(state.params["w"]).max())

    def early_stop_reason(self):
        tests = self.record.history.test
        return "small enough" if tests and tests[-1][1] < self.intervals.stop_below else None

    def parts(self):
        picture = experiments.Part("picture.txt", "drawing", self.draw_picture)
        return [
            experiments.Part(
                "test", "testing", lambda state, path: [f"size {self.evaluate(state):.6f}"]
            ),
            *([picture] if self.intervals.picture else []),
            self.curves_part(),
        ]

    def draw_picture(self, state, path):
        path.write_text(str(np.asarray(state.params["w"])))
        return []


class Shown(experiments.Show):
    """Record the output and run a callback at a training loss."""

    def __init__(self, at=None, error=None):
        self.lines = []
        self.at, self.error = at, error

    def line(self, text):
        self.lines.append(text)

    def watchers(self, experiment, done):
        show = self

        class At(experiments.Watcher):
            def training(self, losses):
                if show.at in [done for done, _ in losses]:
                    raise show.error

        return [At()]


def new(steps=12, cooldown=0.0, **options):
    return Descent.create({"steps": steps, "cooldown": cooldown, **options})


def start(folder, show=None, **options):
    show = show or Shown()
    experiments.start(new(**options), folder, show)
    return show.lines


def resume(folder, show=None, **options):
    show = show or Shown()
    experiments.resume(folder, Descent, Descent.from_record, show, **options)
    return show.lines


def state_of(folder):
    step, record = runs.read(folder, Record)
    state = models.restore(folder, step, Descent(record).run)
    return step, np.asarray(state.params["w"]).tobytes(), record.history


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Read-only uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    lines = start(folder)
    assert lines[0].startswith("training 12 steps on ")
    assert (
        lines[-1]
        == f"finished, as all 12 steps are done. In {folder}: checkpoints, picture.txt, curves.csv"
    )
    return folder


class PowerError(Exception):
    """Simulated power failure, raised as an error."""


def test_a_finished_run_is_left_alone(whole):
    step, _, history = state_of(whole)
    with (whole / "curves.csv").open(newline="") as file:
        rows = [(r["kind"], int(r["step"]), float(r["value"])) for r in csv.DictReader(file)]
    curves = (("training loss", history.train), ("size", history.test))
    assert sorted(rows) == sorted((kind, *point) for kind, points in curves for point in points)
    assert (step, len(history.train), len(history.test)) == (12, 6, 3)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    size = next(iter(runs.read_finishing_record(whole).parts["test"][1]))
    for look in (True, False):
        assert resume(whole, look=look)[-1] == f"{whole} is finished: all 12 steps are done. {size}"
    with pytest.raises(InUseError, match="already holds a checkpoint"):
        start(whole)
    for path, time in before.items():
        assert path.name == ".lock" or path.stat().st_mtime_ns == time


@pytest.mark.parametrize("content", [
    b"",
    b"[]",
    b"null",
    b'{"parts": []}',
    b'{"parts": {"a": 1}}',
    b'{"parts": {"a": [1, 2]}}',
    b"[" * 200_000,
])  # fmt: skip
def test_a_damaged_record_of_finishing_is_none(content, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    result = runs.Finished.read(tmp_path / "run")
    content = content.replace(
        b'{"parts"', b'{"digest": "%s", "why": "", "parts"' % result.digest.encode()
    )
    (tmp_path / "run" / "finished.json").write_bytes(content)
    assert runs.Finished.read(tmp_path / "run") is None
    (tmp_path / "run" / "checkpoints" / "12" / "checkpoint.json").write_bytes(b"[" * 200_000)
    with pytest.raises(CheckpointError, match=r"checkpoint.json is not JSON"):
        checkpoints.peek(tmp_path / "run" / "checkpoints")


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", [slow("picture.txt"), "finished.json"])
def test_finishing_goes_on_where_it_was_ended(whole, tmp_path, place):
    folder, replace, seen = tmp_path / "run", os.replace, []

    def end(source, target):
        seen.append(os.path.basename(target))
        if runs.exists(folder) and "12" in os.listdir(folder / "checkpoints") and seen[-1] == place:
            raise PowerError
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", end)
        with pytest.raises(PowerError):
            start(folder)
    lines = resume(folder)
    assert not any("resumed after" in line for line in lines)  # no step is taken again
    assert lines[-1].startswith("finished, as all 12 steps are done")
    assert state_of(folder) == state_of(whole)
    for name in ("picture.txt", "curves.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert runs.read_finishing_record(folder).is_complete(folder)
    (folder / "picture.txt").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Descent, "draw_picture", interrupt)
        with pytest.raises(experiments.StoppedError) as stopped:
            resume(folder)
    assert stopped.value.done == 12
    assert resume(folder)[-1].startswith("finished, as")
    assert (folder / "picture.txt").exists()
    start(tmp_path / "other", picture=False)
    assert not (tmp_path / "other" / "picture.txt").exists()
    resume(tmp_path / "other", options={"picture": True}, look=False)
    assert (tmp_path / "other" / "picture.txt").exists()


def test_steps_after_the_last_checkpoint_are_taken_again(whole, tmp_path):
    with pytest.raises(PowerError):
        start(tmp_path, Shown(at=8, error=PowerError()))
    assert checkpoints.steps(tmp_path / "checkpoints") == [3, 6]
    lines = (tmp_path / "curves.csv").read_text().splitlines()[1:]
    assert {int(line.split(",")[0]) for line in lines} == {2, 4, 6}
    assert any("resumed after 6 steps" in line for line in resume(tmp_path))
    assert state_of(tmp_path) == state_of(whole)


def test_other_options_and_another_length(whole, tmp_path):
    start(tmp_path / "short", steps=6)
    lines = resume(tmp_path / "short", steps=12)
    assert (
        lines[0]
        == "goes on to 12 steps; what is learned is what a run started with --steps 12 learns."
    )
    step, weights, history = state_of(tmp_path / "short")
    assert (step, weights) == state_of(whole)[:2]
    assert history.lengths == [(0, 6), (6, 12)]
    assert (tmp_path / "short" / "picture.txt").read_text() == (whole / "picture.txt").read_text()
    with pytest.raises(RunError, match="steps is 3, but 12 steps are done"):
        resume(tmp_path / "short", steps=3)
    with pytest.raises(CheckpointError, match="features is 2 in the checkpoint, not 5"):
        resume(tmp_path / "short", same={"features": 5})


@pytest.mark.slow
def test_a_schedule_that_depends_on_the_length(tmp_path):
    for steps in (6, 12, 24):
        start(tmp_path / str(steps), steps=steps, cooldown=0.5)
    lines = resume(tmp_path / "6", steps=12)
    assert "2 of them, the first of them step 5, were taken at another rate" in lines[0]
    assert "not that of such a run" in lines[0]
    assert state_of(tmp_path / "6")[1] != state_of(tmp_path / "12")[1]
    # The rates of steps 5 and 6 were never those of a run of 24 steps, though a run of 12 has them.
    with pytest.raises(PowerError):
        resume(tmp_path / "6", Shown(at=14, error=PowerError()), steps=24)
    # Nothing was cooled before it was made longer.
    with pytest.raises(PowerError):
        start(tmp_path / "early", Shown(at=8, error=PowerError()), steps=12, cooldown=0.5)
    lines = resume(tmp_path / "early", steps=24)
    assert "what a run started with --steps 24 learns" in lines[0]
    assert state_of(tmp_path / "early")[:2] == state_of(tmp_path / "24")[:2]


def test_a_run_that_is_solved_ends(whole, tmp_path):
    limit = state_of(whole)[2].test[0][1] + 1e-6
    lines = start(tmp_path / "run", stop_below=limit)
    assert "finished, as small enough after 4 of 12 steps" in lines[-1]
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [3, 4]
    assert "is finished: small enough after 4 of 12 steps" in resume(tmp_path / "run")[-1]
    with pytest.raises(
        RunError,
        match=r"steps is 20, .*--stop-below ended the run early \(small enough\)\. Change that",
    ):
        resume(tmp_path / "run", steps=20)
    # The same where it was ended in between.
    with pytest.raises(PowerError):
        start(tmp_path / "ended", Shown(at=4, error=PowerError()), stop_below=limit)
    resume(tmp_path / "ended")
    assert state_of(tmp_path / "ended") == state_of(tmp_path / "run")
    # Without the rule it goes on, to what it would have been.
    resume(tmp_path / "run", options={"stop_below": 0.0}, look=False)
    assert state_of(tmp_path / "run")[:2] == state_of(whole)[:2]


def test_a_disk_without_room_is_noticed_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3))
    with pytest.raises(OSError, match=r"a checkpoint needs 0\.0 MB, 0\.0 MB are free") as refused:
        start(tmp_path)
    assert refused.value.errno == errno.ENOSPC
    assert not runs.exists(tmp_path)


def test_an_output_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "output.txt"
    path.write_text("old")

    def write():
        with runs.write_atomically(path) as unfinished:
            unfinished.write_text("half")
            assert path.read_text() == "old"
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["output.txt"]
    assert path.read_text() == "old"


def test_a_dry_run_measures_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    show = Shown()
    experiments.dry_run(new(steps=1000), show)
    words = " ".join(show.lines)
    for text in (
        "dry run of training 1000 steps",
        "parameters: 2 (0.0 MB)",
        "memory for training: 0.0 MB",
    ):
        assert text in words
    assert re.search(r"time: [0-9.]+ ms/step, measured in \d+ steps; 1000 steps take \d+ s", words)
    assert not list(tmp_path.iterdir())


def test_folders_are_named_for_what_they_are(whole, tmp_path):
    def refused(folder):
        with pytest.raises(CheckpointError) as error:
            resume(folder)
        return str(error.value)

    parent, run = tmp_path / "all", tmp_path / "all" / "lm0"
    shutil.copytree(whole, run)
    assert refused(tmp_path / "none") == f"{tmp_path / 'none'} does not exist."
    assert refused(parent).endswith(f"holds 1: give {run}.")
    assert refused(run / "checkpoints").endswith(f"is a part of a run: give {run}.")
    assert refused(run / "checkpoints" / "12").endswith(f"is a part of a run: give {run}.")
    assert "is a file" in refused(run / "picture.txt")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(empty) == f"{empty} holds no checkpoint."
    with runs.lock(empty):
        pass
    assert "was stopped before its first one. Start it again" in refused(empty)
    (run / "checkpoints").rename(run / "kept")
    assert refused(run).endswith(f"rename that folder to {run / 'checkpoints'}.")
    assert "is not named 'checkpoints'" in refused(run / "kept")
    assert "is a checkpoint without its run" in refused(run / "kept" / "12")
    (run / "kept").rename(run / "checkpoints")
    shutil.rmtree(run / "checkpoints" / "9")
    (run / "checkpoints" / "12").rename(run / "checkpoints" / "best")
    assert "rename it to the number of its steps" in refused(run)
    (run / "checkpoints" / "best").rename(run / "checkpoints" / "13")
    assert f"is from step 12: rename it to {run / 'checkpoints' / '12'}." in refused(run)
    with pytest.raises(
        CheckpointError, match="is a run of train ca, not of train lm: continue it with"
    ):
        runs.check_kind(whole, "lm")


def sign(path, content):
    path.write_text(json.dumps({**content, "digest": checkpoints._content_digest(content)}))


def test_records_of_older_versions_are_read(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / "checkpoints" / "12" / "checkpoint.json"
    content = json.loads(path.read_text())
    del (
        content["step"],
        content["digest"],
        content["meta"]["kind"],
        content["meta"]["history"]["lengths"],
    )
    content["meta"]["target"] = None  # by which a run of train ca is known
    sign(path, content)
    assert runs.kind(folder) == "ca"
    del content["meta"]["target"]
    content["meta"]["kind"] = "ca"
    sign(path, content)
    assert runs.read(folder, Record)[1].history == state_of(whole)[2]

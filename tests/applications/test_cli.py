"""The command line: training, resuming, generating, and every kind of bad input."""

import dataclasses
import errno
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import kills
import pytest
import small_runs
from click.testing import CliRunner, Result
from commands import command
from folders import contents
from machine import needs_devices

import lutjax
from lutjax import extras as _extras
from lutjax.cli import _generate, _progress, main
from lutjax.cli._huge_pages import restart_with_huge_pages
from lutjax.cli._main import cli
from lutjax.training import lm_runs, loop, runs
from lutjax.training.tensorboard import Events

SIZES = [
    f"--{name}={value}"
    for name, value in {
        "model": "lut",
        "context": 8,
        "features": 8,
        "n-layers": 1,
        "n-heads": 1,
        "n-detectors": 4,
        "n-anchors": 2,
        "n-position-bits": 2,
        "ffn-detectors": 4,
        "ffn-anchors": 3,
        "batch-size": 4,
        # Rates with which 24 steps learn something.
        "table-optimizer": "row_adagrad",
        "optimizer": "row_adagrad",
        "schedule": "constant",
        "learning-rate": 0.03,
        "loss": "mean",
    }.items()
]
STEPS = ["--steps", "24", "--log-every", "1", "--eval-every", "12", "--checkpoint-every", "8"]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run that was never stopped. Not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, command("train", "lm", "--text", text, "--out", out, *SIZES, *STEPS)


def history(out: Path) -> dict:
    (latest,) = sorted((out / "checkpoints").iterdir(), key=lambda p: int(p.name))[-1:]
    return json.loads((latest / "checkpoint.json").read_text())["meta"]["history"]


def test_train(finished: tuple[Path, Result], text: Path) -> None:
    out, result = finished
    assert result.exit_code == 0, result.output
    first, *lines = result.output.splitlines()
    assert f"training on {text} (1,800 bytes)" in first
    assert "24 steps of 4 x 8 bytes on cpu" in first
    assert "bigram baseline" in first
    assert re.fullmatch(r"kernels: (plain JAX|native code, .*,) for .*", lines[0])
    assert result.output.count("kernels: ") == 1
    assert sum(line.startswith("step ") and "kB/s" in line for line in lines) == 24
    assert "test loss" in result.output
    assert f"lutjax generate {out} --prompt" in result.output
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["16", "24"]
    own = {*lm_runs.LanguageModel.files, "checkpoints", "curves.csv", "finished.json", ".lock"}
    assert {path.name for path in out.iterdir()} == own - {"usage.json"}
    losses = history(out)
    assert [step for step, _ in losses["train"]] == list(range(1, 25))
    assert [step for step, _ in losses["test"]] == [12, 24]
    assert losses["train"][-1][1] < losses["train"][0][1] - 0.5


def test_generate(finished: tuple[Path, Result]) -> None:
    words = ("generate", "--checkpoint", finished[0], "--prompt", "the ", "--bytes", 30)
    one, same, other = (command(*words, *more) for more in ((), ("--seed", 0), ("--seed", 1)))
    assert one.exit_code == 0
    assert one.output.startswith("the ")
    assert one.output == same.output != other.output
    likeliest = {
        command(*words, *more).output for more in (("--temperature", 0), ("--top-k", 1, "--seed", 3))
    }
    assert len(likeliest) == 1


def test_generate_writes_bytes_as_they_are(finished: tuple[Path, Result], tmp_path: Path) -> None:
    """The prompt and the new bytes, whatever they are, and nothing else; of an argument, a file or the standard input."""
    prompt, words = b"\xff\x00the\r\n", ("generate", finished[0], "--bytes", 40, "--temperature", 9)
    (tmp_path / "prompt").write_bytes(prompt)
    whole = command(*words, given=prompt).stdout_bytes
    assert len(whole) == len(prompt) + 40
    assert whole.startswith(prompt)
    with pytest.raises(UnicodeDecodeError):
        whole.decode()
    for source, given in ((("--prompt-file", tmp_path / "prompt"), None), (("--prompt-file", "-"), prompt)):
        assert command(*words, *source, given=given).stdout_bytes == whole
    assert command(*words, "--no-echo", given=prompt).stdout_bytes == whole[len(prompt) :]


@pytest.mark.slow
def test_generate_many_texts(finished: tuple[Path, Result]) -> None:
    """Texts are those of their seeds, whatever is drawn beside them."""
    words = ("generate", finished[0], "--bytes", 40)
    alone = [
        command(*words, "--prompt", prompt, "--seed", seed).stdout_bytes
        for prompt in ("the ", "quick", "over")
        for seed in (5, 6)
    ]
    assert len(set(alone)) == 6
    prompts = ("--prompt", "the ", "--prompt", "quick", "--prompt", "over")
    together = command(*words, *prompts, "--samples", 2, "--seed", 5)
    assert together.stdout_bytes == b"".join(text + b"\n" for text in alone)
    integers = ("--integers", "int16", "--prompt", "the ")
    one, other = (command(*words, *integers, "--seed", seed).stdout_bytes for seed in (5, 6))
    assert command(*words, *integers, "--seed", 5, "--samples", 2).stdout_bytes == b"%s\n%s\n" % (one, other)


class Terminal(io.BytesIO):
    """Terminal that remembers what was written to it, and how much each time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def isatty(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sizes.append(len(data))
        return super().write(data)


def test_generate_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are written as they come, with what a terminal would obey escaped, and characters whose bytes come one by one whole."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="utf-8", write_through=True))
    _generate._write(
        [("\x1b[2Jé\n".encode(), 0)], [[bytes([b]) for b in "\t☃\x9b\u202e".encode() + b"\xe2"]], echo=True
    )
    assert terminal.getvalue().decode() == "\\x1b[2Jé\n\t☃\\x9b\\u202e\\xe2\n"
    assert len([size for size in terminal.sizes if size]) > 5


def test_finished_run_is_left_alone(finished: tuple[Path, Result], text: Path) -> None:
    out = finished[0]
    before = contents(out)
    again = command("train", "lm", "--resume", "--out", out)
    assert again.exit_code == 0
    assert "is finished: all 24 steps are done" in again.output
    refused = command("train", "lm", "--text", text, "--out", out, *SIZES, *STEPS)
    assert refused.exit_code == 2
    assert "--resume" in refused.output
    assert "--out" in refused.output
    assert contents(out) == before


@pytest.mark.slow
def test_interrupted_run_goes_on(
    finished: tuple[Path, Result], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _progress.Report.training

    def interrupt(self: _progress.Report, losses: Sequence[tuple[int, float]]) -> None:
        training(self, losses)
        if losses[-1][0] == 11:
            signal.raise_signal(signal.SIGINT)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(_progress.Report, "training", interrupt)
        patch.setattr("lutjax.training.loop.CALL", 0.0)  # each loss comes alone
        stopped = command("train", "lm", "--text", text, "--out", out, *SIZES, *STEPS)
    assert stopped.exit_code == 130
    assert "Stopped after 11 of 24 steps" in stopped.output
    assert f"lutjax train lm --resume --out {out}" in stopped.output
    resumed = command("train", "lm", "--resume", "--out", out)
    assert resumed.exit_code == 0
    assert "resumed after 11 steps" in resumed.output
    assert history(out) == history(finished[0])


@needs_devices(8)
@pytest.mark.slow
def test_several_devices(
    finished: tuple[Path, Result], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped on one mesh and goes on by another ends as on one device, and its text is generated on both."""
    training = _progress.Report.training

    def interrupt(self: _progress.Report, losses: Sequence[tuple[int, float]]) -> None:
        training(self, losses)
        if losses[-1][0] == 10:
            signal.raise_signal(signal.SIGINT)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(_progress.Report, "training", interrupt)
        patch.setattr("lutjax.training.loop.CALL", 0.0)  # each loss comes alone
        words = ["--text", text, "--out", out, *SIZES, *STEPS, "--mesh", "data=2,detectors=4"]
        stopped = command("train", "lm", *words)
    assert "on 8 x cpu (data=2,detectors=4)" in stopped.output
    assert stopped.exit_code == 130
    resumed = command("train", "lm", "--resume", "--out", out, "--mesh", "detectors=2")
    assert resumed.exit_code == 0, resumed.output
    assert "on 2 x cpu (detectors=2); resumed after 10 steps" in resumed.output
    for measured, expected in zip(history(out).values(), history(finished[0]).values(), strict=True):
        assert [step for step, _ in measured] == [step for step, _ in expected]
        assert [x for _, x in measured] == pytest.approx([x for _, x in expected], rel=1e-4)
    generate = ("generate", "--checkpoint", out, "--prompt", "the ", "--bytes", 30)
    on_mesh = command(*generate, "--mesh", "detectors=4")
    assert on_mesh.exit_code == 0, on_mesh.output
    assert on_mesh.output == command(*generate).output


def test_devices_that_cannot_be_used(finished: tuple[Path, Result], text: Path, tmp_path: Path) -> None:
    new = ("train", "lm", "--text", text, "--out", tmp_path / "run", *SIZES, "--mesh")
    generate = ("generate", "--checkpoint", finished[0], "--prompt", "x", "--mesh")
    for words, message in (
        ((*new, "rows=2"), "'rows=2' is not one of its axes with a number of devices. Write data=2,detectors=4"),
        ((*new, "data=1000"), "mesh is data=1000, so 1000 devices; there are"),
        ((*generate, "data=2"), "one text is generated at a time, so there is nothing to divide over data"),
        ((*generate, "detectors=1", "--integers", "int16"), "runs on one device; leave out --mesh"),
        (("train", "ca", "--mesh", "detectors=2"), "the gates of an automaton are not divided: give data alone"),
        (("train", "ca", "--mesh", "data=2"), "there are" if jax.device_count() < 2 else "a batch of 1 "),
    ):  # fmt: skip
        result = command(*words)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


WORDS = ["train", "lm", *SIZES, *STEPS]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_checkpoint(
    finished: tuple[Path, Result], text: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    out, words = tmp_path / "run", [*WORDS, "--text", str(text)]
    assert kills.run(out, words, compilation_cache_directory, r"\.16\.tmp/checkpoint\.json", 1)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [".16.tmp", "8"]
    resumed = command("train", "lm", "--resume", "--out", out)
    assert resumed.exit_code == 0
    assert "resumed after 8 steps" in resumed.output
    kills.assert_same(out, finished[0])
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["16", "24"]


@pytest.mark.slow
def test_killed_twenty_times(
    finished: tuple[Path, Result], text: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    kills.check([*WORDS, "--text", str(text)], finished[0], tmp_path, compilation_cache_directory)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n-detectors", "5"], "--n-detectors is 4 in the checkpoint, not 5"),
        (["--learning-rate", "0.5"], "--learning-rate is 0.03 in the checkpoint, not 0.5"),
        (["--steps", "50", "--seed", "3"], "another configuration: --seed is 0 in the checkpoint, not 3."),
        (["--model", "lut", "--preset", "reference"], "belongs to another configuration"),
        (["--model", "gpt", "--preset", "reference"], "the model gpt has demo, small"),
    ],
)
def test_checkpoint_of_another_configuration(
    finished: tuple[Path, Result], words: list[str], message: str
) -> None:
    result = command("train", "lm", "--resume", "--out", finished[0], *words)
    assert result.exit_code == (2 if "gpt" in words else 1)
    assert message in " ".join(result.output.split())


def test_a_wrong_run_is_refused_before_the_prompt_is_read(
    finished: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*args: object) -> list[bytes]:
        raise AssertionError("the standard input was read")

    monkeypatch.setattr(_generate, "_prompts", unread)
    for folder in (tmp_path / "none", tmp_path, finished[0] / "checkpoints"):
        result = command("generate", folder)
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {folder} ")
        assert result.output.count("\n") == 1
    monkeypatch.undo()
    result = command("generate", finished[0])
    assert result.exit_code == 2
    assert "Invalid value for the standard input: it is empty" in result.output


def test_predict_names_the_command_for_a_language_model(
    finished: tuple[Path, Result], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    result = command("predict", finished[0], tmp_path / "rows.csv")
    assert result.exit_code == 1
    assert result.output.strip().endswith(f"not of train classify: use it by lutjax generate {finished[0]}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", "--temperature=1e300"], "1e+300; it must be at least 0 and at most 3.40282e+38."),
        (["generate", "RUN", f"--bytes={10**20}"], f"{10**20}; it must be at least 1 and at most 2147483647."),
        (["bench", f"--lm-batch={10**20}"], f"{10**20}; it must be at least 1 and at most 2147483647."),
        (["bench", f"--repeats={10**20}"], f"{10**20}; it must be at least 3 and at most 2147483647."),
        (["bench", f"--shape=fc:{10**20},8,8,4,3"], f"batch is {10**20}; it must be below 2^31; the sizes are fc:batch,inputs,outputs,detectors,anchors."),
        (["export", "RUN", f"--registers={10**20}"], f"--registers is {10**20}; it is a number of levels below 2^31, or 0 for no registers."),
    ],
)  # fmt: skip
def test_numbers_that_are_too_large(words: list[str], message: str) -> None:
    result = command(*words)
    assert result.exit_code == 2
    last = result.output.splitlines()[-1]
    assert last.startswith("Error: ")
    assert last.endswith(message)


@pytest.mark.slow
def test_a_run_is_made_longer(finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    result = command(
        "train",
        "lm",
        "--resume",
        "--out",
        out,
        "--steps=32",
        "--model=lut",
        "--preset=demo",
        "--cooldown=0.5",
    )
    assert "--n-detectors is 4 in the checkpoint, not 8" in result.output
    result = command("train", "lm", "--resume", "--out", out, "--steps=26")
    assert result.exit_code == 0
    assert "11 of them, the first of them step 14, were taken at another rate" in result.output
    assert "resumed after 24 steps" in result.output
    assert "finished, as all 26 steps are done" in result.output
    assert [step for step, _ in history(out)["train"]] == list(range(1, 27))


def test_runs_of_others_and_folders_that_are_none(finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = finished[0]
    for words, message in (
        (["train", "ca", "--resume", "--out", out], f"{out} is a run of train lm, not of train ca: continue it with"),
        (["train", "lm", "--resume", "--out", out.parent], f"is not the folder of a run, but holds 1: give {out}."),
        (["train", "lm", "--resume", "--out", out / "checkpoints"], f"is a part of a run: give {out}."),
        (["generate", "--prompt=x", "--checkpoint", out / "checkpoints" / "24"], f"is a part of a run: give {out}."),
        (["generate", "--prompt=x", "--checkpoint", tmp_path / "none"], "none does not exist."),
        (["generate", "--prompt=x", "--checkpoint", tmp_path], f"{tmp_path} holds no checkpoint."),
    ):  # fmt: skip
        result = command(*words)
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert message in result.output


def test_a_folder_in_use_is_refused(finished: tuple[Path, Result], text: Path, tmp_path: Path) -> None:
    with runs.lock(tmp_path):
        result = command("train", "lm", "--text", text, "--out", tmp_path, *SIZES, *STEPS)
    assert result.exit_code == 1
    assert f"{tmp_path} is in use: process {os.getpid()} trains there" in result.output
    assert "training on" not in result.output


@pytest.mark.slow
def test_a_dry_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", "lm", "--text", text, *SIZES, *STEPS, "--dry-run")
    assert "\nkernels: " in result.output
    assert result.exit_code == 0
    assert "parameters: 10,552 (0.0 MB)" in result.output
    assert "24 steps take" in result.output
    assert not list(tmp_path.iterdir())
    assert command("train", "lm", "--dry-run", "--resume").exit_code == 2


def test_tensorboard_is_an_extra(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "tensorboardX" else find_spec(name)
    )
    result = command("train", "lm", "--text", text, "--out", tmp_path / "run", "--tensorboard")
    assert result.exit_code == 1
    assert result.output == f"Error: --tensorboard needs tensorboardX: {_extras.command('tensorboardX')}\n"


def test_events_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with Events(tmp_path, ("training loss", "hard accuracy"), done=3) as events:
        events.training([(4, 1.5)])
        events.test(4, 0.25)
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    scalars = [(event.step, v.tag, v.simple_value) for event in found for v in event.summary.value]
    assert scalars == [(4, "training_loss", 1.5), (4, "hard_accuracy", 0.25)]
    assert any(
        event.session_log.status == 1 and event.step == 4 for event in found
    )  # forgets what was after step 3


@pytest.mark.slow
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lutjax", "train", "digits"],
        env={**os.environ, "JAX_PLATFORMS": "tpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: JAX found no tpu device")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_checkpoint_of_another_text(finished: tuple[Path, Result], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    shutil.rmtree(out / "checkpoints" / "24")
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes().upper())
    with runs.lock(out):
        before = contents(out)
    result = command("train", "lm", "--resume", "--out", out, "--text", other)
    assert result.exit_code == 1
    assert "belongs to another text" in result.output
    assert contents(out) == before
    # A finished run does not need the text, but says so if it is given another one.
    result = command("train", "lm", "--resume", "--out", finished[0], "--text", other)
    assert result.exit_code == 1
    assert "belongs to another text" in result.output


def test_damaged_checkpoint(finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    checkpoints = out / "checkpoints"
    damage(checkpoints / "24")
    before = contents(out)
    text = command("generate", "--prompt", "x", "--bytes=5", "--checkpoint", out)
    assert text.exit_code == 0
    assert "24 is damaged: " in text.stderr
    assert "The one of step 16 takes its place." in text.stderr
    assert text.stdout.startswith("x")
    assert contents(out) == before
    resumed = command("train", "lm", "--resume", "--out", out, "--log-every=1")
    assert resumed.exit_code == 0
    assert resumed.output.count("24 is damaged: ") == 1
    assert "resumed after 16 steps" in resumed.output
    assert history(out) == history(finished[0])
    assert sorted(p.name for p in checkpoints.iterdir()) == ["16", "24"]

    for step in (16, 24):
        damage(checkpoints / str(step))
    for words in (
        ["train", "lm", "--resume", "--seed=0", "--out"],
        ["generate", "--prompt=x", "--checkpoint"],
    ):
        result = command(*words, out)
        assert result.exit_code == 1
        assert "every checkpoint in" in result.output
        assert "16 is damaged" in result.output
        assert result.output.count("Error") == 1


def damage(checkpoint: Path) -> None:
    largest = max(checkpoint.rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--preset", "huge"], 2, "'demo', 'small', 'reference'"),
        (["--text", "missing.txt"], 2, "cannot read the text missing.txt: No such file"),
        (["--text", "empty.txt"], 2, "the text empty.txt is empty"),
        (["--text", "short.txt"], 2, "too short"),
        (["--features", "1"], 2, "features is 1; it must be at least 2"),
        (["--model=lut", "--n-anchors", "-1"], 2, "--n-anchors is -1"),
        (["--dropout", "1.5"], 2, "dropout is 1.5"),
        (["--vocab-size", "100"], 2, "--vocab-size is 100; a language model of bytes needs 256"),
        (["--steps", "0"], 2, "steps is 0; it must be at least 1"),
        (["--steps", "many"], 2, "'many' is not a valid integer"),
        (["--optimizer", "lion"], 2, "'--optimizer': 'lion' is not one of 'sgd', 'momentum'"),
        (["--table-optimizer", "adam"], 2, "'adam' is not one of 'sgd', 'row_adagrad'"),
        (["--microbatches", "5"], 2, "microbatches is 5; it must divide the batch size"),
        (["--log-every", "0"], 2, "--log-every is 0"),
        (["--cooldown", "2"], 2, "cooldown is 2.0"),
        (["--resume"], 1, "run does not exist"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_typechecking: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    result = command("train", "lm", "--out", "run", *words)
    assert result.exit_code == code
    assert message in " ".join(result.output.split())
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "it is empty"),
        (["--prompt", "x", "--bytes", "0"], "0; it must be at least 1"),
        (["--prompt", "x", "--temperature", "-1"], "it must be at least 0"),
        (["--prompt", "x", "--top-k", "300"], "300; it must be at least 1 and at most 256"),
        (["--prompt", "x", "--prompt-file", "-"], "give --prompt or --prompt-file, not both"),
        (["--prompt-file", "none.txt"], "File 'none.txt' does not exist"),
        (["--prompt", "x", "--samples", "2", "--seed", 2**32 - 1], "2 samples have seeds up to 4294967296"),
    ],
)
def test_bad_input_of_generate(words: list[str], message: str, tmp_path: Path) -> None:
    result = command("generate", "--checkpoint", tmp_path, *words)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FloatingPointError("the training loss is nan after 3 steps."), "after 3 steps. Lower --learning-rate."),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory."), "the device is out of memory. Checkpoints"),
        (jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes."), "the device is out of memory."),
        (OverflowError("Python integer 1000000000000 out of bounds for int32"), "a size is too large: Python integer 1000000000000 out of bounds for int32. Choose smaller"),
        (MemoryError("Unable to allocate 4 TiB"), "this machine is out of memory. Checkpoints are intact"),
        (OSError(errno.ENOSPC, "No space left on device", "x/16"), "No space left on device (x/16). Free some space"),
        (OSError(errno.EROFS, "Read-only file system", "x"), "Read-only file system (x). Choose a writable folder"),
    ],
)  # fmt: skip
def test_what_the_machine_refuses_is_one_line_and_leaves_checkpoints(
    error: Exception,
    message: str,
    finished: tuple[Path, Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    shutil.rmtree(out / "checkpoints" / "24")
    before = contents(out / "checkpoints")

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(loop, "run", refuse)
    result = command("train", "lm", "--resume", "--out", out)
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.splitlines()[-1].startswith("Error: ")
    assert contents(out / "checkpoints") == before


def test_every_field_is_a_flag() -> None:
    train_lm = cli.commands["train"].commands["lm"]  # type: ignore[attr-defined]
    flags = {p.name for p in train_lm.get_params(click.Context(train_lm))}
    configs = lm_runs.LanguageModel.configs
    for config in (*typing.get_args(configs.model), configs.training, configs.options):
        assert {field.name for field in dataclasses.fields(config)} <= flags


def test_bar_on_a_terminal() -> None:
    import io

    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with _progress.Report(console, first=0, steps=20, speed="{:.0f} s a step".format) as report:
        report.training([(10, 2.5)])
        report.test(10, 2.25)
        report.training([(20, 2.0)])
    assert "step 20/20  train 2.0000  test 2.2500" in stream.getvalue()


def test_rooms_keep_to_themselves() -> None:
    """Nothing outside the command line imports it, and models and training import nothing private of kernels."""
    root = Path(lutjax.__file__).parent
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0]
        text = path.read_text()
        assert room in ("cli", "__main__.py") or not re.search(
            r"^\s*(from|import) lutjax\.cli", text, re.MULTILINE
        ), path
        if room in ("models", "training"):
            assert not re.search(r"lutjax\.kernels(\._| import _)", text), path


def run_module(*words: str) -> None:
    """Run ``python -m lutjax`` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lutjax", *words])
        runpy.run_module("lutjax", run_name="__main__")


@pytest.mark.parametrize("run", [main, run_module])
def test_without_the_extra(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "orbax" else find(name))
    message = f"lutjax: orbax not found: {_extras.command('orbax')}"
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        run()


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "safetensors"])
def test_a_command_without_its_extra_is_one_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_runs.RUNS["ca"](tmp_path / "run")
    module = {"starlette": "starlette.applications", "safetensors": "safetensors.numpy"}.get(package, package)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "lutjax.serving._app", raising=False)
    name, *words = (
        ("save", tmp_path / "run", tmp_path / "bundle")
        if package == "safetensors"
        else ("serve", tmp_path / "run")
    )
    result = command(name, *words)
    message = f"lutjax {name} needs {package}, which is not installed: {_extras.command(package)}"
    assert (result.exit_code, result.output) == (1, f"Error: {message}\n")


def test_the_module_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m lutjax`` prints, and ends, as ``lutjax`` does, and calls itself so."""
    for words, status in ((["--version"], 0), (["train", "lm", "--steps", "many"], 2)):
        with pytest.raises(SystemExit) as ended:
            run_module(*words)
        result, printed = CliRunner().invoke(cli, words, prog_name="lutjax"), capsys.readouterr()
        assert ended.value.code == result.exit_code == status
        assert (printed.out.split(), printed.err.split()) == (result.stdout.split(), result.stderr.split())


def test_huge_pages_start_again_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []

    class ReplacedError(Exception):
        """Error in place of the replacement of the process."""

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        started.append((path, words, environment))
        raise ReplacedError

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.argv", ["lutjax", "train", "lm", "--huge-pages"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with pytest.raises(ReplacedError):
        restart_with_huge_pages()
    [(_, words, environment)] = started
    assert words[1:] == ["-m", "lutjax", "train", "lm", "--huge-pages"]
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", environment["GLIBC_TUNABLES"])
    restart_with_huge_pages()  # in the new process: nothing
    assert len(started) == 1

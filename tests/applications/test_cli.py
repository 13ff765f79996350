"""Command line: training, resuming, generation, and invalid input."""

import dataclasses
import errno
import importlib.util
import io
import os
import re
import runpy
import shutil
import socket
import sys
import typing
from pathlib import Path

import click
import jax
import pytest
from click.testing import CliRunner
from commands import command, output, refusal
from folders import contents
from rich.console import Console

from lutjax import extras as _extras, models, training
from lutjax.cli import _generate, _progress, main
from lutjax.cli._huge_pages import restart_with_huge_pages
from lutjax.cli._main import cli
from lutjax.training import lm_runs, loop, runs
from lutjax.training.tensorboard import Events


def history(out):
    return runs.read(out, lm_runs.Record)[1].history


def test_train(lm_run, text):
    out, _, said = lm_run
    first, *lines = said.splitlines()
    assert f"training on {text} (1,800 bytes)" in first
    assert "24 steps of 4 x 8 bytes on cpu" in first
    assert "bigram baseline" in first
    assert re.fullmatch(r"kernels: (plain JAX|native code, .*,) for .*", lines[0])
    assert said.count("kernels: ") == 1
    assert sum(line.startswith("step ") and "kB/s" in line for line in lines) == 24
    assert "test loss" in said
    assert f"lutjax generate {out} --prompt" in said
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["16", "24"]
    own = {*lm_runs.LanguageModel.files, "checkpoints", "curves.csv", "finished.json", ".lock"}
    assert {path.name for path in out.iterdir()} == own - {"usage.json"}
    losses = history(out)
    assert [step for step, _ in losses.train] == list(range(1, 25))
    assert [step for step, _ in losses.test] == [12, 24]
    assert losses.train[-1][1] < losses.train[0][1] - 0.5


def test_generate(lm_run):
    words = ("generate", "--checkpoint", lm_run.out, "--prompt", "the ", "--bytes", 30)
    one, other = (output(*words, *more) for more in ((), ("--seed", 1)))
    assert one.startswith("the ")
    assert one != other
    assert output(*words, "--temperature", 0) == output(*words, "--top-k", 1, "--seed", 3)


def test_generate_writes_bytes_as_they_are(lm_run, tmp_path):
    prompt, words = b"\xff\x00the\r\n", ("generate", lm_run.out, "--bytes", 40, "--temperature", 9)
    (tmp_path / "prompt").write_bytes(prompt)
    whole = command(*words, given=prompt).stdout_bytes
    assert len(whole) == len(prompt) + 40
    assert whole.startswith(prompt)
    with pytest.raises(UnicodeDecodeError):
        whole.decode()
    for source, given in (
        (("--prompt-file", tmp_path / "prompt"), None),
        (("--prompt-file", "-"), prompt),
    ):
        assert command(*words, *source, given=given).stdout_bytes == whole
    assert command(*words, "--no-echo", given=prompt).stdout_bytes == whole[len(prompt) :]


class Terminal(io.BytesIO):
    """Fake terminal: records the written text and the size per write."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def isatty(self):
        return True

    def write(self, data):
        self.sizes.append(len(data))
        return super().write(data)


def test_generate_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(terminal, encoding="utf-8", write_through=True)
    )
    _generate._write(
        [("\x1b[2Jé\n".encode(), 0)],
        [[bytes([b]) for b in "\t☃\x9b\u202e".encode() + b"\xe2"]],
        echo=True,
    )
    assert terminal.getvalue().decode() == "\\x1b[2Jé\n\t☃\\x9b\\u202e\\xe2\n"
    assert len([size for size in terminal.sizes if size]) > 5


def test_finished_run_is_left_alone(lm_run):
    out = lm_run.out
    before = contents(out)
    assert "is finished: all 24 steps are done" in output("train", "lm", "--resume", "--out", out)
    said = refusal(*lm_run.words, "--out", out)
    assert "--resume" in said
    assert "--out" in said
    assert contents(out) == before


def test_devices_that_cannot_be_used(lm_run, tmp_path):
    new = (*lm_run.words, "--out", tmp_path / "run", "--mesh")
    generate = ("generate", "--checkpoint", lm_run.out, "--prompt", "x", "--mesh")
    for words, message in (
        ((*new, "rows=2"), "'rows=2' is not an axis with a device count. Write data=2,detectors=4"),
        ((*new, "data=1000"), "mesh is data=1000, so 1000 devices; there are"),
        ((*generate, "data=2"), "generation has a single sequence. Give only detectors"),
        ((*generate, "detectors=1", "--integers", "int16"), "runs on one device; leave out --mesh"),
        (("train", "ca", "--mesh", "detectors=2"), "automaton gates are replicated. Give only data"),
        (("train", "ca", "--mesh", "data=2"), "there are" if jax.device_count() < 2 else "does not divide the 1 samples"),
    ):  # fmt: skip
        assert message in refusal(*words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "message"), [
    (["--n-detectors", "5"], "--n-detectors is 4 in the checkpoint, not 5"),
    (["--learning-rate", "0.5"], "--learning-rate is 0.03 in the checkpoint, not 0.5"),
    (["--steps", "50", "--seed", "3"],
        "another configuration: --seed is 0 in the checkpoint, not 3."),
    (["--model", "lut", "--preset", "reference"], "has another configuration"),
    (["--model", "gpt", "--preset", "reference"], "the model gpt has demo, small"),
])  # fmt: skip
def test_checkpoint_of_another_configuration(lm_run, words, message):
    assert message in refusal("train", "lm", "--resume", "--out", lm_run.out, *words)


def test_a_wrong_run_is_refused_before_the_prompt_is_read(lm_run, tmp_path, monkeypatch):
    def unread(*args):
        raise AssertionError("the standard input was read")

    monkeypatch.setattr(_generate, "_prompts", unread)
    for folder in (tmp_path / "none", tmp_path, lm_run.out / "checkpoints"):
        result = command("generate", folder)
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {folder} ")
        assert result.output.count("\n") == 1
    monkeypatch.undo()
    assert "Invalid value for the standard input: it is empty" in refusal("generate", lm_run.out)


def test_a_closed_standard_input(monkeypatch):
    monkeypatch.setattr(_generate.sys, "stdin", None)
    for file in (None, Path("-")):
        with pytest.raises(click.UsageError, match="give a text to continue"):
            _generate._prompts([], file)


def test_an_address_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal("serve", tmp_path, "--port", port)
    assert (
        f"--host 127.0.0.1 --port {port} cannot be listened on: Address already in use" in message
    )
    assert "--host a..b" in refusal("serve", tmp_path, "--host", "a..b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", "--temperature=1e300"], "1e+300; it must be at least 0 and at most 3.40282e+38."),
        (["generate", "RUN", f"--bytes={10**20}"], f"{10**20}; it must be at least 1 and at most 2147483647."),
        (["bench", f"--lm-batch={10**20}"], f"{10**20}; it must be at least 1 and at most 2147483647."),
        (["bench", f"--repeats={10**20}"], f"{10**20}; it must be at least 3 and at most 2147483647."),
        (["bench", f"--shape=fc:{10**20},8,8,4,3"], f"batch is {10**20}; it must be below 2^31; the sizes are fc:batch,inputs,outputs,detectors,anchors."),
        (["export", "RUN", f"--registers={10**20}"], f"--registers is {10**20}; expected a number of levels below 2^31."),
    ],
)  # fmt: skip
def test_numbers_that_are_too_large(words, message):
    result = command(*words)
    assert result.exit_code == 2
    last = result.output.splitlines()[-1]
    assert last.startswith("Error: ")
    assert last.endswith(message)


def test_runs_of_others_and_folders_that_are_none(lm_run, tmp_path):
    out = lm_run.out
    for words, message in (
        (["train", "ca", "--resume", "--out", out], f"{out} is a run of train lm, not of train ca: continue it with"),
        (["train", "lm", "--resume", "--out", out.parent], f"is not the folder of a run, but holds 1: give {out}."),
        (["train", "lm", "--resume", "--out", out / "checkpoints"], f"is a part of a run: give {out}."),
        (["generate", "--prompt=x", "--checkpoint", out / "checkpoints" / "24"], f"is a part of a run: give {out}."),
        (["generate", "--prompt=x", "--checkpoint", tmp_path / "none"], "none does not exist."),
        (["generate", "--prompt=x", "--checkpoint", tmp_path], f"{tmp_path} holds no checkpoint."),
        (["predict", out, __file__], f"not of train classify: use it by lutjax generate {out}"),
    ):  # fmt: skip
        said = refusal(*words)
        assert said.startswith("Error: ")
        assert message in said


def test_a_folder_in_use_is_refused(lm_run, tmp_path):
    with runs.lock(tmp_path):
        said = refusal(*lm_run.words, "--out", tmp_path)
    assert f"{tmp_path} is in use: process {os.getpid()} is training there" in said
    assert "training on" not in said


def test_events_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with Events(tmp_path, ("training loss", "hard accuracy"), done=3) as events:
        events.training([(4, 1.5)])
        events.test(4, 0.25)
    (file,) = tmp_path.iterdir()
    data, result = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        result.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    scalars = [(event.step, v.tag, v.simple_value) for event in result for v in event.summary.value]
    assert scalars == [(4, "training_loss", 1.5), (4, "hard_accuracy", 0.25)]
    assert any(
        event.session_log.status == 1 and event.step == 4 for event in result
    )  # forgets what was after step 3


def test_checkpoint_of_another_text(lm_run, text, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(lm_run.out, out)
    shutil.rmtree(out / "checkpoints" / "24")
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes().upper())
    with runs.lock(out):
        before = contents(out)
    for folder in (out, lm_run.out):  # a finished run, too, which does not need the text
        said = refusal("train", "lm", "--resume", "--out", folder, "--text", other)
        assert "belongs to another text" in said
    assert contents(out) == before


def test_damaged_checkpoint(lm_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(lm_run.out, out)
    checkpoints = out / "checkpoints"
    damage_file(checkpoints / "24")
    before = contents(out)
    text = command("generate", "--prompt", "x", "--bytes=5", "--checkpoint", out)
    assert text.exit_code == 0
    assert "24 is damaged: " in text.stderr
    assert "The one of step 16 takes its place." in text.stderr
    assert text.stdout.startswith("x")
    assert contents(out) == before
    damage_file(checkpoints / "16")
    for words in (
        ("train", "lm", "--resume", "--seed=0", "--out"),
        ("generate", "--prompt=x", "--checkpoint"),
    ):
        said = refusal(*words, out)
        assert "every checkpoint in" in said
        assert "16 is damaged" in said
        assert said.count("Error") == 1


def damage_file(checkpoint):
    largest = max(checkpoint.rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


@pytest.mark.parametrize(("words", "message"), [
    (["--preset", "huge"], "'demo', 'small', 'reference'"),
    (["--text", "missing.txt"], "cannot read the text missing.txt: No such file"),
    (["--text", "empty.txt"], "the text empty.txt is empty"),
    (["--text", "short.txt"], "too short"),
    (["--features", "1"], "features is 1; it must be at least 2"),
    (["--model=lut", "--n-anchors", "-1"], "--n-anchors is -1"),
    (["--dropout", "1.5"], "dropout is 1.5"),
    (["--vocab-size", "100"], "--vocab-size is 100; a language model of bytes needs 256"),
    (["--steps", "0"], "steps is 0; it must be at least 1"),
    (["--steps", "many"], "'many' is not a valid integer"),
    (["--optimizer", "lion"], "'--optimizer': 'lion' is not one of 'sgd', 'momentum'"),
    (["--table-optimizer", "adam"], "'adam' is not one of 'sgd', 'row_adagrad'"),
    (["--microbatches", "5"], "microbatches is 5; it must divide --batch-size"),
    (["--log-every", "0"], "--log-every is 0"),
    (["--cooldown", "2"], "cooldown is 2.0"),
    (["--resume"], "run does not exist"),
])  # fmt: skip
def test_bad_input_is_one_message_and_leaves_nothing(
    words, message, tmp_path, monkeypatch, without_typechecking
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    assert message in refusal("train", "lm", "--out", "run", *words)
    assert not Path("run").exists()


@pytest.mark.parametrize(("words", "message"), [
    (["--prompt", ""], "it is empty"),
    (["--prompt", "x", "--bytes", "0"], "0; it must be at least 1"),
    (["--prompt", "x", "--temperature", "-1"], "it must be at least 0"),
    (["--prompt", "x", "--top-k", "300"], "300; it must be at least 1 and at most 256"),
    (["--prompt", "x", "--prompt-file", "-"], "give --prompt or --prompt-file, not both"),
    (["--prompt-file", "none.txt"], "File 'none.txt' does not exist"),
    (["--prompt", "x", "--samples", "2", "--seed", 2**32 - 1],
        "4294967295 + 2 samples exceeds the largest seed"),
])  # fmt: skip
def test_bad_input_of_generate(words, message, tmp_path):
    assert message in refusal("generate", "--checkpoint", tmp_path, *words)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FloatingPointError("the training loss is nan after 3 steps."), "after 3 steps. Lower --learning-rate."),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory."), "the device is out of memory. Checkpoints"),
        (jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes."), "the device is out of memory."),
        (OverflowError("Python integer 1000000000000 out of bounds for int32"), "a size is too large: Python integer 1000000000000 out of bounds for int32. Choose smaller"),
        (MemoryError("Unable to allocate 4 TiB"), "this machine is out of memory. Checkpoints are intact"),
        (OSError(errno.ENOSPC, "No space left on device", "x/16"), "No space left on device (x/16). Free some space"),
        (OSError(errno.EFBIG, "File too large"), "File too large. Raise the limit of file sizes (ulimit -f)"),
        (OSError(errno.EROFS, "Read-only file system", "x"), "Read-only file system (x). Choose a writable folder"),
    ],
)  # fmt: skip
def test_what_the_machine_refuses_is_one_line_and_leaves_checkpoints(
    error, message, lm_run, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    shutil.copytree(lm_run.out, out)
    shutil.rmtree(out / "checkpoints" / "24")
    before = contents(out / "checkpoints")

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(loop, "run", refuse)
    result = command("train", "lm", "--resume", "--out", out)
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.splitlines()[-1].startswith("Error: ")
    assert contents(out / "checkpoints") == before


def test_every_field_is_a_flag():
    train_lm = cli.commands["train"].commands["lm"]
    flags = {p.name for p in train_lm.get_params(click.Context(train_lm))}
    configs = lm_runs.LanguageModel.configs
    for config in (*typing.get_args(configs.model), configs.training, configs.options):
        assert {field.name for field in dataclasses.fields(config)} <= flags


@pytest.mark.parametrize(("package", "module", "words"), [
    ("starlette", "starlette.applications", ("serve",)),
    ("uvicorn", "uvicorn", ("serve",)),
    ("safetensors", "safetensors.numpy", ("save",)),
])  # fmt: skip
def test_a_command_without_its_extra_is_one_line(
    package, module, words, lm_run, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "lutjax.serving._app", raising=False)
    result = command(*words, lm_run.out, *([tmp_path / "bundle"] if words == ("save",) else []))
    message = (
        f"lutjax {words[0]} needs {package}, which is not installed: {_extras.command(package)}"
    )
    assert (result.exit_code, result.output) == (1, f"Error: {message}\n")


def test_training_without_tensorboard_is_one_line(text, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "tensorboardX" else find(name)
    )
    result = command("train", "lm", "--text", text, "--out", tmp_path / "new", "--tensorboard")
    message = f"--tensorboard needs tensorboardX: {_extras.command('tensorboardX')}"
    assert (result.exit_code, result.output) == (1, f"Error: {message}\n")


def test_the_module_is_the_command(capsys, monkeypatch):
    def run_module(*words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["lutjax", *words])
            runpy.run_module("lutjax", run_name="__main__")

    for words, status in ((["--version"], 0), (["train", "lm", "--steps", "many"], 2)):
        with pytest.raises(SystemExit) as ended:
            run_module(*words)
        result, printed = CliRunner().invoke(cli, words, prog_name="lutjax"), capsys.readouterr()
        assert ended.value.code == result.exit_code == status
        assert (printed.out.split(), printed.err.split()) == (
            result.stdout.split(),
            result.stderr.split(),
        )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "orbax" else find(name)
    )
    for run in (main, run_module):
        with pytest.raises(SystemExit) as ended:
            run()
        assert str(ended.value) == f"lutjax: orbax not found: {_extras.command('orbax')}"


def test_huge_pages_start_again_once(monkeypatch, tmp_path):
    started = []

    class ReplacedError(Exception):
        """Raise an error instead of replacing the process."""

    def execve(path, words, environment):
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


def test_bar_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with _progress.Report(console, first=0, steps=20, speed="{:.0f} s a step".format) as report:
        report.training([(10, 2.5)])
        report.test(10, 2.25)
        report.training([(20, 2.0)])
    assert "step 20/20  train 2.0000  test 2.2500" in stream.getvalue()


def test_models_and_training_import_nothing_private_of_kernels():
    for folder in (models, training):
        for path in Path(folder.__file__).parent.rglob("*.py"):
            assert not re.search(r"lutjax\.kernels(\._| import _)", path.read_text()), path

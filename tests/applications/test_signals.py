"""Signals and closed pipes that stop a run, wherever they find it.

As a program, ``test_signals.py WORDS`` runs the command `lutjax` of these words, and gets another Ctrl-C where it writes the checkpoint of a run that was stopped.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small_runs import FOX

from lutjax.training import loop

WORDS = [
    "train",
    "lm",
    "--model",
    "gpt",
    "--feed-forward",
    "dense",
    "--context",
    "8",
    "--features",
    "8",
    "--n-layers",
    "1",
    "--n-heads",
    "1",
    "--batch-size",
    "2",
    "--steps",
    "1000000",
]
OFTEN = ["--log-every", "1", "--eval-every", "1000000", "--checkpoint-every", "1000000"]
SECONDS = 120


def main() -> None:
    from lutjax.cli import main as lutjax
    from lutjax.training import models

    def save(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal did nothing")

    models.save = save  # type: ignore[assignment]
    lutjax()


@contextmanager
def running(program: list[str], out: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own that has taken a step."""
    text = out.parent / "fox.txt"
    text.write_bytes(FOX)
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }
    words = [sys.executable, *program, *WORDS, *OFTEN, "--text", str(text), "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        try:
            while not process.stdout.readline().startswith("step"):
                assert process.poll() is None, process.stderr.read()
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangup", "closed pipe"])
def test_a_run_saves_and_stops(how: str, tmp_path: Path, compilation_cache_directory: Path) -> None:
    with running(["-m", "lutjax"], tmp_path / "run", compilation_cache_directory) as process:
        if how == "hangup":
            for _ in range(3):  # the kernel sends one, and the shell another
                process.send_signal(signal.SIGHUP)
            shown, errors = process.communicate(timeout=SECONDS)
            assert "Continue with:\n  lutjax train lm --resume --out" in shown
        else:
            process.stdout.close()
            errors = process.stderr.read()
        assert process.wait(SECONDS) == 130
        assert not errors
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name) > 0


@pytest.mark.slow
def test_a_second_signal_while_saving_is_one_line(tmp_path: Path, compilation_cache_directory: Path) -> None:
    with running([__file__], tmp_path / "run", compilation_cache_directory) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 130
    again = f"lutjax train lm --resume --out {tmp_path / 'run'}"
    assert errors == f"Stopped immediately. Checkpoints are intact: if there is one, continue with: {again}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_signal_is_lost(number: signal.Signals) -> None:
    """Blocks in which nobody asks end with it, also where their callbacks swallow the exception, or make another of it."""

    def swallow() -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)

    def change() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise RuntimeError("INTERNAL: callback") from None

    for block in (swallow, change, lambda: signal.raise_signal(number)):
        before = signal.getsignal(number)
        with loop.stop_on_signal() as stop:
            with pytest.raises(KeyboardInterrupt), stop.at_once():
                block()
            assert stop()
            with pytest.raises(KeyboardInterrupt), stop.at_once():
                pytest.fail("the block begins")
        assert signal.getsignal(number) is before
    with loop.stop_on_signal() as stop:
        with pytest.raises(RuntimeError), stop.at_once():
            raise RuntimeError("no signal")
        signal.raise_signal(number)
        assert stop()
        if number != signal.SIGINT:
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop.stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


if __name__ == "__main__":
    main()

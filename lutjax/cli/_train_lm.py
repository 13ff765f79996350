"""``lutjax train lm``: the byte language model."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import FieldsCommand
from lutjax.training.presets import PRESETS

if TYPE_CHECKING:
    from lutjax.training.lm import Run
    from lutjax.training.lm_runs import Record
    from lutjax.training.models import State
    from lutjax.training.text import Text

EVALUATION_WINDOWS = 1024
"""Windows of the test part that are evaluated while a run goes on; at its end it is the whole part."""


def _configs() -> Sequence[type]:
    from lutjax.models import LUTTransformerConfig
    from lutjax.training.lm import TrainingConfig

    return LUTTransformerConfig, TrainingConfig, _run.Intervals


@click.command(cls=FieldsCommand, configs=_configs)
@click.option(
    "--text",
    "text_path",
    type=click.Path(path_type=Path),
    help="A file, or a folder of text files. Default: the source of Python's standard library.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help="Sizes and rates; the options below override them. Default: demo.",
)
@_run.out_option("runs/lm")
@_run.resume_option
@click.option(
    "--huge-pages",
    is_flag=True,
    help="Start again with large memory pages (a setting of glibc): faster for large tables on a CPU.",
)
def lm(
    text_path: Path | None,
    preset: str | None,
    out: Path,
    resume: bool,
    huge_pages: bool,
    fields: Mapping[str, Any],
) -> None:
    """Train a language model on bytes.

    The last 10 % of the text is the test part. Losses are in nats per byte. A run that was stopped goes on
    with --resume, and ends exactly as if it had never been stopped.
    """
    from lutjax.cli._huge_pages import restart_with_huge_pages
    from lutjax.training.text import TextError

    if huge_pages:
        restart_with_huge_pages()
    try:
        with _run.errors(out):
            if resume:
                _resume(text_path, preset, out, fields)
            else:
                _start(text_path, preset or "demo", out, fields)
    except TextError as error:
        raise click.BadParameter(str(error), param_hint="--text") from error


def _start(text_path: Path | None, preset: str, out: Path, fields: Mapping[str, Any]) -> None:
    from lutjax.training import lm_runs, runs
    from lutjax.training.lm import Run
    from lutjax.training.text import bigram_loss, load_text

    _run.check_new(out)
    with _run.usage_errors():
        model, training, intervals = (_run.make(c, {**PRESETS[preset], **fields}) for c in _configs())
    text = load_text(text_path, context=model.context)
    with _run.usage_errors():
        run = Run(model, training, text.train)
    path = None if text_path is None else str(text_path.absolute())
    record = lm_runs.Record(
        model=model,
        training=training,
        text=lm_runs.TextIdentity(path, text.size, text.digest),
        bigram=bigram_loss(text.train, text.test),
        options=dataclasses.asdict(intervals),
        history=runs.History(),
    )
    _train(run, run.init(), record, text, out, done=0)


def _resume(text_path: Path | None, preset: str | None, out: Path, fields: Mapping[str, Any]) -> None:
    from lutjax.training import checkpoints, lm_runs, models, runs
    from lutjax.training.lm import Run
    from lutjax.training.text import load_text

    done, record = runs.read(out, lm_runs.Record)
    saved = {**record.model.to_dict(), **dataclasses.asdict(record.training)}
    wanted = {**(PRESETS[preset] if preset else {}), **fields}
    _run.check_same(out, saved, wanted)
    if done >= record.training.steps:
        click.echo(f"{out} is finished: all {done} steps are done. {_results(record)}")
        return
    with _run.usage_errors():
        record.options = dataclasses.asdict(_run.make(_run.Intervals, {**record.options, **wanted}))
    path = text_path or (None if record.text.path is None else Path(record.text.path))
    text = load_text(path, context=record.model.context)
    if text.digest != record.text.digest:
        raise checkpoints.CheckpointError(
            f"the checkpoint in {out} belongs to another text: it was {record.text.size} bytes of "
            f"{record.text.path or 'the standard library'}, now {text.size} other bytes of {text.name}."
        )
    run = Run(record.model, record.training, text.train)
    _train(run, models.restore(out, done, run), record, text, out, done=done)


def _train(run: "Run", state: "State", record: "Record", text: "Text", out: Path, *, done: int) -> None:
    import jax
    from rich.console import Console

    from lutjax.cli._plot import plot_losses
    from lutjax.cli._progress import Report
    from lutjax.training import models

    steps, history = record.training.steps, record.history
    device = jax.local_devices()[0]
    n_bytes = record.training.batch_size * record.model.context
    click.echo(
        f"training on {text.name} ({text.size:,} bytes): {run.structure.n_parameters():,} parameters, {steps} steps of "
        f"{record.training.batch_size} x {record.model.context} bytes on {device.device_kind}; "
        f"bigram baseline {record.bigram:.4f} nats per byte"
        + (f"; resumed after {done} steps" if done else "")
    )

    def evaluate(number: int, state: "State") -> float:
        return run.evaluate(state, text.test, max_windows=None if number == steps else EVALUATION_WINDOWS)

    def save(number: int, state: "State") -> None:
        plot_losses(record, out / "loss.png")
        models.save(out, number, state, record)

    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    state = _run.train(
        run.advance,
        state,
        done=done,
        steps=steps,
        intervals=_run.Intervals(**record.options),
        history=history,
        report=Report(
            Console(), first=done, steps=steps, speed=lambda seconds: f"{n_bytes / seconds / 1000:.1f} kB/s"
        ),
        evaluate=evaluate,
        save=save,
        again=_run.command("train", "lm", "--resume", "--out", str(out)),
    )

    from lutjax.cli._generate import sample

    lines = text.test[: record.model.context].tobytes().decode(errors="ignore").splitlines()
    prompt = next((line for line in lines if line.strip()), " ")
    model = run.structure.model(state.params, state.others)
    click.echo(f"{steps - done} steps in {time.perf_counter() - start:.0f} s. {_results(record)}")
    click.echo(f"loss curve: {out / 'loss.png'}\ncheckpoint: {out}\nsample:\n")
    click.echo(prompt + sample(model, prompt, 300))
    click.echo(f"\nmore of it:\n  {_run.command('generate', '--checkpoint', str(out), '--prompt', prompt)}")


def _results(record: "Record") -> str:
    return f"test loss {record.history.test[-1][1]:.4f} nats per byte, bigram baseline {record.bigram:.4f}."

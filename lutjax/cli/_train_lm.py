"""``lutjax train lm``: the byte language model."""

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._flags import FieldsCommand
from lutjax.training.presets import PRESETS

if TYPE_CHECKING:
    from lutjax.training.lm import Run, State
    from lutjax.training.runs import Record
    from lutjax.training.text import Text

EVALUATION_WINDOWS = 1024
"""Windows of the test part that are evaluated while a run goes on; at its end it is the whole part."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """What happens how often, in steps. They change nothing in what is learnt, so a resumed run may change them.

    Attributes:
      log_every: steps between two training losses.
      eval_every: steps between two test losses.
      checkpoint_every: steps between two checkpoints.
    """

    log_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")


def _configs() -> Sequence[type]:
    from lutjax.models import LUTTransformerConfig
    from lutjax.training.lm import TrainingConfig

    return LUTTransformerConfig, TrainingConfig, Intervals


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
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/lm"),
    show_default=True,
    help="Folder for checkpoints and the loss curve.",
)
@click.option(
    "--resume", is_flag=True, help="Go on from the latest checkpoint in --out; it knows its own options."
)
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
    from lutjax.training import runs
    from lutjax.training.text import TextError

    if huge_pages:
        restart_with_huge_pages()
    try:
        if resume:
            _resume(text_path, preset, out, fields)
        else:
            _start(text_path, preset or "demo", out, fields)
    except TextError as error:
        raise click.BadParameter(str(error), param_hint="--text") from error
    except runs.CheckpointError as error:
        raise click.ClickException(str(error)) from error
    except FloatingPointError as error:
        raise click.ClickException(f"{error} Lower --learning-rate.") from error
    except _device_errors() as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise click.ClickException(
            f"the device is out of memory. Checkpoints in {out} are whole: go on with --resume where more is free, or "
            "start again in another folder with a smaller --batch-size or model."
        ) from error


def _device_errors() -> type[Exception]:
    import jax

    return jax.errors.JaxRuntimeError


def _start(text_path: Path | None, preset: str, out: Path, fields: Mapping[str, Any]) -> None:
    from lutjax.training import runs
    from lutjax.training.lm import Run
    from lutjax.training.text import bigram_loss, load_text

    if runs.exists(out):
        raise click.UsageError(
            f"{out} holds a checkpoint already: go on with it (--resume), or choose another folder (--out)."
        )
    with _usage_errors():
        model, training, intervals = (_make(c, {**PRESETS[preset], **fields}) for c in _configs())
    text = load_text(text_path, context=model.context)
    with _usage_errors():
        run = Run(model, training, text.train)
    path = None if text_path is None else str(text_path.absolute())
    record = runs.Record(
        model=model,
        training=training,
        text=runs.TextIdentity(path, text.size, text.digest),
        bigram=bigram_loss(text.train, text.test),
        options=dataclasses.asdict(intervals),
        history=runs.History(),
    )
    _train(run, run.init(), record, text, out, done=0)


def _resume(text_path: Path | None, preset: str | None, out: Path, fields: Mapping[str, Any]) -> None:
    from lutjax.training import checkpoints, runs
    from lutjax.training.lm import Run
    from lutjax.training.text import load_text

    done, record = runs.read(out)
    saved = {**record.model.to_dict(), **dataclasses.asdict(record.training)}
    wanted = {**(PRESETS[preset] if preset else {}), **fields}
    different = checkpoints.differences(saved, {k: v for k, v in wanted.items() if k in saved})
    if different:
        raise runs.CheckpointError(
            f"the checkpoint in {out} belongs to another configuration: {'; '.join(different)}. "
            "Leave these options out to go on with it, or choose another folder (--out)."
        )
    if done >= record.training.steps:
        click.echo(f"{out} is finished: all {done} steps are done. {_results(record)}")
        return
    with _usage_errors():
        intervals = _make(Intervals, {**record.options, **wanted})
    record.options = dataclasses.asdict(intervals)
    path = text_path or (None if record.text.path is None else Path(record.text.path))
    text = load_text(path, context=record.model.context)
    if text.digest != record.text.digest:
        raise runs.CheckpointError(
            f"the checkpoint in {out} belongs to another text: it was {record.text.size} bytes of "
            f"{record.text.path or 'the standard library'}, now {text.size} other bytes of {text.name}."
        )
    run = Run(record.model, record.training, text.train)
    _train(run, runs.restore(out, done, run), record, text, out, done=done)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """A value that a config refuses is bad usage."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _make(config: type, values: Mapping[str, Any]) -> Any:
    """A config of those values that are its fields."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})


def _train(run: "Run", state: "State", record: "Record", text: "Text", out: Path, *, done: int) -> None:
    import jax
    from rich.console import Console

    from lutjax.cli._plot import plot_losses
    from lutjax.cli._progress import Report
    from lutjax.training import loop, runs

    steps, history = record.training.steps, record.history
    device = jax.local_devices()[0]
    click.echo(
        f"training on {text.name} ({text.size:,} bytes): {run.n_parameters():,} parameters, {steps} steps of "
        f"{record.training.batch_size} x {record.model.context} bytes on {device.device_kind}; "
        f"bigram baseline {record.bigram:.4f} nats per byte"
        + (f"; resumed after {done} steps" if done else "")
    )
    report = Report(
        Console(), first=done, steps=steps, bytes_per_step=record.training.batch_size * record.model.context
    )

    def log(number: int, loss: float, state: "State") -> None:
        history.train.append((number, loss))
        report.training(number, loss)

    def evaluate(number: int, loss: float, state: "State") -> None:
        windows = None if number == steps else EVALUATION_WINDOWS
        history.test.append((number, run.evaluate(state, text.test, max_windows=windows)))
        report.test(*history.test[-1])

    def save(number: int, loss: float, state: "State") -> None:
        plot_losses(record, out / "loss.png")
        runs.save(out, number, state, record)
        report.resume()

    intervals = Intervals(**record.options)
    hooks = [
        loop.Hook(intervals.log_every, log),
        loop.Hook(intervals.eval_every, evaluate),
        loop.Hook(intervals.checkpoint_every, save),
    ]
    out.mkdir(parents=True, exist_ok=True)
    first, start = done, time.perf_counter()
    with report, loop.stop_on_signal() as stopped:
        state, done = loop.run(run.advance, state, first=done, steps=steps, hooks=hooks, stopped=stopped)
        if done < steps and done % intervals.checkpoint_every and done > first:
            save(done, 0.0, state)
    if done < steps:
        again = _command("train", "lm", "--resume", "--out", str(out))
        click.echo(f"stopped after {done} of {steps} steps. Go on with:\n  {again}")
        raise SystemExit(130)

    from lutjax.cli._generate import sample

    lines = text.test[: record.model.context].tobytes().decode(errors="ignore").splitlines()
    prompt = next((line for line in lines if line.strip()), " ")
    model = run.structure.model(state.params, state.others)
    click.echo(f"{done - first} steps in {time.perf_counter() - start:.0f} s. {_results(record)}")
    click.echo(f"loss curve: {out / 'loss.png'}\ncheckpoint: {out}\nsample:\n")
    click.echo(prompt + sample(model, prompt, 300))
    click.echo(f"\nmore of it:\n  {_command('generate', '--checkpoint', str(out), '--prompt', prompt)}")


def _results(record: "Record") -> str:
    return f"test loss {record.history.test[-1][1]:.4f} nats per byte, bigram baseline {record.bigram:.4f}."


def _command(*words: str) -> str:
    return shlex.join(["lutjax", *words])

"""``lutjax quantize``: int8 tables for a trained language model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lutjax.cli import _run
from lutjax.cli._flags import PATH, Command, echo_error
from lutjax.training.errors import RunError


@click.command(cls=Command)
@click.argument("folder", metavar="RUN", type=PATH)
@click.option(
    "--text", "text_path", type=PATH, help="Training text.  [default: its path in training]"
)
def quantize(folder: Path, text_path: Path | None) -> None:
    """Quantize the tables of a language model to int8.

    RUN is the output folder of `train lm --model gpt` with tables. The best state is tested before
    and after, and written to RUN/quantized for `generate` and lutjax.load.
    """
    from lutjax.training import lm_runs, quantize as deployment, runs

    kind = runs.kind(folder)
    if kind != "lm":
        raise RunError(
            f"{folder} is a run of {runs.COMMANDS[kind]}; expected one of train lm --model gpt."
        )
    target = folder / deployment.FOLDER
    deployment.check_place(target)
    # The lock keeps a training process from deleting the checkpoint in the meantime.
    with runs.lock(folder):
        step, record = runs.read(folder, lm_runs.Record, on_damage=echo_error)
        deployed_record = deployment.deployed_record(folder, record)
        with _run.usage_errors(lm_runs.LanguageModel.refuses, "--text"):
            experiment = lm_runs.LanguageModel.from_record(record, text_path)
        text, model = experiment.text, lm_runs.language_model(folder, step, record)
        deployed = deployment.deployed_model(model, deployed_record)
        losses = []
        for what, one, its_record in (
            ("the trained model", model, record),
            ("the model of integers", deployed, deployed_record),
        ):
            with _progress(f"testing {what}") as progress:
                losses.append(deployment.evaluate(one, its_record, text.test, progress=progress))
        deployment.save(target, step, deployed, deployed_record)

    before, after = losses
    click.echo(
        f"test loss: {before:.4f} nats per byte before, {after:.4f} after ({after - before:+.4f}), "
        f"on {text.name}"
    )
    sizes = (deployment.bytes_of(model), deployment.bytes_of(deployed))
    for name, floats, integers in zip(("tables", "model"), *sizes, strict=True):
        click.echo(
            f"{name}: {floats:,} bytes before, {integers:,} after ({100 * integers / floats:.1f} %)"
        )
    read, deployed_read = (getattr(one.model, "read", None) for one in (record, deployed_record))
    if read != deployed_read:
        click.echo(
            f"The run was trained with --read {read}, and its coefficients "
            f"and tables are rounded only now. A run trained with --read {deployed_read} learns "
            "with that rounding and deploys without a loss."
        )
    words = ("generate", str(target), "--prompt", experiment.prompt)
    click.echo(f"Wrote {target}. Generate text with:\n  {_run.command(*words)}")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console()
    if not console.is_terminal:
        click.echo(f"{what} ...")
        yield lambda share: None
        return
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn(what))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)

"""``lutjax train digits``: a classifier of logic gates."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import FieldsCommand

if TYPE_CHECKING:
    from lutjax.training.classifier import Record, Run
    from lutjax.training.models import State
    from lutjax.training.samples import Samples


def _configs() -> Sequence[type]:
    from lutjax.models import LogicClassifierConfig
    from lutjax.training.classifier import TrainingConfig

    return LogicClassifierConfig, TrainingConfig, _run.Intervals


@click.command(cls=FieldsCommand, configs=_configs)
@click.option(
    "--data",
    "path",
    type=click.Path(path_type=Path),
    help="A .npz file of arrays x [N, F] or [N, H, W] and y [N], integers. Default: scikit-learn's digits.",
)
@_run.out_option("runs/digits")
@_run.resume_option
def digits(path: Path | None, out: Path, resume: bool, fields: Mapping[str, Any]) -> None:
    """Train a classifier of logic gates, on images of digits or on other samples.

    A fifth of the samples is the test part, on which the hard network is tested while the soft one is trained. A run
    that was stopped goes on with --resume, and ends exactly as if it had never been stopped.
    """
    from lutjax.training.samples import SamplesError

    try:
        with _run.errors(out):
            if resume:
                _resume(path, out, fields)
            else:
                _start(path, out, fields)
    except SamplesError as error:
        raise click.BadParameter(str(error), param_hint="--data") from error


def _load(path: Path | None) -> "Samples":
    from lutjax.training.samples import load_digits, load_samples

    return load_digits() if path is None else load_samples(path)


def _start(path: Path | None, out: Path, fields: Mapping[str, Any]) -> None:
    from lutjax.models import LogicClassifierConfig
    from lutjax.training import classifier, runs
    from lutjax.training.samples import split

    _run.check_new(out)
    whole = _load(path)
    sizes = {"in_features": whole.x.shape[1], "n_classes": whole.n_classes}
    with _run.usage_errors():
        model = _run.make(LogicClassifierConfig, {**sizes, **fields})
        training = _run.make(classifier.TrainingConfig, fields)
        intervals = _run.make(_run.Intervals, fields)
    train, test = split(whole, training.split)
    record = classifier.Record(
        model=model,
        training=training,
        samples=classifier.SamplesIdentity(
            None if path is None else str(path.absolute()), len(whole.x), whole.digest
        ),
        baselines=classifier.baselines(train, test, training, model.n_thresholds),
        options=dataclasses.asdict(intervals),
        history=runs.History(),
    )
    run = classifier.Run(model, training, train)
    _train(run, run.init(), record, train, test, out, done=0)


def _resume(path: Path | None, out: Path, fields: Mapping[str, Any]) -> None:
    from lutjax.training import checkpoints, classifier, models, runs
    from lutjax.training.samples import split

    done, record = runs.read(out, classifier.Record)
    _run.check_same(out, {**record.model.to_dict(), **dataclasses.asdict(record.training)}, fields)
    if done >= record.training.steps:
        click.echo(f"{out} is finished: all {done} steps are done. {_results(record)}")
        return
    with _run.usage_errors():
        record.options = dataclasses.asdict(_run.make(_run.Intervals, {**record.options, **fields}))
    path = path or (None if record.samples.path is None else Path(record.samples.path))
    whole = _load(path)
    if whole.digest != record.samples.digest:
        raise checkpoints.CheckpointError(
            f"the checkpoint in {out} belongs to other samples: they were {record.samples.size} of "
            f"{record.samples.path or 'scikit-learn'}, now {len(whole.x)} others of {whole.name}."
        )
    train, test = split(whole, record.training.split)
    run = classifier.Run(record.model, record.training, train)
    _train(run, models.restore(out, done, run), record, train, test, out, done=done)


def _train(
    run: "Run", state: "State", record: "Record", train: "Samples", test: "Samples", out: Path, *, done: int
) -> None:
    import jax
    from rich.console import Console

    from lutjax.cli._plot import plot_confusion
    from lutjax.cli._progress import Report
    from lutjax.training import models

    steps, batch = record.training.steps, record.training.batch_size
    layers = " + ".join(map(str, record.model.layers))
    what = "gates" if record.model.n_inputs == 2 else f"tables of {record.model.n_inputs} inputs"
    click.echo(
        f"training on {len(train.x)} samples of {train.name}, testing on {len(test.x)}: {layers} {what}, "
        f"{run.structure.n_parameters():,} parameters, {steps} steps of {batch} samples on "
        f"{jax.local_devices()[0].device_kind}" + (f"; resumed after {done} steps" if done else "")
    )
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    state = _run.train(
        run.advance,
        state,
        done=done,
        steps=steps,
        intervals=_run.Intervals(**record.options),
        history=record.history,
        report=Report(
            Console(),
            first=done,
            steps=steps,
            speed=lambda seconds: f"{1e3 * seconds:.2f} ms/step",
            measure="hard accuracy",
        ),
        evaluate=lambda number, state: run.accuracy(state, test, hard=True),
        save=lambda number, state: models.save(out, number, state, record),
        again=_run.command("train", "digits", "--resume", "--out", str(out)),
    )
    click.echo(
        f"{steps - done} steps in {time.perf_counter() - start:.0f} s. {_results(record)} "
        f"Soft network: {100 * run.accuracy(state, test, hard=False):.1f} %."
    )
    picture = out / "confusion.png"
    plot_confusion(test.y, run.classes(state, test.x, hard=True), record.model.n_classes, picture)
    click.echo(f"confusion matrix: {picture}\ncheckpoint: {out}")


def _results(record: "Record") -> str:
    others = ", ".join(f"{name} {100 * accuracy:.1f} %" for name, accuracy in record.baselines.items())
    return (
        f"Hard network: {100 * record.history.test[-1][1]:.1f} % of the test part; on the same bits {others}."
    )

"""``lutjax train digits``: a classifier of logic gates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import FieldsCommand


def _configs() -> Sequence[type]:
    from lutjax.models import LogicClassifierConfig
    from lutjax.training.classifier import TrainingConfig
    from lutjax.training.classifier_runs import Options

    return LogicClassifierConfig, TrainingConfig, Options


@click.command(cls=FieldsCommand, configs=_configs)
@click.option(
    "--data",
    "path",
    type=click.Path(path_type=Path),
    help="A .npz file of arrays x [N, F] or [N, H, W] and y [N], integers. Default: scikit-learn's digits.",
)
@_run.options("runs/digits")
def digits(path: Path | None, fields: Mapping[str, Any], **options: Any) -> None:
    """Train a classifier of logic gates, on images of digits or on other samples.

    A fifth of the samples is the test part, on which the hard network is tested while the soft one is trained. The
    digits take about a minute on two CPU cores. A run that was stopped goes on with --resume, and ends exactly as if it
    had never been stopped.
    """
    from lutjax.training.classifier_runs import Classifier, Record
    from lutjax.training.samples import SamplesError

    def new() -> Classifier:
        model, training, intervals = _configs()
        sizes = _run.fields_of(model, fields)
        return Classifier.new(sizes, _run.make(training, fields), _run.make(intervals, fields), path)

    _run.train(
        Classifier,
        Record,
        new=new,
        of=lambda record: Classifier.of(record, path),
        source=(SamplesError, "--data"),
        given=fields,
        other_source=path is not None,
        **options,
    )

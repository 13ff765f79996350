"""``lutjax train digits``: the shorthand of ``train classify`` for digits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run


@_run.training_command("lutjax.training.classifier_runs:Classifier", "runs/digits")
@click.option(
    "--data",
    "path",
    type=click.Path(path_type=Path),
    help="A .npz file of arrays x [N, F] or [N, H, W] and y [N], integers. Default: scikit-learn's digits.",
)
def digits(kind: Any, path: Path | None, fields: Mapping[str, Any], **options: Any) -> None:
    """Train a classifier of logic gates on images of digits: `lutjax train classify`, with fewer options.

    A fifth of the samples is the test part, on which the hard network is tested while the soft one is trained. The
    digits take about a minute on two CPU cores. A run that was stopped goes on with --resume, and ends exactly as if it
    had never been stopped.
    """
    _run.train(kind, fields, option="--data", source={"path": path}, **options)

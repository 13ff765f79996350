"""``lutjax train digits``: a classifier of logic gates."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli import _run

if TYPE_CHECKING:
    from lutjax.training.classifier_runs import Classifier


def _kind() -> "type[Classifier]":
    from lutjax.training.classifier_runs import Classifier

    return Classifier


@_run.training_command(_kind, "runs/digits")
@click.option(
    "--data",
    "path",
    type=click.Path(path_type=Path),
    help="A .npz file of arrays x [N, F] or [N, H, W] and y [N], integers. Default: scikit-learn's digits.",
)
def digits(path: Path | None, fields: Mapping[str, Any], **options: Any) -> None:
    """Train a classifier of logic gates, on images of digits or on other samples.

    A fifth of the samples is the test part, on which the hard network is tested while the soft one is trained. The
    digits take about a minute on two CPU cores. A run that was stopped goes on with --resume, and ends exactly as if it
    had never been stopped.
    """
    _run.train(_kind(), fields, option="--data", source={"path": path}, **options)

"""``lutjax train classify``: logic gate classifiers for images and tabular data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.training.recipes import RECIPES, recipe as recipe_of


class SizeType(click.ParamType):
    """Image height and width."""

    name = "HEIGHTxWIDTH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from lutjax.training import pixels

        try:
            return pixels.parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@_run.training_command(
    "lutjax.training.classifier_runs:Classifier",
    "lutjax.training.classifier_config:CONFIGS",
    "runs/classify",
    data="path target test exclude encoding regression image_size split",
    model="model recipe layers n_thresholds n_inputs tables wiring estimator tau kernels",
    optimization="batch_size learning_rate weight_decay cooldown thresholds augment gate_cost patience baselines seed",
)
@click.option(
    "--data",
    "path",
    type=click.Path(path_type=Path),
    help=".npz file, table, IDX or CIFAR-10 folder, or image folder.  [default: scikit-learn's digits]",
)
@click.option("--target", help="Label column.  [default: none]")
@click.option(
    "--test-data",
    "test",
    type=click.Path(path_type=Path),
    help="Test table with the same columns.  [default: a stratified fifth of --data]",
)
@click.option(
    "--exclude", metavar="COLUMN", multiple=True, help="Table column to ignore; repeatable.  [default: none]"
)
@click.option("--encoding", help="Text encoding of a CSV file, such as latin-1.  [default: UTF-8]")
@click.option("--regression", is_flag=True, help="Fit --target as a number (regression).")
@click.option(
    "--image-size", type=SizeType(), help="Size of scaled images, such as 32x32 or 32.  [default: unscaled]"
)
@click.option(
    "--model",
    type=click.Choice(["gates", "tree"]),
    help="gates: dense logic layers. tree: gate trees on images (LogicTreeNet).  [default: gates]",
)
@click.option(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    metavar="NAME",
    help="Published network; options override it.  [default: none]",
)
def classify(kind: Any, recipe: str | None, fields: Mapping[str, Any], resume: bool, **options: Any) -> None:
    """Train a classifier made of logic gates on images or tables.

    The hard network is tested on the test part of the data, or on a fifth of them. Without --data,
    scikit-learn's digits take about a minute on two CPU cores. --resume continues a stopped run bit for
    bit. `train digits` is the same command with another output folder.
    """
    same: Mapping[str, Any] = {}
    if recipe is not None:
        click.echo(recipe_of(recipe))
        if resume:
            same = {name: value for name, value in recipe_of(recipe).fields().items() if name != "steps"}
    names = ("path", "target", "test", "exclude", "encoding", "regression", "image_size", "model")
    source = {name: options.pop(name) or None for name in names}
    _run.train(
        kind,
        fields,
        option="--data",
        source=source,
        # The digits keep the split of their published results.
        preset={"recipe": recipe, "stratified": source["path"] is not None},
        same=same,
        resume=resume,
        **options,
    )


digits = _run.alias(
    classify, "digits", "runs/digits", "Train such a classifier on scikit-learn's digits by default."
)

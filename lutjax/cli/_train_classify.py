"""``lutjax train classify``: a classifier of logic gates for images and for tables of data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.training.recipes import RECIPES, recipe as recipe_of


class SizeType(click.ParamType):
    """Height and width of images."""

    name = "HEIGHTxWIDTH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from lutjax.training import pixels

        try:
            return pixels.parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@_run.training_command("lutjax.training.classifier_runs:Classifier", "runs/classify")
@click.option(
    "--data",
    "path",
    type=click.Path(path_type=Path),
    help="A .npz file of arrays x [N, F], [N, H, W] or [N, H, W, C] and y [N], or of x_train, y_train, x_test and y_test; a table, .csv, "
    ".tsv (also .gz) or .parquet (with --target); a folder of IDX files (MNIST, Fashion-MNIST) or of CIFAR-10, binary or Python version; or a "
    "folder of PNG, JPEG or other images with one subfolder for each class, also below folders train and test. Default: scikit-learn's digits.",
)
@click.option(
    "--target",
    help="The column of a table that holds the labels. The other columns are numbers or categories. Default: none, for other data.",
)
@click.option(
    "--test-data",
    "test",
    type=click.Path(path_type=Path),
    help="A table with the same columns that is the test part. Default: a fifth of --data, in which each class has its share.",
)
@click.option(
    "--exclude",
    metavar="COLUMN",
    multiple=True,
    help="A column of a table that is left out, such as an id; may be given several times. Default: none.",
)
@click.option("--encoding", help="Of the text of a CSV file, such as latin-1. Default: UTF-8.")
@click.option(
    "--regression",
    is_flag=True,
    help="The column of --target holds numbers, which are learned as they are: the answer is a number, and no class.",
)
@click.option(
    "--image-size",
    type=SizeType(),
    help="Height and width to which the images of a folder are scaled, such as 32x32, or 32 for a square; the aspect ratio is not kept. "
    "Default: their own size, which must be one for all.",
)
@click.option(
    "--model",
    type=click.Choice(["gates", "tree"]),
    help="gates: layers of gates or tables over all numbers of a sample. tree: for images, layers of trees of gates that slide over them "
    "(LogicTreeNet). Default: that of --recipe, or gates.",
)
@click.option(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    help="A published network, whose sizes and rates are shown; the options below override them. Default: none.",
)
def classify(
    kind: Any,
    path: Path | None,
    target: str | None,
    test: Path | None,
    exclude: tuple[str, ...],
    encoding: str | None,
    regression: bool,
    image_size: tuple[int, int] | None,
    model: str | None,
    recipe: str | None,
    fields: Mapping[str, Any],
    resume: bool,
    **options: Any,
) -> None:
    """Train a classifier of logic gates, on images or on a table of data.

    The hard network is tested on the test part while the soft one is trained: the one that the data come with, or a fifth
    of them. `lutjax train digits` is the same command with another folder: without --data both train on scikit-learn's digits, which takes
    about a minute on two CPU cores. With --regression numbers are learned in place of classes. A run that was stopped goes on with --resume, and ends exactly as if it had never been stopped.
    """
    same: Mapping[str, Any] = {}
    if recipe is not None:
        click.echo(recipe_of(recipe))
        if resume:
            same = {name: value for name, value in recipe_of(recipe).fields().items() if name != "steps"}
    _run.train(
        kind,
        fields,
        option="--data",
        source={
            "path": path,
            "target": target,
            "test": test,
            "exclude": exclude or None,
            "encoding": encoding,
            "regression": regression or None,
            "image_size": image_size,
            "model": model,
        },
        # The digits keep the split of their published figures.
        preset={"recipe": recipe, "stratified": path is not None},
        same=same,
        resume=resume,
        **options,
    )


digits = _run.alias(classify, "digits", "runs/digits")

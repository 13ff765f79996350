"""``lutjax train classify``: logic gate classifiers for images and tabular data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import PATH, Integer, Integers, Parsed, parameter_error
from lutjax.training.recipes import RECIPES, recipe as recipe_of


@_run.training_command(
    "lutjax.training.classifier_runs:Classifier",
    "lutjax.training.classifier_config:CONFIGS",
    "runs/classify",
    data="path target test exclude encoding regression image_size split",
    model=(
        "model recipe luts front layers n_thresholds n_inputs tables wiring estimator tau kernels"
    ),
    optimization=(
        "batch_size learning_rate weight_decay cooldown thresholds augment gate_cost patience "
        "baselines seed"
    ),
)
@click.option(
    "--data",
    "path",
    type=PATH,
    help=(
        ".npz file, table, IDX or CIFAR-10 folder, or image folder.  "
        "[default: scikit-learn's digits]"
    ),
)
@click.option("--target", help="Label column.  [default: none]")
@click.option(
    "--test-data", "test", type=PATH, help="Test table.  [default: a stratified fifth of --data]"
)
@click.option(
    "--exclude",
    metavar="COLUMN",
    multiple=True,
    help="Table column to ignore; repeatable.  [default: none]",
)
@click.option("--encoding", help="Encoding of a CSV file.  [default: UTF-8]")
@click.option("--regression", is_flag=True, help="Fit --target as a number (regression).")
@click.option(
    "--image-size",
    type=Parsed("HEIGHTxWIDTH", "lutjax.training.pixels:parse_size"),
    help="Size of scaled images.  [default: unscaled]",
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
    help=(
        "Sizes and rates of a published or measured network; options override them.  "
        "[default: none]"
    ),
)
@click.option(
    "--luts", type=Integer(1), help="Circuit size in 6-input tables, within 5 %.  [default: none]"
)
@click.option(
    "--front", type=Integers(), help="Runs for several --luts, with a plot.  [default: none]"
)
def classify(
    kind: Any,
    recipe: str | None,
    fields: Mapping[str, Any],
    resume: bool,
    luts: int | None,
    front: tuple[int, ...] | None,
    **options: Any,
) -> None:
    """Train a classifier made of logic gates on images or tables.

    The hard network is tested on the test part of the data, or on a fifth of them. Without --data,
    scikit-learn's digits take about a minute on two CPU cores. --resume continues a stopped run bit
    for bit. `train digits` is the same command with another output folder.
    """
    same: Mapping[str, Any] = {}
    if recipe is not None:
        click.echo(recipe_of(recipe))
        # A resumed run must be one of this recipe; only its number of steps may change.
        if resume:
            same = {
                name: value for name, value in recipe_of(recipe).fields().items() if name != "steps"
            }
    names = ("path", "target", "test", "exclude", "encoding", "regression", "image_size", "model")
    source = {name: options.pop(name) or None for name in names}
    settings: dict[str, Any] = {
        "option": "--data",
        "source": source,
        "preset": {
            "recipe": recipe,
            # The digits keep the split of their published results.
            "stratified": source["path"] is not None,
            "progress": click.echo,
            "cross_validate": not options["dry_run"],
        },
        "same": same,
        "resume": resume,
        **options,
    }
    if luts is None and front is None:
        _run.train(kind, fields, **settings)
        return
    sizes = front or (() if luts is None else (luts,))
    _check_sizes(sizes, luts, front, source, settings)
    try:
        _train_sizes(kind, fields, sizes, front is not None, settings)
    except KeyboardInterrupt:
        click.echo("Stopped while choosing a size. Finished runs are intact.")
        raise SystemExit(130) from None


def _check_sizes(
    sizes: tuple[int, ...],
    luts: int | None,
    front: tuple[int, ...] | None,
    source: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Raise UsageError if sizes cannot be chosen with other options; RunError without ABC."""
    from lutjax.training import sizes as sizing

    name = "--front" if front is not None else "--luts"
    if luts is not None and front is not None:
        raise click.UsageError("--luts and --front exclude each other; choose one.")
    if min(sizes) < 1:
        raise parameter_error(name, f"{min(sizes)}; sizes must be at least 1.")
    others = {
        "--resume": settings["resume"],
        "--dry-run": settings["dry_run"],
        "--coordinator": settings["coordinator"],
        "--processes": (settings["n_processes"] or 1) > 1,
    }
    for option, is_given in others.items():
        if is_given:
            what = " a finished size is continued without it" if option == "--resume" else ""
            raise click.UsageError(
                f"{name} starts new runs in one process; leave out {option}.{what}"
            )
    if source["model"] == "tree":
        raise click.UsageError(f"{name} scales layers of gates, not trees; leave out --model tree.")
    sizing.check_abc()


def _train_sizes(
    kind: Any,
    fields: Mapping[str, Any],
    sizes: tuple[int, ...],
    is_front: bool,
    settings: dict[str, Any],
) -> None:
    from lutjax.training import sizes as sizing

    out: Path = settings["out"]
    places = {size: out / str(size) if is_front else out for size in sizes}
    # Before the first of many runs, since each of them takes long.
    for place in places.values():
        _run.check_new(place, kind)

    def make(chosen: Mapping[str, Any]) -> Any:
        with _run.usage_errors(kind.refuses, settings["option"]), _run.too_large(chosen):
            experiment = kind.create(chosen, **settings["source"], **settings["preset"])
            experiment.run.divide(settings["mesh"])
        return experiment

    attempts: list[sizing.Attempt] = []
    points = []

    def show(attempt: sizing.Attempt) -> None:
        attempts.append(attempt)
        click.echo(f"  {attempt}")

    # Attempts at one size tell `find` where to look for the next ones.
    for size, place in places.items():
        click.echo(f"Choosing layers for {size:,} LUT6 ...")
        with _run.usage_errors(kind.refuses, settings["option"]):
            chosen = sizing.find(size, make, fields, attempts=tuple(attempts), on_attempt=show)
        _run.train(kind, chosen.fields, **{**settings, "out": place})
        points.append(sizing.measure(place, size))
        click.echo(
            f"Circuit: {points[-1].lut6:,} LUT6 from inputs to class, "
            f"{100 * (points[-1].lut6 / size - 1):+.1f} % of {size:,}."
        )
    if is_front:
        sizing.write_front(out, points, attempts)
        for line in sizing.front_table(points):
            click.echo(line)
        click.echo(f"Wrote {out / 'front.json'} and {out / 'front.png'}.")


digits = _run.alias(
    classify,
    "digits",
    "runs/digits",
    "Train such a classifier on scikit-learn's digits by default.",
)

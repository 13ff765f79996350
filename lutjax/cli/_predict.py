"""``lutjax predict``: classes and votes of new rows or images."""

import sys
from pathlib import Path

import click

from lutjax.cli import _run
from lutjax.cli._export import progress


@click.command()
@_run.run_argument("run", "--run")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The CSV file to write; one that is there is replaced. Default: standard output.",
)
@click.option(
    "--target",
    help="The column of FILE that holds labels, or the array of a .npz file, or any name for a folder of images in folders of their classes: the "
    "share of rows that are right is also printed, to standard error where the table goes to standard output. Default: none, and labels that "
    "FILE has are not read.",
)
@click.option(
    "--id",
    "ids",
    metavar="COLUMN",
    multiple=True,
    help="A column of FILE that identifies its rows, or an array of a .npz file: the output begins with it; may be given several times. "
    "Default: none. Images have a column with the names of their files.",
)
@click.option("--encoding", help="Of the text of a CSV file, such as latin-1. Default: UTF-8.")
def predict(
    run: Path, file: Path, out: Path | None, target: str | None, ids: tuple[str, ...], encoding: str | None
) -> None:
    """Predict the classes of the rows or images in FILE with the classifier of RUN.

    RUN is a run of `train classify`, the folder of its --out, or a bundle of a classifier (`lutjax save`, `lutjax import`). FILE is a table, .csv, .tsv or .parquet, whose
    columns have the names of those of training; a .npz file with an array x, or x_test; an image, or a folder of images, also in subfolders;
    or a folder of IDX files or of CIFAR-10. The test part is taken of a folder that has one. Labels are not needed.

    The CSV table has a line for each row, in order: the name of its class in a column with the name of the target, and the votes for each class. For a run of
    --regression it has the number, and how many bits that is made of. A line for an image begins with the name of its file. An imported network takes arrays and images, and its
    classes are numbers.
    """
    from lutjax.files._files import atomically
    from lutjax.training import predictions, raw
    from lutjax.training.reports import Errors
    from lutjax.training.samples import SamplesError

    if str(file) == "-" and not file.exists():
        raise click.BadParameter(
            "it is -, the standard input; the ending of a name tells what a file is: save what comes there, such as to rows.csv, and give that file.",
            param_hint="FILE",
        )
    with progress("predicting") as doing:
        doing("reading the run")
        trained = predictions.load(run, on_damage=lambda text: click.echo(text, err=True))
        doing(f"reading {file}")
        try:
            given = raw.read(file, trained.form, target=target, encoding=encoding, ids=ids)
            numbers = None if given.labels is None else trained.form.label_numbers(given.labels)
        except SamplesError as error:
            raise click.BadParameter(str(error), param_hint="FILE") from error
        doing("predicting")
        found = trained.predict_numbers(given.numbers)
    for doubt in (*given.remarks, *trained.form.doubts(given.numbers)):
        click.echo(doubt, err=True)
    if out is None:
        found.write(sys.stdout, given.ids)
    else:
        with atomically(out) as path, path.open("w", newline="", encoding="utf-8") as written:
            found.write(written, given.ids)
        click.echo(f"{len(found)} rows are written to {out}")
    if numbers is not None and trained.form.regression:
        click.echo(f"{Errors.of(numbers, found.numbers)} on {len(found)} rows.", err=out is None)
    elif numbers is not None:
        right = int((found.numbers == numbers).sum())
        click.echo(
            f"{100 * right / len(found):.2f} % are right: {right} of {len(found)} rows.", err=out is None
        )

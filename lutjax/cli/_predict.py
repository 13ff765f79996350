"""``lutjax predict``: classes and votes for new rows or images."""

import functools
import sys
from pathlib import Path

import click

from lutjax.cli import _run
from lutjax.cli._export import progress
from lutjax.cli._flags import FILE, PATH, Command, echo_error, parameter_error


@click.command(cls=Command)
@_run.run_argument("run", "--run")
@click.argument("file", metavar="FILE", type=PATH)
@click.option("--out", type=FILE, help="CSV file to write or replace.  [default: standard output]")
@click.option(
    "--target",
    help=(
        "Column, or array of a .npz file, with labels: print the accuracy.  "
        "[default: ignore labels]"
    ),
)
@click.option(
    "--id",
    "ids",
    metavar="COLUMN",
    multiple=True,
    help="Column that identifies rows, copied to the output; repeatable.  [default: none]",
)
@click.option("--encoding", help="Text encoding of a CSV file, such as latin-1.  [default: UTF-8]")
def predict(
    run: Path,
    file: Path,
    out: Path | None,
    target: str | None,
    ids: tuple[str, ...],
    encoding: str | None,
) -> None:
    """Predict the classes of rows or images with a classifier.

    RUN is the output folder of `train classify`, or a bundle of a classifier. FILE is a .csv, .tsv
    or .parquet table with the training columns, a .npz file with an array x or x_test, an image, a
    folder of images, or a folder of IDX or CIFAR-10 files. The output is a CSV table with the class
    and the votes of each row.
    """
    from lutjax.files.atomic import write_atomically
    from lutjax.training import predictions, raw
    from lutjax.training.reports import Errors
    from lutjax.training.samples import SamplesError

    if str(file) == "-" and not file.exists():
        raise parameter_error("FILE", "standard input has no file type; save it as rows.csv first.")
    with progress("predicting") as doing:
        doing("reading the run")
        trained = predictions.load(run, on_damage=echo_error)
        doing(f"reading {file}")
        try:
            samples = raw.read(file, trained.form, target=target, encoding=encoding, ids=ids)
            numbers = None if samples.labels is None else trained.form.label_numbers(samples.labels)
        except SamplesError as error:
            raise parameter_error("FILE", error) from error
        doing("predicting")
        predicted = trained.predict_numbers(samples.numbers)
    # Samples in other units would be classified without an error.
    for doubt in (*samples.remarks, *trained.form.doubts(samples.numbers)):
        click.echo(doubt, err=True)
    if out is None:
        predicted.write(sys.stdout, samples.ids)
    else:
        with write_atomically(out) as path, path.open("w", newline="", encoding="utf-8") as written:
            predicted.write(written, samples.ids)
        click.echo(f"Wrote {len(predicted)} rows to {out}")
    # Not on standard output, if that is the table.
    echo = functools.partial(click.echo, err=out is None)
    if numbers is not None and trained.form.regression:
        echo(f"{Errors.compute(numbers, predicted.numbers)} on {len(predicted)} rows.")
    elif numbers is not None:
        right, n_rows = int((predicted.numbers == numbers).sum()), len(predicted)
        echo(f"Accuracy: {100 * right / n_rows:.2f} % ({right} of {n_rows} rows)")

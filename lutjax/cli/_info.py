"""``lutjax info``: facts about a run or a bundle."""

import json
from pathlib import Path

import click

from lutjax.cli import _run


@click.command()
@_run.run_argument("run", "--run")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print an object of JSON, with every loss and every test, for programs.",
)
def info(run: Path, as_json: bool) -> None:
    """Show a run or a bundle: its model, sizes, options, data, losses, tests and versions.

    RUN is a run of any `train` command, the folder of its --out, or a bundle (`lutjax save`, `lutjax import`), which may have no run. Nothing is trained, and the data are not read.
    """
    from lutjax.training import about

    found = about.facts(run, on_damage=lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for line in about.lines(found):
        click.echo(line)

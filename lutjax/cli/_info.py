"""``lutjax info``: facts about a run, bundle or overlay."""

import json
from pathlib import Path

import click

from lutjax.cli import _run
from lutjax.cli._flags import Command, echo_error


@click.command(cls=Command, compiles=False)
@_run.run_argument("run", "--run")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with all losses and tests.")
def info(run: Path, as_json: bool) -> None:
    """Show the model, options, data, losses and versions of a run.

    RUN is the output folder of any `train` command, a bundle, or an overlay of a mapped table.
    """
    from lutjax.training import about

    facts = about.facts(run, on_damage=echo_error)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for line in about.lines(facts):
        click.echo(line)

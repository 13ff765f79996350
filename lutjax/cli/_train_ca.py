"""``lutjax train ca``: cellular automata of logic gates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import Finite
from lutjax.training.presets import EXPERIMENTS


@_run.training_command("lutjax.training.automaton_runs:Automaton", "runs/ca")
@click.option(
    "--experiment",
    type=click.Choice(list(EXPERIMENTS)),
    help="What to learn, with the published sizes; the options below override them. Default: life, or picture with --target. A run ends where "
    "the task is solved: on two CPU cores life after half a minute, the checkerboards and letter after one to four minutes, lizard after up to "
    "half an hour, which is a minute on an H100.",
)
@click.option(
    "--target",
    "path",
    type=click.Path(path_type=Path),
    help="An image to draw, of at most 64 x 64 pixels in black, white, red, green, blue and their mixtures. Default: the picture of --experiment.",
)
@click.option(
    "--threshold",
    type=Finite(0, 1),
    help="What is brighter in the image is 1. Default: values must be 0 or full.",
)
def ca(
    kind: Any,
    experiment: str | None,
    path: Path | None,
    threshold: float | None,
    fields: Mapping[str, Any],
    resume: bool,
    **options: Any,
) -> None:
    """Train a cellular automaton whose rule is a circuit of logic gates.

    Losses are squared errors of a grid; wrong bits are those of a grid when each gate is the likeliest one. The best
    automaton so far is kept. A run that was stopped goes on with --resume, and ends exactly as if it had never been
    stopped.
    """
    if resume and path is not None:
        raise click.UsageError("--target is part of the checkpoint; leave it out with --resume.")
    _run.train(
        kind,
        fields,
        option="--target",
        preset={
            "experiment": experiment or ("life" if path is None else "picture"),
            "path": path,
            "threshold": threshold,
        },
        same={"experiment": experiment} if experiment else {},
        resume=resume,
        **options,
    )

"""``lutjax train ca``: cellular automata of logic gates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import PATH, Finite
from lutjax.training.presets import EXPERIMENTS


@_run.training_command(
    "lutjax.training.automaton_runs:Automaton",
    "lutjax.training.automaton_config:CONFIGS",
    "runs/ca",
    data="experiment path threshold",
    model="channels kernels perception update periodic",
    optimization=(
        "batch_size learning_rate weight_decay size n_steps runs hard_share "
        "last_hard_share clip seed"
    ),
)
@click.option(
    "--experiment",
    type=click.Choice(list(EXPERIMENTS)),
    help="Published task and sizes; options override them.  [default: life; picture with --target]",
)
@click.option(
    "--target",
    "path",
    type=PATH,
    help="Image to draw, up to 64 x 64 pixels.  [default: picture of --experiment]",
)
@click.option(
    "--threshold",
    type=Finite(0, 1),
    help="Brightness above which a color is 1.  [default: 0 or full only]",
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
    """Train a cellular automaton made of logic gates.

    The loss is the squared error of a grid; tests count wrong bits with hard gates. The best
    automaton is kept. --resume continues a stopped run bit for bit.
    """
    # The record holds the bits of the target, so the image need not exist any more.
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

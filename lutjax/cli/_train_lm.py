"""``lutjax train lm``: byte-level language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._huge_pages import huge_pages_option, restart_with_huge_pages
from lutjax.training import presets


@_run.training_command(
    "lutjax.training.lm_runs:LanguageModel",
    "lutjax.training.lm_config:CONFIGS",
    "runs/lm",
    data="text_path",
    model=(
        "model preset features context n_layers n_heads feed_forward lut_heads lut_tables "
        "lut_bits dropout dtype"
    ),
    optimization=(
        "batch_size learning_rate optimizer table_optimizer schedule warmup cooldown "
        "weight_decay clip seed"
    ),
)
@click.option(
    "--text",
    "text_path",
    type=click.Path(path_type=Path),
    help="Text file, or folder of text files.  [default: source of Python's standard library]",
)
@click.option(
    "--model",
    type=click.Choice(list(presets.PRESETS)),
    help=f"gpt: attention with table layers. lut: tables only.  [default: {presets.MODEL}]",
)
@click.option(
    "--preset",
    type=click.Choice(
        list(dict.fromkeys(name for each in presets.PRESETS.values() for name in each))
    ),
    help=(
        "Sizes and rates; options override them.  [default: demo, about 2 minutes on two CPU cores]"
    ),
)
@huge_pages_option
def lm(
    kind: Any,
    text_path: Path | None,
    model: str | None,
    preset: str | None,
    huge_pages: bool,
    fields: Mapping[str, Any],
    out: Path,
    resume: bool,
    **options: Any,
) -> None:
    """Train a byte-level language model.

    The last 10 % of the text is the test part; losses are in nats per byte. --resume continues a
    stopped run bit for bit.
    """
    if huge_pages:
        restart_with_huge_pages()
    # A preset given with --resume must be that of the run.
    try:
        same = presets.preset(model or presets.MODEL, preset) if resume and preset else {}
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    experiment: Any = _run.train(
        kind,
        fields,
        option="--text",
        source={"path": text_path, "model": model},
        preset={"preset": preset or "demo"},
        # A resumed run keeps its number of steps unless the option is given.
        same={name: value for name, value in same.items() if name != "steps"},
        out=out,
        resume=resume,
        **options,
    )
    if experiment is not None:
        words = ("generate", str(out), "--prompt", experiment.prompt)
        click.echo(f"Generate more text with:\n  {_run.command(*words)}")

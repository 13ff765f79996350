"""``lutjax train lm``: the byte language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.training import presets


@_run.training_command("lutjax.training.lm_runs:LanguageModel", "runs/lm")
@click.option(
    "--text",
    "text_path",
    type=click.Path(path_type=Path),
    help="A file, or a folder of text files. Default: the source of Python's standard library.",
)
@click.option(
    "--model",
    type=click.Choice(list(presets.PRESETS)),
    help="gpt: softmax attention, with a feed-forward layer that --feed-forward chooses. lut: tables for everything, "
    f"without matrix products. Default: {presets.MODEL}.",
)
@click.option(
    "--preset",
    type=click.Choice(list(dict.fromkeys(name for each in presets.PRESETS.values() for name in each))),
    help="Sizes and rates; the options below override them. demo (default): about 2 minutes on two CPU cores. small: "
    "minutes on an H100; of lut 811 M parameters (3.2 GB). reference, the published model of lut: 813 M parameters "
    "(3.3 GB), a minute on an H100. --dry-run measures it here.",
)
@click.option(
    "--huge-pages",
    is_flag=True,
    help="Start again with large memory pages (a setting of glibc): faster for large tables on a CPU.",
)
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
    """Train a language model on bytes.

    The last 10 % of the text is the test part. Losses are in nats per byte. A run that was stopped goes on
    with --resume, and ends exactly as if it had never been stopped.
    """
    from lutjax.cli._huge_pages import restart_with_huge_pages

    if huge_pages:
        restart_with_huge_pages()
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
        # The steps of a run are its own, unless they are asked for.
        same={name: value for name, value in same.items() if name != "steps"},
        out=out,
        resume=resume,
        **options,
    )
    if experiment is not None:
        words = ("generate", str(out), "--prompt", experiment.prompt)
        click.echo(f"more text:\n  {_run.command(*words)}")

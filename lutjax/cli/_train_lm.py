"""``lutjax train lm``: the byte language model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import FieldsCommand
from lutjax.training.presets import PRESETS


def _configs() -> Sequence[type]:
    from lutjax.models import LUTTransformerConfig
    from lutjax.training.experiments import Intervals
    from lutjax.training.lm import TrainingConfig

    return LUTTransformerConfig, TrainingConfig, Intervals


@click.command(cls=FieldsCommand, configs=_configs)
@click.option(
    "--text",
    "text_path",
    type=click.Path(path_type=Path),
    help="A file, or a folder of text files. Default: the source of Python's standard library.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help="Sizes and rates; the options below override them. demo (default): 10.7 M parameters, about 3 minutes on two CPU "
    "cores. small: 811 M parameters (3.2 GB), 2.6 minutes on an H100. reference, the published model: 813 M parameters "
    "(3.3 GB), a minute on an H100. --dry-run measures it here.",
)
@_run.options("runs/lm")
@click.option(
    "--huge-pages",
    is_flag=True,
    help="Start again with large memory pages (a setting of glibc): faster for large tables on a CPU.",
)
def lm(
    text_path: Path | None,
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
    from lutjax.training.lm_runs import LanguageModel, Record
    from lutjax.training.text import TextError

    if huge_pages:
        restart_with_huge_pages()

    def new() -> LanguageModel:
        values = {**PRESETS[preset or "demo"], **fields}
        model, training, intervals = (_run.make(config, values) for config in _configs())
        return LanguageModel.new(model, training, intervals, text_path)

    given = dict(fields)
    if resume and preset:  # the steps of a run are its own, unless they are asked for
        given = {**{name: value for name, value in PRESETS[preset].items() if name != "steps"}, **given}
    experiment = _run.train(
        LanguageModel,
        Record,
        new=new,
        of=lambda record: LanguageModel.of(record, text_path),
        source=(TextError, "--text"),
        given=given,
        other_source=text_path is not None,
        out=out,
        resume=resume,
        **options,
    )
    if isinstance(experiment, LanguageModel):
        words = ("generate", "--checkpoint", str(out), "--prompt", experiment.prompt)
        click.echo(f"more text:\n  {_run.command(*words)}")

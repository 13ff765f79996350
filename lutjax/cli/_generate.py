"""``lutjax generate``: text from a trained model."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from lutjax.cli._flags import Finite, MeshType
from lutjax.cli._run import process_options, processes, run_argument
from lutjax.training.errors import RunError


@click.command()
@run_argument("folder", "--checkpoint")
@click.option("--prompt", required=True, help="The text to continue.")
@click.option(
    "--bytes", "n_bytes", type=click.IntRange(1), default=500, show_default=True, help="How much to add."
)
@click.option(
    "--temperature",
    type=Finite(0),
    default=0.8,
    show_default=True,
    help="Below 1 more likely text, above 1 more varied; 0 takes the likeliest byte.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, 256),
    help="Draw only from so many of the likeliest bytes. Default: from all.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the draws.")
@click.option(
    "--integers",
    type=click.Choice(["int16", "int8"]),
    help="Round a model of train lm --model lut to whole numbers, with such tables, and draw as the C program does that "
    "`export` makes of it: the same bytes. Default: draw from the model as it was trained.",
)
@click.option(
    "--mesh",
    type=MeshType(),
    help="Devices over which tables are divided, such as detectors=4, for a model that is larger than one of them. Default: one device.",
)
@click.option(
    "--speed",
    is_flag=True,
    help="Write the text again, compiled by now, and print bytes a second to standard error.",
)
def generate(coordinator: str | None, n_processes: int | None, process: int | None, **options: Any) -> None:
    """Continue a text with the language model of RUN.

    RUN is the folder of a run of `train lm`: what it got as --out; or its folder quantised, which `quantise` made.
    """
    with processes(coordinator, n_processes, process):
        _generate(**options)


generate.params += process_options("Divide the model over the devices of several processes")


def _generate(
    folder: Path,
    prompt: str,
    n_bytes: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    integers: str | None,
    mesh: Mapping[str, int] | None,
    speed: bool,
) -> None:
    """Continue a text; the first of several processes prints it."""
    if not prompt:
        raise click.BadParameter("it is empty; give at least one byte to continue.", param_hint="--prompt")

    if integers is not None and mesh is not None:
        raise click.UsageError("--integers computes as the C program does, on one device; leave --mesh out.")

    import jax

    from lutjax.training import hosts, lm_runs, meshes, runs

    if hosts.count() > 1:
        if integers is not None:
            raise click.UsageError(
                "--integers computes as the C program does, on one device; start one process."
            )
        if mesh is None:
            mesh = {meshes.DETECTORS: jax.device_count()}

    step, record = runs.read(folder, lm_runs.Record, on_damage=_say_error)
    try:
        model = lm_runs.language_model(folder, step, record, mesh)
    except RunError:
        raise
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--mesh") from error
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed}
    if integers is None:
        _print(prompt, lambda: lm_runs.sample(model, prompt, n_bytes, **options), n_bytes if speed else None)
        return

    from lutjax.training import integers as whole

    try:
        whole.thousandths(temperature)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--temperature") from error
    rounded = whole.rounded_model(folder, model, tables=integers)

    def sample() -> str:
        added = rounded.generate(prompt.encode(errors="surrogateescape"), n_bytes, **options)
        return added.decode(errors="replace")

    _print(prompt, sample, n_bytes if speed else None)


def _print(prompt: str, sample: Callable[[], str], n_bytes: int | None) -> None:
    """Print a prompt and what follows; if its number of bytes is given, also how many a second."""
    from lutjax.training import hosts

    text = prompt + sample()
    if hosts.is_first():
        click.echo(text)
    if n_bytes is not None:
        start = time.perf_counter()
        sample()
        _say_error(f"{n_bytes / (time.perf_counter() - start):,.0f} bytes a second.")


def _say_error(text: str) -> None:
    from lutjax.training import hosts

    if hosts.is_first():
        click.echo(text, err=True)

"""``lutjax export``: circuit files for hardware, C and the web from a trained model."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import PATH, Command, Integer, echo_error, flag_of, replace_fields

PROGRAMS = "jax"
"""Format of exported JAX programs, which is not a circuit format."""


class Formats(click.ParamType):
    """Comma-separated format names; an empty tuple selects all."""

    name = "formats"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "all" or isinstance(value, tuple):
            return () if value == "all" else value
        from lutjax.circuits.deployment import FORMATS

        words = tuple(word.strip() for word in value.split(","))
        for word in words:
            if word not in (*FORMATS, PROGRAMS):
                self.fail(
                    f"{word!r} is not one of {', '.join(FORMATS)}, {PROGRAMS}, or all.", param, ctx
                )
        if PROGRAMS in words and len(words) > 1:
            self.fail(f"{PROGRAMS} is not a circuit format; export it separately.", param, ctx)
        return words


@click.command(
    cls=Command,
    sections={
        "Output": "formats folder name target",
        "Interface": "inputs outputs",
        "Circuit": "registers lut optimize integers",
    },
)
@_run.run_argument("run", "--run")
@click.option(
    "--format",
    "formats",
    type=Formats(),
    metavar="FORMAT,...",
    default="all",
    help="verilog, blif, aiger, alkaid, json, c, html, dot (with commas) or jax.",
)
@click.option(
    "--out",
    "folder",
    type=PATH,
    help="Output folder.  [default: RUN/circuit, RUN/jax or RUN/TARGET]",
)
@click.option(
    "--inputs", help="Input format: uint8, fixed12.4, ..., rows or bits.  [default: from the data]"
)
@click.option(
    "--outputs",
    type=click.Choice(["class", "votes", "bits"]),
    help="Classifier outputs.  [default: class]",
)
@click.option(
    "--name", help="Name of the Verilog module, C functions and files.  [default: from RUN]"
)
@click.option(
    "--registers",
    type=Integer(0),
    default=0,
    help="Gate levels between Verilog registers; 0 for none.",
)
@click.option(
    "--lut",
    type=Integer(2, 6),
    help="Inputs per FPGA lookup table.  [default: gates of up to 3 inputs]",
)
@click.option(
    "--optimize",
    type=click.Choice(["ands", "gates", "lut6"]),
    help="Minimize AND nodes, gates or 6-input tables (pyosys).  [default: nothing]",
)
@click.option(
    "--integers",
    type=click.Choice(["int16", "int8"]),
    help="Language-model table dtype.  [default: int16]",
)
@click.option(
    "--target",
    type=click.Choice(["cortex-m4", "avr", "riscv32"]),
    help="Microcontroller for a C library (--format c).  [default: none]",
)
def export(run: Path, formats: tuple[str, ...], folder: Path | None, **wanted: Any) -> None:
    """Export a model as Verilog, C, netlists, HTML or StableHLO.

    RUN is the output folder of `train classify`, `train ca` or `train lm`, or a bundle. The export
    includes samples with answers, test programs and a Makefile; `lutjax verify` proves it. A
    language model is exported as a C program. `--format jax` writes StableHLO programs that run
    without lutjax.
    """
    # Programs of JAX are no circuits: a run gives either, by different code.
    if formats == (PROGRAMS,):
        for name, value in wanted.items():
            if value:
                raise click.UsageError(f"--format jax has no option {flag_of(name)}; leave it out.")
        _export_programs(run, folder or run / PROGRAMS)
        return
    from lutjax.training import export as exporting

    start = time.perf_counter()
    target = wanted["target"]
    if target and formats != ("c",):
        raise click.UsageError(f"--target {target} is for programs in C: add --format c.")
    place = folder or run / (target or exporting.FOLDER)
    try:
        chosen = exporting.Wanted(formats=formats, **wanted)
    except ValueError as error:
        raise click.UsageError(
            replace_fields(str(error), ["name", "registers", "target"])
        ) from error
    with progress("exporting") as doing:
        lines = exporting.export(run, place, chosen, progress=doing, on_damage=echo_error)
    for line in lines:
        click.echo(line)
    again = _run.command("verify", str(place))
    click.echo(f"Wrote {place} in {time.perf_counter() - start:.1f} s. Verify it with:\n  {again}")


def _export_programs(run: Path, folder: Path) -> None:
    from lutjax.bundles import programs

    start = time.perf_counter()
    with progress("exporting") as doing:
        written = programs.write(_run.model(run), folder, progress=doing)
    for path in written:
        click.echo(f"  {path.name:<11}  {path.stat().st_size:>11,} bytes")
    click.echo(
        f"Wrote {folder} in {time.perf_counter() - start:.1f} s, "
        f"for {', '.join(programs.PLATFORMS)}. {programs.ABOUT} describes their inputs."
    )


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show progress on a terminal; yield its callback. Other outputs show nothing."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"{what} ...") as status:
        yield lambda text: status.update(f"{text} ...")

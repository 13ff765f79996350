"""``lutjax export``: a trained model as a circuit, in files for hardware, C and the web."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import by_options

PROGRAMS = "jax"
"""Format of programs of JAX, which is none of a circuit."""


class Formats(click.ParamType):
    """Type of names of formats with commas between them, or of all: an empty tuple."""

    name = "formats"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "all" or isinstance(value, tuple):
            return () if value == "all" else value
        from lutjax.circuits.deployment import FORMATS

        words = tuple(word.strip() for word in value.split(","))
        for word in words:
            if word not in (*FORMATS, PROGRAMS):
                self.fail(f"{word!r} is none of {', '.join(FORMATS)}, {PROGRAMS}, or all.", param, ctx)
        if PROGRAMS in words and len(words) > 1:
            self.fail(f"{PROGRAMS} is no format of a circuit: export it by itself.", param, ctx)
        return words


@click.command()
@_run.run_argument("run", "--run")
@click.option(
    "--format",
    "formats",
    type=Formats(),
    metavar="FORMAT,...",
    default="all",
    show_default=True,
    help="verilog, blif, aiger, alkaid, json, c, html, dot, or several with commas between them; or jax: programs of JAX.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder to write. Default: RUN/circuit, RUN/jax, or RUN and the name of the target.",
)
@click.option(
    "--inputs",
    help="Format of a sample's numbers: uint8 and the like, fixed12.4 for 12 bits of which 4 are after the point; rows for one port per table column, "
    "in units that suit the numbers; or bits to leave the comparison with thresholds outside. Default: rows for tables, uint8 where all samples are such "
    "numbers, and bits for other bundles without samples.",
)
@click.option(
    "--outputs",
    type=click.Choice(["class", "votes", "bits"]),
    help="What a classifier answers. Default: the class.",
)
@click.option(
    "--name",
    help="Of the Verilog module, the C functions and the files. Default: that of the folder RUN of a classifier (of runs/adult adult; of runs/classify that of its data), automaton or lm.",
)
@click.option(
    "--registers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Levels of gates between two registers of the Verilog module; 0 for none.",
)
@click.option(
    "--lut",
    type=click.IntRange(2, 6),
    help="Inputs of the look-up tables of an FPGA that the circuit is for: larger gates, and fewer of them. Default: gates of up "
    "to three inputs.",
)
@click.option(
    "--optimize",
    type=click.Choice(["ands", "gates", "lut6"]),
    help="What is made fewer of before the circuit is written: AND nodes, gates of two inputs of any kind (for at most 12 inputs), or look-up tables of 6 "
    "inputs. ands and lut6 need pyosys. Default: nothing.",
)
@click.option(
    "--integers",
    type=click.Choice(["int16", "int8"]),
    help="Numbers in the tables of a language model. Default: int16; int8 takes half the bytes.",
)
@click.option(
    "--target",
    type=click.Choice(["cortex-m4", "avr", "riscv32"]),
    help="Microcontroller that C is for: a library for Arduino and PlatformIO that answers one sample at a time, and a report of flash, RAM and "
    "instructions. Needs --format c. Default: none.",
)
def export(
    run: Path,
    formats: tuple[str, ...],
    folder: Path | None,
    inputs: str | None,
    outputs: str | None,
    name: str | None,
    registers: int,
    lut: int | None,
    optimize: str | None,
    integers: str | None,
    target: str | None,
) -> None:
    """Export the circuit of RUN: Verilog, BLIF, AIGER, ALIR, C, JSON, Graphviz text, a web page.

    RUN is a run of `train classify`, `train ca` or `train lm`, the folder of its --out, or a bundle (`lutjax save`, `lutjax import`).

    The folder also gets samples with their answers, programs that test the C code and the Verilog on them, a Makefile, and a
    manifest. A bundle has no samples: random inputs take their place. `lutjax verify` then proves that every file computes what the trained model computes. A language model is exported
    as a C program.

    With --format jax the model is written as programs that JAX runs without lutjax, for CPUs, NVIDIA GPUs and TPUs and batches of any size, beside its bundle (`lutjax save`).
    """
    if formats == (PROGRAMS,):
        others = {
            "--inputs": inputs,
            "--outputs": outputs,
            "--name": name,
            "--lut": lut,
            "--optimize": optimize,
            "--target": target,
        }
        for option, value in {**others, "--registers": registers, "--integers": integers}.items():
            if value:
                raise click.UsageError(f"--format jax has no option {option}; leave it out.")
        _export_programs(run, folder or run / PROGRAMS)
        return
    from lutjax.training import export as exporting

    start = time.perf_counter()
    if target and formats != ("c",):
        raise click.UsageError(f"--target {target} is for programs in C: add --format c.")
    place = folder or run / (target or exporting.FOLDER)
    try:
        wanted = exporting.Wanted(
            formats=formats,
            inputs=inputs,
            outputs=outputs,
            name=name,
            registers=registers,
            lut=lut,
            optimize=optimize,
            integers=integers,
            target=target,
        )
    except ValueError as error:
        raise click.UsageError(by_options(str(error), ["name", "registers", "target"])) from error
    with progress("exporting") as doing:
        lines = exporting.export(
            run, place, wanted, progress=doing, on_damage=lambda text: click.echo(text, err=True)
        )
    for line in lines:
        click.echo(line)
    again = _run.command("verify", str(place))
    click.echo(f"written to {place} in {time.perf_counter() - start:.1f} s. Prove it by:\n  {again}")


def _export_programs(run: Path, folder: Path) -> None:
    """Write the programs of a run or of a bundle."""
    from lutjax.bundles import programs

    start = time.perf_counter()
    with progress("exporting") as doing:
        written = programs.write(_run.model(run), folder, progress=doing)
    for path in written:
        click.echo(f"  {path.name:<11}  {path.stat().st_size:>11,} bytes")
    click.echo(
        f"written to {folder} in {time.perf_counter() - start:.1f} s, for {', '.join(programs.PLATFORMS)}. "
        f"{programs.ABOUT} says what they take."
    )


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is done; yield how it is told. Nothing is shown where there is none."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"{what} ...") as status:
        yield lambda text: status.update(f"{text} ...")

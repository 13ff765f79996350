"""``lutjax bench``: device times of the ops, compared with their memory traffic."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._flags import Command, Finite, Integer
from lutjax.cli._huge_pages import huge_pages_option, restart_with_huge_pages
from lutjax.cli._measuring import (
    Progress,
    check_file,
    dtype_option,
    file_option,
    make_console,
    shape_option,
)
from lutjax.models._fields import MOST_INT
from lutjax.names import BENCHMARK_ROWS

if TYPE_CHECKING:
    from lutjax.benchmark.report import Result

MARKS = {
    "--csv": b"shape,sizes,row,implementation",
    "--png": b"Software\0lutjax bench",
    "--markdown": b"| shape | what | by |",
}
"""Marker near the beginning of each option's output file."""


@click.command(
    cls=Command,
    sections={
        "What to measure": "asked rows implementations dtypes scale lm_batch",
        "Measurement": "repeats huge_pages",
        "Output": "csv png markdown",
    },
)
@shape_option("all; a few on a CPU")
@click.option(
    "--row",
    "rows",
    type=click.Choice(BENCHMARK_ROWS),
    multiple=True,
    help="Direction to measure; repeatable.  [default: all]",
)
@click.option(
    "--implementation",
    "implementations",
    type=click.Choice(["native", "triton", "pallas", "xla"]),
    multiple=True,
    help="Implementation to measure; repeatable.  [default: all available]",
)
@dtype_option()
@click.option(
    "--accumulate",
    "scale",
    type=Finite(0, 2.0**31, min_open=True),
    metavar="SCALE",
    help="Scale of fixed-point sums, as lutjax.FixedPoint(SCALE).  [default: floating-point sums]",
)
@click.option(
    "--lm-batch", type=Integer(1, MOST_INT), default=128, help="Windows per step of --shape lm."
)
@click.option("--repeats", type=Integer(3, MOST_INT), default=20, help="Timed loops per row.")
@file_option("--csv", "CSV file to write, row by row.")
@file_option("--png", "Plot to write.")
@file_option("--markdown", "Markdown table to write.")
@huge_pages_option
def bench(
    asked: tuple[Any, ...],
    rows: tuple[str, ...],
    implementations: tuple[str, ...],
    dtypes: tuple[str, ...],
    scale: float | None,
    lm_batch: int,
    repeats: int,
    csv: Path | None,
    png: Path | None,
    markdown: Path | None,
    huge_pages: bool,
) -> None:
    """Benchmark the ops on this machine, forward, backward and update.

    Times are device times per call in one compiled loop, next to the time a copy of the same bytes
    takes. Ctrl-C shows finished rows.
    """
    # Before minutes of measurements, and before a restart repeats them.
    for name, path in (("--csv", csv), ("--png", png), ("--markdown", markdown)):
        if path is not None:
            check_file(name, path, MARKS[name])
    if huge_pages:
        restart_with_huge_pages()

    import jax

    import lutjax
    from lutjax.benchmark import report, shapes
    from lutjax.benchmark.measurements import IMPLEMENTATIONS, accumulates, measurements
    from lutjax.benchmark.results import Machine, run_measurement
    from lutjax.cases import Tag

    # Shapes for accelerators take hours on a CPU.
    tag = Tag.CPU if jax.default_backend() == "cpu" else Tag.BENCH
    chosen = asked or tuple(shapes.named_shapes(tag).values())
    if scale is not None:
        without = [shapes.name_of(shape) for shape in chosen if not accumulates(shape)]
        if asked and without:
            raise click.UsageError(
                f"--accumulate is {scale:g}, but {', '.join(without)} has no sums that take it: "
                "leave it or the shape out."
            )
        sums = lutjax.FixedPoint(scale)
        chosen = tuple(dataclasses.replace(s, accumulate=sums) for s in chosen if accumulates(s))
    todo = [
        measurement
        for shape in chosen
        for dtype in dtypes or ("float32",)
        for measurement in measurements(
            shapes.LanguageModel(lm_batch) if shape == shapes.LanguageModel() else shape,
            rows=rows,
            dtype=dtype,
            implementations=implementations or IMPLEMENTATIONS,
        )
    ]
    if not todo:
        raise click.UsageError(
            f"nothing to measure: on {jax.devices()[0].device_kind} no implementation that was "
            "asked for has a kernel for these shapes and rows. "
            "Leave --implementation or --row out."
        )
    console = make_console()
    machine = None
    results: list[Result] = []
    with (
        contextlib.nullcontext() if csv is None else csv.open("w", newline="") as file,
        contextlib.suppress(KeyboardInterrupt),
        Progress(console, len(todo)) as progress,
    ):
        # Row by row, so that an interrupted benchmark leaves its finished rows.
        write = None if file is None else report.csv_writer(file)
        progress.starts("the bandwidth of a copy")
        machine = Machine.measure_default()
        for one in todo:
            progress.starts(f"{one.name}, {one.row}, {one.implementation}, {one.dtype}")
            results.append(run_measurement(machine, one, repeats=repeats))
            if write is not None:
                write(results[-1])
            progress.show_result(results[-1])
    if machine is not None:
        console.print(str(machine), highlight=False, soft_wrap=True)
        console.print(report.table(results, console))
        if markdown is not None:
            markdown.write_text(report.markdown(machine, results), encoding="utf-8")
        if png is not None:
            report.plot(machine, results, png)
    for path in (csv, markdown, png):
        if path is not None and path.exists():
            click.echo(f"Wrote {path}")
    if len(results) < len(todo):
        click.echo(f"Interrupted after {len(results)} of {len(todo)} rows.")
        raise SystemExit(130)

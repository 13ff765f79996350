"""``lutjax status``: support matrix."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lutjax.cli._flags import Command, parameter_error
from lutjax.cli._measuring import Progress, check_file, file_option, make_console

if TYPE_CHECKING:
    from lutjax.status.checks import CheckOne
    from lutjax.status.matrix import Cell, Column

MARKS = {"--markdown": b"Written by `lutjax status", "--record": b'"state"'}
"""Marker near the beginning of each option's output file."""

_HERE = Path("<this device>")  # value of --record without a path


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print totals, gaps and all cells as JSON.")
@click.option("--recorded", is_flag=True, help="Show recorded results only; check nothing.")
@click.option(
    "--compile", "compiles", is_flag=True, help="Compile for TPUs instead (requires libtpu)."
)
@click.option("--op", "ops", multiple=True, help="Op to show; repeatable.  [default: all]")
@file_option("--markdown", "Page to write the matrix to.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    is_flag=False,
    flag_value=str(_HERE),
    help="Write results to FILE, or to the record of this device.  [default: none]",
)
def status(
    as_json: bool,
    recorded: bool,
    compiles: bool,
    ops: tuple[str, ...],
    markdown: Path | None,
    record: Path | None,
) -> None:
    """Check and show the support matrix of all ops.

    Every op, direction, implementation and dtype runs on the devices of this machine and is
    compared with the reference. Other devices show recorded runs, compilations or lowerings. It
    takes one or two minutes; Ctrl-C shows partial results. The exit status is 1 if a cell is
    missing or fails.
    """
    if recorded and (compiles or record is not None):
        raise click.UsageError("--recorded checks nothing; leave out --compile and --record.")

    # Checking processes share a GPU. JAX reads the variable when it is imported.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from lutjax.status import checks, matrix, report, results

    if record == _HERE:
        record = results.path_of("TPU" if compiles else jax.devices()[0].device_kind)
    for name, path in (("--markdown", markdown), ("--record", record)):
        if path is not None:
            check_file(name, path, MARKS[name])
    known = {op for op, _ in matrix.rows()}
    for op in ops:
        if op not in known:
            raise parameter_error("--op", f"{op!r} is not one of {', '.join(sorted(known))}.")
    columns = [c for c in matrix.COLUMNS if not compiles or c.platform == "tpu"]
    check: checks.CheckOne | None
    check = checks.check_compilation if compiles else None if recorded else checks.check
    places = [place for place in matrix.all_positions(columns) if not ops or place[0] in ops]
    console = make_console()
    cells: list[matrix.Cell] = []
    recorded_cells = {} if compiles else results.read()
    try:
        with contextlib.ExitStack() as stack:
            if check is not None:
                keys = dict.fromkeys(matrix.to_check(recorded_cells, columns, ops or None))
                check = stack.enter_context(checks.in_processes(check, keys))
                check = stack.enter_context(_with_progress(check, len(keys)))
            for cell in matrix.matrix(recorded_cells, check, columns, ops or None):
                cells.append(cell)
    except KeyboardInterrupt:
        click.echo(f"Interrupted after {len(cells)} of {len(places)} cells.", err=True)
    if as_json:
        click.echo(report.as_json(cells))
    else:
        gaps = report.gaps(cells)
        console.print(f"{len(cells)} cells: {report.summary(cells)}.", soft_wrap=True)
        console.print(f"gaps: {len(gaps)}" if gaps else "gaps: none")
        for line in gaps:
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
        for table in report.rich_tables(cells):
            console.print(table)
        legend = [f"{word}: {meaning}" for word, meaning in report.LEGEND.items()]
        missing = [*report.not_installed(cells), *report.reasons(cells)]
        for title, lines in (
            ("legend", legend),
            ("validation results", report.remarks(cells)),
            ("missing kernels", missing),
        ):
            console.print(title)
            for line in lines:
                console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    if markdown is not None:
        markdown.write_text(report.markdown(cells), encoding="utf-8")
    if record is not None:
        backend = "tpu" if compiles else jax.default_backend()
        device = "cuda" if backend == "gpu" else backend
        results.write(cells, record, device, recorded_cells)
    for path in (markdown, record):
        if path is not None:
            click.echo(f"Wrote {path}", err=True)
    if len(cells) < len(places):
        raise SystemExit(130)
    if any(cell.state.is_gap for cell in cells):
        raise SystemExit(1)


@contextlib.contextmanager
def _with_progress(check: "CheckOne", n_checks: int) -> "Iterator[CheckOne]":
    console = make_console(stderr=True)
    console.print(
        f"Checking {n_checks} combinations of op, implementation and dtype", highlight=False
    )
    with Progress(console, n_checks) as progress:

        def check_with_progress(op: str, column: "Column", dtype: str) -> "dict[str, Cell]":
            progress.starts(f"{op}, {column.key}, {dtype}")
            cells = check(op, column, dtype)
            states = dict.fromkeys(str(cell.state) for cell in cells.values())
            progress.show_result(f"{op}, {column.key}, {dtype}: {', '.join(states)}")
            return cells

        yield check_with_progress

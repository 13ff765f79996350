"""``lutjax tune``: fastest kernel configs on this device."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._flags import FILE, Command, Renamed, parameter_error
from lutjax.cli._measuring import Progress, check_folder, dtype_option, make_console, shape_option

if TYPE_CHECKING:
    from rich.table import Table

    from lutjax.benchmark.search import Found
    from lutjax.tuning import Document


@click.command(cls=Command)
@click.option(
    "--out",
    "--output",
    "output",
    cls=Renamed,
    type=FILE,
    required=True,
    metavar="FILE",
    help="JSON file of kernel configs, updated after every kernel.",
)
@click.option("--update", is_flag=True, help="Measure again and keep other entries of FILE.")
@click.option("--resume", is_flag=True, help="Measure only kernels and sizes missing in FILE.")
@shape_option("all names")
@dtype_option()
@click.option(
    "--effort",
    type=click.Choice(["quick", "thorough"]),
    default="quick",
    help="Vary one config field at a time, or two.",
)
def tune(
    output: Path,
    update: bool,
    resume: bool,
    asked: tuple[Any, ...],
    dtypes: tuple[str, ...],
    effort: Any,
) -> None:
    """Find the fastest Triton kernel configs on this device.

    Each kernel of the shapes, forward, backward and update, is measured until no config that
    differs in one field is faster. Use the result with lutjax.tuning.use(FILE). Ctrl-C keeps
    finished kernels; --resume continues.
    """
    check_folder("--out", output)
    if output.exists() and not (update or resume):
        raise parameter_error(
            "--out", f"{str(output)!r} exists; pass --update to replace or --resume to add entries."
        )
    if update and resume:
        raise click.UsageError("--update and --resume exclude each other; choose one.")

    from lutjax.benchmark import search, shapes
    from lutjax.cases import Tag

    document = _document(output)
    try:
        todo = search.kernels(
            list(asked or shapes.named_shapes(Tag.TUNE).values()), dtypes or ("float32",)
        )
    except search.NoKernelError as error:
        raise click.ClickException(str(error)) from None
    if resume:
        todo = [kernel for kernel in todo if kernel.key not in document.entries]
        if not todo:
            click.echo(f"{output} has all of these kernels and sizes.")
            return
    console = make_console()
    results: list[Found] = []
    with contextlib.suppress(KeyboardInterrupt), Progress(console, len(todo)) as progress:
        for kernel in todo:
            progress.starts(str(kernel))
            results.append(search.tune(kernel, effort, progress.starts))
            # Written after each kernel, since all of them take hours.
            entry = results[-1].entry
            if entry is not None:
                document = document.with_entry(entry)
                document.write(output)
            progress.show_result(results[-1])
    console.print(_table(results))
    if any(result.entry for result in results):
        click.echo(f"Wrote {output}")
    if len(results) < len(todo):
        click.echo(
            f"Interrupted after {len(results)} of {len(todo)} kernels; continue with --resume."
        )
        raise SystemExit(130)


def _document(output: Path) -> "Document":
    import dataclasses

    from lutjax import tuning
    from lutjax.benchmark import search

    new = search.document()
    if not output.exists():
        return new
    try:
        old = tuning.read(output)
    except (OSError, ValueError) as error:
        raise parameter_error("--out", error) from None
    if old.device != new.device:
        raise parameter_error(
            "--out",
            f"{str(output)!r} was measured on {old.device}, this is {new.device}; "
            "choose another file.",
        )
    return dataclasses.replace(new, entries=old.entries)


def _table(results: Iterable["Found"]) -> "Table":
    import rich.box
    from rich.table import Table

    table = Table(box=rich.box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("kernel", "sizes"):
        table.add_column(name)
    for name in ("rule", "best", "launch", "measured", "do not run"):
        table.add_column(name, justify="right")
    for result in results:
        entry, asked = result.entry, result.kernel.asked
        cells = ["", "", result.problem]
        if entry is not None:
            how = entry.launch
            cells = [
                "" if entry.rule_microseconds is None else f"{entry.rule_microseconds} us",
                f"{entry.microseconds} us",
                (
                    f"{how.rows} x {how.outputs}, {how.detectors or 'all'} detectors, "
                    f"{how.warps} warps"
                ),
            ]
        sizes = " ".join(f"{name}={size}" for name, size in asked.sizes.items())
        table.add_row(asked.kernel, sizes, *cells, str(result.measured), str(result.skipped))
    return table

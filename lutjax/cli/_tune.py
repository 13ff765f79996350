"""``lutjax tune``: the launches of kernels that are the fastest on this device."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.benchmark import shapes
from lutjax.cases import Tag
from lutjax.cli._flags import Renamed
from lutjax.cli._measuring import SHAPES, Progress, ShapeType, check_folder, make_console

if TYPE_CHECKING:
    from rich.table import Table

    from lutjax.benchmark.search import Found
    from lutjax.tuning._files import Document


@click.command(epilog=SHAPES)
@click.option(
    "--out",
    "--output",
    "output",
    cls=Renamed,
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="The file of launches (JSON). It is written anew after every kernel.",
)
@click.option("--update", is_flag=True, help="FILE exists: measure again, and keep what else it has.")
@click.option(
    "--resume", is_flag=True, help="FILE exists: measure only kernels and sizes that it does not have."
)
@click.option(
    "--shape",
    "asked",
    type=ShapeType(),
    multiple=True,
    help="A name, or sizes such as fc:4096,32,32,16,10; can be given several times. Default: all names.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    help="Of the tables. Default: float32.",
)
@click.option(
    "--effort",
    type=click.Choice(["quick", "thorough"]),
    default="quick",
    show_default=True,
    help="Vary one field of a launch at a time, or two.",
)
def tune(
    output: Path, update: bool, resume: bool, asked: tuple[Any, ...], dtypes: tuple[str, ...], effort: Any
) -> None:
    """Measure how kernels in Triton are best launched on this device.

    For every kernel that the shapes launch, forward, backward and update, launches are measured until none that
    differs in a field is faster. `lutjax.tuning.use(FILE)` uses them in a block of calls; nothing else is changed.
    Ctrl-C ends the run with what is measured so far; --resume goes on.
    """
    check_folder("--out", output)
    if output.exists() and not (update or resume):
        raise click.BadParameter(
            f"{str(output)!r} exists; --update measures again and keeps what else it has, --resume measures only what it "
            "does not have.",
            param_hint="--out",
        )
    if update and resume:
        raise click.UsageError("--update measures again what --resume leaves out; give one of them.")

    from lutjax.benchmark import search

    document = _document(output)
    try:
        todo = search.kernels(list(asked or shapes.named(Tag.TUNE).values()), dtypes or ("float32",))
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
            entry = results[-1].entry
            if entry is not None:
                document = document.with_entry(entry)
                document.write(output)
            progress.ended(results[-1])
    console.print(_table(results))
    if any(found.entry for found in results):
        click.echo(f"written: {output}")
    if len(results) < len(todo):
        click.echo(f"interrupted after {len(results)} of {len(todo)} kernels; go on with --resume.")
        raise SystemExit(130)


def _document(output: Path) -> "Document":
    """Return the file's launches as if measured by the installed packages; no launches if there is no file."""
    import dataclasses

    from lutjax.benchmark import search
    from lutjax.tuning import _files

    new = search.document()
    if not output.exists():
        return new
    try:
        old = _files.read(output)
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--out") from None
    if old.device != new.device:
        raise click.BadParameter(
            f"{str(output)!r} was measured on {old.device}, this is {new.device}; choose another file.",
            param_hint="--out",
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
    for found in results:
        entry, asked = found.entry, found.kernel.asked
        cells = ["", "", found.problem]
        if entry is not None:
            how = entry.launch
            cells = [
                "" if entry.rule_microseconds is None else f"{entry.rule_microseconds} us",
                f"{entry.microseconds} us",
                f"{how.rows} x {how.outputs}, {how.detectors or 'all'} detectors, {how.warps} warps",
            ]
        sizes = " ".join(f"{name}={size}" for name, size in asked.sizes.items())
        table.add_row(asked.kernel, sizes, *cells, str(found.measured), str(found.skipped))
    return table

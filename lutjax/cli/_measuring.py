"""Options and output shared by the measuring commands."""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._flags import Parsed, parameter_error

if TYPE_CHECKING:
    from rich.console import Console

_HEAD = 4096  # bytes at the beginning with the marker
_WIDTH = 150  # table width in a file or pipe


class ShapeType(Parsed):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "list" and ctx is not None:
            from lutjax.benchmark import shapes

            click.echo("Names:\n  " + "\n  ".join(shapes.named_shapes()))
            click.echo(
                "Sizes:\n  " + "\n  ".join(kind.usage for _, kind in shapes.kinds().values())
            )
            ctx.exit()
        return super().convert(value, param, ctx)


def check_folder(option: str, path: Path) -> None:
    if not os.access(path.absolute().parent, os.W_OK):
        raise parameter_error(
            option, f"{str(path.parent)!r} is not a writable folder; choose another one."
        )


def check_file(option: str, path: Path, mark: bytes) -> None:
    """Reject an unwritable directory, or a file without the marker of this option's output."""
    # A mistyped path must not replace a file of the user.
    check_folder(option, path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head and mark not in head:
        raise parameter_error(
            option,
            f"{str(path)!r} exists, but is not from {option}; move it or choose another file.",
        )


def make_console(stderr: bool = False) -> "Console":
    from rich.console import Console

    # Rich takes 80 columns for a pipe, in which tables would be cut off.
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=_WIDTH, stderr=stderr)


def file_option(name: str, what: str) -> Callable[..., Any]:
    return click.option(
        name,
        type=click.Path(path_type=Path, dir_okay=False, writable=True),
        help=f"{what}  [default: none]",
    )


def shape_option(default: str) -> Callable[..., Any]:
    return click.option(
        "--shape",
        "asked",
        type=ShapeType("shape", "lutjax.benchmark.shapes:parse"),
        multiple=True,
        help=(
            "Name, or sizes such as fc:4096,32,32,16,10; repeatable; "
            f"'list' lists all.  [default: {default}]"
        ),
    )


def dtype_option() -> Callable[..., Any]:
    return click.option(
        "--dtype",
        "dtypes",
        type=click.Choice(["float32", "bfloat16"]),
        multiple=True,
        help="Table dtype; repeatable.  [default: float32]",
    )


class Progress:
    """Context manager for measurement progress: a bar on a terminal, else a line per result."""

    def __init__(self, console: "Console", count: int):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=count)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def starts(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def show_result(self, result: object) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)
        else:
            self._console.print(str(result), highlight=False, soft_wrap=True)

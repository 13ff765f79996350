"""One-line messages for machine, directory and run errors, without tracebacks."""

import errno
import io
import os
import re
import sys
from typing import Any

import click

from lutjax import extras
from lutjax.files.errors import FolderError

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED|Out of memory"
"""Pattern for XLA's out-of-memory errors."""


_EXPLAINED = (
    FolderError, OSError, MemoryError, RuntimeError, AssertionError, FloatingPointError,
    OverflowError,
)  # fmt: skip
"""Types of errors for which `explain` may have a message; JAX raises an AssertionError for some."""


class Commands(click.Group):
    """Command group with one-line errors and a nonzero status for machine or run failures."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; escape characters that the terminal cannot encode."""
        # Names of files and classes may have any characters, and a message must not fail for one.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # in click's own output, such as --help
            message = explain(error, training=False)
            if message is None:
                raise
            click.echo(f"Error: {message}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            message = extras.install_hint(f"lutjax {ctx.invoked_subcommand}", error)
            if message is None:
                raise
            raise click.ClickException(message) from error
        except _EXPLAINED as error:
            message = explain(error, training=ctx.invoked_subcommand == "train")
            if message is None:
                raise
            raise click.ClickException(message) from error


def explain(error: BaseException, *, training: bool) -> str | None:
    """Return a message for the user, or None for a bug; `training` may leave checkpoints."""
    if isinstance(error, FolderError):
        return str(error)
    if isinstance(error, FloatingPointError):
        return f"{error} Lower --learning-rate." if training else None
    if isinstance(error, OverflowError):
        return f"a size is too large: {error}. Choose smaller sizes."
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and re.search(OUT_OF_MEMORY, str(error))
    ):
        # Its own message names the remedy. Not imported yet, it cannot have raised the error.
        if isinstance(error, MemoryError) and "lutjax.tables.host" in sys.modules:
            from lutjax.tables.host import HostMemoryError

            if isinstance(error, HostMemoryError):
                return str(error)
        where = "this machine" if isinstance(error, MemoryError) else "the device"
        advice = "Choose smaller sizes."
        if training:
            advice = (
                "Checkpoints are intact: continue with --resume on a machine with more memory, "
                "or start in another folder with a smaller --batch-size or model."
            )
        return f"{where} is out of memory. {advice}"
    if isinstance(error, OSError):
        return _explain_os_error(error, training)
    return _explain_missing_device()


def _explain_os_error(error: OSError, training: bool) -> str | None:
    # click ends quietly at a broken pipe; an error without a number is a bug.
    if error.errno is None or error.errno == errno.EPIPE:
        return None
    where = "" if error.filename is None else f" ({error.filename})"
    full = " Free some space or choose another folder" + (
        "; checkpoints are intact, continue with --resume." if training else "."
    )
    advice = {
        errno.ENOSPC: full,
        errno.EDQUOT: full,
        errno.EFBIG: full.replace("Free some space", "Raise the limit of file sizes (ulimit -f)"),
        errno.EROFS: " Choose a writable folder.",
        errno.EACCES: " Choose a readable and writable folder.",
    }.get(error.errno, "")
    return f"{error.strerror or os.strerror(error.errno)}{where}.{advice}"


def _explain_missing_device() -> str | None:
    """Return a message if no device is available, else None; only another JAX call can tell."""
    if "jax" not in sys.modules:
        return None
    import jax

    # A RuntimeError of XLA may be a bug. If devices are available, it has another cause.
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        why = str(error).split("(set JAX_PLATFORMS")[0].strip()
        return (
            f"JAX found no {asked} device{': ' if why else '.'}{why} Set JAX_PLATFORMS to another "
            "platform, such as cpu, or leave it out."
        )
    return None

"""Errors that say what is wrong with a machine, a folder or a run, for every command: one line instead of a traceback."""

import errno
import os
import sys
from typing import Any

import click

from lutjax.training.errors import RunError


class Commands(click.Group):
    """A group of commands whose errors are one line and a status that is not 0, where the machine or a run is at fault."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (
            RunError,
            OSError,
            MemoryError,
            RuntimeError,
            AssertionError,
            FloatingPointError,
        ) as error:
            message = explain(error)
            if message is None:
                raise
            raise click.ClickException(message) from error


def explain(error: BaseException) -> str | None:
    """What an error says to who gave the command; None if it is not the machine's or a run's, but a mistake in lutjax."""
    match error:
        case RunError():
            return str(error)
        case FloatingPointError():
            return f"{error} Lower --learning-rate."
        case OSError():
            return _explain_os_error(error)
        case MemoryError():
            return f"this machine is out of memory: {error} {_SMALLER}".replace(":  ", ". ")
    if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return f"the device is out of memory. {_SMALLER}"
    return _explain_missing_device()


_SMALLER = (
    "Checkpoints are whole: go on with --resume where more is free, or start again in another folder with a smaller "
    "--batch-size or model."
)


def _explain_os_error(error: OSError) -> str | None:
    if error.errno is None or error.errno == errno.EPIPE:
        return None
    where = "" if error.filename is None else f" ({error.filename})"
    advice = {
        errno.ENOSPC: " Free some space, or choose another folder; checkpoints are whole, and --resume goes on.",
        errno.EDQUOT: " Free some space, or choose another folder; checkpoints are whole, and --resume goes on.",
        errno.EROFS: " Choose a folder that can be written.",
        errno.EACCES: " Choose a folder that can be read and written.",
    }.get(error.errno, "")
    return f"{error.strerror or os.strerror(error.errno)}{where}.{advice}"


def _explain_missing_device() -> str | None:
    """That there is no device to run on, if it is so: only asking JAX again tells."""
    if "jax" not in sys.modules:
        return None
    import jax

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        why = str(error).split("(set JAX_PLATFORMS")[0].strip()
        return (
            f"JAX finds no device of the platform {asked} here{': ' if why else '.'}{why} Set JAX_PLATFORMS to another one, "
            "such as cpu, or leave it out."
        )
    return None

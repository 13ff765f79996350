"""Programs of others, run to their end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


def run(
    words: Sequence[str | Path], folder: str | Path, seconds: float | int, *, where: str = ""
) -> tuple[int, str]:
    """Return the status with which a program ends, and all that it prints.

    Args:
      words: the program and its arguments.
      folder: in which it runs.
      seconds: after which it is ended.
      where: begins the message of the error.

    Raises:
      TimeoutError: the time was over.
      OSError: the machine refuses to run it.
    """
    try:
        done = subprocess.run(
            list(map(str, words)),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{where}no result after {seconds:g} seconds.") from None
    return done.returncode, done.stdout

"""External programs, run to completion."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


def run(
    words: Sequence[str | Path], folder: str | Path, seconds: float | int, *, where: str = ""
) -> tuple[int, str]:
    """Return the exit status and output of a program; messages begin with `where`."""
    try:
        # Without standard input, a tool that asks a question ends instead of waiting.
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

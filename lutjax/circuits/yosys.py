"""Yosys synthesis tool, from ``pip install pyosys``."""

import importlib.util
import json
import pathlib
import sys
from collections.abc import Sequence

from lutjax.circuits import _programs

# A separate process, because a Yosys error exits the process.
_PROGRAM = """
import json, sys
from pyosys import libyosys
design = libyosys.Design()
for command in json.loads(sys.argv[1]):
    libyosys.run_pass("tee -q -a yosys.log " + command, design)
"""


def is_installed() -> bool:
    """Return True if pyosys is installed."""
    return importlib.util.find_spec("pyosys") is not None


def run(
    commands: Sequence[str], folder: str | pathlib.Path, *, seconds: float | int = 600, where: str
) -> str:
    """Run Yosys passes in a folder, which receives ``yosys.log``, and return the output.

    Raises:
      RuntimeError: pyosys is not installed, or a command fails.
      TimeoutError: the time limit was exceeded.
    """
    if not is_installed():
        raise RuntimeError(f"{where}: pyosys is not installed; `pip install pyosys` brings Yosys.")
    words = [sys.executable, "-c", _PROGRAM, json.dumps(list(commands))]
    status, printed = _programs.run(words, folder, seconds, where=f"{where}: ")
    log = pathlib.Path(folder, "yosys.log")
    said = log.read_text(errors="replace") if log.is_file() else printed
    if status:
        raise RuntimeError(f"{where}: Yosys failed: {' '.join(said.split())[-300:]}")
    return said

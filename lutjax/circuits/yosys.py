"""Yosys, the synthesis tool that ``pip install pyosys`` brings."""

import importlib.util
import json
import pathlib
import sys
from collections.abc import Sequence

from lutjax.circuits import _programs

# A process of its own, since an error of Yosys ends the process.
_PROGRAM = """
import json, sys
from pyosys import libyosys
design = libyosys.Design()
for command in json.loads(sys.argv[1]):
    libyosys.run_pass("tee -q -a yosys.log " + command, design)
"""


def is_installed() -> bool:
    """Return whether pyosys is installed."""
    return importlib.util.find_spec("pyosys") is not None


def run(
    commands: Sequence[str], folder: str | pathlib.Path, *, seconds: float | int = 600, where: str
) -> str:
    """Run commands of Yosys, and return what they print.

    Args:
      commands: each a pass with its arguments.
      folder: in which file names of the commands are; it gets ``yosys.log``.
      seconds: after which it is ended.
      where: begins the messages of errors.

    Raises:
      RuntimeError: pyosys is not installed, or a command fails.
      TimeoutError: the time was over.
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

"""Verilog simulation with Icarus Verilog, if installed."""

import dataclasses
import pathlib
import shutil
import tempfile
import time

from lutjax.circuits import _programs


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Result of a testbench.

    Attributes:
      passed: whether its line begins with PASS.
      line: printed line, or the first line of a simulator error.
      seconds: duration of compilation and simulation.
    """

    passed: bool
    line: str
    seconds: float

    def __bool__(self) -> bool:
        return self.passed


def find() -> str | None:
    """Return the path of ``iverilog``, or None if it is not installed."""
    return shutil.which("iverilog") if shutil.which("vvp") else None


def run(module: str, testbench: str, *, seconds: float | int = 600) -> Simulation:
    """Simulate a testbench for a `verilog.write` module with Icarus Verilog, and a time limit.

    Raises:
      RuntimeError: Icarus Verilog is not installed.
    """
    compiler = find()
    if compiler is None:
        raise RuntimeError(
            "simulate.run: iverilog is not on the path; "
            "install Icarus Verilog (Debian, Ubuntu: `apt install iverilog`)."
        )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("module.v", module), ("testbench.v", testbench)):
            pathlib.Path(folder, name).write_text(text, encoding="utf-8")
        passed, line = False, ""
        compile_command = [compiler, "-g2001", "-o", "testbench.vvp", "testbench.v", "module.v"]
        for command in (compile_command, ["vvp", "-n", "testbench.vvp"]):
            remaining = max(seconds - (time.perf_counter() - start), 0)
            try:
                status, text = _programs.run(command, folder, remaining)
            except TimeoutError:
                passed, line = False, f"no result after {seconds:g} seconds"
                break
            lines = text.strip().splitlines() or [f"{command[0]} printed nothing"]
            verdicts = [row for row in lines if row.startswith(("PASS", "FAIL"))]
            line = (verdicts or lines)[0]
            # A simulator may print warnings and exit normally after an error.
            passed = status == 0 and len(verdicts) == 1 and line.startswith("PASS")
            if status:
                break
    return Simulation(passed, line, time.perf_counter() - start)

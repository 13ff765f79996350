"""Optional packages: the message if one is missing, and its advice works."""

import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from folders import ROOT

from lutjax import extras as _extras


@pytest.fixture
def installed_from(monkeypatch):
    """Return a function simulating a pip installation from a folder or an index."""

    def install(folder: Path | None, *, editable: bool = False) -> None:
        url = (
            {}
            if folder is None
            else {"url": folder.as_uri(), "dir_info": {"editable": True} if editable else {}}
        )
        monkeypatch.setattr(_extras, "__file__", "/nowhere/site-packages/lutjax/extras.py")
        monkeypatch.setattr(_extras, "_direct_url", lambda: url)
        monkeypatch.setattr(_extras, "_checkout", inspect.unwrap(_extras._checkout))

    return install


def targets(command: str) -> list[str]:
    pip, install, *words = shlex.split(command)
    assert (pip, install) == ("pip", "install")
    return [word for word in words if not word.startswith("-")]


def extras() -> set[str]:
    return set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


@pytest.mark.parametrize("package", [*_extras.EXTRAS, _extras.NATIVE])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the checkout", "elsewhere"])
def test_a_checkout_is_named_with_an_extra_that_it_has(
    package, elsewhere, installed_from, tmp_path, monkeypatch
):
    installed_from(ROOT)
    monkeypatch.chdir(tmp_path if elsewhere else ROOT)
    [target] = targets(_extras.command(package))
    folder, extra = re.fullmatch(r"(.*?)(?:\[(\w+)\])?", target).groups()
    assert (Path.cwd() / folder / "pyproject.toml").is_file()
    if package == _extras.NATIVE:
        assert Path(folder).resolve() == ROOT / "native"
        assert extra is None
    else:
        assert Path(folder).resolve() == ROOT
        assert extra in extras()
    assert Path(folder).is_absolute() == elsewhere


def test_commands_of_a_checkout(installed_from, monkeypatch):
    monkeypatch.chdir(ROOT)
    installed_from(ROOT)
    assert _extras.command("safetensors") == 'pip install ".[bundles]"'
    assert _extras.command("lutjax_cpu") == "pip install ./native"
    assert _extras.command("optax", "uvicorn", "click") == 'pip install ".[apps,serve]"'
    assert _extras.command("optax", "no_such_package") == ""
    installed_from(ROOT, editable=True)
    assert _extras.command("safetensors", "lutjax_cpu") == 'pip install -e ".[bundles]" ./native'


def test_a_wheel_without_a_checkout_names_packages_of_an_index(installed_from, tmp_path):
    for folder in (None, tmp_path / "deleted"):
        installed_from(folder)
        assert _extras.command("orbax", "safetensors") == "pip install orbax-checkpoint safetensors"
        assert _extras.command("lutjax_cpu") == "pip install ./native in a checkout of lutjax"


def test_pages_name_no_package_that_is_on_no_index():
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "native" / "README.md"]
    for folder, pattern in (
        ("docs", "*.md"),
        ("docs", "*.py"),
        ("lutjax", "*.py"),
        ("native/lutjax_cpu", "*.py"),
    ):
        files += (ROOT / folder).rglob(pattern)
    for file in files:
        result = re.findall(
            r"pip install [^\n`&]*?\blutjax(?:\[|-cpu|\b(?=[`\"' ]))[^\n]*",
            file.read_text(encoding="utf-8"),
        )
        assert not result, (file, result)


def test_commands_of_pages_name_extras_of_the_package():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    result = [
        name
        for page in pages
        for names in re.findall(
            r"pip install [^\n]*?\"\.\[([\w,]+)\]", page.read_text(encoding="utf-8")
        )
        for name in names.split(",")
    ]
    assert len(result) > 10
    assert set(result) <= extras()


# ------------------------------------------------------------------------------------- names of packages that need one
LISTED = """
import inspect, json, pydoc, rlcompleter, sys
for package in json.loads(sys.argv[1]):
    sys.modules[package] = None
import lutjax
for name in ("", ".bundles", ".circuits", ".convert", ".layers", ".models", ".serving", ".training", ".wiring"):
    module = __import__(f"lutjax{name}", fromlist=["lutjax"])
    members = dict(inspect.getmembers(module))
    assert set(members) >= set(dir(module)), name
    completed = rlcompleter.Completer({"module": module}).attr_matches("module.")
    assert {word.split(".")[1].rstrip("()") for word in completed} >= {w for w in dir(module) if w[0] != "_"}, name
    assert len(pydoc.plain(pydoc.render_doc(module)).splitlines()) > 10, name
print(*dir(lutjax))
print(*dir(lutjax.bundles))
print(*dir(lutjax.models))
"""


def listed(*missing: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", LISTED, json.dumps(missing)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_help_and_completion_without_any_extra():
    package, bundles, models = listed(*_extras.EXTRAS)
    assert {"save", "load", "lookup", "models"} <= set(package)
    assert {"Bundle", "read"} <= set(bundles)
    assert "GPT" not in models


# ------------------------------------------------------------------------------------- pip itself
@pytest.mark.slow
@pytest.mark.parametrize("package", ["safetensors", "lutjax_cpu"])
def test_the_command_installs(package, installed_from, tmp_path, monkeypatch):
    installed_from(ROOT)
    monkeypatch.chdir(ROOT)
    command = shlex.split(_extras.command(package))
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    reached = subprocess.run(
        [python, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, "jaxtyping"],
        check=False,
    )
    if reached.returncode:
        pytest.skip("pip reaches no index")
    # Only the package itself of the native kernels: they need lutjax, which is of the checkout.
    words = ["--no-deps"] if package == _extras.NATIVE else []
    subprocess.run([python, "-m", *command, *words], check=True, timeout=540)
    result = subprocess.run(
        [python, "-c", f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "True"

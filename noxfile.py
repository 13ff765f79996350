"""Checks of the repository, for `.ci/run` and the GitHub workflows: `nox -l` lists them."""

import os
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
AXE = "node_modules/axe-core/axe.min.js"  # npm install --no-save axe-core
DEV = ("-e", ".[dev]")
WITH_NATIVE = nox.parametrize("native", [False, True], ids=["plain", "native"])


def install_native(session: nox.Session) -> None:
    """Build and install the native kernels at every instruction level, and check their objects."""
    with tempfile.TemporaryDirectory() as build:
        options = (f"build-dir={build}", "cmake.define.LUTJAX_QUICK=ON")
        session.install("./native", *(f"--config-settings={option}" for option in options))
        session.run_install("python", "native/check_objects.py", build)
    session.run_install("python", "tests/support/native_kernels.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling and the layers of imports."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    session.install(*DEV)
    session.run("python", "hatch_build.py")  # stubs of layers that are made at import
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the fast tests on this Python."""
    session.install(*DEV)
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
@WITH_NATIVE
def minimum(session: nox.Session, native: bool) -> None:
    """Run the fast tests on the oldest Python with the oldest supported dependencies."""
    pins = [name.replace(">=", "==") for name in PROJECT["project"]["dependencies"]]
    session.install(*DEV, *pins)
    if native:
        install_native(session)
    session.run("pytest", *session.posargs)


@nox.session(python="3.13")
@WITH_NATIVE
def newest(session: nox.Session, native: bool) -> None:
    """Run the fast tests on the newest Python with the newest dependencies."""
    session.install("--upgrade", "--upgrade-strategy=eager", *DEV)
    if native:
        install_native(session)
    session.run("pytest", *session.posargs)


# On another Python: nox -s smoke -P 3.13
@nox.session
def smoke(session: nox.Session) -> None:
    """Run a few tests of each kind, with native kernels if there is a C++ compiler."""
    session.install(*DEV)
    if any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        install_native(session)
    session.run("pytest", "@tests/smoke.txt", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run the slow tests, of the given files if any."""
    session.install(*DEV)
    session.run("pytest", "-m", "slow", *session.posargs)


@nox.session
def optimized(session: nox.Session) -> None:
    """Compare implementations with the reference in the optimized programs that users get."""
    session.install(*DEV)
    files = session.posargs or ["tests/core/test_parity.py", "tests/core/test_ops.py"]
    session.run("pytest", *files, env={"XLA_FLAGS": "--xla_backend_optimization_level=3"})


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests for a machine with an NVIDIA GPU."""
    session.install(*DEV, "jax[cuda13]")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site with warnings as errors, and check its accessibility."""
    session.install(
        "-e", ".[apps,bundles,export,haiku,serve]", *nox.project.dependency_groups(PROJECT, "docs")
    )
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
    session.run("python", "docs/accessibility.py")
    if Path(AXE).exists():
        session.run("python", "docs/accessibility.py", "--axe", AXE)

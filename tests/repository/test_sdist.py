"""Tests for the source distribution: it contains the full repository, and its installed package passes the tests."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import tomllib

import pytest
from folders import ROOT

BUILD = "import hatchling.build, sys; print(hatchling.build.build_sdist(sys.argv[1]))"
# Tests that read files of the repository, and a few that compute.
SELECTION = (
    "repository/test_docs.py", "core/test_status.py", "repository/test_coverage.py",
    "core/test_golden.py", "repository/test_sdist.py",
)  # fmt: skip
SELECTED = "not docstrings and not (test_recorded and reference)"


def patterns():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["sdist"]


def listed_by_git():
    """Return repository file names, each followed by a zero byte."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout: there is no list of the repository's files")
    # A checkout may belong to another user, to read.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"git cannot be run: {error.strerror}")
    if done.returncode or "pyproject.toml" not in done.stdout:
        pytest.skip(f"git does not list this checkout: {done.stderr.strip() or done.stdout[:200]}")
    return done.stdout


def test_every_file_of_the_repository_is_included():
    listed = listed_by_git()
    include = patterns()["include"]
    assert all(pattern.startswith("/") for pattern in include), (
        "a pattern without / means any folder"
    )
    files = {f"/{name}" for name in listed.split("\0") if name} - {"/pyproject.toml"}
    missing = [f for f in files if not any(f == p or f.startswith(f"{p}/") for p in include)]
    assert not missing, (
        f"{missing} would be missing; the list is in pyproject.toml, tool.hatch.build.targets.sdist"
    )
    assert len(files) > 200


def test_every_pattern_is_of_something():
    assert not [pattern for pattern in patterns()["include"] if not (ROOT / pattern[1:]).exists()]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="once is enough, in a checkout")
def test_what_is_installed_from_it_passes_its_tests(tmp_path):
    """Install non-editable in a separate environment that borrows the other packages from this one; pip fetches hatchling."""

    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    }

    def run(*command, cwd=tmp_path):
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (
            f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    run(sys.executable, "-m", "venv", "environment")
    python = tmp_path / "environment" / "bin" / "python"
    run(python, "-m", "pip", "install", "hatchling")
    sdist = tmp_path / run(python, "-c", BUILD, tmp_path, cwd=ROOT).split()[-1]
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", sdist)
    own = pathlib.Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    (own / "others.pth").write_text(
        sysconfig.get_path("purelib")
    )  # an editable lutjax in there stays unseen
    with tarfile.open(sdist) as archive:
        # Python 3.11.4 has filters, which later versions ask for.
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (unpacked,) = (path.parent for path in tmp_path.glob("lutjax-*/pyproject.toml"))
    result = run(python, "-P", "-c", "import lutjax; print(lutjax.__file__)", cwd=unpacked)
    assert pathlib.Path(result.strip()).is_relative_to(own)
    tests = [unpacked / "tests" / name for name in SELECTION]
    out = run(python, "-P", "-m", "pytest", "-q", "-n", "0", "-k", SELECTED, *tests, cwd=unpacked)
    assert " passed" in out
    assert " failed" not in out

"""Choice of the tests of a run: cases that a mark leaves to the slow suite, and kernels that only interpreters and compilers can run here.

Kernels in Triton and Pallas run where their sources differ from those of the branch that this one began at, with ``-m kernels``, and in `.ci/run`.
"""

import fnmatch
import os
import re
import subprocess

import pytest
from folders import ROOT

_KNOWN = "LUTJAX_TESTS_OF_KERNELS"  # what the first process found, for its workers
_SOURCES = (
    "lutjax/kernels",
    "lutjax/reads.py",
    "lutjax/cases",
    "lutjax/testing",
    "lutjax/tuning",
    "tests/kernels",
    "tests/support",
)


def by_cases(items, error):
    """Return the cases of a test, of which each has the marks that are meant for it.

    The marks `slow` and `thorough` are of the cases that their patterns name, or of all; `fast` names those that are not slow.
    """
    for mark in tuple(items[0].own_markers) if items else ():
        if mark.name not in ("fast", "slow", "thorough") or not mark.args:
            continue
        ids = [item.callspec.id for item in items]
        if unknown := [p for p in mark.args if not fnmatch.filter(ids, p)]:
            raise error(
                f"the mark `{mark.name}` of {items[0].originalname} names no case: {unknown} of {ids}"
            )
        for item, case in zip(items, ids, strict=True):
            named = any(fnmatch.fnmatchcase(case, p) for p in mark.args)
            if mark.name == "fast" and not named:
                item.add_marker(pytest.mark.slow)
            if mark.name != "fast" and not named:
                item.own_markers.remove(mark)
    return items


def _git(*words: str) -> str | None:
    """Return what git says of this checkout, which may belong to another user; None where it says nothing."""
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed() -> list[str]:
    """Return the files of kernels and of their tests that differ from the upstream branch, or from the last commit where there is none."""
    base = next((b for b in ("@{upstream}", "origin/HEAD") if _git("rev-parse", "--verify", b)), "HEAD")
    since = (_git("merge-base", "HEAD", base) or "HEAD").strip()
    committed = _git("diff", "--name-only", since, "--", *_SOURCES) or ""
    new = _git("ls-files", "--others", "--exclude-standard", "--", *_SOURCES) or ""
    return sorted({*committed.splitlines(), *new.splitlines()})


def why_without_kernels(markers: str) -> str | None:
    """Return why a run leaves out the tests of kernels; None if it has them.

    Args:
      markers: the words after ``-m``.
    """
    if re.search(r"\b(kernels|gpu)\b", markers):
        return None
    if _KNOWN not in os.environ:
        os.environ[_KNOWN] = ",".join(changed())
    return None if os.environ[_KNOWN] else "nothing of them has changed; -m kernels runs them"

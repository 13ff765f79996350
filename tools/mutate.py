"""Measure the share of detected faults: apply mutations to the source, and run pytest on each.

    python tools/mutate.py -- tests/core                  # all mutations in tools/mutations.py
    python tools/mutate.py --only 3,7-9 -- tests/core -m slow
    python tools/mutate.py --tree ../other -- tests       # tests in another checkout

A mutation replaces one unique piece of text in a file. Each one is applied to a temporary copy, so
the tree itself never changes, and pytest stops at the first failure. A mutation may name its tests
(``-k``); ``--all`` runs all given tests instead. The unchanged copy runs first: tests that fail
without a mutation prove nothing.

The table has one line per mutation: the first failed test, or "survived".
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    """A fault.

    Attributes:
      file: path in the repository.
      old, new: text that occurs once in the file, and its replacement.
      tests: ``pytest -k`` expression for its tests; empty: all tests.
    """

    file: str
    old: str
    new: str
    tests: str = ""


class Result(NamedTuple):
    """Test outcome for a mutation: the first failed test ("" if none), and seconds."""

    found_by: str
    seconds: float


def read_mutations(path: Path) -> list[Mutation]:
    """Read ``MUTATIONS`` from a Python file: tuples ``(file, old, new)``, with tests or without."""
    return [Mutation(*each) for each in runpy.run_path(str(path))["MUTATIONS"]]


def parse_numbers(text: str, n: int) -> list[int]:
    """Parse a list such as ``3,7-9``; an empty text means all ``n`` numbers."""
    if not text:
        return list(range(1, n + 1))
    ends = [part.split("-") for part in text.split(",")]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]


def copy_tree(tree: Path, target: Path) -> None:
    """Copy tracked and untracked files, without files that git ignores."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, target / name)


def apply(mutation: Mutation, copy: Path) -> str:
    """Apply a mutation to a copy and return the original text of its file.

    Raises:
      ValueError: the old text does not occur exactly once.
    """
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"mutate: {mutation.file} has {text.count(mutation.old)} times {mutation.old!r}; "
            "it must have it once."
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return text


def run_tests(copy: Path, python: str, arguments: Sequence[str], timeout: float) -> Result:
    """Run pytest in a copy until the first failure."""
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    # The copy before an installed package. No bytecode: a mutation within a second of the last one
    # keeps size and time of a file, by which Python would take the old code.
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Result("timeout", time.monotonic() - begin)
    seconds = time.monotonic() - begin
    if done.returncode == 0:
        return Result("", seconds)
    if done.returncode == 5:
        raise ValueError(f"mutate: {' '.join(arguments)} selects no tests; choose others.")
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    return Result(failed[1] if failed else done.stdout[-2000:] + done.stderr[-2000:], seconds)


def run_mutations(
    mutations: Sequence[Mutation],
    numbers: Sequence[int],
    copy: Path,
    python: str,
    arguments: Sequence[str],
    timeout: float,
    every_test: bool,
) -> Iterator[tuple[int, Result]]:
    """Yield each mutation's number and result."""
    for number in numbers:
        mutation = mutations[number - 1]
        original = apply(mutation, copy)
        chosen = [] if every_test or not mutation.tests else ["-k", mutation.tests]
        try:
            yield number, run_tests(copy, python, [*arguments, *chosen], timeout)
        finally:
            (copy / mutation.file).write_text(original, encoding="utf-8")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mutations", type=Path, default=ROOT / "tools" / "mutations.py", help="list of mutations"
    )
    parser.add_argument("--only", default="", help="numbers of mutations, such as 3,7-9")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="checkout whose copy is mutated and tested"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs pytest")
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds for each run of pytest"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="run all given tests, not only those that a mutation names",
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not run the tests without a mutation first"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    chosen = parser.parse_args()
    mutations = read_mutations(chosen.mutations)
    numbers = parse_numbers(chosen.only, len(mutations))
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder)
        copy_tree(chosen.tree, copy)
        for number in numbers:  # fail before the first run if the source has changed
            mutation = mutations[number - 1]
            (copy / mutation.file).write_text(apply(mutation, copy), encoding="utf-8")
        if not chosen.unchecked:
            result = run_tests(copy, chosen.python, chosen.pytest, chosen.timeout)
            if result.found_by:
                print(f"mutate: without a mutation {result.found_by} fails; repair it first.")
                return 2
        every = run_mutations(
            mutations, numbers, copy, chosen.python, chosen.pytest, chosen.timeout, chosen.all
        )
        for number, result in every:
            mutation = mutations[number - 1]
            survived += not result.found_by
            old, new = (re.sub(r"\s+", " ", text).strip() for text in (mutation.old, mutation.new))
            print(f"{number:3} {mutation.file}: {old[:60]} -> {new[:60]}")
            print(f"    {result.seconds:5.0f} s  {result.found_by or 'survived'}", flush=True)
    print(f"{len(numbers) - survived} of {len(numbers)} mutations found")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Automata over seeds: `python benchmarks/automaton_seeds.py life --seeds 0 1 2 [--steps N] [--set FIELD=VALUE ...]`.

A seed draws wires and batches. Every seed is trained by itself (`--set runs=1` is the default here) until three tests, one after the other, find no
wrong bit, as `lutjax train ca` does, or with `--all-steps` to the end. Its best hard automaton is tested every `eval_every` steps of the experiment, on
samples that no step has seen. A row says how many bits of a grid were wrong in the best and the last test, after how many steps a test
found none for the first time, and the mean training loss since the last test but one. A run of several automata, such as ``--runs 4 --seed 3``, keeps
the best of the seeds 3 to 6. ``--together`` trains all seeds side by side in one program, until the last of them has nothing to learn: for a GPU.
``--rows docs/benchmarks/automata.csv`` adds the rows to the file that docs/appendix/cellular-automaton.md shows.
"""

import csv
import dataclasses
import datetime
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from harness import fields_of, head, markdown_row, options, table as markdown_table  # beside this file

from lutjax.training.automaton_runs import SOLVED_TESTS, Automaton
from lutjax.training.models import State
from lutjax.training.presets import EXPERIMENTS


@dataclasses.dataclass(frozen=True)
class Row:
    """Training of a seed.

    Attributes:
      experiment, seed: of `lutjax train ca`.
      device, versions, date: where, with what and when.
      steps: that were taken.
      first: steps after which a test found no wrong bit for the first time; -1 for never.
      wrong: fewest wrong bits in a test.
    """

    experiment: str
    seed: int
    device: str
    versions: str
    date: str
    steps: int
    first: int
    wrong: float


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    kinds = {"seed": int, "steps": int, "first": int, "wrong": float}
    with path.open(newline="") as file:
        return [
            Row(**{name: kinds.get(name, str)(x) for name, x in row.items()}) for row in csv.DictReader(file)
        ]


def add(path: Path, row: Row) -> None:
    """Add a row to a file, which is made where there is none."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(row))


def table(rows: Sequence[Row]) -> str:
    """Return rows as tables in Markdown, one of each device: for each seed the steps until no bit was wrong, or how many were in the best test."""
    tables = []
    for device in dict.fromkeys(row.device for row in rows):
        own = [row for row in rows if row.device == device]
        where = sorted({f"{device}, {row.versions}, {row.date}" for row in own})
        tables.append(f"{_table(own)}\n{'; '.join(where)}.\n")
    return "\n".join(tables)


def _table(rows: Sequence[Row]) -> str:
    seeds, lines = sorted({row.seed for row in rows}), []
    for name in EXPERIMENTS:
        own = {row.seed: row for row in rows if row.experiment == name}
        if own:
            cells = {n: f"{row.first}" if row.first >= 0 else f"({row.wrong:g})" for n, row in own.items()}
            solved = f"{sum(row.first >= 0 for row in own.values())} of {len(own)}"
            lines.append((f"`{name}`", *(cells.get(seed, "") for seed in seeds), solved))
    return markdown_table(["experiment", *map(str, seeds), "without a wrong bit"], lines)


def page_table(path: Path) -> str:
    """Return the table of a page of the documentation."""
    return table(read(path))


Tests = list[tuple[int, list[float]]]
"""Steps before each test, and the wrong bits of each run, or of the best."""


def trained(
    experiment: Automaton, all_steps: bool = False, *, together: bool = False
) -> tuple[Tests, float, State]:
    """Return all tests, the last mean loss, and the last state.

    Args:
      together: test each of several runs, and go on until none has anything to learn; else the best.
    """
    run, steps, every = experiment.run, experiment.record.training.steps, experiment.intervals.eval_every
    tests: Tests = []
    state, done, loss = run.init(), 0, float("nan")
    while done < steps:
        count = min(every, steps - done)
        state, mean = run.advance(state, done, count)
        done, loss = done + count, float(mean)
        tests.append((done, run.wrong_of_runs(state) if together else [run.wrong(state)]))
        last = [any(wrong) for _, wrong in tests[-SOLVED_TESTS:]]
        if not all_steps and last == [False] * SOLVED_TESTS:
            break
    return tests, loss, state


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--steps", type=int, help="default: those of the experiment")
    parser.add_argument(
        "--set", nargs="+", default=[], help="other fields of its configs, with values as in JSON"
    )
    parser.add_argument("--all-steps", action="store_true", help="go on where the task is solved")
    parser.add_argument("--together", action="store_true", help="side by side; seeds follow each other")
    parser.add_argument("--rows", type=Path, help="file that gets the rows, too")
    parser.add_argument("--device", default=jax.devices()[0].device_kind, help="its name in these rows")
    arguments = parser.parse_args()
    values = {"runs": 1} | fields_of(arguments.set) | ({"steps": arguments.steps} if arguments.steps else {})
    names = "seed", "steps", "first without a wrong bit", "wrong at best", "wrong at last", "loss", "seconds"
    print(head(names, 0))
    solved, seeds, together = 0, arguments.seeds, arguments.together
    if together and seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        parser.error("seeds that are trained --together follow each other")
    for of_program in [seeds] if together else [[seed] for seed in seeds]:
        start = time.perf_counter()
        own = {"seed": of_program[0]} | ({"runs": len(of_program)} if together else {})
        experiment = Automaton.new({**values, **own}, arguments.experiment)
        tests, loss, _ = trained(experiment, arguments.all_steps, together=together)
        for number, seed in enumerate(of_program):
            wrong = [each[number] for _, each in tests]
            first = next((done for done, each in tests if each[number] == 0), -1)
            solved += first >= 0
            cells = (
                seed, tests[-1][0], first if first >= 0 else "never", f"{min(wrong):g}", f"{wrong[-1]:g}", f"{loss:.4g}",
                f"{time.perf_counter() - start:.0f}",
            )  # fmt: skip
            print(markdown_row(cells), flush=True)
            if arguments.rows:
                where = (arguments.device, f"jax {jax.__version__}", f"{datetime.date.today()}")
                row = Row(arguments.experiment, seed, *where, tests[-1][0], first, min(wrong))
                add(arguments.rows, row)
    print(f"\n{arguments.experiment}: without a wrong bit {solved} of {len(arguments.seeds)}")


if __name__ == "__main__":
    main()

"""Automata by seed: `python benchmarks/automaton_seeds.py life --seeds 0 1 2 [--steps N] [--set FIELD=VALUE ...]`.

Each seed is trained separately (`--set runs=1` is the default) until three consecutive tests find no wrong bit, as in `lutjax train ca`, or with
`--all-steps` to the end. The best hard automaton is tested every `eval_every` steps on new samples. A row contains the wrong bits per grid in the
best and the last test, the steps before the first test without a wrong bit, and the mean loss since the previous test. `--together` trains all seeds
side by side in one program until all are done: for GPUs. `--rows docs/benchmarks/automata.csv` appends the rows to the file behind
docs/appendix/cellular-automaton.md.
"""

import csv
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from harness import parse, parse_fields, print_table, table as markdown_table  # beside this file

from lutjax.training.automaton_runs import SOLVED_TESTS, Automaton
from lutjax.training.models import State
from lutjax.training.presets import EXPERIMENTS

Row = dict[str, Any]
FIELDS = {"experiment": str, "seed": int, "device": str, "versions": str, "date": str, "steps": int, "first": int, "wrong": float}  # fmt: skip
"""Fields of a row. `first`: steps before the first test without a wrong bit, or -1. `wrong`: fewest wrong bits."""


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    with path.open(newline="") as file:
        return [{name: FIELDS[name](x) for name, x in row.items()} for row in csv.DictReader(file)]


def add(path: Path, row: Row) -> None:
    """Append a row to a file, and create the file if needed."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def page_table(path: Path) -> str:
    """Return one Markdown table per device for a page: steps until no bit was wrong, or the fewest wrong bits, by seed."""
    tables, rows = [], read(path)
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        where = sorted({f"{device}, {row['versions']}, {row['date']}" for row in own})
        tables.append(f"{_table(own)}\n{'; '.join(where)}.\n")
    return "\n".join(tables)


def _table(rows: Sequence[Row]) -> str:
    seeds, lines = sorted({row["seed"] for row in rows}), []
    for name in EXPERIMENTS:
        if own := {row["seed"]: row for row in rows if row["experiment"] == name}:
            cells = {n: f"{r['first']}" if r["first"] >= 0 else f"({r['wrong']:g})" for n, r in own.items()}
            solved = f"{sum(row['first'] >= 0 for row in own.values())} of {len(own)}"
            lines.append((f"`{name}`", *(cells.get(seed, "") for seed in seeds), solved))
    return markdown_table(["experiment", *map(str, seeds), "without a wrong bit"], lines)


Tests = list[tuple[int, list[float]]]
"""Steps before each test, and the wrong bits of each run, or the best run."""


def train(
    experiment: Automaton, all_steps: bool = False, *, together: bool = False
) -> tuple[Tests, float, State]:
    """Return all tests, the last mean loss, and the last state.

    Args:
      experiment: automaton and training.
      all_steps: continue after the task is solved.
      together: test each of several runs and stop after all are solved, instead of the best one.
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
    given = parse(
        __doc__,
        "experiment",
        experiment=(tuple(EXPERIMENTS), "experiment of `lutjax train ca`"),
        seeds=([*range(10)], "seeds of the wires and batches"),
        steps=(int, "training steps; default: those of the experiment"),
        set=([str], "other fields of its configs"),
        all_steps=(False, "continue after the task is solved"),
        together=(False, "train consecutive seeds side by side"),
        rows=(Path, "file for the rows"),
        device=(jax.devices()[0].device_kind, "device name in these rows"),
    )
    values = {"runs": 1} | parse_fields(given.set) | ({"steps": given.steps} if given.steps else {})
    seeds, together, rows = given.seeds, given.together, list[Row]()
    if together and seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        raise SystemExit("--together requires consecutive seeds")

    def lines() -> Any:
        for group in [seeds] if together else [[seed] for seed in seeds]:
            start = time.perf_counter()
            own = {"seed": group[0]} | ({"runs": len(group)} if together else {})
            experiment = Automaton.new({**values, **own}, given.experiment)
            tests, loss, _ = train(experiment, given.all_steps, together=together)
            seconds = time.perf_counter() - start
            for number, seed in enumerate(group):
                wrong = [each[number] for _, each in tests]
                first = next((done for done, each in tests if each[number] == 0), -1)
                where = given.device, f"jax {jax.__version__}", f"{datetime.date.today()}"
                cells = given.experiment, seed, *where, tests[-1][0], first, min(wrong)
                rows.append(dict(zip(FIELDS, cells, strict=True)))
                if given.rows:
                    add(given.rows, rows[-1])
                bits = f"{min(wrong):g}", f"{wrong[-1]:g}"
                yield (
                    seed,
                    tests[-1][0],
                    first if first >= 0 else "never",
                    *bits,
                    f"{loss:.4g}",
                    f"{seconds:.0f}",
                )

    names = "seed | steps | first without a wrong bit | wrong at best | wrong at last | loss | seconds"
    print_table(names, lines(), 0)
    solved = sum(row["first"] >= 0 for row in rows)
    print(f"\n{given.experiment}: without a wrong bit {solved} of {len(seeds)}")


if __name__ == "__main__":
    main()

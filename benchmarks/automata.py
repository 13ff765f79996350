"""Cellular automata by seed, on pictures, and in time.

Run `python benchmarks/automata.py life --seeds 0 1 2 [--set FIELD=VALUE ...]`.

Each seed is trained separately (`--set runs=1` is the default) until three consecutive tests find
no wrong bit, as in `lutjax train ca`. The best hard automaton is tested every `eval_every` steps on
new samples. A row contains the wrong bits per grid in the best and the last test, the steps before
the first test without a wrong bit, and the mean loss since the previous test. `--together` trains
all seeds side by side in one program until all are done: for GPUs. `--rows
docs/benchmarks/automata.csv` appends the rows to the file behind
docs/appendix/cellular-automaton.md.

`pictures` draws pictures and trains one automaton on each until three consecutive tests find no
wrong bit, as `lutjax train ca --target` does. `times` measures a training step of each experiment,
and the Game of Life in packed words.
"""

import csv
import datetime
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import (
    parse,
    parse_fields,
    print_table,
    table as markdown_table,
    time_calls,
)  # beside this file

from lutjax.training.automaton_runs import SOLVED_TESTS, Automaton
from lutjax.training.models import State
from lutjax.training.presets import EXPERIMENTS

Row = dict[str, Any]
FIELDS = {"experiment": str, "seed": int, "device": str, "versions": str, "date": str, "steps": int, "first": int, "wrong": float}  # fmt: skip
"""Fields of a row.

`first`: steps before the first test without a wrong bit, or -1. `wrong`: fewest wrong bits.
"""


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
            cells = {
                n: f"{r['first']}" if r["first"] >= 0 else f"({r['wrong']:g})"
                for n, r in own.items()
            }
            solved = f"{sum(row['first'] >= 0 for row in own.values())} of {len(own)}"
            lines.append((f"`{name}`", *(cells.get(seed, "") for seed in seeds), solved))
    return markdown_table(["experiment", *map(str, seeds), "without a wrong bit"], lines)


Tests = list[tuple[int, list[float]]]
"""Steps before each test, and the wrong bits of each run, or the best run."""


def train(experiment: Automaton, together: bool = False) -> tuple[Tests, float, State]:
    """Return all tests, the last mean loss, and the last state.

    Args:
      experiment: automaton and training.
      together: test each of several runs and stop after all are solved, instead of the best one.
    """
    run, steps, every = (
        experiment.run,
        experiment.record.training.steps,
        experiment.intervals.eval_every,
    )
    tests: Tests = []
    state, done, loss = run.init(), 0, float("nan")
    while done < steps:
        count = min(every, steps - done)
        state, mean = run.advance(state, done, count)
        done, loss = done + count, float(mean)
        tests.append((done, run.wrong_of_runs(state) if together else [run.wrong(state)]))
        last = [any(wrong) for _, wrong in tests[-SOLVED_TESTS:]]
        if last == [False] * SOLVED_TESTS:
            break
    return tests, loss, state


# ------------------------------------------------------------------------------------- pictures
BLACK, WHITE, RED, YELLOW, BLUE = (
    (0, 0, 0),
    (255, 255, 255),
    (255, 0, 0),
    (255, 255, 0),
    (0, 0, 255),
)
CYAN, MAGENTA = (0, 255, 255), (255, 0, 255)

# Shapes, their corners on a 16 x 16 grid, and their colors; the first color is the background.
DRAWINGS: dict[str, tuple[Any, ...]] = {
    "face": (
        BLACK,
        ("ellipse", (1, 1, 14, 14), YELLOW),
        *(("rectangle", (x, 4, x + 1.5, 6), BLUE) for x in (4, 9)),
        ("rectangle", (4, 9.5, 11, 11), RED),
    ),
    "boat": (
        CYAN,
        ("ellipse", (11, 1, 14.5, 4.5), YELLOW),
        ("polygon", (7, 2, 7, 10, 1.5, 10), WHITE),
        ("polygon", (8.5, 4, 8.5, 10, 12, 10), MAGENTA),
        ("polygon", (1, 11, 14, 11, 11, 13.5, 4, 13.5), RED),
        ("rectangle", (0, 14, 16, 16), BLUE),
    ),
    "key": (
        BLACK,
        ("ellipse", (1, 4, 7, 10), WHITE),
        ("ellipse", (3, 6, 5, 8), BLACK),
        ("rectangle", (7, 6.5, 14, 8), WHITE),
        *(("rectangle", (x, 8, x + 1, 10.5), WHITE) for x in (10, 13)),
    ),
}
PICTURES = {
    f"{name} {size}": (name, size)
    for size, names in {
        16: "key face boat",
        24: "key face boat",
        32: "key boat",
        48: "boat",
        64: "boat",
    }.items()
    for name in names.split()
}


def draw(name: str, size: int) -> Any:
    """Return a drawing in some size."""
    from PIL import Image, ImageDraw

    background, *shapes = DRAWINGS[name]
    image = Image.new("RGB", (size, size), background)
    canvas = ImageDraw.Draw(image)
    for shape, corners, color in shapes:
        getattr(canvas, shape)([size / 16 * corner for corner in corners], color)
    return image


def train_pictures(values: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Train each picture, and yield its row."""
    for name, place in PICTURES.items():
        start, picture = time.perf_counter(), draw(*place)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"
            picture.save(path)
            experiment = Automaton.create(values, "picture", path)
        tests, _, _ = train(experiment)
        run, config = experiment.run, experiment.run.config
        colors = len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0))
        sizes = config.channels, config.n_gates, run.training.n_steps
        wrong = f"{min(wrong for _, (wrong,) in tests):g}"
        yield name, colors, *sizes, wrong, tests[-1][0], f"{time.perf_counter() - start:.0f}"


# ------------------------------------------------------------------------------------- times
def measure_times() -> Iterator[tuple[str, str, str]]:
    """Yield medians of training steps of `lutjax train ca`, and of Game of Life cells per second in packed words."""
    several = 24 if jax.default_backend() == "gpu" else 2
    steps: list[tuple[str, str, dict[str, int]]] = [
        (name, name, {"runs": 1})
        for name in ("life", "checkerboard", "checkerboard-async", "lizard", "letter")
    ]
    steps.append((f"lizard, {several} runs", "lizard", {"runs": several}))
    steps.append(("letter, every 4", "letter", {"runs": 1, "keep_every": 4}))
    for what, name, fields in steps:
        run = Automaton.create(fields, name).run
        state, seconds = run.init(), []
        for first in range(0, 44, 4):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(run.advance(state, first, 4))
            seconds.append((time.perf_counter() - start) / 4)
        yield f"step, {what}", f"{1e3 * np.median(seconds[1:]):.3f}", "ms"
    rule = life_in_words()
    for side in (1024, 16384):
        n_steps = 2**28 // side**2 or 4
        words = jax.random.bits(jax.random.key(0), (1, side, side // 32), jnp.uint32)
        seconds = time_calls(lambda w=words, n=n_steps, s=side: rule.steps(w, s, n), 10)  # type: ignore[misc]
        rate = n_steps * side**2 / np.median(seconds) / 1e9
        yield f"Game of Life, {side} x {side} cells", f"{rate:.3f}", "G cells/s"


def life_in_words() -> Any:
    """Return the Game of Life as a circuit, 32 cells per word."""
    from lutjax.circuits import Builder, arithmetic
    from lutjax.models import PackedAutomaton

    builder = Builder()
    *near, cell = (bit for (bit,) in builder.input("x", 9))
    one, two, four, eight = arithmetic.popcount(builder, near)
    none = builder.gate([four, eight], 0b0001)
    alive = builder.gate([two, none, builder.gate([one, cell], 0b1110)], 0b10000000)
    builder.output("y", [[alive]])
    return PackedAutomaton(builder.circuit({"kind": "automaton", "channels": 1, "periodic": True}))


def main() -> None:
    given = parse(
        __doc__,
        "experiment",
        experiment=((*EXPERIMENTS, "pictures", "times"), "experiment of `lutjax train ca`"),
        seeds=([*range(10)], "seeds of the wires and batches"),
        steps=(int, "training steps; default: those of the experiment"),
        set=([str], "other fields of its configs"),
        together=(False, "train consecutive seeds side by side"),
        rows=(Path, "file for the rows"),
        device=(jax.devices()[0].device_kind, "device name in these rows"),
    )
    values = {"runs": 1} | parse_fields(given.set) | ({"steps": given.steps} if given.steps else {})
    if given.experiment == "pictures":
        head = (
            "picture | colors | channels | gates | steps of the automaton | wrong bits | training "
            "steps | seconds"
        )
        return print_table(head, train_pictures(values))
    if given.experiment == "times":
        return print_table("figure | median | unit", measure_times())
    seeds, together, rows = given.seeds, given.together, list[Row]()
    if together and seeds != list(range(seeds[0], seeds[0] + len(seeds))):
        raise SystemExit("--together requires consecutive seeds")

    def lines() -> Any:
        for group in [seeds] if together else [[seed] for seed in seeds]:
            start = time.perf_counter()
            own = {"seed": group[0]} | ({"runs": len(group)} if together else {})
            experiment = Automaton.create({**values, **own}, given.experiment)
            tests, loss, _ = train(experiment, together)
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

    names = (
        "seed | steps | first without a wrong bit | wrong at best | wrong at last | loss | seconds"
    )
    print_table(names, lines(), 0)
    solved = sum(row["first"] >= 0 for row in rows)
    print(f"\n{given.experiment}: without a wrong bit {solved} of {len(seeds)}")


if __name__ == "__main__":
    main()

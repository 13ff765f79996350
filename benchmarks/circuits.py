"""Accuracy against hardware for scikit-learn's digits: `python benchmarks/circuits.py [--runs FOLDER] [--only NAME ...]`.

Networks with and without a cost of gates, with narrow last layers, and whose votes trained tables reduce, are trained on some splits and kept as runs in a
folder, so that a second call only measures. For each there are the accuracy of the hard network on the test part, gates of the simplified
circuit from pixels to class, and look-up tables of 6 inputs (LUT6) after mapping by ABC; needs pyosys. The rows go into
docs/benchmarks/circuits.csv, their table into docs/appendix/circuits.md, and the curve into docs/circuits.png.
"""

import csv
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import RECORDED, axes_of, options, table as markdown_table  # beside this file

from lutjax import circuits
from lutjax.training import classifier, models
from lutjax.training.classifier_runs import Classifier
from lutjax.training.export import source_of

ROWS, PICTURE = RECORDED / "circuits.csv", RECORDED.parent / "circuits.png"
PIXELS = "uint5"  # from 0 to 16

WIDE, NARROW = {"layers": (2000, 2000, 2000)}, {"layers": (2000, 2000, 500), "tau": 2.0}
COLD = {"final_temperature": 0.1}
LEARNED = {"n_inputs": 6, "wiring": "top-k", **COLD}
NETWORKS: dict[str, dict[str, Any]] = {
    "3 x 2000 gates": WIDE,
    **{f"3 x 2000 gates, cost {c}": {**WIDE, "gate_cost": c} for c in (0.01, 0.03, 0.1)},
    "2000 + 2000 + 500 gates": NARROW,
    **{f"2000 + 2000 + 500 gates, cost {c}": {**NARROW, "gate_cost": c} for c in (0.01, 0.03, 0.1)},
    "3 x 2000 gates, reduced by 3": {**WIDE, "reduce": (3,), "tau": 2.0},
    "3 x 2000 gates, reduced by 3, cold": {**WIDE, "reduce": (3,), "tau": 2.0, **COLD},
    "2 x 500 tables of 6": {"layers": (500, 500), "n_inputs": 6},
    "500 + 200 tables of 6": {"layers": (500, 200), "n_inputs": 6, "tau": 1.25},
    "200 + 100 tables of 6": {"layers": (200, 100), "n_inputs": 6, "tau": 1.0},
    "500 + 300 tables of 6, cold, top-k": {"layers": (500, 300), "tau": 2.0, **LEARNED},
    "300 + 200 tables of 6, cold, top-k": {"layers": (300, 200), "tau": 1.25, **LEARNED},
    "200 + 100 tables of 6, cold, top-k": {"layers": (200, 100), "tau": 1.0, **LEARNED},
}
FIELDS = ("network", "split", "accuracy", "gates", "votes", "ands", "levels", "lut6")


def train(folder: Path, fields: dict[str, Any]) -> None:
    """Train a network and keep it as a run that `lutjax export` takes."""
    experiment = Classifier.new(fields)
    steps = experiment.record.training.steps
    state, _ = experiment.run.advance(experiment.run.init(), 0, steps)
    models.save(folder, steps, state, experiment.record)


def measure(folder: Path) -> dict[str, Any]:
    """Return the accuracy and the costs of a run."""
    source = source_of(folder, inputs=PIXELS, lut=6)
    _, record = classifier.load_model(folder)
    labels = Classifier.of(record).test.y
    stats = circuits.statistics.of(source.circuit, lut6=True)
    if stats.lut6 is None:
        raise SystemExit("benchmarks/circuits.py: mapping needs ABC: pip install pyosys")
    return {
        "accuracy": float((source.answer(source.samples)[:, 0] == labels).mean()),
        "gates": stats.gates,
        "votes": next(part.gates for part in stats.parts if part.name == "votes"),
        "ands": stats.ands,
        "levels": stats.levels,
        "lut6": stats.lut6,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, with numbers as numbers."""
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    kinds: dict[str, Callable[[str], Any]] = {"network": str, "accuracy": float}
    return [{name: kinds.get(name, int)(row[name]) for name in FIELDS} for row in rows]


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each network the means over its splits."""
    found: dict[str, dict[str, float]] = {}
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        found[network] = {name: sum(row[name] for row in own) / len(own) for name in FIELDS[1:]}
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/appendix/circuits.md."""
    found = []
    for network, mean in means(rows).items():
        n_splits = sum(row["network"] == network for row in rows)
        counts = (f"{mean[name]:.0f}" for name in ("gates", "levels", "lut6"))
        votes = f"{100 * mean['votes'] / mean['lut6']:.0f} %"
        found.append((network, f"{100 * mean['accuracy']:.1f}", n_splits, *counts, votes))
    names = "network", "% right", "splits", "gates", "levels", "LUT6", "of these votes"
    return markdown_table(names, found, len(names))


def page_table(path: Path) -> str:
    """Return the table of a page of the documentation."""
    return table(read(path))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy against LUT6, a line for each family of networks."""
    families: dict[str, list[tuple[float, float, str]]] = {}
    for network, mean in means(rows).items():
        name, _, cost = network.partition(", ")
        family = "tables of 6 inputs" if "tables" in name else f"{name}, by cost"
        label = name.removesuffix(" tables of 6") if "tables" in name else cost.removeprefix("cost ") or "0"
        if "cold" in cost or "reduced" in cost:
            family = f"{family.removesuffix(', by cost')}, reduced or cold"
        families.setdefault(family, []).append((mean["lut6"], 100 * mean["accuracy"], label))
    for axes in axes_of(path, size=(7, 4.2)):
        for (family, points), marker in zip(families.items(), "osD^vP", strict=False):
            points.sort()
            axes.plot([p[0] for p in points], [p[1] for p in points], marker=marker, label=family)
            for x, y, text in points:
                axes.annotate(text, (x, y), textcoords="offset points", xytext=(5, -11), fontsize=8)
        axes.set_xscale("log")
        ticks = [500, 1000, 2000, 4000]
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.set_xlabel("LUT6 from pixels to class")
        axes.set_ylabel("% of test images right")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/circuits"))
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=15000)
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the rows, next to stored rows of other networks and splits, and the picture",
    )
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        for number in arguments.splits:
            folder = arguments.runs / f"{re.sub('[^a-z0-9.]+', '-', name)}-{number}"
            start = time.process_time()
            if not folder.exists():
                train(folder, {**NETWORKS[name], "steps": arguments.steps, "split": number, "seed": number})
            rows.append({"network": name, "split": number, **measure(folder)})
            print(rows[-1], f"{time.process_time() - start:.0f} s of CPU time", flush=True)
    if arguments.write:
        measured = {(row["network"], row["split"]) for row in rows}
        rows += [row for row in read(ROWS) if (row["network"], row["split"]) not in measured]
        rows.sort(key=lambda row: ([*NETWORKS].index(row["network"]), row["split"]))
    print(table(rows))
    if arguments.write:
        with ROWS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        draw(rows, PICTURE)


if __name__ == "__main__":
    main()

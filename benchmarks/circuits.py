"""Accuracy against hardware for scikit-learn's digits.

Run `python benchmarks/circuits.py [--runs FOLDER] [--only NAME ...]`.

Trains networks with and without a gate cost, with narrow last layers, and with votes reduced by
trained tables, on some splits. Runs stay in a folder, so a second call only measures. Rows contain
the hard network's test accuracy, gates of the simplified circuit from pixels to class, and
six-input lookup tables (LUT6) after mapping by ABC, which needs pyosys. `--write` stores rows in
docs/benchmarks/circuits.csv and the curve in docs/circuits.png.
"""

import csv
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import RECORDED, draw_axes, parse, table as markdown_table  # beside this file

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
    """Train a network and save it as a run for `lutjax export`."""
    experiment = Classifier.create(fields)
    steps = experiment.record.training.steps
    state, _ = experiment.run.advance(experiment.run.init(), 0, steps)
    models.save(folder, steps, state, experiment.record)


def measure(folder: Path) -> dict[str, Any]:
    """Return accuracy and hardware costs of a run."""
    source = source_of(folder, inputs=PIXELS, lut=6)
    _, record = classifier.load_model(folder)
    labels = Classifier.from_record(record).test.y
    stats = circuits.statistics.compute(source.circuit, lut6=True)
    if stats.lut6 is None:
        raise SystemExit("benchmarks/circuits.py: mapping needs ABC: pip install pyosys")
    accuracy = float((source.answer(source.samples)[:, 0] == labels).mean())
    votes = next(part.gates for part in stats.parts if part.name == "votes")
    sizes = {name: getattr(stats, name) for name in ("gates", "ands", "levels", "lut6")}
    return {"accuracy": accuracy, "votes": votes, **sizes}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, with numeric fields converted."""
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    kinds: dict[str, Callable[[str], Any]] = {"network": str, "accuracy": float}
    return [{name: kinds.get(name, int)(row[name]) for name in FIELDS} for row in rows]


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the means over all splits, by network."""
    found: dict[str, dict[str, float]] = {}
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        found[network] = {name: sum(row[name] for row in own) / len(own) for name in FIELDS[1:]}
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table in docs/appendix/circuits.md."""
    found = []
    for network, mean in means(rows).items():
        n_splits = sum(row["network"] == network for row in rows)
        counts = (f"{mean[name]:.0f}" for name in ("gates", "levels", "lut6"))
        votes = f"{100 * mean['votes'] / mean['lut6']:.0f} %"
        found.append((network, f"{100 * mean['accuracy']:.1f}", n_splits, *counts, votes))
    names = "network", "% right", "splits", "gates", "levels", "LUT6", "of these votes"
    return markdown_table(names, found, len(names))


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    return table(read(path))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy against LUT6, a line for each family of networks."""
    families: dict[str, list[tuple[float, float, str]]] = {}
    for network, mean in means(rows).items():
        name, _, cost = network.partition(", ")
        family = "tables of 6 inputs" if "tables" in name else f"{name}, by cost"
        label = (
            name.removesuffix(" tables of 6")
            if "tables" in name
            else cost.removeprefix("cost ") or "0"
        )
        if "cold" in cost or "reduced" in cost:
            family = f"{family.removesuffix(', by cost')}, reduced or cold"
        families.setdefault(family, []).append((mean["lut6"], 100 * mean["accuracy"], label))
    for axes in draw_axes(path, size=(7, 4.2)):
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
    given = parse(
        __doc__,
        runs=(Path("runs/circuits"), "folder for the trained runs"),
        only=(NETWORKS, "networks"),
        steps=(15000, "training steps"),
        splits=([0, 1], "splits of the digits"),
        write=(
            False,
            "store the rows, next to rows of other networks and splits, and draw the picture",
        ),
    )
    rows = []
    for name in given.only:
        for number in given.splits:
            folder = given.runs / f"{re.sub('[^a-z0-9.]+', '-', name)}-{number}"
            start = time.process_time()
            if not folder.exists():
                train(
                    folder,
                    {**NETWORKS[name], "steps": given.steps, "split": number, "seed": number},
                )
            rows.append({"network": name, "split": number, **measure(folder)})
            print(rows[-1], f"{time.process_time() - start:.0f} s of CPU time", flush=True)
    if given.write:
        measured = {(row["network"], row["split"]) for row in rows}
        rows += [row for row in read(ROWS) if (row["network"], row["split"]) not in measured]
        rows.sort(key=lambda row: ([*NETWORKS].index(row["network"]), row["split"]))
        with ROWS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        draw(rows, PICTURE)
    print(table(rows))


if __name__ == "__main__":
    main()

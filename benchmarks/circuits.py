"""Accuracy against hardware for scikit-learn's digits: `python benchmarks/circuits.py [--runs FOLDER] [--only NAME ...]`.

Networks with and without a cost of gates, and with narrow last layers, are trained and kept in a folder, so that a second
call only measures. For each: accuracy of the hard network on the test part, gates of the simplified circuit from pixels to
class, AND nodes, and tables of 6 inputs (LUT6) as ABC maps them for area, with the share of the votes. The table goes into
docs/circuits.md, the curve to docs/circuits.png.
"""

import argparse
import re
import time
from pathlib import Path
from typing import Any

from lutjax.training import models
from lutjax.training.classifier import load_model
from lutjax.training.classifier_runs import Classifier
from lutjax.training.samples import load_digits, split

ROOT = Path(__file__).parents[1]
WIDE, NARROW = {"layers": (2000, 2000, 2000)}, {"layers": (2000, 2000, 500), "tau": 2.0}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "3 x 2000 gates": ("2000 + 2000 + 2000 gates", WIDE),
    **{f"3 x 2000 gates, cost {c}": ("2000 + 2000 + 2000 gates", {**WIDE, "gate_cost": c}) for c in (0.01, 0.03, 0.1)},
    "2000 + 2000 + 500 gates": ("2000 + 2000 + 500 gates", NARROW),
    **{f"2000 + 2000 + 500 gates, cost {c}": ("2000 + 2000 + 500 gates", {**NARROW, "gate_cost": c}) for c in (0.01, 0.03, 0.1)},
    "2 x 500 tables of 6": ("tables of 6 inputs", {"layers": (500, 500), "n_inputs": 6}),
    "500 + 200 tables of 6": ("tables of 6 inputs", {"layers": (500, 200), "n_inputs": 6, "tau": 1.25}),
    "200 + 100 tables of 6": ("tables of 6 inputs", {"layers": (200, 100), "n_inputs": 6, "tau": 1.0}),
}  # fmt: skip


def train(folder: Path, fields: dict[str, Any]) -> None:
    """Train a network and keep it as a run that `lutjax export --run` takes."""
    experiment = Classifier.new(fields)
    steps = experiment.record.training.steps
    state, _ = experiment.run.advance(experiment.run.init(), 0, steps)
    models.save(folder, steps, state, experiment.record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/circuits"))
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=15000)
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    for name in arguments.only:
        for number in arguments.splits:
            folder = arguments.runs / f"{re.sub('[^a-z0-9.]+', '-', name)}-{number}"
            if not folder.exists():
                start = time.process_time()
                options = {**NETWORKS[name][1], "steps": arguments.steps, "split": number, "seed": number}
                train(folder, options)
                print(
                    f"{name}, split {number}: trained in {time.process_time() - start:.0f} s of CPU time",
                    flush=True,
                )


if __name__ == "__main__":
    main()

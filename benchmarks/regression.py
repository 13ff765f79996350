"""Errors on numbers over five splits of scikit-learn's diabetes data.

Run `python benchmarks/regression.py [--layers 1280] [--steps 1000]`.

The test part of split s is a random fifth of the 442 rows, sampled with seed s, as in `lutjax train
classify --regression --split s`, which also defines the network settings.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import mean_and_error, parse, print_table  # beside this file

from lutjax.training.classifier_runs import Classifier
from lutjax.training.reports import Errors

SPLITS = 5
TARGET = "progression"


def write_data(folder: Path) -> Path:
    """Write the data as a CSV file, and return its path."""
    from sklearn.datasets import load_diabetes

    found, path = load_diabetes(scaled=False), folder / "diabetes.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*found.feature_names, TARGET])
        writer.writerows(
            [*(f"{cell:g}" for cell in row), f"{number:g}"]
            for row, number in zip(found.data, found.target, strict=True)
        )
    return path


def measure(path: Path, split: int, fields: dict[str, Any]) -> dict[str, Errors]:
    """Return the errors of the hard network and other learners on the test part of a split."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import LinearRegression, RidgeCV

    def build(**changes: Any) -> Classifier:
        return Classifier.create(
            {**fields, "split": split, **changes}, path, target=TARGET, regression=True
        )

    bits, numbers = build(), build(column_bits=0)
    run, test = bits.run, bits.test
    state, _ = run.advance(run.init(), 0, bits.record.training.steps)
    layers = "+".join(map(str, run.config.layers))
    found = {f"{layers} gates": run.classes(run.selected(state), test.x, hard=True)}
    for name, model, data in (
        ("linear regression", LinearRegression(), numbers),
        ("ridge regression on the bits", RidgeCV(np.logspace(-2, 4, 13)), bits),
        ("random forest", RandomForestRegressor(300, random_state=0), numbers),
    ):
        found[name] = model.fit(data.train.x, bits.train.y).predict(data.test.x)
    found["mean of the training part"] = np.full(len(test.y), bits.train.y.mean())
    return {name: Errors.compute(test.y, answers) for name, answers in found.items()}


def main() -> None:
    given = parse(__doc__, layers=([1280], "gates in each layer"), steps=(1000, "training steps"))
    fields = {"layers": tuple(given.layers), "steps": given.steps}
    with tempfile.TemporaryDirectory() as folder:
        path = write_data(Path(folder))
        splits = [measure(path, split, fields) for split in range(SPLITS)]
    rows = []
    for name in splits[0]:
        r2, *errors = (
            [getattr(s[name], field) for s in splits] for field in ("r2", "absolute", "squared")
        )
        each = " ".join(f"{value:.3f}" for value in r2)
        rows.append(
            (name, each, mean_and_error(r2, 3), *(f"{np.mean(error):.1f}" for error in errors))
        )
    print_table(" | R2 of each split | R2 | mean absolute error | root mean squared error", rows, 2)


if __name__ == "__main__":
    main()

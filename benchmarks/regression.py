"""Errors on numbers over five splits of scikit-learn's diabetes data: `python benchmarks/regression.py [--layers 1280] [--steps 1000]`.

The test part of split s is a random fifth of the 442 rows, drawn with seed s, as `lutjax train classify --regression --split s` draws it. Networks have the
settings of that command. It prints a table in Markdown: means over the splits, and each split's R2.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import head, markdown_row, options  # beside this file

from lutjax.training.classifier_runs import Classifier
from lutjax.training.reports import Errors

SPLITS = 5
TARGET = "progression"


def written(folder: Path) -> Path:
    """Write the data as a CSV file, and return its path."""
    from sklearn.datasets import load_diabetes

    found, path = load_diabetes(scaled=False), folder / "diabetes.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*found.feature_names, TARGET])
        for row, number in zip(found.data, found.target, strict=True):
            writer.writerow([*(f"{cell:g}" for cell in row), f"{number:g}"])
    return path


def measured(path: Path, split: int, fields: dict[str, Any]) -> dict[str, Errors]:
    """Return the errors of the hard network and of others on the test part of a split."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import LinearRegression, RidgeCV

    made = Classifier.new({**fields, "split": split}, path, target=TARGET, regression=True)
    run, train, test = made.run, made.train, made.test
    state, _ = run.advance(run.init(), 0, made.record.training.steps)
    found = {
        f"{'+'.join(map(str, run.config.layers))} gates": run.classes(run.selected(state), test.x, hard=True)
    }
    as_numbers = Classifier.new(
        {**fields, "split": split, "column_bits": 0}, path, target=TARGET, regression=True
    )
    numbers = as_numbers.train.x, as_numbers.test.x
    for name, model, (x, other) in (
        ("linear regression", LinearRegression(), numbers),
        ("ridge regression on the bits", RidgeCV(np.logspace(-2, 4, 13)), (train.x, test.x)),
        ("random forest", RandomForestRegressor(300, random_state=0), numbers),
    ):
        found[name] = model.fit(x, train.y).predict(other)
    found["mean of the training part"] = np.full(len(test.y), train.y.mean())
    return {name: Errors.of(test.y, answers) for name, answers in found.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--layers", default="1280")
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    fields = {"layers": tuple(map(int, given.layers.split(","))), "steps": given.steps}
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder))
        splits = [measured(path, split, fields) for split in range(SPLITS)]
    names = "", "R2 of each split", "R2", "mean absolute error", "root mean squared error"
    print(head(names, 2))
    for name in splits[0]:
        errors = [split[name] for split in splits]
        r2, absolute, squared = (
            np.array([getattr(e, field) for e in errors]) for field in ("r2", "absolute", "squared")
        )
        error = r2.std(ddof=1) / len(r2) ** 0.5
        each = " ".join(f"{value:.3f}" for value in r2)
        means = f"{r2.mean():.3f} ± {error:.3f}", f"{absolute.mean():.1f}", f"{squared.mean():.1f}"
        print(markdown_row([name, each, *means]))


if __name__ == "__main__":
    main()

"""Accuracy on columns and digits over five seeded splits: `python benchmarks/columns.py --adult adult.npz [--only NAME ...]`.

Adult comes with a test part. Split s leaves out a stratified fifth of its training rows, drawn with seed s, and trains on
the rest; the hard network is tested once, on the test part, after the last step. Digits: the test part of split s is a
stratified fifth, drawn with seed s.

Sizes and rates were chosen with ``--validate``, which never reads a test part: on Adult it tests on the fifth that is left
out; on digits it leaves out parts of the images that are in none of the five test parts. ``--tune NAME=VALUE`` changes a field.

The networks of all splits train at the same time, in one program. ``--others`` measures those of scikit-learn on the same rows.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.models import LogicClassifierConfig
from lutjax.training import datasets
from lutjax.training.classifier import Run, TrainingConfig
from lutjax.training.loop import Repeated
from lutjax.training.samples import Samples, part, split_ids

SPLITS = 5
ROWS = Path(__file__).parents[1] / "docs" / "benchmarks" / "columns.json"
PAGE = Path(__file__).parents[1] / "docs" / "columns.md"

# Fields of LogicClassifierConfig and TrainingConfig that differ from their defaults.
NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "adult": {
        "1280 gates": {
            "layers": (1280,),
            "wiring": "learnable",
            "estimator": "straight_through",
            "tau": 12.0,
            "column_bits": 32,
            "steps": 3000,
            "batch_size": 256,
            "learning_rate": 0.05,
        },
    },
    "digits": {
        "12000 gates": {"layers": (2000,) * 6, "residual": 5.0, "noise": 0.0},
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one learner reached.

    Attributes:
      data, name: what was learnt, and by what.
      gates: gates of the network; None of others.
      hard: accuracy of the hard network on each split, in percent, or that of another learner.
      soft: of the soft network.
      seconds: that all splits took together, with compilation.
      device: that trained.
      validation: whether these are accuracies on validation parts.
    """

    data: str
    name: str
    gates: int | None
    hard: tuple[float, ...]
    soft: tuple[float, ...] | None
    seconds: float
    device: str
    validation: bool

    def __str__(self) -> str:
        each = " ".join(f"{value:.2f}" for value in self.hard)
        soft = "" if self.soft is None else f", soft {np.mean(self.soft):.2f}"
        return f"{self.data}, {self.name}: {mean_and_error(self.hard)} ({each}){soft}, {self.seconds:.0f} s"


def mean_and_error(values: Sequence[float]) -> str:
    """Return the mean of some figures and its standard error."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):.2f} ± {error:.2f}"


def parts(data: datasets.Data, split: int, bits: int, *, validate: bool) -> tuple[Samples, Samples]:
    """Return what a split trains and tests on."""
    if data.test is None:
        assert isinstance(data.train, Samples)
        labels = data.train.y
        if not validate:
            train, test = split_ids(labels, split, stratified=True)
        else:
            tests = [split_ids(labels, number, stratified=True)[1] for number in range(SPLITS)]
            untested = np.setdiff1d(np.arange(len(labels)), np.concatenate(tests))
            untested = np.random.default_rng(0).permutation(untested)
            size = len(untested) // SPLITS
            test = untested[split * size : (split + 1) * size]
            rest = np.setdiff1d(np.arange(len(labels)), test)
            train = np.random.default_rng(split).permutation(rest)[: len(labels) - len(tests[0])]
        return part(data.train, train), part(data.train, test)
    table = data.train
    train, left_out = split_ids(table.labels, split, stratified=True)
    test = table.rows(left_out) if validate else data.test
    found = datasets.Data(table.rows(train), test).parts(bits=bits)
    return found.train, found.test


def padded(samples: Samples, size: int) -> Samples:
    """Return samples with features of 0 added: the splits of a table may differ in their number."""
    if samples.x.shape[1] == size:
        return samples
    x = np.pad(samples.x, ((0, 0), (0, size - samples.x.shape[1])))
    return dataclasses.replace(samples, x=x, shape=(size,))


def measure(
    kind: str,
    name: str,
    data: datasets.Data,
    fields: dict[str, Any],
    splits: Sequence[int],
    *,
    validate: bool,
) -> Row:
    """Train a network on each split, all at the same time, and test the hard networks."""
    start = time.perf_counter()
    own = {field.name for field in dataclasses.fields(LogicClassifierConfig)}
    trainings = [
        TrainingConfig(**{key: value for key, value in fields.items() if key not in own}, seed=split)
        for split in splits
    ]
    divided = [parts(data, split, trainings[0].column_bits, validate=validate) for split in splits]
    size = max(train.x.shape[1] for train, _ in divided)
    divided = [(padded(train, size), padded(test, size)) for train, test in divided]
    sizes = {"n_thresholds": 0} if data.test is not None else {}
    sizes |= {key: value for key, value in fields.items() if key in own}
    n_classes = max(train.n_classes for train, _ in divided)
    model = LogicClassifierConfig(size, n_classes, **sizes)
    runs = [Run(model, training, train) for training, (train, _) in zip(trainings, divided, strict=True)]
    samples = tuple(jnp.stack([getattr(train, array) for train, _ in divided]) for array in ("x", "y"))

    def step(states: Any, number: Any, samples: Any) -> Any:
        states, losses = jax.vmap(runs[0].step, (0, None, 0))(states, number, samples)
        return states, losses.mean()

    states = jax.tree.map(lambda *arrays: jnp.stack(arrays), *[run.init() for run in runs])
    states, _ = Repeated(step, samples)(states, 0, trainings[0].steps)
    found: dict[bool, list[float]] = {True: [], False: []}
    for i, (_, test) in enumerate(divided):
        state = jax.tree.map(lambda array, i=i: array[i], states)
        for hard, accuracies in found.items():
            accuracies.append(round(100 * runs[0].accuracy(state, test, hard=hard), 3))
    return Row(
        kind,
        name,
        sum(model.layers) if model.n_inputs == 2 else None,
        tuple(found[True]),
        tuple(found[False]),
        round(time.perf_counter() - start, 1),
        jax.devices()[0].device_kind,
        validate,
    )


def others(kind: str, data: datasets.Data, splits: Sequence[int], *, validate: bool) -> list[Row]:
    """Measure learners of scikit-learn on the same rows: trees on numbers, logistic regression on the bits of networks."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    learners: dict[str, Any] = {
        "logistic regression": lambda seed: LogisticRegression(C=0.3, max_iter=300),
        "random forest": lambda seed: RandomForestClassifier(
            300, min_samples_leaf=LEAF[kind], random_state=seed
        ),
        "gradient boosting": lambda seed: HistGradientBoostingClassifier(
            max_iter=300, learning_rate=0.06, random_state=seed
        ),
    }
    bits = next(iter(NETWORKS[kind].values())).get("column_bits", 0)
    rows = []
    for name, learner in learners.items():
        start, found = time.perf_counter(), []
        for split in splits:
            train, test = parts(data, split, bits if "regression" in name else 0, validate=validate)
            fitted = learner(split).fit(train.x, train.y)
            found.append(round(100 * float(fitted.score(test.x, test.y)), 3))
        took = round(time.perf_counter() - start, 1)
        rows.append(Row(kind, name, None, tuple(found), None, took, "CPU", validate))
    return rows


LEAF = {"adult": 5, "digits": 1}
"""Least samples of a leaf of a forest, chosen on validation parts."""


def table(rows: Sequence[Row]) -> str:
    """Return the table of a page."""
    lines = ["| | % right on the test part | each split | soft network |", "| --- | --: | --- | --: |"]
    for row in rows:
        each = " ".join(f"{value:.2f}" for value in row.hard)
        soft = "" if row.soft is None else f"{np.mean(row.soft):.2f}"
        lines.append(f"| {row.name} | {mean_and_error(row.hard)} | {each} | {soft} |")
    return "\n".join(lines) + "\n"


def read(path: Path = ROWS) -> list[Row]:
    """Return the rows that a run has written."""
    found = json.loads(path.read_text())
    return [Row(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}) for row in found]


def written(page: str, rows: Sequence[Row]) -> str:
    """Return a page with its tables replaced by those of rows."""
    for kind in NETWORKS:
        begin, end = f"<!-- {kind} -->\n", "<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + table([row for row in rows if row.data == kind]) + rest[rest.index(end) :]
    return page


def main() -> None:
    names = [name for networks in NETWORKS.values() for name in networks]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--adult", type=Path, help="x_train, y_train, x_test, y_test and names of Adult as a .npz file"
    )
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--others", action="store_true", help="also the learners of scikit-learn")
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(SPLITS)))
    parser.add_argument("--validate", action="store_true", help="on validation parts; no test part is read")
    parser.add_argument(
        "--tune", nargs="*", default=[], metavar="NAME=VALUE", help="fields that differ, as JSON"
    )
    parser.add_argument(
        "--output", type=Path, help="a file that gets the rows, one JSON object a line, as they come"
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        help="write the rows of such files into the page, and do nothing else",
    )
    arguments = parser.parse_args()
    if arguments.write:
        lines = [line for path in arguments.write for line in path.read_text().splitlines()]
        ROWS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        PAGE.write_text(written(PAGE.read_text(), read()))
        return
    tuned = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in arguments.tune)}
    tuned = {key: tuple(value) if isinstance(value, list) else value for key, value in tuned.items()}
    for kind, networks in NETWORKS.items():
        if kind == "adult" and arguments.adult is None:
            continue
        data = datasets.load(arguments.adult if kind == "adult" else None)
        chosen = {name: fields for name, fields in networks.items() if name in arguments.only}
        rows = others(kind, data, arguments.splits, validate=arguments.validate) if arguments.others else []
        for row in rows:
            report(row, arguments.output)
        for name, fields in chosen.items():
            report(
                measure(kind, name, data, {**fields, **tuned}, arguments.splits, validate=arguments.validate),
                arguments.output,
            )


def report(row: Row, output: Path | None) -> None:
    """Print a row, and add it to a file."""
    print(row, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")


if __name__ == "__main__":
    main()

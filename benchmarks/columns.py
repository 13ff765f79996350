"""Accuracy on columns and digits over five seeded splits: `python benchmarks/columns.py --adult adult.npz [--only NAME ...]`.

Adult comes with a test part. Split s leaves out a stratified fifth of its training rows, drawn with seed s, and trains on
the rest; the hard network is tested once, on the test part, after the last step. Digits: the test part of split s is a
stratified fifth, drawn with seed s.

Sizes and rates were chosen on validation parts (``--parts validation``, which tests on nothing else): on Adult the fifth that
is left out; on digits a fifth of the images that are in none of the five test parts, with as many others to train on as a
split has. ``--tune NAME=VALUE`` changes a field.

The networks of all splits train at the same time, in one program. ``--others`` measures those of scikit-learn on the same rows.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import RECORDED, Trained, fields_of, mean_and_error, options  # beside this file

import lutjax
from lutjax.models import LogicClassifierConfig
from lutjax.training import datasets
from lutjax.training.classifier import TrainingConfig
from lutjax.training.samples import Samples, part, split_ids

SPLITS = 5
PARTS = ("validation", "test")
OTHERS = ("logistic regression", "random forest", "random forest on bits", "gradient boosting")
ROWS = RECORDED / "columns.json"

# Fields of LogicClassifierConfig and TrainingConfig that differ from their defaults.
_COLUMNS = {"wiring": "learnable", "estimator": "straight_through", "column_bits": 32, "batch_size": 256}
_WIDE = {"layers": (4000,) * 3, "tau": 8.0}
NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "adult": {
        "1280 gates, 1000 steps": {
            **_COLUMNS,
            "layers": (1280,),
            "tau": 8.0,
            "steps": 1000,
            "batch_size": 200,
        },
        "8000 gates": {**_COLUMNS, "layers": (8000,), "tau": 30.0, "learning_rate": 0.03, "steps": 4000},
    },
    "digits": {
        "3 x 4000 gates": {**_WIDE, "wiring": "learnable", "steps": 6000},
        "3 x 4000 gates, top-k, 1200 steps": {**_WIDE, "wiring": "top-k", "steps": 1200},
        "3 x 4000 gates, top-k": {**_WIDE, "wiring": "top-k", "steps": 3000},
        "3 x 4000 gates, 7 thresholds": {**_WIDE, "wiring": "learnable", "steps": 6000, "n_thresholds": 7},
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Accuracy of one learner, and how it was measured.

    Attributes:
      data, name: what was learned, and by what.
      gates: gates of the network; None of others.
      reached: percent right on each split: "test" and "validation" of the hard network or of another learner, "soft test" and
        "soft validation" of the soft network.
      seconds: that all splits took together, with compilation.
      device: that trained.
    """

    data: str
    name: str
    gates: int | None
    reached: dict[str, list[float]]
    seconds: float
    device: str

    def __str__(self) -> str:
        each = [f"{kind} {mean_and_error(values)}" for kind, values in self.reached.items()]
        return f"{self.data}, {self.name}: {', '.join(each)}; {self.seconds:.0f} s"


def of_adult(data: datasets.Data, split: int, bits: int) -> dict[str, tuple[Samples, Samples]]:
    """Return what a split trains on, and its two test parts: those rows are the same for both."""
    assert isinstance(data.train, datasets.Table)
    train, left_out = (data.train.rows(ids) for ids in split_ids(data.train.labels, split, stratified=True))
    encoding = datasets.Encoding.fit(train, bits)
    parts = [
        Samples(encoding.encode(rows), encoding.labels(rows), (len(encoding.features),), rows.name)
        for rows in (train, data.test, left_out)
    ]
    return {"test": (parts[0], parts[1]), "validation": (parts[0], parts[2])}


def of_digits(data: datasets.Data, split: int) -> dict[str, tuple[Samples, Samples]]:
    """Return what a split trains and tests on, and a part of the images that are in no test part with as many others."""
    assert isinstance(data.train, Samples)
    labels = data.train.y
    train, test = split_ids(labels, split, stratified=True)
    tests = [split_ids(labels, number, stratified=True)[1] for number in range(SPLITS)]
    untested = np.setdiff1d(np.arange(len(labels)), np.concatenate(tests))
    untested = np.random.default_rng(0).permutation(untested)
    size = len(untested) // SPLITS
    held = untested[split * size : (split + 1) * size]
    rest = np.setdiff1d(np.arange(len(labels)), held)
    others = np.random.default_rng(split).permutation(rest)[: len(train)]
    ids = {"test": (train, test), "validation": (others, held)}
    return {kind: (part(data.train, a), part(data.train, b)) for kind, (a, b) in ids.items()}


def in_bits(samples: Samples, train: Samples) -> Samples:
    """Return samples whose numbers are the bits that networks make of them."""
    thresholds = lutjax.thermometer_thresholds(jnp.asarray(train.x), LogicClassifierConfig(1, 2).n_thresholds)
    bits = (samples.x[:, :, None] > np.asarray(thresholds)).reshape(len(samples.x), -1)
    return dataclasses.replace(samples, x=bits.astype(np.float32), shape=bits.shape[1:])


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
    wanted: Sequence[str],
) -> Row:
    """Train a network on each split, all at the same time, and test the hard networks on the wanted parts."""
    start = time.perf_counter()
    own = {field.name for field in dataclasses.fields(LogicClassifierConfig)}
    training = TrainingConfig(**{key: value for key, value in fields.items() if key not in own})
    found = [
        of_adult(data, split, training.column_bits) if kind == "adult" else of_digits(data, split)
        for split in splits
    ]
    # Adult has the same rows to train on for both parts.
    divided = [split[part][0] for part in (wanted[:1] if kind == "adult" else wanted) for split in found]
    size = max(train.x.shape[1] for train in divided)
    divided = [padded(train, size) for train in divided]
    sizes = {"n_thresholds": 0} if kind == "adult" else {}
    sizes |= {key: value for key, value in fields.items() if key in own}
    model = LogicClassifierConfig(size, max(train.n_classes for train in divided), **sizes)
    seeds = [seed for seed, _ in zip(itertools.cycle(splits), divided, strict=False)]
    trained = Trained(model, training, divided, seeds)
    reached: dict[str, list[float]] = {}
    for number, part_name in enumerate(wanted):
        for hard in (True, False):
            accuracies = []
            for i, split in enumerate(found):
                i += 0 if kind == "adult" else number * len(found)
                accuracies.append(trained.accuracy(i, padded(split[part_name][1], size), hard=hard))
            reached[part_name if hard else f"soft {part_name}"] = [round(value, 3) for value in accuracies]
    n_gates = sum(model.layers) if model.n_inputs == 2 else None
    took = round(time.perf_counter() - start, 1)
    return Row(kind, name, n_gates, reached, took, jax.devices()[0].device_kind)


def others(kind: str, data: datasets.Data, splits: Sequence[int], wanted: Sequence[str]) -> Iterator[Row]:
    """Measure scikit-learn's learners on the same rows.

    Trees read numbers, and logistic regression reads the bits of networks. For digits, all learners read pixels, and a forest also reads bits.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    learners: dict[str, Any] = {
        "logistic regression": lambda seed: make_pipeline(
            MinMaxScaler(), LogisticRegression(C=0.3, max_iter=300)
        ),
        "random forest": lambda seed: RandomForestClassifier(
            300, min_samples_leaf=LEAF[kind], n_jobs=4, random_state=seed
        ),
        "gradient boosting": lambda seed: HistGradientBoostingClassifier(
            max_iter=300, learning_rate=0.06, random_state=seed
        ),
    }
    bits = next(iter(NETWORKS[kind].values())).get("column_bits", 0)
    if kind == "digits":
        learners["random forest on bits"] = learners["random forest"]
    for name, learner in learners.items():
        start = time.perf_counter()
        reached: dict[str, list[float]] = {part_name: [] for part_name in wanted}
        for split in splits:
            n_bits = bits if name == "logistic regression" else 0
            found = of_adult(data, split, n_bits) if kind == "adult" else of_digits(data, split)
            fitted = None
            for part_name in wanted:
                train, test = found[part_name]
                if name == "random forest on bits":
                    train, test = (in_bits(samples, train) for samples in (train, test))
                if fitted is None or kind != "adult":
                    fitted = learner(split).fit(train.x, train.y)
                reached[part_name].append(round(100 * float(fitted.score(test.x, test.y)), 3))
        yield Row(kind, name, None, reached, round(time.perf_counter() - start, 1), "CPU")


LEAF = {"adult": 5, "digits": 1}
"""Least samples of a leaf of a forest, chosen on validation parts."""


def table(rows: Sequence[Row]) -> str:
    """Return the table of a page."""
    lines = [
        "| | validation parts | % right on the test part | each split | soft network |",
        "| --- | --: | --: | --- | --: |",
    ]
    for row in rows:
        each = " ".join(f"{value:.2f}" for value in row.reached["test"])
        soft = f"{np.mean(row.reached['soft test']):.2f}" if "soft test" in row.reached else ""
        validation, test = (
            mean_and_error(row.reached[kind]) if kind in row.reached else "" for kind in PARTS
        )
        lines.append(f"| {row.name} | {validation} | {test} | {each} | {soft} |")
    return "\n".join(lines) + "\n"


def read(path: Path = ROWS) -> list[Row]:
    """Return the rows that a run has written."""
    return [Row(**row) for row in json.loads(path.read_text())]


def page_table(path: Path, data: str) -> str:
    """Return the table of a data set for a page of the documentation."""
    return table([row for row in read(path) if row.data == data])


def main() -> None:
    names = [name for networks in NETWORKS.values() for name in networks]
    parser = options(__doc__)
    parser.add_argument(
        "--adult", type=Path, help="Adult as a .npz file: x_train, y_train, x_test, y_test and names"
    )
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--others", action="store_true", help="also the learners of scikit-learn")
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(SPLITS)))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--tune", nargs="*", default=[], metavar="NAME=VALUE", help="fields that differ, as JSON"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"store the rows in {ROWS.name}, next to those of other learners"
    )
    arguments = parser.parse_args()
    tuned, found = fields_of(arguments.tune), list[Row]()
    for kind, networks in NETWORKS.items():
        chosen = {name: {**fields, **tuned} for name, fields in networks.items() if name in arguments.only}
        if (kind == "adult" and arguments.adult is None) or not (chosen or arguments.others):
            continue
        data = datasets.load(arguments.adult if kind == "adult" else None)
        for name, fields in chosen.items():
            found.append(measure(kind, name, data, fields, arguments.splits, arguments.parts))
            print(found[-1], flush=True)
        for row in others(kind, data, arguments.splits, arguments.parts) if arguments.others else ():
            found.append(row)
            print(row, flush=True)
    if arguments.write:
        known = {(row.data, row.name): row for row in [*read(), *found]}
        order = [*(name for networks in NETWORKS.values() for name in networks), *OTHERS]
        rows = sorted(known.values(), key=lambda row: (row.data, order.index(row.name)))
        ROWS.write_text("[\n" + ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()

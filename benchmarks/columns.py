"""Accuracy on columns and digits over five seeded splits.

Run `python benchmarks/columns.py --adult adult.npz [--only NAME ...]`.

Adult has its own test part. Split s holds out a stratified fifth of the training rows, sampled with
seed s, and trains on the rest; the hard network is tested once, on the test part, after the last
step. Digits: the test part of split s is a stratified fifth, sampled with seed s.

Sizes and rates were chosen on validation parts (`--parts validation` tests nothing else): the
held-out fifth on Adult; for digits a fifth of the images outside all five test parts, with as many
other training images as in a split.

The networks of all splits train at the same time, in one program. `--others` measures
scikit-learn's learners on the same rows.
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
from harness import (
    RECORDED,
    TrainedNetworks,
    markdown_row,
    mean_and_error,
    parse,
)  # beside this file

import lutjax
from lutjax.models import LogicClassifierConfig
from lutjax.training import datasets
from lutjax.training.classifier import TrainingConfig
from lutjax.training.samples import Samples, select_samples, split_ids

SPLITS = 5
PARTS = ("validation", "test")
ROWS = RECORDED / "columns.json"
LEAF = {"adult": 5, "digits": 1}
"""Least samples in a leaf of a forest, chosen on validation parts."""
OTHERS = ("logistic regression", "random forest", "random forest on bits", "gradient boosting")

# Fields of LogicClassifierConfig and TrainingConfig that differ from their defaults.
_COLUMNS = {
    "wiring": "learnable",
    "estimator": "straight_through",
    "column_bits": 32,
    "batch_size": 256,
}
_SMALL = {"layers": (1280,), "tau": 8.0, "steps": 1000, "batch_size": 200}
_WIDE = {"layers": (4000,) * 3, "tau": 8.0}
NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "adult": {
        "1280 gates, 1000 steps": {**_COLUMNS, **_SMALL},
        "8000 gates": {
            **_COLUMNS,
            "layers": (8000,),
            "tau": 30.0,
            "learning_rate": 0.03,
            "steps": 4000,
        },
    },
    "digits": {
        "3 x 4000 gates": {**_WIDE, "wiring": "learnable", "steps": 6000},
        "3 x 4000 gates, top-k, 1200 steps": {**_WIDE, "wiring": "top-k", "steps": 1200},
        "3 x 4000 gates, top-k": {**_WIDE, "wiring": "top-k", "steps": 3000},
        "3 x 4000 gates, 7 thresholds": {
            **_WIDE,
            "wiring": "learnable",
            "steps": 6000,
            "n_thresholds": 7,
        },
    },
}
NAMES = [name for networks in NETWORKS.values() for name in networks]

Row = dict[str, Any]
"""Accuracy of one learner: data, name, gates (of networks), percentages by part and split (`reached`), seconds, device."""

Parts = dict[str, tuple[Samples, Samples]]
"""Training and test samples, for each of `PARTS`."""


def split_adult(data: datasets.Data, split: int, bits: int) -> Parts:
    """Return the parts of a split, with the same training rows for both."""
    assert isinstance(data.train, datasets.Table)
    train, left_out = (
        data.train.rows(ids) for ids in split_ids(data.train.labels, split, stratified=True)
    )
    encoding = datasets.Encoding.fit(train, bits)
    parts = [
        Samples(encoding.encode(rows), encoding.labels(rows), (len(encoding.features),), rows.name)
        for rows in (train, data.test, left_out)
    ]
    return {"test": (parts[0], parts[1]), "validation": (parts[0], parts[2])}


def split_digits(data: datasets.Data, split: int) -> Parts:
    """Return the parts of a split. Validation images are in no test part."""
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
    return {
        kind: (select_samples(data.train, a), select_samples(data.train, b))
        for kind, (a, b) in ids.items()
    }


def encode_bits(samples: Samples, train: Samples) -> Samples:
    """Return samples with the network's input bits instead of numbers."""
    thresholds = lutjax.thermometer_thresholds(
        jnp.asarray(train.x), LogicClassifierConfig(1, 2).n_thresholds
    )
    bits = (samples.x[:, :, None] > np.asarray(thresholds)).reshape(len(samples.x), -1)
    return dataclasses.replace(samples, x=bits.astype(np.float32), shape=bits.shape[1:])


def pad(samples: Samples, size: int) -> Samples:
    """Return samples padded with zero features, because splits of a table may differ in their number."""
    x = np.pad(samples.x, ((0, 0), (0, size - samples.x.shape[1])))
    return dataclasses.replace(samples, x=x, shape=(size,))


def measure(
    kind: str,
    name: str,
    data: datasets.Data,
    fields: dict[str, Any],
    splits: Sequence[int],
    parts: Sequence[str],
) -> Row:
    """Train a network on all splits at the same time, and test the hard and soft networks on the given parts."""
    start, adult = time.perf_counter(), kind == "adult"
    own = {field.name for field in dataclasses.fields(LogicClassifierConfig)}
    training = TrainingConfig(**{key: value for key, value in fields.items() if key not in own})
    found = [
        split_adult(data, s, training.column_bits) if adult else split_digits(data, s)
        for s in splits
    ]
    trained_parts = parts[:1] if adult else parts  # both parts of Adult have the same training rows
    divided = [split[select_samples][0] for select_samples in trained_parts for split in found]
    size = max(train.x.shape[1] for train in divided)
    divided = [train if train.x.shape[1] == size else pad(train, size) for train in divided]
    sizes = {"n_thresholds": 0} if adult else {}
    sizes |= {key: value for key, value in fields.items() if key in own}
    model = LogicClassifierConfig(size, max(train.n_classes for train in divided), **sizes)
    seeds = [seed for seed, _ in zip(itertools.cycle(splits), divided, strict=False)]
    trained = TrainedNetworks(model, training, divided, seeds)
    reached: dict[str, list[float]] = {}
    for (number, name_of_part), hard in itertools.product(enumerate(parts), (True, False)):
        first = 0 if adult else number * len(found)
        tests = [split[name_of_part][1] for split in found]
        tests = [test if test.x.shape[1] == size else pad(test, size) for test in tests]
        reached[name_of_part if hard else f"soft {name_of_part}"] = [
            round(trained.accuracy(first + i, test, hard=hard), 3) for i, test in enumerate(tests)
        ]
    n_gates = sum(model.layers) if model.n_inputs == 2 else None
    return _row(kind, name, n_gates, reached, start, jax.devices()[0].device_kind)


def measure_others(
    kind: str, data: datasets.Data, splits: Sequence[int], parts: Sequence[str]
) -> Iterator[Row]:
    """Measure scikit-learn's learners on the same rows.

    Trees read numbers, and logistic regression reads network bits. On digits, all read pixels, and
    one more forest reads bits.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    def forest(seed: int) -> Any:
        return RandomForestClassifier(300, min_samples_leaf=LEAF[kind], n_jobs=4, random_state=seed)

    learners: dict[str, Any] = {
        "logistic regression": lambda _: make_pipeline(
            MinMaxScaler(), LogisticRegression(C=0.3, max_iter=300)
        ),
        "random forest": forest,
        "gradient boosting": lambda seed: HistGradientBoostingClassifier(
            max_iter=300, learning_rate=0.06, random_state=seed
        ),
        **({"random forest on bits": forest} if kind == "digits" else {}),
    }
    for name, learner in learners.items():
        start, reached = time.perf_counter(), dict[str, list[float]]()
        bits = _COLUMNS["column_bits"] if name == "logistic regression" else 0
        for split in splits:
            found = split_adult(data, split, bits) if kind == "adult" else split_digits(data, split)
            fitted = None
            for part_name in parts:
                train, test = found[part_name]
                if name == "random forest on bits":
                    train, test = (encode_bits(samples, train) for samples in (train, test))
                if fitted is None or kind != "adult":
                    fitted = learner(split).fit(train.x, train.y)
                score = round(100 * float(fitted.score(test.x, test.y)), 3)
                reached.setdefault(part_name, []).append(score)
        yield _row(kind, name, None, reached, start, "CPU")


def _row(kind: str, name: str, gates: int | None, reached: Any, start: float, device: str) -> Row:
    each = [
        f"{select_samples} {mean_and_error(values)}" for select_samples, values in reached.items()
    ]
    seconds = round(time.perf_counter() - start, 1)
    print(f"{kind}, {name}: {', '.join(each)}; {seconds:.0f} s", flush=True)
    return {
        "data": kind,
        "name": name,
        "gates": gates,
        "reached": reached,
        "seconds": seconds,
        "device": device,
    }


def page_table(path: Path, data: str) -> str:
    """Return the table of a data set for a documentation page."""
    lines = []
    for row in json.loads(path.read_text()):
        if row["data"] == data:
            reached = row["reached"]
            each = " ".join(f"{value:.2f}" for value in reached["test"])
            soft = f"{np.mean(reached['soft test']):.2f}" if "soft test" in reached else ""
            means = (
                mean_and_error(reached[select_samples]) if select_samples in reached else ""
                for select_samples in PARTS
            )
            lines.append((row["name"], *means, each, soft))
    head = "| | validation parts | % right on the test part | each split | soft network |"
    return "\n".join([head, "| --- | --: | --: | --- | --: |", *map(markdown_row, lines)]) + "\n"


def main() -> None:
    given = parse(
        __doc__,
        adult=(Path, "Adult as a .npz file: x_train, y_train, x_test, y_test and names"),
        only=(dict.fromkeys(NAMES), "networks"),
        others=(False, "also measure scikit-learn's learners"),
        splits=([*range(SPLITS)], "splits"),
        parts=(dict.fromkeys(PARTS), "parts for testing"),
        write=(False, f"store the rows in {ROWS.name}, next to rows of other learners"),
    )
    found = list[Row]()
    for kind, networks in NETWORKS.items():
        chosen = {name: fields for name, fields in networks.items() if name in given.only}
        if (kind == "adult" and given.adult is None) or not (chosen or given.others):
            continue
        data = datasets.load(given.adult if kind == "adult" else None)
        for name, fields in chosen.items():
            found.append(measure(kind, name, data, fields, given.splits, given.parts))
        if given.others:
            found += measure_others(kind, data, given.splits, given.parts)
    if given.write:
        known = {(row["data"], row["name"]): row for row in [*json.loads(ROWS.read_text()), *found]}
        order = [*NAMES, *OTHERS]
        rows = sorted(known.values(), key=lambda row: (row["data"], order.index(row["name"])))
        ROWS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()

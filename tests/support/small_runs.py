"""Small texts, models and runs for each kind."""

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from commands import output
from flax import nnx

from lutjax.models import (
    GPTConfig,
    LogicCA,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LogicTreeNetConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.training import automaton, classifier, lm, lm_runs, models, runs
from lutjax.training.samples import Samples, samples
from lutjax.training.text import split_text

FOX = b"the quick brown fox jumps over the lazy dog. " * 40
TEXT = split_text(FOX, name="fox", context=8)
MEMORY = GPTConfig(
    features=16, context=16, n_layers=2, n_heads=2, feed_forward="dense", memory=True, memory_orders=(2, 3),
    memory_rows=100, memory_layers=(0, 1),
)  # fmt: skip
HISTORY = runs.History(train=[(1, 5.5), (3, 2.5)], test=[(3, 2.0)])


def perturb(model: Any, seed: int = 0) -> Any:
    """Add noise to a new model's parameters, so that every part affects the output; return the model."""
    for i, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param):
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), variable.shape)
            variable.set_value(variable[...] + 0.3 * noise.astype(variable.dtype))
    return model


def saved(
    folder: Path,
    structure: Any,
    record: Any,
    optimizer: Any = lambda params: {"step": jnp.zeros(())},
) -> Any:
    """Write a three-step run and return its model."""
    params, others = structure.init(0)
    models.save(folder, 3, models.State(params, others, optimizer(params)), record)
    return structure.model(params, others)


def lm_run(folder: Path) -> LUTTransformer:
    sizes = {
        "features": 8,
        "context": 6,
        "n_layers": 1,
        "n_heads": 1,
        "n_detectors": 2,
        "n_anchors": 2,
    }
    config = LUTTransformerConfig(**sizes, ffn_detectors=2, ffn_anchors=3, dropout=0.5)
    text = runs.Source("fox.txt", 100, "f" * 64)
    record = lm_runs.Record(
        config, lm.TrainingConfig(steps=9), text, 2.5, {"log_every": 1}, HISTORY
    )
    return saved(folder, lm.structure_of(config), record)


def digits_run(folder: Path) -> LogicClassifier:
    config = LogicClassifierConfig(in_features=6, n_classes=3, n_thresholds=2, layers=(12, 12))
    samples = runs.Source(None, 100, "f" * 64)
    record = classifier.Record(config, classifier.TrainingConfig(steps=9), samples, {}, {}, HISTORY)
    return saved(folder, models.Structure(lambda rngs: LogicClassifier(config, rngs=rngs)), record)


def ca_run(folder: Path) -> LogicCA:
    """Write a run with different best and latest automata."""
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
    training = automaton.TrainingConfig(
        experiment="letter", start="zero", size=6, n_steps=3, steps=9
    )
    rows = [["010010"] * 6]
    target = np.array([[[bit == "1" for bit in row] for row in channel] for channel in rows])
    run = automaton.Run(config, training, target)
    state = run.init()
    best = jax.tree.map(lambda a: a[::-1], state.optimizer.best)
    state = state._replace(optimizer=state.optimizer._replace(best=best))
    models.save(folder, 3, state, automaton.Record(config, training, rows, {}, HISTORY))
    return run.best(state)


def automaton_of(**options: Any) -> LogicCA:
    """Return a small automaton with distinct gates."""
    sizes = {"channels": 2, "kernels": 3, "perception": (8, 4, 2), "update": (12, 6, 2)}
    model = LogicCA(LogicCAConfig(**sizes, **options), rngs=nnx.Rngs(0))
    model.logits.set_value(3 * jax.random.normal(jax.random.key(1), model.logits.shape))
    return model


def tree_run(folder: Path) -> Any:
    config = LogicTreeNetConfig((4, 4, 1), 2, n_thresholds=1, kernels=(2,), layers=(8, 8), depth=1)
    source = runs.Source("/secret/place/images", 100, "f" * 64)
    record = classifier.Record(config, classifier.TrainingConfig(steps=9), source, {}, {}, HISTORY)
    return saved(
        folder, models.Structure(lambda rngs: classifier.classifier_of(config, rngs=rngs)), record
    )


def call(model: Any) -> Any:
    if isinstance(model, LUTTransformer):
        return model(jnp.asarray([[1, 2, 3, 4]], jnp.int32))
    if isinstance(model, LogicClassifier):
        return model(jnp.linspace(0, 1, 12, dtype=jnp.float32).reshape(2, 6))
    return model(jnp.ones((6, 6, 2), bool), 3, deterministic=True)


RUNS = {"lm": lm_run, "digits": digits_run, "ca": ca_run}


class Finished(NamedTuple):
    """An uninterrupted run: its folder, its command without the folder, and its output."""

    out: Path
    words: list[str]
    said: str


def finished(folder: Path, *words: object) -> Finished:
    """Train by `lutjax train` with these words."""
    started = ["train", *map(str, words)]
    return Finished(folder / "run", started, output(*started, "--out", folder / "run"))


LM_SIZES = [
    "--model=lut", "--context=8", "--features=8", "--n-layers=1", "--n-heads=1", "--n-detectors=4",
    "--n-anchors=2", "--n-position-bits=2", "--ffn-detectors=4", "--ffn-anchors=3", "--batch-size=4",
    "--table-optimizer=row_adagrad", "--optimizer=row_adagrad", "--schedule=constant",
    "--learning-rate=0.03", "--loss=mean",
]  # fmt: skip
"""Language model sizes, with rates high enough to learn within 24 steps."""

LM_STEPS = ["--steps=24", "--log-every=1", "--eval-every=12", "--checkpoint-every=8"]

TABLE = [
    "--target=class", "--exclude=day", "--encoding=latin-1", "--learning-rate=0.1", "--steps=20",
    "--no-baselines", "--layers=24,24", "--batch-size=16", "--log-every=10", "--eval-every=10",
    "--checkpoint-every=10",
]  # fmt: skip

DIGITS = [
    "--layers=30,30", "--n-thresholds=2", "--steps=12", "--batch-size=20", "--estimator=gumbel",
    "--reduce=3,2", "--log-every=6", "--eval-every=6", "--checkpoint-every=6",
]  # fmt: skip

TREES = [
    "--model=tree", "--kernels=3,4", "--layers=12", "--depth=2", "--n-thresholds=2", "--tables=light",
    "--thresholds=learned", "--kernel=3,2", "--padding=1,0", "--pool=2,1", "--temperature=2",
    "--final-temperature=0.5", "--annealing=linear", "--steps=6", "--batch-size=20", "--log-every=3",
    "--eval-every=3", "--checkpoint-every=3",
]  # fmt: skip

CA_SIZES = [
    "--channels=2", "--kernels=2", "--perception=8,2", "--update=8,2", "--size=6", "--n-steps=3",
]  # fmt: skip
CA = [
    "--experiment=checkerboard-async",
    *CA_SIZES,
    *["--steps=8", "--log-every=1", "--eval-every=4", "--checkpoint-every=3"],
]

LABELS = ("$large_$ & \\x$$", "<small>\n_")
"""Class names as plain text, not formulas."""


def table_text(n: int = 90, seed: int = 0, *, target: bool = True) -> str:
    """Return a CSV table with decimal commas; its class is whether the size is large, except for kind b."""
    rng, text = np.random.default_rng(seed), io.StringIO()
    writer = csv.writer(text, delimiter=";")
    writer.writerow(["size", "kind", "noise", "day", "class"][: 4 + target])
    for row in range(n):
        size, kind, noise, day = (
            rng.normal(),
            rng.choice(["a", "b"]),
            rng.integers(5),
            rng.integers(1, 29),
        )
        cells = [
            "" if row % 17 == 3 else f"{size:.3f}".replace(".", ","),
            kind,
            noise,
            f"2024-01-{day:02}",
        ]
        writer.writerow([*cells, LABELS[(size > 0) == (kind == "b")]][: 4 + target])
    return text.getvalue()


def blobs(n: int = 60) -> Samples:
    """Return 2 x 3 pixel images in three classes."""
    y = np.arange(n) % 3
    x = np.random.default_rng(0).uniform(0, 4, (n, 2, 3))
    x[np.arange(n), 0, y] += 6
    return samples(x, y, name="blobs")


def images(n: int = 60, n_channels: int = 1) -> Samples:
    """Return images in two classes, darker and brighter; the first pixel is always 3 and the second is binary."""
    rng = np.random.default_rng(4)
    y = np.arange(n) % 2
    x = rng.integers(0, 200, (n, 4, 4, n_channels)) + 50 * y[:, None, None, None]
    x[:, 0, 0], x[:, 0, 1] = 3, x[:, 0, 1] % 2
    shape = (4, 4) if n_channels == 1 else (4, 4, n_channels)
    return Samples(x.reshape(n, -1).astype(np.float32), y.astype(np.int32), shape, "images")

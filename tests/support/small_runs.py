"""Small texts, models and runs of each kind."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
from commands import command
from flax import nnx
from pytrees import equal

from lutjax.models import (
    GPTConfig,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.training import automaton, classifier, lm, lm_runs, models, runs
from lutjax.training.text import split_text

FOX = b"the quick brown fox jumps over the lazy dog. " * 40
TEXT = split_text(FOX, name="fox", context=8)
MEMORY = GPTConfig(
    features=16,
    context=16,
    n_layers=2,
    n_heads=2,
    feed_forward="dense",
    memory=True,
    memory_orders=(2, 3),
    memory_rows=100,
    memory_layers=(0, 1),
)
HISTORY = runs.History(train=[(1, 5.5), (3, 2.5)], test=[(3, 2.0)])


def perturb(model, seed=0):
    """Add noise to the parameters of a new model, so that every part shows; return the model."""
    for i, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param):
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), variable.shape)
            variable.set_value(variable[...] + 0.3 * noise.astype(variable.dtype))
    return model


def assert_resumes(kind, out, other, last, before):
    """Resume a copy of a finished classifier run from the checkpoint before its last one, and compare both."""
    shutil.copytree(out, other)
    shutil.rmtree(other / runs.FOLDER / str(last))
    assert f"resumed after {before} steps" in command("train", kind, "--resume", "--out", other).output
    (one, first), (two, second) = (classifier.load_model(folder) for folder in (out, other))
    assert first == second
    assert equal(models.arrays(one), models.arrays(two))


def saved(folder, structure, record, optimizer=lambda params: {"step": jnp.zeros(())}):
    """Writes a run of three steps, and returns its model."""
    params, others = structure.init(0)
    models.save(folder, 3, models.State(params, others, optimizer(params)), record)
    return structure.model(params, others)


def lm_run(folder):
    sizes = {"features": 8, "context": 6, "n_layers": 1, "n_heads": 1, "n_detectors": 2, "n_anchors": 2}
    config = LUTTransformerConfig(**sizes, ffn_detectors=2, ffn_anchors=3, dropout=0.5)
    text = runs.Source("fox.txt", 100, "f" * 64)
    record = lm_runs.Record(config, lm.TrainingConfig(steps=9), text, 2.5, {"log_every": 1}, HISTORY)
    return saved(folder, lm.structure_of(config), record)


def digits_run(folder):
    config = LogicClassifierConfig(in_features=6, n_classes=3, n_thresholds=2, layers=(12, 12))
    samples = runs.Source(None, 100, "f" * 64)
    record = classifier.Record(config, classifier.TrainingConfig(steps=9), samples, {}, {}, HISTORY)
    return saved(folder, models.Structure(lambda rngs: LogicClassifier(config, rngs=rngs)), record)


def ca_run(folder):
    """Run whose best automaton is not its latest one."""
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
    training = automaton.TrainingConfig(experiment="letter", start="zero", size=6, n_steps=3, steps=9)
    rows = [["010010"] * 6]
    target = np.array([[[bit == "1" for bit in row] for row in channel] for channel in rows])
    run = automaton.Run(config, training, target)
    state = run.init()
    best = jax.tree.map(lambda a: a[::-1], state.optimizer.best)
    state = state._replace(optimizer=state.optimizer._replace(best=best))
    models.save(folder, 3, state, automaton.Record(config, training, rows, {}, HISTORY))
    return run.best(state)


def call(model):
    if isinstance(model, LUTTransformer):
        return model(jnp.asarray([[1, 2, 3, 4]], jnp.int32))
    if isinstance(model, LogicClassifier):
        return model(jnp.linspace(0, 1, 12, dtype=jnp.float32).reshape(2, 6))
    return model(jnp.ones((6, 6, 2), bool), 3, deterministic=True)


RUNS = {"lm": lm_run, "digits": digits_run, "ca": ca_run}

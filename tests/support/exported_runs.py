"""Untrained runs for export tests."""

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.training import models
from lutjax.training.automaton_runs import Automaton
from lutjax.training.classifier_runs import Classifier


def message(result):
    """Return command output as one line."""
    return " ".join(result.output.replace("│", "").split())


def images(n=50):
    """Return 2 x 3 integer images in three classes."""
    y = np.arange(n) % 3
    x = np.random.default_rng(0).integers(0, 5, (n, 2, 3))
    x[np.arange(n), 0, y] += 7
    return x, y


def write_classifier(folder, x, y):
    """Write a classifier run and return its folder."""
    np.savez(folder / "digits.npz", x=x, y=y)
    options = {"layers": (24, 24), "n_thresholds": 2, "steps": 1, "noise": 2.0}
    experiment = Classifier.create(options, folder / "digits.npz")
    models.save(folder / "digits", 1, experiment.run.init(), experiment.record)
    return folder / "digits"


def write_trees(folder):
    """Write a tree run with random gates on two-channel images; return its folder and the images."""
    x, y = images()
    x = np.pad(x, ((0, 0), (1, 1), (0, 1)))
    x = np.stack([x, x[:, ::-1] // 2], -1)
    np.savez(folder / "digits.npz", x=x, y=y)
    options = {"kernels": (4,), "layers": (24,), "depth": 2, "kernel": 3, "padding": 1, "pool": 2}
    options |= {"n_thresholds": 2, "steps": 1}
    experiment = Classifier.create(options, folder / "digits.npz", model="tree")
    state = experiment.run.init()
    draw = np.random.default_rng(20).normal
    params = jax.tree.map(lambda a: jnp.asarray(draw(size=a.shape), a.dtype), state.params)
    models.save(folder / "digits", 1, state._replace(params=params), experiment.record)
    return folder / "digits", x


def write_automaton(folder, *, channels=1, **options):
    """Write an automaton run with random gates and return its folder."""
    options |= {"runs": 1, "kernels": 2, "channels": channels}
    options |= {"perception": (8, 2), "update": (12, 6, channels)}
    experiment = Automaton.create(options, "life" if channels == 1 else "checkerboard")
    state = experiment.run.init()
    gates = np.random.default_rng(7).choice([1, 6, 7, 9, 14], state.params["logits"].shape[1])
    params = {"logits": jnp.eye(16)[:, gates]}
    state = state._replace(params=params, optimizer=state.optimizer._replace(best=params))
    models.save(folder / "run", 1, state, experiment.record)
    return folder / "run"

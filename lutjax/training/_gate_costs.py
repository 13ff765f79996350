"""Choice of the gate cost for small tables by cross-validation."""

from collections.abc import Sequence

import jax
import numpy as np

from lutjax.models import LogicClassifierConfig
from lutjax.training.classifier import Run
from lutjax.training.classifier_config import TrainingConfig
from lutjax.training.samples import Samples
from lutjax.values import Array

N_FOLDS = 5


def cross_validate(
    model: LogicClassifierConfig, training: TrainingConfig, train: Samples, costs: Sequence[float]
) -> list[float]:
    """Return the accuracy of hard networks on held-out training samples, for each gate cost.

    Args:
      model: model sizes.
      training: training config, whose gate cost is ignored.
      train: training samples, at least `N_FOLDS`.
      costs: gate costs to compare.
    """
    run = Run(model, training, train)
    order = np.random.default_rng(training.seed).permutation(len(train.y))
    size = len(order) // N_FOLDS
    # Folds of equal size share one program; remaining samples are always trained on.
    folds = [
        np.split(np.roll(order, -k * size), [size]) for k in range(N_FOLDS)
    ]  # held-out samples, and the others

    @jax.jit
    def count(cost: Array, x: Array, y: Array, held_x: Array, held_y: Array) -> Array:
        state = jax.lax.fori_loop(
            0,
            training.steps,
            lambda number, state: run.step(state, number, (x, y), cost)[0],
            run.sample_state(jax.random.key(training.seed)),
        )
        return (run.hard_classes(state, held_x) == held_y).sum()

    return [
        sum(
            int(count(cost, *(a[ids] for ids in (kept, held) for a in (train.x, train.y))))
            for held, kept in folds
        )
        / (N_FOLDS * size)
        for cost in costs
    ]

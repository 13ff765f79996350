"""Choice of the gate cost for small tables by cross-validation."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from lutjax.models import LogicClassifierConfig
from lutjax.training.classifier import Run
from lutjax.training.classifier_config import TrainingConfig
from lutjax.training.models import State
from lutjax.training.samples import Samples
from lutjax.values import Array

N_FOLDS = 5

_AT_ONCE = 100  # steps between interruptions


def cross_validate(
    model: LogicClassifierConfig,
    training: TrainingConfig,
    train: Samples,
    costs: Sequence[float],
    progress: Callable[[str], object] = lambda line: None,
) -> list[float]:
    """Return the accuracy of hard networks on held-out training samples, for each gate cost.

    Args:
      model: model sizes.
      training: training config, whose gate cost is ignored.
      train: training samples, at least `N_FOLDS`.
      costs: gate costs to compare.
      progress: receives a line for each fold.
    """
    run = Run(model, training, train)
    order = np.random.default_rng(training.seed).permutation(len(train.y))
    # Folds of equal size share one program; remaining samples are always trained on.
    size = len(order) // N_FOLDS

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state: State, first: Array, last: Array, cost: Array, x: Array, y: Array) -> State:
        # The cost is traced, so all costs share one program as well.
        state = jax.lax.fori_loop(
            first, last, lambda number, state: run.step(state, number, (x, y), cost)[0], state
        )
        return state

    @jax.jit
    def count_correct(state: State, x: Array, y: Array) -> Array:
        return (run.hard_classes(state, x) == y).sum()

    sample_state = jax.jit(run.sample_state)  # compiled once for all folds

    def validate(cost: float, fold: int) -> int:
        held_out, others = np.split(np.roll(order, -fold * size), [size])
        state = sample_state(jax.random.key(training.seed))
        for first in range(0, training.steps, _AT_ONCE):
            last = min(first + _AT_ONCE, training.steps)
            # Python handles a Ctrl-C only between programs.
            state = jax.block_until_ready(
                advance(state, first, last, cost, train.x[others], train.y[others])
            )
        n_correct = int(count_correct(state, train.x[held_out], train.y[held_out]))
        progress(
            f"  gate cost {cost:g}, fold {fold + 1} of {N_FOLDS}: {100 * n_correct / size:.1f} %"
        )
        return n_correct

    return [
        sum(validate(cost, fold) for fold in range(N_FOLDS)) / (N_FOLDS * size) for cost in costs
    ]

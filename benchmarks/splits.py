"""A network that is trained on several splits at the same time, in one program, for the figures of other commands here."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import lutjax
from lutjax.training.classifier import Config, Run, TrainingConfig, by_feature, first_thresholds
from lutjax.training.loop import Repeated
from lutjax.training.samples import Samples


class Trained:
    """Networks of one config, one for each part that they were trained on.

    Args:
      model, training: of all networks.
      parts: samples that each is trained on, as many in all.
      seeds: of the first values of each.

    Raises:
      ValueError: there are several parts and thresholds are learned: their rates would be those of the first part.
    """

    def __init__(
        self, model: Config, training: TrainingConfig, parts: Sequence[Samples], seeds: Sequence[int]
    ):
        if model.learned_thresholds and len(parts) > 1:
            raise ValueError(
                f"learned_thresholds is True for {len(parts)} parts; train one after the other, as their rates differ."
            )
        self.run = Run(model, training, parts[0])
        states = jax.jit(jax.vmap(self.run.drawn))(jnp.stack([jax.random.key(seed) for seed in seeds]))
        if model.n_thresholds and not model.learned_thresholds:
            n = model.n_thresholds
            thresholds = [first_thresholds(by_feature(model, part), training, n) for part in parts]
            states.others["encoder"]["thresholds"] = jnp.stack(thresholds)
        samples = tuple(jnp.stack([getattr(part, array) for part in parts]) for array in ("x", "y"))

        def step(states: Any, number: Any, samples: Any) -> Any:
            states, losses = jax.vmap(self.run.step, (0, None, 0))(states, number, samples)
            return states, losses.mean()

        with lutjax.use_implementation("xla"):  # under vmap other kernels run for one network after the other
            self.states, self.loss = Repeated(step, samples)(states, 0, training.steps)

    def accuracy(self, number: int, part: Samples, *, hard: bool) -> float:
        """Return the percentage of a part whose classes a network gets right."""
        state = jax.tree.map(lambda array: array[number], self.states)
        return 100 * self.run.accuracy(state, part, hard=hard)

"""Fields and checks that the training of every kind of model shares."""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from lutjax._extras import needed_by
from lutjax.models._fields import MOST_INT, check_floats
from lutjax.training import optimizers

with needed_by(__name__):
    import optax


MOST_SAMPLES = 2**53
"""Largest number of samples of a step, whose memory is told in float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A base of dataclasses of what decides a training run beside its model and data.

    Attributes:
      steps: optimizer steps in all; the cool-down depends on it.
      batch_size: samples of one step.
      learning_rate: rate before warm-up and cool-down.
      seed: of the model and of everything random.

    Raises:
      ValueError: a value is impossible.
    """

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("seed", "split"):
                continue  # of 32 bits without a sign
            most = MOST_SAMPLES if field.name == "batch_size" else MOST_INT
            if isinstance(value, int) and value > most:
                raise ValueError(f"{field.name} is {value}; it must be at most {most}.")
        check_floats(self)
        self.check_least(steps=1, batch_size=1)
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0 and finite.")
        self.check_seeds("seed")

    def check_least(self, **least: int) -> None:
        """Raise ValueError if a field is below its least value."""
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {smallest}.")

    def check_fractions(self, *names: str) -> None:
        """Raise ValueError if a field is no fraction of the steps."""
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a fraction of the steps, 0 to 1.")

    def check_seeds(self, *names: str) -> None:
        """Raise ValueError if a field is not an unsigned number of 32 bits."""
        for name in names:
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to {2**32 - 1}.")

    def rate(self) -> optax.Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled()

    scheduled_name: ClassVar[str] = "rate"
    """What of a step depends on the number of all steps, in words."""

    def scheduled_values(self, numbers: Int[np.ndarray, " steps"]) -> Float[np.ndarray, "steps values"]:
        """Return what depends on the number of all steps, for steps that are counted from 0."""
        rates = np.asarray(self.rate()(numbers), np.float32)  # a constant schedule answers with one number
        return np.broadcast_to(rates, numbers.shape)[:, None]

    def scheduled(
        self, schedule: str = "constant", *, warmup: float = 0.0, cooldown: float = 0.0
    ) -> optax.Schedule:
        """Return a schedule of these steps, batches and this rate; see `optimizers.learning_rate`."""
        return optimizers.learning_rate(
            schedule,
            rate=self.learning_rate,
            steps=self.steps,
            batch_size=self.batch_size,
            warmup=warmup,
            cooldown=cooldown,
        )

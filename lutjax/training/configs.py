"""Training fields and checks shared by all models."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lutjax.models._fields import MOST_INT, check_floats

Schedule = Callable[[Any], Any]  # an `optax.Schedule`: a value for every step, counted from 0

MOST_SAMPLES = 2**53
"""Largest number of samples per step: the banner computes their memory in float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Base config for training.

    Attributes:
      steps: number of optimizer steps. The cooldown depends on it.
      batch_size: samples per step.
      learning_rate: learning rate before warmup and cooldown.
      seed: random seed.

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
            raise ValueError(
                f"learning_rate is {self.learning_rate}; it must be above 0 and finite."
            )
        self.check_seeds("seed")

    def check_least(self, **least: int) -> None:
        """Raise ValueError if a field is below its least value."""
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least {smallest}."
                )

    def check_fractions(self, *names: str) -> None:
        """Raise ValueError if a field is no fraction of the steps."""
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it is a fraction of the steps, 0 to 1."
                )

    def check_seeds(self, *names: str) -> None:
        """Raise ValueError if a field is not an unsigned number of 32 bits."""
        for name in names:
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to {2**32 - 1}.")

    def rate(self) -> Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled()

    scheduled_name: ClassVar[str] = "rate"
    """Description of the step values that depend on the total number of steps."""

    def scheduled_values(
        self, numbers: Int[np.ndarray, " steps"]
    ) -> Float[np.ndarray, "steps values"]:
        """Return the values of steps, from 0, that depend on the total number of steps."""
        # A constant schedule returns a single number.
        rates = np.asarray(self.rate()(numbers), np.float32)
        return np.broadcast_to(rates, numbers.shape)[:, None]

    def scheduled(
        self, schedule: str = "constant", *, warmup: float = 0.0, cooldown: float = 0.0
    ) -> Schedule:
        """Return a schedule with these steps, batches and rate; see `optimizers.learning_rate`."""
        from lutjax.training import optimizers

        schedule_of: Schedule = optimizers.learning_rate(
            schedule,
            rate=self.learning_rate,
            steps=self.steps,
            batch_size=self.batch_size,
            warmup=warmup,
            cooldown=cooldown,
        )
        return schedule_of


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Intervals between measurements and checkpoints, in steps.

    They change nothing in what is learned, so a resumed run may change them.

    Attributes:
      log_every: steps between training losses.
      eval_every: steps between tests.
      checkpoint_every: steps between checkpoints.
    """

    log_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name in ("log_every", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")


class Configs(NamedTuple):
    """Classes of dataclasses that hold all that can be chosen of a run of one kind."""

    # Sizes of the model; a union of classes where a run is one of several models
    model: type | UnionType
    # Everything else that decides what is learned: a `lutjax.training.configs.Training`
    training: type
    # What may change while a run goes on; the record's `options` are its fields
    options: type[Intervals]
    # Classes of the model's config by the names of models, the first by default; none where there
    # is one class
    models: Mapping[str, type] = MappingProxyType({})
    # Returns the values of fields of a new run of one of `models` (None where there are none) whose
    # default is another; words for one that follows from data
    preset: Callable[[str | None], Mapping[str, Any]] = lambda model: {}

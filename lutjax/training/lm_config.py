"""What can be chosen of a run of a language model. Importing it needs no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lutjax._names import OPTIMIZERS, SCHEDULES, TABLE_OPTIMIZERS
from lutjax.models._fields import check_names, one_of
from lutjax.models._language_configs import GPTConfig, LUTTransformerConfig
from lutjax.training import presets
from lutjax.training.configs import Configs, Intervals, Schedule, Training

TABLE_GRADIENTS = ("factored", "dense")

SAME = "same"
"""Tables move as all other parameters do."""

ModelConfig = LUTTransformerConfig | GPTConfig

MODELS: dict[str, type[ModelConfig]] = {"lut": LUTTransformerConfig, "gpt": GPTConfig}
"""Classes of the configs of models, by the names under which they are trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model and the text. Data order and dropout follow from the seed.

    Attributes:
      batch_size: windows of the text in one step.
      learning_rate: rate before warm-up and cool-down; a factor of the published schedule.
      table_gradient: factored, the rows that were looked up and their cotangents, or dense, arrays of the tables'
        shapes; both give the same results up to rounding. Only factored ones know of rows that were looked up and have
        a gradient of exactly 0: row_adam counts these look-ups, and momentum and weight decay move such rows.
      table_optimizer: how table rows move: sgd, row_adagrad, row_momentum or row_adam; or same, as all other
        parameters do, by dense gradients.
      table_rate: factor of the learning rate for tables of detectors.
      table_weight_decay: share of a row that a step takes away from it if it was looked up, times the rate.
      memory_optimizer: how rows of a memory of n-grams move: sgd, row_adagrad, row_momentum or row_adam, always by factored gradients.
      memory_rate: factor of the learning rate for rows of a memory.
      memory_weight_decay: as table_weight_decay, of rows of a memory.
      memory_depth: of the queue of rows of a memory in the memory of the host: the most steps whose updates the rows that a step reads may lack. 0: none, and
        what is learned is what a memory on the device learns; with more the CPU works while the device computes.
      optimizer: of everything else: sgd, momentum, adam, adamw, adagrad or row_adagrad.
      weight_decay: of adamw: share of a matrix that a step takes away, times the rate. Tables, scales and biases have
        none.
      clip: largest norm of all gradients together; larger ones are scaled to it. By default of the class there is no limit.
      total_variation: weight in the loss of the mean squared differences between rows of a table whose addresses differ in
        one bit; needs dense gradients.
      microbatches: parts of a batch that are computed one after the other, to save memory.
      schedule: constant, published or cosine: the rate between warm-up and cool-down.
      warmup: fraction of the steps over which the rate rises linearly.
      cooldown: fraction of the steps, at the end, over which the rate falls linearly to 0.
      loss: mean or sum, of the cross-entropies of all bytes that a batch predicts.
      validate: whether the validation part is kept to choose sizes, rates and states with, or is trained on, too.
      select_every: steps between two tests on the validation part; the state with the lowest loss there is kept, tested at
        the end and loaded. 0 (default): the last state is.
      seed: of the model, the data order and dropout.
    """

    learning_rate: float = 0.005
    table_gradient: str = one_of(TABLE_GRADIENTS, "factored")
    table_optimizer: str = one_of((*TABLE_OPTIMIZERS, SAME), "row_adagrad")
    table_rate: float = 1.0
    table_weight_decay: float = 0.0
    memory_optimizer: str = one_of(TABLE_OPTIMIZERS, "row_adam")
    memory_rate: float = 1.0
    memory_weight_decay: float = 0.0
    memory_depth: int = 0
    optimizer: str = one_of(OPTIMIZERS, "row_adagrad")
    microbatches: int = 1
    schedule: str = one_of(SCHEDULES, "constant")
    warmup: float = 0.0
    cooldown: float = 0.5
    loss: str = one_of(("mean", "sum"), "mean")
    weight_decay: float = 0.0
    clip: float | None = None
    total_variation: float = 0.0
    validate: bool = True
    select_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(microbatches=1, select_every=0, memory_depth=0)
        self.check_fractions("warmup", "cooldown")
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches is {self.microbatches}; it must divide the batch size, {self.batch_size}."
            )
        for name in (
            "table_rate", "table_weight_decay", "memory_rate", "memory_weight_decay", "weight_decay", "total_variation"
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and not negative.")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"clip is {self.clip}; it must be above 0 and finite, or None for no limit.")
        check_names(self)
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"weight_decay is {self.weight_decay} and optimizer {self.optimizer!r}; only adamw has weight decay."
            )
        if self.table_optimizer == SAME and self.table_weight_decay:
            raise ValueError(
                f"table_weight_decay is {self.table_weight_decay}; rules for rows have it, not {SAME!r}."
            )
        if self.select_every and not self.validate:
            raise ValueError(
                f"select_every is {self.select_every}; it needs the validation part, so validate."
            )
        for name, asked in (
            ("table_optimizer", self.table_optimizer == SAME),
            ("total_variation", self.total_variation),
        ):
            if asked and self.table_gradient != "dense":
                raise ValueError(f"{name} is {getattr(self, name)!r}; it needs table_gradient 'dense'.")

    def rate(self) -> Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled(self.schedule, warmup=self.warmup, cooldown=self.cooldown)


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      usage: count at the end how often the test part reads each row of each table, in usage.json; rows of a memory are always counted.
    """

    usage: bool = False


def _demo(model: str | None) -> Mapping[str, Any]:
    return presets.preset(model or presets.MODEL, "demo")


CONFIGS = Configs(
    LUTTransformerConfig | GPTConfig,
    TrainingConfig,
    Options,
    {name: MODELS[name] for name in (presets.MODEL, *MODELS)},
    _demo,
)

"""Configs of the training runs of a language model, importable without JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lutjax.models._fields import check_names, one_of
from lutjax.models._language_configs import GPTConfig, LUTTransformerConfig
from lutjax.names import OPTIMIZERS, SCHEDULES, TABLE_OPTIMIZERS
from lutjax.training import presets
from lutjax.training.configs import Configs, Intervals, Schedule, Training

TABLE_GRADIENTS = ("factored", "dense")

SAME = "same"  # tables are updated like all other parameters

ModelConfig = LUTTransformerConfig | GPTConfig

MODELS: dict[str, type[ModelConfig]] = {"lut": LUTTransformerConfig, "gpt": GPTConfig}
"""Classes of the configs of models, by the names under which they are trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model and the text.

    Data order and dropout follow from the seed.

    Attributes:
      batch_size: text windows per step.
      learning_rate: learning rate before warmup and cooldown. A factor of the published schedule.
      table_gradient: table gradient type. factored: accessed rows and their cotangents. dense:
        arrays of the table shapes. Both give the same results up to rounding, but only sparse
        gradients know accessed rows with a zero gradient, which row_adam counts and momentum and
        weight decay update.
      table_optimizer: table row optimizer. same updates tables like all other parameters, by dense
        gradients.
      table_rate: learning-rate factor for detector tables.
      table_weight_decay: table weight decay for accessed rows, scaled by the rate.
      memory_optimizer: memory row optimizer. It always uses sparse gradients.
      memory_rate: learning-rate factor for memory rows.
      memory_weight_decay: memory weight decay for accessed rows, scaled by the rate.
      memory_depth: prefetch depth for host-resident memories. With depth 0 every step waits for the
        previous update, as on the device. With depth n, reads lag updates by exactly n steps, and
        the CPU works while the device computes.
      optimizer: optimizer for other parameters.
      weight_decay: matrix weight decay (adamw), scaled by the rate. Tables, scales and biases have
        none.
      clip: maximum global gradient norm. Default: no limit.
      total_variation: total-variation penalty weight for tables. It is the mean squared difference
        of rows whose addresses differ in one bit; requires dense gradients.
      microbatches: sequential parts per batch, to save memory.
      schedule: learning-rate schedule between warmup and cooldown.
      warmup: fraction of steps with linear warmup.
      cooldown: fraction of steps with linear cooldown to 0.
      loss: cross-entropy reduction over a batch.
      validate: hold out a validation part, or train on it.
      select_every: steps between validations for selecting the kept state. The state with the
        lowest validation loss is tested at the end and loaded; 0 keeps the last state.
      seed: random seed for model, data order and dropout.
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
                f"microbatches is {self.microbatches}; "
                f"it must divide batch_size, {self.batch_size}."
            )
        decays = "table_weight_decay", "memory_weight_decay", "weight_decay", "total_variation"
        for name in ("table_rate", "memory_rate", *decays):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be finite and not negative."
                )
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(
                f"clip is {self.clip}; it must be above 0 and finite, or None for no limit."
            )
        check_names(self)
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"weight_decay is {self.weight_decay} and optimizer {self.optimizer!r}; "
                "it requires adamw."
            )
        if self.table_optimizer == SAME and self.table_weight_decay:
            raise ValueError(
                f"table_weight_decay is {self.table_weight_decay}; "
                f"it requires a row rule, not {SAME!r}."
            )
        if self.select_every and not self.validate:
            raise ValueError(
                f"select_every is {self.select_every}; it requires the validation part (validate)."
            )
        needs_dense = {
            "table_optimizer": self.table_optimizer == SAME,
            "total_variation": self.total_variation,
        }
        for name, needs in needs_dense.items():
            if needs and self.table_gradient != "dense":
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it needs table_gradient 'dense'."
                )

    def rate(self) -> Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled(self.schedule, warmup=self.warmup, cooldown=self.cooldown)


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      usage: count accesses per table row in usage.json. The test part is counted at the end; memory
        rows are always counted.
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

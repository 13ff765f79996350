"""Configs of the training runs of a classifier, importable without JAX."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lutjax.models._config import MOST_THRESHOLDS
from lutjax.models._fields import check_names, one_of
from lutjax.models._logic_configs import LogicClassifierConfig, LogicTreeNetConfig
from lutjax.names import ANNEALINGS
from lutjax.training.configs import Configs, Intervals, Schedule, Training

THRESHOLDS = ("uniform", "gaussian", "distributive", "learned")

TREE_TAU = 8.0  # temperature of the votes of trees without a recipe

FOR_TABLES: Mapping[str, Any] = MappingProxyType(
    {
        "layers": (1280,),
        "wiring": "learnable",
        "estimator": "straight_through",
        "tau": 10.0,
        "steps": 1000,
        "batch_size": 256,
        "column_bits": 32,
        "select_every": 50,
    }
)
"""Defaults of fields for gate layers on the rows of a table, below recipes and given values."""

GATES_PER_CLASS = (200, 200)
"""Gates per class and layer for the rows of a table with more than two classes.

On DNA splices two layers of 300 or 1500 gates gained 1.4 and 1.3 points over one of 1280, on one
split.
"""

TAU_OF_CLASSES = 6.0  # vote temperature of these layers

SMALL = 256
"""Fewest training rows of a table with the defaults of `FOR_TABLES`: one batch."""

FOR_SMALL_TABLES: Mapping[str, Any] = MappingProxyType(
    {
        "layers": (400,),
        "tau": 2.0,
        "learning_rate": 0.03,
        "steps": 1500,
        "batch_size": 64,
        "gate_cost": 0.0,
        "select_every": 0,
    }
)
"""Values in place of `FOR_TABLES` for classes of smaller tables, if none of them is given.

Layers are gates per class. The gate cost is one of `GATE_COSTS`, chosen by cross-validation.
"""

GATE_COSTS = (0.0, 3.0)
"""Gate costs compared on small tables: for rows that gates can reproduce, and for noisy labels."""

MODELS = {"gates": LogicClassifierConfig, "tree": LogicTreeNetConfig}  # configs of models by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model and the samples.

    Attributes:
      batch_size: samples per step.
      learning_rate: Adam learning rate before the cooldown.
      weight_decay: AdamW weight decay for gates and tables, scaled by the rate. Thresholds and
        scores of learned wires have none.
      cooldown: fraction of steps with linear cooldown to 0.
      thresholds: threshold placement. uniform, gaussian and distributive follow the training part,
        see lutjax.thermometer_thresholds; learned starts as uniform, and at quantiles for table
        columns.
      temperature: gate temperature. It divides the logits. See estimator.
      final_temperature: temperature after the last step. Default: --temperature.
      annealing: temperature annealing.
      augment: strength of image augmentation: shifts, rotations and scalings. 1 is up to half a
        pixel, 0.15 radians and 10 %; 0 is none. Other samples are unchanged.
      shift: maximum additional image shift, in pixels.
      bend: standard deviation of image warps, in pixels. See lutjax.training.augment.warp.
      flip: probability of mirroring an image left to right.
      gate_cost: loss per 1000 circuit gates, in nats. Counted are gates expected to need two
        inputs; a vote that is not constant counts as one gate. Circuits become smaller and, at high
        costs, less accurate; see docs/circuits.md.
      column_bits: maximum bits per numeric table column, at quantiles. 0 keeps numbers, which
        n_thresholds turns into bits.
      select_every: steps between hard tests for selecting the kept network. The network with the
        best accuracy on up to 4096 training samples is tested at the end, exported and loaded; 0
        keeps the last network.
      split: random fifth of samples to test on. Ignored for data with a test part.
      stratified: split each class in proportion.
      seed: random seed for model, sample order and noise.
    """

    steps: int = 15000
    batch_size: int = 100
    weight_decay: float | int = 0.0
    cooldown: float = 0.5
    thresholds: str = one_of(THRESHOLDS, "uniform")
    temperature: float | int = 1.0
    final_temperature: float | int | None = None
    annealing: str = one_of(ANNEALINGS, "exponential")
    augment: float | int = 1.0
    shift: float | int = 0.0
    bend: float | int = 0.0
    flip: float | int = 0.0
    gate_cost: float | int = 0.0
    column_bits: int = 8
    select_every: int = 0
    split: int = 0
    stratified: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fractions("cooldown")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip}; it is a probability, 0 to 1.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay is {self.weight_decay}; it must not be negative.")
        self.check_least(column_bits=0, select_every=0)
        if self.column_bits > MOST_THRESHOLDS:
            raise ValueError(
                f"column_bits is {self.column_bits}; it must be at most {MOST_THRESHOLDS}."
            )
        self.check_seeds("split")
        check_names(self)
        for name in ("temperature", "final_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be positive and finite.")
        for name in ("augment", "shift", "bend", "gate_cost"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} is {value}; it must not be negative.")

    def rate(self) -> Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled(cooldown=self.cooldown)

    def temperatures(self) -> Schedule | None:
        """Return the temperature of every step, counted from 0; None if it is 1."""
        from lutjax.training import optimizers

        last = self.temperature if self.final_temperature is None else self.final_temperature
        schedule = optimizers.annealed(
            self.annealing, first=self.temperature, last=last, steps=self.steps
        )
        return None if self.temperature == last == 1 else schedule


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      patience: tests without improvement before stopping. The test part then chooses the stopping
        time, so its accuracy is slightly optimistic. Default: never stop early.
      baselines: fit logistic regression and a random forest to the same bits. Default: for at most
        20 million training bits.
    """

    patience: int | None = None
    baselines: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience is {self.patience}; it must be at least 1.")


def _preset(model: str | None) -> Mapping[str, Any]:
    """Return words for what follows from the samples, and the temperature of the votes of trees."""
    words = {}
    for name, value in FOR_TABLES.items():
        configs = (LogicClassifierConfig, TrainingConfig)
        usual = next(
            c.__dataclass_fields__[name].default for c in configs if name in c.__dataclass_fields__
        )
        more = {"layers": " or 200,200 a class", "tau": ", 6"}.get(name, "")
        words[name] = f"{_format_option(usual)} (tables: {_format_option(value)}{more})"
    stratified = {"stratified": "on with --data"}
    if model == "tree":
        of_images = dict.fromkeys(("kernels", "kernel", "padding", "pool"), "from the image size")
        return {**stratified, **of_images, "tau": TREE_TAU}
    return {**words, **stratified, "image_shape": "from the samples"}


def _format_option(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


CONFIGS = Configs(
    LogicClassifierConfig | LogicTreeNetConfig, TrainingConfig, Options, MODELS, _preset
)

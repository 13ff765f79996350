"""What can be chosen of a run of a classifier. Importing it needs no JAX."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lutjax._names import ANNEALINGS
from lutjax.models._config import MOST_THRESHOLDS
from lutjax.models._fields import check_names, one_of
from lutjax.models._logic_configs import LogicClassifierConfig, LogicTreeNetConfig
from lutjax.training.configs import Configs, Intervals, Schedule, Training

THRESHOLDS = ("uniform", "gaussian", "distributive", "learned")

TREE_TAU = 8.0
"""Temperature of the votes of trees without a recipe."""

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
"""Values of fields for layers of gates on the rows of a table, where neither a recipe nor the user gives others."""

MODELS = {"gates": LogicClassifierConfig, "tree": LogicTreeNetConfig}
"""Configs of models by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model and the samples.

    Attributes:
      batch_size: samples of one step.
      learning_rate: of Adam, before the cool-down.
      weight_decay: share of each number of gates and tables that a step takes away, times the rate, as in AdamW; not of
        thresholds and of the scores of learned wires. 0 is Adam.
      cooldown: fraction of the steps, at the end, over which the rate falls linearly to 0.
      thresholds: where numbers become bits, by what the training part holds: uniform, gaussian or distributive, see
        lutjax.thermometer_thresholds; or learned, which starts as uniform, and for columns of
        tables at their quantiles.
      temperature: of the gates: their logits are divided by it. See estimator.
      final_temperature: after the last step; annealing says how it is reached. Default: temperature, in all steps.
      annealing: linear, exponential or cosine.
      augment: how strongly images are moved, turned and stretched at random in each step: with 1 up to half a
        pixel, 0.15 radians and 10 %; 0 not at all. Samples that are no images stay as they are.
      shift: pixels by which images are moved at random beyond that, at most.
      bend: pixels by which points of an image are moved, each in its own direction, as a standard deviation; see
        lutjax.training.augment.warp.
      gate_cost: what 1000 gates of the circuit add to the loss, in nats: as many as are expected to need two inputs, and a
        vote that is not constant counts as one. Circuits become smaller, and at some cost less accurate; see
        docs/circuits.md.
      column_bits: bits that a column of numbers of a table becomes at most, at quantiles of the training part; 0 leaves it a
        number, which n_thresholds makes bits of. Other data have no columns.
      select_every: steps between two tests of the hard network on the training part, on at most 4096 of its samples; the network that is
        right most often there is kept, tested at the end, exported and loaded. 0: the last one is.
      split: which random fifth of the samples is the test part, where they have none of their own.
      stratified: whether each class has its share in that fifth.
      seed: of the model, the order of samples and all noise.
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
    gate_cost: float | int = 0.0
    column_bits: int = 8
    select_every: int = 0
    split: int = 0
    stratified: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fractions("cooldown")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay is {self.weight_decay}; it must not be negative.")
        self.check_least(column_bits=0, select_every=0)
        if self.column_bits > MOST_THRESHOLDS:
            raise ValueError(f"column_bits is {self.column_bits}; it must be at most {MOST_THRESHOLDS}.")
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
        schedule = optimizers.annealed(self.annealing, first=self.temperature, last=last, steps=self.steps)
        return None if self.temperature == last == 1 else schedule


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      patience: stop after so many tests in which the hard network was not better than before. The test part then
        decides when to stop, so its accuracy says a little too much. Default: all steps.
      baselines: fit logistic regression and a random forest to the same bits after the last step. Default: where the
        training part has at most 20 million bits; beyond, they take many minutes.
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
        usual = next(c.__dataclass_fields__[name].default for c in configs if name in c.__dataclass_fields__)
        words[name] = f"{_shown(usual)} (tables: {_shown(value)})"
    stratified = {"stratified": "--stratified with --data"}
    if model == "tree":
        of_images = dict.fromkeys(("kernels", "kernel", "padding", "pool"), "from the image size")
        return {**stratified, **of_images, "tau": TREE_TAU}
    return {**words, **stratified, "image_shape": "from the samples"}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


CONFIGS = Configs(LogicClassifierConfig | LogicTreeNetConfig, TrainingConfig, Options, MODELS, _preset)

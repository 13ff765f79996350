"""Named logic gate networks, published and our own: sizes and rates for ``train classify``."""

import dataclasses
from typing import Any, ClassVar

from lutjax.training import presets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """Base class for a network's sizes and rates. `print` shows them.

    Attributes:
      name: recipe name.
      source: publication, or the page with our measurements.
      data: training data.
      published: published accuracy on it, in percent; None if the source of these sizes gives none.
      differs: description of differences from the publication; empty if none are known.
      steps, batch_size, learning_rate, weight_decay, cooldown, thresholds, augment, flip: see
        `lutjax.training.classifier.TrainingConfig`.
    """

    model: ClassVar[str]  # model name in ``train classify``

    name: str
    source: str
    data: str
    published: float | None
    differs: str = ""
    steps: int = 200_000
    batch_size: int = 100
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    cooldown: float = 0.0
    thresholds: str = "uniform"
    augment: float = 0.0
    flip: float = 0.0

    @property
    def samples(self) -> tuple[tuple[int, ...], int]:
        """Sample shape (empty for table rows) and number of classes in the publication."""
        return _SAMPLES[self.data]

    def sizes(self) -> dict[str, Any]:
        """Return field values for the model config."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Return field values for the configs of a run."""
        return {**self.sizes(), **self._rates()}

    def _rates(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _TRAINING}

    def _gates(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        result = "for" if self.published is None else f"published with {self.published:g} % on"
        lines = [
            f"{self.name}: {self._gates()}, {result} {self.data}",
            f"source: {self.source}",
            *([f"differs: {self.differs}"] if self.differs else []),
            *(
                "; ".join(f"{name} {_format_option(value)}" for name, value in v.items())
                for v in (self.sizes(), self._rates())
            ),
        ]
        return "\n  ".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Published):
    """Sizes and rates for a gate or table network. `print` shows them.

    Attributes:
      layers, n_thresholds, n_inputs, tables, residual, noise, wiring, candidates, edges, tau: see
        `lutjax.models.LogicClassifierConfig`.

    Example:
      >>> from lutjax.training.recipes import RECIPES
      >>> print(RECIPES["difflogic-mnist-small"])  # doctest: +ELLIPSIS
      difflogic-mnist-small: 48,000 gates, published with 97.69 % on MNIST
        source: Petersen et al., Deep Differentiable Logic Gate Networks, 2022
        differs: pixels are bits while training, too; the published network reads 20 x 20 pixels ...
        layers 8000,8000,8000,8000,8000,8000; n_thresholds 1; n_inputs 2; tables gates; ...
        steps 200000; batch_size 100; learning_rate 0.01; weight_decay 0.0; ...
    """

    model: ClassVar[str] = "gates"

    layers: tuple[int, ...]
    n_thresholds: int
    n_inputs: int = 2
    tables: str = "gates"
    residual: float = 0.0
    noise: float = 1.0
    wiring: str = "unique"
    candidates: int = 8
    edges: bool = False
    tau: float

    def sizes(self) -> dict[str, Any]:
        """Return field values for the model config."""
        return {name: getattr(self, name) for name in _MODEL}

    def _gates(self) -> str:
        kind = "gates" if self.n_inputs == 2 else f"tables of {self.n_inputs} inputs"
        return f"{sum(self.layers):,} {kind}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeRecipe(Published):
    """Sizes and rates for a published tree network on images. `print` shows them.

    Attributes:
      network: `lutjax.models.LogicTreeNetConfig` method returning its sizes, cifar10 or
        mnist.
      size: size passed to the method.

    Example:
      >>> from lutjax.training.recipes import RECIPES
      >>> print(RECIPES["logictreenet-mnist-s"])  # doctest: +ELLIPSIS
      logictreenet-mnist-s: 73,136 gates that are trained, published with 98.46 % on MNIST
        source: Petersen et al., Convolutional Differentiable Logic Gate Networks, 2024
        differs: the last network is the result, not the one that is best on a validation part
        kernels 16,48,144; layers 40960,20480,10240; n_thresholds 1; depth 3; kernel 5,3,3; ...
        steps 200000; batch_size 512; learning_rate 0.01; weight_decay 0.0; cooldown 0.0; ...
    """

    model: ClassVar[str] = "tree"

    network: str
    size: str

    def _config(self) -> Any:
        from lutjax.models import LogicTreeNetConfig

        return getattr(LogicTreeNetConfig, self.network)(self.size)

    def sizes(self) -> dict[str, Any]:
        """Return field values for the model config."""
        config = self._config()
        names = (
            field.name
            for field in dataclasses.fields(config)
            if field.name not in _OF_SAMPLES and field.metadata.get("option", True)
        )
        return {name: getattr(config, name) for name in names}

    def _gates(self) -> str:
        return f"{self._config().n_gates:,} gates that are trained"


def _format_option(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_MODEL = (
    *("layers", "n_thresholds", "n_inputs", "tables", "residual", "noise"),
    *("wiring", "candidates", "edges", "tau"),
)
_TRAINING = (
    *("steps", "batch_size", "learning_rate", "weight_decay", "cooldown"),
    *("thresholds", "augment", "flip"),
)
_OF_SAMPLES = ("in_shape", "n_classes")

_SAMPLES: dict[str, tuple[tuple[int, ...], int]] = {
    "MNIST": ((28, 28), 10),
    "Fashion-MNIST": ((28, 28), 10),
    "CIFAR-10": ((32, 32, 3), 10),
    "Adult": ((), 2),
}
"""Sample shape (empty for table rows) and number of classes, by data set name."""

RECIPES: dict[str, Published] = {
    name: (TreeRecipe if "network" in values else Recipe)(
        **{"name": name, "published": None, **values}
    )
    for name, values in presets.read_values("recipes.toml").items()
}
"""Known recipes by name, from ``recipes.toml``."""


def recipe(name: str) -> Published:
    """Return a recipe by name.

    Raises:
      ValueError: no recipe has that name.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; the known ones are {', '.join(RECIPES)}.")
    return RECIPES[name]

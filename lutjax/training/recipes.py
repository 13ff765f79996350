"""Logic gate networks by name, published ones and our own: sizes and rates for ``train classify``."""

import dataclasses
from typing import Any, ClassVar


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

    model: ClassVar[str]
    """Model name in ``train classify``."""

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
        """Return a description of the gate count."""
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
      >>> print(RECIPES["difflogic-mnist-small"])
      difflogic-mnist-small: 48,000 gates, published with 97.69 % on MNIST
        source: Petersen et al., Deep Differentiable Logic Gate Networks, 2022
        differs: pixels are bits while training, too; the published network reads 20 x 20 pixels of each image
        layers 8000,8000,8000,8000,8000,8000; n_thresholds 1; n_inputs 2; tables gates; residual 0.0; noise 1.0; wiring unique; candidates 8; edges False; tau 10.0
        steps 200000; batch_size 100; learning_rate 0.01; weight_decay 0.0; cooldown 0.0; thresholds uniform; augment 0.0; flip 0.0
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
      >>> print(RECIPES["logictreenet-mnist-s"])
      logictreenet-mnist-s: 73,136 gates that are trained, published with 98.46 % on MNIST
        source: Petersen et al., Convolutional Differentiable Logic Gate Networks, 2024
        differs: the last network is the result, not the one that is best on a validation part
        kernels 16,48,144; layers 40960,20480,10240; n_thresholds 1; depth 3; kernel 5,3,3; padding 0; pool 2; pool_padding 0,1,1; channels_per_kernel 0; tables gates; residual 0.9; wiring balanced; candidates 8; estimator soft; tau 6.5; edges False
        steps 200000; batch_size 512; learning_rate 0.01; weight_decay 0.0; cooldown 0.0; thresholds uniform; augment 0.0; flip 0.0
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

_DIFFLOGIC = "Petersen et al., Deep Differentiable Logic Gate Networks, 2022"
_OF_THE_DATA = "thresholds lie between the smallest and the largest value of each pixel in the training part, not of all pixels"


def _difflogic(name: str, data: str, published: float, differs: str = "", **sizes: Any) -> Recipe:
    return Recipe(
        name=f"difflogic-{name}", source=_DIFFLOGIC, data=data, published=published, differs=differs, **sizes
    )


def _cifar(name: str, published: float, layers: tuple[int, ...], n_thresholds: int) -> Recipe:
    return _difflogic(
        f"cifar10-{name}",
        "CIFAR-10",
        published,
        _OF_THE_DATA,
        layers=layers,
        n_thresholds=n_thresholds,
        tau=100.0,
    )


_TREES = "Petersen et al., Convolutional Differentiable Logic Gate Networks, 2024"
_LAST = "the last network is the result, not the one that is best on a validation part"
_EDGES = (
    "bits of edges and of curvature are those of differences of neighbors, 31 of each; no teacher is followed"
)


def _tree(
    network: str,
    size: str,
    data: str,
    published: float,
    *differs: str,
    rate: float,
    batch_size: int = 128,
    weight_decay: float = 0.0,
) -> TreeRecipe:
    return TreeRecipe(
        name=f"logictreenet-{network}-{size.lower()}",
        source=_TREES,
        data=data,
        published=published,
        differs="; ".join((*differs, _LAST)),
        network=network,
        size=size,
        learning_rate=rate,
        batch_size=batch_size,
        weight_decay=weight_decay,
    )


def _lilogic(
    data: str, size: str, n_gates: int, published: float, tau: float, n_thresholds: int, differs: str = ""
) -> Recipe:
    return Recipe(
        name=f"lilogic-{data.lower().replace('-', '')}-{size}",
        source="Fojcik et al., LILogic Net, 2025 (arXiv 2511.12340)",
        data=data,
        published=published,
        differs="a gate reads its best candidates while training, too, and not their mixture; two equal layers, thresholds and no "
        f"augmentation are choices of this package{differs}",
        layers=(n_gates // 2,) * 2,
        n_thresholds=n_thresholds,
        wiring="top-k",
        candidates=32,
        tau=tau,
        steps=200 * (50_000 if data == "CIFAR-10" else 60_000) // 256,
        batch_size=256,
        learning_rate=0.075,
    )


def _fashion(size: str, n_gates: int, **values: Any) -> Recipe:
    return Recipe(
        name=f"fashion-mnist-{size}",
        source=_OWN,
        data="Fashion-MNIST",
        published=None,
        layers=(n_gates // 2,) * 2,
        n_thresholds=8,
        edges=True,
        thresholds="distributive",
        wiring="top-k",
        cooldown=0.5,
        **values,
    )


_OWN = "lutjax, docs/appendix/images.md"

_OWN_RATES = ", and so are tau and the rate, batch and 200 epochs of the networks for CIFAR-10"

RECIPES: dict[str, Published] = {
    recipe.name: recipe
    for recipe in (
        _difflogic(
            "mnist-small",
            "MNIST",
            97.69,
            "pixels are bits while training, too; the published network reads 20 x 20 pixels of each image",
            layers=(8000,) * 6,
            n_thresholds=1,
            tau=10.0,
        ),
        _difflogic(
            "mnist",
            "MNIST",
            98.47,
            "pixels are bits while training, too",
            layers=(64_000,) * 6,
            n_thresholds=1,
            tau=30.0,
        ),
        _cifar("small", 51.27, (12_000,) * 4, 3),
        _cifar("medium", 57.39, (128_000,) * 4, 3),
        _cifar("large", 60.78, (256_000,) * 5, 31),
        _cifar("large-2x", 61.41, (512_000,) * 5, 31),
        _cifar("large-4x", 62.14, (1_024_000,) * 5, 31),
        _difflogic(
            "adult",
            "Adult",
            84.8,
            "columns are encoded otherwise: numbers by quantiles (--column-bits)",
            layers=(256,) * 5,
            n_thresholds=0,
            tau=20.0,
            steps=100_000,
        ),
        Recipe(
            name="dwn-mnist",
            source="Bacellar et al., Differentiable Weightless Neural Networks, 2024: the example of its package",
            data="MNIST",
            published=None,
            differs="the gradient of an input passes through the chosen wires alone; the rate falls linearly at the end, not by a tenth after "
            "14 and 28 of 30 epochs",
            layers=(2000, 1000),
            n_thresholds=3,
            n_inputs=6,
            tables="binary",
            wiring="full,random",
            thresholds="distributive",
            tau=1 / 0.3,
            steps=56_250,
            batch_size=32,
            cooldown=0.5,
        ),
        _tree("mnist", "S", "MNIST", 98.46, rate=0.01, batch_size=512),
        _tree("mnist", "M", "MNIST", 99.23, rate=0.01, batch_size=256),
        _tree("mnist", "L", "MNIST", 99.35, rate=0.01),
        _tree("cifar10", "S", "CIFAR-10", 60.38, rate=0.02, weight_decay=0.002),
        _tree("cifar10", "M", "CIFAR-10", 71.01, rate=0.02, weight_decay=0.002),
        _tree("cifar10", "B", "CIFAR-10", 80.17, _EDGES, rate=0.02, weight_decay=0.002),
        _tree("cifar10", "L", "CIFAR-10", 84.99, _EDGES, rate=0.02, weight_decay=0.002),
        _tree("cifar10", "G", "CIFAR-10", 86.29, _EDGES, rate=0.02, weight_decay=0.001),
        _lilogic("MNIST", "small", 4000, 97.96, 30.0, 1, _OWN_RATES),
        _lilogic("MNIST", "medium", 8000, 98.45, 30.0, 1, _OWN_RATES),
        _lilogic("MNIST", "large", 32_000, 98.95, 30.0, 1, _OWN_RATES),
        _lilogic("CIFAR-10", "small", 8000, 55.11, 90.0, 3, ", and so is tau"),
        _lilogic("CIFAR-10", "medium", 64_000, 57.66, 90.0, 3),
        _lilogic("CIFAR-10", "large", 256_000, 60.98, 100.0, 3),
        _fashion("small", 16_000, candidates=32, tau=15.0, steps=8000, batch_size=1024, learning_rate=0.03),
        _fashion(
            "large",
            100_000,
            candidates=16,
            tau=40.0,
            steps=8000,
            batch_size=1024,
            learning_rate=0.05,
            flip=0.5,
        ),
    )
}
"""Known recipes by name."""


def recipe(name: str) -> Published:
    """Return a recipe by name.

    Raises:
      ValueError: no recipe has that name.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; the known ones are {', '.join(RECIPES)}.")
    return RECIPES[name]

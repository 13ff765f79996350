"""Published networks of logic gates by name: their sizes and rates for ``train classify``."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and rates of a published network. `print` shows them.

    Attributes:
      name: by which it is asked for.
      source: where it was published.
      data: what it was trained on.
      published: its accuracy there, in percent; None where the source of these sizes names none.
      differs: what is not as published here, in words; empty where nothing is known to differ.
      layers, n_thresholds, n_inputs, tables, residual, noise, wiring, candidates, tau: see `lutjax.models.LogicClassifierConfig`.
      steps, batch_size, learning_rate, cooldown, thresholds, augment: see `lutjax.training.classifier.TrainingConfig`.

    Example:
      >>> from lutjax.training.recipes import RECIPES
      >>> print(RECIPES["difflogic-mnist-small"])
      difflogic-mnist-small: 48,000 gates, published with 97.69 % on MNIST
        source: Petersen et al., Deep Differentiable Logic Gate Networks, 2022
        differs: pixels are bits while training, too; the published network reads 20 x 20 pixels of each image
        layers 8000,8000,8000,8000,8000,8000; n_thresholds 1; n_inputs 2; tables gates; residual 0.0; noise 1.0; wiring unique; candidates 8; tau 10.0
        steps 200000; batch_size 100; learning_rate 0.01; cooldown 0.0; thresholds uniform; augment 0.0
    """

    name: str
    source: str
    data: str
    published: float | None
    differs: str = ""
    layers: tuple[int, ...]
    n_thresholds: int
    n_inputs: int = 2
    tables: str = "gates"
    residual: float = 0.0
    noise: float = 1.0
    wiring: str = "unique"
    candidates: int = 8
    tau: float
    steps: int = 200_000
    batch_size: int = 100
    learning_rate: float = 0.01
    cooldown: float = 0.0
    thresholds: str = "uniform"
    augment: float = 0.0

    def fields(self) -> dict[str, Any]:
        """Return the values of fields of the configs of a run."""
        return {name: getattr(self, name) for name in (*_MODEL, *_TRAINING)}

    def __str__(self) -> str:
        result = "" if self.published is None else f" with {self.published:g} %"
        kind = "gates" if self.n_inputs == 2 else f"tables of {self.n_inputs} inputs"
        lines = [
            f"{self.name}: {sum(self.layers):,} {kind}, published{result} on {self.data}",
            f"source: {self.source}",
            *([f"differs: {self.differs}"] if self.differs else []),
            *("; ".join(f"{name} {self._words(name)}" for name in names) for names in (_MODEL, _TRAINING)),
        ]
        return "\n  ".join(lines)

    def _words(self, name: str) -> str:
        value = getattr(self, name)
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_MODEL = ("layers", "n_thresholds", "n_inputs", "tables", "residual", "noise", "wiring", "candidates", "tau")
_TRAINING = ("steps", "batch_size", "learning_rate", "cooldown", "thresholds", "augment")

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


_OWN_RATES = ", and so are tau and the rate, batch and 200 epochs of the networks for CIFAR-10"

RECIPES = {
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
        _lilogic("MNIST", "small", 4000, 97.96, 30.0, 1, _OWN_RATES),
        _lilogic("MNIST", "medium", 8000, 98.45, 30.0, 1, _OWN_RATES),
        _lilogic("MNIST", "large", 32_000, 98.95, 30.0, 1, _OWN_RATES),
        _lilogic("CIFAR-10", "small", 8000, 55.11, 90.0, 3, ", and so is tau"),
        _lilogic("CIFAR-10", "medium", 64_000, 57.66, 90.0, 3),
        _lilogic("CIFAR-10", "large", 256_000, 60.98, 100.0, 3),
    )
}
"""The known recipes by name."""


def recipe(name: str) -> Recipe:
    """Return a recipe by its name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}; the known ones are {', '.join(RECIPES)}.")
    return RECIPES[name]

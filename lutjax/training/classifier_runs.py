"""Runs of classifiers: where their samples are from, and the work at the end."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.models import LogicClassifierConfig
from lutjax.training import datasets, meshes, presets, reports, runs
from lutjax.training.classifier import Record, Run, TrainingConfig, baselines, expected_gates
from lutjax.training.datasets.columns import Encoding
from lutjax.training.errors import CheckpointError
from lutjax.training.experiments import Configs, Experiment, Intervals, Part
from lutjax.training.models import State
from lutjax.training.recipes import RECIPES, recipe as recipe_of
from lutjax.training.samples import Samples, SamplesError

MOST_BITS = 20_000_000
"""Bits of a training part to which baselines are fitted without being asked for."""


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      patience: stop after so many tests in which the hard network was not better than before. The test part then
        decides when to stop, so its accuracy says a little too much. Default: all steps.
      baselines: fit logistic regression and a random forest to the same bits before the first step. Default: where the
        training part has at most 20 million bits; beyond, they take many minutes.
    """

    patience: int | None = None
    baselines: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience is {self.patience}; it must be at least 1.")


class Classifier(Experiment):
    """A classifier on samples: an `Experiment`."""

    configs = Configs(LogicClassifierConfig, TrainingConfig, Options)
    kept = Record
    refuses = SamplesError
    curves = ("training loss", "hard accuracy", "soft accuracy")
    ends_early = "--patience"

    record: Record
    run: Run

    def __init__(self, record: Record, train: Samples, test: Samples, encoding: Encoding | None = None):
        self.record, self.train, self.test, self.encoding = record, train, test, encoding
        self.run = Run(record.model, record.training, train)

    @classmethod
    def new(
        cls,
        fields: Mapping[str, Any],
        path: Path | None = None,
        target: str | None = None,
        test: Path | None = None,
        recipe: str | None = None,
        stratified: bool = False,
    ) -> "Classifier":
        """Return a run that has no step yet, on the data at a path, or on scikit-learn's digits.

        Sizes that are not among the fields are those of the recipe, or as the samples need them.

        Args:
          path, target, test: see `lutjax.training.datasets.load`.
          recipe: one of `lutjax.training.recipes.RECIPES`.
          stratified: whether a test part is split off so, where the fields do not say it.
        """
        data = datasets.load(path, target=target, test=test)
        if data.test is not None:
            for name in ("split", "stratified"):
                if name in fields:
                    raise ValueError(
                        f"{name} is {fields[name]}, but {data.name} has a test part of its own; leave --{name} out."
                    )
        values = {
            "stratified": stratified and data.test is None,
            **(recipe_of(recipe).fields() if recipe else {}),
            **fields,
        }
        training = presets.make(TrainingConfig, values)
        parts = _parts(data, training)
        model, training, options = cls.made({**_sizes(parts, training, values), **values})
        record = Record(
            model=model,
            training=training,
            samples=runs.Source.of(path, len(data), data.digest),
            baselines={},
            options=dataclasses.asdict(options),
            history=runs.History(),
            target=target,
            test=None if test is None else str(test.absolute()),
            recipe=recipe,
        )
        return cls(record, parts.train, parts.test, parts.encoding)

    @classmethod
    def of(
        cls,
        record: Record,
        path: Path | None = None,
        target: str | None = None,
        test: Path | None = None,
    ) -> "Classifier":
        """Return the run of a record, with the samples at `path` or where they were."""
        places = (path or record.samples.path, test or record.test)
        whole, other = (None if place is None else Path(place) for place in places)
        data = datasets.load(whole, target=target or record.target, test=other)
        if data.digest != record.samples.digest:
            raise CheckpointError(
                f"the run belongs to other samples: they were {record.samples.size} of "
                f"{record.samples.path or 'scikit-learn'}, now {len(data)} others of {data.name}."
            )
        parts = _parts(data, record.training)
        return cls(record, parts.train, parts.test, parts.encoding)

    def prepare(self) -> None:
        record = self.record
        n_bits = self.train.x.size * max(record.model.n_thresholds, 1)
        wanted = self.intervals.baselines
        if wanted or (wanted is None and n_bits <= MOST_BITS):
            record.baselines = baselines(self.train, self.test, record.training, record.model.n_thresholds)

    def describe(self) -> str:
        model, training = self.record.model, self.record.training
        layers = " + ".join(map(str, model.layers))
        gates = "gates" if model.n_inputs == 2 else f"tables of {model.n_inputs} inputs"
        return (
            f"on {len(self.train.x)} samples of {self.train.name}, testing on {len(self.test.x)}: {layers} {gates}, "
            f"{self.run.structure.n_parameters():,} parameters, {training.steps} steps of {training.batch_size} samples"
        )

    def evaluate(self, state: State) -> float:
        return self.run.accuracy(state, self.test, hard=True)

    def evaluate_other(self, state: State) -> float:
        return self.run.accuracy(state, self.test, hard=False)

    def remark(self, state: State) -> str:
        words, history = [], self.record.history
        if history.test and history.other:
            hard, soft = history.test[-1][1], history.other[-1][1]
            words.append(f"soft accuracy {soft:.4f}, gap {soft - hard:+.4f}")
        if self.record.training.gate_cost:
            expected, survive = self._gates(state)
            words.append(
                f"gates of two inputs and votes expected {expected:.0f}; gates that survive {survive}"
            )
        return "; ".join(words)

    def _gates(self, state: State) -> tuple[float, int]:
        """Return the gates that training expects, and those of the simplified circuit from bits to bits."""
        from lutjax import circuits

        model = self.run.structure.model(*meshes.local((state.params, state.others)))
        return float(expected_gates(model)), len(circuits.of(model, inputs="bits", outputs="bits"))

    def solved(self) -> str | None:
        patience = self.intervals.patience
        accuracies = [accuracy for _, accuracy in self.record.history.test]
        if patience is None or not accuracies:
            return None
        n_since = len(accuracies) - 1 - accuracies.index(max(accuracies))
        return f"no better hard network in {n_since} tests" if n_since >= patience else None

    def parts(self) -> list[Part]:
        encoding = [Part("columns.json", "writing the encoding of columns", self._write_encoding)]
        return [
            Part("report.json", "testing the hard and the soft network", self._report),
            Part("confusion.png", "drawing the confusion matrix", self._draw),
            Part("accuracy.png", "drawing the accuracies", self._draw_accuracies),
            *(encoding if self.encoding is not None else []),
            self.curves_part(),
        ]

    def _report(self, state: State, path: Path) -> list[str]:
        record = self.record
        packed = self.run.structure.model(*meshes.local((state.params, state.others))).packed()
        thresholds = None if packed.thresholds is None else np.asarray(packed.thresholds)
        hard, soft = (self.run.classes(state, self.test.x, hard=hard) for hard in (True, False))
        report = reports.report(
            self.test.y,
            hard,
            soft,
            classes=self._class_names(),
            truth=[np.asarray(truth) for truth in packed.truth],
            wires=[np.asarray(wires) for wires in packed.wires],
            bits=reports.bit_names(self.test, thresholds, self.encoding),
        )
        path.write_text(json.dumps(report.to_dict(), indent=1))
        others = ", ".join(f"{name} {100 * found:.1f} %" for name, found in record.baselines.items())
        lines = [
            f"Hard network: {100 * report.hard:.1f} % of the test part"
            + (f"; on the same bits {others}." if others else "."),
            f"Soft network: {100 * report.soft:.1f} %.",
            f"Circuit: {self._gates(state)[1]:,} of {sum(record.model.layers):,} gates survive simplification.",
            *report.lines(),
        ]
        recipe = RECIPES.get(record.recipe or "")
        if recipe is not None and recipe.published is not None:
            lines.append(f"Published: {recipe.published:g} % on {recipe.data} (the recipe {recipe.name}).")
        return lines

    def _draw(self, state: State, path: Path) -> list[str]:
        from lutjax.training.pictures import plot_confusion

        classes = self.run.classes(state, self.test.x, hard=True)
        counts = reports.confusion(self.test.y, classes, self.record.model.n_classes)
        plot_confusion(counts, path, self.test.classes)
        return []

    def _draw_accuracies(self, state: State, path: Path) -> list[str]:
        from lutjax.training.pictures import plot_accuracies

        plot_accuracies(self.record.history, self.record.baselines, path)
        return []

    def _write_encoding(self, state: State, path: Path) -> list[str]:
        assert self.encoding is not None
        path.write_text(self.encoding.to_json())
        return []

    def _class_names(self) -> list[str]:
        return list(self.test.classes) or [str(label) for label in range(self.record.model.n_classes)]


def _parts(data: datasets.Data, training: TrainingConfig) -> datasets.Parts:
    return data.parts(split=training.split, stratified=training.stratified, bits=training.column_bits)


def _sizes(parts: datasets.Parts, training: TrainingConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that the samples need."""
    n_classes = parts.n_classes
    *layers, last = LogicClassifierConfig.layers
    sizes: dict[str, Any] = {
        "in_features": parts.train.x.shape[1],
        "n_classes": n_classes,
        "layers": (*layers, -(-last // n_classes) * n_classes),
    }
    if len(parts.train.shape) > 1 and "windows" in str(given.get("wiring")):
        sizes["image_shape"] = parts.train.shape
    if parts.encoding is not None and training.column_bits:
        sizes["n_thresholds"] = 0
        if given.get("n_thresholds"):
            raise ValueError(
                f"n_thresholds is {given['n_thresholds']}, but columns are made bits already: --column-bits says of how many, and 0 "
                "leaves numbers for --n-thresholds."
            )
    return sizes

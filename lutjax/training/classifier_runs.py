"""Runs of classifiers: where their samples are from, and the work at the end."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lutjax.models import LogicClassifierConfig
from lutjax.training import meshes, runs
from lutjax.training.classifier import Record, Run, TrainingConfig, baselines, expected_gates
from lutjax.training.errors import CheckpointError
from lutjax.training.experiments import Configs, Experiment, Intervals, Part
from lutjax.training.models import State
from lutjax.training.samples import Samples, SamplesError, load_digits, load_samples, split


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      patience: stop after so many tests in which the hard network was not better than before. The test part then
        decides when to stop, so its accuracy says a little too much. Default: all steps.
    """

    patience: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience is {self.patience}; it must be at least 1.")


class Classifier(Experiment):
    """A classifier on samples: an `Experiment`."""

    configs = Configs(LogicClassifierConfig, TrainingConfig, Options)
    kept = Record
    refuses = SamplesError
    curves = ("training loss", "hard accuracy")
    ends_early = "--patience"

    record: Record
    run: Run

    def __init__(self, record: Record, train: Samples, test: Samples):
        self.record, self.train, self.test = record, train, test
        self.run = Run(record.model, record.training, train)

    @classmethod
    def new(cls, fields: Mapping[str, Any], path: Path | None = None) -> "Classifier":
        """Return a run that has no step yet, on the samples of a file, or on scikit-learn's digits.

        Sizes that are not among the fields are as the samples need them.
        """
        whole = _load(path)
        sizes = {"in_features": whole.x.shape[1], "n_classes": whole.n_classes}
        model, training, options = cls.made({**sizes, **fields})
        record = Record(
            model=model,
            training=training,
            samples=runs.Source.of(path, len(whole.x), whole.digest),
            baselines={},
            options=dataclasses.asdict(options),
            history=runs.History(),
        )
        return cls(record, *split(whole, training.split))

    @classmethod
    def of(cls, record: Record, path: Path | None = None) -> "Classifier":
        """Return the run of a record, with the samples at `path` or where they were."""
        whole = _load(path or record.samples.path)
        if whole.digest != record.samples.digest:
            raise CheckpointError(
                f"the run belongs to other samples: they were {record.samples.size} of "
                f"{record.samples.path or 'scikit-learn'}, now {len(whole.x)} others of {whole.name}."
            )
        return cls(record, *split(whole, record.training.split))

    def prepare(self) -> None:
        record = self.record
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

    def remark(self, state: State) -> str:
        if not self.record.training.gate_cost:
            return ""
        expected, survive = self._gates(state)
        return f"gates of two inputs and votes expected {expected:.0f}; gates that survive {survive}"

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
        return [
            Part("test", "testing the hard and the soft network", self._test),
            Part("confusion.png", "drawing the confusion matrix", self._draw),
            self.curves_part(),
        ]

    def _test(self, state: State, path: Path) -> list[str]:
        hard, soft = (100 * self.run.accuracy(state, self.test, hard=hard) for hard in (True, False))
        others = ", ".join(f"{name} {100 * found:.1f} %" for name, found in self.record.baselines.items())
        return [
            f"Hard network: {hard:.1f} % of the test part; on the same bits {others}.",
            f"Soft network: {soft:.1f} %.",
            f"Circuit: {self._gates(state)[1]:,} of {sum(self.record.model.layers):,} gates survive simplification.",
        ]

    def _draw(self, state: State, path: Path) -> list[str]:
        from lutjax.training.pictures import plot_confusion

        classes = self.run.classes(state, self.test.x, hard=True)
        plot_confusion(self.test.y, classes, self.record.model.n_classes, path)
        return []


def _load(path: Path | str | None) -> Samples:
    return load_digits() if path is None else load_samples(Path(path))

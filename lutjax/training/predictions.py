"""Predictions of the trained classifier of a run for raw samples."""

import csv
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int

from lutjax.models import LogicClassifierConfig, PackedClassifier, PackedTreeNet
from lutjax.models.packed import number_of
from lutjax.training import checkpoints, classifier, model_folders, runs
from lutjax.training.datasets.columns import Encoding
from lutjax.training.errors import CheckpointError
from lutjax.training.raw import Form
from lutjax.training.reports import Errors

AT_ONCE = 8192
"""Samples whose votes are counted together at most."""


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Classes of samples, and the votes that they got.

    Attributes:
      votes: for each class, ``[N, n_classes]``.
      classes: names of the classes.
      target: the column that is predicted; None where it has no name.
    """

    votes: Int[np.ndarray, "samples classes"]
    classes: tuple[str, ...]
    target: str | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.votes)

    @property
    def numbers(self) -> Int[np.ndarray, " samples"]:
        """Number of the class of each sample: the first of those with the most votes."""
        found: np.ndarray = self.votes.argmax(1)
        return found

    @property
    def names(self) -> list[str]:
        """Name of the class of each sample."""
        return [self.classes[number] for number in self.numbers]

    def write(self, file: TextIO, ids: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """Write a table in CSV: columns that identify the samples, the class of each sample, and its votes for each class."""
        rows = ([name, *votes] for name, votes in zip(self.names, self.votes.tolist(), strict=True))
        _write(file, [self.target or "class", *(f"votes {name}" for name in self.classes)], rows, ids)


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Numbers that a regression gives samples, and how many bits they are made of.

    Attributes:
      votes: how many bits of the last layer are 1, ``[N, 1]``.
      numbers: float32 ``[N]``.
      target: the column that is predicted; None where it has no name.
    """

    votes: Int[np.ndarray, "samples 1"]
    numbers: Float32[np.ndarray, " samples"]
    target: str | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.votes)

    def write(self, file: TextIO, ids: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """Write a table in CSV: columns that identify the samples, the number of each sample, and how many bits it is made of."""
        rows = (
            [f"{number:.7g}", count]
            for number, count in zip(self.numbers.tolist(), self.votes[:, 0].tolist(), strict=True)
        )
        _write(file, [self.target or "number", "bits"], rows, ids)


def _write(
    file: TextIO, header: Sequence[str], rows: Iterable[Sequence[Any]], ids: Mapping[str, Sequence[str]]
) -> None:
    """Write rows in CSV, each after what identifies it."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*ids, *header])
    if ids:
        rows = ([*own, *row] for own, row in zip(zip(*ids.values(), strict=True), rows, strict=True))
    writer.writerows(rows)


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The hard network of a run of ``train classify``, with all that raw samples need.

    Attributes:
      packed: the network, which runs 32 samples a word.
      form: of its samples.
      steps: that were done; 0 where no run is known.

    Example:
      >>> from lutjax.training import predictions
      >>> run = predictions.load("runs/classify")  # doctest: +SKIP
      >>> run.predict({"age": [50, 20], "hours": [40, 20], "job": ["pilot", "clerk"]}).names  # doctest: +SKIP
      ['high', 'low']
    """

    packed: PackedClassifier | PackedTreeNet
    form: Form
    steps: int

    def predict(self, raw: Any) -> Predictions | Estimates:
        """Return classes and votes of raw samples, or the numbers of a regression: columns by name, or an array; see `lutjax.training.raw.Form.numbers`.

        Raises:
          SamplesError: they are not of the form of the run's samples.
        """
        return self.predict_numbers(self.form.numbers(raw))

    def predict_numbers(self, x: np.ndarray) -> Predictions | Estimates:
        """Return classes and votes, or the numbers of a regression, of samples that are numbers already, ``[N, features]``."""
        votes = [
            np.asarray(self.packed.votes(jnp.asarray(x[first : first + AT_ONCE])))
            for first in range(0, len(x), AT_ONCE)
        ]
        nothing = np.zeros((0, self.packed.config.n_classes), np.int32)
        found = np.concatenate([nothing, *votes])
        if self.form.regression:
            numbers = np.asarray(number_of(self.packed.config, jnp.asarray(found[:, 0])))
            return Estimates(found, numbers, self.form.target)
        return Predictions(found, self.form.classes, self.form.target)

    def accuracy(self, raw: Any, labels: Sequence[Any] | np.ndarray) -> float:
        """Return the share of raw samples whose class is their label, by its name; of regression R2.

        Raises:
          SamplesError: as `predict`, or a label is none of the classes, or no number.
        """
        if self.form.regression:
            return Errors.of(self.form.label_numbers(labels), self.predict(raw).numbers).r2
        return float((self.predict(raw).numbers == self.form.label_numbers(labels)).mean())


def load(
    folder: str | os.PathLike[str], *, on_damage: Callable[[str], None] = checkpoints.warn
) -> TrainedRun:
    """Return the classifier in a folder, ready to predict.

    Args:
      folder: a run of ``lutjax train classify``, or a bundle of a classifier (``lutjax save``, ``lutjax import``).
      on_damage: see `lutjax.training.runs.read`.

    Raises:
      CheckpointError: there is no such run, or an earlier version has written it and not said what its columns are.
      BundleError: the bundle is damaged.
    """
    found = model_folders.read(Path(folder), classifier.Record.kind, on_damage=on_damage)
    return of_model(found.model)


def of_model(model: Any) -> TrainedRun:
    """Return a classifier, of `lutjax.load` or `lutjax.convert`, ready to predict.

    Raises:
      CheckpointError: the record of its run does not say what its samples are.
    """
    record = getattr(model, "record", None)
    return TrainedRun(model.packed(), form_of(model), 0 if record is None else record.steps)


def form_of(model: Any) -> Form:
    """Return the form of the samples of a classifier: that of its run or, without a run, an array of its inputs and classes named by their numbers.

    Raises:
      CheckpointError: as `of_model`.
    """
    record = getattr(model, "record", None)
    if record is None:
        return _form_of_arrays(model.config)
    form: Form = record.form if record.form.shape else _form_of_old(record.folder, record.record)
    if form.target is None and record.record.target is not None:  # in runs of earlier versions
        return dataclasses.replace(form, target=record.record.target)
    return form


def _form_of_arrays(config: classifier.Config) -> Form:
    regression = isinstance(config, LogicClassifierConfig) and config.regression
    names = () if regression else tuple(map(str, range(config.n_classes)))
    return Form(classifier.shape_of(config), names, regression=regression)


def _form_of_old(folder: Path, record: classifier.Record) -> Form:
    """Return the form of the samples of a run of an earlier version, whose record has none."""
    model, columns = record.model, folder / "columns.json"
    if columns.is_file():
        try:
            encoding = Encoding.from_json(columns.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{columns} is damaged: {error}") from error
        return Form((classifier.n_features(model),), encoding.classes, json.loads(encoding.to_json()))
    if record.target is not None:
        raise CheckpointError(
            f"{folder} was trained on a table by an earlier version, and has no columns.json: finish it by "
            f"{runs.resumption(record.kind, folder)}"
        )
    return _form_of_arrays(model)

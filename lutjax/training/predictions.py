"""Predictions for raw samples from a trained classifier run."""

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

from lutjax.models import PackedClassifier, PackedTreeNet
from lutjax.models.packed import number_of
from lutjax.training import checkpoints, classifier, model_folders, runs
from lutjax.training.datasets.columns import Encoding
from lutjax.training.errors import CheckpointError
from lutjax.training.raw import Form
from lutjax.training.reports import Errors

AT_ONCE = 8192  # maximum samples per vote count


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Predicted classes and their votes.

    Attributes:
      votes: votes per class, ``[N, n_classes]``.
      classes: class names.
      target: predicted column; None if unnamed.
    """

    votes: Int[np.ndarray, "samples classes"]
    classes: tuple[str, ...]
    target: str | None = None

    def __len__(self) -> int:
        return len(self.votes)

    @property
    def numbers(self) -> Int[np.ndarray, " samples"]:
        """Class index of each sample: the first class with the most votes."""
        first_largest: np.ndarray = self.votes.argmax(1)
        return first_largest

    @property
    def names(self) -> list[str]:
        """Class name of each sample."""
        return [self.classes[number] for number in self.numbers]

    def write(self, file: TextIO, ids: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """Write a CSV table: id columns, then each sample's class and votes per class."""
        rows = ([name, *votes] for name, votes in zip(self.names, self.votes.tolist(), strict=True))
        header = [self.target or "class", *(f"votes {name}" for name in self.classes)]
        _write(file, header, rows, ids)


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Values predicted by a regression, and their numbers of 1 bits."""

    votes: Int[np.ndarray, "samples 1"]  # 1 bits in the last layer, ``[N, 1]``
    numbers: Float32[np.ndarray, " samples"]  # float32 ``[N]``
    target: str | None = None  # predicted column; None if unnamed

    def __len__(self) -> int:
        return len(self.votes)

    def write(self, file: TextIO, ids: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """Write a CSV table: id columns, then each sample's predicted value and its 1 bits."""
        pairs = zip(self.numbers.tolist(), self.votes[:, 0].tolist(), strict=True)
        rows = ([f"{number:.7g}", count] for number, count in pairs)
        _write(file, [self.target or "number", "bits"], rows, ids)


def _write(
    file: TextIO,
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    ids: Mapping[str, Sequence[str]],
) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*ids, *header])
    if ids:
        ids_by_row = zip(*ids.values(), strict=True)
        rows = ([*own, *row] for own, row in zip(ids_by_row, rows, strict=True))
    writer.writerows(rows)


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """Hard network of a ``train classify`` run, with everything needed for raw samples.

    Attributes:
      packed: the network, which processes 32 samples per word.
      form: form of its samples.
      steps: completed training steps; 0 without a known run.

    Example:
      >>> from lutjax.training import predictions
      >>> run = predictions.load("runs/classify")  # doctest: +SKIP
      >>> columns = {"age": [50, 20], "hours": [40, 20], "job": ["pilot", "clerk"]}
      >>> run.predict(columns).names  # doctest: +SKIP
      ['high', 'low']
    """

    packed: PackedClassifier | PackedTreeNet
    form: Form
    steps: int

    def predict(self, raw: Any) -> Predictions | Estimates:
        """Predict classes and votes, or regression values, for raw samples.

        Samples are columns by name, or an array; see `lutjax.training.raw.Form.numbers`.

        Raises:
          SamplesError: the samples do not have the form of the run's samples.
        """
        return self.predict_numbers(self.form.numbers(raw))

    def predict_numbers(self, x: np.ndarray) -> Predictions | Estimates:
        """Predict classes and votes, or regression values, for numeric rows ``[N, features]``."""
        votes = [
            np.asarray(self.packed.votes(jnp.asarray(x[first : first + AT_ONCE])))
            for first in range(0, len(x), AT_ONCE)
        ]
        # Without samples np.concatenate needs an array of the result's shape.
        nothing = np.zeros((0, self.packed.config.n_classes), np.int32)
        counts = np.concatenate([nothing, *votes])
        if self.form.regression:
            numbers = np.asarray(number_of(self.packed.config, jnp.asarray(counts[:, 0])))
            return Estimates(counts, numbers, self.form.target)
        return Predictions(counts, self.form.classes, self.form.target)

    def accuracy(self, raw: Any, labels: Sequence[Any] | np.ndarray) -> float:
        """Return the accuracy on raw samples with class names as labels; for regression, R2."""
        if self.form.regression:
            return Errors.compute(self.form.label_numbers(labels), self.predict(raw).numbers).r2
        return float((self.predict(raw).numbers == self.form.label_numbers(labels)).mean())


def load(
    folder: str | os.PathLike[str], *, on_damage: Callable[[str], None] = checkpoints.warn
) -> TrainedRun:
    """Load the classifier in a folder, ready to predict.

    Args:
      folder: a run of ``lutjax train classify``, or a bundle of a classifier (``lutjax save``,
        ``lutjax import``).
      on_damage: see `lutjax.training.runs.read`.

    Raises:
      CheckpointError: no such run exists, or an earlier version wrote it without column
        information.
      BundleError: the bundle is damaged.
    """
    folder_content = model_folders.read(Path(folder), classifier.Record.kind, on_damage=on_damage)
    return wrap_model(folder_content.model)


def wrap_model(model: Any) -> TrainedRun:
    """Wrap a classifier from `lutjax.load` or `lutjax.convert`, ready to predict.

    Raises:
      CheckpointError: the record of its run does not describe its samples.
    """
    record = getattr(model, "record", None)
    return TrainedRun(model.packed(), form_of(model), 0 if record is None else record.steps)


def form_of(model: Any) -> Form:
    """Return a classifier's sample form.

    Without a run, samples are arrays of its inputs, and classes are named by index.
    """
    record = getattr(model, "record", None)
    if record is None:
        return _form_of_arrays(model.config)
    form: Form = record.form if record.form.shape else _form_of_old(record.folder, record.record)
    if form.target is None and record.record.target is not None:  # in runs of earlier versions
        return dataclasses.replace(form, target=record.record.target)
    return form


def _form_of_arrays(config: classifier.Config) -> Form:
    regression = classifier.is_regression(config)
    names = () if regression else tuple(map(str, range(config.n_classes)))
    return Form(classifier.shape_of(config), names, regression=regression)


def _form_of_old(folder: Path, record: classifier.Record) -> Form:
    """Return the sample form for an earlier version's run, without a recorded form."""
    model, columns = record.model, folder / "columns.json"
    if columns.is_file():
        try:
            encoding = Encoding.from_json(columns.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{columns} is damaged: {error}") from error
        columns_of = json.loads(encoding.to_json())
        return Form((classifier.n_features(model),), encoding.classes, columns_of)
    if record.target is not None:
        raise CheckpointError(
            f"{folder} was trained on a table by an earlier version, and has no columns.json: "
            f"finish it by {runs.resumption(record.kind, folder)}"
        )
    return _form_of_arrays(model)

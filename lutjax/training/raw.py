"""Raw samples without labels (table rows or images) and their conversion to classifier inputs."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.files import strict_json
from lutjax.files.messages import in_a_line
from lutjax.training import datasets, pixels
from lutjax.training.datasets import columns, folders
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.samples import Samples, SamplesError, read_arrays

Numbers = Shaped[np.ndarray, "samples features"]
Labels = Shaped[np.ndarray, " samples"]
Columns = Mapping[str, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Form:
    """A run's sample form, stored with it: everything needed to convert raw samples.

    Attributes:
      shape: shape of a numeric sample; for a table, the number of features. Empty if unknown, in
        runs of earlier versions.
      classes: class names by label.
      columns: output of `lutjax.training.datasets.columns.Encoding.to_json` for table rows, else
        None.
      least, largest: smallest and largest value in the training part.
      regression: whether labels are numeric targets; there are no classes then.
      scaled: whether images of other sizes are scaled to the shape.
      target: label column of a table; None if absent or unknown.
    """

    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    columns: dict[str, Any] | None = None
    least: float = 0.0
    largest: float = 0.0
    regression: bool = False
    scaled: bool = False
    target: str | None = None

    @classmethod
    def from_samples(
        cls,
        train: Samples,
        n_classes: int,
        encoding: Encoding | None,
        *,
        scaled: bool = False,
        target: str | None = None,
    ) -> "Form":
        """Return a training part's sample form."""
        return cls(
            tuple(train.shape),
            () if train.regression else tuple(train.classes or map(str, range(n_classes))),
            None if encoding is None else json.loads(encoding.to_json()),
            float(train.x.min()),
            float(train.x.max()),
            train.regression,
            scaled,
            target,
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Form":
        """Restore a form from the output of `dataclasses.asdict`."""
        lists = {name: tuple(fields[name]) for name in ("shape", "classes")}
        form = cls(**{**fields, **lists})
        _ = form.encoding  # raises for an invalid encoding
        return form

    @functools.cached_property
    def encoding(self) -> Encoding | None:
        """Column encoding; None for numeric samples."""
        return None if self.columns is None else Encoding.from_json(json.dumps(self.columns))

    def numbers(self, raw: Any, *, name: str = "the samples") -> Numbers:
        """Convert raw samples to the numeric rows that the classifier takes.

        Args:
          raw: for a run trained on a table, columns by name (a dict of sequences, a data frame, a
            `lutjax.training.datasets.columns.Table`), without columns that training left out if
            necessary, or text rows ``[N, columns]`` in the order of these columns. Otherwise an
            array ``[N, *shape]``, optionally as rows or without an axis for one channel.
          name: sample name, for messages.

        Raises:
          SamplesError: the samples do not have this form.
        """
        if self.encoding is not None:
            names = [column.name for column in self.encoding.columns]
            return self.encoding.encode(_table(raw, names, name))
        if isinstance(raw, Table | Mapping):
            raise SamplesError(
                f"{name} are columns, but the run was trained on arrays "
                f"of shape {self._expected_shape()}."
            )
        x = np.asarray(raw)
        if x.dtype.kind not in "buif":
            raise SamplesError(f"{name} have dtype {x.dtype}; expected numbers.")
        x, _ = datasets.channels_last(x)
        size = math.prod(self.shape)
        # Gray images have one channel or no axis for it.
        without = self.shape[:-1] if self.shape[-1] == 1 else self.shape
        same = x.shape[1:] in (self.shape, (size,), (*self.shape, 1), without)
        if x.ndim < 2 or not (same or (len(self.shape) == 1 and math.prod(x.shape[1:]) == size)):
            raise SamplesError(
                f"{name} have shape {list(x.shape)}; expected {self._expected_shape()}."
            )
        rows = x.reshape(len(x), size)
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, an error below
            rows = rows if rows.dtype == np.uint8 else rows.astype(np.float32)
        if not np.isfinite(rows).all():
            raise SamplesError(
                f"{name}: number {int(np.isfinite(rows).all(1).argmin()) + 1} is not finite."
            )
        return rows

    def _expected_shape(self) -> str:
        return f"[N, {', '.join(map(str, self.shape))}]"

    def doubts(self, x: Numbers) -> list[str]:
        """Return warnings about samples unlike the training part: other units, new categories."""
        if self.encoding is not None:
            return self.encoding.unknown(x)
        width = self.largest - self.least
        if not x.size or not width:
            return []
        least, largest = float(x.min()), float(x.max())
        if largest <= self.largest + width and least >= self.least - width:
            return []
        return [
            f"warning: the numbers go from {least:g} to {largest:g}, "
            f"those of the training part from {self.least:g} to {self.largest:g}: "
            "give them in the same unit."
        ]

    def label_numbers(self, labels: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Convert labels to class indices, int32 ``[N]``, or regression values, float32 ``[N]``."""
        if self.regression:
            return columns.targets(columns.strings(labels), name="the samples")
        return columns.label_numbers(
            columns.strings(labels), self.classes, name="the column of labels"
        )


def _table(raw: Any, names: Sequence[str], name: str) -> Table:
    if isinstance(raw, Table):
        return raw
    if hasattr(raw, "items") and not isinstance(raw, np.ndarray):  # a dict or a pandas data frame
        cells = {str(column): columns.strings(map(_cell, values)) for column, values in raw.items()}
    else:
        rows = np.asarray(raw)
        if rows.ndim != 2 or rows.shape[1] != len(names):
            raise SamplesError(
                f"{name} have shape {list(rows.shape)}; "
                f"expected [N, {len(names)}], the columns {', '.join(names)}, or columns by name."
            )
        cells = {
            column: columns.strings(map(_cell, values))
            for column, values in zip(names, rows.T, strict=True)
        }
    sizes = {len(values) for values in cells.values()}
    if len(sizes) != 1:
        raise SamplesError(f"{name}: columns have {sorted(sizes)} rows; expected as many in each.")
    return Table(cells, np.full(sizes.pop(), "", np.str_), name)


def _cell(value: Any) -> str:
    """Format a value as a table cell; None and missing pandas values become empty."""
    return "" if value is None or type(value).__name__ in ("NAType", "NaTType") else str(value)


@dataclasses.dataclass(frozen=True)
class Raw:
    """Raw samples from a file or folder, in the form that a run's classifier takes."""

    numbers: Numbers  # values of each sample
    labels: Labels | None = None  # labels if a target was named, else None
    # Values that identify each sample, by column name: image files, or requested table columns
    ids: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # warnings about omitted data


def read(
    path: Path,
    form: Form,
    *,
    target: str | None = None,
    encoding: str | None = None,
    ids: Sequence[str] = (),
) -> Raw:
    """Read the samples in a file or folder.

    It takes at most 200 times the memory of uncompressed files, and at most 8,000 times the memory
    of other files, or 400 MB; see `lutjax.training.datasets.load`. Nothing in a file is executed.

    Args:
      path: a table; a ``.npz`` file with an array ``x``, or with ``x_test``; an image, or a folder
        of images, also in subfolders, sorted by name; or a folder of IDX files or CIFAR-10. If a
        folder has a test part, only that is read.
      form: sample form required by the run.
      target: table label column, or label array name. For folders any name: labels are
        the classes whose folders hold the images, or the labels in IDX files or CIFAR-10.
      encoding: table text encoding; UTF-8 by default.
      ids: columns of a table, or arrays of a ``.npz`` file, to return with the samples.

    Raises:
      SamplesError: the data cannot be read, or has no samples in the form of the run.
    """
    if datasets.is_table(path):
        cells = columns.read_cells(path, encoding=encoding)
        if target is not None and target not in cells:
            raise SamplesError(
                f"{path} has no column {target!r}, which --target names; "
                f"it has {in_a_line(', '.join(cells))}."
            )
        for column in ids:
            if column not in cells:
                raise SamplesError(
                    f"{path} has no column {column!r}, which --id names; "
                    f"it has {in_a_line(', '.join(cells))}."
                )
        found_ids = {column: cells[column].tolist() for column in ids}
        labels = None if target is None else cells.pop(target)
        if not len(next(iter(cells.values()), ())):
            raise SamplesError(f"{path} has no rows beside the names of its columns.")
        if form.encoding is None:
            raise SamplesError(
                f"{path} is a table, but the run was trained on arrays "
                f"of shape {form._expected_shape()}."
            )
        table = Table(cells, np.full(len(next(iter(cells.values()))), "", np.str_), str(path))
        return Raw(form.numbers(table), labels, found_ids)
    if encoding is not None:
        raise SamplesError(f"--encoding is {encoding}, but {path} is no table; leave it out.")
    if path.is_dir() or folders.is_image(path):
        if ids:
            raise SamplesError(
                f"--id is {ids[0]}, but {path} is neither a table nor a .npz file. Omit it: images "
                "have a column with their file names."
            )
        if path.is_dir():
            return _read_folder(path, form, target)
        return _read_images([path], path.parent, form, target)
    # Read only the arrays that are used: others may be large.
    named = [*([target] if target else []), *ids]
    arrays = read_arrays(path, (), ("x", "x_test", "names", *named))
    name = "x" if "x" in arrays else "x_test"
    required = (name, *named)
    if any(column not in arrays for column in required):
        read_arrays(path, required)  # names the problem
    x = arrays[name]
    raw: Any = x
    if form.encoding is not None and x.ndim == 2:
        names = datasets.names_of(arrays, path) or columns.default_column_names(x.shape[1])
        if len(names) != x.shape[1]:
            raise SamplesError(
                f"{path}: names are {len(names)}; expected one for each of {x.shape[1]} columns."
            )
        raw = dict(zip(names, x.astype(np.str_).T, strict=True))
    labels = None
    if target is not None:
        labels = columns.strings(arrays[target])
        if labels.shape != (len(x),):
            raise SamplesError(
                f"{path}: {target} has shape {list(labels.shape)}; expected [{len(x)}]."
            )
    found_ids = {}
    for column in ids:
        if arrays[column].shape != (len(x),):
            raise SamplesError(
                f"{path}: {column} has shape {list(arrays[column].shape)}; expected [{len(x)}]."
            )
        found_ids[column] = columns.strings(arrays[column]).tolist()
    return Raw(form.numbers(raw, name=str(path)), labels, found_ids)


def _read_folder(folder: Path, form: Form, target: str | None) -> Raw:
    """Return a folder's test part if it has one, else all images in it and its subfolders."""
    if datasets.holds_known_files(folder):
        test = datasets.load(folder).test
        assert isinstance(test, Samples)
        numbers = form.numbers(test.x.reshape(-1, *test.shape), name=str(folder))
        return Raw(numbers, None if target is None else np.asarray(form.classes)[test.y])
    _, test_folder, _ = folders.find_parts(folder)
    files = folders.find(test_folder or folder)
    if not files.images:
        raise SamplesError(f"{folder} has no images ({', '.join(pixels.ENDINGS)}).")
    samples = _read_images(files.images, folder, form, target)
    if not files.others:
        return samples
    names = strict_json.format_names(
        [str(one.relative_to(folder)) for one in files.others[:3]], 200
    )
    more = ", ..." if files.others[3:] else ""
    remark = (
        "warning: files whose names do not end as those of images are left out, "
        f"{len(files.others)} in all: {names}{more}"
    )
    return dataclasses.replace(samples, remarks=(remark,))


def _read_images(paths: Sequence[Path], folder: Path, form: Form, target: str | None) -> Raw:
    """Read images, gray or in color like the run's images, with file names relative to a folder."""
    shape = form.shape
    if len(shape) < 2:
        raise SamplesError(
            f"{paths[0]} is an image, "
            f"but the run was trained on rows of {shape[0] if shape else '?'} numbers."
        )
    channels = shape[2] if len(shape) > 2 else 1
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    if channels not in modes:
        raise SamplesError(
            f"{paths[0]} is an image, but the images of the run have {channels} channels."
        )
    labels = None if target is None else np.asarray(folders.labels(folder, paths, form.classes))
    images = []
    for path in paths:
        try:
            image = pixels.read(path, modes[channels], (shape[0], shape[1]), scaled=form.scaled)
        except pixels.SizeError as error:
            raise SamplesError(
                f"{path} has {error.height} x {error.width} pixels; "
                f"expected {shape[0]} x {shape[1]}. "
                "Scale it, or train with --image-size, after which images are scaled."
            ) from None
        except ValueError as error:
            raise SamplesError(str(error)) from error
        images.append(image.reshape(shape))
    # File names need not be valid text, but a UTF-8 table cannot hold anything else.
    names = [
        path.relative_to(folder).as_posix().encode(errors="backslashreplace").decode()
        for path in paths
    ]
    return Raw(form.numbers(np.stack(images), name=str(folder)), labels, {"file": names})

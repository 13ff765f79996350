"""Classification data from a file or folder, and their training and test parts."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.files import strict_json
from lutjax.training import pixels
from lutjax.training.datasets import cifar, columns, folders, idx
from lutjax.training.datasets.columns import Encoding, Table, classes_of_labels
from lutjax.training.samples import (
    Samples,
    SamplesError,
    load_digits,
    read_arrays,
    samples,
    select_samples,
    split_ids,
)

TABLES = (".csv", ".tsv", ".parquet", ".pq", ".csv.gz", ".tsv.gz")  # file extensions of tables

_PARTS = ("x_train", "y_train", "x_test", "y_test")
_DEPTH = 2  # maximum subfolder depth of the search for known files, for torchvision's MNIST/raw


@dataclasses.dataclass(frozen=True)
class Parts:
    """Training and test samples of a run.

    Attributes:
      train, test: the two parts; all labels are below `n_classes`.
      encoding: table column encoding.
      remarks: lines about reading the data, and warnings.
      test_rows: raw rows of a table's test part.
    """

    train: Samples
    test: Samples
    encoding: Encoding | None = None
    remarks: tuple[str, ...] = ()
    test_rows: Table | None = None

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return max(self.train.n_classes, self.test.n_classes)


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples or table rows, with an optional separate test part.

    Attributes:
      train: all samples, or the training part.
      test: the test part; None if it must be split off.
      remarks: lines about reading the data.
      regression: whether table labels are regression targets.
    """

    train: Samples | Table
    test: Samples | Table | None = None
    remarks: tuple[str, ...] = ()
    regression: bool = False

    @property
    def name(self) -> str:
        """Name of the training part, for messages."""
        return self.train.name

    def __len__(self) -> int:
        return sum(_labels(part).size for part in (self.train, self.test) if part is not None)

    @property
    def digest(self) -> str:
        """SHA-256 of all data."""
        if self.test is None:
            return self.train.digest
        return hashlib.sha256((self.train.digest + self.test.digest).encode()).hexdigest()

    def parts(
        self, *, split: int = 0, stratified: bool = False, bits: int = 0, numbers: bool = False
    ) -> Parts:
        """Return the training and the test part.

        Args:
          split: seed of a random split, if there is no test part yet.
          stratified: whether to keep class proportions in this split.
          bits: maximum bits per numeric column of a table; 0 keeps numbers.
          numbers: whether to replace each of these bits with a number, for learned thresholds.

        Raises:
          SamplesError: the data cannot be split this way, or the two parts are incompatible.
        """
        train, test, whole = self.train, self.test, self.train
        classes = None
        if isinstance(whole, Table):
            classes = [] if self.regression else columns.classes_of(whole)
            if self.regression and not np.ptp(columns.targets(whole.labels, name=self.name)):
                raise SamplesError(
                    f"{self.name}: the target is {whole.labels[0]} in all rows; "
                    "there is nothing to learn."
                )
        if test is None:
            names = () if isinstance(whole, Table) else whole.classes
            options: dict[str, Any] = {"name": self.name, "classes": names}
            ids = split_ids(_labels(whole), split, stratified=stratified, **options)
            if isinstance(whole, Table):
                train, test = (whole.rows(rows) for rows in ids)
            else:
                train, test = (select_samples(whole, rows) for rows in ids)
        if isinstance(train, Samples) and isinstance(test, Samples):
            if train.shape != test.shape:
                raise SamplesError(
                    f"{self.name}: training samples have shape {train.shape}, "
                    f"test samples {test.shape}."
                )
            return Parts(train, test, None, self.remarks)
        assert isinstance(train, Table)
        assert isinstance(test, Table)
        # The test part takes no part in the choice of thresholds and categories. Classes are those
        # of the whole table: a rare one may be missing from a random training part.
        encoding = Encoding.fit(train, bits, classes, numbers=numbers)
        remarks = (*self.remarks, *columns.describe_columns(train, encoding))
        x, x_test = (_encode_table(part, encoding) for part in (train, test))
        return Parts(x, x_test, encoding, remarks, test)


def is_table(path: Path) -> bool:
    """Return True if a path has a table's file extension."""
    return path.name.lower().endswith(TABLES)


def load(
    path: Path | None = None,
    *,
    target: str | None = None,
    test: Path | None = None,
    exclude: Sequence[str] = (),
    encoding: str | None = None,
    regression: bool = False,
    image_size: tuple[int, int] | None = None,
) -> Data:
    """Return the data at a path.

    Reading takes at most 200 times the memory of uncompressed files, and at most 8,000 times the
    memory of compressed files (``.npz``, ``.gz``, Parquet, images), or 400 MB. Compressed files may
    unpack to at most 100 times their size, or to 4 MiB (128 MiB for a folder of images). Reading
    never executes code from the data.

    Args:
      path: a ``.npz`` file with arrays ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test`` and
        ``y_test``. String arrays ``x`` and numeric rows with NaNs are tables, whose columns
        ``names`` may name. Or a table, ``.csv``, ``.tsv`` or ``.parquet``; a folder with IDX files
        or CIFAR-10; or an image folder with one subfolder per class, see
        `lutjax.training.datasets.folders`. None: scikit-learn's digits.
      target: label column in a table.
      test: a table with the test part.
      exclude: table columns to leave out.
      encoding: table text encoding; see `columns.read`.
      regression: whether a table's target is a regression target.
      image_size: height and width to which a folder's images are scaled.

    Raises:
      SamplesError: the data do not exist or are damaged, or an argument does not apply to them.
    """
    if path is None or not is_table(path):
        for_tables = {
            "--target": target,
            "--test-data": test,
            "--exclude": ",".join(exclude) or None,
            "--encoding": encoding,
            "--regression": "given" if regression else None,
        }
        for option, value in for_tables.items():
            if value is not None:
                raise SamplesError(
                    f"{option} is {value}, but it is for tables ({', '.join(TABLES)}), "
                    f"and the data are {path or 'the digits'}; leave it out."
                )
    if path is not None and path.is_dir() and not is_table(path):
        return _load_folder(path, image_size)
    if image_size is not None:
        _refuse_size(image_size, path or "the digits")
    if path is None:
        return Data(load_digits())
    if is_table(path):
        data = _load_table(path, target, test, exclude, encoding)
        return dataclasses.replace(data, regression=regression)
    if path.suffix.lower() not in (".npz", "") and path.exists():
        raise SamplesError(
            f"{path} ends in {path.suffix}; expected a .npz file, a table ({', '.join(TABLES)}), "
            "or a folder with IDX files, CIFAR-10, or one image subfolder per class."
        )
    return _load_arrays(path)


def _labels(part: Samples | Table) -> np.ndarray:
    return part.labels if isinstance(part, Table) else part.y


def _encode_table(table: Table, encoding: Encoding) -> Samples:
    x = encoding.encode(table)
    return Samples(x, encoding.labels(table), x.shape[1:], table.name, encoding.classes)


def _load_table(
    path: Path, target: str | None, test: Path | None, exclude: Sequence[str], encoding: str | None
) -> Data:
    if target is None:
        raise SamplesError(f"{path} is a table: name its column of labels by --target.")
    if test is not None and not is_table(test):
        raise SamplesError(f"--test-data is {test}; expected a table ({', '.join(TABLES)}).")
    options: dict[str, Any] = {"exclude": exclude, "encoding": encoding}
    train = columns.read(path, target, **options)
    return Data(train, None if test is None else columns.read(test, target, **options))


def _load_arrays(path: Path) -> Data:
    arrays = read_arrays(path, (), ("x", "y", *_PARTS, "names"))
    required = (
        _PARTS if "x" not in arrays and any(name in arrays for name in _PARTS) else ("x", "y")
    )
    if any(name not in arrays for name in required):
        read_arrays(path, required)  # says which
    names = names_of(arrays, path)
    xs, ys = ([arrays[name] for name in required[i::2]] for i in (0, 1))
    if len({x.dtype.kind == "U" for x in xs}) > 1:
        raise SamplesError(f"{path}: x_train and x_test are of different kinds, text and numbers.")
    if xs[0].dtype.kind == "U" or any(holds_missing(x) for x in xs):
        texts = [x if x.dtype.kind == "U" else x.astype(np.str_) for x in xs]
        tables = [
            columns.table_from_arrays(x, y, names, name=str(path))
            for x, y in zip(texts, ys, strict=True)
        ]
        return Data(tables[0], tables[1] if tables[1:] else None)
    classes = classes_of_labels(np.concatenate(ys), name=str(path)) if _can_be_named(ys) else ()
    if classes and columns.missing_mask(columns.strings(np.concatenate(ys))).any():
        raise SamplesError(f"{path}: a label is missing; leave samples without a label out.")
    remarks = []
    if classes and ys[0].dtype.kind not in "Ub":
        remarks.append(
            f"labels: the {len(classes)} classes are {strict_json.format_names(classes, 200)}."
        )
    parts = []
    for x, y in zip(xs, ys, strict=True):
        x, remark = channels_last(x)
        remarks += [remark] if remark and remark not in remarks else []
        numbers = y
        if classes:
            numbers = columns.label_numbers(columns.strings(y), classes, name=str(path))
        parts.append(dataclasses.replace(samples(x, numbers, name=str(path)), classes=classes))
    return Data(parts[0], parts[1] if parts[1:] else None, tuple(remarks))


def names_of(arrays: Mapping[str, np.ndarray], path: Path) -> list[str] | None:
    """Return the column names in a file of arrays, or None."""
    names = arrays.get("names")
    if names is not None and (names.ndim != 1 or names.dtype.kind != "U"):
        raise SamplesError(
            f"{path}: names are {names.dtype} {list(names.shape)}; "
            "expected a string per column of x."
        )
    return None if names is None else names.tolist()


def holds_missing(x: np.ndarray) -> bool:
    """Return True if an array has numeric rows with NaNs, which are read as a table."""
    return x.ndim == 2 and x.dtype.kind == "f" and bool(np.isnan(x).any())


def _can_be_named(ys: Sequence[np.ndarray]) -> bool:
    """Return True if labels are strings or booleans, or integers with unused classes."""
    if len({y.dtype.kind == "U" for y in ys}) > 1 or any(y.ndim != 1 or not len(y) for y in ys):
        return False
    if all(y.dtype.kind in "Ub" for y in ys):
        return True
    if any(y.dtype.kind not in "ui" for y in ys):
        return False
    distinct = np.unique(np.concatenate(ys))
    return len(distinct) > 1 and not np.array_equal(distinct, np.arange(len(distinct)))


def channels_last(x: np.ndarray) -> tuple[np.ndarray, str]:
    """Return images with the channel axis last, and a remark if the axis moved.

    Other arrays are unchanged, with an empty remark. Square images with more than four pixels, in
    1, 3 or 4 channels, are recognized by their shape.
    """
    # Larger than 4, since 3 x 3 or 4 x 4 pixels could be the channels themselves.
    if x.ndim == 4 and x.shape[1] in (1, 3, 4) and x.shape[2] == x.shape[3] > 4:
        _, channels, height, width = x.shape
        pixels_of = f"{channels} of {height} x {width} pixels"
        remark = f"x: {list(x.shape)} is read as channels first, {pixels_of}."
        return np.moveaxis(x, 1, -1), remark
    return x, ""


def holds_known_files(folder: Path) -> bool:
    """Return True if a folder or a subfolder contains IDX files or CIFAR-10."""
    return bool(_find_known(folder))


def _find_known(folder: Path) -> list[tuple[Path, Callable[[Path], tuple[Samples, Samples]]]]:
    """Return folders with known files, among this one and its subfolders, with their loaders."""
    known: list[tuple[Path, Callable[[Path], tuple[Samples, Samples]]]] = []
    level = [folder]
    try:
        for _ in range(_DEPTH + 1):
            known += [
                (place, kind.load) for place in level for kind in (idx, cifar) if kind.holds(place)
            ]
            level = sorted(inner for place in level for inner in place.iterdir() if inner.is_dir())
    except OSError as error:
        raise SamplesError(
            f"{error.filename} cannot be read: {error.strerror or error}."
        ) from error
    return known


def _load_folder(folder: Path, image_size: tuple[int, int] | None) -> Data:
    known = _find_known(folder)
    if len(known) > 1:
        places = ", ".join(str(place) for place, _ in known)
        raise SamplesError(f"{folder} holds several data sets: give one of {places}.")
    if known:
        [(place, read)] = known
        if image_size is not None:
            _refuse_size(image_size, place)
        return Data(*read(place))
    if not folders.find(folder).images:
        raise SamplesError(
            f"{folder} has no IDX files ({idx.FILES[0]} and others, also .gz), no batches of "
            f"CIFAR-10 ({cifar.FILES[0]} or {cifar.FILES[0]}.bin and others), and no images "
            f"({', '.join(pixels.ENDINGS)}) in one subfolder per class."
        )
    train, test, remarks = folders.load(folder, image_size)
    return Data(train, test, tuple(remarks))


def _refuse_size(image_size: tuple[int, int], data: Path | str) -> None:
    height, width = image_size
    raise SamplesError(
        f"--image-size is {height}x{width}, but it is for folders of images "
        f"with one subfolder for each class, and the data are {data}; leave it out."
    )

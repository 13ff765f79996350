"""Tables of data: columns of numbers and of categories, some of them missing, and their encoding as bits or numbers."""

import csv
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Shaped

from lutjax._extras import command
from lutjax.training.samples import SamplesError

MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
"""Cells that hold nothing, in small letters."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

MOST_CATEGORIES = 64
"""A column's most frequent categories that have a bit each; the others have none."""

_MOST = float(np.finfo(np.float32).max)
_APART, _MANY = 0.99, 2**20
"""Share of a column's different numbers that differ as features, at least; of very many numbers so many."""

Cells = Shaped[np.ndarray, " rows"]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of cells that are text, as a file has them, and the label of each row.

    Attributes:
      columns: cells of each column, strings ``[rows]``, without spaces around them.
      labels: strings ``[rows]``.
      name: where it is from, for messages.
    """

    columns: Mapping[str, Cells]
    labels: Cells
    name: str

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, ids: np.ndarray) -> "Table":
        """Return the table of some rows, by their numbers."""
        return Table({name: cells[ids] for name, cells in self.columns.items()}, self.labels[ids], self.name)

    @property
    def digest(self) -> str:
        """SHA-256 of names, cells and labels."""
        found = hashlib.sha256()
        for name, cells in (*self.columns.items(), ("", self.labels)):
            found.update("\x1f".join((name, *cells)).encode() + b"\x1e")
        return found.hexdigest()


def missing(cells: Cells) -> Bool[np.ndarray, " rows"]:
    """Return which cells hold nothing."""
    return np.isin(np.char.lower(cells), MISSING)


def read(path: Path, target: str) -> Table:
    """The table of a CSV or Parquet file.

    Args:
      path: ``.csv`` or ``.tsv``, of UTF-8 with the names of columns in its first line; or ``.parquet`` or ``.pq``.
      target: the column of labels.

    Raises:
      SamplesError: it cannot be read, is no such table, or has no such column.
    """
    names, columns = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    if not names:
        raise SamplesError(
            f"{path} is empty; expected a line of names of columns, and a line for each sample."
        )
    if target not in names:
        raise SamplesError(
            f"{path} has no column {target!r}, which --target names; it has {', '.join(names)}."
        )
    arrays = {name: strings(cells) for name, cells in zip(names, columns, strict=True)}
    labels = arrays.pop(target)
    return checked(Table(arrays, labels, str(path)), target)


def checked(table: Table, target: str = "y") -> Table:
    """Return a table that can be used.

    Raises:
      SamplesError: it has no column beside the labels, no rows, or a row without a label.
    """
    if not len(table) or not table.columns:
        raise SamplesError(
            f"{table.name} has {len(table)} rows and {len(table.columns)} columns beside {target}; expected some."
        )
    without = np.flatnonzero(missing(table.labels))
    if len(without):
        raise SamplesError(
            f"{table.name}: {target} is missing in row {without[0] + 1} and {len(without) - 1} others; leave rows without a label out."
        )
    return table


def strings(cells: Iterable[Any]) -> Cells:
    """Return cells as an array of strings without spaces around them."""
    return np.char.strip(np.asarray(list(cells), dtype=np.str_))


def _csv(path: Path) -> tuple[list[str], list[Sequence[str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
            names = [name.strip() for name in next(reader, [])]
            if len(set(names)) < len(names) or not all(names):
                raise SamplesError(
                    f"{path}: its first line names the columns {names}; expected a different name for each. Add a line of names "
                    "if there is none."
                )
            rows: list[list[str]] = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(names):
                    raise SamplesError(
                        f"{path}: line {reader.line_num} has {len(row)} cells, but there are {len(names)} columns."
                    )
                rows.append(row)
    except OSError as error:
        raise SamplesError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SamplesError(f"{path} is not a CSV file of UTF-8 text: {error}") from error
    return names, list(zip(*rows, strict=True)) if rows else [()] * len(names)


def _parquet(path: Path) -> tuple[list[str], list[Sequence[str]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SamplesError(
            f"{path} is a Parquet file; pyarrow, which reads it, is not installed: {command('pyarrow')}"
        ) from None
    try:
        table = parquet.read_table(path)
    except OSError as error:
        raise SamplesError(f"{path} cannot be read: {error.strerror or error}") from error
    except pyarrow.ArrowException as error:
        raise SamplesError(f"{path} is not a Parquet file: {error}") from error
    for field in table.schema:
        if pyarrow.types.is_nested(field.type):
            raise SamplesError(
                f"{path}: column {field.name} has the type {field.type}; expected numbers, text or categories. Leave it out."
            )
    cells: list[Sequence[str]] = [
        ["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns
    ]
    return list(table.column_names), cells


def of_arrays(x: np.ndarray, y: np.ndarray, names: Sequence[str] | None, *, name: str) -> Table:
    """Return the table of an array of text.

    Args:
      x: strings ``[N, columns]``.
      y: labels ``[N]``.
      names: of the columns; by default their numbers.

    Raises:
      SamplesError: shapes do not fit, or as `checked`.
    """
    if x.ndim != 2 or y.shape != (len(x),):
        raise SamplesError(
            f"{name}: x has shape {list(x.shape)} and y {list(y.shape)}; text is expected as [N, columns], and its labels as [N]."
        )
    names = [f"column {number}" for number in range(1, x.shape[1] + 1)] if names is None else list(names)
    if len(set(names)) != x.shape[1]:
        raise SamplesError(
            f"{name}: names are {names}; expected a different one for each of {x.shape[1]} columns."
        )
    columns = {column: strings(cells) for column, cells in zip(names, x.T, strict=True)}
    return checked(Table(columns, strings(y), name))


@dataclasses.dataclass(frozen=True)
class Number:
    """A column of numbers, encoded.

    Attributes:
      name: of the column.
      fill: the number that a missing one counts as: the median.
      thresholds: each is a bit, whether the number is above it. None: the number itself is a feature.
      missing: whether one more bit says that the number was missing.
      numbers: whether there is the number itself for each threshold, as a feature whose threshold is learned.
      centre, scale: a number that is a feature is ``(number - centre) / scale``, so that different ones differ in float32, too.
    """

    name: str
    fill: float
    thresholds: tuple[float, ...] | None
    missing: bool
    numbers: bool = False
    centre: float = 0.0
    scale: float = 1.0

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        bits = [self.name]
        if self.thresholds is not None:
            bits = [f"{self.name} > {t}" for t in in_words(self.thresholds)]
        if self.numbers:
            bits = [self.name] * len(bits)
        return [*bits, f"{self.name} missing"] if self.missing else bits

    def encode(self, cells: Cells) -> Float[np.ndarray, "rows features"]:
        """Return the features of cells.

        Raises:
          SamplesError: a cell is no number.
        """
        absent = missing(cells)
        numbers = np.where(absent, self.fill, _numbers(cells, absent, self.name))[:, None]
        found = numbers > np.asarray(self.thresholds or ())
        if self.thresholds is None or self.numbers:
            found = np.repeat(self.scaled(numbers), 1 if self.thresholds is None else found.shape[1], 1)
        return np.column_stack([found, absent] if self.missing else [found]).astype(np.float64)

    def scaled(self, numbers: np.ndarray) -> Float32[np.ndarray, "*shape"]:
        """Return numbers as features; those beyond float32 become its largest."""
        return _single((np.asarray(numbers, np.float64) - self.centre) / self.scale)

    def above(self, feature: float) -> str:
        """Return the condition that a feature which is a number is above a threshold, in the column's own numbers."""
        n_digits = 6 + max(0, math.ceil(math.log10(max(abs(self.centre) / self.scale, 1))))
        return f"{self.name} > {feature * self.scale + self.centre:.{min(n_digits, 17)}g}"


@dataclasses.dataclass(frozen=True)
class Categories:
    """A column of categories, encoded as a bit for each; those that are not named have none.

    Attributes:
      name: of the column.
      values: the categories.
      missing: whether one more bit says that it was missing.
    """

    name: str
    values: tuple[str, ...]
    missing: bool

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        bits = [f"{self.name} = {value}" for value in self.values]
        return [*bits, f"{self.name} missing"] if self.missing else bits

    def encode(self, cells: Cells) -> Float[np.ndarray, "rows features"]:
        """Return the features of cells."""
        bits = cells[:, None] == np.asarray(self.values, dtype=np.str_)[None, :]
        return np.column_stack([bits, missing(cells)] if self.missing else [bits]).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Encoding of the columns of tables, learnt from a training part.

    Attributes:
      columns: in the order of features; columns that say nothing, because all rows have the same, are left out.
      classes: labels by their number.

    Example:
      >>> import numpy as np
      >>> from lutjax.training.datasets.columns import Encoding, Table
      >>> cells = {"age": np.array(["20", "31", "?", "64"]), "job": np.array(["a", "b", "a", "a"])}
      >>> table = Table(cells, np.array(["no", "yes", "no", "yes"]), "example")
      >>> encoding = Encoding.fit(table, bits=2)
      >>> encoding.features
      ['age > 20', 'age > 31', 'age missing', 'job = a', 'job = b']
      >>> encoding.encode(table)[1]
      array([1., 0., 0., 0., 1.], dtype=float32)
      >>> encoding.labels(table)
      array([0, 1, 0, 1], dtype=int32)
    """

    columns: tuple[Number | Categories, ...]
    classes: tuple[str, ...]

    @classmethod
    def fit(
        cls, train: Table, bits: int, classes: Sequence[str] | None = None, *, numbers: bool = False
    ) -> "Encoding":
        """Return the encoding that a training part gives.

        A column is of numbers if all its cells are, apart from missing ones. Its thresholds are quantiles; where many rows
        have the same number, others among the different numbers take their place.

        Args:
          train: the training part.
          bits: most bits of a column of numbers; 0 leaves numbers as they are.
          classes: labels by their number; by default those of the training part.
          numbers: whether there is a number for each bit of a column of numbers, and a threshold to start with in `thresholds`.

        Raises:
          SamplesError: every column has the same cell in all rows, or a column of numbers has a few cells that are none.
        """
        try:
            fitted = [_fit(name, cells, bits, numbers or not bits) for name, cells in train.columns.items()]
        except SamplesError as error:
            raise SamplesError(f"{train.name}: {error}") from error
        columns = tuple(column for column in fitted if column is not None)
        if numbers and bits:
            columns = tuple(
                dataclasses.replace(column, numbers=True) if isinstance(column, Number) else column
                for column in columns
            )
        if not columns:
            raise SamplesError(
                f"{train.name}: every column has the same cell in all rows; there is nothing to learn from."
            )
        return cls(columns, tuple(classes or classes_of(train)))

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        return [feature for column in self.columns for feature in column.features]

    @property
    def thresholds(self) -> Float32[np.ndarray, "features 1"] | None:
        """First thresholds of features, 1/2 for bits; None unless columns of numbers have a number for each threshold."""
        numbers = [column for column in self.columns if isinstance(column, Number) and column.numbers]
        if not numbers:
            return None
        found = np.full((len(self.features), 1), 0.5, np.float32)
        found[self.is_number, 0] = [
            t for column in numbers for t in column.scaled(np.asarray(column.thresholds))
        ]
        return found

    def above(self, feature: int, threshold: float | np.floating) -> str:
        """Return the condition that a feature, by its number, is above a threshold."""
        column = [column for column in self.columns for _ in column.features][feature]
        if isinstance(column, Number) and self.is_number[feature]:
            return column.above(float(threshold))
        return f"{self.features[feature]} > {threshold:g}"

    @property
    def is_number(self) -> list[bool]:
        """Flags of the features that are numbers, and not bits."""
        found: list[bool] = []
        for column in self.columns:
            is_number = isinstance(column, Number) and (column.numbers or column.thresholds is None)
            n_features = len(column.features)
            n_numbers = (n_features - column.missing) if is_number else 0
            found += [True] * n_numbers + [False] * (n_features - n_numbers)
        return found

    def encode(self, table: Table) -> Float32[np.ndarray, "rows features"]:
        """Return the features of the rows of a table: bits of 0 and 1, or numbers.

        Raises:
          SamplesError: a column is missing, or a cell of a column of numbers is no number.
        """
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            raise SamplesError(
                f"{table.name} has no column {', '.join(absent)}; it has {', '.join(table.columns)}."
            )
        try:
            found = [column.encode(table.columns[column.name]) for column in self.columns]
        except SamplesError as error:
            raise SamplesError(f"{table.name}: {error}") from error
        return np.concatenate(found, 1).astype(np.float32)

    def labels(self, table: Table) -> np.ndarray:
        """Return the labels of the rows of a table as numbers, int32 ``[rows]``.

        Raises:
          SamplesError: a label is none of the classes.
        """
        number = {label: i for i, label in enumerate(self.classes)}
        unknown = sorted(set(table.labels.tolist()) - set(number))
        if unknown:
            raise SamplesError(
                f"{table.name} has the label {unknown[0]!r}, which the training part lacks; that has {', '.join(self.classes)}."
            )
        return np.array([number[label] for label in table.labels.tolist()], np.int32)

    def to_json(self) -> str:
        """Return a text of which `from_json` makes the encoding."""
        columns = [{"kind": type(column).__name__, **dataclasses.asdict(column)} for column in self.columns]
        return json.dumps({"columns": columns, "classes": self.classes}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Encoding":
        """Return the encoding that `to_json` wrote.

        Raises:
          ValueError, KeyError, TypeError: it is no such text.
        """
        kinds: dict[str, Any] = {"Number": Number, "Categories": Categories}
        fields = json.loads(text)
        columns = []
        for column in fields["columns"]:
            of_kind = kinds[column.pop("kind")]
            columns.append(
                of_kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in column.items()})
            )
        return cls(tuple(columns), tuple(fields["classes"]))


def in_words(numbers: Sequence[float]) -> list[str]:
    """Return numbers in as few digits, from 6 on, as tell them apart."""
    for n_digits in range(6, 18):
        words = [f"{number:.{n_digits}g}" for number in numbers]
        if len(set(words)) == len(set(numbers)):
            break
    return words


def classes_of(table: Table) -> list[str]:
    """Return the labels of a table, numbers in their order and text by the alphabet.

    Raises:
      SamplesError: there are fewer than two, or nearly every row has its own.
    """
    found = np.unique(table.labels).tolist()
    if len(found) < 2:
        raise SamplesError(f"{table.name}: every label is {found[0]!r}; expected at least two classes.")
    if len(found) > max(len(table) // 2, 2):
        raise SamplesError(
            f"{table.name}: the target has {len(found)} different values in {len(table)} rows; expected classes, with several rows "
            "each. Choose another column, or put numbers into classes first."
        )
    return sorted(found, key=float if all(map(_is_number, found)) else None)


def _fit(name: str, cells: Cells, bits: int, as_numbers: bool) -> Number | Categories | None:
    absent = missing(cells)
    present = cells[~absent]
    if not len(present):
        return None
    try:
        numbers = _numbers(present, np.zeros(len(present), bool), name)
    except SamplesError:
        values, counts = np.unique(present, return_counts=True)
        if len(values) == 1 and not absent.any():
            return None
        odd = np.array([not _is_number(value) for value in values])
        if len(values) > MOST_CATEGORIES and counts[odd].sum() <= 0.05 * len(present):
            raise SamplesError(
                f"column {name} has numbers, and {values[odd][:3].tolist()} in {counts[odd].sum()} of {len(present)} rows; expected "
                f"numbers alone, or at most {MOST_CATEGORIES} categories. Mend these cells, or leave them empty."
            ) from None
        most = np.argsort(-counts, kind="stable")[:MOST_CATEGORIES]
        return Categories(name, tuple(sorted(values[most].tolist())), bool(absent.any()))
    if np.ptp(numbers) == 0 and not absent.any():
        return None
    thresholds = tuple(_thresholds(numbers, bits).tolist()) if bits else None
    centre, scale = _units(numbers, name) if as_numbers else (0.0, 1.0)
    return Number(name, float(np.median(numbers)), thresholds, bool(absent.any()), centre=centre, scale=scale)


def _single(numbers: np.ndarray) -> np.ndarray:
    """Return numbers in float32; those beyond it become its largest."""
    single: np.ndarray = np.clip(numbers, -_MOST, _MOST).astype(np.float32)
    return single


def _units(numbers: Float[np.ndarray, " rows"], name: str) -> tuple[float, float]:
    """Return what a column's numbers are taken from, and divided by, so that different ones differ in float32: 0 and 1 where they do.

    Raises:
      SamplesError: in no unit do they.
    """
    distinct = np.unique(numbers)
    n_apart = len(np.unique(_single(distinct)))
    if n_apart == len(distinct) and np.abs(distinct).max() <= _MOST:
        return 0.0, 1.0
    low, high = distinct[0] / 2, distinct[-1] / 2  # a sum of large numbers would be infinite
    centre, scale = float(low + high), float(high - low) or 1.0
    n_apart = len(np.unique(_single((distinct - centre) / scale)))
    if n_apart < min(_APART * len(distinct), _MANY):
        raise SamplesError(
            f"column {name} has {len(distinct)} different numbers, of which {n_apart} differ in float32: they lie too unevenly between "
            f"{distinct[0]:g} and {distinct[-1]:g}. Give their logarithms, or make bits of them, which compare them exactly "
            "(--column-bits, without --thresholds learned)."
        )
    return centre, scale


def _is_number(cell: str) -> bool:
    # What Python takes for a number besides is a code: 1_23, or digits of other scripts.
    return _NUMBER.fullmatch(cell) is not None and math.isfinite(float(cell))


def _numbers(cells: Cells, absent: np.ndarray, name: str) -> Float[np.ndarray, " rows"]:
    """Return cells as numbers; absent ones are 0."""
    found = np.zeros(len(cells))
    for row in np.flatnonzero(~absent):
        if not _is_number(cells[row]):
            raise SamplesError(
                f"column {name} has {str(cells[row])!r} in row {row + 1}, which is no finite number, but the training part has "
                "numbers there."
            )
        found[row] = float(cells[row])
    return found


def _thresholds(numbers: np.ndarray, bits: int) -> Float[np.ndarray, " thresholds"]:
    """Return at most so many thresholds, ascending; each separates some of the numbers from others."""
    distinct = np.unique(numbers)[:-1]  # nothing is above the largest
    if len(distinct) <= bits:
        return distinct
    share = np.arange(1, bits + 1) / (bits + 1)
    found = np.intersect1d(np.quantile(numbers, share, method="lower"), distinct)
    lacking = bits - len(found)
    if lacking:
        rest = np.setdiff1d(distinct, found)
        share = np.arange(1, lacking + 1) / (lacking + 1)
        found = np.union1d(found, np.quantile(rest, share, method="lower"))
    return found

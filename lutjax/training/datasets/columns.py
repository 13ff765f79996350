"""Tabular data: numeric and categorical columns, missing cells, and encoding as bits or numbers."""

import codecs
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Shaped

from lutjax.extras import command
from lutjax.files import compressed, strict_json
from lutjax.files.messages import escape_unprintable, in_a_line
from lutjax.files.strict_json import Fields
from lutjax.training.samples import SamplesError

MISSING = ("", "?", "na", "n/a", "nan", "null", "none")  # lowercase spellings of missing cells

_NUMBER = re.compile(r"[+-]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(?:[0-9]+(?:,[0-9]+)?|,[0-9]+)([eE][+-]?[0-9]+)?")
_DATE = re.compile(
    r"([0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}"
    r"|[0-9]{1,2}[-/.][0-9]{1,2}[-/.]([0-9]{4}|[0-9]{2}))([T ][0-9:.+Z-]+)?"
)

_MOST_SHOWN = 40  # maximum columns listed in remarks
_FEWEST_IDS = 20  # minimum number of rows, each with a distinct number, for an id warning
_ODD = 0.05  # maximum share of non-numeric cells treated as mistakes in a numeric column
MOST_CATEGORIES = 64  # maximum number of categories with a bit; the most frequent ones are chosen

_MOST = float(np.finfo(np.float32).max)
_APART, _MANY = 0.99, 2**20
"""Minimum share (and maximum count) required to differ as float32, among distinct numbers."""

_BLOCK = 1 << 16
"""Maximum cells held as Python strings at once, which take several times an array's memory."""

_FEWEST_ROWS = 256
"""Minimum rows per block: for fewer cells an array takes more memory than the strings."""

Cells = Shaped[np.ndarray, " rows"]


@dataclasses.dataclass(frozen=True)
class Table:
    """Text columns, as in a file, and a label per row.

    Attributes:
      columns: cells per column, strings ``[rows]``, without surrounding spaces.
      labels: strings ``[rows]``.
      name: data source, for messages.
    """

    columns: Mapping[str, Cells]
    labels: Cells
    name: str

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, ids: np.ndarray) -> "Table":
        """Select rows by number."""
        columns = {name: cells[ids] for name, cells in self.columns.items()}
        return Table(columns, self.labels[ids], self.name)

    @property
    def digest(self) -> str:
        """SHA-256 of names, cells and labels."""
        digest = hashlib.sha256()
        for name, cells in (*self.columns.items(), ("", self.labels)):
            # Separators of ASCII, which text does not have, keep neighboring cells apart.
            digest.update(name.encode())
            for first in range(0, len(cells), _BLOCK):
                block = "".join(f"\x1f{cell}" for cell in cells[first : first + _BLOCK])
                digest.update(block.encode())
            digest.update(b"\x1e")
        return digest.hexdigest()


def missing_mask(cells: Cells) -> Bool[np.ndarray, " rows"]:
    """Return a mask of the missing cells."""
    return np.isin(np.char.lower(cells), MISSING)


def read(
    path: Path, target: str, *, exclude: Sequence[str] = (), encoding: str | None = None
) -> Table:
    """Return the table from a CSV file with a header line (perhaps gzipped), or a Parquet file.

    Raises:
      SamplesError: the file cannot be read, has the wrong format, or lacks a named column.
    """
    arrays = read_cells(path, encoding=encoding)
    for option, name in (("--target", target), *(("--exclude", name) for name in exclude)):
        if name not in arrays:
            raise SamplesError(
                f"{path} has no column {name!r}, which {option} names; "
                f"it has {in_a_line(', '.join(arrays))}."
            )
    if target in exclude:
        raise SamplesError(
            f"{path}: --exclude names {target!r}, the column of labels; leave it out there."
        )
    labels = arrays.pop(target)
    arrays = {name: cells for name, cells in arrays.items() if name not in exclude}
    return validate_table(Table(arrays, labels, str(path)), target)


def read_cells(path: Path, *, encoding: str | None = None) -> dict[str, Cells]:
    """Return a file's columns, in any format supported by `read`."""
    if path.suffix.lower() in (".parquet", ".pq"):
        if encoding is not None:
            raise SamplesError(
                f"--encoding is {encoding}, but {path} is no CSV file; leave it out."
            )
        names, columns = _parquet(path)
    else:
        names, columns = _csv(path, encoding)
    if not names:
        raise SamplesError(
            f"{path} is empty; expected a line of column names, and a line per sample."
        )
    return dict(zip(names, columns, strict=True))


def validate_table(table: Table, target: str = "y") -> Table:
    """Return a table; raise SamplesError if it lacks other columns, rows or a row's label."""
    if not len(table) or not table.columns:
        raise SamplesError(
            f"{table.name} has {len(table)} rows and {len(table.columns)} columns besides "
            f"{target}; expected at least two rows and one other column."
        )
    without = np.flatnonzero(missing_mask(table.labels))
    if len(without):
        raise SamplesError(
            f"{table.name}: {target} is missing in row {without[0] + 1} and {len(without) - 1} "
            "others; remove rows without a label."
        )
    return table


def strings(cells: Iterable[Any]) -> Cells:
    """Return cells as a string array without surrounding spaces, with individual cell lengths."""
    return np.char.strip(np.asarray(list(cells), dtype=np.dtypes.StringDType()))


def _csv(path: Path, encoding: str | None = None) -> tuple[list[str], list[Cells]]:
    try:
        # Unlike `codecs.lookup`, it refuses codecs of bytes, such as hex.
        io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")
    except (LookupError, ValueError):  # ValueError: a null character
        raise SamplesError(
            f"--encoding is {encoding!r}, which Python does not know as an encoding of text; "
            "an example is latin-1."
        ) from None
    suffix = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    head = b""
    try:
        with (
            compressed.open_compressed(path) as octets,
            io.TextIOWrapper(octets, encoding=encoding or "utf-8-sig", newline="") as file,
        ):
            head = octets.peek(2)[:2]
            first = file.readline()
            delimiter = "\t" if suffix == ".tsv" else max(",;\t", key=first.count)
            reader = csv.reader(
                itertools.chain([first], file), delimiter=delimiter, skipinitialspace=True
            )
            # `utf-8` keeps the byte order mark in the first name.
            names = [name.removeprefix("\ufeff").strip() for name in next(reader, [])]
            if len(set(names)) < len(names) or not all(names):
                raise SamplesError(
                    f"{path}: its first line has the column names {in_a_line(names)}; expected "
                    "distinct names. Add a line of names if there is none."
                )
            return names, _split_columns(_rows(reader, len(names), path), len(names))
    except OSError as error:
        raise SamplesError(f"{path} cannot be read: {error.strerror or error}") from error
    except compressed.PackedError as error:
        raise SamplesError(str(error)) from error
    except (UnicodeError, csv.Error) as error:
        # Spreadsheets write UTF-16 with a byte order mark.
        likely = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin-1"
        advice = ""
        if isinstance(error, UnicodeError):
            advice = f" Name another encoding by --encoding, such as {likely}."
        raise SamplesError(
            f"{path} is not a CSV file of {encoding or 'UTF-8'} text: {error}.{advice}"
        ) from error


def _rows(reader: Any, n_columns: int, path: Path) -> Iterator[list[str]]:
    """Yield the nonempty rows of a CSV file; raise SamplesError for another number of cells."""
    for row in filter(None, reader):
        if len(row) != n_columns:
            raise SamplesError(
                f"{path}: line {reader.line_num} has {len(row)} cells, "
                f"but there are {n_columns} columns."
            )
        yield row


def _split_columns(rows: Iterator[list[str]], n_columns: int) -> list[Cells]:
    """Return the cells of each column, reading rows block by block."""
    blocks: list[list[Cells]] = [[strings(())] for _ in range(n_columns)]
    n_rows = max(_FEWEST_ROWS, _BLOCK // max(1, n_columns))
    while block := list(itertools.islice(rows, n_rows)):
        for column, cells in zip(blocks, zip(*block, strict=True), strict=True):
            column.append(strings(cells))
    columns = []
    for k, column in enumerate(blocks):
        columns.append(np.concatenate(column))
        blocks[k] = []  # frees the blocks: never hold all cells twice
    return columns


def _parquet(path: Path) -> tuple[list[str], list[Cells]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SamplesError(
            f"{path} is a Parquet file, which requires pyarrow: {command('pyarrow')}"
        ) from None
    damaged = (pyarrow.ArrowException, ImportError, LookupError, OverflowError, ValueError)
    try:
        with parquet.ParquetFile(path) as file:
            parts = (file.metadata.row_group(k) for k in range(file.metadata.num_row_groups))
            n_bytes = sum(part.total_byte_size for part in parts)
            compressed.check(path, n_bytes, "write it without compression")
            _check_cells(path, file.metadata.num_rows, file.metadata.num_columns)
            of_text = [
                column.name for column in file.schema if column.physical_type == "BYTE_ARRAY"
            ]
        # As dictionaries: repeated text would otherwise unpack to many times the file.
        table = parquet.read_table(path, read_dictionary=of_text)
        table.validate(full=True)  # Arrow reads beyond the arrays of damaged columns
    except OSError as error:
        raise SamplesError(
            f"{path} cannot be read: {in_a_line(error.strerror or error)}"
        ) from error
    except compressed.PackedError as error:
        raise SamplesError(str(error)) from error
    except damaged as error:
        raise SamplesError(f"{path} is not a Parquet file: {in_a_line(error)}") from error
    for field in table.schema:
        if pyarrow.types.is_nested(field.type):
            raise SamplesError(
                f"{path}: column {in_a_line(field.name)} has the type {in_a_line(field.type)}; "
                "expected numbers, text or categories. Exclude it."
            )
    names = list(table.column_names)
    if len(set(names)) < len(names):
        raise SamplesError(
            f"{path} has columns {in_a_line(names)}; expected a different name for each."
        )
    try:
        cells = [
            [cell for chunk in column.chunks for cell in _texts_of(chunk)]
            for column in table.columns
        ]
    except damaged as error:
        raise SamplesError(f"{path} has a cell that cannot be read: {in_a_line(error)}") from error
    _check_cells(path, sum(len(cell) for column in cells for cell in column), 1)
    return names, [strings(column) for column in cells]


_CELLS = 64
"""Maximum cells or characters per byte of a Parquet file; damaged files can state any number."""


def _check_cells(path: Path, rows: int, columns: int) -> None:
    """Raise SamplesError if a Parquet file's unpacked size exceeds the limit for its file size."""
    size = path.stat().st_size
    if rows * columns > _CELLS * max(size, 1 << 16):
        raise SamplesError(
            f"{path} has {size:,} bytes, which unpack to {rows * columns:,} cells or characters; "
            f"at most {_CELLS} per byte are read. Remove constant columns."
        )


def _texts_of(chunk: Any) -> list[str]:
    """Return the cells of an Arrow column chunk as strings, shared among equal cells."""
    import pyarrow

    if not pyarrow.types.is_dictionary(chunk.type):
        return ["" if cell is None else str(cell) for cell in chunk.to_pylist()]
    texts = _texts_of(chunk.dictionary)
    return ["" if code is None else texts[code] for code in chunk.indices.to_pylist()]


def table_from_arrays(
    x: np.ndarray, y: np.ndarray, names: Sequence[str] | None, *, name: str
) -> Table:
    """Create a table from strings ``[N, columns]`` and labels; columns are named by number."""
    if x.ndim != 2 or y.shape != (len(x),):
        raise SamplesError(
            f"{name}: x has shape {list(x.shape)} and y {list(y.shape)}; expected text [N, "
            "columns] and labels [N]."
        )
    names = default_column_names(x.shape[1]) if names is None else list(names)
    if len(set(names)) != x.shape[1]:
        raise SamplesError(
            f"{name}: names are {in_a_line(names)}; "
            f"expected a different one for each of {x.shape[1]} columns."
        )
    columns = {column: strings(cells) for column, cells in zip(names, x.T, strict=True)}
    return validate_table(Table(columns, strings(y), name))


@dataclasses.dataclass(frozen=True)
class Number:
    """Encoded numeric column."""

    name: str
    fill: float  # replacement for missing numbers: the median
    # Each gives a bit, whether the number is above it. None: the number itself is a feature.
    thresholds: tuple[float, ...] | None
    missing: bool  # whether an additional bit marks missing numbers
    # Whether each threshold gets a copy of the number as a feature, for learned thresholds.
    numbers: bool = False
    # center, scale: a numeric feature is ``(number - center) / scale``, so that distinct numbers
    # also differ in float32
    center: float = 0.0
    scale: float = 1.0
    decimal: str = "."  # decimal separator, a point or a comma
    # Maximum decimals in the training data; None if unknown, in runs of earlier versions
    digits: int | None = None
    # least, largest: training data range, None if unknown
    least: float | None = None
    largest: float | None = None

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        bits = [self.name]
        if self.thresholds is not None:
            bits = [f"{self.name} > {t}" for t in in_words(self.thresholds)]
        if self.numbers:
            bits = [self.name] * len(bits)
        return [*bits, f"{self.name} missing"] if self.missing else bits

    def parse_cells(self, cells: Cells) -> list[float | None]:
        """Parse cells as numbers, with None for missing cells."""
        absent = missing_mask(cells)
        numbers = _parse_numbers(cells, absent, self.name, self.decimal).tolist()
        return [None if none else number for number, none in zip(numbers, absent, strict=True)]

    def format_cells(self, values: Iterable[float | None]) -> Cells:
        """Format numbers as cells, the inverse of `parse_cells`."""
        return strings(
            "" if value is None else repr(float(value)).replace(".", self.decimal)
            for value in values
        )

    def encode(self, cells: Cells) -> Float32[np.ndarray, "rows features"]:
        """Encode cells as features."""
        absent = missing_mask(cells)
        parsed = _parse_numbers(cells, absent, self.name, self.decimal)
        numbers = np.where(absent, self.fill, parsed)[:, None]
        # Compare in float64, before any scaling: distinct numbers may be equal in float32.
        features = numbers > np.asarray(self.thresholds or ())
        if self.thresholds is None or self.numbers:
            n_copies = 1 if self.thresholds is None else features.shape[1]
            features = np.repeat(self.scale_numbers(numbers), n_copies, 1)
        return np.column_stack([features, absent] if self.missing else [features]).astype(
            np.float32
        )

    def scale_numbers(self, numbers: np.ndarray) -> Float32[np.ndarray, "*shape"]:
        """Return numbers as features, clipped to the float32 range."""
        return _to_float32((np.asarray(numbers, np.float64) - self.center) / self.scale)

    def above(self, feature: float) -> str:
        """Describe the condition "feature above a threshold" in the column's original units."""
        # Enough digits for differences of `scale` around `center`, of which float64 has 17.
        n_digits = 6 + max(0, math.ceil(math.log10(max(abs(self.center) / self.scale, 1))))
        return f"{self.name} > {feature * self.scale + self.center:.{min(n_digits, 17)}g}"


@dataclasses.dataclass(frozen=True)
class Categories:
    """Categorical column encoded as one bit per category; unknown categories set no bit."""

    name: str
    values: tuple[str, ...]
    missing: bool  # whether an additional bit marks missing cells

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        bits = [f"{self.name} = {value}" for value in self.values]
        return [*bits, f"{self.name} missing"] if self.missing else bits

    def parse_cells(self, cells: Cells) -> list[str | None]:
        """Parse cells as categories, with None for missing cells."""
        return [
            None if none else cell
            for cell, none in zip(cells.tolist(), missing_mask(cells), strict=True)
        ]

    def format_cells(self, values: Iterable[str | None]) -> Cells:
        """Format categories as cells, the inverse of `parse_cells`."""
        return strings("" if value is None else value for value in values)

    def encode(self, cells: Cells) -> Float32[np.ndarray, "rows features"]:
        """Encode cells as features."""
        bits = cells[:, None] == np.array(self.values, np.dtypes.StringDType())[None, :]
        flags = [bits, missing_mask(cells)] if self.missing else [bits]
        return np.column_stack(flags).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Encoding of table columns, learned from a training part.

    Attributes:
      columns: in the order of features; constant columns are left out.
      classes: labels by number; empty in regression.

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
        """Learn the encoding from a training part.

        A column is numeric if all nonmissing cells are numbers. Its thresholds are quantiles;
        quantiles repeated by frequent numbers are replaced with other distinct numbers.

        Args:
          train: the training part.
          bits: maximum bits per numeric column; 0 keeps numbers.
          classes: labels by number; by default the training part's.
          numbers: whether each bit of a numeric column becomes a number with an initial threshold
            in `thresholds`.

        Raises:
          SamplesError: every column is constant, or a numeric column has a few non-numeric cells.
        """
        try:
            as_numbers = numbers or not bits
            fitted = [_fit(name, cells, bits, as_numbers) for name, cells in train.columns.items()]
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
                f"{train.name}: every column has the same cell in all rows; "
                "there is nothing to learn from."
            )
        return cls(columns, tuple(classes_of(train) if classes is None else classes))

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        return [feature for column in self.columns for feature in column.features]

    @property
    def thresholds(self) -> Float32[np.ndarray, "features 1"] | None:
        """Initial feature thresholds, 1/2 for bits; None unless `fit` had ``numbers=True``."""
        numbers = [
            column for column in self.columns if isinstance(column, Number) and column.numbers
        ]
        if not numbers:
            return None
        thresholds = np.full((len(self.features), 1), 0.5, np.float32)
        thresholds[self.is_number, 0] = [
            t for column in numbers for t in column.scale_numbers(np.asarray(column.thresholds))
        ]
        return thresholds

    def above(self, feature: int, threshold: float | np.floating) -> str:
        """Describe the condition "feature above a threshold", for a feature number."""
        column = [column for column in self.columns for _ in column.features][feature]
        if isinstance(column, Number) and self.is_number[feature]:
            return column.above(float(threshold))
        return f"{self.features[feature]} > {threshold:g}"

    @property
    def is_number(self) -> list[bool]:
        """Flags for numeric features, as opposed to bits."""
        flags: list[bool] = []
        for column in self.columns:
            is_number = isinstance(column, Number) and (column.numbers or column.thresholds is None)
            n_features = len(column.features)
            n_numbers = (n_features - column.missing) if is_number else 0
            flags += [True] * n_numbers + [False] * (n_features - n_numbers)
        return flags

    def encode(self, table: Table) -> Float32[np.ndarray, "rows features"]:
        """Encode table rows as features: bits of 0 and 1, or numbers.

        Raises:
          SamplesError: a column is missing, or a numeric column has a non-numeric cell.
        """
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            raise SamplesError(
                f"{table.name} has no column {in_a_line(', '.join(absent))}; "
                f"it has {in_a_line(', '.join(table.columns))}."
            )
        features, first = np.empty((len(table), len(self.features)), np.float32), 0
        for column in self.columns:
            n_features = len(column.features)
            try:
                features[:, first : first + n_features] = column.encode(table.columns[column.name])
            except SamplesError as error:
                raise SamplesError(f"{table.name}: {error}") from error
            first += n_features
        return features

    def unknown(self, x: Float32[np.ndarray, "rows features"]) -> list[str]:
        """Return a warning for each categorical column with categories unknown from training."""
        warnings, first = [], 0
        for column in self.columns:
            bits = x[:, first : first + len(column.features)]
            first += bits.shape[1]
            if isinstance(column, Categories) and (n := int((bits == 0).all(1).sum())):
                warnings.append(
                    f"warning: column {in_a_line(column.name)}: "
                    f"{n} of {len(x)} rows have a value that is none of the {len(column.values)} "
                    "categories that training knows; it is read as none of them, all bits 0."
                )
        return warnings

    def labels(self, table: Table) -> np.ndarray:
        """Return class numbers, int32 ``[rows]``, or regression targets, float32 ``[rows]``.

        Raises:
          SamplesError: a label is not a known class, or not a number.
        """
        if not self.classes:
            return targets(table.labels, name=table.name)
        return label_numbers(table.labels, self.classes, name=table.name)

    def to_json(self) -> str:
        """Serialize the encoding for `from_json`."""
        columns = [
            {"kind": type(column).__name__, **dataclasses.asdict(column)} for column in self.columns
        ]
        return json.dumps({"columns": columns, "classes": self.classes}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Encoding":
        """Parse an encoding from `to_json`, with at most 100 times the memory of the text.

        Raises:
          ValueError: the text is invalid; the message names the field.
        """
        try:
            content, fields = strict_json.loads(text), Fields("the encoding")
        except ValueError as error:
            raise ValueError(f"the encoding is not JSON: {error}.") from None
        columns = fields.field(content, "columns", list)
        read = (_column(Fields(f"columns[{k}]"), column) for k, column in enumerate(columns))
        classes = _texts(fields, content, "classes")
        return cls(tuple(read), classes)


def _column(fields: Fields, content: Any) -> Number | Categories:
    kind, name = (fields.field(content, key, str) for key in ("kind", "name"))
    missing = fields.field(content, "missing", bool)
    if kind == "Categories":
        return Categories(name, _texts(fields, content, "values"), missing)
    if kind != "Number":
        raise ValueError(
            f"{fields.where}: 'kind' is {strict_json.format_value(kind)}; "
            "expected 'Number' or 'Categories'."
        )
    thresholds = None
    if content.get("thresholds") is not None:
        listed = fields.field(content, "thresholds", list)
        by_name = {str(k): threshold for k, threshold in enumerate(listed)}
        own = Fields(f"{fields.where}: thresholds")
        thresholds = tuple(_require_finite(own, by_name, key) for key in by_name)
    # Fields with a default here are missing from files of older versions.
    fill, center, scale = (
        _require_finite(fields, {"center": 0.0, "scale": 1.0, **content}, key)
        for key in ("fill", "center", "scale")
    )
    if scale == 0:
        raise ValueError(f"{fields.where}: 'scale' is 0; numbers are divided by it.")
    as_numbers = "numbers" in content and fields.field(content, "numbers", bool)
    decimal = content.get("decimal", ".")
    if decimal not in (".", ","):
        raise ValueError(
            f"{fields.where}: 'decimal' is {strict_json.format_value(decimal)}; "
            "expected a point or a comma."
        )
    digits = None if content.get("digits") is None else fields.field(content, "digits", int)
    least, largest = (
        None if content.get(key) is None else _require_finite(fields, content, key)
        for key in ("least", "largest")
    )
    options = (as_numbers, center, scale, decimal, digits, least, largest)
    return Number(name, fill, thresholds, missing, *options)


def _require_finite(fields: Fields, content: Any, name: str) -> float:
    number = fields.number(content, name)
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"{fields.where}: {name!r} is {strict_json.format_value(content.get(name))}; "
            "expected a finite number."
        )
    return number


def _texts(fields: Fields, content: Any, name: str) -> tuple[str, ...]:
    texts = fields.field(content, name, list)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{fields.where}: {name!r} is {strict_json.format_value(texts)}; expected texts."
        )
    return tuple(texts)


def label_numbers(labels: Cells, classes: Sequence[str], *, name: str) -> np.ndarray:
    """Return labels as class numbers, int32 ``[rows]``."""
    number = {label: i for i, label in enumerate(classes)}
    unknown = sorted(set(labels.tolist()) - set(number))
    if unknown:
        raise SamplesError(
            f"{name} has the label {in_a_line(repr(unknown[0]), 80)}, which is missing from the "
            f"training part; that has {in_a_line(', '.join(classes))}."
        )
    return np.array([number[label] for label in labels.tolist()], np.int32)


def targets(labels: Cells, *, name: str) -> Float32[np.ndarray, " rows"]:
    """Parse labels as regression targets; raise SamplesError for one that is not finite."""
    points = labels if _decimal_separator(labels) == "." else np.char.replace(labels, ",", ".")
    for row, label in enumerate(points.tolist()):
        if not _is_number(label) or not math.isfinite(np.float32(label)):
            raise SamplesError(
                f"{name}: the target is {in_a_line(repr(label), 80)} in row {row + 1}; "
                "--regression requires finite numbers (float32). Remove the row, or choose "
                "another column."
            )
    return np.array([float(label) for label in points.tolist()], np.float32)


def default_column_names(n_columns: int) -> list[str]:
    """Return default names for unnamed columns."""
    return [f"column {number}" for number in range(1, n_columns + 1)]


def describe_columns(train: Table, encoding: Encoding) -> list[str]:
    r"""Return lines about the interpretation of each training column, and warnings.

    Example:
      >>> import numpy as np
      >>> from lutjax.training.datasets.columns import Encoding, Table, describe_columns
      >>> cells = {"day": np.array(["2024-01-31", "2024-02-01"]), "pay": np.array(["1,5", "2,25"])}
      >>> table = Table(cells, np.array(["no", "yes"]), "example")
      >>> line, warning = describe_columns(table, Encoding.fit(table, 8))
      >>> line
      'columns: day 2 categories; pay numbers with a decimal comma (1 bit)'
      >>> warning.partition(":")[0], warning.partition(", which")[0].split(": ")[1]
      ('warning', 'column day has dates')
    """
    used = {column.name: column for column in encoding.columns}
    words = [f"{name} {_in_words(column)}" for name, column in list(used.items())[:_MOST_SHOWN]]
    if len(used) > len(words):
        words.append(f"and {len(used) - len(words)} others, in columns.json")
    constant = [name for name in train.columns if name not in used]
    if constant:
        words.append(
            f"left out, as all rows have the same: {strict_json.format_names(constant, 200)}"
        )
    warnings = [
        f"warning: column {name} {why}"
        for name in used
        if (why := _doubt(train.columns[name], used[name]))
    ]
    return [escape_unprintable(line) for line in (f"columns: {'; '.join(words)}", *warnings)]


def _in_words(column: Number | Categories) -> str:
    missing = ", some missing" if column.missing else ""
    if isinstance(column, Categories):
        return f"{len(column.values)} categories{missing}"
    comma = " with a decimal comma" if column.decimal == "," else ""
    n_bits = 0 if column.thresholds is None else len(column.thresholds)
    bits = f" ({n_bits} bit{'s' * (n_bits != 1)})" if n_bits else ""
    return f"numbers{comma}{bits}{missing}"


def _doubt(cells: Cells, column: Number | Categories) -> str:
    """Return a warning about a column that may be neither numeric nor categorical; may be empty."""
    present = cells[~missing_mask(cells)]
    out = f"leave it out (--exclude {column.name})"
    distinct = np.unique(present)
    if isinstance(column, Categories):
        if all(map(_DATE.fullmatch, present)):
            return (
                "has dates, which are read as categories: give numbers in their place, "
                f"such as the days since one of them, or {out}."
            )
        if len(distinct) > max(MOST_CATEGORIES, len(present) // 2):
            return (
                f"has {len(distinct)} different texts in {len(present)} rows, "
                f"as names or ids have, of which other rows have none: {out}."
            )
        if len(distinct) > MOST_CATEGORIES:
            frequent = f"the {MOST_CATEGORIES} most frequent have a bit each and the others none"
            return f"has {len(distinct)} categories, of which {frequent}."
        return ""
    if len(distinct) < max(len(present), _FEWEST_IDS):
        return ""
    # A different integer in each row, with few gaps, is more likely an id than a measurement.
    numbers = _parse_numbers(present, np.zeros(len(present), bool), column.name, column.decimal)
    if (numbers == np.floor(numbers)).all() and np.ptp(numbers) < 2 * len(numbers):
        return f"counts the rows, as ids do, of which other rows have other ones: {out}."
    return ""


def in_words(numbers: Sequence[float]) -> list[str]:
    """Format numbers with the fewest digits, at least 6, that distinguish them."""
    for n_digits in range(6, 18):
        words = [f"{number:.{n_digits}g}" for number in numbers]
        if len(set(words)) == len(set(numbers)):
            break
    return words


def classes_of(table: Table) -> list[str]:
    """Return the labels of a table, numbers in numeric order and text alphabetically.

    Raises:
      SamplesError: there are fewer than two, or nearly every row has its own.
    """
    return list(classes_of_labels(table.labels, name=table.name))


def classes_of_labels(labels: np.ndarray, *, name: str) -> tuple[str, ...]:
    """Return labels by class number, as `classes_of` for arrays."""
    distinct = np.unique(strings(labels)).tolist()
    if len(distinct) < 2:
        raise SamplesError(
            f"{name}: every label is {in_a_line(repr(distinct[0]), 80)}; "
            "expected at least two classes."
        )
    if len(distinct) > max(len(labels) // 2, 2):
        raise SamplesError(
            f"{name}: the target has {len(distinct)} different values in {len(labels)} rows; "
            "expected classes with several rows each. "
            "Use --regression, choose another column, or bin the numbers first."
        )
    return tuple(sorted(distinct, key=float if all(map(_is_number, distinct)) else None))


def _fit(name: str, cells: Cells, bits: int, as_numbers: bool) -> Number | Categories | None:
    absent = missing_mask(cells)
    present = cells[~absent]
    if not len(present):
        return None
    decimal = _decimal_separator(present)
    try:
        numbers = _parse_numbers(present, np.zeros(len(present), bool), name, decimal)
    except SamplesError:
        values, counts = np.unique(present, return_counts=True)
        if len(values) == 1 and not absent.any():
            return None
        # Many numbers with a few other cells are a column with mistakes, not one of categories.
        odd = np.array([not _is_number(value) for value in values])
        if len(values) > MOST_CATEGORIES and counts[odd].sum() <= _ODD * len(present):
            raise SamplesError(
                f"column {in_a_line(name)} has numbers, and {in_a_line(values[odd][:3].tolist())} "
                f"in {counts[odd].sum()} of {len(present)} rows; expected only numbers, or at most "
                f"{MOST_CATEGORIES} categories. Correct these cells, or leave them empty."
            ) from None
        # A stable sort, so that equally frequent categories are chosen in every version of NumPy.
        most = np.argsort(-counts, kind="stable")[:MOST_CATEGORIES]
        return Categories(name, tuple(sorted(values[most].tolist())), bool(absent.any()))
    if np.ptp(numbers) == 0 and not absent.any():
        return None
    thresholds = tuple(_thresholds(numbers, bits).tolist()) if bits else None
    center, scale = _units(numbers, name) if as_numbers else (0.0, 1.0)
    fill, has_missing = float(np.median(numbers)), bool(absent.any())
    return Number(
        *(name, fill, thresholds, has_missing),
        center=center,
        scale=scale,
        decimal=decimal,
        digits=_digits(numbers),
        least=float(numbers.min()),
        largest=float(numbers.max()),
    )


_MOST_DIGITS = 15  # maximum decimals that `_digits` detects


def _digits(numbers: Float[np.ndarray, " rows"]) -> int:
    """Return the maximum decimals of numbers, at most `_MOST_DIGITS`."""
    with np.errstate(over="ignore", invalid="ignore"):  # large numbers have no decimals anyway
        for digits in range(_MOST_DIGITS):
            unit = 10.0**digits
            if (np.round(numbers * unit) / unit == numbers).all():
                return digits
    return _MOST_DIGITS


def _decimal_separator(present: Cells) -> str:
    """Return the decimal separator: a comma if it fits all cells and is common enough."""
    commas = np.char.count(present, ",") > 0
    if commas.mean() > _ODD and all(map(_DECIMAL_COMMA.fullmatch, present)):
        return ","
    return "."


def _to_float32(numbers: np.ndarray) -> np.ndarray:
    single: np.ndarray = np.clip(numbers, -_MOST, _MOST).astype(np.float32)
    return single


def _units(numbers: Float[np.ndarray, " rows"], name: str) -> tuple[float, float]:
    """Return offset and divisor (0, 1 if possible) for distinct numbers in float32."""
    distinct = np.unique(numbers)
    n_apart = len(np.unique(_to_float32(distinct)))
    if n_apart == len(distinct) and np.abs(distinct).max() <= _MOST:
        return 0.0, 1.0
    low, high = distinct[0] / 2, distinct[-1] / 2  # avoids overflow in a sum of large numbers
    center, scale = float(low + high), float(high - low) or 1.0
    n_apart = len(np.unique(_to_float32((distinct - center) / scale)))
    if n_apart < min(_APART * len(distinct), _MANY):
        raise SamplesError(
            f"column {name} has {len(distinct)} different numbers, of which {n_apart} differ in "
            f"float32: they are too unevenly spaced between {distinct[0]:g} and {distinct[-1]:g}. "
            "Give their logarithms, or binarize them, which compares exactly (--column-bits, "
            "without --thresholds learned)."
        )
    return center, scale


def _is_number(cell: str) -> bool:
    # Python also parses codes as numbers: 1_23, or digits of other scripts.
    return _NUMBER.fullmatch(cell) is not None and math.isfinite(float(cell))


def _parse_numbers(
    cells: Cells, absent: np.ndarray, name: str, decimal: str = "."
) -> Float[np.ndarray, " rows"]:
    """Parse cells as numbers; absent cells become 0."""
    numbers = np.zeros(len(cells))
    points = cells if decimal == "." else np.char.replace(cells, decimal, ".")
    for row in np.flatnonzero(~absent):
        if not _is_number(points[row]):
            raise SamplesError(
                f"column {in_a_line(name)} has {in_a_line(repr(str(cells[row])), 80)} in row "
                f"{row + 1}, which is not a finite number; the column is numeric in the training "
                "part."
            )
        numbers[row] = float(points[row])
    return numbers


def _thresholds(numbers: np.ndarray, bits: int) -> Float[np.ndarray, " thresholds"]:
    """Return at most `bits` ascending thresholds, each between some numbers."""
    distinct = np.unique(numbers)[:-1]  # no number is above the largest
    if len(distinct) <= bits:
        return distinct
    # "lower" gives numbers of the column, between which the comparison is the same for any value.
    share = np.arange(1, bits + 1) / (bits + 1)
    thresholds = np.intersect1d(np.quantile(numbers, share, method="lower"), distinct)
    lacking = bits - len(thresholds)
    if lacking:
        rest = np.setdiff1d(distinct, thresholds)
        share = np.arange(1, lacking + 1) / (lacking + 1)
        thresholds = np.union1d(thresholds, np.quantile(rest, share, method="lower"))
    return thresholds

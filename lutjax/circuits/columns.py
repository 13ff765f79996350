"""Table columns as circuit inputs, with one port per column.

A numeric port takes integers in a stated unit, and a categorical port takes category codes. The
circuit compares them with thresholds and codes, so users pass rows without encoding them first. The
description is plain data, stored in ``about["columns"]`` of the circuit.
"""

import dataclasses
import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from lutjax.circuits import _names
from lutjax.circuits.ports import Format, Port, whole_range
from lutjax.files.strict_json import Fields, format_names, format_value

MOST_BITS = 53
"""Maximum bits of a numeric port: float64 and JavaScript represent all such integers."""

USUAL_BITS = 32
"""Maximum bits of a numeric port with a unit chosen from the data decimals."""

MOST_DECIMALS = 320
"""Maximum decimals of a unit, enough for the smallest float64."""

MISSING = -1
"""Part index for the missing-cell test of a column; see `Columns`."""

_ABSENT = 0.05
"""Fraction of missing cells in each column of random rows."""

Value = float | int | str | None
Bit = tuple[int, int]


def _error(column: str, text: str) -> ValueError:
    return ValueError(f"column {format_value(column)}: {text}")


@dataclasses.dataclass(frozen=True)
class Number:
    """Numeric column.

    Attributes:
      name: column name.
      port: port name.
      format: port format.
      decimals: the port value ``n`` represents the number ``n / 10**decimals``.
      thresholds: float64 thresholds in ascending order.
      fill: number that replaces a missing number in comparisons.
      missing: whether missing numbers have a separate code; otherwise they have the code of `fill`.
      least, largest: range of the training data, None if unknown.

    Raises:
      ValueError: the format cannot separate the thresholds, or has no code for missing numbers.

    Example:
      >>> from lutjax.circuits import Format
      >>> from lutjax.circuits.columns import Number
      >>> hours = Number("hours", "hours", Format.parse("int10"), 1, (7.5, 38.0), 38.0, True)
      >>> [hours.code(x) for x in (7.5, 7.51, 40.0, None)], hours.value(76)
      ([75, 76, 400, -512], 7.6)
    """

    name: str
    port: str
    format: Format
    decimals: int
    thresholds: tuple[float, ...]
    fill: float
    missing: bool
    least: float | None = None
    largest: float | None = None

    def __post_init__(self) -> None:
        if self.format.bits > MOST_BITS:
            raise _error(
                self.name, f"format is {self.format}; at most {MOST_BITS} bits are supported."
            )
        first, last = self._range
        levels = self.levels
        apart = all(a < b for a, b in itertools.pairwise(levels))
        if not apart or (levels and not first <= levels[0] <= levels[-1] < last):
            raise _error(
                self.name,
                f"format is {self.format} in units of {self.unit}, "
                "which cannot separate its thresholds. Use more bits, or more fraction bits.",
            )

    # A fraction, so that codes and decimals are compared without rounding.
    @functools.cached_property
    def _ratio(self) -> Fraction:
        ratio: Fraction = Fraction(10) ** -self.decimals / 2**self.format.fraction
        return ratio

    @property
    def unit(self) -> str:
        """Number represented by port value 1, as text."""
        return f"{_float(1, Fraction(10) ** -self.decimals):g}"

    @functools.cached_property
    def _range(self) -> tuple[int, int]:
        """Smallest and largest integer code, excluding the missing code."""
        least, largest = whole_range(self.format)
        # A missing number has the code at one end of the format.
        if self.missing and self.format.signed:
            least += 1
        elif self.missing:
            largest -= 1
        return least, largest

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Largest integer code not above each threshold."""
        return tuple(_level(threshold, self._ratio) for threshold in self.thresholds)

    @property
    def missing_code(self) -> int:
        """Integer code of a missing number."""
        if not self.missing:
            return self._nearest_code(self.fill)
        least, largest = whole_range(self.format)
        return least if self.format.signed else largest

    @property
    def canonical(self) -> tuple[int, ...]:
        """One integer code for each threshold interval, in ascending order."""
        levels = self.levels
        return (*levels, levels[-1] + 1) if levels else (self._range[0],)

    def _nearest_code(self, number: float) -> int:
        """Return the integer code nearest to a number with the same thresholds below it."""
        above = sum(threshold < number for threshold in self.thresholds)
        first, last = self._range
        levels = self.levels
        # Rounding must not move a number across a threshold.
        low = levels[above - 1] + 1 if above else first
        high = levels[above] if above < len(levels) else last
        return min(max(round(Fraction(number) / self._ratio), low), high)

    def encode_integer(self, value: Value) -> int:
        """Return the integer code of a number, or of None if it is missing.

        Raises:
          ValueError: the value is not a finite number.
        """
        if value is None:
            return self.missing_code
        if isinstance(value, str) or not math.isfinite(value):
            raise _error(
                self.name, f"value is {value!r}; expected a finite number, or None if missing."
            )
        return self._nearest_code(float(value))

    def code(self, value: Value) -> int | float:
        """Return the port value of a number; see `encode_integer`."""
        whole = self.encode_integer(value)
        return whole / 2**self.format.fraction if self.format.fraction else whole

    def value(self, code: float | int) -> Value:
        """Return the number represented by a port value, or None if it is missing."""
        whole = int(math.ldexp(code, self.format.fraction)) if self.format.fraction else int(code)
        if self.missing and whole == self.missing_code:
            return None
        return _float(whole, self._ratio)

    def boundaries(self) -> list[int]:
        """Return codes next to thresholds, at both ends of the range, and of a missing number."""
        near = [k + side for k in self.levels for side in (0, 1)]
        return sorted({*near, *self._range, self.missing_code})

    def facts(self) -> dict[str, Any]:
        """Return the JSON description without the format."""
        return {
            **{name: value for name, value in dataclasses.asdict(self).items() if name != "format"},
            "kind": "number",
            "thresholds": list(self.thresholds),
            "codes": list(self.canonical),
            "missing_code": self.missing_code,
        }


@dataclasses.dataclass(frozen=True)
class Category:
    """Categorical column; the code of a category is its index in `values`.

    Attributes:
      name: column name.
      port: port name.
      format: port format.
      values: known categories.
      missing: whether missing cells have a separate code; otherwise they have the code of unknown
          categories.

    Raises:
      ValueError: the format has too few codes, or is not an unsigned integer.

    Example:
      >>> from lutjax.circuits import Format
      >>> from lutjax.circuits.columns import Category
      >>> job = Category("job", "job", Format(2), ("clerk", "farmer"), True)
      >>> [job.code(x) for x in ("clerk", "farmer", "pilot", None)]
      [0, 1, 2, 3]
    """

    name: str
    port: str
    format: Format
    values: tuple[str, ...]
    missing: bool

    def __post_init__(self) -> None:
        most = whole_range(self.format)[1]
        if self.format.signed or self.format.fraction or self.missing_code > most:
            raise _error(
                self.name,
                f"format is {self.format}; it must be an unsigned integer format "
                f"with the codes 0 to {self.missing_code}.",
            )

    @property
    def other_code(self) -> int:
        """Code of an unknown category."""
        return len(self.values)

    @property
    def missing_code(self) -> int:
        """Code of a missing cell."""
        return len(self.values) + self.missing

    def encode_integer(self, value: Value) -> int:
        """Return the code of a category, or of None if it is missing.

        Raises:
          ValueError: the value is not a string.
        """
        if value is None:
            return self.missing_code
        if not isinstance(value, str):
            raise _error(self.name, f"value is {value!r}; expected a string, or None if missing.")
        return self.values.index(value) if value in self.values else self.other_code

    def code(self, value: Value) -> int:
        """Return the code of a category; see `encode_integer`."""
        return self.encode_integer(value)

    def value(self, code: float | int) -> Value:
        """Return the category of a code, None if missing, or an unknown one for another code."""
        if code < len(self.values):
            return self.values[int(code)]
        if self.missing and code == self.missing_code:
            return None
        return next(word for n in itertools.count() if (word := f"other {n}") not in self.values)

    def boundaries(self) -> list[int]:
        """Return all codes with different meanings."""
        return list(range(self.missing_code + 1))

    def facts(self) -> dict[str, Any]:
        """Return the JSON description without the format."""
        return {
            **{name: value for name, value in dataclasses.asdict(self).items() if name != "format"},
            "kind": "category",
            "values": list(self.values),
            "missing_code": self.missing_code,
        }


Column = Number | Category


@dataclasses.dataclass(frozen=True)
class Columns:
    """Table columns, and the bits that a network reads from them.

    Attributes:
      columns: in port order.
      bits: a pair for each bit: a column index, and the index of the threshold that the number
          exceeds, the index of the category, or `MISSING`. A constant bit is
          -1 and its value. Empty if only the columns are known.

    Raises:
      ValueError: two columns share a port, or a bit refers to a missing column, threshold or
          category.

    Example:
      >>> from lutjax.circuits import Format
      >>> from lutjax.circuits.columns import Category, Columns, Number
      >>> age = Number("age", "age", Format.parse("int8"), 0, (30.0, 50.0), 40.0, False)
      >>> job = Category("job", "job", Format(2), ("clerk", "farmer"), True)
      >>> table = Columns((age, job), ((0, 0), (0, 1), (1, 0), (1, 1), (1, -1)))
      >>> codes = table.encode([[30.5, "clerk"], [None, None]])
      >>> {port: numbers.tolist() for port, numbers in codes.items()}
      {'age': [[31], [40]], 'job': [[0], [3]]}
    """

    columns: tuple[Column, ...]
    bits: tuple[Bit, ...] = ()

    def __post_init__(self) -> None:
        ports = [column.port.lower() for column in self.columns]
        if len(set(ports)) < len(ports):
            raise ValueError(
                f"columns have the ports {format_value(ports)}; expected different ports."
            )
        for at, part in self.bits:
            if at < 0 or at >= len(self.columns):
                good = at == -1 and part in (0, 1)
            else:
                column = self.columns[at]
                n = len(column.thresholds if isinstance(column, Number) else column.values)
                good = 0 <= part < n or (part == MISSING and column.missing)
            if not good:
                raise ValueError(f"bits has {[at, part]}, which is no part of a column.")

    @property
    def ports(self) -> tuple[Port, ...]:
        """Input ports of the circuit."""
        return tuple(Port(column.port, 1, column.format) for column in self.columns)

    def encode(self, rows: Sequence[Sequence[Value]]) -> dict[str, Shaped[np.ndarray, "rows 1"]]:
        """Return the port values of rows with a number, string or None (missing) for each column.

        Raises:
          ValueError: a row has the wrong number of cells, or a cell has the wrong type.
        """
        for k, row in enumerate(rows):
            if len(row) != len(self.columns):
                names = format_names([c.name for c in self.columns], 200)
                raise ValueError(
                    f"row {k} has {len(row)} cells; expected {len(self.columns)}: {names}."
                )
        return {
            column.port: np.array([[column.code(row[i])] for row in rows]).reshape(len(rows), 1)
            for i, column in enumerate(self.columns)
        }

    def decode(self, numbers: Sequence[Shaped[np.ndarray, "rows 1"]]) -> list[list[Value]]:
        """Return the rows represented by port values."""
        cells = [
            [column.value(code) for code in np.asarray(codes).ravel().tolist()]
            for column, codes in zip(self.columns, numbers, strict=True)
        ]
        return [list(row) for row in zip(*cells, strict=True)]

    def boundaries(
        self, samples: Sequence[Shaped[np.ndarray, "rows 1"]]
    ) -> list[Int[np.ndarray, "others 1"] | Shaped[np.ndarray, "others 1"]]:
        """Return copies of samples that cover boundary values, one column at a time.

        They cover the codes next to thresholds, all categories, and missing cells.
        """
        n = len(samples[0])
        codes_by_column: list[list[Any]] = [[] for _ in self.columns]
        row = 0
        for changed, column in enumerate(self.columns):
            for whole in column.boundaries():
                for i, codes in enumerate(samples):
                    code = whole / 2**column.format.fraction if column.format.fraction else whole
                    codes_by_column[i].append(code if i == changed else codes[row % n, 0])
                row += 1
        return [np.asarray(codes).reshape(-1, 1) for codes in codes_by_column]

    def random_rows(self, n: int, seed: int = 0) -> list[list[Value]]:
        """Return n random rows.

        They cover numbers slightly beyond the threshold range, all category codes, and missing
        cells.
        """
        draw = np.random.default_rng(seed)
        wholes = []
        for column in self.columns:
            if isinstance(column, Number):
                first, last = column._range
                low, high = column.canonical[0], column.canonical[-1]
                margin = max(1, (high - low) // 8)
                low, high = max(low - margin, first), min(high + margin, last)
                whole_numbers = draw.integers(low, high, n, endpoint=True)
            else:
                whole_numbers = draw.integers(0, column.missing_code, n, endpoint=True)
            absent = draw.random(n) < _ABSENT
            wholes.append(np.where(absent, column.missing_code, whole_numbers))
        codes = []
        for column, whole in zip(self.columns, wholes, strict=True):
            scale = 2**column.format.fraction
            codes.append((whole / scale if scale > 1 else whole)[:, None])
        return self.decode(codes)

    def facts(self) -> list[dict[str, Any]]:
        """Return the value of ``about["columns"]``."""
        return [column.facts() for column in self.columns]

    @classmethod
    def parse(cls, facts: Any, ports: Sequence[Port]) -> "Columns":
        """Parse ``about["columns"]`` for a circuit with these input ports.

        Raises:
          ValueError: the description does not fit the ports; the message names the field.
        """
        if not isinstance(facts, list) or len(facts) != len(ports):
            raise ValueError(
                f"columns is {format_value(facts)}; expected a list of {len(ports)} columns."
            )
        columns = []
        for k, (one, port) in enumerate(zip(facts, ports, strict=True)):
            fields = Fields(f"columns[{k}]")
            column = _column(fields, one, port.format)
            if (column.port, 1) != (port.name, port.count):
                raise ValueError(
                    f"{fields.where}: 'port' is {format_value(column.port)}; "
                    f"the input port is {port.name!r}, with {port.count} numbers."
                )
            for name in ("codes", "missing_code"):
                if (expected := column.facts().get(name)) != one.get(name):
                    raise ValueError(
                        f"{fields.where}: {name!r} is {format_value(one.get(name))}; "
                        f"expected {format_value(expected)}."
                    )
            columns.append(column)
        return cls(tuple(columns))


def circuit_columns(about: Mapping[str, Any], inputs: Sequence[Port]) -> Columns | None:
    """Return the columns of a circuit with these facts and inputs, or None if it takes no rows."""
    facts = about.get("columns")
    return None if facts is None else Columns.parse(facts, inputs)


def _column(fields: Fields, facts: Any, format: Format) -> Column:
    kind, name, port = (fields.field(facts, key, str) for key in ("kind", "name", "port"))
    missing = fields.field(facts, "missing", bool)
    if kind == "category":
        values = fields.field(facts, "values", list)
        if not all(isinstance(value, str) for value in values) or len(set(values)) < len(values):
            raise ValueError(
                f"{fields.where}: 'values' is {format_value(values)}; expected different texts."
            )
        return Category(name, port, format, tuple(values), missing)
    if kind != "number":
        raise ValueError(
            f"{fields.where}: 'kind' is {format_value(kind)}; expected 'number' or 'category'."
        )
    decimals = fields.field(facts, "decimals", int)
    stored = fields.field(facts, "thresholds", list)
    thresholds = [_require_finite(fields, "thresholds", one) for one in stored]
    if abs(decimals) > MOST_DECIMALS or any(a >= b for a, b in itertools.pairwise(thresholds)):
        raise ValueError(
            f"{fields.where}: 'thresholds' must ascend, and 'decimals', {decimals}, "
            f"lie between {-MOST_DECIMALS} and {MOST_DECIMALS}."
        )
    fill = _require_finite(fields, "fill", facts.get("fill"))
    least, largest = (
        None if facts.get(key) is None else _require_finite(fields, key, facts[key])
        for key in ("least", "largest")
    )
    return Number(name, port, format, decimals, tuple(thresholds), fill, missing, least, largest)


def _require_finite(fields: Fields, name: str, value: Any) -> float:
    number = fields.number({name: value}, name)
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"{fields.where}: {name!r} has {format_value(value)}; expected finite numbers."
        )
    return number


def _float(whole: int, ratio: Fraction) -> float:
    """Return an integer code as the nearest float64, the value that parsing its decimals gives."""
    try:
        # A quotient of integers of any size is rounded once, as the parser of decimals rounds.
        return whole * ratio.numerator / ratio.denominator
    except OverflowError:
        return math.copysign(math.inf, whole)


def _level(threshold: float, ratio: Fraction) -> int:
    """Return the largest integer code not above a threshold in float64."""
    level = math.floor(Fraction(threshold) / ratio)
    # The next code may also be on this side: 0.3 parses as a float64 below 3/10.
    return level + (_float(level + 1, ratio) <= threshold)


# ------------------------------------------------------------------------------------------ choices
def number(
    name: str,
    port: str,
    thresholds: Iterable[float],
    fill: float,
    missing: bool,
    *,
    decimals: int | None = None,
    least: float | None = None,
    largest: float | None = None,
    format: Format | None = None,
) -> Number:
    """Return a numeric column in a format that separates all thresholds.

    Args:
      name: see `Number`.
      port: see `Number`.
      thresholds: see `Number`; they may be unordered and repeated.
      fill: see `Number`.
      missing: see `Number`.
      decimals: data decimals; default: the threshold decimals. The unit keeps them if the port
        then has at most `USUAL_BITS` bits.
      least: see `Number`.
      largest: see `Number`.
      format: port format, in column units. Default: the smallest signed integer format.

    Raises:
      ValueError: the given format, or every format up to `MOST_BITS` bits, cannot separate the
        thresholds.

    Example:
      >>> from lutjax.circuits import columns
      >>> hours = columns.number("hours", "hours", [7.5, 38.0], 38.0, True, least=0.0, largest=60.0)
      >>> str(hours.format), hours.decimals
      ('int11', 1)
    """
    ordered = tuple(sorted(set(map(float, thresholds))))

    def make_number(format: Format, decimals: int) -> Number:
        return Number(name, port, format, decimals, ordered, fill, missing, least, largest)

    if format is not None:
        return make_number(format, 0)
    numbers = [*ordered, fill, *(x for x in (least, largest) if x is not None)]
    start = max(map(decimals_of, (*ordered, fill))) if decimals is None else decimals
    # Decimals that float64 noise adds are dropped if all thresholds stay apart without them.
    while start > -MOST_DECIMALS and _bits(numbers, start) > USUAL_BITS:
        start -= 1
    for tried in range(start, MOST_DECIMALS):
        bits = _bits(numbers, tried)
        if bits > MOST_BITS:
            break
        try:
            return make_number(Format(bits, signed=True), tried)
        except ValueError:
            continue
    raise _error(
        name,
        f"integers of at most {MOST_BITS} bits cannot separate its thresholds, "
        "which are too close together.",
    )


def category(name: str, port: str, values: Sequence[str], missing: bool) -> Category:
    """Return a categorical column in the smallest format that has all codes.

    Example:
      >>> from lutjax.circuits import columns
      >>> columns.category("job", "job", ["clerk", "farmer", "nurse"], False).format
      Format(bits=2, fraction=0, signed=False)
    """
    format = Format(max(1, (len(values) + missing).bit_length()))
    return Category(name, port, format, tuple(values), missing)


def _bits(numbers: Sequence[float], decimals: int) -> int:
    """Return the signed bits for numbers in a unit, the code above each, and missing numbers."""
    ratio = Fraction(10) ** -decimals
    largest = max(abs(math.floor(Fraction(x) / ratio)) + 2 for x in numbers)
    return largest.bit_length() + 1


def decimals_of(number: float) -> int:
    """Return the number of decimals in the shortest decimal form of a float64."""
    mantissa, _, exponent = repr(float(number)).partition("e")
    digits = mantissa.partition(".")[2].rstrip("0")
    return max(0, len(digits) - int(exponent or 0))


def port_names(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    """Return port names for columns: valid in Verilog, VHDL, C and C++, and not taken.

    Example:
      >>> from lutjax.circuits.columns import port_names
      >>> port_names(["Größe (m)", "class", "y", "2nd", "size", "Size"], ["y"])
      ['grosse_m', 'class_column', 'y_column', 'column_2nd', 'size', 'size_column']
    """
    # VHDL does not distinguish lower and upper case.
    used = {name.lower() for name in taken}
    ports = []
    for place, name in enumerate(names, 1):
        word = word_of(name) or f"column_{place}"
        if word[0].isdigit():
            word = f"column_{word}"
        numbered = (f"{word}_{n}" for n in itertools.count(2))
        for port in itertools.chain((word, f"{word}_column"), numbered):
            is_bad = _names.explain_bad_port(port) or _names.explain_bad_function(port)
            if port not in used and not is_bad:
                break
        used.add(port)
        ports.append(port)
    return ports


def word_of(text: str) -> str:
    """Reduce a string to lower-case letters, digits and single underscores."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(c for c in plain if not unicodedata.combining(c))
    return re.sub("[^a-z0-9]+", "_", letters)[:40].strip("_")

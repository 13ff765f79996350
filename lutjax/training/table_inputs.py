"""Circuit inputs for table rows, from the encoding of a run and the thresholds of its network."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64, Shaped

from lutjax.circuits import columns
from lutjax.circuits.columns import MISSING, Bit, Column, Columns, Value
from lutjax.circuits.ports import Format
from lutjax.circuits.verilog import CONTROL
from lutjax.training.datasets.columns import Cells, Encoding, Number, Table

TAKEN = ("x", "y", *CONTROL)  # port names unavailable to columns


def columns_of(
    encoding: Encoding,
    thresholds: Shaped[np.ndarray, "features thresholds"] | None,
    format: Format | None = None,
) -> Columns:
    """Return the columns of a table and the bits for the first layer of a network.

    The thresholds are None if the network's features are bits. Without a format, every column gets
    an integer format with a suitable unit.

    Raises:
      ValueError: a format cannot separate the thresholds, or a numeric feature has no thresholds.
    """
    ports = columns.port_names([column.name for column in encoding.columns], TAKEN)
    converted: list[Column] = []
    bits: list[Bit] = []
    feature = 0
    for at, (column, port) in enumerate(zip(encoding.columns, ports, strict=True)):
        n_features = len(column.features)
        rows = None if thresholds is None else thresholds[feature : feature + n_features]
        feature += n_features
        if not isinstance(column, Number):
            converted.append(columns.category(column.name, port, column.values, column.missing))
            parts = [*range(len(column.values)), *([MISSING] if column.missing else [])]
            bits += _flag_bits([(at, part) for part in parts], rows)
            continue
        # An infinite threshold compares nothing: its bit is a constant, for column -1.
        limits = _limits(column, rows)
        known = limits[np.isfinite(limits)]
        number = columns.number(
            *(column.name, port, known.tolist(), column.fill, column.missing),
            decimals=column.digits,
            least=column.least,
            largest=column.largest,
            format=format,
        )
        converted.append(number)
        place = {limit: k for k, limit in enumerate(number.thresholds)}
        bits += [
            (at, place[limit]) if np.isfinite(limit) else (-1, int(limit < 0))
            for limit in limits.tolist()
        ]
        if column.missing:
            bits += _flag_bits([(at, MISSING)], None if rows is None else rows[-1:])
    return Columns(tuple(converted), tuple(bits))


def _flag_bits(flags: Sequence[Bit], thresholds: np.ndarray | None) -> list[Bit]:
    """Return the bits of 0/1 features; thresholds outside of [0, 1) make them constant."""
    if thresholds is None:
        return list(flags)
    return [
        flag if 0 <= t < 1 else (-1, int(t < 0))
        for flag, row in zip(flags, thresholds.tolist(), strict=True)
        for t in row
    ]


def _limits(column: Number, thresholds: np.ndarray | None) -> Float64[np.ndarray, " bits"]:
    """Return the largest float64 for which each bit of a numeric column is 0.

    It is -inf or inf for constant bits.

    Raises:
      ValueError: a numeric feature has no thresholds.
    """
    if column.thresholds is not None and not column.numbers:
        limits = np.asarray(column.thresholds, np.float64)
        if thresholds is None:
            return limits
        flags = _flag_bits([(0, k) for k in range(len(limits))], thresholds[: len(limits)])
        return np.array([limits[k] if at == 0 else (np.inf, -np.inf)[k] for at, k in flags])
    if thresholds is None:
        raise ValueError(f"column {column.name!r} has no thresholds; a circuit needs at least one.")
    n_numbers = len(thresholds) - column.missing
    flat = thresholds[:n_numbers].ravel()
    return _bisect_largest(lambda numbers: column.scale_numbers(numbers) > flat, len(flat))


def _bisect_largest(above: Callable[[np.ndarray], np.ndarray], n: int) -> Float64[np.ndarray, " n"]:
    """Return the largest float64 for which each of n monotone conditions is false.

    It is -inf or inf if there is none.

    Bisection over the ordered float64 values finds the exact boundary in 65 steps, however the
    condition rounds.
    """
    # The bits of nonnegative floats, as integers, have the order of the floats. Python integers
    # (object) avoid overflow in the sum of two places.
    last = int(np.float64(np.finfo(np.float64).max).view(np.int64))
    low, high = np.full(n, -last, object), np.full(n, last, object)

    def floats(places: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = np.abs(places).astype(np.int64).view(np.float64)
        return np.where(places < 0, -sizes, sizes)

    always, never = above(floats(low)), ~above(floats(high))
    for _ in range(65):
        middle = (low + high) // 2
        holds = above(floats(middle))
        low, high = np.where(holds, low, middle), np.where(holds, middle, high)
    largest: np.ndarray = np.where(always, -np.inf, np.where(never, np.inf, floats(low)))
    return largest


def values_of(encoding: Encoding, table: Table) -> list[list[Value]]:
    """Return the rows of a table as numbers, categories, and None for missing cells."""
    cells = [column.parse_cells(table.columns[column.name]) for column in encoding.columns]
    return [list(row) for row in zip(*cells, strict=True)]


def table_of(encoding: Encoding, rows: Sequence[Sequence[Value]], *, name: str) -> Table:
    """Return a table with the rows of `values_of`."""
    cells: dict[str, Cells] = {
        column.name: column.format_cells([row[i] for row in rows])  # type: ignore[misc]
        for i, column in enumerate(encoding.columns)
    }
    return Table(cells, np.full(len(rows), "", np.str_), name)

"""Gates that encode table rows as bits, by threshold comparisons and category codes."""

from collections.abc import Callable, Sequence

from lutjax.circuits import arithmetic
from lutjax.circuits.builder import ONE, ZERO, Builder, Literal
from lutjax.circuits.columns import MISSING, Columns, Number


def bits_of_rows(
    builder: Builder, rows: Columns, numbers: Sequence[list[Literal]]
) -> list[Literal]:
    """Return the network input bits for rows, given the input port literals."""

    def compare_part(at: int, part: int) -> Literal:
        column, number = rows.columns[at], numbers[at]
        if part == MISSING:
            in_two_complement = column.missing_code & ((1 << len(number)) - 1)
            return arithmetic.equal_to_constant(builder, number, in_two_complement)
        if not isinstance(column, Number):
            return arithmetic.equal_to_constant(builder, number, part)
        if column.format.signed:
            return arithmetic.above_signed(builder, number, column.levels[part])
        return arithmetic.above_constant(builder, number, column.levels[part])

    return bits_of_comparisons(builder, rows, compare_part)


def bits_of_comparisons(
    builder: Builder, rows: Columns, compared: Callable[[int, int], Literal]
) -> list[Literal]:
    """Return the network input bits for rows, built from integer comparisons.

    Args:
      compared: returns a comparison literal, given a column index and a part as in `Columns`: the
        integer code is above the threshold level, or equals the code of a category or missing
        cell. It is called at most once per comparison.
    """
    known: dict[tuple[int, int], Literal] = {}

    def read(at: int, part: int) -> Literal:
        if (at, part) not in known:
            known[at, part] = compared(at, part)
        return known[at, part]

    def bit(at: int, part: int) -> Literal:
        if at < 0:
            return ONE if part else ZERO
        column, compared_bit = rows.columns[at], read(at, part)
        if not isinstance(column, Number) or part == MISSING or not column.missing:
            return compared_bit
        # A missing number counts as its fill value, the median of training.
        filled = column.fill > column.thresholds[part]
        # If the code for missing numbers compares like the fill value, no gate is needed.
        if filled == (column.missing_code > column.levels[part]):
            return compared_bit
        if filled:
            return builder.gate([compared_bit, read(at, MISSING)], 0b1110)
        return builder.gate([compared_bit, read(at, MISSING) ^ 1], 0b1000)

    return [bit(at, part) for at, part in rows.bits]

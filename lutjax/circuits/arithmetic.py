"""Sums of bits, comparisons and the first largest number, as gates of a builder.

Numbers are lists of literals, lowest bit first. `Builder.lut` decides how large the tables are: with 2 gates of two inputs,
with 3 full adders, from 4 on counters of that many bits, one table for each bit of the count.
"""

import functools
import heapq
from collections.abc import Sequence

from lutjax.circuits.builder import ONE, ZERO, Builder, Literal


def popcount(builder: Builder, literals: Sequence[Literal]) -> list[Literal]:
    """Return the number of literals that are 1.

    Literals may be repeated, opposite or constant. The number has as many bits as the largest count needs, at least one.

    Example:
      >>> from lutjax.circuits import Builder, arithmetic
      >>> builder = Builder()
      >>> bits = [bit for bit, in builder.input("x", 5)]
      >>> builder.output("y", [arithmetic.popcount(builder, bits)])
      >>> builder.circuit()([[1, 1, 0, 1, 1]])
      array([4])
    """
    constant, terms = _weights(literals)
    return _sum(builder, constant, terms)


def popcounts(
    builder: Builder, groups: Sequence[Sequence[Literal]], *, relative: bool = False
) -> list[list[Literal]]:
    """Return for each class the number of its literals that are 1, all of the same number of bits.

    Args:
      builder: gets the gates.
      groups: for each class its literals.
      relative: whether a constant that all counts contain is left out, so that the numbers compare as the counts do.
    """
    sums = [_weights(literals) for literals in groups]
    least = min((constant for constant, _ in sums), default=0) if relative else 0
    numbers = []
    for constant, terms in sums:
        builder.next_class()
        numbers.append(_sum(builder, constant - least, terms))
    width = max(map(len, numbers), default=0)
    return [number + [ZERO] * (width - len(number)) for number in numbers]


def _weights(literals: Sequence[Literal]) -> tuple[int, list[tuple[Literal, int]]]:
    """A sum as a constant and weights > 0 of literals of different nodes: an opposite pair is 1."""
    count: dict[int, list[int]] = {}
    for literal in literals:
        count.setdefault(literal >> 1, [0, 0])[literal & 1] += 1
    constant, terms = 0, []
    for node, (plus, minus) in count.items():
        if node == 0:
            constant += minus
        else:
            constant += min(plus, minus)
            if plus != minus:
                terms.append((2 * node + (minus > plus), abs(plus - minus)))
    return constant, terms


@functools.cache
def _counter(n: int) -> tuple[int, ...]:
    """Tables of the bits of the count of n bits."""
    return tuple(sum((a.bit_count() >> bit & 1) << a for a in range(1 << n)) for bit in range(n.bit_length()))


def _count(builder: Builder, literals: Sequence[Literal]) -> list[Literal]:
    """Bits of the count of at most `builder.lut` literals, or of 3."""
    if len(literals) == 3 and builder.lut == 2:
        a, b, c = literals
        half = builder.gate([a, b], 0b0110)
        carry = builder.gate([builder.gate([half, c], 0b1000), builder.gate([a, b], 0b1000)], 0b1110)
        return [builder.gate([half, c], 0b0110), carry]
    return [builder.gate(literals, table) for table in _counter(len(literals))]


def _sum(builder: Builder, constant: int, terms: Sequence[tuple[Literal, int]]) -> list[Literal]:
    """Bits of a weighted sum; the earliest bits of a column are added first."""
    width = max((constant + sum(weight for _, weight in terms)).bit_length(), 1)
    columns: list[list[tuple[int, Literal]]] = [[] for _ in range(width)]

    def put(k: int, literal: Literal) -> None:
        if literal != ZERO and k < width:  # beyond the width bits are always 0
            heapq.heappush(columns[k], (builder.level(literal), literal))

    for literal, weight in [(ONE, constant), *terms]:
        for k in range(weight.bit_length()):
            if weight >> k & 1:
                put(k, literal)
    for k, column in enumerate(columns):
        while len(column) > 1:
            size = min(len(column), max(builder.lut, 3))
            earliest = [heapq.heappop(column)[1] for _ in range(size)]
            for place, bit in enumerate(_count(builder, earliest), k):
                put(place, bit)
    return [column[0][1] if column else ZERO for column in columns]


def above_constant(builder: Builder, bits: Sequence[Literal], k: int, *, signed: bool = False) -> Literal:
    """Return whether a number is greater than a whole number k, which may lie beyond the range of the number.

    Args:
      builder: gets the gates.
      bits: of the number.
      k: any whole number.
      signed: whether the number is in two's complement.
    """
    bits = list(bits)
    if signed:  # adding half of the range makes the least number 0
        bits[-1] ^= 1
        k += 1 << len(bits) - 1
    if k < 0:
        return ONE
    above = ZERO
    if k >> len(bits):
        return above
    for i, bit in enumerate(bits):
        above = builder.gate([bit, above], 0b1000 if k >> i & 1 else 0b1110)
    return above


def at_least(builder: Builder, a: Sequence[Literal], b: Sequence[Literal]) -> Literal:
    """Return whether a >= b, for unsigned numbers of the same number of bits."""
    # For runs of bits: (a > b, a >= b); of two runs the higher decides unless its bits are equal.
    runs = [(builder.gate([x, y], 0b0010), builder.gate([x, y], 0b1011)) for x, y in zip(a, b, strict=True)]
    while len(runs) > 1:
        pairs = zip(runs[::2], runs[1::2], strict=False)
        joined = [tuple(_either(builder, high, low) for low in lows) for lows, high in pairs]
        runs = [(x, y) for x, y in joined] + runs[len(runs) // 2 * 2 :]
    return runs[0][1] if runs else ONE


def _either(builder: Builder, high: tuple[Literal, Literal], low: Literal) -> Literal:
    """Above, or at least and what the lower bits say."""
    above, least = high
    if builder.lut == 2:
        return builder.gate([above, builder.gate([least, low], 0b1000)], 0b1110)
    return builder.gate([above, least, low], 0b11101010)


def select(builder: Builder, a: Literal, b: Literal, first: Literal) -> Literal:
    """Return a where `first` is 1, else b."""
    if builder.lut == 2:
        return builder.gate([builder.gate([first, a], 0b1000), builder.gate([first, b], 0b0100)], 0b1110)
    return builder.gate([a, b, first], 0b10101100)


def argmax(builder: Builder, numbers: Sequence[Sequence[Literal]]) -> list[Literal]:
    """Return the index of the first largest of unsigned numbers of the same number of bits.

    The index has ``max(1, (len(numbers) - 1).bit_length())`` bits.

    Raises:
      ValueError: no numbers, or numbers of different lengths.
    """
    sizes = sorted({len(number) for number in numbers})
    if len(sizes) != 1:
        raise ValueError(
            f"argmax: numbers have {sizes} bits; expected at least one number, and the same bits in each."
        )
    width = max(1, (len(numbers) - 1).bit_length())
    rows = [(list(number), [i >> k & 1 for k in range(width)]) for i, number in enumerate(numbers)]
    while len(rows) > 1:
        winners = []
        for (a, i), (b, j) in zip(rows[::2], rows[1::2], strict=False):
            first = at_least(builder, a, b)
            winners.append(
                tuple(
                    [select(builder, x, y, first) for x, y in zip(u, v, strict=True)]
                    for u, v in ((a, b), (i, j))
                )
            )
        rows = [(n, i) for n, i in winners] + rows[len(rows) // 2 * 2 :]
    return rows[0][1]

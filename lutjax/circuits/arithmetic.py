"""Bit sums, comparisons and argmax, built from gates.

Numbers are literal lists, lowest bit first. `Builder.lut` sets the table size: 2 uses two-input
gates, 3 full adders, and 4 or more counters over that number of bits, with one table for each
count bit.
"""

import collections
import functools
import heapq
import itertools
from collections.abc import Sequence

from lutjax.circuits import truth
from lutjax.circuits._joint_counts import Sum, join_sums
from lutjax.circuits.builder import ONE, ZERO, Builder, Literal


def popcount(builder: Builder, literals: Sequence[Literal]) -> list[Literal]:
    """Return the number of literals equal to 1.

    Literals may be repeated, opposite or constant. The result has as many bits as the largest
    count needs, at least one.

    Example:
      >>> from lutjax.circuits import Builder, arithmetic
      >>> builder = Builder()
      >>> bits = [bit for bit, in builder.input("x", 5)]
      >>> builder.output("y", [arithmetic.popcount(builder, bits)])
      >>> builder.circuit()([[1, 1, 0, 1, 1]])
      array([4])
    """
    return _sum(builder, _weights(literals), 0)


def popcounts(
    builder: Builder, groups: Sequence[Sequence[Literal]], *, relative: bool = False
) -> list[list[Literal]]:
    """Return the number of 1 literals for each class, all with the same number of bits.

    With 6-input tables (`Builder.lut`), bits are counted together with their source gates if this
    saves tables.

    Args:
      builder: receives the gates.
      groups: literals for each class.
      relative: whether to drop a constant shared by all counts; comparisons stay valid.
    """
    sums = [_weights(literals) for literals in groups]
    if builder.lut == 6 and builder.simplify:
        sums = join_sums(builder, sums)
    least = min((each.constant for each in sums), default=0) if relative else 0
    numbers = []
    for each in sums:
        builder.next_class()
        numbers.append(_sum(builder, each, least))
    width = max(map(len, numbers), default=0)
    return [number + [ZERO] * (width - len(number)) for number in numbers]


def _weights(literals: Sequence[Literal]) -> Sum:
    """Sum distinct nodes: repeated literals get a weight, an opposite pair is 1."""
    # Two equal bits are one bit of weight 2, so `x + x` needs no adder; x + not x is always 1.
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
    return Sum(constant, tuple(terms))


def _sum(builder: Builder, weighted: Sum, less: int) -> list[Literal]:
    """Return the bits of a weighted sum minus a constant; a column's earliest bits come first."""
    constant, terms = weighted.constant - less, weighted.build_gates(builder)
    width = max((constant + sum(weight for _, weight in terms)).bit_length(), 1)
    columns: list[list[tuple[int, Literal]]] = [[] for _ in range(width)]

    def put(k: int, literal: Literal) -> None:
        # Bits beyond the width are always 0: the sum never reaches them.
        if literal != ZERO and k < width:
            heapq.heappush(columns[k], (builder.level(literal), literal))

    for literal, weight in [(ONE, constant), *terms]:
        for k in range(weight.bit_length()):
            if weight >> k & 1:
                put(k, literal)
    if builder.lut < 4:
        for k, column in enumerate(columns):
            while len(column) > 1:
                # The earliest bits first keep the longest path short.
                earliest = [heapq.heappop(column)[1] for _ in range(min(3, len(column)))]
                for place, bit in enumerate(_add(builder, earliest), k):
                    put(place, bit)
    else:
        k = 0
        while k < width:
            # Replan after each step, because bits may turn out constant.
            step = _next_counter(tuple(map(len, columns[k:])), builder.lut)
            if step is None:
                k += 1
                continue
            low, high = (
                [heapq.heappop(columns[k + i])[1] for _ in range(n)] for i, n in enumerate(step)
            )
            for place, table in enumerate(_counter(*step)):
                put(k + place, builder.gate([*low, *high], table))
    return [column[0][1] if column else ZERO for column in columns]


def _add(builder: Builder, literals: Sequence[Literal]) -> list[Literal]:
    if len(literals) == 3 and builder.lut == 2:
        a, b, c = literals
        half = builder.gate([a, b], 0b0110)
        either, both = builder.gate([half, c], 0b1000), builder.gate([a, b], 0b1000)
        carry = builder.gate([either, both], 0b1110)
        return [builder.gate([half, c], 0b0110), carry]
    return [builder.gate(literals, table) for table in _counter(len(literals))]


@functools.cache
def _counter(n: int, twos: int = 0) -> tuple[int, ...]:
    """Return the output tables for the sum of n bits with weight 1, then bits with weight 2."""
    addresses = range(1 << (n + twos))
    sums = [(a & (1 << n) - 1).bit_count() + 2 * (a >> n).bit_count() for a in addresses]
    bits = range((n + 2 * twos).bit_length())
    return tuple(sum((s >> bit & 1) << a for a, s in enumerate(sums)) for bit in bits)


_MANY = 10  # above this column size, add some bits at once without searching for the best step


def _next_counter(heights: tuple[int, ...], lut: int) -> tuple[int, int] | None:
    """Return the bits to add next from the first two columns, or None if the first has one bit.

    Sums have no bits beyond the last of the column `heights`; at most `lut` bits are added at once.
    """
    if heights[0] < 2:
        return None
    if heights[0] > _MANY:
        return _counter_width(lut), 0
    return _fewest_tables(heights, lut)[1]


def _counter_width(lut: int) -> int:
    """Return the counter width with the fewest tables per bit; a full adder beats 4 to 3."""
    return 3 if lut == 4 else lut


@functools.lru_cache(maxsize=1 << 16)
def _fewest_tables(heights: tuple[int, ...], lut: int) -> tuple[int, tuple[int, int] | None]:
    """Return the tables required until every column has one bit, and the first step."""
    if not heights:
        return 0, None
    if heights[0] < 2:
        return _fewest_tables(heights[1:], lut)[0], None
    if heights[0] > _MANY:
        steps = [(_counter_width(lut), 0)]
    else:
        limit = heights[1] if len(heights) > 1 else 0
        widths = range(min(lut, heights[0]), 1, -1)
        steps = [(n, twos) for n in widths for twos in range(min(2, lut - n, limit) + 1)]
    best: tuple[int, tuple[int, int] | None] | None = None
    for n, twos in steps:
        new = list(heights)
        new[0] -= n
        if twos:
            new[1] -= twos
        bits = min((n + 2 * twos).bit_length(), len(heights))
        for place in range(bits):
            new[place] += 1
        cost = bits + _fewest_tables(tuple(new), lut)[0]
        if best is None or cost < best[0]:
            best = cost, (n, twos)
    assert best is not None
    return best


def above_constant(
    builder: Builder, bits: Sequence[Literal], k: int, *, signed: bool = False
) -> Literal:
    """Compare a number with an integer k: number > k. k may be out of range.

    Args:
      builder: receives the gates.
      bits: number to compare.
      k: any integer.
      signed: whether the number is in two's complement.
    """
    bits = list(bits)
    # Adding half of the range maps the minimum to 0.
    if signed:
        bits[-1] ^= 1
        k += 1 << len(bits) - 1
    if k < 0:
        return ONE
    if k >> len(bits):
        return ZERO
    if builder.lut < 4:
        return _compare_by_gates(builder, bits, k)
    # Reduce the high bits to one bit if k has only zeros or only ones there: thresholds share it.
    size = builder.lut
    split = size - 1
    high, high_k = bits[split:], k >> split
    if len(bits) > size and high_k in (0, (1 << len(high)) - 1):
        decided = _tree(builder, high, any_of=not high_k)
        bits, k = [*bits[:split], decided], (k & (1 << split) - 1) | (1 << split if high_k else 0)
    above = ZERO
    while bits:
        n = min(size if above == ZERO else split, len(bits))
        limit = k & (1 << n) - 1
        greater = sum(1 << a for a in range(limit + 1, 1 << n))
        above = builder.gate([*bits[:n], above], greater | (greater | 1 << limit) << (1 << n))
        bits, k = bits[n:], k >> n
    return above


def above_signed(builder: Builder, bits: Sequence[Literal], k: int) -> Literal:
    """Compare a two's complement number with k in range; equal signs share more gates."""
    *low, sign = bits
    if not low:
        return above_constant(builder, bits, k, signed=True)
    # With equal signs, the lower bits compare as unsigned numbers; else the sign decides.
    above = above_constant(builder, low, k if k >= 0 else k + (1 << len(low)))
    return builder.gate([above, sign ^ 1], 0b1000 if k >= 0 else 0b1110)


def equal_to_constant(builder: Builder, bits: Sequence[Literal], code: int) -> Literal:
    """Compare an unsigned number with a constant for equality."""
    if code >> len(bits):
        return ZERO
    return _tree(builder, [bit ^ (code >> k & 1) ^ 1 for k, bit in enumerate(bits)], any_of=False)


def _compare_by_gates(builder: Builder, bits: Sequence[Literal], k: int) -> Literal:
    """Compare number > k by small gates; the highest bits are shared between many k."""
    run = len(bits)
    one = k >> run - 1 & 1
    while run and k >> run - 1 & 1 == one:
        run -= 1
    above = ZERO
    for i, bit in enumerate(bits[:run]):
        above = builder.gate([bit, above], 0b1000 if k >> i & 1 else 0b1110)
    decided = _tree(builder, bits[run:], any_of=not one)
    return builder.gate([decided, above], 0b1000 if one else 0b1110)


def _tree(builder: Builder, bits: Sequence[Literal], *, any_of: bool) -> Literal:
    queue, size = collections.deque(bits), builder.lut
    while len(queue) > 1:
        some = [queue.popleft() for _ in range(min(size, len(queue)))]
        full = truth.FULL[len(some)]
        queue.append(builder.gate(some, full ^ 1 if any_of else full ^ full >> 1))
    return queue[0]


def greater_equal(builder: Builder, a: Sequence[Literal], b: Sequence[Literal]) -> Literal:
    """Compare unsigned numbers of equal width: a >= b."""
    if builder.lut >= 5:
        return _compare_runs(builder, a, b)
    # Bit runs: (a > b, a >= b). The higher of two runs decides unless its bits are equal.
    runs = [
        (builder.gate([x, y], 0b0010), builder.gate([x, y], 0b1011))
        for x, y in zip(a, b, strict=True)
    ]
    while len(runs) > 1:
        pairs = zip(runs[::2], runs[1::2], strict=False)
        joined = [
            (_combine_runs(builder, high, low[0]), _combine_runs(builder, high, low[1]))
            for low, high in pairs
        ]
        runs = joined + runs[len(runs) // 2 * 2 :]
    return runs[0][1] if runs else ONE


def _combine_runs(builder: Builder, high: tuple[Literal, Literal], low: Literal) -> Literal:
    """Combine two run comparisons: the lower run decides if the higher bits are equal."""
    above, least = high
    if builder.lut == 2:
        return builder.gate([above, builder.gate([least, low], 0b1000)], 0b1110)
    return builder.gate([above, least, low], 0b11101010)


def _compare_runs(builder: Builder, a: Sequence[Literal], b: Sequence[Literal]) -> Literal:
    """Compare a >= b from the lowest bits on, with as many bit pairs per table as possible."""
    result, at = ONE, 0
    while at < len(a):
        # The first table has no comparison of lower bits to read, and takes an input more.
        n = min((builder.lut - (result != ONE)) // 2, len(a) - at)
        read = [*a[at : at + n], *b[at : at + n], result]
        result = builder.gate(read, _run_at_least(n))
        at += n
    return result


@functools.cache
def _run_at_least(n: int) -> int:
    """Table over n bits from a, n bits from b, and the comparison of the lower bits."""
    ones = (1 << n) - 1
    return sum(((x & ones) + (x >> 2 * n) > x >> n & ones) << x for x in range(1 << (2 * n + 1)))


def select(builder: Builder, a: Literal, b: Literal, first: Literal) -> Literal:
    """Return a if `first` is 1, else b."""
    if builder.lut == 2:
        selected_a, selected_b = builder.gate([first, a], 0b1000), builder.gate([first, b], 0b0100)
        return builder.gate([selected_a, selected_b], 0b1110)
    return builder.gate([a, b, first], 0b10101100)


# Order of three numbers: bits a, b, c, then whether a >= b, a >= c and b >= c.
_OF_THREE = truth.from_function(lambda a, b, c, ab, ac, bc: a if ab and ac else b if bc else c, 6)


def argmax(builder: Builder, numbers: Sequence[Sequence[Literal]]) -> list[Literal]:
    """Return the index of the first maximum among unsigned numbers of equal width.

    The index has ``max(1, (len(numbers) - 1).bit_length())`` bits. Numbers are compared in pairs,
    or in threes with 6-input tables.

    Raises:
      ValueError: no numbers, or different widths.

    Example:
      >>> from lutjax.circuits import Builder, Format, arithmetic
      >>> builder = Builder()
      >>> numbers = builder.input("x", 3, Format.parse("uint4"))
      >>> builder.output("y", [arithmetic.argmax(builder, numbers)])
      >>> builder.circuit()([[7, 9, 9], [3, 2, 1]])
      array([1, 0])
    """
    sizes = sorted({len(number) for number in numbers})
    if len(sizes) != 1:
        raise ValueError(f"argmax: numbers have {sizes} bits; expected numbers of one width.")
    width = max(1, (len(numbers) - 1).bit_length())
    # Each row is a number with the bits of its index, which are constants: simplification removes
    # the gates that select equal ones.
    rows = [[*number, *(i >> k & 1 for k in range(width))] for i, number in enumerate(numbers)]
    # Six inputs hold one bit of three numbers and the three comparisons of their order.
    at_once = 3 if builder.lut == 6 else 2
    while len(rows) > 1:
        rows = [
            _first_largest(builder, rows[k : k + at_once], sizes[0])
            for k in range(0, len(rows), at_once)
        ]
    return rows[0][sizes[0] :]


def _first_largest(builder: Builder, rows: Sequence[list[Literal]], bits: int) -> list[Literal]:
    """Return the first of up to three rows with the maximum in its leading bits."""
    if len(rows) == 1:
        return rows[0]
    if len(rows) == 2:
        a, b = rows
        first = greater_equal(builder, a[:bits], b[:bits])
        return [select(builder, x, y, first) for x, y in zip(a, b, strict=True)]
    pairs = [greater_equal(builder, x[:bits], y[:bits]) for x, y in itertools.combinations(rows, 2)]
    return [builder.gate([*column, *pairs], _OF_THREE) for column in zip(*rows, strict=True)]

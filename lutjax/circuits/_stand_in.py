"""Stand-in, until the arithmetic of circuits is merged."""

from collections.abc import Sequence

from lutjax.circuits.builder import ONE, ZERO, Builder, Literal


def above_constant(builder: Builder, bits: Sequence[Literal], k: int, signed: bool = False) -> Literal:
    low = -(1 << len(bits) - 1) if signed else 0
    k, bits = k - low, list(bits)
    if k < 0:
        return ONE
    if k >= (1 << len(bits)) - 1:
        return ZERO
    if signed:
        bits[-1] ^= 1
    above = ZERO
    for i, x in enumerate(bits):
        above = builder.gate([x, above], 0b1000 if k >> i & 1 else 0b1110)
    return above


def popcount(builder: Builder, literals: Sequence[Literal]) -> list[Literal]:
    columns = [list(literals)]
    out = []
    for column in columns:
        while len(column) > 1:
            a, b, c = (column.pop(0) if column else ZERO for _ in range(3))
            if len(columns) == len(out) + 1:
                columns.append([])
            columns[len(out) + 1].append(builder.gate([a, b, c], 0b11101000))
            column.append(builder.gate([a, b, c], 0b10010110))
        out.append(column[0] if column else ZERO)
    return out


def argmax(builder: Builder, numbers: Sequence[Sequence[Literal]]) -> list[Literal]:
    width = (len(numbers) - 1).bit_length()
    best, label = list(numbers[0]), [ZERO] * width
    for k, number in enumerate(numbers[1:], 1):
        above = ZERO
        for a, b in zip(number, best, strict=True):
            above = builder.gate([a, b, above], 0b10110010)
        best = [builder.gate([a, b, above], 0b10101100) for a, b in zip(number, best, strict=True)]
        label = [builder.gate([above, x], 0b1110 if k >> i & 1 else 0b0100) for i, x in enumerate(label)]
    return label

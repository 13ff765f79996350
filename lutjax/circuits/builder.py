"""Circuits made gate by gate."""

from collections.abc import Mapping, Sequence
from typing import Any

from lutjax.circuits.circuit import Circuit, Format, Port

Literal = int
ZERO, ONE = 0, 1


class Builder:
    """Makes a circuit gate by gate, simplified as gates come: literals in, literals out.

    Args:
      simplify: whether gates are simplified; else every gate is kept as it is given.
      merge: a gate reads through its fan-in where that leaves it at most so many inputs.
    """

    def __init__(self, *, simplify: bool = True, merge: int = 3):
        self.simplify, self.merge = simplify, merge
        self.inputs: list[Port] = []
        self.fanins: list[tuple[int, ...]] = []
        self.tables: list[int] = []
        self.outputs: list[tuple[Port, list[Literal]]] = []
        self.parts: list[tuple[str, int]] = []  # name, and gates before it
        self._known: dict[tuple[tuple[Literal, ...], int], int] = {}

    def input(self, name: str, count: int = 1, format: Format = Format()) -> list[list[Literal]]:  # noqa: B008
        """Declare an input port, before the first gate; return the literals of its numbers, lowest bit first."""
        first = 1 + sum(port.n_bits for port in self.inputs)
        self.inputs.append(Port(name, count, format))
        bits = [2 * (first + k) for k in range(count * format.bits)]
        return [bits[k : k + format.bits] for k in range(0, len(bits), format.bits)]

    def part(self, name: str) -> None:
        """Name the gates that follow."""
        self.parts.append((name, len(self.tables)))

    def gate(self, literals: Sequence[Literal], table: int) -> Literal:
        """Return the literal of a table over literals."""
        key = tuple(literals), table
        if key not in self._known:
            for k, literal in enumerate(literals):
                if literal & 1:  # read as it is: swap the halves of the table
                    table = sum((table >> (a ^ 1 << k) & 1) << a for a in range(1 << len(literals)))
            self.fanins.append(tuple(literal >> 1 for literal in literals))
            self.tables.append(table)
            self._known[key] = sum(port.n_bits for port in self.inputs) + len(self.tables)
        return 2 * self._known[key]

    def output(self, name: str, numbers: Sequence[Sequence[Literal]], format: Format | None = None) -> None:
        """Declare an output port: the literals of its numbers, lowest bit first."""
        format = format or Format(len(numbers[0]))
        self.outputs.append((Port(name, len(numbers), format), [k for number in numbers for k in number]))

    def circuit(self, about: Mapping[str, Any] | None = None) -> Circuit:
        """Return the circuit of what the outputs read."""
        ends = [start for _, start in self.parts[1:]] + [len(self.tables)]
        return Circuit(
            inputs=tuple(self.inputs),
            outputs=tuple(port for port, _ in self.outputs),
            fanins=tuple(self.fanins),
            tables=tuple(self.tables),
            literals=tuple(k for _, literals in self.outputs for k in literals),
            parts=tuple((name, end - start) for (name, start), end in zip(self.parts, ends, strict=True)),
            about=dict(about or {}),
        )

"""AND-inverter graphs, as in AIGER and ABC, and graphs with AND and XOR nodes."""

import functools
import itertools
from collections.abc import Sequence

from lutjax.circuits import truth
from lutjax.circuits.circuit import Circuit, alive_gates, walk_literals


def and_graph(circuit: Circuit) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the AND nodes and output literals of a circuit.

    Equal nodes are merged, and an XOR takes three nodes. Only nodes required by the outputs are
    kept.

    Returns:
      The two literals of each AND node, larger first, and the output literals. Literals follow
      AIGER: ``2 * variable``, plus one if inverted. Variable 0 is the constant 0, followed by
      the input bits and the AND nodes.
    """
    return _build(circuit, Graph(circuit.n_inputs))


def operations(circuit: Circuit) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the AND and XOR operations and output literals of a circuit, as `and_graph`.

    A node with the smaller literal first is an XOR.
    """
    return _build(circuit, Graph(circuit.n_inputs, xors=True))


def _build(circuit: Circuit, graph: "Graph") -> tuple[list[tuple[int, int]], list[int]]:
    return graph.compact(walk_literals(circuit, range(0, 2 * circuit.first_gate, 2), graph.table))


class Graph:
    """Deduplicated AND nodes; with `xors` also XOR nodes, with the smaller literal first."""

    def __init__(self, n_inputs: int, *, xors: bool = False):
        self.first = 1 + n_inputs
        self.xors = xors
        self.ands: list[tuple[int, int]] = []
        self.known: dict[tuple[int, int], int] = {}

    def conjunction(self, a: int, b: int) -> int:
        """Return the literal of ``a & b``."""
        if a < b:
            a, b = b, a
        if b < 2:
            return a if b else 0
        if a ^ b < 2:
            return a if a == b else 0
        return self._node(a, b)

    def _node(self, a: int, b: int) -> int:
        literal = self.known.get((a, b))
        if literal is None:
            literal = self.known[a, b] = 2 * (self.first + len(self.ands))
            self.ands.append((a, b))
        return literal

    def disjunction(self, a: int, b: int) -> int:
        """Return the literal of ``a | b``."""
        return self.conjunction(a ^ 1, b ^ 1) ^ 1

    def difference(self, a: int, b: int) -> int:
        """Return XOR, reusing existing AND nodes from either decomposition."""
        if self.xors:
            # Inversions move to the output, so that equal XORs of inverted literals are one node.
            inverted = (a ^ b) & 1
            a, b = sorted((a & ~1, b & ~1))
            return (self._node(a, b) if 0 < a < b else a ^ b) ^ inverted
        # Two decompositions with three nodes: through a & b and ~a & ~b, or a & ~b and ~a & b.
        both, neither = (max(a, b), min(a, b)), (max(a ^ 1, b ^ 1), min(a ^ 1, b ^ 1))
        if both in self.known or neither in self.known:
            return self.disjunction(self.conjunction(a, b), self.conjunction(a ^ 1, b ^ 1)) ^ 1
        return self.disjunction(self.conjunction(a, b ^ 1), self.conjunction(a ^ 1, b))

    def two_input_table(self, a: int, b: int, table: int) -> int:
        """Return a table over two literals."""
        if table in (0b0110, 0b1001):
            return self.difference(a, b) ^ (table & 1)
        if table in (0b1010, 0b0101):
            return a ^ (table & 1)
        if table in (0b1100, 0b0011):
            return b ^ (table & 1)
        if table in (0b0000, 0b1111):
            return table & 1
        inverted = table.bit_count() == 3
        if inverted:
            table ^= 0b1111
        at = table.bit_length() - 1
        return self.conjunction(a ^ (~at & 1), b ^ (~at >> 1 & 1)) ^ inverted

    def table(self, literals: Sequence[int], table: int) -> int:
        """Return a table over literals, decomposed by `_decompose`."""
        n = len(literals)
        kind, i, j, first, second = _decompose(table, n)[1]
        if kind == "constant":
            return first
        x = literals[i]
        if kind == "input":
            return x ^ first
        # The table depends on inputs i and j only through a two-input table.
        if kind == "pair":
            joined = self.two_input_table(x, literals[j], first)
            others = [*literals[:i], *literals[i + 1 : j], *literals[j + 1 :]]
            return self.table([*others, joined], second)
        rest = [*literals[:i], *literals[i + 1 :]]
        low = self.table(rest, first)
        if kind == "difference":
            return self.difference(low, self.conjunction(x, self.table(rest, second)))
        high = self.table(rest, second)
        if kind == "rising":  # low <= high
            return self.disjunction(low, self.conjunction(x, high))
        if kind == "falling":
            return self.disjunction(high, self.conjunction(x ^ 1, low))
        return self.disjunction(self.conjunction(x, high), self.conjunction(x ^ 1, low))

    def compact(self, outputs: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the renumbered nodes required by the outputs, and the outputs."""
        needed = alive_gates(self.first, [(a >> 1, b >> 1) for a, b in self.ands], outputs)
        new = list(range(self.first))
        count = itertools.count(self.first)
        new += [next(count) if is_needed else 0 for is_needed in needed]
        ands = [
            (2 * new[a >> 1] | a & 1, 2 * new[b >> 1] | b & 1)
            for (a, b), is_needed in zip(self.ands, needed, strict=True)
            if is_needed
        ]
        return ands, [2 * new[literal >> 1] | literal & 1 for literal in outputs]


_Step = tuple[str, int, int, int, int]  # kind, inputs i and j, and two tables or a bit


@functools.lru_cache(maxsize=1 << 18)
def _decompose(table: int, n: int) -> tuple[int, _Step]:
    """Count the AND nodes of a table of n inputs without sharing, and select its decomposition."""
    read = truth.support(table, n)
    if not read:
        return 0, ("constant", 0, 0, table & 1, 0)
    if len(read) == 1:
        return 0, ("input", read[0], 0, table & 1, 0)
    for i, j in itertools.combinations(read, 2):
        if pair := _pair(table, n, i, j):
            inner, outer = pair
            cost = (3 if inner == 0b0110 else 1) + _decompose(outer, n - 1)[0]
            return cost, ("pair", i, j, inner, outer)
    splits = [(i, truth.cofactor(table, n, i, 0), truth.cofactor(table, n, i, 1)) for i in read]
    # Exhaustive search is too slow: prefer small, unbalanced halves, which need few nodes.
    if len(read) > 4:
        splits = [min(splits, key=lambda s: sum(_size(t, n - 1) for t in s[1:]))]
    return min(_split(i, low, high, n - 1) for i, low, high in splits)


def _size(table: int, n: int) -> float:
    ones = table.bit_count() / (1 << n)
    return len(truth.support(table, n)) + min(ones, 1 - ones)


def _split(i: int, low: int, high: int, n: int) -> tuple[int, _Step]:
    costs = _decompose(low, n)[0], _decompose(high, n)[0]
    if not low & ~high:
        kind, extra = "rising", 2
    elif not high & ~low:
        kind, extra = "falling", 2
    else:
        kind, extra = "choice", 3
    selected = extra + sum(costs), (kind, i, 0, low, high)
    cost = 4 + costs[0] + _decompose(low ^ high, n)[0]
    return min(selected, (cost, ("difference", i, 0, low, low ^ high)))


def _pair(table: int, n: int, i: int, j: int) -> tuple[int, int] | None:
    """Decompose a table through a two-input table over i < j, if possible.

    The result is the inner table, and the outer table over the other inputs followed by the inner
    output.
    """
    low = truth.LOW[n][i] & truth.LOW[n][j]
    quarters = [table >> (((a & 1) << i) + ((a >> 1) << j)) & low for a in range(4)]
    # Inputs i and j select one of four tables over the other inputs. The table has such a
    # decomposition if only two of the four differ.
    zero = quarters[0]
    others = {q for q in quarters if q != zero}
    if len(others) != 1:
        return None
    inner = sum((q != zero) << a for a, q in enumerate(quarters))
    at = inner.bit_length() - 1
    zero, one = (
        truth.cofactor(truth.cofactor(table, n, j, a >> 1), n - 1, i, a & 1) for a in (0, at)
    )
    return inner, zero | one << (1 << (n - 2))

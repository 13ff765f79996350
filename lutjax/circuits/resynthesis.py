"""Circuit minimization by a randomized search over exhaustive truth tables.

A gate output is free for inputs that do not affect the circuit outputs. A gate, or a gate with its
single-reader fan-in, can therefore be rebuilt from any nodes outside its fan-out if the circuit
outputs are unchanged. The search does so at random gates if the circuit does not grow, and
occasionally accepts a small growth to escape local minima.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from lutjax.circuits.ands import Graph, and_graph, operations
from lutjax.circuits.builder import ZERO, Builder, add_inputs, add_outputs
from lutjax.circuits.circuit import Circuit

MOST_INPUTS = 12
"""Maximum circuit inputs: each node stores its outputs for all input combinations."""

GOALS = ("gates", "ands")

_DIVISORS = 96  # maximum candidate nodes for a rebuilt gate
_WORK = 1e11  # products for an effort of 1
# Sampled inputs of each kind for the gate search, before candidates are checked on all inputs.
_SAMPLES = 64
_OVERHEAD = 300_000  # setup cost of a search, in products
_AT_ONCE = 6  # maximum replacements tried in a step
_SEARCHES = 30  # of one step, at most
# Maximum growth beyond the smallest circuit, and the frequency of such changes.
_UPHILL, _RATE = 2, 0.2
_PATIENCE = 500  # steps per node without improvement before the search ends
_AND, _XOR = 0b1000, 0b0110

_Gate = tuple[int, int, int]  # two nodes, and the table of both


def resynthesize(
    circuit: Circuit, goal: str = "gates", *, effort: float | int = 1.0, seed: int = 0
) -> Circuit:
    """Return an equivalent two-input-gate circuit, minimized by a search.

    The search starts from the circuit and changes random gates without changing any output. It is
    deterministic for given arguments. Prove the result by `lutjax.circuits.abc.cec`, or
    exhaustively.

    Args:
      circuit: circuit with at most 12 inputs. Parts are lost.
      goal: ``"gates"`` minimizes two-input gates of any kind, ``"ands"`` AND nodes, with three per
        XOR.
      effort: search effort; 1 takes at most about 20 seconds on one core, for any circuit.
      seed: random seed.

    Returns:
      The smallest circuit found, or the given one if it has no more gates or AND nodes.

    Raises:
      ValueError: too many inputs, an unknown goal, or a nonpositive effort.

    Example:
      >>> from lutjax import circuits
      >>> builder = circuits.Builder(merge=2)
      >>> (a,), (b,), (c,) = builder.input("x", 3)
      >>> least = builder.gate([builder.gate([a, b], 0b1000), c], 0b1000)
      >>> most = builder.gate([builder.gate([a, b], 0b1110), c], 0b1110)
      >>> all_equal = builder.gate([least, most ^ 1], 0b1110)
      >>> builder.output("y", [[all_equal]])
      >>> circuit = builder.circuit()
      >>> smaller = circuits.resynthesize(circuit, effort=0.01)
      >>> answers = [smaller([[a, a, c]]).item() for a, c in ((0, 0), (0, 1), (1, 1))]
      >>> len(circuit), len(smaller), answers
      (5, 3, [1, 0, 1])
    """
    where = "resynthesize"
    if circuit.n_inputs > MOST_INPUTS:
        raise ValueError(
            f"{where}: the circuit has {circuit.n_inputs} inputs; "
            f"at most {MOST_INPUTS} are supported. Call simplify, or lutjax.circuits.abc.optimize."
        )
    if goal not in GOALS:
        raise ValueError(f"{where}: goal is {goal!r}; expected one of {GOALS}.")
    if not 0 < effort < float("inf"):
        raise ValueError(f"{where}: effort is {effort}; it must be positive and finite.")
    net = _Search(_Net.from_circuit(circuit), goal, seed).run(effort * _WORK)
    small = net.replace_gates(xors=goal == "gates").circuit(circuit)
    # The first of two equally small circuits is the given one.
    if goal == "ands":
        return min((circuit, small), key=lambda c: len(and_graph(c)[0]))
    return min((circuit, small), key=lambda c: len(operations(c)[0]))


@dataclasses.dataclass(frozen=True)
class _Net:
    """Operations as in `lutjax.circuits.ands.operations`, and output literals."""

    n_inputs: int
    nodes: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]

    @classmethod
    def from_circuit(cls, circuit: Circuit) -> "_Net":
        nodes, outputs = operations(circuit)
        return cls(circuit.n_inputs, tuple(nodes), tuple(outputs))

    @property
    def first(self) -> int:
        return 1 + self.n_inputs

    def replace_gates(
        self, gates: Mapping[int, _Gate] = MappingProxyType({}), *, xors: bool = True
    ) -> "_Net":
        """Replace gates at some nodes and drop unused nodes; without `xors`, use only AND nodes."""
        graph, present = Graph(self.n_inputs, xors=xors), set(self.nodes)
        values = {node: 2 * node for node in range(self.first)}
        stack = [literal >> 1 for literal in self.outputs]
        while stack:
            node = stack[-1]
            if node in values:
                stack.pop()
                continue
            gate = gates.get(node)
            if gate is not None:
                a, b, table = gate
            else:
                x, y = self.nodes[node - self.first]
                a, b, table = x >> 1, y >> 1, 0
            missing = [n for n in (a, b) if n not in values]
            if missing:
                stack += missing
            elif gate is not None:
                values[node] = graph.two_input_table(values[a], values[b], table)
            else:
                a, b = values[a] ^ x & 1, values[b] ^ y & 1
                if x > y:
                    values[node] = graph.conjunction(a, b)
                    continue
                # From an existing AND of the two, if another node needs it.
                if not xors:
                    for i in range(2):
                        if (y ^ i, x ^ i) in present:
                            graph.conjunction(a ^ i, b ^ i)
                values[node] = graph.difference(a, b)
        nodes, outputs = graph.compact([values[k >> 1] ^ k & 1 for k in self.outputs])
        return _Net(self.n_inputs, tuple(nodes), tuple(outputs))

    def circuit(self, ports: Circuit) -> Circuit:
        builder = Builder(merge=2)
        values = [ZERO, *add_inputs(builder, ports.inputs)]
        for x, y in self.nodes:
            read = [values[x >> 1] ^ x & 1, values[y >> 1] ^ y & 1]
            values.append(builder.gate(read, _XOR if x < y else _AND))
        add_outputs(builder, ports.outputs, [values[k >> 1] ^ k & 1 for k in self.outputs])
        about = {name: fact for name, fact in ports.about.items() if name != "vote_gates"}
        return builder.circuit(about)


class _Search:
    """Random walk over equivalent nets."""

    def __init__(self, net: _Net, goal: str, seed: int):
        self.goal = goal
        self.rng = np.random.default_rng(seed)
        self.work = 0
        self._take(net, self._cost(net))

    def _cost(self, net: _Net) -> int:
        return len((net.replace_gates(xors=False) if self.goal == "ands" else net).nodes)

    def _take(self, net: _Net, cost: int) -> None:
        self.net, self.cost = net, cost
        n = net.n_inputs
        self.rows = np.zeros((net.first + len(net.nodes), 1 << n), bool)
        self.readers = np.zeros(len(self.rows), int)
        for i in range(n):
            self.rows[1 + i] = np.arange(1 << n) >> i & 1
        for node, (x, y) in enumerate(net.nodes, net.first):
            self.rows[node] = _answers(x, y, self.rows[x >> 1], self.rows[y >> 1])
            self.readers[[x >> 1, y >> 1]] += 1
        for literal in net.outputs:
            self.readers[literal >> 1] += 1

    def run(self, work: float) -> _Net:
        best, waited = (self.net, self.cost), 0
        while self.work < work and waited < _PATIENCE * len(self.net.nodes):
            waited += 1
            node = self.net.first + int(self.rng.integers(len(self.net.nodes)))
            for gates in itertools.islice(self._replacements(node), _AT_ONCE):
                net = self.net.replace_gates(gates)
                self.work += _OVERHEAD * (2 if self.goal == "gates" else 4)
                cost = self._cost(net)
                # Steps without any loss end in a local minimum, so some steps may add gates.
                worse = cost > self.cost
                if worse and (cost > best[1] + _UPHILL or self.rng.random() > _RATE):
                    continue
                if net.nodes != self.net.nodes:
                    self._take(net, cost)
                    break
            if self.cost < best[1]:
                best, waited = (self.net, self.cost), 0
        return best[0]

    def _sensitive_inputs(self, node: int) -> tuple[np.ndarray, np.ndarray]:
        """Flag the inputs with outputs sensitive to a node, and the node's fan-out cone."""
        net, rows = self.net, self.rows
        other = {node: ~rows[node]}
        # Recompute with the node inverted: outputs that change are sensitive to it.
        for later in range(node + 1, len(rows)):
            x, y = net.nodes[later - net.first]
            if x >> 1 in other or y >> 1 in other:
                a, b = (other.get(k >> 1, rows[k >> 1]) for k in (x, y))
                other[later] = _answers(x, y, a, b)
        noticed = np.zeros(rows.shape[1], bool)
        for literal in net.outputs:
            if literal >> 1 in other:
                noticed |= other[literal >> 1] != rows[literal >> 1]
        depends = np.zeros(len(rows), bool)
        depends[list(other)] = True
        return noticed, depends

    def _replacements(self, node: int) -> Iterator[dict[int, _Gate]]:
        """Yield replacements for a node, possibly with a new or single-reader fan-in."""
        net, rows, rng = self.net, self.rows, self.rng
        noticed, depends = self._sensitive_inputs(node)
        on, off = noticed & rows[node], noticed & ~rows[node]
        own = [k >> 1 for k in net.nodes[node - net.first]]
        own = [inner for inner in own if inner >= net.first and self.readers[inner] == 1]
        # The node alone, or with one of its fan-ins: the inner gate.
        if rng.random() < 0.3:
            for gate in self._gates(self._sample_nodes(~depends), on, off):
                yield {node: gate}
            return
        # By default a new gate, whose number is the first free one.
        inner = len(rows)
        if own and rng.random() < 0.9:
            inner = own[rng.integers(len(own))]
            depends[inner] = True
        nodes = self._sample_nodes(~depends)
        searches = 0
        for other in rng.permutation(nodes[1:]).tolist():
            row = rows[other]
            # The node becomes a gate of the inner gate and another node. Where the other node
            # decides the output, the inner gate is free: it has fewer inputs to be 1 or 0 for.
            for joined, wrong, on_left, off_left in (
                (0b1000, on & ~row, on, off & row),
                (0b0010, on & row, on, off & ~row),
                (0b1110, off & row, on & ~row, off),
                (0b1011, off & ~row, on & row, off),
                (_XOR, None, (on & ~row) | (off & row), (off & ~row) | (on & row)),
            ):
                if wrong is not None and wrong.any():
                    continue
                searches += 1
                for gate in itertools.islice(self._gates(nodes, on_left, off_left), 2):
                    yield {inner: gate, node: (inner, other, joined)}
            if searches > _SEARCHES:
                return

    def _sample_nodes(self, free: np.ndarray) -> np.ndarray:
        """Return the constant and a sample of nodes, in order."""
        nodes = np.flatnonzero(free)
        if len(nodes) > _DIVISORS:
            nodes = np.sort(self.rng.permutation(nodes[1:])[:_DIVISORS])
            nodes = np.concatenate([[0], nodes])
        return nodes

    def _gates(self, nodes: np.ndarray, on: np.ndarray, off: np.ndarray) -> Iterator[_Gate]:
        """Yield gates of one node, then two, with output 1 at all `on` and 0 at all `off`."""
        rng = self.rng
        some = [
            self.rows[nodes[:, None], self._sample_inputs(where)].astype(np.float32)
            for where in (on, off)
        ]
        self.work += _OVERHEAD + len(nodes) ** 2 * sum(bits.shape[1] for bits in some)
        # Keep pairs with separable outputs, counting the inputs of each kind for each pair output.
        mixed = [np.minimum(one, zero) > 0 for one, zero in zip(*map(_quarters, some), strict=True)]
        first, second = np.nonzero(np.triu(~np.logical_or.reduce(mixed)))
        order = rng.permutation(len(first))
        # Pairs with the constant, node 0, are gates of one node.
        order = order[np.argsort(first[order] > 0, kind="stable")]
        for i, j in zip(nodes[first[order]].tolist(), nodes[second[order]].tolist(), strict=True):
            a, b = self.rows[i], self.rows[j]
            table = 0
            for address, at_address in enumerate((~(a | b), a & ~b, b & ~a, a & b)):
                one, zero = (on & at_address).any(), (off & at_address).any()
                if one and zero:
                    break
                table |= int(one or (not zero and rng.random() < 0.5)) << address
            else:
                yield i, j, table

    def _sample_inputs(self, where: np.ndarray) -> np.ndarray:
        ids: np.ndarray = np.flatnonzero(where)
        return ids if len(ids) <= _SAMPLES else self.rng.choice(ids, _SAMPLES, replace=False)


def _answers(x: int, y: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the output of an operation on two literals, given node outputs a and b."""
    a, b = a ^ bool(x & 1), b ^ bool(y & 1)
    output: np.ndarray = a ^ b if x < y else a & b
    return output


def _quarters(bits: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the number of inputs with 00, 10, 01 and 11 for each row pair."""
    ones = bits @ bits.T
    each = ones.diagonal()
    only = each[:, None] - ones
    return bits.shape[1] - each[:, None] - only.T, only, only.T, ones

"""Circuits built gate by gate, with simplification."""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lutjax.circuits import truth
from lutjax.circuits.circuit import Circuit, alive_gates
from lutjax.circuits.ports import Format, Port

Literal = int  # 2 * node, plus one if the value is inverted
ZERO, ONE = 0, 1

# Tables of two inputs: _INVERTED[bits][table] has the inputs of the set bits inverted, and
# _EXCHANGED[table] has its inputs swapped.
_INVERTED = tuple(
    tuple(sum((t >> (a ^ inverted) & 1) << a for a in range(4)) for t in range(16))
    for inverted in range(4)
)
_EXCHANGED = tuple(truth.swap(t, 2, 0, 1) for t in range(16))
_DEGENERATE = frozenset({0b0000, 0b1111, 0b1010, 0b0101, 0b1100, 0b0011})


class Builder:
    """Incremental circuit builder: literals in, literals out.

    Each new gate is simplified. Constants, inverters, and repeated or unused inputs are removed
    from its fan-ins. A gate equal to an earlier gate over the same nodes, possibly inverted, *is*
    the earlier gate. A gate reads through its fan-ins if fewer nodes determine its output.
    `circuit` keeps only gates required by the outputs, and merges gates.

    Args:
      simplify: whether to simplify gates; otherwise every gate is kept unchanged.
      merge: a gate absorbs its single-reader fan-ins while it has at most this number of inputs, 2
        to 8. Gates created with more inputs keep them. From 4 on, a gate with several readers is
        absorbed if all readers have free inputs, as in FPGA lookup tables, which cost the same
        full or not. 6 gives the fewest FPGA tables.
      lut: maximum table inputs in `lutjax.circuits.arithmetic`, 2 to 6: 2 for gates, 3 for full
        adders in two tables, 6 for FPGA lookup tables. Default: `merge`, at most 6.

    Raises:
      ValueError: sizes out of range.

    Example:
      >>> from lutjax.circuits import Builder
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> nand = builder.gate([a, b], 0b0111)
      >>> nand == builder.gate([b ^ 1, a ^ 1], 0b1110)  # the same gate, written differently
      True
      >>> builder.output("y", [[nand]])
      >>> builder.circuit()
      Circuit(x: 2 x uint1 -> y: 1 x uint1; 1 gates)
    """

    def __init__(self, *, simplify: bool = True, merge: int = 3, lut: int | None = None):
        if type(merge) is not int or not 2 <= merge <= truth.MAX_INPUTS:
            raise ValueError(
                f"Builder: merge is {merge!r}; expected an integer, 2 to {truth.MAX_INPUTS}."
            )
        lut = min(merge, 6) if lut is None else lut
        if type(lut) is not int or not 2 <= lut <= 6:
            raise ValueError(
                f"Builder: lut is {lut!r}; it must be a whole number from 2 to 6, or None."
            )
        self.simplify, self.merge, self.lut = simplify, merge, lut
        self._inputs: list[Port] = []
        self._outputs: list[tuple[Port, list[Literal]]] = []
        self._parts: list[tuple[str, int]] = []  # name, and number of earlier gates
        self._fanins: list[tuple[int, ...]] = []
        self._tables: list[int] = []
        self._classes: list[int] = []  # number of gates before the votes of each class
        self._votes_end: int | None = None  # number of gates before the next part
        self._first = 1
        self._levels = [0]
        self._known: dict[tuple[tuple[int, ...], int], int] = {}

    def __len__(self) -> int:
        """Return the current number of gates."""
        return len(self._tables)

    def input(
        self, name: str, count: int = 1, format: Format = Format()  # noqa: B008
    ) -> list[list[Literal]]:  # fmt: skip
        """Declare an input port before the first gate; return its literals, lowest bit first.

        Raises:
          ValueError: the builder already has gates, or `Port` rejects the arguments.
        """
        if self._tables:
            raise ValueError(
                f"Builder.input: port {name!r} is after gates; declare the inputs first."
            )
        port = Port(name, count, format)
        self._inputs.append(port)
        bits = range(2 * self._first, 2 * (self._first + port.n_bits), 2)
        self._first += port.n_bits
        self._levels = [0] * self._first
        return [list(bits[k : k + format.bits]) for k in range(0, len(bits), format.bits)]

    def start_part(self, name: str) -> None:
        """Name the gates that follow.

        Raises:
          ValueError: an earlier part has this name.
        """
        if self._parts and self._parts[-1][0] == name:
            return
        if any(name == other for other, _ in self._parts):
            raise ValueError(f"Builder.start_part: name is {name!r}, which another part has.")
        if not self._parts and self._tables:
            self._parts.append(("gates", 0))
        self._parts.append((name, len(self._tables)))
        if self._classes and self._votes_end is None:
            self._votes_end = len(self._tables)

    def next_class(self) -> None:
        """Start the vote counting gates for the next class, up to the next call or part.

        The circuit stores the gate counts in ``about["vote_gates"]``, and
        `lutjax.circuits.statistics.compute` reports the cost for each class.
        """
        self._classes.append(len(self._tables))

    def gate(self, literals: Sequence[Literal], table: int) -> Literal:
        """Return the literal for a table over literals.

        Args:
          literals: at most 8.
          table: bit k is the output at address k; the first literal is the lowest address bit.

        Raises:
          ValueError: a literal does not exist, or the table does not fit the literals.
        """
        n, end = len(literals), 2 * (self._first + len(self._tables))
        if n > truth.MAX_INPUTS or not 0 <= table <= truth.FULL[n]:
            raise ValueError(
                f"Builder.gate: table is {table} over {n} literals; "
                f"expected at most {truth.MAX_INPUTS} literals, "
                "and a table from 0 to 2**2**literals - 1."
            )
        for literal in literals:
            if not 0 <= literal < end:
                raise ValueError(
                    f"Builder.gate: literals is {list(literals)}; expected 0 to {end - 1}."
                )
        if not self.simplify:
            nodes = tuple(literal >> 1 for literal in literals)
            return self._append(nodes, truth.negate_inverted(table, literals))
        if n == 2:
            a, b = literals
            # By far the most common case, without the general reduction: precomputed tables, and
            # one look into the known gates.
            if a > 1 and b > 1 and a >> 1 != b >> 1:
                plain = _INVERTED[a & 1 | (b & 1) << 1][table]
                if plain not in _DEGENERATE:
                    if a < b:
                        return self._pair_literal(a >> 1, b >> 1, plain)
                    return self._pair_literal(b >> 1, a >> 1, _EXCHANGED[plain])
        table = truth.negate_inverted(table, literals)
        return self._gate_literal(*reduce_table([literal >> 1 for literal in literals], table))

    def _pair_literal(self, a: int, b: int, table: int) -> Literal:
        """Return the literal for a table that depends on both nodes a < b."""
        # A gate and its inverse are one node: its table is 0 where all inputs are 0.
        inverted = table & 1
        if inverted:
            table ^= 15
        node = self._known.get(((a, b), table))
        if node is None:
            return self._gate_literal([a, b], table) ^ inverted
        return 2 * node + inverted

    def _gate_literal(self, nodes: list[int], table: int) -> Literal:
        """Return the literal for a table that depends on all its distinct nodes."""
        nodes, table = self._read_through(nodes, table)
        if len(nodes) == 0:
            return table
        if len(nodes) == 1:
            return 2 * nodes[0] + (table & 1)
        key, table = _sort_nodes(nodes, table)
        inverted = table & 1
        if inverted:
            table ^= truth.FULL[len(key)]
        node = self._known.get((key, table))
        if node is None:
            node = self._known[key, table] = self._append(key, table) >> 1
        return 2 * node + inverted

    def _read_through(self, nodes: list[int], table: int) -> tuple[list[int], int]:
        """Return the function over earlier nodes, if it does not need more nodes."""
        # Reading through may open the way to another gate, so it is repeated.
        again = True
        while again and len(nodes) > 1:
            again = False
            n, first, fanins = len(nodes), self._first, self._fanins
            gates = [node for node in nodes if node >= first]
            choices: list[tuple[int, ...]] = [(node,) for node in gates]
            if n < 4:
                choices += list(itertools.combinations(gates, 2))
            for chosen in choices:
                read = [node for node in nodes if node not in chosen]
                size = len(read)
                for gate in chosen:
                    inner = fanins[gate - first]
                    size += len(inner)
                    read += [node for node in inner if node not in read]
                # A function with distinct nodes cannot need fewer.
                if len(read) == size or len(read) > max(n, 4):
                    continue
                new, new_table = nodes, table
                for gate in chosen:
                    new, new_table = compose_tables(
                        new, new_table, gate, fanins[gate - first], self._tables[gate - first]
                    )
                new, new_table = reduce_table(new, new_table)
                if len(new) <= n:
                    nodes, table, again = new, new_table, True
                    break
        return nodes, table

    def _append(self, nodes: tuple[int, ...], table: int) -> Literal:
        self._fanins.append(nodes)
        self._tables.append(table)
        levels = self._levels
        levels.append(1 + max([levels[n] for n in nodes], default=-1))
        return 2 * (len(levels) - 1)

    def level(self, literal: Literal) -> int:
        """Return the longest path to a literal, in gates."""
        return self._levels[literal >> 1]

    def read(self, node: int) -> tuple[tuple[int, ...], int]:
        """Return the fan-ins and table for a gate; no fan-ins for an input or a constant."""
        gate = node - self._first
        return (self._fanins[gate], self._tables[gate]) if gate >= 0 else ((), 0)

    def readers(self, literals: Sequence[Literal]) -> list[int]:
        """Return each node's reader count, over these literals and their transitive fan-in."""
        return self._readers(self._fanins, literals)

    def _readers(self, fanins: Sequence[Sequence[int]], literals: Sequence[Literal]) -> list[int]:
        readers = [0] * (self._first + len(fanins))
        alive = itertools.compress(fanins, alive_gates(self._first, fanins, literals))
        for node in itertools.chain.from_iterable(alive):
            readers[node] += 1
        for literal in literals:
            readers[literal >> 1] += 1
        return readers

    def output(
        self, name: str, numbers: Sequence[Sequence[Literal]], format: Format | None = None
    ) -> None:
        """Declare an output port from the element literals, lowest bit first.

        Args:
          name: port name.
          numbers: elements, all with the same number of bits.
          format: default: unsigned integers.

        Raises:
          ValueError: no elements, or an element does not fit the format, or `Port` rejects the
            arguments.
        """
        if not numbers:
            raise ValueError(
                f"Builder.output: port {name!r} has no numbers; it needs at least one."
            )
        format = format or Format(len(numbers[0]))
        sizes = {len(number) for number in numbers}
        if sizes != {format.bits}:
            raise ValueError(
                f"Builder.output: numbers of port {name!r} have {sorted(sizes)} bits; "
                f"the format {format} has {format.bits}."
            )
        bits = [literal for number in numbers for literal in number]
        end = 2 * (self._first + len(self._tables))
        if not all(0 <= literal < end for literal in bits):
            raise ValueError(f"Builder.output: port {name!r} has literals beyond 0 to {end - 1}.")
        self._outputs.append((Port(name, len(numbers), format), bits))

    def circuit(self, about: Mapping[str, Any] | None = None) -> Circuit:
        """Return the circuit; with simplification, only the gates required by the outputs."""
        fanins, tables = self._fanins, self._tables
        literals = [literal for _, bits in self._outputs for literal in bits]
        is_kept = bytearray(b"\1") * len(tables)
        if self.simplify:
            fanins, tables = self._absorb_gates(literals)
            is_kept = alive_gates(self._first, fanins, literals)
        # Number of kept gates before each gate.
        before = list(itertools.accumulate(is_kept, initial=0))
        if before[-1] < len(tables):
            number = [*range(self._first), *(self._first + count for count in before)]
            renumbered = itertools.compress(fanins, is_kept)
            fanins = [tuple([number[n] for n in nodes]) for nodes in renumbered]
            tables = list(itertools.compress(tables, is_kept))
            literals = [2 * number[literal >> 1] | literal & 1 for literal in literals]
        # Counts per part and class follow from the gates kept before each boundary.
        starts = [start for _, start in self._parts] + [len(is_kept)]
        parts = [
            (name, before[end] - before[start])
            for (name, start), end in zip(self._parts, starts[1:], strict=True)
        ]
        about = dict(about or {})
        if self._classes:
            end = len(is_kept) if self._votes_end is None else self._votes_end
            ends = [before[start] for start in (*self._classes, end)]
            about["vote_gates"] = [end - start for start, end in itertools.pairwise(ends)]
        circuit = Circuit(
            inputs=tuple(self._inputs),
            outputs=tuple(port for port, _ in self._outputs),
            fanins=tuple(fanins),
            tables=tuple(tables),
            literals=tuple(literals),
            parts=tuple(parts),
            about=about,
        )
        # Absorption can reveal simpler gates.
        if self.simplify and min(map(len, fanins), default=2) < 2:
            return rebuild(circuit, Builder(merge=self.merge, lut=self.lut))
        return circuit

    def _absorb_gates(self, literals: Sequence[Literal]) -> tuple[list[tuple[int, ...]], list[int]]:
        """Absorb single-reader gates into their reader; absorbed gates keep no readers."""
        first, merge = self._first, self.merge
        fanins, tables = list(self._fanins), list(self._tables)
        if merge == 2:
            return fanins, tables
        # Readers are counted again after each change: a gate absorbed by one reader may leave
        # another gate with one reader.
        readers = self._readers(fanins, literals)
        for gate in itertools.compress(range(len(fanins)), alive_gates(first, fanins, literals)):
            nodes, table = fanins[gate], tables[gate]
            at = 0
            while at < len(nodes):
                inner = nodes[at] - first
                at += 1
                if inner < 0 or readers[first + inner] > 1:
                    continue
                union = {*nodes, *fanins[inner]}
                # The reader may grow to `merge` inputs, but a wider gate must not grow further.
                if len(union) - 1 > max(merge, len(nodes)):
                    continue
                new, table = compose_tables(
                    list(nodes), table, first + inner, fanins[inner], tables[inner]
                )
                for node in (*nodes, *fanins[inner]):
                    readers[node] -= 1
                nodes, table = _sort_nodes(*reduce_table(new, table))
                for node in nodes:
                    readers[node] += 1
                fanins[gate], tables[gate] = nodes, table
                # New fan-ins may be absorbed as well: start again.
                at = 0
        if merge > 3:
            self._put_into_all_readers(fanins, tables, literals)
        return fanins, tables

    def _put_into_all_readers(
        self, fanins: list[tuple[int, ...]], tables: list[int], literals: Sequence[Literal]
    ) -> None:
        """Merge gates into all readers with free inputs: full lookup tables cost no more."""
        first = self._first
        live = itertools.compress(range(len(fanins)), alive_gates(first, fanins, literals))
        readers: dict[int, set[int]] = {gate: set() for gate in live}
        for gate in readers:
            for node in fanins[gate]:
                if node >= first:
                    readers[node - first].add(gate)
        needed = {literal >> 1 for literal in literals}

        # The least additional inputs first, so that they fit before others take the space.
        def cost(gate: int) -> tuple[int, int]:
            return len(readers[gate]) * (len(fanins[gate]) - 1), gate

        for inner in sorted(readers, key=cost):
            if first + inner in needed or not readers[inner]:
                continue
            own = fanins[inner]
            if any(len({*fanins[gate], *own}) - 1 > self.merge for gate in readers[inner]):
                continue
            for gate in sorted(readers[inner]):
                before = fanins[gate]
                new = compose_tables(before, tables[gate], first + inner, own, tables[inner])
                fanins[gate], tables[gate] = _sort_nodes(*reduce_table(*new))
                for node in {*before, *own}:
                    if node >= first:
                        readers[node - first].discard(gate)
                for node in fanins[gate]:
                    if node >= first:
                        readers[node - first].add(gate)
            for node in own:
                if node >= first:
                    readers[node - first].discard(inner)
            readers[inner].clear()


def simplify(circuit: Circuit, *, merge: int = 3) -> Circuit:
    """Return an equivalent circuit with fewer gates; see `Builder`.

    Args:
      circuit: any circuit.
      merge: maximum gate inputs where this saves a gate, 2 to 8: 2 for two-input gates, 3 for
        three-operand instructions, 6 for FPGAs.

    Raises:
      ValueError: `merge` out of range.

    Example:
      >>> from lutjax import circuits
      >>> builder = circuits.Builder(simplify=False)
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate([builder.gate([a, b], 0b1000), b], 0b1000)]])
      >>> len(builder.circuit()), len(circuits.simplify(builder.circuit()))
      (2, 1)
    """
    return rebuild(circuit, Builder(merge=merge))


def rebuild(circuit: Circuit, builder: Builder) -> Circuit:
    """Replay a circuit on an empty builder."""
    literals = [ZERO, *add_inputs(builder, circuit.inputs)]
    classes: collections.Counter[int] = collections.Counter()  # start before a gate
    if circuit.about.get("vote_gates") and "votes" in circuit.part_ranges:
        start = circuit.part_ranges["votes"].start
        classes.update(itertools.accumulate(circuit.about["vote_gates"][:-1], initial=start))
    for name, gates in circuit.part_ranges.items():
        builder.start_part(name)
        for gate in (*gates, gates.stop):
            for _ in range(classes[gate] if name == "votes" else 0):
                builder.next_class()
            if gate == gates.stop:
                break
            nodes = [literals[n] for n in circuit.fanins[gate]]
            literals.append(builder.gate(nodes, circuit.tables[gate]))
    add_outputs(builder, circuit.outputs, [literals[k >> 1] ^ k & 1 for k in circuit.literals])
    return builder.circuit(circuit.about)


def add_inputs(builder: Builder, ports: Iterable[Port]) -> list[Literal]:
    """Declare input ports; return the literals of all their bits."""
    numbers = [
        number for port in ports for number in builder.input(port.name, port.count, port.format)
    ]
    return [bit for number in numbers for bit in number]


def add_outputs(builder: Builder, ports: Iterable[Port], literals: Iterable[Literal]) -> None:
    """Declare output ports, given the literals of all their bits."""
    bits = iter(literals)
    for port in ports:
        numbers = [list(itertools.islice(bits, port.format.bits)) for _ in range(port.count)]
        builder.output(port.name, numbers, port.format)


def reduce_table(nodes: Sequence[int], table: int) -> tuple[list[int], int]:
    """Return the distinct nodes of a table, and the table over them."""
    nodes = list(nodes)
    if len(set(nodes)) < len(nodes):
        # From the last input on, so that positions of earlier inputs stay valid.
        for i in range(len(nodes) - 1, -1, -1):
            at = nodes.index(nodes[i])
            if at < i:
                table = truth.merge_inputs(table, len(nodes), at, i)
                del nodes[i]
    if 0 in nodes:
        i = nodes.index(0)
        table = truth.cofactor(table, len(nodes), i, 0)
        del nodes[i]
    for i in range(len(nodes) - 1, -1, -1):
        if not truth.depends_on_input(table, len(nodes), i):
            table = truth.cofactor(table, len(nodes), i, 0)
            del nodes[i]
    return nodes, table


def _sort_nodes(nodes: Sequence[int], table: int) -> tuple[tuple[int, ...], int]:
    order = sorted(range(len(nodes)), key=nodes.__getitem__)
    return tuple([nodes[i] for i in order]), truth.permute(table, len(nodes), order)


def compose_tables(
    nodes: Sequence[int], table: int, gate: int, inner: Sequence[int], inner_table: int
) -> tuple[list[int], int]:
    """Substitute a gate over inner nodes for one table input; return the nodes and the table."""
    i = nodes.index(gate)
    union = [*nodes[:i], *nodes[i + 1 :]]
    union += [node for node in inner if node not in union]
    positions = [union.index(node) for node in inner]
    return union, truth.compose(table, len(nodes), i, inner_table, positions, len(union))

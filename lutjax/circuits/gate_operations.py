"""Circuits as three-input operations, with scheduling and value slots, for program generation.

A processor with three-operand logic (AVX-512) has one instruction for each three-input table, and
other processors need at most four or five. Larger tables are decomposed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from lutjax.circuits import truth
from lutjax.circuits.arithmetic import popcount
from lutjax.circuits.builder import ZERO, Builder, Literal, reduce_table
from lutjax.circuits.circuit import Circuit, walk_literals


@dataclasses.dataclass
class Operations:
    """Topologically ordered tables with one to three distinct, nonconstant inputs.

    Attributes:
      n_inputs: input bits. Node 0 is the constant 0, nodes 1 to `n_inputs` are inputs, followed by
        operations.
      fanins: input nodes for each operation, two or three.
      tables: table for each operation; bit k is the output at address k.
      literals: outputs, ``2 * node + inverted``.
    """

    n_inputs: int
    fanins: list[tuple[int, ...]]
    tables: list[int]
    literals: list[int]

    @property
    def first(self) -> int:
        """First operation node."""
        return 1 + self.n_inputs

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.tables)


def operations(
    circuit: Circuit, n_inputs: int | None = None, bits: Sequence[Literal] | None = None
) -> Operations:
    """Return the operations required by the circuit outputs, from a `Builder` with small tables.

    By default they have the circuit inputs; else `bits` has a literal for each circuit input bit,
    over `n_inputs` nodes from 1 on.
    """
    builder, n = Builder(merge=3), circuit.n_inputs if n_inputs is None else n_inputs
    literals = [ZERO, *(bit for (bit,) in builder.input("x", n))] if n else [ZERO]
    if bits is not None:
        literals = [ZERO, *(literals[k >> 1] ^ k & 1 for k in bits)]
    if output_literals := walk_literals(circuit, literals, functools.partial(_gate, builder)):
        builder.output("y", [[literal] for literal in output_literals])
    small = builder.circuit()
    # Tables that differ only in the order of their inputs become equal: fewer macros and kinds.
    fanins, tables = [], []
    for nodes, table in zip(small.fanins, small.tables, strict=True):
        order, ordered_table = _order_inputs(table, len(nodes))
        fanins.append(tuple([nodes[i] for i in order]))
        tables.append(ordered_table)
    return Operations(n, fanins, tables, list(small.literals))


def inputs_read(program: Operations) -> list[int]:
    """Return the input nodes in use."""
    nodes = {n for nodes in program.fanins for n in nodes} | {k >> 1 for k in program.literals}
    return sorted(n for n in nodes if 0 < n < program.first)


def _gate(builder: Builder, literals: Sequence[Literal], table: int) -> Literal:
    """Return the literal for a table, built from gates with at most three inputs."""
    table = truth.negate_inverted(table, literals)
    nodes, table = reduce_table([literal >> 1 for literal in literals], table)
    literals, n = [2 * node for node in nodes], len(nodes)
    if n <= 3:
        return builder.gate(literals, table)
    # Half of all tables are inverses of the others: the decompositions are found for one half.
    if table & 1:
        return _gate(builder, literals, table ^ truth.FULL[n]) ^ 1
    # A table of the number of ones, such as a vote, is a counter with a small table.
    if symmetric := _find_symmetry(table, n):
        phases, answers = symmetric
        counted = [literal | phase for literal, phase in zip(literals, phases, strict=True)]
        return _gate(builder, popcount(builder, counted), answers)
    if n == 4 and (steps := _two_steps(table)):
        inner, inner_table, outer, outer_table = steps
        first = builder.gate([literals[i] for i in inner], inner_table)
        return builder.gate([first, *[literals[i] for i in outer]], outer_table)
    i, halves, outer_table = _split(table, n)
    rest = literals[:i] + literals[i + 1 :]
    combined = [_gate(builder, rest, half) for half in halves]
    return builder.gate([*combined, literals[i]], outer_table)


@functools.lru_cache(maxsize=512)
def _order_inputs(table: int, n: int) -> tuple[tuple[int, ...], int]:
    """Return the input order with the smallest table, and this table, for two or three inputs."""
    orders = itertools.permutations(range(n))
    ordered = ((order, truth.permute(table, n, order)) for order in orders)
    return min(ordered, key=lambda pair: pair[1])


@functools.lru_cache(maxsize=1 << 16)
def _find_symmetry(table: int, n: int) -> tuple[tuple[int, ...], int] | None:
    """Return the inverted inputs and outputs by popcount for a symmetric table, or None.

    The inputs are inverted so that the output depends only on the number of ones.
    """
    phases = [0]
    for i in range(1, n):
        if truth.swap(table, n, 0, i) == table:
            phases.append(0)
            continue
        table = truth.negate(table, n, i)
        if truth.swap(table, n, 0, i) != table:
            return None
        phases.append(1)
    bits = n.bit_length()
    answers = [table >> ((1 << k) - 1) & 1 for k in range(n + 1)]
    candidates = []
    # Zeros can be counted as well: the inverted inputs.
    for inverted, answers_of_count in enumerate((answers, answers[::-1])):
        known = sum(answer << k for k, answer in enumerate(answers_of_count))
        # Counts above n never occur: try all their outputs, for a table of fewer bits.
        for unused in range(1 << (1 << bits) - (n + 1)):
            filled = known | unused << (n + 1)
            candidates.append((len(truth.support(filled, bits)), inverted, filled))
    # Prefer the fewest inputs.
    _, inverted, filled = min(candidates)
    return tuple(phase ^ inverted for phase in phases), filled


@functools.lru_cache(maxsize=1 << 16)
def _two_steps(table: int) -> tuple[tuple[int, ...], int, tuple[int, ...], int] | None:
    """Decompose a four-input table into two nested three-input tables, or return None.

    Returns:
      The inner inputs, the inner table, the outer inputs after the inner output, and the outer
      table.
    """
    # The outer table reads input d, the output of the inner table, and an input e that the inner
    # table reads as well.
    for d in range(4):
        inner = tuple(i for i in range(4) if i != d)
        halves = truth.cofactor(table, 4, d, 0), truth.cofactor(table, 4, d, 1)
        for e in range(3):
            cores, outer = [0, 0], 0
            # For each value of e, the table over the two inner inputs must be constant, one core
            # table, or its inverse, on both sides of d.
            for value in (0, 1):
                core = None
                for side, half in enumerate(halves):
                    rest = truth.cofactor(half, 3, e, value)
                    if rest in (0, 15):
                        answers = 3 * (rest & 1)
                    elif core is None or rest == core:
                        core, answers = rest, 0b10
                    elif rest == core ^ 15:
                        answers = 0b01
                    else:
                        break
                    outer |= answers << (2 * side + 4 * value)
                else:
                    cores[value] = core or 0
                    continue
                break
            else:
                at = [k for k in range(3) if k != e]
                inner_table = truth.expand(cores[0], 2, at, 3) & truth.LOW[3][e]
                inner_table |= truth.expand(cores[1], 2, at, 3) & truth.variable(3, e)
                return inner, inner_table, (d, inner[e]), outer
    return None


@functools.lru_cache(maxsize=1 << 16)
def _split(table: int, n: int) -> tuple[int, tuple[int, int], int]:
    """Return an input, two tables over the other inputs, and the table that combines them."""
    best = None
    for i in range(n):
        low, high = truth.cofactor(table, n, i, 0), truth.cofactor(table, n, i, 1)
        a, b, c = _effort(low, n - 1), _effort(high, n - 1), _effort(low ^ high, n - 1)
        for effort, halves, outer in (
            (a + b, (low, high), 0b11001010),  # the input selects
            (a + c, (low, low ^ high), 0b01101010),  # low XOR (input AND difference)
            (b + c, (high, low ^ high), 0b10100110),  # high XOR (NOT input AND difference)
        ):
            if best is None or effort < best[0]:
                best = effort, i, halves, outer
    assert best is not None
    return best[1:]


@functools.lru_cache(maxsize=1 << 16)
def _effort(table: int, n: int) -> int:
    """Return an upper bound on the operations for an unstructured table."""
    read = len(truth.support(table, n))
    return int(read > 1) if read < 4 else (1 << (read - 2)) - 1


def _reorder_operations(program: Operations, order: Sequence[int]) -> Operations:
    """Reorder operations; fan-ins precede their readers in `order`."""
    first = program.first
    new = list(range(first)) + [0] * len(program)
    for k, g in enumerate(order, first):
        new[first + g] = k
    return Operations(
        program.n_inputs,
        [tuple([new[n] for n in program.fanins[g]]) for g in order],
        [program.tables[g] for g in order],
        [2 * new[k >> 1] | k & 1 for k in program.literals],
    )


# ---------------------------------------------------------------------- order, and places of values
def short_lived(program: Operations) -> Operations:
    """Reorder operations to keep few values live.

    Outputs are processed in sequence, depth first, after their dependencies. Operations over the
    same nodes, such as sum and carry in an adder, stay adjacent. An operation is scheduled as soon
    as it is the last reader of at least as many values as it produces.
    """
    first = program.first
    groups: list[list[int]] = []  # operations over the same nodes
    group_of: dict[tuple[int, ...], int] = {}
    group: list[int] = []  # for each operation
    # Groups that read each node.
    readers: list[list[int]] = [[] for _ in range(first + len(program))]
    for g, nodes in enumerate(program.fanins):
        key = tuple(sorted(nodes))
        k = group_of.setdefault(key, len(groups))
        group.append(k)
        if k == len(groups):
            groups.append([])
            for n in nodes:
                readers[n].append(k)
        groups[k].append(g)
    nodes_of = [program.fanins[members[0]] for members in groups]
    # The number of values that each group waits for.
    waits = [sum(n >= first for n in nodes) for nodes in nodes_of]
    unread = [len(r) for r in readers]
    for n in (*range(first), *(k >> 1 for k in program.literals)):
        # Inputs and outputs stay, so no operation is their last reader.
        unread[n] = len(groups) + 1
    placed, order = bytearray(len(groups)), []

    def schedule(start: int) -> None:
        todo = [start]
        while todo:
            k = todo.pop()
            if placed[k]:
                continue
            placed[k] = 1
            order.extend(groups[k])
            near: list[int] = []
            for n in nodes_of[k]:
                unread[n] -= 1
                if unread[n] <= 2:
                    near += readers[n]
            for g in groups[k]:
                for r in readers[first + g]:
                    waits[r] -= 1
                near += readers[first + g]
            for r in near:
                if not placed[r] and not waits[r]:
                    ends = sum([unread[n] == 1 for n in nodes_of[r]])
                    if ends >= len(groups[r]):
                        todo.append(r)

    for literal in program.literals:
        stack = [group[(literal >> 1) - first]] if literal >> 1 >= first else []
        while stack:
            k = stack[-1]
            before = [] if placed[k] else [group[n - first] for n in nodes_of[k] if n >= first]
            before = [b for b in before if not placed[b]]
            if before:
                stack += reversed(before)
                continue
            stack.pop()
            if not placed[k]:
                schedule(k)
    return _reorder_operations(program, order)


def in_runs(program: Operations, window: int) -> Operations:
    """Group operations with equal tables, within `window` operations."""
    first, order = program.first, []
    # Levels within the window: operations of a level are independent, and can be sorted by table.
    level = [0] * (first + len(program))  # for each operation, in its window
    for start in range(0, len(program), window):
        in_window = range(start, min(start + window, len(program)))
        for g in in_window:
            earlier = [level[n] for n in program.fanins[g] if n >= first + start]
            level[first + g] = 1 + max(earlier, default=0)

        def kind(g: int) -> tuple[int, int, int]:
            return level[first + g], len(program.fanins[g]), program.tables[g]

        order += sorted(in_window, key=kind)
    return _reorder_operations(program, order)


def assign_slots(program: Operations, chunk: int) -> tuple[list[int], int]:
    """Return each value's slot, -1 if it is local to its chunk, and the slot count.

    Chunks are runs with `chunk` operations. A slot is free in the next chunk after its last
    reader; with one-operation chunks, also for the last reader's own value.
    """
    first, n_chunks = program.first, -(-len(program) // chunk)
    last = [-1] * (first + len(program))  # last chunk with a reader of a node
    for g, nodes in enumerate(program.fanins):
        now = g // chunk
        for n in nodes:
            last[n] = now
    for k in program.literals:
        last[k >> 1] = n_chunks
    where, free, count = [-1] * len(program), [], 0
    expiring: list[list[int]] = [[] for _ in range(n_chunks + 1)]
    for now in range(n_chunks):
        # With one operation per chunk, the value may take the slot of a value that it reads last.
        if chunk == 1:
            free += expiring[now]
        for g in range(now * chunk, min((now + 1) * chunk, len(program))):
            until = last[first + g]
            if until > now:
                if free:
                    where[g] = free.pop()
                else:
                    where[g], count = count, count + 1
                expiring[until].append(where[g])
        if chunk > 1:
            free += expiring[now]
    return where, count

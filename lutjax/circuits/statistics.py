"""Circuit cost statistics."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from lutjax.circuits import abc, ands
from lutjax.circuits.circuit import (
    Circuit,
    gate_counts as gate_counts,
    gates_in_words as gates_in_words,
)


@dataclasses.dataclass(frozen=True)
class PartStats:
    """Part of a circuit: its gates, and the levels between its first inputs and its last gate."""

    name: str
    gates: int
    share: float
    levels: int


@dataclasses.dataclass(frozen=True)
class ClassStats:
    """Gates required for the votes of a class.

    Attributes:
      own: gates used only by this class.
      shared: gates also used by the votes of other classes.
    """

    own: int
    shared: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Circuit statistics; formatted as a small table.

    Attributes:
      gates: tables with any number of inputs.
      fan_in: gate count by number of inputs.
      fan_out: input and gate count by number of readers (gates and outputs).
      ands: AND nodes in an AND-inverter graph.
      levels: gates on the longest path.
      lut6: 6-input lookup tables after mapping; None if not requested or ABC is not installed
        (`pip install pyosys`).
      parts: encoder, layers, votes and argmax.
      classes: cost of each class, for a classifier with vote counters.
    """

    gates: int
    fan_in: dict[int, int]
    fan_out: dict[int, int]
    ands: int
    levels: int
    lut6: int | None
    parts: tuple[PartStats, ...]
    classes: tuple[ClassStats, ...]

    def __str__(self) -> str:
        rows = [
            ("gates", f"{self.gates}"),
            ("fan-in", _histogram(self.fan_in)),
            ("fan-out", _histogram(self.fan_out)),
            ("AND nodes", f"{self.ands}"),
            ("levels", f"{self.levels}"),
        ]
        if self.lut6 is not None:
            rows.append(("LUT6", f"{self.lut6}"))
        rows += [(p.name, f"{p.gates} gates, {p.share:.1%}, {p.levels} levels") for p in self.parts]
        rows += [
            (f"class {k}", f"{c.own} gates of its own, {c.shared} shared")
            for k, c in enumerate(self.classes)
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _histogram(counts: dict[int, int]) -> str:
    entries = [f"{k}: {count}" for k, count in itertools.islice(counts.items(), 8)]
    more = list(counts.items())[8:]
    if more:
        entries.append(f"{more[0][0]} to {more[-1][0]}: {sum(count for _, count in more)}")
    return ", ".join(entries) or "none"


def compute(circuit: Circuit, *, lut6: bool = True) -> Stats:
    """Return the statistics of a circuit.

    Args:
      circuit: any circuit.
      lut6: whether to map it to 6-input lookup tables, if ABC is installed. This takes seconds for
        thousands of gates.
    """
    readers = [0] * (circuit.first_gate + len(circuit))
    for node in itertools.chain.from_iterable(circuit.fanins):
        readers[node] += 1
    for literal in circuit.literals:
        readers[literal >> 1] += 1
    return Stats(
        gates=len(circuit),
        fan_in=_count_values(map(len, circuit.fanins)),
        fan_out=_count_values(readers[1:]),
        ands=len(ands.and_graph(circuit)[0]),
        levels=circuit.depth,
        lut6=_lut6(circuit) if lut6 else None,
        parts=tuple(
            PartStats(name, len(gates), len(gates) / max(len(circuit), 1), _levels(circuit, gates))
            for name, gates in circuit.part_ranges.items()
        ),
        classes=_classes(circuit),
    )


def _lut6(circuit: Circuit) -> int | None:
    if not abc.find():
        return None
    mapped = abc.lut_count(circuit, 6)
    if max(map(len, circuit.fanins), default=0) > 6:
        return mapped
    # The unmapped gates may be fewer. Some outputs need a table to be inverted: those of inputs,
    # and of gates that are also an output as they are.
    literals, first = set(circuit.literals), circuit.first_gate
    inverters = sum(k & 1 and k > 1 and (k >> 1 < first or k ^ 1 in literals) for k in literals)
    return min(mapped, len(circuit) + inverters)


def _count_values(numbers: Iterable[int]) -> dict[int, int]:
    return dict(sorted(collections.Counter(numbers).items()))


def _levels(circuit: Circuit, gates: range) -> int:
    first = circuit.first_gate
    level: dict[int, int] = {}
    for gate in gates:
        level[first + gate] = 1 + max([level.get(n, 0) for n in circuit.fanins[gate]], default=-1)
    return max(level.values(), default=0)


def _classes(circuit: Circuit) -> tuple[ClassStats, ...]:
    """Return class costs, from the `Builder.next_class` gate runs or the output elements."""
    n_classes = circuit.about.get("n_classes")
    runs = circuit.about.get("vote_gates") or ()
    if not n_classes:
        return ()
    if len(runs) == n_classes and "votes" in circuit.part_ranges:
        start = circuit.first_gate + circuit.part_ranges["votes"].start
        ends = list(itertools.accumulate(runs, initial=start))
        roots: list[Sequence[int]] = [range(a, b) for a, b in itertools.pairwise(ends)]
    elif len(circuit.outputs) == 1 and circuit.outputs[0].count == n_classes:
        bits = circuit.outputs[0].format.bits
        nodes = [literal >> 1 for literal in circuit.literals]
        roots = [nodes[k : k + bits] for k in range(0, len(nodes), bits)]
    else:
        return ()
    # Bit k: class k depends on the node.
    reached = [0] * (circuit.first_gate + len(circuit))
    for k, nodes_of_class in enumerate(roots):
        for node in nodes_of_class:
            reached[node] |= 1 << k
    for gate in range(len(circuit) - 1, -1, -1):
        mask = reached[circuit.first_gate + gate]
        if mask:
            for node in circuit.fanins[gate]:
                reached[node] |= mask
    masks = collections.Counter(reached[circuit.first_gate :])
    return tuple(
        ClassStats(
            own=masks[1 << k],
            shared=sum(count for mask, count in masks.items() if mask >> k & 1 and mask != 1 << k),
        )
        for k in range(n_classes)
    )

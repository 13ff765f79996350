"""Joint counting of bits and their source gates.

An FPGA lookup table has 6 inputs. Three two-input gates and their full adder take five tables, but
the two bits of their count depend on only 6 bits: two tables. Bits with shared inputs gain more: a
AND b and (NOT a) AND c are never both 1, so their sum is one bit.
"""

import collections
import dataclasses
import functools
import heapq
from collections.abc import Iterator, Sequence
from fractions import Fraction

from lutjax.circuits import truth
from lutjax.circuits.builder import Builder, Literal, compose_tables

_INPUTS = 6


@dataclasses.dataclass(frozen=True)
class Addend:
    """A bit of a sum as a table over nodes."""

    literal: Literal
    nodes: tuple[int, ...]
    table: int
    saved: int  # tables made redundant by counting this bit through its inputs


@dataclasses.dataclass(frozen=True)
class Joint:
    """A sum of bits as tables over a few nodes."""

    addends: tuple[Addend, ...]
    nodes: tuple[int, ...]  # combined inputs of all addends, at most 6
    counts: tuple[int, ...]  # the sum at each address

    @property
    def least(self) -> int:
        """Minimum sum, used as a constant offset."""
        return min(self.counts)

    def tables(self) -> dict[int, int]:
        """Return tables over the nodes for the sum minus its minimum, by bit position."""
        least, tables = self.least, {}
        for place in range((max(self.counts) - least).bit_length()):
            table = sum(((count - least) >> place & 1) << a for a, count in enumerate(self.counts))
            if table:
                tables[place] = table
        return tables

    def gain(self) -> int:
        """Return the number of saved tables; each bit removed from a sum saves one."""
        # A bit of the count costs its table, and is one more bit to add.
        n_tables = len(set(self.tables().values()))
        return len(self.addends) - 2 * n_tables + sum(a.saved for a in self.addends)

    @functools.cached_property
    def advantage(self) -> Fraction:
        """Gain beyond counting the same bits in threes."""
        return self.gain() - _ALONE * sum(max(a.saved, 0) for a in self.addends)

    def with_addend(self, addend: Addend) -> "Joint | None":
        """Return the sum with an additional bit, or None if it needs too many nodes."""
        nodes = self.nodes + tuple(n for n in addend.nodes if n not in self.nodes)
        if len(nodes) > _INPUTS:
            return None
        # New nodes are the highest address bits, so the counts repeat.
        counts = self.counts * (1 << (len(nodes) - len(self.nodes)))
        at = [nodes.index(n) for n in addend.nodes]
        table = truth.expand(addend.table, len(addend.nodes), at, len(nodes))
        new_counts = tuple([c + (table >> a & 1) for a, c in enumerate(counts)])
        return Joint((*self.addends, addend), nodes, new_counts)


_NOTHING = Joint((), (), (0,))
# Gain required for each saved table, because bits without shared inputs also gain.
_ALONE = Fraction(1, 3)


@dataclasses.dataclass(frozen=True)
class Sum:
    constant: int
    terms: tuple[tuple[Literal, int], ...]  # bits and their weights, at least 1
    joints: tuple[Joint, ...] = ()  # bit sums to be built from gate inputs

    def build_gates(self, builder: Builder) -> list[tuple[Literal, int]]:
        """Build the joint gates and return all terms."""
        terms = list(self.terms)
        for joint in self.joints:
            nodes = [2 * node for node in joint.nodes]
            tables = joint.tables().items()
            terms += [(builder.gate(nodes, table), 1 << place) for place, table in tables]
        return terms


def join_sums(builder: Builder, sums: Sequence[Sum]) -> list[Sum]:
    """Return equivalent sums with fewer bits, without adding gates to the builder."""
    readers = builder.readers([literal for each in sums for literal, _ in each.terms])
    return [_join_sum(builder, each, readers) for each in sums]


def _join_sum(builder: Builder, original: Sum, readers: Sequence[int]) -> Sum:
    views = [
        view
        for literal, weight in original.terms
        if weight == 1
        for view in _views(builder, literal, readers)
    ]
    joints = list(_find_overlaps(views))
    used = {addend.literal for joint in joints for addend in joint.addends}
    joints += _threes([view for view in views if view.literal not in used and len(view.nodes) == 2])
    used = {addend.literal for joint in joints for addend in joint.addends}
    return Sum(
        original.constant + sum(joint.least for joint in joints),
        tuple(
            (literal, weight)
            for literal, weight in original.terms
            if weight > 1 or literal not in used
        ),
        tuple(joints),
    )


def _views(builder: Builder, literal: Literal, readers: Sequence[int]) -> Iterator[Addend]:
    """Yield tables of a bit over successively deeper nodes, if no other gate reads them."""
    node, inverted = literal >> 1, literal & 1
    yield Addend(literal, (node,), 0b01 if inverted else 0b10, 0)
    nodes, table = builder.read(node)
    if not nodes or len(nodes) > 4:
        return
    if inverted:
        table ^= truth.FULL[len(nodes)]
    # Only a gate without other readers becomes redundant when its bit is counted through its
    # inputs.
    saved = int(readers[node] == 1)
    inner = [n for n in nodes if readers[n] == 1 and builder.read(n)[0]]
    yield Addend(literal, nodes, table, saved - len(inner))
    deeper: Sequence[int] = nodes
    for n in inner:
        # The table of this gate replaces the inner gate's, which no other gate reads.
        own = builder.read(n)
        if len({*deeper, *own[0]} - {n}) > truth.MAX_INPUTS:
            return
        deeper, table = compose_tables(deeper, table, n, *own)
    if inner and len(deeper) <= 4:
        yield Addend(literal, tuple(deeper), table, saved)


def _find_overlaps(views: Sequence[Addend]) -> Iterator[Joint]:
    """Yield disjoint sums of bits with common inputs, the largest gain first."""
    readers: dict[int, list[Addend]] = collections.defaultdict(list)
    for view in views:
        for node in view.nodes:
            readers[node].append(view)
    used: set[Literal] = set()
    queue: list[tuple[Fraction, int, Joint]] = []

    def grow(rank: int) -> None:
        # Greedy: add the best neighbor until no bit fits, and keep the best sum on the way. A worse
        # step may lead to a better sum.
        joint = best = _NOTHING.with_addend(views[rank]) or _NOTHING
        while True:
            inside = {addend.literal for addend in joint.addends}
            near = {view for node in joint.nodes for view in readers[node]}
            larger = [
                joined
                for view in sorted(near, key=lambda v: (v.literal, v.nodes))
                if view.literal not in inside
                and view.literal not in used
                and (joined := joint.with_addend(view))
            ]
            if not larger:
                break
            joint = max(larger, key=lambda joined: (joined.advantage, -len(joined.nodes)))
            best = max(best, joint, key=lambda joined: joined.advantage)
        if best.advantage > 0:
            heapq.heappush(queue, (-best.advantage, rank, best))

    for rank, view in enumerate(views):
        if len(view.nodes) > 1:
            grow(rank)
    while queue:
        _, rank, joint = heapq.heappop(queue)
        if used.isdisjoint(addend.literal for addend in joint.addends):
            used.update(addend.literal for addend in joint.addends)
            yield joint
        # Bits of this sum are in a better sum: grow it again without them.
        elif views[rank].literal not in used:
            grow(rank)


def _threes(views: Sequence[Addend]) -> Iterator[Joint]:
    """Yield sums of three two-input gates, if they save tables."""
    remaining = sorted(views, key=lambda view: -view.saved)
    while len(remaining) > 2:
        joint: Joint | None = _NOTHING
        for view in remaining[:3]:
            joint = joint and joint.with_addend(view)
        del remaining[:3]
        if joint and joint.gain() > 0:
            yield joint

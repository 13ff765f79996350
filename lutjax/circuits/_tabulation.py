"""Resynthesis of small circuits from their truth tables."""

from collections.abc import Sequence

import numpy as np

from lutjax.circuits.ands import and_graph
from lutjax.circuits.builder import ONE, ZERO, Builder, Literal, add_inputs, add_outputs
from lutjax.circuits.circuit import Circuit

_MAX_INPUTS = 14


def tabulate(circuit: Circuit) -> Circuit:
    """Rebuild a circuit from its truth table, or return it if it has fewer AND nodes.

    Use it for automaton rules and other functions with few inputs: training finds an arbitrary
    circuit for a rule, and the result is independent of it. The result is a decision diagram of
    all outputs with two-input gates, in one part. Input orders are tried in both directions, and
    with the last input first; the best one is used.

    Raises:
      ValueError: more than 14 inputs.

    Example:
      >>> from lutjax import circuits
      >>> builder = circuits.Builder(simplify=False)
      >>> (a,), (b,) = builder.input("x", 2)
      >>> both, first_only = builder.gate([a, b], 0b1000), builder.gate([a, b], 0b0010)
      >>> long_way = builder.gate([both, first_only], 0b1110)
      >>> builder.output("y", [[long_way]])
      >>> len(builder.circuit()), len(circuits.tabulate(builder.circuit()))
      (3, 0)
    """
    n = circuit.n_inputs
    if n > _MAX_INPUTS:
        raise ValueError(
            f"tabulate: the circuit has {n} inputs; expected at most {_MAX_INPUTS}. Call simplify."
        )
    natural = list(range(n))
    # The size of a diagram depends on the order of its decisions. Four are tried: the inputs as
    # they are and reversed, with the last input at either end.
    last, others = natural[-1:], natural[:-1]
    orders = [natural, natural[::-1], last + others, others[::-1] + last]
    candidates = [circuit, *(_diagram(circuit, order) for order in orders)]
    return min(candidates, key=lambda c: len(and_graph(c)[0]))


def _diagram(circuit: Circuit, order: Sequence[int]) -> Circuit:
    """Build a decision diagram with the first input in `order` as its last decision."""
    n = circuit.n_inputs
    bits: np.ndarray = np.zeros((n, 1 << n), np.uint8)
    for k, i in enumerate(order):
        bits[i] = np.arange(1 << n) >> k & 1
    answers = circuit.evaluate(np.packbits(bits, axis=1, bitorder="little"))
    builder = Builder(merge=2)
    inputs = add_inputs(builder, circuit.inputs)
    known: dict[tuple[int, int], Literal] = {}

    def build(table: int, k: int) -> Literal:
        full = (1 << (1 << k)) - 1
        if table in (0, full):
            return ONE if table else ZERO
        # A table and its inverse are one diagram, with an inverted literal.
        inverted = table & 1
        if inverted:
            table ^= full
        if (table, k) not in known:
            half = 1 << (k - 1)
            low, high = table & (1 << half) - 1, table >> half
            a, b = build(low, k - 1), build(high, k - 1)
            known[table, k] = _select_branch(builder, inputs[order[k - 1]], a, b, low, high)
        return known[table, k] ^ inverted

    end = (1 << (1 << n)) - 1
    literals = [build(int.from_bytes(row.tobytes(), "little") & end, n) for row in answers]
    add_outputs(builder, circuit.outputs, literals)
    return builder.circuit({k: v for k, v in circuit.about.items() if k != "vote_gates"})


def _select_branch(
    builder: Builder, x: Literal, a: Literal, b: Literal, low: int, high: int
) -> Literal:
    """Return a, with table `low`, where x is 0, else b."""
    if a == b:
        return a
    if a == b ^ 1:
        return builder.gate([x, a], 0b0110)
    # If one branch implies the other, the selection takes one gate less.
    if not low & ~high:
        return builder.gate([a, builder.gate([x, b], 0b1000)], 0b1110)
    if not high & ~low:
        return builder.gate([b, builder.gate([x, a], 0b0100)], 0b1110)
    return builder.gate([builder.gate([x, b], 0b1000), builder.gate([x, a], 0b0100)], 0b1110)

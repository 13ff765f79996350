"""Circuits for page and picture tests."""

import random

from lutjax.circuits import Builder, Format

AND, OR, XOR, MAJORITY, PARITY = 0b1000, 0b1110, 0b0110, 0b11101000, 0b10010110


def random_circuit(
    seed,
    n_inputs,
    n_gates,
    *,
    arities=(0, 1, 2, 3, 4, 5, 6, 7, 8),
    ports=None,
    about=None,
    simplify=False,
    near=60,
):
    """Return random gates over random nodes; the outputs are literals for the last gates, inputs and constants.

    Args:
      n_inputs: input bits, or ports as names with a count and a format.
      ports: outputs as names with a count and a format.
      near: number of preceding nodes read by most gates.
    """
    draw = random.Random(seed)
    builder = Builder(simplify=simplify)
    if isinstance(n_inputs, int):
        n_inputs = {"x": (n_inputs, Format())}
    nodes = [0]
    for name, (count, form) in n_inputs.items():
        nodes += [bit for number in builder.input(name, count, form) for bit in number]
    builder.start_part("layer 1")
    for k in range(n_gates):
        if k == n_gates // 2:
            builder.start_part("layer 2")
        n, nearest = draw.choice(arities), nodes[-near:] if draw.random() < 0.8 else nodes
        fanin = [draw.choice(nearest) ^ draw.getrandbits(1) for _ in range(n)]
        nodes.append(builder.gate(fanin, draw.getrandbits(1 << n)))
    for name, (count, form) in (ports or {"y": (8, Format())}).items():
        bits = [draw.choice(nodes[-40:]) ^ draw.getrandbits(1) for _ in range(count * form.bits)]
        if name == "y" and ports is None:
            bits[:3] = [0, 1, 3]
        builder.output(
            name, [bits[k : k + form.bits] for k in range(0, len(bits), form.bits)], form
        )
    return builder.circuit(about)


def life_circuit(channels=1, *, periodic=True):
    """Return the Game of Life rule in the first channel; channel k receives the cell's old state from channel k - 1."""
    builder = Builder()
    cells = [bit for (bit,) in builder.input("x", 9 * channels)]
    *near, center = cells[::channels]
    builder.start_part("perception")
    sums, carries = [], []
    for a, b, c in (near[:3], near[3:6]):
        sums.append(builder.gate((a, b, c), PARITY))
        carries.append(builder.gate((a, b, c), MAJORITY))
    sums.append(builder.gate(near[6:], XOR))
    carries.append(builder.gate(near[6:], AND))
    builder.start_part("update")
    ones = builder.gate(sums, PARITY)
    carries.append(builder.gate(sums, MAJORITY))
    first, second = builder.gate(carries[:3], PARITY), builder.gate(carries[:3], MAJORITY)
    twos, fours = builder.gate((first, carries[3]), XOR), builder.gate((first, carries[3]), AND)
    many = builder.gate((second, fours), OR)
    alive = builder.gate((ones, twos, many, center), sum(1 << k for k in (0b0011, 0b1011, 0b1010)))
    builder.output("y", [[alive]] + [[bit] for bit in cells[8 * channels : 9 * channels - 1]])
    return builder.circuit({"kind": "automaton", "channels": channels, "periodic": periodic})

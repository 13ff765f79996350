"""Circuit strategies, including circuits prone to format errors."""

import numpy as np
from hypothesis import strategies as st

from lutjax.circuits import Circuit, Format, Port, truth

FORMATS = [Format(), Format(3), Format(4, signed=True), Format(5, 2), Format(4, 4, signed=True)]


INPUTS, OUTPUTS = (Port("x", 4, Format(3)),), (Port("y", 3, Format(2)),)


@st.composite
def plans(draw, most_gates=24, most_inputs=8):
    """Draw circuit plans for `made`. The type checks that run in `made` draw random numbers, which a strategy must not do."""
    inputs = [
        (name, draw(st.integers(1, most_inputs // 2)), draw(st.sampled_from(FORMATS)))
        for name in ("x", "second")[: draw(st.integers(1, 2))]
    ]
    nodes = 1 + sum(count * format.bits for _, count, format in inputs)
    gates = []
    for g in range(draw(st.integers(0, most_gates))):
        n = draw(st.integers(0, 8))
        near = st.one_of(st.integers(max(0, nodes + g - 16), nodes + g - 1), st.just(0))
        gates.append(
            (draw(st.lists(near, min_size=n, max_size=n)), draw(st.integers(0, truth.FULL[n])))
        )
    outputs = [
        (name, 2, draw(st.sampled_from(FORMATS))) for name in ("y", "z")[: draw(st.integers(1, 2))]
    ]
    n = sum(count * format.bits for _, count, format in outputs)
    literals = draw(st.lists(st.integers(0, 2 * (nodes + len(gates)) - 1), min_size=n, max_size=n))
    return inputs, outputs, gates, literals


def made(plan):
    """Build a circuit from a plan: any gates over ports in any format, with constants, repeated and unread inputs, and unread gates."""
    inputs, outputs, gates, literals = plan
    ports = [tuple(Port(*port) for port in some) for some in (inputs, outputs)]
    parts = (("first", len(gates) // 2), ("rest", len(gates) - len(gates) // 2))
    fanins, tables = tuple(tuple(nodes) for nodes, _ in gates), tuple(table for _, table in gates)
    return Circuit(
        *ports, fanins, tables, tuple(literals), parts, {"kind": "network", "image": [2, 2]}
    )


def drawn(seed, n_gates=40, inputs=INPUTS, outputs=OUTPUTS):
    """Build a circuit from gates with 1 to 6 inputs, mostly reading recent nodes so that it has many levels."""
    rng = np.random.default_rng(seed)
    first = 1 + sum(port.n_bits for port in inputs)
    fanins, tables = [], []
    for g in range(n_gates):
        n = int(rng.choice([1, 2, 2, 3, 3, 3, 4, 6]))
        near = max(1, first + g - 10)
        fanins.append(
            tuple(int(rng.integers(near if rng.random() < 0.6 else 1, first + g)) for _ in range(n))
        )
        tables.append(int.from_bytes(rng.bytes(8), "little") & truth.FULL[n])
    n_outputs = sum(port.n_bits for port in outputs)
    literals = rng.integers(2 * max(1, first + n_gates - 12), 2 * (first + n_gates), n_outputs)
    return Circuit(inputs, outputs, tuple(fanins), tuple(tables), tuple(literals.tolist()))


def _special():
    x, y = (Port("x", 2),), (Port("y", 2),)
    ports = (Port("g0", 2), Port("d1_3")), (Port("t3_96"), Port("valid"))
    return {
        "no gates": Circuit(x, y, (), (), (2, 5)),
        "constants": Circuit(x, y, (), (), (0, 1)),
        "one gate": Circuit(x, (Port("y"),), ((1, 2),), (0b0110,), (6,)),
        "one inverted": Circuit(x, (Port("y"),), ((1, 2),), (0b0110,), (7,)),
        "gates without inputs": Circuit(x, y, ((), (3, 1), ()), (1, 0b1000, 0), (8, 11)),
        "repeated fan-ins": Circuit(x, y, ((1, 1, 2), (3, 3, 3, 3)), (0b10010110, 0x8001), (6, 8)),
        "constant fan-ins": Circuit(x, y, ((0, 0, 0, 0), (0, 1, 0, 2)), (0x0001, 0x1234), (6, 8)),
        "constant tables": Circuit(x, y, ((1, 2, 1, 2), (1, 2)), (0xFFFF, 0), (6, 8)),
        "one gate twice": Circuit(x, y, ((1, 2),), (0b0110,), (6, 6)),
        "eight inputs": Circuit((Port("x", 8),), (Port("y"),), (tuple(range(1, 9)),), (truth.FULL[8] // 3 ^ 1 << 77,), (18,)),
        "names of our own": Circuit(*ports, ((1, 2, 3), (4, 1, 2, 3)), (0x96, 0x1EE8), (8, 11)),
    }  # fmt: skip


SPECIAL = _special()


def words(circuit):
    """Return all inputs for a circuit with at most 12 bits, else 1024 random ones, as words for `evaluate`."""
    n = circuit.n_inputs
    if n > 12:
        return np.random.default_rng(0).integers(0, 2**64, (n, 16), dtype=np.uint64)
    bits = (np.arange(max(64, 1 << n)) >> np.arange(n)[:, None] & 1).astype(np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def same(first, second):
    """Return True if two circuits have the same ports and compute the same outputs for `words`."""
    given = words(first)
    ports = first.inputs == second.inputs and first.outputs == second.outputs
    return ports and np.array_equal(first.evaluate(given), second.evaluate(given))


def numbers(circuit, n=50, seed=0):
    """Return samples for the input ports in their formats."""
    rng = np.random.default_rng(seed)
    ports = ((port.format, (n, port.count)) for port in circuit.inputs)
    return tuple(
        f.decode(rng.integers(0, 1 << f.bits, shape, dtype=np.uint64)) for f, shape in ports
    )


def flipped(circuit, gate, address=0):
    """Return the circuit with one inverted entry in one table."""
    tables = list(circuit.tables)
    tables[gate] ^= 1 << address
    return Circuit(circuit.inputs, circuit.outputs, circuit.fanins, tuple(tables), circuit.literals)


def visibly_flipped(circuit):
    """Yield circuits with one inverted table entry and a different output for `words`."""
    for gate in range(len(circuit)):
        for address in range(1 << len(circuit.fanins[gate])):
            wrong = flipped(circuit, gate, address)
            if not same(circuit, wrong):
                yield wrong

"""Circuits: tables, simplification, evaluation, arithmetic, AND nodes and counts."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lutjax import circuits
from lutjax.circuits import Builder, Circuit, Format, Port, arithmetic, ports, truth
from lutjax.circuits.ands import and_graph, operations

AND, OR, XOR = 0b1000, 0b1110, 0b0110
X, Y = Port("x", 2), Port("y")


def assignments(n):
    """Return all n-bit values, ``[2**n, n]``, with the first bit fastest."""
    return np.arange(1 << n)[:, None] >> np.arange(n) & 1


def answers(circuit, bits):
    """Evaluate the output bits gate by gate and sample by sample: the slow circuit definition."""
    result = []
    for sample in bits.tolist():
        values = [0, *sample]
        for nodes, table in zip(circuit.fanins, circuit.tables, strict=True):
            values.append(table >> sum(values[n] << k for k, n in enumerate(nodes)) & 1)
        result.append([values[k >> 1] ^ k & 1 for k in circuit.literals])
    return np.array(result, int).reshape(len(bits), len(circuit.literals))


def begun(n, **options):
    """Return a builder and its n input bits."""
    builder = Builder(**options)
    return builder, [bit for (bit,) in builder.input("x", n)]


def fan_ins(circuit):
    return [len(nodes) for nodes in circuit.fanins]


@st.composite
def tables(draw, least=0, most=8):
    n = draw(st.integers(least, most))
    return n, draw(st.integers(0, truth.FULL[n]))


@st.composite
def recipes(draw):
    """Arbitrary gates: constants, repeated and unread inputs, inverted literals, unread gates."""
    n_inputs = draw(st.integers(1, 8))
    gates = []
    for k in range(draw(st.integers(0, 24))):
        n, table = draw(tables())
        nodes = draw(st.lists(st.integers(max(-16, -n_inputs - k - 1), 1), min_size=n, max_size=n))
        gates.append((nodes, draw(st.integers(0, (1 << n) - 1)), table))
    outputs = st.lists(st.integers(0, 2 * (n_inputs + len(gates)) + 1), min_size=1, max_size=6)
    return n_inputs, gates, draw(outputs)


def raw_circuit(recipe):
    n_inputs, gates, outputs = recipe
    builder, bits = begun(n_inputs, simplify=False)
    literals = [0, *bits]
    for k, (nodes, inverted, table) in enumerate(gates):
        if k % 8 == 0:
            builder.start_part(f"part {k}")
        literals.append(
            builder.gate([literals[n] ^ inverted >> i & 1 for i, n in enumerate(nodes)], table)
        )
    builder.output("y", [[k] for k in outputs])
    return builder.circuit({"kind": "network"})


# ------------------------------------------------------------------------------------------- truth tables
@settings(max_examples=40)
@given(table=tables(least=1), data=st.data())
def test_operations_on_tables(table, data):
    n, table = table
    bits, values = assignments(n), table >> np.arange(1 << n).astype(object) & 1

    def index(rows):
        return (rows << np.arange(rows.shape[1])).sum(1)

    def same(result, rows, m):
        assert 0 <= result <= truth.FULL[m]
        assert [result >> a & 1 for a in range(1 << m)] == values[index(rows)].tolist()

    i, value = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 1))
    shorter = assignments(n - 1)
    same(truth.cofactor(table, n, i, value), np.insert(shorter, i, value, axis=1), n - 1)
    same(truth.negate(table, n, i), bits ^ (np.arange(n) == i), n)
    order = data.draw(st.permutations(range(n)))
    same(truth.permute(table, n, order), bits[:, np.argsort(order)], n)
    m = data.draw(st.integers(n, 8))
    positions = data.draw(st.permutations(range(m)))[:n]
    same(truth.expand(table, n, positions, m), assignments(m)[:, positions], m)
    varies = [
        (values[index(bits)] != values[index(bits ^ (np.arange(n) == k))]).any() for k in range(n)
    ]
    assert truth.support(table, n) == tuple(np.nonzero(varies)[0])
    assert truth.from_function(lambda *x: truth.evaluate(table, x), n) == table
    if n > 1:
        i, j = sorted(data.draw(st.permutations(range(n)))[:2])
        same(
            truth.merge_inputs(table, n, i, j), np.insert(shorter, j, shorter[:, i], axis=1), n - 1
        )


@given(outer=tables(least=1), inner=tables(least=1), data=st.data())
def test_composition_of_tables(outer, inner, data):
    (n, outer), (k, inner) = outer, inner
    i = data.draw(st.integers(0, n - 1))
    m = data.draw(st.integers(max(n - 1, k), 8))
    positions = data.draw(st.permutations(range(m)))[:k]
    result = truth.compose(outer, n, i, inner, positions, m)
    for a, x in enumerate(assignments(m).tolist()):
        rest = x[: n - 1]
        rest.insert(i, truth.evaluate(inner, [x[p] for p in positions]))
        assert result >> a & 1 == truth.evaluate(outer, rest)


@given(table=tables())
def test_cubes_are_an_irredundant_sum_of_products(table):
    n, table = table

    def cover(cubes):
        return sum(any(a & read == value for read, value in cubes) << a for a in range(1 << n))

    cubes = truth.cubes(table, n)
    assert cover(cubes) == table
    assert all(not value & ~read for read, value in cubes)
    for k, (read, value) in enumerate(cubes):
        assert cover(cubes[:k] + cubes[k + 1 :]) != table
        for i in range(n):
            if read >> i & 1:
                assert cover([(read & ~(1 << i), value & ~(1 << i))]) & ~table


# ------------------------------------------------------------------------------------------- simplification
@settings(max_examples=30)
@given(recipe=recipes(), merge=st.integers(2, 8))
def test_simplified_circuits_compute_the_same(recipe, merge):
    raw = raw_circuit(recipe)
    bits = assignments(raw.n_inputs)
    want = answers(raw, bits)
    assert (raw(bits).reshape(want.shape) == want).all()
    simple = circuits.simplify(raw, merge=merge)
    assert (answers(simple, bits) == want).all()
    assert len(circuits.simplify(simple, merge=merge)) <= len(simple) <= len(raw)
    assert [name for name, _ in simple.parts] == [name for name, _ in raw.parts]
    assert (simple.inputs, simple.outputs, simple.about) == (raw.inputs, raw.outputs, raw.about)
    read = set(itertools.chain.from_iterable(simple.fanins)) | {k >> 1 for k in simple.literals}
    assert read >= set(range(simple.first_gate, simple.first_gate + len(simple)))  # no dead gate
    for nodes, table in zip(simple.fanins, simple.tables, strict=True):
        assert len(nodes) >= 2
        assert list(nodes) == sorted(set(nodes) - {0})
        assert truth.support(table, len(nodes)) == tuple(range(len(nodes)))


@settings(max_examples=60)
@given(table=tables(least=2), data=st.data())
def test_a_function_its_complement_and_its_permutations_are_one_gate(table, data):
    n, table = table
    builder, x = begun(n, merge=2)
    first = builder.gate(x, table)
    assert builder.gate(x, table ^ truth.FULL[n]) == first ^ 1
    order = data.draw(st.permutations(range(n)))
    assert builder.gate([x[k] for k in order], truth.permute(table, n, order)) == first
    i = data.draw(st.integers(0, n - 1))
    x[i] ^= 1
    assert builder.gate(x, truth.negate(table, n, i)) == first


def test_gates_read_through_what_they_do_not_need():
    builder, (a, b) = begun(2, merge=2)
    both, either = builder.gate([a, b], AND), builder.gate([a, b], OR)
    assert builder.gate([both, a], OR) == a  # absorption
    assert builder.gate([both, either], AND) == both
    assert builder.gate([both, either ^ 1], AND) == 0
    assert builder.gate([both ^ 1, either], AND) == builder.gate([a, b], XOR)


def test_gates_absorb_what_only_they_read():
    builder, (a, b, c, d) = begun(4, merge=3)
    three = builder.gate([builder.gate([a, b], XOR), c], AND)
    builder.output("y", [[builder.gate([three, d], OR)], [three]])
    circuit = builder.circuit()
    assert circuit.fanins == ((1, 2, 3), (4, 5))
    assert fan_ins(circuits.simplify(circuit, merge=4)) == [3, 2]  # an output is a reader
    assert fan_ins(circuits.builder.rebuild(circuit, Builder(merge=2))) == [3, 2]


def test_from_four_inputs_on_all_readers_take_a_gate_in():
    builder, x = begun(5, merge=6)
    inner = builder.gate(x[:3], 0b10010110)
    builder.output("y", [[builder.gate([inner, bit], AND)] for bit in x[3:]])
    assert fan_ins(builder.circuit()) == [4, 4]


@given(recipe=recipes())
def test_tabulated_circuits_compute_the_same(recipe):
    raw = raw_circuit(recipe)
    bits = assignments(raw.n_inputs)
    small = circuits.tabulate(raw)
    assert (answers(small, bits) == answers(raw, bits)).all()
    assert len(and_graph(small)[0]) <= len(and_graph(raw)[0])
    assert (small.inputs, small.outputs) == (raw.inputs, raw.outputs)


def test_a_rule_of_few_inputs_is_found_anew():
    """Rule for the Game of Life: 8 neighbors, then the cell."""
    builder, x = begun(9, merge=2)
    count = arithmetic.popcount(builder, x[:8])
    alive = [
        builder.gate([*count, x[8]], 1 << (k | 16 * cell)) for k, cell in ((3, 0), (3, 1), (2, 1))
    ]
    builder.output("y", [[builder.gate(alive, 0b11111110)]])
    circuit = builder.circuit()
    small = circuits.tabulate(circuit)
    assert len(and_graph(small)[0]) <= 56
    assert (small(assignments(9)) == circuit(assignments(9))).all()


@settings(max_examples=8)
@given(recipe=recipes(), goal=st.sampled_from(["gates", "ands"]), seed=st.integers(0, 3))
def test_resynthesized_circuits_compute_the_same(recipe, goal, seed):
    raw = raw_circuit(recipe)
    bits = assignments(raw.n_inputs)
    small, again = (circuits.resynthesize(raw, goal, effort=0.0005, seed=seed) for _ in range(2))
    assert (answers(small, bits) == answers(raw, bits)).all()
    assert (small.inputs, small.outputs) == (raw.inputs, raw.outputs)
    count = operations if goal == "gates" else and_graph
    assert len(count(small)[0]) <= len(count(raw)[0])
    assert small == again


@pytest.mark.parametrize(("goal", "count"), [("gates", 5), ("ands", 7)])
def test_a_full_adder_is_found(goal, count, without_typechecking):
    builder, x = begun(3, merge=2)
    sums = []
    for total in ({1, 3}, {2, 3}):  # as sums of products
        products = []
        for a in range(8):
            if a.bit_count() in total:
                low, mid, high = (bit ^ (~a >> k & 1) for k, bit in enumerate(x))
                products.append(builder.gate([low, builder.gate([mid, high], AND)], AND))
        while len(products) > 1:
            products.append(builder.gate([products.pop(0), products.pop(0)], OR))
        sums += [products]
    builder.output("y", sums)
    circuit = builder.circuit()
    result = circuits.resynthesize(circuit, goal, effort=0.01)
    assert len((operations if goal == "gates" else and_graph)(result)[0]) == count < len(circuit)
    assert (result(assignments(3)) == circuit(assignments(3))).all()


@pytest.mark.parametrize("inverted", [0, 1])
def test_absorption_may_leave_an_input(inverted):
    """Five inputs exceed the read-through limit for incoming gates, but absorbed gates may reveal the function."""
    builder, (a, *rest) = begun(5, merge=6)
    parts = [
        builder.gate([a, *rest], truth.from_function(lambda a, *r, s=s: a and all(r) == s, 5))
        for s in (True, False)
    ]
    y = builder.gate(parts, OR)
    builder.output("y", [[y ^ inverted], [builder.gate([y, rest[0]], AND)]])
    circuit = builder.circuit()
    assert circuit.literals == (a ^ inverted, 2 * circuit.first_gate)
    assert (circuit.fanins, circuit.tables) == (((1, 2),), (AND,))


def test_raw_circuits_stay_as_they_are_given():
    builder, (a,) = begun(1, simplify=False)
    y = builder.gate([a, a, 1], 0b10000000)
    builder.gate([], 1)
    builder.output("y", [[y ^ 1]])
    circuit = builder.circuit()
    assert circuit.fanins == ((1, 1, 0), ())
    assert circuit.parts == (("gates", 2),)
    assert circuit([0, 1]).tolist() == [1, 0]
    assert circuit.levels == (0, 0, 1, 0)


@pytest.mark.parametrize("merge", [2, 6])
def test_large_circuits(merge):
    """Wide and deep circuits need no recursion; samples are evaluated in blocks."""
    rng = np.random.default_rng(0)
    builder, x = begun(300, merge=merge)
    for _ in range(5):
        wires = rng.integers(0, 300, (300, 2)).tolist()
        kinds = rng.choice([1, 2, 4, 6, 7, 8, 9, 11, 13, 14], 300).tolist()
        x = [builder.gate([x[i], x[j]], t) for (i, j), t in zip(wires, kinds, strict=True)]
    chain = x[0]
    for k in range(500):
        chain = builder.gate([chain, x[k % 300], x[k * 7 % 300]], 0b11001010)
    builder.output("y", [[bit] for bit in [*x, chain]])
    circuit = builder.circuit()
    bits = rng.integers(0, 2, (70, 300))
    assert (circuit(bits)[:3] == answers(circuit, bits[:3])).all()
    octets = np.packbits(bits.T.astype(np.uint8), axis=1, bitorder="little")
    words = np.tile(octets, (1, 500))
    assert (circuit.evaluate(words) == np.tile(circuit.evaluate(octets), (1, 500))).all()


# ------------------------------------------------------------------------------------------- AND nodes
@settings(max_examples=20)
@given(recipe=recipes())
def test_and_nodes_and_operations_compute_the_same(recipe):
    raw = raw_circuit(recipe)
    bits = assignments(raw.n_inputs)
    (ands, _), (nodes, _) = and_graph(raw), operations(raw)
    for result, outputs in (and_graph(raw), operations(raw)):
        values = [np.zeros(len(bits), int), *bits.T]
        for a, b in result:
            x, y = values[a >> 1] ^ a & 1, values[b >> 1] ^ b & 1
            assert 2 * len(values) > max(a, b)
            assert a > b or not (a | b) & 1
            values.append(x ^ y if a < b else x & y)
        assert (np.stack([values[k >> 1] ^ k & 1 for k in outputs], 1) == answers(raw, bits)).all()
    assert all(a > b for a, b in ands)
    assert len(set(ands)) == len(ands) >= len(nodes)
    read = {k >> 1 for pair in ands for k in pair} | {k >> 1 for k in and_graph(raw)[1]}
    assert set(range(raw.first_gate, raw.first_gate + len(ands))) <= read


@pytest.mark.parametrize(("function", "n", "count"), [
    (lambda *x: all(x), 8, 7),
    (lambda *x: sum(x) % 2, 8, 21),
    (lambda a, b, s: a if s else b, 3, 3),
    (lambda *x: sum(x) > 1, 3, 4),
    (lambda a, b, c, d, e, f: (a and not b) != (c or d) or (e and f), 6, 7),
])  # fmt: skip
def test_tables_are_taken_apart_well(function, n, count):
    builder, x = begun(n, merge=2)
    builder.output("y", [[builder.gate(x, truth.from_function(function, n))]])
    assert len(and_graph(builder.circuit())[0]) == count


# ------------------------------------------------------------------------------------------- arithmetic
STYLES = [{"lut": k} for k in (2, 3, 4, 6)] + [{"lut": k, "simplify": False} for k in (2, 6)]


def value_of(literal, bits):
    return (bits[:, (literal >> 1) - 1] if literal > 1 else np.zeros(len(bits), int)) ^ literal & 1


@pytest.mark.parametrize("style", STYLES, ids=str)
@given(
    groups=st.lists(st.lists(st.integers(0, 15), max_size=16), min_size=1, max_size=4),
    relative=st.booleans(),
)
def test_counts_and_their_first_largest(style, groups, relative):
    """Repeated, opposite and constant literals, empty sums, ties, one number."""
    bits = assignments(7)
    builder, _ = begun(7, **style)
    counts = np.stack(
        [sum((value_of(k, bits) for k in group), np.zeros(128, int)) for group in groups], 1
    )
    builder.start_part("votes")
    alone = arithmetic.popcount(builder, groups[0])
    numbers = arithmetic.popcounts(builder, groups, relative=relative)
    builder.output("alone", [alone])
    builder.output("votes", numbers)
    builder.output("first", [arithmetic.argmax(builder, numbers)])
    alone, votes, first = builder.circuit()(bits)
    assert (alone == counts[:, 0]).all()
    votes = votes.reshape(128, -1)
    assert len(np.unique(counts - votes)) == 1 if relative else (votes == counts).all()
    assert (first == counts.argmax(1)).all()


@pytest.mark.parametrize("lut", [2, 3, 6])
def test_bits_are_counted_through_gates_that_share_inputs(lut):
    builder, x = begun(6, lut=lut, merge=lut)
    kinds = np.random.default_rng(lut).choice([1, 2, 4, 6, 8, 14], 60).tolist()
    pairs = itertools.cycle(itertools.combinations(x, 2))
    gates = [builder.gate(pair, kind) for kind, pair in zip(kinds, pairs, strict=False)]
    groups = [gates[k::3] for k in range(3)]
    builder.output("y", arithmetic.popcounts(builder, groups))
    for k, group in enumerate(groups):
        builder.output(f"y{k}", [[bit] for bit in group])
    result, *rest = builder.circuit()(assignments(6))
    assert (result == np.stack([bits.sum(1) for bits in rest], 1)).all()


def test_bits_over_more_nodes_than_a_table_reads_are_counted():
    """Gates over four gates with disjoint inputs: reading through them would take 12 nodes."""
    builder, x = begun(12, lut=6, merge=6)
    majorities = [builder.gate(x[k : k + 3], 0b11101000) for k in range(0, 12, 3)]
    one = builder.gate(majorities, 0b0110_1001_1001_0110)  # parity
    builder.output("y", arithmetic.popcounts(builder, [[one, x[0]]]))
    bits = assignments(12)
    expected = (bits.reshape(-1, 4, 3).sum(2) >= 2).sum(1) % 2 + bits[:, 0]
    assert (builder.circuit()(bits) == expected).all()


def test_exclusive_gates_are_one_bit_of_a_sum():
    builder, (a, b, c) = begun(3, lut=6, merge=6)
    gates = [builder.gate([a, b], AND), builder.gate([a, c], 0b0100)]  # never both 1
    builder.output("y", arithmetic.popcounts(builder, [gates]))
    assert len(builder.circuit()) == 1


@pytest.mark.parametrize("lut", [2, 3, 6])
@pytest.mark.parametrize("format", ["uint1", "int1", "uint4", "int4", "uint9", "int9"])
def test_comparison_with_constants(lut, format):
    form = Format.parse(format)
    least, most = form.range
    numbers, limits = np.arange(least, most + 1), np.arange(least - 2, most + 3)
    if form.bits > 4:
        limits = np.array(
            [
                least - 5000,
                least,
                least + 1,
                -2,
                -1,
                0,
                1,
                30,
                31,
                32,
                128,
                most - 1,
                most,
                most + 5000,
            ]
        )
    builder = Builder(lut=lut)
    (x,) = builder.input("x", 1, form)
    above = [arithmetic.above_constant(builder, x, int(k), signed=form.signed) for k in limits]
    builder.output("y", [[bit] for bit in above])
    if form.bits == 4 and form.signed:
        builder.output("z", [[arithmetic.above_signed(builder, x, int(k))] for k in numbers])
    result = builder.circuit()(numbers)
    if isinstance(result, tuple):
        result, of_signed = result
        assert (of_signed == (numbers[:, None] > numbers)).all()
    assert (result == (numbers[:, None] > limits)).all()


@pytest.mark.parametrize("lut", [2, 3, 5, 6])
@pytest.mark.parametrize("bits", [1, 4, 5])
def test_comparison_of_numbers(lut, bits):
    builder = Builder(lut=lut)
    a, b = builder.input("x", 2, Format(bits))
    builder.output("y", [[arithmetic.greater_equal(builder, a, b)]])
    x = np.stack(np.meshgrid(*[np.arange(1 << bits)] * 2), -1).reshape(-1, 2)
    assert (builder.circuit()(x) == (x[:, 0] >= x[:, 1])).all()


@pytest.mark.parametrize("lut", [2, 3, 6])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_first_largest(lut, count):
    builder = Builder(lut=lut)
    builder.output("y", [arithmetic.argmax(builder, builder.input("x", count, Format(4)))])
    x = np.random.default_rng(0).integers(0, 4, (500, count))  # many ties
    circuit = builder.circuit()
    assert (circuit(x) == x.argmax(1)).all()
    assert circuit.outputs[0].format.bits == max(1, (count - 1).bit_length())


@pytest.mark.parametrize(("lut", "most"), [(4, 2.0), (5, 1.5), (6, 1.06)])
@pytest.mark.parametrize("n", [20, 107])
def test_sums_take_about_a_table_for_each_bit_that_goes(lut, most, n):
    builder, bits = begun(n, lut=lut, merge=lut)
    builder.output("y", [arithmetic.popcount(builder, bits)])
    circuit = builder.circuit()
    x = np.random.default_rng(0).integers(0, 2, (99, n))
    assert (circuit(x) == x.sum(1)).all()
    assert len(circuit) <= most * (n - n.bit_length()) + 2


# ------------------------------------------------------------------------------------------- numbers of ports
@given(
    bits=st.integers(1, 64), fraction=st.integers(0, 20), signed=st.booleans(),
    codes=st.lists(st.integers(0), min_size=1),
)  # fmt: skip
def test_formats(bits, fraction, signed, codes):
    form = Format(bits, min(fraction, bits) if bits <= 53 else 0, signed)
    assert Format.parse(str(form)) == form
    codes = np.array([code & (1 << bits) - 1 for code in codes], np.uint64)
    numbers = form.decode(codes)
    assert (form.encode(numbers) == codes).all()
    for code, number in zip(codes.tolist(), numbers.tolist(), strict=True):
        whole = code - (1 << bits) if signed and code >> bits - 1 else code
        assert number == (whole / 2**form.fraction if form.fraction else whole)
    least, most = form.range
    for beyond in (least - 1, most + 1):
        if form.fraction or -(2**53) < beyond < 2**53:
            with pytest.raises(ValueError, match=r"Format.encode: numbers\[0\] is"):
                form.encode(np.array([beyond], float))


@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        ("uint8", [256]), ("uint8", [-1]), ("uint8", [0.5]), ("uint8", [np.nan]), ("uint8", [np.inf]), ("int8", [-129]),
        ("int8", [128.0]), ("fixed8.4", [8]), ("fixed8.4", [0.03125]), ("ufixed8.8", [1]), ("ufixed8.8", [True]),
        ("int64", [2.0**63]), ("uint64", [2.0**64]), ("uint63", np.array([2**63], np.uint64)),
    ],
)  # fmt: skip
def test_numbers_that_a_format_does_not_have(form, numbers):
    with pytest.raises(ValueError, match=f"{form} has .* from .* to .*Round and clip"):
        Format.parse(form).encode(np.array(numbers))


def test_half_precision_is_encoded():
    numbers = np.asarray(jnp.array([0.5, 3], jnp.bfloat16))
    assert Format.parse("fixed8.4").encode(numbers).tolist() == [8, 48]


def test_numbers_in_numbers_out():
    builder = Builder()
    x = builder.input("x", 2, Format.parse("fixed6.2"))
    (s,) = builder.input("s")
    chosen = [arithmetic.select(builder, a, b, s[0]) for a, b in zip(*x, strict=True)]
    builder.output("y", [chosen], Format.parse("fixed6.2"))
    builder.output("z", [s, [0]])
    numbers, first = np.array([[1.25, -8.0], [7.75, 0.0]]), np.array([True, False])
    y, z = builder.circuit()(numbers, first)
    assert y.tolist() == [1.25, 0.0]
    assert z.tolist() == [[1, 0], [0, 0]]


# ------------------------------------------------------------------------------------------- refusals
GOOD = {"inputs": (X,), "outputs": (Y,), "fanins": ((1, 2),), "tables": (8,), "literals": (6,)}
TWO_PORTS = Circuit((X, Port("s")), (Y,), ((1, 2),), (8,), (6,))


def wire(n):
    """Gate-free circuit with n input bits."""
    return Circuit((Port("x", n),), (Y,), (), (), (2,))


def gate(*literals, table):
    return begun(1)[0].gate(literals, table)


@pytest.mark.parametrize(("change", "message"), [
    ({"fanins": ((0, 3),)}, "gate 0, node 3, has the fan-ins .*from 0 to 2"),
    ({"fanins": ((0, -1),)}, "gate 0, node 3, has the fan-ins"),
    ({"fanins": ((0, 2**70),)}, "gate 0, node 3, has the fan-ins"),
    ({"fanins": ((1,) * 9,)}, "gate 0 has 9 inputs; expected at most 8"),
    ({"tables": (16,)}, r"table of gate 0 is 16; expected 0 to 2\*\*4 - 1"),
    ({"tables": (-1,)}, "table of gate 0 is -1"),
    ({"tables": (8, 8)}, "1 fanins and 2 tables"),
    ({"literals": (8,)}, "literal 0 is 8; .* from 0 to 7"),
    ({"literals": (6, 6)}, "2 literals; the output ports have 1 bits"),
    ({"parts": (("a", 2),)}, r"parts have \[2\] gates"),
    ({"parts": (("a", 1), ("a", 0))}, "different, non-empty"),
    ({"outputs": (Port("X"),)}, "port names 'x' and 'X' differ only in case"),
])  # fmt: skip
def test_fields_that_make_no_circuit(change, message):
    assert len(Circuit(**GOOD)) == 1
    with pytest.raises(ValueError, match=f"Circuit: .*{message}"):
        Circuit(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda name=name: Port(name), f"Port: name is '{name}'; ")
            for name in ("", "2x", "a b", "x-y", "é", "wire", "int", "signal", "ENTITY", "Register", "logic", "_Bool")
        ),
        *(
            (lambda text=text: Format.parse(text), "Format")
            for text in ("uint", "uint0", "uint65", "fixed8", "int8.4", "float32", "fixed8.9", "fixed60.4", "", "u int8")
        ),
        (lambda: Format(8).encode(np.zeros(2, np.complex64)), "Format.encode: numbers is complex64"),
        (lambda: circuits.tabulate(wire(15)), "the circuit has 15 inputs; expected at most 14. Call simplify"),
        (lambda: circuits.resynthesize(wire(13)), "the circuit has 13 inputs; at most 12 are supported. Call simplify"),
        (lambda: circuits.resynthesize(wire(2), "luts"), "goal is 'luts'; expected one of"),
        (lambda: circuits.resynthesize(wire(2), effort=0), "effort is 0; it must be positive"),
        (lambda: arithmetic.argmax(Builder(), [[0] * 4, [0] * 5]), r"numbers have \[4, 5\] bits"),
        (lambda: TWO_PORTS([[0, 1]]), "1 arrays are given; the ports are x, s"),
        (lambda: TWO_PORTS([[0, 1, 1]], [0]), r"x is int64\[1, 3\]; expected shape \[samples, 2\]"),
        (lambda: TWO_PORTS([[0, 1]], [0, 1]), r"have \[1, 2\] samples"),
        (lambda: TWO_PORTS([[0, 2]], [0]), r"numbers\[0, 1\] is 2; uint1 has whole numbers from 0 to 1"),
        (lambda: TWO_PORTS.evaluate(np.zeros((2, 1), np.uint8)), r"words is uint8\[2, 1\]; expected shape \[3, words\]"),
        (lambda: gate(2, table=4), "table is 4 over 1 literals"),
        (lambda: gate(2, 4, table=8), r"literals is \[2, 4\]; expected 0 to 3"),
        (lambda: gate(*[2] * 9, table=0), "at most 8 literals"),
        (lambda: begun(1)[0].output("y", [[2], [2, 2]]), r"have \[1, 2\] bits; the format uint1 has 1"),
        (lambda: begun(1)[0].output("y", []), "no numbers"),
        (lambda: begun(1)[0].output("y", [[4]]), "literals beyond 0 to 3"),
        *(
            (lambda sizes=sizes: Builder(**sizes), "Builder: {} is {}".format(*next(iter(sizes.items()))))
            for sizes in ({"merge": 1}, {"merge": 9}, {"lut": 7}, {"lut": 1})
        ),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_builder_refuses_parts_and_inputs_that_come_late():
    builder, _ = begun(1, simplify=False)
    for name in ("votes", "votes", "argmax"):
        builder.start_part(name)
    with pytest.raises(ValueError, match="name is 'votes', which another part has"):
        builder.start_part("votes")
    builder.gate([], 0)
    with pytest.raises(ValueError, match="declare the inputs first"):
        builder.input("z")


# ------------------------------------------------------------------------------------------- counts
def voting(lut=3, outputs="class"):
    builder, x = begun(8, lut=lut, merge=lut)
    builder.start_part("layer 1")
    bits = [builder.gate([x[i], x[(i + 3) % 8]], t) for i in range(8) for t in (8, 6, 1)]
    builder.start_part("votes")
    numbers = arithmetic.popcounts(
        builder, [bits[k::3] for k in range(3)], relative=outputs == "class"
    )
    if outputs == "class":
        builder.start_part("argmax")
        numbers = [arithmetic.argmax(builder, numbers)]
    builder.output("y", numbers)
    return builder.circuit({"kind": "classifier", "n_classes": 3})


def test_counts_of_a_circuit():
    circuit = voting()
    stats = circuits.statistics.compute(circuit, lut6=False)
    assert (stats.gates, stats.levels, stats.lut6) == (len(circuit), circuit.depth, None)
    assert stats.ands == len(and_graph(circuit)[0])
    assert sum(stats.fan_in.values()) == stats.gates
    ends = [sum(n * count for n, count in fans.items()) for fans in (stats.fan_in, stats.fan_out)]
    assert ends[0] + 2 == ends[1]
    assert [part.name for part in stats.parts] == ["layer 1", "votes", "argmax"]
    assert sum(part.share for part in stats.parts) == pytest.approx(1)
    assert sum(circuit.about["vote_gates"]) == dict(circuit.parts)["votes"]
    assert circuit.part_ranges["votes"].start == dict(circuit.parts)["layer 1"]
    for line in ("gates", "AND nodes", "layer 1", "class 2"):
        assert f"\n{line}" in f"\n{stats}"
    assert circuits.statistics.compute(wire(2), lut6=False).gates == 0


@pytest.mark.parametrize("outputs", ["class", "votes"])
def test_what_a_class_costs(outputs):
    """Votes counted inside the circuit, and votes as circuit outputs."""
    circuit = voting(outputs=outputs)
    for simple in (circuit, circuits.simplify(circuit)):
        costs = circuits.statistics.compute(simple, lut6=False).classes
        assert len(costs) == 3
        before = sum(count for name, count in simple.parts if name != "argmax")
        assert sum(c.own for c in costs) <= before <= sum(c.own + c.shared for c in costs)
    assert costs[0].own > 8


def test_classes_without_gates_are_counted():
    builder, x = begun(4)
    builder.start_part("votes")
    numbers = arithmetic.popcounts(builder, [[x[0]], x, [x[1]], []])
    builder.start_part("argmax")
    builder.output("y", [arithmetic.argmax(builder, numbers)])
    circuit = builder.circuit({"n_classes": 4})
    for same in (circuit, circuits.simplify(circuit)):
        votes = dict(same.parts)["votes"]
        assert same.about["vote_gates"] == [0, votes, 0, 0]
        assert [c.own for c in circuits.statistics.compute(same, lut6=False).classes] == [
            0,
            votes,
            0,
            0,
        ]


def test_a_circuit_of_look_up_tables_is_its_own_mapping():
    """Count gates instead of the mapper's tables if there are fewer gates."""
    pytest.importorskip("pyosys", reason="pyosys maps circuits to look-up tables")
    circuit = voting(lut=6)
    assert circuits.statistics.compute(circuit).lut6 <= len(circuit)


@pytest.mark.parametrize(("n_inputs", "expected"), [(6, 1), (7, 5)])
def test_gates_with_more_than_six_inputs_are_no_mapping(n_inputs, expected, monkeypatch):
    monkeypatch.setattr(circuits.statistics.abc, "find", lambda: "abc")
    monkeypatch.setattr(circuits.statistics.abc, "lut_count", lambda circuit, n: 5)
    gate = (tuple(range(1, n_inputs + 1)),), (1 << 2**n_inputs - 1,)
    circuit = Circuit((Port("x", n_inputs),), (Y,), *gate, (2 * (n_inputs + 1),))
    assert circuits.statistics.compute(circuit).lut6 == expected


def test_levels_are_rounded_down_and_in_the_range_of_the_format():
    thresholds = np.array([0.3, -0.3, 1.0, 99.0, -99.0])
    levels = ports.levels_of(thresholds, Format.parse("fixed4.1"))
    assert levels.tolist() == [0, -1, 2, 7, -9]


def small(n):
    """Circuit with an `n`-bit port and a one-bit port."""
    outputs = Port("z", 2), Port("w")
    return Circuit((Port("x", n), Y), outputs, ((1, n + 1),), (AND,), (2, 4, 2 * (n + 2)))


def test_circuits_are_values(tmp_path, without_typechecking):
    """Circuits are equal if all fields match; files are read by path."""
    circuit, same, other = (small(n) for n in (3, 3, 4))
    assert circuit == same
    assert hash(circuit) == hash(same)
    assert len({circuit, same, other}) == 2
    assert circuit not in (
        other,
        "a circuit",
        dataclasses.replace(circuit, about={"kind": "another"}),
    )
    written = {
        circuits.netlist_json.read: circuits.netlist_json.write(circuit).encode(),
        circuits.blif.read: circuits.blif.write(circuit, "name").encode(),
        circuits.aiger.read: circuits.aiger.write(circuit),
    }
    for read, content in written.items():
        (tmp_path / "file").write_bytes(content)
        assert read(tmp_path / "file") == read(content)
    assert circuits.netlist_json.read(circuits.netlist_json.write(circuit)) == circuit
    message = r"aiger.read: data is a str; expected bytes or a pathlib\.Path"
    with pytest.raises(TypeError, match=message):
        circuits.aiger.read("file")
    with pytest.raises(FileNotFoundError):
        circuits.blif.read(tmp_path / "none")


def test_one_sample():
    """A single sample has no sample axis, and neither do its answers."""
    circuit = small(3)
    x, y = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]]), np.array([1, 1, 0])
    z, w = circuit(x, y)
    for k in range(3):
        one_z, one_w = circuit(x[k].tolist(), int(y[k]))
        np.testing.assert_array_equal(one_z, z[k])
        assert (one_w.shape, one_w) == ((), w[k])
    assert Circuit((Port("x"),), (Y,), (), (), (3,))(1) == 0
    for wrong in ((x[0], y), (x, 1), (x[0][None, None], 1)):
        with pytest.raises(ValueError, match=r"expected shape \[samples, |the arrays have"):
            circuit(*wrong)

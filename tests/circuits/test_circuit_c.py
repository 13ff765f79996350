"""C99 circuits compared with `Circuit`, which has its own tests."""

import random
import re
import subprocess

import jaxtyping
import numpy as np
import pytest
import tools
from cases import slow_except, slow_where
from circuit_strategies import numbers
from tools import compiled, require_tool

from lutjax import circuits
from lutjax.circuits import (
    Builder,
    Circuit,
    Format,
    Port,
    _evaluation,
    c,
    gate_operations as _operations,
)
from lutjax.circuits._formulas import formula
from lutjax.circuits.c import c_test
from lutjax.circuits.circuit import walk

CHECKED = ("-fsanitize=undefined,address", "-fno-sanitize-recover=all")
STYLES = ("functions", "interpreter")
MAINLY_FUNCTIONS = slow_except(STYLES, "functions")
INPUTS = (Port("x", 9, Format(5)), Port("n", 1, Format(12, 3, True)))
OUTPUTS = (
    Port("y", 2, Format(3)),
    Port("low", 1, Format(4, 0, True)),
    Port("wide", 1, Format(11, 0, True)),
)


def drawn(seed, n_gates, arities, inputs=INPUTS, outputs=OUTPUTS):
    """Return random gates over random nodes, unsimplified: constants, repeated fan-ins, unread gates."""
    draw = random.Random(seed)
    first = 1 + sum(port.n_bits for port in inputs)
    fanins = [
        tuple(draw.randrange(first + g) for _ in range(draw.choice(arities)))
        for g in range(n_gates)
    ]
    tables = [draw.getrandbits(1 << len(nodes)) for nodes in fanins]
    last = 2 * (first + n_gates)
    literals = [
        draw.randrange(max(0, last - 60), last) for _ in range(sum(port.n_bits for port in outputs))
    ]
    # Constants, an input, an inverted one, a bit and its inverse.
    literals[:6] = [0, 1, 2, 5, literals[4], literals[4] ^ 1]
    return Circuit(inputs, outputs, tuple(fanins), tuple(tables), tuple(literals))


def run(folder, files, *flags):
    """Compile files and run the program; return its status and output."""
    done = subprocess.run([compiled(folder, files, *flags)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def with_test(circuit, given, **options):
    return {**c.write(circuit, **options), "main.c": c_test(circuit, *given)}


def bits(program, words):
    """Evaluate a list of operations and return the outputs."""
    start = [0] * program.first
    levels = walk(program.fanins, program.tables, start, lambda before, table: 1 + max(before))
    fields = program.n_inputs, program.fanins, program.tables, program.literals, levels
    return _evaluation.Plan(*fields).run(words)


# ------------------------------------------------------------------------------------- operations
@pytest.mark.parametrize(
    ("seed", "arities"),
    slow_where(
        [*((seed, range(9)) for seed in range(5)), (12, (2,)), (16, (2, 3)), (23, (6,))],
        lambda seed, arities: seed in (3, 4, 23),
    ),
)
def test_operations_are_the_circuit(seed, arities):
    circuit = drawn(seed, 20 + 2 * seed, arities)
    words = np.random.default_rng(seed).integers(0, 2**64, (circuit.n_inputs, 4), dtype=np.uint64)
    program = _operations.operations(circuit)
    assert {len(nodes) for nodes in program.fanins} <= {2, 3}
    assert all(n > 0 for nodes in program.fanins for n in nodes)
    expected = circuit.evaluate(words)
    short = _operations.short_lived(program)
    for made in (program, short, _operations.in_runs(short, 7), _operations.in_runs(short, 10**6)):
        assert len(made) == len(program)
        assert all(n < made.first + g for g, nodes in enumerate(made.fanins) for n in nodes)
        np.testing.assert_array_equal(bits(made, words), expected)


@pytest.mark.parametrize("n", range(9))
def test_operations_of_every_size_of_table(n):
    """Single table: all answers, including constant and inverted inputs."""
    draw = random.Random(n)
    symmetric = [
        sum((k >> a.bit_count() & 1) << a for a in range(1 << n)) for k in (0b01101, 0b110010110)
    ]
    for table in [*symmetric, *(draw.getrandbits(1 << n) for _ in range(8))]:
        port = Port("x", max(n, 1))
        circuit = Circuit(
            (port,), (Port("y"),), (tuple(range(1, n + 1)),), (table,), (2 * (port.count + 1),)
        )
        count = 1 << port.count
        words = np.array(
            [[a >> k & 1 for a in range(count)] for k in range(port.count)], dtype=np.uint64
        )
        result = bits(_operations.operations(circuit), words)[0] & np.uint64(1)
        assert result.tolist() == [table >> (a % (1 << n)) & 1 for a in range(count)]


def test_few_operations_for_known_tables():
    """Six-bit counters take eight operations instead of one per output; two-step functions with four inputs are found."""

    def operations(n, *functions):
        builder = Builder(simplify=False)
        inputs = [bit for (bit,) in builder.input("x", n)]
        tables = [
            sum(int(f(*(a >> k & 1 for k in range(n)))) << a for a in range(1 << n))
            for f in functions
        ]
        builder.output("y", [[builder.gate(inputs, table)] for table in tables])
        return len(_operations.operations(builder.circuit()))

    assert operations(6, *(lambda *x, k=k: sum(x) >> k & 1 for k in range(3))) == 8
    assert operations(6, *(lambda a, *x, k=k: (sum(x) + 1 - a) >> k & 1 for k in range(3))) == 8
    assert operations(8, lambda *x: sum(x) & 1) == 4
    assert operations(4, lambda a, b, c, d: ((a and b) or c) ^ d) == 2
    assert operations(4, lambda a, b, c, d: b if a else c and d) == 2


def test_gates_that_one_gate_reads_move_into_it():
    builder = Builder(simplify=False)
    a, b, c, d, e = (bit for (bit,) in builder.input("x", 5))
    inner, shared = builder.gate([a, b], 0b1000), builder.gate([a, d], 0b0110)
    both = [builder.gate([shared, x], 0b1110) for x in (b, c, e)]
    builder.output("y", [[builder.gate([inner, c], 0b0110)], *([k] for k in both)])
    program = _operations.operations(builder.circuit())
    assert sorted(map(len, program.fanins)) == [2, 2, 2, 2, 3]


def test_expressions_of_all_tables_of_three_inputs():
    """Operator precedence in Python matches C and Verilog."""
    for n in (1, 2, 3):
        full = (1 << (1 << n)) - 1
        expressions = [formula(table, n) for table in range(1, full)]
        for table, text in enumerate(expressions, 1):
            assert eval(text.format(0xAA, 0xCC, 0xF0)) & full == table
        assert (
            max(len(re.findall(r"[&|^~]", text.replace("& ~", "&"))) for text in expressions) <= 6
        )


def test_short_lived_values_need_fewer_places():
    builder = Builder(lut=3)
    numbers = [bit for (bit,) in builder.input("x", 256)]
    builder.output("y", [circuits.arithmetic.popcount(builder, numbers)])
    program = _operations.operations(builder.circuit())
    places = _operations.assign_slots(program, 1)[1]
    assert 2 * _operations.assign_slots(_operations.short_lived(program), 1)[1] < places < 256


@pytest.mark.parametrize("chunk", [1, 10])
def test_a_place_holds_a_value_until_its_last_reader(chunk):
    program = _operations.short_lived(_operations.operations(drawn(3, 200, (2, 3, 4))))
    where, count = _operations.assign_slots(program, chunk)
    held = [None] * count
    for start in range(0, len(program), chunk):
        for g in range(start, min(start + chunk, len(program))):
            for n in program.fanins[g]:
                assert (
                    n < program.first
                    or n >= program.first + start
                    or held[where[n - program.first]] == n
                )
        for g in range(start, min(start + chunk, len(program))):
            if where[g] >= 0:
                held[where[g]] = program.first + g
    assert all(
        held[where[(k >> 1) - program.first]] == k >> 1
        for k in program.literals
        if k >> 1 >= program.first
    )


# ------------------------------------------------------------------------------------- programs
@pytest.mark.parametrize(
    ("style", "lanes"),
    slow_where(
        [("functions", 8), ("functions", 128), ("functions", 512), ("interpreter", 32)],
        lambda style, lanes: lanes in (8, 512),
    ),
)
def test_every_word_and_style(tmp_path, style, lanes):
    require_tool("cc", *CHECKED)
    circuit = drawn(lanes, 40, (0, 1, 2, 2, 3, 4, 5))
    files = with_test(circuit, numbers(circuit, 530), style=style)
    flags = (f"-DCIRCUIT_LANES={lanes}", "-O1" if lanes == 512 else "-O0", *CHECKED)
    assert run(tmp_path, files, *flags) == (0, "circuit: 530 samples, 0 wrong\n")


@pytest.mark.parametrize("style", MAINLY_FUNCTIONS)
def test_without_gates_and_in_static_memory(tmp_path, style):
    """Constant and input-only outputs, plus a word type for compilers without extensions."""
    require_tool("cc")
    circuit = drawn(0, 0, (2,))
    files = with_test(circuit, numbers(circuit, 70), style=style)
    assert run(tmp_path, files, "-DCIRCUIT_STATIC", "-UCIRCUIT_LANES")[0] == 0
    circuit = drawn(1, 300, (2, 3))
    files = with_test(circuit, numbers(circuit, 70), style=style)
    assert run(tmp_path, files, "-DCIRCUIT_STATIC", "-DCIRCUIT_LANES=32")[0] == 0


@pytest.mark.parametrize("lanes", [16, 64])
def test_without_extensions_of_compilers(tmp_path, lanes):
    require_tool("cc")
    circuit = drawn(5, 40, (2, 3, 4))
    files = with_test(circuit, numbers(circuit, 130))
    files["circuit.c"] = "#undef __GNUC__\n" + files["circuit.c"]
    assert run(tmp_path, files, f"-DCIRCUIT_LANES={lanes}")[0] == 0


@pytest.mark.parametrize("style", MAINLY_FUNCTIONS)
def test_any_number_of_samples(tmp_path, style):
    """The first n answers are independent of the sample count, and memory past them stays untouched."""
    require_tool("cc", *CHECKED)
    ports = (Port("x", 13, Format(8)),), (Port("y", 1, Format(8)), Port("z", 3, Format(2)))
    circuit = drawn(7, 60, (2, 3), *ports)
    main = """
#include <stdio.h>
#include <string.h>
#include "circuit.h"
static uint8_t x[13 * 200], all[200], y[201], all_z[600], z[601];
int main(void)
{
    size_t n, k;
    for (k = 0; k < sizeof x; k++)
        x[k] = (uint8_t)(k * k * 7 + k / 13);
    circuit_predict(x, 200, all, all_z);
    for (n = 0; n <= 200; n++) {
        memset(y, 77, sizeof y);
        memset(z, 77, sizeof z);
        circuit_predict(x, n, y, z);
        if (memcmp(y, all, n) || memcmp(z, all_z, 3 * n) || y[n] != 77 || z[3 * n] != 77)
            printf("%d ", (int)n);
    }
    for (n = 0; n < 200; n++)
        printf("%d ", all[n]);
    return 0;
}
"""
    files = {**c.write(circuit, style=style), "main.c": main}
    text = run(tmp_path, files, "-DCIRCUIT_LANES=64", *CHECKED)[1]
    k = np.arange(13 * 200)
    expected = circuit(((k * k * 7 + k // 13) % 256).reshape(200, 13))[0]
    assert list(map(int, text.split())) == expected.tolist()


@pytest.mark.parametrize("style", MAINLY_FUNCTIONS)
def test_words(tmp_path, style):
    """Packed bits in and out: bit j in word w is sample 64 w + j, as in `Circuit.evaluate`."""
    require_tool("cc", *CHECKED)
    circuit = drawn(8, 80, (2, 3))
    words = np.random.default_rng(0).integers(0, 2**64, (circuit.n_inputs, 4), dtype=np.uint64)
    numbers = ", ".join(f"{word}u" for word in words.ravel().tolist())
    main = f"""
#include <stdio.h>
#include "circuit.h"
static const uint64_t x[] = {{{numbers}}};
static uint64_t y[4 * CIRCUIT_OUTPUTS];
int main(void)
{{
    int k;
    circuit_words((const circuit_word *)x, (circuit_word *)y);
    for (k = 0; k < 4 * CIRCUIT_OUTPUTS; k++)
        printf("%llu ", (unsigned long long)y[k]);
    return CIRCUIT_INPUTS != {circuit.n_inputs};
}}
"""
    files = {**c.write(circuit, style=style), "main.c": main}
    status, text = run(tmp_path, files, "-DCIRCUIT_LANES=256", *CHECKED)
    assert status == 0
    assert list(map(int, text.split())) == circuit.evaluate(words).ravel().tolist()


@pytest.mark.parametrize("style", MAINLY_FUNCTIONS)
def test_a_flipped_answer_is_found(tmp_path, style):
    require_tool("cc")
    builder = Builder()
    numbers = [bit for (bit,) in builder.input("x", 10)]
    builder.output("y", [circuits.arithmetic.popcount(builder, numbers)])
    circuit = builder.circuit()
    given = np.array([[a >> k & 1 for k in range(10)] for a in range(1024)])
    g = len(circuit) // 2
    tables = list(circuit.tables)
    tables[g] ^= 1 << 1
    wrong = Circuit(
        circuit.inputs, circuit.outputs, circuit.fanins, tuple(tables), circuit.literals
    )
    n_wrong = int((wrong(given) != circuit(given)).sum())
    assert n_wrong > 0
    status, text = run(tmp_path, {**c.write(wrong, style=style), "main.c": c_test(circuit, given)})
    assert (status, text) == (1, f"circuit: 1024 samples, {n_wrong} wrong\n")


@pytest.mark.parametrize(("style", "lanes"), [("functions", 8), ("interpreter", 32)])
def test_microcontrollers(tmp_path, style, lanes):
    """A freestanding build needs neither a heap nor a library, and its memory use matches the header."""
    require_tool("cc")
    require_tool("nm")
    circuit = drawn(9, 200, (2, 3))
    files = c.write(circuit, "net", style=style)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    flags = [
        "-ffreestanding",
        "-nostdlib",
        "-Os",
        "-DNET_STATIC",
        f"-DNET_LANES={lanes}",
        "-c",
        "net.c",
    ]
    subprocess.run([tools.c_compiler(), *tools.STRICT, *flags], cwd=tmp_path, check=True)
    symbols = subprocess.run(
        ["nm", "-S", "net.o"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    unknown = set(re.findall(r"^ +U (\w+)", symbols, re.MULTILINE))
    assert unknown <= {
        "memcpy",
        "memset",
        "memmove",
        "memcmp",
    }  # those that compilers ask every program for
    sizes = [int(size, 16) for size in re.findall(r"^\w+ (\w+) b ", symbols, re.MULTILINE)]
    slots = int(re.search(r"define NET_SLOTS (\d+)", files["net.h"])[1])
    assert (
        sum(sizes) <= (slots + circuit.n_inputs + circuit.n_outputs) * lanes // 8 + 3 * 64
    )  # and alignment
    tables = re.findall(r"^\w+ \w+ ([dD]) ", symbols, re.MULTILINE)
    assert not tables  # constants are read-only


@pytest.mark.parametrize(
    ("periodic", "lanes"),
    slow_where([(True, 8), (False, 64), (True, 256)], lambda periodic, lanes: lanes > 64),
)
def test_steps_of_an_automaton(tmp_path, periodic, lanes):
    """Grids with any size, including single rows and columns, as in `step_automaton`."""
    require_tool("cc", *CHECKED)
    channels = 2
    builder = Builder()
    seen = [bit for (bit,) in builder.input("x", 9 * channels)]
    next_state = []
    for channel in range(channels):
        pairs = zip(seen, random.Random(channel).sample(seen, len(seen)), strict=True)
        bit = 0
        for a, b in pairs:  # every neighbor can change it
            bit = builder.gate([bit, builder.gate([a, b], 0b0010)], 0b0110)
        next_state.append([bit])
    builder.output("y", next_state)
    rule = builder.circuit({"kind": "automaton", "channels": channels, "periodic": periodic})
    unit = min(lanes, 64)
    main = ["#include <stdio.h>", '#include "circuit.h"', "int main(void)", "{", "    size_t k;"]
    expected = []
    for rows, columns in [(1, 1), (2, 2), (3, 7), (4, 8), (2, 64), (5, 65), (3, 600)]:
        state = np.random.default_rng(columns).integers(
            0, 2, (rows, columns, channels), dtype=np.uint8
        )
        after = circuits.step_automaton(rule, state)
        assert rows * columns < 20 or 0.2 < after.mean() < 0.8
        units = -(-columns // unit)

        def packed(cells, shape=(channels, rows, units * unit), columns=columns):
            padded = np.zeros(shape, np.uint8)
            padded[..., :columns] = np.moveaxis(cells, 2, 0)
            return np.packbits(padded, bitorder="little").view(f"u{unit // 8}").ravel().tolist()

        expected += packed(after)
        numbers = ", ".join(f"{k}u" for k in packed(state))
        n = channels * rows * units
        main += [
            f"    {{ static const circuit_unit cells[] = {{{numbers}}}; static circuit_unit next[{n}];",
            f"      circuit_step(cells, next, {rows}, {columns});",
            f'      for (k = 0; k < {n}; k++) printf("%llu ", (unsigned long long)next[k]); }}',
        ]
    main += ["    return 0;", "}", ""]
    files = {**c.write(rule), "main.c": "\n".join(main)}
    _, text = run(tmp_path, files, f"-DCIRCUIT_LANES={lanes}", *CHECKED)
    assert list(map(int, text.split())) == expected
    assert "step" not in c.write(drawn(0, 10, (2,)))["circuit.h"]


# ------------------------------------------------------------------------------------- texts
def test_the_header_says_what_enters_and_leaves():
    text = c.write(drawn(0, 50, (2, 3)), "net")["net.h"]
    assert "Input x, 9 of uint5: bits 0 to 44" in text
    assert "Input n, 1 of fixed12.3: bits 45 to 56" in text
    assert "A number of n stands for itself over 8." in text
    assert (
        "void net_predict(const uint8_t *input_x, const int16_t *input_n, size_t n, "
        "uint8_t *output_y, int8_t *output_low, int16_t *output_wide);"
    ) in text
    assert "@" not in text


def test_auto_is_functions_until_they_take_long_to_compile(monkeypatch):
    circuit = drawn(0, 300, (2, 3))
    assert (
        c.write(circuit)
        == c.write(circuit, style="functions")
        != c.write(circuit, style="interpreter")
    )
    monkeypatch.setattr("lutjax.circuits.c._FUNCTIONS_UP_TO", 20)
    assert c.write(circuit) == c.write(circuit, style="interpreter")


CLOSED = Circuit((), (Port("y"),), (), (), (1,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda name=name: c.write(drawn(0, 3, (2,)), name), "name is") for name in ("", "2nd", "a-b", "a.b", "stdint")),
        (lambda: c.write(drawn(0, 3, (2,)), style="fast"), "'fast'"),
        (lambda: c_test(CLOSED), "no inputs or no outputs"),
        (lambda: c_test(drawn(0, 3, (2,)), *numbers(drawn(0, 3, (2,)), 0)), "no samples"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(call, message):
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=message):
        call()


def test_circuits_without_inputs_are_written():
    assert "net_predict(size_t n, uint8_t *output_y)" in c.write(CLOSED, "net")["net.h"]

"""Circuits in Verilog, BLIF, AIGER and JSON, tested in simulators and ABC."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import time

import numpy as np
import pytest
from cases import slow_except
from circuit_strategies import SPECIAL, drawn, made, numbers, plans, same, visibly_flipped
from hypothesis import given, settings
from tools import require_tool

from lutjax import circuits
from lutjax.circuits import Circuit, Format, Port, abc, simulate, verilog

FORMATS = {
    "blif": lambda circuit: circuits.blif.read(circuits.blif.write(circuit)),
    "aig": lambda circuit: circuits.aiger.read(circuits.aiger.write(circuit)),
    "aag": lambda circuit: circuits.aiger.read(circuits.aiger.write(circuit, binary=False)),
    "alkaid": lambda circuit: circuits.alkaid.read(circuits.alkaid.write(circuit)),
    "json": lambda circuit: circuits.netlist_json.read(circuits.netlist_json.write(circuit)),
}


# ------------------------------------------------------------------------------------------- there and back
@given(plan=plans())
@settings(max_examples=8)
def test_circuits_come_back(plan):
    circuit = made(plan)
    for name, back in FORMATS.items():
        result = back(circuit)
        assert same(circuit, result), name
        if name == "json":
            assert dataclasses.asdict(result) == dataclasses.asdict(circuit)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_circuits_come_back(name):
    circuit = SPECIAL[name]
    for back in FORMATS.values():
        assert same(circuit, back(circuit))


@given(plan=plans())
@settings(max_examples=20)
def test_blif_keeps_the_gates_of_simplified_circuits(plan):
    circuit = circuits.simplify(made(plan))
    result = circuits.blif.read(circuits.blif.write(circuit))
    assert (result.fanins, result.tables, result.literals) == (
        circuit.fanins,
        circuit.tables,
        circuit.literals,
    )


def test_texts_are_the_same_each_time():
    for format in (circuits.verilog, circuits.blif, circuits.aiger, circuits.netlist_json):
        assert format.write(drawn(1)) == format.write(drawn(1))


def test_the_example_of_aiger():
    """Half adder from the format's report, in both forms."""
    text = b"aag 7 2 0 2 3\n2\n4\n6\n12\n6 13 15\n12 2 4\n14 3 5\ni0 x\ni1 y\no0 s\no1 c\n"
    data = b"aig 5 2 0 2 3\n10\n6\n\x02\x02\x03\x02\x01\x02i0 x\ni1 y\no0 s\no1 c\n"
    for result in (circuits.aiger.read(text), circuits.aiger.read(data)):
        assert [port.name for port in (*result.inputs, *result.outputs)] == ["x", "y", "s", "c"]
        s, c = result([0, 1, 0, 1], [0, 0, 1, 1])
        assert (s.tolist(), c.tolist()) == ([0, 1, 1, 0], [0, 0, 0, 1])


# ------------------------------------------------------------------------------------------- BLIF of others
def test_blif_of_other_programs():
    text = r"""
# written by hand
.model top # a comment
.default_input_arrival 0 0
.inputs a b \
  c
.inputs $d[1] $d[0]
.outputs both \
not_b one same
.outputs late
.names n1 c both
11 1
.names a b n1
1- 0
-1 0
.names b not_b
0 1
.names one
1
.names never
.names a same
1 1
.names never $d[1] $d[0] late
-10 1
1-- 1
--1 1
.end
.names what comes after the end is not read
"""
    actual = circuits.blif.read(text)
    assert [port.name for port in actual.inputs] == ["a", "b", "c", "_d"]
    assert [port.name for port in actual.outputs] == ["both", "not_b", "one", "same", "late"]
    bits = np.arange(32)[:, None] >> np.arange(5) & 1
    a, b, c, low, high = bits.T
    expected = [(1 - a) * (1 - b) * c, 1 - b, a * 0 + 1, a, low | high]
    assert np.array_equal(actual(a, b, c, bits[:, 3:]), expected)


def test_blif_tables_of_many_inputs():
    rng, n = np.random.default_rng(0), 20
    rows = ["".join(rng.choice(list("01---"), n)) for _ in range(30)]
    names = " ".join(f"x[{k}]" for k in range(n))
    samples = rng.integers(0, 2, (500, n))
    hit = np.array(
        [
            any(all(c in ("-", str(v)) for c, v in zip(row, x, strict=True)) for row in rows)
            for x in samples
        ]
    )
    assert 0.1 < hit.mean() < 0.9
    for answer in "01":
        cover = "\n".join(f"{row} {answer}" for row in rows)
        result = circuits.blif.read(
            f".model m\n.inputs {names}\n.outputs y\n.names {names} y\n{cover}\n.end\n"
        )
        assert np.array_equal(result(samples), hit == (answer == "1"))


@pytest.mark.parametrize(("lines", "message"), [
    (".latch a y re clk 0", "line 4: .latch: it has latches"),
    (".subckt other x=a z=y", "line 4: .subckt: it has other models in it; flatten"),
    (".gate nand2 A=a B=a O=y", "line 4: .gate: it is mapped to cells"),
    (".names a y\n11 1", "the table of y has the row '11 1'; expected 1 of 0, 1 and -"),
    (".names a y\n1 1\n0 0", "rows that answer 0 and rows that answer 1"),
    (".names a y\n1 2", "expected 1 of 0, 1 and -"),
    (".names b y\n1 1", "line 4: b is read, but it has no driver"),
    (".names a a\n1 1", "line 4: a is driven, but it is an input"),
    (".names y\n.names y\n1", "line 5: y has a second driver, after line 4"),
    (".names y b\n1 1\n.names b y\n1 1", "is in a loop"),
    ("1 1", "is a row of a table, but no .names is before it"),
    (".names", "line 4: .names has no signal"),
    (".inputs a", "a is twice among the inputs"),
    (".model again", "line 4: a second .model begins"),
    (".nonsense", "line 4: .nonsense is not known"),
])  # fmt: skip
def test_blif_that_is_no_circuit(lines, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        circuits.blif.read(f".model m\n.inputs a\n.outputs y\n{lines}\n.end\n")
    assert str(caught.value).startswith("blif.read: ")


def test_text_that_is_not_blif():
    with pytest.raises(ValueError, match="is it BLIF"):
        circuits.blif.read("")
    with pytest.raises(ValueError, match="UTF-8"):
        circuits.blif.read(b".model \xff\n")
    with pytest.raises(ValueError, match=r"y is read, but it has no driver"):
        circuits.blif.read(".model m\n.outputs y\n.end\n")


def test_a_deep_chain_is_read():
    n = 5000
    rows = [f".names n{k} n{k + 1}\n0 1" for k in reversed(range(n))]
    result = circuits.blif.read(
        "\n".join([".model m", ".inputs n0", f".outputs n{n}", *rows, ".end"])
    )
    assert result.literals == (2,)


# ------------------------------------------------------------------------------------------- AIGER of others
def test_aiger_without_names_and_in_any_order():
    result = circuits.aiger.read(b"aag 6 2 0 2 2\n4\n2\n13\n1\n12 10 5\n10 2 4\n")
    assert (result.inputs, result.outputs) == ((Port("x", 2),), (Port("y", 2),))
    assert result([[0, 0], [0, 1], [1, 0], [1, 1]]).tolist() == [[1, 1]] * 4
    named = circuits.aiger.read(
        b"aag 1 1 0 1 0\n2\n3\ni0 a name\no0 reg\nc\nlutjax ports nonsense\n"
    )
    assert (named.inputs, named.outputs, named.literals) == (
        (Port("a_name"),),
        (Port("reg_0"),),
        (3,),
    )


@pytest.mark.parametrize(("data", "message"), [
    (b"", "the file ends before its header"),
    (b"aig 1 1 0 1\n", "the header is 'aig 1 1 0 1'; expected 'aig' or 'aag'"),
    (b"blif 1 1 0 1 0\n", "expected 'aig' or 'aag'"),
    (b"aig 1 -1 0 1 0\n", "expected 'aig' or 'aag'"),
    (b"aig 2 1 1 1 0\n", "the file has 1 latches"),
    (b"aig 1 1 0 0 0 1\n", "properties and constraints (B C J F) are unsupported"),
    (b"aig 3 1 0 1 1\n", "the header has 3 variables; inputs and AND nodes need 2"),
    (b"aig 1 1 0 1 0\n9\n", "output 0 is '9'; with 1 variables literals go up to 3"),
    (b"aig 1 1 0 1 0\n", "the file ends before output 0"),
    (b"aig 3 2 0 1 1\n6\n\x02", "the file ends in AND 0"),
    (b"aig 3 2 0 1 1\n6\n\x07\x00", "AND 0 reads -1 and -1"),
    (b"aig 3 2 0 1 1\n6\n\x00\x02", "AND 0 reads 6 and 4"),
    (b"aig 3 2 0 1 1\n6\n" + b"\xff" * 12, "a number of more than 64 bits"),
    (b"aag 1 1 0 1 0\n3\n2\n", "input 0 is the literal 3; expected an even one"),
    (b"aag 2 2 0 1 0\n2\n2\n2\n", "variable 1 is an input twice"),
    (b"aag 2 1 0 1 1\n2\n4\n2 2 2\n", "AND 0: variable 1 is driven, but it is an input"),
    (b"aag 2 1 0 1 1\n2\n4\n5 2 2\n", "AND 0 defines the literal 5"),
    (b"aag 2 1 0 1 1\n2\n4\n4 2\n", "AND 0 is '4 2'; expected 3 literals"),
    (b"aag 3 1 0 1 2\n2\n4\n4 6 2\n6 4 2\n", "is in a loop"),
    (b"aag 3 1 0 1 1\n2\n6\n4 2 2\n", "variable 3 is read, but it has no driver"),
    (b"aag 1 1 0 1 0\n2\n2\ni5 x\n", "the symbol table has 'i5 x'"),
    (b"aag 1 1 0 1 0\n2\n2\nl0 x\n", "the symbol table has 'l0 x'"),
])  # fmt: skip
def test_aiger_that_is_no_circuit(data, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        circuits.aiger.read(data)
    assert str(caught.value).startswith("aiger.read: ")


def test_aiger_is_bytes():
    with pytest.raises(TypeError):
        circuits.aiger.read("aag 0 0 0 0 0\n")


# ------------------------------------------------------------------------------------------- JSON
def damaged(change):
    result = json.loads(circuits.netlist_json.write(drawn(0)))
    change(result)
    return json.dumps(result)


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: f.update(format="netlist"), 'the field format is "netlist"'),
    (lambda f: f.update(version=2), "the field version is 2; expected version 1"),
    (lambda f: f.pop("tables"), "the field tables is missing"),
    (lambda f: f.update(more=1), "the field more is not a field of version 1"),
    (lambda f: f.update(about=[]), "the field about is []; expected an object"),
    (lambda f: f.update(tables={}), "the field tables is {}; expected a list"),
    (lambda f: f["tables"].__setitem__(3, 7),
        "tables[3] is 7; expected hexadecimal digits in quotes"),
    (lambda f: f["tables"].__setitem__(3, "xyz"), 'the field tables[3] is "xyz"'),
    (lambda f: f["tables"].__setitem__(3, "-1"), 'the field tables[3] is "-1"'),
    (lambda f: f["fanins"].__setitem__(2, [1.5]), "fanins[2] is [1.5]; expected a whole number"),
    (lambda f: f["fanins"].pop(), "the field fanins has 39 gates; tables has 40"),
    (lambda f: f["literals"].__setitem__(0, "a"), 'the field literals[0] is "a"'),
    (lambda f: f["literals"].pop(), "there are 5 literals"),
    (lambda f: f["parts"].__setitem__(0, ["a"]),
        'the field parts[0] is ["a"]; expected a list of 2'),
    (lambda f: f["inputs"][0].pop("name"), "the field inputs[0] is"),
    (lambda f: f["inputs"][0].update(format="float"), "the field inputs[0] is"),
    (lambda f: f["inputs"][0].update(name="1x"), "the field inputs[0] is"),
    (lambda f: f["fanins"].__setitem__(0, [999]), "gate 0"),
])  # fmt: skip
def test_damaged_json(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        circuits.netlist_json.read(damaged(change))
    assert str(caught.value).startswith("netlist_json.read: ")


def test_json_that_was_cut_off():
    text = circuits.netlist_json.write(drawn(0))
    for end in (0, 10, len(text) // 2, len(text) - 3):
        with pytest.raises(ValueError, match=r"netlist_json\.read: the text is not JSON"):
            circuits.netlist_json.read(text[:end])
    with pytest.raises(ValueError, match='the field format is "list"'):
        circuits.netlist_json.read("[]")


# ------------------------------------------------------------------------------------------- Verilog
def test_the_text_of_a_pipeline():
    circuit = drawn(3)
    text = circuits.verilog.write(circuit, registers=2)
    cycles = -(-circuit.depth // 2)
    assert verilog.latency(circuit, 2) == cycles
    assert f"latency {cycles} cycles" in text
    assert "// input x: 4 numbers uint3; number i is x[3 * i +: 3]" in text
    assert verilog.latency(circuit, 0) == 0
    assert verilog.latency(SPECIAL["no gates"], 5) == 1
    stage_of_level = dict(zip(circuit.levels, verilog._stages(circuit, 2), strict=True))
    assert [stage_of_level[level] for level in range(7)] == [0, 0, 0, 1, 1, 2, 2]


CLOCK = Circuit((Port("clk"),), (Port("y"),), (), (), (2,))


def bench(*arrays):
    return verilog.testbench(drawn(0), *arrays)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verilog.write(CLOCK, registers=1), "port 'clk' has the name of an added port"),
        (lambda: verilog.write(CLOCK, "module"), "name is 'module'; it is a keyword of Verilog"),
        (lambda: circuits.blif.write(CLOCK, "two words"), "name is"),
        (lambda: bench(np.zeros((3, 5), int)), "expected shape"),
        (lambda: bench(np.zeros((0, 4), int)), "at least one"),
        (lambda: bench(np.zeros((2, 4), int), np.zeros((3, 3), int)), "2 samples and 3 answers"),
        (lambda: bench(np.zeros((2, 4), int), (np.zeros((2, 3), int),) * 2), "expected has 2 arrays"),
        (lambda: verilog.testbench(Circuit((), (Port("y"),), (), (), (1,)), ()), "no inputs or no outputs"),
        *(
            (lambda call=call, registers=registers: call(drawn(0), registers=registers), "registers is")
            for call in (verilog.write, verilog.latency, lambda c, registers: verilog.testbench(c, 0, registers=registers))
            for registers in (-1, True)
        ),
    ],
)  # fmt: skip
def test_arguments_that_verilog_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_circuit_without_registers_may_have_a_port_of_that_name():
    assert "input wire [0:0] clk" in verilog.write(CLOCK)


def simulated(circuit, registers=0, reference=None, n=50):
    samples = numbers(circuit, n)
    testbench = verilog.testbench(reference or circuit, samples, registers=registers)
    return simulate.run(circuits.verilog.write(circuit, registers=registers), testbench)


def test_registers_at_every_level_in_a_simulator():
    require_tool("iverilog")
    circuit = drawn(5)
    assert circuit.depth >= 6
    for k in range(circuit.depth + 2):
        result = simulated(circuit, k)
        assert result, result.line
        gaps = (
            f", latency {-(-circuit.depth // k)}, without and with gaps"
            if 0 < k <= circuit.depth
            else ""
        )
        assert result.line.startswith(f"PASS: 50 samples{gaps}")


@pytest.mark.parametrize("name", SPECIAL)
def test_special_circuits_in_a_simulator(name):
    require_tool("iverilog")
    for registers in (0, 1) if name != "names of our own" else (0, 1, 2):
        result = simulated(SPECIAL[name], registers, n=8)
        assert result, result.line


def test_numbers_of_several_ports_in_a_simulator():
    require_tool("iverilog")
    inputs = Port("a", 2, Format(4, 2, signed=True)), Port("b", 1, Format(3))
    outputs = Port("low", 1, Format(2)), Port("high", 2, Format(3, signed=True))
    circuit = drawn(7, inputs=inputs, outputs=outputs)
    for registers in (0, 3):
        assert simulated(circuit, registers)


def test_a_simulator_finds_what_is_wrong():
    require_tool("iverilog")
    circuit = drawn(5)
    wrong = next(visibly_flipped(circuit))
    for registers in (0, 2):
        result = simulated(wrong, registers, reference=circuit, n=500)
        assert not result
        assert re.match(r"FAIL: \d+ of \d+ .*wrong.*first sample \d+", result.line), result.line
    samples = numbers(circuit)
    module, testbench = (
        circuits.verilog.write(circuit, registers=2),
        verilog.testbench(circuit, samples, registers=2),
    )
    broken = {
        "valid_in}": "1'b1}",  # gaps are not seen
        "reset ? ": "1'b0 ? ",
        "assign valid_out = valid[": "assign valid_out = ~valid[",
    }
    for old, new in broken.items():
        assert old in module
        result = simulate.run(module.replace(old, new), testbench)
        assert not result
        assert result.line.startswith("FAIL"), result.line
    late = verilog.testbench(circuit, samples, registers=3)
    assert not simulate.run(module, late)
    assert "syntax error" in simulate.run("module", testbench).line
    assert "no result after" in simulate.run(module, testbench, seconds=0.001).line


def test_without_a_simulator(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert simulate.find() is None
    with pytest.raises(RuntimeError, match="install Icarus Verilog"):
        simulate.run("", "")


# ------------------------------------------------------------------------------------------- ABC
def test_formats_are_proved_equal(tmp_path):
    require_tool("abc")
    circuit = drawn(11, 60)
    (tmp_path / "c.blif").write_text(circuits.blif.write(circuit))
    (tmp_path / "c.aig").write_bytes(circuits.aiger.write(circuit))
    (tmp_path / "c.aag").write_bytes(circuits.aiger.write(circuit, binary=False))
    (tmp_path / "c.json").write_text(circuits.netlist_json.write(circuit))
    files = sorted(tmp_path.iterdir())
    for file in files[1:]:
        assert abc.cec(files[0], file)


@given(plan=plans(most_gates=12))
@settings(max_examples=3)
def test_drawn_circuits_are_proved_equal(plan):
    require_tool("abc")
    circuit = made(plan)
    assert abc.cec(circuit, circuits.blif.read(circuits.blif.write(circuit)))


def test_a_proof_finds_a_flipped_answer(tmp_path):
    require_tool("abc")
    circuit = circuits.simplify(drawn(11, 60))
    for wrong in itertools.islice(visibly_flipped(circuit), 0, 40, 20):
        (tmp_path / "wrong.blif").write_text(circuits.blif.write(wrong))
        for other in (wrong, tmp_path / "wrong.blif"):
            result = abc.cec(circuit, other)
            assert not result
            assert result.status == "different"
            bits = np.array(
                [[result.counterexample[f"x[{k}]"]] for k in range(circuit.n_inputs)], np.uint64
            )
            assert not np.array_equal(
                circuit.evaluate(bits) & np.uint64(1), wrong.evaluate(bits) & np.uint64(1)
            )


def test_inputs_are_paired_by_name_else_in_order(tmp_path):
    require_tool("abc")
    rows = ".names a b y\n10 1\n.end\n"
    (tmp_path / "a.blif").write_text(".model m\n.inputs a b\n.outputs y\n" + rows)
    (tmp_path / "b.blif").write_text(".model m\n.inputs b a\n.outputs y\n" + rows)
    assert abc.cec(tmp_path / "a.blif", tmp_path / "b.blif")
    both = Circuit((Port("x", 2),), (Port("z"),), ((1, 2),), (0b0010,), (6,))
    assert abc.cec(tmp_path / "a.blif", both)
    assert abc.cec(both, tmp_path / "b.blif").counterexample in (
        {"x[0]": 0, "x[1]": 1},
        {"x[0]": 1, "x[1]": 0},
    )


def test_what_a_proof_refuses(tmp_path):
    require_tool("abc")
    circuit = drawn(0)
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(ValueError, match=r"the file is 'c.txt'; expected .blif"):
        abc.cec(circuit, tmp_path / "c.txt")
    (tmp_path / "c.blif").write_text("nonsense")
    with pytest.raises(RuntimeError, match="ABC"):
        abc.cec(circuit, tmp_path / "c.blif")
    with pytest.raises(ValueError, match="different interfaces"):
        abc.cec(circuit, SPECIAL["one gate"])
    with pytest.raises(TimeoutError, match="no result after"):
        abc.run("read nothing", seconds=1e-9)


def test_optimized_circuits_compute_the_same():
    require_tool("abc")
    circuit = drawn(12, 80)
    for script in (abc.SCRIPT, "strash; if -K 6 -a"):
        result = abc.optimize(circuit, script)
        assert same(circuit, result)
        assert abc.cec(circuit, result)
    assert max(map(len, result.fanins)) <= 6
    # ABC counts an inverter at an output, which is a literal here.
    assert len(circuit.outputs) * 6 >= abc.lut_count(circuit) - len(result) >= 0
    assert abc.lut_count(circuit) <= abc.lut_count(circuit, 4)
    with pytest.raises(RuntimeError, match="ABC wrote no circuit"):
        abc.optimize(circuit, "strash; nonsense")
    with pytest.raises(ValueError, match="k is 1"):
        abc.lut_count(circuit, 1)


def test_without_abc(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert abc.find() is None
    with pytest.raises(RuntimeError, match="pip install pyosys"):
        abc.lut_count(drawn(0))
    with pytest.raises(RuntimeError, match="pip install pyosys"):
        abc.from_verilog("")


# ------------------------------------------------------------------------------------------- large circuits


@pytest.mark.parametrize("name", slow_except([*FORMATS, "verilog"], "aig", "json", "verilog"))
def test_time_does_not_grow_with_the_square(name):
    """Compare with a circuit four times as large, on any machine; use the minimum times because the machine may be shared."""

    def seconds(n):
        circuit = Circuit((Port("x", n),), (Port("y", n),), (), (), tuple(range(2, 2 * n + 2, 2)))
        start = time.process_time()
        if name == "verilog":
            circuits.verilog.write(circuit, registers=1)
        else:
            assert FORMATS[name](circuit).literals == circuit.literals
        return time.process_time() - start

    seconds(10)
    small = large = math.inf
    for _ in range(5):
        small, large = min(small, seconds(1000)), min(large, seconds(4000))
        if large < 8 * small:  # about 4; with the square 16
            return
    raise AssertionError(f"1000 numbers take {small:.3f} s, 4000 {large:.3f} s")


class TestSlow:
    def test_verilog_is_proved_equal(self, tmp_path):
        require_tool("abc")
        require_tool("yosys")
        inputs = Port("a", 2, Format(4, 2, signed=True)), Port("b", 1, Format(3))
        outputs = Port("low", 1, Format(2)), Port("high", 2, Format(3, signed=True))
        circuit = drawn(7, 60, inputs=inputs, outputs=outputs)
        (tmp_path / "c.v").write_text(circuits.verilog.write(circuit))
        assert abc.cec(tmp_path / "c.v", circuit)
        wrong = next(visibly_flipped(circuit))
        assert abc.cec(tmp_path / "c.v", wrong).status == "different"
        with pytest.raises(RuntimeError, match="Unsupported cell type"):
            abc.from_verilog(circuits.verilog.write(circuit, registers=2))
        with pytest.raises(RuntimeError, match="Yosys failed"):
            abc.from_verilog("module nonsense(")

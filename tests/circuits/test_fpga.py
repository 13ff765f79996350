"""FPGA costs: circuits by part, cells mapped by Yosys, and nextpnr clocks."""

import importlib.util
import json

import numpy as np
import pytest
from commands import command
from example_circuits import life_circuit, random_circuit
from exports import write
from tools import require_tool

from lutjax.circuits import Builder, Format, fpga, verilog


def test_parts_one_after_the_other_are_the_circuit():
    circuit = random_circuit(3, 20, 80, simplify=True, ports={"y": (12, Format())})
    words = np.random.default_rng(0).integers(0, 2**63, (circuit.n_inputs, 4)).astype(np.uint64)
    values = {0: np.zeros(4, np.uint64), **dict(enumerate(words, 1))}
    for gates in circuit.part_ranges.values():
        assert len(gates) > 5
    for name, gates in circuit.part_ranges.items():
        part = fpga.part_of(circuit, name)
        assert len(part) == len(gates)
        nodes = range(circuit.first_gate + gates.start, circuit.first_gate + gates.stop)
        before = {n for g in gates for n in circuit.fanins[g]} - {0, *nodes}
        read_later = {n for g in range(gates.stop, len(circuit)) for n in circuit.fanins[g]}
        needed = (read_later | {k >> 1 for k in circuit.literals}) & set(nodes)
        assert (part.n_inputs, part.n_outputs) == (len(before), len(needed))
        answers = part.evaluate(np.array([values[n] for n in sorted(before)]))
        values.update(zip(sorted(needed), answers, strict=True))
    full = np.uint64(2**64 - 1)
    result = np.array(
        [values[k >> 1] ^ (full if k & 1 else np.uint64(0)) for k in circuit.literals]
    )
    np.testing.assert_array_equal(result, circuit.evaluate(words))


@pytest.mark.parametrize(("family", "options", "message"), [
    ("max10", {}, "family is 'max10'; the known ones are ice40, ecp5, xc7"),
    *(("ice40", {"clock": clock}, "clock is") for clock in (0, -1.0, float("inf"), float("nan"))),
    ("ice40", {"registers": -1}, "registers is -1"),
])  # fmt: skip
def test_arguments(family, options, message):
    with pytest.raises(ValueError, match=message):
        fpga.report(life_circuit(), family, **options)
    with pytest.raises(ValueError, match="the parts are perception, update"):
        fpga.part_of(life_circuit(), "votes")


def test_cells_are_counted():
    """Every four-input gate in the final circuit is one table."""
    require_tool("yosys")
    builder = Builder(merge=4)
    bits = [bit for (bit,) in builder.input("x", 10)]
    builder.start_part("layer 1")
    first = [builder.gate(bits[k : k + 4], 0b1110_1001_0110_1000) for k in (0, 4)]
    builder.start_part("layer 2")
    builder.output(
        "y", [[bit] for bit in (*first, builder.gate([*first, *bits[8:]], 0b1110_1001_0110_1000))]
    )
    result = fpga.report(builder.circuit(), "ice40", place=False)
    assert [
        (cost.name, cost.gates, cost.luts, cost.levels, cost.cycles)
        for cost in (*result.parts, result.total)
    ] == [("layer 1", 2, 2, 1, 1), ("layer 2", 1, 1, 1, 1), ("all", 3, 3, 2, 1)]
    assert {cost.flip_flops for cost in result.parts} == {0}
    assert result.total.clock is None
    assert result.total.latency is None
    assert str(result).splitlines()[-1] == "not placed: it was not asked for"
    stated = json.loads(result.to_json())
    assert [part["name"] for part in stated["parts"]] == ["layer 1", "layer 2"]
    assert stated["all"]["luts"] == result.total.luts
    assert stated["tools"]["pyosys"]


def test_the_module_for_placement_has_few_pins():
    text = fpga._wrapper(random_circuit(0, 20, 30, ports={"y": (5, Format(3))}), 2)
    assert verilog.declared(text, "top") == {
        **dict.fromkeys(("clk", "reset", "valid_in", "number"), "input wire"),
        **dict.fromkeys(("valid_out", "parity"), "output wire"),
    }
    assert ".clk(clk)" in text
    assert ".x(inputs[19:0]), .y(answers[14:0])" in text


# ------------------------------------------------------------------------------------------- the command
def test_errors_are_one_line(tmp_path, monkeypatch):
    folder = write(tmp_path / "life", formats=("json",))
    assert (
        "'max10' is not one of 'ice40', 'ecp5', 'xc7'"
        in command("fpga", folder, "--family", "max10").output
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = command("fpga", folder, "--family", "ice40")
    assert result.exit_code == 1
    assert (
        result.output
        == "Error: lutjax fpga needs Yosys, which is not installed: pip install pyosys\n"
    )
    monkeypatch.undo()
    pytest.importorskip("pyosys", reason="the command asks for it first")
    result = command("fpga", tmp_path / "nowhere", "--family", "ice40")
    assert (result.exit_code, "nowhere is not a folder" in result.output) == (1, True)
    (folder / "life.json").write_text("{")
    result = command("fpga", folder, "--family", "ice40")
    assert (result.exit_code, "life.json cannot be read" in result.output) == (1, True)

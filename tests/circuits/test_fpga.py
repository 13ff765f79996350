"""Costs of circuits on FPGAs: parts by themselves, cells that Yosys maps them to, and clocks of nextpnr."""

import importlib.util
import json
import stat

import numpy as np
import pytest
from commands import command, output
from example_circuits import AND, PARITY, XOR, life_circuit, random_circuit
from exports import write
from tools import require_tool

from lutjax.circuits import Builder, Circuit, Format, Port, fpga, verilog

NEXTPNR = """#!/bin/sh
case "$*" in *--version) echo "nextpnr of a test"; exit;; esac
grep -q '"SB_LUT4"' mapped.json || { echo "ERROR: no cells"; exit 1; }
echo '{"fmax": {"clk": {"achieved": 80.0, "constraint": 50.0}}}' > report.json
case "$*" in *--placed-svg*) echo '<svg/>' > layout.svg;; esac
"""


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
    found = np.array([values[k >> 1] ^ (full if k & 1 else np.uint64(0)) for k in circuit.literals])
    np.testing.assert_array_equal(found, circuit.evaluate(words))


def test_arguments():
    circuit = life_circuit()
    with pytest.raises(ValueError, match="family is 'max10'; the known ones are ice40, ecp5, xc7"):
        fpga.report(circuit, "max10")
    for clock in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="clock is"):
            fpga.report(circuit, "ice40", clock=clock)
    with pytest.raises(ValueError, match="registers is -1"):
        fpga.report(circuit, "ice40", registers=-1)
    with pytest.raises(ValueError, match="the parts are perception, update"):
        fpga.part_of(circuit, "votes")


def test_cells_are_counted():
    """Every gate of four inputs that leaves the circuit is one table."""
    require_tool("yosys")
    builder = Builder(merge=4)
    bits = [bit for (bit,) in builder.input("x", 10)]
    builder.part("layer 1")
    first = [builder.gate(bits[k : k + 4], 0b1110_1001_0110_1000) for k in (0, 4)]
    builder.part("layer 2")
    builder.output("y", [[bit] for bit in (*first, builder.gate([*first, *bits[8:]], 0b1110_1001_0110_1000))])
    found = fpga.report(builder.circuit(), "ice40", place=False)
    assert [
        (cost.name, cost.gates, cost.luts, cost.levels, cost.cycles) for cost in (*found.parts, found.total)
    ] == [("layer 1", 2, 2, 1, 1), ("layer 2", 1, 1, 1, 1), ("all", 3, 3, 2, 1)]
    assert {cost.flip_flops for cost in found.parts} == {0}
    assert found.total.clock is None
    assert found.total.latency is None
    assert str(found).splitlines()[-1] == "not placed: it was not asked for"
    stated = json.loads(found.to_json())
    assert [part["name"] for part in stated["parts"]] == ["layer 1", "layer 2"]
    assert stated["all"]["luts"] == found.total.luts
    assert stated["tools"]["pyosys"]


@pytest.mark.slow
@pytest.mark.parametrize("family", fpga.FAMILIES)
def test_every_family_has_its_cells(family):
    require_tool("yosys")
    circuit = life_circuit()
    found = fpga.report(circuit, family, registers=2, place=False, clock=100)
    cycles = verilog.latency(circuit, 2)
    assert found.total.cycles == cycles
    flip_flops = verilog.n_registers(circuit, 2)
    assert (
        found.total.flip_flops == flip_flops if family != "xc7" else 0 < found.total.flip_flops <= flip_flops
    )
    assert 4 <= found.total.luts <= 40
    assert 1 <= found.total.levels <= 2
    assert sum(cost.gates for cost in found.parts) == found.total.gates == len(circuit)
    assert f"if a clock of 100 MHz is met: {10 * cycles:.1f} ns" in str(found)


def test_parts_without_gates_or_outputs():
    """A part can be empty after simplification, and a circuit can be wires."""
    require_tool("yosys")
    circuit = Circuit(
        (Port("x", 3),),
        (Port("y"),),
        ((1, 2), (3, 4)),
        (AND, XOR),
        (2 * 5,),
        (("encoder", 0), ("layer 1", 2)),
    )
    found = fpga.report(circuit, "ice40", place=False)
    assert [(cost.luts, cost.levels) for cost in (*found.parts, found.total)] == [(0, 0), (1, 1), (1, 1)]
    wires = fpga.report(Circuit((Port("x"),), (Port("y"),), (), (), (2,)), "ice40", place=False)
    assert (wires.parts, wires.total.luts, wires.total.levels) == ((), 0, 0)


def test_the_module_for_placement_has_few_pins():
    text = fpga._wrapper(random_circuit(0, 20, 30, ports={"y": (5, Format(3))}), 2)
    assert verilog.declared(text, "top") == {
        **dict.fromkeys(("clk", "reset", "valid_in", "number"), "input wire"),
        **dict.fromkeys(("valid_out", "parity"), "output wire"),
    }
    assert ".clk(clk)" in text
    assert ".x(inputs[19:0]), .y(answers[14:0])" in text


@pytest.mark.slow
def test_clocks_are_those_of_nextpnr(tmp_path, monkeypatch):
    require_tool("yosys")
    builder = Builder()
    a, b, c = [bit for (bit,) in builder.input("x", 3)]
    builder.output("y", [[builder.gate([a, b, c], PARITY)]])
    program = tmp_path / "nextpnr-ice40"
    program.write_text(NEXTPNR)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = fpga.report(builder.circuit(), "ice40", clock=100, layout=tmp_path / "layout.svg")
    assert (tmp_path / "layout.svg").read_text() == "<svg/>\n"
    assert (found.total.clock, found.total.latency, found.tools["nextpnr-ice40"]) == (
        80.0,
        12.5,
        "nextpnr of a test",
    )
    assert str(found).splitlines()[-1] == "the clock of 100 MHz that was asked for is not met"
    assert json.loads(found.to_json())["all"]["samples_a_second"] == 80e6
    program.write_text(NEXTPNR.replace("SB_LUT4", "nonsense"))
    assert "not placed: nextpnr-ice40 says: ERROR: no cells" in str(fpga.report(builder.circuit(), "ice40"))


@pytest.mark.slow
def test_life_is_placed():
    require_tool("nextpnr-ice40")
    require_tool("yosys")
    found = fpga.report(life_circuit(), "ice40", registers=2)
    assert 20 < found.total.clock < 1000, found


# ------------------------------------------------------------------------------------------- the command
def test_a_report_of_an_export(tmp_path):
    require_tool("yosys")
    folder = write(tmp_path / "life", formats=("json",), registers=2)
    text = output("fpga", folder, "--family", "ice40", "--no-place")
    found = json.loads((tmp_path / "life_ice40.json").read_text())
    assert (found["registers"], found["all"]["flip_flops"] > 0) == (2, True)
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["part", "perception", "update", "all"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "life",
        "life_ice40.json",
    ]  # the export is as it was


def test_errors_are_one_line(tmp_path, monkeypatch):
    folder = write(tmp_path / "life", formats=("json",))
    assert (
        "'max10' is not one of 'ice40', 'ecp5', 'xc7'" in command("fpga", folder, "--family", "max10").output
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = command("fpga", folder, "--family", "ice40")
    assert result.exit_code == 1
    assert result.output == "Error: lutjax fpga needs Yosys, which is not installed: pip install pyosys\n"
    monkeypatch.undo()
    pytest.importorskip("pyosys", reason="the command asks for it first")
    result = command("fpga", tmp_path / "nowhere", "--family", "ice40")
    assert (result.exit_code, "nowhere is not a folder" in result.output) == (1, True)
    (folder / "life.json").write_text("{")
    result = command("fpga", folder, "--family", "ice40")
    assert (result.exit_code, "life.json cannot be read" in result.output) == (1, True)

"""Large circuits in external tools, costs on all FPGA families, and rebuilt gallery pages."""

import itertools
import json
import re
import shutil
import stat
import sys

import numpy as np
import pytest
from circuit_strategies import numbers, visibly_flipped
from commands import output
from example_circuits import AND, PARITY, XOR, life_circuit
from exports import write
from folders import ROOT
from tools import require_tool

from lutjax import circuits
from lutjax.circuits import (
    Builder,
    Circuit,
    Format,
    Port,
    abc,
    arithmetic,
    fpga,
    simulate,
    verilog,
    yosys,
)

NEXTPNR = """#!/bin/sh
case "$*" in *--version) echo "nextpnr of a test"; exit;; esac
grep -q '"SB_LUT4"' mapped.json || { echo "ERROR: no cells"; exit 1; }
echo '{"fmax": {"clk": {"achieved": 80.0, "constraint": 50.0}}}' > report.json
case "$*" in *--placed-svg*) echo '<svg/>' > layout.svg;; esac
"""


@pytest.mark.parametrize("family", fpga.FAMILIES)
def test_every_family_has_its_cells(family):
    require_tool("yosys")
    circuit = life_circuit()
    result = fpga.report(circuit, family, registers=2, place=False, clock=100)
    cycles = verilog.latency(circuit, 2)
    assert result.total.cycles == cycles
    declared = re.findall(r"^  reg (?!\[)(.*);$", verilog.write(circuit, registers=2), re.M)
    flip_flops = sum(len(line.split(", ")) for line in declared) + cycles  # with the valid bits
    assert (
        result.total.flip_flops == flip_flops
        if family != "xc7"
        else 0 < result.total.flip_flops <= flip_flops
    )
    assert 4 <= result.total.luts <= 40
    assert 1 <= result.total.levels <= 2
    assert sum(cost.gates for cost in result.parts) == result.total.gates == len(circuit)
    assert f"if a clock of 100 MHz is met: {10 * cycles:.1f} ns" in str(result)


def test_clocks_are_those_of_nextpnr(tmp_path, monkeypatch):
    require_tool("yosys")
    builder = Builder()
    a, b, c = [bit for (bit,) in builder.input("x", 3)]
    builder.output("y", [[builder.gate([a, b, c], PARITY)]])
    program = tmp_path / "nextpnr-ice40"
    program.write_text(NEXTPNR)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = fpga.report(builder.circuit(), "ice40", clock=100, layout=tmp_path / "layout.svg")
    assert (tmp_path / "layout.svg").read_text() == "<svg/>\n"
    assert (result.total.clock, result.total.latency, result.tools["nextpnr-ice40"]) == (
        80.0,
        12.5,
        "nextpnr of a test",
    )
    assert str(result).splitlines()[-1] == "the clock of 100 MHz that was asked for is not met"
    assert json.loads(result.to_json())["all"]["samples_a_second"] == 80e6
    program.write_text(NEXTPNR.replace("SB_LUT4", "nonsense"))
    assert "not placed: nextpnr-ice40 says: ERROR: no cells" in str(
        fpga.report(builder.circuit(), "ice40")
    )


def test_parts_without_gates_or_outputs():
    """A part may be empty after simplification, and a circuit may consist only of wires."""
    require_tool("yosys")
    circuit = Circuit(
        (Port("x", 3),),
        (Port("y"),),
        ((1, 2), (3, 4)),
        (AND, XOR),
        (2 * 5,),
        (("encoder", 0), ("layer 1", 2)),
    )
    result = fpga.report(circuit, "ice40", place=False)
    assert [(cost.luts, cost.levels) for cost in (*result.parts, result.total)] == [
        (0, 0),
        (1, 1),
        (1, 1),
    ]
    wires = fpga.report(Circuit((Port("x"),), (Port("y"),), (), (), (2,)), "ice40", place=False)
    assert (wires.parts, wires.total.luts, wires.total.levels) == ((), 0, 0)


def test_a_report_of_an_export(tmp_path):
    require_tool("yosys")
    folder = write(tmp_path / "life", formats=("json",), registers=2)
    text = output("fpga", folder, "--family", "ice40", "--no-place")
    result = json.loads((tmp_path / "life_ice40.json").read_text())
    assert (result["registers"], result["all"]["flip_flops"] > 0) == (2, True)
    assert [line.split()[0] for line in text.splitlines()[:4]] == [
        "part",
        "perception",
        "update",
        "all",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "life",
        "life_ice40.json",
    ]  # the export is as it was


def test_life_is_placed():
    require_tool("nextpnr-ice40")
    require_tool("yosys")
    result = fpga.report(life_circuit(), "ice40", registers=2)
    assert 20 < result.total.clock < 1000, result


def layers(width, depth):
    """Random layers with 2-input gates."""
    rng = np.random.default_rng(0)
    starts = [
        1,
        *range(257, 258 + width * depth, width),
    ]  # of the inputs, of each layer, and the end
    fanins = np.concatenate(
        [rng.integers(a, b, (width, 2)) for a, b in itertools.pairwise(starts[:-1])]
    )
    tables = tuple(rng.choice([1, 2, 4, 6, 7, 8, 9, 11, 13, 14], width * depth).tolist())
    literals = tuple(range(2 * starts[-2], 2 * starts[-1], 2))
    return Circuit(
        (Port("x", 256),), (Port("y", width),), tuple(map(tuple, fanins.tolist())), tables, literals
    )


def simulated(circuit, registers, reference=None):
    testbench = verilog.testbench(reference or circuit, numbers(circuit, 300), registers=registers)
    return simulate.run(circuits.verilog.write(circuit, registers=registers), testbench)


def test_a_large_circuit_is_proved(tmp_path):
    require_tool("abc")
    require_tool("yosys")
    require_tool("iverilog")
    circuit = circuits.simplify(layers(2000, 6))
    assert len(circuit) > 3000
    (tmp_path / "c.v").write_text(circuits.verilog.write(circuit))
    (tmp_path / "c.blif").write_text(circuits.blif.write(circuit))
    for file in tmp_path.iterdir():
        assert abc.cec(circuit, file)
    assert abc.cec(circuit, abc.optimize(circuit))
    for k in range(circuit.depth + 1):
        result = simulated(circuit, k)
        assert result, result.line
    for wrong in itertools.islice(visibly_flipped(circuit), 0, 20, 10):
        assert abc.cec(wrong, circuit).status == "different"
        assert not simulated(wrong, 2, reference=circuit)


def test_pages_are_those_of_today_s_templates(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "gallery", raising=False)
    import gallery

    for name in gallery.PAGES:
        text = (ROOT / "docs" / "gallery" / "pages" / "play" / f"{name}.html").read_text(
            encoding="utf-8"
        )
        assert gallery.rewritten(name, text) == text, (
            "python docs/gallery.py --write writes the pages"
        )


def test_verilog_by_alkaid_is_proved(tmp_path):
    """alkaid's Verilog module equals the circuit for all inputs."""
    require_tool("abc")
    require_tool("yosys")
    pytest.importorskip("alkaid", reason="alkaid is not installed: pip install alkaid")
    from alkaid.codegen.rtl import RTLModel
    from alkaid.types import CombLogic

    builder = Builder(merge=6)
    bits = [bit for number in builder.input("x", 5, Format(3)) for bit in number]
    builder.output("y", [arithmetic.popcount(builder, bits)])
    circuit = builder.circuit()
    (tmp_path / "c_alkaid.json").write_text(circuits.alkaid.write(circuit))
    model = RTLModel(CombLogic.load(tmp_path / "c_alkaid.json"), tmp_path / "rtl", "made")
    model.write()
    files = [path for path in (tmp_path / "rtl" / "src").rglob("*.v") if "wrapper" not in path.name]
    for path in files:
        shutil.copy(path, tmp_path)
    # Tables are cases of all addresses, of which Yosys makes choices whose last value is unknown, and never taken.
    yosys.run(
        [
            f"read_verilog {' '.join(path.name for path in files)}",
            *(
                "hierarchy -top made -check",
                "proc -norom",
                "flatten",
                "techmap",
                "setundef -zero",
                "aigmap",
            ),
            "write_aiger -symbols made.aig",
        ],
        tmp_path,
        where="the module",
    )
    assert abc.cec(circuits.aiger.read(tmp_path / "made.aig"), circuit)

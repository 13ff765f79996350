"""Board projects: the module, cycle by cycle, behind a serial port, and the host program."""

import importlib.util
import json

import numpy as np
import pytest
from circuit_strategies import numbers
from commands import command, output
from cycles import Machine
from example_circuits import life_circuit, random_circuit
from exports import write
from tools import require_tool

from lutjax.circuits import Circuit, Format, Port, boards
from lutjax.circuits.deployment import Vectors, evaluate_ports

BAUD = 1_500_000
CYCLES = 8  # of the clock of an iCEBreaker, in a bit
PORTS = random_circuit(
    5,
    {"a": (2, Format(5, 1)), "b": (3, Format(3, signed=True))},
    20,
    simplify=True,
    ports={"c": (3, Format(4, 2, signed=True)), "d": (1, Format(2))},
)


def vectors(circuit, count=3):
    """Return random samples for a circuit with their answers."""
    drawn = numbers(circuit, count)
    given = {port.name: x for port, x in zip(circuit.inputs, drawn, strict=True)}
    return Vectors(given, evaluate_ports(circuit, list(drawn)), "drawn")


def host(files, folder, name):
    """Return the host program as a module."""
    path = folder / f"{name}_host.py"
    path.write_text(files[path.name])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Line:
    """Serial line to a cycle-accurate module simulation: `write` and `read` take and return bytes, as in pyserial."""

    def __init__(self, files, name):
        text = "".join(files[f"{name}{end}.v"] for end in ("", "_stream", "_board"))
        self.machine = Machine(text, f"{name}_board", 1, 0)
        self.machine.state[:] = 0  # as an FPGA begins
        self.levels, self.leds = [], set()
        self.wait(40)

    def step(self, level):
        result = self.machine.step({"from_host": np.full(1, 2**64 - 1 if level else 0, np.uint64)})
        self.levels.append(int(result["to_host"][0]) & 1)
        self.leds.add(int(result["led"][0]) & 1)

    def wait(self, cycles):
        for _ in range(cycles):
            self.step(1)

    def write(self, data):
        for byte in data:
            for bit in (0, *(byte >> k & 1 for k in range(8)), 1):
                for _ in range(CYCLES):
                    self.step(bit)

    def read(self, count):
        """Return bytes received since the last call and wait for pending bytes."""
        self.wait(CYCLES * 10 * (count + 2))
        result, at = [], 1
        while at < len(self.levels):
            if self.levels[at - 1] and not self.levels[at]:
                middle = at + CYCLES // 2
                bits = [self.levels[middle + k * CYCLES] for k in range(10)]
                assert bits[0] == 0
                assert bits[9] == 1
                result.append(sum(bit << k for k, bit in enumerate(bits[1:9])))
                at = middle + 9 * CYCLES
            at += 1
        self.levels = self.levels[-1:]
        return bytes(result)


def test_one_bit(tmp_path):
    """The host program pads to whole bytes and reports missing answers."""
    circuit = Circuit((Port("x"),), (Port("y"),), (), (), (3,))
    files = boards.write(circuit, "dut", "ulx3s", vectors(circuit))
    program = host(files, tmp_path, "dut")
    assert (program.packed({"x": [1]}), program.numbers(b"\1")) == (b"\1", {"y": [1]})

    class Silent:
        def write(self, data): ...

        def read(self, count):
            return b""

    with pytest.raises(
        SystemExit, match="sample 0: the board sent 0 bytes of an answer; expected 1"
    ):
        program.run(Silent(), [{"inputs": {"x": [1]}, "outputs": {"y": [0]}}])


@pytest.mark.parametrize(("board", "pins", "words"), [
    ("icebreaker", "dut.pcf", ["set_io clock 35", "nextpnr-ice40", "--up5k",
        "synth_ice40 -top dut_board"]),
    ("ulx3s", "dut.lpf", ['LOCATE COMP "clock" SITE "G2"', "nextpnr-ecp5",
        "synth_ecp5 -top dut_board"]),
])  # fmt: skip
def test_projects(board, pins, words):
    files = boards.write(PORTS, "dut", board, vectors(PORTS))
    text = files[pins] + files["Makefile"]
    for word in words:
        assert word in text


@pytest.mark.parametrize(("board", "given", "options", "message"), [
    ("arty", life_circuit(), {}, "board is 'arty'; the known ones are icebreaker, ulx3s"),
    ("icebreaker", life_circuit(), {"baud": 12_000_000},
        "baud is 12000000; expected 300 to 3000000"),
    ("icebreaker", PORTS, {}, "values per sample; expected"),
])  # fmt: skip
def test_arguments(board, given, options, message):
    with pytest.raises(ValueError, match=message):
        boards.write(life_circuit(), "dut", board, vectors(given), **options)


def test_the_command(tmp_path):
    folder = write(tmp_path / "life", "life", registers=2)
    target = tmp_path / "life_icebreaker"
    text = output("fpga", folder, "--board", "icebreaker")
    assert f"make -C {target} program" in text
    assert sorted(path.name for path in target.iterdir()) == sorted(
        [
            "Makefile",
            "life.pcf",
            "life.v",
            "life_board.v",
            "life_host.py",
            "life_stream.v",
            "vectors.json",
        ]
    )
    assert "posedge clk" in (target / "life.v").read_text()
    assert (target / "vectors.json").read_bytes() == (folder / "vectors.json").read_bytes()
    result = command("fpga", folder, "--board", "icebreaker")
    assert result.exit_code == 1
    assert f"{target} already exists" in result.output
    for options in ([], ["--board", "ulx3s", "--family", "ecp5"]):
        assert (
            "give --family for a report, or --board for a project"
            in command("fpga", folder, *options).output
        )
    result = command("fpga", folder, "--family", "ice40", "--out", tmp_path)
    assert "a folder; a report is a file" in result.output or "pyosys" in result.output
    (folder / "vectors.json").unlink()
    result = command("fpga", folder, "--board", "ulx3s")
    assert result.exit_code == 1
    assert "vectors.json cannot be read" in result.output


class TestSlow:
    def test_a_board_answers_its_program(self, tmp_path):
        """Several multi-byte samples in sequence; then half a sample, a pause, and a complete sample."""
        require_tool("yosys")
        given = vectors(PORTS, 2)
        files = boards.write(PORTS, "dut", "icebreaker", given, registers=2, baud=BAUD)
        text = files["dut_board.v"]
        files["dut_board.v"] = text.replace(
            "reg [16:0] quiet", "reg [7:0] quiet"
        )  # a pause of 256 cycles
        assert files["dut_board.v"] != text
        program, line = host(files, tmp_path, "dut"), Line(files, "dut")
        samples = json.loads(given.to_json())["samples"]
        assert program.BYTES_IN == 3
        right, _ = program.run(line, samples)
        assert right == len(samples)
        assert line.leds == {0, 1}
        line.write(program.packed(samples[0]["inputs"])[:2])
        line.wait(300)
        wrong = {**samples[0], "outputs": {**samples[0]["outputs"], "d": [9]}}
        assert program.run(line, [wrong, samples[1]])[0] == 1

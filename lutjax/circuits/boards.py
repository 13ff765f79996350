"""FPGA board projects: a circuit on the board, connected to a computer by a serial port."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lutjax.circuits import _templates, streams, verilog
from lutjax.circuits._targets import read_targets
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.deployment import VECTORS, Vectors
from lutjax.circuits.fpga import FAMILIES

BAUD = 115_200
"""Default serial rate in bits per second."""

_QUIET = 0.02
"""Timeout for an incomplete sample in seconds; it expires between half and all of this time."""


@dataclasses.dataclass(frozen=True)
class Board:
    """FPGA board with a serial port.

    Attributes:
      family: a name from `lutjax.circuits.fpga.FAMILIES`.
      clock: oscillator frequency in Hz.
      pins: pins of ``clock``, ``from_host``, ``to_host`` and ``led``.
      place: nextpnr arguments except file names.
      program: command for loading a bitstream.
    """

    family: str
    clock: int
    pins: Mapping[str, str]
    place: tuple[str, ...]
    program: tuple[str, ...]


BOARDS = read_targets("boards", Board)
"""Boards by name: iCEBreaker (iCE40 UP5K, 5280 lookup tables), ULX3S (LFE5U-85F, 84 000)."""

_PROJECTS = read_targets("projects", dict[str, Any])


def write(
    circuit: Circuit,
    name: str,
    board: str,
    vectors: Vectors,
    *,
    registers: int = 0,
    baud: int = BAUD,
) -> dict[str, str]:
    """Return the project files by name.

    The files are Verilog, pins, a Makefile, and a host program with samples. The module
    ``{name}_board`` receives sample bits over the serial port and sends the answer bits back, in
    whole bytes, with the first port and the lowest bits first. ``make`` builds the bitstream with
    Yosys and nextpnr, ``make program`` loads it, and ``{name}_host.py`` sends all samples and
    compares the answers.

    Args:
      circuit: any circuit with inputs and outputs.
      name: circuit module name and file name.
      board: a name from `BOARDS`.
      vectors: samples with expected answers.
      registers: gate levels between two registers; see `lutjax.circuits.verilog.write`.
      baud: serial rate in bits per second, at most a quarter of the board clock.

    Raises:
      ValueError: unknown board, unsupported `baud`, a name that is invalid in Verilog, negative
        `registers`, a circuit without inputs or outputs, or vectors for other ports.

    Example:
      >>> import numpy as np
      >>> from lutjax.circuits import Circuit, Port, boards, deployment
      >>> both = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1000,), (2 * 3,))
      >>> inputs, outputs = {"x": np.array([[1, 1]])}, {"y": np.array([[1]])}
      >>> vectors = deployment.Vectors(inputs, outputs, "one by hand")
      >>> sorted(boards.write(both, "both", "icebreaker", vectors))
      ['Makefile', 'both.pcf', 'both.v', 'both_board.v', 'both_host.py', 'both_stream.v',
      'vectors.json']
    """
    if board not in BOARDS:
        raise ValueError(
            f"boards.write: board is {board!r}; the known ones are {', '.join(BOARDS)}."
        )
    of = BOARDS[board]
    if not 300 <= baud <= of.clock // 4:
        raise ValueError(
            f"boards.write: baud is {baud}; expected 300 to {of.clock // 4} for {board}."
        )
    vectors.check(circuit)
    # Also validates the circuit and the name.
    stream = streams.write(circuit, name, registers=registers)
    project, clock = _PROJECTS[of.family], of.clock / 1e6
    pins, bitstream = f"{name}.{project['pins']}", f"{name}.{project['bitstream']}"
    placed = project["placed"][1]
    # A fixed seed, so that placement is reproducible.
    place = ["$(NEXTPNR)", *of.place, "--freq", f"{clock:g}", "--seed", "1"]
    place += ["--json", "mapped.json", f"--{project['pins']}", pins, *project["placed"]]
    bytes_in, bytes_out = (-(-n // 8) for n in (circuit.n_inputs, circuit.n_outputs))
    bit = round(of.clock / baud)
    values = {
        "module": name,
        "baud": baud,
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "quiet_ms": round(1000 * _QUIET),
        "quiet_top": int(of.clock * _QUIET).bit_length() - 2,
        "bit": bit - 1,
        "bit_and_a_half": bit + bit // 2 - 1,
        "wait_top": (bit + bit // 2).bit_length() - 1,
        "sample_top": 8 * bytes_in - 1,
        "answer_top": 8 * bytes_out - 1,
        "in_top": circuit.n_inputs - 1,
        "out_top": circuit.n_outputs - 1,
        "count_in_top": bytes_in.bit_length() - 1,
        "count_out_top": bytes_out.bit_length() - 1,
    }
    # As the host program reads them.
    ports = tuple(
        tuple((p.name, p.count, p.format.bits, p.format.fraction, p.format.signed) for p in some)
        for some in (circuit.inputs, circuit.outputs)
    )
    pin_lines = [project["pin_line"].format(port=port, pin=pin) for port, pin in of.pins.items()]
    return {
        f"{name}.v": verilog.write(circuit, name, registers=registers),
        f"{name}_stream.v": stream,
        f"{name}_board.v": _templates.fill_template("board.v", **values),
        pins: "".join(pin_lines) + project["clock_line"].format(clock=clock),
        f"{name}_host.py": _templates.fill_template(
            "host.txt", name=name, ports=ports, baud=baud, bytes_in=bytes_in, bytes_out=bytes_out
        ),
        VECTORS: vectors.to_json(),
        "Makefile": _templates.fill_template(
            "board.mk",
            name=name,
            bitstream=bitstream,
            placed=placed,
            pins=pins,
            family=of.family,
            packer=project["packer"],
            pack=f"$(PACK){project['pack_options']} {placed} {bitstream}",
            place=" ".join(place),
            synthesis=FAMILIES[of.family].synthesis.format(f"{name}_board"),
            program=" ".join([*of.program, bitstream]),
        ),
    }

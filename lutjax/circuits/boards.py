"""Projects that put a circuit on a board with an FPGA, where a program on a computer sends it samples through a serial port."""

import dataclasses
from collections.abc import Mapping

from lutjax.circuits import _templates, streams, verilog
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.deployment import VECTORS, Vectors
from lutjax.circuits.fpga import FAMILIES
from lutjax.circuits.ports import Port

BAUD = 115_200
"""Bits a second of the serial port, by default."""

_QUIET = 0.02
"""Seconds after which a part of a sample is forgotten, at least half of them and at most all."""


@dataclasses.dataclass(frozen=True)
class Board:
    """A board with an FPGA and a serial port.

    Attributes:
      family: a name of `lutjax.circuits.fpga.FAMILIES`.
      clock: of its oscillator, in Hz.
      pins: of ``clock``, ``from_host``, ``to_host`` and ``led``.
      place: words of a call of nextpnr, beside names of files.
      program: words that load a bitstream.
    """

    family: str
    clock: int
    pins: Mapping[str, str]
    place: tuple[str, ...]
    program: tuple[str, ...]


BOARDS: dict[str, Board] = {
    "icebreaker": Board(
        "ice40",
        12_000_000,
        {"clock": "35", "from_host": "6", "to_host": "9", "led": "37"},
        ("--up5k", "--package", "sg48"),
        ("iceprog",),
    ),
    "ulx3s": Board(
        "ecp5",
        25_000_000,
        {"clock": "G2", "from_host": "M1", "to_host": "L4", "led": "B2"},
        ("--85k", "--package", "CABGA381"),
        ("openFPGALoader", "-b", "ulx3s"),
    ),
}
"""Boards by name: iCEBreaker (iCE40 UP5K, of 5280 look-up tables), and ULX3S with an LFE5U-85F (84 000)."""


def write(
    circuit: Circuit, name: str, board: str, vectors: Vectors, *, registers: int = 0, baud: int = BAUD
) -> dict[str, str]:
    """Return the files of a project, by name: Verilog, pins, a Makefile, and a program for the computer with its samples.

    The module ``{name}_board`` takes the bits of a sample from the serial port and sends those of its answer back: whole bytes, the first port and
    the lowest bits first. ``make`` makes the bitstream by Yosys and nextpnr, ``make program`` loads it, and ``{name}_host.py`` sends
    all samples and compares the answers.

    Args:
      circuit: any with inputs and outputs.
      name: of the module of the circuit, and of files.
      board: a name of `BOARDS`.
      vectors: samples with the answers that are expected.
      registers: levels of gates between two registers; see `lutjax.circuits.verilog.write`.
      baud: bits a second of the serial port, at most a quarter of the board's clock.

    Raises:
      ValueError: another board, other bits a second, a name that Verilog cannot have, registers below 0, a circuit without inputs or outputs, or vectors of
        other ports.

    Example:
      >>> import numpy as np
      >>> from lutjax.circuits import Circuit, Port, boards, deployment
      >>> both = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1000,), (2 * 3,))
      >>> vectors = deployment.Vectors({"x": np.array([[1, 1]])}, {"y": np.array([[1]])}, "one by hand")
      >>> sorted(boards.write(both, "both", "icebreaker", vectors))
      ['Makefile', 'both.pcf', 'both.v', 'both_board.v', 'both_host.py', 'both_stream.v', 'vectors.json']
    """
    if board not in BOARDS:
        raise ValueError(f"boards.write: board is {board!r}; the known ones are {', '.join(BOARDS)}.")
    of = BOARDS[board]
    if not 300 <= baud <= of.clock // 4:
        raise ValueError(f"boards.write: baud is {baud}; expected 300 to {of.clock // 4} for {board}.")
    vectors.check(circuit)
    stream = streams.write(circuit, name, registers=registers)  # checks the circuit and the name
    pins = f"{name}.pcf" if of.family == "ice40" else f"{name}.lpf"
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
    ports = tuple(tuple(map(_described, some)) for some in (circuit.inputs, circuit.outputs))
    return {
        f"{name}.v": verilog.write(circuit, name, registers=registers),
        f"{name}_stream.v": stream,
        f"{name}_board.v": _templates.filled("board.v", **values),
        pins: _pins(of),
        f"{name}_host.py": _templates.filled(
            "host.txt", name=name, ports=ports, baud=baud, bytes_in=bytes_in, bytes_out=bytes_out
        ),
        VECTORS: vectors.to_json(),
        "Makefile": _makefile(name, of, pins),
    }


def _described(port: Port) -> tuple[str, int, int, int, bool]:
    """Return a port as the program for the computer has it."""
    return port.name, port.count, port.format.bits, port.format.fraction, port.format.signed


def _pins(board: Board) -> str:
    """Return the file that says which pin is which port of the module."""
    if board.family == "ice40":
        return "".join(f"set_io {port} {pin}\n" for port, pin in board.pins.items())
    lines = []
    for port, pin in board.pins.items():
        lines += [f'LOCATE COMP "{port}" SITE "{pin}";', f'IOBUF PORT "{port}" IO_TYPE=LVCMOS33;']
    return "\n".join([*lines, f'FREQUENCY PORT "clock" {board.clock / 1e6:g} MHZ;', ""])


def _makefile(name: str, board: Board, pins: str) -> str:
    """Return the Makefile of a project."""
    ice = board.family == "ice40"
    placed, bitstream = ("placed.asc", f"{name}.bin") if ice else ("placed.config", f"{name}.bit")
    words = [
        *("$(NEXTPNR)", *board.place, "--freq", f"{board.clock / 1e6:g}", "--seed", "1"),
        *(
            "--json",
            "mapped.json",
            "--pcf" if ice else "--lpf",
            pins,
            "--asc" if ice else "--textcfg",
            placed,
        ),
    ]
    return _templates.filled(
        "board.mk",
        name=name,
        bitstream=bitstream,
        placed=placed,
        pins=pins,
        family=board.family,
        packer="icepack" if ice else "ecppack",
        pack=f"$(PACK){'' if ice else ' --compress'} {placed} {bitstream}",
        place=" ".join(words),
        synthesis=FAMILIES[board.family].synthesis.format(f"{name}_board"),
        program=" ".join([*board.program, bitstream]),
    )

"""FPGA costs of circuits: lookup tables, flip-flops, levels and clock.

The clock requires a place-and-route tool.

Yosys (``pip install pyosys``) maps a circuit, and each part separately, to the cells of a family;
nextpnr places and routes them.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lutjax import __version__
from lutjax.circuits import _programs, _templates, verilog, yosys
from lutjax.circuits._targets import read_targets
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Port

_COUNTS = ("luts", "flip_flops", "carry_cells", "muxes")


@dataclasses.dataclass(frozen=True)
class Family:
    """FPGAs with a common cell type.

    Attributes:
      synthesis: Yosys command template with the module name.
      lut: inputs of a lookup table.
      cells: cell name prefixes for each count in a `Cost`.
      nextpnr: start and end of a nextpnr call for the placement device; empty if nextpnr requires
        a device database without an installable package.
      device: device name.
    """

    synthesis: str
    lut: int
    cells: Mapping[str, tuple[str, ...]]
    nextpnr: tuple[str, ...] = ()
    device: str = ""


FAMILIES = read_targets("families", Family)
"""Families by name: Lattice iCE40 and ECP5, and AMD (Xilinx) 7 series."""

_QUICK = ("scratchpad -set abc9.verify false",)
"""Disables ABC's proof of its mapping, the slowest step for wide sums.

`lutjax verify` proves the files.
"""

_SEQUENTIAL = ("SB_DFF", "TRELLIS_FF", "FD", "SRL")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cells, levels and clock of a circuit or a part.

    Attributes:
      name: part name, or "all".
      gates: circuit gates before mapping.
      luts: lookup tables, including inverters and shift registers.
      flip_flops, carry_cells, muxes: other cells; multiplexers combine lookup tables into larger
        ones.
      levels: lookup tables on the longest path between two registers, or from an input to an
        output.
      cycles: cycles from a sample to its registered answer.
      clock: in MHz after placement and routing; None if not placed.
      unplaced: reason for a missing placement; "" if placed.
    """

    name: str
    gates: int
    luts: int
    flip_flops: int
    carry_cells: int
    muxes: int
    levels: int
    cycles: int
    clock: float | None = None
    unplaced: str = ""

    @property
    def latency(self) -> float | None:
        """Time from a sample to its answer, in nanoseconds; None if not placed."""
        return None if self.clock is None else 1000 * self.cycles / self.clock


@dataclasses.dataclass(frozen=True)
class Report:
    """Costs of a circuit and its parts; formatted as a table.

    Attributes:
      family: a name from `FAMILIES`.
      registers: gate levels between two registers; 0 for none.
      asked: requested clock in MHz; None for none.
      parts: separate cost of each part.
      total: cost of the circuit.
      tools: tool versions by name.

    Each cost is complete. A separately mapped part shares no lookup tables with other parts, so
    the parts may add up to more than the circuit, and each part has its own output registers.
    """

    family: str
    registers: int
    asked: float | int | None
    parts: tuple[Cost, ...]
    total: Cost
    tools: Mapping[str, str]

    def to_json(self) -> str:
        """Return the report as a JSON object.

        Units are MHz for clocks, nanoseconds for latencies, and samples per second.
        """
        costs = [
            {
                **dataclasses.asdict(cost),
                "latency_ns": cost.latency,
                "samples_a_second": None if cost.clock is None else 1e6 * cost.clock,
            }
            for cost in (*self.parts, self.total)
        ]
        facts = {
            "family": self.family,
            "device": FAMILIES[self.family].device,
            "registers": self.registers,
            "asked_clock": self.asked,
            "parts": costs[:-1],
            "all": costs[-1],
            "tools": dict(self.tools),
        }
        return json.dumps(facts, indent=2) + "\n"

    def __str__(self) -> str:
        costs = (*self.parts, self.total)
        rows = [["part", "gates", "LUTs", "flip-flops", "carry cells", "muxes", "levels", "cycles"]]
        rows += [
            [
                cost.name,
                *(f"{n:,}" for n in (cost.gates, *(getattr(cost, name) for name in _COUNTS))),
                str(cost.levels),
                str(cost.cycles),
            ]
            for cost in costs
        ]
        if any(cost.clock is not None for cost in costs):
            rows[0] += ["MHz", "ns", "M samples/s"]
            for row, cost in zip(rows[1:], costs, strict=True):
                numbers = (cost.clock, cost.latency, cost.clock)
                row += ["-" if number is None else f"{number:.1f}" for number in numbers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for first, *others in rows:
            cells = [word.rjust(w) for word, w in zip(others, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        remarks: dict[str, list[str]] = {}
        for cost in (*self.parts, self.total):
            if cost.unplaced:
                remarks.setdefault(cost.unplaced, []).append(cost.name)
        lines = []
        for why, names in remarks.items():
            of = "" if len(names) > len(self.parts) else f" ({', '.join(names)})"
            lines.append(f"not placed{of}: {why}")
        if self.total.clock is not None:
            lines.append(
                f"placed and routed on an {FAMILIES[self.family].device}, "
                "between registers for inputs and answers"
            )
        if self.asked is not None and self.total.clock is not None:
            met = "is met" if self.total.clock >= self.asked else "is not met"
            lines.append(f"the clock of {self.asked:g} MHz that was asked for {met}")
        elif self.asked is not None:
            lines.append(
                f"if a clock of {self.asked:g} MHz is met: "
                f"{1000 * self.total.cycles / self.asked:.1f} ns from a sample to its answer, "
                f"{self.asked:g} million samples a second"
            )
        return lines


def report(
    circuit: Circuit,
    family: str,
    *,
    registers: int = 0,
    clock: float | int | None = None,
    place: bool = True,
    layout: str | os.PathLike[str] | None = None,
    seconds: float | int = 1800,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Return the costs of a circuit and each of its parts on an FPGA family.

    Args:
      circuit: any circuit. Build it with ``lut=`` the family's lookup table inputs for the lowest
        cost.
      family: a name from `FAMILIES`: ``"ice40"``, ``"ecp5"`` or ``"xc7"``.
      registers: gate levels between two registers, as in `lutjax.circuits.verilog.write`; 0 for
        none.
      clock: nextpnr target clock in MHz; None for the fastest.
      place: whether to place and route the circuit and its parts if nextpnr is available.
      layout: SVG file for the placed cells of the whole circuit.
      seconds: time limit per tool.
      progress: receives the next step as text.

    Raises:
      ValueError: unknown family, a clock not above 0, or negative `registers`.
      RuntimeError: pyosys is not installed, or Yosys fails.
      TimeoutError: Yosys exceeded the time limit.

    Example:
      >>> from lutjax.circuits import Builder, fpga, yosys
      >>> builder = Builder()
      >>> (a,), (b,), (c,) = builder.input("x", 3)
      >>> builder.output("y", [[builder.gate([a, b, c], 0b10010110)]])
      >>> if yosys.is_installed():
      ...     report = fpga.report(builder.circuit(), "ice40", place=False)
      ...     assert (report.total.luts, report.total.levels) == (1, 1)
    """
    if family not in FAMILIES:
        raise ValueError(
            f"fpga.report: family is {family!r}; the known ones are {', '.join(FAMILIES)}."
        )
    if clock is not None and not 0 < clock < float("inf"):
        raise ValueError(f"fpga.report: clock is {clock!r}; it must be a number of MHz above 0.")
    # Raises for wrong registers before a tool runs for minutes.
    verilog.latency(circuit, registers)
    program = _find(family) if place else None
    tools = {"lutjax": __version__}
    if yosys.is_installed():
        tools["pyosys"] = importlib.metadata.version("pyosys")
    if program is not None:
        tools[program] = _programs.run([program, "--version"], ".", 60)[1].strip().splitlines()[-1]
    costs = []
    parts = {name: part_of(circuit, name) for name in circuit.part_ranges}
    for name, part in [*parts.items(), ("all", circuit)]:
        progress(f"mapping {name}")
        cost = _map_cells(part, name, FAMILIES[family], registers, seconds)
        if not place:
            cost = dataclasses.replace(cost, unplaced="it was not asked for")
        elif program is None:
            cost = dataclasses.replace(cost, unplaced=_unplaced_reason(family))
        elif len(part):
            progress(f"placing {name}")
            picture = pathlib.Path(layout) if layout is not None and part is circuit else None
            cost = _place_cells(
                part, cost, FAMILIES[family], program, registers, clock, picture, seconds
            )
        costs.append(cost)
    return Report(family, registers, clock, tuple(costs[:-1]), costs[-1], tools)


def part_of(circuit: Circuit, name: str) -> Circuit:
    """Return a part as a circuit: ``x`` has its input bits, ``y`` the bits used outside of it.

    Raises:
      ValueError: unknown part.

    Example:
      >>> from lutjax.circuits import Builder, fpga
      >>> builder = Builder(merge=2)
      >>> (a,), (b,), (c,) = builder.input("x", 3)
      >>> builder.start_part("first")
      >>> both = builder.gate([a, b], 0b1000)
      >>> builder.start_part("second")
      >>> builder.output("y", [[builder.gate([both, c], 0b0110)]])
      >>> fpga.part_of(builder.circuit(), "second")
      Circuit(x: 2 x uint1 -> y: 1 x uint1; 1 gates)
    """
    if name not in circuit.part_ranges:
        raise ValueError(
            f"fpga.part_of: name is {name!r}; the parts are {', '.join(circuit.part_ranges)}."
        )
    gates, first = circuit.part_ranges[name], circuit.first_gate
    inside = range(first + gates.start, first + gates.stop)
    all_read = {node for g in gates for node in circuit.fanins[g]}
    read = sorted(node for node in all_read if node and node not in inside)
    needed = {literal >> 1 for literal in circuit.literals}
    needed.update(node for g in range(gates.stop, len(circuit)) for node in circuit.fanins[g])
    used_outside = [node for node in inside if node in needed]
    number = {0: 0, **{node: k for k, node in enumerate([*read, *inside], 1)}}
    return Circuit(
        inputs=(Port("x", len(read)),) if read else (),
        outputs=(Port("y", len(used_outside)),) if used_outside else (),
        fanins=tuple(tuple(number[node] for node in circuit.fanins[g]) for g in gates),
        tables=tuple(circuit.tables[g] for g in gates),
        literals=tuple(2 * number[node] for node in used_outside),
    )


def _find(family: str) -> str | None:
    names = [f"{start}{name}" for name in FAMILIES[family].nextpnr[:1] for start in ("", "yowasp-")]
    return next(filter(shutil.which, names), None)


def _unplaced_reason(family: str) -> str:
    words = FAMILIES[family].nextpnr
    if not words:
        return (
            "there is no nextpnr for this family without a database of the device; "
            "place the Verilog by the maker's tools"
        )
    return f"nextpnr was not found; install {words[0]}, or `pip install yowasp-{words[0]}`"


def _map_cells(
    circuit: Circuit, name: str, family: Family, registers: int, seconds: float | int
) -> Cost:
    counts = dict.fromkeys((*_COUNTS, "levels"), 0)
    if circuit.outputs:
        files = {"a.v": verilog.write(circuit, registers=registers)}
        cells = _cells(files, "circuit", family, seconds)
        for kind, beginnings in family.cells.items():
            counts[kind] = sum(cell["type"].startswith(beginnings) for cell in cells if beginnings)
        counts["levels"] = _levels(cells, family)
    cycles = max(1, verilog.latency(circuit, registers))
    return Cost(name=name, gates=len(circuit), cycles=cycles, clock=None, unplaced="", **counts)


def _cells(
    files: Mapping[str, str], top: str, family: Family, seconds: float | int,
    folder: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Map a Verilog module with Yosys and return its cells; a folder receives ``mapped.json``."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return _cells(files, top, family, seconds, temporary)
    for name, text in files.items():
        pathlib.Path(folder, name).write_text(text, encoding="utf-8")
    commands = [
        *_QUICK,
        f"read_verilog {' '.join(files)}",
        family.synthesis.format(top),
        "delete t:$scopeinfo",
        "write_json mapped.json",
    ]
    yosys.run(commands, folder, seconds=seconds, where="fpga.report")
    design = json.loads(pathlib.Path(folder, "mapped.json").read_bytes())
    return list(design["modules"][top]["cells"].values())


def _levels(cells: Sequence[Mapping[str, Any]], family: Family) -> int:
    """Return the number of lookup tables on the longest register-free path."""
    drivers: dict[Any, int] = {}
    reads: list[list[Any]] = []
    for k, cell in enumerate(cells):
        reads.append([])
        for port, bits in cell["connections"].items():
            if cell["port_directions"][port] == "input":
                reads[k] += bits
            elif not cell["type"].startswith(_SEQUENTIAL):
                drivers.update(dict.fromkeys(bits, k))
    # No register drives a net above, so its output starts a path.
    level: dict[int, int] = {}
    # Depth first with a stack, as paths may be longer than Python's recursion limit. Cells that
    # read their own output, such as carries, do not wait for themselves.
    for root in range(len(cells)):
        stack = [root]
        while stack:
            k = stack[-1]
            before = {drivers[bit] for bit in reads[k] if bit in drivers} - {k}
            if todo := [other for other in before if other not in level]:
                stack += todo
                continue
            counts = cells[k]["type"].startswith(family.cells["luts"])
            level[k] = max((level[other] for other in before), default=0)
            level[k] += counts and not cells[k]["type"].startswith(_SEQUENTIAL)
            stack.pop()
    return max(level.values(), default=0)


def _place_cells(
    circuit: Circuit,
    cost: Cost,
    family: Family,
    program: str,
    registers: int,
    clock: float | int | None,
    layout: pathlib.Path | None,
    seconds: float | int,
) -> Cost:
    """Return a cost with the nextpnr clock of the circuit between registers."""
    # A device has fewer pins than a circuit has inputs and outputs. Inputs therefore come from a
    # shift register, and a register stores the answers and outputs their parity.
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "a.v": verilog.write(circuit, registers=registers),
            "top.v": _wrapper(circuit, registers),
        }
        _cells(files, "top", family, seconds, folder)
        # A fixed seed makes placement reproducible. Without a clock, nextpnr tries to reach a
        # frequency that no family has, and reports the best that it found.
        words = [program, *family.nextpnr[1:], "--json", "mapped.json", "--report", "report.json"]
        words += ["--seed", "1", "--timing-allow-fail", "--freq", f"{clock or 1000:g}"]
        if layout is not None:
            words += ["--placed-svg", "layout.svg"]
        try:
            status, printed = _programs.run(words, folder, seconds)
        except TimeoutError:
            why = f"{program} was not done after {seconds:g} seconds"
            return dataclasses.replace(cost, unplaced=why)
        report_file = pathlib.Path(folder, "report.json")
        if status or not report_file.is_file():
            errors = [line for line in printed.splitlines() if line.startswith("ERROR")]
            why = " ".join((errors or [printed])[0].split())[-200:]
            return dataclasses.replace(cost, unplaced=f"{program} says: {why}")
        if layout is not None:
            shutil.copyfile(pathlib.Path(folder, "layout.svg"), layout)
        clocks = [of["achieved"] for of in json.loads(report_file.read_bytes())["fmax"].values()]
    if not clocks:
        return dataclasses.replace(cost, unplaced=f"{program} finds no path between registers")
    return dataclasses.replace(cost, clock=min(clocks))


def _wrapper(circuit: Circuit, registers: int) -> str:
    connections = [f".{name}({name})" for name in verilog.CONTROL] if registers else []
    connections += verilog.connections(circuit, "inputs", "answers")
    return _templates.fill_template(
        "placed.v",
        module="circuit",
        connections=", ".join(connections),
        in_top=max(circuit.n_inputs - 1, 0),
        out_top=circuit.n_outputs - 1,
        valid="" if registers else "assign valid_out = valid_in;",
    )

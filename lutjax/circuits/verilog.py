"""Circuits as Verilog-2001, with registers and a testbench.

VHDL output is unsupported: VHDL tools also read Verilog, and VHDL can instantiate a module through
a component with the same ports (``std_logic`` and ``std_logic_vector``). A second language would
double the verification effort, and neither ABC nor Yosys reads VHDL.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from lutjax.circuits import _about, _names, _netlists, _templates, truth
from lutjax.circuits._formulas import formula
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Port, bit_ranges

CONTROL = ("clk", "reset", "valid_in", "valid_out")  # ports of a module with registers


def latency(circuit: Circuit, registers: int) -> int:
    """Return the latency in cycles.

    It is 0 without registers, else one for each `registers` levels, at least 1.
    """
    _check_registers("latency", registers)
    return max(1, -(-circuit.depth // registers)) if registers else 0


def write(circuit: Circuit, name: str = "circuit", *, registers: int = 0) -> str:
    """Return a circuit as a Verilog-2001 module.

    The circuit ports become vectors with element 0 in the lowest bits. Gates with up to 3 inputs
    are written with operators. Larger gates are functions with a ``case`` over the table;
    synthesis maps each to one lookup table if the device supports this number of inputs. Adders
    and comparisons are ordinary gates.

    With registers the module is a pipeline that takes a sample in every cycle. It adds the ports
    ``clk``, ``reset`` (synchronous; it clears only the valid bits), ``valid_in`` and
    ``valid_out``. Registered outputs appear `latency` cycles after their inputs.

    Args:
      circuit: the circuit.
      name: module name.
      registers: 0 for a combinational module, or the number of gate levels between registers.

    Raises:
      ValueError, TypeError: a name that is invalid in Verilog, negative `registers`, or a port
        with the name of an added port.

    Example:
      >>> from lutjax.circuits import Circuit, Port, verilog
      >>> both = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1000,), (2 * 3,))
      >>> print(verilog.write(both))  # doctest: +ELLIPSIS
      // ...
      module circuit (
        input wire [1:0] x,
        output wire [0:0] y
      );
        wire g0 = x[0] & x[1];
        assign y[0] = g0;
      endmodule
      `default_nettype wire
      <BLANKLINE>
    """
    _check_registers("verilog.write", registers)
    _check_names("verilog.write", circuit, name, registers)
    names = [port.name for port in (*circuit.inputs, *circuit.outputs)]
    gate, delayed, function = (_free_prefix(prefix, names) for prefix in ("g", "d", "t"))
    cycles, first = latency(circuit, registers), circuit.first_gate
    delays = _delays(circuit, registers, cycles)
    stages = _stages(circuit, registers)
    inputs = _netlists.bit_names(circuit.inputs)
    now = ["1'b0", *inputs, *(f"{gate}{g}" for g in range(len(circuit)))]

    def name_at(node: int, stage: int) -> str:
        cycle = stage - stages[node]
        return f"{delayed}{cycle}_{node}" if cycle and node else now[node]

    functions: dict[tuple[int, int], str] = {}
    body = []
    for g, (nodes, table) in enumerate(zip(circuit.fanins, circuit.tables, strict=True)):
        reads = [name_at(node, stages[first + g]) for node in nodes]
        n = len(reads)
        # Verilog tools share a function of many inputs better than a long formula.
        if table in (0, truth.FULL[n]):
            value = f"1'b{table & 1}"
        elif n <= 3:
            value = formula(table, n).format(*reads)
        else:
            called = f"{function}{n}_{table:x}"
            functions[n, table] = called
            value = f"{called}({{{', '.join(reversed(reads))}}})"
        body.append(f"  wire {gate}{g} = {value};")
    for bit, literal in zip(_netlists.bit_names(circuit.outputs), circuit.literals, strict=True):
        inverter = "~" if literal & 1 else ""
        body.append(f"  assign {bit} = {inverter}{name_at(literal >> 1, cycles)};")
    ports = [f"{kind} {port}" for port, kind in ports_of(circuit, registers).items()]
    lines = [
        *_header(circuit, name, registers),
        # Misspelled names are errors here, and as before in the files that follow.
        "`default_nettype none",
        f"module {name} (",
        ",\n".join(f"  {port}" for port in ports),
        ");",
        *(_function(called, n, table) for (n, table), called in functions.items()),
    ]
    if registers:
        lines += _registers(cycles, delays, now, delayed, _free_prefix("valid", names))
    lines += [*body, "endmodule", "`default_nettype wire", ""]
    return "\n".join(lines)


def ports_of(circuit: Circuit, registers: int = 0) -> dict[str, str]:
    """Return the declaration of each circuit port in `write` output, by name."""
    ports = {}
    if registers:
        ports = {**dict.fromkeys(CONTROL[:3], "input wire"), CONTROL[3]: "output wire"}
    ports |= {port.name: f"input wire [{port.n_bits - 1}:0]" for port in circuit.inputs}
    return ports | {port.name: f"output wire [{port.n_bits - 1}:0]" for port in circuit.outputs}


def connections(circuit: Circuit, inputs: str, outputs: str) -> list[str]:
    """Connect circuit ports to slices of two vectors, the first port in the lowest bits."""
    return [
        f".{port.name}({vector}[{bits[-1]}:{bits[0]}])"
        for vector, ports in ((inputs, circuit.inputs), (outputs, circuit.outputs))
        for port, bits in bit_ranges(ports)
    ]


def declared(text: str, module: str) -> dict[str, str]:
    """Return the port declarations of a module in `write` output, by name, or raise ValueError."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    pattern = rf"\bmodule\s+{re.escape(module)}\s*\(([^()]*)\)\s*;.*?\bendmodule\b"
    port_lists = re.findall(pattern, code, re.DOTALL)
    if len(port_lists) != 1:
        raise ValueError(
            f"it declares {len(port_lists)} modules {module!r} with their ports; expected one"
        )
    words = [port.split() for port in port_lists[0].split(",")]
    return {port[-1]: " ".join(port[:-1]) for port in words if port}


def testbench(
    circuit: Circuit,
    samples: Any,
    expected: Any = None,
    *,
    name: str = "circuit",
    registers: int = 0,
) -> str:
    """Return a testbench for the `write` module, with all samples and answers included.

    It prints one line that begins with PASS or FAIL. With registers it sends the samples twice,
    without and with gaps in the stream, and checks ``valid_out`` in every cycle, also under reset.
    Inputs are unknown (X) in the gaps.

    Args:
      circuit: the circuit.
      samples: values for the input port, as in `Circuit` calls, or a tuple with values for each
        input port.
      expected: values for the output port, or a tuple; None for the circuit's own answers.
      name: as in `write`. The testbench is named ``{name}_testbench``.
      registers: as in `write`.

    Raises:
      ValueError, TypeError: samples that do not fit the ports, no samples, or a circuit without
        inputs or outputs.
    """
    _check_registers("testbench", registers)
    _check_names("testbench", circuit, name, registers)
    if not circuit.inputs or not circuit.outputs:
        raise ValueError("testbench: the circuit has no inputs or no outputs; expected both.")
    samples = samples if isinstance(samples, tuple) else (samples,)
    # Evaluating checks the samples too.
    answers = circuit(*samples)
    if expected is not None:
        answers = expected
    answers = answers if isinstance(answers, tuple) else (answers,)
    if len(answers) != len(circuit.outputs):
        raise ValueError(
            f"testbench: expected has {len(answers)} arrays for {len(circuit.outputs)} outputs."
        )
    rows = (
        _format_hexadecimal(circuit.inputs, samples),
        _format_hexadecimal(circuit.outputs, answers),
    )
    if not rows[0] or len(rows[0]) != len(rows[1]):
        raise ValueError(
            f"testbench: there are {len(rows[0])} samples and {len(rows[1])} answers; "
            "expected as many, and at least one."
        )
    n_in, n_out, n = circuit.n_inputs, circuit.n_outputs, len(rows[0])
    control = [f".{name}({name})" for name in CONTROL] if registers else []
    wires = ", ".join([*control, *connections(circuit, "inputs", "outputs")])
    cycles = latency(circuit, registers)
    body = _templates.fill_template(
        "pipeline.v" if registers else "combinational.v",
        module=name,
        connections=wires,
        n=n,
        latency=cycles,
        top=cycles - 1,
        unknown=f"{{{n_in}{{1'bx}}}}",
    )
    loads = [
        f"    samples[{k}] = {n_in}'h{sample}; answers[{k}] = {n_out}'h{answer};"
        for k, (sample, answer) in enumerate(zip(*rows, strict=True))
    ]
    return _templates.fill_template(
        "testbench.v",
        module=name,
        n=n,
        last=n - 1,
        in_top=n_in - 1,
        out_top=n_out - 1,
        body=body.rstrip(),
        loads=loads,
    )


testbench.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _check_registers(caller: str, registers: int) -> None:
    if type(registers) is not int or registers < 0:
        raise ValueError(
            f"{caller}: registers is {registers!r}; expected an integer: 0 for none, "
            "or k for a register after every k levels."
        )


def _check_names(caller: str, circuit: Circuit, module: str, registers: int) -> None:
    if why := _names.explain_bad_port(module):
        raise ValueError(f"{caller}: name is {module!r}; {why}.")
    for port in (*circuit.inputs, *circuit.outputs):
        if registers and port.name in CONTROL:
            raise ValueError(
                f"{caller}: port {port.name!r} has the name "
                f"of an added port ({', '.join(CONTROL)}); rename it."
            )


def _free_prefix(prefix: str, names: Sequence[str]) -> str:
    """Return an internal name prefix: no port is named with this prefix and digits."""
    while any(re.fullmatch(rf"{prefix}\d*(_\w*)?", name) for name in names):
        prefix += "_"
    return prefix


def _stages(circuit: Circuit, registers: int) -> Sequence[int]:
    """Return the number of registers between the inputs and each node."""
    return [max(0, (level - 1) // registers) if registers else 0 for level in circuit.levels]


def _delays(circuit: Circuit, registers: int, cycles: int) -> list[int]:
    """Return the number of cycles each node is held for its readers."""
    delays = [0] * (circuit.first_gate + len(circuit))
    if not registers:
        return delays
    stages = _stages(circuit, registers)
    for g, nodes in enumerate(circuit.fanins, circuit.first_gate):
        for node in nodes:
            delays[node] = max(delays[node], stages[g] - stages[node])
    for literal in circuit.literals:
        delays[literal >> 1] = max(delays[literal >> 1], cycles - stages[literal >> 1])
    # The constant needs no register.
    delays[0] = 0
    return delays


def _header(circuit: Circuit, module: str, registers: int) -> list[str]:
    lines = [f"// {module}: {len(circuit)} gates in {circuit.depth} levels, written by lutjax"]
    for kind, ports in (("input", circuit.inputs), ("output", circuit.outputs)):
        for port in ports:
            width = port.format.bits
            where = ""
            if port.count > 1:
                where = f"; number i is {port.name}[{width} * i +: {width}], its lowest bit first"
            noun = "number" if port.count == 1 else "numbers"
            lines.append(f"// {kind} {port.name}: {port.count} {noun} {port.format}{where}")
    if registers:
        cycles = latency(circuit, registers)
        lines += [
            f"// a register after every {registers} levels: latency {cycles} cycles of clk, "
            "a sample in every cycle",
            "// valid_out is valid_in after that latency; "
            "reset is synchronous and clears the valid bits alone",
        ]
    # These two are long, and follow as lines of their own.
    long = ("classes", "input_names")
    facts = {name: fact for name, fact in circuit.about.items() if name not in long}
    if facts:
        lines.append(f"// {json.dumps(facts, ensure_ascii=True)}")
    lines += [f"// {line}" for line in _about.names(circuit.about, circuit.inputs)]
    return lines


def _function(name: str, n: int, table: int) -> str:
    ones = [address for address in range(1 << n) if table >> address & 1]
    answer = 1
    # The shorter list of addresses makes the shorter function.
    if len(ones) > 1 << n - 1:
        ones = [address for address in range(1 << n) if not table >> address & 1]
        answer = 0
    rows = ", ".join(f"{n}'d{address}" for address in ones)
    return (
        f"  function {name}(input [{n - 1}:0] a); case (a) {rows}: {name} = 1'b{answer}; "
        f"default: {name} = 1'b{1 - answer}; endcase endfunction"
    )


def _registers(
    cycles: int, delays: Sequence[int], now: Sequence[str], delayed: str, valid: str
) -> list[str]:
    lines = [f"  reg [{cycles - 1}:0] {valid};"]
    shifted = f"{{{valid}[{cycles - 2}:0], valid_in}}" if cycles > 1 else "valid_in"
    lines.append(f"  always @(posedge clk) {valid} <= reset ? {cycles}'d0 : {shifted};")
    lines.append(f"  assign valid_out = {valid}[{cycles - 1}];")
    moves = []
    for node, n in enumerate(delays):
        if n:
            chain = [f"{delayed}{cycle}_{node}" for cycle in range(1, n + 1)]
            lines.append(f"  reg {', '.join(chain)};")
            pairs = zip([now[node], *chain], chain, strict=False)
            moves += [f"    {new} <= {old};" for old, new in pairs]
    if moves:
        lines += ["  always @(posedge clk) begin", *moves, "  end"]
    return lines


def _format_hexadecimal(ports: Sequence[Port], numbers: Sequence[Any]) -> list[str]:
    """Return the digits of each sample, with the first port in the lowest bits."""
    bits = []
    for port, values in zip(ports, numbers, strict=True):
        codes = port.format.encode(np.asarray(values)).reshape(len(values), port.count, 1)
        of_each = codes >> np.arange(port.format.bits, dtype=np.uint64) & np.uint64(1)
        bits.append(of_each.reshape(len(codes), port.n_bits))
    flags = np.concatenate(bits, axis=1).astype(bool)
    # Hexadecimal digits begin with the highest bits.
    octets = np.packbits(flags, axis=1, bitorder="little")[:, ::-1]
    return [row.tobytes().hex().lstrip("0") or "0" for row in octets]

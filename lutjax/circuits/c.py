"""Circuits as C99: bit-parallel evaluation, as functions or as a table with an interpreter loop."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from lutjax.circuits import _about, _c_emitter as c99, _c_rows, _names, _templates, gate_operations
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.columns import Value
from lutjax.circuits.gate_operations import Operations
from lutjax.circuits.ports import Port

Style = Literal["auto", "functions", "interpreter"]
_OWN = (
    "predict",
    "predict_row",
    "predict_rows",
    "words",
    "step",
    "word",
    "unit",
    "number",
    "row",
)  # suffixes of interface names
_INNER = (
    "bits_of",
    "numbers_of",
    "number",
    "of",
    "input",
    "expected",
    "output",
)  # prefixes of port names
_FUNCTION = (
    200  # operations per function: larger ones compile longer, smaller ones keep more values in memory
)
_WINDOW = 4000  # maximum operations reordered into runs by the interpreter: more need more memory for values
_FUNCTIONS_UP_TO = 20_000  # maximum operations that compile quickly


def write(circuit: Circuit, name: str = "circuit", *, style: Style = "auto") -> dict[str, str]:
    """Return a circuit as C99: the texts of ``NAME.h`` and ``NAME.c`` by file name.

    The header describes the interface. ``NAME_predict`` maps input port values to output port
    values for any number of samples. ``NAME_words`` maps bits to bits, with one sample in each bit
    of a word. Words have 8 to 512 bits, chosen at compile time. An automaton rule also gets
    ``NAME_step``, which maps a grid to the next one. A circuit with table rows also gets
    ``NAME_predict_rows``, which takes rows of doubles and category codes.

    Args:
      circuit: any circuit; gates not required by the outputs are dropped.
      name: file name, and prefix of C identifiers.
      style: "functions" writes every operation as an instruction, the fastest form, which takes
        seconds to compile; "interpreter" writes a table and a loop over it, for large circuits and
        small memories; "auto" selects by the number of operations.

    Raises:
      ValueError: a name that is not a word, or an unknown style.

    Example:
      >>> from lutjax.circuits import Builder, c
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate([a, b], 0b0110)]])
      >>> sorted(c.write(builder.circuit(), "parity"))
      ['parity.c', 'parity.h']
    """
    check_name(name, (*circuit.inputs, *circuit.outputs))
    if style not in ("auto", "functions", "interpreter"):
        raise ValueError(f"c.write: style is {style!r}; expected 'auto', 'functions' or 'interpreter'.")
    program = gate_operations.operations(circuit)
    if style == "auto":
        style = "functions" if len(program) <= _FUNCTIONS_UP_TO else "interpreter"
    if not len(program):  # outputs are inputs and constants: no operations to interpret
        style = "functions"
    body, slots = (_functions if style == "functions" else _interpreter)(program, name)
    values = {
        "name": name,
        "NAME": name.upper(),
        "title": f"{name}: {len(circuit)} gates as {len(program)} operations ({style})",
        "summary": "\n".join(f" * {line}" for line in _summary(circuit)),
        "inputs": str(circuit.n_inputs),
        "outputs": str(circuit.n_outputs),
        "in_words": str(max(circuit.n_inputs, 1)),
        "out_words": str(max(circuit.n_outputs, 1)),
        "slots": str(slots),
        "numbers": "\n".join(
            f" * {line}" for line in (*_numbers(circuit), *_about.names(circuit.about, circuit.inputs))
        ),
        "parameters": ", ".join(
            [*c99.input_parameters(circuit), "size_t n", *c99.output_parameters(circuit)]
        ),
        "macros": c99.macros(program),
        "body": body,
        "ports": "".join(
            [
                *(
                    _conversion("to_bits.c", port, bits)
                    for port, bits in zip(circuit.inputs, _bits_read(circuit, program), strict=True)
                ),
                *(_conversion("to_numbers.c", port, port.format.bits) for port in circuit.outputs),
            ]
        ),
        "calls_in": _calls(circuit.inputs, "in", "input"),
        "calls_out": _calls(circuit.outputs, "out", "output"),
        "number": c99.number_function(circuit, name),
    }
    rows = _c_rows.columns_of(circuit)
    in_rows = "" if rows is None else _c_rows.source(circuit, rows, name)
    files = {}
    automaton = circuit.about.get("kind") == "automaton" and circuit.n_inputs == 9 * circuit.n_outputs
    if automaton:
        values["periodic"] = str(int(bool(circuit.about.get("periodic"))))
        values["grid"] = (
            "a torus" if circuit.about.get("periodic") else "a grid, beyond which all cells are 0"
        )
    for end in ("h", "c"):
        values["rows"] = in_rows
        if rows is not None and end == "h":
            values["rows"] = _c_rows.header(circuit, rows, name)
        values["includes"] = "\n#include <string.h>" if "strcmp" in in_rows else ""
        values["step"] = _templates.filled(f"step.{end}", **values) if automaton else ""
        files[f"{name}.{end}"] = _templates.filled(f"circuit.{end}", **values)
    return files


def check_name(name: str, ports: Sequence[Port] = ()) -> None:
    """Raise ValueError if a name is invalid for the `write` files and their identifier prefix."""
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
        or name in _names.HEADERS
    ):
        raise ValueError(
            f"c.write: name is {name!r}; it must be a word of letters, digits and underscores, and no header of C."
        )
    inner = {f"{begin}_{port.name}" for begin in _INNER for port in ports}
    for word in (f"{name}_{end}" for end in _OWN):
        if word in inner:
            raise ValueError(
                f"c.write: name is {name!r}, which makes {word!r} for two things; choose another name."
            )


def c_test(
    circuit: Circuit,
    *samples: Shaped[np.ndarray, "..."],
    name: str = "circuit",
    rows: Sequence[Sequence[Value]] | None = None,
) -> str:
    """Return a C program that tests the `write` output, with samples and expected answers.

    It prints the number of wrong samples, and returns 0 if none is wrong. Compile it together with
    ``NAME.c``.

    Args:
      circuit: as in `write`, with at least one input port and one output port.
      *samples: sample values for each input port, as in `Circuit` calls.
      name: as in `write`.
      rows: raw table rows of the samples; see `lutjax.circuits.columns.Columns.encode`.

    Raises:
      ValueError: a circuit without inputs or outputs, or no samples.
      ValueError, TypeError: samples that do not fit the circuit.
    """
    if not circuit.inputs or not circuit.outputs:
        raise ValueError("c_test: circuit has no input port or no output port; there is nothing to test.")
    answers = c99.answers_to(circuit, samples, where="c_test")
    (inputs, outputs), n = c99.port_names(circuit), len(answers[0])
    calls, lines = [f"{name}_predict({', '.join([*inputs, str(n), *outputs])});"], []
    columns = _c_rows.columns_of(circuit)
    if columns is not None and rows is not None:
        lines = [
            f"static const {name}_row rows[] = {{",
            *(f"    {_c_rows.initializer(columns, row)}," for row in rows),
            "};",
        ]
        calls.append(f"{name}_predict_rows(rows, {n}, {', '.join(outputs)});")
    return c99.write_test(circuit, samples, answers, name, batch_calls=calls, rows=lines)


# ------------------------------------------------------------------------------------- words of the header
def _summary(circuit: Circuit) -> list[str]:
    lines = []
    for what, ports in (("Input", circuit.inputs), ("Output", circuit.outputs)):
        at = 0
        for port in ports:
            kind = str(port.format) if port.format.bits > 1 else "bits"
            of = "of " if port.format.bits > 1 else ""
            lines.append(
                f"{what} {port.name}, {port.count} {of}{kind}: bits {at} to {at + port.n_bits - 1}, number after number, lowest bit first."
            )
            at += port.n_bits
    return lines


def _numbers(circuit: Circuit) -> list[str]:
    lines = []
    for port in circuit.inputs:
        which = f"their lowest {port.format.bits}" if port.format.bits < c99.width_of(port) else "all"
        lines.append(f"input_{port.name} has {port.count} numbers of each sample; {which} bits are read.")
    lines += [f"output_{port.name} gets {port.count} of each sample." for port in circuit.outputs]
    for port in (*circuit.inputs, *circuit.outputs):
        if port.format.fraction:
            lines.append(f"A number of {port.name} stands for itself over {2**port.format.fraction}.")
    return lines


# ------------------------------------------------------------------------------------- operations as C
def _functions(program: Operations, name: str) -> tuple[str, int]:
    """Return functions with an instruction per operation, and the number of shared value slots."""
    program = gate_operations.short_lived(program)
    where, slots = gate_operations.places(program, _FUNCTION)
    first, n = program.first, len(program)
    text = [f"x[{i}]" for i in range(-1, program.n_inputs)] + [f"v[{w}]" for w in where]
    lines, calls = [], []
    for start in range(0, n, _FUNCTION):
        lines.append(
            f"static SEPARATE void part_{start // _FUNCTION}(const word *restrict x, word *restrict v)\n{{"
        )
        calls.append(f"    part_{start // _FUNCTION}(x, v);")
        local, end = first + start, min(start + _FUNCTION, n)
        read = {k for g in range(start, end) for k in program.fanins[g]}
        for g in range(start, end):
            nodes = program.fanins[g]
            arguments = ", ".join([text[k] if k < local else f"g{k - first}" for k in nodes])
            kept = f"v[{where[g]}] = " if where[g] >= 0 else ""
            here = f"const word g{g} = " if first + g in read else ""
            lines.append(f"    {here}{kept}{c99.macro(len(nodes), program.tables[g])}({arguments});")
        lines.append("    (void)x;\n}\n")
    lines.append(f"void {name}_words(const word *x, word *y)\n{{")
    lines.append(f"    MEMORY word v[{max(slots, 1)}] ALIGNED;")
    lines += calls
    for k, literal in enumerate(program.literals):
        lines.append(f"    y[{k}] = {_output(literal, text)};")
    lines.append("    (void)x, (void)y, (void)v;\n}")
    return "\n".join(lines), slots


def _output(literal: int, text: Sequence[str]) -> str:
    if literal < 2:
        return "(word)~(word){0}" if literal else "(word){0}"
    return f"(word)~{text[literal >> 1]}" if literal & 1 else text[literal >> 1]


def _interpreter(program: Operations, name: str) -> tuple[str, int]:
    """Return an operation table with its interpreter loop, and the number of value slots."""
    window = min(max(len(program) // 8, 100), _WINDOW)
    program = gate_operations.in_runs(gate_operations.short_lived(program), window)
    where, slots = gate_operations.places(program, 1)
    read = _inputs_read(program)  # their values come first
    place = [-1] * program.first + [len(read) + w for w in where]
    for k, node in enumerate(read):
        place[node] = k
    slots += len(read)
    runs: list[list[Any]] = []  # operation kind, run length
    table: list[int] = []
    for g, (nodes, answers) in enumerate(zip(program.fanins, program.tables, strict=True)):
        kind = len(nodes), answers
        if not runs or runs[-1][0] != kind:
            runs.append([kind, 0])
        runs[-1][1] += 1
        table += [place[n] for n in nodes]
        table.append(place[program.first + g])
    kinds = sorted({kind for kind, _ in runs})
    bits = 16 if slots < 1 << 16 else 32
    cases = []
    for i, (n, answers) in enumerate(kinds):
        reads = ", ".join(f"v[p[{k}]]" for k in range(n))
        cases += [
            f"        case {i}:",
            f"            for (; n > 0; n--, p += {n + 1})",
            f"                v[p[{n}]] = {c99.macro(n, answers)}({reads});",
            "            break;",
        ]
    results = [2 * place[k >> 1] + (k & 1) if k > 1 else 2 * slots + k for k in program.literals]
    text = _templates.filled(
        "interpreter.c",
        name=name,
        bits=bits,
        operands="\n".join(c99.wrap(table)),
        input_bits=16 if program.n_inputs < 1 << 16 else 32,
        inputs="\n".join(c99.wrap([node - 1 for node in read])),
        runs="\n".join(c99.wrap([f"{{{kinds.index(kind)}, {n}}}" for kind, n in runs] + ["{0, 0}"])),
        results="\n".join(c99.wrap(results or [0])),
        n_read=len(read),
        slots=slots,
        n_slots=slots + 1,
        cases="\n".join(cases),
        n_outputs=len(program.literals),
    )
    return text.rstrip(), slots + 1


def _inputs_read(program: Operations) -> list[int]:
    """Return the input nodes in use."""
    nodes = {n for nodes in program.fanins for n in nodes} | {k >> 1 for k in program.literals}
    return sorted(n for n in nodes if 0 < n < program.first)


# ------------------------------------------------------------------------------------- numbers and bits
def _conversion(template: str, port: Port, read: int) -> str:
    """Return the conversion function between port values and bits.

    It uses the lowest `read` bits in each value.
    """
    return _templates.filled(
        template,
        port=port.name,
        type=c99.type_of(port),
        unsigned=f"uint{c99.width_of(port)}_t",
        count=port.count,
        bits=port.format.bits,
        read=read,
        width=c99.width_of(port),
        sign=port.format.bits - 1 if port.format.signed else -1,
    )


def _bits_read(circuit: Circuit, program: Operations) -> list[int]:
    """Return the number of bits required from each input port's elements, at least 1."""
    nodes = _inputs_read(program)
    numbers, first = [], 1
    for port in circuit.inputs:
        at = [(n - first) % port.format.bits for n in nodes if first <= n < first + port.n_bits]
        numbers.append(max(at, default=0) + 1)
        first += port.n_bits
    return numbers


def _calls(ports: Sequence[Port], buffer: str, prefix: str) -> str:
    lines, at = [], 0
    for port in ports:
        numbers = f"{prefix}_{port.name} + done * {port.count}"
        if prefix == "input":
            lines.append(f"        bits_of_{port.name}({numbers}, left, in + {at} * GROUPS);")
        else:
            lines.append(f"        numbers_of_{port.name}(out + {at} * GROUPS, left, {numbers});")
        at += port.n_bits
    return "\n".join(lines)

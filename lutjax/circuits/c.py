"""Circuits as C99: bit-parallel evaluation, as functions or as a table with an interpreter loop."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Shaped

from lutjax.circuits import _about, _c_emitter as c99, _c_rows, _names, _templates, gate_operations
from lutjax.circuits.circuit import Circuit, columns_of
from lutjax.circuits.columns import Value
from lutjax.circuits.gate_operations import Operations
from lutjax.circuits.ports import Port, bit_ranges

Style = Literal["auto", "functions", "interpreter"]
# Suffixes of interface names, and prefixes of port names.
_OWN = ["predict", "predict_row", "predict_rows", "words", "step", "word", "unit", "number", "row"]
_INNER = ["bits_of", "numbers_of", "number", "of", "input", "expected", "output"]
# Operations per function: larger ones compile longer, smaller ones keep more values in memory.
_FUNCTION = 200
# Most operations reordered into runs by the interpreter: more need more memory for values.
_WINDOW = 4000
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
        raise ValueError(
            f"c.write: style is {style!r}; expected 'auto', 'functions' or 'interpreter'."
        )
    program = gate_operations.operations(circuit)
    if style == "auto":
        style = "functions" if len(program) <= _FUNCTIONS_UP_TO else "interpreter"
    # Outputs are inputs and constants: there are no operations to interpret.
    if not len(program):
        style = "functions"
    body, slots = (_functions if style == "functions" else _interpreter)(program, name)
    values = {
        "name": name,
        "NAME": name.upper(),
        "title": f"{name}: {len(circuit)} gates as {len(program)} operations ({style})",
        "summary": [f" * {line}" for line in _describe_bits(circuit)],
        "inputs": circuit.n_inputs,
        "outputs": circuit.n_outputs,
        "in_words": max(circuit.n_inputs, 1),
        "out_words": max(circuit.n_outputs, 1),
        "slots": slots,
        "numbers": [f" * {line}" for line in _describe_numbers(circuit)],
        "parameters": ", ".join(
            [*c99.input_parameters(circuit), "size_t n", *c99.output_parameters(circuit)]
        ),
        "macros": c99.macros(program),
        "body": body,
        "ports": "".join(_conversions(circuit, program)),
        "calls_in": [
            (
                f"        bits_of_{port.name}(input_{port.name} + done * {port.count}, left, "
                f"in + {bits.start} * GROUPS);"
            )
            for port, bits in bit_ranges(circuit.inputs)
        ],
        "calls_out": [
            (
                f"        numbers_of_{port.name}(out + {bits.start} * GROUPS, left, "
                f"output_{port.name} + done * {port.count});"
            )
            for port, bits in bit_ranges(circuit.outputs)
        ],
        "number": c99.number_function(circuit, name),
    }
    rows = columns_of(circuit)
    in_rows = "" if rows is None else _c_rows.source(circuit, rows, name)
    files = {}
    facts = circuit.about
    automaton = facts.get("kind") == "automaton" and circuit.n_inputs == 9 * circuit.n_outputs
    periodic = bool(facts.get("periodic"))
    values["periodic"] = int(periodic)
    values["grid"] = "a torus" if periodic else "a grid, beyond which all cells are 0"
    values["includes"] = "\n#include <string.h>" if "strcmp" in in_rows else ""
    for end in ("h", "c"):
        values["rows"] = in_rows
        if rows is not None and end == "h":
            values["rows"] = _c_rows.header(circuit, rows, name)
        values["step"] = _templates.fill_template(f"step.{end}", **values) if automaton else ""
        files[f"{name}.{end}"] = _templates.fill_template(f"circuit.{end}", **values)
    return files


def check_name(name: str, ports: Sequence[Port] = ()) -> None:
    """Raise ValueError if a name is invalid for the `write` files and their identifier prefix."""
    is_word = isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
    if not is_word or name in _names.HEADERS:
        raise ValueError(f"c.write: name is {name!r}; expected a word, and no C header name.")
    # The words of the interface and of the ports share one name space in C.
    inner = {f"{begin}_{port.name}" for begin in _INNER for port in ports}
    for word in (f"{name}_{end}" for end in _OWN):
        if word in inner:
            raise ValueError(
                f"c.write: name is {name!r}, which uses {word!r} twice; choose another name."
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
        raise ValueError("c_test: circuit has no inputs or no outputs; expected both.")
    answers = c99.compute_answers(circuit, samples, where="c_test")
    (inputs, outputs), n = c99.port_names(circuit), len(answers[0])
    calls, lines = [f"{name}_predict({', '.join([*inputs, str(n), *outputs])});"], []
    columns = columns_of(circuit)
    if columns is not None and rows is not None:
        lines = [
            f"static const {name}_row rows[] = {{",
            *(f"    {_c_rows.initializer(columns, row)}," for row in rows),
            "};",
        ]
        calls.append(f"{name}_predict_rows(rows, {n}, {', '.join(outputs)});")
    return c99.write_test(circuit, samples, answers, name, batch_calls=calls, rows=lines)


# ------------------------------------------------------------------------------ words of the header
def _describe_bits(circuit: Circuit) -> Iterator[str]:
    for what, ports in (("Input", circuit.inputs), ("Output", circuit.outputs)):
        for port, bits in bit_ranges(ports):
            kind = f"of {port.format}" if port.format.bits > 1 else "bits"
            yield (
                f"{what} {port.name}, {port.count} {kind}: bits {bits[0]} to {bits[-1]}, "
                "number after number, lowest bit first."
            )


def _describe_numbers(circuit: Circuit) -> Iterator[str]:
    for port in circuit.inputs:
        which = "all"
        if port.format.bits < c99.width_of(port):
            which = f"their lowest {port.format.bits}"
        yield f"input_{port.name} has {port.count} numbers of each sample; {which} bits are read."
    for port in circuit.outputs:
        yield f"output_{port.name} gets {port.count} of each sample."
    for port in (*circuit.inputs, *circuit.outputs):
        if port.format.fraction:
            yield f"A number of {port.name} stands for itself over {2**port.format.fraction}."
    yield from _about.names(circuit.about, circuit.inputs)


# ---------------------------------------------------------------------------------- operations as C
def _functions(program: Operations, name: str) -> tuple[str, int]:
    """Return functions with an instruction per operation, and the number of shared value slots."""
    program = gate_operations.short_lived(program)
    where, slots = gate_operations.assign_slots(program, _FUNCTION)
    first, n = program.first, len(program)
    text = ["(word){0}", *(f"x[{i}]" for i in range(program.n_inputs)), *(f"v[{w}]" for w in where)]
    lines, calls = [], []
    for part, start in enumerate(range(0, n, _FUNCTION)):
        arguments = "const word *restrict x, word *restrict v"
        lines.append(f"static SEPARATE void part_{part}({arguments})\n{{")
        calls.append(f"    part_{part}(x, v);")
        local, end = first + start, min(start + _FUNCTION, n)
        read = {k for g in range(start, end) for k in program.fanins[g]}
        for g in range(start, end):
            nodes = program.fanins[g]
            arguments = ", ".join([text[k] if k < local else f"g{k - first}" for k in nodes])
            # A value is a local if this function reads it, and has a slot if later ones do.
            slot = f"v[{where[g]}] = " if where[g] >= 0 else ""
            local_name = f"const word g{g} = " if first + g in read else ""
            call = f"{c99.macro(len(nodes), program.tables[g])}({arguments})"
            lines.append(f"    {local_name}{slot}{call};")
        lines.append("    (void)x;\n}\n")
    lines.append(f"void {name}_words(const word *x, word *y)\n{{")
    lines.append(f"    MEMORY word v[{max(slots, 1)}] ALIGNED;")
    lines += calls
    for k, literal in enumerate(program.literals):
        lines.append(f"    y[{k}] = {'(word)~' * (literal & 1)}{text[literal >> 1]};")
    lines.append("    (void)x, (void)y, (void)v;\n}")
    return "\n".join(lines), slots


def _interpreter(program: Operations, name: str) -> tuple[str, int]:
    """Return an operation table with its interpreter loop, and the number of value slots."""
    window = min(max(len(program) // 8, 100), _WINDOW)
    program = gate_operations.in_runs(gate_operations.short_lived(program), window)
    where, slots = gate_operations.assign_slots(program, 1)
    # Values of inputs in use come first, then the slots of operations.
    read = gate_operations.inputs_read(program)
    place = [-1] * program.first + [len(read) + w for w in where]
    for k, node in enumerate(read):
        place[node] = k
    slots += len(read)
    steps = list(zip(program.fanins, program.tables, strict=True))
    table = [place[n] for g, (nodes, _) in enumerate(steps, program.first) for n in (*nodes, g)]
    kinds_in_order = itertools.groupby((len(n), table) for n, table in steps)
    runs = [(kind, len(list(run))) for kind, run in kinds_in_order]
    kinds = sorted({kind for kind, _ in runs})
    cases = []
    for i, (n, answers) in enumerate(kinds):
        reads = ", ".join(f"v[p[{k}]]" for k in range(n))
        cases += [
            f"        case {i}:",
            f"            for (; n > 0; n--, p += {n + 1})",
            f"                v[p[{n}]] = {c99.macro(n, answers)}({reads});",
            "            break;",
        ]
    # An odd result is inverted. Constants read the last slot, which holds 0.
    results = [2 * place[k >> 1] + (k & 1) if k > 1 else 2 * slots + k for k in program.literals]
    text = _templates.fill_template(
        "interpreter.c",
        name=name,
        bits=16 if slots < 1 << 16 else 32,
        operands=c99.wrap(table),
        input_bits=16 if program.n_inputs < 1 << 16 else 32,
        inputs=c99.wrap([node - 1 for node in read]),
        runs=c99.wrap([f"{{{kinds.index(kind)}, {n}}}" for kind, n in runs] + ["{0, 0}"]),
        results=c99.wrap(results or [0]),
        n_read=len(read),
        slots=slots,
        n_slots=slots + 1,
        cases=cases,
        n_outputs=len(program.literals),
    )
    return text.rstrip(), slots + 1


# --------------------------------------------------------------------------------- numbers and bits
def _conversions(circuit: Circuit, program: Operations) -> Iterator[str]:
    nodes = gate_operations.inputs_read(program)
    for template, ports in (("to_bits.c", circuit.inputs), ("to_numbers.c", circuit.outputs)):
        for port, bits in bit_ranges(ports):
            used = [(n - 1 - bits[0]) % port.format.bits for n in nodes if n - 1 in bits]
            yield _templates.fill_template(
                template,
                port=port.name,
                type=c99.type_of(port),
                unsigned=f"uint{c99.width_of(port)}_t",
                count=port.count,
                bits=port.format.bits,
                # The lowest bits of an input, as many as are required.
                read=max(used, default=0) + 1,
                width=c99.width_of(port),
                sign=port.format.bits - 1 if port.format.signed else -1,
            )

"""Single-sample C programs for circuits, used by `lutjax.circuits.mcu`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from lutjax.circuits import _about, _c_emitter as c99, _c_rows, _templates, gate_operations
from lutjax.circuits._rows import bits_of_comparisons
from lutjax.circuits.builder import ONE, ZERO, Builder, add_outputs
from lutjax.circuits.circuit import Circuit, columns_of, walk, walk_literals
from lutjax.circuits.columns import MISSING, Columns, Number
from lutjax.circuits.gate_operations import Operations
from lutjax.circuits.ports import Port, levels_of, whole_numbers, whole_range

Style = Literal["functions", "tables"]
_WINDOW = 1000  # maximum operations reordered into runs by tables
_EXACT = 22  # maximum bits for which the high byte of a 32-bit difference holds only the sign


@dataclasses.dataclass(frozen=True)
class Load:
    """A bit extracted from an input port element."""

    port: int
    index: int  # of the element
    bit: int | None  # None for a comparison
    below: int = 0  # bound of a less-than comparison with the integer
    equal: int | None = None  # value of an equality comparison with the integer


@dataclasses.dataclass(frozen=True)
class Sink:
    """A signed sum term: a bit from an operation or load, times a power of two."""

    node: int
    result: int
    bit: int
    minus: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A circuit as loads, operations and sums."""

    circuit: Circuit  # with the ports of the program
    loads: tuple[Load, ...]  # nodes 1 and later in the operations
    operations: Operations  # ordered to keep few values live
    sinks: tuple[Sink, ...]  # in node order
    first: tuple[int, ...]  # initial values of sums
    answers: str  # "numbers" for output port values, or "class" for the first maximum

    @property
    def sum_bits(self) -> int:
        widths = [0]
        if self.answers == "numbers":
            widths = [port.format.bits for port in self.circuit.outputs]
        # Sums of classes are counts, and must not wrap, as their maximum is searched. Sums of
        # numbers are bits of numbers, and wrap with them.
        most = [1, *self.first]
        if self.answers == "class":
            for sink in self.sinks:
                most[1 + sink.result] += not sink.minus
        largest = max(*most, *(2**bits - 1 for bits in widths))
        return next(width for width in (8, 16, 32, 64) if largest < 1 << width)

    def sinks_of_nodes(self) -> dict[int, list[Sink]]:
        sinks: dict[int, list[Sink]] = {}
        for sink in self.sinks:
            sinks.setdefault(sink.node, []).append(sink)
        return sinks


def make_program(circuit: Circuit, layers: Circuit | None) -> Program:
    """Return the program for a circuit; see `lutjax.circuits.mcu.write`."""
    if layers is None:
        layers = circuit
    loads: list[Load] = []
    # Equal loads are one node, so that a pixel is compared once for all gates that read it.
    known: dict[Load, int] = {}

    def load(
        port: int, index: int, bit: int | None, below: int = 0, equal: int | None = None
    ) -> int:
        one = Load(port, index, bit, below, equal)
        if one not in known:
            loads.append(one)
            known[one] = 2 * len(loads)
        return known[one]

    # The columns of the circuit with the input bits of the layers, if both describe them.
    taken, column_bits, rows = columns_of(circuit), layers.about.get("column_bits"), None
    if taken is not None and column_bits is not None and layers is not circuit:
        rows = Columns(taken.columns, tuple((at, part) for at, part in column_bits))
        layers = _replace_inputs(layers, rows)
        for at, part in _comparisons(rows):
            column = rows.columns[at]
            if part == MISSING:
                load(at, 0, None, equal=column.missing_code)
            elif isinstance(column, Number):
                load(at, 0, None, column.levels[part] + 1)
            else:
                load(at, 0, None, equal=part)
    levels = None if rows is not None else _levels(circuit, layers)
    bits: list[int] = []
    if rows is not None:
        bits = [2 * k for k in range(1, len(loads) + 1)]
    elif levels is None:
        for p, port in enumerate(circuit.inputs):
            bits += [load(p, i, b) for i in range(port.count) for b in range(port.format.bits)]
    else:
        port = circuit.inputs[0]
        least, largest = whole_range(port.format)
        n_pixels = layers.n_inputs // levels.size
        for feature, row in enumerate(levels.tolist()):
            for level in row:
                for pixel in range(n_pixels):
                    index = pixel * len(levels) + feature
                    # Above the level means not below the next integer.
                    if least <= level < largest:
                        bits.append(load(0, index, None, level + 1) ^ 1)
                    else:
                        bits.append(ONE if level < least else ZERO)
    operations = _drop_unused_loads(gate_operations.operations(layers, len(loads), bits), loads)
    operations = gate_operations.short_lived(operations)
    answers, places = _answer_bits(circuit, layers)
    first = [0] * (1 + max((result for result, _ in places), default=-1))
    sinks = []
    for literal, (result, bit) in zip(operations.literals, places, strict=True):
        # An inverted bit is 1 - bit: the constant goes into the initial sum, and the bit is
        # subtracted.
        first[result] += (literal & 1) << bit
        if literal > 1:
            sinks.append(Sink(literal >> 1, result, bit, bool(literal & 1)))
    # In node order, so that a value is added right after it is computed and need not be kept.
    sinks.sort(key=lambda sink: (sink.node, sink.result, sink.bit))
    return Program(circuit, tuple(loads), operations, tuple(sinks), tuple(first), answers)


def _comparisons(rows: Columns) -> list[tuple[int, int]]:
    """Return the comparisons required for row bits: column indices and parts, as in `Columns`."""
    known: dict[tuple[int, int], int] = {}
    bits_of_comparisons(Builder(), rows, lambda *one: known.setdefault(one, ZERO))
    return list(known)


def _replace_inputs(layers: Circuit, rows: Columns) -> Circuit:
    """Replace row bits at the layers' inputs by comparisons, inverted for thresholds."""
    if len(rows.bits) != layers.n_inputs:
        raise ValueError(
            f"mcu.write: layers has {layers.n_inputs} input bits; column_bits has {len(rows.bits)}."
        )
    builder = Builder()
    comparisons = _comparisons(rows)
    inputs = builder.input("x", len(comparisons)) if comparisons else []
    # A threshold is compared by "less than", so its bit is inverted.
    above = [isinstance(rows.columns[at], Number) and part != MISSING for at, part in comparisons]
    known = {
        one: bit ^ inverted
        for one, (bit,), inverted in zip(comparisons, inputs, above, strict=True)
    }
    bits = bits_of_comparisons(builder, rows, lambda *one: known[one])
    add_outputs(builder, layers.outputs, walk_literals(layers, [ZERO, *bits], builder.gate))
    return builder.circuit()


def _levels(circuit: Circuit, layers: Circuit) -> np.ndarray | None:
    """Return the largest integers not above the thresholds, or None if both take the same bits."""
    thresholds = layers.about.get("thresholds")
    if layers is circuit or thresholds is None or "thresholds" in circuit.about:
        if circuit.n_inputs != layers.n_inputs:
            raise ValueError(
                f"mcu.write: layers has {layers.n_inputs} bits of inputs; "
                f"the circuit has {circuit.n_inputs}, and there are no thresholds between them."
            )
        return None
    (port,) = circuit.inputs
    levels = levels_of(np.asarray(thresholds, np.float64), port.format)
    if port.count % len(levels) or port.count // len(levels) * levels.size != layers.n_inputs:
        raise ValueError(
            f"mcu.write: layers has {layers.n_inputs} bits of inputs and {levels.size} thresholds, "
            f"which do not fit the {port.count} numbers of the circuit."
        )
    return levels


def _answer_bits(circuit: Circuit, layers: Circuit) -> tuple[str, list[tuple[int, int]]]:
    """Return the answer kind, and the target value and bit for each layer output."""
    if layers.outputs == circuit.outputs:
        return "numbers", [
            (start + i, bit)
            for start, port in zip(_starts(circuit.outputs), circuit.outputs, strict=True)
            for i in range(port.count)
            for bit in range(port.format.bits)
        ]
    regression = circuit.about.get("kind") == "regression"
    k = 1 if regression else circuit.about.get("n_classes")
    outputs = circuit.outputs
    one_per_class = len(outputs) == 1 and outputs[0].count in (1, k)
    if not k or layers.n_outputs % k or not one_per_class:
        raise ValueError(
            f"mcu.write: layers has {layers.n_outputs} output bits, "
            f"which cannot vote in {circuit!r}."
        )
    size = layers.n_outputs // k
    kind = "class" if outputs[0].count == 1 and not regression else "numbers"
    return kind, [(j // size, 0) for j in range(k * size)]


def _starts(ports: Sequence[Port]) -> list[int]:
    return [sum(port.count for port in ports[:p]) for p in range(len(ports))]


def _drop_unused_loads(operations: Operations, loads: list[Load]) -> Operations:
    read = gate_operations.inputs_read(operations)
    new = {0: 0, **{n: k for k, n in enumerate(read, 1)}}
    new |= {operations.first + g: 1 + len(read) + g for g in range(len(operations))}
    loads[:] = [loads[n - 1] for n in read]
    return Operations(
        len(read),
        [tuple(new[n] for n in nodes) for nodes in operations.fanins],
        operations.tables,
        [2 * new[k >> 1] | k & 1 for k in operations.literals],
    )


def evaluate(program: Program, samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return values ``[n, count]`` for each output port, computed like the C program."""
    ports, operations = program.circuit.inputs, program.operations
    codes = [port.format.encode(x) for port, x in zip(ports, samples, strict=True)]
    values = [np.zeros(len(samples[0]), bool)]
    for load in program.loads:
        port, code = ports[load.port], codes[load.port][:, load.index]
        if load.bit is not None:
            values.append((code >> np.uint64(load.bit) & np.uint64(1)).astype(bool))
        else:
            whole = whole_numbers(port.format, code)
            values.append(whole < load.below if load.equal is None else whole == load.equal)

    def gate(bits: list[np.ndarray], table: int) -> np.ndarray:
        address = sum(bit.astype(np.int64) << i for i, bit in enumerate(bits))
        answers: np.ndarray = (table >> np.arange(1 << len(bits)) & 1).astype(bool)[address]
        return answers

    values = walk(operations.fanins, operations.tables, values, gate)
    sums = np.tile(np.asarray(program.first, np.uint64), (len(samples[0]), 1))
    # Sums wrap modulo 2**64: the format takes only the low bits, as C does.
    for sink in program.sinks:
        term = values[sink.node].astype(np.uint64) << np.uint64(sink.bit)
        sums[:, sink.result] += np.uint64(0) - term if sink.minus else term
    if program.answers == "class":
        return [sums.argmax(1)[:, None]]
    return [
        port.format.decode(sums[:, start : start + port.count])
        for start, port in zip(
            _starts(program.circuit.outputs), program.circuit.outputs, strict=True
        )
    ]


# ------------------------------------------------------------------------------------------------ C
def source(
    program: Program, name: str, style: Style, chunk: int
) -> tuple[dict[str, str], int, int]:
    """Return the header and program by name, RAM bytes for values, and flash bytes for tables.

    Args:
      chunk: operations per function. Larger functions compile longer and keep more values in
        memory; smaller ones load more inputs repeatedly.
    """
    circuit, operations = program.circuit, program.operations
    if style == "functions":
        body, calls, slots, n_tables = *_functions(program, chunk), 0
    else:
        body, calls, slots, n_tables = _tables(program)
    result, outputs, _ = _results(circuit)
    n_sums = len(program.first)
    memory = slots + n_sums * program.sum_bits // 8
    lines = [f"cell v[{max(slots, 1)}];", f"sum r[{max(n_sums, 1)}];", "uint16_t k;"]
    lines += [f"for (k = 0; k < {n_sums}; k++)", "    r[k] = 0;"]
    lines += [f"r[{i}] = {value}u;" for i, value in enumerate(program.first) if value]
    lines += [*calls, "(void)v, (void)r;", *_answer(program)]
    values = {
        "name": name,
        "NAME": name.upper(),
        "title": (
            f"{name}: {len(circuit):,} gates, as {len(operations):,} operations on bits "
            f"of one sample ({style})"
        ),
        "summary": [f" * {line}" for line in _ports(circuit)],
        "numbers": [f" * {line}" for line in _about.names(circuit.about, circuit.inputs)] or " *",
        "memory": (
            f"Memory: {memory:,} bytes of the stack hold values, "
            "beside what the compiler keeps there. Nothing is allocated, "
            "and threads may call at the same time."
        ),
        "answers": ", number by number" if outputs else "",
        "result": result,
        "parameters": ", ".join([*c99.input_parameters(circuit), *outputs]) or "void",
        "number": c99.number_function(circuit, name),
        "row": _row(circuit, name),
        "sum": f"uint{program.sum_bits}_t",
        "macros": c99.macros(operations),
        "body": body,
        "code": [f"    {line}" for line in lines],
    }
    files = {f"{name}.{e}": _templates.fill_template(f"mcu.{e}", **values) for e in ("h", "c")}
    return files, memory, n_tables


def _row(circuit: Circuit, name: str) -> str:
    rows = columns_of(circuit)
    if rows is None:
        return ""
    result, outputs, names = _results(circuit)
    arguments = [*(f"&row->{port.name}" for port in circuit.inputs), *names]
    return _templates.fill_template(
        "row.h",
        name=name,
        constants=_c_rows.constants(rows, name),
        row=_c_rows.integer_row(circuit, rows, name),
        result=result,
        parameters=", ".join([f"const {name}_row *row", *outputs]),
        call=f"{'' if outputs else 'return '}{name}_predict({', '.join(arguments)})",
    )


def _returns(circuit: Circuit) -> bool:
    return sum(port.count for port in circuit.outputs) == 1


def _results(circuit: Circuit) -> tuple[str, list[str], list[str]]:
    if _returns(circuit):
        return c99.type_of(circuit.outputs[0]), [], []
    return "void", c99.output_parameters(circuit), c99.port_names(circuit)[1]


def _ports(circuit: Circuit) -> list[str]:
    lines = []
    for what, ports in (("input", circuit.inputs), ("output", circuit.outputs)):
        for port in ports:
            where = f"{what}_{port.name}"
            if what == "output" and _returns(circuit):
                where = "The result"
            number = "number" if port.count == 1 else "numbers"
            line = f"{where}: {port.count} {number} of {port.format.bits} bits ({port.format})"
            if port.format.fraction:
                line += f", which stand for themselves over {2**port.format.fraction}"
            lines.append(line + ".")
    return lines


def _answer(program: Program) -> list[str]:
    port, *more = program.circuit.outputs
    if program.answers == "class":
        lines = [
            "{",
            "    uint16_t best = 0;",
            f"    for (k = 1; k < {len(program.first)}; k++)",
            "        if (r[k] > r[best])",
            "            best = k;",
        ]
        # A class is always the only output.
        return [*lines, f"    return ({c99.type_of(port)})best;", "}"]
    if _returns(program.circuit):
        return [f"return {_number(port, 'r[0]')};"]
    lines = []
    for start, each in zip(_starts(program.circuit.outputs), (port, *more), strict=True):
        lines += [f"for (k = 0; k < {each.count}; k++)"]
        lines += [f"    output_{each.name}[k] = {_number(each, f'r[{start} + k]')};"]
    return lines


def _number(port: Port, text: str) -> str:
    """Return a port value from the bits of a sum."""
    kind = c99.type_of(port)
    if not port.format.signed or port.format.bits in (8, 16, 32, 64):
        return f"({kind}){text}"
    # Sign extension without a shift of negative numbers, which C leaves to the compiler.
    unsigned, sign = f"u{kind}", f"((u{kind})1 << {port.format.bits - 1})"
    return f"({kind})({unsigned})((({unsigned}){text} ^ {sign}) - {sign})"


def _load(program: Program, load: Load, index: str | None = None) -> str:
    port = program.circuit.inputs[load.port]
    number = f"input_{port.name}[{load.index if index is None else index}]"
    if load.bit is not None:
        return f"BIT({number}, {load.bit})"
    if load.equal is not None:
        return f"TRUTH({number} == {load.equal})"
    # The macros avoid branches, and read the sign of a difference from its highest byte.
    less = "LESS"
    if c99.type_of(port) == "uint8_t":
        less = "LESS8"
    elif port.format.bits <= _EXACT:
        less = "LESS22"
    return f"{less}({number}, {load.below})"


def _arguments(program: Program) -> tuple[str, str, str]:
    parameters = ", ".join([*c99.input_parameters(program.circuit), "cell *v", "sum *r"])
    arguments = [*c99.port_names(program.circuit)[0], "v", "r"]
    unused = ", ".join(f"(void){argument}" for argument in arguments)
    return parameters, ", ".join(arguments), f"    {unused};"


def _functions(program: Program, chunk: int) -> tuple[str, list[str], int]:
    """Return functions with one instruction per operation, their calls, and shared value slots."""
    operations = program.operations
    where, slots = gate_operations.assign_slots(dataclasses.replace(operations, literals=[]), chunk)
    parameters, arguments, unused = _arguments(program)
    lines, calls = [], []
    for part, start in enumerate(range(0, max(len(operations), 1), chunk)):
        body = _function_body(program, where, range(start, min(start + chunk, len(operations))))
        lines += [f"static SEPARATE void part_{part}({parameters})\n{{", *body, f"{unused}\n}}\n"]
        calls.append(f"part_{part}({arguments});")
    return "\n".join(lines).rstrip(), calls, slots


def _function_body(program: Program, where: Sequence[int], part: range) -> list[str]:
    operations, sinks = program.operations, program.sinks_of_nodes()
    first = operations.first
    named: dict[int, str] = {}
    sums: set[int] = set()
    body: list[str] = []

    def text(node: int) -> str:
        if node not in named:
            if node < first:
                body.append(f"    const word x{node} = {_load(program, program.loads[node - 1])};")
                named[node] = f"x{node}"
            elif node < first + part.start:
                return f"v[{where[node - first]}]"
            else:
                named[node] = f"g{node - first}"
        return named[node]

    def add(node: int) -> None:
        for sink in sinks.get(node, []):
            value = f"TIMES({text(node)}, {sink.bit})" if sink.bit else f"ONE({text(node)})"
            begin, before = ("", f"s{sink.result} ") if sink.result in sums else ("sum ", "")
            body.append(
                f"    {begin}s{sink.result} = (sum)({before}{'-' if sink.minus else '+'} {value});"
            )
            sums.add(sink.result)

    for node in range(1, first) if not part.start else ():
        add(node)
    read = {k for g in part for k in operations.fanins[g]}
    for g in part:
        nodes, node = operations.fanins[g], first + g
        arguments = ", ".join([text(k) for k in nodes])
        call = f"{c99.macro(len(nodes), operations.tables[g])}({arguments})"
        if node in read or node in sinks:
            body.append(f"    const word {text(node)} = {call};")
            call = text(node)
        # Only values for later functions are stored; the others are locals, in registers.
        if where[g] >= 0:
            body.append(f"    v[{where[g]}] = (cell){call};")
        add(node)
    return body + [f"    r[{k}] = (sum)(r[{k}] + s{k});" for k in sorted(sums)]


def _tables(program: Program) -> tuple[str, list[str], int, int]:
    """Return operation tables and their interpreter, its call, value slots, and table bytes."""
    kinds, ordered, payload = _steps(program)
    # Runs of equal steps share one decision of the interpreter.
    ordered = gate_operations.in_runs(ordered, min(max(len(ordered) // 8, 100), _WINDOW))
    where, slots = gate_operations.assign_slots(ordered, 1)
    table: list[int] = []
    runs: list[list[int]] = []
    for g, (nodes, number) in enumerate(zip(ordered.fanins, ordered.tables, strict=True)):
        kind, own = payload[number]
        if not runs or runs[-1][0] != kind or runs[-1][1] == 65535:
            runs.append([kind, 0])
        runs[-1][1] += 1
        table += [*(where[n - 1] for n in nodes), *own]
        if where[g] >= 0:
            table.append(where[g])
    bits = next(width for width in (8, 16, 32) if max(table, default=0) < 1 << width)
    cases = []
    for i, (n, text) in enumerate(kinds):
        reads = " ".join(f"const uint{bits}_t a{k} = READ{bits}(p++);" for k in range(n))
        statement = text.format(*(f"a{k}" for k in range(n)))
        cases += [
            f"        case {i}:",
            "            for (; n > 0; n--) {",
            f"                {reads}",
        ]
        cases += [f"                {statement};", "            }", "            break;"]
    parameters, arguments, unused = _arguments(program)
    body = _templates.fill_template(
        "mcu_tables.c",
        bits=bits,
        operands=c99.wrap(table or [0]),
        runs=c99.wrap([f"{kind}, {n}" for kind, n in runs] + ["0, 0"], 12),
        arguments=parameters,
        cases=cases,
        unused=unused,
    )
    n_bytes = len(table) * bits // 8 + 4 * len(runs) + 4
    return body.rstrip(), [f"evaluate({arguments});"], slots, n_bytes


def _steps(
    program: Program,
) -> tuple[list[tuple[int, str]], Operations, dict[int, tuple[int, tuple[int, ...]]]]:
    """Return loads, operations and sums as steps: loads before readers, sums after nodes.

    Returns:
      The operand count, including the destination slot, and statement for each kind; the steps as
      operations without inputs; and, by the number stored as a step's table, its kind and the
      operands between sources and destination.
    """
    operations, sinks = program.operations, program.sinks_of_nodes()
    kinds: dict[tuple[int, str, int | None], int] = {}
    steps: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []  # nodes, kind, operands
    new: dict[int, int] = {}

    def add(
        nodes: tuple[int, ...], n: int, text: str, own: tuple[int, ...] = (),
        index: int | None = None,
    ) -> int:  # fmt: skip
        steps.append((nodes, kinds.setdefault((n, text, index), len(kinds)), own))
        return len(steps)

    def step_of(node: int) -> int:
        if node not in new:
            load = program.loads[node - 1]
            port = program.circuit.inputs[load.port]
            number = f"input_{port.name}[{{0}}]"
            if load.bit is not None:
                new[node] = add((), 2, f"v[{{1}}] = (cell)BIT({number}, {load.bit})", (load.index,))
            # Operands cannot hold the constant, so it is a part of the step's kind.
            elif load.equal is not None or port.format.bits > _EXACT:
                text = f"v[{{1}}] = (cell){_load(program, load, '{0}')}"
                new[node] = add((), 2, text, (load.index,), load.index)
            else:
                # Operands of tables are unsigned: a negative bound is stored above the least
                # number.
                offset = -whole_range(port.format)[0]
                below = f"(int32_t){{1}} - {offset}" if offset else "{1}"
                text = f"v[{{2}}] = (cell)LESS22({number}, {below})"
                new[node] = add((), 3, text, (load.index, load.below + offset))
            finish(node)
        return new[node]

    def finish(node: int) -> None:
        for sink in sinks.get(node, []):
            value = f"TIMES(v[{{0}}], {sink.bit})" if sink.bit else "ONE(v[{0}])"
            text = f"r[{{1}}] = (sum)(r[{{1}}] {'-' if sink.minus else '+'} {value})"
            add((new[node],), 2, text, (sink.result,))

    gates = zip(operations.fanins, operations.tables, strict=True)
    for node, (nodes, answers) in enumerate(gates, operations.first):
        read, n = tuple([step_of(k) for k in nodes]), len(nodes)
        inner = ", ".join(f"v[{{{k}}}]" for k in range(n))
        new[node] = add(read, n + 1, f"v[{{{n}}}] = (cell){c99.macro(n, answers)}({inner})")
        finish(node)
    for node in sorted(node for node in sinks if node < operations.first):
        step_of(node)
    # A table number for each step, which leads back from the reordered operations to its kind.
    payload = {kind * len(steps) + k: (kind, own) for k, (_, kind, own) in enumerate(steps)}
    ordered = Operations(0, [nodes for nodes, _, _ in steps], list(payload), [])
    return [(n, text) for n, text, _ in kinds], ordered, payload


def call(circuit: Circuit, name: str, at: str = "") -> str:
    """Return a statement that writes the answers for the sample at `at` into the output arrays."""
    inputs, outputs = c99.port_names(circuit)[0], _results(circuit)[2]
    answer = "" if outputs else f"output_{circuit.outputs[0].name}[0] = "
    if columns_of(circuit) is not None:
        members = ", ".join(f"{array}[{at or 0}]" for array in inputs)
        arguments = ", ".join(["&row", *outputs])
        predict = f"{answer}{name}_predict_row({arguments});"
        return f"{{ const {name}_row row = {{{members}}}; {predict} }}"
    if at:
        inputs = [f"input_{port.name} + {at} * {port.count}" for port in circuit.inputs]
    return f"{answer}{name}_predict({', '.join([*inputs, *outputs])});"

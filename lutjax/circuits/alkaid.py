"""Circuits as ALIR, alkaid's interchange form for Verilog, VHDL and HLS projects; and back.

The file is one JSON object: ``"meta"`` is ``"ALIRModel"``, ``"spec_version"`` 4, ``"model"`` the
program, and ``"lutjax"`` the ports, which alkaid ignores. Each input port element is a program
input, in order, and each output port element an output.

A program is a list of operations, each
``[operands, opcode, data, [least, largest, step], latency, cost]``, with a fixed-point result
within these bounds. `write` uses six kinds: inputs (-1), bit extraction (3), constants (5), tables
(8), NOT (9), and AND, OR and XOR (10). Two-input gates become NOT, AND, OR and XOR; larger gates
become tables, addressed by the OR of shifted bits. A gate has cost 1 and latency 1; all other
operations are free.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lutjax.circuits import builder as building, netlist_json, truth
from lutjax.circuits.builder import ONE, ZERO, Builder, Literal
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Format, Port
from lutjax.files import atomic, strict_json
from lutjax.files.strict_json import Fields, format_value

META, VERSION = "ALIRModel", 4
MOST_BITS = 53
"""Maximum bits of a port element: alkaid computes in float64."""

_SOME_GATES = 1000
"""Gates allowed in a text of any size. Each gate from `write` takes at least 24 characters."""

_INPUT, _BITS, _CONSTANT, _TABLE, _UNARY, _BINARY = -1, 3, 5, 8, 9, 10
_NOT, _ANY, _ALL = range(3)
_AND, _OR, _XOR = range(3)
_TABLES = (0b1000, 0b1110, 0b0110)
"""Two-input tables for AND, OR and XOR."""


def _gates() -> dict[int, tuple[int, tuple[bool, bool]]]:
    """Return the operation and inverted inputs for each table over two inputs."""
    gates: dict[int, tuple[int, tuple[bool, bool]]] = {}
    for operation, plain in enumerate(_TABLES):
        for inverted in itertools.product((False, True), (False, True)):
            gates.setdefault(truth.negate_inverted(plain, inverted), (operation, inverted))
    return gates


_GATES = _gates()
_OTHERS = {-2: "a negation", 0: "an addition", 1: "a subtraction", 2: "a ReLU", 4: "an addition"}
_OTHERS |= {6: "a choice", 7: "a multiplication", 11: "a sum"}


# ------------------------------------------------------------------------------------------ writing
def write(circuit: Circuit) -> str:
    """Return a circuit as an ALIR program, readable by ``alkaid.types.CombLogic.load``.

    Raises:
      ValueError: a port with elements over 53 bits.

    Example:
      >>> import json
      >>> from lutjax.circuits import Circuit, Port, alkaid
      >>> both = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1000,), (2 * 3,))
      >>> json.loads(alkaid.write(both))["model"][5][-1]
      [[0, 1], 10, [0, 0], [0.0, 1.0, 1.0], 1.0, 1.0]
      >>> alkaid.read(alkaid.write(both)) == both
      True
    """
    for port in (*circuit.inputs, *circuit.outputs):
        if port.format.bits > MOST_BITS:
            raise ValueError(
                f"alkaid.write: the numbers of port {port.name} have {port.format.bits} bits; "
                f"alkaid takes at most {MOST_BITS}. Choose a shorter format."
            )
    program = _Program()
    # The operation for each node; -1 for the constant 0, which is an operation where it is read.
    values = [-1, *program.inputs(circuit.inputs)]
    for nodes, table in zip(circuit.fanins, circuit.tables, strict=True):
        values.append(program.gate(*building.reduce_table(nodes, table), values))
    bits = iter(circuit.literals)
    places, shifts = [], []
    for port in circuit.outputs:
        for _ in range(port.count):
            literals = itertools.islice(bits, port.format.bits)
            number = [program.literal(values, k) for k in literals]
            places.append(program.number(number, port.format.signed))
            # Bits are joined to an integer, which the shift scales to the port's fraction.
            shifts.append(-port.format.fraction)
    n_in, n_out = (sum(port.count for port in ports) for ports in (circuit.inputs, circuit.outputs))
    model = [[n_in, n_out], [0] * n_in, places, shifts, [False] * n_out, program.operations, -1, -1]
    tables = []
    for answers in program.tables:
        data = b"".join(answer.to_bytes(4, "little") for answer in answers) + b"0"
        spec = {
            "hash": hashlib.sha256(data).hexdigest(),
            "out_qint": {"min": 0.0, "max": 1.0, "step": 1.0},
            "inp_width": (len(answers) - 1).bit_length(),
        }
        tables.append({"spec": spec, "table": answers})
    fields = {
        "meta": META,
        "spec_version": VERSION,
        "lutjax": {
            "inputs": netlist_json.ports_to_json(circuit.inputs),
            "outputs": netlist_json.ports_to_json(circuit.outputs),
        },
        "model": [*model, tables] if tables else model,
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"


Interval = tuple[float, float, float]
_BIT: Interval = (0.0, 1.0, 1.0)


class _Program:
    def __init__(self) -> None:
        self.operations: list[list[Any]] = []
        self.tables: dict[tuple[int, ...], int] = {}
        self._known: dict[tuple[Any, ...], int] = {}

    def add(
        self,
        operands: tuple[int, ...],
        opcode: int,
        data: tuple[int, ...],
        interval: Interval = _BIT,
        cost: float = 0.0,
    ) -> int:
        key = operands, opcode, data, interval
        if key not in self._known:
            latency = max((self.operations[k][4] for k in operands), default=0.0) + cost
            self._known[key] = len(self.operations)
            self.operations.append([operands, opcode, data, interval, latency, cost])
        return self._known[key]

    def inputs(self, ports: Sequence[Port]) -> list[int]:
        formats = [port.format for port in ports for _ in range(port.count)]
        numbers = [
            self.add((), _INPUT, (k,), (float(f.range[0]), float(f.range[1]), 2.0**-f.fraction))
            for k, f in enumerate(formats)
        ]
        bits = []
        for number, format in zip(numbers, formats, strict=True):
            if format.bits == 1 and not format.signed and not format.fraction:
                bits.append(number)  # the number is its bit
                continue
            places = range(format.fraction, format.fraction - format.bits, -1)
            bits += [self.add((number,), _BITS, (place,)) for place in places]
        return bits

    def constant(self, value: int) -> int:
        return self.add((), _CONSTANT, (value,))

    def literal(self, values: Sequence[int], literal: Literal) -> int:
        if literal < 2:
            return self.constant(literal)
        value = values[literal >> 1]
        return self.invert(value) if literal & 1 else value

    def invert(self, value: int) -> int:
        _, opcode, data, *_ = self.operations[value]
        if opcode == _CONSTANT:
            return self.constant(1 - data[0])
        return self.add((value,), _UNARY, (_NOT,))

    def gate(self, nodes: Sequence[int], table: int, values: Sequence[int]) -> int:
        """Return the operation for a table that depends on all its distinct nodes."""
        read = [values[node] for node in nodes]
        if not read:
            return self.constant(table)
        if len(read) == 1:
            return self.invert(read[0]) if table == 0b01 else read[0]
        if len(read) > 2:
            answers = tuple(table >> k & 1 for k in range(1 << len(read)))
            number = self.tables.setdefault(answers, len(self.tables))
            return self.add((self.number(read, False),), _TABLE, (number,), cost=1.0)
        operation, inverted = _GATES[table]
        a, b = (self.invert(x) if invert else x for x, invert in zip(read, inverted, strict=True))
        return self.add((a, b), _BINARY, (0, operation), cost=1.0)

    def number(self, bits: Sequence[int], signed: bool) -> int:
        joined = bits[0]
        for k, bit in enumerate(bits[1:], 1):
            joined = self.add((joined, bit), _BINARY, (k, _OR), (0.0, float((2 << k) - 1), 1.0))
        if not signed:
            return joined
        # The same bits in an interval with negative numbers are their two's complement.
        half = float(1 << len(bits) - 1)
        return self.add((joined,), _BITS, (0,), (-half, half - 1, 1.0))


# ------------------------------------------------------------------------------------------ reading
class _Value(NamedTuple):
    """Fixed-point value in a program: bits, lowest first, and the exponent of the lowest bit."""

    bits: list[Literal]
    lowest: int
    signed: bool
    least: int  # in steps

    def bit(self, weight: int) -> Literal:
        """Return the bit with a weight; bits above the number are its sign, bits below it are 0."""
        k = weight - self.lowest
        if 0 <= k < len(self.bits):
            return self.bits[k]
        return self.bits[-1] if k > 0 and self.signed and self.bits else ZERO


def read(text: str | bytes | os.PathLike[str]) -> Circuit:
    """Return the circuit in an ALIR program, or in the file at a path.

    The program may come from `write`, or use other bit operations. Ports are restored if `write`
    stored them. Otherwise consecutive inputs with one format form a port, and so do outputs. It
    takes at most 100 times the memory of the text.

    Raises:
      ValueError: invalid program, another version, or unsupported operations such as additions;
        the message names the operation.
    """
    content = atomic.content(text)
    try:
        document = strict_json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"alkaid.read: the text is not JSON: {error}. Is the file complete?"
        ) from None
    try:
        return _read(document, most=_SOME_GATES + len(content) // 4)
    except ValueError as error:
        raise ValueError(f"alkaid.read: {error}") from None


def _read(document: Any, most: int) -> Circuit:
    fields = Fields("the file")
    for name, expected in (("meta", META), ("spec_version", VERSION)):
        if fields.field(document, name, type(expected)) != expected:
            raise ValueError(
                f"{name} is {format_value(document[name])}; expected {format_value(expected)}."
            )
    model = fields.field(document, "model", list)
    if len(model) not in (8, 9):
        raise ValueError(f"the model has {len(model)} fields; expected 8 or 9.")
    shape, in_shifts, places, out_shifts, negated, operations, _, _, *more = model
    n_in, n_out = _whole_numbers(shape, "the shape is", 2)
    _whole_numbers(in_shifts, "the shifts of inputs are", n_in)
    if any(in_shifts):
        raise ValueError("inputs are shifted, which is not read.")
    _whole_numbers(places, "the outputs are", n_out)
    _whole_numbers(out_shifts, "the shifts of outputs are", n_out)
    if not isinstance(negated, list) or len(negated) != n_out or any(negated):
        raise ValueError("negated outputs are unsupported; expected false for each output.")
    if not isinstance(operations, list):
        raise ValueError(f"the operations are {format_value(operations)}; expected a list.")
    tables = _tables(more[0] if more and more[0] is not None else [])
    formats: dict[int, Format] = {}
    parsed = []
    for k, operation in enumerate(operations):
        with _name_operation(k):
            parsed.append(_operation(operation, k))
            if (read := parsed[-1]).opcode == _INPUT:
                (number,) = read.data
                if not 0 <= number < n_in:
                    raise ValueError(f"it reads input {number}; there are {n_in}.")
                format = _format(read.width, read.lowest, read.signed, "an input")
                if formats.setdefault(number, format) != format:
                    raise ValueError(
                        f"input {number} has the formats {formats[number]} and {format}."
                    )
    if len(formats) < n_in:
        raise ValueError(f"operations read {len(formats)} of the {n_in} inputs; expected all.")
    in_formats = [formats[k] for k in range(n_in)]
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    if (stored := document.get("lutjax")) is not None:
        inputs, outputs = (
            tuple(netlist_json.ports_from_json(Fields("lutjax").field(stored, kind, list), kind))
            for kind in ("inputs", "outputs")
        )
    inputs = inputs or _runs(in_formats, "x")
    _check_formats(inputs, in_formats, "inputs")
    builder = Builder(merge=2)
    numbers = [
        number for port in inputs for number in builder.input(port.name, port.count, port.format)
    ]
    values: list[_Value] = []
    for k, operation in enumerate(parsed):
        with _name_operation(k):
            values.append(_value(builder, operation, values, numbers, tables))
            # A short text could name operations with so many bits that building them takes all
            # memory.
            if len(builder) > most:
                raise ValueError(f"more than {most} gates are too many for the size of the text.")
    results = []
    for place, shift in zip(places, out_shifts, strict=True):
        if not 0 <= place < len(values):
            raise ValueError(f"an output is operation {place}; there are {len(values)}.")
        results.append(values[place]._replace(lowest=values[place].lowest + shift))
    out_formats = [
        _format(len(value.bits), value.lowest, value.signed, "an output") for value in results
    ]
    outputs = outputs or _runs(out_formats, "y")
    _check_formats(outputs, out_formats, "outputs")
    remaining = iter(results)
    for port in outputs:
        builder.output(port.name, [next(remaining).bits for _ in range(port.count)], port.format)
    return builder.circuit()


@contextlib.contextmanager
def _name_operation(place: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"operation {place}: {error}") from None


class _Operation(NamedTuple):
    operands: list[int]
    opcode: int
    data: list[int]
    least: int  # in steps
    largest: int
    lowest: int  # exponent of the step

    @property
    def signed(self) -> bool:
        return self.least < 0

    @property
    def width(self) -> int:
        """Signed bits required between the least and largest number."""
        width = self.largest.bit_length()
        if self.signed:
            width = 1 + max(width, (~self.least).bit_length())
        return width


_OPERANDS = {_INPUT: 0, _BITS: 1, _CONSTANT: 0, _TABLE: 1, _UNARY: 1, _BINARY: 2}
_DATA = {_INPUT: 1, _BITS: 1, _CONSTANT: 1, _TABLE: 1, _UNARY: 1, _BINARY: 2}


def _operation(stored: Any, place: int) -> _Operation:
    if not isinstance(stored, list) or len(stored) != 6:
        raise ValueError(f"it is {format_value(stored)}; expected a list of six fields.")
    operands, opcode, data, interval, _, _ = stored
    if type(opcode) is not int or opcode not in _OPERANDS:
        other = _OTHERS.get(opcode) if type(opcode) is int else None
        raise ValueError(
            f"its code is {format_value(opcode)}{f', {other}' if other else ''}; "
            f"supported codes are {', '.join(map(str, _OPERANDS))}: inputs, bits, constants, "
            "tables and logic."
        )
    _whole_numbers(operands, "its operands are", _OPERANDS[opcode])
    _whole_numbers(data, "its data is", _DATA[opcode])
    for operand in operands:
        if not 0 <= operand < place:
            raise ValueError(f"it reads operation {operand}; expected one before it.")
    return _Operation(operands, opcode, data, *_interval(interval))


def _interval(stored: Any) -> tuple[int, int, int]:
    """Return the least and the largest number in steps, and the exponent of the step."""
    if isinstance(stored, list) and len(stored) == 3 and {type(x) for x in stored} <= {int, float}:
        least, largest, step = map(float, stored)
        exponent = math.frexp(step)[1] - 1
        if step == math.ldexp(1, exponent) and abs(exponent) < MOST_BITS:
            low, high = (math.ldexp(x, -exponent) for x in (least, largest))
            fits = -(2.0**MOST_BITS) <= low <= high < 2.0**MOST_BITS
            if low.is_integer() and high.is_integer() and fits:
                return int(low), int(high), exponent
    raise ValueError(
        f"its numbers are {format_value(stored)}; expected the least, the largest and a step, "
        f"a power of two of which both are multiples, of at most {MOST_BITS} bits."
    )


def _format(width: int, lowest: int, signed: bool, noun: str) -> Format:
    if lowest > 0 or not 1 <= width <= MOST_BITS or -lowest > width:
        raise ValueError(
            f"{noun} has {width} bits, the lowest of weight 2^{lowest}; "
            f"expected 1 to {MOST_BITS} bits, of which the highest is at the point or before it, "
            "and the lowest at the point or after it."
        )
    return Format(width, -lowest, signed)


def _value(
    builder: Builder,
    operation: _Operation,
    values: Sequence[_Value],
    numbers: Sequence[list[Literal]],
    tables: Sequence[list[int]],
) -> _Value:
    operands, opcode, data, least, _, lowest = operation
    read = [values[k] for k in operands]
    width = operation.width
    weights = range(lowest, lowest + width)
    if opcode == _INPUT:
        bits = numbers[data[0]]
    elif opcode == _CONSTANT:
        bits = [data[0] >> k & 1 for k in range(width)]
    elif opcode == _BITS:
        bits = [read[0].bit(weight - data[0]) for weight in weights]
    elif opcode == _BINARY:
        shift, kind = data
        if kind not in range(3):
            raise ValueError(
                f"its data is {data}; expected 0, 1 or 2 for AND, OR or XOR at the end."
            )
        a, b = read
        bits = [
            builder.gate([a.bit(weight), b.bit(weight - shift)], _TABLES[kind])
            for weight in weights
        ]
    elif opcode == _UNARY:
        bits = _apply_unary(builder, data[0], read[0].bits, width)
    else:
        bits = _looked_up(builder, data[0], read[0], width, tables)
    return _Value(bits, lowest, operation.signed, least)


def _apply_unary(builder: Builder, kind: int, bits: list[Literal], width: int) -> list[Literal]:
    if kind not in range(3):
        raise ValueError(f"its data is [{kind}]; expected 0, 1 or 2 for NOT, any or all.")
    expected = len(bits) if kind == _NOT else 1
    if width != expected:
        raise ValueError(f"its numbers have {width} bits; expected {expected}.")
    if kind == _NOT:
        return [bit ^ 1 for bit in bits]
    result = ZERO if kind == _ANY else ONE
    for bit in bits:
        result = builder.gate([result, bit], _TABLES[_OR if kind == _ANY else _AND])
    return [result]


def _looked_up(
    builder: Builder, number: int, address: _Value, width: int, tables: Sequence[list[int]]
) -> list[Literal]:
    """Return the output bits of a table with addresses relative to the least number."""
    if not 0 <= number < len(tables):
        raise ValueError(f"it reads table {number}; there are {len(tables)}.")
    answers, n = tables[number], len(address.bits)
    if n > truth.MAX_INPUTS:
        raise ValueError(f"its address has {n} bits; expected at most {truth.MAX_INPUTS}.")
    rows = []
    for code in range(1 << n):
        row = (code - (1 << n) if address.signed and code >> n - 1 else code) - address.least
        # Other entries are never addressed, so any value is right.
        rows.append(answers[row] if 0 <= row < len(answers) else 0)
    return [
        builder.gate(address.bits, sum((row >> k & 1) << code for code, row in enumerate(rows)))
        for k in range(width)
    ]


def _tables(stored: Any) -> list[list[int]]:
    if not isinstance(stored, list):
        raise ValueError(f"the tables are {format_value(stored)}; expected a list.")
    tables = []
    for k, table in enumerate(stored):
        answers = Fields(f"table {k}").field(table, "table", list)
        if not 1 <= len(answers) <= 1 << truth.MAX_INPUTS:
            raise ValueError(
                f"table {k} has {len(answers)} rows; expected 1 to {1 << truth.MAX_INPUTS}."
            )
        tables.append(_whole_numbers(answers, f"table {k} is", len(answers)))
    return tables


def _whole_numbers(stored: Any, noun: str, count: int) -> list[int]:
    numbers: list[Any] = stored if isinstance(stored, list) else [None]
    if len(numbers) == count and all(type(n) is int and abs(n) < 1 << 62 for n in numbers):
        return numbers
    raise ValueError(
        f"{noun} {format_value(stored)}; expected {count} whole number{'s' * (count != 1)}."
    )


def _runs(formats: Sequence[Format], name: str) -> tuple[Port, ...]:
    """Group consecutive numbers with one format into ports."""
    runs = [(format, len(list(run))) for format, run in itertools.groupby(formats)]
    names = [name] if len(runs) == 1 else [f"{name}{k}" for k in range(len(runs))]
    return tuple(
        Port(name, count, format) for name, (format, count) in zip(names, runs, strict=True)
    )


def _check_formats(ports: Sequence[Port], formats: Sequence[Format], noun: str) -> None:
    count = sum(port.count for port in ports)
    if count != len(formats):
        raise ValueError(
            f"the ports of {noun} have {count} numbers; the program has {len(formats)} {noun}."
        )
    expected = itertools.chain.from_iterable(
        itertools.repeat(port.format, port.count) for port in ports
    )
    for k, (format, format_in_program) in enumerate(zip(expected, formats, strict=True)):
        if format != format_in_program:
            raise ValueError(f"{noun} {k} is {format_in_program}; its port has {format}.")

"""C99 text shared by circuit and integer-model programs."""

import importlib.resources
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.circuits import _templates
from lutjax.circuits._formulas import formula
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.gate_operations import Operations
from lutjax.circuits.ports import Port, whole_numbers


def read_source(name: str) -> str:
    return (importlib.resources.files(__package__) / "sources" / name).read_text(encoding="ascii")


# ----------------------------------------------------------------------------- constants and arrays
def quote(text: str) -> str:
    """Return a UTF-8 string as a C literal, in ASCII without trigraphs."""
    # Octal escapes have at most three digits, so a digit after one is not a part of it, as it would
    # be after a hexadecimal escape. A question mark could begin a trigraph.
    plain = "".join(
        chr(octet) if 32 <= octet < 127 and chr(octet) not in '"\\?' else f"\\{octet:03o}"
        for octet in text.encode("utf-8", "replace")
    )
    return f'"{plain}"'


def signed_constant(number: int) -> str:
    # C has no negative literals: -9223372036854775808 is the negation of a number that does not fit
    # its largest signed type.
    return str(number) if number > -(1 << 63) else "-9223372036854775807 - 1"


def wrap(items: Sequence[object], per_line: int = 24) -> list[str]:
    text = list(map(str, items))
    return ["    " + ", ".join(text[k : k + per_line]) + "," for k in range(0, len(text), per_line)]


def array(kind: str, name: str, values: np.ndarray, *, static: bool = True) -> list[str]:
    head = f"{'static ' if static else ''}const {kind} {name}[{values.size}] = {{"
    return [head, *wrap(values.ravel().tolist(), 32), "};", ""]


# -------------------------------------------------------------------------------------------- ports
def width_of(port: Port) -> int:
    return next(width for width in (8, 16, 32, 64) if port.format.bits <= width)


def type_of(port: Port) -> str:
    return f"{'' if port.format.signed else 'u'}int{width_of(port)}_t"


def input_parameters(circuit: Circuit) -> list[str]:
    return [f"const {type_of(port)} *input_{port.name}" for port in circuit.inputs]


def output_parameters(circuit: Circuit) -> list[str]:
    return [f"{type_of(port)} *output_{port.name}" for port in circuit.outputs]


def port_names(circuit: Circuit) -> tuple[list[str], list[str]]:
    inputs = [f"input_{port.name}" for port in circuit.inputs]
    return inputs, [f"output_{port.name}" for port in circuit.outputs]


def port_constants(port: Port, numbers: Shaped[np.ndarray, "..."]) -> list[str]:
    """Return port values as C constants: integers, before division."""
    whole = whole_numbers(port.format, port.format.encode(numbers)).ravel().tolist()
    if port.format.signed:
        return list(map(signed_constant, whole))
    return [f"{code}u" for code in whole]


def sample_arrays(
    circuit: Circuit, samples: Sequence[Any], answers: Sequence[Any] = ()
) -> list[str]:
    lines = []
    kinds = (("input", circuit.inputs, samples), ("expected", circuit.outputs, answers))
    for kind, ports, arrays in kinds:
        for port, numbers in zip(ports, arrays, strict=False):
            lines.append(f"static const {type_of(port)} {kind}_{port.name}[] = {{")
            lines += [*wrap(port_constants(port, numbers)), "};"]
    return lines


def output_arrays(circuit: Circuit, n: int) -> list[str]:
    return [
        f"static {type_of(port)} output_{port.name}[{n * port.count}];" for port in circuit.outputs
    ]


def number_function(circuit: Circuit, name: str) -> str:
    """Return the function from a regression circuit's answer to its value, or an empty string."""
    if circuit.about.get("kind") != "regression":
        return ""
    scale, offset = (
        f"{float(circuit.about.get(fact) or default)!r}f"
        for fact, default in (("scale", 1), ("offset", 0))
    )
    return _templates.fill_template("number.h", name=name, scale=scale, offset=offset)


# --------------------------------------------------------------------------------------- operations
def macro(n: int, table: int) -> str:
    return f"F{n}_{table:X}"


def macros(program: Operations) -> str:
    """Return a macro for each table in use: ``F3_E8(a, b, c)`` is table 0xE8 over three inputs."""
    kinds = set(zip(map(len, program.fanins), program.tables, strict=True))
    lines = []
    for n, table in sorted(kinds):
        # Arguments may be expressions, so they are put in parentheses.
        text = formula(table, n).format("(a)", "(b)", "(c)")
        lines.append(f"#define {macro(n, table)}({', '.join('abc'[:n])}) ((word)({text}))")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------- tests
def compute_answers(circuit: Circuit, samples: Sequence[Any], *, where: str) -> tuple[Any, ...]:
    outputs = circuit(*samples)
    answers = outputs if isinstance(outputs, tuple) else (outputs,)
    if not len(answers[0]):
        raise ValueError(f"{where}: there are no samples; expected at least one.")
    return answers


def write_test(
    circuit: Circuit,
    samples: Sequence[Any],
    answers: Sequence[Any],
    name: str,
    *,
    batch_calls: Sequence[str] = (),
    call: str = "",
    rows: Sequence[str] = (),
) -> str:
    """Return a C program that counts wrong samples, called by batch, or with ``k`` by `call`."""
    n, checks = len(answers[0]), []
    for port in circuit.outputs:
        expected = f"{port.name}[k * {port.count} + i]"
        output = expected if batch_calls else f"{port.name}[i]"
        checks.append(f"        for (i = 0; i < {port.count}; i++)")
        checks.append(f"            same &= output_{output} == expected_{expected};")
    inside = "\n".join([f"        {call}"] * bool(call) + checks)
    arrays = [
        *sample_arrays(circuit, samples, answers),
        *rows,
        *output_arrays(circuit, n if batch_calls else 1),
    ]
    calls = [
        _templates.fill_template(
            "test_call.c", n=n, call=f"    {one}\n" if one else "", checks=inside
        )
        for one in batch_calls or [""]
    ]
    return _templates.fill_template(
        "test.c",
        name=name,
        n=n,
        includes="#include <math.h>\n" if rows else "",
        arrays=arrays,
        calls="\n".join(calls).rstrip(),
    )

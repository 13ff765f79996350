"""Table rows in C: category codes, a struct for rows, and functions that take it."""

import itertools
from collections.abc import Sequence

from lutjax.circuits import _about, _c_emitter as c99, _templates, columns
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.columns import Category, Column, Columns, Number, Value
from lutjax.circuits.ports import whole_range

_OWN = ("LANES", "INPUTS", "OUTPUTS", "SLOTS", "STATIC", "H")
"""Suffixes of the other header macros."""


def names_of(rows: Columns, name: str) -> dict[tuple[str, int], str]:
    """Return the macro or enumerator of each category, other and missing cell by port and code."""
    used = {f"{name}_{end}".upper() for end in _OWN}
    names: dict[tuple[str, int], str] = {}

    def add(column: Column, code: int, word: str) -> None:
        if (column.port, code) in names:
            return
        start = f"{name}_{column.port}_{word}".upper()
        # Words of different categories may be equal in C, so the later ones get a number.
        choices = itertools.chain([start], (f"{start}_{n}" for n in itertools.count(2)))
        names[column.port, code] = next(choice for choice in choices if choice not in used)
        used.add(names[column.port, code])

    # Fixed names first: a category called "other" or "missing" gets a number.
    for column in rows.columns:
        if isinstance(column, Category):
            add(column, column.other_code, "other")
        add(column, column.missing_code, "missing")
    for column in rows.columns:
        for code, value in enumerate(column.values if isinstance(column, Category) else ()):
            add(column, code, columns.word_of(value) or str(code))
    return names


def constants(rows: Columns, name: str) -> list[str]:
    names, lines = names_of(rows, name), []
    for column in rows.columns:
        if isinstance(column, Number):
            if column.missing:
                lines.append(
                    f"#define {names[column.port, column.missing_code]} "
                    f"({c99.signed_constant(column.missing_code)})"
                )
            continue
        lines += [f"/* Codes of {_about.in_a_comment(column.name)}. */", "enum {"]
        meanings = {column.missing_code: "a missing cell", column.other_code: "an unknown category"}
        meanings |= {code: _about.in_a_comment(value) for code, value in enumerate(column.values)}
        codes = sorted(meanings)
        for code in codes:
            comma = "," * (code != codes[-1])
            lines.append(f"    {names[column.port, code]} = {code}{comma} /* {meanings[code]} */")
        lines.append("};")
    return lines


def _member(column: Column, kind: str, unit: str) -> str:
    what = _about.in_a_comment(column.name)
    if isinstance(column, Number) and column.least is not None and column.largest is not None:
        what += f", from {column.least:g} to {column.largest:g} in training"
    return f"    {kind} {column.port}; /* {what}{unit} */"


def integer_row(circuit: Circuit, rows: Columns, name: str) -> str:
    names, members = names_of(rows, name), []
    for column, port in zip(rows.columns, circuit.inputs, strict=True):
        unit = "; a code above"
        if isinstance(column, Number):
            scale = f" over {2**column.format.fraction}" if column.format.fraction else ""
            code = column.missing_code
            missing = names[column.port, code] if column.missing else code
            least, largest = whole_range(column.format)
            unit = (
                f"; in units of {column.unit}{scale}, from {least} to {largest}; "
                f"{missing} where missing"
            )
        members.append(_member(column, c99.type_of(port), unit))
    return "\n".join(["typedef struct {", *members, f"}} {name}_row;"])


def header(circuit: Circuit, rows: Columns, name: str) -> str:
    members = []
    for column in rows.columns:
        if isinstance(column, Number):
            members.append(_member(column, "double", "; NAN where missing"))
        else:
            members.append(_member(column, "int", "; a code above"))
    return _templates.fill_template(
        "rows.h",
        name=name,
        constants=constants(rows, name),
        members=members,
        outputs=", ".join(c99.output_parameters(circuit)),
        codes=[
            f"int {name}_code_{column.port}(const char *text);"
            for column in rows.columns
            if isinstance(column, Category)
        ],
    )


def source(circuit: Circuit, rows: Columns, name: str) -> str:
    names = names_of(rows, name)
    parts, locals_, codes = [], [], []
    for column, kind in zip(rows.columns, map(c99.type_of, circuit.inputs), strict=True):
        locals_.append(f"        {kind} of_{column.port}[{name.upper()}_LANES];")
        if isinstance(column, Number):
            parts.append(_number(column, kind))
            codes.append(
                f"            of_{column.port}[k] = number_{column.port}(row->{column.port});"
            )
            continue
        other = names[column.port, column.other_code]
        inside = f"row->{column.port} >= 0 && row->{column.port} <= {column.missing_code}"
        codes.append(
            f"            of_{column.port}[k] = ({kind})({inside} ? row->{column.port} : {other});"
        )
        texts = ", ".join(map(c99.quote, column.values))
        parts.append(
            _templates.fill_template(
                "category.c",
                name=name,
                port=column.port,
                count=len(column.values),
                texts=texts or '""',
                other=other,
                missing=names[column.port, column.missing_code],
            )
        )
    arguments = [f"of_{column.port}" for column in rows.columns]
    answers = [f"output_{port.name} + done * {port.count}" for port in circuit.outputs]
    return _templates.fill_template(
        "rows.c",
        name=name,
        NAME=name.upper(),
        parts=parts,
        outputs=", ".join(c99.output_parameters(circuit)),
        locals=locals_,
        codes=codes,
        arguments=", ".join([*arguments, "left", *answers]),
    )


def _number(column: Number, kind: str) -> str:
    """Return the C function from a double to an integer code above the same thresholds."""
    return _templates.fill_template(
        "number.c" if column.thresholds else "no_number.c",
        port=column.port,
        type=kind,
        count=len(column.thresholds),
        thresholds=", ".join(map(repr, column.thresholds)),
        numbers=", ".join(map(c99.signed_constant, column.canonical)),
        missing=c99.signed_constant(column.missing_code),
    )


def initializer(rows: Columns, row: Sequence[Value]) -> str:
    cells = []
    for column, value in zip(rows.columns, row, strict=True):
        if not isinstance(column, Number):
            cells.append(str(column.code(value)))
        else:
            cells.append("NAN" if value is None else repr(float(value)))
    return f"{{{', '.join(cells)}}}"

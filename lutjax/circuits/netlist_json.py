"""Circuits as lossless JSON, and back.

The file is one object, with these fields in this order:

* ``"format"``: ``"lutjax.circuit"``; ``"version"``: 1.
* ``"inputs"`` and ``"outputs"``: ports, each ``{"name": "x", "count": 64, "format": "uint5"}``
  (see `Format.parse`).
* ``"parts"``: names and gate counts for consecutive gate runs,
  ``[["encoder", 120], ["layer 1", 2000]]``.
* ``"about"``: facts about the circuit, any JSON object; known facts must fit the ports and gates.
* ``"literals"``: output port bits, ``2 * node``, plus one if the value is inverted. Node 0 is the
  constant 0, followed by the input port bits (port by port, element by element, lowest bit first)
  and the gates.
* ``"tables"``: the table for each gate in hexadecimal digits: bit k is the output at address k,
  and the first fan-in is the lowest address bit. Tables are strings because they have up to 256
  bits.
* ``"fanins"``: input nodes for each gate, all before the gate itself.

A reader rejects later versions and unknown fields, so a new field requires a new version.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Format, Port
from lutjax.files import atomic, strict_json
from lutjax.files.strict_json import format_value

FORMAT, VERSION = "lutjax.circuit", 1
_TABLE = re.compile("[0-9a-f]{1,64}")  # for 256 table entries
_FIELDS = (
    *("format", "version", "inputs", "outputs", "parts", "about", "literals", "tables", "fanins"),
)


def write(circuit: Circuit) -> str:
    """Return a circuit as JSON, restored completely by `read`.

    Example:
      >>> from lutjax.circuits import Circuit, Port, netlist_json
      >>> both = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1000,), (2 * 3,))
      >>> netlist_json.read(netlist_json.write(both)).tables
      (8,)
    """
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "inputs": ports_to_json(circuit.inputs),
        "outputs": ports_to_json(circuit.outputs),
        "parts": [list(part) for part in circuit.parts],
        "about": dict(circuit.about),
        "literals": circuit.literals,
        "tables": [f"{table:x}" for table in circuit.tables],
        "fanins": circuit.fanins,
    }
    rows = [
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in fields.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def read(text: str | bytes | os.PathLike[str]) -> Circuit:
    """Return the circuit in a JSON text from `write`, or in the file at a path.

    It takes at most 100 times the memory of the text.

    Raises:
      ValueError: damaged text or another version; the message names the field.
    """
    try:
        document = strict_json.loads(atomic.content(text))
    except ValueError as error:
        raise ValueError(
            f"netlist_json.read: the text is not JSON: {error}. Is the file complete?"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        named = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise _field_error("format", f"is {format_value(named)}; expected {format_value(FORMAT)}")
    if document.get("version") != VERSION:
        raise _field_error(
            "version", f"is {format_value(document.get('version'))}; expected version {VERSION}"
        )
    for name in _FIELDS:
        if name not in document:
            raise _field_error(name, "is missing")
    for name in document:
        if name not in _FIELDS:
            raise _field_error(name[:40], f"is not a field of version {VERSION}")
    if not isinstance(document["about"], dict):
        raise _field_error("about", f"is {format_value(document['about'])}; expected an object")
    parts = _read_each(document, "parts", _read_part)
    tables = _read_each(document, "tables", _read_table)
    fanins = _read_each(document, "fanins", _read_fanin)
    if len(tables) != len(fanins):
        raise _field_error("fanins", f"has {len(fanins)} gates; tables has {len(tables)}")
    try:
        return Circuit(
            inputs=tuple(ports_from_json(document["inputs"], "inputs")),
            outputs=tuple(ports_from_json(document["outputs"], "outputs")),
            fanins=tuple(fanins),
            tables=tuple(tables),
            literals=tuple(_read_each(document, "literals", _read_whole)),
            parts=tuple(parts),
            about=document["about"],
        )
    except (ValueError, TypeError) as error:
        # Errors of the fields already name this function.
        text = str(error).removeprefix("netlist_json.read: ")
        raise ValueError(f"netlist_json.read: {text}") from None


def ports_to_json(ports: tuple[Port, ...]) -> list[dict[str, Any]]:
    """Return ports as JSON."""
    return [{"name": port.name, "count": port.count, "format": str(port.format)} for port in ports]


def ports_from_json(values: Any, field: str) -> list[Port]:
    """Return the ports in a JSON field, or raise ValueError with its name."""
    return _read_each({field: values}, field, _read_port)


def _read_port(port: Any) -> Port:
    if not isinstance(port, dict) or set(port) != {"name", "count", "format"}:
        raise ValueError("expected an object with name, count and format")
    return Port(port["name"], port["count"], Format.parse(port["format"]))


def _read_part(part: Any) -> tuple[str, int]:
    name, count = _read_list(part, 2)
    if not isinstance(name, str):
        raise ValueError("expected a name, and a number of gates")
    return name, _read_whole(count)


def _read_table(table: Any) -> int:
    if not isinstance(table, str) or not _TABLE.fullmatch(table):
        raise ValueError("expected hexadecimal digits in quotes, at most 64 of them")
    return int(table, 16)


def _read_fanin(nodes: Any) -> tuple[int, ...]:
    return tuple(_read_whole(node) for node in _read_list(nodes))


def _read_whole(value: Any) -> int:
    # Larger numbers are no node of any circuit, and would take the memory of a long text.
    if type(value) is not int or abs(value) >= 1 << 62:
        raise ValueError("expected a whole number")
    return value


def _read_list(values: Any, size: int | None = None) -> list[Any]:
    if not isinstance(values, list) or (size is not None and len(values) != size):
        raise ValueError("expected a list" + (f" of {size}" if size is not None else ""))
    return values


def _read_each(document: Mapping[str, Any], field: str, read: Callable[[Any], Any]) -> list[Any]:
    if not isinstance(document[field], list):
        raise _field_error(field, f"is {format_value(document[field])}; expected a list")
    elements = []
    for k, element in enumerate(document[field]):
        try:
            elements.append(read(element))
        except (ValueError, TypeError) as error:
            raise _field_error(f"{field}[{k}]", f"is {format_value(element)}; {error}") from None
    return elements


def _field_error(field: str, what: str) -> ValueError:
    return ValueError(f"netlist_json.read: the field {field} {what}.")

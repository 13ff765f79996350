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
    "format",
    "version",
    "inputs",
    "outputs",
    "parts",
    "about",
    "literals",
    "tables",
    "fanins",
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
        found = strict_json.loads(atomic.content(text))
    except ValueError as error:
        raise ValueError(
            f"netlist_json.read: the text is not JSON: {error}. Is the file complete?"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        named = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise _field_error("format", f"is {format_value(named)}; expected {format_value(FORMAT)}")
    if found.get("version") != VERSION:
        raise _field_error(
            "version", f"is {format_value(found.get('version'))}; expected version {VERSION}"
        )
    for name in _FIELDS:
        if name not in found:
            raise _field_error(name, "is missing")
    for name in found:
        if name not in _FIELDS:
            raise _field_error(name[:40], f"is not a field of version {VERSION}")
    if not isinstance(found["about"], dict):
        raise _field_error("about", f"is {format_value(found['about'])}; expected an object")
    parts = _read_each(found, "parts", _read_part)
    tables = _read_each(found, "tables", _read_table)
    fanins = _read_each(
        found, "fanins", lambda nodes: tuple(_read_whole(n) for n in _read_list(nodes))
    )
    if len(tables) != len(fanins):
        raise _field_error("fanins", f"has {len(fanins)} gates; tables has {len(tables)}")
    try:
        return Circuit(
            inputs=tuple(ports_from_json(found["inputs"], "inputs")),
            outputs=tuple(ports_from_json(found["outputs"], "outputs")),
            fanins=tuple(fanins),
            tables=tuple(tables),
            literals=tuple(_read_each(found, "literals", _read_whole)),
            parts=tuple(parts),
            about=found["about"],
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            str(error)
            if str(error).startswith("netlist_json.read")
            else f"netlist_json.read: {error}"
        ) from None


def ports_to_json(ports: tuple[Port, ...]) -> list[dict[str, Any]]:
    """Return ports as JSON."""
    return [{"name": port.name, "count": port.count, "format": str(port.format)} for port in ports]


def ports_from_json(found: Any, field: str) -> list[Port]:
    """Return the ports in a JSON field, or raise ValueError with its name."""
    return _read_each({field: found}, field, _read_port)


def _read_port(found: Any) -> Port:
    if not isinstance(found, dict) or set(found) != {"name", "count", "format"}:
        raise ValueError("expected an object with name, count and format")
    return Port(found["name"], found["count"], Format.parse(found["format"]))


def _read_part(found: Any) -> tuple[str, int]:
    name, count = _read_list(found, 2)
    if not isinstance(name, str):
        raise ValueError("expected a name, and a number of gates")
    return name, _read_whole(count)


def _read_table(found: Any) -> int:
    if not isinstance(found, str) or not _TABLE.fullmatch(found):
        raise ValueError("expected hexadecimal digits in quotes, at most 64 of them")
    return int(found, 16)


def _read_whole(found: Any) -> int:
    if type(found) is not int or abs(found) >= 1 << 62:
        raise ValueError("expected a whole number")
    return found


def _read_list(found: Any, size: int | None = None) -> list[Any]:
    if not isinstance(found, list) or (size is not None and len(found) != size):
        raise ValueError("expected a list" + (f" of {size}" if size is not None else ""))
    return found


def _read_each(found: Mapping[str, Any], field: str, read: Callable[[Any], Any]) -> list[Any]:
    if not isinstance(found[field], list):
        raise _field_error(field, f"is {format_value(found[field])}; expected a list")
    elements = []
    for k, element in enumerate(found[field]):
        try:
            elements.append(read(element))
        except (ValueError, TypeError) as error:
            raise _field_error(f"{field}[{k}]", f"is {format_value(element)}; {error}") from None
    return elements


def _field_error(field: str, what: str) -> ValueError:
    return ValueError(f"netlist_json.read: the field {field} {what}.")

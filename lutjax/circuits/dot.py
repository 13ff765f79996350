"""Circuits as Graphviz text, and gate names for text and pictures."""

import colorsys
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Port

_COLORS = ("#cfe2ff", "#d9f2d9", "#ffe7c2", "#f3d6f5", "#d3f0ee", "#f9d9d9", "#e6e0ff", "#ecebd0")


class Function(NamedTuple):
    """A named table function.

    Attributes:
      name: function name, or the table in hexadecimal.
      inverted: whether the function inverts each input.
      roles: role of each input in an asymmetric function; else empty.
    """

    name: str
    inverted: tuple[bool, ...]
    roles: tuple[str, ...]


def function_of(table: int, n: int) -> Function:
    """Return the function of a table over n inputs, with as few inverted inputs as possible."""
    plain, n_entries = ((False,) * n, ("",) * n), 1 << n
    if table in (0, (1 << n_entries) - 1):
        return Function("1" if table else "0", *plain)
    if n == 1:
        return Function("buffer" if table == 0b10 else "not", *plain)
    ones = [address for address in range(n_entries) if table >> address & 1]
    zeros = [address for address in range(n_entries) if not table >> address & 1]
    # True at one address: an AND of inputs, some inverted.
    if len(ones) == 1:
        inverted = tuple(not ones[0] >> k & 1 for k in range(n))
        return Function("nor", *plain) if all(inverted) else Function("and", inverted, plain[1])
    if len(zeros) == 1:
        inverted = tuple(bool(zeros[0] >> k & 1) for k in range(n))
        return Function("nand", *plain) if all(inverted) else Function("or", inverted, plain[1])
    if (name := _counting_name(table, n)) is not None:
        return Function(name, *plain)
    if n == 3 and table in (known := _three_input_functions()):
        return known[table]
    return Function(f"0x{table:0{n_entries // 4}x}", plain[0], tuple(str(k) for k in range(n)))


def _counting_name(table: int, n: int) -> str | None:
    """Return the name if the table is a function of the number of ones, else None."""
    answers: dict[int, int] = {}
    for address in range(1 << n):
        if answers.setdefault(address.bit_count(), table >> address & 1) != table >> address & 1:
            return None
    values = [answers[count] for count in range(n + 1)]
    names: dict[str, Callable[[int], int]] = {
        "xor": lambda count: count & 1,
        "xnor": lambda count: 1 - (count & 1),
    }
    if n % 2:
        names["majority"] = lambda count: int(2 * count > n)
        names["minority"] = lambda count: int(2 * count < n)
    for k in range(1, n + 1):
        names[f"at least {k}"] = lambda count, k=k: int(count >= k)  # type: ignore[misc]
        names[f"less than {k}"] = lambda count, k=k: int(count < k)  # type: ignore[misc]
    for k in range(1, n.bit_length()):
        names[f"bit {k} of sum"] = lambda count, k=k: count >> k & 1  # type: ignore[misc]
    for name, function in names.items():
        if values == [function(count) for count in range(n + 1)]:
            return name
    return None


@functools.cache
def _three_input_functions() -> dict[int, Function]:
    bases: dict[str, tuple[tuple[str, str, str], Callable[[int, int, int], int]]] = {
        "mux": (("0", "1", "select"), lambda a, b, s: b if s else a),
        "and-or": (("", "", "or"), lambda a, b, c: a & b | c),
        "or-and": (("", "", "and"), lambda a, b, c: (a | b) & c),
        "and-xor": (("", "", "xor"), lambda a, b, c: a & b ^ c),
        "xor-and": (("", "", "and"), lambda a, b, c: (a ^ b) & c),
        "xor-or": (("", "", "or"), lambda a, b, c: (a ^ b) | c),
        "majority": (("", "", ""), lambda a, b, c: int(a + b + c > 1)),
    }
    known: dict[int, Function] = {}
    # Fewer inverted inputs first, and `setdefault` keeps the first name of a table.
    every = sorted(itertools.product((False, True), repeat=3), key=sum)
    variants = itertools.product(every, bases.items(), itertools.permutations(range(3)))
    for inverted, (name, (roles, function)), order in variants:
        table = 0
        for address in range(8):
            bits = [(address >> k & 1) ^ inverted[k] for k in range(3)]
            table |= function(*(bits[k] for k in order)) << address
        placed = ["", "", ""]
        for k, role in zip(order, roles, strict=True):
            placed[k] = role
        known.setdefault(table, Function(name, inverted, tuple(placed)))
    return known


def bit_names(ports: Sequence[Port]) -> list[str]:
    """Return port bit names: port, element in brackets if there are several, bit after a point."""
    names = []
    for port in ports:
        for number in range(port.count):
            name = port.name if port.count == 1 else f"{port.name}[{number}]"
            bits = range(port.format.bits)
            names += [name] if len(bits) == 1 else [f"{name}.{bit}" for bit in bits]
    return names


def colors_of(n_parts: int) -> list[str]:
    """Return a light color for each part."""
    if n_parts <= len(_COLORS):
        return list(_COLORS[:n_parts])
    # Neighbors differ in lightness as well, because many hues look alike.
    lightness = [0.86 if k % 2 else 0.76 for k in range(n_parts)]
    colors = (colorsys.hls_to_rgb(k / n_parts, lightness[k], 0.75) for k in range(n_parts))
    return ["#" + "".join(f"{round(255 * value):02x}" for value in color) for color in colors]


def write(circuit: Circuit, name: str = "circuit", *, title: str | None = None) -> str:
    """Return the circuit as Graphviz text for ``dot``.

    Gates are labeled with their function, or with their hexadecimal table and inputs numbered from
    the lowest address bit. An inverted edge is dashed and ends in a circle. Boxes group the gates
    of each part. Inputs without readers are omitted.

    Args:
      circuit: the circuit.
      name: graph name.
      title: title above the graph.

    Example:
      >>> from lutjax.circuits import Builder, dot
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate((a, b), 0b0010)]])
      >>> print(dot.write(builder.circuit()))
      digraph "circuit" {
        rankdir=LR;
        node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif"];
        edge [arrowsize=0.7];
        n1 [label="x[0]", shape=plaintext, style=""];
        n2 [label="x[1]", shape=plaintext, style=""];
        n3 [label="and", tooltip="0x2"];
        n1 -> n3;
        n2 -> n3 [style=dashed, arrowhead=odot];
        o0 [label="y", shape=plaintext, style=""];
        n3 -> o0;
      }
      <BLANKLINE>
    """
    lines = [
        f"digraph {_quote_text(name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif"];',
        "  edge [arrowsize=0.7];",
        *([] if title is None else [f"  label={_label(title)}; labelloc=t;"]),
    ]
    names = ["0", *bit_names(circuit.inputs)]
    read = {node for fanin in circuit.fanins for node in fanin} | {k >> 1 for k in circuit.literals}
    lines += [
        f'  n{k} [label={_label(name)}, shape=plaintext, style=""];'
        for k, name in enumerate(names)
        if k in read
    ]
    functions = [
        function_of(table, len(fanin))
        for fanin, table in zip(circuit.fanins, circuit.tables, strict=True)
    ]
    first, part, indent = circuit.first_gate, "", "  "
    colors = colors_of(len(circuit.parts))
    n_clusters = 0
    # A single part needs no name.
    named = circuit.parts if len(circuit.parts) > 1 else (("", len(circuit)),)
    parts = [name for name, count in named for _ in range(count)]
    for gate, (function, new) in enumerate(zip(functions, parts, strict=True)):
        if new != part:
            lines += ["  }"] if part else []
            if new:
                lines.append(f"  subgraph cluster_{n_clusters} {{")
                color = _quote_text(colors[n_clusters])
                lines.append(f"    label={_label(new)}; style=filled; color={color};")
                n_clusters += 1
            part, indent = new, "    " if new else "  "
        hexadecimal = f"0x{circuit.tables[gate]:x}"
        lines.append(
            f'{indent}n{first + gate} [label={_label(function.name)}, tooltip="{hexadecimal}"];'
        )
    lines += ["  }"] if part else []
    for gate, (function, fanin) in enumerate(zip(functions, circuit.fanins, strict=True)):
        for node, inverted, role in zip(fanin, function.inverted, function.roles, strict=True):
            lines.append(f"  n{node} -> n{first + gate}{_edge(inverted, role)};")
    output_bits = zip(circuit.literals, bit_names(circuit.outputs), strict=True)
    for k, (literal, bit) in enumerate(output_bits):
        lines.append(f'  o{k} [label={_label(bit)}, shape=plaintext, style=""];')
        lines.append(f"  n{literal >> 1} -> o{k}{_edge(bool(literal & 1), '')};")
    return "\n".join([*lines, "}", ""])


def _quote_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _label(text: str) -> str:
    """Escape text for a label, including HTML entities, which Graphviz interprets."""
    return _quote_text(text.replace("&", "&amp;"))


def _edge(inverted: bool, role: str) -> str:
    properties = ["style=dashed", "arrowhead=odot"] if inverted else []
    properties += [f"headlabel={_label(role)}"] if role else []
    return f" [{', '.join(properties)}]" if properties else ""

"""Circuits as Graphviz text, and as pictures."""

import colorsys
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lutjax._extras import needed_by
from lutjax.circuits.circuit import Circuit, Port
from lutjax.files._pictures import as_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 200
"""Gates of the largest circuit that `draw` draws."""

_COLOURS = ("#cfe2ff", "#d9f2d9", "#ffe7c2", "#f3d6f5", "#d3f0ee", "#f9d9d9", "#e6e0ff", "#ecebd0")


class Function(NamedTuple):
    """A table in words.

    Attributes:
      name: of the function, or its table in base 16.
      inverted: for each input whether the function reads its inverse.
      roles: for each input its part in a function that is not symmetric; else empty.
    """

    name: str
    inverted: tuple[bool, ...]
    roles: tuple[str, ...]


def function_of(table: int, n: int) -> Function:
    """Return the function that a table of n inputs is, with as few inverted inputs as possible.

    Example:
      >>> from lutjax.circuits.drawing import function_of
      >>> function_of(0b0010, 2)
      Function(name='and', inverted=(False, True), roles=('', ''))
      >>> function_of(0xCA, 3).name, function_of(0xCA, 3).roles
      ('mux', ('0', '1', 'select'))
    """
    plain, n_entries = ((False,) * n, ("",) * n), 1 << n
    if table in (0, (1 << n_entries) - 1):
        return Function("1" if table else "0", *plain)
    if n == 1:
        return Function("buffer" if table == 0b10 else "not", *plain)
    ones = [address for address in range(n_entries) if table >> address & 1]
    zeros = [address for address in range(n_entries) if not table >> address & 1]
    if len(ones) == 1:  # true at one address
        inverted = tuple(not ones[0] >> k & 1 for k in range(n))
        return Function("nor", *plain) if all(inverted) else Function("and", inverted, plain[1])
    if len(zeros) == 1:
        inverted = tuple(bool(zeros[0] >> k & 1) for k in range(n))
        return Function("nand", *plain) if all(inverted) else Function("or", inverted, plain[1])
    if (name := _counting(table, n)) is not None:
        return Function(name, *plain)
    if n == 3 and table in (known := _of_three()):
        return known[table]
    return Function(f"0x{table:0{n_entries // 4}x}", plain[0], tuple(str(k) for k in range(n)))


def _counting(table: int, n: int) -> str | None:
    """Return the name of a function of the number of ones, if the table is one."""
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
def _of_three() -> dict[int, Function]:
    """Return functions of three inputs by table."""
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
    every = sorted(itertools.product((False, True), repeat=3), key=sum)
    for inverted, (name, (roles, function)), order in itertools.product(
        every, bases.items(), itertools.permutations(range(3))
    ):
        table = 0
        for address in range(8):
            bits = [(address >> k & 1) ^ inverted[k] for k in range(3)]
            table |= function(*(bits[k] for k in order)) << address
        placed = ["", "", ""]
        for k, role in zip(order, roles, strict=True):
            placed[k] = role
        known.setdefault(table, Function(name, inverted, tuple(placed)))
    return known


def _bit_names(ports: Sequence[Port]) -> list[str]:
    """Return the names of the bits of ports: port, number in brackets if it has several, bit after a point."""
    names = []
    for port in ports:
        for number in range(port.count):
            name = port.name if port.count == 1 else f"{port.name}[{number}]"
            names += [name if port.format.bits == 1 else f"{name}.{bit}" for bit in range(port.format.bits)]
    return names


def _part_of_gates(circuit: Circuit) -> list[str]:
    """Return the name of the part of each gate; if all gates are one part, it needs no name."""
    parts = circuit.parts if len(circuit.parts) > 1 else (("", len(circuit)),)
    return [name for name, count in parts for _ in range(count)]


def _colours(n_parts: int) -> list[str]:
    """Return a light colour for each part."""
    if n_parts <= len(_COLOURS):
        return list(_COLOURS[:n_parts])
    colours = (colorsys.hls_to_rgb(k / n_parts, 0.86 if k % 2 else 0.76, 0.75) for k in range(n_parts))
    return ["#" + "".join(f"{round(255 * value):02x}" for value in colour) for colour in colours]


def _read(circuit: Circuit) -> list[int]:
    """Return the constant and the inputs that something reads, in order."""
    nodes = {node for fanin in circuit.fanins for node in fanin} | {
        literal >> 1 for literal in circuit.literals
    }
    return sorted(node for node in nodes if node < circuit.first_gate)


def to_dot(circuit: Circuit, name: str = "circuit") -> str:
    """Return the circuit as text of Graphviz, to be drawn by ``dot``.

    Gates are named by their function, or by their table in base 16 with the inputs numbered from the lowest bit of the
    address. An inverted edge is dashed and ends in a circle. Parts are boxes around their gates. Inputs that nothing
    reads are left out.

    Args:
      name: of the graph.

    Example:
      >>> from lutjax.circuits import Builder
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate((a, b), 0b0010)]])
      >>> print(builder.circuit().to_dot())
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
        f"digraph {_quoted(name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif"];',
        "  edge [arrowsize=0.7];",
    ]
    names = ["0", *_bit_names(circuit.inputs)]
    lines += [f'  n{k} [label={_label(names[k])}, shape=plaintext, style=""];' for k in _read(circuit)]
    functions = [
        function_of(table, len(fanin)) for fanin, table in zip(circuit.fanins, circuit.tables, strict=True)
    ]
    first, part, indent = circuit.first_gate, "", "  "
    colours = _colours(len(circuit.parts))
    n_clusters = 0
    for gate, (function, new) in enumerate(zip(functions, _part_of_gates(circuit), strict=True)):
        if new != part:
            lines += ["  }"] if part else []
            if new:
                lines.append(f"  subgraph cluster_{n_clusters} {{")
                lines.append(f"    label={_label(new)}; style=filled; color={_quoted(colours[n_clusters])};")
                n_clusters += 1
            part, indent = new, "    " if new else "  "
        hexadecimal = f"0x{circuit.tables[gate]:x}"
        lines.append(f'{indent}n{first + gate} [label={_label(function.name)}, tooltip="{hexadecimal}"];')
    lines += ["  }"] if part else []
    for gate, (function, fanin) in enumerate(zip(functions, circuit.fanins, strict=True)):
        for node, inverted, role in zip(fanin, function.inverted, function.roles, strict=True):
            lines.append(f"  n{node} -> n{first + gate}{_edge(inverted, role)};")
    for k, (literal, bit) in enumerate(zip(circuit.literals, _bit_names(circuit.outputs), strict=True)):
        lines.append(f'  o{k} [label={_label(bit)}, shape=plaintext, style=""];')
        lines.append(f"  n{literal >> 1} -> o{k}{_edge(bool(literal & 1), '')};")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _label(text: str) -> str:
    """Return a text as a label, in which Graphviz reads entities of HTML, too."""
    return _quoted(text.replace("&", "&amp;"))


def _edge(inverted: bool, role: str) -> str:
    properties = ["style=dashed", "arrowhead=odot"] if inverted else []
    properties += [f"headlabel={_label(role)}"] if role else []
    return f" [{', '.join(properties)}]" if properties else ""


# ------------------------------------------------------------------------------------- pictures
_ACROSS, _WIDE, _HIGH = 2.6, 1.5, 0.62  # from a level to the next one; sides of a gate
_INCHES = 0.62  # of 1


def draw(circuit: Circuit, target: "str | Path | Axes", *, title: str | None = None) -> None:
    """Draw a small circuit level by level from left to right.

    Gates have the colours of their parts, and the names of their functions (see `lutjax.circuits.drawing.function_of`). A
    circle at the end of an edge says that its value is inverted. Inputs that nothing reads are left out.

    Args:
      target: the file of the picture (its ending decides the format), or axes of matplotlib.
      title: above the picture.

    Raises:
      ValueError: the circuit has more than 200 gates.
    """
    if len(circuit) > LARGEST:
        raise ValueError(
            f"draw: the circuit has {len(circuit)} gates; a picture holds up to {LARGEST}. Draw fewer of its outputs, or "
            "write `to_dot()` for Graphviz, or `to_html()`, which shows every gate as a dot."
        )
    with needed_by(__name__):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    layout = _Layout(circuit)
    if not isinstance(target, str | Path):
        layout.draw(target, title)
        return
    low, high = layout.extent
    figure = Figure(
        figsize=(max(4.0, _INCHES * (layout.right + 1)), max(2.0, _INCHES * (high - low + 3))),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    layout.draw(figure.subplots(), title)
    figure.savefig(target, dpi=120)


class _Layout:
    """Places of the nodes, of the outputs, and of the bends of edges that pass a level.

    Items are numbered: nodes first, then outputs, then bends. An edge from a node over several levels has a bend in each of
    them, and all edges of the node share it.
    """

    def __init__(self, circuit: Circuit):
        self.circuit = circuit
        n_nodes = circuit.first_gate + len(circuit)
        used = [*_read(circuit), *range(circuit.first_gate, n_nodes)]
        self.outputs = list(range(n_nodes, n_nodes + circuit.n_outputs))
        self.level = {node: circuit.levels[node] for node in used}
        last = 1 + max(self.level.values(), default=0)
        self.level |= dict.fromkeys(self.outputs, last)
        edges = [
            (node, gate) for gate, fanin in enumerate(circuit.fanins, circuit.first_gate) for node in fanin
        ]
        edges += [(literal >> 1, out) for literal, out in zip(circuit.literals, self.outputs, strict=True)]
        self.bends: dict[int, list[int]] = {}
        number = n_nodes + circuit.n_outputs
        links: list[tuple[int, int]] = []
        for source, sink in edges:
            bends = self.bends.setdefault(source, [])
            while self.level[source] + len(bends) + 1 < self.level[sink]:
                self.level[number] = self.level[source] + len(bends) + 1
                links.append((bends[-1] if bends else source, number))
                bends.append(number)
                number += 1
            links.append((self.route(source, sink)[-1], sink))
        self.layers: list[list[int]] = [[] for _ in range(last + 1)]
        for item, level in self.level.items():
            self.layers[level].append(item)
        self.before: dict[int, list[int]] = {item: [] for item in self.level}
        self.after: dict[int, list[int]] = {item: [] for item in self.level}
        for source, sink in links:
            self.before[sink].append(source)
            self.after[source].append(sink)
        self._n_items = n_nodes + circuit.n_outputs
        self._order()
        self.y = self._heights()

    def route(self, source: int, sink: int) -> list[int]:
        """Return the items through which an edge goes, without its end."""
        return [source, *self.bends.get(source, [])[: self.level[sink] - self.level[source] - 1]]

    def _order(self) -> None:
        """Sort each level by the mean place of the neighbours in the level before or after; keep the shortest edges."""
        place = {item: float(k) for layer in self.layers for k, item in enumerate(layer)}
        best, shortest = [list(layer) for layer in self.layers], np.inf
        for sweep in range(24):
            near = self.after if sweep % 2 else self.before
            for layer in self.layers[::-1] if sweep % 2 else self.layers:
                layer.sort(key=lambda item: (_mean(place, near[item], place[item]), place[item]))
                place |= {item: k - (len(layer) - 1) / 2 for k, item in enumerate(layer)}
            length = sum(abs(place[a] - place[b]) for a, after in self.after.items() for b in after)
            if length < shortest:
                best, shortest = [list(layer) for layer in self.layers], length
        self.layers = best

    def _heights(self) -> dict[int, float]:
        """Return heights near the neighbours' that keep the order and leave room for each item."""
        room = {item: 0.5 if item < self._n_items else 0.18 for item in self.level}
        room |= {
            gate: 0.5 * _high(len(fanin)) + 0.19
            for gate, fanin in enumerate(self.circuit.fanins, self.circuit.first_gate)
        }
        y: dict[int, float] = {}
        offsets = []
        for layer in self.layers:
            rooms = [room[item] for item in layer]
            offset = np.cumsum([0.0, *(a + b for a, b in itertools.pairwise(rooms))])[: len(layer)]
            offsets.append(offset)
            y |= dict(zip(layer, (offset - offset.mean()).tolist() if layer else [], strict=True))
        for sweep in range(24):
            for layer, offset in list(zip(self.layers, offsets, strict=True))[:: -1 if sweep % 2 else 1]:
                near = [self.before[item] + self.after[item] for item in layer]
                wanted = [_mean(y, items, y[item]) for item, items in zip(layer, near, strict=True)]
                fitted = _increasing(np.asarray(wanted) - offset) + offset
                y |= dict(zip(layer, fitted.tolist(), strict=True))
        return y

    @property
    def right(self) -> float:
        """The right edge."""
        return (len(self.layers) - 1) * _ACROSS + _WIDE

    @property
    def extent(self) -> tuple[float, float]:
        """The lowest and the highest place."""
        return min(self.y.values(), default=0.0), max(self.y.values(), default=0.0)

    def draw(self, axes: Any, title: str | None) -> None:
        """Draw all on axes of matplotlib, first things at the top."""
        from matplotlib.patches import FancyBboxPatch, Patch

        circuit, first = self.circuit, self.circuit.first_gate
        parts = _part_of_gates(circuit)
        names = list(dict.fromkeys(parts))
        colours = dict(zip(names, _colours(len(names)), strict=True))
        labels = ["0", *_bit_names(circuit.inputs)]
        text = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 4}
        for node in _read(circuit):
            axes.text(_WIDE - 0.08, -self.y[node], labels[node], **{**text, "ha": "right"})
        for gate, (fanin, table) in enumerate(zip(circuit.fanins, circuit.tables, strict=True), first):
            function = function_of(table, len(fanin))
            x, y = self.level[gate] * _ACROSS, -self.y[gate]
            high = _high(len(fanin))
            box = FancyBboxPatch(
                (x, y - high / 2), _WIDE, high, boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=colours[parts[gate - first]], edgecolor="#333333", linewidth=0.9, zorder=3,
            )  # fmt: skip
            axes.add_patch(box)
            shift = 0.12 if any(function.roles) else 0.0
            size = 8 if len(function.name) < 10 else 6 if len(function.name) < 14 else 4.5
            axes.text(x + _WIDE / 2 + shift, y, _wrapped(function.name), **{**text, "fontsize": size})
            pins = sorted(range(len(fanin)), key=lambda k: (self.y[self.route(fanin[k], gate)[-1]], k))
            for place, k in enumerate(pins):
                pin = y + high * (0.5 - (place + 1) / (len(fanin) + 1))
                self._edge(axes, fanin[k], gate, (x, pin), function.inverted[k])
                if function.roles[k]:
                    axes.text(x + 0.07, pin, function.roles[k], **{**text, "ha": "left", "fontsize": 5})
        for out, literal, label in zip(
            self.outputs, circuit.literals, _bit_names(circuit.outputs), strict=True
        ):
            x, y = self.level[out] * _ACROSS, -self.y[out]
            axes.text(x + 0.08, y, label, **{**text, "ha": "left"})
            self._edge(axes, literal >> 1, out, (x, y), bool(literal & 1))
        low, high = self.extent
        axes.set_xlim(-0.2, self.right + 0.2)
        axes.set_ylim(-high - 0.7, -low + 0.7)
        axes.set_aspect("equal")
        axes.set_axis_off()
        if title is not None:
            axes.set_title("\n".join(map(as_drawn, title.split("\n"))))
        if named := [name for name in names if name]:
            handles = [Patch(facecolor=colours[name], edgecolor="#333333", label="part") for name in named]
            legend = axes.legend(
                handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(handles), frameon=False, fontsize=8
            )  # fmt: skip
            # Labels that begin with an underscore would be left out.
            for label, name in zip(legend.get_texts(), named, strict=True):
                label.set_text(as_drawn(name))

    def _edge(self, axes: Any, source: int, sink: int, end: tuple[float, float], inverted: bool) -> None:
        """Draw an edge from the right of a node, through its bends, to a place at the left of another item."""
        from matplotlib.patches import Circle, PathPatch
        from matplotlib.path import Path as Curve

        start = (self.level[source] * _ACROSS + _WIDE, -self.y[source])
        points, codes = [start], [Curve.MOVETO]
        for bend in self.route(source, sink)[1:]:
            left = self.level[bend] * _ACROSS
            _curve(points, codes, (left, -self.y[bend]))
            points.append((left + _WIDE, -self.y[bend]))
            codes.append(Curve.LINETO)
        radius = 0.07
        _curve(points, codes, (end[0] - 2 * radius if inverted else end[0], end[1]))
        axes.add_patch(
            PathPatch(Curve(points, codes), fill=False, edgecolor="#5b6470", linewidth=0.9, zorder=1)
        )
        if inverted:
            axes.add_patch(
                Circle(
                    (end[0] - radius, end[1]),
                    radius,
                    facecolor="white",
                    edgecolor="#333333",
                    linewidth=0.9,
                    zorder=3,
                )
            )


def _curve(points: list[tuple[float, float]], codes: list[Any], end: tuple[float, float]) -> None:
    """Append a curve that leaves and arrives horizontally."""
    from matplotlib.path import Path as Curve

    y, middle = points[-1][1], (points[-1][0] + end[0]) / 2
    points += [(middle, y), (middle, end[1]), end]
    codes += [Curve.CURVE4] * 3


def _wrapped(name: str) -> str:
    """Return a long table on several lines."""
    return "\n".join(name[k : k + 18] for k in range(0, len(name), 18))


def _high(n_inputs: int) -> float:
    """Return the height of a gate."""
    return max(_HIGH, 0.17 * (n_inputs + 1))


def _mean(place: dict[int, float], items: list[int], otherwise: float) -> float:
    return sum(place[item] for item in items) / len(items) if items else otherwise


def _increasing(wanted: np.ndarray) -> np.ndarray:
    """Return the nearest numbers, in squares, of which none is below the one before it."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in wanted.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])

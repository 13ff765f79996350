"""Small circuits as pictures."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lutjax._extras import needed_by
from lutjax.circuits import dot
from lutjax.circuits.circuit import Circuit
from lutjax.files._pictures import as_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 200
"""Gates of the largest circuit that `draw` draws."""


# ------------------------------------------------------------------------------------- pictures
_ACROSS, _WIDE, _HIGH = 2.6, 1.5, 0.62  # from a level to the next one; sides of a gate
_INCHES = 0.62  # of 1


def draw(circuit: Circuit, target: "str | Path | Axes", *, title: str | None = None) -> None:
    """Draw a small circuit level by level from left to right.

    Gates have the colours of their parts, and the names of their functions (see `lutjax.circuits.dot.function_of`). A
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
            "write it by `circuits.dot` for Graphviz, or by `circuits.page`, which shows every gate as a dot."
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
        used = [*dot.nodes_read(circuit), *range(circuit.first_gate, n_nodes)]
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
        parts = dot.parts_of_gates(circuit)
        names = list(dict.fromkeys(parts))
        colours = dict(zip(names, dot.colours_of(len(names)), strict=True))
        labels = ["0", *dot.bit_names(circuit.inputs)]
        text = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 4}
        for node in dot.nodes_read(circuit):
            axes.text(_WIDE - 0.08, -self.y[node], labels[node], **{**text, "ha": "right"})
        for gate, (fanin, table) in enumerate(zip(circuit.fanins, circuit.tables, strict=True), first):
            function = dot.function_of(table, len(fanin))
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
            self.outputs, circuit.literals, dot.bit_names(circuit.outputs), strict=True
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

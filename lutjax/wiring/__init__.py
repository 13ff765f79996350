"""Wiring: the inputs of gates and detectors, and the outputs of tables.

Wires are int32 input ids ``[gates, inputs per gate]``. `balanced`, `unique_pairs`, `butterfly` and
`trees` use every input about equally often: no input has more than ``ceil(wires / inputs)``
readers, so `lutjax.readers` returns a fan-out list with a static width under `jax.jit`. `FIXED`
maps names to wirings for layers, `LEARNED` contains the names of wirings with scores.

`Edges` is an edge list, with any number of outputs for each table row: `from_edges` makes it from
ids and `edges` returns them; `add_edges`, `remove_edges` and `carry_over` change it between
training steps.

Image ids count values in the order row, column, channel. `projections`, `window_groups` and `full`
return a `Connectivity`: detector groups with their candidate inputs and table outputs. It consists
of NumPy arrays: ops know nothing about images.
"""

from lutjax.values._edges import Edges
from lutjax.wiring._edges import (
    Changed,
    EdgeIds,
    add_edges,
    carry_over,
    edges,
    from_edges,
    remove_edges,
)
from lutjax.wiring._gates import balanced, butterfly, random, trees, unique_pairs
from lutjax.wiring._images import Connectivity, full, projections, window_groups, windows
from lutjax.wiring._names import FIXED, LEARNED, Groups, Windows
from lutjax.wiring._show import show

__all__ = [
    "FIXED",
    "LEARNED",
    "Changed",
    "Connectivity",
    "EdgeIds",
    "Edges",
    "Groups",
    "Windows",
    "add_edges",
    "balanced",
    "butterfly",
    "carry_over",
    "edges",
    "from_edges",
    "full",
    "projections",
    "random",
    "remove_edges",
    "show",
    "trees",
    "unique_pairs",
    "window_groups",
    "windows",
]

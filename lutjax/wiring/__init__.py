"""Wiring: the inputs that gates and detectors read, and the outputs that tables reach.

Wires are int32 ``[gates, inputs of a gate]``, ids of inputs. `balanced`, `unique_pairs`, `butterfly` and `trees` use every input about equally
often: no input is read by more than ``ceil(wires / inputs)`` gates, so the reverse list of `lutjax.readers`
has a width that is known under `jax.jit`. `FIXED` has the wirings that layers know by name, `LEARNED` the names of those with scores.

Rows of tables reach any number of outputs by a list of edges, `Edges`: `from_edges` makes it of ids and `edges` gives them back; `add_edges`, `remove_edges` and
`carry_over` change it between steps of training.

Of images, ids count values in the order row, column, channel. `projections`, `window_groups` and `full` return a `Connectivity`: groups of
detectors with the inputs that they may compare, and the outputs that their tables reach. It is data in NumPy: ops know nothing of images.
"""

from lutjax.values._edges import Edges
from lutjax.wiring._edges import Changed, EdgeIds, add_edges, carry_over, edges, from_edges, remove_edges
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

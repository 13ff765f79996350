"""Edge lists of tables, sorted by detector and row, with any number of edges per row."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax._typing import Array
from lutjax.values._ids import is_concrete

_WIDEST = 64  # edges per read


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("first", "target"),
    meta_fields=("n_detectors", "n_rows", "n_outputs", "width"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Edges:
    """Edge list from table rows to outputs, made by `lutjax.wiring.from_edges`.

    A row has any number of edges. Edges are numbered by detector, then by row, and weights are one
    array ``[E]`` in this order. A pytree of its two arrays, which may be traced.

    Attributes:
      first: int32 ``[T * R + 1]``, the first edge of each row; row ``r`` of detector ``t`` is at
        ``t * R + r``, and the last element is ``E``.
      target: int32 ``[E]``, the output of each edge.
      n_detectors, n_rows, n_outputs: ``T``, ``R`` and the number of outputs.
      width: number of edges that pure-JAX kernels read at once. It does not affect results.

    Source: docs/semantics.md, section 4.

    Example:
      >>> from lutjax.wiring import from_edges
      >>> edges = from_edges([0, 0, 1], [1, 1, 0], [2, 0, 2], n_detectors=2, n_rows=2, n_outputs=3)
      >>> edges.size, edges.counts.tolist()
      (3, [[0, 2], [1, 0]])
    """

    first: Int[Array, " bounds"]
    target: Int[Array, " edges"]
    n_detectors: int
    n_rows: int
    n_outputs: int
    width: int

    @property
    def size(self) -> int:
        """Edge count, ``E``."""
        return int(self.target.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return 4 * (self.size + self.n_detectors * self.n_rows + 1)

    @property
    def counts(self) -> Any:
        """Edge count per row, int32 ``[T, R]``."""
        difference = np.diff if isinstance(self.first, np.ndarray) else jnp.diff
        return difference(self.first).reshape(self.n_detectors, self.n_rows)

    def check(self, where: str) -> "Edges":
        """Return the edges; raise ValueError if concrete arrays are not a valid edge list."""
        if is_concrete(self.first) and is_concrete(self.target):
            check_bounds(where, np.asarray(self.first), self.size)
            check_ids(where, "target", np.asarray(self.target), self.n_outputs, "outputs")
        return self


def check_ids(where: str, name: str, ids: np.ndarray, n: int, what: str) -> None:
    """Raise ValueError for the first edge whose id is not below `n`."""
    wrong = np.flatnonzero((ids < 0) | (ids >= n))
    if wrong.size:
        e = int(wrong[0])
        raise ValueError(
            f"{where}: edge {e} has {name} {ids[e]}, and there are {n} {what}: "
            f"{f'0 to {n - 1}' if n else 'none'}."
        )


def check_bounds(where: str, first: np.ndarray, n_edges: int) -> None:
    """Raise ValueError if the row bounds do not partition the edges into consecutive rows."""
    falls = np.flatnonzero(np.diff(first) < 0)
    if first[0] != 0 or first[-1] != n_edges or falls.size:
        fall = ""
        if falls.size:
            row = int(falls[0])
            fall = f" and falls from {first[row]} to {first[row + 1]} after row {row}"
        raise ValueError(
            f"{where}: first goes from {first[0]} to {first[-1]}{fall}; "
            f"it must rise from 0 to the number of edges, {n_edges}."
        )


def width_of(counts: np.ndarray) -> int:
    """Return the cheapest number of edges per kernel read for rows with these edge counts."""
    if not counts.size or not counts.max():
        return 1
    lengths, n_rows = np.unique(counts, return_counts=True)
    widths = np.arange(1, min(int(lengths[-1]), _WIDEST) + 1)
    reads = np.maximum(-(-lengths[None, :] // widths[:, None]), 1)
    # A further read of a row costs about as much as four more edges; an empty row costs one read.
    costs = ((widths[:, None] + 4) * reads * n_rows[None, :]).sum(1)
    return int(widths[np.argmin(costs)])

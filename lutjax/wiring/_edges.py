"""Edge lists: built from ids, converted back to ids, and changed between training steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from lutjax._typing import Array
from lutjax.arguments import format_value
from lutjax.values._edges import Edges, check_ids, width_of

_MOST = 2**31 - 1  # int32

Ids = Int[Array, " edges"] | list[int]


class EdgeIds(NamedTuple):
    """Detector, row and output of each edge, int32 ``[E]`` each."""

    detector: np.ndarray
    row: np.ndarray
    target: np.ndarray


class Changed(NamedTuple):
    """Edge list after a change.

    Attributes:
      edges: the new list.
      source: int32, the old index of each edge, or -1 for a new edge.
      added: int32, the index of each edge in the added ids, or -1.
      n_before: number of edges in the old list.
    """

    edges: Edges
    source: np.ndarray
    added: np.ndarray
    n_before: int


def from_edges(
    detector: Ids, row: Ids, target: Ids, *, n_detectors: int, n_rows: int, n_outputs: int
) -> Edges:
    """Return an edge list of tables for `lutjax.sparse_lookup` and `lutjax.sparse_lut`.

    Edge ``e`` adds its weight to output ``target[e]`` where detector ``detector[e]`` addresses row
    ``row[e]``. Edges are sorted by detector, then by row; weights are one array ``[E]`` in the same
    order. A row may have any number of edges, including none or several with one target.

    Args:
      detector, row, target: integers ``[E]``.
      n_detectors, n_rows, n_outputs: ``T``, ``R`` and ``O``; a detector of ``C`` bits has ``2**C``
        rows.

    Raises:
      ValueError: the lists differ in length or are not sorted, a detector, row or output does not
        exist, or ids do not fit int32. The error names the edge.
      TypeError: ids are not integers.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax.wiring import from_edges
      >>> edges = from_edges([0, 0, 0], [0, 1, 1], [2, 0, 2], n_detectors=1, n_rows=2, n_outputs=3)
      >>> x, anchors = jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]])
      >>> weights = jnp.array([1.0, 7.0, 8.0])
      >>> lutjax.sparse_lut(x, weights, anchors, edges)
      Array([7., 0., 8.], dtype=float32)
    """
    where = "from_edges"
    _check_sizes(where, n_detectors=n_detectors, n_rows=n_rows, n_outputs=n_outputs)
    ids = _ids_of(where, detector, row, target)
    check_ids(where, "detector", ids.detector, n_detectors, "detectors")
    check_ids(where, "row", ids.row, n_rows, "rows of a detector")
    check_ids(where, "target", ids.target, n_outputs, "outputs")
    place = _row_numbers(ids, n_rows)
    # Weights are stored in the order of the edges. Sorting them here would leave the caller's
    # weights in another order, so unsorted edges are an error.
    falls = np.flatnonzero(np.diff(place) < 0)
    if falls.size:
        e = int(falls[0]) + 1
        raise ValueError(
            f"{where}: edge {e} has detector {ids.detector[e]} and row {ids.row[e]}, after "
            f"detector {ids.detector[e - 1]} and row {ids.row[e - 1]}; edges and their weights "
            "must be sorted by detector and row, as by numpy.lexsort((row, detector))."
        )
    return _from_row_numbers(place, ids.target, n_detectors, n_rows, n_outputs)


def edges(connectivity: Edges | Int[Array, "detectors rows slots"]) -> EdgeIds:
    """Return detector, row and target of each edge.

    Args:
      connectivity: an edge list, or targets ``[T, R, K]`` of `lutjax.sparse_lookup`, -1 for an
        unused slot. Weights ``[T, R, K]`` of the same edges are ``weights[targets >= 0]``, in this
        order.

    Raises:
      TypeError, ValueError: it is neither.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import numpy as np
      >>> from lutjax.wiring import edges, from_edges
      >>> ids = edges(np.array([[[2, 1], [-1, 0]]]))
      >>> [a.tolist() for a in ids]
      [[0, 0, 0], [0, 0, 1], [2, 1, 0]]
      >>> from_edges(*ids, n_detectors=1, n_rows=2, n_outputs=3).counts.tolist()
      [[2, 1]]
    """
    if isinstance(connectivity, Edges):
        n_rows = connectivity.n_detectors * connectivity.n_rows
        place = np.repeat(np.arange(n_rows), np.diff(np.asarray(connectivity.first)))
        detector, row = np.divmod(place, max(connectivity.n_rows, 1))
        return _as_int32(detector, row, np.asarray(connectivity.target))
    targets = np.asarray(connectivity)
    if targets.ndim != 3 or not np.issubdtype(targets.dtype, np.integer):
        raise ValueError(
            f"edges: connectivity is {format_value(connectivity)}; expected an edge list, or "
            "integers [detectors, rows, slots]."
        )
    detector, row, slot = np.nonzero(targets >= 0)
    return _as_int32(detector, row, targets[detector, row, slot])


def remove_edges(connectivity: Edges, keep: Bool[Array, " edges"]) -> Changed:
    """Return an edge list without some of its edges.

    `carry_over` transfers weights and optimizer state to the new list.

    Args:
      connectivity: the edge list.
      keep: ``[E]``, False for removed edges.

    Raises:
      ValueError: `keep` is not one bool for each edge.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import numpy as np
      >>> from lutjax.wiring import carry_over, from_edges, remove_edges
      >>> edges = from_edges([0, 0, 0], [0, 1, 1], [2, 0, 2], n_detectors=1, n_rows=2, n_outputs=3)
      >>> weights = np.array([1.0, 0.0, 8.0])
      >>> fewer = remove_edges(edges, weights != 0)
      >>> fewer.edges.target.tolist(), carry_over(weights, fewer).tolist()
      ([2, 2], [1.0, 8.0])
    """
    is_kept = np.asarray(keep)
    if is_kept.shape != (connectivity.size,) or is_kept.dtype != bool:
        raise ValueError(
            f"remove_edges: keep is {format_value(keep)}; "
            f"expected bool[{connectivity.size}], one for each edge."
        )
    ids, n = edges(connectivity), connectivity
    source = np.flatnonzero(is_kept).astype(np.int32)
    place = _row_numbers(EdgeIds(*(a[is_kept] for a in ids)), n.n_rows)
    changed = _from_row_numbers(place, ids.target[is_kept], n.n_detectors, n.n_rows, n.n_outputs)
    return Changed(changed, source, np.full(source.shape, -1, np.int32), n.size)


def add_edges(connectivity: Edges, detector: Ids, row: Ids, target: Ids) -> Changed:
    """Return an edge list with additional edges, placed after the existing edges of their row.

    Args:
      connectivity: the edge list.
      detector, row, target: integers ``[N]`` of the new edges, in any order.

    Raises:
      ValueError, TypeError: as in `from_edges`, for the new edges.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import numpy as np
      >>> from lutjax.wiring import add_edges, carry_over, from_edges
      >>> edges = from_edges([0, 0], [0, 1], [2, 0], n_detectors=1, n_rows=2, n_outputs=3)
      >>> more = add_edges(edges, [0], [0], [1])
      >>> more.edges.target.tolist(), carry_over(np.array([1.0, 8.0]), more, new=0.5).tolist()
      ([2, 1, 0], [1.0, 0.5, 8.0])
    """
    where, before = "add_edges", connectivity
    new = _ids_of(where, detector, row, target)
    check_ids(where, "detector", new.detector, before.n_detectors, "detectors")
    check_ids(where, "row", new.row, before.n_rows, "rows of a detector")
    check_ids(where, "target", new.target, before.n_outputs, "outputs")
    old = edges(before)
    n_old, n_new = old.target.size, new.target.size
    place = np.concatenate([_row_numbers(old, before.n_rows), _row_numbers(new, before.n_rows)])
    # Stable, so that new edges follow the old edges of their row and both keep their order.
    order = np.argsort(place, kind="stable")
    targets = np.concatenate([old.target, new.target])[order]
    source = np.concatenate([np.arange(n_old), np.full(n_new, -1)])[order].astype(np.int32)
    added = np.concatenate([np.full(n_old, -1), np.arange(n_new)])[order].astype(np.int32)
    changed = _from_row_numbers(
        place[order], targets, before.n_detectors, before.n_rows, before.n_outputs
    )
    return Changed(changed, source, added, before.size)


def carry_over(arrays: Any, changed: Changed, *, new: Any = 0) -> Any:
    """Return edge arrays for a changed list: kept edges keep their values, new edges get `new`.

    Args:
      arrays: a pytree of arrays ``[E]``: weights, rates, or optimizer state, such as
        ``state.rows["weights"]``. Scalars are unchanged.
      changed: from `remove_edges` or `add_edges`.
      new: a number, or an array with one value per added edge, in their order.

    Raises:
      ValueError: the size of `new`, or the number of edges in an array, does not match the change.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import numpy as np
      >>> from lutjax.wiring import carry_over, from_edges, remove_edges
      >>> edges = from_edges([0, 0], [0, 1], [2, 0], n_detectors=1, n_rows=2, n_outputs=3)
      >>> changed = remove_edges(edges, np.array([False, True]))
      >>> carry_over({"velocity": np.array([1.0, 2.0]), "step": 3}, changed)
      {'step': 3, 'velocity': array([2.])}
    """
    n_added = int((changed.added >= 0).sum())
    if np.ndim(new) and np.shape(new) != (n_added,):
        raise ValueError(
            f"carry_over: new has shape {list(np.shape(new))}; expected a number, or one per added "
            f"edge ({n_added})."
        )

    def one(a: Any) -> Any:
        if not np.ndim(a):
            return a
        if np.shape(a) != (changed.n_before,):
            raise ValueError(
                f"carry_over: an array has shape {list(np.shape(a))}; "
                f"the list had {changed.n_before} edges."
            )
        module: Any = np if isinstance(a, np.ndarray) else jnp
        # Edges without a source read index 0, whose value is not selected; it must exist.
        if not a.shape[0]:
            a = module.zeros((1,), a.dtype)
        fresh = module.asarray(new, a.dtype)
        if fresh.ndim and n_added:
            fresh = fresh[np.maximum(changed.added, 0)]
        elif fresh.ndim:
            fresh = module.zeros(changed.added.shape, a.dtype)
        return module.where(changed.source >= 0, a[np.maximum(changed.source, 0)], fresh)

    return jax.tree.map(one, arrays)


def _check_sizes(where: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 0:
            raise ValueError(
                f"{where}: {name} is {format_value(size)}; expected a whole number from 0 on."
            )
        if size > _MOST:
            raise ValueError(
                f"{where}: {name} is {size}; ids are int32, so there are at most {_MOST}."
            )
    if sizes["n_detectors"] * sizes["n_rows"] >= _MOST:
        raise ValueError(
            f"{where}: n_detectors is {sizes['n_detectors']} and n_rows {sizes['n_rows']}; row "
            f"numbers are int32, so there must be fewer than {_MOST} rows in all."
        )


def _ids_of(where: str, detector: Ids, row: Ids, target: Ids) -> EdgeIds:
    """Return ids as int32, after checks of their lengths and range."""
    arrays = dict(zip(EdgeIds._fields, map(np.asarray, (detector, row, target)), strict=True))
    for name, ids in arrays.items():
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(
                f"{where}: {name} is {ids.dtype}{list(ids.shape)}; expected integers [edges]."
            )
        if ids.ndim != 1:
            raise ValueError(
                f"{where}: {name} is {ids.dtype}{list(ids.shape)}; expected integers [edges]."
            )
    sizes = {name: ids.size for name, ids in arrays.items()}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{n} of {name}" for name, n in sizes.items())
        raise ValueError(
            f"{where}: there are {text}; each edge needs one of each, but edge "
            f"{min(sizes.values())} lacks one."
        )
    if max(sizes.values()) > _MOST:
        raise ValueError(
            f"{where}: there are {max(sizes.values())} edges; edge numbers are int32, so edge "
            f"{_MOST} has none."
        )
    # Not converted first: NumPy would wrap ids beyond int32 to other valid ids.
    for name, ids in arrays.items():
        beyond = np.flatnonzero((ids > _MOST) | (ids < -_MOST))
        if beyond.size:
            e = int(beyond[0])
            raise ValueError(f"{where}: edge {e} has {name} {ids[e]}, which does not fit int32.")
    return _as_int32(*arrays.values())


def _as_int32(*ids: np.ndarray) -> EdgeIds:
    return EdgeIds(*(a.astype(np.int32) for a in ids))


def _row_numbers(ids: EdgeIds, n_rows: int) -> np.ndarray:
    """Return the row index of each edge among the rows of all detectors."""
    # In int64, because the product of int32 ids could wrap before it is compared.
    return ids.detector.astype(np.int64) * n_rows + ids.row


def _from_row_numbers(
    place: np.ndarray, target: np.ndarray, n_detectors: int, n_rows: int, n_outputs: int
) -> Edges:
    counts = np.bincount(place, minlength=n_detectors * n_rows)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Edges(first, target.astype(np.int32), n_detectors, n_rows, n_outputs, width_of(counts))

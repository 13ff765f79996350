"""Sums over addressed rows with sparse outputs."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _edges, _groups, _nan
from lutjax.values._detection import Detection
from lutjax.values._edges import Edges
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class SparseLookup(Call, op="sparse_lookup", table="weights", output="o"):
    """The call of `lutjax.sparse_lookup`.

    Attributes:
      weights: ``[T, R, K]`` floats.
      detection: arrays ``[B, T]``; ids may be out of range.
      targets: int32 ``[T or 1, R or 1, K]``; negative ids mark unused slots, and other ids may be
        out of range.
      n_outputs: ``O``. accumulate: see the op.

    Output and its cotangent: ``[B, O]``. Differentiable: `weights`, `detection`.
    """

    weights: jax.Array = shared("t r k")
    detection: Detection = batched(1, "t")
    targets: jax.Array = shared("t r k")
    n_outputs: int = static()
    accumulate: FixedPoint | None = static(default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class EdgeLookup(Call, op="sparse_lookup", table="weights", output="o"):
    """The call of `lutjax.sparse_lookup` with an edge list.

    Attributes:
      weights: ``[E]`` floats, one per edge.
      detection: arrays ``[B, T]``; ids may be out of range.
      first: int32 ``[T * R + 1]``, each row's first edge. targets: int32 ``[E]``; ids may be out of
        range.
      n_rows, n_outputs: ``R`` and ``O``. width: see `lutjax.wiring.Edges`. accumulate: see the op.

    Output and its cotangent: ``[B, O]``. Differentiable: `weights`, `detection`.
    """

    also: ClassVar[tuple[str, ...]] = ("native",)

    # No detector letter: edge lists are replicated.
    weights: jax.Array = shared("e")
    detection: Detection = batched(1, "n")
    first: jax.Array = shared("f")
    targets: jax.Array = shared("e")
    n_rows: int = static()
    n_outputs: int = static()
    width: int = static()
    accumulate: FixedPoint | None = static(default=None)

    def row_call(self) -> Call:
        # Rows do not depend on values: tables without outputs have the same reads.
        shape = self.detection.shape[-1], self.n_rows, 0
        none = jnp.zeros(shape, self.weights.dtype), self.detection, jnp.zeros(shape, jnp.int32)
        return SparseLookup(*none, n_outputs=self.n_outputs, accumulate=self.accumulate)

    @property
    def plain(self) -> str | None:
        return (
            "reads as many slots of each row: lists of edges are for plain JAX and native kernels"
        )


def sparse_lookup(
    weights: Float[Array, "detectors rows slots"] | Float[Array, " edges"],
    detection: Detection,
    targets: Int[Array, "#detectors #rows slots"] | Edges,
    n_outputs: int | None = None,
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any outputs"]:
    """Sum addressed rows into selected outputs.

    Slot ``k`` of row ``r`` of detector ``t`` adds ``weights[t, r, k]`` to output
    ``targets[t, r, k]``. Equal to `lutjax.lookup` with a table with zeros elsewhere.

    Definition for one sample. ``dy`` is the output cotangent, ``dmargin`` the margin cotangent, and
    ``groups=None`` means 1::

        targets = np.broadcast_to(targets, weights.shape)
        t, index, margin = np.arange(len(weights)), detection.index, detection.margin
        group = np.broadcast_to((t // (len(t) // groups))[:, None, None], targets.shape)
        used = targets[t, index] >= 0
        y = np.zeros((groups, n_outputs))
        np.add.at(y, (group[t, index][used], targets[t, index][used]), weights[t, index][used])

        of_slots = np.where(targets >= 0, dy[group, targets], 0)  # each slot's output cotangent
        of_rows = np.where(targets >= 0, weights * of_slots, 0).sum(axis=-1)
        surrogate_derivative = 0.5 * np.where(margin > 0, 1, -1) / (1 + np.abs(margin)) ** 2
        dmargin = surrogate_derivative * (of_rows[t, index] - of_rows[t, index ^ detection.flip])
        dweights = np.zeros_like(weights)
        dweights[t, index] = of_slots[t, index]  # summed over samples

    Args:
      weights: ``[T, R, K]`` float32, bfloat16, float16 or float64, with ``R == 2**detection.bits``.
      detection: arrays ``[..., T]``.
      targets: int32 ``[T or 1, R or 1, K]``, -1 for an unused slot. Out-of-range traced ids are
        clamped. Or an edge list from `lutjax.wiring.from_edges`, with any number of edges per row.
        Weights are then ``[E]``, one per edge, and time and memory scale with the edges, not the
        longest row.
      n_outputs: number of outputs ``O``. An edge list defines its own.
      groups: number of groups ``G``. The first ``T / G`` tables reach the ``O`` outputs of the
        first group, and so on. None means one group without a group axis.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[..., G, O]`` with `groups`; dtype ``weights.dtype``. 16-bit tables
      are accumulated in float32.

    Large rows are safe as for `lutjax.lookup` if slot ``k`` has the same target in both rows:
    values are then subtracted before multiplication. For different targets, and for edge lists,
    products are subtracted and must be finite.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, rows that do not fit the detection's bits, or
        groups that do not divide the detectors.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> lutjax.sparse_lookup(jnp.array([[[1.0], [7.0]]]), d, jnp.array([[[2]]]), 3)
      Array([0., 0., 7.], dtype=float32)
    """
    op = "sparse_lookup"
    detection = _checks.detection(op, "detection", detection, 1, "[..., detectors]")
    if isinstance(targets, Edges):
        return _lookup_edges(
            weights, detection, targets, n_outputs, groups, accumulate, implementation
        )
    _checks.table(op, weights, detection.shape[-1], detection.bits, "detection")
    n_outputs, n_detectors = _edges.check_targets(op, weights, targets, n_outputs), weights.shape[0]
    accumulate = _checks.accumulation(op, accumulate)
    n_groups = _groups.number(op, groups, n_detectors)
    call = SparseLookup(
        as_jax(weights),
        detection,
        _groups.outputs_apart(as_int32(targets), n_outputs, n_groups, n_detectors),
        n_outputs=n_groups * n_outputs,
        accumulate=accumulate,
    )
    y = _groups.split_groups(apply(call, implementation=implementation), groups)
    return _nan.propagate_nan(y, detection.margin)


def _lookup_edges(
    weights: Any,
    detection: Detection,
    edges: Edges,
    n_outputs: int | None,
    groups: int | None,
    accumulate: FixedPoint | None,
    implementation: Implementation,
) -> jax.Array:
    """Look up an edge list."""
    op, n_detectors = "sparse_lookup", detection.shape[-1]
    _checks.floats(op, "weights", weights, 1, "[edges], one for each edge of targets")
    rule = f"targets has {edges.size} edges, so expected [{edges.size}]"
    _checks.require(weights.shape == (edges.size,), op, "weights", weights, rule)
    of = f"targets has {edges.n_detectors} detectors and {edges.n_rows} rows each"
    fits = edges.n_detectors == n_detectors and edges.n_rows == 2**detection.bits
    _checks.require(
        fits, op, "detection", detection, f"{of}, so it must have as many and {edges.n_rows} rows"
    )
    rule = f"targets has {edges.n_outputs}"
    _checks.require(n_outputs in (None, edges.n_outputs), op, "n_outputs", n_outputs, rule)
    n_groups = _groups.number(op, groups, n_detectors)
    _checks.edges(op, edges)
    first, targets = as_int32(edges.first), as_int32(edges.target)
    if n_groups > 1:
        # As `_groups.outputs_apart`, for edges.
        of_rows = jnp.repeat(_groups.detector_groups(n_detectors, n_groups), edges.n_rows)
        of_edge = jnp.repeat(of_rows, jnp.diff(first), total_repeat_length=edges.size)
        targets = jnp.clip(targets, 0, max(edges.n_outputs - 1, 0)) + edges.n_outputs * of_edge
    call = EdgeLookup(
        as_jax(weights),
        detection,
        first,
        targets,
        n_rows=edges.n_rows,
        n_outputs=n_groups * edges.n_outputs,
        width=edges.width,
        accumulate=_checks.accumulation(op, accumulate),
    )
    y = _groups.split_groups(apply(call, implementation=implementation), groups)
    return _nan.propagate_nan(y, detection.margin)

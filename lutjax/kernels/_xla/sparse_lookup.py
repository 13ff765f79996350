"""`lutjax.sparse_lookup` in plain JAX.

Formula with ``row = index[b, t]`` and slots ``k``::

    y[b, targets[t, row, k]] += weights[t, row, k]
    dweights[t, row, k] += dy[b, targets[t, row, k]]
    dmargin[b, t] = slope(margin) * (sum over k of weights[t, row, k] * dy[b, targets[t, row, k]]
                                     - the same for the flipped row)

Work: one table after the other, so that no array ``[B, T, K]`` exists (`_slot_rows`). Edge lists
use `_edge_lists`. Where one-hot products are faster than gathers (TPUs, see `_row_gathers`), small
tables are expanded to all outputs and read by `lookup`.

Numerics: sums use `addend_dtype`. Row ids and targets are clamped; target -1 is an unused slot.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _edge_lists, _row_updates, lookup
from lutjax.kernels._xla._row_gathers import add, clamp_rows, detectors, slope, uses_one_hot
from lutjax.kernels._xla._slot_rows import SlotRows
from lutjax.ops.lookup import Lookup
from lutjax.ops.sparse_lookup import EdgeLookup, SparseLookup
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype, addends, result
from lutjax.values._row_rules import RowState


def forward(call: SparseLookup | EdgeLookup, *, device: Device) -> jax.Array:
    weights, accumulate = call.weights, call.accumulate
    if isinstance(call, EdgeLookup):
        return _edge_lists.forward(call)
    if _as_whole_table(call, device):
        return lookup.forward(whole_table(call), device=device).astype(weights.dtype)
    y = SlotRows.from_call(call).sum_rows(weights, call.detection.index.T, device, accumulate)
    return result(y, weights.dtype, accumulate)


def backward(
    call: SparseLookup | EdgeLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if isinstance(call, EdgeLookup):
        return _edge_lists.backward(call, cotangent, needs)
    if _as_whole_table(call, device):
        cotangents = lookup.backward(whole_table(call), cotangent, needs, device=device)
        return edges_of(call, cotangents)
    weights, d, accumulate, slots = (
        call.weights,
        call.detection,
        call.accumulate,
        SlotRows.from_call(call),
    )
    dtype = accumulator(weights.dtype)
    # Each id is clamped on its own: a flipped id is not the flip of a clamped one.
    index, flipped = (clamp_rows(weights, ids.T) for ids in (d.index, d.index ^ d.flip))
    dy = slots.pad_cotangent(cotangent.astype(dtype))

    def one(d_weights: jax.Array | None, xs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        t, row, other = xs
        if d_weights is not None:
            # Both cotangents in one scan: each gathers the cotangents of the same row.
            d_weights = add(
                d_weights, (t, row), addends(slots.gather_slots(dy, t, row), accumulate)
            )
        difference = (
            slots.change(weights, t, row, other, dy, accumulate) if "detection" in needs else None
        )
        return d_weights, difference

    d_weights = None
    if "weights" in needs:
        d_weights = zeros_varying(weights, weights.shape, addend_dtype(dtype, accumulate))
    d_weights, difference = jax.lax.scan(one, d_weights, (detectors(weights), index, flipped))
    cotangents = {} if d_weights is None else {"weights": d_weights}
    if "detection" in needs:
        cotangents["detection"] = slope(d.margin) * result(difference.T, d.margin.dtype, accumulate)
    return cotangents


def update(
    call: SparseLookup | EdgeLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    if isinstance(call, EdgeLookup):
        return _edge_lists.update(call, cotangent, step)
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: SparseLookup, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call and their maximum per detector."""
    index = clamp_rows(call.weights, call.detection.index.T)

    def visit(detectors: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
        return body(carry, detectors(index), cotangent, None)

    # Hits carry all outputs; `SlotRows.hits` reduces them to the slots of each row.
    return SlotRows.from_call(call).hits(call.weights, (visit, cotangent.shape[0]))


_WHOLE = 2**24  # elements of the largest expanded table


def _as_whole_table(call: SparseLookup, device: Device) -> bool:
    # The expanded table must fit memory: 2**24 float32 are 64 MiB.
    small = math.prod(call.weights.shape[:2]) * call.n_outputs <= _WHOLE
    return small and uses_one_hot(call.weights, call.accumulate, device)


def whole_table(call: SparseLookup) -> Lookup:
    """Expand a call to a lookup with tables ``[T, R, O]``, zero without an edge."""
    # Several slots of a row may share a target: sum, do not assign.
    edge = jnp.where(_is_target(call), addends(call.weights, None)[..., None], 0)
    return Lookup(jnp.sum(edge, 2), call.detection, accumulate=call.accumulate)


def edges_of(call: SparseLookup, cotangents: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gather the `whole_table` cotangents at the targets, ``[T, R, K]``; 0 for unused slots."""
    if "weights" not in cotangents:
        return cotangents
    table = cotangents["weights"]
    return {**cotangents, "weights": jnp.sum(jnp.where(_is_target(call), table[:, :, None], 0), -1)}


def _is_target(call: SparseLookup) -> jax.Array:
    """Return a mask for the outputs each slot reaches, ``[T or 1, R or 1, K, O]``.

    XLA fuses it and stores nothing.
    """
    targets = jnp.clip(call.targets, -1, call.n_outputs - 1)[..., None]
    return targets == jax.lax.broadcasted_iota(jnp.int32, (*targets.shape[:-1], call.n_outputs), 3)

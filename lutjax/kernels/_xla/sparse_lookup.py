"""`lutjax.sparse_lookup` in plain JAX: one detector after the other, so that no ``[B, T, K]`` array exists.

``y[b, targets[t, row, k]] += weights[t, row, k]`` with ``row = index[b, t]``; ``dweights[t, row, k] += dy[b, targets[t, row, k]]``;
``dmargin[b, t] = slope(margin) * (sum_k weights[t, row, k] dy[b, targets[t, row, k]] - the same of the flipped row)``.

Where products with one-hot matrices are faster than gathers (see `_row_gathers`), as a look-up of the whole table.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._dtypes import accumulator
from lutjax._fixed_point import addend_dtype, addends, result
from lutjax._row_rules import RowState
from lutjax.kernels._xla import _row_updates, lookup
from lutjax.kernels._xla._row_gathers import add, by_one_hot, clamped, detectors, read, slope
from lutjax.kernels.contract import Step
from lutjax.kernels.registry import Device
from lutjax.ops.lookup import Lookup
from lutjax.ops.sparse_lookup import SparseLookup


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    weights, n_outputs, accumulate = call.weights, call.n_outputs, call.accumulate
    if _as_whole_table(call, device):
        return lookup.forward(whole_table(call), device=device).astype(weights.dtype)
    sample, index, edges = _prepared(call, call.detection.index)

    def step(y: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        t, row = of
        values = addends(read(weights, t, row), accumulate)
        return add(y, (sample, edges(t, row)), values), None

    y = zeros_varying(index, (index.shape[1], n_outputs + 1), addend_dtype(weights.dtype, accumulate))
    y, _ = jax.lax.scan(step, y, (detectors(weights), index))
    return result(y[:, :n_outputs], weights.dtype, accumulate)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _as_whole_table(call, device):
        found = lookup.backward(whole_table(call), cotangent, needs, device=device)
        return edges_of(call, found)
    weights, d, accumulate, n_outputs = call.weights, call.detection, call.accumulate, call.n_outputs
    dtype = accumulator(weights.dtype)
    sample, index, edges = _prepared(call, d.index)
    flipped = clamped(weights, (d.index ^ d.flip).T)
    _, dy = with_unused(call.targets, cotangent.astype(dtype))

    def of_outputs(t: jax.Array, row: jax.Array) -> jax.Array:
        return read(dy, sample, edges(t, row))

    def values(t: jax.Array, row: jax.Array) -> jax.Array:
        return jnp.where(edges(t, row) < n_outputs, read(weights, t, row).astype(dtype), 0)

    def change(t: jax.Array, row: jax.Array, other: jax.Array) -> jax.Array:
        """``<dy, row - other row>``: where both reach one output, values are subtracted before they are multiplied."""
        value, other_value, dy_row = values(t, row), values(t, other), of_outputs(t, row)
        total = addends((value - other_value) * dy_row, accumulate)
        if call.targets.shape[1] > 1:
            apart = addends(value * dy_row, accumulate)
            apart -= addends(other_value * of_outputs(t, other), accumulate)
            total = jnp.where(edges(t, row) == edges(t, other), total, apart)
        return jnp.sum(total, -1, dtype=total.dtype)

    def one(d_weights: jax.Array | None, of: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        t, row, other = of
        if d_weights is not None:
            d_weights = add(d_weights, (t, row), addends(of_outputs(t, row), accumulate))
        return d_weights, change(t, row, other) if "detection" in needs else None

    d_weights = None
    if "weights" in needs:
        d_weights = zeros_varying(weights, weights.shape, addend_dtype(dtype, accumulate))
    d_weights, difference = jax.lax.scan(one, d_weights, (detectors(weights), index, flipped))
    found = {} if d_weights is None else {"weights": d_weights}
    if "detection" in needs:
        found["detection"] = slope(d.margin) * result(difference.T, d.margin.dtype, accumulate)
    return found


def update(
    call: SparseLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: SparseLookup, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call, see `lutjax.kernels._xla.lookup.hits`."""
    index = clamped(call.weights, call.detection.index.T)
    targets, dy = with_unused(call.targets, cotangent)
    sample = jnp.arange(dy.shape[0], dtype=jnp.int32)[:, None]

    def visit(detectors: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
        rows = detectors(index)
        lists = detectors(targets) if targets.shape[0] > 1 else targets
        number = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
        outputs = _of_list(lists, number, rows)
        return body(carry, rows, read(dy, sample, outputs), None)

    return visit, dy.shape[0]


_WHOLE = 2**24  # numbers of the largest table that is made whole


def _as_whole_table(call: SparseLookup, device: Device) -> bool:
    small = math.prod(call.weights.shape[:2]) * call.n_outputs <= _WHOLE
    return small and by_one_hot(call.weights, call.accumulate, device)


def whole_table(call: SparseLookup) -> Lookup:
    """Return the look-up of a table ``[T, R, O]`` that adds as much to each output, zero where no edge is."""
    edge = jnp.where(_is_target(call), addends(call.weights, None)[..., None], 0)
    return Lookup(jnp.sum(edge, 2), call.detection, accumulate=call.accumulate)


def edges_of(call: SparseLookup, cotangents: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the cotangents of `whole_table` with that of the table at its targets alone, ``[T, R, K]``; 0 for unused slots."""
    if "weights" not in cotangents:
        return cotangents
    table = cotangents["weights"]
    return {**cotangents, "weights": jnp.sum(jnp.where(_is_target(call), table[:, :, None], 0), -1)}


def _is_target(call: SparseLookup) -> jax.Array:
    """``[T or 1, R or 1, K, O]``; compared, not scattered: the compiler stores neither this nor the products."""
    targets = jnp.clip(call.targets, -1, call.n_outputs - 1)[..., None]
    return targets == jax.lax.broadcasted_iota(jnp.int32, (*targets.shape[:-1], call.n_outputs), 3)


def _prepared(call: SparseLookup, index: jax.Array) -> tuple[Any, ...]:
    """Sample ids ``[B, 1]``, rows ``[T, B]``, and the targets of a detector's rows, unused ones behind the last output."""
    edges = functools.partial(_of_list, _behind_last(call.targets, call.n_outputs))
    sample = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
    return sample, clamped(call.weights, index.T), edges


def _of_list(targets: jax.Array, t: jax.Array, row: jax.Array) -> jax.Array:
    """The targets of rows of detectors, of which all detectors or all rows may share one list."""
    return read(
        targets, t if targets.shape[0] > 1 else 0, row if targets.shape[1] > 1 else jnp.zeros_like(row)
    )


def with_unused(targets: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Targets, unused ones behind the last output, and a cotangent ``[B, O + 1]`` that is zero there."""
    return _behind_last(targets, dy.shape[1]), jnp.pad(dy, ((0, 0), (0, 1)))


def _behind_last(targets: jax.Array, n_outputs: int) -> jax.Array:
    targets = jnp.clip(targets, -1, n_outputs - 1)
    return jnp.where(targets < 0, n_outputs, targets)

"""`lutjax.sparse_lookup` in plain JAX: one detector after the other, so that no ``[B, T, K]`` array exists.

Where products with one-hot matrices are faster than gathers (see `_rows`), as a look-up of the whole table.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels._xla import lookup
from lutjax.kernels._xla._rows import add, by_one_hot, clamped, detectors, read, slope
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    detection: Detection,
    targets: jax.Array,
    *,
    n_outputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    if _as_whole_table(weights, n_outputs, accumulate, device):
        table = whole_table(weights, targets, n_outputs)
        y = lookup.forward(table, detection, accumulate=accumulate, device=device)
        return y.astype(weights.dtype)
    sample, index, edges = _prepared(weights, detection.index, targets, n_outputs)

    def step(y: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        t, row = of
        values = addends(read(weights, t, row), accumulate)
        return add(y, (sample, edges(t, row)), values), None

    y = zeros_varying(index, (index.shape[1], n_outputs + 1), addend_dtype(weights.dtype, accumulate))
    y, _ = jax.lax.scan(step, y, (detectors(weights), index))
    return result(y[:, :n_outputs], weights.dtype, accumulate)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    n_outputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    weights, d, targets = saved
    if _as_whole_table(weights, n_outputs, accumulate, device):
        table = whole_table(weights, targets, n_outputs)
        d_table, d_margin = lookup.backward((table, d), dy, needs[:2], accumulate=accumulate, device=device)
        return None if d_table is None else of_edges(d_table, targets, n_outputs), d_margin, None
    dtype = accumulator(weights.dtype)
    sample, index, edges = _prepared(weights, d.index, targets, n_outputs)
    flipped = clamped(weights, (d.index ^ d.flip).T)
    _, dy = with_unused(targets, dy.astype(dtype))

    def cotangent(t: jax.Array, row: jax.Array) -> jax.Array:
        return read(dy, sample, edges(t, row))

    def values(t: jax.Array, row: jax.Array) -> jax.Array:
        return jnp.where(edges(t, row) < n_outputs, read(weights, t, row).astype(dtype), 0)

    def change(t: jax.Array, row: jax.Array, other: jax.Array) -> jax.Array:
        """``<dy, row - other row>``: where both reach one output, values are subtracted before they are multiplied."""
        value, other_value, dy_row = values(t, row), values(t, other), cotangent(t, row)
        total = addends((value - other_value) * dy_row, accumulate)
        if targets.shape[1] > 1:
            apart = addends(value * dy_row, accumulate)
            apart -= addends(other_value * cotangent(t, other), accumulate)
            total = jnp.where(edges(t, row) == edges(t, other), total, apart)
        return jnp.sum(total, -1, dtype=total.dtype)

    def one(d_weights: jax.Array | None, of: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        t, row, other = of
        if d_weights is not None:
            d_weights = add(d_weights, (t, row), addends(cotangent(t, row), accumulate))
        return d_weights, change(t, row, other) if needs[1] else None

    d_weights = zeros_varying(weights, weights.shape, addend_dtype(dtype, accumulate)) if needs[0] else None
    d_weights, difference = jax.lax.scan(one, d_weights, (detectors(weights), index, flipped))
    d_margin = slope(d.margin) * result(difference.T, d.margin.dtype, accumulate) if needs[1] else None
    return d_weights, d_margin, None


_WHOLE = 2**24  # numbers of the largest table that is made whole


def _as_whole_table(
    weights: jax.Array, n_outputs: int, accumulate: FixedPoint | None, device: Device
) -> bool:
    small = math.prod(weights.shape[:2]) * n_outputs <= _WHOLE
    return small and by_one_hot(weights, accumulate, device)


def whole_table(weights: jax.Array, targets: jax.Array, n_outputs: int) -> jax.Array:
    """The table ``[T, R, O]`` that adds as much to each output, zero where no edge is."""
    edge = jnp.where(_is_target(targets, n_outputs), addends(weights, None)[..., None], 0)
    return jnp.sum(edge, 2)


def of_edges(table: jax.Array, targets: jax.Array, n_outputs: int) -> jax.Array:
    """The numbers of a whole table at the targets, ``[T, R, K]``; 0 for unused slots."""
    return jnp.sum(jnp.where(_is_target(targets, n_outputs), table[:, :, None], 0), -1)


def _is_target(targets: jax.Array, n_outputs: int) -> jax.Array:
    """``[T or 1, R or 1, K, O]``; compared, not scattered: the compiler stores neither this nor the products."""
    targets = jnp.clip(targets, -1, n_outputs - 1)[..., None]
    return targets == jax.lax.broadcasted_iota(jnp.int32, (*targets.shape[:-1], n_outputs), 3)


def _prepared(weights: jax.Array, index: jax.Array, targets: jax.Array, n_outputs: int) -> tuple[Any, ...]:
    """Sample ids ``[B, 1]``, rows ``[T, B]``, and the targets of a detector's rows, unused ones behind the last output."""
    targets = _behind_last(targets, n_outputs)

    def edges(t: jax.Array, row: jax.Array) -> jax.Array:
        return read(
            targets,
            t if targets.shape[0] > 1 else 0,
            row if targets.shape[1] > 1 else jnp.zeros_like(row),
        )

    sample = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
    return sample, clamped(weights, index.T), edges


def with_unused(targets: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Targets, unused ones behind the last output, and a cotangent ``[B, O + 1]`` that is zero there."""
    return _behind_last(targets, dy.shape[1]), jnp.pad(dy, ((0, 0), (0, 1)))


def _behind_last(targets: jax.Array, n_outputs: int) -> jax.Array:
    targets = jnp.clip(targets, -1, n_outputs - 1)
    return jnp.where(targets < 0, n_outputs, targets)

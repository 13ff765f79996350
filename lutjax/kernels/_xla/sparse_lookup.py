"""`lutjax.sparse_lookup` in plain JAX: one detector after the other, so that no ``[B, T, K]`` array exists."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels._xla._rows import add, clamped, detectors, read, slope
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
    dtype = accumulator(weights.dtype)
    sample, index, edges = _prepared(weights, d.index, targets, n_outputs)
    flipped = clamped(weights, (d.index ^ d.flip).T)
    _, dy = with_unused(targets, dy.astype(dtype))

    def cotangent(t: jax.Array, row: jax.Array) -> jax.Array:
        return read(dy, sample, edges(t, row))

    def product(t: jax.Array, row: jax.Array) -> jax.Array:
        values = addends(read(weights, t, row).astype(dtype) * cotangent(t, row), accumulate)
        return jnp.sum(values, -1, dtype=values.dtype)

    def one(d_weights: jax.Array | None, of: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        t, row, other = of
        if d_weights is not None:
            d_weights = add(d_weights, (t, row), addends(cotangent(t, row), accumulate))
        return d_weights, product(t, row) - product(t, other) if needs[1] else None

    d_weights = zeros_varying(weights, weights.shape, addend_dtype(dtype, accumulate)) if needs[0] else None
    d_weights, difference = jax.lax.scan(one, d_weights, (detectors(weights), index, flipped))
    d_margin = slope(d.margin) * result(difference.T, d.margin.dtype, accumulate) if needs[1] else None
    return d_weights, d_margin, None


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

"""`lutjax.lookup` on TensorCores."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.tpu import _products, _resident
from lutjax.kernels._pallas.tpu._tables import resident
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels._xla._rows import slope
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array, detection: Detection, *, accumulate: FixedPoint | None, device: Device
) -> jax.Array:
    if 0 in (weights.size, detection.index.size):
        return plain.forward(weights, detection, accumulate=accumulate, device=device)
    if resident(weights.shape, device):
        y = _resident.sum_rows(weights, detection.index, device)
    else:
        y = _products.sum_rows(weights, detection.index)
    return y.astype(weights.dtype)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    weights, d = saved
    if 0 in (weights.size, d.index.size):
        return plain.backward(saved, dy, needs, accumulate=accumulate, device=device)
    d_weights = d_margin = None
    if needs[0]:
        d_weights = add_rows(None, weights.shape, d.index, dy, device)
    if needs[1]:
        if resident(weights.shape, device):
            difference = _resident.differences(weights, d.index, d.index ^ d.flip, dy, device)
        else:
            difference = _products.differences(weights, d.index, d.index ^ d.flip, dy)
        d_margin = slope(d.margin) * difference.astype(d.margin.dtype)
    return d_weights, d_margin


def add_rows(
    total: jax.Array | None, shape: tuple[int, ...], index: jax.Array, values: jax.Array, device: Device
) -> jax.Array:
    """Tables of a shape, or zeros, plus ``values [B, O]`` at each row that was read: ``[T, R, O]`` float32."""
    if resident(shape, device):
        return _resident.add_rows(total, shape, index, values, device)
    return _products.add_rows(total, shape, index, values)

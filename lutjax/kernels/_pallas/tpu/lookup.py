"""`lutjax.lookup` on TensorCores."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.tpu import _products
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels._xla._rows import slope
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array, detection: Detection, *, accumulate: FixedPoint | None, device: Device
) -> jax.Array:
    if 0 in (weights.size, detection.index.size):
        return plain.forward(weights, detection, accumulate=accumulate, device=device)
    return _products.sum_rows(weights, detection.index).astype(weights.dtype)


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
        d_weights = _products.add_rows(None, weights.shape, d.index, dy)
    if needs[1]:
        difference = _products.differences(weights, d.index, d.index ^ d.flip, dy)
        d_margin = slope(d.margin) * difference.astype(d.margin.dtype)
    return d_weights, d_margin

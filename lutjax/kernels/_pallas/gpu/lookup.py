"""`lutjax.lookup` in Mosaic GPU, for tables of few rows: what it reads comes from shared memory, and what it adds is a product
of tensor cores."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.gpu import _one_hot, _rows
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels._xla._rows import slope
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array, detection: Detection, *, accumulate: FixedPoint | None, device: Device
) -> jax.Array:
    if 0 in (*weights.shape, len(detection.index)):
        return plain.forward(weights, detection, accumulate=accumulate, device=device)
    return _rows.sum_rows(weights, detection.index.T).astype(weights.dtype)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    weights, d = saved
    if 0 in (*weights.shape, len(d.index)):
        return plain.backward(saved, dy, needs, accumulate=accumulate, device=device)
    index = d.index.T
    d_weights = d_margin = None
    if needs[0]:
        d_weights = _one_hot.add_rows(index, dy, weights.shape[1])
    if needs[1]:
        difference = _rows.differences(weights, index, index ^ d.flip.T, dy)
        d_margin = slope(d.margin) * difference.astype(d.margin.dtype)
    return d_weights, d_margin

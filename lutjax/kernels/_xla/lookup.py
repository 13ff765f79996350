"""`lutjax.lookup` in plain JAX, and by any other module that reads rows as `_rows` does."""

import functools
from types import ModuleType
from typing import Any

import jax

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels._xla import _rows
from lutjax.kernels.registry import Device


def forward_by(
    rows: ModuleType,
    weights: jax.Array,
    detection: Detection,
    *,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    y = rows.sum_rows(weights, detection.index.T, device, accumulate)
    return result(y, weights.dtype, accumulate)


def backward_by(
    rows: ModuleType,
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    weights, d = saved
    index, margin = d.index.T, d.margin.T
    d_weights = d_margin = None
    if needs[0]:
        zeros = zeros_varying(weights, weights.shape, addend_dtype(weights.dtype, accumulate))
        d_weights = _rows.add_rows(zeros, index, addends(dy, accumulate), device)
    if needs[1]:
        main_and_flipped = index, index ^ d.flip.T
        (difference,) = rows.differences(weights, main_and_flipped, dy, device, accumulate)
        d_margin = (_rows.slope(margin) * difference.astype(margin.dtype)).T
    return d_weights, d_margin


forward = functools.partial(forward_by, _rows)
backward = functools.partial(backward_by, _rows)

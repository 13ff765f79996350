"""`lutjax.lookup` in plain JAX."""

from typing import Any

import jax

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax.kernels._xla import _rows
from lutjax.kernels.registry import Device


def forward(weights: jax.Array, detection: Detection, *, device: Device) -> jax.Array:
    return _rows.sum_rows(weights, detection.index.T, device).astype(weights.dtype)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    weights, d = saved
    index, margin = d.index.T, d.margin.T
    d_weights = d_margin = None
    if needs[0]:
        zeros = zeros_varying(weights, weights.shape, accumulator(weights.dtype))
        d_weights = _rows.add_rows(zeros, index, dy, device)
    if needs[1]:
        main, flipped = _rows.products(weights, (index, index ^ d.flip.T), dy, device)
        d_margin = (_rows.slope(margin) * (main - flipped).astype(margin.dtype)).T
    return d_weights, d_margin

"""`lutjax.sparse_lookup` on TensorCores: a look-up of the whole table, which is zero where no edge is."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.tpu import lookup
from lutjax.kernels._xla.sparse_lookup import of_edges, whole_table
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
    table = whole_table(weights, targets, n_outputs)
    y = lookup.forward(table, detection, accumulate=accumulate, device=device)
    return y.astype(weights.dtype)


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
    table = whole_table(weights, targets, n_outputs)
    d_table, d_margin = lookup.backward((table, d), dy, needs[:2], accumulate=accumulate, device=device)
    return None if d_table is None else of_edges(d_table, targets, n_outputs), d_margin, None

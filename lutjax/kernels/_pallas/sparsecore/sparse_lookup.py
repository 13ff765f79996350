"""`lutjax.sparse_lookup` on SparseCores: values and targets are fetched row by row, and added up or multiplied where
they arrive.

The table's gradient is that of plain JAX: SparseCores do not add to rows in HBM.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.sparsecore import _gather, _sizes
from lutjax.kernels._pallas.sparsecore._rows import ids, in_blocks, out_of_blocks, rows_of
from lutjax.kernels._xla import sparse_lookup as plain
from lutjax.kernels._xla._rows import slope
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
    n_samples, n_detectors = detection.index.shape
    if 0 in (n_samples, n_outputs, *weights.shape):
        return plain.forward(
            weights, detection, targets, n_outputs=n_outputs, accumulate=accumulate, device=device
        )
    cores = _sizes.sparse_cores(device)
    block = samples(weights, n_outputs, n_samples, device, rows=1)
    y = _gather.sum_scattered(
        *tables_and_ids(weights, targets, detection.index.T, n_outputs, block),
        n_detectors,
        _sizes.width(n_outputs),
        cores,
    )
    return y[:n_samples, :n_outputs]


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
    n_samples, n_detectors = d.index.shape
    if 0 in (n_samples, n_outputs, *weights.shape):
        return plain.backward(saved, dy, needs, n_outputs=n_outputs, accumulate=accumulate, device=device)
    d_weights, _, _ = plain.backward(
        saved, dy, (needs[0], False, False), n_outputs=n_outputs, accumulate=accumulate, device=device
    )
    if not needs[1]:
        return d_weights, None, None
    block = samples(weights, n_outputs, n_samples, device, rows=2)
    dy = jnp.pad(dy, ((0, -n_samples % block), (0, _sizes.width(n_outputs) - n_outputs)))
    values, used, ids_, target_ids = tables_and_ids(weights, targets, d.index.T, n_outputs, block)
    *_, other_ids, other_target_ids = tables_and_ids(weights, targets, (d.index ^ d.flip).T, n_outputs, block)
    of_blocks = _gather.differences_scattered(
        values,
        used,
        (ids_, other_ids),
        (target_ids, other_target_ids),
        dy,
        n_detectors,
        _sizes.sparse_cores(device),
    )
    return d_weights, slope(d.margin) * out_of_blocks(of_blocks, n_detectors, n_samples).T, None


def samples(weights: jax.Array, n_outputs: int, n_samples: int, device: Device, *, rows: int) -> int:
    """How many samples, of so many rows each, a subcore works on at once."""
    numbers = _sizes.numbers_of_sparse_lookup(weights.shape[2], n_outputs, rows=rows)
    return _sizes.samples(n_samples, numbers, _sizes.sparse_cores(device))


def tables_and_ids(
    weights: jax.Array, targets: jax.Array, index: jax.Array, n_outputs: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Values, their targets, and where each read finds its row of both, as `_gather.sum_scattered` takes them."""
    n_lists = targets.shape[:2]
    of_values = ids(weights, index)
    # One list of targets for all rows, or all detectors: every read finds its row there.
    of_targets = of_values // weights.shape[1] * n_lists[1] if n_lists[0] > 1 else jnp.zeros_like(of_values)
    of_targets += of_values % weights.shape[1] if n_lists[1] > 1 else 0
    used = jnp.clip(targets, -1, n_outputs - 1)
    return (
        rows_of(weights),
        rows_of(used, fill=-1),
        in_blocks(of_values, block),
        in_blocks(of_targets, block),
    )

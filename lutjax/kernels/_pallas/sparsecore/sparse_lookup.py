"""`lutjax.sparse_lookup` on SparseCores: values and targets are fetched row by row, and added up or multiplied where they
arrive.

``y[b, targets[t, r, k]] += weights[t, r, k]`` with ``r = index[b, t]``, for a block of samples on each subcore, one detector after
the other. The table's gradient is that of plain JAX: SparseCores do not add to rows in HBM.
"""

import jax
import jax.numpy as jnp

from lutjax.kernels._pallas.sparsecore import _gather, _sizes
from lutjax.kernels._pallas.sparsecore._gathered_rows import ids, in_blocks, out_of_blocks, rows_of
from lutjax.kernels._xla import sparse_lookup as plain
from lutjax.kernels._xla._row_gathers import slope
from lutjax.kernels.registry import Device
from lutjax.ops.sparse_lookup import SparseLookup


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    if _empty(call):
        return plain.forward(call, device=device)
    n_samples, n_detectors = call.detection.shape
    values, targets = _tables(call)
    y = _gather.sum_scattered(
        values,
        targets,
        *_ids(call, call.detection.index, _samples(call, device, rows=1)),
        n_detectors,
        _sizes.width(call.n_outputs),
        _sizes.sparse_cores(device),
    )
    return y[:n_samples, : call.n_outputs]


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _empty(call):
        return plain.backward(call, cotangent, needs, device=device)
    found = {}
    if "weights" in needs:
        found = plain.backward(call, cotangent, frozenset({"weights"}), device=device)
    if "detection" not in needs:
        return found
    d, n_outputs = call.detection, call.n_outputs
    n_samples, n_detectors = d.shape
    block = _samples(call, device, rows=2)
    dy = jnp.pad(cotangent, ((0, -n_samples % block), (0, _sizes.width(n_outputs) - n_outputs)))
    of_row, of_other = (_ids(call, index, block) for index in (d.index, d.index ^ d.flip))
    values, targets = _tables(call)
    of_blocks = _gather.differences_scattered(
        values,
        targets,
        (of_row[0], of_other[0]),
        (of_row[1], of_other[1]),
        dy,
        n_detectors,
        _sizes.sparse_cores(device),
    )
    margin = slope(d.margin) * out_of_blocks(of_blocks, n_detectors, n_samples).T
    return {**found, "detection": margin}


def _empty(call: SparseLookup) -> bool:
    return 0 in (call.detection.shape[0], call.n_outputs, *call.weights.shape)


def _samples(call: SparseLookup, device: Device, *, rows: int) -> int:
    """Return the number of samples, each of so many rows, that a subcore works on at once."""
    numbers = _sizes.numbers_of_sparse_lookup(call.weights.shape[2], call.n_outputs, rows=rows)
    return _sizes.samples(call.detection.shape[0], numbers, _sizes.sparse_cores(device))


def _tables(call: SparseLookup) -> tuple[jax.Array, jax.Array]:
    """Return rows of values and rows of their targets, as `_gather.sum_scattered` takes them."""
    return rows_of(call.weights), rows_of(jnp.clip(call.targets, -1, call.n_outputs - 1), fill=-1)


def _ids(call: SparseLookup, index: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return where each read ``[B, T]`` finds its row of values and its row of targets, in blocks of samples."""
    n_lists = call.targets.shape[:2]
    n_rows = call.weights.shape[1]
    of_values = ids(call.weights, index.T)
    # One list of targets for all rows, or all detectors: every read finds its row there.
    of_targets = of_values // n_rows * n_lists[1] if n_lists[0] > 1 else jnp.zeros_like(of_values)
    of_targets += of_values % n_rows if n_lists[1] > 1 else 0
    return in_blocks(of_values, block), in_blocks(of_targets, block)

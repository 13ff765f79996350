"""`lutjax.lookup_attention` in Mosaic GPU, for long texts: reads of rows are counted in shared memory.

``y[j] = sum_t counts[t, j] @ S[t, query id of j]``, with the table seen as ``S[t, query id, (key id, position id), output]`` and
``counts[t, j, (k, e)]`` the number of earlier keys with id k at a distance with id e; so ``dS[t, q]`` is the sum of
``counts[t, j] * dy[j]`` over the queries with id q, and an update adds that. A program counts for four queries of one detector
(`_counts`). The products with counts, and the cotangents of margins, are made by Triton kernels.
"""

import jax

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas.gpu._counts import COUNTER
from lutjax.kernels._triton import _histograms, lookup_attention as in_triton
from lutjax.kernels._triton._detected_pairs import DetectedPairs
from lutjax.kernels._triton._row_additions import Addition
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.tables._row_rules import RowState
from lutjax.values._fixed_point import result


def forward(call: LookupAttention, *, device: Device) -> jax.Array:
    pairs = DetectedPairs.of(call)
    if not _histograms.fits(pairs):
        return in_triton.forward(call, device=device)
    return result(_histograms.sum_rows(pairs, device, COUNTER), call.weights.dtype, call.accumulate)


def backward(
    call: LookupAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    return in_triton.backward_by(_add_rows, call, cotangent, needs, device=device)


def update(
    call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return in_triton.update_by(_add_rows, call, cotangent, step, device=device)


def _add_rows(
    pairs: DetectedPairs, dy: jax.Array, device: Device, addition: Addition
) -> tuple[jax.Array, ...]:
    """Add `dy` to the row of every pair."""
    if not _histograms.fits(pairs):
        return in_triton.add_rows(pairs, dy, device, addition)
    return _histograms.add_rows(pairs, dy, device, addition, COUNTER)

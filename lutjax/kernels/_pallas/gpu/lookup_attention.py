"""`lutjax.lookup_attention` in Mosaic GPU, for long texts: reads of rows are counted in shared memory.

What is multiplied by the counts, and the cotangents of margins, are the Triton kernels' work.
"""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.gpu import _counts
from lutjax.kernels._triton import _histograms, _updates, lookup_attention as in_triton
from lutjax.kernels._triton._pairs import Pairs
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    query: Detection,
    key: Detection,
    position: Detection | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    window: int | None,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    arguments = (weights, query, key, position, start, query_segments, key_segments)
    pairs = Pairs.of(*arguments, window=window)
    if not _histograms.fits(pairs, accumulate):
        return in_triton.forward(*arguments, window=window, accumulate=accumulate, device=device)
    return _histograms.sum_rows(pairs, device, _counts.COUNTER).astype(weights.dtype)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    window: int | None,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    return in_triton.backward_by(
        add_rows, saved, dy, needs, window=window, accumulate=accumulate, device=device
    )


def add_rows(
    addition: _updates.Addition,
    accumulate: FixedPoint | None,
    pairs: Pairs,
    dy: jax.Array,
    device: Device,
) -> tuple[jax.Array, ...]:
    """Adds `dy` to the row of every pair."""
    if not _histograms.fits(pairs, accumulate):
        return in_triton.add_rows(addition, accumulate, pairs, dy, device)
    return _histograms.add_rows(addition, pairs, dy, device, _counts.COUNTER)

"""`lutjax.scored_lut` in Mosaic GPU: rows are read from tables in shared memory (`_shared_reads`).

Margins, scores and the cotangents of inputs are computed by Triton kernels, and so are gradients of tables, updates, and what does not
fit: sums and tables of integers, reads that users write, and larger tables.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas.gpu import _mosaic_launch, _shared_reads
from lutjax.kernels._pallas.gpu._mosaic_fit import rows_by_triton
from lutjax.kernels._triton import scored_lut as in_triton
from lutjax.ops.scored_lut import ScoredLut
from lutjax.tables._row_rules import RowState

_MOST_SCRATCH = 2**30  # bytes that are computed of samples: rows, factors, products


def forward(call: ScoredLut, *, device: Device) -> jax.Array:
    if _by_triton(call):
        return in_triton.forward(call, device=device)
    y = in_triton.in_parts(call, _parts(call), lambda part: {"y": _outputs(part, device)})["y"]
    return (jnp.sum(y, 1, keepdims=True, dtype=y.dtype) if call.sum_groups else y).astype(call.weights.dtype)


def backward(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _by_triton(call):
        return in_triton.backward(call, cotangent, needs, device=device)
    return in_triton.in_parts(
        call, _parts(call), lambda part, dy: _pulled_back(part, dy, needs, device), cotangent
    )


def _outputs(call: ScoredLut, device: Device) -> jax.Array:
    """Return the sums of each group."""
    n, call = len(call.x), _padded(call)
    rows, factors = in_triton.rows_and_factors(call, device)
    y, strange = _shared_reads.sum_rows(call.weights, rows, factors, call.groups)
    return in_triton.mended(call, y, strange, _shared_reads.SAMPLES_OF_WARP, device)[:n]


def _pulled_back(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], device: Device
) -> dict[str, jax.Array]:
    n, call = len(call.x), _padded(call)
    dy = _mosaic_launch.padded(cotangent, len(call.x), *cotangent.shape[1:])
    rows, factors = in_triton.rows_and_factors(call, device)
    found = {}
    if "weights" in needs:
        found["weights"] = in_triton.sums_of_rows(call, rows, factors, dy, device)
    if others := needs - {"weights"}:
        products = _shared_reads.products(call.weights, rows, dy, in_triton.all_ways(call), call.groups)
        if n < len(call.x):  # of samples that are not there: 0 times a row, which may be infinite
            products = products.at[..., n:].set(0)
        found |= in_triton.of_products(call, products, others, device)
    return {name: a[:n] if name in ("x", "keep") else a for name, a in found.items()}


def update(
    call: ScoredLut, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return in_triton.update(call, cotangent, step, device=device)


def _padded(call: ScoredLut) -> ScoredLut:
    """Return the call with samples of zeros to the end of the last program."""
    n = -(-len(call.x) // _shared_reads.SAMPLES) * _shared_reads.SAMPLES
    keep = call.keep if call.keep is None else _mosaic_launch.padded(call.keep, n, *call.keep.shape[1:])
    return call.replace(x=_mosaic_launch.padded(call.x, n, *call.x.shape[1:]), keep=keep)


def _parts(call: ScoredLut) -> int:
    """Return the parts of the samples to compute one after the other, as memory holds what they read."""
    of_sample = (1 + 2 * in_triton.all_ways(call)) * len(call.weights)
    if call.x.shape[1] < call.groups:
        of_sample += call.groups * call.x.shape[2]  # cotangents of inputs by groups
    return -(-4 * of_sample * len(call.x) // _MOST_SCRATCH)


def _by_triton(call: ScoredLut) -> bool:
    return 0 in (*call.weights.shape, *call.x.shape) or rows_by_triton(call) is not None

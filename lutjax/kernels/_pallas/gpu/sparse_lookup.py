"""`lutjax.sparse_lookup` in Mosaic GPU, for long rows: outputs and cotangents of a sample lie in shared memory (`_shared_outputs`).

Gradients of tables, updates, and margins in fixed point are those of the Triton kernels.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas.gpu import _shared_outputs
from lutjax.kernels._triton import sparse_lookup as in_triton
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.tables._row_rules import RowState
from lutjax.values._fixed_point import addends, result


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    if _empty(call):
        return in_triton.forward(call, device=device)
    weights = addends(call.weights, call.accumulate)
    y = _shared_outputs.sum_slots(
        weights, _existing(call, call.detection.index), _targets(call), call.n_outputs
    )
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _empty(call) or call.accumulate is not None:
        return in_triton.backward(call, cotangent, needs, device=device)
    found = in_triton.backward(call, cotangent, needs - {"detection"}, device=device)
    if "detection" in needs:
        d = call.detection
        rows = _existing(call, d.index), _existing(call, d.index ^ d.flip)
        arrays = call.weights.astype(jnp.float32), *rows, _targets(call), cotangent.astype(jnp.float32)
        found["detection"] = slope(d.margin) * _shared_outputs.differences(*arrays).astype(d.margin.dtype)
    return found


def update(
    call: SparseLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return in_triton.update(call, cotangent, step, device=device)


def _existing(call: SparseLookup, rows: jax.Array) -> jax.Array:
    """Return rows ``[B, T]``; ids that do not exist count as the nearest that does."""
    return jnp.clip(rows, 0, call.weights.shape[1] - 1)


def _targets(call: SparseLookup) -> jax.Array:
    return jnp.clip(call.targets, -1, call.n_outputs - 1)


def _empty(call: SparseLookup) -> bool:
    return 0 in (*call.weights.shape, len(call.detection.index), call.n_outputs)

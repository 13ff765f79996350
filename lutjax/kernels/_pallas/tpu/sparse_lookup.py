"""`lutjax.sparse_lookup` on TensorCores: a look-up of the whole table, which is zero where no edge is.

``y[b] = sum_t whole[t, index[b, t]]`` with ``whole[t, r, o] = sum of weights[t, r, k] over the k whose target is o``; the blocks are
those of `lutjax.lookup`, and the edges of the gradient of the whole table are the gradient.
"""

import jax

from lutjax._row_rules import RowState
from lutjax.kernels._pallas.tpu import _products, lookup
from lutjax.kernels._xla import sparse_lookup as plain
from lutjax.kernels.contract import Step
from lutjax.kernels.registry import Device
from lutjax.ops.lookup import Lookup
from lutjax.ops.sparse_lookup import SparseLookup


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    return lookup.forward(_whole(call), device=device).astype(call.weights.dtype)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    found = lookup.backward(_whole(call), cotangent, needs, device=device)
    return {n: _of_edges(call, a) if n == "weights" else a for n, a in found.items()}


def update(
    call: SparseLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    if 0 in (call.weights.size, call.detection.index.size, cotangent.size):
        return plain.update(call, cotangent, step, device=device)
    shape = (*call.weights.shape[:2], call.n_outputs)
    gradient = _of_edges(call, lookup.add_rows(None, shape, call.detection.index, cotangent, device))
    return _products.moved(call.weights, gradient, call.detection.index, step), step.state


def _whole(call: SparseLookup) -> Lookup:
    table = plain.whole_table(call.weights, call.targets, call.n_outputs)
    return Lookup(table, call.detection, accumulate=call.accumulate)


def _of_edges(call: SparseLookup, table: jax.Array) -> jax.Array:
    return plain.of_edges(table, call.targets, call.n_outputs)

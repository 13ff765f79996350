"""`lutjax.sparse_lookup` on TensorCores: a lookup into the table with all outputs.

Formula: ``y[b] = sum_t whole[t, index[b, t]]``. ``whole[t, r, o]`` sums ``weights[t, r, k]`` over
the slots ``k`` with target ``o``; ``dweights[t, r, k] = dwhole[t, r, targets[t, r, k]]``.

Work, layout and numerics: see `lookup`. Matrix units multiply zeros faster than a core gathers
single slots.
"""

import jax

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas.tpu import _products, _tables, lookup
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import sparse_lookup as plain
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.values._row_rules import RowState

SPEC = Declaration(tensorcore_rule(_tables.unsupported, _tables.slower))


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    return lookup.forward(plain.whole_table(call), device=device).astype(call.weights.dtype)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    return plain.edges_of(
        call, lookup.backward(plain.whole_table(call), cotangent, needs, device=device)
    )


def update(
    call: SparseLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    if 0 in (call.weights.size, call.detection.index.size, cotangent.size):
        return plain.update(call, cotangent, step, device=device)
    # The rule updates slots, so the gradient of the whole table is first reduced to edges.
    gradient = backward(call, cotangent, frozenset({"weights"}), device=device)["weights"]
    index = call.detection.index

    def count_reads() -> jax.Array:
        return lookup.read_counts(call.weights, index, device)

    return _products.update_rows(call.weights, gradient, step, count_reads), step.state

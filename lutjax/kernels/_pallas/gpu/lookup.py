"""`lutjax.lookup` in Mosaic GPU, for tables of few rows.

``y[b] = sum_t weights[t, index[b, t]]`` and ``dmargin[b, t] = slope(margin) <dy[b], row - flipped row>`` read rows from shared
memory (`_shared_tables`): a program owns a block of samples and of outputs, and visits the detectors one after the other.
``dweights[t, r] = sum_b [index[b, t] == r] dy[b]`` is a product of tensor cores (`_one_hot`): a program owns four tables, a block
of outputs and a part of the samples. In fixed point, tables of more rows fit too: integers are added in shared memory (`_shared_sums`), and
Triton kernels do the rest. An update adds that array, small as the tables are: ``weights - rate * factor * dweights``.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _steps
from lutjax.kernels._pallas.gpu import _one_hot, _shared_sums, _shared_tables
from lutjax.kernels._triton import lookup as in_triton
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.lookup import Lookup
from lutjax.tables._row_rules import RowState
from lutjax.values._fixed_point import addends, result


def forward(call: Lookup, *, device: Device) -> jax.Array:
    if _empty(call):
        return plain.forward(call, device=device)
    if call.accumulate is not None:
        return in_triton.forward(call, device=device)
    return _shared_tables.sum_rows(call.weights, call.detection.index.T).astype(call.weights.dtype)


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _empty(call):
        return plain.backward(call, cotangent, needs, device=device)
    if call.accumulate is not None:
        found = in_triton.backward(call, cotangent, needs - {"weights"}, device=device)
        return {"weights": _sums(call, cotangent), **found} if "weights" in needs else found
    d, found = call.detection, {}
    index = d.index.T
    if "weights" in needs:
        found["weights"] = _sums(call, cotangent)
    if "detection" in needs:
        difference = _shared_tables.differences(call.weights, index, index ^ d.flip.T, cotangent)
        found["detection"] = slope(d.margin) * difference.astype(d.margin.dtype)
    return found


def update(call: Lookup, cotangent: jax.Array, step: Step, *, device: Device) -> tuple[jax.Array, RowState]:
    if _empty(call):
        return plain.update(call, cotangent, step, device=device)
    weights = call.weights
    # Rows that no sample read have sums of zero, and stay as they are.
    sums = result(_sums(call, cotangent), jnp.float32, call.accumulate)
    moved = weights.astype(jnp.float32) - _steps.rate_and_factor(step) * sums
    return moved.astype(weights.dtype), step.state


def _sums(call: Lookup, cotangent: jax.Array) -> jax.Array:
    """Return the sums of the addends of every row's readers, ``[T, R, O]``."""
    index, n_rows = call.detection.index.T, call.weights.shape[1]
    if call.accumulate is None:
        return _one_hot.add_rows(index, cotangent, n_rows)
    return _shared_sums.add_rows(jnp.clip(index, 0, n_rows - 1), addends(cotangent, call.accumulate), n_rows)


def _empty(call: Lookup) -> bool:
    return 0 in (*call.weights.shape, len(call.detection.index))

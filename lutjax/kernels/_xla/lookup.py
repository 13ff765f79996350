"""`lutjax.lookup` in plain JAX.

Formula for sample ``b``, group ``g`` and tables ``t`` of the group::

    y[b, g] = sum over t of weights[t, index[b, t]]
    dweights[t, index[b, t]] += dy[b, g]
    dmargin[b, t] = slope(margin[b, t]) * <dy[b, g], weights[t, index] - weights[t, index ^ flip]>

Work, layout and numerics: see `_row_gathers`, and `_row_updates` for in-place updates. Ids are
transposed to detector-major ``[T, B]``: a step of the loop reads contiguous ids of one table.
"""

from typing import Any

import jax

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _row_gathers, _row_updates
from lutjax.ops.lookup import Lookup
from lutjax.values._fixed_point import addend_dtype, addends, result
from lutjax.values._row_rules import RowState


def forward(call: Lookup, *, device: Device) -> jax.Array:
    y = _row_gathers.sum_rows(
        call.weights, call.detection.index.T, device, call.accumulate, call.groups
    )
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    weights, d = call.weights, call.detection
    index, margin = d.index.T, d.margin.T
    cotangents = {}
    if "weights" in needs:
        zeros = zeros_varying(weights, weights.shape, addend_dtype(weights.dtype, call.accumulate))
        values = addends(cotangent, call.accumulate)
        cotangents["weights"] = _row_gathers.add_rows(zeros, index, values, device, call.groups)
    if "detection" in needs:
        # Flipped before both ids are clamped, as the op defines it for ids out of range.
        main_and_flipped = index, index ^ d.flip.T
        # The slope multiplies the complete product; rows are subtracted before the product.
        (difference,) = _row_gathers.differences(
            weights, main_and_flipped, cotangent, device, call.accumulate, call.groups
        )
        cotangents["detection"] = (_row_gathers.slope(margin) * difference.astype(margin.dtype)).T
    return cotangents


def update(
    call: Lookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: Lookup, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call and their maximum per detector."""
    index = call.detection.index.T
    values = _row_updates.group_cotangents(cotangent, len(index), call.groups)

    def visit(detectors: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
        # One tile: every sample is one hit of every table, and all count.
        return body(carry, detectors(index), values(detectors), None)

    return visit, cotangent.shape[0]

"""`lutjax.weighted_lookup` in Triton.

Formula for sample ``b``, group ``g``, its tables ``t`` and ways ``k``, with
``i = index[b, t, k]``::

    y[b, g] = sum_{t, k} coefficients[b, t, k] * weights[t, i]
    dcoefficients[b, t, k] = <dy[b, g], weights[t, i]>
    dweights[t, i] += coefficients[b, t, k] * dy[b, g]

Work, layout and numerics: see `_weighted_rows`, which has the kernels. In sums and additions a 0
coefficient masks its row, which is neither read nor added to. Ways beyond `valued` only have
coefficient gradients.
"""

import functools

import jax

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _row_additions, _weighted_rows
from lutjax.kernels._triton._rules import few_additions, unsupported_arguments
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.values._row_rules import RowState


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, WeightedLookup)
    # Ways without values add nothing to the tables.
    n_reads = call.index.shape[0] * call.valued * call.weights.shape[0]
    return unsupported_arguments(request) or few_additions(request, n_reads)


SPEC = Declaration(
    _supports,
    launches=("weighted_lookup.forward", "weighted_lookup.products", "weighted_lookup.table"),
)


def forward(call: WeightedLookup, *, device: Device) -> jax.Array:
    weights = call.weights
    # Without valued ways no kernel runs; the zeros vary over the mesh axes of the inputs.
    if call.valued == 0:
        shape = (len(call.index), call.groups, weights.shape[2])
        return zeros_varying(call.coefficients, shape, weights.dtype)
    return _weighted_rows.weighted_sums(weights, _valued_reads(call), device, call.accumulate)


def backward(
    call: WeightedLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    cotangents = {}
    if "weights" in needs:
        add = functools.partial(_add_to_rows, call, cotangent, device)
        cotangents["weights"] = _row_additions.gradient(call, add)
    if "coefficients" in needs:
        # All ways, also those whose coefficient has no value, have a coefficient gradient.
        index = call.index.transpose(1, 2, 0)
        each = _weighted_rows.products_of(
            call.weights, index, cotangent, call.groups, device, call.accumulate
        )
        cotangents["coefficients"] = each.transpose(2, 0, 1)
    return cotangents


def update(
    call: WeightedLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    return _row_additions.update(call, step, add, device=device)


def _add_to_rows(
    call: WeightedLookup, dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    return _weighted_rows.weighted_add(
        call.weights, addition, _valued_reads(call), dy, device, call.accumulate
    )


def _valued_reads(call: WeightedLookup) -> _weighted_rows.Reads:
    # ``[T, K, n]``: tile samples are contiguous.
    index, coefficients = (
        a[..., : call.valued].transpose(1, 2, 0) for a in (call.index, call.coefficients)
    )
    return _weighted_rows.Reads(index, coefficients, call.groups)

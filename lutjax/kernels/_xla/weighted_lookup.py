"""`lutjax.weighted_lookup` in plain JAX.

``y[b, g] = sum over tables t of g and ways k of c[b, t, k] weights[t, i[b, t, k]]``; ``dc[b, t, k] = <dy[b, g], weights[t, i]>``;
``dweights[t, i] += c[b, t, k] dy[b, g]``. Ids and coefficients are detector-major, ``[T, B]`` of each way.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._dtypes import accumulator
from lutjax._fixed_point import addend_dtype, result
from lutjax._row_rules import RowState
from lutjax.kernels._xla import _row_updates, _weighted_rows
from lutjax.kernels.contract import Step
from lutjax.kernels.registry import Device
from lutjax.ops.weighted_lookup import WeightedLookup


def forward(call: WeightedLookup, *, device: Device) -> jax.Array:
    weights = call.weights
    if call.valued == 0:
        return zeros_varying(
            call.coefficients, (len(call.index), call.groups, weights.shape[2]), weights.dtype
        )
    y = _weighted_rows.sum_rows(weights, _ways(call)[: call.valued], call.groups, device, call.accumulate)
    return result(y, weights.dtype, call.accumulate)


def backward(
    call: WeightedLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    weights, ways, found = call.weights, _ways(call), {}
    if "weights" in needs:
        zeros = zeros_varying(weights, weights.shape, addend_dtype(weights.dtype, call.accumulate))
        found["weights"] = _weighted_rows.add_rows(
            zeros, ways[: call.valued], cotangent, call.groups, device, call.accumulate
        )
    if "coefficients" in needs:
        index = [index for index, _ in ways]
        each = _weighted_rows.products(weights, index, cotangent, call.groups, device, call.accumulate)
        found["coefficients"] = jnp.stack(each, -1).transpose(1, 0, 2) if each else call.coefficients
    return found


def update(
    call: WeightedLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: WeightedLookup, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return how the hits of a call are visited, and how many a detector has at most."""
    return hits_of_ways(call.weights, _ways(call)[: call.valued], cotangent, call.groups)


def hits_of_ways(
    weights: jax.Array, ways: list[_weighted_rows.Way], dy: jax.Array, groups: int
) -> _row_updates.Hits:
    """Return the hits of reads in several ways; a coefficient of 0 is none."""
    dtype = accumulator(weights.dtype)
    by_group = dy.astype(dtype).transpose(1, 0, 2)
    group = jnp.arange(weights.shape[0], dtype=jnp.int32) // (weights.shape[0] // groups)

    def visit(detectors: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
        values = by_group.at[detectors(group)].get(mode="promise_in_bounds")
        for index, coefficient in ways:
            c = detectors(coefficient).astype(dtype)[..., None]
            counts = detectors(coefficient) != 0
            carry = body(carry, detectors(index), jnp.where(c == 0, 0, c * values), counts)
        return carry

    return visit, len(ways) * dy.shape[0]


def _ways(call: WeightedLookup) -> list[_weighted_rows.Way]:
    return [(call.index[..., k].T, call.coefficients[..., k].T) for k in range(call.index.shape[2])]

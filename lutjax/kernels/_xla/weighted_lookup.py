"""`lutjax.weighted_lookup` in plain JAX.

Formula for sample ``b``, group ``g``, tables ``t`` of the group and ways ``k``::

    y[b, g] = sum over t, k of c[b, t, k] * weights[t, i[b, t, k]]
    dc[b, t, k] = <dy[b, g], weights[t, i[b, t, k]]>
    dweights[t, i[b, t, k]] += c[b, t, k] * dy[b, g]

Only the first `valued` ways contribute to ``y`` and ``dweights``; all of them get ``dc``.

Work, layout and numerics: see `_row_gathers`. Ids and coefficients are detector-major, ``[T, B]``
per way. A coefficient of 0 contributes nothing, even from an infinite row.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _row_gathers, _row_updates
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype, result
from lutjax.values._row_rules import RowState

Way = tuple[jax.Array, jax.Array]
"""Row ids and coefficients, ``[T, n]``."""


def forward(call: WeightedLookup, *, device: Device) -> jax.Array:
    weights, groups = call.weights, call.groups
    shape = call.index.shape[0], groups, weights.shape[2]
    # The loops of `_row_gathers` need at least one way.
    if call.valued == 0:
        return zeros_varying(call.coefficients, shape, weights.dtype)
    y = _row_gathers.sum_ways(
        weights, _split_ways(call)[: call.valued], device, call.accumulate, groups
    )
    return result(y.reshape(shape), weights.dtype, call.accumulate)


def backward(
    call: WeightedLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    weights, ways, groups, cotangents = call.weights, _split_ways(call), call.groups, {}
    dy = side_by_side(cotangent)
    if "weights" in needs:
        zeros = zeros_varying(weights, weights.shape, addend_dtype(weights.dtype, call.accumulate))
        cotangents["weights"] = add_ways(
            zeros, ways[: call.valued], dy, device, call.accumulate, groups
        )
    if "coefficients" in needs:
        index = tuple(index for index, _ in ways)
        # All ways, also those without a value: a read may need the product of a row that it does
        # not add.
        each = _row_gathers.products(weights, index, dy, device, call.accumulate, groups)
        cotangents["coefficients"] = (
            jnp.stack(each, -1).transpose(1, 0, 2) if each else call.coefficients
        )
    return cotangents


def update(
    call: WeightedLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    scale = _row_updates.scale_of_additions(call, step)
    if scale is not None:
        # The rate scales the cotangent once, not every addend.
        dy = scale * side_by_side(cotangent)
        ways = _split_ways(call)[: call.valued]
        return add_ways(call.weights, ways, dy, device, None, call.groups), step.state
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: WeightedLookup, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call and their maximum per detector."""
    return hits_of_ways(call.weights, _split_ways(call)[: call.valued], cotangent, device)


def hits_of_ways(
    weights: jax.Array, ways: Sequence[Way], dy: jax.Array, device: Device
) -> _row_updates.Hits:  # dy [n, G, O]
    """Return the hits of reads with several ways; a coefficient of 0 is not a hit.

    Where a scatter is a kernel launch, all ways form one tile: a launch takes as long as many
    additions.
    """
    dtype = accumulator(weights.dtype)
    # Groups first: a detector reads the cotangents of its group as one slice.
    by_group = dy.astype(dtype).transpose(1, 0, 2)
    group = _row_gathers.detectors(weights) // max(weights.shape[0] // dy.shape[1], 1)
    # One scatter for all ways on GPUs; elsewhere ways stay apart, without a copy.
    together = _row_gathers.launches(device) and len(ways) > 1
    tiles = (
        [tuple(jnp.concatenate(of_ways, 1) for of_ways in zip(*ways, strict=True))]
        if together
        else ways
    )

    def visit(detectors: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
        values = _row_gathers.read(by_group, detectors(group))
        for index, coefficient in tiles:
            c = detectors(coefficient).astype(dtype)
            of_reads = jnp.tile(values, (1, len(ways) // len(tiles), 1))
            # A coefficient of 0 is no hit: rules with momentum must not move its row.
            carry = body(carry, detectors(index), _row_gathers.times(c, of_reads), c != 0)
        return carry

    return visit, len(ways) * dy.shape[0]


def add_ways(total: jax.Array, ways: Sequence[Way], *arguments: Any) -> jax.Array:
    """Call `_row_gathers.add_ways`; without ways, return the total."""
    return _row_gathers.add_ways(total, ways, *arguments) if ways else total


def side_by_side(dy: jax.Array) -> jax.Array:
    """Reshape ``[n, G, O]`` to ``[n, G * O]``."""
    n, groups, n_outputs = dy.shape
    return dy.reshape(n, groups * n_outputs)


def _split_ways(call: WeightedLookup) -> list[Way]:
    return [(call.index[..., k].T, call.coefficients[..., k].T) for k in range(call.index.shape[2])]

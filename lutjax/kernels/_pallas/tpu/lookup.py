"""`lutjax.lookup` on TensorCores.

Formula for sample ``b``, group ``g`` and its tables ``t``::

    y[b, g] = sum_t weights[t, index[b, t]]
    dmargin[b, t] = slope(margin[b, t]) * <dy[b, g], weights[t, index] - weights[t, index ^ flip]>
    dweights[t, r] = sum over samples b with index[b, t] == r: dy[b, g]

Work and layout: large tables stay in vector memory while sample blocks pass (`_resident`); other
tables are multiplied by one-hot matrices (`_products`). An update adds ``-rate * factor * dy`` to
the rows, or updates the table from its gradient where the rule updates a row once, by the sum.

Numerics: float32, sums in a fixed order. With one-hot products the margin cotangent is a difference
of two products, so it loses precision for large rows, and a NaN reaches all rows in a block;
resident rows are subtracted first.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas.tpu import _products, _resident, _tables
from lutjax.kernels._pallas.tpu._row_blocks import RowBlocks
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._pallas.tpu._tables import is_resident
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.lookup import Lookup
from lutjax.values._row_rules import RowState

SPEC = Declaration(tensorcore_rule(_tables.unsupported, _tables.slower))


def forward(call: Lookup, *, device: Device) -> jax.Array:
    if _empty(call):
        return plain.forward(call, device=device)
    weights, index = call.weights, call.detection.index
    if is_resident(weights.shape, device, call.groups):
        y = _resident.sum_rows(weights, index, device)
    else:
        blocks = RowBlocks.for_tables(weights.shape, len(index), call.groups)
        y = _products.sum_rows(_reads(blocks, weights.shape, index), weights, blocks, device)
        y = y.reshape(len(index), -1)
    return y.astype(weights.dtype)


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _empty(call):
        return plain.backward(call, cotangent, needs, device=device)
    weights, d, cotangents = call.weights, call.detection, {}
    if "weights" in needs:
        cotangents["weights"] = _add_to_rows(None, call, cotangent, device)
    if "detection" in needs:
        other = d.index ^ d.flip
        if is_resident(weights.shape, device, call.groups):
            difference = _resident.differences(weights, d.index, other, cotangent, device)
        else:
            blocks = RowBlocks.for_tables(weights.shape, len(d.index), call.groups)
            # Two ways of one read: both rows are selected from the same products.
            reads = _reads(blocks, weights.shape, d.index, other)
            (each,) = _products.pull_back(
                reads, weights, 2, _split_groups(call, cotangent), blocks, device
            )
            # Subtracted in the layout of the kernel, so that one array is transposed instead of
            # two.
            difference = blocks.to_elements(each[0] - each[1])
        cotangents["detection"] = slope(d.margin) * difference.astype(d.margin.dtype)
    return cotangents


def update(
    call: Lookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    if _empty(call):
        return plain.update(call, cotangent, step, device=device)
    weights, index = call.weights, call.detection.index
    return _products.update_tables(
        weights,
        cotangent,
        step,
        lambda total, values: _add_to_rows(total, call, values, device),
        lambda: read_counts(weights, index, device),
    )


def read_counts(weights: jax.Array, index: jax.Array, device: Device) -> jax.Array:
    """Return each row's number of reads, ``[T, R, 1]``."""
    # Ones are exact in bfloat16, so counting is a product with a single term.
    shape, ones = (*weights.shape[:2], 1), jnp.ones((len(index), 1, 1), jnp.bfloat16)
    blocks = RowBlocks.for_tables(shape, len(index))
    return _products.add_rows(None, shape, _reads(blocks, shape, index), ones, blocks, device)


def _add_to_rows(
    total: jax.Array | None, call: Lookup, values: jax.Array, device: Device
) -> jax.Array:
    """Return the tables, or zeros, plus a value per output at each addressed row, float32."""
    shape, index = call.weights.shape, call.detection.index
    if is_resident(shape, device, call.groups):
        return _resident.add_rows(total, shape, index, values, device)
    blocks = RowBlocks.for_tables(shape, len(index), call.groups)
    reads = _reads(blocks, shape, index)
    return _products.add_rows(total, shape, reads, _split_groups(call, values), blocks, device)


def _split_groups(call: Lookup, a: jax.Array) -> jax.Array:
    """``[B, groups * O]`` -> ``[B, groups, O]``."""
    return a.reshape(len(a), call.groups, -1)


def _reads(blocks: RowBlocks, shape: tuple[int, ...], *index: jax.Array) -> _products.GivenReads:
    return _products.GivenReads(blocks, jnp.stack(index), shape[1])


def _empty(call: Lookup) -> bool:
    return 0 in (call.weights.size, call.detection.index.size)

"""`lutjax.weighted_lookup` on TensorCores: products with coefficient matrices, see `_products`.

Formula for sample ``b``, group ``g``, its tables ``t`` and ways ``k``::

    y[b, g] = sum_{t, k} c[b, t, k] * weights[t, i[b, t, k]]
    dc[b, t, k] = <dy[b, g], weights[t, i[b, t, k]]>
    dweights[t, i[b, t, k]] += c[b, t, k] * dy[b, g]

An update adds ``-rate * factor * c * dy`` to the rows, or updates the table from its gradient where
the rule updates a row once, by the sum. Numerics: float32, sums in a fixed order; see `_products`
for NaN.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas.tpu import _products, _row_blocks
from lutjax.kernels._pallas.tpu._row_blocks import RowBlocks, blocks_for_weighted
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import weighted_lookup as plain
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.values._row_rules import RowState

SPEC = Declaration(tensorcore_rule(_row_blocks.unsupported, _row_blocks.slower))


def forward(call: WeightedLookup, *, device: Device) -> jax.Array:
    if _empty(call):
        return plain.forward(call, device=device)
    blocks = _blocks(call, device)
    y = _products.sum_rows(_reads(call, blocks), call.weights, blocks, device)
    return y.astype(call.weights.dtype)


def backward(
    call: WeightedLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    cotangents = {}
    if _empty(call):
        return plain.backward(call, cotangent, needs, device=device)
    weights, blocks = call.weights, _blocks(call, device)
    reads = _reads(call, blocks)
    if "weights" in needs:
        cotangents["weights"] = _products.add_rows(
            None, weights.shape, reads, cotangent, blocks, device
        )
    if "coefficients" in needs:
        (each,) = _products.pull_back(
            reads, weights, call.index.shape[2], cotangent, blocks, device
        )
        cotangents["coefficients"] = jnp.moveaxis(blocks.to_elements(each), 0, -1)
    return cotangents


def update(
    call: WeightedLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    if _empty(call):
        return plain.update(call, cotangent, step, device=device)
    weights, blocks = call.weights, _blocks(call, device)
    reads = _reads(call, blocks)

    def count_reads() -> jax.Array:
        shape = (*weights.shape[:2], 1)
        # Blocks depend on shapes only, here on the shape of tables with one output.
        counted = call.replace(weights=jax.ShapeDtypeStruct(shape, weights.dtype))
        blocks = _blocks(counted, device)
        # Exact in bfloat16: the count is a product with a single term.
        ones = jnp.ones((*cotangent.shape[:2], 1), jnp.bfloat16)
        # A coefficient of 0 is no hit. Ways that share a row count twice, which is not 0 either.
        reads = _reads(
            call.replace(coefficients=(call.coefficients != 0).astype(jnp.float32)), blocks
        )
        return _products.add_rows(None, shape, reads, ones, blocks, device)

    def add_to(total: jax.Array | None, values: jax.Array) -> jax.Array:
        return _products.add_rows(total, weights.shape, reads, values, blocks, device)

    return _products.update_tables(weights, cotangent, step, add_to, count_reads)


def _blocks(call: WeightedLookup, device: Device) -> RowBlocks:
    blocks = blocks_for_weighted(call, device)
    assert blocks is not None, "a call that does not fit is not chosen"
    return blocks


def _reads(call: WeightedLookup, blocks: RowBlocks) -> _products.GivenReads:
    # Ways first: a kernel visits them one after the other.
    index, coefficients = (jnp.moveaxis(a, -1, 0) for a in (call.index, call.coefficients))
    return _products.GivenReads(blocks, index, call.weights.shape[1], coefficients, call.valued)


def _empty(call: WeightedLookup) -> bool:
    return call.valued == 0 or 0 in (call.weights.size, call.index.size)

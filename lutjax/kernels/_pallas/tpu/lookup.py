"""`lutjax.lookup` on TensorCores.

``y[b] = sum_t weights[t, index[b, t]]`` and ``dmargin[b, t] = slope(margin) <dy[b], row - flipped row>``; ``dweights[t, r]`` is the sum of
``dy[b]`` over the samples with ``index[b, t] == r``. Tables of many rows stay in vector memory while blocks of samples pass
(`_resident`); of others blocks of rows, samples and outputs are multiplied with one-hot matrices, which are reads in one way without
coefficients (`_products`). An update adds ``-rate * factor * dy`` to the rows, or moves the table by its gradient where rows move once.
"""

import jax
import jax.numpy as jnp

from lutjax._row_rules import RowState
from lutjax.kernels._pallas import _steps
from lutjax.kernels._pallas.tpu import _products, _resident
from lutjax.kernels._pallas.tpu._row_blocks import RowBlocks
from lutjax.kernels._pallas.tpu._tables import resident
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels._xla._row_gathers import slope
from lutjax.kernels.contract import Step
from lutjax.kernels.registry import Device
from lutjax.ops.lookup import Lookup


def forward(call: Lookup, *, device: Device) -> jax.Array:
    if _empty(call):
        return plain.forward(call, device=device)
    weights, index = call.weights, call.detection.index
    if resident(weights.shape, device):
        y = _resident.sum_rows(weights, index, device)
    else:
        blocks = RowBlocks.of(weights.shape, len(index))
        y = _products.sum_rows(_reads(blocks, weights.shape, index), weights, blocks, device)[:, 0]
    return y.astype(weights.dtype)


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _empty(call):
        return plain.backward(call, cotangent, needs, device=device)
    weights, d, found = call.weights, call.detection, {}
    if "weights" in needs:
        found["weights"] = add_rows(None, weights.shape, d.index, cotangent, device)
    if "detection" in needs:
        if resident(weights.shape, device):
            difference = _resident.differences(weights, d.index, d.index ^ d.flip, cotangent, device)
        else:
            difference = _differences(weights, d.index, d.index ^ d.flip, cotangent, device)
        found["detection"] = slope(d.margin) * difference.astype(d.margin.dtype)
    return found


def update(call: Lookup, cotangent: jax.Array, step: Step, *, device: Device) -> tuple[jax.Array, RowState]:
    if _empty(call):
        return plain.update(call, cotangent, step, device=device)
    weights, index = call.weights, call.detection.index
    if step.rule.additive and weights.dtype == jnp.float32:
        values = -_steps.rate_and_factor(step) * cotangent.astype(jnp.float32)
        return add_rows(weights, weights.shape, index, values, device), step.state
    gradient = add_rows(None, weights.shape, index, cotangent, device)
    return _products.moved(weights, gradient, step, lambda: read_counts(weights, index, device)), step.state


def read_counts(weights: jax.Array, index: jax.Array, device: Device) -> jax.Array:
    """Return how often each row is read, ``[T, R, 1]``."""
    ones = jnp.ones((len(index), 1), jnp.bfloat16)
    return _products_added(None, (*weights.shape[:2], 1), index, ones, device)


def add_rows(
    total: jax.Array | None, shape: tuple[int, ...], index: jax.Array, values: jax.Array, device: Device
) -> jax.Array:
    """Return tables of a shape, or zeros, plus ``values [B, O]`` at each row that was read: ``[T, R, O]`` float32."""
    if resident(shape, device):
        return _resident.add_rows(total, shape, index, values, device)
    return _products_added(total, shape, index, values, device)


def _products_added(
    total: jax.Array | None, shape: tuple[int, ...], index: jax.Array, values: jax.Array, device: Device
) -> jax.Array:
    blocks = RowBlocks.of(shape, len(index))
    reads = _reads(blocks, shape, index)
    return _products.add_rows(total, shape, reads, values[:, None], blocks, device)


def _differences(
    weights: jax.Array, index: jax.Array, other: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    """Return ``<dy, row - other row>``: ``[T, R, O]``, ``[B, T]`` twice, ``[B, O]`` -> ``[B, T]`` float32."""
    blocks = RowBlocks.of(weights.shape, len(index))
    reads = _reads(blocks, weights.shape, index, other)
    (each,) = _products.pulled(reads, weights, 2, dy[:, None], blocks, device)
    return blocks.to_elements(each[0] - each[1])


def _reads(blocks: RowBlocks, shape: tuple[int, ...], *index: jax.Array) -> _products.GivenReads:
    return _products.GivenReads(blocks, jnp.stack(index), shape[1])


def _empty(call: Lookup) -> bool:
    return 0 in (call.weights.size, call.detection.index.size)

"""`lutjax.sparse_lookup`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.ops.sparse_lookup import EdgeLookup, SparseLookup
from lutjax.values._fixed_point import addend_dtype, result
from lutjax.values._row_rules import RowState
from lutjax_cpu import _rules
from lutjax_cpu._call import kernel, scale
from lutjax_cpu.kernels.lookup import scale_margins


def _edges(call: SparseLookup | EdgeLookup) -> tuple[str, tuple[jax.Array, ...], tuple[int, ...]]:
    """Return a call's kernel name prefix, and the arrays and integers that define row targets."""
    if isinstance(call, EdgeLookup):
        return "edge_lookup", (call.targets, call.first), (call.n_rows,)
    return "sparse_lookup", (call.targets,), ()


def forward(call: SparseLookup | EdgeLookup, *, device: Any) -> jax.Array:
    index, weights, accumulate = call.detection.index, call.weights, call.accumulate
    sums = weights.dtype if accumulate is None else jnp.int32
    name, edges, sizes = _edges(call)
    (y,) = kernel(
        f"{name}_forward",
        (weights, index, *edges),
        (jax.ShapeDtypeStruct((index.shape[0], call.n_outputs), sums),),
        integers=(accumulate is not None, *sizes),
        numbers=(scale(accumulate),),
    )
    return result(y, weights.dtype, accumulate)


def backward(
    call: SparseLookup | EdgeLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    weights, d, accumulate = call.weights, call.detection, call.accumulate
    shapes = {"weights": weights.shape, "detection": d.index.shape}
    names = [name for name in shapes if name in needs]
    margin, dy = d.margin.astype(jnp.float32), cotangent.astype(jnp.float32)
    name, edges, sizes = _edges(call)
    arrays = kernel(
        f"{name}_backward",
        (weights, d.index, d.flip, margin, *edges, dy),
        [
            jax.ShapeDtypeStruct(shapes[name], addend_dtype(jnp.float32, accumulate))
            for name in names
        ],
        integers=(accumulate is not None, "weights" in needs, "detection" in needs, *sizes),
        numbers=(scale(accumulate),),
    )
    return scale_margins(dict(zip(names, arrays, strict=True)), d.margin, accumulate)


def update(
    call: SparseLookup | EdgeLookup, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    name, edges, sizes = _edges(call)
    inputs, weights = (call.detection.index, *edges, cotangent.astype(jnp.float32)), call.weights
    if isinstance(call, EdgeLookup):
        # To `move_rows` an edge list is one table, whose rows have one number.
        weights = weights[None, :, None]
        rate, factor = (
            None if a is None else a[None, :, None] if a.ndim else a
            for a in (step.rate, step.factor)
        )
        step = dataclasses.replace(step, rate=rate, factor=factor)
    table, state = _rules.update(
        f"{name}_update", weights, step, call.accumulate, inputs, integers=sizes
    )
    return table.reshape(call.weights.shape), state

"""`lutjax.sparse_lookup`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.tables._row_rules import RowState
from lutjax.values._fixed_point import addend_dtype, result
from lutjax_cpu import _rules
from lutjax_cpu._call import kernel, scale
from lutjax_cpu.kernels.lookup import of_margins


def forward(call: SparseLookup, *, device: Any) -> jax.Array:
    index, weights, accumulate = call.detection.index, call.weights, call.accumulate
    sums = weights.dtype if accumulate is None else jnp.int32
    (y,) = kernel(
        "sparse_lookup_forward",
        (weights, index, call.targets),
        (jax.ShapeDtypeStruct((index.shape[0], call.n_outputs), sums),),
        integers=(accumulate is not None,),
        numbers=(scale(accumulate),),
    )
    return result(y, weights.dtype, accumulate)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    weights, d, accumulate = call.weights, call.detection, call.accumulate
    shapes = {"weights": weights.shape, "detection": d.index.shape}
    wanted = [name for name in shapes if name in needs]
    margin, dy = d.margin.astype(jnp.float32), cotangent.astype(jnp.float32)
    arrays = kernel(
        "sparse_lookup_backward",
        (weights, d.index, d.flip, margin, call.targets, dy),
        [jax.ShapeDtypeStruct(shapes[name], addend_dtype(jnp.float32, accumulate)) for name in wanted],
        integers=(accumulate is not None, "weights" in needs, "detection" in needs),
        numbers=(scale(accumulate),),
    )
    return of_margins(dict(zip(wanted, arrays, strict=True)), d.margin, accumulate)


def update(
    call: SparseLookup, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    inputs = (call.detection.index, call.targets, cotangent.astype(jnp.float32))
    return _rules.update("sparse_lookup_update", call.weights, step, call.accumulate, inputs)

"""`lutjax.lookup`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.lookup import Lookup
from lutjax.values._fixed_point import FixedPoint, addend_dtype, result
from lutjax.values._row_rules import RowState
from lutjax_cpu import _rules
from lutjax_cpu._call import kernel, scale


def forward(call: Lookup, *, device: Any) -> jax.Array:
    index, weights, accumulate = call.detection.index, call.weights, call.accumulate
    shape = (index.shape[0], call.groups * weights.shape[2])
    (y,) = kernel(
        "lookup_forward",
        (weights, index),
        (jax.ShapeDtypeStruct(shape, weights.dtype if accumulate is None else jnp.int32),),
        integers=(call.groups, accumulate is not None),
        numbers=(scale(accumulate),),
    )
    return result(y, weights.dtype, accumulate)


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    weights, d, accumulate = call.weights, call.detection, call.accumulate
    shapes = {"weights": weights.shape, "detection": d.index.shape}
    names = [name for name in shapes if name in needs]
    sums = addend_dtype(jnp.float32, accumulate)
    arrays = kernel(
        "lookup_backward",
        (weights, d.index, d.flip, d.margin.astype(jnp.float32), cotangent.astype(jnp.float32)),
        [jax.ShapeDtypeStruct(shapes[name], sums) for name in names],
        integers=(call.groups, accumulate is not None, "weights" in needs, "detection" in needs),
        numbers=(scale(accumulate),),
    )
    return scale_margins(dict(zip(names, arrays, strict=True)), d.margin, accumulate)


def scale_margins(
    cotangents: dict[str, jax.Array], margin: jax.Array, accumulate: FixedPoint | None
) -> dict[str, jax.Array]:
    """Convert the margin cotangent from fixed-point integers, if a kernel returns them."""
    # Kernels sum integers; the slope of the margin is a float and follows afterwards.
    if accumulate is None or "detection" not in cotangents:
        return cotangents
    difference = result(cotangents["detection"], margin.dtype, accumulate)
    return {**cotangents, "detection": slope(margin) * difference}


def update(
    call: Lookup, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    inputs = (call.detection.index, cotangent.astype(jnp.float32))
    return _rules.update(
        "lookup_update", call.weights, step, call.accumulate, inputs, integers=(call.groups,)
    )

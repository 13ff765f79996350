"""`lutjax.margins`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.margins import Margins
from lutjax.values._fixed_point import addend_dtype
from lutjax_cpu._call import kernel, scale


def forward(call: Margins, *, device: Any) -> jax.Array:
    shape = (call.x.shape[0], *call.anchors.shape[:2])
    (u,) = kernel(
        "margins_forward",
        (call.x.astype(jnp.float32), call.anchors),
        (jax.ShapeDtypeStruct(shape, jnp.float32),),
        integers=(call.groups,),
    )
    return u


def backward(
    call: Margins, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    (dx,) = kernel(
        "margins_backward",
        (call.anchors, cotangent.astype(jnp.float32)),
        (jax.ShapeDtypeStruct(call.x.shape, addend_dtype(jnp.float32, call.accumulate)),),
        integers=(call.groups, call.accumulate is not None),
        numbers=(scale(call.accumulate),),
    )
    return {"x": dx}

"""`lutjax.lookup`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.lookup import Lookup
from lutjax_cpu._call import kernel


def forward(call: Lookup, *, device: Any) -> jax.Array:
    index = call.detection.index
    shape = (index.shape[0], call.groups * call.weights.shape[2])
    (y,) = kernel(
        "lookup_forward", (call.weights, index), (jax.ShapeDtypeStruct(shape, jnp.float32),), integers=(call.groups,)
    )
    return y.astype(call.weights.dtype)

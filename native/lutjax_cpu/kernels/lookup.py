"""`lutjax.lookup`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._row_rules import RowState
from lutjax.kernels.contract import Step
from lutjax.ops.lookup import Lookup
from lutjax_cpu import _rules
from lutjax_cpu._call import kernel


def forward(call: Lookup, *, device: Any) -> jax.Array:
    index = call.detection.index
    shape = (index.shape[0], call.groups * call.weights.shape[2])
    (y,) = kernel(
        "lookup_forward", (call.weights, index), (jax.ShapeDtypeStruct(shape, jnp.float32),), integers=(call.groups,)
    )
    return y.astype(call.weights.dtype)


def update(call: Lookup, cotangent: jax.Array, step: Step, *, device: Any) -> tuple[jax.Array, RowState]:
    inputs = (call.detection.index, cotangent)
    return _rules.update(
        "lookup_update", call.weights, step, call.accumulate, inputs, integers=(call.groups,)
    )

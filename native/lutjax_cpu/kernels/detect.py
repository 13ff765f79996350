"""`lutjax.detect`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.detect import Detect
from lutjax.values._detection import Detection
from lutjax.values._fixed_point import addend_dtype
from lutjax_cpu._call import detection_of, kernel, scale


def forward(call: Detect, *, device: Any) -> Detection:
    assert call.x is not None
    index, flip, margin = kernel(
        "detect_forward",
        (call.x, call.anchors),
        detection_of((call.x.shape[0], call.anchors.shape[0])),
        numbers=(call.epsilon,),
    )
    return Detection(index, flip, margin, call.anchors.shape[1])


def backward(
    call: Detect, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    # The derivative needs the two inputs of the closest pair, which `flip` names.
    assert call.flip is not None
    shape = (cotangent.shape[0], call.n_inputs)
    (dx,) = kernel(
        "detect_backward",
        (call.anchors, call.flip, cotangent.astype(jnp.float32)),
        (jax.ShapeDtypeStruct(shape, addend_dtype(jnp.float32, call.accumulate)),),
        integers=(call.accumulate is not None,),
        numbers=(scale(call.accumulate),),
    )
    return {"x": dx}

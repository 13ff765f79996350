"""`lutjax.detect_signs`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.detect_signs import DetectSigns
from lutjax.values._detection import Detection
from lutjax_cpu._call import detection_of, kernel


def forward(call: DetectSigns, *, device: Any) -> Detection:
    positions = call.positions
    assert positions is not None
    shapes = detection_of(positions.shape[:1])
    index, flip, margin = kernel(
        "detect_signs_forward", (positions,), shapes, numbers=(call.epsilon,)
    )
    return Detection(index, flip, margin, call.n_bits)


def backward(
    call: DetectSigns, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    assert call.flip is not None
    shape = jax.ShapeDtypeStruct((cotangent.shape[0], call.n_bits), jnp.float32)
    arrays = (call.flip, cotangent.astype(jnp.float32))
    (d_positions,) = kernel("detect_signs_backward", arrays, (shape,))
    return {"positions": d_positions}

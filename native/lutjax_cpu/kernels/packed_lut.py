"""`lutjax.packed_lut`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.packed_lut import PackedLut
from lutjax_cpu._call import kernel


def forward(call: PackedLut, *, device: Any) -> jax.Array:
    words, wires = call.words, call.wires
    outline = jax.ShapeDtypeStruct((wires.shape[0], words.shape[1]), jnp.uint32)
    (y,) = kernel(
        "packed_lut_forward", (words, call.truth, wires), (outline,), integers=(wires.shape[1],)
    )
    return y

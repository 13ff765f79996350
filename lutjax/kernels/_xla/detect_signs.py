"""`lutjax.detect_signs` in plain JAX.

Formula: ``delta[r] = positions[r]``; index, flip and margin follow as in `detect`.
``dpositions[closest] = dmargin`` and 0 elsewhere. Numerics: see `detect`; each position has at most
one cotangent, so nothing is summed.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla.detect import closest_pair, detect_closest
from lutjax.ops.detect_signs import DetectSigns
from lutjax.values._detection import Detection
from lutjax.values._dtypes import accumulator


def forward(call: DetectSigns, *, device: Device) -> Detection:
    assert call.positions is not None
    dtype = accumulator(call.positions.dtype)
    values = call.positions.astype(dtype).T
    return detect_closest(list(values), call.positions.shape[:1], dtype, call.epsilon)


def backward(
    call: DetectSigns, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    assert call.flip is not None
    bit = jax.lax.broadcasted_iota(jnp.int32, (*cotangent.shape, call.n_bits), 1)
    # A comparison instead of a scatter: one element per detector is not zero, and XLA fuses it.
    return {"positions": jnp.where(bit == closest_pair(call.flip)[:, None], cotangent[:, None], 0)}

"""`lutjax.packed_lut` on TensorCores."""

import jax
import jax.numpy as jnp

from lutjax.kernels._pallas.tpu import _wires
from lutjax.kernels._xla import packed_lut as plain
from lutjax.kernels.registry import Device


def forward(words: jax.Array, truth: jax.Array, wires: jax.Array, *, device: Device) -> jax.Array:
    if 0 in (words.size, wires.size):
        return plain.forward(words, truth, wires, device=device)
    x, masks = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in (words, jnp.stack(plain.masks(truth), 1)))
    y = _wires.apply(plain.value, x, masks, wires, dtype=x.dtype, name="packed_lut", device=device)
    return jax.lax.bitcast_convert_type(y, words.dtype)

"""`lutjax.detect_signs` in plain JAX."""

import jax
import jax.numpy as jnp

from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax.kernels._xla.detect import closest, closest_pair
from lutjax.kernels.registry import Device


def forward(positions: jax.Array, *, epsilon: float, device: Device) -> Detection:
    dtype = accumulator(positions.dtype)
    values = positions.astype(dtype).T
    return closest(list(values), positions.shape[:1], dtype, epsilon)


def backward(
    saved: tuple[Detection], d_margin: jax.Array, needs: tuple[bool, ...], *, epsilon: float, device: Device
) -> tuple[jax.Array]:
    (d,) = saved
    bit = jax.lax.broadcasted_iota(jnp.int32, (*d_margin.shape, d.bits), 1)
    return (jnp.where(bit == closest_pair(d.flip)[:, None], d_margin[:, None], 0),)

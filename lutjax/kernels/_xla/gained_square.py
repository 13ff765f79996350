"""`lutjax.gained_square` in plain JAX: ``y = gain x**2``; ``dx = 2 gain x dy``; ``dgain = sum over samples of x**2 dy``."""

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.ops.gained_square import GainedSquare
from lutjax.values._dtypes import accumulator


def forward(call: GainedSquare, *, device: Device) -> jax.Array:
    dtype = accumulator(call.x.dtype)
    return (call.gain.astype(dtype)[None] * jnp.square(call.x.astype(dtype))).astype(call.x.dtype)


def backward(
    call: GainedSquare, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype = accumulator(call.x.dtype)
    x, dy, found = call.x.astype(dtype), cotangent.astype(dtype), {}
    if "x" in needs:
        found["x"] = 2 * call.gain.astype(dtype)[None] * x * dy
    if "gain" in needs:
        found["gain"] = jnp.sum(jnp.square(x) * dy, 0)
    return found

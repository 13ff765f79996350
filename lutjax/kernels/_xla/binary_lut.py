"""`lutjax.binary_lut` in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._dtypes import accumulator
from lutjax.kernels._xla import _slots, _wires
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    address = jnp.zeros((wires.shape[0], x.shape[1]), jnp.int32)
    for place, read in enumerate(_wires.rows(x, wires, x.dtype)):
        address = address | jnp.left_shift((read > 0).astype(jnp.int32), place)
    return jnp.take_along_axis(table, address, 1, mode="clip").astype(x.dtype)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, readers = saved
    dtype = accumulator(x.dtype, table.dtype)
    dy, read = dy.astype(dtype), _wires.rows(x, wires, x.dtype)
    dx = d_table = None
    if needs[1]:
        d_table = _slots.of_table(table.shape[1], [(a > 0).astype(dtype) for a in read], dy)
    if needs[0]:
        softened = [jnp.where(a > 0, 0.75, 0.25).astype(dtype) for a in read]
        by_wire = [0.5 * dy * slope for slope in _slots.slopes(table.astype(dtype), softened)]
        dx = _wires.to_inputs(by_wire, wires, readers, x.shape[0])
    return dx, d_table, None, None

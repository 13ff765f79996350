"""`lutjax.soft_lut` in plain JAX."""

from typing import Any

import jax

from lutjax._dtypes import accumulator
from lutjax.kernels._xla import _slots, _wires
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    dtype = accumulator(x.dtype, table.dtype)
    return _slots.value(table.astype(dtype), _wires.rows(x, wires, dtype)).astype(x.dtype)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, readers = saved
    dtype = accumulator(x.dtype, table.dtype)
    dy, read = dy.astype(dtype), _wires.rows(x, wires, dtype)
    dx = d_table = None
    if needs[1]:
        d_table = _slots.of_table(table.shape[1], read, dy)
    if needs[0]:
        by_wire = [dy * slope for slope in _slots.slopes(table.astype(dtype), read)]
        dx = _wires.to_inputs(by_wire, wires, readers, x.shape[0])
    return dx, d_table, None, None

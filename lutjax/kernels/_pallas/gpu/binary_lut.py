"""`lutjax.binary_lut` in Mosaic GPU."""

from typing import Any

import jax

from lutjax._dtypes import accumulator
from lutjax.kernels._pallas.gpu import _by_address
from lutjax.kernels._xla import _slots, binary_lut as plain
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    if 0 in (x.size, wires.size):
        return plain.forward(x, table, wires, readers, device=device)
    addresses = _by_address.pack_addresses(x, wires)
    return _by_address.look_up(addresses, table, x.shape[1]).astype(x.dtype)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, readers = saved
    if 0 in (x.size, wires.size):
        return plain.backward(saved, dy, needs, device=device)
    addresses = _by_address.pack_addresses(x, wires)
    dx = d_table = None
    if needs[1]:
        d_table = _by_address.sum_by_address(addresses, dy, table.shape[1])
    if needs[0] and readers is not None and readers.shape[1]:
        slopes = _slots.slopes_at_addresses(table.astype(accumulator(x.dtype, table.dtype)))
        dx = _by_address.sum_over_readers(addresses, slopes, readers, dy, wires.shape[1])
    elif needs[0]:
        # Without readers there is nothing to gather, and XLA scatters.
        dx = plain.backward(saved, dy, (True, False, False, False), device=device)[0]
    return dx, d_table, None, None

"""`lutjax.binary_lut` on TensorCores."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.kernels._pallas.tpu import _wires, soft_lut
from lutjax.kernels._xla import binary_lut as plain
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    if 0 in (x.size, wires.size):
        return plain.forward(x, table, wires, readers, device=device)
    return _wires.apply(_value, x, table, wires, dtype=x.dtype, name="binary_lut", device=device)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, _ = saved
    if 0 in (x.size, wires.size):
        return plain.backward(saved, dy, needs, device=device)
    dx, d_table = _wires.differentiate(
        _of_slots if needs[1] else None,
        _of_inputs if needs[0] else None,
        x,
        table,
        wires,
        dy,
        name="binary_lut_backward",
        device=device,
    )
    return dx, d_table, None, None


def _value(slots: Sequence[jax.Array], read: Sequence[jax.Array]) -> jax.Array:
    return _chosen(slots, [a > 0 for a in read])


def _chosen(slots: Sequence[jax.Array], bits: Sequence[jax.Array]) -> jax.Array:
    """The slot that is addressed."""
    if not bits:
        return slots[0]
    half = len(slots) // 2
    return jnp.where(bits[-1], _chosen(slots[half:], bits[:-1]), _chosen(slots[:half], bits[:-1]))


def _of_slots(slots: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array) -> Sequence[jax.Array]:
    return soft_lut.of_slots(slots, [(a > 0).astype(g.dtype) for a in read], g)


def _of_inputs(slots: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array) -> Sequence[jax.Array]:
    """Half of what the interpolation gives at softened bits."""
    return soft_lut.of_bits(slots, [jnp.where(a > 0, 0.75, 0.25).astype(g.dtype) for a in read], 0.5 * g)

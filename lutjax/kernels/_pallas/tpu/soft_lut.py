"""`lutjax.soft_lut` on TensorCores."""

from collections.abc import Sequence
from typing import Any

import jax

from lutjax.kernels._pallas.tpu import _wires
from lutjax.kernels._xla import soft_lut as plain
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    if 0 in (x.size, wires.size):
        return plain.forward(x, table, wires, readers, device=device)
    return _wires.apply(value, x, table, wires, dtype=x.dtype, name="soft_lut", device=device)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, _ = saved
    if 0 in (x.size, wires.size):
        return plain.backward(saved, dy, needs, device=device)
    dx, d_table = _wires.differentiate(
        of_slots if needs[1] else None,
        of_bits if needs[0] else None,
        x,
        table,
        wires,
        dy,
        name="soft_lut_backward",
        device=device,
    )
    return dx, d_table, None, None


def value(slots: Sequence[jax.Array], bits: Sequence[jax.Array]) -> jax.Array:
    """The interpolation of ``2**n`` slots, depth first: few intermediate values at a time."""
    if not bits:
        return slots[0]
    half = len(slots) // 2
    low, high = value(slots[:half], bits[:-1]), value(slots[half:], bits[:-1])
    return low + bits[-1] * (high - low)


def of_slots(slots: Sequence[jax.Array], bits: Sequence[jax.Array], g: jax.Array) -> Sequence[jax.Array]:
    """Cotangents of the slots."""
    return jax.vjp(lambda slots: value(slots, bits), slots)[1](g)[0]


def of_bits(slots: Sequence[jax.Array], bits: Sequence[jax.Array], g: jax.Array) -> Sequence[jax.Array]:
    """Cotangents of the bits."""
    return jax.vjp(lambda bits: value(slots, bits), bits)[1](g)[0]

"""`lutjax.bilinear_gates` on TensorCores."""

from collections.abc import Sequence
from typing import Any

import jax

from lutjax.kernels._pallas.tpu import _wires
from lutjax.kernels._xla import bilinear_gates as plain
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    if 0 in (x.size, wires.size):
        return plain.forward(x, coefficients, wires, readers, device=device)
    return _wires.apply(_value, x, coefficients.T, wires, dtype=x.dtype, name="bilinear_gates", device=device)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, coefficients, wires, _ = saved
    if 0 in (x.size, wires.size):
        return plain.backward(saved, dy, needs, device=device)
    dx, sums = _wires.differentiate(
        _sums if needs[1] else None,
        _slopes if needs[0] else None,
        x,
        coefficients.T,
        wires,
        dy,
        name="bilinear_gates_backward",
        device=device,
    )
    return dx, None if sums is None else sums.T, None, None


def _value(c: Sequence[jax.Array], read: Sequence[jax.Array]) -> jax.Array:
    a, b = read
    return c[0] + c[1] * a + (c[2] + c[3] * a) * b


def _sums(c: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array) -> list[jax.Array]:
    a, b = read
    return [g, g * a, g * b, g * a * b]


def _slopes(c: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array) -> list[jax.Array]:
    a, b = read
    return [g * (c[1] + c[3] * b), g * (c[2] + c[3] * a)]

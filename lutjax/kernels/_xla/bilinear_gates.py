"""`lutjax.bilinear_gates` in plain JAX."""

from typing import Any

import jax

from lutjax._dtypes import accumulator
from lutjax.kernels._xla import _wires
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    dtype = accumulator(x.dtype, coefficients.dtype)
    a, b = _wires.rows(x, wires, dtype)
    c0, c1, c2, c3 = (c[:, None] for c in coefficients.astype(dtype))
    return (c0 + c1 * a + (c2 + c3 * a) * b).astype(x.dtype)


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, coefficients, wires, readers = saved
    dtype = accumulator(x.dtype, coefficients.dtype)
    coefficients, dy = coefficients.astype(dtype), dy.astype(dtype)
    dx = d_coefficients = None
    if needs[1]:
        a, b = _wires.rows(x, wires, dtype)
        d_coefficients = _wires.sum_over_samples([dy, dy * a, dy * b, dy * a * b])
    if needs[0]:
        a, b = _wires.rows(x, wires, dtype)
        _, c1, c2, c3 = (c[:, None] for c in coefficients)
        dx = _wires.to_inputs([dy * (c1 + c3 * b), dy * (c2 + c3 * a)], wires, readers, x.shape[0])
        # Else XLA computes a layer's cotangents anew for every reader of the layer before it.
        dx = jax.lax.optimization_barrier(dx)
    return dx, d_coefficients, None, None

"""`lutjax.bilinear_gates` in plain JAX.

``y = c0 + c1 a + c2 b + c3 a b`` with ``a, b = x[wires]``; ``dx[wires] += dy (c1 + c3 b), dy (c2 + c3 a)``;
``dcoefficients = sum over samples of dy, dy a, dy b, dy a b``.
"""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _integer_gates, _wire_gathers
from lutjax.kernels._xla._row_gathers import in_sequence, read
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.values._dtypes import accumulator

# Outputs of a layer that stays in the cache of a CPU; then so does what is made of each of them.
_SMALL = 2**19


def forward(call: BilinearGates, *, device: Device) -> jax.Array:
    if _integer_gates.are_in(call):
        return _integer_gates.forward_of_gates(call, device=device)
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    a, b = _wire_gathers.rows(call.x, call.wires, dtype)
    c0, c1, c2, c3 = (c[:, None] for c in call.coefficients.astype(dtype))
    return (c0 + c1 * a + (c2 + c3 * a) * b).astype(call.x.dtype)


def backward(
    call: BilinearGates, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _integer_gates.are_in(call):
        return _integer_gates.backward_of_gates(call, cotangent, needs, device=device)
    x, wires, readers = call.x, call.wires, call.readers
    dtype = accumulator(x.dtype, call.coefficients.dtype)
    coefficients, dy = call.coefficients.astype(dtype), cotangent.astype(dtype)
    found = {}
    # A batch that is a symbolic dimension of an export may be of any size.
    small = in_sequence(device) and isinstance(dy.size, int) and dy.size <= _SMALL
    if "coefficients" in needs:
        a, b = _wire_gathers.rows(x, wires, dtype)
        parts = 4 if small and not dy.shape[1] % 4 else 1
        found["coefficients"] = _wire_gathers.sum_over_samples([dy, dy * a, dy * b, dy * a * b], parts)
    if "x" in needs:
        if readers is not None and _wire_gathers.gathered(wires, readers) and not small:
            dx = _from_readers(x, coefficients, wires, readers, dy)
        else:
            a, b = _wire_gathers.rows(x, wires, dtype)
            _, c1, c2, c3 = (c[:, None] for c in coefficients)
            dx = _wire_gathers.to_inputs([dy * (c1 + c3 * b), dy * (c2 + c3 * a)], wires, readers, x.shape[0])
            if small:  # else XLA computes it anew for every reader of a layer before, in a stack of them
                dx = jax.lax.optimization_barrier(dx)
        found["x"] = dx
    return found


def _from_readers(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, readers: jax.Array, dy: jax.Array
) -> jax.Array:
    """The cotangent of each input from its readers' own, their slopes and their other inputs, in one pass."""
    dtype = dy.dtype
    wires = _wire_gathers.clamped(wires, x.shape[0])
    _, c1, c2, c3 = coefficients
    dx = zeros_varying(dy, x.shape, dtype)
    for place, exists in _wire_gathers.places(readers, wires.size):
        gate, second = place // 2, place % 2
        other = read(x, read(wires, gate, 1 - second)).astype(dtype)
        slope = jnp.where(second == 1, read(c2, gate), read(c1, gate))
        cotangent = read(dy, gate) * (slope[:, None] + read(c3, gate)[:, None] * other)
        dx = dx + jnp.where(exists[:, None], cotangent, 0)
    return dx

"""`lutjax.bilinear_gates` in plain JAX.

Formula for gate ``g`` with ``a, b = x[wires[g]]``::

    y = c0 + c1 a + c2 b + c3 a b
    dx[wires[g]] += dy (c1 + c3 b), dy (c2 + c3 a)
    dcoefficients = sum over samples of dy, dy a, dy b, dy a b

Work and layout: features first, ``[features, samples]``; see `_wire_gathers`. Large layers with
fan-out lists compute the cotangent of each input from its readers in one pass, without an array by
wire.

Numerics: accumulator dtype; the output is rounded to the dtype of ``x``. Readers add in listed
order. In fixed point see `_integer_gates`. Wire ids are clamped.
"""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _integer_gates, _wire_gathers
from lutjax.kernels._xla._row_gathers import in_sequence, read
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.values._dtypes import accumulator

# Maximum number of outputs for which a layer and its cotangents stay in the CPU cache.
_SMALL = 2**19


def forward(call: BilinearGates, *, device: Device) -> jax.Array:
    if _integer_gates.are_in(call):
        return _integer_gates.forward_of_gates(call, device=device)
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    a, b = _wire_gathers.rows(call.x, call.wires, dtype)
    c0, c1, c2, c3 = (c[:, None] for c in call.coefficients.astype(dtype))
    # Three multiply-adds; the expanded form needs one more product.
    return (c0 + c1 * a + (c2 + c3 * a) * b).astype(call.x.dtype)


def backward(
    call: BilinearGates, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _integer_gates.are_in(call):
        return _integer_gates.backward_of_gates(call, cotangent, needs, device=device)
    x, wires, readers = call.x, call.wires, call.readers
    dtype = accumulator(x.dtype, call.coefficients.dtype)
    coefficients, dy = call.coefficients.astype(dtype), cotangent.astype(dtype)
    cotangents = {}
    # A symbolic batch dimension in an export may have any size.
    small = in_sequence(device) and isinstance(dy.size, int) and dy.size <= _SMALL
    if "coefficients" in needs:
        a, b = _wire_gathers.rows(x, wires, dtype)
        # Four independent chains of additions hide the latency of an addition on CPUs.
        parts = 4 if small and not dy.shape[1] % 4 else 1
        cotangents["coefficients"] = _wire_gathers.sum_over_samples(
            [dy, dy * a, dy * b, dy * a * b], parts
        )
    if "x" in needs:
        # Recomputing the slopes per reader costs more reads of x, but saves writing and reading two
        # cotangents per gate: measured twice as fast on large layers. In a small layer these stay
        # in the cache.
        if readers is not None and _wire_gathers.sums_over_readers(wires, readers) and not small:
            dx = _from_readers(x, coefficients, wires, readers, dy)
        else:
            a, b = _wire_gathers.rows(x, wires, dtype)
            _, c1, c2, c3 = (c[:, None] for c in coefficients)
            dx = _wire_gathers.to_inputs(
                [dy * (c1 + c3 * b), dy * (c2 + c3 * a)], wires, readers, x.shape[0]
            )
            if small:  # else XLA recomputes it for every reader in stacked layers
                dx = jax.lax.optimization_barrier(dx)
        cotangents["x"] = dx
    return cotangents


def _from_readers(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, readers: jax.Array, dy: jax.Array
) -> jax.Array:
    """Return the input cotangents from their readers in one pass."""
    dtype = dy.dtype
    wires = _wire_gathers.clamp_wires(wires, x.shape[0])
    _, c1, c2, c3 = coefficients
    dx = zeros_varying(dy, x.shape, dtype)
    for place, exists in _wire_gathers.reader_wires(readers, wires.size):
        gate, second = place // 2, place % 2
        # Wire number = 2 * gate + position: the other input of the gate has the other position.
        other = read(x, read(wires, gate, 1 - second)).astype(dtype)
        slope = jnp.where(second == 1, read(c2, gate), read(c1, gate))
        cotangent = read(dy, gate) * (slope[:, None] + read(c3, gate)[:, None] * other)
        # A select: entries without a reader read gate 0, whose cotangent may be NaN.
        dx = dx + jnp.where(exists[:, None], cotangent, 0)
    return dx

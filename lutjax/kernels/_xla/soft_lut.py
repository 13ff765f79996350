"""`lutjax.soft_lut` in plain JAX.

Formula for gate ``g`` with inputs ``x_l = x[wires[g, l]]``::

    y[g] = sum over slots k of table[g, k] * product over l of (x_l if bit l of k else 1 - x_l)
    dx[wires[g, l]] += dy[g] * (d y[g] / d x_l)
    dtable[g, k] = sum over samples of dy[g] * product

Work and layout: features first, see `_slot_polynomials` and `_wire_gathers`. Numerics: accumulator
dtype; in fixed point see `_integer_gates`. Wire ids are clamped.
"""

import jax

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _integer_gates, _slot_polynomials, _wire_gathers
from lutjax.ops.soft_lut import SoftLut
from lutjax.values._dtypes import accumulator


def forward(call: SoftLut, *, device: Device) -> jax.Array:
    if _integer_gates.are_in(call):
        return _integer_gates.forward_of_soft_lut(call, device=device)
    x, table, wires = call.x, call.table, call.wires
    dtype = accumulator(x.dtype, table.dtype)
    return _slot_polynomials.value(table.astype(dtype), _wire_gathers.rows(x, wires, dtype)).astype(
        x.dtype
    )


def backward(
    call: SoftLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _integer_gates.are_in(call):
        return _integer_gates.backward_of_soft_lut(call, cotangent, needs, device=device)
    x, table, wires = call.x, call.table, call.wires
    dtype = accumulator(x.dtype, table.dtype)
    dy, read = cotangent.astype(dtype), _wire_gathers.rows(x, wires, dtype)
    cotangents = {}
    if "table" in needs:
        cotangents["table"] = _slot_polynomials.table_cotangent(table.shape[1], read, dy)
    if "x" in needs:
        # The slopes are recomputed: saving them would store n arrays of the size of the output.
        by_wire = [dy * slope for slope in _slot_polynomials.slopes(table.astype(dtype), read)]
        cotangents["x"] = _wire_gathers.to_inputs(by_wire, wires, call.readers, x.shape[0])
    return cotangents

"""`lutjax.binary_lut` in plain JAX: ``y = table[address]``, bit ``l`` of the address ``x_l > 0``; backward `soft_lut` at 1/4 and 3/4, halved."""

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _integer_gates, _slot_polynomials, _wire_gathers
from lutjax.ops.binary_lut import BinaryLut
from lutjax.values._dtypes import accumulator


def forward(call: BinaryLut, *, device: Device) -> jax.Array:
    x, table, wires = call.x, call.table, call.wires
    address = jnp.zeros((wires.shape[0], x.shape[1]), jnp.int32)
    for place, read in enumerate(_wire_gathers.rows(x, wires, x.dtype)):
        address = address | jnp.left_shift((read > 0).astype(jnp.int32), place)
    return jnp.take_along_axis(table, address, 1, mode="clip").astype(x.dtype)


def backward(
    call: BinaryLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _integer_gates.are_in(call):
        return _integer_gates.backward_of_binary_lut(call, cotangent, needs, device=device)
    x, table, wires = call.x, call.table, call.wires
    dtype = accumulator(x.dtype, table.dtype)
    dy, read = cotangent.astype(dtype), _wire_gathers.rows(x, wires, x.dtype)
    found = {}
    if "table" in needs:
        found["table"] = _slot_polynomials.of_table(table.shape[1], [a > 0 for a in read], dy)
    if "x" in needs:
        softened = [jnp.where(a > 0, 0.75, 0.25).astype(dtype) for a in read]
        by_wire = [0.5 * dy * slope for slope in _slot_polynomials.slopes(table.astype(dtype), softened)]
        found["x"] = _wire_gathers.to_inputs(by_wire, wires, call.readers, x.shape[0])
    return found

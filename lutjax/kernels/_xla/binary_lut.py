"""`lutjax.binary_lut` in plain JAX.

Formula for gate ``g``: bit ``l`` of the address is ``x[wires[g, l]] > 0``, and ``y[g] = table[g,
address]``. ``dtable[g, address] += dy[g]``. The surrogate gradient of the inputs is half of the
gradient of `soft_lut` with inputs 3/4 for set bits and 1/4 for unset bits.

Layout: features first, ``[features, samples]``. Numerics: sums use the accumulator dtype; a NaN
input is an unset bit. In fixed point see `_integer_gates`. Wire ids are clamped.
"""

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
    # Addresses are in range by construction; clip only avoids the NaN fill of the default mode.
    return jnp.take_along_axis(table, address, 1, mode="clip").astype(x.dtype)


def backward(
    call: BinaryLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _integer_gates.are_in(call):
        return _integer_gates.backward_of_binary_lut(call, cotangent, needs, device=device)
    x, table, wires = call.x, call.table, call.wires
    dtype = accumulator(x.dtype, table.dtype)
    dy, read = cotangent.astype(dtype), _wire_gathers.rows(x, wires, x.dtype)
    cotangents = {}
    if "table" in needs:
        # Booleans select slots; 0/1 floats would multiply an infinite cotangent by 0.
        cotangents["table"] = _slot_polynomials.table_cotangent(
            table.shape[1], [a > 0 for a in read], dy
        )
    if "x" in needs:
        softened = [jnp.where(a > 0, 0.75, 0.25).astype(dtype) for a in read]
        by_wire = [
            0.5 * dy * slope for slope in _slot_polynomials.slopes(table.astype(dtype), softened)
        ]
        cotangents["x"] = _wire_gathers.to_inputs(by_wire, wires, call.readers, x.shape[0])
    return cotangents

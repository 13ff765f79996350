"""`lutjax.packed_lut` on TensorCores.

Formula for gate ``g``: a polynomial in its wires' words, ``m0 ^ a & (m1 ^ b & m3) ^ b & m2`` for
two wires, with masks ``m`` that are all ones or all zeros. Work and layout: see `_gate_kernels`.
Exact.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas.tpu import _gate_blocks, _gate_kernels
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import packed_lut as plain
from lutjax.ops.packed_lut import PackedLut

SPEC = Declaration(tensorcore_rule(_gate_blocks.unsupported, _gate_blocks.slower, "bool"))


def forward(call: PackedLut, *, device: Device) -> jax.Array:
    if 0 in (call.words.size, call.wires.size):
        return plain.forward(call, device=device)
    arrays = call.words, jnp.stack(plain.masks(call.truth), 1)
    # Kernels have 32-bit signed integers; ands and exclusive ors do not depend on the sign.
    x, masks = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in arrays)
    y = _gate_kernels.apply(
        plain.value, x, masks, call.wires, dtype=x.dtype, name=call.op, device=device
    )
    return jax.lax.bitcast_convert_type(y, call.words.dtype)

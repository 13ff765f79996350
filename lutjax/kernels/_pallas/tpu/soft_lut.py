"""`lutjax.soft_lut` on TensorCores.

Formula for gate ``g``: ``y = sum_k table[g, k] * prod_l (x_l if k's bit l else 1 - x_l)``. Work,
layout and numerics: see `_gate_kernels`. Cotangents are interpolation VJPs, traced in the kernel.
"""

from collections.abc import Sequence

import jax

from lutjax.dispatch.registry import Declaration
from lutjax.kernels._pallas.tpu import _gate_blocks
from lutjax.kernels._pallas.tpu._gate_kernels import GateKernels
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import soft_lut as plain

SPEC = Declaration(tensorcore_rule(_gate_blocks.unsupported, _gate_blocks.slower))


def value(slots: Sequence[jax.Array], bits: Sequence[jax.Array]) -> jax.Array:
    """Interpolate ``2**n`` slots, depth first: few intermediate values at a time."""
    if not bits:
        return slots[0]
    half = len(slots) // 2
    # Slots of the highest bit are halves of the list.
    low, high = value(slots[:half], bits[:-1]), value(slots[half:], bits[:-1])
    return low + bits[-1] * (high - low)


def slot_cotangents(
    slots: Sequence[jax.Array], bits: Sequence[jax.Array], g: jax.Array
) -> Sequence[jax.Array]:
    return jax.vjp(lambda slots: value(slots, bits), slots)[1](g)[0]


def bit_cotangents(
    slots: Sequence[jax.Array], bits: Sequence[jax.Array], g: jax.Array
) -> Sequence[jax.Array]:
    return jax.vjp(lambda bits: value(slots, bits), bits)[1](g)[0]


_kernels = GateKernels(plain, "table", value, slot_cotangents, bit_cotangents)
forward, backward = _kernels.forward, _kernels.backward

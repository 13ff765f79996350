"""`lutjax.binary_lut` on TensorCores.

Formula for gate ``g``: ``y = table[g, address]``, with address bit ``l`` set if ``x[wires[g, l]] >
0``. Input cotangents are half the `lutjax.soft_lut` cotangents at bits 1/4 and 3/4. Work, layout
and numerics: see `_gate_kernels`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Declaration
from lutjax.kernels._pallas.tpu import _gate_blocks, soft_lut
from lutjax.kernels._pallas.tpu._gate_kernels import GateKernels
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import binary_lut as plain

SPEC = Declaration(tensorcore_rule(_gate_blocks.unsupported, _gate_blocks.slower))


def _value(slots: Sequence[jax.Array], read: Sequence[jax.Array]) -> jax.Array:
    return _select_slot(slots, [a > 0 for a in read])


def _select_slot(slots: Sequence[jax.Array], bits: Sequence[jax.Array]) -> jax.Array:
    if not bits:
        return slots[0]
    half = len(slots) // 2
    # A tree of selects: lanes cannot gather from a table by address.
    return jnp.where(
        bits[-1], _select_slot(slots[half:], bits[:-1]), _select_slot(slots[:half], bits[:-1])
    )


def _slot_cotangents(
    slots: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array
) -> Sequence[jax.Array]:
    # At bits of 0 and 1 the share of the addressed slot is 1, and of all other slots 0.
    return soft_lut.slot_cotangents(slots, [(a > 0).astype(g.dtype) for a in read], g)


def _input_cotangents(
    slots: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array
) -> Sequence[jax.Array]:
    return soft_lut.bit_cotangents(
        slots, [jnp.where(a > 0, 0.75, 0.25).astype(g.dtype) for a in read], 0.5 * g
    )


_kernels = GateKernels(plain, "table", _value, _slot_cotangents, _input_cotangents)
forward, backward = _kernels.forward, _kernels.backward

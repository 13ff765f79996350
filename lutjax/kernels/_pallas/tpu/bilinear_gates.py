"""`lutjax.bilinear_gates` on TensorCores.

Formula for gate ``g`` with ``a, b = x[wires[g]]``: ``y = c0 + c1 a + c2 b + c3 a b``; cotangents as
in `lutjax.kernels._xla.bilinear_gates`. Work, layout and numerics: see `_gate_kernels`.
"""

from collections.abc import Sequence

import jax

from lutjax.dispatch.registry import Declaration
from lutjax.kernels._pallas.tpu import _gate_blocks
from lutjax.kernels._pallas.tpu._gate_kernels import GateKernels
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import bilinear_gates as plain

SPEC = Declaration(tensorcore_rule(_gate_blocks.unsupported, _gate_blocks.slower))


def _value(c: Sequence[jax.Array], read: Sequence[jax.Array]) -> jax.Array:
    a, b = read
    return c[0] + c[1] * a + (c[2] + c[3] * a) * b


def _sums(c: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array) -> list[jax.Array]:
    a, b = read
    return [g, g * a, g * b, g * a * b]


def _slopes(c: Sequence[jax.Array], read: Sequence[jax.Array], g: jax.Array) -> list[jax.Array]:
    a, b = read
    return [g * (c[1] + c[3] * b), g * (c[2] + c[3] * a)]


# Coefficients are ``[4, G]`` in the op; the kernels take gates first.
_kernels = GateKernels(plain, "coefficients", _value, _sums, _slopes, slots_first=True)
forward, backward = _kernels.forward, _kernels.backward

"""`lutjax.soft_lut`."""

from typing import Any

import jax

from lutjax.ops.soft_lut import SoftLut
from lutjax_cpu.kernels import _tables_of_bits


def forward(call: SoftLut, *, device: Any) -> jax.Array:
    return _tables_of_bits.forward(call)


def backward(
    call: SoftLut, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    return _tables_of_bits.backward(call, cotangent, needs)

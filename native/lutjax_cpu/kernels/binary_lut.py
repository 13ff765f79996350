"""`lutjax.binary_lut`."""

from typing import Any

import jax

from lutjax.ops.binary_lut import BinaryLut
from lutjax_cpu.kernels import _tables_of_bits


def forward(call: BinaryLut, *, device: Any) -> jax.Array:
    return _tables_of_bits.forward(call)


def backward(
    call: BinaryLut, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    return _tables_of_bits.backward(call, cotangent, needs)

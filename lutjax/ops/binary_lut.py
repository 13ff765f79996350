"""Bit-addressed tables with finite-difference gradients."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _nan
from lutjax.ops._gates import TableGates, in_integers
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class BinaryLut(TableGates, op="binary_lut", features_first=True, output="t"):
    """The call of `lutjax.binary_lut`; see `TableGates`."""


def binary_lut(
    x: Float[Array, "..."],
    table: Float[Array, "gates slots"],
    wires: Int[Array, "gates bits"],
    *,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Read bit-addressed tables: ``y[g] = table[g, address]``, address bits ``x[wires[g, l]] > 0``.

    The input cotangent is the extended finite difference: slots with the input's bit set minus
    slots without it, weighted by 3 to the power of minus their distance from the address. It is
    half the `lutjax.soft_lut` cotangent at inputs 1/4 and 3/4 instead of 0 and 1.

    Definition for one sample. ``dy`` is the output cotangent::

        gate, n = np.arange(len(table)), wires.shape[1]
        bit = np.arange(2**n)[:, None] >> np.arange(n) & 1  # [slots, n]
        address = ((x[wires] > 0) << np.arange(n)).sum(axis=-1)
        y = table[gate, address]

        dtable = np.zeros_like(table)
        dtable[gate, address] = dy  # summed over samples
        dx = np.zeros_like(x)
        for l in range(n):
            differs = bit != bit[address][:, None]  # [gates, slots, n]
            distance = np.delete(differs, l, axis=-1).sum(axis=-1)
            share = 0.5 * 0.75 ** (n - 1) / 3.0**distance
            slope = (np.where(bit[:, l], table, -table) * share).sum(axis=-1)
            np.add.at(dx, wires[:, l], dy * slope)

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64; ``[I, ...]`` with ``feature_axis=0``. 0
        and NaN give bit 0.
      table: ``[G, 2**n]``, with n from 1 to 8.
      wires: int32 ``[G, n]``. Out-of-range traced ids are clamped. A table may read one input
        several times.
      readers: see `lutjax.bilinear_gates`.
      feature_axis: see `lutjax.bilinear_gates`.
      accumulate: see `lutjax.bilinear_gates`.
      implementation: see `lutjax.bilinear_gates`.

    Returns:
      ``[..., G]``, or ``[G, ...]``, with dtype ``x.dtype``.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or more than 8 bits.

    Source: docs/logic.md, section 3.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> table = jnp.array([[0.0, 10.0, 20.0, 30.0]])
      >>> lutjax.binary_lut(jnp.array([-0.5, 2.0]), table, jnp.array([[0, 1]]))
      Array([20.], dtype=float32)
    """
    _checks.tables_of_bits("binary_lut", x, table, wires, readers, feature_axis)
    arrays = (
        as_jax(x),
        as_jax(table),
        as_int32(wires),
        None if readers is None else as_int32(readers),
    )
    accumulate = _checks.accumulation("binary_lut", accumulate)
    call = (
        BinaryLut(*arrays)
        if accumulate is None
        else in_integers(BinaryLut)(*arrays, accumulate=accumulate)
    )
    y = jnp.asarray(apply(call, implementation=implementation, feature_axis=feature_axis))
    return _nan.propagate_nan(y, x)

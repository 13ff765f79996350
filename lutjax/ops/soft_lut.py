"""Tables over bits between 0 and 1."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops._gates import TableGates, in_integers
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class SoftLut(TableGates, op="soft_lut", features_first=True, output="t"):
    """The call of `lutjax.soft_lut`; see `TableGates`."""


def soft_lut(
    x: Float[Array, "..."],
    table: Float[Array, "gates slots"],
    wires: Int[Array, "gates bits"],
    *,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Interpolate bit-addressed tables multilinearly for inputs between 0 and 1.

    ``y[g] = sum_k table[g, k] * prod_l (x[wires[g, l]] if bit l of k else 1 - x[wires[g, l]])``.
    For inputs 0 and 1 this is the addressed slot. Wire 0 is the least significant address bit.

    Definition for one sample. ``dy`` is the output cotangent::

        n = wires.shape[1]
        bit = np.arange(2**n)[:, None] >> np.arange(n) & 1  # [slots, n]
        read = x[wires][:, None]
        share = np.where(bit, read, 1 - read)  # [gates, slots, n]
        y = (table * share.prod(axis=-1)).sum(axis=-1)

        dtable = dy[:, None] * share.prod(axis=-1)  # summed over samples
        dx = np.zeros_like(x)
        for l in range(n):
            others = np.delete(share, l, axis=-1).prod(axis=-1)
            slope = (np.where(bit[:, l], table, -table) * others).sum(axis=-1)
            np.add.at(dx, wires[:, l], dy * slope)

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64; ``[I, ...]`` with ``feature_axis=0``.
      table: ``[G, 2**n]``, with n from 1 to 8.
      wires: int32 ``[G, n]``. Out-of-range traced ids are clamped. A table may read one input
        several times.
      readers: see `lutjax.bilinear_gates`.
      feature_axis: see `lutjax.bilinear_gates`.
      accumulate: see `lutjax.bilinear_gates`.
      implementation: see `lutjax.bilinear_gates`.

    Returns:
      ``[..., G]``, or ``[G, ...]`` with dtype ``x.dtype``. Computed in the wider of both dtypes, at
      least float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or more than 8 bits.

    Source: docs/logic.md, section 3.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> table = jnp.array([[0.0, 10.0, 20.0, 30.0]])
      >>> lutjax.soft_lut(jnp.array([1.0, 0.5]), table, jnp.array([[0, 1]]))
      Array([20.], dtype=float32)
    """
    _checks.tables_of_bits("soft_lut", x, table, wires, readers, feature_axis)
    arrays = (
        as_jax(x),
        as_jax(table),
        as_int32(wires),
        None if readers is None else as_int32(readers),
    )
    accumulate = _checks.accumulation("soft_lut", accumulate)
    call = (
        SoftLut(*arrays)
        if accumulate is None
        else in_integers(SoftLut)(*arrays, accumulate=accumulate)
    )
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=feature_axis))

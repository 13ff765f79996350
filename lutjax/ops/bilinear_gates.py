"""Two-input gates as multilinear polynomials."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops._gates import in_integers, readers_of_part
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class BilinearGates(Call, op="bilinear_gates", features_first=True, output="t"):
    """The call of `lutjax.bilinear_gates`.

    Attributes:
      x: ``[I, B]`` floats, features first.
      coefficients: ``[4, G]`` floats.
      wires: int32 ``[G, 2]``, ids, possibly out of range.
      readers: int32 ``[I, F]`` from `lutjax.readers`, or None.

    Output and its cotangent: ``[G, B]``. Differentiable: `x`, `coefficients`.
    """

    x: jax.Array = batched(1, "i")
    coefficients: jax.Array = shared("c t")
    wires: jax.Array = shared("t w")
    readers: jax.Array | None = shared("i f", default=None)

    def select_shard(self, index: Any) -> "BilinearGates":
        if self.readers is None:
            return self
        return self.replace(readers=readers_of_part(self.readers, self.wires.size, index))


def bilinear_gates(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 gates"],
    wires: Int[Array, "gates 2"],
    *,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Evaluate two-input gates ``y = c0 + c1 a + c2 b + c3 a b`` with ``a, b = x[wires]``.

    Compute coefficients once, outside any scan, with `lutjax.gate_coefficients`.
    `lutjax.logic_gates` combines both.

    Definition for one sample. ``dy`` is the output cotangent::

        c0, c1, c2, c3 = coefficients
        a, b = x[wires[:, 0]], x[wires[:, 1]]
        y = c0 + c1 * a + c2 * b + c3 * a * b

        dx = np.zeros_like(x)
        np.add.at(dx, wires[:, 0], dy * (c1 + c3 * b))
        np.add.at(dx, wires[:, 1], dy * (c2 + c3 * a))
        dcoefficients = np.stack([dy, dy * a, dy * b, dy * a * b])  # summed over samples

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64; ``[I, ...]`` with ``feature_axis=0``.
      coefficients: ``[4, G]``, for the terms 1, a, b and ab.
      wires: int32 ``[G, 2]``. Out-of-range traced ids are clamped. A gate may read one input twice.
      readers: int32 ``[I, F]`` fan-out lists from `lutjax.readers`. With them, `x` gradients are
        gathered instead of scattered. Entries inconsistent with `wires` give wrong gradients.
      feature_axis: -1, or 0 if features come first. 0 is the kernels' own layout (contiguous
        samples per feature) and needs no transposition.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`. Its addends are the
        definition's products, term by term, for outputs and cotangents (docs/logic.md, section 11).
        Supported by plain JAX.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., G]``, or ``[G, ...]`` with dtype ``x.dtype``. Computed in the wider of both dtypes, at
      least float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> xor = jnp.array([[0.0], [1.0], [1.0], [-2.0]])
      >>> lutjax.bilinear_gates(jnp.array([[1.0, 0.0], [0.75, 0.5]]), xor, jnp.array([[0, 1]]))
      Array([[1. ],
             [0.5]], dtype=float32)
    """
    op = "bilinear_gates"
    _checks.check_gate_arguments(op, x, wires, readers, feature_axis)
    _checks.gates(op, coefficients, wires)
    arrays = (
        as_jax(x),
        as_jax(coefficients),
        as_int32(wires),
        None if readers is None else as_int32(readers),
    )
    accumulate = _checks.accumulation(op, accumulate)
    call = (
        BilinearGates(*arrays)
        if accumulate is None
        else in_integers(BilinearGates)(*arrays, accumulate=accumulate)
    )
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=feature_axis))

"""Two-input gates as learned mixtures of the sixteen logic gates."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops.bilinear_gates import bilinear_gates
from lutjax.values import _gate_mixtures
from lutjax.values._fixed_point import FixedPoint


def gate_coefficients(
    logits: Float[Array, "..."], *, hard: bool = False, axis: int = -1
) -> Float[jax.Array, "4 gates"]:
    """Compute the coefficients of 1, a, b and ab for mixtures of the sixteen gates.

    A gate's number is its truth table, read most significant bit first over ab = 00, 01, 10, 11: 1
    is and, 3 is a, 6 is xor, 7 is or, 14 is nand.

    Definition. ``dcoefficients`` is the output cotangent::

        answers = [np.arange(16) >> place & 1 for place in (3, 2, 1, 0)]  # to ab = 00, 01, 10, 11
        at_00, at_01, at_10, at_11 = answers
        ab = at_11 - at_10 - at_01 + at_00
        of_gates = np.stack([at_00, at_10 - at_00, at_01 - at_00, ab], axis=-1)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        coefficients = (p @ of_gates).T

        dp = (of_gates @ dcoefficients).T
        dlogits = p * (dp - (p * dp).sum(axis=-1, keepdims=True))

    Args:
      logits: ``[G, 16]`` float32, bfloat16, float16 or float64; ``[16, G]`` with ``axis=0``.
      hard: use the gate with the largest logit (the first maximum) instead of the mixture, without
        a gradient.
      axis: gate axis, -1 or 0.

    Returns:
      ``[4, G]`` for `lutjax.bilinear_gates`: float64 for float64 logits, else float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.gate_coefficients(10.0 * jnp.eye(16)[6:8], hard=True)  # xor and or
      Array([[ 0.,  0.],
             [ 1.,  1.],
             [ 1.,  1.],
             [-2., -1.]], dtype=float32)
    """
    _checks.logits("gate_coefficients", logits, axis)
    hard = _checks.flag("gate_coefficients", "hard", hard)
    coefficients: jax.Array = _gate_mixtures.coefficients(jnp.asarray(logits), hard=hard, axis=axis)
    return coefficients


def logic_gates(
    x: Float[Array, "..."],
    logits: Float[Array, "gates 16"],
    wires: Int[Array, "gates 2"],
    *,
    hard: bool = False,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Evaluate logic gates: `lutjax.gate_coefficients`, then `lutjax.bilinear_gates`.

    Definition::

        y = lutjax.bilinear_gates(x, lutjax.gate_coefficients(logits), wires)

    Args:
      x: ``[..., I]``, bits or values from 0 to 1; ``[I, ...]`` with ``feature_axis=0``.
      logits: ``[G, 16]``.
      wires: int32 ``[G, 2]``.
      hard: use the gate with the largest logit: bits in, bits out, without a `logits` gradient.
      readers: see `lutjax.bilinear_gates`.
      feature_axis: see `lutjax.bilinear_gates`.
      accumulate: see `lutjax.bilinear_gates`. Mixtures and their gradients involve one gate each
        and are not accumulated.
      implementation: see `lutjax.bilinear_gates`.

    Returns:
      ``[..., G]``, or ``[G, ...]``, with dtype ``x.dtype``.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> logits = 10.0 * jnp.eye(16)[jnp.array([6, 1])]  # xor and and: a half adder
      >>> wires = jnp.array([[0, 1], [0, 1]])
      >>> lutjax.logic_gates(jnp.array([[0.0, 1.0], [1.0, 1.0]]), logits, wires, hard=True)
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    _checks.logits("logic_gates", logits, -1)
    hard = _checks.flag("logic_gates", "hard", hard)
    return bilinear_gates(
        x,
        gate_coefficients(logits, hard=hard),
        wires,
        readers=readers,
        feature_axis=feature_axis,
        accumulate=accumulate,
        implementation=implementation,
    )

"""Squares with a gain for each input."""

import dataclasses

import jax
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.values._ids import as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class GainedSquare(Call, op="gained_square", output="i"):
    """The call of `lutjax.gained_square`.

    Attributes:
      x: ``[B, I]`` floats.
      gain: ``[I]`` floats.

    Output and its cotangent: ``[B, I]``. Differentiable: `x`, `gain`.
    """

    x: jax.Array = batched(1, "i")
    gain: jax.Array = shared("i")


def gained_square(
    x: Float[Array, "*batch inputs"], gain: Float[Array, " inputs"], *, implementation: Implementation = None
) -> Float[jax.Array, "*batch inputs"]:
    """Return ``gain * x**2``.

    Definition, for one row of inputs; ``dy`` is the cotangent of ``y``::

        y = gain * x**2

        dx = 2 * gain * x * dy
        dgain = x**2 * dy

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64.
      gain: ``[I]`` of the dtype of `x`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., I]``.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/semantics.md, section 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.gained_square(jnp.array([1.0, 3.0]), jnp.array([2.0, 1.0]))
      Array([2., 9.], dtype=float32)
    """
    _checks.floats("gained_square", "x", x, -1, "[..., inputs]")
    _checks.floats("gained_square", "gain", gain, 1, "[inputs]")
    _checks.require(gain.shape == x.shape[-1:], "gained_square", "gain", gain, f"x has {x.shape[-1]} inputs")
    result: jax.Array = apply(GainedSquare(as_jax(x), as_jax(gain)), implementation=implementation)
    return result

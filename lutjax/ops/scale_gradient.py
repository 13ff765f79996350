"""Gradient scaling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from lutjax._typing import Array, Scalar
from lutjax.dispatch import _table_reads
from lutjax.ops import _checks
from lutjax.values._derivatives import match_mapped_axes
from lutjax.values._ids import as_jax


def scale_gradient(
    x: Float[Array, "*shape"], factor: Scalar | Num[Array, "..."]
) -> Float[jax.Array, "*shape"]:
    """Return the input unchanged, and scale its cotangent by `factor`.

    Use it to scale a layer's learning rate: ``lookup(scale_gradient(weights, f), d)`` scales the
    table gradient but not the margin gradient.

    Definition. ``dy`` is the output cotangent::

        y = x

        dx = factor * dy

    Args:
      x: any shape, float32, bfloat16, float16 or float64.
      factor: a number, possibly traced, or an array with the rank of `x` that broadcasts to it,
        such as ``[T, 1, 1]`` for tables. It has no gradient.

    Returns:
      `x`.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 4; docs/semantics.md, section 8.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> jax.grad(lambda x: lutjax.scale_gradient(x, 0.5) ** 2)(jnp.float32(3.0))
      Array(3., dtype=float32)
    """
    if isinstance(x, int | float | np.generic | list | tuple):
        x = jnp.asarray(x)
    _checks.floats("scale_gradient", "x", x, None, "[...]")
    x = as_jax(x)
    kinds = (np.floating, np.integer, np.bool_)
    if not isinstance(factor, int | float) and not (
        isinstance(factor, np.generic | np.ndarray | jax.Array)
        and any(jnp.issubdtype(factor.dtype, kind) for kind in kinds)
    ):
        raise TypeError(
            f"scale_gradient: factor is {_checks.describe(factor)}; expected a number or a JAX or "
            "numpy array."
        )
    sizes = jnp.shape(factor)
    fits = not sizes or (
        len(sizes) == x.ndim and all(n in (1, m) for n, m in zip(sizes, x.shape, strict=True))
    )
    rule = (
        f"expected a number or an array that broadcasts to x, whose shape is {list(x.shape)}, and "
        "has as many axes"
    )
    _checks.require(fits, "scale_gradient", "factor", factor, rule)
    reads = _table_reads.current_reads()
    name = None if reads is None else reads.name(x)
    if reads is not None and name is not None:
        reads.scale(name, factor)
        return x
    return _scale(x, jax.lax.stop_gradient(jnp.asarray(factor, x.dtype)))


@jax.custom_jvp
def _scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    return match_mapped_axes(x, factor)


@_scale.defjvp
def _jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _scale(*primals), tangents[0] * primals[1]

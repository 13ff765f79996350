"""Gradient norms, dense or sparse."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.arguments import format_value
from lutjax.tables.collect import is_factored
from lutjax.tables.update import squared_norm
from lutjax.values._dtypes import accumulator

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(gradients: Any) -> jax.Array:
    """Return the joint norm over all gradients, like `optax.global_norm` for dense gradients.

    A row's gradients from repeated reads are summed first. This takes about as long as a row-rule
    step, and never allocates an array with the shape of the table, except inside a `jax.shard_map`
    with replicated tables.

    Args:
      gradients: a pytree of arrays and `TableGradient`.

    Returns:
      A scalar, float32 or, if there are float64 gradients, float64.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax import optim
      >>> x = jnp.array([[0.5, 0.25], [0.75, 0.25]])  # both look up row 1
      >>> d = lutjax.detect(x, jnp.array([[[0, 1]]]))
      >>> loss = lambda params: lutjax.lookup(params["weights"], d).sum()
      >>> _, gradients = optim.value_and_grad(loss)({"weights": jnp.zeros((1, 2, 1))})
      >>> optim.global_norm(gradients)
      Array(2., dtype=float32)
    """
    squares = []
    for g in jax.tree.leaves(gradients, is_leaf=is_factored):
        if is_factored(g):
            squares.append(squared_norm(g))
        else:
            g = jnp.asarray(g)  # Python numbers have no dtype
            squares.append(jnp.sum(jnp.square(jnp.abs(g).astype(accumulator(g.dtype)))))
    dtype = accumulator(jnp.dtype("float32"), *(s.dtype for s in squares))
    return jnp.sqrt(sum((s.astype(dtype) for s in squares), jnp.zeros((), dtype)))


def clip_by_global_norm(gradients: Any, max_norm: Any) -> Any:
    """Clip gradients to the global norm `max_norm`, like `optax.clip_by_global_norm`.

    Args:
    Args:
      gradients: a pytree of arrays and `TableGradient`, as from `value_and_grad`.
      max_norm: a positive number, perhaps traced.

    Raises:
      ValueError: a concrete `max_norm` is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax import optim
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> loss = lambda params: 8 * lutjax.lookup(params["weights"], d).sum()
      >>> _, gradients = optim.value_and_grad(loss)({"weights": jnp.zeros((1, 2, 1))})
      >>> optim.global_norm(optim.clip_by_global_norm(gradients, 0.5))
      Array(0.5, dtype=float32)
    """
    if not isinstance(max_norm, int | float) and not hasattr(max_norm, "dtype"):
        raise TypeError(
            f"clip_by_global_norm: max_norm is {format_value(max_norm)}; expected a number."
        )
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm is {max_norm}; it must be above 0.")
    norm = global_norm(gradients)
    limit = jnp.asarray(max_norm, norm.dtype)
    # With a NaN norm the comparison is False, and the gradients stay as they are.
    factor = jnp.where(norm > limit, limit / norm, jnp.ones_like(norm))

    def scale_gradient(gradient: Any) -> Any:
        if is_factored(gradient):
            return gradient.scaled(factor)
        return gradient * factor.astype(gradient.dtype)

    return jax.tree.map(scale_gradient, gradients, is_leaf=is_factored)

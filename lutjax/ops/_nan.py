"""NaN that an op would hide, shown to those who ask JAX for it."""

import jax
import jax.numpy as jnp

from lutjax._typing import Array


def shown(y: jax.Array, *inputs: Array) -> jax.Array:
    """`y`, all NaN under ``jax_debug_nans`` if there is a NaN in the inputs, so that JAX raises.

    A comparison with NaN is a bit of 0 and addresses a row like any other, so `y` itself does not show it.
    """
    if not jax.config.jax_debug_nans:  # type: ignore[attr-defined]
        return y
    for a in inputs:
        of_nan = jax.lax.stop_gradient(jnp.where(jnp.isnan(a), a, jnp.zeros_like(a)))
        y += jnp.sum(of_nan).astype(y.dtype)  # 0, or NaN
    return y

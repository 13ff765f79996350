"""NaN propagation under ``jax_debug_nans``."""

import jax
import jax.numpy as jnp

from lutjax._typing import Array


def propagate_nan(y: jax.Array, *inputs: Array) -> jax.Array:
    """Return `y`, all NaN under ``jax_debug_nans`` if an input has a NaN, so that JAX raises.

    A comparison with NaN gives bit 0 and addresses a regular row, so `y` would hide the NaN.
    """
    if not jax.config.jax_debug_nans:  # type: ignore[attr-defined]
        return y
    for a in inputs:
        # No derivative: this term may add NaN to the output, and nothing else.
        of_nan = jax.lax.stop_gradient(jnp.where(jnp.isnan(a), a, jnp.zeros_like(a)))
        y += jnp.sum(of_nan).astype(y.dtype)  # 0, or NaN
    return y

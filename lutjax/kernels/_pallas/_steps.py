"""Optimizer steps in kernel form."""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step


def rate_and_factor(step: Step) -> jax.Array:
    """Return the learning rate times the gradient factor in float32.

    The result is an array if `Step.differs_by_row`, otherwise a scalar.
    """
    # One factor for kernels: they scale the cotangent once instead of every addend.
    rate: jax.Array = step.rate.astype(jnp.float32)
    return rate if step.factor is None else rate * step.factor.astype(jnp.float32)

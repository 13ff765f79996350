"""The step of an update as the kernels in Pallas take it."""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step


def rate_and_factor(step: Step) -> jax.Array:
    """Return the learning rate times the factor of the gradient, float32: a scalar, or an array where `Step.differs_by_row`."""
    rate: jax.Array = step.rate.astype(jnp.float32)
    return rate if step.factor is None else rate * step.factor.astype(jnp.float32)

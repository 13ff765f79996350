"""Optimizer steps in the form that Pallas kernels take."""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step


def rate_and_factor(step: Step) -> jax.Array:
    """Return the learning rate times the factor of the gradient, float32: a scalar, or an array where `Step.differs_by_row`."""
    # One factor for kernels: they scale the cotangent once instead of every addend.
    rate: jax.Array = step.rate.astype(jnp.float32)
    return rate if step.factor is None else rate * step.factor.astype(jnp.float32)

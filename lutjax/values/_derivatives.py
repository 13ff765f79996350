"""Values with derivatives that are not theirs, in every mode of differentiation."""

from typing import Any

import jax
import jax.numpy as jnp


def mapped_as(value: jax.Array, *others: jax.Array) -> jax.Array:
    """Return `value`, mapped by a `jax.vmap` in scope as soon as one of the others is.

    JAX (0.12) returns wrong numbers or a TypeError, under `vmap` of `jit` or `checkpoint`, for a custom derivative that is
    mapped where its value is not.
    """
    for other in others:
        value = jnp.where(other == other, value, value)  # compilers leave the value alone
    return value


@jax.custom_jvp
def with_derivative_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """Return `value`, with the derivative of `other`."""
    return mapped_as(value, other)


@with_derivative_of.defjvp
def _with_derivative_of_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return with_derivative_of(*primals), tangents[1]

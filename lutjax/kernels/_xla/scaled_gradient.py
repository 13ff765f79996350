"""`lutjax.scale_gradient` in plain JAX: ``y = x``, ``dx = factor * dy``, in every mode of differentiation."""

from typing import Any

import jax

from lutjax.values._derivatives import mapped_as


@jax.custom_jvp
def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    return mapped_as(x, factor)


@_scaled.defjvp
def _jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _scaled(*primals), tangents[0] * primals[1]


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    return _scaled(x, jax.lax.stop_gradient(factor))

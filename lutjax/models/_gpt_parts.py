"""Table reads and initializers for `GPT` layers."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lutjax import names, reads
from lutjax.layers.initializers import Normal
from lutjax.values import Array

READS: dict[str, reads.Read] = dict(
    zip(
        names.READS,
        (
            reads.Hard(),
            reads.Blend(),
            reads.SoftSign(),
            reads.Confidence(),
            reads.Confidence(ways=1),
            reads.PowersOfTwo(),
            reads.PowersOfTwo(ways=1),
        ),
        strict=True,
    )
)
"""Table reads by name."""

STANDARD_DEVIATION = 0.02


class MatrixNormal(Normal):
    """Gaussian matrix initializer, compiled once per shape.

    Eager and jitted initialization are bit-identical: XLA folds the standard deviation into a
    constant of the sampler in both.
    """

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        sampled: jax.Array = _initialize(Normal(self.deviation), key, shape, jnp.dtype(dtype))
        return sampled


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _initialize(init: Normal, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return init(key, shape, dtype)

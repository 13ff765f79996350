"""Images moved, turned and stretched at random, so that a small data set shows more of each class."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lutjax._typing import Array

SHIFT, TURN, STRETCH = 0.5, 0.15, 0.1
"""Pixels, radians and the logarithm of a factor: the most that `warp` does with strength 1."""


def warp(
    key: Array, images: Float[Array, "batch rows columns"], strength: float | int = 1.0
) -> Float[jax.Array, "batch rows columns"]:
    """Moves, turns and stretches each image about its centre, by linear interpolation; what comes in is 0.

    Args:
      key: a key of `jax.random`.
      images: float32 ``[B, H, W]``.
      strength: with 1 up to half a pixel, 0.15 radians and 10 % in each direction, uniformly; 0 changes nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.training.augment import warp
      >>> image = jnp.zeros((1, 5, 5)).at[0, 2, 2].set(1.0)
      >>> bool((warp(jax.random.key(0), image, 0.0) == image).all())
      True
    """
    batch, height, width = images.shape
    random = strength * jax.random.uniform(key, (5, batch, 1, 1), images.dtype, -1, 1)
    down, right, turn = SHIFT * random[0], SHIFT * random[1], TURN * random[2]
    y = jnp.arange(height, dtype=images.dtype)[None, :, None] - (height - 1) / 2
    x = jnp.arange(width, dtype=images.dtype)[None, None, :] - (width - 1) / 2
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    # Where each pixel comes from, and the four pixels around that place.
    from_y = (cos * y - sin * x) * jnp.exp(STRETCH * random[3]) + down + (height - 1) / 2
    from_x = (sin * y + cos * x) * jnp.exp(STRETCH * random[4]) + right + (width - 1) / 2
    corners = jnp.asarray([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], images.dtype)[
        :, :, None, None, None
    ]
    at_y, at_x = jnp.floor(from_y)[None] + corners[:, 0], jnp.floor(from_x)[None] + corners[:, 1]
    share = (1 - jnp.abs(at_y - from_y[None])) * (1 - jnp.abs(at_x - from_x[None]))
    inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
    place = jnp.where(inside, at_y * width + at_x, 0).astype(jnp.int32)
    around = jnp.take_along_axis(images.reshape(1, batch, -1), place.reshape(4, batch, -1), 2)
    # A sum of an axis: XLA does not compute those anew wherever a pixel is read.
    return jnp.sum(jnp.where(inside, share, 0) * around.reshape(inside.shape), 0)

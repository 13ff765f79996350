"""Images moved, turned and stretched at random, so that a small data set shows more of each class."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lutjax._typing import Array

SHIFT, TURN, STRETCH = 0.5, 0.15, 0.1
"""Pixels, radians and the logarithm of a factor: the most that `warp` does with strength 1."""


def warp(
    key: Array, images: Float[Array, "batch rows columns *channels"], strength: float | int = 1.0
) -> Float[jax.Array, "batch rows columns *channels"]:
    """Moves, turns and stretches each image about its centre, by linear interpolation; what comes in is 0.

    Args:
      key: a key of `jax.random`.
      images: float32 ``[B, H, W]``, or ``[B, H, W, C]``, whose channels move together.
      strength: with 1 up to half a pixel, 0.15 radians and 10 % in each direction, uniformly; 0 changes nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.training.augment import warp
      >>> image = jnp.zeros((1, 5, 5)).at[0, 2, 2].set(1.0)
      >>> bool((warp(jax.random.key(0), image, 0.0) == image).all())
      True
    """
    batch = images.shape[0]
    random = strength * jax.random.uniform(key, (5, batch, 1, 1), images.dtype, -1, 1)
    # In two parts, one after the other: XLA would compute a pixel anew wherever it is read after a single one.
    moved = jax.lax.map(lambda of: _moved(*of), (images, random[:, :, 0, 0].T), batch_size=-(-batch // 2))
    return jnp.asarray(moved)


def _moved(image: jax.Array, random: jax.Array) -> jax.Array:
    """Return an image ``[H, W]`` or ``[H, W, C]`` that is changed by five numbers from minus to plus the strength."""
    height, width, *channels = image.shape
    down, right, turn = SHIFT * random[0], SHIFT * random[1], TURN * random[2]
    y = jnp.arange(height, dtype=image.dtype)[:, None] - (height - 1) / 2
    x = jnp.arange(width, dtype=image.dtype)[None, :] - (width - 1) / 2
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    # Where each pixel comes from.
    from_y = (cos * y - sin * x) * jnp.exp(STRETCH * random[3]) + down + (height - 1) / 2
    from_x = (sin * y + cos * x) * jnp.exp(STRETCH * random[4]) + right + (width - 1) / 2

    def plane(image: jax.Array) -> jax.Array:
        moved: jax.Array = jax.scipy.ndimage.map_coordinates(image, [from_y, from_x], 1, "constant")
        return moved

    return jax.vmap(plane, -1, -1)(image) if channels else plane(image)

"""Random image augmentation: mirroring, translation, rotation, scaling and elastic distortion."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lutjax.values import Array

SHIFT, TURN, STRETCH = 0.5, 0.15, 0.1
"""Limits of `warp` at strength 1: pixels, radians and a log factor."""


KNOTS = 5  # control points per image side for the distortion in `warp`


def mirror(
    key: Array, images: Float[Array, "batch rows columns *channels"], share: float | int = 0.5
) -> Float[jax.Array, "batch rows columns *channels"]:
    """Mirror each image left to right, with a given probability.

    Args:
      key: a key of `jax.random`.
      images: ``[B, H, W]`` or ``[B, H, W, C]``.
      share: probability for each image.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.training.augment import mirror
      >>> mirror(jax.random.key(0), jnp.array([[[1.0, 2.0]]]), 1.0)
      Array([[[2., 1.]]], dtype=float32)
    """
    images = jnp.asarray(images)
    chosen = jax.random.bernoulli(key, float(share), (len(images), *(1,) * (images.ndim - 1)))
    return jnp.where(chosen, images[:, :, ::-1], images)


def warp(
    key: Array,
    images: Float[Array, "batch rows columns *channels"],
    strength: float | int = 1.0,
    *,
    shift: float | int = 0.0,
    bend: float | int = 0.0,
) -> Float[jax.Array, "batch rows columns *channels"]:
    """Shift, rotate, scale and bend each image about its center, with zero padding.

    Interpolation is linear.

    Args:
      key: a key of `jax.random`.
      images: float32 ``[B, H, W]``, or ``[B, H, W, C]`` with the same transformation in all
        channels.
      strength: with 1 up to half a pixel, 0.15 radians and 10 % in each direction, uniformly; 0
        changes nothing.
      shift: maximum additional translation in each direction, in pixels.
      bend: standard deviation of independent displacements at 5 by 5 points of the image, in
        pixels; smooth in between. 0: an affine map.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.training.augment import warp
      >>> image = jnp.zeros((1, 5, 5)).at[0, 2, 2].set(1.0)
      >>> bool((warp(jax.random.key(0), image, 0.0) == image).all())
      True
    """
    batch = images.shape[0]
    # Two shifts, a turn and two scales per image. The shape decides the random bits; it stays.
    random = strength * jax.random.uniform(key, (5, batch, 1, 1), images.dtype, -1, 1)[:, :, 0, 0]
    shift_key, bend_key = jax.random.split(jax.random.fold_in(key, 1))
    shifts = SHIFT * random[:2] + shift * jax.random.uniform(
        shift_key, (2, batch), images.dtype, -1, 1
    )
    changes = [images, shifts.T, random[2:].T]
    if not (isinstance(bend, (int, float)) and bend == 0):
        changes.append(bend * jax.random.normal(bend_key, (batch, 2, KNOTS, KNOTS), images.dtype))
    # Interpolate per axis in sequence: in a single pass XLA would recompute a pixel at each read.
    return jnp.asarray(jax.lax.map(lambda of: _distort(*of), changes, batch_size=-(-batch // 2)))


def _distort(
    image: jax.Array, shift: jax.Array, random: jax.Array, knots: jax.Array | None = None
) -> jax.Array:
    """Shift, distort and bend an image, by displacements ``[2, KNOTS, KNOTS]`` in pixels."""
    height, width, *channels = image.shape
    (down, right), turn = shift, TURN * random[0]
    y = jnp.arange(height, dtype=image.dtype)[:, None] - (height - 1) / 2
    x = jnp.arange(width, dtype=image.dtype)[None, :] - (width - 1) / 2
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    # Source position of each pixel. Scales are exponentials, so that growing and shrinking are
    # equally likely.
    from_y = (cos * y - sin * x) * jnp.exp(STRETCH * random[1]) + down + (height - 1) / 2
    from_x = (sin * y + cos * x) * jnp.exp(STRETCH * random[2]) + right + (width - 1) / 2
    if knots is not None:
        bent = jax.image.resize(knots, (2, height, width), "cubic")
        from_y, from_x = from_y + bent[0], from_x + bent[1]

    def plane(image: jax.Array) -> jax.Array:
        moved: jax.Array = jax.scipy.ndimage.map_coordinates(image, [from_y, from_x], 1, "constant")
        return moved

    return jax.vmap(plane, -1, -1)(image) if channels else plane(image)

"""Edges of images: differences between neighboring pixels."""

import math

import jax
import jax.numpy as jnp

from lutjax import sharding
from lutjax.values import Array


def with_edges(x: jax.Array) -> jax.Array:
    """Append the `EDGES` to images ``[channels, height, width, ...]``: ``[5 * channels, ...]``."""

    def maps_of(x: jax.Array) -> jax.Array:
        maps: list[list[jax.Array]] = [[], []]
        for axis in (2, 1):
            around = [(1, 1) if i == axis else (0, 0) for i in range(x.ndim)]
            padded, size = jnp.pad(x, around, mode="edge"), x.shape[axis]
            before, after = (jax.lax.slice_in_dim(padded, n, n + size, axis=axis) for n in (0, 2))
            maps[0].append(after - before)
            maps[1].append(after - 2 * x + before)
        return jnp.concatenate([x, *maps[0], *maps[1]])

    result: jax.Array = sharding.shard_by_compiler(maps_of, sharding.spec_of)(x)
    return result


def rows_with_edges(x: Array, image_shape: tuple[int, ...]) -> jax.Array:
    """Append the `EDGES` to flattened images ``[height * width * channels, ...]``.

    The result starts with the pixels in their order. Each difference follows for all channels, in
    the order channel, row, column.
    """
    height, width, channels = (*image_shape, 1)[:3]
    x = jnp.asarray(x)
    rest = x.shape[1:]
    images = jnp.moveaxis(x.reshape(height, width, channels, *rest), 2, 0)
    maps = with_edges(images)[channels:]
    return jnp.concatenate([x, maps.reshape(math.prod(maps.shape[:3]), *rest)])

"""Paged key caches: one block pool for many sequences, with a block table for each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from lutjax._typing import Array


class Places(NamedTuple):
    """Key positions in a pool: ``p`` is at ``p % size`` of block ``tables[p // size % M]``."""

    tables: Int[Array, "*batch entries"]  # block ids; ids outside the pool mark missing blocks
    lengths: Int[Array, "*batch"]  # stored positions per sequence
    n_blocks: int
    size: int  # positions per block

    @property
    def n_positions(self) -> int:
        return self.tables.shape[-1] * self.size

    def indices(
        self, positions: Int[Array, "*batch n"], selected: Bool[Array, "*batch n"]
    ) -> Int[jax.Array, "*batch n"]:
        """Return pool indices for wanted positions with a block, else the pool size."""
        block = jnp.take_along_axis(self.tables, positions // self.size % self.tables.shape[-1], -1)
        selected &= (block >= 0) & (block < self.n_blocks)
        places = block * self.size + positions % self.size
        return jnp.where(selected, places, self.n_blocks * self.size)

    def latest(
        self, window: int
    ) -> tuple[Int[jax.Array, "*batch window"], Bool[jax.Array, "*batch window"]]:
        """Return pool indices for the last `window` positions, and a validity mask."""
        # Positions before the first token do not exist: they are clamped, and masked by the
        # selection.
        positions = _position_range(self.lengths - window, window)
        places = self.indices(jnp.maximum(positions, 0), positions >= 0)
        return places, places < self.n_blocks * self.size

    def new_indices(self, is_key: Bool[Array, "*batch length"]) -> Int[jax.Array, "*batch length"]:
        """Return pool indices for the last `n_positions` new keys, which padding must follow."""
        positions = _position_range(self.lengths, is_key.shape[-1])
        end = self.lengths + jnp.sum(is_key, -1, dtype=jnp.int32)
        # Earlier positions would be overwritten by later ones of the same call, in no fixed order.
        return self.indices(positions, is_key & (positions >= (end - self.n_positions)[..., None]))


def _position_range(first: Int[Array, "*batch"], n: int) -> Int[jax.Array, "*batch n"]:
    numbers = jnp.arange(n, dtype=jnp.int32).reshape((1,) * first.ndim + (n,))
    return jnp.asarray(first)[..., None] + numbers


def read(pool: Array, places: Int[Array, "*batch n"]) -> jax.Array:
    """Gather from a pool ``[n_blocks, block_size, size]``; unspecified outside the pool."""
    flat = jnp.asarray(pool).reshape(-1, pool.shape[-1])
    return jnp.take(flat, jnp.asarray(places), axis=0, mode="clip")


def write_values(pool: Array, places: Int[Array, "*batch n"], new: Array) -> jax.Array:
    """Write new values to a pool; indices outside the pool are dropped."""
    pool, size = jnp.asarray(pool), pool.shape[-1]
    flat, new = pool.reshape(-1, size), new.reshape(-1, size).astype(pool.dtype)
    return flat.at[places.reshape(-1)].set(new, mode="drop").reshape(pool.shape)

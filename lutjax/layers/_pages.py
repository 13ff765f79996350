"""Caches in blocks: keys of many sequences in one pool, where tables say which blocks each sequence has."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from lutjax._typing import Array


class Places(NamedTuple):
    """Places of the keys of sequences in a pool ``[n_blocks, block_size, ...]``.

    Position ``p`` of a sequence lies in block ``tables[p // block_size % M]``, at ``p % block_size`` there: a table is a ring.

    Attributes:
      tables: ids of blocks ``[*batch, M]``; others than those of blocks stand for none.
      lengths: positions of each sequence that are in the pool, ``[*batch]``.
      n_blocks, size: of the pool.
    """

    tables: Int[Array, "*batch entries"]
    lengths: Int[Array, "*batch"]
    n_blocks: int
    size: int

    @property
    def held(self) -> int:
        """Positions that a table has places for."""
        return self.tables.shape[-1] * self.size

    def of(
        self, positions: Int[Array, "*batch n"], wanted: Bool[Array, "*batch n"]
    ) -> Int[jax.Array, "*batch n"]:
        """Return places among all of the pool, of positions that are wanted and have a block; of others the number of places."""
        block = jnp.take_along_axis(self.tables, positions // self.size % self.tables.shape[-1], -1)
        wanted &= (block >= 0) & (block < self.n_blocks)
        return jnp.where(wanted, block * self.size + positions % self.size, self.n_blocks * self.size)

    def latest(self, window: int) -> tuple[Int[jax.Array, "*batch window"], Bool[jax.Array, "*batch window"]]:
        """Return places of so many positions before the end of each sequence, the latest last, and which of them there are."""
        positions = _counted(self.lengths - window, window)
        places = self.of(jnp.maximum(positions, 0), positions >= 0)
        return places, places < self.n_blocks * self.size

    def new(self, is_key: Bool[Array, "*batch length"]) -> Int[jax.Array, "*batch length"]:
        """Return places of new positions that are keys; of a sequence the last that its table has room for.

        Those that are not are behind those that are.
        """
        positions = _counted(self.lengths, is_key.shape[-1])
        end = self.lengths + jnp.sum(is_key, -1, dtype=jnp.int32)
        return self.of(positions, is_key & (positions >= (end - self.held)[..., None]))


def _counted(first: Int[Array, "*batch"], n: int) -> Int[jax.Array, "*batch n"]:
    """Return so many numbers from each of the first on."""
    numbers = jnp.arange(n, dtype=jnp.int32).reshape((1,) * first.ndim + (n,))
    return jnp.asarray(first)[..., None] + numbers


def read(pool: Array, places: Int[Array, "*batch n"]) -> jax.Array:
    """Return what lies at places of a pool ``[n_blocks, block_size, size]``, ``[*batch, n, size]``; beyond it anything."""
    return jnp.take(jnp.asarray(pool).reshape(-1, pool.shape[-1]), jnp.asarray(places), axis=0, mode="clip")


def written(pool: Array, places: Int[Array, "*batch n"], new: Array) -> jax.Array:
    """Return a pool with new numbers at places; what lies beyond it is left out."""
    pool, size = jnp.asarray(pool), pool.shape[-1]
    flat = (
        pool.reshape(-1, size)
        .at[places.reshape(-1)]
        .set(new.reshape(-1, size).astype(pool.dtype), mode="drop")
    )
    return flat.reshape(pool.shape)

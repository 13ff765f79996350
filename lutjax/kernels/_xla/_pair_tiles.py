"""Tiled iteration over the (query, earlier key) pairs of attention.

Pair of query ``j`` and key ``i``: ``key = start + j - 1 - d`` with the distance ``d >= 0``, so a
query sees earlier keys only. A pair is valid if its query and key exist, ``d < window``, both are
in the same segment, and the mask of its block is positive.

Work: a tile is a block of samples times queries times distances. With distances instead of keys, a
window costs ``L * window``, and a tile reads a single slice of positions and a single slice of
keys. Loops over blocks of samples and queries contain a loop over the distances at which the block
has pairs. A short sequence is a single tile that lists only valid pairs.

Layout: arrays are detector-major, ``[..., samples, positions]``, see `_row_gathers`. Queries are
padded to whole tiles; keys are padded on both sides, so that a tile's slice never leaves the array.

Numerics: sums over pairs keep their dtype. A tile adds its sums to one slice of the totals, tile
after tile, so the order is fixed. Invalid pairs contribute zero.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _row_updates
from lutjax.kernels._xla._row_gathers import in_sequence, read
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_pair_attention import LutPairAttention

Carry = TypeVar("Carry")

_LISTED = 2048  # longest pair list in a single tile


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs in a call, and their tiling.

    Attributes:
      n_samples, n_queries, n_keys: sizes of the call.
      start: position of the first query minus position of the first key; int 0 if known to be 0.
      starts: as `start`, per sample; a tile then contains a single sample.
      window: pairs at this distance or farther are invalid.
      samples, queries, distances: tile size.
      listed: True if the only tile lists valid pairs.
      block_mask, block_sizes: as in the call; tiles without pairs in its blocks are skipped.
    """

    n_samples: int
    n_queries: int
    n_keys: int
    start: jax.Array | int
    window: int | None
    segments: tuple[jax.Array, jax.Array] | None
    samples: int
    queries: int
    distances: int
    listed: bool
    starts: jax.Array | None = None
    block_mask: jax.Array | None = None
    block_sizes: tuple[int, int] = (1, 1)

    def start_of(self, sample: jax.Array | int) -> jax.Array | int:
        """Return the query start minus the key start for a tile's samples."""
        return self.start if self.starts is None else self.starts[sample]

    # Pairs in a tile: local query, distance and key.
    @property
    def _grid(self) -> np.ndarray:
        # NumPy, not JAX: the grid is a program constant, and its length determines shapes.
        query, distance = np.divmod(np.arange(self.queries * self.distances), self.distances)
        if self.listed:
            key = query - 1 - distance
            counts = (key >= 0) & (key < self.n_keys) & (query < self.n_queries)
            query, distance = query[counts], distance[counts]
        return np.stack([query, distance, query - distance + self.distances - 1]).astype(np.int32)

    @property
    def _cells(self) -> np.ndarray:
        """Return the pair number per grid cell (query, distance); one past the last if none."""
        query, distance, _ = self._grid
        # The number behind the last pair reads the zero that sums append to the list of pairs.
        cell = np.full(self.queries * self.distances, self.n_pairs, np.int32)
        cell[query * self.distances + distance] = np.arange(self.n_pairs)
        return cell

    @property
    def n_pairs(self) -> int:
        return self._grid.shape[1]

    @property
    def n_visited(self) -> int:
        """Upper bound for visited pairs in `for_each_tile`, including masked pairs."""
        blocks = -(-self.n_samples // self.samples) * math.ceil(self.n_queries / self.queries)
        if not self.listed:
            # An upper bound for any start: a block of queries meets n_keys + queries - 1 distances.
            blocks *= math.ceil((self.queries + self.n_keys) / self.distances) + 1
        return blocks * self.samples * self.n_pairs

    def padded_samples(self, a: jax.Array) -> jax.Array:
        """Pad ``[..., B, L]`` to whole blocks of samples."""
        return _pad(a, -2, 0, -self.n_samples % self.samples)

    def padded_queries(self, a: jax.Array) -> jax.Array:
        """Pad ``[..., B, Lq]`` to whole tiles of queries and samples."""
        return _pad(self.padded_samples(a), -1, 0, -self.n_queries % self.queries)

    def padded_keys(self, a: jax.Array) -> jax.Array:
        """Pad ``[..., B, Lk]`` so that it contains the key slice of every tile with a key."""
        return _pad(self.padded_samples(a), -1, self._key_margin, self._key_margin)

    def unpadded_queries(self, a: jax.Array) -> jax.Array:
        return a[..., : self.n_samples, : self.n_queries]

    def unpadded_keys(self, a: jax.Array) -> jax.Array:
        return a[..., : self.n_samples, self._key_margin : self._key_margin + self.n_keys]

    def padded_shape(self, n_outputs: int) -> tuple[int, int, int]:
        b = self.n_samples + -self.n_samples % self.samples
        return b, self.n_queries + -self.n_queries % self.queries, n_outputs

    def padded_rows(self, a: jax.Array) -> jax.Array:
        """Pad ``[B, Lq, O]`` to whole tiles of queries and samples."""
        b, length, _ = self.padded_shape(0)
        return _pad(_pad(a, 0, 0, b - a.shape[0]), 1, 0, length - a.shape[1])

    def unpadded_rows(self, a: jax.Array) -> jax.Array:
        return a[: self.n_samples, : self.n_queries]

    @property
    def _key_margin(self) -> int:
        # The key slice of a tile has queries + distances - 1 elements and holds at least one key;
        # so at most all but one lie outside, on either side.
        return max(self.queries + self.distances - 2, 0)

    def for_each_tile(self, body: Callable[["Tile", Carry], Carry], carry: Carry) -> Carry:
        """Pass `carry` through `body` for every tile with possibly valid pairs."""
        sample_blocks = -(-self.n_samples // self.samples)
        query_blocks = math.ceil(self.n_queries / self.queries)
        blocks = sample_blocks * query_blocks
        if blocks == 0 or self.n_pairs == 0:
            return carry

        def block(n: jax.Array | int, carry: Carry) -> Carry:
            # With x64 enabled the loop counter is int64; slices below mix it with int32 starts.
            n = n if isinstance(n, int) else n.astype(np.int32)
            sample, query = n // query_blocks * self.samples, n % query_blocks * self.queries
            if self.listed:
                return body(Tile(self, sample, query, 0), carry)
            # Distances at which a query of this block meets a key.
            start = self.start_of(sample)
            # The first query and the last key are closest; the last query and the first key are
            # farthest.
            first = jnp.maximum(start + query - self.n_keys, 0)
            last = start + query + self.queries - 1
            if self.window is not None:
                last = jnp.minimum(last, self.window)
            tiles = jnp.maximum(last - first + self.distances - 1, 0) // self.distances

            def visit_tile(i: jax.Array, carry: Carry) -> Carry:
                return body(Tile(self, sample, query, first + i * self.distances), carry)

            if self.block_mask is None:
                return jax.lax.fori_loop(
                    np.int32(0),
                    tiles,
                    lambda i, carry: visit_tile(i.astype(np.int32), carry),
                    carry,
                )
            # Compact the numbers of tiles with pairs of their blocks, so that the loop runs over
            # these only. The static length is the bound of n_visited.
            number = jnp.arange(
                math.ceil((self.queries + self.n_keys) / self.distances) + 1, dtype=jnp.int32
            )
            some = Tile(self, sample, query, first).have_blocks(first + number * self.distances) & (
                number < tiles
            )
            (order,) = jnp.nonzero(some, size=number.shape[0], fill_value=0)
            return jax.lax.fori_loop(
                0,
                jnp.sum(some),
                lambda i, carry: visit_tile(order[i].astype(np.int32), carry),
                carry,
            )

        return block(0, carry) if blocks == 1 else jax.lax.fori_loop(0, blocks, block, carry)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile given by its first sample, query and distance, which may be traced."""

    pairs: Pairs
    sample: jax.Array | int
    query: jax.Array | int
    distance: jax.Array | int

    @property
    def _key(self) -> jax.Array | int:
        """Return the start of the tile's slice in the padded keys."""
        p = self.pairs
        # The smallest key in the tile: its first query at its largest distance.
        return p._key_margin + p.start_of(self.sample) + self.query - self.distance - p.distances

    # ---- values of each pair
    def gather_queries(self, a: jax.Array) -> jax.Array:
        """Gather padded ``[..., B, Lq]`` to ``[..., samples, pairs]``."""
        block = _slice(a, self.sample, self.pairs.samples, self.query, self.pairs.queries)
        return _take(block, self.pairs._grid[0])

    def gather_keys(self, a: jax.Array) -> jax.Array:
        """Gather padded ``[..., B, Lk]`` to ``[..., samples, pairs]``."""
        size = self.pairs.queries + self.pairs.distances - 1
        return _take(
            _slice(a, self.sample, self.pairs.samples, self._key, size), self.pairs._grid[2]
        )

    def gather_distances(self, a: jax.Array) -> jax.Array:
        """Gather ``[..., distances]`` to ``[..., 1, pairs]``; the last value covers larger ones."""
        at = jnp.clip(self._distances(a.shape[-1]), 0, a.shape[-1] - 1)
        return _take(jnp.take(a, at, axis=-1), self.pairs._grid[1])[..., None, :]

    def _distances(self, capacity: int) -> jax.Array:
        at = self.distance + jnp.arange(self.pairs.distances, dtype=jnp.int32)
        return jnp.minimum(at, capacity - 1)

    def counts(self) -> jax.Array | None:
        """Return the mask for valid pairs, ``[samples or 1, pairs]``; None if all are valid."""
        p = self.pairs
        counts = None
        if not p.listed:
            query, distance, _ = p._grid
            distance = self.distance + distance
            key = p.start_of(self.sample) + self.query + query - 1 - distance
            # Mask the padding of queries, and keys on either side of the sequence; a start in the
            # middle of a tile makes both occur.
            counts = (self.query + query < p.n_queries) & (key >= 0) & (key < p.n_keys)
            if p.window is not None:
                counts &= distance < p.window
            if p.block_mask is not None:
                counts &= self._block_mask(self.query + query, key) > 0
            counts = counts[None]
        # Padding has segment 0 too; the list of pairs or the masks above exclude it.
        if p.segments is not None:
            same = self.gather_queries(p.segments[0]) == self.gather_keys(p.segments[1])
            counts = same if counts is None else same & counts
        return counts

    def _block_mask(self, query: Any, key: Any) -> jax.Array:
        """Return the block mask for pairs of queries and keys.

        Positions out of range are clamped.
        """
        p = self.pairs
        assert p.block_mask is not None
        (of_queries, of_keys), (n_queries, n_keys) = p.block_sizes, p.block_mask.shape
        row, column = (
            # Padding has no block: any block works, because counts masks these positions.
            jnp.clip(place // size, 0, n - 1)
            for place, size, n in ((query, of_queries, n_queries), (key, of_keys, n_keys))
        )
        return read(p.block_mask, row, column)

    def have_blocks(self, distances: jax.Array) -> jax.Array:
        """Return a mask for tiles at distances ``[n]`` with active blocks."""
        p = self.pairs

        def block_positions(first: jax.Array, n: int, size: int) -> jax.Array:
            """Return a position in each block touched by `n` positions from `first`.

            Some occur twice.
            """
            steps = np.minimum(size * np.arange((n - 1) // size + 2, dtype=np.int32), n - 1)
            return first[:, None] + steps[None, :]

        of_queries, of_keys = p.block_sizes
        n_keys = p.queries + p.distances - 1
        first_key = p.start_of(self.sample) + self.query - distances - p.distances
        first_query = jnp.full((1,), self.query, jnp.int32)
        queries, keys = (
            block_positions(first_query, p.queries, of_queries),
            block_positions(first_key, n_keys, of_keys),
        )
        return jnp.any(self._block_mask(queries[:, :, None], keys[:, None, :]) > 0, (1, 2))

    def gather_rows(self, a: jax.Array) -> jax.Array:
        """Gather padded ``[B, Lq, O]`` to ``[samples * pairs, O]``, zero for invalid pairs."""
        p = self.pairs
        starts = tuple(map(_int32, (self.sample, self.query, 0)))
        block = jax.lax.dynamic_slice(a, starts, (p.samples, p.queries, a.shape[-1]))
        rows = read(block, slice(None), p._grid[0])
        return self._masked_rows(rows).reshape(p.samples * p.n_pairs, a.shape[-1])

    def valid_pairs(self) -> jax.Array | None:
        """Return the valid pairs in `gather_rows`, ``[samples * pairs]``; None if all are valid."""
        counts = self.counts()
        p = self.pairs
        # Samples that fill the last block have cotangents of zero, which is enough for sums; hits
        # must be masked, because rules may update rows without a gradient.
        padded = p.n_samples % p.samples != 0
        if padded:
            sample = self.sample + jnp.arange(p.samples, dtype=jnp.int32)[:, None]
            real = jnp.broadcast_to(sample < p.n_samples, (p.samples, p.n_pairs))
            counts = real if counts is None else counts & real
        if counts is None:
            return None
        return jnp.broadcast_to(counts, (p.samples, p.n_pairs)).reshape(p.samples * p.n_pairs)

    def mask_invalid(self, c: jax.Array) -> jax.Array:
        """Mask ``[T, samples, pairs]`` to zero for invalid pairs."""
        counts = self.counts()
        return c if counts is None else jnp.where(counts[None], c, 0)

    def _masked_rows(self, rows: jax.Array) -> jax.Array:
        counts = self.counts()
        return rows if counts is None else jnp.where(counts[..., None], rows, 0)

    # ---- sums over pairs, added to a total
    def add_rows(self, total: jax.Array, rows: jax.Array) -> jax.Array:
        """Sum ``[samples * pairs, O]`` over a query's valid pairs; add to padded ``[B, Lq, O]``."""
        p = self.pairs
        rows = self._masked_rows(rows.reshape(p.samples, p.n_pairs, rows.shape[-1]))
        if p.listed:
            # A list becomes the full grid, whose cells without a pair read the appended zero: a
            # dense sum over distances replaces a scatter.
            rows = read(_pad(rows, 1, 0, 1), slice(None), p._cells)
        rows = rows.reshape(p.samples, p.queries, p.distances, rows.shape[-1])
        block = jnp.sum(rows, 2, dtype=rows.dtype)
        starts = tuple(map(_int32, (self.sample, self.query, 0)))
        old = jax.lax.dynamic_slice(total, starts, block.shape)
        return jax.lax.dynamic_update_slice(total, old + block, starts)

    def add_to_queries(self, total: jax.Array, c: jax.Array) -> jax.Array:
        """Sum ``[..., samples, pairs]`` over each query's pairs; add to padded ``[..., B, Lq]``."""
        return self._add(total, self.query, jnp.sum(self._scatter_to_grid(c), -1, dtype=c.dtype))

    def add_to_keys(self, total: jax.Array, c: jax.Array) -> jax.Array:
        """Sum ``[..., samples, pairs]`` over each key's pairs; add to padded ``[..., B, Lk]``."""
        p = self.pairs
        # Key = query + (distances - 1 - distance): shift each query's row by its number, add rows.
        by_key = self._scatter_to_grid(c)[..., ::-1]
        width = p.queries + p.distances
        rows = _pad(by_key, -1, 0, p.queries).reshape(*by_key.shape[:-2], p.queries * width)
        # Rows of width `width` reread with width - 1: row q starts q elements later, which aligns
        # equal keys without a scatter.
        shifted = rows[..., : p.queries * (width - 1)].reshape(*by_key.shape[:-1], width - 1)
        return self._add(total, self._key, jnp.sum(shifted, -2, dtype=c.dtype))

    def add_to_distances(self, total: jax.Array, c: jax.Array) -> jax.Array:
        """Sum ``[..., samples, pairs]`` over each distance's pairs; add to ``[..., distances]``."""
        at = jnp.clip(self._distances(total.shape[-1]), 0, total.shape[-1] - 1)
        # A scatter: distances behind the last position share its entry, so slices would not do.
        return total.at[..., at].add(jnp.sum(self._scatter_to_grid(c), (-3, -2), dtype=c.dtype))

    def _scatter_to_grid(self, c: jax.Array) -> jax.Array:
        """Scatter ``[..., pairs]`` to ``[..., queries, distances]``, zero without a pair."""
        p = self.pairs
        if p.listed:
            c = _take(_pad(c, -1, 0, 1), p._cells)
        return c.reshape(*c.shape[:-1], p.queries, p.distances)

    def _add(self, total: jax.Array, place: jax.Array | int, c: jax.Array) -> jax.Array:
        # A single tile covers the total; XLA then sees no dynamic slice.
        if c.shape == total.shape:
            return total + c
        starts = tuple(map(_int32, (*(0,) * (total.ndim - 2), self.sample, place)))
        old = jax.lax.dynamic_slice(total, starts, c.shape)
        return jax.lax.dynamic_update_slice(total, old + c, starts)


def plan(call: LookupAttention | LutPairAttention, device: Device) -> Pairs:
    """Return the tiled pairs for a call.

    On a CPU, the rows that a tile reads from one detector stay in the cache. On other devices,
    tiles are as large as the memory for all detectors' row ids allows.
    """
    start, starts, window = call.start, call.starts, call.window
    n_samples, n_queries, _ = call.query_places.shape
    n_keys = call.key_places.shape[1]
    n_detectors, n_outputs = call.weights.shape[0], call.width
    if in_sequence(device):
        # 2**18 values of float32 are 1 MiB: the rows that a tile reads from one table stay in the
        # cache.
        most_pairs = int(np.clip(2**18 // max(n_outputs, 1), 256, 2**13))
        side = 16 if most_pairs < 1024 else 32
    else:
        # 2**24 int32 ids are 64 MiB.
        most_pairs = max(2**24 // max(n_detectors, 1), 1024)
        side = 64

    # Maximum number of distances between pairs; a query may be farther from every key than there
    # are keys.
    known = start is None and starts is None
    farthest = max(n_queries - 1, 0) if known else n_keys
    if window is not None:
        farthest = min(farthest, window)
    if n_queries == 0 or n_keys == 0:
        farthest = 0
    # The grid of a causal tile is half empty, hence twice the limit. Without a known start the list
    # would depend on data.
    listed = farthest == 0 or (
        known and call.block_mask is None and n_queries * farthest <= 2 * _LISTED
    )
    pairs = Pairs(
        n_samples,
        n_queries,
        n_keys,
        0 if start is None else start,
        window,
        None,
        samples=1,
        queries=max(n_queries if listed else min(side, n_queries), 1),
        distances=farthest if listed else min(side, max(farthest, 1)),
        listed=listed,
        starts=starts,
        block_mask=call.block_mask,
        block_sizes=call.block_sizes or (1, 1),
    )
    samples = 1  # for a symbolic batch in an export
    if isinstance(n_samples, int) and starts is None:
        # Short sequences fill a tile with several samples. Starts that differ by sample need one
        # sample per tile, whose keys are one slice.
        samples = int(np.clip(most_pairs // max(pairs.n_pairs, 1), 1, max(n_samples, 1)))
    pairs = dataclasses.replace(pairs, samples=samples)
    of_queries, of_keys = call.query_segments, call.key_segments
    if of_queries is not None and of_keys is not None:
        padded = pairs.padded_queries(of_queries), pairs.padded_keys(of_keys)
        pairs = dataclasses.replace(pairs, segments=padded)
    return pairs


Ids = Callable[[Tile], jax.Array]
"""Returns the row ids for a tile's pairs, ``[group, n]``."""


def hits_of_pairs(
    pairs: Pairs, dy: jax.Array, of_group: Callable[[_row_updates.Detectors], Ids]
) -> _row_updates.Hits:
    """Return attention hits: each valid pair is a hit for every detector."""
    dy = pairs.padded_rows(dy)

    def visit(detectors: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
        ids = of_group(detectors)

        def tile(tile: Tile, carry: Any) -> Any:
            return body(carry, ids(tile), tile.gather_rows(dy), tile.valid_pairs())

        return pairs.for_each_tile(tile, carry)

    return visit, pairs.n_visited


def _take(a: jax.Array, at: np.ndarray) -> jax.Array:
    return read(a, ..., at)


def _slice(a: jax.Array, sample: Any, samples: int, place: Any, places: int) -> jax.Array:
    # The slice is the whole array: no dynamic slice, also with a traced start.
    if a.shape[-2:] == (samples, places):
        return a
    starts = tuple(map(_int32, (*(0,) * (a.ndim - 2), sample, place)))
    return jax.lax.dynamic_slice(a, starts, (*a.shape[:-2], samples, places))


def _int32(n: Any) -> Any:
    """Convert the start of a slice to int32, even if JAX counts in int64."""
    return np.int32(n) if isinstance(n, int) else n


def _pad(a: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    if before == after == 0:
        return a
    widths = [(0, 0)] * a.ndim
    widths[axis] = (before, after)
    return jnp.pad(a, widths)

"""Query and key pairs for `lutjax.lookup_attention`, in kernel form.

Formula: the row for query ``j`` and key ``i`` in table ``t`` is ``query[t, b, j] | key[t, b, i] |
position[t, distance]``. Each operand's bits are shifted beforehand, so a kernel combines them with
two OR instructions.

Layout: bits are detector-major, ``[T, B, L]``: a key block is contiguous for one detector. Missing
arrays are replaced by placeholders, and constants select the arrays that kernels read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._language import triton
from lutjax.ops.lookup_attention import LookupAttention, SparseLookupAttention
from lutjax.tuning import Launch, Sizes
from lutjax.values._fixed_point import FixedPoint


@dataclasses.dataclass(frozen=True)
class DetectedPairs:
    """Query and key pairs with detected bits.

    Attributes:
      weights: tables ``[T, R, O]``.
      query, key, position: shifted row bits: ``[T, B, Lq]``, ``[T, B, Lk]``,
        ``[T or 1, distances]``.
      start: first query's position among the keys: int32 scalar, or ``[B]``.
      segments: query and key segment ids; pairs with different ids do not count.
      window: maximum keys per query.
      blocks: for each query block, the number of selected key blocks before each key block and
        in total ``[Bk + 1]``, then the selected blocks ``[Bk]``. None selects all keys.
      block_sizes: queries and keys per block.
      targets: output ids of the row slots, ``[T or 1, R or 1, K]``; None if rows reach all
        outputs. width: number of outputs.
      query_shift, key_shift: number of bits below the query bits and the key bits.
    """

    weights: jax.Array
    query: jax.Array
    key: jax.Array
    position: jax.Array | None
    start: jax.Array | None
    segments: tuple[jax.Array | None, jax.Array | None]
    window: int | None
    query_shift: int
    key_shift: int
    accumulate: FixedPoint | None = None
    blocks: jax.Array | None = None
    block_sizes: tuple[int, int] = (1, 1)
    targets: jax.Array | None = None
    width: int = 0

    @classmethod
    def from_call(cls, call: LookupAttention) -> "DetectedPairs":
        key_shift = 0 if call.position is None else call.position.bits
        query_shift = key_shift + call.key.bits
        return cls(
            call.weights,
            # The distance has the lowest bits: the rows of neighboring distances are neighbors in
            # the table. The key follows, then the query.
            move_tables_first(call.query.index << query_shift),
            move_tables_first(call.key.index << key_shift),
            None if call.position is None else call.position.index.T,
            call.start if call.starts is None else call.starts,
            (call.query_segments, call.key_segments),
            call.window,
            query_shift,
            key_shift,
            call.accumulate,
            None if call.block_mask is None else _lists_of_blocks(call.block_mask),
            call.block_sizes or (1, 1),
            call.targets if isinstance(call, SparseLookupAttention) else None,
            call.width,
        )

    @property
    def queries(self) -> tuple[int, int]:
        return self.query.shape[1:]  # type: ignore[return-value]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Kernel input arrays, with placeholders for missing arrays."""
        # Kernels have fixed parameters; constants keep them from reading placeholders.
        position = self.query if self.position is None else self.position
        start = self.query if self.start is None else self.start.reshape(-1)
        segments = (self.query if s is None else s for s in self.segments)
        blocks = self.query if self.blocks is None else self.blocks
        return (self.query, self.key, position, start, *segments, blocks)

    @property
    def sizes(self) -> Sizes:
        n_samples, n_queries = self.queries
        # A window bounds the keys of a query, and so the work.
        n_keys = min(self.key.shape[2], self.window or self.key.shape[2])
        reached = {} if self.targets is None else {"width": self.width}
        return _row_tiles.sizes(
            self.weights, samples=n_samples, queries=n_queries, keys=n_keys, **reached
        )

    @property
    def lists(self) -> jax.Array:
        return self.query if self.targets is None else self.targets

    def tile(
        self,
        config: Launch,
        device: Device,
        *,
        n_detectors: int | None = None,
        all_outputs: bool = False,
    ) -> _row_tiles.RowTile:
        n_tables, _, n_outputs = self.weights.shape
        # Additions visit some tables at a time.
        n_tables = n_tables if n_detectors is None else n_detectors
        return _row_tiles.RowTile(
            config, self.sizes["keys"], n_outputs, n_tables, device, all_outputs
        )

    @property
    def constants(self) -> dict[str, Any]:
        """Kernel constants that define the counted pairs."""
        n_samples, n_queries = self.queries
        return {
            "n_samples": n_samples,
            "n_queries": n_queries,
            "n_keys": self.key.shape[2],
            "n_distances": 0 if self.position is None else self.position.shape[1],
            "SHARED": self.position is not None and self.position.shape[0] == 1,
            "START": self.start is not None,
            "STARTS": self.start is not None and self.start.ndim > 0,
            # A list has ``2 * Bk + 1`` entries, see `blocks`.
            "BLOCKS": 0 if self.blocks is None else self.blocks.shape[1] // 2,
            "QUERIES_OF_BLOCK": self.block_sizes[0],
            "KEYS_OF_BLOCK": self.block_sizes[1],
            "SEGMENTS": self.segments[0] is not None,
            # -1 stands for no window.
            "WINDOW": -1 if self.window is None else self.window,
            "WIDTH": self.width,
            "TARGETS": self.targets is not None,
            "LIST_PER_TABLE": self.targets is not None and self.targets.shape[0] > 1,
            "LIST_PER_ROW": self.targets is not None and self.targets.shape[1] > 1,
        }

    def arguments(self, tile: _row_tiles.RowTile, *, queries: int = 1) -> dict[str, Any]:
        """Return `launch` arguments and constants for programs with `queries` queries each."""
        n_samples, n_queries = self.queries
        programs = (
            n_samples * triton.cdiv(n_queries, queries) * tile.output_blocks * tile.detector_blocks
        )
        return {
            **tile.arguments,
            **_row_tiles.arithmetic(self),
            **self.constants,
            "programs": programs,
        }


def _lists_of_blocks(mask: jax.Array) -> jax.Array:
    """Return `DetectedPairs.blocks` for a mask ``[Bq, Bk]``."""
    before = jnp.cumsum(mask, 1, dtype=jnp.int32)
    before = jnp.pad(before, ((0, 0), (1, 0)))
    # A stable sort of the inverted mask lists the selected blocks in ascending order.
    return jnp.concatenate(
        [before, jnp.argsort(1 - mask, axis=1, stable=True).astype(jnp.int32)], 1
    )


def move_tables_first(a: jax.Array) -> jax.Array:
    """Return ``[B, L, T]`` as ``[T, B, L]``."""
    return jnp.moveaxis(a, -1, 0)

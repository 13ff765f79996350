"""The pairs of queries and keys of one attention, as the kernels take them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton

from lutjax._detection import Detection, existing
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._triton import _rows
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of a call, as kernels take them.

    Attributes:
      query, key, position: bits of the row, in their place in it: ``[T, B, Lq]``, ``[T, B, Lk]``,
        ``[T or 1, distances]``.
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

    @classmethod
    def of(
        cls,
        weights: jax.Array,
        query: Detection,
        key: Detection,
        position: Detection | None,
        start: jax.Array | None,
        query_segments: jax.Array | None,
        key_segments: jax.Array | None,
        *,
        window: int | None,
    ) -> "Pairs":
        key_shift = 0 if position is None else position.bits
        query_shift = key_shift + key.bits
        return cls(
            weights,
            major(existing(query).index << query_shift),
            major(existing(key).index << key_shift),
            None if position is None else existing(position).index.T,
            start,
            (query_segments, key_segments),
            window,
            query_shift,
            key_shift,
        )

    @property
    def queries(self) -> tuple[int, int]:
        """Samples and queries of each."""
        return self.query.shape[1:]  # type: ignore[return-value]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """What every kernel reads; what is absent is replaced by what it does not look at."""
        position = self.query if self.position is None else self.position
        start = self.query if self.start is None else self.start.reshape(1)
        segments = (self.query if s is None else s for s in self.segments)
        return (self.query, self.key, position, start, *segments)

    @property
    def sizes(self) -> Sizes:
        """What a launch is chosen by."""
        n_detectors, n_rows, n_outputs = self.weights.shape
        n_samples, n_queries = self.queries
        return {
            "samples": n_samples,
            "queries": n_queries,
            "keys": min(self.key.shape[2], self.window or self.key.shape[2]),
            "detectors": n_detectors,
            "rows": n_rows,
            "outputs": n_outputs,
            "bits": 8 * self.weights.dtype.itemsize,
        }

    def tile(
        self, how: Launch, device: Device, *, n_detectors: int | None = None, all_outputs: bool = False
    ) -> _rows.Tile:
        n_tables, _, n_outputs = self.weights.shape
        n_tables = n_tables if n_detectors is None else n_detectors
        return _rows.Tile(how, self.sizes["keys"], n_outputs, n_tables, device, all_outputs)

    def programs(self, tile: _rows.Tile, *, queries: int = 1) -> int:
        n_samples, n_queries = self.queries
        return n_samples * triton.cdiv(n_queries, queries) * tile.output_blocks * tile.groups

    @property
    def pair_constants(self) -> dict[str, Any]:
        """Constants of kernels that say which pairs there are."""
        n_samples, n_queries = self.queries
        return {
            "n_samples": n_samples,
            "n_queries": n_queries,
            "n_keys": self.key.shape[2],
            "n_distances": 0 if self.position is None else self.position.shape[1],
            "SHARED": self.position is not None and self.position.shape[0] == 1,
            "START": self.start is not None,
            "SEGMENTS": self.segments[0] is not None,
            "WINDOW": -1 if self.window is None else self.window,
        }

    def constants(self, tile: _rows.Tile, accumulate: FixedPoint | None) -> dict[str, Any]:
        """Constants of kernels."""
        return {
            **self.pair_constants,
            "n_rows": self.weights.shape[1],
            **_rows.arithmetic(self.weights, accumulate),
            **tile.constants,
        }


def major(a: jax.Array) -> jax.Array:
    """``[B, L, T]`` -> ``[T, B, L]``."""
    return jnp.moveaxis(a, -1, 0)


def minor(a: jax.Array) -> jax.Array:
    return jnp.moveaxis(a, 0, -1)

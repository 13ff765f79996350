"""Blocks and array layouts for `lutjax.lookup_attention` on TensorCores.

Work division: a block has the queries from a few samples, or from part of one long sample, in the
128 lanes of a register, and up to 512 keys from the same samples. A grid step visits up to 32
blocks.

Layout: tables are ``[T, O, query ids * slab]``. A query id's *slab* contains the rows for all key
and position ids, contiguous along lanes, so that one slice reads every row a query may address.
Content-independent pair properties (position id, whether a pair counts) are a matrix ``[keys,
queries]`` per block, which XLA computes once for all samples.

Numerics: layouts and estimates only. `seconds` and `seconds_by_row` estimate times from static
compiler profiles and decide between this kernel and plain JAX. Imports no Pallas.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Direction
from lutjax.dispatch.registry import Request
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.ops.lookup_attention import LookupAttention

_QUERIES = LANES  # of one sample in one block
_KEYS = 256
_KEYS_OF_BLOCK = 512
_BLOCKS = 32  # of one grid step
_MOST_DISTANCES = 2**29  # bytes
_ROW = 7e-9  # seconds in which XLA reads a row
_CYCLE = 1 / 1.5e9  # seconds, of the slowest generation
UNROLLED = 8  # queries


@dataclasses.dataclass(frozen=True)
class Plan:
    """Call sizes and their division into blocks.

    Attributes:
      q_bits, k_bits, e_bits: query, key and position id bits.
    """

    n_samples: int
    n_queries: int
    n_keys: int
    n_detectors: int
    n_outputs: int
    q_bits: int
    k_bits: int
    e_bits: int
    n_distances: int

    @classmethod
    def for_call(cls, call: LookupAttention) -> "Plan":
        """Return the plan for a call with arrays or their shapes."""
        n_detectors, _, n_outputs = call.weights.shape
        n_samples, n_queries, _ = call.query.shape
        position = call.position
        return cls(
            n_samples,
            n_queries,
            call.key.shape[1],
            n_detectors,
            n_outputs,
            call.query.bits,
            call.key.bits,
            0 if position is None else position.bits,
            1 if position is None else position.shape[0],
        )

    @property
    def empty(self) -> bool:
        sizes = (self.n_samples, self.n_queries, self.n_keys, self.n_detectors, self.n_outputs)
        return 0 in (*sizes, self.n_distances)

    # ---- ids
    @property
    def q_ids(self) -> int:
        return 2**self.q_bits

    @property
    def k_ids(self) -> int:
        """Number of key ids, padded to whole registers."""
        # At least 8 sublanes of key ids, and slabs of whole registers of 128 lanes.
        return max(2**self.k_bits, 8, LANES >> self.e_bits)

    @property
    def e_ids(self) -> int:
        return 2**self.e_bits

    @property
    def slab(self) -> int:
        return self.k_ids * self.e_ids

    @property
    def rows(self) -> int:
        return self.q_ids * self.slab

    # ---- blocks
    @property
    def queries(self) -> int:
        """Queries per sample and block."""
        return min(self.n_queries, _QUERIES)

    @property
    def keys(self) -> int:
        """Keys per sample and block."""
        return min(self.n_keys, _KEYS)

    @property
    def samples(self) -> int:
        # Short sequences share the lanes of a block; pairs across samples are masked.
        return max(min(self.n_samples, _QUERIES // self.queries, _KEYS_OF_BLOCK // self.keys), 1)

    @property
    def used_lanes(self) -> int:
        return self.samples * self.queries

    @property
    def key_lanes(self) -> int:
        """Keys per block, padded to whole registers."""
        return math.ceil(self.samples * self.keys / LANES) * LANES

    @property
    def query_tiles(self) -> int:
        return math.ceil(self.n_queries / self.queries)

    @property
    def key_tiles(self) -> int:
        return math.ceil(self.n_keys / self.keys)

    @property
    def blocks(self) -> int:
        """Sample blocks per grid step."""
        # Several blocks per grid step: the table of a detector stays resident while they are
        # computed.
        return min(math.ceil(self.n_samples / self.samples), _BLOCKS)

    @property
    def steps(self) -> int:
        return math.ceil(self.n_samples / self.samples / self.blocks)

    @property
    def all_blocks(self) -> int:
        return self.steps * self.blocks

    # ---- arrays
    def table(self, weights: jax.Array) -> jax.Array:
        """``[T, R, O]`` -> ``[T, O, rows]``."""
        table = jnp.swapaxes(weights, 1, 2)
        # Otherwise key ids are padded within each slab, which needs a reshape.
        if 2**self.k_bits == self.k_ids:
            return table
        shape = (self.n_detectors, self.n_outputs, self.q_ids, 2**self.k_bits, self.e_ids)
        table = _pad(table.reshape(shape), 3, self.k_ids)
        return table.reshape(self.n_detectors, self.n_outputs, self.rows)

    def weights(self, table: jax.Array) -> jax.Array:
        """``[T, O, rows]`` -> ``[T, R, O]``."""
        if 2**self.k_bits != self.k_ids:
            shape = (self.n_detectors, self.n_outputs, self.q_ids, self.k_ids, self.e_ids)
            table = table.reshape(shape)[:, :, :, : 2**self.k_bits]
            table = table.reshape(self.n_detectors, self.n_outputs, -1)
        return jnp.swapaxes(table, 1, 2)

    def query_blocks(self, a: jax.Array) -> jax.Array:
        """``[B, Lq, ...]`` -> ``[..., query tiles, blocks, 128]``."""
        return self._in_blocks(a, self.query_tiles, self.queries, LANES)

    def outputs(self, dy: jax.Array) -> jax.Array:
        """``[B, Lq, O]`` -> ``[query tiles, blocks, O, 128]``."""
        return jnp.moveaxis(self.query_blocks(dy), 0, 2)

    def key_blocks(self, a: jax.Array) -> jax.Array:
        """``[B, Lk, ...]`` -> ``[..., key tiles, blocks, key lanes]``."""
        return self._in_blocks(a, self.key_tiles, self.keys, self.key_lanes)

    def from_queries(self, a: jax.Array) -> jax.Array:
        """``[..., query tiles, blocks, 128]`` -> ``[B, Lq, ...]``."""
        return self._from_blocks(a, self.queries)[: self.n_samples, : self.n_queries]

    def from_keys(self, a: jax.Array) -> jax.Array:
        """``[..., key tiles, blocks, key lanes]`` -> ``[B, Lk, ...]``."""
        return self._from_blocks(a, self.keys)[: self.n_samples, : self.n_keys]

    def _in_blocks(self, a: jax.Array, tiles: int, size: int, lanes: int) -> jax.Array:
        a = _pad(_pad(a, 0, self.all_blocks * self.samples), 1, tiles * size)
        a = a.reshape(self.all_blocks, self.samples, tiles, size, *a.shape[2:])
        # Samples of a block next to each other in the lanes.
        a = jnp.moveaxis(a, (2, 0, 1, 3), (-4, -3, -2, -1))
        return _pad(a.reshape(*a.shape[:-2], self.samples * size), -1, lanes)

    def _from_blocks(self, a: jax.Array, size: int) -> jax.Array:
        a = a[..., : self.samples * size]
        a = a.reshape(*a.shape[:-1], self.samples, size)
        a = jnp.moveaxis(a, (-4, -3, -2, -1), (2, 0, 1, 3))
        tiles = a.shape[2]
        return a.reshape(self.all_blocks * self.samples, tiles * size, *a.shape[4:])

    def expand_to_pairs(
        self, of_distance: jax.Array, start: jax.Array | None, window: int | None, other: int
    ) -> jax.Array:
        """Expand per-distance values ``[T or 1, distances]`` to every pair in a block.

        Distances beyond the last one use its value.

        Returns:
          ``[T or 1, query tiles, key tiles, key lanes, 128]``, with `other` at uncounted pairs.
        """
        n_queries, n_keys = self.query_tiles * self.queries, self.key_tiles * self.keys
        # By place of the query minus that of the key among those of the call; negative ones from
        # the end on.
        at = jnp.arange(n_queries + n_keys, dtype=jnp.int32)
        # Negative differences sit at the end, so that the shear below wraps into them.
        at = jnp.where(at < n_queries, at, at - (n_queries + n_keys))
        distance = at - 1 if start is None else at - 1 + start
        counts = distance >= 0
        if window is not None:
            counts &= distance < window
        value = jnp.take(of_distance, jnp.clip(distance, 0, of_distance.shape[1] - 1), axis=1)
        value = jnp.where(counts[None], value, jnp.asarray(other, value.dtype))
        # The row of each key is the one before, shifted by one.
        n = value.shape[0]
        # Repeat the row and cut it into rows of one element less: a Toeplitz matrix without a
        # gather per pair.
        value = jnp.tile(value, (1, n_keys))[:, : n_keys * (value.shape[1] - 1)]
        value = value.reshape(n, n_keys, n_queries + n_keys - 1)[:, : self.n_keys, : self.n_queries]
        value = _pad(_pad(value, 1, n_keys, other), 2, n_queries, other)
        value = value.reshape(n, self.key_tiles, self.keys, self.query_tiles, self.queries)
        value = value.transpose(0, 3, 1, 2, 4)
        # The same for each sample of the block; pairs of two samples do not count.
        same = jnp.eye(self.samples, dtype=bool)[:, None, :, None]
        value = jnp.where(same, value[:, :, :, None, :, None, :], jnp.asarray(other, value.dtype))
        value = value.reshape(*value.shape[:3], self.samples * self.keys, self.used_lanes)
        return _pad(_pad(value, -2, self.key_lanes, other), -1, LANES, other)

    def sum_of_distances(self, of_pairs: jax.Array, start: jax.Array | None) -> jax.Array:
        """Sum ``[T, query tiles, key tiles, key lanes, 128]`` by distance: ``[T, distances]``.

        Uncounted pairs must be zero.
        """
        n = of_pairs.shape[0]
        a = of_pairs[..., : self.samples * self.keys, : self.used_lanes]
        a = a.reshape(*a.shape[:3], self.samples, self.keys, self.samples, self.queries)
        # Only pairs within one sample: the diagonal over samples of keys and queries.
        a = jnp.sum(jnp.diagonal(a, axis1=3, axis2=5), -1).transpose(0, 2, 3, 1, 4)
        a = a.reshape(n, self.key_tiles * self.keys, self.query_tiles * self.queries)
        # The row of each key shifted back by its number.
        width = a.shape[1] + a.shape[2]
        a = _pad(a[:, ::-1], 2, width).reshape(n, -1)[:, : a.shape[1] * (width - 1)]
        a = jnp.sum(a.reshape(n, -1, width - 1), 1)
        distance = jnp.arange(width - 1, dtype=jnp.int32) - (self.key_tiles * self.keys - 1) - 1
        distance = distance if start is None else distance + start
        at = jnp.clip(distance, 0, self.n_distances - 1)
        # A scatter, as all distances behind the last position share its entry.
        return jnp.zeros((n, self.n_distances), a.dtype).at[:, at].add(a)

    def vmem(self, weights: Any, direction: Direction) -> int:
        """Return the vector memory for a call's largest kernel, in bytes."""
        table = _registers(self.n_outputs) * self.rows
        read, sums = (
            2 * weights.dtype.itemsize,
            2 * 4,
        )  # two buffers: one is moved while the other is used
        if direction == "update":
            # Input and output table, and a float32 accumulator for narrower tables.
            tables = 2 * read + (0 if weights.dtype.itemsize == 4 else 4)
        else:
            tables = read if direction == "forward" else max(read, sums)
        # About 16 temporaries [keys, 128] or [keys, key ids] of float32.
        of_pairs = 16 * 4 * self.key_lanes * max(LANES, self.k_ids)
        of_queries = 8 * 4 * LANES * self.slab
        of_blocks = (
            2 * 4 * self.blocks * (_registers(self.n_outputs) * LANES + 6 * 8 * self.key_lanes)
        )
        return tables * table + of_pairs + of_queries + of_blocks

    @property
    def pair_bytes(self) -> int:
        tiles = self.query_tiles * self.key_tiles
        return 4 * self.n_detectors * tiles * self.key_lanes * LANES

    # ---- estimates, from the static profile of the compiler, in seconds
    def seconds(self, weights: Any, tpu: _tpus.TPU, direction: Direction) -> float:
        """Estimate a call's time: the larger of table transfers and slab reads."""
        moved = self.n_detectors * self.rows * _registers(self.n_outputs) * weights.dtype.itemsize
        # An update visits a detector's table once, in and out; other kernels read it again for each
        # step and tile.
        moved *= 2 if direction == "update" else self.steps * self.query_tiles * self.key_tiles
        slabs = (
            self.n_detectors * self.query_tiles * self.key_tiles * self.all_blocks * self.used_lanes
        )
        registers = _registers(self.n_outputs) * self.slab / 1024
        # Transfers overlap with computation, so the larger one counts.
        return max(moved / tpu.bandwidth, slabs * (registers + 10) * _CYCLE)

    def seconds_by_row(self, call: LookupAttention) -> float:
        """Estimate a call's time in plain JAX, which reads a row per pair."""
        # On average half of the pairs are causal.
        keys = self.n_keys / 2 if call.start is None else self.n_keys
        pairs = (
            self.n_samples
            * self.n_queries
            * (keys if call.window is None else min(keys, call.window))
        )
        return self.n_detectors * pairs * _ROW


def unsupported(request: Request) -> str | None:
    """Return the reason that a lookup attention call does not fit the device memory, or None."""
    if request.step is not None and request.step.differs_by_row:
        return "adds pairs to rows at one rate for all, and the rates or factors of these differ"
    call, step = request.call, request.step
    assert isinstance(call, LookupAttention)
    if step is not None and step.rule.weight_decay:
        return "moves rows without weight decay: it does not know which rows a step touches"
    plan = Plan.for_call(call)
    if plan.empty:
        return None
    tpu = _tpus.limits(request.device)
    needed = plan.vmem(call.weights, request.direction)
    if needed > tpu.vmem * 7 // 8:
        return (
            f"weights: a detector's table {list(call.weights.shape[1:])} and what belongs to it "
            f"take {needed / 2**20:.0f} MiB of vector memory, of which a TPU {tpu.name} has "
            f"{tpu.vmem / 2**20:.0f}"
        )
    if plan.pair_bytes > _MOST_DISTANCES:
        return (
            f"query, key: {plan.n_queries} queries and {plan.n_keys} keys have too many distances: "
            f"those of all pairs take {plan.pair_bytes / 2**20:.0f} MiB, more than "
            f"{_MOST_DISTANCES / 2**20:.0f}"
        )
    return None


def slower(request: Request) -> str | None:
    """Return the reason that plain JAX comes first, or None.

    Few pairs read few rows, while these kernels transfer whole tables.
    """
    call = request.call
    assert isinstance(call, LookupAttention)
    plan = Plan.for_call(call)
    if plan.empty:
        return "there is nothing to compute"
    by_row = plan.seconds_by_row(call)
    here = plan.seconds(call.weights, _tpus.limits(request.device), request.direction)
    if here <= by_row:
        return None
    return (
        f"by its static profile plain JAX is faster: {1e6 * by_row:.0f} us against {1e6 * here:.0f}"
    )


def _registers(n: int) -> int:
    return math.ceil(n / 8) * 8


def _pad(a: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    if a.shape[axis] == size:
        return a
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, size - a.shape[axis])
    return jnp.pad(a, widths, constant_values=value)

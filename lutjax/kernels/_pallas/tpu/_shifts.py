"""Pair attention layout on TensorCores: queries in lanes, keys shifted against them.

Layout: samples are adjacent in the lanes, and a sample's queries and keys have the same stride. At
shift ``n`` every query's key is ``n`` lanes before it, so all pairs in a block have one distance. A
kernel step rotates the keys by one lane, so no gather is needed.

Work: a block has up to `TARGET` lanes with whole samples. The loop runs over the shifts at which a
query meets a key. Each lane's key number masks pairs across samples, outside the sequence, or
outside the window.

Numerics: only ids and layouts, all exact. Imports no Pallas.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Request
from lutjax.kernels._pallas.tpu._limits import LANES, vmem_budget
from lutjax.ops.lut_pair_attention import LutPairAttention

TARGET = 512  # lanes of a block, where samples are short
_FAR = 2**30  # beyond any place
_ROWS = 4096
_PLACES = 2048
_IDLE = 8  # keys for each query from which on gathers of XLA read fewer rows than are compared here


@dataclasses.dataclass(frozen=True)
class Shifts:
    """Lane layout for a call, and its number of shifts.

    Attributes:
      stride: lanes per sample. samples: samples per block. lanes: lanes per block.
      most: maximum number of shifts.
    """

    n_samples: int
    n_queries: int
    n_keys: int
    stride: int
    samples: int
    lanes: int
    most: int

    @property
    def n_blocks(self) -> int:
        return -(-self.n_samples // self.samples)

    @property
    def n_lanes(self) -> int:
        return self.n_blocks * self.lanes

    def in_lanes(self, a: jax.Array, fill: int = 0) -> jax.Array:
        """``[..., B, L]`` -> ``[..., lanes of all blocks]``."""
        front = [(0, 0)] * (a.ndim - 2)
        widths = [(0, self.n_blocks * self.samples - a.shape[-2]), (0, self.stride - a.shape[-1])]
        a = jnp.pad(a, [*front, *widths], constant_values=fill)
        a = a.reshape(*a.shape[:-2], self.n_blocks, self.samples * self.stride)
        # Lanes behind the last whole sample of a block stay empty: a sample does not straddle
        # blocks.
        widths = [(0, 0), (0, self.lanes - a.shape[-1])]
        a = jnp.pad(a, [*front, *widths], constant_values=fill)
        return a.reshape(*a.shape[:-2], self.n_lanes)

    def in_places(self, a: jax.Array, length: int) -> jax.Array:
        """``[..., lanes of all blocks]`` -> ``[..., B, length]``."""
        a = a.reshape(*a.shape[:-1], self.n_blocks, self.lanes)[..., : self.samples * self.stride]
        a = a.reshape(*a.shape[:-2], self.n_blocks * self.samples, self.stride)
        return a[..., : self.n_samples, :length]


def plan(call: LutPairAttention, budget: int, n_samples: int) -> Shifts:
    """Return the layout for `n_samples` samples within a memory budget in bytes."""
    n_queries, n_keys = call.x.shape[1], call.keys.shape[1]
    # One stride for both, so that the same rotation serves all samples.
    stride = max(n_queries, n_keys)
    target = min(most_lanes(call.weights, stride, budget), TARGET)
    samples = max(min(target // max(stride, 1), n_samples), 1)
    lanes = -(-samples * stride // LANES) * LANES
    # Without a start query j meets keys 0 to j - 1. With any start a query may also meet keys at
    # its own place and behind it, hence negative shifts.
    most = n_queries - 1 if call.start is None else n_queries + n_keys - 1
    if call.window is not None:
        most = min(most, call.window)
    return Shifts(n_samples, n_queries, n_keys, stride, samples, lanes, max(most, 0))


def most_lanes(weights: Any, stride: int, budget: int) -> int:
    """Return the lanes per block that fit the budget with a table, its gradient and all sums."""
    _, n_rows, n_outputs = weights.shape
    # One comparison per bit of a row id, in whole sublanes.
    n_pairs = 8 * -(-(n_rows.bit_length() - 1) // 8)
    # Everything that travels is there twice; the products of exact terms need copies of what they
    # multiply.
    of_tables = 6 * n_rows * -(-n_outputs // LANES) * LANES
    of_distances = 4 * n_pairs * (2 * stride + LANES)
    of_lane = 4 * n_rows + 5 * (n_outputs + 8) + 24 * n_pairs + 64
    # Float32 elements: a quarter of the bytes.
    return max((budget // 4 - of_tables - of_distances) // of_lane, 0) // LANES * LANES


def unsupported(request: Request) -> str | None:
    """Return the reason that a pair attention call has no layout, or None."""
    if request.step is not None and request.step.differs_by_row:
        return "adds pairs to rows at one rate for all, and the rates or factors of these differ"
    call = request.call
    assert isinstance(call, LutPairAttention)
    n_rows, places = call.weights.shape[1], max(call.x.shape[1], call.keys.shape[1])
    if n_rows > _ROWS:
        return f"weights has {n_rows} rows: each lookup is compared with every row, up to {_ROWS}"
    if places > _PLACES:
        return f"x or keys has {places} places: a sample has to fit in {_PLACES} lanes"
    budget = vmem_budget(request.device)
    shifts = plan(call, budget, 1)
    fitting = most_lanes(call.weights, shifts.stride, budget)
    if shifts.lanes > fitting:
        return (
            f"weights is {list(call.weights.shape)}: with {shifts.stride} places a detector's "
            f"table and sums need {shifts.lanes} lanes, {fitting} fit the memory of the chip"
        )
    return None


def slower(request: Request) -> str | None:
    """Return the reason that the next implementation should run a pair attention call, or None."""
    call = request.call
    assert isinstance(call, LutPairAttention)
    n_queries, n_keys = call.x.shape[1], call.keys.shape[1]
    if _IDLE * n_queries < n_keys:
        return f"{n_queries} queries of {n_keys} keys would leave most lanes idle"
    return None


@dataclasses.dataclass(frozen=True)
class Range:
    """Shifts for a call, depending on the first query's position.

    Attributes:
      first, count: int32 scalars. distances: ``[most]``, pair distance at each shift.
      keys: int32 ``[1, lanes of all blocks]``: the key paired with each lane's query at the first
        shift. It decreases by one per shift. Negative numbers, and numbers not below the number of
        keys, mark no key.
    """

    first: jax.Array
    count: jax.Array
    distances: jax.Array
    keys: jax.Array


def shifts_of(shifts: Shifts, start: jax.Array | None, window: int | None) -> Range:
    """Return the shifts that meet a counted key.

    Args:
      start: first query position minus first key position; None: 0.
    """
    n_queries, n_keys = shifts.n_queries, shifts.n_keys
    first, last, start_place = jnp.int32(1), jnp.int32(n_queries - 1), jnp.int32(0)
    if start is not None:
        # Sums of places must not overflow int32.
        start_place = jnp.clip(start, -_FAR, _FAR).astype(jnp.int32)
        # The distance is start + shift - 1, and must not be negative; no key lies farther behind
        # than n_keys - 1.
        first = jnp.maximum(1 - start_place, 1 - n_keys)
    if window is not None:
        last = jnp.minimum(last, min(window, _FAR) - start_place)
    place = jnp.broadcast_to(jnp.arange(n_queries, dtype=jnp.int32), (shifts.n_samples, n_queries))
    # Empty lanes get a key number that stays negative at every shift, so they never count.
    keys = shifts.in_lanes(place, fill=-2 * shifts.stride - shifts.most) - first
    distances = start_place + first - 1 + jnp.arange(shifts.most, dtype=jnp.int32)
    return Range(first, jnp.maximum(last - first + 1, 0), distances, keys[None])

"""Attention over long sequences: row-read counts times tables.

All pairs for query ``j`` read rows that differ only in the key and distance bits: its cells ``r``.
A long sequence reads each of these few rows many times. Formula, for detector ``t``::

    counts[t, j, r] = number of keys i whose pair with j reads row r
    y[j] = sum_{t, r} counts[t, j, r] * weights[t, r]
    dweights[t, r] = sum_j counts[t, j, r] * dy[j]
    products[t, j, r] = <dy[j], weights[t, r]>, from which each pair reads its margin gradient

Work: `_sort` groups queries with the same id, which share rows. `_count` computes counts as a
product between one-hot distances and one-hot keys on tensor cores; a program owns some queries from
one sample. `_sum_counted` and `_multiply_by_rows` own a query block with one id, `_add_counted`
owns some rows for one id. Detectors are processed in groups, because counts take memory.

Layout: counts are ``[detectors of a group, queries, cells]``, int16 or int32, so a program reads a
query's cells contiguously. After sorting by query id, a program's queries share one row tile.

Numerics: all sums have a fixed order. A bfloat16 operand holds 8 significant bits: counts are split
into bytes, float32 values into three bfloat16 terms, integers into four digits. Margin products use
three TF32 products (22 of 24 bits). A non-finite row or gradient turns every result for queries
with the same id into NaN, read or not. A margin gradient is the difference between two products, so
its error is relative to the products. Ids are clamped. There are no atomics.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from lutjax import _compat
from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_additions, _row_tiles
from lutjax.kernels._triton._detected_pairs import DetectedPairs
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.values._fixed_point import addend_dtype

_Carry = TypeVar("_Carry")
# Most bytes of counts or products of a group of detectors, if the group has several.
_BYTES = 2**28
_COUNT = {"rows": 256, "keys": 32, "warps": 8}
# Elements of the tile of counts of a program: 64 registers per thread of 8 warps.
_MOST_SUMS = 2**14
# Kernel configs of the products; `rows` are queries.
_SUM = {"rows": 64, "cells": 64, "stages": 3}
_ADD = {"rows": 32, "cells": 64, "stages": 1}
_PRODUCTS = {"rows": 64, "cells": 64, "stages": 3}
_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Counter:
    """Function that counts reads.

    Attributes:
      count: takes pairs, first detector, number of detectors, and device; returns each query's
        reads per row, ``[detectors, queries, rows per query id]``.
      keys_last: along the row axis, the key id changes fastest if True, else the distance id.
    """

    count: Callable[[DetectedPairs, jax.Array, int, Device], jax.Array]
    keys_last: bool


# Microseconds on an H200, float32: 64 detectors, 64 query ids, 64 key ids, 16 distance ids and 32
# outputs. The columns of a pass: rows one by one, counts as products, and (forward, table) counts
# in shared memory (`lutjax.kernels._pallas.gpu._counts`).
#   samples  length       forward                margins               table
#        16     256    477  1098   851       1349   1816       1486  1321  1129
#         8     512    955  1367   890       2520   2154       2575  1619  1165
#         4    1024   1783  2013   948       4917   2749       4764  2225  1205
#         1    4096   7080  5553  1236      19763   6076      18780  5890  1501
# The number of keys from which counting was measured faster.
_FEWEST_KEYS = {"forward": 4096, "margins": 512, "table": 256}
_MOST_CELLS = 2**10
# Queries per id; with fewer, blocks of queries with one id are mostly empty.
_FEWEST_OF_ID = 16
_MOST_COUNTS = 2**28  # counts of a detector; margins store two float32 products for each
_MOST_KEYS = 2**24  # float32 counts exactly up to here


def is_faster(direction: str, pairs: DetectedPairs) -> bool:
    """Return True if counting is faster than reading rows one by one."""
    n_samples, n_queries = pairs.queries
    n_keys, n_cells = pairs.sizes["keys"], 1 << pairs.query_shift
    return (
        fits(pairs, direction)
        and n_keys >= _FEWEST_KEYS[direction]
        and n_cells <= _MOST_CELLS
        and n_samples * n_queries >= _FEWEST_OF_ID * (pairs.weights.shape[1] // n_cells)
    )


def fits(pairs: DetectedPairs, direction: str = "table") -> bool:
    """Return True if reads can be counted."""
    return (
        # In fixed point each product of a margin is rounded to an integer by itself, which products
        # of sums cannot do. Targets, block masks and starts per sample have no counting kernel.
        (pairs.accumulate is None or direction != "margins")
        and pairs.targets is None
        and pairs.blocks is None
        and (pairs.start is None or pairs.start.ndim == 0)
        and pairs.sizes["keys"] <= _MOST_KEYS
        and pairs.query[0].size << pairs.query_shift <= _MOST_COUNTS
        and pairs.weights.dtype != jnp.float64
        and 0 not in (*pairs.weights.shape, *pairs.query.shape, *pairs.key.shape)
    )


def sum_rows(pairs: DetectedPairs, device: Device, counter: Counter | None = None) -> jax.Array:
    """Return each query's summed row addends, ``[B, L, O]``."""
    weights, dtype = pairs.weights, addend_dtype(jnp.float32, pairs.accumulate)
    n_detectors, _, n_outputs = weights.shape
    n = pairs.query[0].size
    counter = counter or BY_PRODUCTS
    order = Order(pairs.query >> pairs.query_shift, pairs, device)
    group = _divisor(n_detectors, _bytes_of_counts(pairs))
    tile = _tile(n_outputs, _SUM)

    def add(number: jax.Array, y: jax.Array) -> jax.Array:
        first = number * group
        # Detectors of a group write separate parts, so the sum over detectors has a fixed order.
        (parts,) = launch(
            _sum_counted,
            weights,
            *order.arrays,
            counter.count(pairs, first, group, device),
            first.reshape(1),
            outputs=[jax.ShapeDtypeStruct((group, n, n_outputs), dtype)],
            programs=group * order.blocks(tile["ROWS"]) * triton.cdiv(n_outputs, tile["OUTPUTS"]),
            device=device,
            warps=_WARPS,
            n_blocks=order.blocks(tile["ROWS"]),
            # Products split counts into bytes; only as many as the number of keys needs.
            BYTES=-(-pairs.sizes["keys"].bit_length() // 8),
            POSITIONS=order.positions if counter.keys_last else 1,
            **order.constants,
            **tile,
        )
        return y + jnp.sum(parts, 0, dtype=dtype)

    y = _cast_varying_like((weights, *pairs.arrays), jnp.zeros((n, n_outputs), dtype))
    y = _for_each(n_detectors // group, add, y)
    return y.reshape(*pairs.queries, n_outputs)


def add_rows(
    pairs: DetectedPairs,
    dy: jax.Array,
    device: Device,
    addition: _row_additions.Addition,
    counter: Counter | None = None,
) -> tuple[jax.Array, ...]:
    n_tables, _, n_outputs = addition.total.shape
    counter = counter or BY_PRODUCTS
    order = Order(pairs.query >> pairs.query_shift, pairs, device)
    group = _divisor(n_tables, _bytes_of_counts(pairs))
    tile = _tile(n_outputs, _ADD)
    cell_blocks = triton.cdiv(order.cells, tile["CELLS"])

    def add(number: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        place = number * group
        first = addition.first + place
        return launch(
            _add_counted,
            *order.arrays,
            counter.count(pairs, first, group, device),
            dy,
            addition.step.reshape(1),
            first.reshape(1),
            place.reshape(1),
            in_place=arrays,
            programs=group * order.n_ids * cell_blocks * triton.cdiv(n_outputs, tile["OUTPUTS"]),
            device=device,
            warps=_WARPS,
            TOUCH=addition.touched is not None,
            BYTES=-(-pairs.sizes["keys"].bit_length() // 8),
            POSITIONS=order.positions if counter.keys_last else 1,
            **order.constants,
            **tile,
        )

    like = (dy, *pairs.arrays, addition.step, addition.first)
    total = addition.total
    # The loop over groups of detectors needs an array as its carry.
    if isinstance(total, jax.ShapeDtypeStruct):
        total = jnp.zeros(total.shape, total.dtype)
    else:
        like = (*like, total)
    touched = jnp.zeros((1,), jnp.int32) if addition.touched is None else addition.touched
    return _for_each(
        n_tables // group, add, (_cast_varying_like(like, total), _cast_varying_like(like, touched))
    )


def with_products(
    pairs: DetectedPairs,
    ids: jax.Array,
    dy: jax.Array,
    device: Device,
    use: Callable[..., tuple[jax.Array, ...]],
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Pass ``<dy, row>`` for each query and each row under its ids to `use`.

    Args:
      ids: query ids ``[T, m, B, L]``, `m` per query.
      use: takes products ``[detectors, m * B * L, rows per id]`` for some detectors, the first
        detector, and arrays; returns the arrays.
      shapes: array shapes; the arrays start as zeros.
    """
    weights = pairs.weights
    n_detectors, _, n_outputs = weights.shape
    order = Order(ids, pairs, device)
    group = _divisor(n_detectors, 4 * order.n * order.cells)
    tile = _tile(n_outputs, _PRODUCTS)

    def visit_group(number: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = number * group
        (products,) = launch(
            _multiply_by_rows,
            weights,
            *order.arrays,
            dy,
            first.reshape(1),
            outputs=[jax.ShapeDtypeStruct((group, order.n, order.cells), jnp.float32)],
            programs=group * order.blocks(tile["ROWS"]),
            device=device,
            warps=_WARPS,
            n_blocks=order.blocks(tile["ROWS"]),
            N_QUERIES=pairs.query[0].size,
            **order.constants,
            **tile,
        )
        return use(products, first, *arrays)

    like = (weights, *pairs.arrays, ids, dy)
    zeros = (_cast_varying_like(like, jnp.zeros(s.shape, s.dtype)) for s in shapes)
    return _for_each(n_detectors // group, visit_group, tuple(zeros))


class Order:
    """Query order per detector that groups queries with the same id.

    Attributes:
      n_ids: number of query ids.
      cells: number of rows per id.
      positions: number of distance ids.
    """

    def __init__(self, ids: jax.Array, pairs: DetectedPairs, device: Device):
        self.cells = 1 << pairs.query_shift
        self.n_ids = pairs.weights.shape[1] // self.cells
        self.n = ids[0].size
        self.positions = 1 << pairs.key_shift
        self.arithmetic = _row_tiles.arithmetic(pairs)
        self.arrays = sort_by_id(ids.reshape(len(ids), self.n), self.n_ids, device)

    def blocks(self, rows: int) -> int:
        """Return an upper bound on the number of blocks with `rows` queries under one id."""
        # How many blocks an id needs is known on the device only. Each id leaves at most one block
        # unfilled; programs beyond the last block end at once.
        return self.n // rows + min(self.n_ids, self.n)

    @property
    def constants(self) -> dict[str, Any]:
        return {"n": self.n, "n_ids": self.n_ids, "n_cells": self.cells, **self.arithmetic}


def sort_by_id(ids: jax.Array, n_ids: int, device: Device) -> tuple[jax.Array, ...]:
    """Sort each row of ids ``[m, n]`` stably.

    Returns:
      Positions ``[m, n]`` in id order, and each id's start ``[m, n_ids + 1]``.
    """
    n_lists, n = ids.shape
    return launch(
        _sort,
        ids,
        outputs=[
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (ids.shape, (n_lists, n_ids + 1))
        ],
        programs=n_lists * n_ids,
        device=device,
        warps=4,
        n=n,
        n_ids=n_ids,
        BLOCK=1024,
    )


def _count_by_products(
    pairs: DetectedPairs, first: jax.Array, group: int, device: Device
) -> jax.Array:
    """Return counts, ``[detectors of a group, queries, distance ids * key ids]``."""
    n_samples, n_queries = pairs.queries
    positions, keys = 1 << pairs.key_shift, 1 << (pairs.query_shift - pairs.key_shift)
    # Dimensions of a tensor-core product are at least 16.
    columns = max(keys, 16)
    # The tile has a row for each query and distance id.
    queries = max(min(_COUNT["rows"], _MOST_SUMS // columns) // positions, 1)
    (counts,) = launch(
        _count,
        *pairs.arrays[1:],
        first.reshape(1),
        outputs=[
            jax.ShapeDtypeStruct(
                (group, n_samples * n_queries, positions * keys), dtype_of_counts(pairs)
            )
        ],
        programs=group * n_samples * triton.cdiv(n_queries, queries),
        device=device,
        warps=_COUNT["warps"],
        KEY_SHIFT=pairs.key_shift,
        KEY_IDS=keys,
        COLUMNS=columns,
        POSITIONS=positions,
        QUERIES=queries,
        KEYS=_COUNT["keys"],
        **pairs.constants,
    )
    return counts


BY_PRODUCTS = Counter(_count_by_products, keys_last=True)


def dtype_of_counts(pairs: DetectedPairs) -> Any:
    return jnp.int16 if pairs.sizes["keys"] < 2**15 else jnp.int32


def _bytes_of_counts(pairs: DetectedPairs) -> int:
    return (pairs.query[0].size << pairs.query_shift) * jnp.dtype(dtype_of_counts(pairs)).itemsize


def _divisor(n_detectors: int, size: int) -> int:
    """Return the size of equal detector groups, given `size` bytes per detector."""
    group = min(max(_BYTES // max(size, 1), 1), n_detectors)
    # Equal groups share one compiled kernel in the loop.
    while n_detectors % group:
        group -= 1
    return group


def _tile(n_outputs: int, config: dict[str, int]) -> dict[str, Any]:
    """Return a product kernel's tile constants."""
    return {
        "n_outputs": n_outputs,
        "OUTPUTS": min(max(triton.next_power_of_2(n_outputs), 16), 64),
        "ROWS": config["rows"],
        "CELLS": config["cells"],
        "stages": config["stages"],
    }


def _cast_varying_like(like: Sequence[jax.Array], a: jax.Array) -> jax.Array:
    """Return `a` as a loop carry that varies over these arrays' mesh axes."""
    axes = frozenset[str]().union(*(_compat.varying_axes(b) for b in like))
    return _compat.cast_varying(a, axes)


def _for_each(n_groups: int, f: Callable[[jax.Array, _Carry], _Carry], carry: _Carry) -> _Carry:
    if n_groups == 1:
        return f(jnp.zeros((), jnp.int32), carry)
    return jax.lax.fori_loop(0, n_groups, lambda i, c: f(jnp.asarray(i, jnp.int32), c), carry)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sort(ids, order, starts, c: tl.constexpr):
    # Counting sort: a program owns one id of one detector, and reads all ids twice. It first counts
    # the smaller ids, then writes the positions of its own id. Programs need no communication, and
    # the sort is stable.
    t = (tl.program_id(0) // c.n_ids).to(tl.int64)
    own = tl.program_id(0) % c.n_ids
    smaller = tl.zeros((c.BLOCK,), tl.int32)
    for first in range(0, c.n, c.BLOCK):
        i = first + tl.arange(0, c.BLOCK)
        found = tl.load(ids + t * c.n + i, mask=i < c.n, other=c.n_ids)
        # Ids out of range are clamped, like in every kernel that reads rows.
        found = tl.minimum(tl.maximum(found, 0), c.n_ids - 1)
        smaller += ((found < own) & (i < c.n)).to(tl.int32)
    place = tl.sum(smaller, 0)
    tl.store(starts + t * (c.n_ids + 1) + own, place)
    for first in range(0, c.n, c.BLOCK):
        i = first + tl.arange(0, c.BLOCK)
        found = tl.load(ids + t * c.n + i, mask=i < c.n, other=0)
        found = tl.minimum(tl.maximum(found, 0), c.n_ids - 1)
        same = ((found == own) & (i < c.n)).to(tl.int32)
        # The exclusive sum numbers the matches of the block.
        at = place + tl.cumsum(same, 0) - same
        tl.store(order + t * c.n + at, i, mask=same != 0)
        place += tl.sum(same, 0)
    # The last id also writes the end of the list.
    tl.store(starts + t * (c.n_ids + 1) + c.n_ids, place, mask=own == c.n_ids - 1)


@kernel
def _block(starts, t, number, c: tl.constexpr):
    """Find block `number` among the blocks of queries with one id.

    Returns:
      Its id, its first position in the order, and the id's end. Start and end are equal if the
      block does not exist.
    """
    # A block never spans two ids, so the number of its id follows from the blocks before it. All
    # ids are compared at once, and sums select the one that matches.
    own = tl.arange(0, c.n_ids)
    begin = tl.load(starts + t * (c.n_ids + 1) + own)
    end = tl.load(starts + t * (c.n_ids + 1) + own + 1)
    blocks = (end - begin + c.ROWS - 1) // c.ROWS
    before = tl.cumsum(blocks, 0) - blocks
    here = (before <= number) & (number < before + blocks)
    first = tl.sum(tl.where(here, begin + (number - before) * c.ROWS, 0), 0)
    return tl.sum(tl.where(here, own, 0), 0), first, tl.sum(tl.where(here, end, 0), 0)


@kernel
def _queries(order, t, first, end, c: tl.constexpr):
    place = first + tl.arange(0, c.ROWS)
    exists = place < end
    return tl.load(order + t * c.n + place, mask=exists, other=0).to(tl.int64), exists


@kernel
def _count(
    key,
    position,
    start,
    query_segments,
    key_segments,
    unused,
    first_detector,
    counts,
    c: tl.constexpr,
):
    # A program owns some queries of one sample. The tile has a row for each query and distance id,
    # and a column for each key id; late queries come first because they have most keys.
    ROWS: tl.constexpr = c.QUERIES * c.POSITIONS
    blocks: tl.constexpr = (c.n_queries + c.QUERIES - 1) // c.QUERIES
    block = blocks - 1 - tl.program_id(0) % blocks
    rest = tl.program_id(0) // blocks
    b = (rest % c.n_samples).to(tl.int64)
    group = (rest // c.n_samples).to(tl.int64)
    t = group + tl.load(first_detector)
    j = block * c.QUERIES + tl.arange(0, c.QUERIES)
    # A query sees the keys before its own position, which `start` shifts.
    shift = 0
    if c.START:
        shift = tl.load(start)
    low = 0
    if c.WINDOW >= 0:
        low = tl.minimum(tl.maximum(block * c.QUERIES + shift - c.WINDOW, 0), c.n_keys)
    last = tl.minimum(block * c.QUERIES + c.QUERIES, c.n_queries) - 1
    high = tl.minimum(tl.maximum(last + shift, 0), c.n_keys)
    key += (t * c.n_samples + b) * c.n_keys
    if not c.SHARED:
        position += t * c.n_distances
    place = j + shift
    total = tl.zeros((ROWS, c.COLUMNS), tl.float32)
    for first in range(low, high, c.KEYS):
        i = first + tl.arange(0, c.KEYS)
        meets = (j < c.n_queries)[:, None] & (i < c.n_keys)[None, :] & (i[None, :] < place[:, None])
        if c.WINDOW >= 0:
            meets = meets & (place[:, None] - i[None, :] <= c.WINDOW)
        if c.SEGMENTS:
            own = tl.load(query_segments + b * c.n_queries + j, mask=j < c.n_queries, other=0)
            of_key = tl.load(key_segments + b * c.n_keys + i, mask=i < c.n_keys, other=0)
            meets = meets & (own[:, None] == of_key[None, :])
        found = tl.zeros((c.QUERIES, c.KEYS), tl.int32)
        if c.n_distances > 0:
            distance = tl.minimum(place[:, None] - 1 - i[None, :], c.n_distances - 1)
            found = tl.load(position + distance, mask=meets, other=0)
            found = tl.minimum(tl.maximum(found, 0), c.POSITIONS - 1)
        # Pairs that do not count get distance id -1, which no row of the tile has.
        found = tl.where(meets, found, -1)
        # One-hot tiles: their product adds 1 in the row of the distance and the column of the key
        # for each pair. bfloat16 holds 0 and 1, the sum is float32.
        of_distance = found[:, None, :] == tl.arange(0, c.POSITIONS)[None, :, None]
        of_distance = tl.reshape(of_distance.to(tl.float32).to(tl.bfloat16), (ROWS, c.KEYS))
        found = tl.load(key + i, mask=i < c.n_keys, other=0) >> c.KEY_SHIFT
        found = tl.minimum(tl.maximum(found, 0), c.KEY_IDS - 1)
        of_key = (found[:, None] == tl.arange(0, c.COLUMNS)[None, :]).to(tl.float32).to(tl.bfloat16)
        total = tl.dot(of_distance, of_key, total)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, c.COLUMNS)
    own = block * c.QUERIES + row // c.POSITIONS
    # Unused columns, if there are fewer than 16 key ids, are not stored.
    at = ((group * c.n_samples + b) * c.n_queries + own) * (
        c.POSITIONS * c.KEY_IDS
    ) + row % c.POSITIONS * c.KEY_IDS
    exists = (own < c.n_queries)[:, None] & (column < c.KEY_IDS)[None, :]
    tl.store(counts + at[:, None] + column[None, :], total.to(counts.dtype.element_ty), mask=exists)


@kernel
def _rows_of(own, cell, n_cells: tl.constexpr, POSITIONS: tl.constexpr):
    """Convert cells to rows.

    In product counts the key id changes fastest, in tables the distance id.
    """
    KEY_IDS: tl.constexpr = n_cells // POSITIONS
    return own * n_cells + cell % KEY_IDS * POSITIONS + cell // KEY_IDS


@kernel
def _plus_product(total, counts, values, c: tl.constexpr):
    """Add the product between counts and values in bfloat16 terms."""
    if c.SCALE == 0:
        # A float32 value is the sum of three bfloat16 terms, from the largest to the smallest. A
        # byte of a count has 8 bits and is exact in bfloat16, in its place as well.
        rest = values
        for _ in tl.static_range(3):
            term = rest.to(tl.bfloat16)
            rest = rest - term.to(tl.float32)
            for byte in tl.static_range(c.BYTES):
                part = counts.to(tl.int32) & (255 << (8 * byte))
                total = tl.dot(part.to(tl.float32).to(tl.bfloat16), term, total)
    else:
        # An integer has four digits from -128 to 127. Sums of their products with bytes are whole
        # numbers that float32 holds. Digits whose weight exceeds 32 bits would wrap to nothing and
        # are skipped.
        addends = _row_tiles.addend(values, c)
        for digit in tl.static_range(4):
            low = ((addends + 128) & 255) - 128
            addends = (addends - low) >> 8
            for byte in tl.static_range(c.BYTES):
                if digit + byte < 4:
                    part = (counts.to(tl.int32) >> (8 * byte)) & 255
                    product = tl.dot(
                        part.to(tl.float32).to(tl.bfloat16), low.to(tl.float32).to(tl.bfloat16)
                    )
                    total += product.to(tl.int32) << (8 * (digit + byte))
    return total


@kernel
def _sum_counted(weights, order, starts, counts, first_detector, parts, c: tl.constexpr):
    group = (tl.program_id(0) // c.n_blocks).to(tl.int64)
    output_blocks: tl.constexpr = (c.n_outputs + c.OUTPUTS - 1) // c.OUTPUTS
    output, output_exists = _row_tiles.block(c.OUTPUTS, c.n_outputs, group % output_blocks)
    group = group // output_blocks
    t = group + tl.load(first_detector)
    own, first, end = _block(starts, t, tl.program_id(0) % c.n_blocks, c)
    # Programs beyond the last block have no queries; see `Order.blocks`.
    if first < end:
        query, exists = _queries(order, t, first, end, c)
        table = _row_tiles.table(weights, t, c)
        of_queries = counts + (group * c.n + query)[:, None] * c.n_cells
        total = tl.zeros((c.ROWS, c.OUTPUTS), c.SUM)
        for first_cell in range(0, c.n_cells, c.CELLS):
            cell = first_cell + tl.arange(0, c.CELLS)
            of_cell = tl.load(
                of_queries + cell[None, :],
                mask=exists[:, None] & (cell < c.n_cells)[None, :],
                other=0,
            )
            # All queries of the block share these rows, so one tile of the table serves the
            # product.
            row = _rows_of(own, cell, c.n_cells, c.POSITIONS)
            at = _row_tiles.offset(row, c)[:, None] + output[None, :]
            value = tl.load(
                table + at, mask=(cell < c.n_cells)[:, None] & output_exists[None, :], other=0
            )
            total = _plus_product(total, of_cell, value.to(tl.float32), c)
        at = (group * c.n + query)[:, None] * c.n_outputs + output[None, :]
        tl.store(parts + at, total, mask=exists[:, None] & output_exists[None, :])


@kernel
def _add_counted(
    order,
    starts,
    counts,
    dy,
    step,
    first_detector,
    first_table,
    unused0,
    unused1,
    total,
    touched,
    c: tl.constexpr,
):
    # A program owns some rows of one id and visits all queries with the id, so additions to the
    # table need no atomics.
    cell_blocks: tl.constexpr = (c.n_cells + c.CELLS - 1) // c.CELLS
    output_blocks: tl.constexpr = (c.n_outputs + c.OUTPUTS - 1) // c.OUTPUTS
    cell = tl.program_id(0) % cell_blocks * c.CELLS + tl.arange(0, c.CELLS)
    rest = tl.program_id(0) // cell_blocks
    own = rest % c.n_ids
    rest = rest // c.n_ids
    output, output_exists = _row_tiles.block(c.OUTPUTS, c.n_outputs, rest % output_blocks)
    group = (rest // output_blocks).to(tl.int64)
    t = group + tl.load(first_detector)
    begin = tl.load(starts + t * (c.n_ids + 1) + own)
    end = tl.load(starts + t * (c.n_ids + 1) + own + 1)
    if begin < end:
        sums = tl.zeros((c.CELLS, c.OUTPUTS), c.SUM)
        reads = tl.zeros((c.CELLS,), tl.int32)
        for first in range(begin, end, c.ROWS):
            query, exists = _queries(order, t, first, end, c)
            at = (group * c.n + query)[:, None] * c.n_cells + cell[None, :]
            of_cell = tl.load(
                counts + at, mask=exists[:, None] & (cell < c.n_cells)[None, :], other=0
            )
            if c.TOUCH:
                # Only rows with a count are marked as updated.
                reads = tl.maximum(reads, tl.max(of_cell.to(tl.int32), 0))
            at = query[:, None] * c.n_outputs + output[None, :]
            value = tl.load(dy + at, mask=exists[:, None] & output_exists[None, :], other=0)
            sums = _plus_product(sums, tl.trans(of_cell), value.to(tl.float32), c)
        mask = (cell < c.n_cells)[:, None] & output_exists[None, :]
        row = _rows_of(own, cell, c.n_cells, c.POSITIONS)
        at = _row_tiles.offset(row, c)[:, None] + output[None, :]
        place = group + tl.load(first_table)
        table = _row_tiles.table(total, place, c)
        # In fixed point the step is 1: sums are integers already.
        if c.SCALE == 0:
            sums = sums * tl.load(step)
        # No other program owns these rows.
        sums += tl.load(table + at, mask=mask, other=0)
        tl.store(table + at, sums, mask=mask)
        if c.TOUCH:
            _row_tiles.touch(touched, place, row, reads > 0, c)


@kernel
def _multiply_by_rows(weights, order, starts, dy, first_detector, products, c: tl.constexpr):
    group = (tl.program_id(0) // c.n_blocks).to(tl.int64)
    t = group + tl.load(first_detector)
    own, first, end = _block(starts, t, tl.program_id(0) % c.n_blocks, c)
    if first < end:
        query, exists = _queries(order, t, first, end, c)
        table = _row_tiles.table(weights, t, c)
        of_queries = products + (group * c.n + query)[:, None] * c.n_cells
        for first_cell in range(0, c.n_cells, c.CELLS):
            cell = first_cell + tl.arange(0, c.CELLS)
            total = tl.zeros((c.ROWS, c.CELLS), tl.float32)
            for o in range(0, c.n_outputs, c.OUTPUTS):
                output = o + tl.arange(0, c.OUTPUTS)
                # Several ids of a query share its gradient.
                at = (query % c.N_QUERIES)[:, None] * c.n_outputs + output[None, :]
                cotangent = tl.load(
                    dy + at, mask=exists[:, None] & (output < c.n_outputs)[None, :], other=0
                )
                row = _row_tiles.offset(own * c.n_cells + cell, c)
                at = row[None, :] + output[:, None]
                value = tl.load(
                    table + at,
                    mask=(cell < c.n_cells)[None, :] & (output < c.n_outputs)[:, None],
                    other=0,
                )
                # Three TF32 products keep 22 of 24 bits; plain TF32 keeps 11.
                total = tl.dot(
                    cotangent.to(tl.float32), value.to(tl.float32), total, input_precision="tf32x3"
                )
            tl.store(
                of_queries + cell[None, :],
                total,
                mask=exists[:, None] & (cell < c.n_cells)[None, :],
            )

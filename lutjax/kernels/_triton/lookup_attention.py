"""`lutjax.lookup_attention` in Triton.

Formula for query ``j`` and every counted earlier key ``i``, in table ``t``, with ``row = query bits
| key bits | distance bits`` and ``other`` the row with a margin's flip::

    y[j] = sum_{t, i} weights[t, row]
    dweights[t, row] += dy[j]
    dmargin += slope(margin) * <dy[j], weights[t, row] - weights[t, other]>

Each pair updates the smaller one of the query and key margin gradients, and in addition the
position margin gradient if the position margin is smaller than both. With targets, a row element is
a slot, which is added to one output.

Work: a program owns one query from one sample (two for margins), an output block and a detector
block, and loops over blocks with `ROWS` keys. The grid is one-dimensional: queries change fastest,
then samples, output blocks, and detector blocks. Late queries, which have most keys, start first,
so that no long program is left at the end. Long sequences count reads (`_histograms`).

Layout: bits and margins are ``[T, B, L]``, so a key block is contiguous. Concurrent programs read
few tables, which stay in the L2 cache. Neighboring keys often share rows in the L1 cache.

Numerics: sums use the accumulator dtype (float32 or float64) or, in fixed point, int32. One program
per detector block sums each output, and partial sums are added in a fixed order. Tables, key and
position margins and slots use atomics, so their last bits differ between runs, except in fixed
point or where reads are counted. In a tie the key counts as closer than the query, and both as
closer than the position; a NaN margin is never the smaller one. Row ids are clamped.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _histograms, _row_additions, _row_tiles
from lutjax.kernels._triton._detected_pairs import DetectedPairs, move_tables_first
from lutjax.kernels._triton._language import tl
from lutjax.kernels._triton._rules import few_pair_additions, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla._row_gathers import times_slope
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._fixed_point import addend_dtype, result
from lutjax.values._row_rules import RowState

AddRows = Callable[
    [DetectedPairs, jax.Array, Device, _row_additions.Addition], tuple[jax.Array, ...]
]
"""Adds `dy` to every pair's row; returns `total`, and `touched`."""


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, LookupAttention)
    if why := unsupported_arguments(request):
        return why
    if call.weights.shape[0] == 0:
        return "has no kernel for a table of no detectors"
    return few_pair_additions(request, call, call.query.shape)


SPEC = Declaration(
    _supports,
    launches=("lookup_attention.forward", "lookup_attention.margins", "lookup_attention.table"),
)


def forward(call: LookupAttention, *, device: Device) -> jax.Array:
    pairs = DetectedPairs.from_call(call)
    # Slots reach outputs that are known at run time only, so they are scattered.
    if pairs.targets is not None:
        return _sum_slots(pairs, device)
    if _histograms.is_faster("forward", pairs):
        return result(_histograms.sum_rows(pairs, device), call.weights.dtype, call.accumulate)
    tile = pairs.tile(
        launch_of("lookup_attention.forward", pairs.sizes, device, _forward_rule), device
    )
    return _row_tiles.sum_rows(
        _sum_rows, call, tile, pairs.queries, *pairs.arrays, **pairs.arguments(tile)
    )


def _sum_slots(pairs: DetectedPairs, device: Device) -> jax.Array:
    """Return the slots summed by output, ``[B, Lq, O]``."""
    dtype = addend_dtype(pairs.weights.dtype, pairs.accumulate)
    tile = pairs.tile(
        launch_of("lookup_attention.forward", pairs.sizes, device, _forward_rule), device
    )
    (y,) = launch(
        _scatter_rows,
        pairs.weights,
        *pairs.arrays,
        pairs.lists,
        # Programs of different slots and detectors add to the same outputs.
        zeroed=[jax.ShapeDtypeStruct((*pairs.queries, pairs.width), dtype)],
        **pairs.arguments(tile),
    )
    return result(y, pairs.weights.dtype, pairs.accumulate)


def backward(
    call: LookupAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    return backward_by(add_rows, call, cotangent, needs, device=device)


def backward_by(
    add_rows: AddRows,
    call: LookupAttention,
    cotangent: jax.Array,
    needs: frozenset[str],
    *,
    device: Device,
) -> dict[str, jax.Array]:
    """Return the gradients; `add_rows` computes the table gradient."""
    pairs, cotangents = DetectedPairs.from_call(call), {}
    if "weights" in needs:
        add = functools.partial(add_rows, pairs, cotangent, device)
        cotangents["weights"] = _row_additions.gradient(call, add)
    if needs - {"weights"}:
        cotangents |= _margins(pairs, call, cotangent, "position" in needs, device)
    return {name: cotangents[name] for name in needs}


def update(
    call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return update_by(add_rows, call, cotangent, step, device=device)


def update_by(
    add_rows: AddRows, call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    """Return updated tables and row state; `add_rows` sums row gradients."""
    add = functools.partial(add_rows, DetectedPairs.from_call(call), cotangent, device)
    return _row_additions.update(call, step, add, device=device)


def _margins(
    pairs: DetectedPairs, call: LookupAttention, dy: jax.Array, need_position: bool, device: Device
) -> dict[str, jax.Array]:
    """Return margin gradients for queries, keys and, if needed, positions."""
    weights, query, key, position = call.weights, call.query, call.key, call.position
    of_products = _histograms.is_faster("margins", pairs)
    config = _OF_PRODUCTS
    if not of_products:
        config = launch_of("lookup_attention.margins", pairs.sizes, device, _margins_rule)
    # A margin needs the whole inner product, so a program visits all outputs.
    tile = pairs.tile(config, device, all_outputs=True)
    q_flip, k_flip = (
        move_tables_first(query.flip) << pairs.query_shift,
        move_tables_first(key.flip) << pairs.key_shift,
    )
    dtype = addend_dtype(query.margin.dtype, call.accumulate)
    shape_of_keys = (len(weights), *key.index.shape[:2])
    zeroed = [jax.ShapeDtypeStruct(shape_of_keys, dtype)]
    of_position = (q_flip, query.margin)  # placeholders
    if need_position:
        assert position is not None
        of_position = (position.flip.T, position.margin.T)
        # Separate parts for samples and detectors: fewer programs add to the same element.
        parts = (*shape_of_keys[1::-1], position.index.shape[0])
        zeroed.append(
            jax.ShapeDtypeStruct(parts, addend_dtype(position.margin.dtype, call.accumulate))
        )
    else:
        zeroed.append(jax.ShapeDtypeStruct((1,), dtype))
    inputs = (
        weights,
        *pairs.arrays,
        q_flip,
        move_tables_first(query.margin),
        k_flip,
        move_tables_first(key.margin),
        *of_position,
        pairs.lists,
        dy,
    )
    outputs = [jax.ShapeDtypeStruct((len(weights), *pairs.queries), dtype)]
    # Two queries per program, see `_multiply_rows`.
    arguments = {**pairs.arguments(tile, queries=2), "OF_POSITION": need_position, "CELLS": 0}
    if of_products:

        def multiply_group(
            products: jax.Array, first: jax.Array, *arrays: jax.Array
        ) -> tuple[jax.Array, ...]:
            programs = arguments["programs"] // len(weights) * len(products)
            of_products = {**arguments, "programs": programs, "CELLS": products.shape[2]}
            return launch(
                _multiply_rows, *inputs, products, first.reshape(1), in_place=arrays, **of_products
            )

        # A query reads rows with its own id, and with the id after its closest bit flips.
        ids = jnp.stack([pairs.query, pairs.query ^ q_flip], 1) >> pairs.query_shift
        sums = _histograms.with_products(
            pairs, ids, dy, device, multiply_group, [*outputs, *zeroed]
        )
    else:
        # Placeholders for products, the first detector and the arrays in place.
        none = [jnp.zeros((1,), jnp.int32)] * 5
        sums = launch(_multiply_rows, *inputs, *none, outputs=outputs, zeroed=zeroed, **arguments)

    cotangents = {"query": jnp.moveaxis(sums[0], 0, -1), "key": jnp.moveaxis(sums[1], 0, -1)}
    if need_position and position is not None:
        shared = position.index.shape[1] == 1
        d_position = jnp.sum(sums[2], (0, 1) if shared else 0, dtype=sums[2].dtype)
        cotangents["position"] = d_position[:, None] if shared else d_position.T
    # In fixed point the kernel multiplies each addend by its slope. Otherwise the slope is the same
    # for all pairs of a margin, and multiplies the sum once.
    if call.accumulate is not None:
        return cotangents
    return {
        name: times_slope(total, getattr(call, name).margin) for name, total in cotangents.items()
    }


def add_rows(
    pairs: DetectedPairs, dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    if _histograms.is_faster("table", pairs):
        return _histograms.add_rows(pairs, dy, device, addition)
    config = launch_of("lookup_attention.table", pairs.sizes, device, _table_rule)
    tile = pairs.tile(config, device, n_detectors=addition.total.shape[0])
    n_samples, n_queries = pairs.queries
    # Rows that few pairs read are not in the cache yet, so a prefetch hides their latency (13 % at
    # 128 x 32). Frequently read rows are cached already.
    rarely_read = n_samples * n_queries * pairs.sizes["keys"] <= 4 * pairs.weights.shape[1]
    arguments = {"PREFETCH": rarely_read, **pairs.arguments(tile)}
    return addition(_add_rows, *pairs.arrays, pairs.lists, dy, **arguments)


# ------------------------------------------------------------------------------------- launches
# Short sequences fill only small key blocks, and the detectors of a program share its fixed
# cost. With long sequences, one detector per program keeps the tables of concurrent programs few.
def _is_short(sizes: Sizes) -> bool:
    return sizes["keys"] <= 64


def _forward_rule(sizes: Sizes) -> Launch:
    rows, detectors = (8, 4) if _is_short(sizes) else (32, 1)
    return Launch(rows=rows, outputs=32, detectors=detectors, warps=1)


def _margins_rule(sizes: Sizes) -> Launch:
    return Launch(rows=32, outputs=16, detectors=4 if _is_short(sizes) else 1, warps=1)


# The products of the two queries of a program stay in its L1 cache, so programs are few and large.
_OF_PRODUCTS = Launch(rows=256, outputs=16, detectors=1, warps=8)


def _table_rule(sizes: Sizes) -> Launch:
    return Launch(rows=32, outputs=32, detectors=4 if _is_short(sizes) else 1, warps=1)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sum_rows(
    weights,
    query,
    key,
    position,
    start,
    query_segments,
    key_segments,
    blocks,
    parts,
    c: tl.constexpr,
):
    # The loads of several detectors are independent, and unrolling lets them overlap.
    UNROLL: tl.constexpr = min(c.DETECTORS, 4)
    j, b, output, output_exists, group = _row_tiles.locate_query(c.n_queries, c.n_outputs, c)
    place, low, high, visited = _keys(j, b, start, blocks, c)
    # The last detector block, and the last unrolled step, may have fewer.
    last = tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)
    total = tl.zeros((c.ROWS, c.OUTPUTS), c.SUM)
    for first in range(0, visited, c.ROWS):
        number = first + tl.arange(0, c.ROWS)
        i = _key(number, low, j, blocks, c)
        counts = _counts(number < visited, i, low, high, b, j, query_segments, key_segments, c)
        for t0 in range(group * c.DETECTORS, last, UNROLL):
            for u in tl.static_range(UNROLL):
                t = t0 + u
                exists = counts & (t < last)
                bits = _bits(query, key, position, t, b, j, i, place, exists, t < last, c)
                at = _row_tiles.offset(bits, c)[:, None] + output[None, :]
                table = _row_tiles.table(weights, t, c)
                # The mask covers missing keys, segments and the block remainder: unread rows add 0.
                value = tl.load(table + at, mask=exists[:, None] & output_exists[None, :], other=0)
                total += _row_tiles.addend(value.to(c.ACC), c)
    # Blocks of detectors write separate parts ``[blocks, B, L, O]``. The sum over keys is one
    # reduction at the end, not one per key block.
    at = ((group.to(tl.int64) * c.n_samples + b) * c.n_queries + j) * c.n_outputs + output
    tl.store(parts + at, tl.sum(total, 0).to(parts.dtype.element_ty), mask=output_exists)


@kernel
def _scatter_rows(
    weights,
    query,
    key,
    position,
    start,
    query_segments,
    key_segments,
    blocks,
    targets,
    y,
    c: tl.constexpr,
):
    j, b, slot, slot_exists, group = _row_tiles.locate_query(c.n_queries, c.n_outputs, c)
    place, low, high, visited = _keys(j, b, start, blocks, c)
    of_query = y + (b * c.n_queries + j) * c.WIDTH
    for first in range(0, visited, c.ROWS):
        number = first + tl.arange(0, c.ROWS)
        i = _key(number, low, j, blocks, c)
        counts = _counts(number < visited, i, low, high, b, j, query_segments, key_segments, c)
        for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
            bits = _bits(query, key, position, t, b, j, i, place, counts, True, c)
            # -1 marks missing pairs and unused slots, so `target` is the only mask.
            target = _targets(targets, t, bits, slot, counts[:, None] & slot_exists[None, :], c)
            at = _row_tiles.table(weights, t, c) + (
                _row_tiles.offset(bits, c)[:, None] + slot[None, :]
            )
            value = tl.load(at, mask=target >= 0, other=0).to(c.ACC)
            # Keys of a block and other programs may reach the same output.
            tl.atomic_add(
                of_query + target, _row_tiles.addend(value, c), mask=target >= 0, sem="relaxed"
            )


@kernel
def _multiply_rows(
    weights,
    query,
    key,
    position,
    start,
    query_segments,
    key_segments,
    blocks,
    q_flip,
    q_margin,
    k_flip,
    k_margin,
    p_flip,
    p_margin,
    targets,
    dy,
    products,
    first_detector,
    unused0,
    unused1,
    unused2,
    d_query,
    d_key,
    d_position,
    c: tl.constexpr,
):
    # A program owns two queries, one with many keys and one with few. Every pair of queries has
    # about the same number of keys, and shares partly filled blocks.
    first_query, b, _, _, group = _row_tiles.locate_query((c.n_queries + 1) // 2, c.OUTPUTS, c)
    j0, j1 = c.n_queries - 1 - first_query, first_query
    place0, low0, high0, keys0 = _keys(j0, b, start, blocks, c)
    place1, low1, high1, keys1 = _keys(j1, b, start, blocks, c)
    # The middle query of an odd number is paired with itself and counts once.
    keys1 = tl.where(j0 == j1, 0, keys1)
    dy += b * c.n_queries * c.WIDTH
    for u in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        t = u
        # Products exist for a group of detectors, whose first one is an argument.
        if c.CELLS:
            t += tl.load(first_detector)
        table = _row_tiles.table(weights, t, c)
        # 64 bits: the arrays may have more than 2**31 elements.
        of_queries = (t.to(tl.int64) * c.n_samples + b) * c.n_queries
        of_keys = (t.to(tl.int64) * c.n_samples + b) * c.n_keys
        of_positions = 0 if c.SHARED else t.to(tl.int64) * c.n_distances
        bits0, bits1 = tl.load(query + of_queries + j0), tl.load(query + of_queries + j1)
        flip0, flip1 = tl.load(q_flip + of_queries + j0), tl.load(q_flip + of_queries + j1)
        margin0, margin1 = tl.load(q_margin + of_queries + j0), tl.load(q_margin + of_queries + j1)
        # One partial sum per lane; lanes are reduced once, after all keys.
        total0 = tl.zeros((c.ROWS,), d_query.dtype.element_ty)
        total1 = tl.zeros((c.ROWS,), d_query.dtype.element_ty)
        for first in range(0, keys0 + keys1, c.ROWS):
            number = first + tl.arange(0, c.ROWS)
            # The keys of both queries are numbered consecutively, so one block may hold the end of
            # the first query and the start of the second.
            second = number >= keys0
            j = tl.where(second, j1, j0)
            low, high = tl.where(second, low1, low0), tl.where(second, high1, high0)
            i = _key(number - tl.where(second, keys0, 0), low, j, blocks, c)
            counts = _counts(
                number < keys0 + keys1, i, low, high, b, j, query_segments, key_segments, c
            )
            bits = tl.where(second, bits1, bits0) | tl.load(key + of_keys + i, mask=counts, other=0)
            # Distances beyond the last one share its bits.
            distance = tl.minimum(tl.where(second, place1, place0) - 1 - i, c.n_distances - 1)
            if c.n_distances > 0:
                bits |= tl.load(position + of_positions + distance, mask=counts, other=0)
            margin_of_query = tl.where(second, margin1, margin0)
            margin_of_key = tl.load(k_margin + of_keys + i, mask=counts, other=0)
            flip_of_key = tl.load(k_flip + of_keys + i, mask=counts, other=0)
            query_is_closer = tl.abs(margin_of_query) < tl.abs(margin_of_key)
            flip = tl.where(query_is_closer, tl.where(second, flip1, flip0), flip_of_key)
            if c.OF_POSITION:
                margin_of_position = tl.load(
                    p_margin + of_positions + distance, mask=counts, other=0
                )
                flip_of_position = tl.load(p_flip + of_positions + distance, mask=counts, other=0)
                size = tl.abs(margin_of_position)
                position_is_closest = counts & (size < tl.abs(margin_of_query).to(size.dtype))
                position_is_closest = position_is_closest & (
                    size < tl.abs(margin_of_key).to(size.dtype)
                )
            if c.CELLS:
                # Products ``[2, B, L, CELLS]``: first of the rows with the query's id, then of the
                # rows with its flipped id. A flip of the key or the distance stays within the cells
                # of the id.
                main = bits & (c.CELLS - 1)
                own = (
                    products + ((u.to(tl.int64) * 2 * c.n_samples + b) * c.n_queries + j) * c.CELLS
                )
                flipped = tl.where(query_is_closer, c.n_samples * c.n_queries * c.CELLS, 0) + (
                    (bits ^ flip) & (c.CELLS - 1)
                )
                product = tl.load(own + main, mask=counts, other=0)
                if c.OF_POSITION:
                    at = own + ((main ^ flip_of_position) & (c.CELLS - 1))
                    product_of_position = product - tl.load(at, mask=position_is_closest, other=0)
                product -= tl.load(own + flipped, mask=counts, other=0)
            else:
                main = _row_tiles.offset(bits, c)
                other = _row_tiles.offset(bits ^ flip, c)
                tile = tl.zeros((c.ROWS, c.OUTPUTS), c.SUM)
                tile_of_position = tl.zeros((c.ROWS, c.OUTPUTS), c.SUM)
                if c.OF_POSITION:
                    # Other pairs read their main row again, which is in the cache and adds 0.
                    flipped_position = bits ^ tl.where(position_is_closest, flip_of_position, 0)
                    with_position = _row_tiles.offset(flipped_position, c)
                # Tiles of outputs are added elementwise; lanes are reduced once after the loop.
                for o in range(0, c.n_outputs, c.OUTPUTS):
                    output = o + tl.arange(0, c.OUTPUTS)
                    if c.TARGETS:
                        tile += _change(
                            table, targets, t, bits, bits ^ flip, output, dy, j, counts, c
                        )
                        if c.OF_POSITION:
                            tile_of_position += _change(
                                table, targets, t, bits, flipped_position, output, dy, j, counts, c
                            )
                    else:
                        exists = output < c.n_outputs
                        # Both gradients are loaded as vectors and selected per key, in place of one
                        # row per key.
                        dy0 = tl.load(dy + j0 * c.n_outputs + output, mask=exists, other=0).to(
                            c.ACC
                        )
                        dy1 = tl.load(dy + j1 * c.n_outputs + output, mask=exists, other=0).to(
                            c.ACC
                        )
                        cotangent = tl.where(second[:, None], dy1[None, :], dy0[None, :])
                        row = _row_tiles.read(table, main, output, c).to(c.ACC)
                        other_row = _row_tiles.read(table, other, output, c).to(c.ACC)
                        # Rows are subtracted first: their difference is small, and a difference of
                        # two products would lose it.
                        tile += _row_tiles.addend((row - other_row) * cotangent, c)
                        if c.OF_POSITION:
                            other_row = _row_tiles.read(table, with_position, output, c).to(c.ACC)
                            tile_of_position += _row_tiles.addend((row - other_row) * cotangent, c)
                product = tl.sum(tile, 1)
                product_of_position = tl.sum(tile_of_position, 1)
            # In floating point the slope is the same for all pairs of a margin and multiplies the
            # sum at the end. In fixed point each addend includes its slope before it is rounded.
            if c.SCALE != 0:
                margin = tl.where(query_is_closer, margin_of_query, margin_of_key)
                product = _row_tiles.cotangent(margin, product, c)
            value = tl.where(counts, product, 0).to(d_query.dtype.element_ty)
            # The query of a program needs no atomics. A key meets many queries.
            of_query = tl.where(query_is_closer, value, 0)
            total0 += tl.where(second, 0, of_query)
            total1 += tl.where(second, of_query, 0)
            tl.atomic_add(d_key + of_keys + i, value, mask=counts & ~query_is_closer, sem="relaxed")
            if c.OF_POSITION:
                if c.SCALE != 0:
                    product_of_position = _row_tiles.cotangent(
                        margin_of_position, product_of_position, c
                    )
                part = (b * c.n_detectors + t) * c.n_distances
                value = product_of_position.to(d_position.dtype.element_ty)
                tl.atomic_add(
                    d_position + part + distance, value, mask=position_is_closest, sem="relaxed"
                )
        # No other program owns these queries of the detector.
        tl.store(d_query + of_queries + j0, tl.sum(total0, 0))
        tl.store(d_query + of_queries + j1, tl.sum(total1, 0), mask=j1 != j0)


@kernel
def _add_rows(
    query,
    key,
    position,
    start,
    query_segments,
    key_segments,
    blocks,
    targets,
    dy,
    step,
    first,
    unused0,
    unused1,
    total,
    touched,
    c: tl.constexpr,
):
    j, b, output, output_exists, group = _row_tiles.locate_query(c.n_queries, c.n_outputs, c)
    place, low, high, visited = _keys(j, b, start, blocks, c)
    of_query = dy + (b * c.n_queries + j) * c.WIDTH
    factor = tl.load(step)
    first_detector = tl.load(first)
    if not c.TARGETS:
        # All keys of a query add the same value, which is converted once.
        value = tl.load(of_query + output, mask=output_exists, other=0).to(c.ACC) * factor
        value = tl.broadcast_to(_row_tiles.addend(value, c)[None, :], (c.ROWS, c.OUTPUTS))
    for first_key in range(0, visited, c.ROWS):
        number = first_key + tl.arange(0, c.ROWS)
        i = _key(number, low, j, blocks, c)
        counts = _counts(number < visited, i, low, high, b, j, query_segments, key_segments, c)
        for n in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_tables)):
            t = first_detector + n
            bits = _bits(query, key, position, t, b, j, i, place, counts, True, c)
            inside = counts[:, None] & output_exists[None, :]
            if c.TARGETS:
                # Unused slots add 0: additions to whole rows take one instruction for four
                # elements.
                target = _targets(targets, t, bits, output, inside, c)
                value = tl.load(of_query + target, mask=target >= 0, other=0).to(c.ACC) * factor
                value = _row_tiles.addend(value, c)
            row = _row_tiles.offset(bits, c)
            table = _row_tiles.table(total, n, c)
            if c.PREFETCH:
                _row_tiles.prefetch(table + row)
            if c.TOUCH:
                _row_tiles.touch(touched, n, bits, counts, c)
            # Relaxed order suffices: nothing reads the tables before the kernel ends.
            tl.atomic_add(
                table + (row[:, None] + output[None, :]), value, mask=inside, sem="relaxed"
            )


@kernel
def _change(table, targets, t, bits, other_bits, slot, dy, j, counts, c: tl.constexpr):
    """Return slot times output gradient, minus the other row's product."""
    exists = counts[:, None] & (slot < c.n_outputs)[None, :]
    of_query = dy + j[:, None] * c.WIDTH
    target = _targets(targets, t, bits, slot, exists, c)
    cotangent = tl.load(of_query + target, mask=target >= 0, other=0).to(c.ACC)
    at = table + (_row_tiles.offset(bits, c)[:, None] + slot[None, :])
    of_other = table + (_row_tiles.offset(other_bits, c)[:, None] + slot[None, :])
    value = tl.load(at, mask=target >= 0, other=0).to(c.ACC)
    # If both slots reach one output, the values are subtracted before the product, which keeps the
    # digits of their difference.
    if c.LIST_PER_ROW:
        to = _targets(targets, t, other_bits, slot, exists, c)
        other = tl.load(of_other, mask=to >= 0, other=0).to(c.ACC)
        other_cotangent = tl.load(of_query + to, mask=to >= 0, other=0).to(c.ACC)
        apart = _row_tiles.addend(value * cotangent, c) - _row_tiles.addend(
            other * other_cotangent, c
        )
        return tl.where(to == target, _row_tiles.addend((value - other) * cotangent, c), apart)
    else:
        other = tl.load(of_other, mask=target >= 0, other=0).to(c.ACC)
        return _row_tiles.addend((value - other) * cotangent, c)


@kernel
def _targets(targets, t, bits, slot, exists, c: tl.constexpr):
    # All rows of a table, and all tables, may share one target list.
    slots = _row_tiles.list_of(bits, t, c)[:, None] * c.n_outputs + slot[None, :]
    return _row_tiles.target(targets, slots, exists, c.WIDTH)


@kernel
def _keys(j, b, start, blocks, c: tl.constexpr):
    """Return the range of visited keys.

    Returns:
      The query's position among the keys, its first key, the end of its keys, and the number of
      keys in its blocks.
    """
    place = j
    if c.START:
        place += tl.load(start + (b if c.STARTS else 0))
    low = 0
    if c.WINDOW >= 0:
        low = tl.maximum(place - c.WINDOW, 0)
    high = tl.minimum(place, c.n_keys)
    visited = tl.maximum(high - low, 0)
    if c.BLOCKS:
        # Prefix sums of the block mask give the number of selected blocks between the first and the
        # last key. Blocks at the ends may contain keys that do not count.
        before = blocks + j // c.QUERIES_OF_BLOCK * (2 * c.BLOCKS + 1)
        last = (low + visited + c.KEYS_OF_BLOCK - 1) // c.KEYS_OF_BLOCK
        first = tl.minimum(low // c.KEYS_OF_BLOCK, last)
        visited = (tl.load(before + last) - tl.load(before + first)) * c.KEYS_OF_BLOCK
    return place, low, high, visited


@kernel
def _key(number, low, j, blocks, c: tl.constexpr):
    """Return numbered keys: consecutive keys, or keys from the selected blocks."""
    if c.BLOCKS:
        of_query = blocks + j // c.QUERIES_OF_BLOCK * (2 * c.BLOCKS + 1)
        before = tl.load(of_query + tl.minimum(low // c.KEYS_OF_BLOCK, c.BLOCKS))
        # Numbers beyond the last key read the last block; their mask is false.
        place = tl.minimum(before + number // c.KEYS_OF_BLOCK, c.BLOCKS - 1)
        return tl.load(of_query + c.BLOCKS + 1 + place) * c.KEYS_OF_BLOCK + number % c.KEYS_OF_BLOCK
    else:
        return low + number


@kernel
def _counts(visited, i, low, high, b, j, query_segments, key_segments, c: tl.constexpr):
    """Return a mask for the counted keys in a block."""
    counts = visited
    # Selected blocks may extend beyond the first and the last key.
    if c.BLOCKS:
        counts = counts & (i >= low) & (i < high)
    if c.SEGMENTS:
        own = tl.load(query_segments + b * c.n_queries + j)
        counts = counts & (tl.load(key_segments + b * c.n_keys + i, mask=counts, other=0) == own)
    return counts


@kernel
def _bits(query, key, position, t, b, j, i, place, exists, detector_exists, c: tl.constexpr):
    sample = t.to(tl.int64) * c.n_samples + b
    bits = tl.load(query + sample * c.n_queries + j, mask=detector_exists, other=0)
    bits |= tl.load(key + sample * c.n_keys + i, mask=exists, other=0)
    if c.n_distances > 0:
        # A key at the position before the query has distance 0. Larger distances than the last one
        # share its bits.
        distance = tl.minimum(place - 1 - i, c.n_distances - 1)
        of_detector = 0 if c.SHARED else t.to(tl.int64) * c.n_distances
        bits |= tl.load(position + of_detector + distance, mask=exists, other=0)
    return bits

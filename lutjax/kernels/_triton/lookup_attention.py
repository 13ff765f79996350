"""`lutjax.lookup_attention` in Triton.

A program owns one query of one sample: it visits the keys before it, block by block, for one group of detectors.
Detector-major as plain JAX is: ids and margins are ``[T, B, L]``, so that the keys of a block lie side by side.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl

from lutjax._detection import Detection, existing
from lutjax._fixed_point import FixedPoint, addend_dtype, result
from lutjax.kernels._triton import _histograms, _rows, _updates
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels._triton._pairs import Pairs, major, minor
from lutjax.kernels._xla._rows import times_slope
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

AddRows = Callable[[_updates.Addition, FixedPoint | None, Pairs, jax.Array, Device], tuple[jax.Array, ...]]
"""How `dy` is added to the row of every pair."""


def forward(
    weights: jax.Array,
    query: Detection,
    key: Detection,
    position: Detection | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    window: int | None,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    pairs = Pairs.of(weights, query, key, position, start, query_segments, key_segments, window=window)
    if _histograms.faster("forward", pairs, accumulate):
        return _histograms.sum_rows(pairs, device).astype(weights.dtype)
    how = launch_of("lookup_attention.forward", pairs.sizes, device, _forward_rule)
    tile = pairs.tile(how, device)
    # Several programs for one sum write a part of it each.
    dtype = (
        weights.dtype if tile.groups == 1 and accumulate is None else addend_dtype(weights.dtype, accumulate)
    )
    (parts,) = launch(
        _sum_rows,
        weights,
        *pairs.arrays,
        outputs=[jax.ShapeDtypeStruct((tile.groups, *pairs.queries, weights.shape[2]), dtype)],
        programs=pairs.programs(tile),
        device=device,
        warps=how.warps,
        **pairs.constants(tile, accumulate),
    )
    return result(_rows.sum_of_parts(parts), weights.dtype, accumulate)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    window: int | None,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    return backward_by(add_rows, saved, dy, needs, window=window, accumulate=accumulate, device=device)


def backward_by(
    add_rows: AddRows,
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    window: int | None,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    pairs = Pairs.of(*saved, window=window)
    d_weights = None
    if needs[0]:
        addition = _updates.gradient(saved[0], accumulate)
        d_weights, _ = add_rows(addition, accumulate, pairs, dy, device)
    if any(needs[1:4]):
        d_query, d_key, d_position = _margins(pairs, saved, dy, needs[3], accumulate, device)
    return (
        d_weights,
        d_query if needs[1] else None,
        d_key if needs[2] else None,
        d_position if needs[3] else None,
        *(None,) * 3,
    )


def _margins(
    pairs: Pairs,
    saved: tuple[Any, ...],
    dy: jax.Array,
    need_position: bool,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    """Cotangents of the margins of queries, keys and, if needed, positions."""
    weights, query, key, position, *_ = saved
    query, key, position = existing(query), existing(key), None if position is None else existing(position)
    of_products = _histograms.faster("margins", pairs, accumulate)
    how = (
        _OF_PRODUCTS
        if of_products
        else launch_of("lookup_attention.margins", pairs.sizes, device, _margins_rule)
    )
    tile = pairs.tile(how, device, all_outputs=True)
    q_flip, k_flip = major(query.flip) << pairs.query_shift, major(key.flip) << pairs.key_shift
    dtype = addend_dtype(query.margin.dtype, accumulate)
    shape_of_keys = (len(weights), *key.index.shape[:2])
    zeroed = [jax.ShapeDtypeStruct(shape_of_keys, dtype)]
    of_position = (q_flip, query.margin)  # of no use
    if need_position:
        assert position is not None
        of_position = (position.flip.T, position.margin.T)
        # A part for each sample and detector: fewer programs meet at one number.
        parts = (*shape_of_keys[1::-1], position.index.shape[0])
        zeroed.append(jax.ShapeDtypeStruct(parts, addend_dtype(position.margin.dtype, accumulate)))
    else:
        zeroed.append(jax.ShapeDtypeStruct((1,), dtype))
    inputs = (
        weights,
        *pairs.arrays,
        q_flip,
        major(query.margin),
        k_flip,
        major(key.margin),
        *of_position,
        dy,
    )
    outputs = [jax.ShapeDtypeStruct((len(weights), *pairs.queries), dtype)]
    programs = pairs.programs(tile, queries=2)
    constants: dict[str, Any] = {
        "device": device,
        "warps": how.warps,
        "OF_POSITION": need_position,
        "CELLS": 0,
        **pairs.constants(tile, accumulate),
    }
    if of_products:

        def of_group(products: jax.Array, first: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            return launch(
                _multiply_rows,
                *inputs,
                products,
                first.reshape(1),
                in_place=arrays,
                programs=programs // len(weights) * len(products),
                **{**constants, "CELLS": products.shape[2]},
            )

        ids = jnp.stack([pairs.query, pairs.query ^ q_flip], 1) >> pairs.query_shift
        sums = _histograms.with_products(pairs, ids, dy, device, of_group, [*outputs, *zeroed])
    else:
        none = [jnp.zeros((1,), jnp.int32)] * 5
        sums = launch(
            _multiply_rows,
            *inputs,
            *none,
            outputs=outputs,
            zeroed=zeroed,
            programs=programs,
            **constants,
        )
    d_query, d_key, d_position = sums
    d_query, d_key = (minor(a) for a in (d_query, d_key))
    if accumulate is None:
        d_query, d_key = times_slope(d_query, query.margin), times_slope(d_key, key.margin)
    if not need_position or position is None:
        return d_query, d_key, None
    shared = position.index.shape[1] == 1
    d_position = jnp.sum(d_position, (0, 1) if shared else 0, dtype=d_position.dtype)
    d_position = d_position[:, None] if shared else d_position.T
    return d_query, d_key, times_slope(d_position, position.margin) if accumulate is None else d_position


def add_rows(
    addition: _updates.Addition,
    accumulate: FixedPoint | None,
    pairs: Pairs,
    dy: jax.Array,
    device: Device,
) -> tuple[jax.Array, ...]:
    """Adds `dy` to the row of every pair."""
    if _histograms.faster("table", pairs, accumulate):
        return _histograms.add_rows(addition, pairs, dy, device)
    how = launch_of("lookup_attention.table", pairs.sizes, device, _table_rule)
    tile = pairs.tile(how, device, n_detectors=addition.total.shape[0])
    n_samples, n_queries = pairs.queries
    # Rows that few pairs read are not in the cache yet; asking for the others would be in vain.
    rarely_read = n_samples * n_queries * pairs.sizes["keys"] <= 4 * pairs.weights.shape[1]
    return addition(
        _add_rows,
        *pairs.arrays,
        dy,
        PREFETCH=rarely_read,
        programs=pairs.programs(tile),
        device=device,
        warps=how.warps,
        **pairs.constants(tile, accumulate),
    )


# ------------------------------------------------------------------------------------- launches
# Short texts: few keys fill small blocks, and the detectors of one program share what the program costs. Long ones:
# what runs at the same time reads the table of one detector.
def _is_short(sizes: Sizes) -> bool:
    return sizes["keys"] <= 64


def _forward_rule(sizes: Sizes) -> Launch:
    rows, detectors = (8, 4) if _is_short(sizes) else (32, 1)
    return Launch(rows=rows, outputs=32, detectors=detectors, warps=1)


def _margins_rule(sizes: Sizes) -> Launch:
    return Launch(rows=32, outputs=16, detectors=4 if _is_short(sizes) else 1, warps=1)


# A program's products, of two queries, lie in its part of the cache: few large programs.
_OF_PRODUCTS = Launch(rows=256, outputs=16, detectors=1, warps=8)


def _table_rule(sizes: Sizes) -> Launch:
    return Launch(rows=32, outputs=32, detectors=4 if _is_short(sizes) else 1, warps=1)


# ------------------------------------------------------------------------------------- kernels
# Programs: queries first, then samples, then outputs, then groups of detectors, so that what runs at the same time
# reads few tables, which then stay in the cache. Long queries first, so that none is left alone at the end.
@kernel
def _sum_rows(
    weights,
    query,
    key,
    position,
    start,
    query_segments,
    key_segments,
    parts,
    n_samples: tl.constexpr,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    n_distances: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    SHARED: tl.constexpr,
    START: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    UNROLL: tl.constexpr = min(DETECTORS, 4)
    j, b, output, output_exists, group = _place(n_samples, n_queries, n_outputs, OUTPUTS)
    place, low, high = _keys(j, start, n_keys, START, WINDOW)
    last = tl.minimum((group + 1) * DETECTORS, n_detectors)
    total = tl.zeros((ROWS, OUTPUTS), SUM)
    for first in range(low, high, ROWS):
        i = first + tl.arange(0, ROWS)
        counts = _counts(i, high, b, j, query_segments, key_segments, n_queries, n_keys, SEGMENTS)
        for t0 in range(group * DETECTORS, last, UNROLL):
            for u in tl.static_range(UNROLL):
                t = t0 + u
                exists = counts & (t < last)
                bits = _bits(
                    query, key, position, t, b, j, i, place, exists, t < last, n_samples, n_queries, n_keys,
                    n_distances, SHARED,
                )  # fmt: skip
                at = _rows.offset(bits, n_rows, n_outputs)[:, None] + output[None, :]
                table = _rows.table(weights, t, n_rows, n_outputs)
                value = tl.load(table + at, mask=exists[:, None] & output_exists[None, :], other=0)
                total += _rows.addend(value.to(ACC), SCALE)
    at = ((group.to(tl.int64) * n_samples + b) * n_queries + j) * n_outputs + output
    tl.store(parts + at, tl.sum(total, 0).to(parts.dtype.element_ty), mask=output_exists)


@kernel
def _multiply_rows(
    weights,
    query,
    key,
    position,
    start,
    query_segments,
    key_segments,
    q_flip,
    q_margin,
    k_flip,
    k_margin,
    p_flip,
    p_margin,
    dy,
    products,
    first_detector,
    unused0,
    unused1,
    unused2,
    d_query,
    d_key,
    d_position,
    n_samples: tl.constexpr,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    n_distances: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    SHARED: tl.constexpr,
    START: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    OF_POSITION: tl.constexpr,
    CELLS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    # A program owns two queries, one with many keys and one with few: together they fill whole blocks of keys.
    first_query, b, _, _, group = _place(n_samples, (n_queries + 1) // 2, OUTPUTS, OUTPUTS)
    j0, j1 = n_queries - 1 - first_query, first_query
    place0, low0, high0 = _keys(j0, start, n_keys, START, WINDOW)
    place1, low1, high1 = _keys(j1, start, n_keys, START, WINDOW)
    keys0 = tl.maximum(high0 - low0, 0)
    keys1 = tl.where(j0 == j1, 0, tl.maximum(high1 - low1, 0))
    dy += b * n_queries * n_outputs
    for u in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        t = u
        if CELLS:  # of a group of detectors
            t += tl.load(first_detector)
        table = _rows.table(weights, t, n_rows, n_outputs)
        of_queries = (t.to(tl.int64) * n_samples + b) * n_queries
        of_keys = (t.to(tl.int64) * n_samples + b) * n_keys
        of_positions = 0 if SHARED else t.to(tl.int64) * n_distances
        bits0, bits1 = tl.load(query + of_queries + j0), tl.load(query + of_queries + j1)
        flip0, flip1 = tl.load(q_flip + of_queries + j0), tl.load(q_flip + of_queries + j1)
        margin0, margin1 = tl.load(q_margin + of_queries + j0), tl.load(q_margin + of_queries + j1)
        total0 = tl.zeros((ROWS,), d_query.dtype.element_ty)
        total1 = tl.zeros((ROWS,), d_query.dtype.element_ty)
        for first in range(0, keys0 + keys1, ROWS):
            number = first + tl.arange(0, ROWS)
            second = number >= keys0
            i = tl.where(second, low1 + number - keys0, low0 + number)
            counts = number < keys0 + keys1
            j = tl.where(second, j1, j0)
            if SEGMENTS:
                own = tl.load(query_segments + b * n_queries + j)
                counts = counts & (tl.load(key_segments + b * n_keys + i, mask=counts, other=0) == own)
            bits = tl.where(second, bits1, bits0) | tl.load(key + of_keys + i, mask=counts, other=0)
            distance = tl.minimum(tl.where(second, place1, place0) - 1 - i, n_distances - 1)
            if n_distances > 0:
                bits |= tl.load(position + of_positions + distance, mask=counts, other=0)
            margin_of_query = tl.where(second, margin1, margin0)
            margin_of_key = tl.load(k_margin + of_keys + i, mask=counts, other=0)
            flip_of_key = tl.load(k_flip + of_keys + i, mask=counts, other=0)
            query_is_closer = tl.abs(margin_of_query) < tl.abs(margin_of_key)
            flip = tl.where(query_is_closer, tl.where(second, flip1, flip0), flip_of_key)
            if OF_POSITION:
                margin_of_position = tl.load(p_margin + of_positions + distance, mask=counts, other=0)
                flip_of_position = tl.load(p_flip + of_positions + distance, mask=counts, other=0)
                size = tl.abs(margin_of_position)
                position_is_closest = counts & (size < tl.abs(margin_of_query).to(size.dtype))
                position_is_closest = position_is_closest & (size < tl.abs(margin_of_key).to(size.dtype))
            if CELLS:
                # Products of the query's rows, then of those with its flip.
                main = bits & (CELLS - 1)
                own = products + ((u.to(tl.int64) * 2 * n_samples + b) * n_queries + j) * CELLS
                flipped = tl.where(query_is_closer, n_samples * n_queries * CELLS, 0) + (
                    (bits ^ flip) & (CELLS - 1)
                )
                product = tl.load(own + main, mask=counts, other=0)
                if OF_POSITION:
                    at = own + ((main ^ flip_of_position) & (CELLS - 1))
                    product_of_position = product - tl.load(at, mask=position_is_closest, other=0)
                product -= tl.load(own + flipped, mask=counts, other=0)
            else:
                main = _rows.offset(bits, n_rows, n_outputs)
                other = _rows.offset(bits ^ flip, n_rows, n_outputs)
                tile = tl.zeros((ROWS, OUTPUTS), SUM)
                tile_of_position = tl.zeros((ROWS, OUTPUTS), SUM)
                if OF_POSITION:
                    # Elsewhere the main row again, which is in the cache.
                    with_position = bits ^ tl.where(position_is_closest, flip_of_position, 0)
                    with_position = _rows.offset(with_position, n_rows, n_outputs)
                for o in range(0, n_outputs, OUTPUTS):
                    output = o + tl.arange(0, OUTPUTS)
                    dy0 = tl.load(dy + j0 * n_outputs + output, mask=output < n_outputs, other=0).to(ACC)
                    dy1 = tl.load(dy + j1 * n_outputs + output, mask=output < n_outputs, other=0).to(ACC)
                    cotangent = tl.where(second[:, None], dy1[None, :], dy0[None, :])
                    row = _rows.read(table, main, output, n_outputs, OUTPUTS).to(ACC)
                    other_row = _rows.read(table, other, output, n_outputs, OUTPUTS).to(ACC)
                    tile += _rows.addend((row - other_row) * cotangent, SCALE)
                    if OF_POSITION:
                        other_row = _rows.read(table, with_position, output, n_outputs, OUTPUTS).to(ACC)
                        tile_of_position += _rows.addend((row - other_row) * cotangent, SCALE)
                product = tl.sum(tile, 1)
                product_of_position = tl.sum(tile_of_position, 1)
            # Sums of products alone, where their factor, the slope, is the same for all; not in fixed point, where
            # addends are whole.
            if SCALE != 0:
                margin = tl.where(query_is_closer, margin_of_query, margin_of_key)
                product = _rows.cotangent(margin, product, ACC, SCALE)
            value = tl.where(counts, product, 0).to(d_query.dtype.element_ty)
            of_query = tl.where(query_is_closer, value, 0)
            total0 += tl.where(second, 0, of_query)
            total1 += tl.where(second, of_query, 0)
            tl.atomic_add(d_key + of_keys + i, value, mask=counts & ~query_is_closer, sem="relaxed")
            if OF_POSITION:
                if SCALE != 0:
                    product_of_position = _rows.cotangent(margin_of_position, product_of_position, ACC, SCALE)
                part = (b * n_detectors + t) * n_distances
                value = product_of_position.to(d_position.dtype.element_ty)
                tl.atomic_add(d_position + part + distance, value, mask=position_is_closest, sem="relaxed")
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
    dy,
    step,
    first,
    unused0,
    unused1,
    total,
    touched,
    n_samples: tl.constexpr,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    n_distances: tl.constexpr,
    n_detectors: tl.constexpr,
    n_tables: tl.constexpr,
    TOUCH: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    SHARED: tl.constexpr,
    START: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    j, b, output, output_exists, group = _place(n_samples, n_queries, n_outputs, OUTPUTS)
    place, low, high = _keys(j, start, n_keys, START, WINDOW)
    value = tl.load(dy + (b * n_queries + j) * n_outputs + output, mask=output_exists, other=0).to(ACC)
    value = tl.broadcast_to(_rows.addend(value * tl.load(step), SCALE)[None, :], (ROWS, OUTPUTS))
    first_detector = tl.load(first)
    for first_key in range(low, high, ROWS):
        i = first_key + tl.arange(0, ROWS)
        counts = _counts(i, high, b, j, query_segments, key_segments, n_queries, n_keys, SEGMENTS)
        for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_tables)):
            bits = _bits(
                query, key, position, first_detector + t, b, j, i, place, counts, True, n_samples, n_queries, n_keys, n_distances,
                SHARED,
            )  # fmt: skip
            row = _rows.offset(bits, n_rows, n_outputs)
            at = row[:, None] + output[None, :]
            table = _rows.table(total, t, n_rows, n_outputs)
            if PREFETCH:
                _rows.prefetch(table + row)
            if TOUCH:
                _rows.touch(touched, t, bits, counts, n_rows)
            tl.atomic_add(table + at, value, mask=counts[:, None] & output_exists[None, :], sem="relaxed")


@kernel
def _place(n_samples: tl.constexpr, n_queries: tl.constexpr, n_outputs: tl.constexpr, OUTPUTS: tl.constexpr):
    """Query, sample, outputs and group of detectors of this program."""
    output_blocks: tl.constexpr = (n_outputs + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    j = n_queries - 1 - program % n_queries
    rest = program // n_queries
    b = (rest % n_samples).to(tl.int64)
    rest = rest // n_samples
    output, output_exists = _rows.block(OUTPUTS, n_outputs, rest % output_blocks)
    return j, b, output, output_exists, rest // output_blocks


@kernel
def _keys(j, start, n_keys: tl.constexpr, START: tl.constexpr, WINDOW: tl.constexpr):
    """Place of a query among the keys, and the keys from which and before which pairs count."""
    place = j
    if START:
        place += tl.load(start)
    low = 0
    if WINDOW >= 0:
        low = tl.maximum(place - WINDOW, 0)
    return place, low, tl.minimum(place, n_keys)


@kernel
def _counts(
    i, high, b, j, query_segments, key_segments, n_queries: tl.constexpr, n_keys: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """Which keys of a block count."""
    counts = i < high
    if SEGMENTS:
        own = tl.load(query_segments + b * n_queries + j)
        counts = counts & (tl.load(key_segments + b * n_keys + i, mask=counts, other=0) == own)
    return counts


@kernel
def _bits(
    query, key, position, t, b, j, i, place, exists, detector_exists, n_samples: tl.constexpr, n_queries: tl.constexpr,
    n_keys: tl.constexpr, n_distances: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Bits of the row of each pair."""
    sample = t.to(tl.int64) * n_samples + b
    bits = tl.load(query + sample * n_queries + j, mask=detector_exists, other=0)
    bits |= tl.load(key + sample * n_keys + i, mask=exists, other=0)
    if n_distances > 0:
        distance = tl.minimum(place - 1 - i, n_distances - 1)
        of_detector = 0 if SHARED else t.to(tl.int64) * n_distances
        bits |= tl.load(position + of_detector + distance, mask=exists, other=0)
    return bits

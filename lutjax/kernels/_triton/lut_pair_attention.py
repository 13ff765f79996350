"""`lutjax.lut_pair_attention` in Triton.

A program owns some queries of one sample, and visits the keys before them block by block. A pair of a block is one
row of its tile: it is detected from the terms of its places, and its table rows are summed where they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from lutjax._fixed_point import FixedPoint, addend_dtype, result
from lutjax.kernels._triton import _rows, _updates, detect
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels._xla._terms import Terms
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

_KEYS = 32  # most keys of a block: what is left of a tile are further queries, which read the same keys


def forward(
    x: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    anchors: jax.Array,
    positions: jax.Array | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    interleave: bool,
    window: int | None,
    epsilon: float,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    terms = Terms(x, keys, anchors, positions, interleave)
    pairs = Pairs(terms, weights, start, query_segments, key_segments, window, epsilon)
    how = launch_of("lut_pair_attention.forward", pairs.sizes, device, _forward_rule)
    tile = pairs.tile(how, device)
    # Several programs for one sum write a part of it each.
    dtype = (
        weights.dtype if tile.groups == 1 and accumulate is None else addend_dtype(weights.dtype, accumulate)
    )
    (parts,) = launch(
        _sum_rows,
        weights,
        *pairs.arrays,
        outputs=[jax.ShapeDtypeStruct((tile.groups, *x.shape[:2], weights.shape[2]), dtype)],
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
    interleave: bool,
    window: int | None,
    epsilon: float,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    x, keys, weights, anchors, positions, start, query_segments, key_segments = saved
    need_x, need_keys, need_weights, _, need_positions = needs[:5]
    terms = Terms(x, keys, anchors, positions, interleave)
    pairs = Pairs(terms, weights, start, query_segments, key_segments, window, epsilon)
    if not (need_x or need_keys or need_positions):
        return None, None, _gradient(pairs, dy, accumulate, device), *(None,) * 5
    d_query, d_key, d_position, d_weights = _terms(pairs, dy, needs, accumulate, device)
    return (
        terms.to_x(d_query, part=1) if need_x else None,
        terms.to_x(d_key, part=0) if need_keys else None,
        d_weights if need_weights else None,
        None,
        terms.to_positions(d_position) if need_positions else None,
        *(None,) * 3,
    )


def _gradient(pairs: "Pairs", dy: jax.Array, accumulate: FixedPoint | None, device: Device) -> jax.Array:
    """Cotangent of the tables."""
    addition = _updates.gradient(pairs.weights, accumulate)
    return add_rows(addition, accumulate, pairs, dy, device)[0]


def _terms(
    pairs: "Pairs", dy: jax.Array, needs: tuple[bool, ...], accumulate: FixedPoint | None, device: Device
) -> tuple[jax.Array, ...]:
    """Cotangents of the terms of queries, keys and positions, and of the tables: those that are needed."""
    need_keys, need_weights, need_positions = needs[1], needs[2], needs[4]
    terms, weights = pairs.terms, pairs.weights
    dtype = addend_dtype(terms.query.dtype, accumulate)
    n_pairs, n_detectors, n_samples, _ = terms.query.shape
    has_positions = need_positions and pairs.n_distances > 0
    if n_pairs == 0:  # no comparison, no gradient
        shapes = [terms.query.shape, terms.key.shape, (0, n_detectors, pairs.n_distances)]
        zeros = [jnp.zeros(shape, dtype) for shape in shapes]
        d_weights = _gradient(pairs, dy, accumulate, device) if need_weights else weights
        return *zeros, d_weights

    how = launch_of("lut_pair_attention.terms", pairs.sizes, device, _terms_rule)
    tile = pairs.tile(how, device, all_outputs=True)
    # A part of the positions for each sample, which is no more than the keys have: fewer programs meet at one number.
    of_positions = (n_samples, n_pairs, n_detectors, pairs.n_distances)
    d_query, d_key, d_position, d_weights = launch(
        _multiply_rows,
        weights,
        *pairs.arrays,
        terms.parts(),
        dy,
        outputs=[jax.ShapeDtypeStruct(terms.query.shape, dtype)],
        zeroed=[
            jax.ShapeDtypeStruct(terms.key.shape if need_keys else (1,), dtype),
            jax.ShapeDtypeStruct(of_positions if has_positions else (1,), dtype),
            jax.ShapeDtypeStruct(
                weights.shape if need_weights else (1,), addend_dtype(weights.dtype, accumulate)
            ),
        ],
        programs=pairs.programs(tile),
        device=device,
        warps=how.warps,
        OF_KEYS=need_keys,
        OF_POSITIONS=has_positions,
        OF_WEIGHTS=need_weights,
        PAIRS=triton.next_power_of_2(n_pairs),
        **pairs.constants(tile, accumulate),
    )
    if has_positions:
        d_position = jnp.sum(d_position, 0, dtype=dtype)
    elif need_positions:
        d_position = jnp.zeros(of_positions[1:], dtype)
    return d_query, d_key, d_position, d_weights


def add_rows(
    addition: _updates.Addition,
    accumulate: FixedPoint | None,
    pairs: "Pairs",
    dy: jax.Array,
    device: Device,
) -> tuple[jax.Array, ...]:
    """Adds `dy` to the row of every pair."""
    how = launch_of("lut_pair_attention.table", pairs.sizes, device, _table_rule)
    tile = pairs.tile(how, device, n_detectors=addition.total.shape[0])
    return addition(
        _add_rows,
        *pairs.arrays,
        dy,
        programs=pairs.programs(tile),
        device=device,
        warps=how.warps,
        **pairs.constants(tile, accumulate),
    )


class Pairs:
    """The pairs of a call, as kernels take them."""

    def __init__(
        self,
        terms: Terms,
        weights: jax.Array,
        start: jax.Array | None,
        query_segments: jax.Array | None,
        key_segments: jax.Array | None,
        window: int | None,
        epsilon: float,
    ):
        self.terms, self.weights = terms, weights
        self._start, self._window, self._epsilon = start, window, epsilon
        self._segments = query_segments, key_segments

    @property
    def n_distances(self) -> int:
        return 0 if self.terms.position is None else self.terms.position.shape[2]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """What every kernel reads; what is absent or empty is replaced by what it does not look at."""
        terms, unused = self.terms, jnp.zeros((1,), jnp.int32)
        of_places = (
            jnp.zeros((1,), terms.key.dtype) if a is None or not a.size else a
            for a in (terms.key, terms.query, terms.position)
        )
        start = unused if self._start is None else self._start.reshape(1)
        return *of_places, start, *(unused if s is None else s for s in self._segments)

    @property
    def _most_keys(self) -> int:
        """Keys that one query can meet."""
        n_queries, n_keys = self.terms.query.shape[3], self.terms.key.shape[3]
        most = n_keys if self._start is not None else max(min(n_keys, n_queries - 1), 0)
        return most if self._window is None else min(most, self._window)

    @property
    def sizes(self) -> Sizes:
        """What a launch is chosen by."""
        n_pairs, n_detectors, n_samples, n_queries = self.terms.query.shape
        return {
            "samples": n_samples,
            "queries": n_queries,
            "keys": self._most_keys,
            "detectors": n_detectors,
            "pairs": n_pairs,
            "outputs": self.weights.shape[2],
            "bits": 8 * self.weights.dtype.itemsize,
        }

    def tile(
        self, how: Launch, device: Device, *, n_detectors: int | None = None, all_outputs: bool = False
    ) -> _rows.Tile:
        n_tables, _, n_outputs = self.weights.shape
        n_tables = n_tables if n_detectors is None else n_detectors
        n_queries = self.terms.query.shape[3]
        most = min(triton.next_power_of_2(max(self._most_keys, 1)), _KEYS)
        n_rows = most * triton.next_power_of_2(max(n_queries, 1))
        return _rows.Tile(how, n_rows, n_outputs, n_tables, device, all_outputs)

    def _keys(self, tile: _rows.Tile) -> int:
        return min(tile.rows, triton.next_power_of_2(max(self._most_keys, 1)), _KEYS)

    def programs(self, tile: _rows.Tile) -> int:
        _, _, n_samples, n_queries = self.terms.query.shape
        if self._most_keys == 0 or self.weights.size == 0:
            return 0
        query_blocks = triton.cdiv(n_queries, tile.rows // self._keys(tile))
        return query_blocks * n_samples * tile.output_blocks * tile.groups

    def constants(self, tile: _rows.Tile, accumulate: FixedPoint | None) -> dict[str, Any]:
        """Constants of kernels."""
        n_pairs, _, n_samples, n_queries = self.terms.query.shape
        constants = tile.constants
        rows, keys = constants.pop("ROWS"), self._keys(tile)
        constants["n_detectors"] = self.weights.shape[0]
        return {
            **constants,
            **_rows.arithmetic(self.weights, accumulate),
            "n_samples": n_samples,
            "n_queries": n_queries,
            "n_keys": self.terms.key.shape[3],
            "n_distances": self.n_distances,
            "n_pairs": n_pairs,
            "n_rows": self.weights.shape[1],
            "START": self._start is not None,
            "SEGMENTS": self._segments[0] is not None,
            "WINDOW": -1 if self._window is None else self._window,
            "EPSILON": self._epsilon,
            "QUERIES": rows // keys,
            "KEYS": keys,
        }


# ------------------------------------------------------------------------------------- launches
def _rule(sizes: Sizes, all_outputs: bool) -> Launch:
    outputs = min(triton.next_power_of_2(max(sizes["outputs"], 1)), 64)
    rows = min(max(4096 // outputs, 32), 128)
    queries = max(rows // min(triton.next_power_of_2(max(sizes["keys"], 1)), _KEYS), 1)
    programs = sizes["samples"] * triton.cdiv(sizes["queries"], queries)
    if not all_outputs:
        programs *= triton.cdiv(sizes["outputs"], outputs)
    # More than fill a device: those of early queries are short.
    detectors = _rows.split(programs, sizes["detectors"], enough=4096)
    return Launch(rows=rows, outputs=outputs, detectors=detectors, warps=4)


def _forward_rule(sizes: Sizes) -> Launch:
    return _rule(sizes, all_outputs=False)


def _terms_rule(sizes: Sizes) -> Launch:
    return _rule(sizes, all_outputs=True)


def _table_rule(sizes: Sizes) -> Launch:
    return _rule(sizes, all_outputs=False)


# ------------------------------------------------------------------------------------- kernels
# Programs: queries first, then samples, then outputs, then groups of detectors, so that what runs at the same time
# reads few tables, which then stay in the cache. Late queries first: they have most keys.
@kernel
def _sum_rows(
    weights,
    key,
    query,
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
    n_pairs: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    START: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    EPSILON: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * KEYS
    block, b, output, output_exists, group = _place(n_samples, n_queries, n_outputs, QUERIES, OUTPUTS)
    j, place = _queries(block, start, QUERIES, KEYS, START)
    low, high = _keys(block, start, n_queries, n_keys, QUERIES, START, WINDOW)
    total = tl.zeros((ROWS, OUTPUTS), SUM)
    for first in range(low, high, KEYS):
        i = first + tl.arange(0, ROWS) % KEYS
        counts = _counts(b, i, j, place, query_segments, key_segments, n_queries, n_keys, SEGMENTS, WINDOW)
        for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
            index, _, _, _, _ = _detection(
                key, query, position, query, t, b, i, j, place, counts, n_samples, n_queries, n_keys,
                n_distances, n_detectors, n_pairs, EPSILON, False,
            )  # fmt: skip
            at = _rows.offset(index, n_rows, n_outputs)[:, None] + output[None, :]
            table = _rows.table(weights, t, n_rows, n_outputs)
            value = tl.load(table + at, mask=counts[:, None] & output_exists[None, :], other=0)
            total += _rows.addend(value.to(ACC), SCALE)
    y = tl.sum(tl.reshape(total, (QUERIES, KEYS, OUTPUTS)), 1)
    own, exists = _rows.block(QUERIES, n_queries, block)
    at = ((group.to(tl.int64) * n_samples + b) * n_queries + own)[:, None] * n_outputs + output[None, :]
    tl.store(parts + at, y.to(parts.dtype.element_ty), mask=exists[:, None] & output_exists[None, :])


@kernel
def _multiply_rows(
    weights,
    key,
    query,
    position,
    start,
    query_segments,
    key_segments,
    parts,
    dy,
    d_query,
    d_key,
    d_position,
    d_weights,
    n_samples: tl.constexpr,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    n_distances: tl.constexpr,
    n_detectors: tl.constexpr,
    n_pairs: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    START: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    EPSILON: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_POSITIONS: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * KEYS
    output = tl.arange(0, OUTPUTS)
    block, b, _, _, group = _place(n_samples, n_queries, OUTPUTS, QUERIES, OUTPUTS)
    j, place = _queries(block, start, QUERIES, KEYS, START)
    low, high = _keys(block, start, n_queries, n_keys, QUERIES, START, WINDOW)
    of_queries = dy + (b * n_queries + j)[:, None] * n_outputs
    cotangent = tl.zeros((ROWS, OUTPUTS), ACC)
    if n_outputs <= OUTPUTS:  # the same in every block: read once
        exists = (j < n_queries)[:, None] & (output < n_outputs)[None, :]
        cotangent = tl.load(of_queries + output[None, :], mask=exists, other=0).to(ACC)
    own, own_exists = _rows.block(QUERIES, n_queries, block)
    pair = tl.arange(0, PAIRS)
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        table = _rows.table(weights, t, n_rows, n_outputs)
        by_pair = tl.zeros((PAIRS, ROWS), d_query.dtype.element_ty)
        for first in range(low, high, KEYS):
            i = first + tl.arange(0, ROWS) % KEYS
            counts = _counts(
                b, i, j, place, query_segments, key_segments, n_queries, n_keys, SEGMENTS, WINDOW
            )
            index, flip, margin, closest, of_parts = _detection(
                key, query, position, parts, t, b, i, j, place, counts, n_samples, n_queries, n_keys,
                n_distances, n_detectors, n_pairs, EPSILON, True,
            )  # fmt: skip
            main = _rows.offset(index, n_rows, n_outputs)
            flipped = _rows.offset(index ^ flip, n_rows, n_outputs)
            difference = tl.zeros((ROWS,), SUM)
            for o in range(0, n_outputs, OUTPUTS):
                column = o + output
                exists = counts[:, None] & (column < n_outputs)[None, :]
                if n_outputs > OUTPUTS:
                    cotangent = tl.load(of_queries + column[None, :], mask=exists, other=0).to(ACC)
                at = main[:, None] + column[None, :]
                if OF_WEIGHTS:
                    tl.atomic_add(
                        _rows.table(d_weights, t, n_rows, n_outputs) + at,
                        _rows.addend(cotangent, SCALE),
                        mask=exists,
                        sem="relaxed",
                    )
                change = tl.load(table + at, mask=exists, other=0).to(ACC)
                at = flipped[:, None] + column[None, :]
                change -= tl.load(table + at, mask=exists, other=0).to(ACC)
                difference += tl.sum(_rows.addend(change * cotangent, SCALE), 1)
            value = _rows.cotangent(margin, difference, ACC, SCALE)
            value = tl.where(counts, value, 0).to(d_query.dtype.element_ty)
            by_pair += tl.where(pair[:, None] == closest[None, :], value[None, :], 0)
            plane = closest.to(tl.int64) * n_detectors + t
            if OF_KEYS:
                tl.atomic_add(
                    d_key + (plane * n_samples + b) * n_keys + i,
                    value,
                    mask=counts & ((of_parts & 1) != 0),
                    sem="relaxed",
                )
            if OF_POSITIONS:
                of_sample = b * n_pairs * n_detectors * n_distances
                distance = tl.minimum(place - 1 - i, n_distances - 1)
                tl.atomic_add(
                    d_position + of_sample + plane * n_distances + distance,
                    value,
                    mask=counts & ((of_parts & 4) != 0),
                    sem="relaxed",
                )
        of_query = tl.sum(tl.reshape(by_pair, (PAIRS, QUERIES, KEYS)), 2)
        at = ((pair.to(tl.int64) * n_detectors + t) * n_samples + b)[:, None] * n_queries + own[None, :]
        tl.store(d_query + at, of_query, mask=(pair < n_pairs)[:, None] & own_exists[None, :])


@kernel
def _add_rows(
    key,
    query,
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
    n_pairs: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    START: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    EPSILON: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * KEYS
    block, b, output, output_exists, group = _place(n_samples, n_queries, n_outputs, QUERIES, OUTPUTS)
    j, place = _queries(block, start, QUERIES, KEYS, START)
    low, high = _keys(block, start, n_queries, n_keys, QUERIES, START, WINDOW)
    exists = (j < n_queries)[:, None] & output_exists[None, :]
    value = tl.load(dy + (b * n_queries + j)[:, None] * n_outputs + output[None, :], mask=exists, other=0)
    value = _rows.addend(value.to(ACC) * tl.load(step), SCALE)
    first_detector = tl.load(first)
    for first_key in range(low, high, KEYS):
        i = first_key + tl.arange(0, ROWS) % KEYS
        counts = _counts(b, i, j, place, query_segments, key_segments, n_queries, n_keys, SEGMENTS, WINDOW)
        for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_tables)):
            index, _, _, _, _ = _detection(
                key, query, position, query, first_detector + t, b, i, j, place, counts, n_samples, n_queries, n_keys,
                n_distances, n_detectors, n_pairs, EPSILON, False,
            )  # fmt: skip
            if TOUCH:
                _rows.touch(touched, t, index, counts, n_rows)
            at = _rows.offset(index, n_rows, n_outputs)[:, None] + output[None, :]
            table = _rows.table(total, t, n_rows, n_outputs)
            tl.atomic_add(table + at, value, mask=counts[:, None] & output_exists[None, :], sem="relaxed")


@kernel
def _place(
    n_samples: tl.constexpr,
    n_queries: tl.constexpr,
    n_outputs: tl.constexpr,
    QUERIES: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Block of queries, sample, outputs and group of detectors of this program."""
    query_blocks: tl.constexpr = (n_queries + QUERIES - 1) // QUERIES
    output_blocks: tl.constexpr = (n_outputs + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    block = query_blocks - 1 - program % query_blocks
    rest = program // query_blocks
    b = (rest % n_samples).to(tl.int64)
    rest = rest // n_samples
    output, output_exists = _rows.block(OUTPUTS, n_outputs, rest % output_blocks)
    # Of 32 bits, as what it is added to.
    return block, b, output.to(tl.int32), output_exists, rest // output_blocks


@kernel
def _queries(block, start, QUERIES: tl.constexpr, KEYS: tl.constexpr, START: tl.constexpr):
    """The query of each row of a tile, and its place among the keys."""
    j = block * QUERIES + tl.arange(0, QUERIES * KEYS) // KEYS
    if START:
        return j, j + tl.load(start).to(tl.int64)
    else:
        return j, j


@kernel
def _keys(
    block,
    start,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    QUERIES: tl.constexpr,
    START: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The keys from which and before which some query of a block meets them."""
    first = (block * QUERIES).to(tl.int64)
    last = tl.minimum(first + QUERIES, n_queries) - 1
    if START:
        first += tl.load(start)
        last += tl.load(start)
    low = tl.zeros_like(first)
    if WINDOW >= 0:
        low = tl.minimum(tl.maximum(first - WINDOW, 0), n_keys)
    return low.to(tl.int32), tl.minimum(tl.maximum(last, 0), n_keys).to(tl.int32)


@kernel
def _counts(
    b,
    i,
    j,
    place,
    query_segments,
    key_segments,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Which pairs of a tile count."""
    counts = (j < n_queries) & (i < n_keys) & (i < place)
    if WINDOW >= 0:
        counts = counts & (place - i <= WINDOW)
    if SEGMENTS:
        own = tl.load(query_segments + b * n_queries + j, mask=counts, other=0)
        counts = counts & (tl.load(key_segments + b * n_keys + i, mask=counts, other=0) == own)
    return counts


@kernel
def _detection(
    key,
    query,
    position,
    parts,
    t,
    b,
    i,
    j,
    place,
    counts,
    n_samples: tl.constexpr,
    n_queries: tl.constexpr,
    n_keys: tl.constexpr,
    n_distances: tl.constexpr,
    n_detectors: tl.constexpr,
    n_pairs: tl.constexpr,
    EPSILON: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Index, flip and margin of each pair, the number of its closest comparison, and which parts that one reads."""
    index, flip, margin = detect.nothing(counts.shape[0], key.dtype.element_ty)
    closest, of_closest = tl.zeros_like(index), tl.zeros_like(index)
    for r in tl.static_range(n_pairs):
        plane = tl.cast(t, tl.int64) + r * n_detectors
        sample = plane * n_samples + b
        delta = tl.load(key + sample * n_keys + i, mask=counts, other=0)
        delta += tl.load(query + sample * n_queries + j, mask=counts, other=0)
        if n_distances > 0:
            distance = tl.minimum(place - 1 - i, n_distances - 1)
            delta += tl.load(position + plane * n_distances + distance, mask=counts, other=0)
        closer = detect.is_closer(delta, margin, r)
        index |= detect.bit(delta, r, EPSILON)
        margin = tl.where(closer, delta, margin)
        flip = tl.where(closer, 1 << r, flip)
        closest = tl.where(closer, r, closest)
        if PARTS:
            of_closest = tl.where(closer, tl.load(parts + plane), of_closest)
    return index, flip, margin, closest, of_closest

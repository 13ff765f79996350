"""`lutjax.lut_pair_attention` in Triton.

Formula for query ``j`` and every counted earlier key ``i``: detector ``t`` compares sums over
position terms (`_xla._comparison_terms`)::

    delta[r] = key[r, t, i] + query[r, t, j] + position[r, t, j - i - 1]
    row and closest comparison c as in `lutjax.detect`;  other = row ^ 2**c
    y[j] = sum_{t, i} weights[t, row]
    ddelta[c] = slope(delta[c]) * <dy[j], weights[t, row] - weights[t, other]>, added to the terms
    dweights[t, row] += dy[j]

Work: a program owns one sample's query block, an output block and a detector block, and visits the
keys block by block. A tile row is one query and key pair. The kernel detects the pair from its
terms, so no array over all pairs is stored. The grid is one-dimensional: query blocks change
fastest, then samples, output blocks, and detector blocks. Late queries, which have most keys, start
first.

Layout: terms are ``[comparisons, T, B, L]``, so a block's keys are contiguous. Concurrent programs
read few tables, which stay in the L2 cache.

Numerics: sums use the accumulator dtype or, in fixed point, int32. One program per detector block
sums outputs, and partial sums are added in a fixed order. Key, position and table gradients use
atomics, so their last bits differ between runs, except in fixed point. Among equal deltas the first
is the closest, and the first NaN is closer than any number.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _row_additions, _row_tiles, detect
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import few_pair_additions, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla._comparison_terms import Terms
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._fixed_point import addend_dtype
from lutjax.values._row_rules import RowState

# Most keys of a block. The remaining rows of a tile are further queries, which read the same keys.
_KEYS = 32


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, LutPairAttention)
    return unsupported_arguments(request) or few_pair_additions(request, call, call.x.shape)


SPEC = Declaration(
    _supports,
    launches=("lut_pair_attention.forward", "lut_pair_attention.terms", "lut_pair_attention.table"),
)


def forward(call: LutPairAttention, *, device: Device) -> jax.Array:
    pairs = ComparedPairs(call)
    tile = pairs.tile(launch_of("lut_pair_attention.forward", pairs.sizes, device, _rule), device)
    return _row_tiles.sum_rows(
        _sum_rows, call, tile, call.x.shape[:2], *pairs.arrays, **pairs.arguments(tile)
    )


def backward(
    call: LutPairAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    pairs = ComparedPairs(call)
    if needs <= {"weights"}:
        return {name: _gradient(pairs, cotangent, device) for name in needs}
    d_query, d_key, d_position, d_weights = _terms(pairs, cotangent, needs, device)
    cotangents = {}
    if "x" in needs:
        cotangents["x"] = pairs.terms.to_x(d_query, part=1)
    if "keys" in needs:
        cotangents["keys"] = pairs.terms.to_x(d_key, part=0)
    if "weights" in needs:
        cotangents["weights"] = d_weights
    if "positions" in needs:
        cotangents["positions"] = pairs.terms.to_positions(d_position)
    return cotangents


def update(
    call: LutPairAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    add = functools.partial(_add_to_rows, ComparedPairs(call), cotangent, device)
    return _row_additions.update(call, step, add, device=device)


def _gradient(pairs: "ComparedPairs", dy: jax.Array, device: Device) -> jax.Array:
    return _row_additions.gradient(pairs.call, functools.partial(_add_to_rows, pairs, dy, device))


def _terms(
    pairs: "ComparedPairs", dy: jax.Array, needs: frozenset[str], device: Device
) -> tuple[jax.Array, ...]:
    """Return the needed gradients for query, key and position terms, and for the tables."""
    terms, weights, accumulate = pairs.terms, pairs.call.weights, pairs.call.accumulate
    dtype = addend_dtype(terms.query.dtype, accumulate)
    n_pairs, n_detectors, n_samples, _ = terms.query.shape
    has_positions = "positions" in needs and pairs.n_distances > 0
    # Without comparisons the terms have no gradient.
    if n_pairs == 0:
        shapes = [terms.query.shape, terms.key.shape, (0, n_detectors, pairs.n_distances)]
        zeros = [jnp.zeros(shape, dtype) for shape in shapes]
        d_weights = _gradient(pairs, dy, device) if "weights" in needs else weights
        return *zeros, d_weights

    config = launch_of("lut_pair_attention.terms", pairs.sizes, device, _terms_rule)
    # A margin needs the whole inner product, so a program visits all outputs.
    tile = pairs.tile(config, device, all_outputs=True)
    # Separate parts for samples, no larger than the gradients of keys: fewer programs add to the
    # same element.
    of_positions = (n_samples, n_pairs, n_detectors, pairs.n_distances)
    needed = [
        ("keys" in needs, terms.key.shape, dtype),
        (has_positions, of_positions, dtype),
        ("weights" in needs, weights.shape, addend_dtype(weights.dtype, accumulate)),
    ]
    d_query, d_key, d_position, d_weights = launch(
        _multiply_rows,
        weights,
        *pairs.arrays,
        terms.compared_parts(),
        dy,
        outputs=[jax.ShapeDtypeStruct(terms.query.shape, dtype)],
        # Arrays that are not needed have one element: kernels have fixed parameters.
        zeroed=[jax.ShapeDtypeStruct(shape if need else (1,), t) for need, shape, t in needed],
        OF_KEYS="keys" in needs,
        OF_POSITIONS=has_positions,
        OF_WEIGHTS="weights" in needs,
        # A tile dimension is a power of two.
        PAIRS=triton.next_power_of_2(n_pairs),
        **pairs.arguments(tile),
    )
    if has_positions:
        d_position = jnp.sum(d_position, 0, dtype=dtype)
    elif "positions" in needs:
        d_position = jnp.zeros(of_positions[1:], dtype)
    return d_query, d_key, d_position, d_weights


def _add_to_rows(
    pairs: "ComparedPairs", dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    config = launch_of("lut_pair_attention.table", pairs.sizes, device, _rule)
    tile = pairs.tile(config, device, n_detectors=addition.total.shape[0])
    return addition(_add_rows, *pairs.arrays, dy, **pairs.arguments(tile))


class ComparedPairs:
    """Query and key pairs that kernels detect from terms."""

    def __init__(self, call: LutPairAttention):
        self.call, self.terms = call, Terms(call)

    @property
    def n_distances(self) -> int:
        return 0 if self.terms.position is None else self.terms.position.shape[2]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Kernel input arrays, with placeholders for missing or empty arrays."""
        terms, call, unused = self.terms, self.call, jnp.zeros((1,), jnp.int32)
        of_places = (
            jnp.zeros((1,), terms.key.dtype) if a is None or not a.size else a
            for a in (terms.key, terms.query, terms.position)
        )
        start = unused if call.start is None else call.start.reshape(1)
        segments = (call.query_segments, call.key_segments)
        return *of_places, start, *(unused if s is None else s for s in segments)

    @property
    def _most_keys(self) -> int:
        n_queries, n_keys = self.terms.query.shape[3], self.terms.key.shape[3]
        # Query 0 has no earlier key, unless `start` shifts the queries.
        most = n_keys if self.call.start is not None else max(min(n_keys, n_queries - 1), 0)
        return most if self.call.window is None else min(most, self.call.window)

    @property
    def sizes(self) -> Sizes:
        n_pairs, _, n_samples, n_queries = self.terms.query.shape
        others = {
            "samples": n_samples,
            "queries": n_queries,
            "keys": self._most_keys,
            "pairs": n_pairs,
        }
        sizes = _row_tiles.sizes(self.call.weights, **others)
        # The number of rows follows from the number of comparisons.
        del sizes["rows"]
        return sizes

    def tile(
        self,
        config: Launch,
        device: Device,
        *,
        n_detectors: int | None = None,
        all_outputs: bool = False,
    ) -> _row_tiles.RowTile:
        n_tables, _, n_outputs = self.call.weights.shape
        n_tables = n_tables if n_detectors is None else n_detectors
        # A tile needs no more rows than there are pairs of a key block.
        most = _row_tiles.fit_size(_KEYS, self._most_keys)
        n_reads = most * triton.next_power_of_2(max(self.terms.query.shape[3], 1))
        return _row_tiles.RowTile(config, n_reads, n_outputs, n_tables, device, all_outputs)

    def arguments(self, tile: _row_tiles.RowTile) -> dict[str, Any]:
        n_pairs, n_detectors, n_samples, n_queries = self.terms.query.shape
        # Rows beyond the keys of a block become further queries.
        keys = _row_tiles.fit_size(min(tile.rows, _KEYS), self._most_keys)
        queries = tile.rows // keys
        programs = (
            triton.cdiv(n_queries, queries) * n_samples * tile.output_blocks * tile.detector_blocks
        )
        return {
            **tile.arguments,
            **_row_tiles.arithmetic(self.call),
            "programs": programs if self._most_keys and self.call.weights.size else 0,
            "n_detectors": n_detectors,
            "n_samples": n_samples,
            "n_queries": n_queries,
            "n_keys": self.terms.key.shape[3],
            "n_distances": self.n_distances,
            "n_pairs": n_pairs,
            "START": self.call.start is not None,
            "SEGMENTS": self.call.query_segments is not None,
            "WINDOW": -1 if self.call.window is None else self.call.window,
            "EPSILON": self.call.epsilon,
            "QUERIES": queries,
            "KEYS": keys,
        }


# ------------------------------------------------------------------------------------- launches
def _rule(sizes: Sizes, all_outputs: bool = False) -> Launch:
    outputs = _row_tiles.fit_size(64, sizes["outputs"])
    # 4096 elements per tile are 32 float32 registers per thread of four warps.
    rows = min(max(4096 // outputs, 32), 128)
    queries = max(rows // _row_tiles.fit_size(_KEYS, sizes["keys"]), 1)
    programs = sizes["samples"] * triton.cdiv(sizes["queries"], queries)
    if not all_outputs:
        programs *= triton.cdiv(sizes["outputs"], outputs)
    # More programs than a device runs at once, because those of early queries are short.
    detectors = _row_tiles.split(programs, sizes["detectors"], enough=4096)
    return Launch(rows=rows, outputs=outputs, detectors=detectors, warps=4)


def _terms_rule(sizes: Sizes) -> Launch:
    return _rule(sizes, all_outputs=True)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sum_rows(
    weights, key, query, position, start, query_segments, key_segments, parts, c: tl.constexpr
):
    ROWS: tl.constexpr = c.QUERIES * c.KEYS
    block, b, output, output_exists, group = _locate_program(c.n_outputs, c)
    j, place = _queries(block, start, c)
    low, high = _keys(block, start, c)
    total = tl.zeros((ROWS, c.OUTPUTS), c.SUM)
    for first in range(low, high, c.KEYS):
        # Row ``n`` of the tile is query ``n // KEYS`` and key ``n % KEYS``.
        i = first + tl.arange(0, ROWS) % c.KEYS
        counts = _counts(b, i, j, place, query_segments, key_segments, c)
        for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
            index, _, _, _, _ = _detection(
                key, query, position, query, t, b, i, j, place, counts, False, c
            )
            at = _row_tiles.offset(index, c)[:, None] + output[None, :]
            table = _row_tiles.table(weights, t, c)
            # Pairs that do not count read nothing and add 0.
            value = tl.load(table + at, mask=counts[:, None] & output_exists[None, :], other=0)
            total += _row_tiles.addend(value.to(c.ACC), c)
    # The keys of a query are consecutive rows of the tile, so a reshape separates them. They are
    # summed once, after all key blocks.
    y = tl.sum(tl.reshape(total, (c.QUERIES, c.KEYS, c.OUTPUTS)), 1)
    own, exists = _row_tiles.block(c.QUERIES, c.n_queries, block)
    at = ((group.to(tl.int64) * c.n_samples + b) * c.n_queries + own)[
        :, None
    ] * c.n_outputs + output[None, :]
    tl.store(
        parts + at, y.to(parts.dtype.element_ty), mask=exists[:, None] & output_exists[None, :]
    )


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
    c: tl.constexpr,
):
    ROWS: tl.constexpr = c.QUERIES * c.KEYS
    output = tl.arange(0, c.OUTPUTS)
    block, b, _, _, group = _locate_program(c.OUTPUTS, c)
    j, place = _queries(block, start, c)
    low, high = _keys(block, start, c)
    of_queries = dy + (b * c.n_queries + j)[:, None] * c.n_outputs
    cotangent = tl.zeros((ROWS, c.OUTPUTS), c.ACC)
    # A gradient that fits one tile is the same for all keys and detectors, and is read once.
    if c.n_outputs <= c.OUTPUTS:
        exists = (j < c.n_queries)[:, None] & (output < c.n_outputs)[None, :]
        cotangent = tl.load(of_queries + output[None, :], mask=exists, other=0).to(c.ACC)
    own, own_exists = _row_tiles.block(c.QUERIES, c.n_queries, block)
    pair = tl.arange(0, c.PAIRS)
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        table = _row_tiles.table(weights, t, c)
        # Gradients of query terms stay in registers, one row per comparison, because a program owns
        # its queries.
        by_pair = tl.zeros((c.PAIRS, ROWS), d_query.dtype.element_ty)
        for first in range(low, high, c.KEYS):
            i = first + tl.arange(0, ROWS) % c.KEYS
            counts = _counts(b, i, j, place, query_segments, key_segments, c)
            index, flip, margin, closest, of_parts = _detection(
                key, query, position, parts, t, b, i, j, place, counts, True, c
            )
            main = _row_tiles.offset(index, c)
            flipped = _row_tiles.offset(index ^ flip, c)
            difference = tl.zeros((ROWS,), c.SUM)
            for o in range(0, c.n_outputs, c.OUTPUTS):
                column = o + output
                exists = counts[:, None] & (column < c.n_outputs)[None, :]
                if c.n_outputs > c.OUTPUTS:
                    cotangent = tl.load(of_queries + column[None, :], mask=exists, other=0).to(
                        c.ACC
                    )
                at = main[:, None] + column[None, :]
                # The main row is known here, so the table gradient needs no second detection.
                if c.OF_WEIGHTS:
                    tl.atomic_add(
                        _row_tiles.table(d_weights, t, c) + at,
                        _row_tiles.addend(cotangent, c),
                        mask=exists,
                        sem="relaxed",
                    )
                change = tl.load(table + at, mask=exists, other=0).to(c.ACC)
                at = flipped[:, None] + column[None, :]
                change -= tl.load(table + at, mask=exists, other=0).to(c.ACC)
                # Rows are subtracted before the product, which keeps the digits of their
                # difference.
                difference += tl.sum(_row_tiles.addend(change * cotangent, c), 1)
            value = _row_tiles.cotangent(margin, difference, c)
            value = tl.where(counts, value, 0).to(d_query.dtype.element_ty)
            # A mask selects the row of `by_pair` that belongs to the closest comparison of each
            # pair: registers cannot be indexed.
            by_pair += tl.where(pair[:, None] == closest[None, :], value[None, :], 0)
            plane = closest.to(tl.int64) * c.n_detectors + t
            # `of_parts` tells which of the three terms the closest comparison contains. A key meets
            # many queries, and a distance many pairs, so both need atomics.
            if c.OF_KEYS:
                tl.atomic_add(
                    d_key + (plane * c.n_samples + b) * c.n_keys + i,
                    value,
                    mask=counts & ((of_parts & 1) != 0),
                    sem="relaxed",
                )
            if c.OF_POSITIONS:
                of_sample = b * c.n_pairs * c.n_detectors * c.n_distances
                distance = tl.minimum(place - 1 - i, c.n_distances - 1)
                tl.atomic_add(
                    d_position + of_sample + plane * c.n_distances + distance,
                    value,
                    mask=counts & ((of_parts & 4) != 0),
                    sem="relaxed",
                )
        of_query = tl.sum(tl.reshape(by_pair, (c.PAIRS, c.QUERIES, c.KEYS)), 2)
        # Rows of `PAIRS` beyond the last comparison are padding.
        at = ((pair.to(tl.int64) * c.n_detectors + t) * c.n_samples + b)[
            :, None
        ] * c.n_queries + own[None, :]
        tl.store(d_query + at, of_query, mask=(pair < c.n_pairs)[:, None] & own_exists[None, :])


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
    c: tl.constexpr,
):
    ROWS: tl.constexpr = c.QUERIES * c.KEYS
    block, b, output, output_exists, group = _locate_program(c.n_outputs, c)
    j, place = _queries(block, start, c)
    low, high = _keys(block, start, c)
    exists = (j < c.n_queries)[:, None] & output_exists[None, :]
    value = tl.load(
        dy + (b * c.n_queries + j)[:, None] * c.n_outputs + output[None, :], mask=exists, other=0
    )
    # The addend of a query is the same for all keys, and is converted once.
    value = _row_tiles.addend(value.to(c.ACC) * tl.load(step), c)
    first_detector = tl.load(first)
    for first_key in range(low, high, c.KEYS):
        i = first_key + tl.arange(0, ROWS) % c.KEYS
        counts = _counts(b, i, j, place, query_segments, key_segments, c)
        for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_tables)):
            index, _, _, _, _ = _detection(
                key, query, position, query, first_detector + t, b, i, j, place, counts, False, c
            )
            if c.TOUCH:
                _row_tiles.touch(touched, t, index, counts, c)
            at = _row_tiles.offset(index, c)[:, None] + output[None, :]
            table = _row_tiles.table(total, t, c)
            # Relaxed order suffices: nothing reads the tables before the kernel ends.
            tl.atomic_add(
                table + at, value, mask=counts[:, None] & output_exists[None, :], sem="relaxed"
            )


@kernel
def _locate_program(n_outputs: tl.constexpr, c: tl.constexpr):
    """Return query block, sample, outputs, whether they exist, and detector block."""
    block, b, output, exists, group = _row_tiles.locate_query(c.n_queries, n_outputs, c, c.QUERIES)
    # Offsets in a table have 32 bits where they fit; a wider summand would widen them.
    return block, b, output.to(tl.int32), exists, group


@kernel
def _queries(block, start, c: tl.constexpr):
    """Return each tile row's query, and its position among the keys."""
    j = block * c.QUERIES + tl.arange(0, c.QUERIES * c.KEYS) // c.KEYS
    if c.START:
        return j, j + tl.load(start).to(tl.int64)
    else:
        return j, j


@kernel
def _keys(block, start, c: tl.constexpr):
    """Return the first key that a block's queries read, and the end of these keys."""
    # 64 bits: `start` is an argument, and a sum in int32 could overflow before it is clamped.
    first = (block * c.QUERIES).to(tl.int64)
    last = tl.minimum(first + c.QUERIES, c.n_queries) - 1
    if c.START:
        first += tl.load(start)
        last += tl.load(start)
    low = tl.zeros_like(first)
    if c.WINDOW >= 0:
        low = tl.minimum(tl.maximum(first - c.WINDOW, 0), c.n_keys)
    return low.to(tl.int32), tl.minimum(tl.maximum(last, 0), c.n_keys).to(tl.int32)


@kernel
def _counts(b, i, j, place, query_segments, key_segments, c: tl.constexpr):
    """Return a mask for a tile's counted pairs."""
    # Blocks cover the keys of their last query; each query masks those at or after its own
    # position.
    counts = (j < c.n_queries) & (i < c.n_keys) & (i < place)
    if c.WINDOW >= 0:
        counts = counts & (place - i <= c.WINDOW)
    if c.SEGMENTS:
        own = tl.load(query_segments + b * c.n_queries + j, mask=counts, other=0)
        counts = counts & (tl.load(key_segments + b * c.n_keys + i, mask=counts, other=0) == own)
    return counts


@kernel
def _detection(
    key, query, position, parts, t, b, i, j, place, counts, PARTS: tl.constexpr, c: tl.constexpr
):
    """Detect the pairs in a tile.

    Returns:
      Each pair's row, flip and margin, its closest comparison's number, and, if `PARTS`, the values
      that this comparison reads.
    """
    index, flip, margin = detect.initial_detection(counts.shape[0], key.dtype.element_ty)
    closest, of_closest = tl.zeros_like(index), tl.zeros_like(index)
    # Unrolled: bits and masks of comparison `r` are compile-time constants.
    for r in tl.static_range(c.n_pairs):
        plane = tl.cast(t, tl.int64) + r * c.n_detectors
        sample = plane * c.n_samples + b
        # At most two of the three terms are nonzero, so the sum rounds once, like the difference in
        # the definition.
        delta = tl.load(key + sample * c.n_keys + i, mask=counts, other=0)
        delta += tl.load(query + sample * c.n_queries + j, mask=counts, other=0)
        if c.n_distances > 0:
            distance = tl.minimum(place - 1 - i, c.n_distances - 1)
            delta += tl.load(position + plane * c.n_distances + distance, mask=counts, other=0)
        closer = detect.is_closer(delta, margin, r)
        index |= detect.bit(delta, r, c.EPSILON)
        margin = tl.where(closer, delta, margin)
        flip = tl.where(closer, 1 << r, flip)
        closest = tl.where(closer, r, closest)
        if PARTS:
            of_closest = tl.where(closer, tl.load(parts + plane), of_closest)
    return index, flip, margin, closest, of_closest

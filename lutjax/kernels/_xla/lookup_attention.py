"""`lutjax.lookup_attention` in plain JAX.

Formula for query ``j``, earlier key ``i`` at distance ``d``, detector ``t``; ``N`` bits of the
position::

    row = query.index[j] << (key.bits + N) | key.index[i] << N | position.index[d]
    y[j] = sum over i, t of weights[t, row]
    dweights[t, row] += dy[j]
    dmargin += slope(margin) * <dy[j], weights[t, row] - weights[t, row ^ flip]>

``margin`` and ``flip`` belong to the closer one of query and key, or to the position if it is
closer than both.

Work: tile by tile, see `_pair_tiles`: nothing of the size of all pairs exists. The loops over rows
are those of `_row_gathers`, or of `SlotRows` for sparse rows.

Numerics: sums use `addend_dtype`, tile after tile in fixed order. Ties go to the key. Ids are
clamped.
"""

import copy
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _pair_tiles, _row_gathers, _row_updates
from lutjax.kernels._xla._slot_rows import rows_of, slot_hits
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype, addends, result
from lutjax.values._row_rules import RowState


def forward(call: LookupAttention, *, device: Device) -> jax.Array:
    weights, accumulate, rows = call.weights, call.accumulate, rows_of(call)
    pairs = _pair_tiles.plan(call, device)
    row = RowIds(pairs, call)

    def body(tile: _pair_tiles.Tile, y: jax.Array) -> jax.Array:
        return tile.add_rows(
            y, rows.sum_rows(weights, _row_gathers.flat(row(tile)), device, accumulate)
        )

    dtype = addend_dtype(weights.dtype, accumulate)
    y = zeros_varying(call.query.index, pairs.padded_shape(call.width), dtype)
    return result(pairs.unpadded_rows(pairs.for_each_tile(body, y)), weights.dtype, accumulate)


def backward(
    call: LookupAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    weights, query, key, position = call.weights, call.query, call.key, call.position
    accumulate, rows = call.accumulate, rows_of(call)
    pairs = _pair_tiles.plan(call, device)
    row = RowIds(pairs, call)
    # Padding queries have cotangents of zero, so they add nothing to tables.
    dy = pairs.padded_rows(cotangent.astype(accumulator(weights.dtype)))
    need_query, need_key, need_position = (name in needs for name in ("query", "key", "position"))

    q_flip, q_margin = (
        pairs.padded_queries(_move_tables_first(a)) for a in (query.flip, query.margin)
    )
    k_flip, k_margin = (pairs.padded_keys(_move_tables_first(a)) for a in (key.flip, key.margin))
    if need_position:
        assert position is not None
        p_flip, p_margin = position.flip.T, position.margin.T

    def body(tile: _pair_tiles.Tile, totals: dict[str, jax.Array]) -> dict[str, jax.Array]:
        totals = dict(totals)
        main = row(tile)
        # The cotangent of a query once per pair, zero for pairs that do not count: no other mask is
        # needed for table gradients.
        dy_pair = tile.gather_rows(dy)
        if "weights" in needs:
            addend = addends(dy_pair, accumulate)
            totals["weights"] = rows.add_rows(
                totals["weights"], _row_gathers.flat(main), addend, device
            )
        if not (need_query or need_key or need_position):
            return totals

        of_query, of_key = tile.gather_queries(q_margin), tile.gather_keys(k_margin)
        # Strictly: the key wins ties, and a NaN of either margin selects the key.
        query_is_closer = jnp.abs(of_query) < jnp.abs(of_key)
        margin = jnp.where(query_is_closer, of_query, of_key)
        flip = jnp.where(
            query_is_closer,
            tile.gather_queries(q_flip) << row.query_shift,
            tile.gather_keys(k_flip) << row.key_shift,
        )
        ids = [main, main ^ flip]
        if need_position:
            of_position = tile.gather_distances(p_margin)
            position_is_closest = jnp.abs(of_position) < jnp.minimum(
                jnp.abs(of_query), jnp.abs(of_key)
            ).astype(of_position.dtype)
            # Other reads use the main row again, which is in the cache.
            ids.append(main ^ jnp.where(position_is_closest, tile.gather_distances(p_flip), 0))

        flat_ids = tuple(_row_gathers.flat(i) for i in ids)
        flipped = rows.differences(weights, flat_ids, dy_pair, device, accumulate)
        # One call for both flips reads the main row once.
        difference, *of_flipped_position = (d.reshape(main.shape) for d in flipped)
        cotangent = _row_gathers.slope(margin) * difference.astype(margin.dtype)
        cotangent = addends(tile.mask_invalid(cotangent), accumulate)
        if need_query:
            totals["query"] = tile.add_to_queries(
                totals["query"], jnp.where(query_is_closer, cotangent, 0)
            )
        if need_key:
            totals["key"] = tile.add_to_keys(
                totals["key"], jnp.where(query_is_closer, 0, cotangent)
            )
        if need_position:
            difference = of_flipped_position[0].astype(of_position.dtype)
            # Where the position is not closest, the other row is the main row, and the select drops
            # the product.
            cotangent = jnp.where(
                position_is_closest, _row_gathers.slope(of_position) * difference, 0
            )
            cotangent = addends(tile.mask_invalid(cotangent), accumulate)
            # Positions without a detector axis receive the sum over detectors.
            if of_position.shape[0] == 1:  # shared by all detectors
                cotangent = jnp.sum(cotangent, 0, keepdims=True, dtype=cotangent.dtype)
            totals["position"] = tile.add_to_distances(totals["position"], cotangent)
        return totals

    totals = {}
    if "weights" in needs:
        totals["weights"] = zeros_varying(
            weights, weights.shape, addend_dtype(weights.dtype, accumulate)
        )
    margins = {"query": q_margin, "key": k_margin} | (
        {"position": p_margin} if need_position else {}
    )
    for name, margin in margins.items():
        if name in needs:
            totals[name] = jnp.zeros_like(margin, addend_dtype(margin.dtype, accumulate))
    # Totals are the carry of a sequential loop over tiles, updated in place.
    totals = pairs.for_each_tile(body, totals)
    if need_query:
        totals["query"] = _move_tables_last(pairs.unpadded_queries(totals["query"]))
    if need_key:
        totals["key"] = _move_tables_last(pairs.unpadded_keys(totals["key"]))
    if need_position:
        totals["position"] = totals["position"].T
    return totals


def update(
    call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: LookupAttention, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call, see `lutjax.kernels._xla.lookup.hits`."""
    pairs = _pair_tiles.plan(call, device)
    row = RowIds(pairs, call)

    def group_ids(detectors: _row_updates.Detectors) -> _pair_tiles.Ids:
        ids = row.for_detectors(detectors)
        return lambda tile: _row_gathers.flat(ids(tile))

    dy = cotangent.astype(accumulator(call.weights.dtype))
    return slot_hits(call, _pair_tiles.hits_of_pairs(pairs, dy, group_ids))


class RowIds:
    """Row ids for a tile's pairs: concatenated query, key and position bits."""

    def __init__(self, pairs: _pair_tiles.Pairs, call: LookupAttention):
        query, key, position = call.query, call.key, call.position
        self.key_shift = 0 if position is None else position.bits
        self.query_shift = self.key_shift + key.bits
        # Shifted once per query and key instead of once per pair.
        self._query = pairs.padded_queries(_move_tables_first(query.index) << self.query_shift)
        self._key = pairs.padded_keys(_move_tables_first(key.index) << self.key_shift)
        # Positions without bits address nothing and are skipped.
        self._position = position.index.T if self.key_shift and position is not None else None

    def for_detectors(self, detectors: Callable[[jax.Array], jax.Array]) -> "RowIds":
        """Return the row ids for a detector group."""
        # Slices of the padded ids: padding them again per group would copy them.
        group = copy.copy(self)
        group._query, group._key = detectors(self._query), detectors(self._key)
        # Positions shared by all detectors have no axis to slice.
        if self._position is not None and self._position.shape[0] > 1:
            group._position = detectors(self._position)
        return group

    def __call__(self, tile: _pair_tiles.Tile) -> jax.Array:
        row = tile.gather_queries(self._query) | tile.gather_keys(self._key)
        return row if self._position is None else row | tile.gather_distances(self._position)


def _move_tables_first(a: jax.Array) -> jax.Array:
    """Transpose ``[B, L, T]`` to ``[T, B, L]``."""
    return jnp.moveaxis(a, -1, 0)


def _move_tables_last(a: jax.Array) -> jax.Array:
    return jnp.moveaxis(a, 0, -1)

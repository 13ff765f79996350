"""`lutjax.lut_pair_attention` in plain JAX.

Formula for query ``j``, earlier key ``i`` at distance ``d``, ``z = [keys[i], x[j],
positions[d]]``::

    delta[r] = z[a] - z[b] for comparison r of detector t;  row, flip, margin as in `detect`
    y[j] = sum over i, t of weights[t, row]
    dweights[t, row] += dy[j]
    dz[a], dz[b] += c, -c at the closest comparison,
        c = slope(margin) * <dy[j], weights[t, row] - weights[t, row ^ flip]>

Work: tile by tile (`_pair_tiles`); deltas are sums of terms per position (`_comparison_terms`).
The loops over rows are those of `_row_gathers`, or of `SlotRows`. Cotangents are summed per term,
``[C, T, B, L]``, and distributed to the inputs once, after all tiles.

Numerics: sums use `addend_dtype`, tile after tile in fixed order. Anchors are clamped.
"""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _pair_tiles, _row_gathers, _row_updates
from lutjax.kernels._xla._comparison_terms import Terms
from lutjax.kernels._xla._slot_rows import rows_of, slot_hits
from lutjax.kernels._xla.detect import closest_pair, detect_closest
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.values._detection import Detection
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype, addends, result
from lutjax.values._row_rules import RowState


def forward(call: LutPairAttention, *, device: Device) -> jax.Array:
    weights, accumulate, rows = call.weights, call.accumulate, rows_of(call)
    pairs = _pair_tiles.plan(call, device)
    terms = TiledTerms(pairs, call)

    def body(tile: _pair_tiles.Tile, y: jax.Array) -> jax.Array:
        index = _row_gathers.flat(terms.detect(tile).index)
        return tile.add_rows(y, rows.sum_rows(weights, index, device, accumulate))

    y = zeros_varying(
        call.x, pairs.padded_shape(call.width), addend_dtype(weights.dtype, accumulate)
    )
    return result(pairs.unpadded_rows(pairs.for_each_tile(body, y)), weights.dtype, accumulate)


def backward(
    call: LutPairAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    weights, accumulate, rows = call.weights, call.accumulate, rows_of(call)
    need_x, need_keys, need_positions = (name in needs for name in ("x", "keys", "positions"))
    pairs = _pair_tiles.plan(call, device)
    terms = TiledTerms(pairs, call)
    dy = pairs.padded_rows(cotangent.astype(accumulator(weights.dtype)))

    def body(tile: _pair_tiles.Tile, totals: dict[str, jax.Array]) -> dict[str, jax.Array]:
        totals = dict(totals)
        d = terms.detect(tile)
        dy_pair = tile.gather_rows(dy)
        index = _row_gathers.flat(d.index)
        if "weights" in needs:
            totals["weights"] = rows.add_rows(
                totals["weights"], index, addends(dy_pair, accumulate), device
            )
        # Without comparisons there is no margin, and no axis to index.
        if not (need_x or need_keys or need_positions) or not d.bits:
            return totals
        main_and_flipped = index, _row_gathers.flat(d.index ^ d.flip)
        (difference,) = rows.differences(weights, main_and_flipped, dy_pair, device, accumulate)
        difference = difference.reshape(d.margin.shape)
        cotangent = _row_gathers.slope(d.margin) * difference.astype(d.margin.dtype)
        cotangent = addends(tile.mask_invalid(cotangent), accumulate)
        # All comparisons of a pair share one product; only the closest one receives it.
        closest = closest_pair(d.flip)
        # One comparison at a time: an array with an axis of comparisons and of pairs would be C
        # times as large as the others.
        for r in range(d.bits):
            of_pair = jnp.where(closest == r, cotangent, 0)
            if need_x:
                totals["x"] = totals["x"].at[r].set(tile.add_to_queries(totals["x"][r], of_pair))
            if need_keys:
                totals["keys"] = (
                    totals["keys"].at[r].set(tile.add_to_keys(totals["keys"][r], of_pair))
                )
            if need_positions:
                total = tile.add_to_distances(totals["positions"][r], of_pair)
                totals["positions"] = totals["positions"].at[r].set(total)
        return totals

    totals = {}
    if "weights" in needs:
        totals["weights"] = zeros_varying(
            weights, weights.shape, addend_dtype(weights.dtype, accumulate)
        )
    if need_x:
        totals["x"] = jnp.zeros_like(terms.query, addend_dtype(terms.query.dtype, accumulate))
    if need_keys:
        totals["keys"] = jnp.zeros_like(terms.key, addend_dtype(terms.key.dtype, accumulate))
    if need_positions and terms.position is not None:
        totals["positions"] = jnp.zeros_like(
            terms.position, addend_dtype(terms.position.dtype, accumulate)
        )
    # Totals are the carry of a sequential loop over tiles, updated in place.
    totals = pairs.for_each_tile(body, totals)
    if need_x:
        # Only here are anchors scattered to inputs, once per position instead of once per pair.
        totals["x"] = terms.to_x(pairs.unpadded_queries(totals["x"]), part=1)
    if need_keys:
        totals["keys"] = terms.to_x(pairs.unpadded_keys(totals["keys"]), part=0)
    if need_positions:
        totals["positions"] = terms.to_positions(totals["positions"])
    return totals


def update(
    call: LutPairAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: LutPairAttention, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call; see `lutjax.kernels._xla.lookup.hits`."""
    pairs = _pair_tiles.plan(call, device)

    def group_ids(detectors: _row_updates.Detectors) -> _pair_tiles.Ids:
        positions = call.positions
        if positions is not None and positions.shape[1] > 1:
            positions = detectors(positions, 1)
        # Terms of a group of detectors only; the tables of the call are not sliced.
        group = call.replace(anchors=detectors(call.anchors), positions=positions)
        terms = TiledTerms(pairs, group)
        return lambda tile: _row_gathers.flat(terms.detect(tile).index)

    dy = cotangent.astype(accumulator(call.weights.dtype))
    return slot_hits(call, _pair_tiles.hits_of_pairs(pairs, dy, group_ids))


class TiledTerms(Terms):
    """Terms padded to whole tiles of positions."""

    def __init__(self, pairs: _pair_tiles.Pairs, call: LutPairAttention):
        super().__init__(call)
        self._pairs, self._epsilon = pairs, call.epsilon
        # Padded once, so that every tile is a slice.
        self.key, self.query = pairs.padded_keys(self.key), pairs.padded_queries(self.query)

    def detect(self, tile: _pair_tiles.Tile) -> Detection:
        """Return the detection for every pair in a tile, ``[T, samples, pairs]``."""

        def delta(r: int) -> jax.Array:
            delta = tile.gather_keys(self.key[r]) + tile.gather_queries(self.query[r])
            # At most two terms are not zero, so the order of the sum does not matter.
            return (
                delta if self.position is None else delta + tile.gather_distances(self.position[r])
            )

        n_bits, n_detectors = self.key.shape[:2]
        shape = (n_detectors, self._pairs.samples, self._pairs.n_pairs)
        return detect_closest(
            [delta(r) for r in range(n_bits)], shape, self.key.dtype, self._epsilon
        )

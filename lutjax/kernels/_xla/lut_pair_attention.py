"""`lutjax.lut_pair_attention` in plain JAX, tile by tile, and by any other module that reads rows as `_rows` does."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels._xla import _pairs, _rows
from lutjax.kernels._xla._terms import Terms
from lutjax.kernels._xla.detect import closest, closest_pair
from lutjax.kernels.registry import Device


def forward_by(
    rows: ModuleType,
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
    segments = (query_segments, key_segments)
    pairs = _pairs.plan(x, keys, weights, start, window, segments, device)
    terms = TiledTerms(pairs, x, keys, anchors, positions, interleave, epsilon)

    def body(tile: _pairs.Tile, y: jax.Array) -> jax.Array:
        index = _rows.flat(terms.detect(tile).index)
        return tile.add_rows(y, rows.sum_rows(weights, index, device, accumulate))

    y = zeros_varying(x, pairs.padded_shape(weights.shape[-1]), addend_dtype(weights.dtype, accumulate))
    return result(pairs.unpadded_rows(pairs.for_each_tile(body, y)), weights.dtype, accumulate)


def backward_by(
    rows: ModuleType,
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
    segments = (query_segments, key_segments)
    pairs = _pairs.plan(x, keys, weights, start, window, segments, device)
    terms = TiledTerms(pairs, x, keys, anchors, positions, interleave, epsilon)
    dy = pairs.padded_rows(dy.astype(accumulator(weights.dtype)))

    def body(tile: _pairs.Tile, totals: dict[str, jax.Array]) -> dict[str, jax.Array]:
        totals = dict(totals)
        d = terms.detect(tile)
        dy_pair = tile.of_rows(dy)
        index = _rows.flat(d.index)
        if need_weights:
            totals["weights"] = _rows.add_rows(totals["weights"], index, addends(dy_pair, accumulate), device)
        if not (need_x or need_keys or need_positions) or not d.bits:
            return totals
        main_and_flipped = index, _rows.flat(d.index ^ d.flip)
        (difference,) = rows.differences(weights, main_and_flipped, dy_pair, device, accumulate)
        difference = difference.reshape(d.margin.shape)
        cotangent = _rows.slope(d.margin) * difference.astype(d.margin.dtype)
        cotangent = addends(tile.masked(cotangent), accumulate)
        closest = closest_pair(d.flip)
        for r in range(d.bits):
            of_pair = jnp.where(closest == r, cotangent, 0)
            if need_x:
                totals["x"] = totals["x"].at[r].set(tile.add_to_queries(totals["x"][r], of_pair))
            if need_keys:
                totals["keys"] = totals["keys"].at[r].set(tile.add_to_keys(totals["keys"][r], of_pair))
            if need_positions:
                total = tile.add_to_distances(totals["positions"][r], of_pair)
                totals["positions"] = totals["positions"].at[r].set(total)
        return totals

    totals = {}
    if need_weights:
        totals["weights"] = zeros_varying(weights, weights.shape, addend_dtype(weights.dtype, accumulate))
    if need_x:
        totals["x"] = jnp.zeros_like(terms.query, addend_dtype(terms.query.dtype, accumulate))
    if need_keys:
        totals["keys"] = jnp.zeros_like(terms.key, addend_dtype(terms.key.dtype, accumulate))
    if need_positions and terms.position is not None:
        totals["positions"] = jnp.zeros_like(terms.position, addend_dtype(terms.position.dtype, accumulate))
    totals = pairs.for_each_tile(body, totals)
    return (
        terms.to_x(pairs.unpadded_queries(totals["x"]), part=1) if need_x else None,
        terms.to_x(pairs.unpadded_keys(totals["keys"]), part=0) if need_keys else None,
        totals.get("weights"),
        None,
        terms.to_positions(totals["positions"]) if need_positions else None,
        *(None,) * 3,
    )


forward = functools.partial(forward_by, _rows)
backward = functools.partial(backward_by, _rows)


class TiledTerms(Terms):
    """The terms with whole tiles of places."""

    def __init__(
        self,
        pairs: _pairs.Pairs,
        x: jax.Array,
        keys: jax.Array,
        anchors: jax.Array,
        positions: jax.Array | None,
        interleave: bool,
        epsilon: float,
    ):
        super().__init__(x, keys, anchors, positions, interleave)
        self._pairs, self._epsilon = pairs, epsilon
        self.key, self.query = pairs.padded_keys(self.key), pairs.padded_queries(self.query)

    def detect(self, tile: _pairs.Tile) -> Detection:
        """The detection of every pair of a tile, ``[T, samples, pairs]``."""

        def delta(r: int) -> jax.Array:
            delta = tile.of_keys(self.key[r]) + tile.of_queries(self.query[r])
            return delta if self.position is None else delta + tile.of_distances(self.position[r])

        n_bits, n_detectors = self.key.shape[:2]
        shape = (n_detectors, self._pairs.samples, self._pairs.n_pairs)
        return closest([delta(r) for r in range(n_bits)], shape, self.key.dtype, self._epsilon)

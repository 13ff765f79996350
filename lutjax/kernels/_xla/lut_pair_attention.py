"""`lutjax.lut_pair_attention` in plain JAX, tile by tile.

A comparison of two parts of ``z = [key, query, position]`` is a sum of one term per part, of which at most
two are not zero; so the terms are computed once for each place, and added for each pair. Such sums are exact.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels._xla import _pairs, _rows
from lutjax.kernels._xla.detect import closest, closest_pair
from lutjax.kernels.registry import Device


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
    segments = (query_segments, key_segments)
    pairs = _pairs.plan(x, keys, weights, start, window, segments, device)
    terms = Terms(pairs, x, keys, anchors, positions, interleave, epsilon)

    def body(tile: _pairs.Tile, y: jax.Array) -> jax.Array:
        rows = _rows.sum_rows(weights, _rows.flat(terms.detect(tile).index), accumulate)
        return tile.add_rows(y, rows)

    y = zeros_varying(x, pairs.padded_shape(weights.shape[-1]), addend_dtype(weights.dtype, accumulate))
    return result(pairs.unpadded_rows(pairs.for_each_tile(body, y)), weights.dtype, accumulate)


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
    segments = (query_segments, key_segments)
    pairs = _pairs.plan(x, keys, weights, start, window, segments, device)
    terms = Terms(pairs, x, keys, anchors, positions, interleave, epsilon)
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
        rows = index, _rows.flat(d.index ^ d.flip)
        (difference,) = _rows.differences(weights, rows, dy_pair, device, accumulate)
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


class Terms:
    """What each place contributes to each comparison: ``[C, T, ...places]`` of keys, queries and positions."""

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
        self._pairs, self._epsilon = pairs, epsilon
        self._n_inputs = n_inputs = x.shape[-1]
        n_bits = 0 if positions is None else positions.shape[-1]
        ids = jnp.clip(anchors, 0, 2 * n_inputs + n_bits - 1).transpose(2, 1, 0)  # [end, C, T]
        if interleave:
            self._part, self._id = ids % 3, ids // 3
        else:
            self._part = jnp.minimum(ids // max(n_inputs, 1), 2)
            self._id = ids - self._part * n_inputs
        dtype = accumulator(*(a.dtype for a in (x, positions) if a is not None))
        self.key = pairs.padded_keys(self._of_inputs(keys.astype(dtype), 0))
        self.query = pairs.padded_queries(self._of_inputs(x.astype(dtype), 1))
        self.position = None
        if positions is not None:
            self._positions_shape = positions.shape
            self.position = self._of_positions(positions.astype(dtype))

    def detect(self, tile: _pairs.Tile) -> Detection:
        """The detection of every pair of a tile, ``[T, samples, pairs]``."""

        def delta(r: int) -> jax.Array:
            delta = tile.of_keys(self.key[r]) + tile.of_queries(self.query[r])
            return delta if self.position is None else delta + tile.of_distances(self.position[r])

        n_bits, n_detectors = self.key.shape[:2]
        shape = (n_detectors, self._pairs.samples, self._pairs.n_pairs)
        return closest([delta(r) for r in range(n_bits)], shape, self.key.dtype, self._epsilon)

    def to_x(self, total: jax.Array, part: int) -> jax.Array:
        """Cotangent of the inputs ``[B, L, I]`` from that of their terms ``[C, T, B, L]``."""
        flat = total.reshape(*total.shape[:2], math.prod(total.shape[2:]))
        # One row more for the ends that lie in other parts.
        dx = zeros_varying(total, (self._n_inputs + 1, flat.shape[-1]), total.dtype)
        for end, sign in ((0, flat), (1, -flat)):
            at = jnp.where(self._part[end] == part, self._id[end], self._n_inputs)
            dx = _rows.add(dx, (at,), sign)
        return jnp.moveaxis(dx[:-1].reshape(self._n_inputs, *total.shape[2:]), 0, -1)

    def to_positions(self, total: jax.Array) -> jax.Array:
        """Cotangent of the positions ``[distances, T or 1, N]`` from that of their terms ``[C, T, distances]``."""
        n_distances, n_detectors, n_bits = self._positions_shape
        dp = zeros_varying(total, (n_detectors, n_bits + 1, n_distances), total.dtype)
        detector = self._position_detector(total.shape[1])
        for end, sign in ((0, total), (1, -total)):
            at = jnp.where(self._part[end] == 2, self._id[end], n_bits)
            dp = _rows.add(dp, (detector, at), sign)
        return dp[:, :-1].transpose(2, 0, 1)

    def _of_inputs(self, values: jax.Array, part: int) -> jax.Array:
        by_input = jnp.moveaxis(values, -1, 0)
        n_inputs = self._n_inputs

        def end(e: int) -> jax.Array:
            ids = jnp.clip(self._id[e], 0, n_inputs - 1)
            of = _rows.read(by_input, ids)
            return jnp.where((self._part[e] == part)[..., None, None], of, 0)

        return end(0) - end(1)

    def _of_positions(self, values: jax.Array) -> jax.Array:
        n_bits = values.shape[-1]
        by_bit = values.transpose(1, 2, 0)  # [T or 1, N, distances]
        detector = self._position_detector(self._id.shape[-1])

        def end(e: int) -> jax.Array:
            if n_bits == 0:
                return jnp.zeros((*self._id.shape[1:], values.shape[0]), values.dtype)
            ids = jnp.clip(self._id[e], 0, n_bits - 1)
            of = _rows.read(by_bit, detector, ids)
            return jnp.where((self._part[e] == 2)[..., None], of, 0)

        return end(0) - end(1)

    def _position_detector(self, n_detectors: int) -> jax.Array:
        """Which detector's positions each detector reads, ``[1, T]``."""
        at = jnp.arange(n_detectors, dtype=jnp.int32)[None]
        return at if self._positions_shape[1] > 1 else jnp.zeros_like(at)

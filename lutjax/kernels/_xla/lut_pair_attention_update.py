"""Updates after `lutjax.lut_pair_attention` in plain JAX."""

from typing import Any

import jax

from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._xla import _pairs, _rows, _updates
from lutjax.kernels._xla.lut_pair_attention import TiledTerms
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    dy: jax.Array,
    x: jax.Array,
    keys: jax.Array,
    anchors: jax.Array,
    positions: jax.Array | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    interleave: bool,
    window: int | None,
    epsilon: float,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    visit, n_hits = hits(
        weights,
        dy,
        x,
        keys,
        anchors,
        positions,
        start,
        query_segments,
        key_segments,
        interleave=interleave,
        window=window,
        epsilon=epsilon,
        device=device,
    )
    return _updates.update(
        weights, state, rate, factor, visit, n_hits, rule=rule, accumulate=accumulate, device=device
    )


def hits(
    weights: jax.Array,
    dy: jax.Array,
    x: jax.Array,
    keys: jax.Array,
    anchors: jax.Array,
    positions: jax.Array | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    interleave: bool,
    window: int | None,
    epsilon: float,
    device: Device,
) -> tuple[_updates.Visit, int]:
    """See `lutjax.kernels._xla.lookup_update.hits`."""
    segments = (query_segments, key_segments)
    pairs = _pairs.plan(x, keys, weights, start, window, segments, device)
    dy = pairs.padded_rows(dy.astype(accumulator(weights.dtype)))

    def visit(detectors: _updates.Detectors, body: _updates.Body, carry: Any) -> Any:
        of_group = positions
        if positions is not None and positions.shape[1] > 1:
            of_group = detectors(positions, 1)
        terms = TiledTerms(pairs, x, keys, detectors(anchors), of_group, interleave, epsilon)

        def tile(tile: _pairs.Tile, carry: Any) -> Any:
            return body(carry, _rows.flat(terms.detect(tile).index), tile.of_rows(dy), tile.counted())

        return pairs.for_each_tile(tile, carry)

    return visit, pairs.n_visited

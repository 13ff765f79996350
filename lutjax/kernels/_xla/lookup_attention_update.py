"""Updates after `lutjax.lookup_attention` in plain JAX."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._xla import _pairs, _rows, _updates
from lutjax.kernels._xla.lookup_attention import RowIds
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    dy: jax.Array,
    query: Detection,
    key: Detection,
    position: Detection | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    window: int | None,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    visit, n_hits = hits(
        weights, dy, query, key, position, start, query_segments, key_segments, window=window, device=device
    )
    return _updates.update(
        weights, state, rate, factor, visit, n_hits, rule=rule, accumulate=accumulate, device=device
    )


def hits(
    weights: jax.Array,
    dy: jax.Array,
    query: Detection,
    key: Detection,
    position: Detection | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    window: int | None,
    device: Device,
) -> tuple[_updates.Visit, int]:
    """See `lutjax.kernels._xla.lookup_update.hits`."""
    segments = (query_segments, key_segments)
    pairs = _pairs.plan(query.index, key.index, weights, start, window, segments, device)
    row = RowIds(pairs, query, key, position)
    dy = pairs.padded_rows(dy.astype(accumulator(weights.dtype)))

    def visit(detectors: _updates.Detectors, body: _updates.Body, carry: Any) -> Any:
        of_group = row.of(detectors)

        def tile(tile: _pairs.Tile, carry: Any) -> Any:
            return body(carry, _rows.flat(of_group(tile)), tile.of_rows(dy), tile.counted())

        return pairs.for_each_tile(tile, carry)

    return visit, pairs.n_visited

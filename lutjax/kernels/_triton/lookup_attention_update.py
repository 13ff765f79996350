"""Updates after `lutjax.lookup_attention` in Triton."""

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._triton import _updates, lookup_attention
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
    pairs = lookup_attention.Pairs.of(
        weights, query, key, position, start, query_segments, key_segments, window=window
    )

    def add(addition: _updates.Addition, accumulate: FixedPoint | None) -> tuple[jax.Array, ...]:
        return lookup_attention.add_rows(addition, accumulate, pairs, dy, device)

    return _updates.update(weights, state, rate, factor, add, rule=rule, accumulate=accumulate, device=device)

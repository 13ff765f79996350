"""Updates after `lutjax.lookup_attention` in Triton."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._triton import _updates, lookup_attention
from lutjax.kernels._triton._pairs import Pairs
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
    return forward_by(
        lookup_attention.add_rows,
        weights,
        state,
        rate,
        factor,
        dy,
        (query, key, position, start, query_segments, key_segments),
        window=window,
        rule=rule,
        accumulate=accumulate,
        device=device,
    )


def forward_by(
    add_rows: lookup_attention.AddRows,
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    dy: jax.Array,
    detections: tuple[Any, ...],
    *,
    window: int | None,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    pairs = Pairs.of(weights, *detections, window=window)

    def add(addition: _updates.Addition, accumulate: FixedPoint | None) -> tuple[jax.Array, ...]:
        return add_rows(addition, accumulate, pairs, dy, device)

    return _updates.update(weights, state, rate, factor, add, rule=rule, accumulate=accumulate, device=device)

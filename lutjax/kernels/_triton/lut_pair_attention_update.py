"""Updates after `lutjax.lut_pair_attention` in Triton."""

import jax

from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._triton import _updates, lut_pair_attention
from lutjax.kernels._xla._terms import Terms
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
    terms = Terms(x, keys, anchors, positions, interleave)
    pairs = lut_pair_attention.Pairs(terms, weights, start, query_segments, key_segments, window, epsilon)

    def add(addition: _updates.Addition, accumulate: FixedPoint | None) -> tuple[jax.Array, ...]:
        return lut_pair_attention.add_rows(addition, accumulate, pairs, dy, device)

    return _updates.update(weights, state, rate, factor, add, rule=rule, accumulate=accumulate, device=device)

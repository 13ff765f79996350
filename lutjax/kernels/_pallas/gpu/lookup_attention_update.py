"""Updates after `lutjax.lookup_attention` in Mosaic GPU, for long texts."""

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._pallas.gpu import lookup_attention
from lutjax.kernels._triton import lookup_attention_update as in_triton
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
    return in_triton.forward_by(
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

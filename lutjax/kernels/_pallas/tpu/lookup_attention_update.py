"""Updates after `lutjax.lookup_attention` on TensorCores: the gradient, scaled, is added in the table's own memory."""

import jax
import jax.numpy as jnp

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._pallas.tpu import lookup_attention
from lutjax.kernels._pallas.tpu._attention import Plan
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
    plan = Plan.of(weights, query, key, position)
    if plan.empty:
        return weights, state
    step = -rate.astype(jnp.float32)
    if factor is not None:
        step = step * factor.astype(jnp.float32)
    pairs = lookup_attention.Pairs(plan, query, key, position, start, query_segments, key_segments, window)
    return lookup_attention.add_rows(pairs, step * dy.astype(jnp.float32), weights, device), state

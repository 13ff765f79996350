"""Updates after `lutjax.lookup` on TensorCores."""

import jax
import jax.numpy as jnp

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._pallas.tpu import _products, lookup
from lutjax.kernels._xla import lookup_update as plain
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    dy: jax.Array,
    detection: Detection,
    *,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    if 0 in (weights.size, detection.index.size):
        return plain.forward(
            weights, state, rate, factor, dy, detection, rule=rule, accumulate=accumulate, device=device
        )
    step = rate if factor is None else rate * factor
    if rule.additive and weights.dtype == jnp.float32:
        values = -step * dy.astype(jnp.float32)
        return lookup.add_rows(weights, weights.shape, detection.index, values, device), state
    gradient = lookup.add_rows(None, weights.shape, detection.index, dy, device)
    return _products.moved(weights, gradient, detection.index, rate, factor, rule), state

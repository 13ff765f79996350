"""Updates after `lutjax.lookup` in Mosaic GPU: of small tables, whose gradient as an array costs little."""

import jax
import jax.numpy as jnp

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._pallas.gpu import _one_hot
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
    if 0 in (*weights.shape, len(dy)):
        return plain.forward(
            weights, state, rate, factor, dy, detection, rule=rule, accumulate=accumulate, device=device
        )
    step = -rate.astype(jnp.float32)
    if factor is not None:
        step *= factor.astype(jnp.float32)
    # Rows that no sample read have sums of zero, and stay as they are.
    sums = _one_hot.add_rows(detection.index.T, dy, weights.shape[1])
    return (weights.astype(jnp.float32) + step * sums).astype(weights.dtype), state

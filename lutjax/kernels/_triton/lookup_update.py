"""Updates after `lutjax.lookup` in Triton."""

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._triton import _updates, lookup
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

    def add(addition: _updates.Addition, accumulate: FixedPoint | None) -> tuple[jax.Array, ...]:
        return lookup.add_rows(addition, accumulate, weights, detection, dy, device)

    return _updates.update(weights, state, rate, factor, add, rule=rule, accumulate=accumulate, device=device)

"""Updates after `lutjax.sparse_lookup` in Triton."""

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._triton import _rows, sparse_lookup
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    dy: jax.Array,
    detection: Detection,
    targets: jax.Array,
    *,
    n_outputs: int,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    step = _rows.step(rate, factor)
    return sparse_lookup.add_rows(weights, detection, targets, dy, step, None, device), state

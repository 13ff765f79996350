"""Updates after `lutjax.sparse_lookup` on TensorCores: of the edges, by the gradient of the whole table."""

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._pallas.tpu import _products, lookup
from lutjax.kernels._xla import sparse_lookup_update as plain
from lutjax.kernels._xla.sparse_lookup import of_edges
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
    if 0 in (weights.size, detection.index.size, dy.size):
        return plain.forward(
            weights,
            state,
            rate,
            factor,
            dy,
            detection,
            targets,
            n_outputs=n_outputs,
            rule=rule,
            accumulate=accumulate,
            device=device,
        )
    gradient = lookup.add_rows(None, (*weights.shape[:2], n_outputs), detection.index, dy, device)
    gradient = of_edges(gradient, targets, n_outputs)
    return _products.moved(weights, gradient, detection.index, rate, factor, rule), state

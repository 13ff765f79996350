"""Updates after `lutjax.lookup` in plain JAX."""

from typing import Any

import jax

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._xla import _updates
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
    visit, n_hits = hits(weights, dy, detection, device=device)
    return _updates.update(
        weights, state, rate, factor, visit, n_hits, rule=rule, accumulate=accumulate, device=device
    )


def hits(
    weights: jax.Array, dy: jax.Array, detection: Detection, *, device: Device
) -> tuple[_updates.Visit, int]:
    """How the hits of a call are visited, and how many a detector has at most."""
    index = detection.index.T

    def visit(detectors: _updates.Detectors, body: _updates.Body, carry: Any) -> Any:
        return body(carry, detectors(index), dy, None)

    return visit, dy.shape[0]

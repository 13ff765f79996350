"""Updates after `lutjax.sparse_lookup` in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._xla import _updates
from lutjax.kernels._xla._rows import clamped, read
from lutjax.kernels._xla.sparse_lookup import with_unused
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
    visit, n_hits = hits(weights, dy, detection, targets, n_outputs=n_outputs, device=device)
    return _updates.update(
        weights, state, rate, factor, visit, n_hits, rule=rule, accumulate=accumulate, device=device
    )


def hits(
    weights: jax.Array,
    dy: jax.Array,
    detection: Detection,
    targets: jax.Array,
    *,
    n_outputs: int,
    device: Device,
) -> tuple[_updates.Visit, int]:
    """See `lutjax.kernels._xla.lookup_update.hits`."""
    index = clamped(weights, detection.index.T)
    targets, dy = with_unused(targets, dy)
    sample = jnp.arange(dy.shape[0], dtype=jnp.int32)[:, None]

    def visit(detectors: _updates.Detectors, body: _updates.Body, carry: Any) -> Any:
        rows = detectors(index)
        lists = detectors(targets) if targets.shape[0] > 1 else targets
        number = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
        outputs = read(
            lists,
            number if lists.shape[0] > 1 else 0,
            rows if lists.shape[1] > 1 else jnp.zeros_like(rows),
        )
        return body(carry, rows, read(dy, sample, outputs), None)

    return visit, dy.shape[0]

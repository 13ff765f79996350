"""Sparse table outputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lutjax import _meshes
from lutjax.ops import _checks
from lutjax.values._ids import as_int32


def check_targets(op: str, weights: Any, targets: Any, n_outputs: Any) -> int:
    """Check targets ``[T or 1, R or 1, K]`` for tables ``[T, R, K]``; return the output count."""
    _checks.integers(op, "targets", targets, 3, "[detectors or 1, rows or 1, slots]")
    n_detectors, n_rows, n_slots = weights.shape
    fits = (
        targets.shape[0] in (1, n_detectors)
        and targets.shape[1] in (1, n_rows)
        and targets.shape[2] == n_slots
    )
    _checks.require(
        fits, op, "targets", targets, f"expected [{n_detectors} or 1, {n_rows} or 1, {n_slots}]"
    )
    n = _checks.integer(op, "n_outputs", n_outputs)
    _checks.require(n >= 0, op, "n_outputs", n, "it must not be negative")
    _checks.require(n < 2**31, op, "n_outputs", n, "output ids are int32")
    _checks.ids(op, "targets", targets, n, "outputs", unused=True)
    return n


NOT_READ = (
    "reads no targets: in attention, rows that reach some of the outputs are for plain JAX, "
    "native kernels and Triton"
)
"""Why other implementations do not run attention with targets."""


def split_row_targets(
    op: str, weights: Any, targets: Any, n_outputs: int | None
) -> tuple[dict[str, Any], Callable[[jax.Array], jax.Array]]:
    """Return call fields for row targets, and a function to finish the call's outputs.

    Fields exist only for per-row targets. With one target list for all rows, slots are summed like
    outputs and then added at their targets.
    """
    if targets is None:
        rule = "it is that of targets, which are not given"
        _checks.require(n_outputs is None, op, "n_outputs", n_outputs, rule)
        return {}, lambda y: y
    _checks.floats(op, "weights", weights, 3, "[detectors, rows, slots]")
    if n_outputs is None:
        raise ValueError(
            f"{op}: targets is {_checks.describe(targets)} but n_outputs is not given."
        )
    n = check_targets(op, weights, targets, n_outputs)
    ids = as_int32(targets)
    # One list for all rows: slots are summed like outputs, and scattered once per sample.
    if ids.shape[:2] != (1, 1):
        return {"targets": ids, "n_outputs": n}, lambda y: y
    # Unused slots get the id `n`, and additions out of range are dropped.
    ids = jnp.where(ids < 0, n, jnp.minimum(ids, n - 1))[0, 0]

    def scatter_slots(slots: jax.Array, ids: jax.Array) -> jax.Array:
        """Add slots ``[..., K]`` to zeros ``[..., n]``."""
        zeros = jnp.zeros_like(slots, shape=(*slots.shape[:-1], n))
        return zeros.at[..., ids].add(slots, mode="drop")

    def laid_out(slots: jax.Array, ids: jax.Array) -> PartitionSpec:
        del ids
        return _meshes.spec_of(slots)

    add = _meshes.shard_by_compiler(scatter_slots, laid_out)
    return {}, lambda y: add(y, ids)

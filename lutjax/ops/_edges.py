"""Edges of tables: rows that reach only some of the outputs."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lutjax import _meshes
from lutjax._ids import as_int32, as_jax
from lutjax.ops import _checks


def checked(op: str, weights: Any, targets: Any, n_outputs: Any) -> int:
    """Return the number of outputs, after checking targets ``[T or 1, R or 1, K]`` of tables ``[T, R, K]``."""
    _checks.integers(op, "targets", targets, 3, "[detectors or 1, rows or 1, slots]")
    n_detectors, n_rows, n_slots = weights.shape
    fits = (
        targets.shape[0] in (1, n_detectors)
        and targets.shape[1] in (1, n_rows)
        and targets.shape[2] == n_slots
    )
    _checks.require(fits, op, "targets", targets, f"expected [{n_detectors} or 1, {n_rows} or 1, {n_slots}]")
    n = operator.index(n_outputs)
    _checks.require(n >= 0, op, "n_outputs", n, "it must not be negative")
    return n


def spread(
    op: str, weights: Any, targets: Any, n_outputs: int | None
) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """Return tables of an op that adds whole rows, and what makes the outputs of its outputs, where rows have targets.

    With one list of targets for all rows the tables are those of its slots, and outputs are added at their targets. Otherwise the tables
    are ``[T, R, n_outputs]``, zero where no slot reaches.
    """
    if targets is None:
        _checks.require(
            n_outputs is None, op, "n_outputs", n_outputs, "it is that of targets, which are not given"
        )
        return weights, lambda y: y
    _checks.floats(op, "weights", weights, 3, "[detectors, rows, slots]")
    if n_outputs is None:
        raise ValueError(f"{op}: targets is {_checks.describe(targets)} but n_outputs is not given.")
    n = checked(op, weights, targets, n_outputs)
    weights, ids = as_jax(weights), as_int32(targets)
    ids = jnp.where(ids < 0, n, jnp.minimum(ids, n - 1))  # what is added beyond the end is dropped

    def at(slots: jax.Array, ids: jax.Array) -> jax.Array:
        """Add slots ``[..., K]`` to zeros ``[..., n]``."""
        zeros = jnp.zeros_like(slots, shape=(*slots.shape[:-1], n))
        if ids.ndim == 1:
            return zeros.at[..., ids].add(slots, mode="drop")
        t, r = (jax.lax.broadcasted_iota(jnp.int32, slots.shape, axis) for axis in (0, 1))
        return zeros.at[t, r, jnp.broadcast_to(ids, slots.shape)].add(slots, mode="drop")

    def laid_out(slots: jax.Array, ids: jax.Array) -> PartitionSpec:
        del ids
        return _meshes.spec_of(slots)

    add = _meshes.divided_by_compiler(at, laid_out)
    if ids.shape[:2] == (1, 1):
        return weights, lambda y: add(y, ids[0, 0])
    return add(weights, ids), lambda y: y

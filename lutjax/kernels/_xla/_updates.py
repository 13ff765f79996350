"""Moving the rows of tables in their own memory, from the look-ups that touched them.

A look-up is seen here as hits: detector `t` read row ``index[t, i]``, whose gradient receives ``values[i]`` (or
``values[t, i]``). A kernel enumerates them tile by tile; `update` does the rest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._dtypes import accumulator
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._xla import _rows
from lutjax.kernels.registry import Device

_SCRATCH = 2**24  # numbers that the gradients of a group of detectors may take

Detectors = Callable[..., jax.Array]
"""Takes a group of detectors out of an array: ``detectors(a, axis=0)``."""

Body = Callable[[Any, jax.Array, jax.Array, jax.Array | None], Any]
"""``carry, index [group, n], values [n or group, n, O], counts [n] or None -> carry``; the values of hits that do
not count are zero."""


Visit = Callable[[Detectors, Body, Any], Any]
"""Passes a carry through a body for every tile of hits of a group of detectors."""


def update(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    visit: Visit,
    n_hits: int,
    *,
    rule: RowRule,
    device: Device,
) -> tuple[jax.Array, RowState]:
    """Tables ``[T, R, O]`` and the state of their rows after one step.

    Args:
      visit: see `Visit`. n_hits: of one detector, at most.
    """
    dtype = accumulator(weights.dtype)
    rate = rate.astype(dtype)
    if rule.additive and dtype == weights.dtype:

        def add(total: jax.Array, index: jax.Array, values: jax.Array, counts: Any) -> jax.Array:
            return _rows.add_rows(total, index, -rate * values.astype(dtype), device)

        return visit(lambda a, axis=0: a, add, weights), state

    # A row moves by the sum over all its hits. That is made for a group of detectors at a time, in an array as
    # long as their tables or as their hits, whatever is shorter.
    n_detectors, n_rows, n_outputs = weights.shape
    length = min(n_rows, n_hits)
    size = 1 if _rows.in_sequence(device) else _divisor(n_detectors, _SCRATCH // max(length * n_outputs, 1))
    move = _move_all if length == n_rows else _move_hit

    def step(carry: Any, first: jax.Array) -> tuple[Any, None]:
        tables, last_hit = carry
        group = _Group(first, size, n_rows, n_hits)
        return move(group, tables, last_hit, rate, visit, rule), None

    # The last hit of each row; what earlier groups leave there is never read.
    last_hit = zeros_varying(weights, (size, n_rows if move is _move_hit else 0), jnp.int32)
    firsts = jnp.arange(0, n_detectors, size, dtype=jnp.int32)
    ((weights, state), _), _ = jax.lax.scan(step, ((weights, state), last_hit), firsts)
    return weights, state


@dataclasses.dataclass(frozen=True)
class _Group:
    """Some detectors, one after the other."""

    first: jax.Array
    size: int
    n_rows: int
    n_hits: int

    @property
    def numbers(self) -> jax.Array:
        return jnp.arange(self.size, dtype=jnp.int32)[:, None]

    def of(self, a: jax.Array, axis: int = 0) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(a, self.first, self.size, axis)

    def rows(self, index: jax.Array, counts: jax.Array | None) -> jax.Array:
        """Row ids that exist, or one past the last for hits that do not count."""
        rows = jnp.clip(index, 0, self.n_rows - 1)
        return rows if counts is None else jnp.where(counts, rows, self.n_rows)

    def add(self, gradient: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
        values = jnp.broadcast_to(values.astype(gradient.dtype), (*at.shape, gradient.shape[-1]))
        return gradient.at[self.numbers, at].add(values, mode="drop")


def _move_all(
    group: _Group, tables: Any, last_hit: jax.Array, rate: jax.Array, visit: Visit, rule: RowRule
) -> Any:
    """Gradients as arrays of the shape of the group's tables."""
    weights, state = tables
    shape = (group.size, *weights.shape[1:])

    def add(total: Any, index: jax.Array, values: jax.Array, counts: Any) -> Any:
        gradient, touched = total
        at = group.rows(index, counts)
        if touched is not None:
            touched = touched.at[group.numbers, at].set(True, mode="drop")
        return group.add(gradient, at, values), touched

    touched = zeros_varying(weights, shape[:2], jnp.bool_) if rule.moves_without_gradient else None
    total = (zeros_varying(weights, shape, rate.dtype), touched)
    gradient, touched = visit(group.of, add, total)
    old = jax.tree.map(group.of, (weights, state))
    new = _step(rule, old, gradient, rate)
    if touched is not None:
        new = jax.tree.map(lambda n, o: jnp.where(touched[..., None], n, o), new, old)
    moved = jax.tree.map(
        lambda a, n: jax.lax.dynamic_update_slice_in_dim(a, n, group.first, 0), (weights, state), new
    )
    return moved, last_hit


def _move_hit(
    group: _Group, tables: Any, last_hit: jax.Array, rate: jax.Array, visit: Visit, rule: RowRule
) -> Any:
    """Gradients of the rows that were hit only: each is where the row's last hit is in the list of hits."""
    weights, state = tables
    number = group.numbers

    def remember(carry: Any, index: jax.Array, values: jax.Array, counts: Any) -> Any:
        last_hit, first = carry
        hits = jnp.broadcast_to(first + jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
        return (
            last_hit.at[number, group.rows(index, counts)].set(hits, mode="drop"),
            first + index.shape[1],
        )

    zero = zeros_varying(weights, (), jnp.int32)
    last_hit, _ = visit(group.of, remember, (last_hit, zero))

    def add(total: Any, index: jax.Array, values: jax.Array, counts: Any) -> Any:
        gradient, row_of = total
        rows = group.rows(index, counts)
        at = last_hit.at[number, rows].get(mode="fill", fill_value=group.n_hits)
        return group.add(gradient, at, values), row_of.at[number, at].set(rows, mode="drop")

    gradient = zeros_varying(weights, (group.size, group.n_hits, weights.shape[2]), rate.dtype)
    nowhere = zeros_varying(weights, (group.size, group.n_hits), jnp.int32) + group.n_rows
    gradient, row_of = visit(group.of, add, (gradient, nowhere))
    at = (group.first + number, row_of)
    old = jax.tree.map(lambda a: a.at[at].get(mode="fill", fill_value=0), (weights, state))
    new = _step(rule, old, gradient, rate)
    moved = jax.tree.map(lambda a, n: a.at[at].set(n, mode="drop"), (weights, state), new)
    return moved, last_hit


def _step(rule: RowRule, old: Any, gradient: jax.Array, rate: jax.Array) -> Any:
    rows, state = old
    moved, state = rule.step(rows.astype(rate.dtype), gradient, state, rate)
    return moved.astype(rows.dtype), state


def _divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` up to a limit, at least 1."""
    return max((d for d in range(1, n + 1) if n % d == 0 and d <= limit), default=1)

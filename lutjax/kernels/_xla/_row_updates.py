"""In-place optimizer updates of table rows, driven by the lookups that read them.

Formula for detector ``t``, row ``r`` and hits ``i``::

    gradient[t, r] = factor * sum over i with index[t, i] == r of values[i]
    weights[t, r], state[t, r] = rule.step(weights[t, r], gradient[t, r], state[t, r], rate)

A hit is one read of a row: detector ``t`` read row ``index[t, i]``, whose gradient receives
``values[i]`` (or ``values[t, i]``). A kernel enumerates its hits tile by tile through a `Visit`
function.

Work: a scan over groups of detectors bounds the scratch memory for gradients to `_SCRATCH` values.
A group accumulates in an array over all rows (where ``R <= hits``) or over its hits: then the first
visit records the last hit of each row, and the second adds all hits of a row at this slot. Additive
rules (plain SGD) need no sum and add every hit to its row directly.

Layout: tables and state are carried through the scan, so XLA updates them in place. CPUs take one
detector per group; other devices take as many as fit the scratch memory.

Numerics: gradients use `addend_dtype`; in fixed point the result does not depend on the order of
hits. Without it, the scatter order of GPUs may change the last bits between runs. Row ids are
clamped; hits that do not count get id ``R``, which a scatter with ``mode="drop"`` ignores.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _row_gathers
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.values._row_rules import DECAY, RowState

_SCRATCH = 2**24  # elements of scratch memory for a group's gradients

Detectors = Callable[..., jax.Array]
"""Selects a group of detectors from an array: ``detectors(a, axis=0)``."""

Body = Callable[[Any, jax.Array, jax.Array, jax.Array | None], Any]
"""``carry, index [group, n], values [n or group, n, O], counts [n] or None -> carry``.

Values are zero for invalid hits.
"""

Visit = Callable[[Detectors, Body, Any], Any]
"""Passes a carry through a body for every tile of a detector group's hits."""


OfRows = Callable[[jax.Array], jax.Array]
"""Selects the updated rows' rates or factors from all rows; results broadcast to these rows."""

Hits = tuple[Visit, int]
"""Hits of a call: the visit function, and the maximum number per detector."""


@runtime_checkable
class Reads(Protocol):
    """Op call that reads tables ``[T, R, O]``."""

    @property
    def weights(self) -> jax.Array: ...
    @property
    def accumulate(self) -> FixedPoint | None: ...


def group_cotangents(
    dy: jax.Array, n_detectors: int, groups: int
) -> Callable[[Detectors], jax.Array]:
    """Return a detector group's cotangents ``[n, O]`` or ``[group, n, O]``, from ``[n, G * O]``."""
    if groups == 1:
        return lambda detectors: dy
    by_group = dy.reshape(dy.shape[0], groups, dy.shape[1] // groups).transpose(1, 0, 2)
    number = jnp.arange(n_detectors, dtype=jnp.int32) // (n_detectors // groups)
    return lambda detectors: _row_gathers.read(by_group, detectors(number))


def update(
    call: Reads, step: Step, visit: Visit, n_hits: int, *, device: Device
) -> tuple[jax.Array, RowState]:
    """Return a call's tables and row state after a step.

    Args:
      visit, n_hits: see `Hits`.
    """
    weights, accumulate, rule = call.weights, call.accumulate, step.rule
    # The decay state has one entry per table, not per row: rules read it, and it is returned
    # unchanged.
    of_tables = {name: a for name, a in step.state.items() if name == DECAY}
    state = {name: a for name, a in step.state.items() if name != DECAY}
    dtype = accumulator(weights.dtype)
    scale = scale_of_additions(call, step)
    # A rule linear in the gradient may add each hit separately, without an array for sums.
    if scale is not None:

        def add(total: jax.Array, index: jax.Array, values: jax.Array, counts: Any) -> jax.Array:
            return _row_gathers.add_rows(total, index, scale * values.astype(dtype), device)

        return visit(lambda a, axis=0: a, add, weights), state

    # Otherwise a row is updated by the sum over all its hits. A group of detectors accumulates sums
    # in an array over its rows or its hits, whichever is shorter.
    n_rows, size = weights.shape[1], _group_size(weights, n_hits, device)
    move = _move_all if _few_rows(weights, n_hits) else _move_hit

    def apply_rule(old: Any, total: jax.Array, of_rows: OfRows) -> Any:
        rows, state = old
        # The factor applies to the complete sum: products with single addends would round
        # differently.
        gradient = _scale_gradient(result(total, dtype, accumulate), step.factor, of_rows)
        state = {**state, **{name: of_rows(a) for name, a in of_tables.items()}}
        # Rules compute in the accumulator dtype; rows in bfloat16 or float16 are rounded once, at
        # the end.
        new, state = rule.step(
            rows.astype(dtype), gradient, state, of_rows(step.rate).astype(dtype)
        )
        return new.astype(rows.dtype), {name: a for name, a in state.items() if name != DECAY}

    def step_group(carry: Any, first: jax.Array) -> tuple[Any, None]:
        tables, last_hit = carry
        group = _Group(first, size, n_rows, n_hits, accumulate, rule.moves_without_gradient)
        return move(group, tables, last_hit, visit, apply_rule), None

    ((weights, state), _), _ = jax.lax.scan(
        step_group,
        ((weights, state), _no_last_hit(weights, size, n_hits)),
        _group_starts(weights, size),
    )
    return weights, {**state, **of_tables}


def scale_of_additions(call: Reads, step: Step) -> jax.Array | None:
    """Return the cotangent factor if hits are added separately; None if rows need the sum."""
    dtype = accumulator(call.weights.dtype)
    if (
        not step.rule.additive
        or step.differs_by_row
        # In fixed point, and with rows narrower than the accumulator, each addition would round;
        # the sum rounds once.
        or call.accumulate is not None
        or dtype != call.weights.dtype
    ):
        return None
    rate = step.rate.astype(dtype)
    return -rate if step.factor is None else -rate * step.factor.astype(dtype)


def _scale_gradient(gradient: jax.Array, factor: jax.Array | None, of_rows: "OfRows") -> jax.Array:
    return gradient if factor is None else gradient * of_rows(factor).astype(gradient.dtype)


def squared_norm(
    call: Reads, visit: Visit, n_hits: int, factor: jax.Array | None = None, *, device: Device
) -> jax.Array:
    """Return the squared norm of a call's table gradient; only the table shape matters.

    Gradients are summed group by group as in `update`, and none is kept.

    Args:
      factor: gradient factor, see `lutjax.dispatch.contract.Step`.
    """
    weights, accumulate = call.weights, call.accumulate
    dtype = accumulator(weights.dtype)
    n_rows, size = weights.shape[1], _group_size(weights, n_hits, device)

    def add_group(carry: Any, first: jax.Array) -> tuple[Any, None]:
        total, last_hit = carry
        group = _Group(first, size, n_rows, n_hits, accumulate, False)
        if _few_rows(weights, n_hits):
            sums, _ = _sums_of_all(group, weights, visit)
            of_rows = group.all_scales
        else:
            sums, row_of, last_hit = _sums_of_hit(group, weights, last_hit, visit)
            of_rows = functools.partial(group.hit_scales, row_of)
        gradient = _scale_gradient(result(sums, dtype, accumulate), factor, of_rows)
        return (total + jnp.sum(jnp.square(gradient)), last_hit), None

    # The carry holds a scalar and scratch only: the gradient of all tables never exists.
    start = zeros_varying(weights, (), dtype), _no_last_hit(weights, size, n_hits)
    return jax.lax.scan(add_group, start, _group_starts(weights, size))[0][0]


def counts(call: Reads, visit: Visit) -> jax.Array:
    """Count the hits per row: int32 ``[T, R]``. Only the table shape matters."""
    n_detectors, n_rows, _ = call.weights.shape
    group = _Group(jnp.int32(0), n_detectors, n_rows, 0, call.accumulate, False)

    def add(total: jax.Array, index: jax.Array, values: jax.Array, counts: Any) -> jax.Array:
        # Hits that do not count have an id behind the last row; the scatter drops them.
        return total.at[group.column, group.rows(index, counts)].add(jnp.int32(1), mode="drop")

    start = zeros_varying(call.weights, (n_detectors, n_rows), jnp.int32)
    result: jax.Array = visit(lambda a, axis=0: a, add, start)
    return result


def _group_size(weights: jax.Array, n_hits: int, device: Device) -> int:
    n_detectors, n_rows, n_outputs = weights.shape
    # One detector at a time keeps its rows and gradient in the cache of a CPU.
    if _row_gathers.in_sequence(device):
        return 1
    length = n_rows if _few_rows(weights, n_hits) else n_hits
    # A divisor: all groups have one size, and the scan needs no remainder.
    return _divisor(n_detectors, _SCRATCH // max(length * n_outputs, 1))


def _few_rows(weights: jax.Array, n_hits: int) -> bool:
    """Return True if gradients should cover all rows.

    Always True with a symbolic number of hits in an export.
    """
    return not isinstance(n_hits, int) or weights.shape[1] <= n_hits


def _group_starts(weights: jax.Array, size: int) -> jax.Array:
    return jnp.arange(0, weights.shape[0], size, dtype=jnp.int32)


def _no_last_hit(weights: jax.Array, size: int, n_hits: int) -> jax.Array:
    """Return scratch memory for the last hit of each row."""
    # Sums over all rows need no record of last hits. Reusing one array for all groups is safe
    # because the first visit writes every entry that the second one reads.
    n_rows = 0 if _few_rows(weights, n_hits) else weights.shape[1]
    return zeros_varying(weights, (size, n_rows), jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Consecutive detectors with joint row updates."""

    first: jax.Array
    size: int
    n_rows: int
    n_hits: int
    accumulate: FixedPoint | None
    moves_without_gradient: bool

    @property
    def column(self) -> jax.Array:
        return jnp.arange(self.size, dtype=jnp.int32)[:, None]

    def slice(self, a: jax.Array, axis: int = 0) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(a, self.first, self.size, axis)

    def all_scales(self, a: jax.Array) -> jax.Array:
        """Return rates or factors of all rows: scalar or ``[group or 1, R or 1, O or 1]``."""
        return self.slice(a) if a.ndim and a.shape[0] > 1 else a

    def hit_scales(self, row_of: jax.Array, a: jax.Array) -> jax.Array:
        """Return rates or factors of rows ``[group, n]``, scalar or ``[group or 1, n, O or 1]``."""
        a = self.all_scales(a)
        if not a.ndim or a.shape[1] == 1:
            return a
        # Unused slots have id R; clipping reads some rate for them, and the final scatter drops the
        # result.
        return a.at[self.column if a.shape[0] > 1 else 0, row_of].get(mode="clip")

    def rows(self, index: jax.Array, counts: jax.Array | None) -> jax.Array:
        """Return clamped row ids, or the number of rows for invalid hits."""
        rows = jnp.clip(index, 0, self.n_rows - 1)
        # One past the last row, not -1: negative ids would wrap.
        return rows if counts is None else jnp.where(counts, rows, self.n_rows)

    def zeros(self, weights: jax.Array, length: int) -> jax.Array:
        """Return zero gradients for `length` rows per detector."""
        return zeros_varying(
            weights,
            (self.size, length, weights.shape[2]),
            addend_dtype(weights.dtype, self.accumulate),
        )

    def add(self, total: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
        # Values are zero where a hit does not count, but the id decides: for rules that move rows
        # without a gradient a hit differs from an addend of zero.
        values = addends(values, self.accumulate).astype(total.dtype)
        values = jnp.broadcast_to(values, (*at.shape, total.shape[-1]))
        return total.at[self.column, at].add(values, mode="drop")


def _move_all(
    group: _Group,
    tables: Any,
    last_hit: jax.Array,
    visit: Visit,
    moved: Callable[[Any, jax.Array, OfRows], Any],
) -> Any:
    """Update all rows in a group from a dense gradient."""
    gradient, touched = _sums_of_all(group, tables[0], visit)
    old = jax.tree.map(group.slice, tables)
    new = moved(old, gradient, group.all_scales)
    if touched is not None:
        # Such rules (with momentum or decay) would also update rows without hits.
        new = jax.tree.map(lambda n, o: jnp.where(touched[..., None], n, o), new, old)
    new = jax.tree.map(
        lambda a, n: jax.lax.dynamic_update_slice_in_dim(a, n, group.first, 0), tables, new
    )
    return new, last_hit


def _sums_of_all(
    group: _Group, weights: jax.Array, visit: Visit
) -> tuple[jax.Array, jax.Array | None]:
    """Return gradients for all rows, and a mask of hit rows if the rule needs it."""

    def add(total: Any, index: jax.Array, values: jax.Array, counts: Any) -> Any:
        gradient, touched = total
        at = group.rows(index, counts)
        if touched is not None:
            touched = touched.at[group.column, at].set(True, mode="drop")
        return group.add(gradient, at, values), touched

    # Only rules that update a row with zero gradient need a mask.
    touched = None
    if group.moves_without_gradient:
        touched = zeros_varying(weights, (group.size, group.n_rows), jnp.bool_)
    sums: tuple[jax.Array, jax.Array | None]
    sums = visit(group.slice, add, (group.zeros(weights, group.n_rows), touched))
    return sums


def _move_hit(
    group: _Group,
    tables: Any,
    last_hit: jax.Array,
    visit: Visit,
    moved: Callable[[Any, jax.Array, OfRows], Any],
) -> Any:
    """Update only the hit rows in a group."""
    gradient, row_of, last_hit = _sums_of_hit(group, tables[0], last_hit, visit)
    # Each row occurs once in row_of, at its last hit; other slots hold R. So the set below has no
    # duplicate ids and its result is defined.
    at = (group.first + group.column, row_of)
    # Slots without a row read zeros, so that no NaN or infinity enters the rule for them.
    old = jax.tree.map(lambda a: a.at[at].get(mode="fill", fill_value=0), tables)
    new = moved(old, gradient, functools.partial(group.hit_scales, row_of))
    return jax.tree.map(lambda a, n: a.at[at].set(n, mode="drop"), tables, new), last_hit


def _sums_of_hit(
    group: _Group, weights: jax.Array, last_hit: jax.Array, visit: Visit
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return gradients at each row's last hit, the rows of these slots, and last hits."""
    number = group.column

    def remember(carry: Any, index: jax.Array, values: jax.Array, counts: Any) -> Any:
        last_hit, first = carry
        hits = jnp.broadcast_to(first + jnp.arange(index.shape[1], dtype=jnp.int32), index.shape)
        # Duplicates within a tile: any winner will do, because every hit of the row reads the
        # winner back.
        last_hit = last_hit.at[number, group.rows(index, counts)].set(hits, mode="drop")
        return last_hit, first + index.shape[1]

    # Two visits: the first one chooses one slot per hit row, the second one sums at this slot.
    last_hit, _ = visit(group.slice, remember, (last_hit, zeros_varying(weights, (), jnp.int32)))

    def add(total: Any, index: jax.Array, values: jax.Array, counts: Any) -> Any:
        gradient, row_of = total
        rows = group.rows(index, counts)
        at = last_hit.at[number, rows].get(mode="fill", fill_value=group.n_hits)
        return group.add(gradient, at, values), row_of.at[number, at].set(rows, mode="drop")

    # Id R marks slots without a row, which the final scatter drops.
    nowhere = zeros_varying(weights, (group.size, group.n_hits), jnp.int32) + group.n_rows
    gradient, row_of = visit(group.slice, add, (group.zeros(weights, group.n_hits), nowhere))
    return gradient, row_of, last_hit


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of `n` up to `most`, at least 1."""
    return next((d for d in range(min(n, most), 1, -1) if n % d == 0), 1)

"""Row loops for tables whose slots reach some of the outputs (`lutjax.sparse_lookup`).

Formula for tables ``weights [T, R, K]`` and targets ``[T or 1, R or 1, K]``::

    sum_rows:     y[b, targets[t, row, k]] += weights[t, row, k]
    differences:  sum over k of weights[t, row, k] * dy[b, targets[t, row, k]]
                  - the same for the other row
    add_rows:     total[t, row, k] += dy[b, targets[t, row, k]]

Work: a scan over tables, all reads of a table at once: no array ``[T, n, K]`` exists.

Layout: cotangents and sums are ``[n, O]`` as in `_row_gathers`, plus one column for unused slots,
which have target ``O``: sums are discarded there and cotangents read a zero.

Numerics: sums use `addend_dtype`. Where both rows reach the same output, values are subtracted
before they are multiplied. Row ids and targets are clamped.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _row_gathers, _row_updates
from lutjax.kernels._xla._row_gathers import add, clamp_rows, detectors, read
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addend_dtype, addends, result


@runtime_checkable
class HasTargets(Protocol):
    """Op call whose rows have targets."""

    @property
    def targets(self) -> jax.Array: ...
    @property
    def n_outputs(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class SlotRows:
    """Table rows with a target output per slot.

    Attributes:
      targets: ``[T or 1, R or 1, K]``; `n_outputs` for unused slots.
    """

    targets: jax.Array
    n_outputs: int

    @classmethod
    def from_call(cls, call: HasTargets) -> "SlotRows":
        # -1 marks an unused slot; other negative ids count as unused, large ids are clamped.
        targets = jnp.clip(call.targets, -1, call.n_outputs - 1)
        return cls(jnp.where(targets < 0, call.n_outputs, targets), call.n_outputs)

    # ------------------------------------------------------------------------------------ one table
    def outputs(self, t: jax.Array, row: jax.Array) -> jax.Array:
        """Return the targets for a table's rows ``[n]``: ``[n, K]``."""
        # Targets shared by tables or rows have one entry there, read with id 0 instead of
        # broadcasting them.
        targets = self.targets
        return read(
            targets,
            t if targets.shape[0] > 1 else 0,
            row if targets.shape[1] > 1 else jnp.zeros_like(row),
        )

    def pad_cotangent(self, dy: jax.Array) -> jax.Array:
        """Append a zero to a cotangent ``[n, O]``, for unused slots."""
        return jnp.pad(dy, ((0, 0), (0, 1)))

    def gather_slots(self, dy: jax.Array, t: jax.Array, row: jax.Array) -> jax.Array:
        """Gather the rows' targets from a padded cotangent ``[n, O + 1]``: ``[n, K]``."""
        return read(dy, _position_column(dy), self.outputs(t, row))

    def change(
        self,
        weights: jax.Array,
        t: jax.Array,
        row: jax.Array,
        other: jax.Array,
        dy: jax.Array,
        accumulate: FixedPoint | None,
    ) -> jax.Array:
        """Sum the addends ``<dy, row - other row>``.

        If both rows reach the same output, values are subtracted before the product.

        Args:
          dy: padded cotangent in the accumulator dtype.
        """

        def values(row: jax.Array) -> jax.Array:
            # Unused slots may contain anything, also NaN: their values are masked, not only
            # multiplied by the zero of the padded cotangent.
            return jnp.where(
                self.outputs(t, row) < self.n_outputs, read(weights, t, row).astype(dy.dtype), 0
            )

        value, other_value, dy_row = values(row), values(other), self.gather_slots(dy, t, row)
        total = addends((value - other_value) * dy_row, accumulate)
        if self.targets.shape[1] > 1:
            apart = addends(value * dy_row, accumulate)
            apart -= addends(other_value * self.gather_slots(dy, t, other), accumulate)
            total = jnp.where(self.outputs(t, row) == self.outputs(t, other), total, apart)
        return jnp.sum(total, -1, dtype=total.dtype)

    # ----------------------------------------------------------------------------------- all tables
    def sum_rows(
        self, weights: jax.Array, index: jax.Array, device: Device, accumulate: FixedPoint | None
    ) -> jax.Array:
        """Sum the addends of all addressed rows at their targets: ``[T, n]`` -> ``[n, O]``."""
        del device

        def step(y: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            t, row = xs
            values = addends(read(weights, t, row), accumulate)
            return add(y, (_position_column(y), self.outputs(t, row)), values), None

        shape = (index.shape[1], self.n_outputs + 1)
        y = zeros_varying(index, shape, addend_dtype(weights.dtype, accumulate))
        # The sums are the carry of a sequential scan: tables add in ascending order, in place.
        y, _ = jax.lax.scan(step, y, (detectors(weights), clamp_rows(weights, index)))
        return y[:, : self.n_outputs]

    def differences(
        self,
        weights: jax.Array,
        index: tuple[jax.Array, ...],
        dy: jax.Array,
        device: Device,
        accumulate: FixedPoint | None,
    ) -> tuple[jax.Array, ...]:
        """Compute ``<dy, row - other row>`` for each read: the first way against each other way.

        ``[T, n]``s, ``[n, O]`` -> ``[T, n]``s.
        """
        del device
        dy = self.pad_cotangent(dy.astype(accumulator(weights.dtype)))

        def step(_: None, xs: tuple[jax.Array, tuple[jax.Array, ...]]) -> tuple[None, Any]:
            t, (row, *others) = xs
            return None, tuple(
                self.change(weights, t, row, other, dy, accumulate) for other in others
            )

        rows = tuple(clamp_rows(weights, i) for i in index)
        _, totals = jax.lax.scan(step, None, (detectors(weights), rows))
        return tuple(result(total, dy.dtype, accumulate) for total in totals)

    def add_rows(
        self, total: jax.Array, index: jax.Array, values: jax.Array, device: Device
    ) -> jax.Array:
        """Add output values ``[n, O]`` to the rows that reach them: ``[T, R, K]``, ``[T, n]``."""
        del device
        values = self.pad_cotangent(values.astype(total.dtype))

        def step(total: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            t, row = xs
            return add(total, (t, row), self.gather_slots(values, t, row)), None

        return jax.lax.scan(step, total, (detectors(total), clamp_rows(total, index)))[0]

    def hits(self, weights: jax.Array, hits: _row_updates.Hits) -> _row_updates.Hits:
        """Convert hits with values for all outputs to hits with values per slot."""
        visit, n_hits = hits

        def visit_slots(group: _row_updates.Detectors, body: _row_updates.Body, carry: Any) -> Any:
            # A group of detectors has its own part of the targets, except where all tables share
            # them.
            lists = SlotRows(
                group(self.targets) if self.targets.shape[0] > 1 else self.targets, self.n_outputs
            )

            def find_hits(
                carry: Any, rows: jax.Array, values: jax.Array, counts: jax.Array | None
            ) -> Any:
                number = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
                rows = clamp_rows(weights, rows)
                return body(
                    carry,
                    rows,
                    lists.gather_slots(self.pad_cotangent(values), number, rows),
                    counts,
                )

            return visit(group, find_hits, carry)

        return visit_slots, n_hits


def _position_column(a: jax.Array) -> jax.Array:
    """Return positions as a column, ``[n, 1]``."""
    return jnp.arange(a.shape[0], dtype=jnp.int32)[:, None]


def rows_of(call: Any) -> Any:
    """Return the loops over the rows of an attention call: of its slots, or of `_row_gathers`."""
    return SlotRows.from_call(call) if isinstance(call, HasTargets) else _row_gathers


def slot_hits(call: Any, hits: _row_updates.Hits) -> _row_updates.Hits:
    """Return hits with values per slot if the rows of an attention call have targets."""
    weights = call.weights
    return SlotRows.from_call(call).hits(weights, hits) if isinstance(call, HasTargets) else hits

"""Watched tables: their lookups leave a record of the gradient instead of computing it.

`lutjax.tables.collect` watches a loss's tables, and ops check for watched tables. A table is
recognized by its identity as a traced value: layers that pass it on keep the identity, and every
operation that changes it makes another value.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import _compat
from lutjax.dispatch._table_reads import Run, TableReads
from lutjax.dispatch.contract import Call


@dataclasses.dataclass(frozen=True)
class Read:
    """Lookup in a watched table: its call with None instead of the table, and its output type."""

    call: Call
    output: Any


class TableUseError(ValueError):
    """Error for a loss that uses a table in a way without a sparse gradient."""


class Watch(TableReads):
    """Watched tables in one evaluation of a loss.

    `tables` are traced values. `taps` has, for each name, a zero with the lookup output's shape and
    a scalar zero; it is None in the first evaluation, which only finds these shapes. `host` names
    host-resident tables.
    """

    def __init__(
        self,
        tables: Mapping[str, jax.Array],
        taps: Mapping[str, tuple[Any, Any]] | None,
        host: Mapping[Any, str] | None = None,
    ):
        self._host = host or {}
        self.ids: dict[str, Any] = {}
        self._names = {id(table): name for name, table in tables.items()}
        self._tables = tables  # kept, so that an id stays that of one object
        self._made: list[jax.Array] = []
        self._taps = taps
        self._trace = _compat.trace_state()
        self.look_ups: dict[str, Read] = {}
        self.factors: dict[str, Any] = {}
        self.unknown: list[tuple[tuple[int, ...], bool]] = []
        """Shapes of unwatched arrays read as tables, flagged if inside another transformation."""

    def name(self, table: Any) -> str | None:
        """Return a table's name; None if it is not watched."""
        name = self._names.get(id(table))
        if name is None:
            self.unknown.append((np.shape(table), _compat.trace_state() != self._trace))
        if name is not None and _compat.trace_state() != self._trace:
            raise TableUseError(
                f"the table {name} is used inside a jit, vmap, scan, checkpoint or shard_map "
                "within the loss; a sparse gradient requires a lookup outside. Transform the "
                "whole training step instead, or remove this table from `tables` to get a dense "
                "gradient."
            )
        return name

    def look_up(self, name: str, call: Call, run: Run) -> jax.Array:
        """Return the output of a call that reads a table; its taps take the table's cotangent."""
        if name in self.look_ups:
            raise TableUseError(
                f"the table {name} is looked up twice in the loss ({self.look_ups[name].call.op}, "
                f"then {call.op}), but a sparse gradient has one lookup. Join the two batches in "
                "one call, or remove this table from `tables` to get a dense gradient."
            )
        field = str(call.table_name)
        # The table has no gradient here: `run` adds the tap, whose gradient is the output's
        # cotangent.
        without = call.replace(**{field: jax.lax.stop_gradient(getattr(call, field))})
        y = run(None if self._taps is None else self._taps[name], without)
        rest = jax.lax.stop_gradient(call.replace(**{field: None}))
        self.look_ups[name] = Read(rest, jax.typeof(y))
        return y

    def stand_in(self, table: Any, made: jax.Array) -> None:
        """Treat an array derived from a table as the table. Both have the same gradient."""
        name = self.name(table)
        if name is not None:
            self._names[id(made)] = name
            self._made.append(made)

    def observe_rows(self, table: Any, rows: jax.Array, index: Any) -> jax.Array:
        """Watch a host-resident table's rows, and keep the ids that read them."""
        name = self._host.get(table)
        if name is None:
            return rows
        if name in self.ids:
            raise TableUseError(
                f"the host-resident table {name} is read twice in the loss, but a sparse gradient "
                "has one lookup. Join the two batches in one call."
            )
        # A new array, because the rows may be an argument that others read too.
        rows = jax.lax.stop_gradient(rows) + jnp.zeros((), rows.dtype)
        self.ids[name] = jax.lax.stop_gradient(index)
        self._names[id(rows)] = name
        self._made.append(rows)
        return rows

    def scale(self, name: str, factor: Any) -> None:
        """Multiply a table's gradient by a factor."""
        before = self.factors.get(name)
        self.factors[name] = jnp.asarray(factor) if before is None else before * factor

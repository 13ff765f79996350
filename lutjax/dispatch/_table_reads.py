"""Observers of table reads.

A loss with sparse table gradients (`lutjax.tables`) observes every read of its tables. Ops know it
only by this interface.
"""

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from lutjax.dispatch.contract import Call

Run = Callable[[tuple[jax.Array, jax.Array] | None, Call], jax.Array]
"""Runs a call, with or without two taps; see `lutjax.dispatch._transforms`."""


class TableReads(abc.ABC):
    """Watched tables, identified by their traced values."""

    @abc.abstractmethod
    def name(self, table: Any) -> str | None:
        """Return a table's name; None if it is not watched."""

    @abc.abstractmethod
    def look_up(self, name: str, call: Call, run: Run) -> jax.Array:
        """Run a call on a watched table and return its output."""

    @abc.abstractmethod
    def stand_in(self, table: Any, made: jax.Array) -> None:
        """Treat an array derived from a table as the table. Both have the same gradient."""

    def observe_rows(self, table: Any, rows: jax.Array, index: Any) -> jax.Array:
        """Return rows that replace a host-resident table: its rows at `index`, in order."""
        return rows

    @abc.abstractmethod
    def scale(self, name: str, factor: Any) -> None:
        """Multiply a table's gradient by a factor."""


_current: ContextVar[TableReads | None] = ContextVar("lutjax_table_reads", default=None)


def current_reads() -> TableReads | None:
    """Return the active observer."""
    return _current.get()


@contextmanager
def observe_reads(reads: TableReads) -> Iterator[None]:
    """Activate an observer in this block."""
    token = _current.set(reads)
    try:
        yield
    finally:
        _current.reset(token)

"""Observers of the reads of tables.

A loss whose gradients of tables are wanted in factors (`lutjax.tables`) takes part in each read of its tables: the ops ask here, and
know no more of it.
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
    """Tables that are watched, by the identity of their traced values."""

    @abc.abstractmethod
    def name(self, table: Any) -> str | None:
        """Return the name of a table; None if it is not watched."""

    @abc.abstractmethod
    def look_up(self, name: str, call: Call, run: Run) -> jax.Array:
        """Return the output of a call that reads a watched table."""

    @abc.abstractmethod
    def stand_in(self, table: Any, made: jax.Array) -> None:
        """Take an array that was made of a table, and whose gradient is that of the table, as the table itself."""

    def fetched(self, table: Any, rows: jax.Array, index: Any) -> jax.Array:
        """Return rows that stand for a table in the memory of the host: those which ids address, one after the other."""
        return rows

    @abc.abstractmethod
    def scale(self, name: str, factor: Any) -> None:
        """Multiply the gradient of a table by one more factor."""


_current: ContextVar[TableReads | None] = ContextVar("lutjax_table_reads", default=None)


def current() -> TableReads | None:
    """Return what is in scope."""
    return _current.get()


@contextmanager
def reported_to(reads: TableReads) -> Iterator[None]:
    """Make it the current one."""
    token = _current.set(reads)
    try:
        yield
    finally:
        _current.reset(token)

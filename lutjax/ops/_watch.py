"""Watched tables: their look-ups leave what the gradient is made of instead of computing it.

`lutjax.training.tables` watches the tables of a loss; the ops ask here whether a table is watched. A table is
known by its identity as a traced value, because that survives any layer that hands it on as it is, and nothing
that changes it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import _compat


@dataclasses.dataclass(frozen=True)
class Output:
    """What a look-up returned: shape, dtype, and the mesh axes over which it varies."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class LookUp:
    """One look-up of a watched table: the op, its arguments without the table, its options, its output."""

    op: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    output: Output


class TableUseError(ValueError):
    """A loss uses a table in a way that has no factored gradient."""


class Watch:
    """The watched tables of one evaluation of a loss.

    Args:
      tables: traced values, by name.
      taps: for each name a zero of the shape of its look-up's output, and a scalar zero; None in the first
        evaluation, which only finds these shapes.
    """

    def __init__(self, tables: Mapping[str, jax.Array], taps: Mapping[str, tuple[Any, Any]] | None):
        self._names = {id(table): name for name, table in tables.items()}
        self._tables = tables  # kept, so that an id stays that of one object
        self._taps = taps
        self._trace = _compat.trace_state()
        self.look_ups: dict[str, LookUp] = {}
        self.factors: dict[str, Any] = {}

    def name(self, table: Any) -> str | None:
        """The name of a table; None if it is not watched."""
        name = self._names.get(id(table))
        if name is not None and _compat.trace_state() != self._trace:
            raise TableUseError(
                f"the table {name} is used inside a jit, vmap, scan, checkpoint or shard_map within the loss; its "
                "factored gradient needs the look-up outside of them. Transform the whole training step "
                "instead, or leave this table out of `tables`: it then has a dense gradient."
            )
        return name

    def tap(self, name: str) -> tuple[Any, Any] | None:
        """The zeros whose cotangents are the look-up's; None in the first evaluation."""
        return None if self._taps is None else self._taps[name]

    def record(self, name: str, look_up: LookUp) -> None:
        """Remembers the look-up of a table."""
        if name in self.look_ups:
            raise TableUseError(
                f"the table {name} is looked up twice in the loss ({self.look_ups[name].op}, then {look_up.op}); a "
                "factored gradient is that of one look-up. Join the two batches into one call, or leave this "
                "table out of `tables`: it then has a dense gradient."
            )
        self.look_ups[name] = look_up

    def scale(self, name: str, factor: Any) -> None:
        """The gradient of a table is multiplied by one more factor."""
        self.factors[name] = self.factors[name] * factor if name in self.factors else jnp.asarray(factor)


_current: ContextVar[Watch | None] = ContextVar("lutjax_watch", default=None)


def current() -> Watch | None:
    """The watch in scope."""
    return _current.get()


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Makes a watch the current one."""
    token = _current.set(watch)
    try:
        yield
    finally:
        _current.reset(token)

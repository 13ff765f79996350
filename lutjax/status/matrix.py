"""Support matrix cells and their meaning."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax

from lutjax import cases
from lutjax.dispatch.contract import Direction
from lutjax.dispatch.registry import KernelSpec, kernel_registry
from lutjax.kernels import _triton
from lutjax.kernels._pallas import gpu, tpu
from lutjax.kernels._pallas._tpus import TPUS


class State(enum.StrEnum):
    """Validation state, strongest first. Shipped results store these values."""

    RUNS = "runs here"
    RAN = "ran"
    COMPILES = "compiles"
    LOWERS = "lowers"
    PARTS = "by its parts"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "not checked"
    FAILS = "fails"
    MISSING = "missing"

    @property
    def word(self) -> str:
        """Word for the state in tables and summaries."""
        return {State.RAN: "validated", State.PARTS: "decomposed"}.get(self, self.value)

    @property
    def is_gap(self) -> bool:
        """Return True if a kernel fails or is missing."""
        return self in (State.FAILS, State.MISSING)


@functools.cache
def first_device(platform: str) -> jax.Device | None:
    """Return the first local device on a platform, or None."""
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError:  # no such backend
        return None


@dataclasses.dataclass(frozen=True)
class Column:
    """Implementation on a device kind.

    Attributes:
      key: implementation name; plain JAX includes the device: ``"xla/tpu"``.
      platform: device platform in `jax.export`. kinds: device kinds for lowering, the default
        first.
    """

    title: str
    key: str
    platform: str
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        """Implementation name without the platform."""
        return self.title.partition(",")[0]

    @property
    def implementation(self) -> str:
        """Return the name of the implementation."""
        return "xla" if self.key.startswith("xla/") else self.key

    @property
    def device(self) -> jax.Device | None:
        """Suitable local device, or None."""
        return first_device(self.platform)

    def spec(self, op: str) -> KernelSpec | None:
        """Return the registered implementation, or None."""
        wanted = self.implementation
        specs = (spec for spec in kernel_registry.candidates(op) if wanted in spec.names)
        return next(specs, None)


_H200, _TPU_KINDS = ("NVIDIA H200",), tuple(tpu.device_kind for tpu in reversed(TPUS))
COLUMNS = (
    Column("XLA, CPU", "xla/cpu", "cpu", ("cpu",)),
    Column("Native, CPU", "native/cpu", "cpu", ("cpu",)),
    Column("XLA, GPU", "xla/gpu", "cuda", _H200),
    Column("XLA, TPU", "xla/tpu", "tpu", _TPU_KINDS),
    Column("Triton", "triton/gpu", "cuda", _H200),
    Column("Pallas, GPU", "pallas/gpu", "cuda", _H200),
    Column("Pallas, TPU", "pallas/tpu", "tpu", _TPU_KINDS),
)


def rows() -> list[tuple[str, Direction]]:
    """Return ops with cases, and their directions."""
    return [
        (op, direction)
        for op in kernel_registry.ops()
        if kernel_registry.cases(op)
        for direction in kernel_registry.directions(op)
    ]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Matrix cell: op, direction, implementation, device kind and dtype.

    Attributes:
      kinds: device kinds for execution, compilation or lowering.
      jax: the version that did. lutjax: the version that was run. date: the day, as ISO 8601 writes
        it.
      reason: why it is unsupported, or how it fails; else what else is to be said.
    """

    op: str
    direction: str
    column: str
    dtype: str
    state: State
    kinds: tuple[str, ...] = ()
    jax: str = ""
    lutjax: str = ""
    reason: str = ""
    date: str = ""

    @property
    def position(self) -> tuple[str, str, str, str]:
        """Matrix position."""
        return self.op, self.direction, self.column, self.dtype

    @property
    def strength(self) -> tuple[int, str]:
        """Sort key among results for one place: stronger states first, then newer dates."""
        return -list(State).index(self.state), self.date

    def __str__(self) -> str:
        on = ", ".join(self.kinds)
        by = f"with lutjax {self.lutjax}, jax {self.jax}" + (f", {self.date}" if self.date else "")
        text = {
            State.RUNS: f"runs here: {on}",
            State.RAN: f"validated on {on} {by}",
            State.COMPILES: f"compiles for {on} {by}",
            State.LOWERS: f"lowers for {on} {by}",
        }.get(self.state, str(self.state))
        return f"{text}: {self.reason}" if self.reason else text


ABSENT: dict[str, Mapping[str, str | gpu.Measured]] = {
    "triton/gpu": _triton.ABSENT,
    "pallas/gpu": gpu.ABSENT,
    "pallas/tpu": tpu.ABSENT,
}
"""Reasons for deliberately missing kernels by column, then by op, direction, or both."""


def absence_reason(op: str, direction: str, column: str) -> str | None:
    """Return the reason, or None for a missing kernel."""
    of_column = ABSENT.get(column, {})
    for key in (f"{op} {direction}", op, direction):
        if key in of_column:
            return str(of_column[key])
    # A fused op without an own kernel still runs by its parts, whose kernels have their own rows.
    decomposed = any(spec.is_decomposition for spec in kernel_registry.candidates(op))
    if decomposed and kernel_registry.announced(op, column) is None:
        return "runs by its parts, which have kernels"
    return None


def all_positions(
    columns: Iterable[Column] = COLUMNS,
) -> Iterator[tuple[str, Direction, Column, str]]:
    """Yield every cell, row by row."""
    for op, direction in rows():
        for column in columns:
            for dtype in cases.find_module(op).dtypes:
                yield op, direction, column, dtype


def absent_cell(op: str, direction: Direction, column: Column, dtype: str) -> Cell | None:
    """Return the cell for an unregistered implementation; None if one is registered."""
    spec = column.spec(op)
    if spec is not None and direction in spec.directions:
        return None
    # A deliberate gap is a reason, an uninstalled package is unknown, and all else is missing.
    reason, state = absence_reason(op, direction, column.key), State.UNSUPPORTED
    if reason is None:
        reason, state = kernel_registry.not_installed(op, column.key), State.UNKNOWN
    if reason is None:
        reason, state = "has no kernel yet", State.MISSING
    return Cell(op, direction, column.key, dtype, state, reason=reason)


def _unknown_cell(op: str, direction: Direction, column: Column, dtype: str) -> Cell:
    """Return the cell for an unchecked implementation.

    In plain JAX a fused op is its parts, ops with their own cells.
    """
    spec = column.spec(op)
    by_parts = spec is not None and spec.is_decomposition
    return Cell(op, direction, column.key, dtype, State.PARTS if by_parts else State.UNKNOWN)


def matrix(
    recorded: dict[tuple[str, str, str, str], Cell],
    check: Callable[[str, Column, str], dict[str, Cell]] | None,
    columns: Iterable[Column] = COLUMNS,
    ops: Iterable[str] | None = None,
) -> Iterator[Cell]:
    """Every cell, row by row.

    Args:
      recorded: by place, see `results.read`.
      check: finds out now what a column says of an op in a dtype, by direction, for each of
        `to_check`; None: only what is recorded.
      columns: wanted columns; by default all.
      ops: wanted ops; by default all.
    """
    keys = set() if check is None else set(to_check(recorded, columns, ops))
    checked: dict[tuple[str, Column, str], dict[str, Cell]] = {}
    for op, direction, column, dtype in all_positions(columns):
        if ops is not None and op not in ops:
            continue
        nothing = absent_cell(op, direction, column, dtype)
        cell = recorded.get((op, direction, column.key, dtype))
        if nothing is not None:
            yield cell if cell is not None and nothing.state == State.UNKNOWN else nothing
            continue
        key = op, column, dtype
        if check is not None and key in keys:
            if key not in checked:
                checked[key] = check(*key)
            cell = checked[key].get(direction, cell)
        yield cell or _unknown_cell(op, direction, column, dtype)


def to_check(
    recorded: dict[tuple[str, str, str, str], Cell],
    columns: Iterable[Column] = COLUMNS,
    ops: Iterable[str] | None = None,
) -> Iterator[tuple[str, Column, str]]:
    """Yield op, column and dtype of all cells that can be checked here or have no result."""
    for op, direction, column, dtype in all_positions(columns):
        if (ops is None or op in ops) and absent_cell(op, direction, column, dtype) is None:
            cell = recorded.get((op, direction, column.key, dtype))
            known = cell is not None and cell.state != State.LOWERS
            if column.device is not None or not known:
                yield op, column, dtype

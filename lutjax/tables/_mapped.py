"""Tables over published files: rows are read in place, and updated rows are kept apart."""

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, Shaped

from lutjax.arguments import format_value
from lutjax.dispatch.registry import Device
from lutjax.tables._codecs import Codec
from lutjax.tables._mapped_rows import MappedRows, Parts, read_scale
from lutjax.tables.gradient import TableGradient
from lutjax.tables.host import HostTable, in_threads, row_slices, take_rows
from lutjax.tables.overlays import Overlay, OverlayError, read_overlay, write_overlay
from lutjax.values._dtypes import accumulator
from lutjax.values._row_rules import RowRule

_FEWEST = 1024
"""Initial number of updated rows that have memory."""

_CHUNK = 2048
"""Fewest rows that a thread decodes."""


class MappedTable(HostTable):
    """A table ``[1, rows, width]`` over read-only maps of published files.

    `fetch` copies the bytes of each row once per batch, and the device decodes them: `gather`
    returns the same float32 values. If rows change, `fetch` returns them too. `update` keeps the
    updated rows, float32, and their optimizer state in memory of their own, and `save` writes them
    as an overlay. The files never change.

    A program that reads a table on a GPU waits for the CPU at each read. Use
    `lutjax.optim.host.RowPrefetcher` where ids are known ahead.

    Args:
      parts, codec, width, scales, layout, trains, overlays, base, name: see
        `lutjax.optim.host.HostTable.mapped`.

    Attributes:
      description: JSON-compatible facts about the files, to give as ``base=`` later.
      layout: digest of the layout, or None.
      trains: whether `update` may change rows.
      overlays: overlays below the updated rows, the first at the bottom.

    Raises:
      FolderError: a file is truncated, replaced or foreign, or an overlay belongs to others.
      ValueError: an argument is impossible.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        codec: str,
        width: int,
        scales: Parts = (),
        layout: Any = None,
        trains: bool = False,
        overlays: Sequence[str | os.PathLike[str]] = (),
        base: Mapping[str, Any] | None = None,
        name: str = "weights",
    ):
        scale = None
        if codec == "e4m3":
            if len(scales) != 1:
                raise ValueError(
                    f"HostTable.mapped: scales has {len(scales)} tensors; "
                    "e4m3 needs the scale of the table."
                )
            scale, scales = read_scale(scales[0]), ()
        self._base = MappedRows(parts, Codec(codec, width, scale), scales, base)
        super().__init__((1, self._base.n_rows, width), np.float32, _refuse_to_sample, name)
        self.layout, self.trains = None if layout is None else layout.digest, trains
        if layout is not None:
            layout_width = getattr(layout, "width", None)
            if layout.n_rows > self._base.n_rows or layout_width not in (None, width):
                raise ValueError(
                    f"HostTable.mapped: layout has {layout.n_rows:,} rows of width {layout_width}; "
                    f"the files have {self._base.n_rows:,} of width {width}."
                )
        self.overlays: tuple[Overlay, ...] = ()
        self._merged = np.empty((0, width), np.float32)  # rows of the overlays
        self._is_wide = trains or bool(overlays)
        self._slots: np.ndarray | None = self._zero_slots() if self._is_wide else None
        self._forget()
        for folder in overlays:
            self.add_overlay(folder)

    def __repr__(self) -> str:
        return f"HostTable.mapped({self._base.codec.name}{list(self.shape)})"

    def __getstate__(self) -> dict[str, Any]:
        # Slots are mostly empty memory, which a copy would fill: `__setstate__` makes them again.
        return {**super().__getstate__(), "_slots": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._is_wide:
            self._number_rows()

    @property
    def description(self) -> dict[str, Any]:
        """JSON-compatible facts about the files."""
        return self._base.description

    @property
    def updated(self) -> Int[np.ndarray, " n"]:
        """Increasing ids of updated rows, without rows in `overlays`."""
        return np.sort(self._ids[: self._n_updated])

    @property
    def nbytes(self) -> int:
        """Bytes of memory for updated rows and their state."""
        return self._merged.nbytes + sum(a.nbytes for a in self._arrays().values())

    def bytes_beside(self, rule: RowRule) -> int:
        """Return 0: `nbytes` includes the state."""
        return 0

    def share(self, process: int, n_processes: int, mesh: Mesh) -> None:
        """Raise ValueError for several processes, which must each read a mapped table."""
        if n_processes > 1:
            raise ValueError(
                f"the table {self.name} lies in mapped files, "
                f"which {n_processes} processes cannot divide: train it in one process."
            )
        super().share(process, n_processes, mesh)

    def borrow(self, other: HostTable) -> None:
        """Read another mapped table's rows, also later updates."""
        self.__dict__ = other.__dict__

    def draw(self, key: Any = None) -> None:
        """Discard all updated rows and their state: the files and overlays give the rows."""
        self.state, self.rule = {}, None
        if self._n_updated:
            self._forget()
            self._number_rows()

    def start(self, rule: RowRule) -> None:
        """Prepare the state of a rule, unless it exists; rows get it when they are first updated.

        Raises:
          ValueError: the table does not train, or the rule keeps more than per-row arrays.
        """
        if not self.trains:
            raise ValueError(f"the table {self.name} is read-only: create it with trains=True.")
        if self.rule == rule:
            return
        self._check_rule(rule)
        self.rule, capacity = rule, len(self._ids)
        sizes = rule.state_sizes(self.shape[2])
        self.state = {
            name: np.zeros((1, capacity, size), accumulator(self.dtype))
            for name, size in sizes.items()
        }

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"rows": self._rows, **self.state}

    def _forget(self) -> None:
        self._n_updated, self._ids = 0, np.empty(0, np.int64)
        self._rows = np.empty((1, 0, self.shape[2]), np.float32)

    def _zero_slots(self) -> np.ndarray:
        """Return a zero for each row, int32, in memory that is taken page by page when written."""
        n_rows = self.shape[1]
        if not hasattr(mmap, "MAP_ANONYMOUS"):
            return np.zeros(n_rows, np.int32)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, 4 * n_rows, flags=flags)
        # A huge page would hold few updated rows.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(memory, np.int32)

    def _number_rows(self) -> None:
        """Write the positions of rows outside the files: ``i + 1`` updated, ``-i - 1`` merged."""
        self._slots = self._zero_slots()
        rows, n = [self._merged[:0]], 0
        for overlay in self.overlays:
            self._slots[overlay.ids] = -1 - n - np.arange(len(overlay.ids), dtype=np.int32)
            rows.append(np.asarray(overlay.arrays["rows"]))
            n += len(overlay.ids)
        self._merged = np.concatenate(rows)
        self._slots[self._ids[: self._n_updated]] = 1 + np.arange(self._n_updated, dtype=np.int32)

    def add_overlay(self, folder: str | os.PathLike[str]) -> None:
        """Add an overlay on top: its rows replace rows in earlier overlays and in the files.

        Raises:
          OverlayError: it is damaged, or belongs to other files or another layout.
          ValueError: rows have been updated, or programs expect a table without overlays.
        """
        overlay = read_overlay(folder)
        self._check_origin(overlay)
        # Updated rows were computed from the rows below them: another stack would change their
        # meaning.
        self._check_stack()
        if not self._is_wide:
            raise ValueError(
                f"the table {self.name} was created without overlays, "
                "so programs expect rows of the files: create it with overlays=[...]."
            )
        self.overlays = (*self.overlays, overlay)
        self._number_rows()

    def remove_overlay(self, folder: str | os.PathLike[str]) -> None:
        """Remove an overlay: rows have every bit from before `add_overlay`.

        Raises:
          ValueError: there is no such overlay, or rows have been updated.
        """
        self._check_stack()
        path = Path(folder).absolute()
        if path not in (names := [overlay.folder.absolute() for overlay in self.overlays]):
            raise ValueError(
                f"the table {self.name} has no overlay {folder}; "
                f"it has {format_value(list(map(str, names)))}."
            )
        # The same folder may lie twice in the stack: the upper one goes.
        at = len(names) - 1 - names[::-1].index(path)
        self.overlays = self.overlays[:at] + self.overlays[at + 1 :]
        self._number_rows()

    def _check_stack(self) -> None:
        if self._n_updated:
            raise ValueError(
                f"the table {self.name} has {self._n_updated:,} updated rows, "
                "computed from the overlays: save them, or discard them with draw()."
            )

    def _check_origin(self, overlay: Overlay) -> None:
        """Raise an error if an overlay belongs to other files or to another layout."""
        self._base.check(overlay.about["base"], f"the overlay {overlay.folder}")
        layout = overlay.about.get("layout")
        if None not in (layout, self.layout) and layout != self.layout:
            raise OverlayError(
                f"the overlay {overlay.folder} belongs to the layout {layout}, "
                f"not to {self.layout} of the table {self.name}."
            )

    @property
    def record(self) -> tuple[int, np.dtype]:
        """Length and dtype of a row on its way to the device: bytes, or float32 if rows change."""
        if self._is_wide:
            return self.shape[2], self.dtype
        return self._base.codec.n_bytes, np.dtype(np.uint8)

    def gather(
        self, index: Int[np.ndarray, "n tables ways"], out: np.ndarray | None = None
    ) -> Float[np.ndarray, "tables reads numbers"]:
        """Return the addressed rows, float32, clamping ids out of range; see `HostTable.gather`."""
        ids = self._clamp_ids(index)
        gathered = np.empty((1, len(ids), self.shape[2]), np.float32) if out is None else out
        slots = None if self._slots is None else self._slots[ids]
        if slots is None or not slots.any():
            gathered[0] = self._read_files(ids)
            return gathered
        # All places are written, with row 0 where no row was updated; the next loop overwrites
        # those.
        if (slots > 0).any():
            self._gather(np.maximum(slots - 1, 0).reshape(-1, 1, 1), gathered)
        for at, read in ((slots == 0, self._read_files), (slots < 0, self._read_overlays)):
            if len(places := np.flatnonzero(at)):
                gathered[0, places] = read(ids[places])
        return gathered

    def _local_weights(self) -> np.ndarray:
        return self._rows

    def fetch(
        self, index: Int[np.ndarray, "n tables ways"], out: np.ndarray | None = None
    ) -> Shaped[np.ndarray, "tables reads record"]:
        """Return the addressed rows in the form for the device; see `record`."""
        if self._is_wide:
            return self.gather(index, out)
        # Reads of a batch repeat rows, and each page of a file is touched once, in increasing
        # order.
        ids, inverse = np.unique(self._clamp_ids(index), return_inverse=True)
        fetched = np.empty((1, len(inverse), self.record[0]), np.uint8) if out is None else out
        take_rows([(self._records(ids), inverse, fetched[0])])
        return fetched

    def _clamp_ids(self, index: np.ndarray) -> np.ndarray:
        """Return existing ids, int64 ``[reads]``."""
        if index.ndim != 3 or index.shape[1] != 1:
            raise ValueError(
                f"HostTable: index is {format_value(index)}; expected integer ids [n, 1, ways]."
            )
        ids = index.reshape(-1).astype(np.int64)
        return np.minimum(np.maximum(ids, 0, out=ids), self.shape[1] - 1, out=ids)

    def _read_overlays(self, ids: np.ndarray) -> np.ndarray:
        assert self._slots is not None
        rows: np.ndarray = self._merged[-1 - self._slots[ids]]
        return rows

    def _read_files(self, ids: np.ndarray) -> np.ndarray:
        """Return decoded rows; each row is read once."""
        ids, inverse = np.unique(ids, return_inverse=True)
        records = self._records(ids)
        rows: np.ndarray
        if len(parts := row_slices(len(ids), _CHUNK)) < 2:
            rows = self.decode(records)
            return rows[inverse]
        rows = np.concatenate(in_threads(lambda part: self.decode(records[part]), parts))
        gathered = np.empty((len(inverse), self.shape[2]), np.float32)
        take_rows([(rows, inverse, gathered)])
        return gathered

    def _records(self, ids: np.ndarray) -> np.ndarray:
        """Return the bytes of rows with increasing ids."""
        records = np.empty((len(ids), self._base.codec.n_bytes), np.uint8)
        self._base.gather(ids, records)
        return records

    def decode(self, rows: Any) -> Any:
        """Return float32 rows from the result of `fetch`, in NumPy or on the device."""
        if rows.dtype != np.uint8:
            # Decoded by `fetch` already, as rows of this table change: see `record`.
            return rows
        return self._base.codec.decode(rows)

    def update(self, gradient: TableGradient, rate: Any, *, waits: bool = True) -> None:
        """Update the accessed rows, as `HostTable.update` does, outside of the files."""
        gradient = self._fetch_gradient(gradient)
        look_up: Any = gradient.look_up
        index = np.clip(np.asarray(look_up.index), 0, self.shape[1] - 1)
        assert self._slots is not None
        self._add_rows(np.unique(index[self._slots[index] <= 0]).astype(np.int64))
        # Updated rows are a small table of their own, with slots as ids, so that the rules and
        # kernels are those of other host-resident tables.
        rows = HostTable((1, len(self._ids), self.shape[2]), self.dtype, self.init, self.name)
        rows.weights, rows.state, rows.rule = self._rows, self.state, self.rule
        rows.moved = np.zeros(rows.shape[:2], np.bool_)
        look_up = look_up.replace(index=self._slots[index] - 1)
        rows.update(dataclasses.replace(gradient, look_up=look_up, shape=rows.shape), rate)

    def _add_rows(self, ids: np.ndarray) -> None:
        """Copy rows with increasing ids from the files and overlays to memory."""
        assert self._slots is not None
        first, n = self._n_updated, self._n_updated + len(ids)
        if n > len(self._ids):
            # Capacities double, so that the rows are copied a few times only.
            self._reserve(max(2 * len(self._ids), 1 << (n - 1).bit_length(), _FEWEST))
        self.gather(ids.reshape(-1, 1, 1), self._rows[:, first:n])
        # The slots come last: until then the ids read from the files.
        self._ids[first:n], self._n_updated = ids, n
        self._slots[ids] = 1 + np.arange(first, n, dtype=np.int32)

    def _reserve(self, capacity: int) -> None:
        """Extend the memory for updated rows."""
        sizes = [a.shape[2] * a.itemsize for a in self._arrays().values()]
        self._require(capacity * sum(sizes), "its updated rows with their state")

        def extend(a: np.ndarray) -> np.ndarray:
            extended = np.zeros((1, capacity, a.shape[2]), a.dtype)
            extended[:, : self._n_updated] = a[:, : self._n_updated]
            return extended

        self._rows = extend(self._rows)
        self.state = {name: extend(a) for name, a in self.state.items()}
        ids = np.zeros(capacity, np.int64)
        ids[: self._n_updated] = self._ids[: self._n_updated]
        self._ids = ids

    def save(self, folder: Path) -> None:
        """Write the updated rows and their state: an overlay, for `add_overlay`, `load` and `info`.

        It also records digests for the files, the layout and the overlays below. It contains
        rows from these overlays only if they were updated.
        """
        folder = Path(folder)
        folder.mkdir(parents=True)
        order = np.argsort(self._ids[: self._n_updated])
        about = {
            "base": self.description,
            "layout": self.layout,
            "rule": None if self.rule is None else repr(self.rule),
            "below": [overlay.digest for overlay in self.overlays],
        }
        arrays = {name: a[0, order] for name, a in self._arrays().items()}
        write_overlay(folder, self._ids[order], arrays, about)

    def load(self, folder: Path) -> None:
        """Continue from the rows of `save`: they become the updated rows.

        If they have a state, call `start` with the same rule first.

        Raises:
          OverlayError: the rows are damaged, or belong to other files, overlays or another rule.
        """
        overlay = read_overlay(folder)
        self._check_origin(overlay)
        below = [each.digest for each in self.overlays]
        if overlay.about.get("below", []) != below:
            raise OverlayError(
                f"{folder} continues from the overlays "
                f"{format_value(overlay.about.get('below'))}; "
                f"the table {self.name} has {format_value(below)}."
            )
        for name, a in self._arrays().items():
            saved, shape = overlay.arrays.get(name), (len(overlay.ids), a.shape[2])
            if saved is None or saved.shape != shape or saved.dtype != a.dtype:
                raise OverlayError(
                    f"{folder} has no {name} {a.dtype}{list(shape)}, "
                    f"which the table {self.name} needs."
                )
        # All checks come before the first change: a failed load leaves the table as it was.
        self._forget()
        n = len(overlay.ids)
        self._reserve(max(1 << max(n - 1, 0).bit_length(), _FEWEST))
        for name, a in self._arrays().items():
            a[0, :n] = overlay.arrays[name]
        self._ids[:n], self._n_updated = overlay.ids, n
        self._is_wide = True
        self._number_rows()

    def _is_shown_to(self, device: Device) -> bool:
        """Return False: the CPU gathers bytes of mapped files."""
        return False


def _refuse_to_sample(*_: Any) -> NoReturn:
    raise ValueError("the rows of a mapped table come from its files.")

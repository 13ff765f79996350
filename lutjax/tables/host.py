"""Host-resident tables: the host reads and updates rows; a device sees its batch's rows."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from lutjax._typing import Array
from lutjax.arguments import format_value
from lutjax.dispatch import _table_reads
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import (
    Backend,
    Device,
    Implementation,
    Request,
    devices_of,
    kernel_registry,
)
from lutjax.kernels import _nvidia, _triton
from lutjax.kernels._xla import _row_gathers
from lutjax.ops import _checks, _nan
from lutjax.ops.weighted_lookup import WeightedLookup, check_reads, weighted_lookup
from lutjax.tables import _registered
from lutjax.tables.gradient import TableGradient
from lutjax.tables.update import update_table
from lutjax.values._derivatives import with_derivative_of
from lutjax.values._detection import Detection, clamp_detection
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, is_concrete
from lutjax.values._row_rules import RowRule

_BLOCK = 1 << 21  # numbers that are drawn or copied at a time, by one thread
_LEAST = 1 << 12  # rows that are worth a thread of their own
_SMALL = 1 << 17  # bytes of rows that are not worth threads


class HostMemoryError(MemoryError):
    """Error for a table that does not fit in host memory."""


class HostTable:
    """Tables with rows and optimizer state as NumPy arrays in host memory.

    A device receives rows gathered by the CPU, or a GPU reads them directly. The device returns the
    sparse gradient, and the CPU updates the rows by the same kernels, in the same order, as on a
    device. `draw` or `load` creates the arrays: until then the object takes no memory.

    It is compared and hashed by identity, so it can be an attribute of an `nnx.Module`.

    Args:
      shape: ``(tables, rows, elements per row)``.
      dtype: dtype of the rows.
      init: samples the initial values, as in `jax.nn.initializers`. `Normal` samples block by
          block; zeros take no memory before a row is updated; other initializers sample the whole
          table at once, which takes several times its memory.
      name: name of the table, for messages.

    Attributes:
      weights: the rows, ``[tables, rows, elements]``; None before initialization.
      moved: mask of updated rows since initialization, ``[tables, rows]``.
      rows: row ids of this process; all, unless `share` was called.
      rule: row update rule; see `start`.
      state: of the rule, as ``rule.init`` makes it.

    Raises:
      ValueError: the shape is not a table shape.

    Source: docs/semantics.md, section 14.

    Example:
      >>> import jax, numpy as np
      >>> from lutjax.tables.host import HostTable, Normal
      >>> table = HostTable((2, 1000, 4), np.float32, Normal(0.02))
      >>> table.draw(jax.random.key(0))
      >>> table.gather(np.array([[[3], [999]]])).shape
      (2, 1, 4)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        init: Callable[..., Any],
        name: str = "weights",
    ):
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(
                f"HostTable: shape is {shape}; expected (tables, rows, numbers of a row)."
            )
        self.shape, self.dtype, self.init, self.name = tuple(shape), np.dtype(dtype), init, name
        self._weights: np.ndarray | None = None
        self._cell: _registered.Cell | None = None
        self._refused = False
        self.moved: np.ndarray | None = None
        self.rule: RowRule | None = None
        self.state: dict[str, np.ndarray] = {}
        self.rows = range(self.shape[1])
        self._mesh: Mesh | None = None
        self._n_local = 1

    def __repr__(self) -> str:
        return f"HostTable({self.dtype}{list(self.shape)})"

    def share(self, process: int, n_processes: int, mesh: Mesh) -> None:
        """Assign each process a block of each table's rows, before initialization.

        All processes must call it. `gather` then returns zeros for other processes' rows, `update`
        updates only this process's rows, and a jitted function on arrays across all devices reads
        all rows.

        Args:
          process: number of this process.
          n_processes: number of processes.
          mesh: mesh of a model's arrays, with the same number of devices from each process, grouped
              by process.

        Raises:
          ValueError: different rows already exist, there are fewer rows than processes, or the mesh
              has unequal device counts.
        """
        if self.shape[1] < n_processes:
            raise ValueError(
                f"the table {self.name} has {self.shape[1]} rows, "
                f"fewer than the {n_processes} processes."
            )
        owners = [device.process_index for device in mesh.devices.flat]
        counts = [owners.count(owner) for owner in dict.fromkeys(owners)]
        if n_processes > 1 and (len(counts) != n_processes or len(set(counts)) > 1):
            raise ValueError(
                f"the table {self.name} is shared by {n_processes} processes, with "
                f"{', '.join(map(str, counts))} devices in the mesh: use the same number of "
                "devices per process."
            )
        rows = range(*(self.shape[1] * i // n_processes for i in (process, process + 1)))
        if self.weights is not None and rows != self.rows:
            raise ValueError(
                f"the table {self.name} already exists: call share(process, n_processes, mesh) "
                "first."
            )
        self.rows, self._mesh, self._n_local = rows, mesh, mesh.size // n_processes

    def borrow(self, other: "HostTable") -> None:
        """Read another table's rows. Both tables have the same shape."""
        self.weights, self.rows = other.weights, other.rows
        self._mesh, self._n_local = other._mesh, other._n_local

    @staticmethod
    def mapped(
        parts: Sequence[tuple[str | os.PathLike[str], str]],
        *,
        codec: str,
        width: int,
        scales: Sequence[tuple[str | os.PathLike[str], str]] = (),
        layout: Any = None,
        trains: bool = False,
        overlays: Sequence[str | os.PathLike[str]] = (),
        base: Mapping[str, Any] | None = None,
        name: str = "weights",
    ) -> "HostTable":
        """Return a table whose rows stay in published files; see `lutjax.optim.host.MappedTable`.

        The files are mapped, and never written. All processes of a host share one copy.

        Args:
          parts: paths and tensor names in row order, of safetensors or GGUF files.
          codec: ``"bfloat16"``; ``"e4m3"`` with one scale for the table; ``"e4m3_ue8m0"`` with one
              scale per 32 elements; ``"row264"``, the same bytes in one row.
          width: elements per row.
          scales: paths and tensor names of the scales, for ``"e4m3"`` and ``"e4m3_ue8m0"``.
          layout: `lutjax.NgramLayout` whose ids address the rows; overlays record its digest.
          trains: True if `update` may change rows.
          overlays: folders from `save` with updated rows; later ones take precedence.
          base: expected ``description`` of the files.
          name: name of the table, for messages.

        Raises:
          FolderError: a file is truncated, replaced or foreign, or an overlay belongs to others.
          ValueError: an argument is impossible.

        Example:
          >>> import numpy as np, tempfile, jax.numpy as jnp
          >>> from pathlib import Path
          >>> from safetensors.numpy import save_file
          >>> from lutjax.optim.host import HostTable
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     path = Path(folder, "model.safetensors")
          ...     rows = np.full((9, 4), 0x38, np.uint8)
          ...     save_file({"rows": rows, "scale": np.float32([2])}, path)
          ...     table = HostTable.mapped(
          ...         [(path, "rows")], codec="e4m3", width=4, scales=[(path, "scale")]
          ...     )
          ...     table.gather(np.array([[[8]]]))
          array([[[2., 2., 2., 2.]]], dtype=float32)
        """
        mapped = importlib.import_module("lutjax.tables._mapped")
        table: HostTable = mapped.MappedTable(
            parts, codec=codec, width=width, scales=scales, layout=layout, trains=trains,
            overlays=overlays, base=base, name=name,
        )  # fmt: skip
        return table

    @property
    def is_shared(self) -> bool:
        """True if the rows are divided over processes."""
        return len(self.rows) < self.shape[1]

    @property
    def _local_shape(self) -> tuple[int, int, int]:
        return self.shape[0], len(self.rows), self.shape[2]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has rows of its own, at another address.
        return {**self.__dict__, "_cell": None}

    @property
    def weights(self) -> np.ndarray | None:
        """The rows, ``[tables, rows, elements]``; None before initialization."""
        return self._weights

    @weights.setter
    def weights(self, rows: np.ndarray | None) -> None:
        # The lock also covers the cell: a program must not find rows that the table no longer has.
        with _registered.lock:
            self._weights = rows
            if self._cell is not None:
                self._show()

    @property
    def nbytes(self) -> int:
        """Bytes of this process's rows."""
        return math.prod(self._local_shape) * self.dtype.itemsize

    def bytes_beside(self, rule: RowRule) -> int:
        """Return the bytes of a rule's state and of the mask of updated rows."""
        n_tables, n_rows, width = self._local_shape
        numbers = sum(rule.state_sizes(width).values())
        return n_tables * n_rows * (1 + numbers * accumulator(self.dtype).itemsize)

    def draw(self, key: Any) -> None:
        """Initialize the rows from a `jax.random` key, with the same values as a table on a device.

        Raises:
          HostMemoryError: host memory is too small.
        """
        n_tables, n_rows, width = self._local_shape
        # Old memory is released before new memory is required.
        self.weights, self.moved, self.state, self.rule = None, None, {}, None
        self._require(self.nbytes + n_tables * n_rows, "it")
        if self.init is jax.nn.initializers.zeros:
            self.weights = self._zeros(self._local_shape, self.dtype)
        elif isinstance(self.init, Normal) and self.init.supports_ranges(self.dtype):
            rows = self._zeros(self._local_shape, self.dtype)
            init, data = self.init, np.asarray(jax.random.key_data(key))
            # Consecutive elements in the whole table, by the position of the first.
            runs = [(0, rows.reshape(-1))]
            if self.is_shared:
                places = [(t * self.shape[1] + self.rows.start) * width for t in range(n_tables)]
                runs = [(at, a.reshape(-1)) for at, a in zip(places, rows, strict=True)]

            def fill(job: tuple[int, np.ndarray]) -> None:
                first, part = job
                with jax.default_device(cpu()):
                    part[:] = np.asarray(init.sample_range(data, first, _BLOCK))[: part.size]

            jobs = [(at + i, a[i : i + _BLOCK]) for at, a in runs for i in range(0, a.size, _BLOCK)]
            in_threads(fill, jobs)
            self.weights = rows
        else:
            # Other initializers may depend on the shape, so the whole table is sampled.
            with jax.default_device(cpu()):
                sample = jax.jit(lambda key: self.init(key, self.shape, self.dtype))
                drawn = sample(jax.device_put(key, cpu()))
            rows = self._zeros(self._local_shape, self.dtype)
            rows[...] = drawn[:, self.rows.start : self.rows.stop]
            self.weights = rows
        self.moved = np.zeros((n_tables, n_rows), np.bool_)

    def start(self, rule: RowRule) -> None:
        """Initialize a rule's state to zeros, unless it exists.

        Raises:
          HostMemoryError: host memory is too small.
          ValueError: the rule keeps more than per-row arrays.
        """
        if self.rule == rule:
            return
        self._check_rule(rule)
        n_tables, n_rows, width = self._local_shape
        dtype = accumulator(self.dtype)
        sizes = rule.state_sizes(width)
        self._require(self.bytes_beside(rule), "the state of its optimizer")
        self.rule = rule
        self.state = {
            name: self._zeros((n_tables, n_rows, size), dtype) for name, size in sizes.items()
        }

    def _check_rule(self, rule: RowRule) -> None:
        more = set(jax.eval_shape(rule.init, jax.ShapeDtypeStruct(self.shape, self.dtype)))
        more -= set(rule.state_sizes(self.shape[-1]))
        if more:
            raise ValueError(
                f"the host-resident table {self.name} keeps optimizer state only for accessed "
                f"rows, but {rule} also has {', '.join(sorted(more))}: use a rule without other "
                "state."
            )

    def _require(self, n_bytes: int, what: str) -> None:
        free = free_memory()
        if free is not None and n_bytes > free:
            raise HostMemoryError(
                f"the table {self.name} {self.dtype}{list(self.shape)}: {what} takes "
                f"{n_bytes / 1e9:,.2f} GB of host memory; {free / 1e9:,.2f} GB are free. Choose "
                "fewer rows, or a machine with more memory."
            )

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return zeros that take no memory until written, in huge pages if available."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            if not hasattr(mmap, "MAP_ANONYMOUS"):
                return np.zeros(shape, dtype)
            memory = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise HostMemoryError(
                f"the table {self.name} {self.dtype}{list(self.shape)}: the host could not "
                f"allocate {n_bytes / 1e9:,.2f} GB ({error}): choose fewer rows."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Random rows of a large table would miss the TLB with small pages. Not every system has
            # huge pages.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)

    def _local_weights(self) -> np.ndarray:
        if self.weights is None:
            raise ValueError(
                f"the table {self.name} {self.dtype}{list(self.shape)} has no rows yet: call "
                "draw(key), or load a checkpoint; models built inside jit have none."
            )
        return self.weights

    def gather(
        self, index: Int[np.ndarray, "n tables ways"], out: np.ndarray | None = None
    ) -> Float[np.ndarray, "tables reads numbers"]:
        """Return the addressed rows, clamping ids out of range.

        For each table, all ways of the first element come first, then all ways of the next. If a
        table is shared, rows of other processes are zeros: the sum over all processes gives the
        rows.

        Args:
          index: row ids of each table.
          out: output array; by default new memory.

        Raises:
          ValueError: the rows are not initialized, or the ids are for another number of tables.
        """
        weights = self._local_weights()
        if index.ndim != 3 or index.shape[1] != len(weights):
            raise ValueError(
                f"HostTable: index is {format_value(index)}; "
                f"expected integer ids [n, {len(weights)}, ways]."
            )
        n, _, ways = index.shape
        if out is None:
            out = np.empty((len(weights), n * ways, weights.shape[-1]), self.dtype)
        self._gather(self._localize_ids(index)[0] if self.is_shared else index, out)
        return self.own(out, index)

    @property
    def record(self) -> tuple[int, np.dtype]:
        """Length and dtype of a row as transferred to the device."""
        return self.shape[2], self.dtype

    def fetch(
        self, index: Int[np.ndarray, "n tables ways"], out: np.ndarray | None = None
    ) -> Shaped[np.ndarray, "tables reads record"]:
        """Return the addressed rows in the form for the device, for `decode`; see `gather`."""
        return self.gather(index, out)

    def decode(self, rows: Any) -> Any:
        """Return float rows from the result of `fetch`, in NumPy or on the device."""
        return rows

    def own(self, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Set other processes' rows to zero in gathered `rows`, and return `rows`."""
        if self.is_shared:
            others = ~np.moveaxis(self._localize_ids(index)[1], 1, 0).reshape(*rows.shape[:2], 1)

            def clear(part: tuple[int, slice]) -> None:
                np.copyto(rows[part], 0, where=others[part])

            parts = row_slices(rows.shape[1])
            in_threads(clear, [(t, part) for t in range(len(rows)) for part in parts])
        return rows

    def _gather(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write this process's rows into `out`."""
        weights = self._local_weights()
        # Threads would take longer to start than to copy so few bytes.
        if out.nbytes <= _SMALL:
            for t, table in enumerate(weights):
                np.take(table, index[:, t].reshape(-1), axis=0, out=out[t], mode="clip")
            return
        call = _call(index, weights.shape, self.dtype)
        if (native := _find_native("forward", call)) is not None:
            native.gather(weights, index, out, n_threads())
            return
        ids = np.ascontiguousarray(np.moveaxis(index, 1, 0)).reshape(len(weights), -1)
        take_rows([(weights[t], ids[t], out[t]) for t in range(len(weights))])

    def _localize_ids(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return clamped ids within this process's block, and a mask of ids inside it."""
        index = np.clip(index, 0, self.shape[1] - 1)
        is_local = (index >= self.rows.start) & (index < self.rows.stop)
        return np.clip(index - self.rows.start, 0, len(self.rows) - 1), is_local

    def read(
        self, index: Int[Array, "*batch tables ways"]
    ) -> tuple[Float[jax.Array, "tables reads numbers"], Int[jax.Array, "*batch tables ways"]]:
        """Return a device table with the addressed rows, and the ids of the same rows in it.

        The rows come from an enclosing `provide_rows` block, if any. Otherwise a jitted function on
        an NVIDIA GPU with Triton reads them directly: the rows are locked in memory when the first
        such function is traced. Any other device waits for the CPU to gather them.
        """
        n_tables, _, width = self.shape
        shape = index.shape
        n, ways = math.prod(shape[:-2]), shape[-1]
        own: Any = np.arange(n * ways, dtype=np.int32).reshape(*shape[:-2], 1, ways)
        rows, part = _provided_rows.get().get(self, (None, None))
        if rows is None:
            flat = jnp.asarray(index).reshape(n, n_tables, ways)
            mesh = self._mesh
            rows = self._read(flat) if mesh is None else self._read_all_processes(flat, mesh)
        if rows.dtype != self.dtype:
            rows = self.decode(rows)
        if rows.shape[::2] != (n_tables, width) or rows.shape[1] % max(n * ways, 1):
            raise ValueError(
                f"HostTable: the provided rows are {list(rows.shape)}; expected "
                f"{[n_tables, n * ways, width]}, or rows for several parts."
            )
        # Provided rows may belong to several parts of a batch, one after the other.
        if part is not None:
            own = own + part * (n * ways)
        reads = _table_reads.current_reads()
        if reads is not None:
            rows = reads.observe_rows(self, rows, index)
        return rows, jnp.broadcast_to(own, shape)

    def weighted_lookup(
        self,
        index: Int[Array, "*batch tables ways"],
        coefficients: Float[Array, "*batch tables ways"],
        *,
        groups: int | None = None,
        accumulate: FixedPoint | None = None,
        implementation: Implementation = None,
    ) -> Float[jax.Array, "*any numbers"]:
        """Return the result of `lutjax.weighted_lookup` for the table and these arguments.

        Raises:
          ValueError, TypeError: as there.

        Source: docs/semantics.md, section 12.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from lutjax.optim.host import HostTable
          >>> table = HostTable((2, 1000, 4), jnp.float32, jax.nn.initializers.ones)
          >>> table.draw(jax.random.key(0))
          >>> index, coefficients = jnp.array([[3, 5], [7, 0]]), jnp.array([[1.0, 0.5], [1.0, 1.0]])
          >>> table.weighted_lookup(index, coefficients)
          Array([3.5, 3.5, 3.5, 3.5], dtype=float32)
        """
        check_reads("HostTable.weighted_lookup", self.shape[0], index, coefficients)
        rows, own = self.read(index)
        return weighted_lookup(
            rows, own, coefficients,
            groups=groups, accumulate=accumulate, implementation=implementation,
        )  # fmt: skip

    def lookup(
        self,
        detection: Detection,
        *,
        margins: bool = True,
        groups: int | None = None,
        accumulate: FixedPoint | None = None,
        implementation: Implementation = None,
    ) -> Float[jax.Array, "*any numbers"]:
        """Return the result of `lutjax.lookup` for the table and a detection, by a weighted lookup.

        A margin's cotangent is the surrogate gradient times the difference of two products: the
        cotangent with the flipped row, and with the addressed row.

        Args:
          detection: arrays ``[..., tables]``, with as many bits as ``2**bits`` rows have.
          margins: True if margins have a gradient; without it half as many rows are read.
          groups: as in `lutjax.lookup`.
          accumulate: as in `lutjax.lookup`.
          implementation: implementation of the weighted lookup.

        Raises:
          ValueError, TypeError: as there.

        Source: docs/semantics.md, sections 2 and 3.

        Example:
          >>> import jax, jax.numpy as jnp, lutjax
          >>> from lutjax.optim.host import HostTable
          >>> def init(key, shape, dtype):
          ...     return jnp.array([[[1], [7]]], dtype)
          >>> table = HostTable((1, 2, 1), jnp.float32, init)
          >>> table.draw(jax.random.key(0))
          >>> table.lookup(lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]])))
          Array([7.], dtype=float32)
        """
        op = "HostTable.lookup"
        detection = _checks.detection(op, "detection", detection, 1, "[..., tables]")
        # A table for the check of shapes, with one element in memory.
        like = np.broadcast_to(np.zeros((), self.dtype), self.shape)
        _checks.table(op, like, detection.shape[-1], detection.bits, "detection")
        d, margin = clamp_detection(detection), detection.margin
        if margins:
            # The flipped row has a share, which is 0 and has the surrogate derivative.
            slope = jax.lax.stop_gradient(_row_gathers.slope(margin))
            share = with_derivative_of(jnp.zeros_like(margin), -slope * margin)
            index = jnp.stack([d.index, d.index ^ d.flip], -1)
            coefficients = jnp.stack([1 - share, share], -1)
        else:
            index, coefficients = d.index[..., None], jnp.ones_like(margin)[..., None]
        rows, own = self.read(index)
        # Only the first row of a pair has a gradient, and updates the table.
        y = weighted_lookup(
            rows, own, coefficients, groups=groups, valued=1,
            accumulate=accumulate, implementation=implementation,
        )  # fmt: skip
        return _nan.propagate_nan(y, margin)

    def _read_all_processes(self, index: jax.Array, mesh: Mesh) -> jax.Array:
        """Return rows from all processes; a function waits while each CPU reads its rows."""
        n_tables, _, width = self.shape
        result = jax.ShapeDtypeStruct(
            (n_tables, index.shape[0] * index.shape[-1], width), self.dtype
        )

        def gather_rows(ids: Any, device: Any) -> np.ndarray:
            # Only the first device of a process reads: the sum over all devices adds its rows once.
            if device % self._n_local:
                return np.zeros(result.shape, result.dtype)
            return self.gather(np.asarray(ids))

        def sum_on_device(ids: jax.Array) -> jax.Array:
            device = jax.lax.axis_index(mesh.axis_names)
            rows = jax.pure_callback(gather_rows, result, ids, device, vmap_method="sequential")
            total: jax.Array = jax.lax.psum(rows, mesh.axis_names)
            return total

        replicated = PartitionSpec()
        read = jax.shard_map(
            sum_on_device, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False
        )
        rows: jax.Array = jax.jit(read)(index)
        return rows

    def _read(self, index: jax.Array) -> jax.Array:
        """Return the result of `gather` on the device; a capable GPU reads the rows directly."""
        if is_concrete(index):
            return jnp.asarray(self.fetch(np.asarray(index)))
        n, n_tables, ways = index.shape
        length, dtype = self.record
        result = jax.ShapeDtypeStruct((n_tables, n * ways, length), dtype)

        def read_on_cpu(index: jax.Array) -> jax.Array:
            rows: jax.Array = jax.pure_callback(
                lambda ids: self.fetch(np.asarray(ids)), result, index, vmap_method="sequential"
            )
            return rows

        devices = devices_of([index])
        gpu = next((device for device in devices if device.backend == Backend.GPU), None)
        if gpu is None or not self._is_shown_to(gpu):
            return read_on_cpu(index)
        host_rows = importlib.import_module("lutjax.kernels._triton._host_rows")
        assert self._cell is not None
        cell = self._cell.address

        def read_on_gpu(index: jax.Array) -> jax.Array:
            rows: jax.Array = host_rows.read(cell, as_int32(index), self.shape, self.dtype, gpu)
            return rows

        if len(devices) == 1:
            return read_on_gpu(index)
        rows: jax.Array = jax.lax.platform_dependent(index, cuda=read_on_gpu, default=read_on_cpu)
        return rows

    def _is_shown_to(self, device: Device) -> bool:
        """Return True if a GPU's programs find the rows by the cell, made at the first trace."""
        if (_nvidia.compute_capability(device) or 0) < 80 or _triton.unfit_packages():
            return False
        with _registered.lock:
            if self._cell is None and not self._refused:
                try:
                    driver = _registered.driver()
                    if driver is None:
                        return False
                    self._cell = _registered.Cell(driver)
                    self._show()
                    # Not at exit: the driver may be gone then.
                    weakref.finalize(self, self._cell.abandon).atexit = False
                except (HostMemoryError, _registered.RegistrationError) as error:
                    # Not tried again, so that there is one warning.
                    self._cell, self._refused = None, True
                    reason = f"the GPU does not read host memory: {error}."
                    if isinstance(error, HostMemoryError):
                        reason = str(error)
                    warnings.warn(
                        f"{reason} Until then, programs wait for the CPU, "
                        "up to a third of a millisecond per read.",
                        stacklevel=2,
                    )
            return self._cell is not None

    def _show(self) -> None:
        """Let GPU programs that embed the cell find the rows.

        Raises:
          HostMemoryError: the memory cannot be locked.
          ValueError: the rows do not belong to such a table.
        """
        assert self._cell is not None
        rows = self.weights
        if rows is not None and (rows.shape, rows.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"HostTable: weights is {format_value(rows)}; "
                f"expected {self.dtype}{list(self.shape)}."
            )
        try:
            is_sparse = self.init is jax.nn.initializers.zeros
            if is_sparse and rows is not None and not self._cell.has_locked(rows):
                # Locked memory is resident, also the zeros that no update has written.
                self._require(self.nbytes, "all of its rows in locked memory")
            self._cell.point(rows)
        except _registered.RegistrationError as error:
            raise HostMemoryError(
                f"the table {self.name} {self.dtype}{list(self.shape)}: the GPU driver did not "
                f"lock its {self.nbytes / 1e9:,.2f} GB of host memory ({error}): choose fewer "
                "rows, or raise the process's limit for locked memory."
            ) from error

    def gradient_of(
        self, gradient: TableGradient, index: Int[Array, "*batch tables ways"]
    ) -> TableGradient:
        """Return this table's gradient from the gradient of the rows returned by `read`."""
        look_up: Any = gradient.look_up
        index = index.reshape(look_up.index.shape)
        return dataclasses.replace(gradient, look_up=look_up.replace(index=index), shape=self.shape)

    def update(self, gradient: TableGradient, rate: Any, *, waits: bool = True) -> None:
        """Update the accessed rows in their own memory, as `lutjax.update_table` does.

        Args:
          gradient: this table's gradient; see `gradient_of`.
          rate: the learning rate of this step.
          waits: wait for GPU programs that read the rows. False: the caller knows that none does.

        Raises:
          ValueError: the table has no rule, or the gradient belongs to another table, or not all of
              it is in this process.
        """
        weights = self._local_weights()
        gradient = self._fetch_gradient(gradient)
        assert self.rule is not None
        assert self.moved is not None
        # The CPU writes in place: programs that read the rows on a GPU must have ended.
        if waits:
            self._wait()
        look_up: Any = gradient.look_up
        if self.is_shared:
            for t in range(len(weights)):
                self._update_block(t, gradient, rate)
            return
        step = Step(rate=np.asarray(rate), factor=gradient.factor, state=self.state, rule=self.rule)
        shape = jax.ShapeDtypeStruct(self.shape, self.dtype)
        native = _find_native("update", look_up.replace(weights=shape), gradient.cotangent, step)
        index = look_up.index
        if native is not None:
            native.update(weights, self.state, look_up, gradient.cotangent, step, n_threads())
            for t, moved in enumerate(self.moved):
                moved[np.clip(index[..., t, :], 0, self.shape[1] - 1)] = True
            return
        by_table = np.moveaxis(index.reshape(-1, *index.shape[-2:]), 1, 0)
        unique: list[Any] = in_threads(
            lambda ids: np.unique(np.clip(ids, 0, self.shape[1] - 1), return_inverse=True), by_table
        )
        rows = [ids for ids, _ in unique]
        inverse = np.stack([at.reshape(by_table.shape[1:]) for _, at in unique], 1).astype(np.int32)
        # A few padded sizes limit the number of compiled programs. Padding reads use the last row,
        # which no table has.
        room = 1 << max(ids.size for ids in rows).bit_length()
        more = -len(inverse) % (1 << max(len(inverse).bit_length() - 4, 0))

        def pad_array(a: np.ndarray, n_axes: int, value: int = 0) -> np.ndarray:
            a = a.reshape(-1, *a.shape[a.ndim - n_axes :])
            return np.pad(a, [(0, more)] + [(0, 0)] * n_axes, constant_values=value)

        arrays = {"weights": weights, **self.state}
        compact = {n: np.zeros((len(a), room, a.shape[-1]), a.dtype) for n, a in arrays.items()}
        jobs = [
            (a[t], ids, compact[name][t, : ids.size])
            for name, a in arrays.items()
            for t, ids in enumerate(rows)
        ]
        take_rows(jobs)
        compact_look_up = look_up.replace(
            index=pad_array(inverse, 2, room - 1),
            coefficients=pad_array(look_up.coefficients, 2),
        )
        local = dataclasses.replace(
            gradient,
            look_up=compact_look_up,
            sealed=pad_array(np.asarray(gradient.cotangent), 2),
            shape=compact["weights"].shape,
        )
        # This may be another thread or coroutine than the last: jit's cache key must be this one's.
        kernel_registry.follow_coroutine(traced=False)
        with jax.default_device(cpu()):
            moved, state = _updated_rows(
                compact.pop("weights"), compact, local, step.rate, self.rule
            )
        of_host = {name: np.asarray(a) for name, a in {"weights": moved, **state}.items()}

        def put(job: tuple[str, int]) -> None:
            name, t = job
            arrays[name][t][rows[t]] = of_host[name][t, : rows[t].size]

        in_threads(put, [(name, t) for name in arrays for t in range(len(weights))])
        for t, ids in enumerate(rows):
            self.moved[t][ids] = True

    def _fetch_gradient(self, gradient: TableGradient) -> TableGradient:
        """Return this table's gradient in host memory, with the reads that update rows."""
        if self.rule is None:
            raise ValueError(f"the table {self.name} has no update rule: call start(rule).")
        if gradient.shape != self.shape:
            raise ValueError(
                f"HostTable: the gradient has shape {list(gradient.shape)}; "
                f"expected {list(self.shape)}."
            )
        gradient = open_gradient(gradient)
        for a in jax.tree.leaves(gradient):
            if isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated):
                raise ValueError(
                    f"HostTable: the gradient of {self.name} is divided over devices of other "
                    "processes; jit the step with replicated out_shardings, NamedSharding(mesh, "
                    "PartitionSpec())."
                )
        gradient = jax.device_get(gradient)
        look_up: Any = gradient.look_up
        # Other ways have no gradient and update no rows.
        if look_up.valued < look_up.index.shape[-1]:
            look_up = look_up.replace(
                index=look_up.index[..., : look_up.valued],
                coefficients=look_up.coefficients[..., : look_up.valued],
            )
            gradient = dataclasses.replace(gradient, look_up=look_up)
        return gradient

    def _update_block(self, t: int, gradient: TableGradient, rate: Any) -> None:
        """Update this process's rows in one table, by their reads only, in read order."""
        look_up: Any = gradient.look_up
        assert self.weights is not None
        assert self.moved is not None
        local, is_local = self._localize_ids(
            look_up.index[..., t, :].reshape(-1, look_up.index.shape[-1])
        )
        samples, ways = np.nonzero(is_local)
        if not len(samples):
            return
        coefficients = look_up.coefficients[..., t, :].reshape(local.shape)
        own = np.where(ways < look_up.valued, coefficients[samples, ways], 0)
        own = own.astype(coefficients.dtype)
        # Each read of a local row becomes a sample with one way, in the same order: sums are added
        # as in a table that one process holds.
        ids = local[samples, ways][:, None, None].astype(np.int32)
        options = {**dict(look_up.options()), "groups": 1, "valued": 1}
        call = WeightedLookup.from_arrays((None, ids, own[:, None, None]), options.items())
        group = t // (self.shape[0] // look_up.groups)
        every = np.asarray(gradient.cotangent).reshape(-1, self.shape[2])
        cotangent = np.empty((len(samples), 1, self.shape[2]), every.dtype)
        take_rows([(every, samples * look_up.groups + group, cotangent[:, 0])])
        factor = gradient.factor
        if np.ndim(factor) == 3 and len(factor) > 1:
            factor = factor[t : t + 1]
        # Views: the block's update writes into this table's memory.
        block = HostTable((1, *self._local_shape[1:]), self.dtype, self.init, self.name)
        block.weights, block.moved = self.weights[t : t + 1], self.moved[t : t + 1]
        block.rule = self.rule
        block.state = {name: a[t : t + 1] for name, a in self.state.items()}
        gradient = dataclasses.replace(
            gradient, look_up=call, sealed=cotangent, factor=factor, shape=block.shape
        )
        block.update(gradient, rate)

    def _wait(self) -> None:
        if self._cell is not None:
            self._cell.wait()

    def save(self, folder: Path) -> None:
        """Write the updated rows and their state: a checkpoint stores only learned rows.

        The key reproduces all other rows. For a shared table, each process writes its own rows into
        its own folder.
        """
        weights = self._local_weights()
        assert self.moved is not None
        folder.mkdir(parents=True)
        ids = np.flatnonzero(self.moved)
        table, row = np.divmod(ids, len(self.rows))
        np.save(folder / "ids.npy", table * self.shape[1] + self.rows.start + row)
        for name, a in {"rows": weights, **self.state}.items():
            flat = a.reshape(-1, a.shape[-1])
            shape = (len(ids), a.shape[-1])
            path = folder / f"{name}.npy"
            if not len(ids):  # an empty file cannot be mapped
                np.save(path, np.empty(shape, a.dtype))
                continue
            # Threads write into the file: no second copy of the rows in memory.
            rows = np.lib.format.open_memmap(path, "w+", a.dtype, shape)
            take_rows([(flat, ids, rows)])
            rows.flush()

    def load(self, folder: Path) -> None:
        """Read a checkpoint from `save`, after `draw` with the same key.

        If it has a state, call `start` with the same rule first. For a shared table, rows of other
        processes are skipped; load the folders of all processes one after the other.

        Raises:
          ValueError: it belongs to another table or rule.
        """
        weights = self._local_weights()
        assert self.moved is not None
        self._wait()
        arrays = {"rows": weights, **self.state}

        def read(name: str) -> np.ndarray:
            array: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return array

        ids = read("ids")
        is_list = ids.ndim == 1 and ids.dtype == np.int64
        n_rows = math.prod(self.shape[:2])
        if not is_list or (ids.size and not 0 <= ids.min() <= ids.max() < n_rows):
            raise ValueError(
                f"{folder} has ids out of range for the table {self.name} {list(self.shape)}."
            )
        table, row = np.divmod(ids, self.shape[1])
        # A checkpoint of any number of processes has ids of the whole table.
        mine = np.flatnonzero((row >= self.rows.start) & (row < self.rows.stop))
        places = (table * len(self.rows) + row - self.rows.start)[mine]
        for name, a in arrays.items():
            saved = read(name)
            if saved.shape != (len(ids), a.shape[-1]) or saved.dtype != a.dtype:
                raise ValueError(
                    f"{folder} has {name} {saved.dtype}{list(saved.shape)}; "
                    f"the table {self.name} needs {a.dtype}{[len(ids), a.shape[-1]]}."
                )
            flat = a.reshape(-1, a.shape[-1])

            def put(part: slice, flat: np.ndarray = flat, saved: np.ndarray = saved) -> None:
                flat[places[part]] = saved[mine[part]]

            in_threads(put, row_slices(len(mine), 1 << 16))
        self.moved.reshape(-1)[places] = True


def open_gradient(gradient: TableGradient) -> TableGradient:
    """Return a gradient with a float cotangent, which all devices can copy to the host."""
    return dataclasses.replace(gradient, sealed=gradient.cotangent)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal initializer that can sample any part separately."""

    deviation: float

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        """Return an array, as `jax.nn.initializers.normal` does."""
        return jax.nn.initializers.normal(self.deviation)(jnp.asarray(key), shape, dtype)

    def supports_ranges(self, dtype: DTypeLike) -> bool:
        """Return True if `sample_range` matches a full call: float32, JAX's default generator."""
        config: Any = jax.config
        usual = config.jax_threefry_partitionable and config.jax_default_prng_impl == "threefry2x32"
        return bool(usual) and jnp.dtype(dtype) == jnp.float32

    def sample_range(self, data: Any, first: int, count: int) -> jax.Array:
        """Return `count` elements of a jitted call's sample from `first` on, in memory order."""
        high, low = divmod(first, 1 << 32)
        sample: jax.Array = _normal_part(
            data, np.uint32(high), np.uint32(low), count, self.deviation
        )
        return sample


@functools.partial(jax.jit, static_argnums=(3, 4))
def _normal_part(data: Any, high: Any, low: Any, count: int, deviation: float) -> jax.Array:
    # `jax.random.normal` generates each element from its position in the array, in two words.
    at = low + jnp.arange(count, dtype=jnp.uint32)
    one, other = _threefry(data, high + (at < low).astype(jnp.uint32), at)
    bits = one ^ other
    # Random bits become the mantissa of a number in [1, 2).
    unit = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    unit = unit - np.float32(1)
    least = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(least, unit * (np.float32(1) - least) + least)
    # One factor, as JAX 0.12 multiplies; earlier versions do when XLA has folded their constants.
    scale = np.float32(np.sqrt(2)) * np.float32(deviation)
    drawn: jax.Array = scale * jax.lax.erf_inv(uniform)
    return drawn


def _threefry(key: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return Threefry-2x32 outputs with twenty rounds, JAX's generator."""
    # Without a loop, so that a CPU keeps the words in registers.
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = x ^ (y << np.uint32(turn) | y >> np.uint32(32 - turn))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


@functools.partial(jax.jit, static_argnums=4, donate_argnums=(0, 1))
def _updated_rows(rows: Any, state: Any, gradient: TableGradient, rate: Any, rule: RowRule) -> Any:
    return update_table(rows, gradient, rate, rule, state)


def _call(index: Any, shape: tuple[int, ...], dtype: Any) -> WeightedLookup:
    """Return the call that reads one row per id, in shapes."""
    ids = jax.ShapeDtypeStruct(index.shape, np.int32)
    coefficients = jax.ShapeDtypeStruct(index.shape, accumulator(dtype))
    arrays = (jax.ShapeDtypeStruct(shape, dtype), ids, coefficients)
    options = {"groups": shape[0], "valued": index.shape[-1], "accumulate": None}
    return WeightedLookup.from_arrays(arrays, options.items())


def _find_native(direction: Any, call: Any, cotangent: Any = None, step: Step | None = None) -> Any:
    """Return the function on NumPy memory from the CPU implementation of such a call, or None."""
    names = kernel_registry.request(call.op, None)
    leaves = [(np.shape(a), a.dtype) for a in call.values()]
    rule = None if step is None else (step.rule, step.factor is None)

    def find() -> tuple[Any]:
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), (call, cotangent, step)
        )
        request = Request(direction, shapes[0], _device(), *shapes[1:])
        spec = kernel_registry.resolve_request(request, names)
        return (getattr(importlib.import_module(spec.target), "on_host", None),)

    key = ("host", direction, names, tuple(leaves), call.options(), rule)
    return kernel_registry.remembered(key, find)[0]


@functools.cache
def _device() -> Any:
    return devices_of([jax.device_put(np.zeros(()), cpu())])[0]


_provided_rows = contextvars.ContextVar[Mapping[HostTable, tuple[Any, Any]]](
    "provided_rows", default=MappingProxyType({})
)


@contextlib.contextmanager
def provide_rows(rows: Mapping[HostTable, Any], part: Any = None) -> Iterator[None]:
    """Provide the rows for table reads in this block.

    They are ``[tables, reads, elements]``, as returned by `HostTable.gather`.

    Args:
      rows: rows by table.
      part: index of the batch part to read, if the rows cover all parts.
    """
    token = _provided_rows.set(
        {**_provided_rows.get(), **{table: (a, part) for table, a in rows.items()}}
    )
    try:
        yield
    finally:
        _provided_rows.reset(token)


def free_memory() -> int | None:
    """Return the bytes this process may allocate, by kernel and control group; None if unknown."""
    free = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free.append(int(available.split()[1]) * 1024)
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            limit, taken = (int((group / name).read_text()) for name in (most, used))
            stat = (group / used).with_name("memory.stat").read_text().split()
            # The page cache counts as used, but the kernel gives its inactive part away first.
            taken -= int(stat[stat.index("inactive_file") + 1])
            free.append(limit - taken)
    return max(min(free), 0) if free else None


def cpu() -> jax.Device:
    """Return the CPU as a JAX device; raise ValueError if JAX has no CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise ValueError(
            f"host-resident tables require the CPU as a second device, but JAX uses only {asked}: "
            f"set JAX_PLATFORMS to {asked},cpu, or unset it."
        ) from error


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads(), "lutjax-host")


def n_threads() -> int:
    """Return the number of row-copy threads: one for each CPU available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(function: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
    """Run a function on each job in all threads, and return the results."""
    return list(_threads().map(function, jobs))


def row_slices(n: int, least: int = _LEAST) -> list[slice]:
    """Return slices for `n` rows: slightly more slices than threads, none small."""
    size = max(-(-n // (4 * n_threads())), least)
    return [slice(first, first + size) for first in range(0, n, size)]


def take_rows(jobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """Copy rows in all threads. A job is a table, ids ``[n]`` and output ``[n, elements]``."""

    def take(job: tuple[np.ndarray, np.ndarray, np.ndarray, slice]) -> None:
        table, ids, out, part = job
        np.take(table, ids[part], axis=0, out=out[part], mode="clip")

    shares = [(*job, part) for job in jobs for part in row_slices(len(job[1]))]
    if len(shares) == 1:
        take(shares[0])
    else:
        in_threads(take, shares)

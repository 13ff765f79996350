"""Training with host-resident tables: the CPU prefetches rows while the device computes."""

import contextlib
import contextvars
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lutjax.tables import _registered
from lutjax.tables._mapped import MappedTable
from lutjax.tables.gradient import TableGradient
from lutjax.tables.host import HostMemoryError, HostTable, in_threads, open_gradient, provide_rows
from lutjax.tables.host_tables import HostTables

__all__ = [
    "Batch",
    "HostMemoryError",
    "HostTable",
    "HostTables",
    "MappedTable",
    "RowPrefetcher",
    "ShardedHostTable",
    "provide_rows",
]

_SMALL = 1 << 20  # JAX fetches smaller arrays as fast
_SAMPLES = "data"  # mesh axis over which `ShardedHostTable` shards samples


class Batch(NamedTuple):
    """Rows of a batch on the device, by table name.

    Attributes:
      rows: ``[tables, reads, elements]`` each, see `lutjax.optim.host.HostTable.gather`; as
        `lutjax.optim.host.HostTable.fetch` returns them.
      ids: compact ids of these rows, ``[n, tables, ways]``, below the number of distinct rows:
        equal for equal rows, in the order of the table ids.
    """

    rows: dict[str, Any]
    ids: dict[str, Any]


class Ids(NamedTuple):
    """Batch row ids by table name: ids in the tables, and compact ids for a `Batch`."""

    of_tables: dict[str, np.ndarray]
    own: dict[str, np.ndarray]


def _compact_ids(ids: np.ndarray) -> np.ndarray:
    """Return compact ids for each table, ``[n, tables, ways]``."""
    by_table = np.moveaxis(ids, 1, 0)
    ids_by_table = in_threads(
        lambda a: np.unique(a, return_inverse=True)[1].reshape(a.shape).astype(np.int32), by_table
    )
    return np.stack(ids_by_table, 1)


class RowPrefetcher:
    """Queue of prefetched rows and pending updates.

    One thread owns the tables and works in an order that depends only on the steps.

    Step ``s``'s rows are gathered as soon as step ``s - depth - 1``'s update is done. With depth 0,
    rows are exact, and a step begins after the previous update. With a larger depth, the thread
    works while the device computes, and rows lack at most the last `depth` updates.

    Args:
      tables: host tables by name, started with a row rule.
      ids: returns a step's row ids for each table, ``[n, tables, ways]``.
      rate: returns a step's learning rate.
      depth: prefetch depth, in steps.
      put: transfers an array pytree to the device.
      lands: copy rows into reused GPU memory: while programs run, and faster. The program whose
        gradients `update` gets must then be the last one to read the batch of a step.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax, numpy as np
      >>> from lutjax import optim
      >>> from lutjax.optim import host
      >>> table = host.HostTable((1, 100, 2), np.float32, jax.nn.initializers.zeros)
      >>> table.draw(jax.random.key(0))
      >>> table.start(optim.SGD())
      >>> ids = lambda step: {"memory": np.full((3, 1, 1), step, np.int32)}
      >>> ahead = host.RowPrefetcher({"memory": table}, ids, rate=lambda step: 0.5)
      >>> def loss(rows, index):
      ...     with host.provide_rows({table: rows["memory"]}):
      ...         weights, own = table.read(index)
      ...         return (lutjax.weighted_lookup(weights, own, jnp.ones(own.shape)) - 1).sum()
      >>> for step in range(2):
      ...     batch = ahead.batch(step)
      ...     ahead.update(step, optim.value_and_grad(loss)(batch.rows, batch.ids["memory"])[1])
      >>> ahead.wait()
      >>> table.weights[0, :3, 0]
      array([-1.5, -1.5,  0. ], dtype=float32)
    """

    def __init__(
        self,
        tables: Mapping[str, HostTable],
        ids: Callable[[int], Mapping[str, np.ndarray]],
        rate: Callable[[int], Any],
        depth: int = 0,
        put: Callable[[Any], Any] = jax.device_put,
        lands: bool = False,
    ):
        self._tables, self._ids, self._rate, self._put = dict(tables), ids, rate, put
        self.depth, self._lands = depth, lands
        self._landings: dict[Any, list[jax.Array]] = {}
        # One thread for each stage. The stages without tables work ahead of the table thread, which
        # applies updates and gathers rows in the order of submission: so a run is reproducible.
        self._threads = {
            what: ThreadPoolExecutor(1, f"lutjax-host-{what}")
            for what in ("ids", "get", "tables", "put")
        }
        self._known: dict[int, Future[Ids]] = {}
        self._queue = deque[tuple[Future[Ids], Future[dict[str, np.ndarray]], Future[Batch]]]()
        self._updates: deque[Future[None]] = deque()
        self._buffers: dict[Any, list[np.ndarray]] = {}
        self._next = 0
        """First step in the queue."""

    def batch(self, step: int) -> Batch:
        """Return a step's rows; a step out of sequence restarts the queue."""
        if step != self._next or not self._queue:
            self.begin(step)
        return self._queue[0][2].result()

    def update(self, step: int, gradients: Mapping[str, TableGradient]) -> None:
        """Update rows by a step's gradients, once available, and gather a later step's rows.

        Args:
          step: step number.
          gradients: batch row gradients, as `lutjax.optim.value_and_grad` returns them.
        """
        assert step == self._next, "batch(step) comes first"
        ids, _, batch = self._queue.popleft()
        self._next += 1
        opened = {name: open_gradient(g) for name, g in gradients.items()}
        fetched = self._submit("get", self._fetch_gradients, opened, batch)
        self._updates.append(self._submit("tables", self._move, step, fetched, ids))
        self._fetch(step + 1 + self.depth)
        # Errors of finished updates are raised here, in the caller's thread, and not only at the
        # end.
        while self._updates and self._updates[0].done():
            self._updates.popleft().result()  # re-raises its error

    def wait(self) -> None:
        """Wait until all updates are done; raise the error of an update or a gather."""
        while self._updates:
            self._updates.popleft().result()
        for _, rows, _ in self._queue:
            rows.result()

    def begin(self, step: int, rows: Sequence[Mapping[str, np.ndarray]] = ()) -> None:
        """Begin with a step.

        Args:
          step: first step.
          rows: rows for the first steps, from `queued`; rows for later steps are gathered now.
        """
        self.wait()
        self._queue.clear()
        self._landings = {}  # a program may still read the old memory
        self._known.clear()
        self._next = step
        for at in range(step, step + self.depth + 1):
            self._fetch(at, rows[at - step] if at - step < len(rows) else None)

    def _fetch(self, step: int, stored: Mapping[str, np.ndarray] | None = None) -> None:
        # Ids of a step ahead, so that the id thread works while the tables are busy.
        for at in (step, step + 1):
            if at not in self._known:
                self._known[at] = self._submit("ids", self._ids_of, at)
        ids = self._known.pop(step)
        rows = self._submit("tables", self._gather_rows, ids, stored)
        self._queue.append((ids, rows, self._submit("put", self._place_batch, rows, ids)))

    def _place_batch(self, rows: Future[dict[str, np.ndarray]], ids: Future["Ids"]) -> Batch:
        gathered, compact_ids = rows.result(), ids.result().own
        if self._driver is None:
            batch: Batch = self._put(Batch(gathered, compact_ids))
            return batch
        placed = {name: self._copy_rows(a) for name, a in gathered.items()}
        return Batch(placed, self._put(compact_ids))

    @functools.cached_property
    def _driver(self) -> "_registered.Driver | None":
        """Return the driver of the GPU that receives the rows; None if JAX transfers them."""
        if not self._lands:
            return None
        with contextlib.suppress(_registered.RegistrationError):
            return _registered.driver_of(self._put(np.zeros(1, np.float32)))
        return None

    def _copy_rows(self, rows: np.ndarray) -> Any:
        """Copy rows to the GPU while it computes; a JAX copy waits for earlier programs."""
        assert self._driver is not None
        # JAX has views of external float memory only.
        if rows.dtype.kind != "f":
            return self._put(rows)
        # Memory on the device is reused once no array refers to it: an allocation would wait for
        # earlier programs.
        free = self._landings.setdefault((rows.shape, rows.dtype), [])
        with contextlib.suppress(_registered.RegistrationError):
            memory = free.pop() if free else jax.block_until_ready(self._put(np.zeros_like(rows)))
            self._driver.copy_in(rows, memory)
            lent = _registered.view(memory)
            weakref.finalize(lent, free.append, memory)
            return lent
        return self._put(rows)

    def _ids_of(self, step: int) -> "Ids":
        ids_of_tables = dict(self._ids(step))
        return Ids(ids_of_tables, {name: _compact_ids(ids) for name, ids in ids_of_tables.items()})

    def _submit(self, what: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        # Threads inherit the caller's `lutjax.use_implementation`.
        return self._threads[what].submit(contextvars.copy_context().run, function, *args)

    def _gather_rows(
        self, ids: Future["Ids"], stored: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray]:
        index_of = ids.result().of_tables
        if stored is not None:
            return {
                name: table.own(stored[name], index_of[name])
                for name, table in self._tables.items()
            }
        rows = {}
        for name, table in self._tables.items():
            index = index_of[name]
            length, dtype = table.record
            shape = (table.shape[0], len(index) * index.shape[-1], length)
            rows[name] = table.fetch(index, self._buffer(shape, dtype, self._driver))
        return rows

    def _fetch_gradients(
        self, gradients: Mapping[str, TableGradient], batch: Any
    ) -> Mapping[str, TableGradient]:
        """Return computed gradients on the host; the batch stays alive until the step ends."""
        jax.block_until_ready(gradients)
        fetched: Mapping[str, TableGradient] = jax.tree.map(self._fetch_array, gradients)
        return fetched

    def _fetch_array(self, array: Any) -> np.ndarray:
        # Without page-locked memory, JAX copies the array twice.
        with contextlib.suppress(_registered.RegistrationError):
            driver = _registered.driver_of(array) if array.nbytes > _SMALL else None
            if driver is not None:
                buffer = self._buffer(array.shape, array.dtype, driver)
                driver.copy_out(array, buffer)
                return buffer
        return np.asarray(jax.device_get(array))

    def _buffer(
        self, shape: tuple[int, ...], dtype: Any, driver: "_registered.Driver | None"
    ) -> np.ndarray:
        """Return a reused buffer, page-locked if there is a driver; new memory is slow."""
        free = self._buffers.setdefault((shape, dtype, driver is not None), [])
        memory = free.pop() if free else None
        if memory is None and driver is not None:
            # Without page-locked memory copies are slower, but work.
            with contextlib.suppress(_registered.RegistrationError):
                memory = _registered.allocate_registered(shape, dtype, driver)
        if memory is None:
            memory = np.empty(shape, dtype)
        # The view is lent: when it is gone, its memory is free again.
        lent = memory.view()
        weakref.finalize(lent, free.append, memory)
        return lent

    def _move(
        self, step: int, gradients: Future[Mapping[str, TableGradient]], ids: Future["Ids"]
    ) -> None:
        rate, fetched, index = self._rate(step), gradients.result(), ids.result().of_tables
        for name, table in self._tables.items():
            # Gradients are available, so earlier programs that read the table have ended.
            table.update(table.gradient_of(fetched[name], index[name]), rate, waits=False)

    def abstract(self) -> Batch:
        """Return a batch's shapes and dtypes."""
        ids = self._ids(0)
        rows = {}
        for name, a in ids.items():
            length, dtype = self._tables[name].record
            rows[name] = jax.ShapeDtypeStruct((len(a[0]), len(a) * a.shape[-1], length), dtype)
        compact = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in ids.items()}
        return Batch(rows, compact)

    def queued(self) -> list[dict[str, np.ndarray]]:
        """Return prefetched rows that lack the last updates, for a checkpoint; at most `depth`."""
        self.wait()
        return [rows.result() for _, rows, _ in list(self._queue)[: self.depth]]


class ShardedHostTable:
    """Placement of a `Batch` on a mesh with sharded samples: `put` of `RowPrefetcher`.

    If several processes share the rows (`lutjax.optim.host.HostTable.share`), each process
    transfers its own rows and zeros, and `gather_rows` adds them.

    Args:
      mesh: mesh with an axis ``data`` for samples; it has all devices of all processes, the same
        number for each.

    Source: docs/semantics.md, section 14.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh
      >>> from lutjax.optim import host
      >>> put = host.ShardedHostTable(Mesh(jax.devices(), ("data",)))
      >>> n = 2 * jax.device_count()
      >>> rows, ids = np.ones((3, n, 4), np.float32), np.arange(3 * n).reshape(n, 3, 1)
      >>> batch = put(host.Batch({"memory": rows}, {"memory": ids}))
      >>> gathered = jax.jit(put.gather_rows)(batch)
      >>> tuple(batch.rows["memory"].sharding.spec), gathered["memory"].shape == rows.shape
      ((None, 'data'), True)
    """

    def __init__(self, mesh: Mesh):
        self._n, self._mesh = jax.process_count(), mesh
        self._of_ids = NamedSharding(mesh, PartitionSpec(_SAMPLES))
        of_rows = PartitionSpec(None, _SAMPLES) if self._n == 1 else PartitionSpec(mesh.axis_names)
        self._of_rows = NamedSharding(mesh, of_rows)

    def __call__(self, batch: Batch) -> Batch:
        """Transfer a batch to the mesh."""

        def put(rows: np.ndarray) -> jax.Array:
            shape = self._shape(rows)
            if self._n == 1:
                return _put(rows, self._of_rows)
            size, n_local = shape[2], self._mesh.size // self._n

            # Rows are padded so that the devices of a process share them evenly.
            def pad_rows(part: Any) -> np.ndarray:
                first = part[0].start % n_local * size
                own_rows = rows[:, first : first + size]
                return np.pad(own_rows, [(0, 0), (0, size - own_rows.shape[1]), (0, 0)])[None]

            return jax.make_array_from_callback(shape, self._of_rows, pad_rows)

        ids = {name: _put(a, self._of_ids) for name, a in batch.ids.items()}
        return Batch({name: put(a) for name, a in batch.rows.items()}, ids)

    def abstract(self, batch: Batch) -> Batch:
        """Return shapes, dtypes and shardings of a transferred batch, given its host arrays."""
        rows = {
            name: jax.ShapeDtypeStruct(self._shape(a), a.dtype, sharding=self._of_rows)
            for name, a in batch.rows.items()
        }
        ids = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._of_ids)
            for name, a in batch.ids.items()
        }
        return Batch(rows, ids)

    def _shape(self, rows: Any) -> tuple[int, ...]:
        """Return the shape of rows ``[tables, reads, elements]`` on the mesh.

        With several processes it is ``[devices, tables, part of the reads, elements]``.
        """
        if self._n == 1:
            return tuple(rows.shape)
        n_tables, n_reads, width = rows.shape
        return self._mesh.size, n_tables, -(-n_reads // (self._mesh.size // self._n)), width

    def gather_rows(self, batch: Batch) -> dict[str, Any]:
        """Return the rows of all processes, ``[tables, reads, elements]``; call it inside `jit`."""
        if self._n == 1:
            return dict(batch.rows)
        rows_by_name = {}
        for name, a in batch.rows.items():
            n_reads = math.prod(batch.ids[name].shape[::2])
            # Each process has partial sums `[processes, devices of a process, tables, ...]`: a sum
            # selects the only process that has a row, as others have zeros.
            of_all = a.reshape(self._n, -1, *a.shape[1:]).sum(0, dtype=a.dtype)
            rows = jnp.moveaxis(of_all, 0, 1).reshape(a.shape[1], -1, a.shape[3])
            rows_by_name[name] = rows[:, :n_reads]
        return rows_by_name


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return an array on all processes' devices, from every process's host array."""
    return jax.make_array_from_callback(array.shape, sharding, lambda part: np.asarray(array[part]))

"""Training with host-resident tables: steps, and checkpoint contents."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lutjax.optim import RowRule
from lutjax.optim.host import Batch, HostTable, HostTables, RowPrefetcher, ShardedHostTable
from lutjax.tables.host_tables import share_of, shares
from lutjax.training import hosts, meshes
from lutjax.training.errors import CheckpointError
from lutjax.training.loop import Advance, Repeated, State, compiler_options

FOLDER = "host"  # checkpoint folder with host memory contents


def share(structure: Any, mesh: Mesh) -> None:
    """Assign a row block of uninitialized tables to each process, and set their devices."""
    for table, _ in structure.host_tables.values():
        table.share(hosts.index(), hosts.count(), mesh)


class Steps(Repeated):
    """Steps that read rows from a `RowPrefetcher`, one jitted call each.

    Args:
      step: one step, of the state, its number, the data and its `Batch`; returns the state, the
        loss, and table gradients by name.
      data: pytree of arrays passed to every step; transferred to the device at first use.
      ahead: prefetcher of the tables.
      of_state, of_data: shardings of the state and data on a mesh; by default a single device.
      on_mesh: placement of a batch on the mesh.
    """

    def __init__(
        self,
        step: Any,
        data: Any,
        ahead: RowPrefetcher,
        *,
        of_state: Any = None,
        of_data: Any = None,
        on_mesh: ShardedHostTable | None = None,
    ):
        self.step, self._data, self._of_data, self.ahead = step, data, of_data, ahead
        self._on_mesh = on_mesh
        options: dict[str, Any] = {"compiler_options": compiler_options()}
        if of_state is not None:
            everywhere = meshes.replicated_sharding(jax.tree.leaves(of_state)[0].mesh)
            # Every process needs the complete gradient; one process takes it from any device.
            of_gradient = everywhere if hosts.count() > 1 else None
            options["out_shardings"] = (of_state, everywhere, of_gradient)
        self._jitted = jax.jit(step, donate_argnums=0, **options)

    def __call__(self, state: State, first: int, count: int) -> tuple[State, Any]:
        """Run `count` steps, consuming the state; return the state and mean loss."""
        state, losses = self._run(self._jitted, state, first, [count])
        return state, losses[0]

    def run_parts(self, state: State, first: int, ends: Sequence[int]) -> tuple[State, Any]:
        """Run steps from step `first`; see `lutjax.training.loop.Repeated.run_parts`."""
        return self._run(self._jitted, state, first, ends)

    def _run(
        self, program: Any, state: State, first: int, ends: Sequence[int]
    ) -> tuple[State, Any]:
        losses = []
        for number in range(first, first + ends[-1]):
            # Nothing here waits for the device: losses stay there until the end, so that the CPU
            # prefetches the next rows meanwhile.
            batch = self.ahead.batch(number)
            state, loss, gradients = program(state, np.int32(number), self.data, batch)
            self.ahead.update(number, gradients)
            losses.append(loss)
        self.ahead.wait()
        values = np.asarray(jax.device_get(losses), np.float32)
        parts = zip([0, *ends[:-1]], ends, strict=True)
        # Accumulate sequentially, as on the device: np.sum adds pairwise and rounds differently.
        means = [np.add.accumulate(values[a:b])[-1] / np.float32(b - a) for a, b in parts]
        return state, np.asarray(means)

    def trace(self, state: State) -> None:
        """Trace the program for the state's shapes and dtypes; calls reuse this trace."""
        self._jitted.trace(state, np.int32(0), self.data, self._batch())

    def _batch(self) -> Batch:
        batch = self.ahead.abstract()
        return batch if self._on_mesh is None else self._on_mesh.abstract(batch)

    def compile_program(self, state: State) -> tuple[jax.stages.Compiled, Advance]:
        """Return the compiled program for the state's shapes and dtypes, and its call function."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        program = self._jitted.lower(state, number, self.data, self._batch()).compile()

        def advance(state: State, first: int, count: int) -> tuple[State, Any]:
            state, losses = self._run(program, state, first, [count])
            return state, losses[0]

        return program, advance


def save(
    folder: Path, tables: Mapping[str, HostTable], queued: Sequence[Mapping[str, np.ndarray]] = ()
) -> None:
    """Write tables and prefetched rows into a checkpoint folder.

    All processes call it, and each writes its own rows.
    """
    of_host = HostTables(tables)
    of_host.save(folder / FOLDER)
    for i, (name, table) in enumerate(of_host.items()):
        for k, rows in enumerate(queued):
            np.save(share_of(table, folder / FOLDER / str(i)) / f"queued_{k}.npy", rows[name])


def load(folder: Path, structure: Any, others: Any, rule: RowRule | None = None) -> None:
    """Restore a structure's tables from a checkpoint.

    `others` has the PRNG keys of the initialization. Without a rule no optimizer state is read.

    Raises:
      CheckpointError: the checkpoint has other tables.
      HostMemoryError: host memory is too small.
    """
    keys = structure.host_keys(others)
    tables = HostTables({name: table for name, (table, _) in structure.host_tables.items()})
    for name, table in tables.items():
        table.draw(jax.random.wrap_key_data(jnp.asarray(keys[name])))
        if rule is not None:
            table.start(rule)
    with _convert_load_errors(folder):
        tables.load(folder / FOLDER)


def load_queued_rows(folder: Path, like: Batch, depth: int) -> list[dict[str, np.ndarray]]:
    """Return the prefetched rows from `save`; `like` is from `RowPrefetcher.abstract`."""
    queued: list[dict[str, np.ndarray]] = []
    for k in range(depth):
        rows = {}
        for i, (name, expected) in enumerate(sorted(like.rows.items())):
            with _convert_load_errors(folder):
                paths = [share / f"queued_{k}.npy" for share in shares(folder / FOLDER / str(i))]
                of_each = [np.load(path, allow_pickle=False) for path in paths]
                # Each process wrote its own rows, and zeros elsewhere.
                rows[name] = functools.reduce(np.add, of_each)
            if (rows[name].shape, rows[name].dtype) != (expected.shape, expected.dtype):
                raise CheckpointError(
                    f"the checkpoint {folder} does not fit this run: {paths[0].name} of {name} is "
                    f"{rows[name].dtype}{list(rows[name].shape)}, not "
                    f"{expected.dtype}{list(expected.shape)}."
                )
        queued.append(rows)
    return queued


@contextlib.contextmanager
def _convert_load_errors(folder: Path) -> Any:
    try:
        yield
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} does not fit this model: {error}"
        ) from error

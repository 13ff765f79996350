"""Host-resident tables for models with plain-array parameters: Flax Linen, Haiku, or your own."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from lutjax.arguments import format_value
from lutjax.tables.gradient import TableGradient
from lutjax.tables.host import HostTable
from lutjax.values._row_rules import RowRule

KEY = "{}_key"  # name of the key that initializes a layer's table


class HostTables(Mapping[str, HostTable]):
    """Host-resident tables, by the names that they would have among a model's parameters.

    A Flax Linen or Haiku layer holds no tables itself. Pass one object of this class as
    ``placement=`` to all memory layers in a model: each layer adds its own tables, without rows,
    when it first runs, as in ``init``. Rows are read as zeros there. Then `draw` initializes the
    rows from the keys that ``init`` returned with the parameters, with the same values as ``init``
    would use for tables on a device.

    It is a mapping, and serves as the argument `host` of `lutjax.optim.value_and_grad` and
    `lutjax.optim.host.RowPrefetcher`. It is compared and hashed by identity, so it can be a module
    attribute.

    Args:
      tables: existing tables, by name.

    Source: docs/semantics.md, section 14.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import ProductKeyMemory
      >>> from lutjax import optim
      >>> from lutjax.optim import host
      >>> memory = host.HostTables()
      >>> layer = ProductKeyMemory(8, 4, n_keys=16, k=2, placement=memory)
      >>> others = layer.init(jax.random.key(0), jnp.ones((3, 8)))
      >>> params = others.pop("params")
      >>> memory.draw(others["keys"])
      >>> memory.start(optim.RowAdam())
      >>> @jax.jit
      ... def step(params, others, x):
      ...     def loss(params):
      ...         return jnp.mean((layer.apply({"params": params, **others}, x) - 1) ** 2)
      ...     value, (_, gradients) = optim.value_and_grad(loss, host=memory)(params)
      ...     return value, gradients
      >>> losses = []
      >>> for _ in range(3):
      ...     value, gradients = step(params, others, jnp.ones((3, 8)))
      ...     memory.update(gradients, 0.1)
      ...     losses.append(float(value))
      >>> losses[0] > losses[1] > losses[2], list(memory)
      (True, ['weights'])
    """

    def __init__(self, tables: Mapping[str, HostTable] | None = None):
        self._tables = dict(tables or {})

    def __getitem__(self, name: str) -> HostTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._tables))

    def __len__(self) -> int:
        return len(self._tables)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        return f"HostTables({', '.join(f'{name}: {table}' for name, table in self.items())})"

    def table(self, name: str, shape: tuple[int, ...], dtype: DTypeLike, init: Any) -> HostTable:
        """Return a table by name; create it without rows if it is missing.

        Raises:
          ValueError: the table has another shape or dtype.
        """
        table = self._tables.setdefault(name, HostTable(shape, dtype, init, name))
        if (table.shape, table.dtype) != (tuple(shape), np.dtype(dtype)):
            raise ValueError(
                f"HostTables: {name} is {table}, but a layer needs {np.dtype(dtype)}{list(shape)}: "
                "use separate HostTables for each model."
            )
        return table

    def draw(self, keys: Any) -> None:
        """Initialize the rows of all tables; see `HostTable.draw`.

        Args:
          keys: nested dicts with the keys: ``variables["keys"]`` in Flax Linen, the state in Haiku.

        Raises:
          ValueError: a table's key is missing, or there are no tables.
          HostMemoryError: host memory is too small.
        """
        keys_by_name = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree.leaves_with_path(keys)
        }
        if not self._tables:
            raise ValueError(
                "HostTables.draw: there are no tables yet: first run init of the model whose "
                "layers have them as placement=."
            )
        for name in self:
            if KEY.format(name) not in keys_by_name:
                raise ValueError(
                    f"HostTables.draw: keys has {format_value(sorted(keys_by_name))}, but not "
                    f"{KEY.format(name)}: give variables['keys'] from Flax Linen, or the state "
                    "from Haiku."
                )
        for name, table in self.items():
            table.draw(jax.random.wrap_key_data(jnp.asarray(keys_by_name[KEY.format(name)])))

    def start(self, rule: RowRule) -> None:
        """Initialize a rule's state for all tables; see `HostTable.start`.

        Start tables with different rules one by one.

        Raises:
          HostMemoryError: host memory is too small.
          ValueError: the rule keeps more than per-row arrays.
        """
        for table in self.values():
            table.start(rule)

    def update(self, gradients: Mapping[str, TableGradient], rate: Any) -> None:
        """Update all tables by one step, each by its rule; outside of jit.

        Args:
          gradients: gradients of all tables, from `lutjax.optim.value_and_grad` with this object as
              `host`.
          rate: the learning rate of the step.

        Raises:
          ValueError: a table has no rule, or the gradients belong to another model.
        """
        if set(self._tables) != set(gradients):
            raise ValueError(
                f"the gradients are for the tables {sorted(gradients)}; the model's host-resident "
                f"tables are {list(self)}."
            )
        for name, table in self.items():
            table.update(gradients[name], rate)

    def save(self, folder: Path) -> None:
        """Write the updated rows and their state into a new folder.

        The keys reproduce all other rows, so save the keys as well. With shared tables, all
        processes call it with the same folder, and each writes its own rows.
        """
        for i, table in enumerate(self.values()):
            table.save(share_of(table, Path(folder) / str(i)))

    def load(self, folder: Path) -> None:
        """Read a checkpoint from `save`, after `draw` with the same keys.

        If it has a state, call `start` with the same rule first. Any number of processes may read
        it, regardless of the number that wrote it.

        Raises:
          ValueError: it belongs to other tables or another rule.
          OSError: it does not exist.
        """
        for i, table in enumerate(self.values()):
            for share in shares(Path(folder) / str(i)):
                table.load(share)

    def share(self, process: int, n_processes: int, mesh: Mesh) -> None:
        """Divide rows over processes, after ``init`` and before `draw`; see `HostTable.share`."""
        for table in self.values():
            table.share(process, n_processes, mesh)


def share_of(table: HostTable, folder: Path) -> Path:
    """Return the folder for this process's rows inside a table's folder."""
    return folder / str(table.rows.start) if table.is_shared else folder


def shares(folder: Path) -> list[Path]:
    """Return the folders with the processes' rows: `folder` if one process had all."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) or [folder]


class Blank(HostTable):
    """Table that reads as zeros, used while a layer's variables are initialized."""

    def gather(
        self, index: Int[np.ndarray, "n tables ways"], out: np.ndarray | None = None
    ) -> Float[np.ndarray, "tables reads numbers"]:
        """Return zeros."""
        n, n_tables, ways = index.shape
        return np.zeros((n_tables, n * ways, self.shape[-1]), self.dtype)

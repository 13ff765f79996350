"""Tables in the memory of the host of models whose parameters are plain arrays: those of Flax Linen, of Haiku, and of your own."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from lutjax.arguments import shown
from lutjax.tables.gradient import TableGradient
from lutjax.tables.host import HostTable
from lutjax.values._row_rules import RowRule

KEY = "{}_key"
"""Name of the key that draws a table of a layer."""


class HostTables(Mapping[str, HostTable]):
    """Tables in the memory of the host, by the names that they would have among the parameters of a model.

    A layer of Flax Linen or Haiku holds no tables itself. As ``placement=`` of the memory layers of a model one object of this class has those of all of them: each adds its own, without
    rows, when it runs for the first time, as in ``init``. There, rows are read as zeros. Then `draw` makes the rows, of the keys that ``init`` returned beside the
    parameters, which are the same numbers as ``init`` would draw for tables on a device.

    It is a mapping, so it is what the argument `host` of `lutjax.optim.value_and_grad`, and `lutjax.optim.host.RowPrefetcher` take. It is compared and hashed by its identity, so it can
    be an attribute of a module.

    Args:
      tables: that are there already, by name.

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
      ...     loss = lambda params: jnp.mean((layer.apply({"params": params, **others}, x) - 1) ** 2)
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
        """Return the table of a name, made without rows if there is none.

        Raises:
          ValueError: there is one of another shape or dtype.
        """
        found = self._tables.setdefault(name, HostTable(shape, dtype, init, name))
        if (found.shape, found.dtype) != (tuple(shape), np.dtype(dtype)):
            raise ValueError(
                f"HostTables: {name} is {found}, and a layer needs {np.dtype(dtype)}{list(shape)}: give each model HostTables of its own."
            )
        return found

    def draw(self, keys: Any) -> None:
        """Make the rows of all tables; see `HostTable.draw`.

        Args:
          keys: nested dicts with the keys: ``variables["keys"]`` of Flax Linen, the state of Haiku.

        Raises:
          ValueError: a table has no key there, or there are no tables.
          HostMemoryError: the memory of the host is too small.
        """
        leaves = jax.tree.leaves_with_path(keys)
        found = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        if not self._tables:
            raise ValueError(
                "HostTables.draw: there are no tables yet: run init of the model whose layers have them as placement=."
            )
        for name in self:
            if KEY.format(name) not in found:
                raise ValueError(
                    f"HostTables.draw: keys has no {KEY.format(name)}, but {shown(sorted(found))}: give variables['keys'] of Flax Linen, or the state of Haiku."
                )
        for name, table in self.items():
            table.draw(jax.random.wrap_key_data(jnp.asarray(found[KEY.format(name)])))

    def start(self, rule: RowRule) -> None:
        """Make the state of a rule for all tables; see `HostTable.start`. Tables by other rules are started one by one.

        Raises:
          HostMemoryError: the memory of the host is too small.
          ValueError: the rule keeps more than numbers of each row.
        """
        for table in self.values():
            table.start(rule)

    def update(self, gradients: Mapping[str, TableGradient], rate: Any) -> None:
        """Move all tables by one step, each by its rule; outside of jit.

        Args:
          gradients: of all tables, from `lutjax.optim.value_and_grad` with these as `host`.
          rate: the learning rate of the step.

        Raises:
          ValueError: a table has no rule yet, or the gradients are those of another model.
        """
        if set(self._tables) != set(gradients):
            raise ValueError(
                f"the gradients are of the tables {sorted(gradients)}; in the memory of the host the model has {list(self)}."
            )
        for name, table in self.items():
            table.update(gradients[name], rate)

    def save(self, folder: Path) -> None:
        """Write the rows that have moved, and their state, into a new folder; the others follow from the keys, so save these, too.

        Of tables that are shared each process writes its own rows: all of them call it with the same folder.
        """
        for i, table in enumerate(self.values()):
            table.save(share_of(table, Path(folder) / str(i)))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, after `draw` with the same keys, and `start` with the same rule where there is a state.

        As many processes as like may read it, however many wrote it.

        Raises:
          ValueError: it is of other tables or another rule.
          OSError: it is not there.
        """
        for i, table in enumerate(self.values()):
            for share in shares(Path(folder) / str(i)):
                table.load(share)

    def share(self, process: int, n_processes: int, mesh: Mesh) -> None:
        """Leave rows to other processes, when ``init`` has run, and before `draw`; see `HostTable.share`."""
        for table in self.values():
            table.share(process, n_processes, mesh)


def share_of(table: HostTable, folder: Path) -> Path:
    """Return the folder of the rows of this process in that of a table."""
    return folder / str(table.rows.start) if table.is_shared else folder


def shares(folder: Path) -> list[Path]:
    """Return the folders into which processes wrote their rows of a table: itself, where one had all."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) or [folder]


class Blank(HostTable):
    """Table that is read as zeros: of a layer whose variables are being made."""

    def gather(
        self, index: Int[np.ndarray, "n tables ways"], out: np.ndarray | None = None
    ) -> Float[np.ndarray, "tables reads numbers"]:
        """Return zeros."""
        n, n_tables, ways = index.shape
        return np.zeros((n_tables, n * ways, self.shape[-1]), self.dtype)

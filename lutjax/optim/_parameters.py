"""Parameter kinds as Optax labels and masks, and a penalty on tables."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

import lutjax
from lutjax.tables.collect import Chosen, select_tables

__all__ = ["cell_total_variation", "decayed", "kind_of", "kinds"]

_BIASES = ("bias", "scale", "offset", "b")


def kind_of(name: str, array: Any, tables: Chosen) -> str:
    """Return the kind of a parameter: ``"table"``, ``"scalar"``, ``"matrix"`` or ``"vector"``.

    Layers declare their tables. A scalar, such as a scalar of a table read, has no axis or a name
    ``log_...``. A vector has one axis, or the name ``bias``, ``..._bias``, ``scale``, ``offset`` or
    ``b``. All other parameters are matrices. Kinds are therefore the same in blocks that are
    stacked for a scan, with one more axis.

    Args:
      name: keys from the root of the parameters, joined by ``/``.
      array: the parameter, or its shape and dtype.
      tables: table names, as `tables_of` of `lutjax.layers.nnx`, `linen` and `haiku` finds them, or
        a function of name and array.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax import optim
      >>> optim.kind_of("block/weights", jnp.zeros((8, 16, 4)), tables={"block/weights"})
      'table'
      >>> optim.kind_of("mine/weights", jnp.zeros((8, 16, 4)), tables={"block/weights"})
      'matrix'
    """
    tables = select_tables("kind_of", tables)
    last, rank = name.rpartition("/")[2], len(array.shape)
    if tables(name, array) if callable(tables) else name in tables:
        return "table"
    if rank == 0 or last.startswith("log_"):
        return "scalar"
    if rank == 1 or last in _BIASES or last.endswith("_bias"):
        return "vector"
    return "matrix"


def kinds(params: Any, tables: Chosen) -> Any:
    """Return the kind of each parameter, see `kind_of`, for ``optax.multi_transform``.

    Args:
      params: a pytree of arrays from any library; for Flax NNX also an `nnx.State`.
      tables: as for `kind_of`.

    Example:
      >>> import functools, jax.numpy as jnp, optax
      >>> from lutjax import optim
      >>> params = {"weights": jnp.zeros((8, 16, 4)), "log_tau": jnp.zeros(())}
      >>> params["kernel"] = jnp.zeros((4, 4))
      >>> kinds = functools.partial(optim.kinds, tables={"weights"})
      >>> kinds(params)
      {'kernel': 'matrix', 'log_tau': 'scalar', 'weights': 'table'}
      >>> adam = optax.adam(1e-2)
      >>> transforms = {"table": adam, "matrix": optax.adamw(1e-3), "scalar": adam}
      >>> optimizer = optax.multi_transform(transforms, kinds)
      >>> state = optimizer.init(params)
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, array: kind_of(_name(path), array, tables), params
    )


def decayed(params: Any, tables: Chosen) -> Any:
    """Return a weight-decay mask: True for matrices, False for tables, scalars, biases and norms.

    Args:
      params: as for `kinds`.
      tables: as for `kinds`.

    Example:
      >>> import functools, jax.numpy as jnp, optax
      >>> from lutjax import optim
      >>> mask = functools.partial(optim.decayed, tables={"weights"})
      >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=mask)
      >>> params = {"weights": jnp.zeros((8, 16, 4)), "kernel": jnp.zeros((4, 4))}
      >>> mask({**params, "bias": jnp.zeros(4)})
      {'bias': False, 'kernel': True, 'weights': False}
    """
    return jax.tree.map(lambda kind: kind == "matrix", kinds(params, tables))


def cell_total_variation(params: Any, tables: Chosen) -> Float[jax.Array, ""]:
    """Return the mean `lutjax.cell_total_variation` over a model's layers with tables.

    Its gradient has the shape of the tables, so use `jax.grad`. `lutjax.optim.value_and_grad`
    raises an error for tables with a sparse gradient.

    Args:
      params: as for `kinds`. Blocks stacked for a scan count individually.
      tables: as for `kinds`.

    Returns:
      ``[]``; 0 if there are no tables.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax import optim
      >>> a, b = jnp.array([[[1.0], [3.0]]]), jnp.zeros((1, 2, 1))
      >>> params = {"a": {"weights": a}, "b": {"weights": b}}
      >>> optim.cell_total_variation(params, tables={"a/weights", "b/weights"})
      Array(2., dtype=float32)
    """
    table_arrays = [
        array
        for path, array in jax.tree_util.tree_leaves_with_path(params)
        if kind_of(_name(path), array, tables) == "table"
    ]
    layers = [math.prod(table.shape[:-3]) for table in table_arrays]
    each = [
        # The mean over stacked layers equals the value for one layer with all their tables.
        n * lutjax.cell_total_variation(table.reshape(-1, *table.shape[-2:]))
        for n, table in zip(layers, table_arrays, strict=True)
    ]
    mean: jax.Array = sum(each, jnp.float32(0)) / max(sum(layers), 1)
    return mean


def _name(path: tuple[Any, ...]) -> str:
    last = path[-1:]
    if last and isinstance(last[0], jax.tree_util.GetAttrKey) and last[0].name == "value":
        path = path[:-1]  # the array of a Flax NNX variable
    return jax.tree_util.keystr(path, simple=True, separator="/")

"""Parameters of a model by kind: tables, scalars of reads, matrices and vectors. For optimisers, and for penalties on tables."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

import lutjax

__all__ = ["cell_total_variation", "decayed", "kind_of", "kinds"]

_BIASES = ("bias", "scale", "offset", "b")


def kind_of(name: str, array: Any) -> str:
    """Return the kind of a parameter: ``"table"``, ``"scalar"``, ``"matrix"`` or ``"vector"``.

    A table is called ``weights`` and has three axes. A scalar, as reads of tables have, has no axis, or is called ``log_...``. A
    vector has one axis, or is called ``bias``, ``..._bias``, ``scale``, ``offset`` or ``b``. All else is a matrix. The names tell kinds
    apart also where blocks are stacked for a scan, with one axis more.

    Args:
      name: keys from the root of the parameters, joined by ``/``.
      array: the parameter, or its shape and dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.training import parameters
      >>> parameters.kind_of("block/weights", jnp.zeros((8, 16, 4)))
      'table'
    """
    last, rank = name.rpartition("/")[2], len(array.shape)
    if last == "weights" and rank >= 3:
        return "table"
    if rank == 0 or last.startswith("log_"):
        return "scalar"
    if rank == 1 or last in _BIASES or last.endswith("_bias"):
        return "vector"
    return "matrix"


def kinds(params: Any) -> Any:
    """Return the kind of each parameter, see `kind_of`, for ``optax.multi_transform``.

    Args:
      params: a pytree of arrays, of any library; of Flax NNX also an `nnx.State`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from lutjax.training import parameters
      >>> params = {"weights": jnp.zeros((8, 16, 4)), "log_tau": jnp.zeros(()), "kernel": jnp.zeros((4, 4))}
      >>> parameters.kinds(params)
      {'kernel': 'matrix', 'log_tau': 'scalar', 'weights': 'table'}
      >>> optimizer = optax.multi_transform(
      ...     {"table": optax.adam(1e-2), "matrix": optax.adamw(1e-3), "scalar": optax.adam(1e-3)}, parameters.kinds
      ... )
      >>> state = optimizer.init(params)
    """
    return jax.tree_util.tree_map_with_path(lambda path, array: kind_of(_name(path), array), params)


def decayed(params: Any) -> Any:
    """Return for each parameter whether weight decay is for it: for matrices, not for tables, scalars, biases and norms.

    Args:
      params: as for `kinds`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from lutjax.training import parameters
      >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=parameters.decayed)
      >>> parameters.decayed({"weights": jnp.zeros((8, 16, 4)), "kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)})
      {'bias': False, 'kernel': True, 'weights': False}
    """
    return jax.tree.map(lambda kind: kind == "matrix", kinds(params))


def cell_total_variation(params: Any) -> Float[jax.Array, ""]:
    """Return the mean of `lutjax.cell_total_variation` over the layers of a model that have tables.

    Its gradient is of the shape of the tables, so it is for `jax.grad`. `lutjax.training.tables.value_and_grad` refuses it for
    the tables whose gradient is in factors.

    Args:
      params: as for `kinds`. Blocks that are stacked for a scan count one by one.

    Returns:
      ``[]``; 0 if there are no tables.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.training import parameters
      >>> params = {"a": {"weights": jnp.array([[[1.0], [3.0]]])}, "b": {"weights": jnp.zeros((1, 2, 1))}}
      >>> parameters.cell_total_variation(params)
      Array(2., dtype=float32)
    """
    tables = [
        array
        for path, array in jax.tree_util.tree_leaves_with_path(params)
        if kind_of(_name(path), array) == "table"
    ]
    layers = [math.prod(table.shape[:-3]) for table in tables]
    each = [
        # The mean of stacked layers is that of a layer with all their tables.
        n * lutjax.cell_total_variation(table.reshape(-1, *table.shape[-2:]))
        for n, table in zip(layers, tables, strict=True)
    ]
    mean: jax.Array = sum(each, jnp.float32(0)) / max(sum(layers), 1)
    return mean


def _name(path: tuple[Any, ...]) -> str:
    last = path[-1:]
    if last and isinstance(last[0], jax.tree_util.GetAttrKey) and last[0].name == "value":
        path = path[:-1]  # the array of a variable of Flax NNX
    return jax.tree_util.keystr(path, simple=True, separator="/")

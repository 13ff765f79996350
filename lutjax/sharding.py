"""Division of the arrays of a model over the devices of a mesh.

Tables are divided by detector: each device owns some of the tables of every layer, looks up the whole batch in them, and the outputs are
summed. Devices then exchange outputs, never tables, and a model may be larger than the memory of one device.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from lutjax._arguments import shown

__all__ = ["DETECTORS", "specs"]

DETECTORS = "detectors"
"""Name of the mesh axis over which tables are divided, if nothing else is said."""

# Arrays of layers by name: their rank, and the axis of it that counts detectors (or gates).
_DIVIDED = {"weights": (3, 0), "positions": (3, 1), "logits": (2, 0), "table": (2, 0), "scores": (3, 0)}


def specs(
    params: Any,
    mesh: Mesh | AbstractMesh,
    *,
    axis: str | None = None,
    tables: Collection[str] | None = None,
) -> Any:
    """Return for each array of a model how it is divided over a mesh: a pytree of `jax.sharding.PartitionSpec`.

    Tables of look-ups (``weights``, ``[T, R, O]``), position bits of attention with a table for each detector, logits, tables and scores of
    gates are divided by detector, and so is what optimisers keep beside them. All else is the same on all devices. Blocks that are stacked for a scan
    have one axis more in front, which is not divided.

    Gates that are divided exchange all their outputs, since the next layer reads them anywhere, and have few parameters: where a model has gates alone, divide
    its batch, by a mesh without the axis. See docs/scaling.md.

    Args:
      params: a pytree of arrays or `jax.ShapeDtypeStruct`: parameters of any library, an `nnx.State`, the state of
        `lutjax.training.tables.Optimizer` or of an optax optimiser.
      mesh: the devices.
      axis: name of the mesh axis over which detectors are divided. By default ``"detectors"``; a mesh without an axis of that name has
        everything on all of its devices.
      tables: names of the tables, as `lutjax.layers.linen.tables_of` finds them. An array is a table's if its own name has that of a
        table in it, as in the state of an optimiser. By default all that is called ``weights``, with three axes or more, is taken for one.

    Raises:
      ValueError: the mesh has no axis of the given name, or a layer's detectors cannot be divided evenly by its size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AbstractMesh
      >>> from lutjax import sharding
      >>> params = {"weights": jnp.zeros((8, 16, 4)), "bias": jnp.zeros(4)}
      >>> specs = sharding.specs(params, AbstractMesh((4,), ("detectors",)))
      >>> tuple(specs["weights"]), tuple(specs["bias"])
      (('detectors', None, None), ())
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"sharding.specs: mesh is {shown(mesh)}; expected a jax.sharding.Mesh.")
    if axis is not None and axis not in mesh.axis_names:
        raise ValueError(f"sharding.specs: axis is {axis!r}; the mesh has the axes {tuple(mesh.axis_names)}.")
    axis = DETECTORS if axis is None else axis
    n_devices = dict(mesh.shape).get(axis)
    divided = _DIVIDED.keys() if tables is None else _DIVIDED.keys() - {"weights"}

    def spec(path: tuple[Any, ...], array: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = [_DIVIDED[word] for word in name.split("/") if word in divided]
        if tables is not None and any(f"/{table}/" in f"/{name}/" for table in tables):
            found = [_DIVIDED["weights"]]
        if n_devices is None or not found:
            return PartitionSpec()
        rank, place = found[-1]
        if len(array.shape) < rank:  # a step counter or a scalar beside it
            return PartitionSpec()
        place += len(array.shape) - rank
        n = array.shape[place]
        if n == 1 and found[-1] == _DIVIDED["positions"]:  # all detectors share it
            return PartitionSpec()
        if n % n_devices:
            fitting = [d for d in range(1, n_devices) if n % d == 0]
            raise ValueError(
                f"sharding.specs: {name} has shape {list(array.shape)}, and its {n} detectors cannot be divided evenly by the {n_devices} "
                f"devices of the mesh axis {axis!r}. Give that axis {' or '.join(map(str, fitting[-3:]))} devices and the rest to the "
                "batch, or choose a number of detectors that is a multiple."
            )
        return PartitionSpec(*(axis if i == place else None for i in range(len(array.shape))))

    return jax.tree_util.tree_map_with_path(spec, params)

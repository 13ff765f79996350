"""Division of the arrays of a model over the devices of a mesh.

Tables are divided by detector: each device owns some of the tables of every layer, looks up the whole batch in them, and the outputs are
summed. Devices then exchange outputs, never tables, and a model may be larger than the memory of one device.

Memories have few tables of many rows: these are divided by blocks of rows. Devices then exchange the ids of the rows that their samples ask for, and what
is read of them.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Int

from lutjax._meshes import divided_by_compiler as divided_by_compiler, rows as rows, spec_of as spec_of
from lutjax._typing import Array
from lutjax.arguments import shown
from lutjax.dispatch.registry import Implementation
from lutjax.ops.weighted_lookup import weighted_lookup
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._row_rules import DECAY

__all__ = ["DETECTORS", "lookup_in_blocks", "specs"]

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
    by_rows: Collection[str] = (),
) -> Any:
    """Return for each array of a model how it is divided over a mesh: a pytree of `jax.sharding.PartitionSpec`.

    Tables of look-ups (``weights``, ``[T, R, O]``), position bits of attention with a table for each detector, logits, tables and scores of
    gates are divided by detector, and so is what optimizers keep beside them. All else is the same on all devices. Blocks that are stacked for a scan
    have one axis more in front, which is not divided.

    Gates that are divided exchange all their outputs, since the next layer reads them anywhere, and have few parameters: where a model has gates alone, divide
    its batch, by a mesh without the axis. See docs/scaling.md.

    Args:
      params: a pytree of arrays or `jax.ShapeDtypeStruct`: parameters of any library, an `nnx.State`, the state of
        `lutjax.optim.Optimizer` or of an optax optimizer.
      mesh: the devices.
      axis: name of the mesh axis over which detectors are divided. By default ``"detectors"``; a mesh without an axis of that name has
        everything on all of its devices.
      tables: names of the tables, as `lutjax.layers.linen.tables_of` finds them. An array is a table's if its own name has that of a
        table in it, as in the state of an optimizer. By default all that is called ``weights``, with three axes or more, is taken for one.
      by_rows: names of the tables that are divided by blocks of rows in place of detectors, as `lookup_in_blocks` reads them.

    Raises:
      ValueError: the mesh has no axis of the given name, or a layer's detectors, or rows, cannot be divided evenly by its size.

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
        rows = any(f"/{table}/" in f"/{name}/" for table in by_rows)
        if rows:
            found = [(3, 1)]
        if n_devices is None or not found:
            return PartitionSpec()
        rank, place = found[-1]
        if len(array.shape) < rank:  # a step counter or a scalar beside it
            return PartitionSpec()
        place += len(array.shape) - rank
        n = array.shape[place]
        if n == 1 and found[-1] == _DIVIDED["positions"]:  # all detectors share it
            return PartitionSpec()
        if rows and name.endswith(f"/{DECAY}"):  # all rows share it
            return PartitionSpec()
        if n % n_devices:
            fitting, what = [d for d in range(1, n_devices) if n % d == 0], "rows" if rows else "detectors"
            raise ValueError(
                f"sharding.specs: {name} has shape {list(array.shape)}, and its {n} {what} cannot be divided evenly by the {n_devices} "
                f"devices of the mesh axis {axis!r}. Give that axis {' or '.join(map(str, fitting[-3:]))} devices and the rest to the "
                f"batch, or choose a number of {what} that is a multiple."
            )
        return PartitionSpec(*(axis if i == place else None for i in range(len(array.shape))))

    return jax.tree_util.tree_map_with_path(spec, params)


def lookup_in_blocks(
    block: Float[Array, "detectors rows outputs"],
    index: Int[Array, "batch *rest detectors ways"],
    coefficients: Float[Array, "batch *rest detectors ways"],
    *,
    axis: str,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "batch *any outputs"]:
    """Return `lutjax.weighted_lookup` of samples that are divided over an axis of a mesh, as the rows of the tables are. For `jax.shard_map`.

    Each device sends the ids and coefficients of its samples to all others, reads the rows of its block for all samples, and gets
    the sums of its own ones. A device adds what it has of a sum, and nothing for rows of others. The gradient of a block is that of
    all samples: `lutjax.optim` moves it as a table of this device alone.

    Per device and step it receives ``samples * T * K`` ids and coefficients and ``samples * G * O`` sums, with the samples of all devices. Tables that are
    divided by detector send ``T / n`` of the groups alone where each table is a group of its own, so divide these so as long as there are as
    many tables as devices.

    Args:
      block: this device's rows of each table, ``[T, R / n, O]``: the first device of the axis has the first rows.
      index: ids in whole tables of this device's samples, ``[B / n, ..., T, K]``. Ids out of range read nothing.
      coefficients: ``[B / n, ..., T, K]``.
      axis: name of the mesh axis.
      groups: as in `lutjax.weighted_lookup`.
      accumulate: as in `lutjax.weighted_lookup`.
      implementation: as in `lutjax.weighted_lookup`.

    Returns:
      ``[B / n, ..., O]``, or ``[B / n, ..., G, O]`` with `groups`.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from lutjax import sharding
      >>> table, index = jnp.arange(8.0).reshape(1, 8, 1), jnp.array([[[7]], [[2]]])
      >>> mesh = jax.make_mesh((1,), ("rows",), (AxisType.Auto,))
      >>> read = jax.shard_map(
      ...     lambda *given: sharding.lookup_in_blocks(*given, axis="rows"),
      ...     mesh=mesh, in_specs=(P(None, "rows"), P("rows"), P("rows")), out_specs=P("rows"),
      ... )
      >>> jax.jit(read)(table, index, jnp.ones((2, 1, 1)))
      Array([[7.],
             [2.]], dtype=float32)
    """
    every, weights = (jax.lax.all_gather(a, axis, tiled=True) for a in (index, coefficients))
    n_rows = block.shape[1]
    own = every - jax.lax.axis_index(axis).astype(every.dtype) * n_rows
    there = (own >= 0) & (own < n_rows)
    sums = weighted_lookup(
        block,
        jnp.where(there, own, 0),
        jnp.where(there, weights, jnp.zeros_like(weights)),
        groups=groups,
        accumulate=accumulate,
        implementation=implementation,
    )
    result: jax.Array = jax.lax.psum_scatter(sums, axis, tiled=True)
    return result

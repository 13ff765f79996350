"""Model sharding over device meshes.

Tables are sharded by detector: each device owns some tables in every layer and looks up the whole
batch in them, and outputs are summed. Devices exchange outputs, never tables, and a model may
exceed one device's memory.

Memory layers have few tables with many rows and are sharded by row blocks. Devices exchange
requested row ids and partial sums.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Int

from lutjax._meshes import rows as rows, shard_by_compiler as shard_by_compiler, spec_of as spec_of
from lutjax._typing import Array
from lutjax.arguments import format_value
from lutjax.dispatch.registry import Implementation
from lutjax.ops.weighted_lookup import weighted_lookup
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._row_rules import DECAY

__all__ = ["DETECTORS", "lookup_in_blocks", "specs"]

DETECTORS = "detectors"
"""Default mesh axis for sharding tables."""

# Layer arrays by name: rank and detector (or gate) axis.
_DIVIDED = {
    "weights": (3, 0),
    "positions": (3, 1),
    "logits": (2, 0),
    "table": (2, 0),
    "scores": (3, 0),
}


def specs(
    params: Any,
    mesh: Mesh | AbstractMesh,
    *,
    axis: str | None = None,
    tables: Collection[str] | None = None,
    by_rows: Collection[str] = (),
) -> Any:
    """Return a `jax.sharding.PartitionSpec` pytree for a model's arrays.

    Lookup tables (``weights``, ``[T, R, O]``), per-detector attention positions, and gate logits,
    tables and scores are sharded by detector, together with their optimizer state. All other arrays
    are replicated. Blocks stacked for a scan have an additional unsharded leading axis.

    Sharded gates exchange all outputs, since the next layer may read any of them, and have few
    parameters. For gate-only models use data parallelism, with a mesh without this axis. See
    docs/scaling.md.

    Args:
      params: pytree with arrays or `jax.ShapeDtypeStruct`: any library's parameters, an
        `nnx.State`, or the state from `lutjax.optim.Optimizer` or an optax optimizer.
      mesh: the devices.
      axis: mesh axis for sharding detectors, by default ``"detectors"``. Without this axis in the
        mesh, the default replicates everything.
      tables: table names, as in `lutjax.layers.linen.tables_of`. Arrays with a table name in their
        path, such as optimizer state, belong to this table. By default every array named
        ``weights`` with three or more axes is a table.
      by_rows: names of tables sharded by row blocks instead, for `lookup_in_blocks`.

    Raises:
      ValueError: the mesh has no such axis, or its size does not divide a layer's detectors or
        rows.

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
        raise TypeError(
            f"sharding.specs: mesh is {format_value(mesh)}; expected a jax.sharding.Mesh."
        )
    if axis is not None and axis not in mesh.axis_names:
        raise ValueError(
            f"sharding.specs: axis is {axis!r}; the mesh has the axes {tuple(mesh.axis_names)}."
        )
    axis = DETECTORS if axis is None else axis
    n_devices = dict(mesh.shape).get(axis)
    divided = _DIVIDED.keys() if tables is None else _DIVIDED.keys() - {"weights"}

    def spec(path: tuple[Any, ...], array: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Whole words of a path: optimizer state has the table's path within a longer one. The last
        # word counts, since a layer may have the name of an array.
        divisions = [_DIVIDED[word] for word in name.split("/") if word in divided]
        if tables is not None and any(f"/{table}/" in f"/{name}/" for table in tables):
            divisions = [_DIVIDED["weights"]]
        rows = any(f"/{table}/" in f"/{name}/" for table in by_rows)
        if rows:
            divisions = [(3, 1)]
        if n_devices is None or not divisions:
            return PartitionSpec()
        rank, place = divisions[-1]
        if len(array.shape) < rank:  # a step counter or another scalar
            return PartitionSpec()
        place += len(array.shape) - rank  # a leading axis of blocks stacked for a scan
        n = array.shape[place]
        if n == 1 and divisions[-1] == _DIVIDED["positions"]:  # all detectors share it
            return PartitionSpec()
        if rows and name.endswith(f"/{DECAY}"):  # all rows share it
            return PartitionSpec()
        if n % n_devices:
            fitting = [d for d in range(1, n_devices) if n % d == 0]
            what, advice = "rows" if rows else "detectors", ""
            has_rows = not rows and rank == 3 and place == len(array.shape) - 3
            if has_rows and array.shape[place + 1] % n_devices == 0:
                advice = f" Or shard its {array.shape[place + 1]} rows: by_rows=[{name!r}]."
            raise ValueError(
                f"sharding.specs: {name} has shape {list(array.shape)}, "
                f"and its {n} {what} cannot be divided evenly by the {n_devices} devices "
                f"of the mesh axis {axis!r}. "
                f"Give that axis {' or '.join(map(str, fitting[-3:]))} devices "
                "and the rest to the batch, "
                f"or choose a number of {what} that is a multiple.{advice}"
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
    """Run `lutjax.weighted_lookup` inside `jax.shard_map` with samples and rows sharded alike.

    Each device sends its samples' ids and coefficients to all other devices, reads its row block
    for all samples, and receives its own samples' sums. Rows on other devices add nothing. A
    block's gradient covers all samples: `lutjax.optim` updates the block like a device-local table.

    Per step, each device receives ``samples * T * K`` ids and coefficients and ``samples * G * O``
    sums, with the global number of samples. With one group per table, sharding by detector only
    sends ``T / n`` groups, so prefer it with at least one table per device.

    Args:
      block: this device's rows in each table, ``[T, R / n, O]``. The first device on the axis has
        the first rows.
      index: global row ids for this device's samples, ``[B / n, ..., T, K]``. Out-of-range ids read
        nothing.
      coefficients: ``[B / n, ..., T, K]``.
      axis: the mesh axis.
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
    local = every - jax.lax.axis_index(axis).astype(every.dtype) * n_rows
    # Ids of other blocks read row 0 with weight 0: shapes stay fixed.
    is_local = (local >= 0) & (local < n_rows)
    sums = weighted_lookup(
        block,
        jnp.where(is_local, local, 0),
        jnp.where(is_local, weights, jnp.zeros_like(weights)),
        groups=groups,
        accumulate=accumulate,
        implementation=implementation,
    )
    result: jax.Array = jax.lax.psum_scatter(sums, axis, tiled=True)
    return result

"""Sequences that are divided over the devices of a mesh axis, inside a `jax.shard_map`: queries stay, keys are gathered."""

from typing import Any

import jax

from lutjax import _compat


def why_plain(call: Any) -> str | None:
    """Return the reason why plain JAX and native kernels alone run a call of attention; None: any implementation may."""
    if call.starts is not None:
        return (
            "reads one start for all sequences: those of each sequence are for plain JAX and native kernels"
        )
    if call.block_mask is not None:
        return "reads all blocks of pairs: masks of blocks are for plain JAX and native kernels"
    return None


def whole(sequence_axis: Any, n_queries: int, query_start: Any) -> tuple[int, Any]:
    """Return the number of queries of all devices, and the position of the first query of this one.

    Args:
      sequence_axis: name of the mesh axis; None: sequences are not divided. n_queries: of this device. query_start: of all.
    """
    if sequence_axis is None:
        return n_queries, query_start
    first = jax.lax.axis_index(sequence_axis) * n_queries
    return n_queries * jax.lax.axis_size(sequence_axis), query_start + first


def keys_of_all(op: str, arrays: Any, sequence_axis: str | None, axis: int) -> Any:
    """Return the keys of all devices, in their order.

    They are the same on all devices, so that a cotangent is summed as integers before each device takes its part of it.

    Args:
      arrays: of this device's keys. axis: that of positions.

    Raises:
      ValueError: there is no such mesh axis here.
    """
    if sequence_axis is None:
        return arrays
    here = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if sequence_axis not in here:
        raise ValueError(
            f"{op}: sequence_axis is {sequence_axis!r}; it must name an axis of the mesh of a jax.shard_map around the call, and "
            f"there are the axes {here} here. Outside of a shard_map pass whole sequences."
        )
    tracked = sequence_axis not in _compat.untracked_axes()

    def gathered(a: jax.Array) -> jax.Array:
        a = _compat.cast_varying(a, (sequence_axis,))
        to = "invarying" if tracked else "varying"
        result: jax.Array = jax.lax.all_gather(a, sequence_axis, axis=axis % a.ndim, tiled=True, to=to)
        return result

    return jax.tree.map(gathered, arrays)

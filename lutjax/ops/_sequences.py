"""Sequences that are divided over the devices of a mesh axis, inside a `jax.shard_map`: queries stay, keys come from other devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import _compat
from lutjax.dispatch import _table_reads


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


def keys_seen(
    op: str,
    keys: Any,
    segments: Any,
    sequence_axis: str | None,
    n_queries: int,
    **how: Any,
) -> tuple[Any, Any, Any]:
    """Return keys ``[..., keys, n]`` that the queries of this device may see, their segments, and how many keys of all lie before the first;
    None: none does.

    With a window they are its own and as many before them as the window reaches, from the devices before it; else those of all devices.

    Args:
      n_queries: of this device. how: see `_reach`.
    """
    n_keys: int = jax.tree.leaves(keys)[0].shape[-2]
    reach = _reach(op, sequence_axis, n_queries, n_keys, **how)
    if reach is None or sequence_axis is None:
        keys = keys_of_all(op, keys, sequence_axis, -2)
        return keys, keys_of_all(op, segments, sequence_axis, -1), None
    index, n_devices = jax.lax.axis_index(sequence_axis), jax.lax.axis_size(sequence_axis)

    def with_earlier(a: jax.Array, axis: int) -> jax.Array:
        a = _compat.cast_varying(a, (sequence_axis,))
        parts = []
        for back in range(-(-reach // n_keys), 0, -1):
            n = min(reach - (back - 1) * n_keys, n_keys)
            last = jax.lax.slice_in_dim(a, n_keys - n, n_keys, axis=axis % a.ndim)
            pairs = [(source, source + back) for source in range(n_devices - back)]
            parts.append(jax.lax.ppermute(last, sequence_axis, pairs))
        # The first devices have fewer keys before them: theirs come first, and behind them some that no query sees.
        shape = [*a.shape]
        shape[axis] = reach
        unseen = _compat.cast_varying(jnp.zeros(shape, a.dtype), _compat.varying_axes(a))
        whole = jnp.concatenate([*parts, a, unseen], axis)
        return jax.lax.dynamic_slice_in_dim(
            whole, jnp.maximum(reach - index * n_keys, 0), reach + n_keys, axis
        )

    keys = jax.tree.map(lambda a: with_earlier(a, -2), keys)
    segments = None if segments is None else with_earlier(segments, -1)
    return keys, segments, jnp.maximum(index * n_keys - reach, 0)


def _reach(
    op: str,
    sequence_axis: str | None,
    n_queries: int,
    n_keys: int,
    *,
    window: int | None,
    causal: bool,
    starts: tuple[Any, Any],
    accumulate: Any,
) -> int | None:
    """Return how many keys before its own the queries of a device see; None where it takes those of all devices.

    It does so in fixed point and where a gradient of tables is wanted in factors, which hold the keys of all.

    Args:
      n_queries, n_keys: of a device. starts: positions of the first query and the first key of all.
    """
    if sequence_axis is None or window is None or not causal or accumulate is not None:
        return None
    known = all(isinstance(start, int | np.integer) for start in starts)
    if not known or starts[0] != starts[1] or n_queries != n_keys or not n_keys:
        return None
    _require_axis(op, sequence_axis)
    farther = window > (jax.lax.axis_size(sequence_axis) - 1) * n_keys
    return None if farther or _table_reads.current() is not None else window


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
    _require_axis(op, sequence_axis)
    tracked = sequence_axis not in _compat.untracked_axes()

    def gathered(a: jax.Array) -> jax.Array:
        a = _compat.cast_varying(a, (sequence_axis,))
        to = "invarying" if tracked else "varying"
        result: jax.Array = jax.lax.all_gather(a, sequence_axis, axis=axis % a.ndim, tiled=True, to=to)
        return result

    return jax.tree.map(gathered, arrays)


def _require_axis(op: str, sequence_axis: str) -> None:
    here = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if sequence_axis not in here:
        raise ValueError(
            f"{op}: sequence_axis is {sequence_axis!r}; it must name an axis of the mesh of a jax.shard_map around the call, and "
            f"there are the axes {here} here. Outside of a shard_map pass whole sequences."
        )

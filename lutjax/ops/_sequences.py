"""Sequence sharding inside a `jax.shard_map`: queries stay local, keys are exchanged."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import _compat
from lutjax.dispatch import _table_reads


def plain_reason(call: Any) -> str | None:
    """Return the reason if only some implementations support a call, else None."""
    if call.starts is not None:
        return "reads one start for all sequences, and here each has its own"
    if call.block_mask is not None:
        return "reads all blocks of pairs, and here a mask leaves some out"
    return None


def global_queries(sequence_axis: Any, n_queries: int, query_start: Any) -> tuple[int, Any]:
    """Return the global number of queries, and this device's first query position.

    Args:
      sequence_axis: mesh axis, or None for unsharded sequences.
      n_queries: queries per device.
      query_start: global first query position.
    """
    if sequence_axis is None:
        return n_queries, query_start
    first = jax.lax.axis_index(sequence_axis) * n_queries
    return n_queries * jax.lax.axis_size(sequence_axis), query_start + first


class Keys(NamedTuple):
    """Keys for an attention call.

    Attributes:
      keys, segments: local arrays, joined with gathered ones from other devices.
      n_all: global number of keys.
      n_before: number of global keys before the first; None: none.
      ring: mesh axis for rotating keys through all devices, one shard at a time; None: no rotation.
    """

    keys: Any
    segments: Any
    n_all: int
    n_before: jax.Array | None = None
    ring: str | None = None

    def first_position(self, key_start: Any) -> Any:
        """Return the first key's position, given the global first position `key_start`."""
        return key_start if self.n_before is None else key_start + self.n_before


def keys_seen(
    op: str,
    keys: Any,
    segments: Any,
    sequence_axis: str | None,
    n_queries: int,
    weights: Any,
    *,
    window: int | None,
    causal: bool,
    starts: tuple[Any, Any],
    accumulate: Any,
) -> Keys:
    """Return the keys ``[..., keys, n]`` visible to this device's queries.

    With a window they are the local keys plus keys within reach from previous devices. Otherwise
    keys rotate through all devices. Fixed point, 16-bit tables (sums are rounded once) and sparse
    gradients (with all keys) gather instead.

    Args:
      n_queries: queries per device. starts: global first query and key positions.

    Raises:
      ValueError: the mesh axis is not in scope.
    """
    n_keys: int = jax.tree.leaves(keys)[0].shape[-2]
    if sequence_axis is None:
        return Keys(keys, segments, n_keys)
    here = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if sequence_axis not in here:
        raise ValueError(
            f"{op}: sequence_axis is {sequence_axis!r}; it must name an axis of the mesh of a "
            f"jax.shard_map around the call, and there are the axes {here} here. Outside of a "
            "shard_map pass whole sequences."
        )
    n_all: int = n_keys * jax.lax.axis_size(sequence_axis)
    # Partial sums over devices would be rounded one by one, to 16 bits or from integers.
    whole = accumulate is not None or jnp.dtype(weights.dtype).itemsize < 4 or not n_keys
    if whole or _table_reads.current_reads() is not None:
        return Keys(
            _gather_shards(keys, sequence_axis, -2),
            _gather_shards(segments, sequence_axis, -1),
            n_all,
        )
    alike = (
        causal
        and all(isinstance(start, int | np.integer) for start in starts)
        and starts[0] == starts[1]
    )
    # A window needs only the preceding devices' keys. Otherwise all keys travel around a ring.
    if window is None or not alike or n_queries != n_keys or window > n_all - n_keys:
        varying = functools.partial(_compat.cast_varying, axes=(sequence_axis,))
        return Keys(
            jax.tree.map(varying, keys), jax.tree.map(varying, segments), n_all, ring=sequence_axis
        )
    index = jax.lax.axis_index(sequence_axis)
    earlier = functools.partial(_with_earlier, window, index, sequence_axis)
    keys, segments = (
        jax.tree.map(lambda a: earlier(a, -2), keys),
        jax.tree.map(lambda a: earlier(a, -1), segments),
    )
    return Keys(keys, segments, n_all, n_before=jnp.maximum(index * n_keys - window, 0))


def _with_earlier(
    reach: int, index: jax.Array, sequence_axis: str, a: jax.Array, axis: int
) -> jax.Array:
    """Prepend `reach` positions from previous devices to a device's array."""
    a = _compat.cast_varying(a, (sequence_axis,))
    n_own, parts = a.shape[axis], []
    for back in range(-(-reach // n_own), 0, -1):
        n = min(reach - (back - 1) * n_own, n_own)
        last = jax.lax.slice_in_dim(a, n_own - n, n_own, axis=axis % a.ndim)
        pairs = [
            (source, source + back) for source in range(jax.lax.axis_size(sequence_axis) - back)
        ]
        parts.append(jax.lax.ppermute(last, sequence_axis, pairs))
    # The first devices have fewer earlier keys: shift theirs to the front and pad with unseen keys.
    shape = [*a.shape]
    shape[axis] = reach
    unseen = _compat.cast_varying(jnp.zeros(shape, a.dtype), _compat.varying_axes(a))
    whole = jnp.concatenate([*parts, a, unseen], axis)
    return jax.lax.dynamic_slice_in_dim(
        whole, jnp.maximum(reach - index * n_own, 0), reach + n_own, axis
    )


def sum_key_shards(
    call: Any, names: tuple[str, ...], ring: str | None, run: Callable[[Any], jax.Array]
) -> jax.Array:
    """Run a call, or sum its outputs over key shards rotating around a ring.

    Args:
      call: the call; with a ring, its start is relative to the first device's keys.
      names: fields with keys.
      ring: mesh axis, or None.
      run: function to run a call.
    """
    if ring is None:
        return run(call)
    n_devices: int = jax.lax.axis_size(ring)
    index, n_keys = jax.lax.axis_index(ring), call.key_places.shape[-2]
    place = "start" if call.start is not None else "starts"
    around = [(device, (device + 1) % n_devices) for device in range(n_devices)]

    def run_part(keys: dict[str, Any], back: Any) -> jax.Array:
        first = (index - back) % n_devices * n_keys
        return run(call.replace(**keys, **{place: getattr(call, place) - first}))

    def step(carry: Any, back: Any) -> tuple[Any, None]:
        # Keys move one device further: this device now has those of the device `back` before it.
        keys, total = carry
        keys = jax.tree.map(lambda a: jax.lax.ppermute(a, ring, around), keys)
        return (keys, total + run_part(keys, back)), None

    keys = {name: getattr(call, name) for name in names}
    y: jax.Array = jax.lax.scan(step, (keys, run_part(keys, 0)), jnp.arange(1, n_devices))[0][1]
    return y


def _gather_shards(arrays: Any, sequence_axis: str, axis: int) -> Any:
    """Gather arrays over all devices, in order.

    Results are device-invariant, so cotangents are summed as integers before each device takes its
    shard.
    """
    tracked = sequence_axis not in _compat.untracked_axes()

    def gather(a: jax.Array) -> jax.Array:
        a = _compat.cast_varying(a, (sequence_axis,))
        # Without tracked types there is no cast to an array that is equal on all devices.
        to = "invarying" if tracked else "varying"
        result: jax.Array = jax.lax.all_gather(
            a, sequence_axis, axis=axis % a.ndim, tiled=True, to=to
        )
        return result

    return jax.tree.map(gather, arrays)

"""Sequences that are divided over the devices of a mesh axis, inside a `jax.shard_map`: queries stay, keys come from other devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import _compat
from lutjax.dispatch import _table_reads


def why_plain(call: Any) -> str | None:
    """Return the reason why only some implementations run a call of attention, plain JAX among them; None: any may."""
    if call.starts is not None:
        return "reads one start for all sequences, and here each has its own"
    if call.block_mask is not None:
        return "reads all blocks of pairs, and here a mask leaves some out"
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


class Keys(NamedTuple):
    """Keys that a call of attention reads.

    Attributes:
      keys, segments: with those of other devices, as far as they are read at once.
      n_all: number of keys of all devices.
      n_before: how many of these lie before the first; None: none.
      ring: mesh axis over whose devices keys go around, so that each reads those of all, one part after the other; None: they do not.
    """

    keys: Any
    segments: Any
    n_all: int
    n_before: jax.Array | None = None
    ring: str | None = None

    def first(self, key_start: Any) -> Any:
        """Return the position of the first of them, where that of the first of all is `key_start`."""
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
    """Return the keys ``[..., keys, n]`` that the queries of this device may see.

    With a window they are its own and as many before them as the window reaches, from the devices before it; else those of all devices, which
    go around. They are gathered in fixed point, for tables of 16 bits, whose sums are rounded once, and where a gradient of tables is wanted
    in factors, which hold the keys of all.

    Args:
      n_queries: of this device. starts: positions of the first query and the first key of all.

    Raises:
      ValueError: there is no such mesh axis here.
    """
    n_keys: int = jax.tree.leaves(keys)[0].shape[-2]
    if sequence_axis is None:
        return Keys(keys, segments, n_keys)
    here = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if sequence_axis not in here:
        raise ValueError(
            f"{op}: sequence_axis is {sequence_axis!r}; it must name an axis of the mesh of a jax.shard_map around the call, and "
            f"there are the axes {here} here. Outside of a shard_map pass whole sequences."
        )
    n_all: int = n_keys * jax.lax.axis_size(sequence_axis)
    whole = accumulate is not None or jnp.dtype(weights.dtype).itemsize < 4 or not n_keys
    if whole or _table_reads.current() is not None:
        return Keys(_gathered(keys, sequence_axis, -2), _gathered(segments, sequence_axis, -1), n_all)
    alike = causal and all(isinstance(start, int | np.integer) for start in starts) and starts[0] == starts[1]
    if window is None or not alike or n_queries != n_keys or window > n_all - n_keys:
        varying = functools.partial(_compat.cast_varying, axes=(sequence_axis,))
        return Keys(jax.tree.map(varying, keys), jax.tree.map(varying, segments), n_all, ring=sequence_axis)
    index = jax.lax.axis_index(sequence_axis)
    earlier = functools.partial(_with_earlier, window, index, sequence_axis)
    keys, segments = (
        jax.tree.map(lambda a: earlier(a, -2), keys),
        jax.tree.map(lambda a: earlier(a, -1), segments),
    )
    return Keys(keys, segments, n_all, n_before=jnp.maximum(index * n_keys - window, 0))


def _with_earlier(reach: int, index: jax.Array, sequence_axis: str, a: jax.Array, axis: int) -> jax.Array:
    """Return an array of a device's positions and of so many before them, which other devices have."""
    a = _compat.cast_varying(a, (sequence_axis,))
    n_own, parts = a.shape[axis], []
    for back in range(-(-reach // n_own), 0, -1):
        n = min(reach - (back - 1) * n_own, n_own)
        last = jax.lax.slice_in_dim(a, n_own - n, n_own, axis=axis % a.ndim)
        pairs = [(source, source + back) for source in range(jax.lax.axis_size(sequence_axis) - back)]
        parts.append(jax.lax.ppermute(last, sequence_axis, pairs))
    # The first devices have fewer keys before them: theirs come first, and behind them some that no query sees.
    shape = [*a.shape]
    shape[axis] = reach
    unseen = _compat.cast_varying(jnp.zeros(shape, a.dtype), _compat.varying_axes(a))
    whole = jnp.concatenate([*parts, a, unseen], axis)
    return jax.lax.dynamic_slice_in_dim(whole, jnp.maximum(reach - index * n_own, 0), reach + n_own, axis)


def summed(call: Any, names: tuple[str, ...], ring: str | None, run: Callable[[Any], jax.Array]) -> jax.Array:
    """Return the outputs of a call, or the sum of those of parts of its keys, which go around a ring of devices.

    Args:
      call: of a ring with the start that is right for the keys of its first device. names: of its arrays of keys. run: runs a call.
    """
    if ring is None:
        return run(call)
    n_devices: int = jax.lax.axis_size(ring)
    index, n_keys = jax.lax.axis_index(ring), call.key_places.shape[-2]
    place = "start" if call.start is not None else "starts"
    around = [(device, (device + 1) % n_devices) for device in range(n_devices)]

    def of_part(keys: dict[str, Any], back: Any) -> jax.Array:
        first = (index - back) % n_devices * n_keys
        return run(call.replace(**keys, **{place: getattr(call, place) - first}))

    def step(carry: Any, back: Any) -> tuple[Any, None]:
        keys, total = carry
        keys = jax.tree.map(lambda a: jax.lax.ppermute(a, ring, around), keys)
        return (keys, total + of_part(keys, back)), None

    keys = {name: getattr(call, name) for name in names}
    y: jax.Array = jax.lax.scan(step, (keys, of_part(keys, 0)), jnp.arange(1, n_devices))[0][1]
    return y


def _gathered(arrays: Any, sequence_axis: str, axis: int) -> Any:
    """Return arrays of the positions of all devices, in their order.

    They are the same on all devices, so that a cotangent is summed as integers before each device takes its part of it.
    """
    tracked = sequence_axis not in _compat.untracked_axes()

    def gathered(a: jax.Array) -> jax.Array:
        a = _compat.cast_varying(a, (sequence_axis,))
        to = "invarying" if tracked else "varying"
        result: jax.Array = jax.lax.all_gather(a, sequence_axis, axis=axis % a.ndim, tiled=True, to=to)
        return result

    return jax.tree.map(gathered, arrays)

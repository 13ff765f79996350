"""Trees of gates over an image in plain JAX: the leaves of all places are gathered, and everything after is element by element.

The backward pass evaluates the trees again, and goes down the one that a group chose.

The cotangent of the image is a sum over readers where there is a list of them, as that of gates is: a pixel is read by a leaf at one
place or at none.
"""

import math

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _wire_gathers
from lutjax.kernels._xla._row_gathers import read
from lutjax.ops.logic_trees import LogicTrees, levels
from lutjax.values._dtypes import accumulator


def forward(call: LogicTrees, *, device: Device) -> jax.Array:
    return _best(call, _leaves(call, call.x), call.coefficients)[0].astype(call.x.dtype)


def backward(
    call: LogicTrees, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    leaves, coefficients = _leaves(call, call.x.astype(dtype)), call.coefficients.astype(dtype)
    _, chosen = _best(call, leaves, coefficients)
    own = leaves[:, :, 0]
    for place in range(1, leaves.shape[2]):
        own = jnp.where((chosen == place)[:, None], leaves[:, :, place], own)
    _, pull = jax.vjp(_nodes, own, coefficients)
    of_leaves, of_coefficients = pull(cotangent.astype(dtype))
    found = {"coefficients": of_coefficients}
    if "x" in needs:
        found["x"] = _to_image(call, of_leaves, chosen)
    return {name: found[name] for name in needs}


def _ids(call: LogicTrees) -> tuple[jax.Array, jax.Array]:
    """Return the id of each leaf at each place of each group, and whether it is in the image: ``[K, leaves, places of a group, groups]``."""
    (height, width), stride, around = call.places.image, call.places.stride, call.places.padding
    groups = jnp.asarray(call.places.of_groups())
    channel, *offsets = call.places.in_window(call.leaves, call.n_channels)
    row, column = (
        of[:, :, None, None] + (groups[None, None, ..., i] * stride[i] - around[i])
        for i, of in enumerate(offsets)
    )
    exists = (groups[None, None, ..., 0] >= 0) & (row >= 0) & (row < height)
    exists = exists & (column >= 0) & (column < width)
    return (channel[:, :, None, None] * height + row) * width + column, exists


def _leaves(call: LogicTrees, x: jax.Array) -> jax.Array:
    """Return the leaves at all places, zeros around the image: ``[K, leaves, places of a group, groups, B]``."""
    ids, exists = _ids(call)
    values = read(x, jnp.clip(ids, 0, len(x) - 1).reshape(-1)).reshape(*ids.shape, x.shape[1])
    return jnp.where(exists[..., None], values, 0)


def _best(call: LogicTrees, leaves: jax.Array, coefficients: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest of the trees at the places of each group, and which place of the group it is: ``[K, groups, B]``."""
    dtype = accumulator(leaves.dtype, coefficients.dtype)
    exists = (call.places.of_groups()[..., 0] >= 0)[None, :, :, None]
    values = _nodes(leaves.astype(dtype), coefficients.astype(dtype))
    best = jnp.full(values[:, 0].shape, -jnp.inf, dtype)
    chosen = jnp.full(best.shape, -1, jnp.int32)
    for place in range(values.shape[1]):
        value = values[:, place]
        better = exists[:, place] & ((value > best) | jnp.isnan(value) | (chosen < 0))
        best, chosen = jnp.where(better, value, best), jnp.where(better, place, chosen)
    return best, chosen


def _nodes(values: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Return the roots of trees with these leaves: ``[K, leaves, ...]`` -> ``[K, ...]``."""
    first, others = 0, range(2, values.ndim)
    for n in levels(values.shape[1]):
        c0, c1, c2, c3 = jnp.expand_dims(coefficients[:, :, first : first + n], [a + 1 for a in others])
        a, b = values[:, ::2], values[:, 1::2]
        values, first = c0 + c1 * a + (c2 + c3 * a) * b, first + n
    return values[:, 0]


def _to_image(call: LogicTrees, of_leaves: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return the sum of what all leaves pass on to each pixel: ``[I, B]``.

    Leaves at all places are wires, ordered by tree, leaf, place of the group and group.
    """
    ids, exists = _ids(call)
    # One more input takes what is not of the image.
    wires = jnp.where(exists, ids, len(call.x))
    place = jnp.arange(wires.shape[2], dtype=jnp.int32)[None, None, :, None, None]
    at_places = jnp.where(chosen[:, None, None] == place, of_leaves[:, :, None], 0)
    by_wire = at_places.reshape(wires.size, call.x.shape[1])
    readers = None if call.readers is None or not wires.size else _readers(call, call.readers)
    return _wire_gathers.to_inputs([by_wire], wires.reshape(-1, 1), readers, len(call.x) + 1)[:-1]


def _readers(call: LogicTrees, of_channels: jax.Array) -> jax.Array:
    """Return the wires of `_to_image` that read each pixel ``[I + 1, F]``, from the leaves that read its channel; -1: none."""
    places = call.places
    number = jnp.clip(of_channels, 0, call.leaves.size - 1)
    _, row, column = (a.reshape(-1)[number] for a in places.in_window(call.leaves, call.n_channels))
    at = places.that_read(row, column)  # [channels, F, height, 1] and [channels, F, 1, width]
    padded = [jnp.maximum(a, 0) + p for a, p in zip(at, places.pool_padding, strict=True)]
    group = [a // k for a, k in zip(padded, places.pool, strict=True)]
    of_group = [a % k for a, k in zip(padded, places.pool, strict=True)]
    wire = number[..., None, None] * math.prod(places.pool) + of_group[0] * places.pool[1] + of_group[1]
    wire = wire * call.n_groups + group[0] * places.groups[1] + group[1]
    exists = (at[0] >= 0) & (at[1] >= 0) & (of_channels >= 0)[..., None, None]
    # A pool need not reach all places.
    exists &= (group[0] < places.groups[0]) & (group[1] < places.groups[1])
    found = jnp.moveaxis(jnp.where(exists, wire, -1), 1, -1).reshape(len(call.x), of_channels.shape[1])
    return jnp.concatenate([found, jnp.full((1, of_channels.shape[1]), -1, found.dtype)])

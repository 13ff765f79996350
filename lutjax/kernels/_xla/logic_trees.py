"""Trees of gates over an image in plain JAX: each leaf of each place is gathered, and everything after is element by element.

The backward pass evaluates the trees again, and goes down the one that a group chose.

The cotangent of the image is a sum over readers where there is a list of them, as that of gates is: a pixel is read by a leaf at one
place or at none.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from lutjax._dtypes import accumulator
from lutjax.kernels._xla import _wire_gathers
from lutjax.kernels._xla._row_gathers import read
from lutjax.kernels.registry import Device
from lutjax.ops.logic_trees import LogicTrees, levels


def forward(call: LogicTrees, *, device: Device) -> jax.Array:
    return _best(call, _leaves(call, call.x), call.coefficients)[0].astype(call.x.dtype)


def backward(
    call: LogicTrees, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    leaves, coefficients = _leaves(call, call.x.astype(dtype)), call.coefficients.astype(dtype)
    _, chosen = _best(call, leaves, coefficients)
    own = [
        functools.reduce(lambda a, p: jnp.where(chosen == p, of[p], a), range(1, len(of)), of[0])
        for of in leaves
    ]
    _, pull = jax.vjp(_nodes, own, coefficients)
    of_leaves, of_coefficients = pull(cotangent.astype(dtype))
    found = {"coefficients": of_coefficients}
    if "x" in needs:
        found["x"] = _to_image(call, of_leaves, chosen)
    return {name: found[name] for name in needs}


def _leaves(call: LogicTrees, x: jax.Array) -> list[list[jax.Array]]:
    """Return each leaf at each place of a group, zeros around the image: leaves times places of a group times ``[K, groups, B]``."""
    (height, width), stride, around = call.places.image, call.places.stride, call.places.padding
    channel, row, column = call.places.in_window(call.leaves, call.n_channels)

    def at(leaf: int, places: np.ndarray) -> jax.Array:
        r, c = (
            of[:, leaf, None] + (places[None, :, i] * stride[i] - around[i])
            for i, of in enumerate((row, column))
        )
        ids = (channel[:, leaf, None] * height + r) * width + c
        values = read(x, jnp.clip(ids, 0, max(len(x) - 1, 0)).reshape(-1)).reshape(*ids.shape, x.shape[1])
        if not any(around):
            return values
        inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
        return jnp.where(inside[:, :, None], values, 0)

    every = np.maximum(call.places.of_groups(), 0)
    return [[at(leaf, places) for places in every] for leaf in range(call.leaves.shape[1])]


def _best(
    call: LogicTrees, leaves: list[list[jax.Array]], coefficients: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the largest of the trees at the places of each group, and which place of the group it is: ``[K, groups, B]``."""
    dtype = accumulator(leaves[0][0].dtype, coefficients.dtype)
    values = []
    for place, exists in enumerate(call.places.of_groups()[:, :, 0] >= 0):
        value = _nodes([of[place].astype(dtype) for of in leaves], coefficients.astype(dtype))
        values.append(value if exists.all() else jnp.where(exists[None, :, None], value, -jnp.inf))
    best, chosen = values[0], jnp.zeros(values[0].shape, jnp.int32)
    for place, value in enumerate(values[1:], 1):
        better = (value > best) | jnp.isnan(value)
        best, chosen = jnp.where(better, value, best), jnp.where(better, place, chosen)
    return best, chosen


def _nodes(values: list[jax.Array], coefficients: jax.Array) -> jax.Array:
    """Return the roots of trees with these leaves, each ``[K, groups, B]``."""
    of_trees, first = coefficients[..., None, None], 0
    for n in levels(len(values)):
        above = []
        for node in range(n):
            c0, c1, c2, c3 = of_trees[:, :, first + node]
            a, b = values[2 * node], values[2 * node + 1]
            above.append(c0 + c1 * a + (c2 + c3 * a) * b)
        values, first = above, first + n
    return values[0]


def _to_image(call: LogicTrees, of_leaves: list[jax.Array], chosen: jax.Array) -> jax.Array:
    """Return the sum of what all leaves pass on to each pixel: ``[I, B]``.

    Leaves at all places are wires, ordered by tree, leaf, place of the group and group.
    """
    (height, width), stride, around = call.places.image, call.places.stride, call.places.padding
    groups = call.places.of_groups()
    shape = (*call.leaves.shape, *groups.shape[:2])
    channel, row, column = call.places.in_window(call.leaves, call.n_channels)
    r, c = (
        of[:, :, None, None] + (groups[None, None, ..., i] * stride[i] - around[i])
        for i, of in enumerate((row, column))
    )
    exists = (groups[None, None, ..., 0] >= 0) & (r >= 0) & (r < height) & (c >= 0) & (c < width)
    # One more input takes what is not of the image.
    wires = jnp.where(exists, (channel[:, :, None, None] * height + r) * width + c, len(call.x))
    at_places = [
        jnp.stack([jnp.where(chosen == p, of, 0) for p in range(len(groups))], 1) for of in of_leaves
    ]
    by_wire = jnp.stack(at_places, 1).reshape(math.prod(shape), call.x.shape[1])
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

"""Initial wires for automata."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax.models._logic_configs import N_NEIGHBORS
from lutjax.values import Array

NEIGHBORS = [(y, x) for y in (0, 1, 2) for x in (0, 1, 2) if (y, x) != (1, 1)]
CENTER = N_NEIGHBORS  # number of neighbors, and index of the cell itself
_CORNERS, _EDGES = (0, 2, 5, 7), (1, 3, 4, 6)
_OPPOSITE = ((0, 7), (1, 6), (2, 5), (3, 4))


def draw(
    key: Array, wired: Sequence[tuple[int, int, int]], *, perception: tuple[int, ...], kernels: int
) -> list[jax.Array]:
    """Sample the wires for every layer except the first: int32 ``[gates in all copies, 2]`` each.

    Pairs within a layer are distinct where possible (`pairs`), with a separate order per kernel.
    Two choices help more seeds learn:

    - A gate starts as its first input, so each kernel output starts as a neighbor. All kernels
    together cover as many directions as there are outputs.
    - The first update layer pairs its inputs in random order, so that gates combine different
    kernels and channels.

    Args:
      wired: copies per layer, with inputs and gates per copy.
      perception: number of gates per layer in a kernel.

    Source: docs/logic.md, section 5.
    """
    keys = jax.random.split(key, len(wired) + 2)
    wires = [_sample_wires(k, *layer) for k, layer in zip(keys, wired, strict=False)]
    n_perceiving = len(perception) - 1
    if n_perceiving:
        seen = _directions(keys[-2], wires[:n_perceiving], perception, kernels)
        wires[0] = seen.reshape(-1)[wires[0]]
    order = jax.random.permutation(keys[-1], wired[n_perceiving][1]).astype(jnp.int32)
    wires[n_perceiving] = order[wires[n_perceiving]]
    return wires


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sample_wires(key: Array, copies: int, n_inputs: int, n_gates: int) -> jax.Array:
    """Sample a layer's wires, in a separate order per copy: int32 ``[copies * n_gates, 2]``."""
    keys = jax.random.split(key, copies)
    wires = jax.vmap(lambda key: jax.random.permutation(key, pairs(n_inputs, n_gates)))(keys)
    return (wires + n_inputs * jnp.arange(copies, dtype=jnp.int32)[:, None, None]).reshape(-1, 2)


def pairs(n_inputs: int, n_gates: int) -> np.ndarray:
    """Return pairs of inputs, neighbors first, as published: int32 ``[n_gates, 2]``.

    First inputs are distinct where possible, so that gates initialized to their first input keep
    every input.
    """
    first = np.arange(n_inputs - 1)
    by_distance = [np.stack([a, a + 1], -1) for a in (first[::2], first[1::2])]
    by_distance += [
        np.stack([a, a + d], -1) for d in range(2, n_inputs) for a in (np.arange(n_inputs - d),)
    ]
    every = np.concatenate(by_distance) if n_inputs > 1 else np.zeros((1, 2))
    return np.resize(every, (n_gates, 2)).astype(np.int32)


def _directions(
    key: Array, wires: list[jax.Array], perception: tuple[int, ...], kernels: int
) -> Int[jax.Array, "kernels 8"]:
    """Return a first-layer gate order per kernel that gives its outputs different directions."""
    n_outputs, kernel = perception[-1], jnp.arange(kernels, dtype=jnp.int32)[:, None]
    at = jnp.arange(kernels * n_outputs, dtype=jnp.int32)
    for layer in reversed(wires):
        at = layer[at, 0]  # a gate starts as its first input
    order_key, corner_key, edge_key, pair_key = jax.random.split(key, 4)
    if n_outputs == 1:
        corners = jax.random.permutation(corner_key, jnp.array(_CORNERS))
        edges = jax.random.permutation(edge_key, jnp.array(_EDGES))
        circle = jnp.concatenate([corners, edges])
    else:  # opposite neighbors together: they are the outputs of one kernel
        circle = jax.random.permutation(pair_key, jnp.array(_OPPOSITE)).reshape(-1)
    asked = jnp.resize(circle, (kernels, n_outputs)).astype(jnp.int32)
    order_keys = jax.random.split(order_key, kernels)
    orders = jax.vmap(lambda k: jax.random.permutation(k, CENTER))(order_keys)
    of_kernel = at.reshape(kernels, n_outputs) - CENTER * kernel
    return jax.vmap(_swap_entries)(orders.astype(jnp.int32), of_kernel, asked) + CENTER * kernel


def _swap_entries(order: jax.Array, places: jax.Array, asked: jax.Array) -> jax.Array:
    """Swap entries so that the requested values are at these positions, if positions differ."""

    def exchange(order: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        place, value = one
        other = jnp.argmax(order == value)
        return order.at[other].set(order[place]).at[place].set(value), None

    swapped: jax.Array = jax.lax.scan(exchange, order, (places, asked))[0]
    return swapped

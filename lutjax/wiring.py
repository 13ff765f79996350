"""Which inputs gates read: drawing wires.

Wires are int32 ``[gates, inputs of a gate]``, ids of inputs. What is drawn uses every input about equally often:
no input is read by more than ``ceil(wires / inputs)`` gates, so the reverse list of `lutjax.readers` has a width
that is known under `jax.jit`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax._typing import Array

__all__ = ["balanced", "trees", "unique_pairs", "windows"]


def _require(where: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{where}: {name} is {size}; it must be at least 1.")


def balanced(key: Array, n_inputs: int, n_gates: int, arity: int = 2) -> Int[jax.Array, "{n_gates} {arity}"]:
    """Draws wires that use every input about equally often.

    The fan-out of two inputs differs by at most one. The inputs of a gate differ if there are at least `arity`
    of them. Gates take the next inputs of a random order, and there is a new order when it is used up.

    Args:
      key: a key of `jax.random`.
      n_inputs: inputs to choose from.
      n_gates: gates.
      arity: inputs that a gate reads.

    Returns:
      int32 ``[n_gates, arity]``.

    Raises:
      ValueError: a size is less than 1.

    Source: differentiable logic semantics, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> wires = wiring.balanced(jax.random.key(0), n_inputs=8, n_gates=12)
      >>> jnp.bincount(wires.ravel())
      Array([3, 3, 3, 3, 3, 3, 3, 3], dtype=int32)
      >>> bool((wires[:, 0] != wires[:, 1]).all())
      True
    """
    _require("balanced", n_inputs=n_inputs, n_gates=n_gates, arity=arity)
    block = n_inputs // math.gcd(n_inputs, arity)  # gates that go through an order a whole number of times
    orders = jnp.broadcast_to(jnp.arange(n_inputs, dtype=jnp.int32), (-(-n_gates // block), n_inputs))
    orders = jax.random.permutation(key, orders, axis=1, independent=True)
    gate, slot = np.arange(n_gates)[:, None], np.arange(arity)
    return orders[gate // block, (gate % block * arity + slot) % n_inputs]


def unique_pairs(key: Array, n_inputs: int, n_gates: int) -> Int[jax.Array, "{n_gates} 2"]:
    """Draws pairs of different inputs, no two gates the same pair in any order.

    The fan-out of two inputs differs by at most one. Inputs stand in a circle in random order; the pairs are
    those of a few random distances, each taken all around, so they are not independent of each other.

    Args:
      key: a key of `jax.random`.
      n_inputs: inputs to choose from.
      n_gates: gates.

    Returns:
      int32 ``[n_gates, 2]``.

    Raises:
      ValueError: there are fewer than `n_gates` pairs, or a size is less than 1.

    Source: differentiable logic semantics, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> wires = wiring.unique_pairs(jax.random.key(0), n_inputs=5, n_gates=10)
      >>> sorted({tuple(sorted(pair)) for pair in wires.tolist()})
      [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    """
    _require("unique_pairs", n_inputs=n_inputs, n_gates=n_gates)
    pairs = n_inputs * (n_inputs - 1) // 2
    if n_gates > pairs:
        raise ValueError(
            f"unique_pairs: n_gates is {n_gates}, but {n_inputs} inputs have only {pairs} pairs; use fewer "
            "gates, or balanced wiring."
        )
    input_key, distance_key, gate_key, side_key = jax.random.split(key, 4)
    circles, rest = divmod(n_gates, n_inputs)
    start, most = np.arange(n_inputs), (n_inputs - 1) // 2  # distances up to `most` have n_inputs pairs
    # The rest comes from distance 1, every other pair first, so that all inputs have one before any has two;
    # or, where that is among the circles, from the distance of opposite inputs.
    spare = 2 if circles < most else 1
    distances = jax.random.permutation(distance_key, np.arange(spare, most + 1, dtype=np.int32))[:circles]
    last = np.concatenate([start[::2], start[1::2]])[:rest] if circles < most else start[:rest]
    first = np.concatenate([np.tile(start, circles), last])
    apart = jnp.repeat(distances, n_inputs, total_repeat_length=circles * n_inputs)
    apart = jnp.concatenate([apart, jnp.full(rest, 1 if circles < most else n_inputs // 2, jnp.int32)])
    wires = jnp.stack([jnp.asarray(first, jnp.int32), (first + apart) % n_inputs], -1)
    wires = jax.random.permutation(input_key, np.arange(n_inputs, dtype=np.int32))[wires]
    wires = jax.random.permutation(gate_key, wires)
    swap = jax.random.bernoulli(side_key, shape=(n_gates, 1))
    return jnp.where(swap, wires[:, ::-1], wires)


def trees(key: Array, n_inputs: int, n_trees: int, depth: int) -> Int[jax.Array, "{n_trees} {2**depth}"]:
    """Draws the leaves of complete binary trees of gates, each used about equally often.

    The leaves of a tree differ if there are as many inputs. Gates of the first level read leaves 0 and 1, 2 and 3,
    and so on; those of each further level two neighbours of the level before.

    Args:
      key: a key of `jax.random`.
      n_inputs: inputs to choose from: for a window of an image ``kernel * kernel * channels``.
      n_trees: trees.
      depth: levels of gates.

    Returns:
      int32 ``[n_trees, 2**depth]``. ``.reshape(-1, 2)`` are the wires of the first level.

    Raises:
      ValueError: a size is less than 1.

    Source: differentiable logic semantics, section 4.

    Example:
      >>> import jax
      >>> from lutjax import wiring
      >>> wiring.trees(jax.random.key(0), n_inputs=9, n_trees=16, depth=3).shape
      (16, 8)
    """
    _require("trees", depth=depth)
    return balanced(key, n_inputs, n_trees, 2**depth)


def windows(
    image_shape: tuple[int, int, int], kernel: int, stride: int = 1
) -> Int[np.ndarray, "rows columns window"]:
    """Which values of a flattened image each window holds.

    Args:
      image_shape: height, width and channels; values lie in that order.
      kernel: height and width of a window.
      stride: from one window to the next.

    Returns:
      int32 ``[rows, columns, kernel * kernel * channels]``: for each place of the window the ids of its values.
      ``windows(...)[..., leaves]`` are the wires of trees at every place.

    Raises:
      ValueError: the window is larger than the image, or a size is less than 1.

    Source: differentiable logic semantics, section 4.

    Example:
      >>> from lutjax import wiring
      >>> wiring.windows((3, 4, 1), kernel=2)[1, 2]
      array([ 6,  7, 10, 11], dtype=int32)
    """
    height, width, channels = image_shape
    _require("windows", height=height, width=width, channels=channels, kernel=kernel, stride=stride)
    if kernel > min(height, width):
        raise ValueError(f"windows: kernel is {kernel}, larger than an image of {height} by {width}.")
    ids = np.arange(height * width * channels, dtype=np.int32).reshape(height, width, channels)
    found = np.lib.stride_tricks.sliding_window_view(ids, (kernel, kernel), (0, 1))[::stride, ::stride]
    return np.moveaxis(found, 2, -1).reshape(*found.shape[:2], -1)

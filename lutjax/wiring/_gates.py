"""Sampling of gate wires, with balanced fan-outs or independent wires."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax._typing import Array
from lutjax.arguments import require_key
from lutjax.values._anchors import warn_of_repeats
from lutjax.wiring._sizes import require


def balanced(
    key: Array, n_inputs: int, n_gates: int, arity: int = 2
) -> Int[jax.Array, "{n_gates} {arity}"]:
    """Sample wires that use every input about equally often.

    Fan-outs differ by at most one. The inputs of a gate are distinct if there are at least `arity`
    inputs. Gates take the next inputs of a random order, and a new order begins when it is used up.

    Args:
      key: a key of `jax.random`.
      n_inputs: inputs to choose from.
      n_gates: gates.
      arity: inputs per gate.

    Returns:
      int32 ``[n_gates, arity]``.

    Warns:
      RepeatedInputsWarning: `arity` is larger than `n_inputs`, so a gate reads an input twice.

    Raises:
      ValueError: a size is less than 1.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> wires = wiring.balanced(jax.random.key(0), n_inputs=8, n_gates=12)
      >>> jnp.bincount(wires.ravel())
      Array([3, 3, 3, 3, 3, 3, 3, 3], dtype=int32)
      >>> bool((wires[:, 0] != wires[:, 1]).all())
      True
    """
    require_key("balanced", key)
    require("balanced", n_inputs=n_inputs, n_gates=n_gates, arity=arity)
    _warn_of_repeats("balanced", n_inputs, arity)
    return sample_balanced(key, n_inputs, n_gates, arity)


def _warn_of_repeats(where: str, n_inputs: int, arity: int) -> None:
    verb, plural = ("is", "") if n_inputs == 1 else ("are", "s")
    inputs = f"there {verb} {n_inputs} input{plural} to read"
    warn_of_repeats(where, "arity", arity, n_inputs, inputs)


def _orders(key: Array, n: int, size: int) -> jax.Array:
    """Return random orders, int32 ``[n, size]``, by one sort instead of several."""
    return jnp.argsort(jax.random.bits(key, (n, size)), axis=1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def sample_balanced(key: Array, n_inputs: int, n_gates: int, arity: int) -> jax.Array:
    # Gates of a block read a random order of the inputs, over and over, a whole number of times. So
    # all inputs are read equally often, and a gate reads different ones if there are enough.
    block = n_inputs // math.gcd(n_inputs, arity)
    orders = _orders(key, -(-n_gates // block), n_inputs)
    gate, slot = np.arange(n_gates)[:, None], np.arange(arity)
    return orders[gate // block, (gate % block * arity + slot) % n_inputs]


def unique_pairs(key: Array, n_inputs: int, n_gates: int) -> Int[jax.Array, "{n_gates} 2"]:
    """Sample distinct pairs of distinct inputs, in any order.

    Fan-outs differ by at most one. Inputs are on a circle in random order; the pairs have a few
    random distances, each used around the whole circle, so they are not independent.

    Args:
      key: a key of `jax.random`.
      n_inputs: inputs to choose from.
      n_gates: gates.

    Returns:
      int32 ``[n_gates, 2]``.

    Raises:
      ValueError: there are fewer than `n_gates` pairs, or a size is less than 1.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> wires = wiring.unique_pairs(jax.random.key(0), n_inputs=5, n_gates=10)
      >>> sorted({tuple(sorted(pair)) for pair in wires.tolist()})
      [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    """
    require_key("unique_pairs", key)
    require("unique_pairs", n_inputs=n_inputs, n_gates=n_gates)
    pairs = n_inputs * (n_inputs - 1) // 2
    if n_gates > pairs:
        raise ValueError(
            f"unique_pairs: n_gates is {n_gates}, but {n_inputs} inputs have only {pairs} pairs; "
            "use fewer gates, or balanced wiring."
        )
    return _unique_pairs(key, n_inputs, n_gates)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unique_pairs(key: Array, n_inputs: int, n_gates: int) -> jax.Array:
    input_key, distance_key = jax.random.split(key)
    circles, rest = divmod(n_gates, n_inputs)
    # Each distance on the circle up to `most` has n_inputs pairs, one that starts at each input.
    start, most = np.arange(n_inputs), (n_inputs - 1) // 2
    # The other pairs have distance 1, alternating, so that all inputs have one before any has two;
    # or, if the circles include distance 1, the distance of opposite inputs.
    spare = 2 if circles < most else 1
    last = np.concatenate([start[::2], start[1::2]])[:rest] if circles < most else start[:rest]
    one = np.concatenate([np.tile(start, circles), last]).astype(np.int32)
    distances = spare + _orders(distance_key, 1, most + 1 - spare)[0, :circles]
    distances = jnp.append(distances, jnp.int32(1 if circles < most else n_inputs // 2))
    other = (one + distances[np.arange(n_gates) // n_inputs]) % n_inputs
    return _orders(input_key, 1, n_inputs)[0, jnp.stack([one, other], -1)]


def trees(
    key: Array, n_inputs: int, n_trees: int, depth: int, arity: int = 2
) -> Int[jax.Array, "{n_trees} {arity**depth}"]:
    """Sample leaves for complete gate trees, with every input used about equally often.

    A tree's leaves are distinct if there are enough inputs. The first gate in the first level reads
    the first `arity` leaves, the second gate the next ones, and so on. Gates in each further level
    read as many neighbors in the previous level.

    Args:
      key: a `jax.random` key.
      n_inputs: inputs to choose from: for an image window ``height * width * channels``.
      n_trees: trees.
      depth: gate levels.
      arity: inputs per gate.

    Returns:
      int32 ``[n_trees, arity**depth]``. ``.reshape(-1, arity)`` are the first-level wires.

    Warns:
      RepeatedInputsWarning: `arity` is larger than `n_inputs`, so a gate reads an input twice.

    Raises:
      ValueError: a size is less than 1.

    Source: docs/logic.md, sections 4 and 8.

    Example:
      >>> import jax
      >>> from lutjax import wiring
      >>> wiring.trees(jax.random.key(0), n_inputs=9, n_trees=16, depth=3).shape
      (16, 8)
    """
    require_key("trees", key)
    require("trees", n_inputs=n_inputs, n_trees=n_trees, depth=depth, arity=arity)
    # The gates of a tree may share inputs, so only the inputs of a gate are compared with `arity`.
    _warn_of_repeats("trees", n_inputs, arity)
    return sample_balanced(key, n_inputs, n_trees, arity**depth)


def random(
    key: Array, n_inputs: int, n_gates: int, arity: int = 2
) -> Int[jax.Array, "{n_gates} {arity}"]:
    """Sample every wire independently: some inputs are read often, some by no gate.

    The inputs of a gate are distinct if there are at least `arity` inputs.

    Args:
      key: a key of `jax.random`.
      n_inputs: inputs to choose from.
      n_gates: gates.
      arity: inputs that a gate reads.

    Returns:
      int32 ``[n_gates, arity]``.

    Warns:
      RepeatedInputsWarning: `arity` is larger than `n_inputs`, so a gate reads an input twice.

    Raises:
      ValueError: a size is less than 1.

    Source: docs/logic.md, section 9.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> wires = wiring.random(jax.random.key(0), n_inputs=8, n_gates=12)
      >>> wires.shape, bool((wires[:, 0] != wires[:, 1]).all())
      ((12, 2), True)
    """
    require_key("random", key)
    require("random", n_inputs=n_inputs, n_gates=n_gates, arity=arity)
    _warn_of_repeats("random", n_inputs, arity)
    return _sample_random(key, n_inputs, n_gates, arity)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sample_random(key: Array, n_inputs: int, n_gates: int, arity: int) -> jax.Array:
    # Input i is drawn among n - i remaining inputs, then shifted past earlier draws, ascending.
    earlier: list[jax.Array] = []
    for number, place_key in enumerate(jax.random.split(key, arity)):
        n_free = n_inputs - number if n_inputs >= arity else n_inputs
        drawn = jax.random.randint(place_key, (n_gates,), 0, n_free, jnp.int32)
        if n_inputs >= arity and earlier:
            # In ascending order: each shift may move the number onto the next earlier one.
            for before in jnp.sort(jnp.stack(earlier), 0):
                drawn = jnp.where(drawn >= before, drawn + 1, drawn)
        earlier.append(drawn)
    return jnp.stack(earlier, -1)


def butterfly(
    key: Array | None, n_inputs: int, n_gates: int, arity: int = 2
) -> Int[jax.Array, "{n_gates} {arity}"]:
    """Wire layers so that each output depends on as many inputs as possible.

    After ``k`` equally wide layers an output depends on ``arity**k`` inputs, up to the width: on
    all inputs after ``ceil(log(width) / log(arity))`` layers. In other wirings a gate's inputs soon
    depend on the same network inputs. Fan-outs differ by at most one.

    A layer's gates are numbered from 0 in a random order. Number `p` reads the inputs ``arity * p``
    to ``arity * p + arity - 1``, modulo the width, in the input layer's order: the fast Fourier
    transform network, for every width. Orders depend only on widths and not on `key`, because
    layers must fit together.

    Args:
      key: unused, for the common signature of wirings.
      n_inputs: inputs to choose from.
      n_gates: gates.
      arity: inputs per gate.

    Returns:
      int32 ``[n_gates, arity]``.

    Raises:
      ValueError: a size is less than 1.

    Source: docs/logic.md, section 9.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> wires = wiring.butterfly(None, n_inputs=8, n_gates=8)
      >>> depends = jnp.eye(8, dtype=bool)
      >>> for _ in range(3):
      ...     depends = depends[wires].any(1)
      >>> bool(depends.all())
      True
    """
    require("butterfly", n_inputs=n_inputs, n_gates=n_gates, arity=arity)
    # The order of the gates is the order in which the next layer reads them, as both have one
    # width.
    number = np.argsort(_order(n_gates))
    reads = (number[:, None] * arity + np.arange(arity)) % n_inputs
    return jnp.asarray(_order(n_inputs)[reads], jnp.int32)


def _order(width: int) -> np.ndarray:
    """Return a layer's gate order, the same for all layers with this width."""
    return np.random.default_rng(width).permutation(width)

"""Trees of gates over an image in plain JAX: each leaf of each place is gathered, and everything after is element by element."""

import jax
import jax.numpy as jnp
import numpy as np

from lutjax._dtypes import accumulator
from lutjax.kernels._xla import _wire_gathers
from lutjax.kernels._xla._row_gathers import read
from lutjax.kernels.registry import Device
from lutjax.ops.logic_trees import LogicTrees, levels


def forward(call: LogicTrees, *, device: Device) -> jax.Array:
    return _trees(call, call.x, call.coefficients).astype(call.x.dtype)


def backward(
    call: LogicTrees, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    x, coefficients = call.x.astype(dtype), call.coefficients.astype(dtype)
    _, pull = jax.vjp(lambda x, coefficients: _trees(call, x, coefficients), x, coefficients)
    found = dict(zip(("x", "coefficients"), pull(cotangent.astype(dtype)), strict=True))
    return {name: found[name] for name in needs}


def _trees(call: LogicTrees, x: jax.Array, coefficients: jax.Array) -> jax.Array:
    n_trees, n_leaves = call.leaves.shape
    dtype = accumulator(x.dtype, coefficients.dtype)
    of_trees = coefficients.astype(dtype).reshape(4, n_trees, n_leaves - 1, 1, 1)
    best = None
    for shifts in call.places.shifts().T:
        value = _at(call, x, of_trees, np.maximum(shifts, 0))
        value = jnp.where((shifts >= 0)[None, :, None], value, -jnp.inf)
        best = value if best is None else jnp.where((value > best) | jnp.isnan(value), value, best)
    assert best is not None
    return best.reshape(n_trees * best.shape[1], x.shape[1])


def _at(call: LogicTrees, x: jax.Array, of_trees: jax.Array, shifts: np.ndarray) -> jax.Array:
    """Return the trees at one place of each group: ``[K, groups, B]``."""
    n_trees, n_leaves = call.leaves.shape
    values = []
    for leaf in range(n_leaves):
        ids = _wire_gathers.clamped(call.leaves[:, leaf, None] + shifts[None], x.shape[0])
        values.append(
            read(x, ids.reshape(-1)).astype(of_trees.dtype).reshape(n_trees, len(shifts), x.shape[1])
        )
    first = 0
    for n in levels(n_leaves):
        above = []
        for node in range(n):
            c0, c1, c2, c3 = of_trees[:, :, first + node]
            a, b = values[2 * node], values[2 * node + 1]
            above.append(c0 + c1 * a + (c2 + c3 * a) * b)
        values, first = above, first + n
    return values[0]

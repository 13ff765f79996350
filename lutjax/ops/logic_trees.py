"""Trees of gates over an image, and the or of neighbouring places, in one op."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lutjax._ids import as_int32, as_jax
from lutjax._typing import Array
from lutjax.kernels.contract import Call, batched, shared, static
from lutjax.kernels.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops._transforms import apply

MAX_LEAVES = 16


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of windows in an image, and the groups of them whose largest value is taken.

    Attributes:
      width: of a row of the image. stride: from one place to the next, in rows and in columns.
      places: rows and columns of places. pool, pool_padding: height and width of groups, and of what lies around the places.
    """

    width: int
    stride: tuple[int, int]
    places: tuple[int, int]
    pool: tuple[int, int] = (1, 1)
    pool_padding: tuple[int, int] = (0, 0)

    @property
    def groups(self) -> tuple[int, int]:
        """Rows and columns of groups."""
        rows, columns = (
            (n + 2 * p) // k for n, k, p in zip(self.places, self.pool, self.pool_padding, strict=True)
        )
        return rows, columns

    def shifts(self) -> np.ndarray:
        """Return what the ids of each place are higher by, group by group: int32 ``[groups, places of a group]``; -1: no place."""
        of_axes = []
        for groups, size, around, n in zip(
            self.groups, self.pool, self.pool_padding, self.places, strict=True
        ):
            place = np.arange(groups)[:, None] * size + np.arange(size) - around
            of_axes.append(np.where((place >= 0) & (place < n), place, -1))
        row, column = of_axes[0][:, None, :, None], of_axes[1][None, :, None, :]
        found = np.where(
            (row < 0) | (column < 0), -1, row * self.stride[0] * self.width + column * self.stride[1]
        )
        return found.reshape(math.prod(self.groups), -1).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class LogicTrees(Call, op="logic_trees", features_first=True, output="p"):
    """The call of `logic_trees`.

    Attributes:
      x: ``[I, B]`` floats, features first.
      coefficients: ``[4, K * (leaves - 1)]`` floats, tree by tree, of each its nodes level by level.
      leaves: int32 ``[K, leaves]``, ids of the first place; their number is a power of two.
      places: where trees are.

    Output and its cotangent: ``[K * groups, B]``. Differentiable: `x`, `coefficients`.
    """

    x: jax.Array = batched(1, "i")
    coefficients: jax.Array = shared("c n")
    leaves: jax.Array = shared("k l")
    places: Places = static()


def logic_trees(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 nodes"],
    leaves: Int[Array, "trees leaves"],
    *,
    places: Places,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Trees of gates at all places of an image, and the largest of the values at neighbouring places.

    It is what `lutjax.bilinear_gates` gives level by level, with the leaves of a tree at each place shifted by the place, then
    the maximum over groups of places, whose gradient goes to the first of the largest. Values of nodes are not stored: the backward
    pass computes them again.

    Args:
      x: ``[I, ...]``, features first: the image, padded, rows of its channels one after the other.
      coefficients: ``[4, nodes]``, of all trees level by level, the leaves' parents first, as in `lutjax.layers.nnx.LogicConv`.
      leaves: int32 ``[trees, leaves]``, 2 to 16, ids of `x` at the first place. Ids beyond the inputs are clamped.
      places: where trees are.
      implementation: see `lutjax.detect`. In Triton, the gradient of `x` is summed by atomics.

    Returns:
      ``[trees * groups, ...]``, of the dtype of `x`.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 8.
    """
    op = "logic_trees"
    _checks.floats(op, "coefficients", coefficients, 2, "[4, nodes]")
    n_trees, n_leaves = leaves.shape
    _checks.require(
        2 <= n_leaves <= MAX_LEAVES and n_leaves & (n_leaves - 1) == 0,
        op,
        "leaves",
        leaves,
        f"expected [trees, leaves] with 2 to {MAX_LEAVES} leaves, a power of two",
    )
    _checks.require(
        coefficients.shape == (4, n_trees * (n_leaves - 1)),
        op,
        "coefficients",
        coefficients,
        f"expected [4, {n_trees * (n_leaves - 1)}]: 1, a, b and ab for each node of the trees",
    )
    call = LogicTrees(as_jax(x), _by_tree(as_jax(coefficients), n_trees), as_int32(leaves), places=places)
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=0))


def levels(n_leaves: int) -> Sequence[int]:
    """Return the number of nodes of each level of a tree, the leaves' parents first."""
    return [n_leaves >> level for level in range(1, n_leaves.bit_length())]


def _by_tree(coefficients: jax.Array, n_trees: int) -> jax.Array:
    """Return coefficients of nodes level by level in the order of trees."""
    parts, first = [], 0
    for n in levels(coefficients.shape[1] // max(n_trees, 1) + 1):
        parts.append(coefficients[:, first : first + n * n_trees].reshape(4, n_trees, n))
        first += n * n_trees
    return jnp.concatenate(parts, 2).reshape(4, -1)

"""Trees of gates over an image, and the or of neighbouring places, in one op."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops._gates import readers_of_part
from lutjax.values._ids import as_int32, as_jax

MAX_LEAVES = 16


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of a window in an image, and the groups of them whose largest value is taken. Pairs are of rows and columns.

    Attributes:
      image: height and width of the image. kernel: of the window.
      stride: from one place to the next. padding: rows and columns of zeros around the image, of which there is no copy.
      pool: height and width of groups. pool_padding: rows and columns around the places that groups reach into, where there is nothing.
    """

    image: tuple[int, int]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    pool: tuple[int, int] = (1, 1)
    pool_padding: tuple[int, int] = (0, 0)

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of places."""
        rows, columns = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip(self.image, self.kernel, self.stride, self.padding, strict=True)
        )
        return rows, columns

    @property
    def groups(self) -> tuple[int, int]:
        """Rows and columns of groups."""
        rows, columns = (
            (n + 2 * p) // k for n, k, p in zip(self.counts, self.pool, self.pool_padding, strict=True)
        )
        return rows, columns

    def of_groups(self) -> np.ndarray:
        """Return row and column of each place of each group: int32 ``[places of a group, groups, 2]``; -1, -1: there is no place."""
        of_axes = []
        for groups, size, around, n in zip(
            self.groups, self.pool, self.pool_padding, self.counts, strict=True
        ):
            place = np.arange(size)[:, None] + np.arange(groups) * size - around
            of_axes.append(np.where((place >= 0) & (place < n), place, -1))
        row, column = np.broadcast_arrays(of_axes[0][:, None, :, None], of_axes[1][None, :, None, :])
        found = np.stack([row, column], -1).reshape(math.prod(self.pool), -1, 2).astype(np.int32)
        return np.where((found < 0).any(-1, keepdims=True), -1, found)

    def in_window(self, leaves: Any, n_channels: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return channel, row and column of ids of values in the window; ids beyond it are clamped."""
        ids = jnp.clip(leaves, 0, math.prod(self.kernel) * n_channels - 1)
        pixel, channel = jnp.divmod(ids, n_channels)
        return (channel, *jnp.divmod(pixel, self.kernel[1]))

    def that_read(self, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the places where a value at ``row, column`` of the window is each pixel of the image.

        Args:
          row, column: int32 ``[...]``.

        Returns:
          Rows ``[..., height, 1]`` and columns ``[..., 1, width]`` of places; -1 where there is none.
        """
        found = []
        for offset, size, step, around, n in zip(
            (row, column), self.image, self.stride, self.padding, self.counts, strict=True
        ):
            pixel = jnp.arange(size, dtype=jnp.int32).reshape(*(1,) * offset.ndim, size)
            distance = pixel + (around - offset[..., None])
            exists = (distance >= 0) & (distance % step == 0) & (distance // step < n)
            found.append(jnp.where(exists, distance // step, -1))
        return found[0][..., :, None], found[1][..., None, :]


@dataclasses.dataclass(frozen=True, eq=False)
class LogicTrees(Call, op="logic_trees", features_first=True, output="t p"):
    """The call of `logic_trees`.

    Attributes:
      x: ``[I, B]`` floats, features first: channels, rows, columns.
      coefficients: ``[4, K, leaves - 1]`` floats, the nodes of each tree level by level.
      leaves: int32 ``[K, leaves]``, ids of values in a window, which may lie beyond it; their number is a power of two.
      readers: int32 ``[channels, F]`` of `lutjax.readers` of the channels of leaves, or None.
      places: where trees are.

    Output and its cotangent: ``[K, groups, B]``. Differentiable: `x`, `coefficients`.
    """

    x: jax.Array = batched(1, "i")
    coefficients: jax.Array = shared("c t n")
    leaves: jax.Array = shared("t l")
    readers: jax.Array | None = shared("k f", default=None)
    places: Places = static()

    @property
    def n_channels(self) -> int:
        """Channels of the image."""
        return self.x.shape[0] // math.prod(self.places.image)

    @property
    def n_groups(self) -> int:
        """Groups of places."""
        return math.prod(self.places.groups)

    def of_part(self, index: Any) -> "LogicTrees":
        if self.readers is None:
            return self
        return self.replace(readers=readers_of_part(self.readers, self.leaves.size, index))


def logic_trees(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 trees nodes"],
    leaves: Int[Array, "trees leaves"],
    *,
    places: Places,
    readers: Int[Array, "channels fan_out"] | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Trees of gates at all places of an image, and the largest of the values at neighbouring places.

    It is what `lutjax.bilinear_gates` gives level by level, on the values of a window at each place, then the maximum over groups
    of places, whose gradient goes to the first of the largest. Windows are not copied, nor is the image padded; values of nodes are not
    stored: the backward pass computes them again.

    Args:
      x: ``[I, ...]``, features first: the image, channels, rows and columns.
      coefficients: ``[4, trees, nodes]``, of each tree level by level, the leaves' parents first: those of 1, a, b and ab.
      leaves: int32 ``[trees, leaves]``, 2 to 16, ids of values in a window in the order row, column, channel. Ids beyond it are clamped.
      places: where windows are.
      readers: int32 ``[channels, F]``: ``lutjax.readers(leaves % channels, channels)``. With it the gradient of `x` needs no sorting.
        Entries that do not belong to `leaves` give wrong gradients.
      implementation: see `lutjax.detect`.

    Returns:
      ``[trees, groups, ...]``, of the dtype of `x`; computed in the wider dtype of `x` and `coefficients`, at least float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 8.
    """
    op, n_pixels = "logic_trees", math.prod(places.image)
    if any(n < 1 for n in places.counts):
        raise ValueError(f"{op}: places is {places}; the window is larger than the image with its padding.")
    if any(p >= k for k, p in zip(places.pool, places.pool_padding, strict=True)):
        raise ValueError(
            f"{op}: places is {places}; pool_padding must be less than pool, or a group could have no place."
        )
    _checks.floats(op, "x", x, None, "[inputs, ...]")
    _checks.require(
        x.ndim > 0 and x.shape[0] > 0 and x.shape[0] % n_pixels == 0,
        op,
        "x",
        x,
        f"expected [channels * {n_pixels}, ...]: all values of an image of {places.image[0]} rows and {places.image[1]} columns",
    )
    _checks.floats(op, "coefficients", coefficients, 3, "[4, trees, nodes]")
    _checks.integers(op, "leaves", leaves, 2, "[trees, leaves]")
    n_trees, n_leaves = leaves.shape
    _checks.require(
        2 <= n_leaves <= MAX_LEAVES and n_leaves & (n_leaves - 1) == 0,
        op,
        "leaves",
        leaves,
        f"expected [trees, leaves] with 2 to {MAX_LEAVES} leaves, a power of two",
    )
    _checks.require(
        coefficients.shape == (4, n_trees, n_leaves - 1),
        op,
        "coefficients",
        coefficients,
        f"expected [4, {n_trees}, {n_leaves - 1}]: 1, a, b and ab for each node of the trees",
    )
    n_channels = x.shape[0] // n_pixels
    if readers is not None:
        _checks.integers(op, "readers", readers, 2, "[channels, fan_out]")
        _checks.require(
            readers.shape[0] == n_channels,
            op,
            "readers",
            readers,
            f"expected [{n_channels}, fan_out]: the readers of each channel",
        )
    call = LogicTrees(
        as_jax(x),
        as_jax(coefficients),
        as_int32(leaves),
        None if readers is None else as_int32(readers),
        places=places,
    )
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=0))


def levels(n_leaves: int) -> Sequence[int]:
    """Return the number of nodes of each level of a tree, the leaves' parents first."""
    return [n_leaves >> level for level in range(1, n_leaves.bit_length())]

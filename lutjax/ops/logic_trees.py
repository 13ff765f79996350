"""Gate trees over image windows with OR-pooling, fused or level by level."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lutjax import _meshes
from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops._gates import readers_of_part
from lutjax.ops.bilinear_gates import bilinear_gates
from lutjax.values._dtypes import accumulator
from lutjax.values._ids import as_int32, as_jax

# Evaluates one level: inputs (features first), node slice, copies per node, wires, fan-out lists.
Level = Callable[[jax.Array, slice, int, Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Places:
    """Window positions in an image and their pooling groups. Pairs hold rows and columns.

    Attributes:
      image: image height and width. kernel: window height and width.
      stride: window stride. padding: implicit zero padding around the image.
      pool: pooling height and width. pool_padding: empty rows and columns around the positions,
        reached by pooling groups.
    """

    image: tuple[int, int]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    pool: tuple[int, int] = (1, 1)
    pool_padding: tuple[int, int] = (0, 0)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of position rows and columns."""
        rows, columns = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip(self.image, self.kernel, self.stride, self.padding, strict=True)
        )
        return rows, columns

    @property
    def groups(self) -> tuple[int, int]:
        """Number of group rows and columns."""
        rows, columns = (
            (n + 2 * p) // k
            for n, k, p in zip(self.counts, self.pool, self.pool_padding, strict=True)
        )
        return rows, columns

    def in_groups(self, y: jax.Array, nothing: Any) -> list[jax.Array]:
        """Return a list with, for each position in a group, all groups' values row by row.

        Args:
          y: ``[trees, rows, columns, ...]``, values at all positions.
          nothing: value for empty positions.
        """
        (down, right), (rows, columns) = self.pool, self.groups
        if any(self.pool_padding):
            outer = ((0, 0), *((p, p) for p in self.pool_padding), *((0, 0),) * (y.ndim - 3))
            y = jnp.pad(y, outer, constant_values=nothing)
        return [
            y[:, row::down, column::right][:, :rows, :columns]
            for row, column in itertools.product(range(down), range(right))
        ]

    def in_window(self, leaves: Any, n_channels: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return channel, row and column for clamped ids in a window."""
        ids = jnp.clip(leaves, 0, math.prod(self.kernel) * n_channels - 1)
        pixel, channel = jnp.divmod(ids, n_channels)
        return (channel, *jnp.divmod(pixel, self.kernel[1]))

    def reading_positions(self, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return, for each image pixel, the position that reads it by one pixel of its window.

        At most one position does: a window at position ``p`` begins ``p * stride - padding`` pixels
        into the image.

        Args:
          row: int32 ``[...]``, row of the pixel within the window.
          column: int32 ``[...]``, its column.

        Returns:
          Position rows ``[..., height, 1]`` and columns ``[..., 1, width]``; -1 for none.
        """

        def positions_along(axis: int, offset: jax.Array) -> jax.Array:
            size, stride, n = self.image[axis], self.stride[axis], self.counts[axis]
            pixels = jnp.arange(size, dtype=jnp.int32).reshape(*(1,) * offset.ndim, size)
            # Distance of a pixel from the first pixel that this part of a window reads.
            distance = pixels + (self.padding[axis] - offset[..., None])
            position = distance // stride
            exists = (distance % stride == 0) & (position >= 0) & (position < n)
            return jnp.where(exists, position, -1)

        return positions_along(0, row)[..., :, None], positions_along(1, column)[..., None, :]


def in_levels(
    places: Places, x: jax.Array, wires: Any, readers: Any, n_nodes: Sequence[int], level: Level
) -> jax.Array:
    """Evaluate trees level by level at all positions and return their roots.

    Args:
      places: the window positions.
      x: ``[channels, height, width, ...]``.
      wires: int32 ``[first nodes, n]``, window ids.
      readers: fan-out lists for channels, or None.
      n_nodes: nodes per level for all trees together, from the leaves up.
      level: function to evaluate one level.

    Returns:
      ``[trees, rows, columns, ...]``.
    """
    batch, n, (rows, columns) = x.shape[3:], wires.shape[1], places.counts
    around = [(p, p) for p in places.padding]
    x = jnp.pad(x, ((0, 0), *around, *((0, 0),) * len(batch)))
    n_channels = x.shape[0]
    x = x.reshape(math.prod(x.shape[:3]), *batch)
    if readers is not None:
        readers = _readers_of_image(places, n_channels, readers, wires)
    # Leaves at all positions become gates over the padded image. Above, positions join the batch.
    y = level(
        x, slice(0, n_nodes[0]), rows * columns, _wires_of_image(places, n_channels, wires), readers
    )
    y = y.reshape(n_nodes[0], rows, columns, *batch)
    first = n_nodes[0]
    for count in n_nodes[1:]:  # they read neighbors of the level before
        ids = jnp.arange(n * count, dtype=jnp.int32)
        y = level(y, slice(first, first + count), 1, ids.reshape(-1, n), ids[:, None])
        first += count
    return y


def _wires_of_image(places: Places, n_channels: int, wires: Any) -> jax.Array:
    """Return leaf wires at all positions as padded-image ids: ``[leaves * positions, n]``."""
    height, width = (n + 2 * p for n, p in zip(places.image, places.padding, strict=True))
    channel, row, column = places.in_window(jnp.asarray(wires, jnp.int32), n_channels)
    ids = (channel * height + row) * width + column  # at the first position
    down, right = (
        np.arange(n, dtype=np.int32) * s for n, s in zip(places.counts, places.stride, strict=True)
    )
    shifts = (down[:, None] * width + right[None]).reshape(1, -1, 1)
    return (ids[:, None] + shifts).reshape(-1, wires.shape[1])


def _readers_of_image(places: Places, n_channels: int, readers: Any, wires: Any) -> jax.Array:
    """Expand channel fan-out lists to the padded image: ``[channels * height * width, F]``.

    Each leaf reads a given value at one position at most.
    """
    height, width = (n + 2 * p for n, p in zip(places.image, places.padding, strict=True))
    number = jnp.maximum(readers, 0)
    of_readers = jnp.asarray(wires, jnp.int32).reshape(-1)[number]
    _, row, column = places.in_window(of_readers, n_channels)
    padded = dataclasses.replace(places, image=(height, width), padding=(0, 0))
    row, column = padded.reading_positions(row, column)
    gate, slot = (a[..., None, None] for a in jnp.divmod(number, wires.shape[1]))
    wire = (gate * math.prod(places.counts) + row * places.counts[1] + column) * wires.shape[
        1
    ] + slot
    exists = (row >= 0) & (column >= 0) & (readers >= 0)[..., None, None]
    found = jnp.moveaxis(jnp.where(exists, wire, -1), 1, -1)
    return found.reshape(n_channels * height * width, -1)


def max_pool_groups(places: Places, y: jax.Array) -> jax.Array:
    """Max-pool ``[trees, rows, columns, ...]``. The first maximum gets the gradient."""

    def pool_groups(y: jax.Array) -> jax.Array:
        return first_maximum(places.in_groups(y, -jnp.inf))

    found: jax.Array = _meshes.shard_by_compiler(pool_groups, _meshes.spec_of)(y)
    return found


def first_maximum(values: Sequence[jax.Array]) -> jax.Array:
    """Return the elementwise maximum, propagating NaN. The first maximum gets the gradient.

    `jax.numpy.max` would split the gradient among equal values, and bits are often equal.
    """
    best, *others = values
    for value in others:
        best = jnp.where((value > best) | jnp.isnan(value), value, best)
    return best


def _level_by_level(call: "LogicTrees", *, implementation: Implementation) -> jax.Array:
    """Evaluate a call level by level with `lutjax.bilinear_gates`, then max-pool."""
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    coefficients, (n_trees, n_leaves), batch = (
        call.coefficients.astype(dtype),
        call.leaves.shape,
        call.x.shape[1:],
    )
    of_tree = levels(n_leaves)

    def level(x: jax.Array, part: slice, copies: int, wires: Any, readers: Any) -> jax.Array:
        first = part.start // n_trees if n_trees else 0
        own = _level_coefficients(
            coefficients, first, (part.stop - part.start) // max(n_trees, 1), copies
        )
        return bilinear_gates(
            x, own, wires, readers=readers, feature_axis=0, implementation=implementation
        )

    image = (call.n_channels, *call.places.image)
    x = _meshes.reshape_unsharded(call.x.astype(dtype), 0, *image, stop=1)
    wires = _meshes.reshape_unsharded(call.leaves, 0, n_trees * n_leaves // 2, 2)
    n_nodes = [n_trees * n for n in of_tree]
    y = max_pool_groups(call.places, in_levels(call.places, x, wires, call.readers, n_nodes, level))
    return y.astype(call.x.dtype).reshape(n_trees, call.n_groups, *batch)


def _level_coefficients(coefficients: jax.Array, first: int, n: int, copies: int) -> jax.Array:
    """Slice and repeat `n` nodes per tree: ``[4, trees, nodes]`` -> ``[4, trees * n * copies]``."""

    def repeat_coefficients(coefficients: jax.Array) -> jax.Array:
        of_nodes = coefficients[:, :, first : first + n]
        return jnp.repeat(of_nodes.reshape(4, of_nodes.shape[1] * n), copies, 1)

    def spec(coefficients: jax.Array) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(*(*_meshes.spec_of(coefficients), None, None)[:2])

    found: jax.Array = _meshes.shard_by_compiler(repeat_coefficients, spec)(coefficients)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class LogicTrees(Call, op="logic_trees", features_first=True, output="t p", parts=_level_by_level):
    """The call of `logic_trees`. It decomposes into gates, level by level.

    Attributes:
      x: ``[I, B]`` floats, features first: channels, rows, columns.
      coefficients: ``[4, K, leaves - 1]`` floats, each tree's nodes level by level.
      leaves: int32 ``[K, leaves]``, window ids, possibly out of range. The leaf count is a power of
        two.
      readers: int32 ``[channels, F]`` from `lutjax.readers` for the leaves' channels, or None.
      places: the window positions.

    Output and its cotangent: ``[K, groups, B]``. Differentiable: `x`, `coefficients`.
    """

    x: jax.Array = batched(1, "i")
    coefficients: jax.Array = shared("c t n")
    leaves: jax.Array = shared("t l")
    readers: jax.Array | None = shared("k f", default=None)
    places: Places = static()

    @property
    def n_channels(self) -> int:
        """Number of image channels."""
        return self.x.shape[0] // math.prod(self.places.image)

    @property
    def n_groups(self) -> int:
        """Number of position groups."""
        return math.prod(self.places.groups)

    def select_shard(self, index: Any) -> "LogicTrees":
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
    """Evaluate gate trees at all window positions of an image, then OR-pool neighboring positions.

    Equivalent to `lutjax.bilinear_gates` level by level on each window, followed by max pooling
    over position groups. The first maximum in a group gets the gradient. Windows are not copied. A
    fused kernel, if available, neither pads the image nor stores node values; the backward pass
    recomputes them.

    Definition for one sample. ``dy`` is the output cotangent::

        height, width = places.image
        n_channels, n_leaves = len(x) // (height * width), leaves.shape[1]

        def evaluate(tree, row, column):  # ids read by the leaves; values of leaves and gates
            pixel, channel = np.divmod(leaves[tree], n_channels)
            row = row * places.stride[0] - places.padding[0] + pixel // places.kernel[1]
            column = column * places.stride[1] - places.padding[1] + pixel % places.kernel[1]
            inside = (0 <= row) & (row < height) & (0 <= column) & (column < width)
            ids = np.where(inside, (channel * height + row) * width + column, -1)
            nodes = list(np.where(inside, x[ids], 0))
            for gate in range(n_leaves - 1):
                c0, c1, c2, c3 = coefficients[:, tree, gate]
                a, b = nodes[2 * gate], nodes[2 * gate + 1]
                nodes.append(c0 + c1 * a + c2 * b + c3 * a * b)
            return ids, nodes

        y = np.zeros((len(leaves), places.groups[0] * places.groups[1]))
        dx, dcoefficients = np.zeros_like(x), np.zeros_like(coefficients)
        for tree, group in np.ndindex(*y.shape):
            first = np.multiply(divmod(group, places.groups[1]), places.pool)
            top, left = first - places.pool_padding
            window = [(top + i, left + j) for i, j in np.ndindex(*places.pool)]
            inside = [at for at in window if min(at) >= 0 and np.all(np.less(at, places.counts))]
            found = [evaluate(tree, *at) for at in inside]
            ids, nodes = max(found, key=lambda each: each[1][-1])  # the first maximum
            y[tree, group] = nodes[-1]

            dnodes = [0] * (len(nodes) - 1) + [dy[tree, group]]
            for gate in reversed(range(n_leaves - 1)):
                _, c1, c2, c3 = coefficients[:, tree, gate]
                a, b, dgate = nodes[2 * gate], nodes[2 * gate + 1], dnodes[n_leaves + gate]
                dcoefficients[:, tree, gate] += dgate * np.array([1, a, b, a * b])
                dnodes[2 * gate : 2 * gate + 2] = dgate * (c1 + c3 * b), dgate * (c2 + c3 * a)
            for id, dleaf in zip(ids, dnodes):
                if id >= 0:
                    dx[id] += dleaf

    Args:
      x: ``[I, ...]``, features first: channels, rows, columns.
      coefficients: ``[4, trees, nodes]``, for the terms 1, a, b and ab. Each tree's nodes are
        ordered level by level, the leaves' parents first.
      leaves: int32 ``[trees, leaves]``, window ids in the order row, column, channel. The leaf
        count is a power of two. Out-of-range traced ids are clamped.
      places: the window positions.
      readers: int32 ``[channels, F]`` fan-out lists
        ``lutjax.readers(leaves % channels, channels)``. With them, the `x` gradient needs no
        sorting. Entries inconsistent with `leaves` give wrong gradients.
      implementation: see `lutjax.detect`.

    Returns:
      ``[trees, groups, ...]`` with dtype ``x.dtype``. Computed in the wider of both dtypes, at
      least float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/logic.md, section 8.
    """
    op, n_pixels = "logic_trees", math.prod(places.image)
    if any(n < 1 for n in places.counts):
        raise ValueError(
            f"{op}: places is {places}; the window is larger than the image with its padding."
        )
    if any(p >= k for k, p in zip(places.pool, places.pool_padding, strict=True)):
        raise ValueError(
            f"{op}: places is {places}; pool_padding must be less than pool, or a group could "
            "have no place."
        )
    _checks.floats(op, "x", x, None, "[inputs, ...]")
    rule = (
        f"expected [channels * {n_pixels}, ...]: all values of an image of {places.image[0]} rows "
        f"and {places.image[1]} columns"
    )
    _checks.require(x.ndim > 0 and x.shape[0] > 0 and x.shape[0] % n_pixels == 0, op, "x", x, rule)
    _checks.floats(op, "coefficients", coefficients, 3, "[4, trees, nodes]")
    _checks.integers(op, "leaves", leaves, 2, "[trees, leaves]")
    n_trees, n_leaves = leaves.shape
    rule = "expected [trees, leaves] with at least 2 leaves, a power of two"
    _checks.require(n_leaves >= 2 and n_leaves & (n_leaves - 1) == 0, op, "leaves", leaves, rule)
    fits = coefficients.shape == (4, n_trees, n_leaves - 1)
    rule = f"expected [4, {n_trees}, {n_leaves - 1}]: 1, a, b and ab for each node of the trees"
    _checks.require(fits, op, "coefficients", coefficients, rule)
    n_channels = x.shape[0] // n_pixels
    _checks.ids(op, "leaves", leaves, math.prod(places.kernel) * n_channels, "values of a window")
    if readers is not None:
        _checks.integers(op, "readers", readers, 2, "[channels, fan_out]")
        rule = f"expected [{n_channels}, fan_out]: the readers of each channel"
        _checks.require(readers.shape[0] == n_channels, op, "readers", readers, rule)
        _checks.ids(op, "readers", readers, leaves.size, "entries of leaves", unused=True)
    call = LogicTrees(
        as_jax(x),
        as_jax(coefficients),
        as_int32(leaves),
        None if readers is None else as_int32(readers),
        places=places,
    )
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=0))


def levels(n_leaves: int) -> Sequence[int]:
    """Return the node count for each tree level, the leaves' parents first."""
    return [n_leaves >> level for level in range(1, n_leaves.bit_length())]

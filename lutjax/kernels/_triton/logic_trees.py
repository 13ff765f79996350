"""Trees of gates over an image in Triton, with OR-pooling.

Formula for node ``n`` of a tree with the inputs ``a`` and ``b`` (leaves, or nodes of the level
below), its coefficients ``c``, and the gradient ``g`` of its output::

    value = c[0] + c[1] * a + c[2] * b + c[3] * a * b
    y[tree, group] = largest root value over the positions of a group
    dc += g, g * a, g * b, g * a * b;   da = g * (c[1] + c[3] * b);   db = g * (c[2] + c[3] * a)

Work: a program owns a tree, a sample block and a group block, trees changing fastest. It evaluates
the tree in registers, one sample per element, and keeps the largest root. The backward pass
evaluates all positions again, walks back through the chosen one, and stores the gradient of each
parent of leaves and the chosen position. `_add` then sums the image gradient: a program owns a
channel and a sample block, and adds one leaf after the other.

Layout: images are ``[channels, rows, columns, B]``, outputs ``[trees, groups, B]``: samples are
contiguous. The image is not padded; masks read 0 around it.

Numerics: the accumulator dtype. The first of equal positions is chosen, and NaN wins over numbers.
Coefficient gradients are partial sums of programs, added in a fixed order. The image gradient has
a fixed order: the places of a leaf add to different pixels, and a barrier separates leaves. There
are no atomics. Leaf ids are clamped.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops.logic_trees import LogicTrees
from lutjax.values._dtypes import accumulator


@dataclasses.dataclass(frozen=True)
class Tile:
    """Samples, position groups, and warps per program."""

    samples: int
    groups: int
    warps: int


# FORWARD and BACKWARD were the fastest of those tried on an H100 at the sizes of a LogicTreeNet.
FORWARD = Tile(128, 4, 2)
BACKWARD = Tile(32, 8, 1)  # one warp reduces over samples without shared memory
CHANNELS = Tile(16, 32, 16)  # one pixel of one sample per thread
HELD = 8  # most leaves of trees whose coefficients stay in registers

_LEAVES_OF_TREE = 16
# Positions and leaves are unrolled, which bounds code size. Positions also fit a byte.
_LEAVES_OF_GROUP = 256


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, LogicTrees)
    if why := unsupported_arguments(request):
        return why
    n_leaves = call.leaves.shape[1]
    if n_leaves > _LEAVES_OF_TREE:
        return (
            f"keeps the nodes of a tree in registers, of at most {_LEAVES_OF_TREE} leaves, here "
            f"{n_leaves}"
        )
    n_leaves *= math.prod(call.places.pool)
    if n_leaves > _LEAVES_OF_GROUP:
        return (
            f"writes out the leaves of all places of a group, at most {_LEAVES_OF_GROUP}, here "
            f"{n_leaves}"
        )
    return None


SPEC = Declaration(_supports)


def forward(call: LogicTrees, *, device: Device) -> jax.Array:
    (y,) = launch(
        _apply,
        call.x,
        call.coefficients,
        call.leaves,
        outputs=[
            jax.ShapeDtypeStruct((len(call.leaves), call.n_groups, call.x.shape[1]), call.x.dtype)
        ],
        **_arguments(call, device, FORWARD),
    )
    return y


def backward(
    call: LogicTrees, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype, n_samples = accumulator(call.x.dtype, call.coefficients.dtype), call.x.shape[1]
    n_trees, n_leaves = call.leaves.shape
    arguments = _arguments(call, device, BACKWARD)
    n_parts = arguments["programs"] // max(n_trees, 1)
    sums, passed = "coefficients" in needs, "x" in needs
    parts, of_parents, chosen = launch(
        _reduce,
        call.x,
        call.coefficients,
        call.leaves,
        cotangent,
        outputs=[
            jax.ShapeDtypeStruct((n_parts, *call.coefficients.shape) if sums else (1,), dtype),
            jax.ShapeDtypeStruct(
                (n_trees, n_leaves // 2, call.n_groups, n_samples) if passed else (1,), dtype
            ),
            jax.ShapeDtypeStruct(cotangent.shape if passed else (1,), jnp.int8),
        ],
        SUMS=sums,
        PASSED=passed,
        **arguments,
    )
    cotangents = {}
    if sums:
        cotangents["coefficients"] = _row_tiles.sum_of_parts(parts)
    if passed:
        cotangents["x"] = _image_gradient(call, of_parents, chosen, device)
    return cotangents


def _image_gradient(
    call: LogicTrees, of_parents: jax.Array, chosen: jax.Array, device: Device
) -> jax.Array:
    """Return the image gradient from the leaf parents' gradients and the chosen positions."""
    n_channels = call.n_channels
    # Without fan-out lists, leaves are sorted by channel.
    if call.readers is None:
        channel = call.places.in_window(call.leaves, n_channels)[0].reshape(-1)
        order = jnp.argsort(channel, stable=True).astype(jnp.int32)
        ends = jnp.cumsum(jnp.bincount(channel, length=n_channels), dtype=jnp.int32)
        bounds = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    else:
        order = bounds = call.readers
    arguments = _arguments(call, device, CHANNELS)
    n_blocks = triton.cdiv(call.x.shape[1], arguments["SAMPLES"])
    groups = min(CHANNELS.groups, triton.next_power_of_2(call.n_groups))
    arguments |= {
        "programs": n_channels * n_blocks if of_parents.size else 0,
        "GROUPS": groups,
        "warps": min(CHANNELS.warps, max(groups * arguments["SAMPLES"] // 32, 1)),
    }
    (dx,) = launch(
        _add,
        call.x,
        call.coefficients,
        call.leaves,
        order,
        bounds,
        of_parents,
        chosen,
        # The kernel reads and writes back sums; pixels without a leaf stay 0.
        zeroed=[jax.ShapeDtypeStruct(call.x.shape, of_parents.dtype)],
        fan_out=0 if call.readers is None else call.readers.shape[1],
        LISTED=call.readers is not None,
        **arguments,
    )
    return dx


def _arguments(call: LogicTrees, device: Device, tile: Tile) -> dict[str, Any]:
    places, n_samples = call.places, call.x.shape[1]
    samples = _row_tiles.fit_size(tile.samples, n_samples)
    groups = min(tile.groups, max(call.n_groups, 1))
    n_blocks = triton.cdiv(call.n_groups, groups) * triton.cdiv(n_samples, samples)
    return {
        "programs": len(call.leaves) * n_blocks if call.x.size else 0,
        "device": device,
        "warps": tile.warps,
        "n_samples": n_samples,
        "n_trees": len(call.leaves),
        "n_nodes": math.prod(call.coefficients.shape[1:]),
        "n_channels": call.n_channels,
        "LEAVES": call.leaves.shape[1],
        "SAMPLES": samples,
        "GROUPS": groups,
        # The coefficients of larger trees do not fit the registers and are loaded where they are
        # used.
        "HELD": call.leaves.shape[1] <= HELD,
        **_pairs("ROWS", "COLUMNS", places.groups),
        **_pairs("HEIGHT", "WIDTH", places.image),
        **_pairs("KERNEL_ROWS", "KERNEL_COLUMNS", places.kernel),
        **_pairs("DOWN", "RIGHT", places.stride),
        **_pairs("ABOVE", "LEFT", places.padding),
        **_pairs("PLACE_ROWS", "PLACE_COLUMNS", places.counts),
        **_pairs("POOL_ROWS", "POOL_COLUMNS", places.pool),
        **_pairs("AROUND_ROWS", "AROUND_COLUMNS", places.pool_padding),
        # Without padding, masks are compiled away.
        "BORDERED": any(places.padding),
        "PADDED": any(places.pool_padding),
        "ACC": _row_tiles.TYPES[accumulator(call.x.dtype, call.coefficients.dtype).name],
    }


def _pairs(of_rows: str, of_columns: str, values: tuple[int, int]) -> dict[str, int]:
    return {of_rows: values[0], of_columns: values[1]}


# ------------------------------------------------------------------------------------- kernels
@kernel
def _apply(x, coefficients, leaves, y, c: tl.constexpr):
    tree, block, sample, exists, _part = _locate_program(c)
    held = _load_coefficients(coefficients, tree, c)
    starts, rows, columns = _window(leaves, tree, c)
    for group in range(block * c.GROUPS, tl.minimum((block + 1) * c.GROUPS, c.ROWS * c.COLUMNS)):
        best = tl.full((c.SAMPLES,), float("-inf"), c.ACC)
        # Unrolled: the coordinates of a position within its group are constants.
        for place in tl.static_range(c.POOL_ROWS * c.POOL_COLUMNS):
            row, column, there = _locate_window(group, place, c)
            read = _leaves(x, starts, rows, columns, row, column, sample, exists & there, c)
            values = _nodes(read, held, coefficients, tree, c)
            value = values[len(values) - 1]
            # NaN replaces any value. No number replaces NaN, because the comparison is false.
            best = tl.where(
                _mask_positions((value > best) | (value != value), there, c), value, best
            )
        tl.store(y + _output(tree, group, c) + sample, best.to(y.dtype.element_ty), mask=exists)


@kernel
def _reduce(x, coefficients, leaves, dy, parts, of_parents, chosen, c: tl.constexpr):
    tree, block, sample, exists, part = _locate_program(c)
    held = _load_coefficients(coefficients, tree, c)
    starts, rows, columns = _window(leaves, tree, c)
    sums = _gate_tiles.empty_tuple()
    for _number in tl.static_range(4 * (c.LEAVES - 1)):
        # Four elementwise sums per node; samples are reduced when the program ends.
        sums += (tl.zeros((c.SAMPLES,), c.ACC),)
    for group in range(block * c.GROUPS, tl.minimum((block + 1) * c.GROUPS, c.ROWS * c.COLUMNS)):
        best = tl.full((c.SAMPLES,), float("-inf"), c.ACC)
        best_place = tl.full((c.SAMPLES,), -1, tl.int32)
        own = _gate_tiles.empty_tuple()
        for _leaf in tl.static_range(c.LEAVES):
            own += (tl.zeros((c.SAMPLES,), c.ACC),)
        for place in tl.static_range(c.POOL_ROWS * c.POOL_COLUMNS):
            row, column, there = _locate_window(group, place, c)
            read = _leaves(x, starts, rows, columns, row, column, sample, exists & there, c)
            values = _nodes(read, held, coefficients, tree, c)
            value = values[len(values) - 1]
            # The first existing position is chosen even if all values are minus infinity.
            better = _mask_positions((value > best) | (value != value) | (best_place < 0), there, c)
            best = tl.where(better, value, best)
            best_place = tl.where(better, place, best_place)
            kept = _gate_tiles.empty_tuple()
            for leaf in tl.static_range(c.LEAVES):
                # The leaves of the chosen position stay in registers; its tree is evaluated once
                # more below.
                kept += (tl.where(better, read[leaf], own[leaf]),)
            own = kept
        values = _nodes(own, held, coefficients, tree, c)
        # Gradients of nodes, root first. Node `n` has the inputs `2 n` and `2 n + 1` of the list of
        # leaves and nodes, so the reverse order visits parents before children.
        gs = _gate_tiles.empty_tuple()
        gs += (tl.load(dy + _output(tree, group, c) + sample, mask=exists, other=0).to(c.ACC),)
        added = _gate_tiles.empty_tuple()
        for node in tl.static_range(c.LEAVES - 2, -1, -1):
            g, a, b = gs[c.LEAVES - 2 - node], values[2 * node], values[2 * node + 1]
            c1 = _coefficient(held, coefficients, 1, tree, node, c)
            c2 = _coefficient(held, coefficients, 2, tree, node, c)
            c3 = _coefficient(held, coefficients, 3, tree, node, c)
            added += (
                sums[4 * (c.LEAVES - 2 - node)] + g,
                sums[4 * (c.LEAVES - 2 - node) + 1] + g * a,
                sums[4 * (c.LEAVES - 2 - node) + 2] + g * b,
                sums[4 * (c.LEAVES - 2 - node) + 3] + g * a * b,
            )
            # Input `2 n + 1` precedes input `2 n` in the reverse order.
            gs += (g * (c2 + c3 * a), g * (c1 + c3 * b))
        sums = added
        # Each parent of leaves stores one gradient in place of two; `_add` multiplies it for each
        # leaf.
        if c.PASSED:
            tl.store(chosen + _output(tree, group, c) + sample, best_place.to(tl.int8), mask=exists)
            for node in tl.static_range(c.LEAVES // 2):
                to = of_parents + _output(tree * (c.LEAVES // 2) + node, group, c) + sample
                tl.store(to, gs[c.LEAVES - 2 - node], mask=exists)
    if c.SUMS:
        for node in tl.static_range(c.LEAVES - 1):
            to = parts + part.to(tl.int64) * 4 * c.n_nodes + tree * (c.LEAVES - 1) + node
            tl.store(to, tl.sum(sums[4 * (c.LEAVES - 2 - node)], 0))
            tl.store(to + c.n_nodes, tl.sum(sums[4 * (c.LEAVES - 2 - node) + 1], 0))
            tl.store(to + 2 * c.n_nodes, tl.sum(sums[4 * (c.LEAVES - 2 - node) + 2], 0))
            tl.store(to + 3 * c.n_nodes, tl.sum(sums[4 * (c.LEAVES - 2 - node) + 3], 0))


@kernel
def _add(x, coefficients, leaves, order, bounds, of_parents, chosen, dx, c: tl.constexpr):
    """Sum one channel's gradient over its reading leaves."""
    channel = tl.program_id(0) % c.n_channels
    sample = (tl.program_id(0) // c.n_channels) * c.SAMPLES + tl.arange(0, c.SAMPLES)
    if c.LISTED:
        first, last = channel * c.fan_out, (channel + 1) * c.fan_out
    else:
        first, last = tl.load(bounds + channel), tl.load(bounds + channel + 1)
    for at in range(first, last):
        number = tl.load(order + at)
        # -1 marks unused entries of fan-out lists.
        if number >= 0:
            number = tl.minimum(number, c.n_trees * c.LEAVES - 1)
            tree, parent = number // c.LEAVES, number // 2
            _channel, leaf_row, leaf_column = _value_of_window(leaves, number, c)
            of_pair, pair_row, pair_column = _value_of_window(leaves, number ^ 1, c)
            # The gradient of a leaf needs the slope of its parent, and so the value of the other
            # leaf.
            of_node = coefficients + tree * (c.LEAVES - 1) + parent % (c.LEAVES // 2)
            slope = tl.load(of_node + (1 + number % 2) * c.n_nodes).to(c.ACC)
            cross = tl.load(of_node + 3 * c.n_nodes).to(c.ACC)
            for block in range((c.ROWS * c.COLUMNS + c.GROUPS - 1) // c.GROUPS):
                group = block * c.GROUPS + tl.arange(0, c.GROUPS)
                mask = (group < c.ROWS * c.COLUMNS)[:, None] & (sample < c.n_samples)[None, :]
                here = group[:, None] * c.n_samples + sample[None, :]
                place = tl.load(chosen + _output(tree, 0, c) + here, mask=mask, other=-1).to(
                    tl.int32
                )
                mask = mask & (place >= 0)
                row = ((group // c.COLUMNS) * c.POOL_ROWS - c.AROUND_ROWS)[
                    :, None
                ] + place // c.POOL_COLUMNS
                column = (group % c.COLUMNS) * c.POOL_COLUMNS - c.AROUND_COLUMNS
                column = column[:, None] + place % c.POOL_COLUMNS
                row, column = row * c.DOWN, column * c.RIGHT
                g = tl.load(of_parents + _output(parent, 0, c) + here, mask=mask, other=0)
                # Outside the image the other leaf is 0.
                b = tl.load(
                    _pixel(x, of_pair, row + pair_row, column + pair_column, sample, c),
                    mask=mask & _is_inside(row + pair_row, column + pair_column, c),
                    other=0,
                ).to(c.ACC)
                to = _pixel(dx, channel, row + leaf_row, column + leaf_column, sample, c)
                inside = mask & _is_inside(row + leaf_row, column + leaf_column, c)
                # Different groups chose different pixels for this leaf, so plain additions do not
                # collide.
                tl.store(
                    to, tl.load(to, mask=inside, other=0) + g * (slope + cross * b), mask=inside
                )
            # The next leaf may add to the same pixels from other threads.
            tl.debug_barrier()


@kernel
def _locate_program(c: tl.constexpr):
    """Return tree, group block, samples, whether they exist, and number in the tree."""
    blocks: tl.constexpr = (c.ROWS * c.COLUMNS + c.GROUPS - 1) // c.GROUPS
    # Trees change fastest: concurrent programs read the same block of the image.
    tree, part = tl.program_id(0) % c.n_trees, tl.program_id(0) // c.n_trees
    sample = (part // blocks) * c.SAMPLES + tl.arange(0, c.SAMPLES)
    return tree, part % blocks, sample, sample < c.n_samples, part


@kernel
def _locate_window(group, place: tl.constexpr, c: tl.constexpr):
    """Return a position's window start in the image, and whether it exists."""
    row = (group // c.COLUMNS) * c.POOL_ROWS + place // c.POOL_COLUMNS - c.AROUND_ROWS
    column = (group % c.COLUMNS) * c.POOL_COLUMNS + place % c.POOL_COLUMNS - c.AROUND_COLUMNS
    there = (row >= 0) & (row < c.PLACE_ROWS) & (column >= 0) & (column < c.PLACE_COLUMNS)
    return row * c.DOWN, column * c.RIGHT, there


@kernel
def _value_of_window(leaves, number, c: tl.constexpr):
    """Return a leaf's channel, and its row and column at the first position."""
    value = tl.load(leaves + number)
    value = tl.minimum(tl.maximum(value, 0), c.KERNEL_ROWS * c.KERNEL_COLUMNS * c.n_channels - 1)
    pixel = value // c.n_channels
    # Rows and columns in the padding are outside the image.
    row, column = pixel // c.KERNEL_COLUMNS - c.ABOVE, pixel % c.KERNEL_COLUMNS - c.LEFT
    return value % c.n_channels, row, column


@kernel
def _window(leaves, tree, c: tl.constexpr):
    """Return a tree's leaves at the first position: pixel ids, rows and columns.

    Out-of-bounds leaves have ids of other pixels and are masked by row and column.
    """
    starts, rows, columns = (
        _gate_tiles.empty_tuple(),
        _gate_tiles.empty_tuple(),
        _gate_tiles.empty_tuple(),
    )
    for leaf in tl.static_range(c.LEAVES):
        channel, row, column = _value_of_window(leaves, tree * c.LEAVES + leaf, c)
        starts += ((channel * c.HEIGHT + row) * c.WIDTH + column,)
        rows += (row,)
        columns += (column,)
    return starts, rows, columns


@kernel
def _is_inside(row, column, c: tl.constexpr):
    return (row >= 0) & (row < c.HEIGHT) & (column >= 0) & (column < c.WIDTH)


@kernel
def _pixel(image, channel, row, column, sample, c: tl.constexpr):
    """Return sample addresses for a channel's pixels, one pixel per sample."""
    # 64 bits for the channel; offsets within a channel are smaller.
    start = image + channel.to(tl.int64) * (c.HEIGHT * c.WIDTH * c.n_samples)
    return start + (row * c.WIDTH + column) * c.n_samples + sample[None, :]


@kernel
def _output(tree, group, c: tl.constexpr):
    return (tree.to(tl.int64) * (c.ROWS * c.COLUMNS) + group) * c.n_samples


@kernel
def _leaves(x, starts, rows, columns, row, column, sample, exists, c: tl.constexpr):
    values = _gate_tiles.empty_tuple()
    for leaf in tl.static_range(c.LEAVES):
        at = (starts[leaf] + (row * c.WIDTH + column)).to(tl.int64) * c.n_samples
        mask = exists
        if c.BORDERED:
            mask = mask & _is_inside(rows[leaf] + row, columns[leaf] + column, c)
        values += (tl.load(x + at + sample, mask=mask, other=0).to(c.ACC),)
    return values


@kernel
def _nodes(values, held, coefficients, tree, c: tl.constexpr):
    """Return leaves and all nodes above them, root last."""
    for node in tl.static_range(c.LEAVES - 1):
        a, b = values[2 * node], values[2 * node + 1]
        c0 = _coefficient(held, coefficients, 0, tree, node, c)
        c1 = _coefficient(held, coefficients, 1, tree, node, c)
        c2 = _coefficient(held, coefficients, 2, tree, node, c)
        c3 = _coefficient(held, coefficients, 3, tree, node, c)
        values += ((c0 + c1 * a) + (c2 + c3 * a) * b,)
    return values


@kernel
def _mask_positions(mask, there, c: tl.constexpr):
    # Only padded groups have missing positions.
    if c.PADDED:
        return mask & there
    else:
        return mask


@kernel
def _load_coefficients(coefficients, tree, c: tl.constexpr):
    """Return a tree's coefficients by number and node; empty if they do not fit registers."""
    values = _gate_tiles.empty_tuple()
    if c.HELD:
        for number in tl.static_range(4):
            for node in tl.static_range(c.LEAVES - 1):
                at = coefficients + number * c.n_nodes + tree * (c.LEAVES - 1) + node
                values += (tl.load(at).to(c.ACC),)
    return values


@kernel
def _coefficient(
    held, coefficients, number: tl.constexpr, tree, node: tl.constexpr, c: tl.constexpr
):
    if c.HELD:
        return held[number * (c.LEAVES - 1) + node]
    else:
        return tl.load(coefficients + number * c.n_nodes + tree * (c.LEAVES - 1) + node).to(c.ACC)

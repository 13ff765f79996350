"""Trees of gates over an image in Triton.

A program owns a tree, a block of samples and a block of groups of places. It reads the leaves of a place, evaluates the tree in
registers, and keeps the largest value of a group. The backward pass evaluates the trees again, and goes down the one that the
group chose: from ``g`` of a node with the inputs ``a`` and ``b`` come the four addends of its coefficients, ``g, g a, g b, g a b``,
which are summed over the samples when the program ends, and ``g (c1 + c3 b)``, ``g (c2 + c3 a)`` of the inputs; those of leaves are
added to the image by atomics.
"""

import dataclasses
from typing import Any

import jax
import triton
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.ops.logic_trees import LogicTrees


@dataclasses.dataclass(frozen=True)
class Tile:
    """Samples, groups of places and warps of a program. Of those tried on an H100, at the sizes of a LogicTreeNet, these were the fastest."""

    samples: int
    groups: int
    warps: int


FORWARD = Tile(128, 4, 2)
BACKWARD = Tile(32, 8, 1)  # sums over samples stay in a warp


def forward(call: LogicTrees, *, device: Device) -> jax.Array:
    shape = (len(call.leaves) * _n_groups(call), call.x.shape[1])
    (y,) = launch(
        _apply,
        call.x,
        call.coefficients,
        call.leaves,
        outputs=[jax.ShapeDtypeStruct(shape, call.x.dtype)],
        **_arguments(call, device, FORWARD),
    )
    return y


def backward(
    call: LogicTrees, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    arguments = _arguments(call, device, BACKWARD)
    n_parts = arguments["programs"] // max(len(call.leaves), 1)
    sums, scatter = "coefficients" in needs, "x" in needs
    parts, dx = launch(
        _reduce,
        call.x,
        call.coefficients,
        call.leaves,
        cotangent,
        outputs=[jax.ShapeDtypeStruct((n_parts, *call.coefficients.shape) if sums else (1,), dtype)],
        zeroed=[jax.ShapeDtypeStruct(call.x.shape if scatter else (1,), dtype)],
        SUMS=sums,
        SCATTER=scatter,
        **arguments,
    )
    found = {"x": dx}
    if sums:
        found["coefficients"] = _row_tiles.sum_of_parts(parts)
    return {name: found[name] for name in needs}


def _n_groups(call: LogicTrees) -> int:
    rows, columns = call.places.groups
    return rows * columns


def _arguments(call: LogicTrees, device: Device, tile: Tile) -> dict[str, Any]:
    """Arguments of `launch`, and constants of kernels."""
    places, n_samples = call.places, call.x.shape[1]
    samples = _row_tiles.fitted(tile.samples, n_samples)
    groups = min(tile.groups, max(_n_groups(call), 1))
    n_blocks = triton.cdiv(_n_groups(call), groups) * triton.cdiv(n_samples, samples)
    return {
        "programs": len(call.leaves) * n_blocks if call.x.size else 0,
        "device": device,
        "warps": tile.warps,
        "n_samples": n_samples,
        "n_inputs": call.x.shape[0],
        "n_trees": len(call.leaves),
        "n_nodes": call.coefficients.shape[1],
        "LEAVES": call.leaves.shape[1],
        "SAMPLES": samples,
        "GROUPS": groups,
        "ROWS": places.groups[0],
        "COLUMNS": places.groups[1],
        "DOWN": places.stride[0] * places.width,
        "RIGHT": places.stride[1],
        "PLACE_ROWS": places.places[0],
        "PLACE_COLUMNS": places.places[1],
        "POOL_ROWS": places.pool[0],
        "POOL_COLUMNS": places.pool[1],
        "AROUND_ROWS": places.pool_padding[0],
        "AROUND_COLUMNS": places.pool_padding[1],
        "PADDED": any(places.pool_padding),
        "ACC": _row_tiles.TYPES[accumulator(call.x.dtype, call.coefficients.dtype).name],
    }


# ------------------------------------------------------------------------------------- kernels
@kernel
def _apply(x, coefficients, leaves, y, c: tl.constexpr):
    tree, block, sample, exists, _part = _own(c)
    for group in range(block * c.GROUPS, tl.minimum((block + 1) * c.GROUPS, c.ROWS * c.COLUMNS)):
        best = tl.full((c.SAMPLES,), float("-inf"), c.ACC)
        for place in tl.static_range(c.POOL_ROWS * c.POOL_COLUMNS):
            shift, there = _shift(group, place, c)
            values = _nodes(_leaves(x, leaves, tree, shift, sample, exists & there, c), coefficients, tree, c)
            better = _better(values[len(values) - 1], best, there, c)
            best = tl.where(better, values[len(values) - 1], best)
        tl.store(y + _output(tree, group, c) + sample, best.to(y.dtype.element_ty), mask=exists)


@kernel
def _reduce(x, coefficients, leaves, dy, parts, dx, c: tl.constexpr):
    tree, block, sample, exists, part = _own(c)
    sums = _gate_tiles.nothing()
    for _number in tl.static_range(4 * (c.LEAVES - 1)):
        sums += (tl.zeros((c.SAMPLES,), c.ACC),)
    for group in range(block * c.GROUPS, tl.minimum((block + 1) * c.GROUPS, c.ROWS * c.COLUMNS)):
        best = tl.full((c.SAMPLES,), float("-inf"), c.ACC)
        chosen = tl.full((c.SAMPLES,), -1, tl.int32)
        own = _gate_tiles.nothing()
        for _leaf in tl.static_range(c.LEAVES):
            own += (tl.zeros((c.SAMPLES,), c.ACC),)
        for place in tl.static_range(c.POOL_ROWS * c.POOL_COLUMNS):
            shift, there = _shift(group, place, c)
            read = _leaves(x, leaves, tree, shift, sample, exists & there, c)
            values = _nodes(read, coefficients, tree, c)
            better = _better(values[len(values) - 1], best, there, c)
            best = tl.where(better, values[len(values) - 1], best)
            chosen = tl.where(better, place, chosen)
            kept = _gate_tiles.nothing()
            for leaf in tl.static_range(c.LEAVES):
                kept += (tl.where(better, read[leaf], own[leaf]),)
            own = kept
        values = _nodes(own, coefficients, tree, c)
        # Cotangents of nodes and leaves, the root's first: node n has the inputs 2 n and 2 n + 1 of leaves and nodes.
        gs = _gate_tiles.nothing()
        gs += (tl.load(dy + _output(tree, group, c) + sample, mask=exists, other=0).to(c.ACC),)
        added = _gate_tiles.nothing()
        for node in tl.static_range(c.LEAVES - 2, -1, -1):
            g, a, b = gs[c.LEAVES - 2 - node], values[2 * node], values[2 * node + 1]
            c1 = _coefficient(coefficients, 1, tree, node, c)
            c2 = _coefficient(coefficients, 2, tree, node, c)
            c3 = _coefficient(coefficients, 3, tree, node, c)
            added += (
                sums[4 * (c.LEAVES - 2 - node)] + g,
                sums[4 * (c.LEAVES - 2 - node) + 1] + g * a,
                sums[4 * (c.LEAVES - 2 - node) + 2] + g * b,
                sums[4 * (c.LEAVES - 2 - node) + 3] + g * a * b,
            )
            gs += (g * (c2 + c3 * a), g * (c1 + c3 * b))
        sums = added
        if c.SCATTER:
            for place in tl.static_range(c.POOL_ROWS * c.POOL_COLUMNS):
                shift, _there = _shift(group, place, c)
                for leaf in tl.static_range(c.LEAVES):
                    to = dx + _input(leaves, tree, leaf, shift, c) + sample
                    tl.atomic_add(
                        to, gs[2 * c.LEAVES - 2 - leaf], mask=exists & (chosen == place), sem="relaxed"
                    )
    if c.SUMS:
        for node in tl.static_range(c.LEAVES - 1):
            to = parts + part.to(tl.int64) * 4 * c.n_nodes + tree * (c.LEAVES - 1) + node
            tl.store(to, tl.sum(sums[4 * (c.LEAVES - 2 - node)], 0))
            tl.store(to + c.n_nodes, tl.sum(sums[4 * (c.LEAVES - 2 - node) + 1], 0))
            tl.store(to + 2 * c.n_nodes, tl.sum(sums[4 * (c.LEAVES - 2 - node) + 2], 0))
            tl.store(to + 3 * c.n_nodes, tl.sum(sums[4 * (c.LEAVES - 2 - node) + 3], 0))


@kernel
def _own(c: tl.constexpr):
    """Tree, block of groups and samples of this program, whether the samples exist, and its number among those of its tree."""
    blocks: tl.constexpr = (c.ROWS * c.COLUMNS + c.GROUPS - 1) // c.GROUPS
    tree, part = tl.program_id(0) % c.n_trees, tl.program_id(0) // c.n_trees
    sample = (part // blocks) * c.SAMPLES + tl.arange(0, c.SAMPLES)
    return tree, part % blocks, sample, sample < c.n_samples, part


@kernel
def _shift(group, place: tl.constexpr, c: tl.constexpr):
    """Distance of the ids at a place of a group from those at the first place, and whether there is a place."""
    row = (group // c.COLUMNS) * c.POOL_ROWS + place // c.POOL_COLUMNS - c.AROUND_ROWS
    column = (group % c.COLUMNS) * c.POOL_COLUMNS + place % c.POOL_COLUMNS - c.AROUND_COLUMNS
    there = (row >= 0) & (row < c.PLACE_ROWS) & (column >= 0) & (column < c.PLACE_COLUMNS)
    return row * c.DOWN + column * c.RIGHT, there


@kernel
def _input(leaves, tree, leaf: tl.constexpr, shift, c: tl.constexpr):
    """Start of the samples of the input that a leaf is."""
    number = tl.load(leaves + tree * c.LEAVES + leaf) + shift
    return tl.minimum(tl.maximum(number, 0), c.n_inputs - 1).to(tl.int64) * c.n_samples


@kernel
def _output(tree, group, c: tl.constexpr):
    """Start of the samples of an output."""
    return (tree.to(tl.int64) * (c.ROWS * c.COLUMNS) + group) * c.n_samples


@kernel
def _leaves(x, leaves, tree, shift, sample, exists, c: tl.constexpr):
    values = _gate_tiles.nothing()
    for leaf in tl.static_range(c.LEAVES):
        at = x + _input(leaves, tree, leaf, shift, c) + sample
        values += (tl.load(at, mask=exists, other=0).to(c.ACC),)
    return values


@kernel
def _nodes(values, coefficients, tree, c: tl.constexpr):
    """Leaves, and all nodes above them, the root last."""
    for node in tl.static_range(c.LEAVES - 1):
        a, b = values[2 * node], values[2 * node + 1]
        c0 = _coefficient(coefficients, 0, tree, node, c)
        c1 = _coefficient(coefficients, 1, tree, node, c)
        c2 = _coefficient(coefficients, 2, tree, node, c)
        c3 = _coefficient(coefficients, 3, tree, node, c)
        values += ((c0 + c1 * a) + (c2 + c3 * a) * b,)
    return values


@kernel
def _better(value, best, there, c: tl.constexpr):
    """Mask of values that take the place of the largest before them: NaN does."""
    better = (value > best) | (value != value)
    if c.PADDED:
        return better & there
    else:
        return better


@kernel
def _coefficient(coefficients, number: tl.constexpr, tree, node: tl.constexpr, c: tl.constexpr):
    return tl.load(coefficients + number * c.n_nodes + tree * (c.LEAVES - 1) + node).to(c.ACC)

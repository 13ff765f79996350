"""Batch dimensions of calls: any number outside kernels, one inside."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Call


@functools.cache
def leaf_ranks(structure: Any) -> tuple[int | None, ...]:
    """Return each leaf's rank without batch dimensions, for a call's tree structure.

    It is None for the leaves of shared arrays.
    """
    call: Call = jax.tree.unflatten(structure, range(structure.num_leaves))
    arrays = zip(call.values(), call.ranks(), strict=True)
    return tuple([rank for array, rank in arrays for _ in jax.tree.leaves(array)])


def rank_of_output(op: type[Call]) -> int:
    """Return a lookup output's rank without batch dimensions, which is the detection's rank."""
    return max(rank for rank in op.ranks() if rank is not None)


def _leading_shapes(call: Call) -> set[tuple[int, ...]]:
    """Return the batch dimensions of all batched arrays."""
    leaves, structure = jax.tree.flatten(call)
    ranked = zip(leaves, leaf_ranks(structure), strict=True)
    return {a.shape[: a.ndim - rank] for a, rank in ranked if rank is not None}


def batch_shape(call: Call, feature_axis: int = -1) -> tuple[int, ...]:
    """Return the joint batch dimensions of a call's arrays.

    Args:
      feature_axis: for ops with features-first kernels, 0 if features precede the batch dimensions.
    """
    if call.features_first:
        ranked = zip(call.values(), call.ranks(), strict=True)
        shape: tuple[int, ...] = next(a.shape for a, rank in ranked if rank is not None)
        return shape[1:] if feature_axis == 0 else shape[:-1]
    shapes = _leading_shapes(call)
    return shapes.pop() if len(shapes) == 1 else jnp.broadcast_shapes(*shapes)


def fold(call: Call, batch: tuple[int, ...], feature_axis: int = -1) -> Call:
    """Return the call in kernel layout: all batch dimensions merged into one."""
    n = math.prod(batch)
    if not call.features_first and (n,) == batch and _leading_shapes(call) == {batch}:
        return call

    def fold_leaf(a: jax.Array, rank: int | None) -> jax.Array:
        if rank is None:
            return a
        if not call.features_first:
            return fold_array(a, rank, batch)
        return a.reshape(a.shape[0], n) if feature_axis == 0 else a.reshape(n, a.shape[-1]).T

    leaves, structure = jax.tree.flatten(call)
    folded: Call = jax.tree.unflatten(structure, map(fold_leaf, leaves, leaf_ranks(structure)))
    return folded


def fold_array(a: jax.Array, rank: int, batch: tuple[int, ...]) -> jax.Array:
    """Broadcast an array's batch dimensions to `batch`, and merge them into one."""
    core = a.shape[a.ndim - rank :]
    if a.shape != (*batch, *core):
        a = a.reshape((1,) * (len(batch) + rank - a.ndim) + a.shape)
        a = jnp.broadcast_to(a, (*batch, *core))
    return a.reshape(math.prod(batch), *core)


def unfold(op: type[Call], outputs: Any, batch: tuple[int, ...], feature_axis: int = -1) -> Any:
    """Return kernel outputs with these batch dimensions."""
    if len(batch) == 1 and not op.features_first:
        return outputs
    if not op.features_first:
        return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), outputs)
    if feature_axis == 0:
        return outputs.reshape(*outputs.shape[:-1], *batch)
    return jnp.moveaxis(outputs, -1, 0).reshape(*batch, *outputs.shape[:-1])


def fold_call(call: Call, cotangent: jax.Array) -> tuple[Call, jax.Array]:
    """Return a lookup call and its output's cotangent as kernels receive them."""
    call = call.prepare()
    batch, rank = batch_shape(call), rank_of_output(type(call))
    batch = jnp.broadcast_shapes(batch, cotangent.shape[: cotangent.ndim - rank])
    return fold(call, batch), fold_array(cotangent, rank, batch)


def shapes_of_kernel(call: Call, feature_axis: int) -> Call:
    """Return the call with shapes for arrays and one batch axis, to select an implementation."""
    n = 0 if call.features_first else math.prod(batch_shape(call))

    def shape(a: jax.Array, rank: int | None) -> jax.Array | jax.ShapeDtypeStruct:
        if rank is None:
            return a
        wanted: tuple[int, ...] = (n, *a.shape[a.ndim - rank :])
        if call.features_first:
            features = a.shape[feature_axis]
            wanted = (features, a.size // max(features, 1))
        return a if a.shape == wanted else jax.ShapeDtypeStruct(wanted, a.dtype)

    leaves, structure = jax.tree.flatten(call)
    shapes: Call = jax.tree.unflatten(structure, map(shape, leaves, leaf_ranks(structure)))
    return shapes


def folded_output(call: Call, output: Any) -> Any:
    """Return an output's shape and dtype in kernel layout. Cotangents have the same.

    Args:
      call: with one batch axis. output: with any batch dimensions; features first if it comes so.
    """
    first = next(a for a, rank in zip(call.values(), call.ranks(), strict=True) if rank is not None)
    n, rank = jax.tree.leaves(first)[0].shape[0], rank_of_output(type(call))

    def outline(a: jax.Array) -> jax.ShapeDtypeStruct:
        shape = a.shape if call.features_first else (n, *a.shape[a.ndim - rank :])
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(outline, output)

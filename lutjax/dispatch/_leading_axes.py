"""Batch dimensions of calls: any number outside kernels, one inside."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Call

Ranks = tuple[int | None, ...]


def batch_shape(ranks: Ranks, args: tuple[Any, ...]) -> tuple[int, ...]:
    leading = [
        leaf.shape[: leaf.ndim - rank]
        for arg, rank in zip(args, ranks, strict=True)
        if rank is not None
        for leaf in jax.tree.leaves(arg)
    ]
    return jnp.broadcast_shapes(*leading)


def fold_call(call: Call, cotangent: jax.Array) -> tuple[Any, jax.Array]:
    """Return an op call and its output's cotangent in kernel layout."""
    ranks = (*call.ranks(), rank_of_output(call.ranks()))
    args = (*call.prepare().values(), cotangent)
    *values, cotangent = fold(ranks, args, batch_shape(ranks, args))
    return call.from_arrays(values, call.options()), cotangent


def fold(ranks: Ranks, args: tuple[Any, ...], batch: tuple[int, ...]) -> tuple[Any, ...]:
    """Merge all batch dimensions into one."""

    def fold(a: jax.Array, rank: int) -> jax.Array:
        core = a.shape[a.ndim - rank :]
        if a.shape != (*batch, *core):
            a = jnp.broadcast_to(
                a.reshape((1,) * (len(batch) + rank - a.ndim) + a.shape), (*batch, *core)
            )
        return a.reshape(math.prod(batch), *core)

    return tuple(
        arg if rank is None else jax.tree.map(functools.partial(fold, rank=rank), arg)
        for arg, rank in zip(args, ranks, strict=True)
    )


def shapes_of_kernel(call: Call, feature_axis: int) -> Call:
    """Return the call with shapes for arrays and one batch axis, to select an implementation."""
    n = 0 if call.features_first else math.prod(batch_shape(call.ranks(), call.values()))

    def shape(a: jax.Array, rank: int) -> jax.Array | jax.ShapeDtypeStruct:
        wanted: tuple[int, ...] = (n, *a.shape[a.ndim - rank :])
        if call.features_first:
            features = a.shape[feature_axis]
            wanted = (features, a.size // max(features, 1))
        return a if a.shape == wanted else jax.ShapeDtypeStruct(wanted, a.dtype)

    return call.from_arrays(
        (
            a if rank is None else jax.tree.map(functools.partial(shape, rank=rank), a)
            for a, rank in zip(call.values(), call.ranks(), strict=True)
        ),
        call.options(),
    )


def folded_output(call: Call, output: Any) -> Any:
    """Return an output's shape and dtype in kernel layout. Cotangents have the same.

    Args:
      call: with one batch axis. output: with any batch dimensions; features first if it comes so.
    """
    first = next(a for a, rank in zip(call.values(), call.ranks(), strict=True) if rank is not None)
    n, rank = jax.tree.leaves(first)[0].shape[0], rank_of_output(call.ranks())

    def outline(a: jax.Array) -> jax.ShapeDtypeStruct:
        shape = a.shape if call.features_first else (n, *a.shape[a.ndim - rank :])
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(outline, output)


def rank_of_output(ranks: Ranks) -> int:
    """Return a lookup output's rank without batch dimensions, which is the detection's rank."""
    return max(rank for rank in ranks if rank is not None)


def ranks_of_update(op: type[Call]) -> Ranks:
    """Return the ranks for the call's arrays, the cotangent, rate, factor and state."""
    return (*op.ranks(), rank_of_output(op.ranks()), None, None, None)

"""Samples in lanes: ``[batch, features]`` as ``[features, groups, 128]``.

A feature of all samples of a block is then a few full registers, whose address is a leading index: it may be read and
written by a number that is known only when the kernel runs.
"""

import jax
import jax.numpy as jnp

LANES = 128
_GROUPS = (16, 8)  # of a block; the last one divides no further: 8 groups are a register


def groups(batch: int) -> int:
    """How many groups of lanes hold a batch."""
    return -(-batch // LANES)


def block_of(batch: int, bytes_per_group: int, budget: int) -> int:
    """Groups of a block: all of them or a multiple of 8, as many as fit the budget if any does."""
    for size in _GROUPS:
        if size * bytes_per_group <= budget:
            break
    return min(size, groups(batch))


def fits(batch: int, bytes_per_group: int, budget: int) -> bool:
    """Whether the smallest block fits the budget."""
    return min(_GROUPS[-1], groups(batch)) * bytes_per_group <= budget


def in_lanes(a: jax.Array) -> jax.Array:
    """``[batch, features]`` -> ``[features, groups, 128]``, the last lanes zero."""
    batch, features = a.shape
    padded = groups(batch) * LANES
    return jnp.pad(a.T, ((0, 0), (0, padded - batch))).reshape(features, padded // LANES, LANES)


def batch_first(a: jax.Array, batch: int) -> jax.Array:
    """The same back."""
    return a.reshape(a.shape[0], a.shape[1] * LANES)[:, :batch].T

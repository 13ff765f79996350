"""Samples in lanes: ``[batch, features]`` as ``[features, groups, 128]``.

Layout: one feature occupies a few full registers with 8 x 128 samples each. Its address is a
leading index, so a kernel may read and write it by a run-time id. With features in lanes or
sublanes that would be a gather within registers.

The last group is padded with zeros. Values are only copied, so nothing is rounded.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device, Request
from lutjax.kernels._pallas.tpu._limits import LANES, vmem_budget
from lutjax.ops.detect import Detect

_GROUPS = (16, 8)  # of a block: whole registers


def groups(batch: int) -> int:
    return -(-batch // LANES)


def block_of(batch: int, bytes_per_group: int, budget: int) -> int:
    """Return the groups per block: all groups or a multiple of 8, as many as the budget allows."""
    # The second to last axis of a block must be a multiple of 8 sublanes, or the whole axis.
    for size in _GROUPS:
        if size * bytes_per_group <= budget:
            break
    return min(size, groups(batch))


def detect_groups(batch: int, n_inputs: int, device: Device) -> int | None:
    """Return the groups per `lutjax.detect` block, or None if inputs fill over half the memory."""
    # Two buffers: the inputs of the next block arrive during this one.
    bytes_per_group, budget = 2 * n_inputs * LANES * 4, vmem_budget(device) // 2
    size = block_of(batch, bytes_per_group, budget)
    return size if size * bytes_per_group <= budget else None


def unsupported(request: Request) -> str | None:
    """Return the reason that a `lutjax.detect` call is unsupported, or None."""
    assert isinstance(request.call, Detect)
    n_inputs = request.call.n_inputs
    # The smallest block that a large batch may have: 8 groups.
    if detect_groups(8 * LANES, n_inputs, request.device) is None:
        return (
            f"x has {n_inputs} inputs: a block of samples with all of them does not fit the "
            "memory of the chip"
        )
    return None


def in_lanes(a: jax.Array) -> jax.Array:
    """``[batch, features]`` -> ``[features, groups, 128]``, the last lanes zero."""
    batch, features = a.shape
    padded = groups(batch) * LANES
    return jnp.pad(a.T, ((0, 0), (0, padded - batch))).reshape(features, padded // LANES, LANES)


def batch_first(a: jax.Array, batch: int) -> jax.Array:
    return a.reshape(a.shape[0], a.shape[1] * LANES)[:, :batch].T

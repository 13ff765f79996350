"""Reading rows of tables on SparseCores, by functions of the same names and arguments as in `lutjax.kernels._xla._row_gathers`.

Here is all that surrounds the kernels of `_gather`: ids that exist, and blocks that fit a subcore.
"""

import jax
import jax.numpy as jnp

from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas.sparsecore import _gather, _sizes
from lutjax.kernels._xla import _row_gathers as plain
from lutjax.kernels.registry import Device

add_rows = plain.add_rows


def sum_rows(
    weights: jax.Array, index: jax.Array, device: Device, accumulate: FixedPoint | None, groups: int = 1
) -> jax.Array:
    """Sum over the detectors of a group the rows that they address: ``[T, R, O]``, ``[T, n]`` -> ``[n, groups * O]``."""
    if 0 in (index.shape[1], *weights.shape):
        return plain.sum_rows(weights, index, device, accumulate, groups)
    cores = _sizes.sparse_cores(device)
    table = rows_of(weights)
    each = _as_samples(ids(weights, index), groups)
    n_terms, n_samples = each.shape
    block = _sizes.samples(n_samples, table.shape[1], cores)
    y = _gather.sum_rows(table, in_blocks(each, block), n_terms, cores)[:n_samples, : weights.shape[2]]
    return y.reshape(groups, index.shape[1], -1).swapaxes(0, 1).reshape(index.shape[1], -1)


def differences(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> tuple[jax.Array, ...]:
    """Return ``<dy, row - other row>`` of each read: the first way to read against each other one.

    ``[T, R, O]``, ``[T, n]``s, ``[n, groups * O]`` -> ``[T, n]``s.
    """
    if 0 in (len(dy), *weights.shape):
        return plain.differences(weights, index, dy, device, accumulate, groups)
    cores = _sizes.sparse_cores(device)
    table = rows_of(weights)
    every = [_as_samples(ids(weights, i), groups) for i in index]
    n_terms, n_samples = every[0].shape
    block = _sizes.samples(n_samples, _sizes.numbers_of_differences(weights.shape[2]), cores)
    dy = dy.reshape(len(dy), groups, -1).swapaxes(0, 1).reshape(n_samples, -1)
    dy = jnp.pad(dy, ((0, -n_samples % block), (0, table.shape[1] - dy.shape[1])))
    sums = _gather.differences(table, tuple(in_blocks(each, block) for each in every), dy, n_terms, cores)
    return tuple(
        out_of_blocks(of_way, n_terms, n_samples)
        .reshape(n_terms, groups, -1)
        .swapaxes(0, 1)
        .reshape(index[0].shape)
        for of_way in sums
    )


def _as_samples(ids: jax.Array, groups: int) -> jax.Array:
    """``[T, n]`` -> ``[T / groups, groups * n]``: a sample of each group is a sample of its own."""
    return ids.reshape(groups, -1, ids.shape[1]).swapaxes(0, 1).reshape(-1, groups * ids.shape[1])


def rows_of(weights: jax.Array, fill: int = 0) -> jax.Array:
    """``[T, R, O]`` -> ``[T * R, width]``."""
    table = weights.reshape(-1, weights.shape[2])
    padding = _sizes.width(weights.shape[2]) - weights.shape[2]
    return jnp.pad(table, ((0, 0), (0, padding)), constant_values=fill) if padding else table


def ids(weights: jax.Array, index: jax.Array) -> jax.Array:
    """Return where the rows of each detector are in `rows_of`, ``[T, n]``."""
    return plain.detectors(weights)[:, None] * weights.shape[1] + plain.clamped(weights, index)


def in_blocks(ids: jax.Array, block: int) -> jax.Array:
    """``[terms, n]`` -> ``[blocks, terms, block]``, whole groups of terms."""
    terms, n_samples = ids.shape
    ids = jnp.pad(ids, ((0, -terms % _sizes.group(terms)), (0, -n_samples % block)))
    return ids.reshape(ids.shape[0], -1, block).swapaxes(0, 1)


def out_of_blocks(a: jax.Array, terms: int, n_samples: int) -> jax.Array:
    """Undo `in_blocks`: ``[blocks, terms, block]`` -> ``[terms, n]``."""
    return a.swapaxes(0, 1).reshape(a.shape[1], -1)[:terms, :n_samples]

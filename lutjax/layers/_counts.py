"""Attention over counts of key codes instead of keys: for `LUTAttention` without positions."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

import lutjax
from lutjax import _meshes
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.values._derivatives import with_derivative_of
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, nan_where_apart

_MOST_NUMBERS = 2**20
"""Maximum number of counts in memory at a time; affects results only by rounding."""

_SYMBOLIC_SIZE = 32
"""Assumed size of symbolic dimensions when positions are divided into blocks."""


def attend_counts(
    weights: Float[Array, "detectors rows outputs"], counts: Int[Array, "*batch detectors codes"],
    index: Int[Array, "*batch length detectors"], is_key: Bool[Array, "*batch length"], *,
    accumulate: FixedPoint | None, implementation: Implementation,
) -> tuple[
    Float[jax.Array, "*batch length outputs"], Int[jax.Array, "*batch detectors codes"]
]:  # fmt: skip
    """Attend to earlier positions, given by their counts per code; return outputs and new counts.

    ``y[j] = sum over t, c of counts_j[t, c] * weights[t, index[j, t] * codes + c]``, where
    ``counts_j`` counts the keys before ``j`` for detector ``t`` and code ``c``; padding, where
    `is_key` is False, is neither a query nor a key. In fixed point the result equals the sum over
    all keys, bit for bit. Source: docs/semantics.md, section 5.
    """
    length = index.shape[-2]
    sums: Any = {"accumulate": accumulate, "implementation": implementation}
    # Counts of all positions would take `length` times the memory of a cache, so they are made
    # block by block. A decoding step is one position, and needs no loop.
    sizes = (n if isinstance(n, int) else _SYMBOLIC_SIZE for n in counts.shape)
    size = length if length == 1 else max(1, _MOST_NUMBERS // max(math.prod(sizes), 1))
    if size >= length:
        return _attended_block(weights, counts, index, is_key, **sums)
    n_blocks = -(-length // size)
    blocks = _meshes.shard_by_compiler(
        lambda a, is_key: (
            _in_blocks(a, n_blocks, size, -2), _in_blocks(is_key, n_blocks, size, -1)
        ),
        lambda a, is_key: (_with_axis(a), _with_axis(is_key)),
    )(index, is_key)  # fmt: skip

    def step(counts: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, counts = _attended_block(weights, counts, *block, **sums)
        return counts, y

    after, y = jax.lax.scan(step, jnp.asarray(counts), blocks)
    y = jnp.moveaxis(y, 0, -3)  # [..., blocks, size, outputs]
    return y.reshape(*y.shape[:-3], n_blocks * size, y.shape[-1])[..., :length, :], after


def _attended_block(
    weights: Array, counts: Any, index: Array, is_key: Array, **sums: Any
) -> tuple[jax.Array, jax.Array]:
    n_codes = counts.shape[-1]

    def count_keys(counts: Any, index: Any, is_key: Any) -> tuple[jax.Array, jax.Array]:
        codes = _codes(index, n_codes)
        # New keys per code, [..., length, T, codes], and the keys before each position.
        new = ((index[..., None] == codes) & is_key[..., None, None]).astype(jnp.int32)
        before = counts[..., None, :, :] + jnp.cumsum(new, -3, dtype=jnp.int32) - new
        after = counts + jnp.sum(new, -3, dtype=jnp.int32)
        # Padding is no query: without counts it reads nothing.
        return jnp.where(is_key[..., None, None], before, 0), after

    def specs(counts: Any, index: Any, _: Any) -> Any:
        return PartitionSpec(*_meshes.spec_of(index), None), _meshes.spec_of(counts)

    before, after = _meshes.shard_by_compiler(count_keys, specs)(counts, index, is_key)
    return _sum_rows(weights, index, before, **sums), after


def _sum_rows(
    weights: Array, index: Array, counts: Array, *, accumulate: Any, **options: Any
) -> jax.Array:
    n_codes = counts.shape[-1]
    rows = jnp.asarray(index)[..., None] * n_codes + _codes(index, n_codes)
    # Counts beyond 2**24 are rounded here, as in a sum of equally many floats.
    in_floats = jnp.asarray(counts).astype(accumulator(weights.dtype))
    y = lutjax.weighted_lookup(weights, rows, in_floats, accumulate=accumulate, **options)
    if accumulate is None:
        return y
    add_integers = _meshes.shard_by_compiler(
        functools.partial(_sum_of_integers, accumulate=accumulate), lambda *_: _meshes.spec_of(y)
    )
    fixed = add_integers(jax.lax.stop_gradient(weights), index, counts)
    if accumulate.checked:
        floats = lutjax.weighted_lookup(weights, rows, in_floats, **options)
        fixed = nan_where_apart(fixed, jax.lax.stop_gradient(floats), accumulate)
    return with_derivative_of(fixed, y)


def _sum_of_integers(
    weights: Array, index: Array, counts: Array, *, accumulate: FixedPoint
) -> jax.Array:
    """Return the sum of rows times their counts in fixed point, ``[..., length, outputs]``.

    Args:
      weights: tables ``[T, codes * codes, outputs]``, rows by query code and key code.
      index: query codes ``[..., length, T]``.
      counts: keys before each position by their codes, ``[..., length, T, codes]``.
      accumulate: fixed-point format.
    """
    *positions, n_tables, n_codes = counts.shape
    n_outputs = weights.shape[-1]
    index_by_table = jnp.moveaxis(index, -1, 0).reshape(n_tables, -1)
    counts_by_table = jnp.moveaxis(counts, -2, 0).reshape(n_tables, -1, n_codes)

    def add_table(total: jax.Array, table_and_keys: Any) -> tuple[jax.Array, None]:
        table, query_codes, counts = table_and_keys
        # The rows of a query code are consecutive: [positions, codes, outputs].
        rows = table.reshape(-1, n_codes, n_outputs)[query_codes]
        # An addend times a count in int32 equals the sum of so many equal addends, bit for bit.
        addends = counts[..., None] * accumulate.quantize(rows)
        return total + jnp.sum(addends, 1, dtype=jnp.int32), None

    # One table at a time, because rows for all codes take much memory.
    zeros = jnp.zeros((index_by_table.shape[1], n_outputs), jnp.int32)
    total, _ = jax.lax.scan(add_table, zeros, (weights, index_by_table, counts_by_table))
    return accumulate.total(total.reshape(*positions, n_outputs), weights.dtype)


def _codes(index: Array, n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32).reshape((1,) * index.ndim + (n,))


def _in_blocks(a: Array, n: int, size: int, axis: int) -> jax.Array:
    """Split an axis into `n` zero-padded blocks, and move the block axis to the front."""
    axis %= a.ndim
    widths = [(0, n * size - a.shape[axis]) if i == axis else (0, 0) for i in range(a.ndim)]
    parts = jnp.pad(a, widths).reshape(*a.shape[:axis], n, size, *a.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def _with_axis(a: Array) -> PartitionSpec:
    return PartitionSpec(None, *_meshes.spec_of(a))

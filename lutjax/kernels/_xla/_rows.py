"""Reading and adding rows of tables: the three loops that all look-ups are made of.

Arrays are detector-major here, ``[detectors, n]`` for ``n`` reads of each detector's table: the compilers
for CPUs turn a chain of gathers and additions into one pass without temporaries, 3 to 20 times faster
than one gather of ``[n, detectors, outputs]`` and a sum. Compilers for accelerators fuse that large gather
into the sum themselves, and would pay for a loop with a launch per detector.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import cast_varying, varying_axes, zeros_varying
from lutjax._dtypes import accumulator
from lutjax.kernels.registry import Backend, Device

_UNROLLED = 16  # detectors per step of a loop: longer chains gain nothing, and compile longer
_OUTPUT_BLOCK = 32  # outputs in one expression
_READS = 2**15  # in one step of `products`: enough for every core


def in_sequence(device: Device) -> bool:
    """Whether detectors are visited one after the other."""
    return device.backend == Backend.CPU


def slope(margin: jax.Array) -> jax.Array:
    """``U'(margin)``, section 2 of the semantics."""
    return jnp.where(margin > 0, 0.5, -0.5).astype(margin.dtype) / jnp.square(1 + jnp.abs(margin))


def read(a: jax.Array, *ids: Any) -> jax.Array:
    """``a[ids]``; the ids have been clamped."""
    return a.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def add(a: jax.Array, ids: tuple[Any, ...], values: jax.Array) -> jax.Array:
    """`a` plus `values` at ``a[ids]``; the ids have been clamped."""
    return a.at[ids].add(values, mode="promise_in_bounds", wrap_negative_indices=False)


def detectors(weights: jax.Array) -> jax.Array:
    """The number of each detector, ``[T]``."""
    return jnp.arange(weights.shape[0], dtype=jnp.int32)


def clamped(weights: jax.Array, index: jax.Array) -> jax.Array:
    """Row ids that exist."""
    return jnp.clip(index, 0, weights.shape[1] - 1)


def flat(index: jax.Array) -> jax.Array:
    """``[T, samples, pairs]`` -> ``[T, n]``."""
    return index.reshape(index.shape[0], math.prod(index.shape[1:]))


def sum_rows(weights: jax.Array, index: jax.Array, device: Device) -> jax.Array:
    """Sum over detectors of the rows they address: ``[T, R, O]``, ``[T, n]`` -> ``[n, O]``, accumulated."""
    dtype = accumulator(weights.dtype)
    index = clamped(weights, index)
    if not in_sequence(device):
        return jnp.sum(_gather_all(weights, index), 0)

    def step(y: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return y + read(weights, *of).astype(dtype), None

    y = zeros_varying(index, (index.shape[1], weights.shape[2]), dtype)
    return jax.lax.scan(step, y, (detectors(weights), index), unroll=_UNROLLED)[0]


def products(
    weights: jax.Array, index: tuple[jax.Array, ...], dy: jax.Array, device: Device
) -> tuple[jax.Array, ...]:
    """``<dy, row>`` of each read, for each way to read: ``[T, R, O]``, ``[T, n]``s, ``[n, O]`` -> ``[T, n]``s."""
    dtype = accumulator(weights.dtype)
    index, dy = tuple(clamped(weights, i) for i in index), dy.astype(dtype)
    if not in_sequence(device):
        return tuple(
            jnp.einsum("tno,no->tn", _gather_all(weights, i), dy, precision="highest") for i in index
        )

    rows = jnp.stack(
        index, 1
    )  # a detector's reads side by side: one core makes them while its rows are cached
    n_detectors, ways, n = rows.shape
    axes = frozenset().union(*map(varying_axes, (weights, rows, dy)))
    if 0 in rows.shape:
        return tuple(cast_varying(jnp.zeros(i.shape, dtype), axes) for i in index)
    # The sum over outputs is written out, block by block: the compiler then keeps it in registers, where a
    # reduction would first write the products of whole rows to memory (3 times slower).
    blocks, rest = divmod(weights.shape[2], _OUTPUT_BLOCK)
    by_output = dy.T[:, None, None]
    # At least two steps: outside of a loop the compiler copies the whole table.
    size = _divisor(n_detectors, min(_READS // (ways * n), n_detectors // 2))
    zeros = cast_varying(jnp.zeros((size, ways, n), dtype), axes)

    def add_block(total: jax.Array, t: jax.Array, row: jax.Array, first: Any, outputs: int) -> jax.Array:
        terms = [total]
        for o in range(outputs):
            cotangent = jax.lax.dynamic_index_in_dim(by_output, first + o)[0]
            terms.append(read(weights, t, row, first + o).astype(dtype) * cotangent)
        return _sum(terms)

    def step(last: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        t, row = of
        total = zeros
        if blocks == 1:
            total = add_block(total, t, row, 0, _OUTPUT_BLOCK)
        elif blocks:
            total = jax.lax.fori_loop(
                0, blocks, lambda i, y: add_block(y, t, row, i * _OUTPUT_BLOCK, _OUTPUT_BLOCK), total
            )
        return add_block(total, t, row, blocks * _OUTPUT_BLOCK, rest), last

    # Each step stores what the one before it computed: the compiler fuses storing into computing otherwise,
    # and runs such a fusion on one core.
    steps = n_detectors // size
    of = detectors(weights).reshape(steps, size, 1, 1), rows.reshape(steps, size, ways, n)
    last, stored = jax.lax.scan(step, zeros, of)
    result = jnp.concatenate([stored[1:], last[None]]).reshape(rows.shape)
    return tuple(result[:, i] for i in range(ways))


def _sum(terms: list[jax.Array]) -> jax.Array:
    """In four chains, which need not wait for one another."""
    chains = [functools.reduce(operator.add, terms[i::4]) for i in range(min(4, len(terms)))]
    return functools.reduce(operator.add, chains)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`, at least 1."""
    return next((d for d in range(min(n, most), 1, -1) if n % d == 0), 1)


def add_rows(gradient: jax.Array, index: jax.Array, dy: jax.Array, device: Device) -> jax.Array:
    """The gradient of a table plus `dy` at every row that was read: ``[T, R, O]``, ``[T, n]``, ``[n, O]``."""
    dy = dy.astype(gradient.dtype)
    index = clamped(gradient, index)
    if in_sequence(device):
        return jax.lax.scan(
            lambda total, of: (add(total, of, dy), None), gradient, (detectors(gradient), index)
        )[0]
    return add(
        gradient,
        (detectors(gradient)[:, None], index),
        jnp.broadcast_to(dy, (gradient.shape[0], *dy.shape)),
    )


def _gather_all(weights: jax.Array, index: jax.Array) -> jax.Array:
    rows = read(weights, detectors(weights)[:, None], index)
    return rows.astype(accumulator(weights.dtype))

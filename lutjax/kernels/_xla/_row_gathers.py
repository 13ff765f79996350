"""Reading and adding rows of tables: the three loops that all look-ups are made of.

Arrays are detector-major here, ``[detectors, n]`` for ``n`` reads of each detector's table. Compilers turn a
chain of gathers and additions into one pass without temporaries: on CPUs 3 to 20 times faster than one gather of
``[n, detectors, outputs]`` and a sum, and faster on GPUs, where fewer tables then compete for the cache. Products and
additions to rows are one large fusion on accelerators, where a loop would pay with a launch per detector.

TPUs read and write rows one by one, and multiply matrices fast: rows of small tables are read and added there as products
with one-hot matrices, in every float32 digit. Such a product meets every row: an infinity or NaN in a table or a cotangent
makes NaN of every sum in its output, not only of those that read it. A margin's cotangent is then a difference of two
products, where gathered rows are subtracted before they are multiplied: large rows lose what they differ by.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels.registry import Backend, Device

_UNROLLED = 16  # detectors per step of a loop: longer chains gain nothing, and compile longer
_OUTPUT_BLOCK = 4  # outputs in one expression: of 16 and more gathers the compiler makes no vectors
# Rows of the longest table that is read and added to by products.
_ONE_HOT_ROWS = 512


def in_sequence(device: Device) -> bool:
    """Return whether detectors are visited one after the other."""
    return device.backend == Backend.CPU


def multiplies_fast(device: Device) -> bool:
    """Return whether a product with a one-hot matrix is faster than a gather."""
    return device.backend == Backend.TPU


def by_one_hot(weights: jax.Array, accumulate: FixedPoint | None, device: Device) -> bool:
    """Return whether rows of these tables are read and added as products."""
    fits = weights.shape[1] <= _ONE_HOT_ROWS and addend_dtype(weights.dtype, accumulate) == jnp.float32
    return fits and multiplies_fast(device)


def slope(margin: jax.Array) -> jax.Array:
    """The surrogate derivative, section 2 of the semantics."""
    return jnp.where(margin > 0, 0.5, -0.5).astype(margin.dtype) / jnp.square(1 + jnp.abs(margin))


def times_slope(total: jax.Array, margin: jax.Array) -> jax.Array:
    """A sum of products times their common factor; nothing where nothing was added, be the margin NaN."""
    return jnp.where(total == 0, 0, slope(margin) * total.astype(margin.dtype))


def read(a: jax.Array, *ids: Any) -> jax.Array:
    """``a[ids]``; the ids have been clamped."""
    if a.shape[0] == 0 and ids[0] is not Ellipsis:
        # JAX refuses to trace a read from nothing, also in a loop over no detectors, which never runs.
        a = jnp.zeros((1, *a.shape[1:]), a.dtype)
    return a.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def add(a: jax.Array, ids: tuple[Any, ...], values: jax.Array) -> jax.Array:
    """`a` plus `values` at ``a[ids]``; the ids have been clamped."""
    if a.shape[0] == 0:
        return a
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


def sum_rows(
    weights: jax.Array, index: jax.Array, device: Device, accumulate: FixedPoint | None
) -> jax.Array:
    """Sum over detectors of the rows they address: ``[T, R, O]``, ``[T, n]`` -> ``[n, O]``, a sum of addends."""
    dtype = addend_dtype(weights.dtype, accumulate)
    index = clamped(weights, index)
    if by_one_hot(weights, accumulate, device):
        return _multiply("tnr,stro->nso", _one_hot(weights, index), weights, axis=1)

    def step(y: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return y + addends(read(weights, *of), accumulate), None

    y = zeros_varying(index, (index.shape[1], weights.shape[2]), dtype)
    return jax.lax.scan(step, y, (detectors(weights), index), unroll=_UNROLLED)[0]


def differences(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
) -> tuple[jax.Array, ...]:
    """``<dy, row - other row>`` of each read: the first way to read against each other one.

    ``[T, R, O]``, ``[T, n]``s, ``[n, O]`` -> ``[T, n]``s. Rows are subtracted before they are multiplied: products of large
    rows would lose their difference, or overflow. `_differences_by_products` alone multiplies first.
    """
    dtype, sum_dtype = accumulator(weights.dtype), addend_dtype(weights.dtype, accumulate)
    index, dy = tuple(clamped(weights, i) for i in index), dy.astype(dtype)
    if by_one_hot(weights, accumulate, device):
        return _differences_by_products(weights, index, dy)
    if not in_sequence(device):
        row, *other_rows = (_gather_all(weights, i) for i in index)
        sums = [jnp.sum(addends((row - o) * dy[None], accumulate), -1, dtype=sum_dtype) for o in other_rows]
        return tuple(result(s, dtype, accumulate) for s in sums)

    # The sum over outputs is written out, block by block: the compiler then keeps it in registers, where a
    # reduction would first write the products of whole rows to memory (3 times slower).
    blocks, rest = divmod(weights.shape[2], _OUTPUT_BLOCK)
    by_output = dy.T

    def add_block(
        sums: list[jax.Array], t: jax.Array, rows: list[jax.Array], first: Any, size: int
    ) -> list[jax.Array]:
        for o in range(size):
            cotangent = jax.lax.dynamic_index_in_dim(by_output, first + o, keepdims=False)
            row, *other_rows = (read(weights, t, r, first + o).astype(dtype) for r in rows)
            sums = [
                s + addends((row - other) * cotangent, accumulate)
                for s, other in zip(sums, other_rows, strict=True)
            ]
        return sums

    def one(_: None, of: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        t, *rows = of
        sums = [zeros_varying(dy, dy.shape[:1], sum_dtype) for _ in rows[1:]]
        if blocks == 1:
            sums = add_block(sums, t, rows, 0, _OUTPUT_BLOCK)
        elif blocks:
            sums = jax.lax.fori_loop(
                0, blocks, lambda i, s: add_block(s, t, rows, i * _OUTPUT_BLOCK, _OUTPUT_BLOCK), sums
            )
        sums = add_block(sums, t, rows, blocks * _OUTPUT_BLOCK, rest)
        return None, tuple(result(s, dtype, accumulate) for s in sums)

    return jax.lax.scan(one, None, (detectors(weights), *index))[1]


def add_rows(total: jax.Array, index: jax.Array, values: jax.Array, device: Device) -> jax.Array:
    """Tables plus values at every row that was read: ``[T, R, O]``, ``[T, n]``, ``[n or T, n, O]``."""
    values = values.astype(total.dtype)
    index = clamped(total, index)
    if in_sequence(device):
        each = values if values.ndim == 3 else None

        def step(total: jax.Array, of: tuple[Any, ...]) -> tuple[jax.Array, None]:
            t, row, of_detector = of
            return add(total, (t, row), values if of_detector is None else of_detector), None

        return jax.lax.scan(step, total, (detectors(total), index, each))[0]
    if total.dtype == jnp.float32 and by_one_hot(total, None, device):
        layout = "sno" if values.ndim == 2 else "stno"
        return total + _multiply(f"tnr,{layout}->tsro", _one_hot(total, index), values, axis=1)
    values = jnp.broadcast_to(values, (total.shape[0], *values.shape[-2:]))
    return add(total, (detectors(total)[:, None], index), values)


def _gather_all(weights: jax.Array, index: jax.Array) -> jax.Array:
    return addends(read(weights, detectors(weights)[:, None], index), None)


_TERMS = {"float32": 3, "float16": 2, "bfloat16": 1}


def terms(values: jax.Array) -> list[jax.Array]:
    """Arrays of bfloat16 whose sum is the values, in every digit: what a one-hot matrix is multiplied with.

    Half the passes through a matrix unit that ``precision="highest"`` takes.
    """
    rest, found = values.astype(jnp.float32), []
    for _ in range(_TERMS[values.dtype.name] - 1):
        term = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        rest -= term
        found.append(term)
    return [term.astype(jnp.bfloat16) for term in (*found, rest)]


def _differences_by_products(
    weights: jax.Array, index: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array, ...]:
    """Return `differences` from the products with every row; the compiler picks them where it makes them, ``[T, n, R]``
    is never stored. The error is that of the products: see `lutjax.lookup`."""
    every = jnp.einsum("no,tro->tnr", dy, weights.astype(dy.dtype), precision="highest")
    main, *others = (jnp.where(_hits(weights, i), every, 0) for i in index)
    return tuple(jnp.sum(main - other, -1) for other in others)


def _hits(weights: jax.Array, index: jax.Array) -> jax.Array:
    """``[T, n]`` -> ``[T, n, R]``: which row is meant."""
    return index[..., None] == jax.lax.broadcasted_iota(jnp.int32, (*index.shape, weights.shape[1]), 2)


def _one_hot(weights: jax.Array, index: jax.Array) -> jax.Array:
    return _hits(weights, index).astype(jnp.bfloat16)


def _multiply(equation: str, one_hot: jax.Array, values: jax.Array, axis: int) -> jax.Array:
    """A product with the `terms` of values, ``s`` in the equation, summed over them."""
    of = jnp.stack(terms(values))
    return jnp.sum(jnp.einsum(equation, one_hot, of, preferred_element_type=jnp.float32), axis)

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
    weights: jax.Array,
    index: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> jax.Array:
    """Sum over the detectors of each group the rows they address: ``[T, R, O]``, ``[T, n]`` -> ``[n, G * O]``, sums of addends."""
    dtype = addend_dtype(weights.dtype, accumulate)
    n_detectors, n_rows, n_outputs = weights.shape
    index, each = clamped(weights, index), n_detectors // groups
    n = index.shape[1]
    if by_one_hot(weights, accumulate, device):
        of_groups = _one_hot(weights, index).reshape(groups, each, n, n_rows)
        tables = weights.reshape(groups, each, n_rows, n_outputs)
        return _multiply("gpnr,sgpro->ngso", of_groups, tables, axis=2).reshape(n, groups * n_outputs)

    def step(y: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        place, row = of
        return y + addends(read(weights, tables_at(place, each, groups), row), accumulate), None

    y = zeros_varying(index, (groups, n, n_outputs), dtype)
    y, _ = jax.lax.scan(step, y, (places(each), by_place(index, groups)), unroll=_UNROLLED)
    return y.transpose(1, 0, 2).reshape(n, groups * n_outputs)


def differences(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> tuple[jax.Array, ...]:
    """``<dy, row - other row>`` of each read: the first way to read against each other one.

    ``[T, R, O]``, ``[T, n]``s, ``[n, G * O]`` -> ``[T, n]``s. Rows are subtracted before they are multiplied: products of large
    rows would lose their difference, or overflow. `_differences_by_products` alone multiplies first.
    """
    dtype, sum_dtype = accumulator(weights.dtype), addend_dtype(weights.dtype, accumulate)
    n_detectors, _, n_outputs = weights.shape
    index, each, n = tuple(clamped(weights, i) for i in index), n_detectors // groups, dy.shape[0]
    dy = dy.astype(dtype).reshape(n, groups, n_outputs)
    if by_one_hot(weights, accumulate, device):
        return _differences_by_products(weights, index, dy)
    if not in_sequence(device):
        row, *other_rows = (_gather_all(weights, i) for i in index)
        of_tables = of_each_table(dy, n_detectors)
        sums = [jnp.sum(addends((row - o) * of_tables, accumulate), -1, dtype=sum_dtype) for o in other_rows]
        return tuple(result(s, dtype, accumulate) for s in sums)

    # The sum over outputs is written out, block by block: the compiler then keeps it in registers, where a
    # reduction would first write the products of whole rows to memory (3 times slower).
    blocks, rest = divmod(n_outputs, _OUTPUT_BLOCK)
    by_output = dy.transpose(2, 1, 0)

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
        place, *rows = of
        t = tables_at(place, each, groups)
        sums = [zeros_varying(dy, (groups, n), sum_dtype) for _ in rows[1:]]
        if blocks == 1:
            sums = add_block(sums, t, rows, 0, _OUTPUT_BLOCK)
        elif blocks:
            sums = jax.lax.fori_loop(
                0, blocks, lambda i, s: add_block(s, t, rows, i * _OUTPUT_BLOCK, _OUTPUT_BLOCK), sums
            )
        sums = add_block(sums, t, rows, blocks * _OUTPUT_BLOCK, rest)
        return None, tuple(result(s, dtype, accumulate) for s in sums)

    _, found = jax.lax.scan(one, None, (places(each), *(by_place(i, groups) for i in index)))
    return tuple(f.transpose(1, 0, 2).reshape(n_detectors, n) for f in found)


def add_rows(
    total: jax.Array, index: jax.Array, values: jax.Array, device: Device, groups: int = 1
) -> jax.Array:
    """Tables plus values at every row that was read.

    ``[T, R, O]``, ``[T, n]``, ``[n, G * O]`` or, for each table, ``[T, n, O]``.
    """
    values = values.astype(total.dtype)
    n_detectors, n_rows, n_outputs = total.shape
    index, each = clamped(total, index), n_detectors // groups
    n = index.shape[1]
    if values.ndim == 2:
        values = values.reshape(n, groups, n_outputs)
        if in_sequence(device):
            by_group = values.transpose(1, 0, 2)

            def step(total: jax.Array, of: tuple[Any, ...]) -> tuple[jax.Array, None]:
                place, row = of
                return add(total, (tables_at(place, each, groups), row), by_group), None

            return jax.lax.scan(step, total, (places(each), by_place(index, groups)))[0]
        if total.dtype == jnp.float32 and by_one_hot(total, None, device):
            of_groups = _one_hot(total, index).reshape(groups, each, n, n_rows)
            return total + _multiply("gpnr,sngo->gpsro", of_groups, values, axis=2).reshape(total.shape)
        return add(total, (detectors(total)[:, None], index), of_each_table(values, n_detectors))
    if in_sequence(device):

        def step_of_table(total: jax.Array, of: tuple[Any, ...]) -> tuple[jax.Array, None]:
            t, row, of_table = of
            return add(total, (t, row), of_table), None

        return jax.lax.scan(step_of_table, total, (detectors(total), index, values))[0]
    if total.dtype == jnp.float32 and by_one_hot(total, None, device):
        return total + _multiply("tnr,stno->tsro", _one_hot(total, index), values, axis=1)
    return add(total, (detectors(total)[:, None], index), values)


def places(each: int) -> jax.Array:
    """The places of tables in their group."""
    return jnp.arange(each, dtype=jnp.int32)


def tables_at(place: jax.Array, each: int, groups: int) -> jax.Array:
    """The tables at one place of every group, ``[G, 1]``."""
    return (jnp.arange(groups, dtype=jnp.int32) * each + place)[:, None]


def by_place(a: jax.Array, groups: int) -> jax.Array:
    """``[T, n]`` -> ``[T / G, G, n]``."""
    return a.reshape(groups, a.shape[0] // groups, a.shape[1]).transpose(1, 0, 2)


def of_each_table(values: jax.Array, n_tables: int) -> jax.Array:
    """Those of a table's group: ``[n, G, O]`` -> ``[T, n, O]``."""
    n, groups, n_outputs = values.shape
    every = (groups, n_tables // groups, n, n_outputs)
    return jnp.broadcast_to(values.transpose(1, 0, 2)[:, None], every).reshape(n_tables, n, n_outputs)


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
    n, groups, _ = dy.shape
    tables = weights.astype(dy.dtype).reshape(groups, -1, *weights.shape[1:])
    every = jnp.einsum("ngo,gpro->gpnr", dy, tables, precision="highest").reshape(-1, n, weights.shape[1])
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

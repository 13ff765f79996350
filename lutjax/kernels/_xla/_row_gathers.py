"""Row loops shared by all lookups: sum rows, multiply rows by a cotangent, add to rows.

Formula for tables ``weights [T, R, O]``, ways ``k`` with row ids ``i [T, n]`` and coefficients
``c [T, n]`` (1 without coefficients), and tables ``t`` of group ``g``::

    sum_ways:     y[b, g] = sum over t, k of c[t, b] * weights[t, i[t, b]]
    products:     p[t, b] = <dy[b, g], weights[t, i[t, b]]>
    differences:  the same for ``weights[t, first id] - weights[t, other id]``
    add_ways:     total[t, i[t, b]] += c[t, b] * dy[b, g]

Work: a CPU visits one group after the other, and one table after the other within it; the sums of a
group stay in its cache. Other devices visit one table of every group per step, because a step costs
kernel launches. TPUs multiply small tables by one-hot matrices instead of gathering rows.

Layout: ids are detector-major ``[T, n]``, tables of a group are adjacent. XLA fuses a chain of
gathers and additions into one pass without temporaries: 3 to 20 times faster on CPUs than one
gather of ``[n, T, O]`` and a sum. It is also faster on GPUs, where fewer tables compete for the L2
cache.

Numerics: sums use `addend_dtype`: float32, integers in fixed point, int32 or `WideSum` for integer
coefficients. Tables are added in ascending order. Row ids are clamped. One-hot products keep all
digits of float32, but they touch every row: an infinity or NaN in one row makes NaN of all sums of
its output. They also subtract two products where gathers subtract rows first, so they lose digits
of large rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Backend, Device
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.values._quantized import WideSum, fits_int32

# Detectors per loop step: longer chains only cost compile time. Weighted chains are not vectorized.
_UNROLLED = 16
# Maximum table length for one-hot products.
_ONE_HOT_ROWS = 512

Way = tuple[jax.Array, jax.Array | None]
"""Row ids and coefficients, ``[T, n]``; None: 1."""


def in_sequence(device: Device) -> bool:
    """Return True if detectors are visited sequentially."""
    return device.backend == Backend.CPU


def multiplies_fast(device: Device) -> bool:
    """Return True if a one-hot matrix product is faster than a gather."""
    return device.backend == Backend.TPU


def launches(device: Device) -> bool:
    """Return True if every gather or scatter is a separate kernel launch."""
    return device.backend == Backend.GPU


def uses_one_hot(weights: jax.Array, accumulate: FixedPoint | None, device: Device) -> bool:
    """Return True if one-hot products read and update these tables."""
    fits = (
        weights.shape[1] <= _ONE_HOT_ROWS and addend_dtype(weights.dtype, accumulate) == jnp.float32
    )
    return fits and multiplies_fast(device)


def slope(margin: jax.Array) -> jax.Array:
    """Return the surrogate gradient of a comparison (semantics, section 2)."""
    return jnp.where(margin > 0, 0.5, -0.5).astype(margin.dtype) / jnp.square(1 + jnp.abs(margin))


def times_slope(total: jax.Array, margin: jax.Array) -> jax.Array:
    """Multiply a sum by the surrogate gradient; 0 where the sum is 0, even if the margin is NaN."""
    return jnp.where(total == 0, 0, slope(margin) * total.astype(margin.dtype))


def read(a: jax.Array, *ids: Any) -> jax.Array:
    """Return ``a[ids]`` for clamped ids."""
    if a.shape[0] == 0 and ids[0] is not Ellipsis:
        # JAX refuses to trace a read from an empty array, even in a loop over no detectors.
        a = jnp.zeros((1, *a.shape[1:]), a.dtype)
    # Ids are clamped once, outside of the loops. With this promise XLA emits no second clamp and no
    # select for negative ids.
    return a.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def add(a: jax.Array, ids: tuple[Any, ...], values: jax.Array) -> jax.Array:
    """Add `values` to `a` at clamped ids."""
    # An array without rows has no valid id, not even a clamped one.
    if a.shape[0] == 0:
        return a
    return a.at[ids].add(values, mode="promise_in_bounds", wrap_negative_indices=False)


def detectors(weights: jax.Array) -> jax.Array:
    """Return the detector indices, ``[T]``."""
    return jnp.arange(weights.shape[0], dtype=jnp.int32)


def clamp_rows(weights: jax.Array, index: jax.Array) -> jax.Array:
    """Clamp row ids to ``[0, R)``."""
    return jnp.clip(index, 0, weights.shape[1] - 1)


def flat(index: jax.Array) -> jax.Array:
    """Reshape ``[T, samples, pairs]`` to ``[T, n]``."""
    return index.reshape(index.shape[0], math.prod(index.shape[1:]))


# ------------------------------------------------------------------------------------- all tables
def sum_rows(
    weights: jax.Array,
    index: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> jax.Array:
    """Sum the addressed rows: ``[T, R, O]``, ``[T, n]`` -> ``[n, G * O]`` in addends."""
    return sum_ways(weights, [(index, None)], device, accumulate, groups)


def sum_ways(
    weights: jax.Array,
    ways: Sequence[Way],
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> Any:
    """Sum ``coefficient * row`` over each group's tables and all ways, at least one.

    Integer coefficients are multiplied and accumulated as integers, in a `WideSum` if int32 is too
    small.
    """
    n_detectors, n_rows, n_outputs = weights.shape
    ways, each = [(clamp_rows(weights, i), c) for i, c in ways], n_detectors // groups
    index, coefficient = ways[0]
    n, dtype = index.shape[1], sum_dtype(weights, coefficient, accumulate)
    # Sums of integers and of fixed-point addends stay gathers: the matrix product accumulates in
    # float32.
    if uses_one_hot(weights, accumulate, device) and dtype == jnp.float32:
        tables = weights.reshape(groups, each, n_rows, n_outputs)
        if coefficient is None:
            of_groups = _one_hot(weights, index).reshape(groups, each, n, n_rows)
            # A one-hot matrix is exact in bfloat16, so only the table needs several terms.
            y = _multiply("gpnr,sgpro->ngso", of_groups, tables, axis=2)
        else:
            of_groups = _weighted_hits(weights, ways).reshape(groups, each, n, n_rows)
            # Coefficients are not exact in bfloat16. All ways share one matrix and thus one
            # product.
            y = jnp.einsum("gpnr,gpro->ngo", of_groups, tables.astype(dtype), precision="highest")
        return y.reshape(n, groups * n_outputs)
    if in_sequence(device):

        def visit_group(_: None, xs: Any) -> tuple[None, Any]:
            first, ways = xs

            def step(y: Any, xs: Any) -> tuple[Any, None]:
                t, ways = xs
                return y + sum_of_table(weights, t, ways, accumulate), None

            y = zero_of(index, (n, n_outputs), dtype, each * len(ways), coefficient)
            # An unrolled chain is one pass over the sums. LLVM does not vectorize chains with
            # coefficients, so unrolling would only cost compile time.
            unroll = _UNROLLED if coefficient is None else 1
            return None, jax.lax.scan(
                step, y, (first + table_positions(each), ways), unroll=unroll
            )[0]

        _, y = over_groups(visit_group, None, (first_tables(groups, each), in_groups(ways, groups)))
    else:

        def add_place(y: Any, xs: Any) -> tuple[Any, None]:
            place, ways = xs
            return y + sum_of_table(weights, tables_at(place, each, groups), ways, accumulate), None

        y = zero_of(index, (groups, n, n_outputs), dtype, each * len(ways), coefficient)
        # One step reads the table at one place of every group: as many steps as a group has tables,
        # each with work for all groups.
        by_place = jax.tree.map(lambda a: a.swapaxes(0, 1), in_groups(ways, groups))
        # Bound the number of gathers in the body, which each way multiplies.
        unroll = max(_UNROLLED // len(ways), 1)
        y, _ = jax.lax.scan(add_place, y, (table_positions(each), by_place), unroll=unroll)
    return jax.tree.map(lambda y: y.transpose(1, 0, 2).reshape(n, groups * n_outputs), y)


def differences(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> tuple[jax.Array, ...]:
    """Compute ``<dy, row - other row>`` for each read: the first way against each other way.

    ``[T, R, O]``, ``[T, n]``s, ``[n, G * O]`` -> ``[T, n]``s. Rows are subtracted before the
    product: products with large rows would lose their difference, or overflow. Only
    `_products_with_every_row` multiplies first.
    """
    if uses_one_hot(weights, accumulate, device):
        main, *others = products(weights, index, dy, device, accumulate, groups)
        return tuple(main - other for other in others)
    return _row_products(weights, index, dy, device, accumulate, groups, subtract=True)


def products(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> tuple[jax.Array, ...]:
    """Compute ``<dy, row>`` for each way.

    ``[T, R, O]``, ``[T, n]``s, ``[n, G * O]`` -> ``[T, n]``s.
    """
    if uses_one_hot(weights, accumulate, device):
        index = tuple(clamp_rows(weights, i) for i in index)
        every = _products_with_every_row(weights, dy, groups)
        return tuple(jnp.sum(jnp.where(_hits(weights, i), every, 0), -1) for i in index)
    return _row_products(weights, index, dy, device, accumulate, groups, subtract=False)


def _row_products(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int,
    *,
    subtract: bool,
) -> tuple[jax.Array, ...]:
    n_detectors, _, n_outputs = weights.shape
    each, n = n_detectors // groups, dy.shape[0]
    index = tuple(clamp_rows(weights, i) for i in index)
    dy = dy.astype(accumulator(weights.dtype)).reshape(n, groups, n_outputs)
    # Accelerators gather all rows in one fusion, which multiplies and sums them without storing
    # them. A loop would launch one kernel per table.
    if not in_sequence(device):
        rows = [_gather_all(weights, i) for i in index]
        if subtract:
            rows = [rows[0] - other for other in rows[1:]]
        of_tables = repeat_per_table(dy, n_detectors)
        return tuple(product(row, of_tables, accumulate) for row in rows)

    def visit_group(_: None, xs: Any) -> tuple[None, Any]:
        first, index, of_outputs = xs

        def one(_: None, xs: Any) -> tuple[None, Any]:
            t, index = xs
            return None, products_of_table(
                weights, t, index, of_outputs, accumulate, subtract=subtract
            )

        return None, jax.lax.scan(one, None, (first + table_positions(each), index))[1]

    xs = first_tables(groups, each), in_groups(index, groups), dy.transpose(1, 0, 2)
    _, stacked = over_groups(visit_group, None, xs)
    return tuple(a.reshape(n_detectors, n) for a in stacked)


def add_rows(
    total: jax.Array, index: jax.Array, values: jax.Array, device: Device, groups: int = 1
) -> jax.Array:
    """Add values to every accessed row.

    ``[T, R, O]``, ``[T, n]``, ``[n, G * O]`` or, per table, ``[T, n, O]``.
    """
    values = values.astype(total.dtype)
    if values.ndim == 2:
        return add_ways(total, [(index, None)], values, device, None, groups)
    index = clamp_rows(total, index)
    if in_sequence(device):

        def step(total: jax.Array, xs: tuple[Any, ...]) -> tuple[jax.Array, None]:
            t, row, of_table = xs
            return add(total, (t, row), of_table), None

        return jax.lax.scan(step, total, (detectors(total), index, values))[0]
    if total.dtype == jnp.float32 and uses_one_hot(total, None, device):
        # Values differ by table here, so the product has a batch dimension of tables.
        return total + _multiply("tnr,stno->tsro", _one_hot(total, index), values, axis=1)
    return add(total, (detectors(total)[:, None], index), values)


def add_ways(
    total: jax.Array,
    ways: Sequence[Way],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> jax.Array:
    """Add the addends ``coefficient * dy`` to every accessed row, with ``dy [n, G * O]``.

    Without coefficients, `dy` contains the addends.
    """
    n_detectors, n_rows, n_outputs = total.shape
    ways, each, n = [(clamp_rows(total, i), c) for i, c in ways], n_detectors // groups, dy.shape[0]
    dy = dy.reshape(n, groups, n_outputs)
    if total.dtype == jnp.float32 and uses_one_hot(total, accumulate, device):
        index, coefficient = ways[0]
        if coefficient is None:
            of_groups = _one_hot(total, index).reshape(groups, each, n, n_rows)
            # All tables of a group receive the same cotangent: it is read once per group, not per
            # table.
            sums = _multiply("gpnr,sngo->gpsro", of_groups, dy, axis=2)
        else:
            of_groups = _weighted_hits(total, ways).reshape(groups, each, n, n_rows)
            sums = jnp.einsum(
                "gpnr,ngo->gpro", of_groups, dy.astype(jnp.float32), precision="highest"
            )
        return total + sums.reshape(total.shape)
    if in_sequence(device):

        def visit_group(total: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            first, ways, dy = xs

            def step(total: jax.Array, xs: Any) -> tuple[jax.Array, None]:
                t, ways = xs
                return add_to_table(total, t, ways, dy, accumulate), None

            return jax.lax.scan(step, total, (first + table_positions(each), ways))[0], None

        return over_groups(
            visit_group,
            total,
            (first_tables(groups, each), in_groups(ways, groups), dy.transpose(1, 0, 2)),
        )[0]
    # One scatter for all tables: on a GPU each scatter is a launch. Its order of additions, and
    # thus the last bits of float sums, may vary between runs.
    every, of_tables = detectors(total)[:, None], repeat_per_table(dy, n_detectors)
    return add_to_table(total, every, ways, of_tables, accumulate)


# ------------------------------------------------------------------------------------- one table
def sum_dtype(
    weights: jax.Array, coefficient: jax.Array | None, accumulate: FixedPoint | None
) -> np.dtype:
    if coefficient is not None and jnp.issubdtype(coefficient.dtype, jnp.integer):
        return jnp.dtype(jnp.int32)
    return addend_dtype(weights.dtype, accumulate)


def zero_of(
    like: jax.Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    addends: int,
    coefficient: jax.Array | None,
) -> Any:
    """Return zeros that can accumulate this number of addends."""
    zero = zeros_varying(like, shape, dtype)
    in_integers = coefficient is not None and jnp.issubdtype(coefficient.dtype, jnp.integer)
    # int8 rows times integer coefficients may exceed int32; two int32 parts then hold the sum.
    return WideSum(zero, zero) if in_integers and not fits_int32(addends) else zero


def sum_of_table(
    weights: jax.Array, t: jax.Array, ways: Sequence[Way], accumulate: FixedPoint | None
) -> jax.Array:
    """Sum the addends ``coefficient * row`` over ways. `t`, ids and coefficients broadcast."""
    total: Any = 0
    for index, coefficient in ways:
        row = read(weights, t, index)
        if coefficient is None:
            total += addends(row, accumulate)
        elif jnp.issubdtype(coefficient.dtype, jnp.integer):
            # Integer reads multiply exactly; a float product would round above 2**24.
            total += coefficient[..., None] * row.astype(jnp.int32)
        else:
            total += addends(times(coefficient, row.astype(accumulator(row.dtype))), accumulate)
    return total


def products_of_table(
    weights: jax.Array,
    t: jax.Array,
    index: Sequence[jax.Array],
    dy: jax.Array,
    accumulate: FixedPoint | None,
    *,
    subtract: bool = False,
) -> list[jax.Array]:
    """Compute ``<dy, row>`` per way, or ``<dy, first row - row>`` per other way.

    ``[n]``s, ``[n, O]`` -> ``[n]``s.
    """
    rows = [read(weights, t, i).astype(accumulator(weights.dtype)) for i in index]
    if subtract:
        rows = [rows[0] - other for other in rows[1:]]
    # Addends in fixed point are integers per element: they must be rounded before the sum, which a
    # matrix product cannot do.
    if accumulate is not None:
        return [product(row, dy, accumulate) for row in rows]
    # A product with ones adds vectors; the compiler's reduction over the last axis is sequential.
    ones = jnp.ones(dy.shape[-1:], dy.dtype)
    return [jnp.matmul(row * dy, ones, precision="highest") for row in rows]


def product(row: jax.Array, dy: jax.Array, accumulate: FixedPoint | None) -> jax.Array:
    total = jnp.sum(addends(row * dy, accumulate), -1, dtype=addend_dtype(dy.dtype, accumulate))
    return result(total, dy.dtype, accumulate)


def add_to_table(
    total: jax.Array,
    t: jax.Array,
    ways: Sequence[Way],
    dy: jax.Array,
    accumulate: FixedPoint | None,
) -> jax.Array:
    """Add the addends ``coefficient * dy`` to rows in table `t`.

    Without coefficients, `dy` is the addends.
    """
    for index, coefficient in ways:
        values = dy
        if coefficient is not None:
            values = addends(times(coefficient, dy.astype(accumulator(dy.dtype))), accumulate)
        total = add(total, (t, index), values.astype(total.dtype))
    return total


def times(coefficient: jax.Array, values: jax.Array) -> jax.Array:
    """Return ``coefficient * values``; 0 for coefficient 0, even if a value is NaN."""
    c = coefficient.astype(values.dtype)[..., None]
    # A read without effect must not turn an infinity or NaN of its row into NaN of the sum.
    return jnp.where(c == 0, 0, c * values)


# ------------------------------------------------------------------------------------- groups
def over_groups(body: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
    """Run `jax.lax.scan` over groups, without a loop for a single group."""
    if jax.tree.leaves(xs)[0].shape[0] != 1:
        return jax.lax.scan(body, carry, xs)
    carry, output = body(carry, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], output)


def first_tables(groups: int, each: int) -> jax.Array:
    """Return the first table in each group, ``[G]``."""
    return jnp.arange(groups, dtype=jnp.int32) * each


def table_positions(each: int) -> jax.Array:
    """Return the table positions within a group, ``[T / G]``."""
    return jnp.arange(each, dtype=jnp.int32)


def tables_at(place: jax.Array, each: int, groups: int) -> jax.Array:
    """Return the table at this position in every group, ``[G, 1]``."""
    return (first_tables(groups, each) + place)[:, None]


def in_groups(arrays: Any, groups: int) -> Any:
    """Reshape ``[T, ...]`` to ``[G, T / G, ...]``."""
    return jax.tree.map(lambda a: a.reshape(groups, a.shape[0] // groups, *a.shape[1:]), arrays)


def repeat_per_table(values: jax.Array, n_tables: int) -> jax.Array:
    """Repeat group values for each table: ``[n, G, O]`` -> ``[T, n, O]``."""
    n, groups, n_outputs = values.shape
    every = (groups, n_tables // groups, n, n_outputs)
    return jnp.broadcast_to(values.transpose(1, 0, 2)[:, None], every).reshape(
        n_tables, n, n_outputs
    )


def _gather_all(weights: jax.Array, index: jax.Array) -> jax.Array:
    return addends(read(weights, detectors(weights)[:, None], index), None)


_TERMS = {"float32": 3, "float16": 2, "bfloat16": 1}


def terms(values: jax.Array) -> list[jax.Array]:
    """Split values into bfloat16 arrays with an exact sum, as factors for a one-hot matrix.

    The product takes half the matrix unit passes of ``precision="highest"``.
    """
    # float32 has 24 significant bits and bfloat16 has 8: three terms hold every digit.
    rest, leading = values.astype(jnp.float32), []
    for _ in range(_TERMS[values.dtype.name] - 1):
        # Unlike a conversion to bfloat16 and back, reduce_precision is not removed by the
        # simplifier.
        term = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        rest -= term
        leading.append(term)
    return [term.astype(jnp.bfloat16) for term in (*leading, rest)]


def _products_with_every_row(weights: jax.Array, dy: jax.Array, groups: int) -> jax.Array:
    """Multiply ``dy [n, G * O]`` by every row, ``[T, n, R]``.

    XLA fuses the selection and stores no product. For the rounding error, see `lutjax.lookup`.
    """
    n_detectors, n_rows, n_outputs = weights.shape
    n, dtype = dy.shape[0], accumulator(weights.dtype)
    dy = dy.astype(dtype).reshape(n, groups, n_outputs)
    tables = weights.astype(dtype).reshape(groups, n_detectors // groups, n_rows, n_outputs)
    # R products per read instead of one: on a matrix unit they are faster than gathering the row.
    every = jnp.einsum("ngo,gpro->gpnr", dy, tables, precision="highest")
    return every.reshape(n_detectors, n, n_rows)


def _hits(weights: jax.Array, index: jax.Array) -> jax.Array:
    """Return a mask for the row of each read: ``[T, n]`` -> ``[T, n, R]``."""
    # A comparison fuses into its consumer; a scattered one-hot matrix would be stored.
    return index[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, (*index.shape, weights.shape[1]), 2
    )


def _one_hot(weights: jax.Array, index: jax.Array) -> jax.Array:
    return _hits(weights, index).astype(jnp.bfloat16)


def _weighted_hits(weights: jax.Array, ways: Sequence[Way]) -> jax.Array:
    """Sum the coefficients per row and read over ways: ``[T, n, R]``."""
    total: Any = 0
    for index, coefficient in ways:
        assert coefficient is not None
        # Ways may address the same row; their coefficients then add up, as the reads would.
        total += jnp.where(_hits(weights, index), coefficient.astype(jnp.float32)[..., None], 0)
    return total


def _multiply(equation: str, one_hot: jax.Array, values: jax.Array, axis: int) -> jax.Array:
    """Sum a product over the `terms` of values, ``s`` in the equation."""
    # One product for all terms reads the one-hot matrix once.
    xs = jnp.stack(terms(values))
    return jnp.sum(jnp.einsum(equation, one_hot, xs, preferred_element_type=jnp.float32), axis)

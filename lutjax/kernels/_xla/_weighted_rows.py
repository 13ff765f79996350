"""Weighted sums of rows in ways and groups, their products with cotangents, and weighted additions to rows.

Arrays are detector-major: row ids and coefficients ``[T, n]`` of each way. The tables at one place of every group are visited together,
one place after the other.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.kernels._xla._row_gathers import add, clamped, in_sequence, read
from lutjax.kernels.registry import Device

Way = tuple[jax.Array, jax.Array]
"""Row ids and coefficients, ``[T, n]``."""

_UNROLLED = 16  # gathers in one step of a loop


def sum_rows(
    weights: jax.Array, ways: Sequence[Way], groups: int, device: Device, accumulate: FixedPoint | None
) -> jax.Array:
    """Return the sum over tables and ways of ``coefficient * row``, ``[n, G, O]``, of addends.

    There is at least one way. Coefficients that are integers are multiplied and summed as such.
    """
    in_integers = jnp.issubdtype(ways[0][1].dtype, jnp.integer)
    dtype = jnp.dtype(jnp.int32) if in_integers else accumulator(weights.dtype)
    sum_dtype = dtype if in_integers else addend_dtype(dtype, accumulate)
    each = weights.shape[0] // groups

    def step(y: jax.Array, of: tuple[jax.Array, list[Way]]) -> tuple[jax.Array, None]:
        p, ways = of
        for index, coefficient in ways:
            row, c = (
                read(weights, _tables(groups, each, p), index).astype(dtype),
                coefficient.astype(dtype)[..., None],
            )
            weighted = jnp.where(c == 0, 0, c * row)
            y += weighted if in_integers else addends(weighted, accumulate)
        return y, None

    xs = _places(each), [(_by_place(clamped(weights, i), groups), _by_place(c, groups)) for i, c in ways]
    y = zeros_varying(ways[0][1], (groups, ways[0][0].shape[1], weights.shape[2]), sum_dtype)
    y, _ = jax.lax.scan(step, y, xs, unroll=_unrolled(each, max(_UNROLLED // len(ways), 1)))
    return y.transpose(1, 0, 2)


def products(
    weights: jax.Array,
    index: Sequence[jax.Array],
    dy: jax.Array,
    groups: int,
    device: Device,
    accumulate: FixedPoint | None,
) -> list[jax.Array]:
    """Return ``<dy, row>`` of each way, ``[T, n]``s, for ``dy [n, G, O]``."""
    dtype, sum_dtype = accumulator(weights.dtype), addend_dtype(weights.dtype, accumulate)
    dy = dy.astype(dtype)
    by_group, by_output = dy.transpose(1, 0, 2), dy.transpose(2, 1, 0)
    each, n_outputs = weights.shape[0] // groups, weights.shape[2]

    def one(_: None, of: tuple[jax.Array, list[jax.Array]]) -> tuple[None, list[jax.Array]]:
        p, rows = of
        t, found = _tables(groups, each, p), []
        for r in rows:
            if in_sequence(device):
                # Written out: the compiler keeps the sum in registers.
                total = zeros_varying(by_output, r.shape, sum_dtype)
                for o in range(n_outputs):
                    total += addends(read(weights, t, r, o).astype(dtype) * by_output[o], accumulate)
            else:
                total = jnp.sum(
                    addends(read(weights, t, r).astype(dtype) * by_group, accumulate), -1, dtype=sum_dtype
                )
            found.append(result(total, dtype, accumulate))
        return None, found

    xs = _places(each), [_by_place(clamped(weights, i), groups) for i in index]
    _, found = jax.lax.scan(one, None, xs)
    return [f.transpose(1, 0, 2).reshape(weights.shape[0], -1) for f in found]


def add_rows(
    total: jax.Array,
    ways: Sequence[Way],
    dy: jax.Array,
    groups: int,
    device: Device,
    accumulate: FixedPoint | None,
) -> jax.Array:
    """Return tables of sums plus the addends of ``coefficient * dy`` at every row that was read."""
    dtype = accumulator(dy.dtype)
    by_group = dy.astype(dtype).transpose(1, 0, 2)
    each = total.shape[0] // groups

    def step(total: jax.Array, of: tuple[jax.Array, list[Way]]) -> tuple[jax.Array, None]:
        p, ways = of
        for index, coefficient in ways:
            c = coefficient.astype(dtype)[..., None]
            weighted = addends(jnp.where(c == 0, 0, c * by_group), accumulate)
            total = add(total, (_tables(groups, each, p), index), weighted.astype(total.dtype))
        return total, None

    xs = _places(each), [(_by_place(clamped(total, i), groups), _by_place(c, groups)) for i, c in ways]
    return jax.lax.scan(step, total, xs)[0]


def _unrolled(steps: int, most: int) -> int:
    """Return how many steps a loop makes at a time: it stays a loop, without steps that are left over.

    Outside of a loop the compiler fuses coefficients into the sum, and computes them again for every output.
    """
    return max((n for n in range(1, most + 1) if steps % n == 0 and n < steps), default=1)


def _places(each: int) -> jax.Array:
    return jnp.arange(each, dtype=jnp.int32)


def _tables(groups: int, each: int, place: jax.Array) -> jax.Array:
    """The tables at one place of every group, ``[G, 1]``."""
    return (jnp.arange(groups, dtype=jnp.int32) * each + place)[:, None]


def _by_place(a: jax.Array, groups: int) -> jax.Array:
    """``[T, n]`` -> ``[T / G, G, n]``."""
    return a.reshape(groups, a.shape[0] // groups, -1).transpose(1, 0, 2)

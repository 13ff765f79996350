"""Int8 tables with a power-of-two scale for each group and output."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Int, Int8

from lutjax import _meshes
from lutjax._typing import Array
from lutjax.values._dtypes import accumulator

_BITS = 8
_TINY = 1e-30

UNKNOWN = 2**20  # exponent of a NaN scale, for tables with a non-finite entry

BEYOND_SCALES = UNKNOWN // 2
"""Exclusive bound on the magnitude of finite exponents, including shifted ones."""

SHIFT = 6
"""The least coefficient of an integer read is ``2**-SHIFT``; all coefficients are multiples."""

HIGHEST = 4  # the largest coefficient of an integer read is ``2**HIGHEST``
MOST_UNITS = 2 ** (HIGHEST + SHIFT)  # the largest coefficient in units of the least coefficient

MOST_ADDENDS = 2 ** (31 - (_BITS - 1) - HIGHEST - SHIFT) - 1
"""Number of entry-coefficient products whose sum always fits int32."""

_LOW = 16  # bits of the lower part of a two-part sum


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTables:
    """Quantized tables: entry ``values[t, r]`` has the value ``values[t, r] * 2.0**exponents[g]``.

    Attributes:
      values: int8 ``[T, R, O]``.
      exponents: int32 ``[G, O]``, for the group ``g`` of each table.
    """

    values: Int8[Array, "detectors rows outputs"]
    exponents: Int[Array, "groups outputs"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tables."""
        return self.values.shape


def _unflatten(_: None, children: Iterable[Any]) -> QuantizedTables:
    # Transformations put placeholders in the fields, so no constructor may inspect them.
    tables = object.__new__(QuantizedTables)
    tables.__dict__.update(zip(("values", "exponents"), children, strict=True))
    return tables


jax.tree_util.register_pytree_with_keys(
    QuantizedTables,
    lambda t: (
        (
            (jax.tree_util.GetAttrKey("values"), t.values),
            (jax.tree_util.GetAttrKey("exponents"), t.exponents),
        ),
        None,
    ),
    _unflatten,
    lambda t: ((t.values, t.exponents), None),
)


def exponents(weights: jax.Array, groups: int) -> jax.Array:
    """Return the least exponents that fit each group into int8, int32 ``[G, O]``, without gradient.

    A group's largest entry is clamped if it is a power of two, which does not fit.
    """

    def least_exponent(weights: jax.Array) -> jax.Array:
        most = jnp.max(jnp.abs(in_groups(weights, groups)), axis=1, initial=0)
        # most = f * 2**e with 0.5 <= f < 1: exactly ceil(log2(most)), except e - 1 for powers of
        # two. A logarithm would be rounded. _TINY gives a group of zeros a finite exponent.
        f, e = jnp.frexp(jnp.maximum(most.astype(accumulator(weights.dtype)), _TINY))
        known = jnp.where(f == 0.5, e - 1, e) - (_BITS - 1)
        return jnp.where(jnp.isfinite(most), known, UNKNOWN).astype(jnp.int32)

    of_all = _meshes.shard_by_compiler(least_exponent, lambda _: PartitionSpec())
    result: jax.Array = of_all(jax.lax.stop_gradient(weights))
    return result


def in_groups(weights: jax.Array, groups: int) -> jax.Array:
    """Return all table rows by group, ``[T, R, O]`` -> ``[G, T / G * R, O]``."""
    n_tables, n_rows, n_outputs = weights.shape
    return weights.reshape(groups, n_tables // groups * n_rows, n_outputs)


def power(exponents: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return ``2.0**exponents`` exactly, so products are not rounded. It is NaN for `UNKNOWN`."""
    known = jnp.ldexp(jnp.ones((), dtype), exponents)
    return jnp.where(jnp.abs(exponents) < BEYOND_SCALES, known, jnp.nan)


def round_to_scale(weights: jax.Array, exponents: jax.Array) -> jax.Array:
    """Return tables in units of their scale: int8-range integers in the accumulator dtype."""
    weights = weights.astype(accumulator(weights.dtype))
    scaled = in_groups(weights, exponents.shape[0]) * power(-exponents[:, None], weights.dtype)
    half = 2 ** (_BITS - 1)
    # Ties round up, as in the circuits: `jnp.round` would round them to even.
    return jnp.clip(jnp.floor(scaled + 0.5), -half, half - 1).reshape(weights.shape)


# --------------------------------------------------------------------------------- sums of integers
def in_units(coefficient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a coefficient in units of the least coefficient, and a mask of invalid coefficients.

    The first array is int32 and 0 where the coefficient is invalid, such as NaN.
    """
    units = coefficient * 2**SHIFT
    wrong = ~((jnp.abs(units) <= MOST_UNITS) & (units == jnp.floor(units)))
    return jnp.where(wrong, 0, units).astype(jnp.int32), wrong


def fits_int32(addends: int) -> bool:
    """Return True if int32 holds every sum of so many products of an entry and a coefficient."""
    return addends <= MOST_ADDENDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WideSum:
    """Exact sum beyond the int32 range, ``high * 2**16 + low`` with ``0 <= low < 2**16``.

    Both parts are int32. ``+`` adds to the sum without rounding.
    """

    high: jax.Array
    low: jax.Array

    @classmethod
    def from_parts(cls, parts: jax.Array) -> "WideSum":
        """Return the sum over the first axis of int32 ``[parts, ...]``, for < ``2**15`` parts."""
        return cls._carry(
            jnp.sum(parts >> _LOW, 0, dtype=jnp.int32), jnp.sum(parts & _MASK, 0, dtype=jnp.int32)
        )

    @classmethod
    def _carry(cls, high: jax.Array, low: jax.Array) -> "WideSum":
        # An arithmetic shift rounds down, so the low part is in [0, 2**16) for negative sums too.
        return cls(high + (low >> _LOW), low & _MASK)

    def __add__(self, addend: jax.Array) -> "WideSum":
        return self._carry(self.high + (addend >> _LOW), self.low + (addend & _MASK))

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return the sum as a floating-point number, rounded once."""
        # Both parts are exact in float32 if `high` is below 2**24, so only the sum is rounded.
        return self.high.astype(dtype) * 2**_LOW + self.low.astype(dtype)


_MASK = 2**_LOW - 1

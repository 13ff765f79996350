"""Tables of int8 with a power of two as scale for each group and output."""

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

UNKNOWN = 2**20
"""Exponent of a scale that is not a number, as an entry is none."""

BEYOND_SCALES = UNKNOWN // 2
"""Exponents of scales that are numbers are smaller in magnitude, also where a shift was added."""

SHIFT = 6
"""The least coefficient of an integer read is ``2**-SHIFT``, of which all are multiples."""

HIGHEST = 4
"""The largest coefficient of an integer read is ``2**HIGHEST``."""

MOST_UNITS = 2 ** (HIGHEST + SHIFT)
"""The largest coefficient in units of the least one."""

MOST_ADDENDS = 2 ** (31 - (_BITS - 1) - HIGHEST - SHIFT) - 1
"""Products of an entry and a coefficient whose sum int32 holds, whatever they are."""

_LOW = 16  # bits of the lower part of a sum in two parts


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTables:
    """Tables of integers: row ``values[t, r]`` stands for ``values[t, r] * 2.0**exponents[g]`` in group ``g``.

    Attributes:
      values: int8 ``[T, R, O]``.
      exponents: int32 ``[G, O]``.
    """

    values: Int8[Array, "detectors rows outputs"]
    exponents: Int[Array, "groups outputs"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tables."""
        return self.values.shape


def _unflatten(_: None, children: Iterable[Any]) -> QuantizedTables:
    # Transformations put placeholders where the arrays are, so no constructor may look at them.
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
    """Return the least exponents with which the tables of each group fit int8, int32 ``[G, O]``; without a gradient.

    A largest entry that is a power of two does not fit: it is clamped.
    """

    def least(weights: jax.Array) -> jax.Array:
        most = jnp.max(jnp.abs(in_groups(weights, groups)), axis=1, initial=0)
        # most = f * 2**e with 0.5 <= f < 1: exactly ceil(log2(most)), but for powers of two, where it is e - 1.
        f, e = jnp.frexp(jnp.maximum(most.astype(accumulator(weights.dtype)), _TINY))
        known = jnp.where(f == 0.5, e - 1, e) - (_BITS - 1)
        return jnp.where(jnp.isfinite(most), known, UNKNOWN).astype(jnp.int32)

    of_all = _meshes.divided_by_compiler(least, lambda _: PartitionSpec())
    result: jax.Array = of_all(jax.lax.stop_gradient(weights))
    return result


def in_groups(weights: jax.Array, groups: int) -> jax.Array:
    """Return the rows of all tables of each group, ``[T, R, O]`` -> ``[G, T / G * R, O]``."""
    n_tables, n_rows, n_outputs = weights.shape
    return weights.reshape(groups, n_tables // groups * n_rows, n_outputs)


def power(exponents: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return ``2.0**exponents``, exactly: products with it round nothing. It is NaN where an entry of the tables is no finite number."""
    known = jnp.ldexp(jnp.ones((), dtype), exponents)
    return jnp.where(jnp.abs(exponents) < BEYOND_SCALES, known, jnp.nan)


def rounded(weights: jax.Array, exponents: jax.Array) -> jax.Array:
    """Return tables in units of their scale, whole numbers that fit int8, in the accumulator's dtype."""
    weights = weights.astype(accumulator(weights.dtype))
    scaled = in_groups(weights, exponents.shape[0]) * power(-exponents[:, None], weights.dtype)
    half = 2 ** (_BITS - 1)
    return jnp.clip(jnp.floor(scaled + 0.5), -half, half - 1).reshape(weights.shape)


# ------------------------------------------------------------------------------------- sums of integers
def in_units(coefficient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a coefficient in units of the least one, int32, and whether it is none that an integer read has, as NaN; it is 0 there."""
    units = coefficient * 2**SHIFT
    wrong = ~((jnp.abs(units) <= MOST_UNITS) & (units == jnp.floor(units)))
    return jnp.where(wrong, 0, units).astype(jnp.int32), wrong


def fits_int32(addends: int) -> bool:
    """Return whether int32 holds every sum of so many entries, each times a coefficient in units."""
    return addends <= MOST_ADDENDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WideSum:
    """A sum of more integers than int32 holds, ``high * 2**16 + low`` with ``0 <= low < 2**16``, both int32.

    It is added to by ``+``, and never rounded.
    """

    high: jax.Array
    low: jax.Array

    @classmethod
    def of(cls, parts: jax.Array) -> "WideSum":
        """Return the sum over the first axis of int32 ``[parts, ...]``, of which there are fewer than ``2**15``."""
        return cls._carried(
            jnp.sum(parts >> _LOW, 0, dtype=jnp.int32), jnp.sum(parts & _MASK, 0, dtype=jnp.int32)
        )

    @classmethod
    def _carried(cls, high: jax.Array, low: jax.Array) -> "WideSum":
        return cls(high + (low >> _LOW), low & _MASK)

    def __add__(self, addend: jax.Array) -> "WideSum":
        return self._carried(self.high + (addend >> _LOW), self.low + (addend & _MASK))

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return the sum as a floating-point number, rounded once."""
        return self.high.astype(dtype) * 2**_LOW + self.low.astype(dtype)


_MASK = 2**_LOW - 1

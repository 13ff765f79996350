"""Integer (fixed-point) accumulation in place of floating-point sums, independent of order."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from lutjax.values._dtypes import accumulator

_LARGEST = 2**31 - 1
_FLOAT32 = np.finfo(np.float32)
_LEAST_FLOAT32, _LARGEST_FLOAT32 = float(_FLOAT32.tiny), float(_FLOAT32.max)


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Accumulation in int32: sums are bit-identical in any order.

    Passed to an op as ``accumulate``. An addend ``v`` counts as the integer ``trunc(v * scale)``
    and a result is ``sum / scale``, in the forward and in the backward pass, for any order of
    samples, detectors and mesh devices. Inputs, tables, outputs and cotangents stay floating point.

    Definition, for a sum over the first axis of ``values``::

        addends = np.trunc(values * scale).astype(np.int32)
        y = addends.sum(axis=0, dtype=np.int32) / scale

    Addends are the table values that are read, the cotangents that rows and inputs receive, and the
    products of an inner product. ``v * scale`` is computed in float32, or in float64 for float64
    values.

    - Choose a scale that all sums fit: beyond `range` they wrap to wrong numbers. `for_bound`
      chooses a scale and `check` validates it. With ``checked=True`` wrapped results are NaN. A
      single addend beyond the range saturates.
    - Parts of an addend below `resolution` are lost. A NaN counts as 0 and is invisible in
      unchecked results.
    - Prefer powers of two: they scale without rounding. With other scales a result is still the
      same in any order, but a compiler may fold the constant differently into two programs.
    - Scores of `lutjax.scored_lut` are floats that are converted to addends. Pure JAX computes them
      with the same bits in every program.
    - Sums outside the op are floating-point sums: terms of ``grad`` of a ``vmap`` over the batch,
      loop steps, partial outputs that you `psum` over detectors in a `shard_map`, and replicated
      values in a `shard_map` with ``check_vma=False``. They are exact, hence the same in any order,
      while ``|sum| * scale < 2**24`` (``2**53`` in float64) and the scale is a power of two.
    - Sharding the *outputs* of a table splits inner products: the result is the same in any device
      order, but differs from the result on one device.

    Attributes:
      scale: integers per unit, a finite number > 0.
      checked: also compute every sum in floating point, and return NaN for a result that differs
        from it by more than ``2**22 / scale``: it wrapped, an addend saturated or was NaN, or so
        many addends (millions) lost their parts below the resolution. Takes twice the time; results
        that fit are bit-identical to unchecked ones. `jax_debug_nans` then raises at the op.

    Raises:
      ValueError: the scale is not a finite number > 0, or beyond the float32 range.

    Source: docs/semantics.md, section 7.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> weights = jnp.array([[[1.0], [0.7]]])
      >>> lutjax.lookup(weights, d, accumulate=lutjax.FixedPoint(8))
      Array([0.625], dtype=float32)
      >>> lutjax.lookup(weights, d, accumulate=lutjax.FixedPoint(2.0**32, checked=True))
      Array([nan], dtype=float32)
    """

    scale: float | int
    checked: bool = False

    def __post_init__(self) -> None:
        scale = self.scale
        if not _is_number(scale) or not _LEAST_FLOAT32 <= scale <= _LARGEST_FLOAT32:
            raise ValueError(
                f"FixedPoint: scale is {scale!r}; expected a finite number > 0, "
                "in the range of float32."
            )
        object.__setattr__(self, "scale", float(scale))

    def __repr__(self) -> str:
        return f"FixedPoint(scale={self.scale}{', checked=True' if self.checked else ''})"

    @property
    def resolution(self) -> float:
        """Smallest representable magnitude, ``1 / scale``."""
        return 1 / self.scale

    @property
    def range(self) -> float:
        """Exclusive upper bound for the magnitude of sums, ``2**31 / scale``."""
        return 2**31 / self.scale

    @classmethod
    def for_bound(
        cls, bound: float | int, *, terms: int = 1, resolution: float | int | None = None
    ) -> "FixedPoint":
        """Return the largest power-of-two scale that fits the given number of addends.

        Args:
          bound: largest magnitude of an addend, > 0.
          terms: largest number of addends in one sum.
          resolution: coarsest acceptable resolution. Default: any.

        Raises:
          ValueError: invalid arguments, or no scale has both the range and the resolution.

        Example:
          >>> import lutjax
          >>> lutjax.FixedPoint.for_bound(1.0, terms=1000)
          FixedPoint(scale=2097152.0)
        """
        total = _total_bound("FixedPoint.for_bound", bound, terms)
        exponent = math.frexp(_LARGEST / float(total))[1]
        # `frexp` gets a rounded quotient. Fractions are exact, so the bound holds for every sum.
        while total * Fraction(2) ** exponent > _LARGEST:
            exponent -= 1
        scale = 2.0 ** min(exponent, 127)
        if resolution is not None:
            if not _is_number(resolution) or not 0 < resolution < math.inf:
                raise ValueError(
                    f"FixedPoint.for_bound: resolution is {resolution!r}; "
                    "expected a finite number > 0."
                )
            if 1 / scale > resolution:
                raise ValueError(
                    f"FixedPoint.for_bound: resolution is {resolution:g}, "
                    f"but sums of {terms} addends up to {bound:g} fit int32 at a resolution "
                    f"of {1 / scale:g} only; accept that one, or smaller sums."
                )
        return cls(scale)

    def check(self, bound: float | int, terms: int = 1) -> None:
        """Raise if `terms` addends with this magnitude overflow, or are below the resolution.

        Args:
          bound: largest magnitude of an addend.
          terms: largest number of addends in one sum.

        Raises:
          ValueError: the sum is beyond `range`, `bound` is below `resolution`, or arguments are
            invalid.

        Example:
          >>> import lutjax
          >>> lutjax.FixedPoint(2.0**20).check(1.0, terms=1000)
        """
        total, scale = _total_bound("FixedPoint.check", bound, terms), Fraction(self.scale)
        if total * scale > _LARGEST:
            raise ValueError(
                f"FixedPoint.check: {terms} addends up to {bound:g} sum to {float(total):g}, "
                f"beyond the range {self.range:g} of {self}; "
                f"FixedPoint.for_bound({bound:g}, terms={terms}) has a scale that fits."
            )
        if bound * scale < 1:
            raise ValueError(
                f"FixedPoint.check: bound is {bound:g}, below the resolution {self.resolution:g} "
                f"of {self}; every addend would count as 0. Use a larger scale."
            )

    def quantize(self, values: jax.Array) -> jax.Array:
        """Return values as int32 addends; large values saturate, NaN becomes 0."""
        values = values.astype(accumulator(values.dtype)) * self.scale
        # Devices convert out-of-range values differently, so clip to the largest float below
        # 2**31: 2**31 - 1 itself is no float32 and would round up to 2**31.
        limit = np.nextafter(values.dtype.type(2**31), values.dtype.type(0))
        return jnp.where(jnp.isnan(values), 0, jnp.clip(values, -limit, limit)).astype(jnp.int32)

    def total(self, addends: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return a sum of int32 addends as a floating-point number."""
        # Compilers may add two partial sums across devices as floats, before the parts are summed.
        addends = jax.lax.optimization_barrier(addends)
        return (addends.astype(accumulator(dtype)) / self.scale).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Totals(FixedPoint):
    """Accumulation with int32 results, for kernels whose outputs are first summed over devices."""

    def total(self, addends: jax.Array, dtype: DTypeLike) -> jax.Array:
        return addends


# -------------------------------------------------------------------------------------- for kernels
def addends(values: jax.Array, accumulate: FixedPoint | None) -> jax.Array:
    """Return values in their addend dtype: integers, or floats with at least 32 bits."""
    if accumulate is None:
        return values.astype(accumulator(values.dtype))
    return accumulate.quantize(values)


def addend_dtype(dtype: DTypeLike, accumulate: FixedPoint | None) -> np.dtype:
    """Return the dtype of `addends` for values of this dtype."""
    return accumulator(dtype) if accumulate is None else jnp.dtype(jnp.int32)


def result(total: jax.Array, dtype: DTypeLike, accumulate: FixedPoint | None) -> jax.Array:
    """Return a sum of `addends` in the given dtype."""
    return total.astype(dtype) if accumulate is None else accumulate.total(total, dtype)


# ------------------------------------------------------------------------------------------ for ops
# An overflow moves a sum by a multiple of 2**32 units. Rounding and the truncation of addends move
# it by less than this many units.
_MOST_APART = 2**22


def nan_where_apart(fixed: jax.Array, floating: jax.Array, accumulate: FixedPoint) -> jax.Array:
    """Return fixed-point sums, with NaN where they differ from the floating-point sums."""
    dtype = accumulator(fixed.dtype)
    apart = jnp.abs(fixed.astype(dtype) - floating.astype(dtype))
    # `apart` may be NaN, for which the comparison is False: the result is then NaN as well.
    return jnp.where(apart <= _MOST_APART / accumulate.scale, fixed, jnp.nan)


# ------------------------------------------------------------------------------------------- checks
def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _total_bound(where: str, bound: Any, terms: Any) -> Fraction:
    if not _is_number(bound) or not _LEAST_FLOAT32 <= bound <= _LARGEST_FLOAT32:
        raise ValueError(
            f"{where}: bound is {bound!r}; expected a finite number > 0, in the range of float32."
        )
    if not isinstance(terms, int | np.integer) or isinstance(terms, bool) or terms < 1:
        raise ValueError(f"{where}: terms is {terms!r}; expected a whole number of at least 1.")
    return Fraction(float(bound)) * int(terms)

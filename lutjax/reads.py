"""Reads of look-up tables: how the margins of a detector become rows and their coefficients.

A read is a frozen dataclass of pure functions. `lutjax.scored_lut` takes one, and a read of your own is a subclass of `Read`
with two methods: see its example. The formulas are in docs/semantics.md, section 12.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.values._derivatives import with_derivative_of
from lutjax.values._detection import is_above_zero
from lutjax.values._fixed_point import FixedPoint, addends, result
from lutjax.values._quantized import HIGHEST, SHIFT
from lutjax.values._reproducible import reproducible

__all__ = [
    "Blend",
    "Confidence",
    "Hard",
    "PowersOfTwo",
    "Read",
    "SoftSign",
    "absolute",
    "address",
    "straight_through",
]

Scalars = Mapping[str, Any]
Way = tuple[jax.Array, jax.Array]
"""Row ids and coefficients of one way to read, of one shape."""

_HALF = math.log(0.5)


class Read(abc.ABC):
    """Base of reads: rows of a table and their coefficients, as elementwise functions of the margins.

    Example:
      >>> import dataclasses, jax.numpy as jnp, lutjax
      >>> from lutjax import reads
      >>> @dataclasses.dataclass(frozen=True)
      ... class Closest(reads.Read):
      ...     '''One row, weighted by the smallest distance times a learned factor.'''
      ...
      ...     def initial(self):
      ...         return {"log_scale": jnp.float32(0)}
      ...
      ...     def select(self, u, scalars):
      ...         index, flip, closest = reads.address(u)
      ...         return [(index, closest * jnp.exp(scalars["log_scale"]))]
      >>> x, anchors = jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]])
      >>> read, weights = Closest(), jnp.array([[[1.0], [8.0]]])
      >>> lutjax.scored_lut(x, weights, anchors, read.initial(), read=read)
      Array([2.], dtype=float32)
    """

    @abc.abstractmethod
    def initial(self) -> dict[str, jax.Array]:
        """Return the initial values of the learned scalars, float32, by name; none: an empty dictionary."""

    @abc.abstractmethod
    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        """Return for each way to read a table the row ids, int32, and its coefficients.

        Elementwise, so that kernels may call it in any layout, and differentiable: the gradient of the coefficients is the
        gradient of the read.

        Args:
          u: the margins of the ``C >= 1`` comparisons, arrays of one shape.
          scalars: those of `initial`, arrays that broadcast against a margin.
        """

    @property
    def valued(self) -> int | None:
        """Number of first ways whose coefficients may differ from 0; the others have gradients only. None: all."""
        return None

    @property
    def rounds_tables(self) -> bool:
        """True where tables are rounded to int8 as they are read; see `lutjax.quantize_tables`."""
        return False

    def __call__(
        self,
        u: Float[Array, "*batch comparisons"],
        scalars: Scalars,
        *,
        accumulate: FixedPoint | None = None,
    ) -> tuple[Int[jax.Array, "*batch ways"], Float[jax.Array, "*batch ways"]]:
        """Return row ids and coefficients of all ways, for `lutjax.weighted_lookup`.

        Args:
          u: ``[..., C]``, from `lutjax.margins`.
          scalars: as `initial` returns them.
          accumulate: that of the look-up. With it coefficients and gradients are the same bits in every program, as sums in fixed point
            are; see `lutjax.FixedPoint`.

        Returns:
          int32 and floats ``[..., K]``.

        Example:
          >>> import jax.numpy as jnp, lutjax
          >>> index, coefficients = lutjax.reads.Blend()(jnp.array([[1.0, -3.0]]), {})
          >>> index, coefficients
          (Array([[1, 0]], dtype=int32), Array([[0.75, 0.25]], dtype=float32))
        """
        u = jnp.asarray(u)
        scalars = {name: jnp.asarray(value, u.dtype) for name, value in scalars.items()}
        margins = [u[..., c] for c in range(u.shape[-1])]
        if accumulate is None:
            ways = self.select(margins, scalars)
        else:
            ways = list(zip(*_select_reproducibly(self, accumulate, margins, scalars), strict=True))
        return jnp.stack([index for index, _ in ways], -1), jnp.stack([c for _, c in ways], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _select_reproducibly(
    read: Read, accumulate: FixedPoint, u: list[jax.Array], scalars: dict[str, jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return ids and coefficients of the ways of a read, the same in every program."""
    index, coefficients = reproducible(functools.partial(_selected, read))(u, scalars)
    return index, coefficients


def _selected(read: Read, u: Any, scalars: Any) -> Any:
    ways = read.select(u, scalars)
    return [index for index, _ in ways], [c for _, c in ways]


def _selected_forward(read: Read, accumulate: FixedPoint, u: Any, scalars: Any) -> Any:
    return _select_reproducibly(read, accumulate, u, scalars), (u, scalars)


def _selected_backward(read: Read, accumulate: FixedPoint, saved: Any, cotangents: Any) -> Any:
    u, scalars = saved

    def pulled(u: Any, each: Any, of_coefficients: Any) -> Any:
        return jax.vjp(lambda u, each: _selected(read, u, each)[1], u, each)[1](of_coefficients)

    each = {name: jnp.broadcast_to(s, u[0].shape) for name, s in scalars.items()}
    du, of_each = reproducible(pulled)(u, each, cotangents[1])

    def of_scalar(name: str) -> jax.Array:
        s, found = scalars[name], addends(of_each[name], accumulate)
        axes = tuple(range(found.ndim - s.ndim))
        axes += tuple(i for i in range(found.ndim) if i not in axes and s.shape[i - len(axes)] == 1)
        return result(jnp.sum(found, axes, dtype=found.dtype).reshape(s.shape), s.dtype, accumulate)

    return du, {name: of_scalar(name) for name in scalars}


_select_reproducibly.defvjp(_selected_forward, _selected_backward)


# ------------------------------------------------------------------------------------- parts of reads
def absolute(u: jax.Array) -> jax.Array:
    """Return ``|u|``, whose slope at 0 is -1: that of the side which the bit says.

    Example:
      >>> import jax, lutjax
      >>> jax.grad(lutjax.reads.absolute)(0.0)
      Array(-1., dtype=float32, weak_type=True)
    """
    u = jnp.asarray(u)
    return straight_through(jnp.abs(u), jnp.where(is_above_zero(u), u, -u))


def straight_through(value: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return `value`, with the gradient of `gradient`.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> jax.value_and_grad(lambda x: lutjax.reads.straight_through(jnp.round(x), 3 * x))(1.2)
      (Array(1., dtype=float32, weak_type=True), Array(3., dtype=float32, weak_type=True))
    """
    value, gradient = jnp.broadcast_arrays(value, gradient)
    if value.dtype != gradient.dtype:
        dtype = jnp.result_type(value, gradient)
        value, gradient = value.astype(dtype), gradient.astype(dtype)
    return with_derivative_of(value, gradient)


def address(u: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the row of margins, the bit of the closest comparison, and its distance.

    Bit ``j`` of the row is ``u[j] > 0``. The closest comparison is the first with the smallest ``|u[j]|``; NaN counts as smallest.

    Args:
      u: margins of the comparisons, arrays of one shape.

    Returns:
      int32, int32, and the distance, at least 0 or NaN.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> index, flip, closest = lutjax.reads.address([jnp.float32(2.0), jnp.float32(-0.5)])
      >>> int(index), int(flip), float(closest)
      (1, 2, 0.5)
    """
    index = is_above_zero(u[0]).astype(jnp.int32)
    flip, closest = jnp.ones_like(index), absolute(u[0])
    for j, margin in enumerate(u[1:], 1):
        index |= is_above_zero(margin).astype(jnp.int32) << j
        distance = absolute(margin)
        closer = (distance < closest) | (jnp.isnan(distance) & ~jnp.isnan(closest))
        closest = jnp.where(closer, distance, closest)
        flip = jnp.where(closer, jnp.int32(1 << j), flip)
    return index, flip, closest


def _blended(index: jax.Array, flip: jax.Array, share: jax.Array, hard: bool) -> list[Way]:
    """Return the row and its neighbor, which has a share; `hard`: a share of the gradient alone."""
    main = 1 - share
    if hard:
        # A distance that is NaN is seen in the output.
        one = jnp.where(jnp.isnan(share), share, jnp.ones_like(share))
        main, share = straight_through(one, main), straight_through(jnp.zeros_like(share), share)
    return [(index, main), (index ^ flip, share)]


# ------------------------------------------------------------------------------------- reads
@dataclasses.dataclass(frozen=True)
class Hard(Read):
    """The read of `lutjax.lookup`: one row; the gradient is that of `Blend`.

    Definition for the margins ``u`` of one detector; the gradient of `coefficients` is the gradient of `smooth`::

        distances = np.where(u > 0, u, -u)
        closest = np.abs(u).argmin()  # the first; NaN is the smallest
        row = ((u > 0) << np.arange(len(u))).sum()
        share = 0.5 / (1 + distances[closest])
        index = np.array([row, row ^ 1 << closest])
        coefficients, smooth = np.array([1.0, 0.0]), np.array([1 - share, share])

    Example:
      >>> import lutjax
      >>> lutjax.reads.Hard().initial()
      {}
    """

    def initial(self) -> dict[str, jax.Array]:
        return {}

    @property
    def valued(self) -> int:
        return 1

    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        index, flip, closest = address(u)
        return _blended(index, flip, 0.5 / (1 + closest), hard=True)


@dataclasses.dataclass(frozen=True)
class Blend(Read):
    """A fixed blend of the row and its nearest neighbor: a share of ``0.5 / (1 + m)``, with the smallest distance ``m``.

    Definition for the margins ``u`` of one detector::

        distances = np.where(u > 0, u, -u)
        closest = np.abs(u).argmin()  # the first; NaN is the smallest
        row = ((u > 0) << np.arange(len(u))).sum()
        share = 0.5 / (1 + distances[closest])
        index = np.array([row, row ^ 1 << closest])
        coefficients = np.array([1 - share, share])
    """

    def initial(self) -> dict[str, jax.Array]:
        return {}

    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        index, flip, closest = address(u)
        return _blended(index, flip, 0.5 / (1 + closest), hard=False)


@dataclasses.dataclass(frozen=True)
class SoftSign(Read):
    """A learned blend of the row and its nearest neighbor.

    The neighbor's share is ``sigmoid(-2 rho / T_select)`` with ``rho = m / (T_soft + m)``.

    Definition for the margins ``u`` of one detector; the gradient of `coefficients` is the gradient of `smooth`::

        distances = np.where(u > 0, u, -u)
        closest = np.abs(u).argmin()  # the first; NaN is the smallest
        row = ((u > 0) << np.arange(len(u))).sum()
        rho = distances[closest] / (np.exp(log_soft) + distances[closest])
        share = 1 / (1 + np.exp(2 * rho / np.exp(log_select)))
        index = np.array([row, row ^ 1 << closest])
        smooth = np.array([1 - share, share])
        coefficients = np.array([1.0, 0.0]) if hard else smooth

    Attributes:
      hard: the value is the row alone, the gradient that of the blend.
    """

    hard: bool = False

    def initial(self) -> dict[str, jax.Array]:
        return {"log_soft": jnp.float32(_HALF), "log_select": jnp.float32(_HALF)}

    @property
    def valued(self) -> int | None:
        return 1 if self.hard else None

    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        index, flip, closest = address(u)
        rho = _softsign(closest, jnp.exp(scalars["log_soft"]))
        share = jax.nn.sigmoid(-2 * rho * jnp.exp(-scalars["log_select"]))
        return _blended(index, flip, share, self.hard)


@dataclasses.dataclass(frozen=True)
class Confidence(Read):
    """Rows weighted by a score of how sure the comparisons are.

    The score is ``s = S exp(gamma L)`` with the sum of the distances ``S`` and ``L = sum log sigmoid(beta m)``. One way reads the row
    with coefficient ``s``; two ways share it with the nearest neighbor, whose part is ``sigmoid(-2 m / tau)`` of the smallest
    distance ``m``.

    Definition for the margins ``u`` of one detector::

        distances = np.where(u > 0, u, -u)
        closest = np.abs(u).argmin()  # the first; NaN is the smallest
        row = ((u > 0) << np.arange(len(u))).sum()
        confidence = -np.log(1 + np.exp(-np.exp(log_beta) * distances)).sum()
        score = distances.sum() * np.exp(np.exp(log_gamma) * confidence)
        index, coefficients = np.array([row]), np.array([score])
        if ways == 2:
            part = 1 / (1 + np.exp(2 * distances[closest] / np.exp(log_tau)))
            index, coefficients = np.array([row, row ^ 1 << closest]), score * np.array([1 - part, part])

    Attributes:
      ways: 1 or 2 rows.

    Raises:
      ValueError: another number of ways.
    """

    ways: int = 2

    def __post_init__(self) -> None:
        _check_ways(self)

    def initial(self) -> dict[str, jax.Array]:
        scalars = {"log_beta": jnp.float32(-_HALF), "log_gamma": jnp.float32(0)}
        return scalars | {"log_tau": jnp.float32(_HALF)} if self.ways == 2 else scalars

    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        return _scored(u, scalars, self.ways).ways


class Rounding(NamedTuple):
    """Constants of `PowersOfTwo`, which kernels in other languages are passed.

    Attributes:
      lowest, highest: exponents of the coefficient of a row; of a lower one nothing is read.
      farthest: the largest shift, from the row's coefficient to its neighbor's, of a neighbor that is read.
      negligible: the least shift of a neighbor that leaves the row its whole score. most_shift: the largest there is.
      least_exact: exact coefficients count as at least this where a power of two is divided by them.
      most_ratio: the largest quotient of a power of two and the exact coefficient.
    """

    lowest: int
    highest: int
    farthest: int
    negligible: int
    most_shift: int
    least_exact: float
    most_ratio: float


_FARTHEST = 3  # a neighbor weighs at least an eighth of its row


@dataclasses.dataclass(frozen=True)
class PowersOfTwo(Read):
    """`Confidence` with coefficients that are powers of two, over tables that are rounded to int8.

    The value is that of an integer machine: shifts and additions. A score below about ``2**-3.5`` reads nothing, coefficients end at
    ``2**4``, and a neighbor that weighs less than an eighth of the row is dropped. Gradients are straight-through: of the
    exact coefficient ``E``, times ``F / E`` with the power of two ``F``. That ratio grows as ``1 / E`` where ``E`` is small, and all inputs
    near zero would have gradients without bound; it ends at ``2**8``.

    Definition for the margins ``u`` of one detector. The gradient of `coefficients` is `ratio` times the gradient of `exact`, and
    numbers are rounded half up::

        index, exact = lutjax.reads.Confidence(ways)(u, scalars)
        exponent, shift = np.log2(exact.sum()), 0
        if ways == 2:
            shift = np.clip(np.floor(2 * np.abs(u).min() / np.exp(log_tau) / np.log(2) + 0.5), 0, rounding.most_shift)
            exponent -= np.log2(1 + 2.0**-shift) if shift < rounding.negligible else 0
        exponent = np.floor(exponent + 0.5)
        reads = exponent >= rounding.lowest
        exponent = np.clip(exponent, rounding.lowest, rounding.highest)
        powers = 2.0 ** (exponent - np.array([0, shift]))[:ways]
        coefficients = np.where([reads, reads and shift <= rounding.farthest][:ways], powers, 0)
        ratio = np.minimum(powers / np.maximum(exact, rounding.least_exact), rounding.most_ratio)

    Attributes:
      ways: 1 or 2 rows.
      rounding: the constants of the formulas.

    Raises:
      ValueError: another number of ways.
    """

    ways: int = 2
    rounding: ClassVar[Rounding] = Rounding(
        lowest=_FARTHEST - SHIFT,
        highest=HIGHEST,
        farthest=_FARTHEST,
        negligible=8,
        most_shift=64,
        least_exact=1e-30,
        most_ratio=2.0**8,
    )

    def __post_init__(self) -> None:
        _check_ways(self)

    @property
    def rounds_tables(self) -> bool:
        return True

    def initial(self) -> dict[str, jax.Array]:
        return Confidence(self.ways).initial()

    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        exact, closest, total, power = _scored(u, scalars, self.ways)
        of = self.rounding
        exponent = jnp.log2(total) + power / _LN2
        q = jnp.zeros_like(closest)
        if self.ways == 2:
            q = jnp.clip(_rounded(2 * closest * jnp.exp(-scalars["log_tau"]) / _LN2), 0, of.most_shift)
            exponent -= jnp.where(q < of.negligible, jnp.log2(1 + jnp.exp2(-q)), 0)
        k = _rounded(exponent)
        reads = k >= of.lowest  # not where the score is 0
        k = jnp.clip(jnp.where(reads, k, of.lowest), of.lowest, of.highest).astype(jnp.int32)
        shifts, present = (0, q.astype(jnp.int32)), (reads, reads & (q <= of.farthest))

        def way(row: jax.Array, coefficient: jax.Array, shift: Any, exists: jax.Array) -> Way:
            rounded = jnp.ldexp(jnp.ones_like(coefficient), k - shift)
            ratio = jnp.minimum(rounded / jnp.maximum(coefficient, of.least_exact), of.most_ratio)
            value = jnp.where(exists, rounded, jnp.zeros_like(rounded))
            value = jnp.where(jnp.isnan(coefficient), coefficient, value)
            return row, straight_through(value, coefficient * jax.lax.stop_gradient(ratio))

        return [
            way(row, coefficient, shift, exists)
            for (row, coefficient), shift, exists in zip(exact, shifts, present, strict=False)
        ]


_LN2 = math.log(2.0)


def _check_ways(read: Confidence | PowersOfTwo) -> None:
    if read.ways not in (1, 2):
        raise ValueError(f"{type(read).__name__}: ways is {read.ways!r}; it must be 1 or 2.")


class _Scored(NamedTuple):
    """Ways with the score ``total * exp(power)`` of `Confidence`, and the smallest distance."""

    ways: list[Way]
    closest: jax.Array
    total: jax.Array
    power: jax.Array


def _scored(u: Sequence[jax.Array], scalars: Scalars, ways: int) -> _Scored:
    index, flip, closest = address(u)
    total, logs = _score_terms(u, scalars)
    power = jnp.exp(scalars["log_gamma"]) * logs
    s = total * jnp.exp(power)
    if ways == 1:
        return _Scored([(index, s)], closest, total, power)
    v = jax.nn.sigmoid(-2 * closest * jnp.exp(-scalars["log_tau"]))
    return _Scored([(index, s * (1 - v)), (index ^ flip, s * v)], closest, total, power)


def _score_terms(u: Sequence[jax.Array], scalars: Scalars) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the distances, and that of the logarithms of their sigmoids."""
    distances = [absolute(margin) for margin in u]
    beta = jnp.exp(scalars["log_beta"])
    # One logarithm: -log of the product of all 1 + exp(-beta m), of which 1 is left out to keep its digits.
    product = jnp.zeros_like(distances[0])
    for m in distances:
        power = jnp.exp(-beta * m)
        product += power * (1 + product)
    total = sum(distances[1:], distances[0])
    # A sum without a bound is no score: NaN, and so is the gradient.
    of_finite = jnp.where(jnp.isfinite(total), jnp.ones_like(total), jnp.nan)
    return total * jax.lax.stop_gradient(of_finite), -jnp.log1p(product)


def _softsign(m: jax.Array, soft: jax.Array) -> jax.Array:
    """Return ``m / (soft + m)``, whose derivatives lose no digits where one is much larger than the other."""
    fixed_m, fixed_soft = jax.lax.stop_gradient(m), jax.lax.stop_gradient(soft)
    slopes = fixed_m / (soft + fixed_m) - fixed_soft / (fixed_soft + m)
    return straight_through(m / (soft + m), slopes)


def _rounded(x: jax.Array) -> jax.Array:
    """Half up, without a gradient."""
    return jnp.floor(jax.lax.stop_gradient(x) + 0.5)

"""Table reads: from detector margins to row ids and coefficients.

A read is a frozen dataclass with pure functions, passed to `lutjax.scored_lut`. Custom reads
subclass `Read` and define two methods: see its example. The formulas are in docs/semantics.md,
section 12.
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
from lutjax.values._reproducible import make_reproducible

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
"""Row ids and coefficients for one way, with the same shape."""

_HALF = math.log(0.5)


class Read(abc.ABC):
    """Base class for reads: row ids and coefficients as elementwise functions on margins.

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
        """Return the learned scalars' initial float32 values by name, possibly none."""

    @abc.abstractmethod
    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        """Return int32 row ids and coefficients for each way.

        Elementwise, so kernels may call it in any layout, and differentiable: the coefficients'
        gradient is the read's gradient.

        Args:
          u: margins for ``C >= 1`` comparisons, arrays with the same shape.
          scalars: the scalars from `initial`, broadcastable to a margin.
        """

    @property
    def valued(self) -> int | None:
        """Number of leading ways with values; later ways have only gradients. None: all."""
        return None

    @property
    def rounds_tables(self) -> bool:
        """True if reads round tables to int8; see `lutjax.quantize_tables`."""
        return False

    def __call__(
        self,
        u: Float[Array, "*batch comparisons"],
        scalars: Scalars,
        *,
        accumulate: FixedPoint | None = None,
    ) -> tuple[Int[jax.Array, "*batch ways"], Float[jax.Array, "*batch ways"]]:
        """Return all ways' row ids and coefficients for `lutjax.weighted_lookup`.

        Args:
          u: ``[..., C]``, from `lutjax.margins`.
          scalars: as returned by `initial`.
          accumulate: the lookup's setting. With it coefficients and gradients are bitwise
            reproducible across programs, like fixed-point sums; see `lutjax.FixedPoint`.

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
    """Return all ways' ids and coefficients, bitwise reproducible across programs."""
    index, coefficients = make_reproducible(functools.partial(_select_rows, read))(u, scalars)
    return index, coefficients


def _select_rows(read: Read, u: Any, scalars: Any) -> Any:
    ways = read.select(u, scalars)
    return [index for index, _ in ways], [c for _, c in ways]


def _selected_forward(read: Read, accumulate: FixedPoint, u: Any, scalars: Any) -> Any:
    return _select_reproducibly(read, accumulate, u, scalars), (u, scalars)


def _selected_backward(read: Read, accumulate: FixedPoint, saved: Any, cotangents: Any) -> Any:
    u, scalars = saved

    def pull_back(u: Any, each: Any, of_coefficients: Any) -> Any:
        return jax.vjp(lambda u, each: _select_rows(read, u, each)[1], u, each)[1](of_coefficients)

    each = {name: jnp.broadcast_to(s, u[0].shape) for name, s in scalars.items()}
    du, of_each = make_reproducible(pull_back)(u, each, cotangents[1])

    def scalar_cotangent(name: str) -> jax.Array:
        s, found = scalars[name], addends(of_each[name], accumulate)
        axes = tuple(range(found.ndim - s.ndim))
        axes += tuple(i for i in range(found.ndim) if i not in axes and s.shape[i - len(axes)] == 1)
        return result(jnp.sum(found, axes, dtype=found.dtype).reshape(s.shape), s.dtype, accumulate)

    return du, {name: scalar_cotangent(name) for name in scalars}


_select_reproducibly.defvjp(_selected_forward, _selected_backward)


# ----------------------------------------------------------------------------------- parts of reads
def absolute(u: jax.Array) -> jax.Array:
    """Return ``|u|`` with slope -1 at 0, consistent with bit 0.

    Example:
      >>> import jax, lutjax
      >>> jax.grad(lutjax.reads.absolute)(0.0)
      Array(-1., dtype=float32, weak_type=True)
    """
    u = jnp.asarray(u)
    return straight_through(jnp.abs(u), jnp.where(is_above_zero(u), u, -u))


def straight_through(value: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return `value` with the gradient from `gradient`.

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
    """Return the row addressed by margins, the closest comparison's bit, and its distance.

    Bit ``j`` of the row is ``u[j] > 0``. The closest comparison is the first with the smallest
    ``|u[j]|``; NaN counts as smallest.

    Args:
      u: comparison margins, arrays with the same shape.

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


def _blend_rows(index: jax.Array, flip: jax.Array, share: jax.Array, hard: bool) -> list[Way]:
    """Blend the row with its neighbor. With `hard`, only the gradient is blended."""
    main = 1 - share
    if hard:
        # NaN distances propagate to the output.
        one = jnp.where(jnp.isnan(share), share, jnp.ones_like(share))
        main, share = straight_through(one, main), straight_through(jnp.zeros_like(share), share)
    return [(index, main), (index ^ flip, share)]


# ------------------------------------------------------------------------------------- reads
@dataclasses.dataclass(frozen=True)
class Hard(Read):
    """The read used by `lutjax.lookup`: one row, with the gradient from `Blend`.

    Definition for one detector's margins ``u``. `coefficients` takes the gradient from `smooth`::

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
        return _blend_rows(index, flip, 0.5 / (1 + closest), hard=True)


@dataclasses.dataclass(frozen=True)
class Blend(Read):
    """A fixed blend between the row and its nearest neighbor.

    The neighbor's share is ``0.5 / (1 + m)`` with the smallest distance ``m``.

    Definition for one detector's margins ``u``::

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
        return _blend_rows(index, flip, 0.5 / (1 + closest), hard=False)


@dataclasses.dataclass(frozen=True)
class SoftSign(Read):
    """A learned blend between the row and its nearest neighbor.

    The neighbor's share is ``sigmoid(-2 rho / T_select)`` with ``rho = m / (T_soft + m)``.

    Definition for one detector's margins ``u``. `coefficients` takes the gradient from `smooth`::

        distances = np.where(u > 0, u, -u)
        closest = np.abs(u).argmin()  # the first; NaN is the smallest
        row = ((u > 0) << np.arange(len(u))).sum()
        rho = distances[closest] / (np.exp(log_soft) + distances[closest])
        share = 1 / (1 + np.exp(2 * rho / np.exp(log_select)))
        index = np.array([row, row ^ 1 << closest])
        smooth = np.array([1 - share, share])
        coefficients = np.array([1.0, 0.0]) if hard else smooth

    Attributes:
      hard: return only the row, with the blend's gradient.
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
        return _blend_rows(index, flip, share, self.hard)


@dataclasses.dataclass(frozen=True)
class Confidence(Read):
    """Rows weighted by the comparisons' confidence.

    The score is ``s = S exp(gamma L)`` with the distance sum ``S`` and
    ``L = sum log sigmoid(beta m)``. One way reads the row with coefficient ``s``. Two ways split
    ``s`` with the nearest neighbor, which gets the part ``sigmoid(-2 m / tau)`` for the smallest
    distance ``m``.

    Definition for one detector's margins ``u``::

        distances = np.where(u > 0, u, -u)
        closest = np.abs(u).argmin()  # the first; NaN is the smallest
        row = ((u > 0) << np.arange(len(u))).sum()
        confidence = -np.log(1 + np.exp(-np.exp(log_beta) * distances)).sum()
        score = distances.sum() * np.exp(np.exp(log_gamma) * confidence)
        index, coefficients = np.array([row]), np.array([score])
        if ways == 2:
            part = 1 / (1 + np.exp(2 * distances[closest] / np.exp(log_tau)))
            index = np.array([row, row ^ 1 << closest])
            coefficients = score * np.array([1 - part, part])

    Attributes:
      ways: 1 or 2 rows.

    Raises:
      ValueError: `ways` is neither 1 nor 2.
    """

    ways: int = 2

    def __post_init__(self) -> None:
        _check_ways(self)

    def initial(self) -> dict[str, jax.Array]:
        scalars = {"log_beta": jnp.float32(-_HALF), "log_gamma": jnp.float32(0)}
        return scalars | {"log_tau": jnp.float32(_HALF)} if self.ways == 2 else scalars

    def select(self, u: Sequence[jax.Array], scalars: Scalars) -> list[Way]:
        return _score_rows(u, scalars, self.ways).ways


class Rounding(NamedTuple):
    """`PowersOfTwo` constants, shared with kernels in other languages.

    Attributes:
      lowest, highest: exponent range for row coefficients. Nothing is read below `lowest`.
      farthest: largest shift from the row's coefficient to a neighbor's for reading the neighbor.
      negligible: smallest neighbor shift that leaves the row its whole score. most_shift: maximum
        shift.
      least_exact: lower bound for exact coefficients as divisors.
      most_ratio: upper bound for a power of two divided by the exact coefficient.
    """

    lowest: int
    highest: int
    farthest: int
    negligible: int
    most_shift: int
    least_exact: float
    most_ratio: float


_FARTHEST = 3  # a neighbor weighs at least 1/8 as much as its row


@dataclasses.dataclass(frozen=True)
class PowersOfTwo(Read):
    """`Confidence` with power-of-two coefficients and tables rounded to int8.

    The value matches an integer machine with shifts and additions only. Scores below about
    ``2**-3.5`` read nothing, coefficients are limited to ``2**4``, and neighbors below 1/8 of the
    row's weight are dropped. Gradients are straight-through: the exact coefficient ``E``'s gradient
    times ``F / E`` with the power of two ``F``. This ratio grows as ``1 / E`` for small ``E``, so
    gradients near zero inputs would be unbounded; it is limited to ``2**8``.

    Definition for one detector's margins ``u``. The `coefficients` gradient is `ratio` times the
    `exact` gradient, and rounding is half up::

        index, exact = lutjax.reads.Confidence(ways)(u, scalars)
        exponent, shift = np.log2(exact.sum()), 0
        if ways == 2:
            shift = np.floor(2 * np.abs(u).min() / np.exp(log_tau) / np.log(2) + 0.5)
            shift = np.clip(shift, 0, rounding.most_shift)
            exponent -= np.log2(1 + 2.0**-shift) if shift < rounding.negligible else 0
        exponent = np.floor(exponent + 0.5)
        reads = exponent >= rounding.lowest
        exponent = np.clip(exponent, rounding.lowest, rounding.highest)
        powers = 2.0 ** (exponent - np.array([0, shift]))[:ways]
        coefficients = np.where([reads, reads and shift <= rounding.farthest][:ways], powers, 0)
        ratio = np.minimum(powers / np.maximum(exact, rounding.least_exact), rounding.most_ratio)

    Attributes:
      ways: 1 or 2 rows.
      rounding: constants in the formulas.

    Raises:
      ValueError: `ways` is neither 1 nor 2.
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
        exact, closest, total, power = _score_rows(u, scalars, self.ways)
        of = self.rounding
        exponent = jnp.log2(total) + power / _LN2
        q = jnp.zeros_like(closest)
        if self.ways == 2:
            q = jnp.clip(
                _round_half_up(2 * closest * jnp.exp(-scalars["log_tau"]) / _LN2), 0, of.most_shift
            )
            exponent -= jnp.where(q < of.negligible, jnp.log2(1 + jnp.exp2(-q)), 0)
        k = _round_half_up(exponent)
        reads = k >= of.lowest  # not where the score is 0
        k = jnp.clip(jnp.where(reads, k, of.lowest), of.lowest, of.highest).astype(jnp.int32)
        shifts, present = (0, q.astype(jnp.int32)), (reads, reads & (q <= of.farthest))

        def make_way(row: jax.Array, coefficient: jax.Array, shift: Any, exists: jax.Array) -> Way:
            rounded = jnp.ldexp(jnp.ones_like(coefficient), k - shift)
            ratio = jnp.minimum(rounded / jnp.maximum(coefficient, of.least_exact), of.most_ratio)
            value = jnp.where(exists, rounded, jnp.zeros_like(rounded))
            value = jnp.where(jnp.isnan(coefficient), coefficient, value)
            return row, straight_through(value, coefficient * jax.lax.stop_gradient(ratio))

        return [
            make_way(row, coefficient, shift, exists)
            for (row, coefficient), shift, exists in zip(exact, shifts, present, strict=False)
        ]


_LN2 = math.log(2.0)


def _check_ways(read: Confidence | PowersOfTwo) -> None:
    if read.ways not in (1, 2):
        raise ValueError(f"{type(read).__name__}: ways is {read.ways!r}; it must be 1 or 2.")


class _Scored(NamedTuple):
    """`Confidence` ways with the score ``total * exp(power)``, and the smallest distance."""

    ways: list[Way]
    closest: jax.Array
    total: jax.Array
    power: jax.Array


def _score_rows(u: Sequence[jax.Array], scalars: Scalars, ways: int) -> _Scored:
    index, flip, closest = address(u)
    total, logs = _score_terms(u, scalars)
    power = jnp.exp(scalars["log_gamma"]) * logs
    s = total * jnp.exp(power)
    if ways == 1:
        return _Scored([(index, s)], closest, total, power)
    v = jax.nn.sigmoid(-2 * closest * jnp.exp(-scalars["log_tau"]))
    return _Scored([(index, s * (1 - v)), (index ^ flip, s * v)], closest, total, power)


def _score_terms(u: Sequence[jax.Array], scalars: Scalars) -> tuple[jax.Array, jax.Array]:
    """Return the distance sum and the log-sigmoid sum."""
    distances = [absolute(margin) for margin in u]
    beta = jnp.exp(scalars["log_beta"])
    # -log of the product over 1 + exp(-beta m), stored minus 1 to keep its precision.
    product = jnp.zeros_like(distances[0])
    for m in distances:
        power = jnp.exp(-beta * m)
        product += power * (1 + product)
    total = sum(distances[1:], distances[0])
    # An infinite sum is not a score: both value and gradient become NaN.
    of_finite = jnp.where(jnp.isfinite(total), jnp.ones_like(total), jnp.nan)
    return total * jax.lax.stop_gradient(of_finite), -jnp.log1p(product)


def _softsign(m: jax.Array, soft: jax.Array) -> jax.Array:
    """Return ``m / (soft + m)`` with derivatives accurate for very different magnitudes."""
    fixed_m, fixed_soft = jax.lax.stop_gradient(m), jax.lax.stop_gradient(soft)
    slopes = fixed_m / (soft + fixed_m) - fixed_soft / (fixed_soft + m)
    return straight_through(m / (soft + m), slopes)


def _round_half_up(x: jax.Array) -> jax.Array:
    """Round half up, without a gradient."""
    return jnp.floor(jax.lax.stop_gradient(x) + 0.5)

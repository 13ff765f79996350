"""Definitions of every op in NumPy: the semantics as code, independent of the package.

Each function is one formula. `x`, `weights` and so on are NumPy arrays of the dtypes that an op takes, with any leading
axes ``...`` where the formula has a batch. Comparisons are made in the dtype of the margin, because which row is addressed
is decided there; all sums are made in float64.

A function with the suffix ``_vjp`` returns the cotangents of an op's arguments by name, for a cotangent `dy` of its
output. What is a sum is returned as a `Sum`: its value, and what is needed to say how far rounding may lead away from it.

``accumulate`` is None, or the scale of fixed-point sums. Infinities and NaN are values like others: call these functions
within ``numpy.errstate(all="ignore")``.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INT32 = np.iinfo(np.int32)


# ------------------------------------------------------------------------------------- sums, and their rounding
class Sum(NamedTuple):
    """Sums, and the bound of what a computation with rounding may differ from them.

    Attributes:
      value: the sums, float64.
      size: sums of the magnitudes of the addends.
      depth: how many roundings an addend passes at most on its way into the result.
      error: what a result may differ by beyond rounding: a unit of fixed point where it is not decided whether an addend
        is above or below a whole number. Infinite where the result is not defined: integers that wrap, finite numbers
        whose partial sums may overflow.
    """

    value: np.ndarray
    size: np.ndarray
    depth: np.ndarray
    error: np.ndarray

    def times(self, factor: Any, roundings: int = 1) -> "Sum":
        """Each sum times a number that is itself rounded so many times."""
        factor = np.asarray(factor, np.float64)
        error = np.where(self.error == 0, 0, self.error * np.abs(factor))
        error = np.where(np.isinf(self.error), np.inf, error)
        return Sum(self.value * factor, self.size * np.abs(factor), self.depth + roundings, error)

    def map(self, function: Any) -> "Sum":
        """Apply a function to all four arrays: a reshape, a part, ..."""
        return Sum(*map(function, self))

    def fitting(self, dtype: Any) -> "Sum":
        """Return the sum, undefined where finite addends do not fit a dtype."""
        overflows = np.isfinite(self.size) & (self.size > float(ml_dtypes.finfo(dtype).max))
        return self._replace(error=np.where(overflows, np.inf, self.error))

    def bound(self, dtype: Any) -> np.ndarray:
        """Return the largest distance of a result from `value` if each rounding is one of `dtype`, in which it is accumulated.

        ``n`` roundings of ``1 + e`` with ``|e| <= eps / 2`` change an addend by less than ``n * eps`` of its
        magnitude, for all ``n * eps < 1``; an addend that underflows loses less than the smallest normal number.
        """
        info = ml_dtypes.finfo(dtype)
        rounding = self.depth * float(info.eps) * self.size
        return np.where(self.depth == 0, 0, rounding + self.depth * float(info.tiny)) + self.error


def exactly(value: Any) -> Sum:
    """Numbers that no rounding has touched."""
    value = np.asarray(value, np.float64)
    zero = np.zeros(value.shape)
    return Sum(value, np.abs(value), zero, zero)


def added(a: Sum, b: Sum) -> Sum:
    """``a + b``."""
    return Sum(a.value + b.value, a.size + b.size, np.maximum(a.depth, b.depth) + 1, a.error + b.error)


class Totals:
    """Sums under construction: ``total[at] += addends``, each index as often as it occurs.

    With a scale an addend counts as the integer ``trunc(addend * scale)``, the product in the dtype of the addends;
    one that does not fit saturates and NaN is 0. The result is ``total / scale``. Sums must fit int32.
    """

    def __init__(self, shape: tuple[int, ...], accumulate: float | None = None, dtype: Any = np.float32):
        self.value, self.size, self.error = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.added, self.inner = np.zeros(shape), np.zeros(shape)
        self.scale, self.dtype = accumulate, np.dtype(dtype)

    def add(self, at: Any, addends: "Sum | np.ndarray | float") -> None:
        """``total[at] += addends``; `at` is a tuple of index arrays that broadcast with the addends."""
        of = addends if isinstance(addends, Sum) else exactly(addends)
        shape = np.broadcast_shapes(np.shape(of.value), *(np.shape(a) for a in at))
        value, size, depth, error = (np.broadcast_to(a, shape) for a in of)
        if self.scale is not None:
            value, error = self._quantized(value, depth, size, error)
            size = np.zeros(shape)
        at = tuple(np.broadcast_to(a, shape) for a in at)
        for total, addend in ((self.value, value), (self.size, size), (self.error, error), (self.added, 1)):
            np.add.at(total, at, addend)
        np.maximum.at(self.inner, at, depth)

    def _quantized(self, value: Any, depth: Any, size: Any, error: Any) -> tuple[np.ndarray, np.ndarray]:
        product = np.asarray(value, self.dtype) * self.dtype.type(self.scale)
        product = np.asarray(product, np.float64)
        integer = np.where(np.isnan(product), 0, np.trunc(np.clip(product, INT32.min + 1, INT32.max)))
        # The largest number of the dtype that fits int32 is a little below: 2**31 - 128 in float32.
        saturated = np.abs(integer) > 2**31 - 129
        # An addend that has been rounded may be on the other side of a whole number, and more if it is large.
        rounds = (depth > 0) & np.isfinite(size)  # infinities saturate, and NaN is 0
        rounding = np.where(rounds, depth * float(ml_dtypes.finfo(self.dtype).eps) * size, 0) + error
        units = (
            rounding * self.scale + np.where(saturated, 128, 0) + np.where((depth > 0) | (error > 0), 1, 0)
        )
        return integer, units

    def sum(self) -> Sum:
        if self.scale is None:
            depth = np.where(self.added > 0, self.added + self.inner, 0)
            return Sum(self.value, self.size, depth, self.error).fitting(self.dtype)
        undefined = np.abs(self.value) + self.error > INT32.max
        error = np.where(undefined, np.inf, self.error / self.scale)
        value = self.value / self.scale
        # The integer becomes a float, and is divided.
        return Sum(value, np.abs(value), np.where(value == 0, 0, 2.0), error)


def inner_product(
    dy: np.ndarray, row: np.ndarray, other: np.ndarray, accumulate: float | None, dtype: Any, result: Any
) -> Sum:
    """``<dy, row - other> = sum_o dy[o] * (row[o] - other[o])`` over the last axis of ``[n, O]``.

    The difference is taken first: where rows are large and close it has no rounding error, and the difference of two
    sums would have a large one. `dtype`: in which it is computed, `result`: in which it is returned.
    """
    n, n_outputs = row.shape
    totals = Totals((n,), accumulate, dtype)
    at = (np.arange(n)[:, None],)
    if accumulate is None:
        gap = wide(row) - wide(other)
        products = exactly(wide(dy) * gap)
        overflows = np.isfinite(gap) & (np.abs(gap) > ml_dtypes.finfo(dtype).max)
        # Rounded as a difference, and as a product.
        products = products._replace(depth=np.full((n, n_outputs), 2.0), error=np.where(overflows, np.inf, 0))
    else:
        gap = row.astype(dtype) - other.astype(dtype)
        products = exactly(gap * dy.astype(dtype))  # an addend is rounded as often, and then made an integer
    totals.add(at, products)
    return totals.sum().fitting(result)


def accumulator(*dtypes: Any) -> np.dtype:
    """Dtype in which values are compared and summed: the widest of them, at least float32."""
    return np.dtype(np.float64) if any(np.dtype(d).itemsize == 8 for d in dtypes) else np.dtype(np.float32)


def clamped(ids: Any, n: int) -> np.ndarray:
    """Ids that exist, 0 to n - 1: those out of range become the nearest one."""
    return np.clip(np.asarray(ids).astype(np.int64), 0, max(n - 1, 0))


def wide(a: Any) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


# ------------------------------------------------------------------------------------- detection
class Detection(NamedTuple):
    """``index``, ``flip``: int64; ``margin``: of the dtype in which it was compared; each ``[..., T]``."""

    index: np.ndarray
    flip: np.ndarray
    margin: np.ndarray
    bits: int


def detect_signs(deltas: np.ndarray, epsilon: float = 0.0) -> Detection:
    """``[..., C]`` deltas to one detection ``[...]``.

    bit_r  = delta_r > 0 and not |delta_r| < epsilon        0, -0 and NaN give 0
    index  = sum_r bit_r << r
    r*     = the first r that minimizes |delta_r|            NaN counts as the smallest
    margin = delta_{r*},   flip = 1 << r*
    C = 0:   index = 0,    flip = 0,  margin = +inf
    """
    deltas = np.asarray(deltas)
    deltas = deltas.astype(accumulator(deltas.dtype))
    *batch, bits = deltas.shape
    if bits == 0:
        return Detection(np.zeros(batch, int), np.zeros(batch, int), np.full(batch, np.inf, deltas.dtype), 0)
    bit = (deltas > 0) & ~(np.abs(deltas) < deltas.dtype.type(epsilon))
    closest = np.argmin(np.where(np.isnan(deltas), -1, np.abs(deltas)), -1)
    index = np.sum(bit.astype(np.int64) << np.arange(bits), -1)
    margin = np.take_along_axis(deltas, closest[..., None], -1)[..., 0]
    return Detection(index, np.left_shift(1, closest), margin, bits)


def detect_signs_vjp(deltas: np.ndarray, d_margin: Sum) -> Sum:
    """The cotangent of the margin goes to ``delta_{r*}``, all others receive 0."""
    bits = np.shape(deltas)[-1]
    if bits == 0:
        return exactly(np.zeros(np.shape(deltas)))
    is_closest = (detect_signs(deltas).flip[..., None] >> np.arange(bits)) & 1
    return d_margin.map(lambda a: np.where(is_closest, a[..., None], 0))


def deltas_of(x: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """``delta_r = x[a_r] - x[b_r]``: ``[..., I]`` and ``[T, C, 2]`` to ``[..., T, C]``, subtracted in at least float32."""
    x = np.asarray(x)
    if np.size(anchors) == 0:
        return np.zeros((*x.shape[:-1], *anchors.shape[:2]), accumulator(x.dtype))
    x, ids = x.astype(accumulator(x.dtype)), clamped(anchors, x.shape[-1])
    return x[..., ids[..., 0]] - x[..., ids[..., 1]]


def detect(x: np.ndarray, anchors: np.ndarray, epsilon: float = 0.0) -> Detection:
    """`detect_signs` of the deltas of each detector."""
    return detect_signs(deltas_of(x, anchors), epsilon)


def detect_vjp(x: np.ndarray, anchors: np.ndarray, d_margin: Sum, accumulate: float | None = None) -> Sum:
    """``margin = x[a_{r*}] - x[b_{r*}]``: its cotangent is added to ``x[a_{r*}]`` and subtracted from ``x[b_{r*}]``."""
    shape, n_inputs = np.shape(x), np.shape(x)[-1]
    n = math.prod(shape[:-1])
    x, d_margin = np.reshape(x, (n, n_inputs)), d_margin.map(lambda a: np.reshape(a, (n, len(anchors))))
    of_deltas = detect_signs_vjp(deltas_of(x, anchors), d_margin)
    flip = detect(x, anchors).flip
    totals = Totals(x.shape, accumulate, accumulator(x.dtype))
    ids = clamped(anchors, n_inputs)
    for t, r in np.ndindex(anchors.shape[:2]):
        (b,) = np.nonzero(flip[:, t] == 1 << r)
        addends = of_deltas.map(lambda a, at=(b, t, r): a[at])
        totals.add((b, ids[t, r, 0]), addends)
        totals.add((b, ids[t, r, 1]), addends._replace(value=-addends.value))
    return totals.sum().map(lambda a: a.reshape(shape))


def slope(margin: np.ndarray) -> np.ndarray:
    """``U'(u) = 0.5 * s(u) / (1 + |u|)**2`` with ``s(u) = +1 if u > 0 else -1``: the derivative of the surrogate."""
    u = wide(margin)
    value = np.where(u > 0, 0.5, -0.5) / (1 + np.abs(u)) ** 2
    # At margins beyond the square root of what the dtype holds it is 0 there.
    return wide(value.astype(np.asarray(margin).dtype))


SLOPE_ROUNDINGS = (
    6  # of 1 + |u| (counted twice, it is squared), the square, the quotient, the product, the difference
)


# ------------------------------------------------------------------------------------- look-ups
def groups_of(n_detectors: int, groups: int | None) -> np.ndarray:
    """Return the group of each table: those of a group follow each other. None: one group."""
    return np.arange(n_detectors) // max(n_detectors // (groups or 1), 1)


def _with_groups(a: np.ndarray, groups: int | None) -> np.ndarray:
    """An array ``[..., O]`` as that of one group, ``[..., 1, O]``; with groups it has that axis."""
    return np.asarray(a)[..., None, :] if groups is None else np.asarray(a)


def _as_given(a: Sum, groups: int | None) -> Sum:
    return a.map(lambda a: a.reshape(*a.shape[:-2], a.shape[-1])) if groups is None else a


def lookup(
    weights: np.ndarray, d: Detection, accumulate: float | None = None, groups: int | None = None
) -> Sum:
    """``y[b] = sum_t weights[t, index[b, t]]``; with groups ``y[b, g]``, of the tables of each."""
    n_detectors, n_rows, n_outputs = weights.shape
    rows = wide(weights)[np.arange(n_detectors), clamped(d.index, n_rows)]  # [..., T, O]
    shape = (*d.index.shape[:-1], groups or 1, n_outputs)
    totals = Totals(shape, accumulate, accumulator(weights.dtype))
    *batch, t, output = np.indices(rows.shape, sparse=True)
    totals.add((*batch, groups_of(n_detectors, groups)[t], output), rows)
    return _as_given(totals.sum(), groups)


def lookup_vjp(
    weights: np.ndarray,
    d: Detection,
    dy: np.ndarray,
    accumulate: float | None = None,
    groups: int | None = None,
) -> dict[str, Sum]:
    """Only the addressed row receives `dy`; the margin compares it with the flipped row.

    d weights[t, index[b, t]] += dy[b]
    d margin[b, t]             = U'(margin[b, t]) * <dy[b], weights[t, index] - weights[t, index ^ flip]>
    """
    n_detectors, n_rows, _ = weights.shape
    dtype = accumulator(weights.dtype)
    index, flipped = clamped(d.index, n_rows), clamped(d.index ^ d.flip, n_rows)
    detector = np.arange(n_detectors)
    totals = Totals(weights.shape, accumulate, dtype)
    output = np.arange(weights.shape[2])
    rows, others = weights[detector, index], weights[detector, flipped]  # [..., T, O]
    dy = _with_groups(dy, groups)[..., groups_of(len(weights), groups), :]
    totals.add((detector[:, None], index[..., None], output), wide(dy))
    flat = (a.reshape(d.index.size, weights.shape[2]) for a in (dy, rows, others))
    inner = inner_product(*flat, accumulate, dtype, d.margin.dtype).map(lambda a: a.reshape(d.index.shape))
    return {"weights": totals.sum(), "margin": inner.times(slope(d.margin), SLOPE_ROUNDINGS)}


def _weighted(coefficients: np.ndarray, values: np.ndarray, dtype: Any) -> Sum:
    """Products of coefficients ``[...]`` with values ``[..., O]``; a coefficient of 0 makes nothing of anything."""
    c, values = np.asarray(coefficients).astype(dtype)[..., None], values.astype(dtype)
    products = exactly(np.where(c == 0, 0, c * values))
    overflows = np.isinf(products.value) & np.isfinite(c) & np.isfinite(values)
    return products._replace(depth=np.ones(overflows.shape), error=np.where(overflows, np.inf, 0))


def _first(coefficients: np.ndarray, valued: int | None) -> np.ndarray:
    n_ways = np.shape(coefficients)[-1]
    return np.where(np.arange(n_ways) < (n_ways if valued is None else valued), coefficients, 0)


def weighted_lookup(
    weights: np.ndarray,
    index: np.ndarray,
    coefficients: np.ndarray,
    groups: int = 1,
    accumulate: float | None = None,
    valued: int | None = None,
) -> Sum:
    """``y[b, g] = sum over t of g and k of coefficients[b, t, k] * weights[t, index[b, t, k]]``, ``[..., G, O]``.

    The first `valued` ways have a value; the coefficients of others count as 0.
    """
    n_detectors, n_rows, n_outputs = weights.shape
    coefficients = _first(coefficients, valued)
    dtype, detector = accumulator(weights.dtype), np.arange(n_detectors)[:, None]
    rows = np.asarray(weights)[detector, clamped(index, n_rows)]  # [..., T, K, O]
    totals = Totals((*index.shape[:-2], groups, n_outputs), accumulate, dtype)
    *batch, t, _, output = np.indices(rows.shape, sparse=True)
    totals.add((*batch, groups_of(n_detectors, groups)[t], output), _weighted(coefficients, rows, dtype))
    return totals.sum()


def weighted_lookup_vjp(
    weights: np.ndarray,
    index: np.ndarray,
    coefficients: np.ndarray,
    dy: np.ndarray,
    groups: int = 1,
    accumulate: float | None = None,
    valued: int | None = None,
) -> dict[str, Sum]:
    """Every row that was read receives its coefficient times `dy`, ``[..., G, O]``; a coefficient ``<dy, row>``."""
    n_detectors, n_rows, n_outputs = weights.shape
    coefficients = _first(coefficients, valued)
    dtype, detector = accumulator(weights.dtype), np.arange(n_detectors)[:, None]
    ids = clamped(index, n_rows)
    rows = np.asarray(weights)[detector, ids]
    of_tables = np.asarray(dy)[..., groups_of(n_detectors, groups), None, :]  # [..., T, 1, O]
    of_ways = np.broadcast_to(of_tables, rows.shape)
    totals = Totals(weights.shape, accumulate, dtype)
    addends = _weighted(coefficients, of_ways, dtype)
    totals.add((detector[..., None], ids[..., None], np.arange(n_outputs)), addends)
    flat = [a.reshape(index.size, n_outputs) for a in (of_ways, rows, np.zeros_like(rows))]
    inner = inner_product(*flat, accumulate, dtype, np.asarray(coefficients).dtype)
    return {"weights": totals.sum(), "coefficients": inner.map(lambda a: a.reshape(index.shape))}


# ------------------------------------------------------------------------------------- scored reads
def _ends(x: np.ndarray, anchors: np.ndarray, groups: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return groups and ids of the inputs that are compared, each ``[T, 1]`` and ``[T, C]``; of a single probe there is one."""
    ids = clamped(anchors, x.shape[-1])
    group = groups_of(len(anchors), groups)[:, None] if x.shape[-2] > 1 else np.zeros((len(anchors), 1), int)
    return [(group, i) for i in (np.moveaxis(ids, -1, 0) if ids.ndim == 3 else [ids])]


def margins(x: np.ndarray, anchors: np.ndarray, groups: int = 1) -> np.ndarray:
    """``u[t, c] = x[g, a] - x[g, b]`` of ``[..., G or 1, I]``, or ``x[g, a]`` of a single probe: ``[..., T, C]``."""
    x = np.asarray(x).astype(accumulator(x.dtype))
    first, *second = (x[..., group, ids] for group, ids in _ends(x, anchors, groups))
    return first - second[0] if second else first


def margins_vjp(
    x: np.ndarray, anchors: np.ndarray, du: Sum, groups: int = 1, accumulate: float | None = None
) -> Sum:
    """The cotangent of a margin is added to ``x[g, a]`` and subtracted from ``x[g, b]``."""
    flat = (
        np.reshape(x, (-1, *x.shape[-2:])) if x.size else np.zeros((math.prod(x.shape[:-2]), *x.shape[-2:]))
    )
    totals = Totals(flat.shape, accumulate, accumulator(x.dtype))
    du = du.map(lambda a: np.reshape(a, (len(flat), *anchors.shape[:2])))
    sample = np.arange(len(flat))[:, None, None]
    for sign, (group, ids) in zip((1, -1), _ends(x, anchors, groups), strict=False):
        totals.add((sample, group, ids), du._replace(value=sign * du.value))
    return totals.sum().map(lambda a: a.reshape(x.shape))


class Way(NamedTuple):
    """Way to read tables by margins ``[..., T, C]``.

    Attributes:
      index: rows, ``[..., T]``.
      coefficient: of them.
      of_margins, of_scalars: derivatives of the coefficient ``[..., T, C]``, and by name ``[..., T]``.
    """

    index: np.ndarray
    coefficient: Sum
    of_margins: Sum
    of_scalars: dict[str, Sum]


READ_ROUNDINGS = 64.0
"""Roundings of a coefficient and of its derivatives, for margins of 16 at most and scalars between -1 and 1."""


def _terms(*addends: np.ndarray) -> Sum:
    """The sum of terms that may cancel."""
    value, size = sum(addends), sum(np.abs(a) for a in addends)
    return Sum(value, size, np.full(np.shape(value), READ_ROUNDINGS), np.zeros(np.shape(value)))


def ways_of(read: str, u: np.ndarray, s: dict[str, float], n_ways: int = 2) -> list[Way]:
    """Return the ways of a read: ``hard``, ``blend``, ``soft_sign``, ``hard_sign``, ``confidence`` or ``powers``.

    Scalars `s` have no ``log_``.

    m = |u|, closest = the smallest, S = sum m, L = -sum log(1 + exp(-beta m)), with the slope -1 of m at 0

    hard, blend  share = 0.5 / (1 + closest)                                   1 - share of the row, share of its neighbor;
    soft_sign    share = sigmoid(-2 closest / ((soft + closest) select))       hard, hard_sign: of the gradient alone
    confidence   score = S exp(gamma L), share = sigmoid(-2 closest / tau)     score (1 - share), score share
    powers       the nearest powers of two F of these E, with the derivative of E times min(F / E, 2**8)
    """
    u = wide(u)
    m, side = np.abs(u), np.where(u > 0, 1.0, -1.0)
    index = np.sum((u > 0).astype(np.int64) << np.arange(u.shape[-1]), -1)
    nearest = np.argmin(m, -1)
    only = np.eye(u.shape[-1])[nearest]  # [..., T, C]
    closest = m.min(-1)
    rows = index, index ^ (1 << nearest)
    side_of_closest = side * only
    if read in ("hard", "blend", "soft_sign", "hard_sign"):
        of_scalars, hard = {}, read.startswith("hard")
        if read.endswith("sign"):
            share = _sigmoid(-2 * closest / (s["soft"] + closest) / s["select"])
            slope = 2 * share * (1 - share) / s["select"] / (s["soft"] + closest)
            of_closest = -slope * s["soft"] / (s["soft"] + closest)
            of_scalars = {"soft": -of_closest * closest, "select": slope * closest}
        else:
            share, of_closest = 0.5 / (1 + closest), -0.5 / (1 + closest) ** 2
        values = (np.ones_like(share), np.zeros_like(share)) if hard else (1 - share, share)
        return [
            Way(
                row,
                exactly(value) if hard else _terms(value),
                _terms(sign * of_closest[..., None] * side_of_closest),
                {name: _terms(sign * d) for name, d in of_scalars.items()},
            )
            for row, value, sign in zip(rows, values, (-1, 1), strict=True)
        ]
    near = _sigmoid(-s["beta"] * m)
    logs = -np.log1p(np.exp(-s["beta"] * m)).sum(-1)
    power = s["gamma"] * logs
    score = m.sum(-1) * np.exp(power)
    grows = score[..., None] * s["gamma"] * s["beta"] * near
    of_m = np.exp(power)[..., None], grows
    of_beta, of_gamma = (grows * m).sum(-1), score * power
    tau = s.get("tau", 1.0)
    share = _sigmoid(-2 * closest / tau) if n_ways == 2 else np.zeros_like(score)
    slope = 2 / tau * share * (1 - share) * score
    ways = []
    for row, part, sign in ((rows[0], 1 - share, 1), (rows[1], share, -1))[:n_ways]:
        of_scalars = {"beta": _terms(of_beta * part), "gamma": _terms(of_gamma * part)}
        if n_ways == 2:
            of_scalars["tau"] = _terms(-sign * slope * closest)
        moved = _terms(*(a * part[..., None] * side for a in of_m), sign * slope[..., None] * side_of_closest)
        ways.append(Way(row, _terms(score * part), moved, of_scalars))
    return ways if read == "confidence" else _powers(ways, m.sum(-1), power, closest, s)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _powers(
    ways: list[Way], total: np.ndarray, power: np.ndarray, closest: np.ndarray, s: dict[str, float]
) -> list[Way]:
    exponent, shift = np.log2(total) + power / math.log(2), np.zeros_like(closest)
    undecided = np.zeros(closest.shape, bool)
    if len(ways) == 2:
        exact = 2 * closest / s["tau"] / math.log(2)
        shift, undecided = np.minimum(np.floor(exact + 0.5), 64), _between(exact)
        exponent = exponent - np.where(shift < 8, np.log2(1 + 2.0**-shift), 0)
    k = np.floor(exponent + 0.5)
    undecided |= _between(exponent)
    reads, k = k >= -3, np.clip(k, -3, 4)
    found = []
    for way, by, exists in zip(ways, (0, shift), (reads, reads & (shift <= 3)), strict=False):
        kept = 2.0 ** (k - by)
        ratio = np.minimum(kept / np.maximum(way.coefficient.value, 1e-30), 2.0**8)

        def times(a: Sum, ratio: np.ndarray = ratio) -> Sum:
            return _undecided(a.times(ratio, READ_ROUNDINGS), undecided)

        value = _undecided(exactly(np.where(exists, kept, 0)), undecided)
        of_margins = _undecided(way.of_margins.times(ratio[..., None], READ_ROUNDINGS), undecided[..., None])
        found.append(Way(way.index, value, of_margins, {n: times(a) for n, a in way.of_scalars.items()}))
    return found


def _between(exponent: np.ndarray) -> np.ndarray:
    """Return where rounding may lead to another whole number."""
    return np.isfinite(exponent) & (np.abs(exponent - np.floor(exponent) - 0.5) < 1e-4)


def _undecided(a: Sum, where: np.ndarray) -> Sum:
    return a._replace(error=np.where(where, np.inf, a.error))


def quantized(weights: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tables as integers, and the exponents of their scales, ``[G, O]``.

    The least exponent with which the largest entry of a group and output is at most 128; integers are rounded half up and end at 127.
    """
    n_tables, _, n_outputs = weights.shape
    w, group = wide(weights), groups_of(n_tables, groups)
    most = np.zeros((groups, n_outputs))
    np.maximum.at(most, group, np.abs(w).max(1, initial=0))
    exponents = np.ceil(np.log2(np.maximum(most, 1e-30))).astype(int) - 7
    whole = np.floor(np.ldexp(w, -exponents[group][:, None]) + 0.5)
    return np.clip(whole, -128, 127).astype(np.int8), exponents


Integers = tuple[np.ndarray, np.ndarray]
"""Tables of integers ``[T, R, O]``, and the exponents of their scales, ``[G, O]``."""


def _shape_of(weights: np.ndarray | Integers) -> tuple[int, ...]:
    return np.shape(weights[0] if isinstance(weights, tuple) else weights)


def _rows_of_reads(weights: np.ndarray | Integers, read: str, groups: int) -> np.ndarray:
    if read != "powers":
        return wide(weights)
    whole, exponents = weights if isinstance(weights, tuple) else quantized(weights, groups)
    return np.ldexp(wide(whole), exponents[groups_of(len(whole), groups)][:, None])


def scored_lut(
    ways: list[Way],
    weights: np.ndarray | Integers,
    read: str,
    groups: int = 1,
    sum_groups: bool = False,
    keep: np.ndarray | None = None,
    accumulate: float | None = None,
) -> Sum:
    """``y[g] = sum over t of g and ways of keep[t] * coefficient * weights[t, index]``, ``[..., G or 1, O]``."""
    n_detectors, _, n_outputs = _shape_of(weights)
    rows, group = _rows_of_reads(weights, read, groups), groups_of(n_detectors, 1 if sum_groups else groups)
    batch, dtype = ways[0].index.shape[:-1], np.float32 if isinstance(weights, tuple) else weights.dtype
    totals = Totals((*batch, 1 if sum_groups else groups, n_outputs), None, accumulator(dtype))
    for way in ways:
        read_rows = rows[np.arange(n_detectors), way.index]  # [..., T, O]
        *at, t, output = np.indices(read_rows.shape, sparse=True)
        factor = 1.0 if keep is None else wide(keep)[..., None]
        addends = way.coefficient.map(_with_axis).times(read_rows).times(factor)
        totals.add((*at, group[t], output), truncated(addends, accumulate))
    return totals.sum()


def truncated(addends: Sum, accumulate: float | None) -> Sum:
    """Addends of which fixed point drops less than one unit each; in which direction it does so is left open."""
    return addends if accumulate is None else addends._replace(error=addends.error + 1 / accumulate)


def _with_axis(a: np.ndarray) -> np.ndarray:
    return a[..., None]


def scored_lut_vjp(
    x: np.ndarray,
    ways: list[Way],
    weights: np.ndarray,
    anchors: np.ndarray,
    dy: np.ndarray,
    read: str,
    groups: int = 1,
    sum_groups: bool = False,
    keep: np.ndarray | None = None,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    """`scored_vjp`, and the cotangent of the inputs by that of the margins."""
    of = scored_vjp(ways, weights, dy, read, groups, sum_groups, keep, accumulate)
    return {"x": margins_vjp(x, anchors, of.pop("margins"), groups, accumulate), **of}


def scored_vjp(
    ways: list[Way],
    weights: np.ndarray,
    dy: np.ndarray,
    read: str,
    groups: int = 1,
    sum_groups: bool = False,
    keep: np.ndarray | None = None,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    """A row receives its coefficient times `dy`; margins and scalars what the product ``<dy, row>`` moves a coefficient by."""
    n_detectors, _, n_outputs = weights.shape
    rows, group = _rows_of_reads(weights, read, groups), groups_of(n_detectors, 1 if sum_groups else groups)
    detector, output, dtype = np.arange(n_detectors), np.arange(n_outputs), accumulator(weights.dtype)
    of_tables = wide(dy)[..., group, :]  # [..., T, O]
    factor = (
        np.ones(ways[0].index.shape) if keep is None else np.broadcast_to(wide(keep), ways[0].index.shape)
    )
    of_weights = Totals(weights.shape, None, dtype)
    of_margins = of_keep = None
    of_scalars = {name: Totals((1,), None, dtype) for name in ways[0].of_scalars}
    for way in ways:
        addends = way.coefficient.map(_with_axis).times(of_tables).times(factor[..., None])
        of_weights.add((detector[:, None], way.index[..., None], output), truncated(addends, accumulate))
        products = of_tables * rows[detector, way.index]
        lost = np.full(way.index.shape, 0.0 if accumulate is None else n_outputs / accumulate)
        inner = Sum(
            products.sum(-1), np.abs(products).sum(-1), np.full(way.index.shape, n_outputs + 2.0), lost
        )
        to_keep = _product_of(inner, way.coefficient)
        of_keep = to_keep if of_keep is None else added(of_keep, to_keep)
        inner = inner.times(factor)
        to_margins = _product_of(inner.map(_with_axis), way.of_margins)
        of_margins = to_margins if of_margins is None else added(of_margins, to_margins)
        for name, derivative in way.of_scalars.items():
            addends = _product_of(inner, derivative)
            of_scalars[name].add((np.zeros(way.index.shape, int),), truncated(addends, accumulate))
    assert of_margins is not None
    assert of_keep is not None
    return {
        "margins": of_margins,
        "weights": of_weights.sum(),
        "keep": of_keep,
        **{name: totals.sum().map(lambda a: a[0]) for name, totals in of_scalars.items()},
    }


def _product_of(a: Sum, b: Sum) -> Sum:
    undecided = np.isinf(a.error) | np.isinf(b.error)
    (of_a, of_b) = (np.where(undecided, 0, x.error) for x in (a, b))
    lost = of_a * np.abs(np.where(of_a > 0, b.value, 0)) + of_b * np.abs(np.where(of_b > 0, a.value, 0))
    error = np.where(undecided, np.inf, lost)
    return Sum(a.value * b.value, a.size * b.size, a.depth + b.depth + 1, error)


def cell_total_variation(weights: np.ndarray) -> Sum:
    """The mean over tables and pairs of rows whose addresses differ in one bit of ``|row - other|**2``."""
    n_tables, n_rows, _ = weights.shape
    bits, w = n_rows.bit_length() - 1, wide(weights)
    squares = sum(((w - w[:, np.arange(n_rows) ^ (1 << bit)]) ** 2).sum() / 2 for bit in range(bits))
    value = np.asarray(squares / max(n_tables * bits * n_rows // 2, 1))
    return Sum(value, value, np.asarray(weights.size * bits + 4.0), np.zeros(())).fitting(
        accumulator(weights.dtype)
    )


def cell_total_variation_vjp(weights: np.ndarray, dy: Any) -> Sum:
    """``2 dy (row - other)`` over the same number, of each pair to both of its rows."""
    n_tables, n_rows, _ = weights.shape
    bits, w = n_rows.bit_length() - 1, wide(weights)
    others = [w[:, np.arange(n_rows) ^ (1 << bit)] for bit in range(bits)]
    gaps, dtype = [w - other for other in others], accumulator(weights.dtype)
    value, size = (
        np.zeros(w.shape) + sum(terms) for terms in (gaps, [np.abs(w) + np.abs(o) for o in others])
    )
    total = Sum(value, size, np.full(w.shape, bits + 4.0), np.zeros(w.shape))
    return (
        total.times(2 * max(abs(float(dy)), 1))
        .fitting(dtype)
        .times(_share_of(dy, n_tables * bits * n_rows // 2))
    )


def _share_of(dy: Any, n_pairs: int) -> float:
    return float(dy) / max(abs(float(dy)), 1) / max(n_pairs, 1)


# ------------------------------------------------------------------------------------- sparse look-ups
def slots_of(targets: np.ndarray, shape: tuple[int, ...], n_outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """The target of each slot of each row, and which slots are used: a negative target is none, one too large the last output."""
    targets = np.broadcast_to(np.asarray(targets).astype(np.int64), shape)
    return clamped(targets, n_outputs), (targets >= 0) & (n_outputs > 0)


def sparse_lookup(
    weights: np.ndarray,
    d: Detection,
    targets: np.ndarray,
    n_outputs: int,
    accumulate: float | None = None,
    groups: int | None = None,
) -> Sum:
    """``y[b, o] = sum over t, k with targets[t, index, k] == o of weights[t, index, k]``; with groups ``y[b, g, o]``."""
    target, used = slots_of(targets, weights.shape, n_outputs)
    shape = (*d.index.shape[:-1], groups or 1, n_outputs)
    totals = Totals(shape, accumulate, accumulator(weights.dtype))
    index, group = clamped(d.index, weights.shape[1]), groups_of(len(weights), groups)
    for b in np.ndindex(d.index.shape[:-1]):
        for t, k in itertools.product(range(weights.shape[0]), range(weights.shape[2])):
            row = index[(*b, t)]
            if used[t, row, k]:
                totals.add((*b, group[t], target[t, row, k]), wide(weights[t, row, k]))
    return _as_given(totals.sum(), groups)


def sparse_lookup_vjp(
    weights: np.ndarray,
    d: Detection,
    targets: np.ndarray,
    dy: np.ndarray,
    accumulate: float | None = None,
    groups: int | None = None,
) -> dict[str, Sum]:
    """A slot takes part with the cotangent of its target; the two rows may have different targets.

    g(t, row)                 = sum over used k of weights[t, row, k] * dy[targets[t, row, k]]
    d margin[b, t]            = U'(margin) * (g(t, index) - g(t, index ^ flip))
    d weights[t, index, k]   += dy[targets[t, index, k]]

    Where a slot reaches one output from both rows its two weights are subtracted first, as in `lookup_vjp`.
    """
    dtype = accumulator(weights.dtype)
    target, used = slots_of(targets, weights.shape, np.shape(dy)[-1])
    n_rows = weights.shape[1]
    index, flipped = clamped(d.index, n_rows), clamped(d.index ^ d.flip, n_rows)
    of_weights, of_margin = Totals(weights.shape, accumulate, dtype), Totals(d.index.shape, accumulate, dtype)
    w, group, dy = weights.astype(dtype), groups_of(len(weights), groups), _with_groups(dy, groups)
    for at in np.ndindex(d.index.shape):
        *b, t = at
        row, other = index[at], flipped[at]
        for k in range(weights.shape[2]):
            of_row, of_other = (
                dy[(*b, group[t], target[t, r, k])] if used[t, r, k] else None for r in (row, other)
            )
            if of_row is not None:
                of_weights.add((t, row, k), wide(of_row))
            if used[t, row, k] and used[t, other, k] and target[t, row, k] == target[t, other, k]:
                products = [(w[t, row, k] - w[t, other, k], of_row)]
            else:
                products = [(w[t, row, k], of_row), (-w[t, other, k], of_other)]
            for weight, cotangent in products:
                if cotangent is not None:
                    of_margin.add(at, _product(weight, cotangent, accumulate, dtype))
    inner = of_margin.sum().fitting(d.margin.dtype)
    return {"weights": of_weights.sum(), "margin": inner.times(slope(d.margin), SLOPE_ROUNDINGS)}


class EdgesAsSlots:
    """Slots ``[T, R, K]`` of a list of edges, no two rows of a table with the same slots: products of two rows are then added apart."""

    def __init__(self, first: np.ndarray, n_rows: int):
        counts = np.diff(first)
        place = np.repeat(np.arange(len(counts)), counts)
        self.width = int(counts.max(initial=0))
        lane = np.arange(len(place)) - np.asarray(first)[:-1][place]
        t, row = place // n_rows, place % n_rows
        self.at = t, row, row * self.width + lane
        self.shape = (len(counts) // n_rows, n_rows, n_rows * self.width)

    def spread(self, a: np.ndarray, empty: Any) -> np.ndarray:
        found = np.full(self.shape, empty, a.dtype)
        found[self.at] = a
        return found

    def given(self, weights: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights and targets of slots. A negative target of an edge is the first output."""
        return self.spread(weights, 0), self.spread(np.maximum(targets, 0), -1)

    def of_edges(self, slots: Sum) -> Sum:
        return slots.map(lambda a: a[self.at])


def _product(weight: Any, cotangent: Any, accumulate: float | None, dtype: Any) -> Sum:
    if accumulate is None:
        return exactly(wide(weight) * wide(cotangent))._replace(depth=np.array(2.0))
    # Slots of one row that reach one output may be multiplied together: what is below a unit is lost once, or for each.
    product = exactly(weight * np.asarray(cotangent, dtype))
    return product._replace(error=np.array(1 / accumulate))


# ------------------------------------------------------------------------------------- attention
def pairs(
    n_queries: int, n_keys: int, query_start: int = 0, key_start: int = 0, window: int | None = None
) -> list[tuple[int, int, int]]:
    """All ``(j, i, d)``: query j meets key i at distance ``d = (query_start + j) - (key_start + i) - 1``.

    A pair counts when ``d >= 0`` and, with a window, ``d < window``.
    """
    every = itertools.product(range(n_queries), range(n_keys))
    distances = ((j, i, query_start + j - key_start - i - 1) for j, i in every)
    return [(j, i, d) for j, i, d in distances if d >= 0 and (window is None or d < window)]


def spread(weights: np.ndarray, targets: np.ndarray | None, n_outputs: int | None) -> np.ndarray:
    """The table ``[T, R, n_outputs]`` that tables with targets stand for: 0 where no slot reaches; without targets the table."""
    if targets is None or n_outputs is None:
        return weights
    target, used = slots_of(targets, weights.shape, n_outputs)
    table = np.zeros((*weights.shape[:2], n_outputs), accumulator(weights.dtype))
    t, row, _ = np.indices(weights.shape, sparse=True)
    np.add.at(table, (t, row, target), np.where(used, weights, 0))
    return table


def spread_vjp(dtable: Sum, targets: np.ndarray | None, shape: tuple[int, ...]) -> Sum:
    """A slot receives the cotangent of its target, an unused one 0."""
    if targets is None:
        return dtable
    target, used = slots_of(targets, shape, dtable.value.shape[2])
    t, row, _ = np.indices(shape, sparse=True)
    return dtable.map(lambda a: np.where(used, a[t, row, target], 0))


class Where(NamedTuple):
    """Pairs of attention that count: arguments as those of the ops, starts as plain numbers, or one for each sample.

    Where all pairs count, queries come after all keys: `query_start` is their number.
    """

    window: int | None = None
    query_start: Any = 0
    key_start: Any = 0
    query_segments: Any = None
    key_segments: Any = None
    block_mask: Any = None
    block_sizes: Any = None

    def walk(self, n_samples: int, n_queries: int, n_keys: int) -> Iterator[tuple[np.ndarray, int, int, int]]:
        """``samples, j, i, d`` of every pair: the samples in which query j and key i count, of one segment."""
        start = np.broadcast_to(np.asarray(self.query_start, np.int64) - self.key_start, n_samples)
        met = [
            (j, i, d, s)
            for s in set(start.tolist())
            for j, i, d in pairs(n_queries, n_keys, s, 0, self.window)
        ]
        for j, i, d, s in met:
            same = start == s
            if (
                self.block_mask is not None
                and not self.block_mask[j // self.block_sizes[0], i // self.block_sizes[1]]
            ):
                continue
            if self.query_segments is not None:
                same &= self.query_segments[:, j] == self.key_segments[:, i]
            if same.any():
                yield np.nonzero(same)[0], j, i, d


EVERY_PAIR = Where()


def _flat_batch(arrays: tuple[Any, ...], rank: int) -> tuple[tuple[int, ...], list[np.ndarray]]:
    batch = np.shape(arrays[0])[: np.ndim(arrays[0]) - rank]
    n = math.prod(batch)
    return batch, [np.asarray(a).reshape(n, *np.shape(a)[len(batch) :]) for a in arrays]


def _flat_where(where: Where, batch: tuple[int, ...]) -> Where:
    def flat(s: Any) -> Any:
        if s is None:
            return None
        s = np.asarray(s)
        return np.broadcast_to(s, (*batch, s.shape[-1])).reshape(math.prod(batch), s.shape[-1])

    def flat_start(start: Any) -> Any:
        return np.broadcast_to(start, batch).reshape(-1) if np.ndim(start) else int(start)

    return where._replace(
        query_segments=flat(where.query_segments),
        key_segments=flat(where.key_segments),
        query_start=flat_start(where.query_start),
        key_start=flat_start(where.key_start),
    )


def existing(d: Detection) -> Detection:
    """Return a detection with rows that exist: ``index`` and ``index ^ flip``, each clamped to the rows that its bits can address."""
    index = clamped(d.index, 2**d.bits)
    return d._replace(index=index, flip=index ^ clamped(d.index ^ d.flip, 2**d.bits))


NO_POSITION = Detection(np.zeros((1, 1), int), np.zeros((1, 1), int), np.full((1, 1), np.inf), 0)


class Meetings:
    """The pairs of a call of attention, with one batch axis, and the row that each of them addresses:

    row(j, i) = query.index[j] << (key.bits + N) | key.index[i] << N | position.index[d]
    """

    def __init__(self, query: Detection, key: Detection, position: Detection | None, where: Where):
        self.batch, parts = _flat_batch((*existing(query)[:3], *existing(key)[:3]), 2)
        self.query, self.key = Detection(*parts[:3], query.bits), Detection(*parts[3:], key.bits)
        self.position = existing(position) if position is not None and position.bits else NO_POSITION
        self.where = _flat_where(where, self.batch)
        self.key_shift, self.query_shift = self.position.bits, self.position.bits + key.bits
        self.n_samples, self.n_queries, self.n_detectors = self.query.index.shape

    def __iter__(self) -> Iterator[tuple[np.ndarray, int, int, int, np.ndarray]]:
        """``samples, j, i, d, row[samples, T]`` of every pair."""
        n_keys = self.key.index.shape[1]
        for samples, j, i, d in self.where.walk(self.n_samples, self.n_queries, n_keys):
            d = min(d, len(self.position.index) - 1)  # the last one beyond them
            of_query, of_key = self.query.index[samples, j], self.key.index[samples, i]
            row = of_query << self.query_shift | of_key << self.key_shift | self.position.index[d]
            yield samples, j, i, d, row


def lookup_attention(
    weights: np.ndarray,
    query: Detection,
    key: Detection,
    position: Detection | None = None,
    where: Where = EVERY_PAIR,
    accumulate: float | None = None,
) -> Sum:
    """``y[j] = sum over keys i before j that count, and detectors t, of weights[t, row(j, i)]``, see `Meetings`."""
    of = Meetings(query, key, position, where)
    n_detectors, _, n_outputs = weights.shape
    totals = Totals((of.n_samples, of.n_queries, n_outputs), accumulate, accumulator(weights.dtype))
    for samples, j, _, _, row in of:
        rows = wide(weights)[np.arange(n_detectors), row]  # [samples, T, O]
        totals.add((samples[:, None, None], j, np.arange(n_outputs)), rows)
    return totals.sum().map(lambda a: a.reshape(*of.batch, of.n_queries, n_outputs))


def lookup_attention_vjp(
    weights: np.ndarray,
    query: Detection,
    key: Detection,
    position: Detection | None,
    dy: np.ndarray,
    where: Where = EVERY_PAIR,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    """Per pair and detector, everything added up:

    d weights[row] += dy[j]
    one of query and key: the query's margin if |q.margin[j]| < |k.margin[i]| (strict), else the key's, receives
        U'(margin) * <dy[j], weights[row] - weights[row ^ that flip]>
    in addition the position's margin, where |e.margin[d]| is strictly smaller than both, in the same way.
    """
    of = Meetings(query, key, position, where)
    n_outputs, dtype = weights.shape[2], accumulator(weights.dtype)
    dy = np.reshape(dy, (of.n_samples, of.n_queries, n_outputs))
    detectors = np.arange(of.n_detectors)
    shapes = {"query": of.query.index.shape, "key": of.key.index.shape, "position": of.position.index.shape}
    totals = {n: Totals(shape, accumulate, of.query.margin.dtype) for n, shape in shapes.items()}
    totals["weights"] = Totals(weights.shape, accumulate, dtype)

    def receive(name: str, at: tuple[Any, ...], margin: Any, flip: Any, chosen: np.ndarray) -> None:
        """The margins of a part of the pairs, ``[samples, T]``, which stand at these places of their detection."""
        sample, t = np.nonzero(chosen)
        flip, margin, *at = (np.broadcast_to(a, chosen.shape)[chosen] for a in (flip, margin, *at))
        main, other = weights[t, row[chosen]], weights[t, row[chosen] ^ flip]
        inner = inner_product(dy[samples[sample], j], main, other, accumulate, dtype, of.query.margin.dtype)
        totals[name].add(tuple(at), inner.times(slope(margin), SLOPE_ROUNDINGS))

    of_position = detectors if of.position.index.shape[1] > 1 else 0
    for samples, j, i, d, row in of:
        at = samples[:, None]
        totals["weights"].add((detectors[:, None], row[..., None], np.arange(n_outputs)), wide(dy[at, j]))
        q, k, e = of.query.margin[samples, j], of.key.margin[samples, i], of.position.margin[d]
        to_query, to_position = np.abs(q) < np.abs(k), (np.abs(e) < np.abs(q)) & (np.abs(e) < np.abs(k))
        receive("query", (at, j, detectors), q, of.query.flip[samples, j] << of.query_shift, to_query)
        receive("key", (at, i, detectors), k, of.key.flip[samples, i] << of.key_shift, ~to_query)
        receive("position", (d, of_position), e, of.position.flip[d], to_position)

    sums = {name: total.sum() for name, total in totals.items()}
    if position is not None and not position.bits:
        sums["position"] = exactly(np.zeros(position.index.shape))
    for name in ("query", "key"):
        sums[name] = sums[name].map(lambda a: a.reshape(*of.batch, *a.shape[1:]))
    return sums


def lut_pair_attention(
    x: np.ndarray,
    keys: np.ndarray,
    weights: np.ndarray,
    anchors: np.ndarray,
    positions: np.ndarray | None = None,
    where: Where = EVERY_PAIR,
    *,
    interleave: bool = False,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> Sum:
    """``y[j] = sum over keys i before j that count, and detectors t, of weights[t, index(z)]``, see `pair_inputs`."""
    return _pair_attention(
        x, keys, weights, anchors, positions, None, where, interleave, epsilon, accumulate
    )["y"]


def lut_pair_attention_vjp(
    x: np.ndarray,
    keys: np.ndarray,
    weights: np.ndarray,
    anchors: np.ndarray,
    positions: np.ndarray | None,
    dy: np.ndarray,
    where: Where = EVERY_PAIR,
    *,
    interleave: bool = False,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    """Per pair and detector, everything added up:

    d weights[t, index(z)]  += dy[j]
    d margin(z)              = U'(margin) * <dy[j], weights[t, index] - weights[t, index ^ flip]>
    which goes with sign + and - to the two elements of z that the closest comparison has, and from there to
    whichever of key, query and position each of them is. The output is there too, as ``"y"``.
    """
    return _pair_attention(x, keys, weights, anchors, positions, dy, where, interleave, epsilon, accumulate)


def pair_inputs(n_inputs: int, n_positions: int, interleave: bool) -> list[tuple[str, int]]:
    """Origin of each element of z: ``z = [key (I), query (I), position (N)]``; interleaved ``z[3s : 3s + 3] = key[s], query[s], position[s]``."""
    parts = [[(name, s) for s in range(n_inputs)] for name in ("keys", "x")]
    parts.append([("positions", s) for s in range(n_positions)])
    if interleave:
        return [part[s] for s in range(n_inputs) for part in parts]
    return [element for part in parts for element in part]


def _pair_attention(
    x: Any, keys: Any, weights: Any, anchors: Any, positions: Any, dy: Any, where: Where,
    interleave: bool, epsilon: float, accumulate: float | None,
) -> dict[str, Sum]:  # fmt: skip
    batch, (flat_x, flat_keys) = _flat_batch((x, keys), 2)
    where = _flat_where(where, batch)
    n_detectors, n_rows, n_outputs = weights.shape
    n_positions = 0 if positions is None else positions.shape[2]
    elements = pair_inputs(flat_x.shape[2], n_positions, interleave)
    dtypes = [flat_x.dtype] + ([] if positions is None else [positions.dtype])
    dtype, sums_dtype = accumulator(*dtypes), accumulator(weights.dtype)
    totals = {
        "y": Totals((*flat_x.shape[:2], n_outputs), accumulate, sums_dtype),
        "x": Totals(flat_x.shape, accumulate, dtype),
        "keys": Totals(flat_keys.shape, accumulate, dtype),
        "positions": Totals((0, 0, 0) if positions is None else positions.shape, accumulate, dtype),
        "weights": Totals(weights.shape, accumulate, sums_dtype),
    }
    dy = None if dy is None else wide(dy).reshape(*flat_x.shape[:2], n_outputs)
    output = np.arange(n_outputs)
    for samples, j, i, d in where.walk(len(flat_x), flat_x.shape[1], flat_keys.shape[1]):
        distance = 0 if positions is None else min(d, len(positions) - 1)
        for t in range(n_detectors):
            shared = 0 if positions is None or positions.shape[1] == 1 else t
            place = {
                "keys": lambda s, at=(samples, i): (*at, s),
                "x": lambda s, at=(samples, j): (*at, s),
                "positions": lambda s, at=(distance, shared): (*at, s),
            }
            source = {"keys": flat_keys, "x": flat_x, "positions": positions}
            columns = [
                np.broadcast_to(source[n][place[n](s)], samples.shape).astype(dtype) for n, s in elements
            ]
            z = np.stack(columns, -1) if columns else np.zeros((len(samples), 0), dtype)
            found = detect(z, anchors[t : t + 1], epsilon)
            index, flipped = (clamped(a[:, 0], n_rows) for a in (found.index, found.index ^ found.flip))
            totals["y"].add((samples[:, None], j, output), wide(weights)[t, index])
            if dy is None:
                continue
            totals["weights"].add((t, index[:, None], output), dy[samples, j])
            rows, others = weights[t, index], weights[t, flipped]
            of_margin = inner_product(dy[samples, j], rows, others, accumulate, sums_dtype, dtype)
            of_margin = of_margin.times(slope(found.margin[:, 0]), SLOPE_ROUNDINGS)
            ids = clamped(anchors[t], len(elements))
            for r, side in np.ndindex(ids.shape):
                name, s = elements[ids[r, side]]
                for n in np.nonzero(found.flip[:, 0] == 1 << r)[0]:
                    addend = of_margin.map(lambda a, n=n: a[n])
                    at = place[name](s)
                    at = (samples[n], *at[1:]) if name != "positions" else at
                    totals[name].add(at, addend._replace(value=addend.value * (1 - 2 * side)))
    sums = {name: total.sum() for name, total in totals.items()}
    of_batch = {"y", "x", "keys"}
    return {
        n: s.map(lambda a: a.reshape(*batch, *a.shape[1:])) if n in of_batch else s for n, s in sums.items()
    }


# ------------------------------------------------------------------------------------- compositions
def joined(x: np.ndarray, anchors: np.ndarray, groups: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of all groups ``[..., G or 1, I]`` side by side, and the anchors of each as ids of these; as they are without groups."""
    if groups is None:
        return x, anchors
    n_parts, n_inputs = np.shape(x)[-2:]
    first = groups_of(len(anchors), groups) % n_parts * n_inputs
    return np.reshape(x, (*np.shape(x)[:-2], n_parts * n_inputs)), clamped(anchors, n_inputs) + first[
        :, None, None
    ]


def lut(
    x: Any,
    weights: Any,
    anchors: Any,
    epsilon: float = 0.0,
    accumulate: float | None = None,
    groups: int | None = None,
) -> Sum:
    """``lookup(weights, detect(x, anchors))``."""
    return lookup(weights, detect(*joined(x, anchors, groups), epsilon), accumulate, groups)


def lut_vjp(
    x: Any,
    weights: Any,
    anchors: Any,
    dy: Any,
    epsilon: float = 0.0,
    accumulate: float | None = None,
    groups: int | None = None,
) -> dict[str, Sum]:
    shape = np.shape(x)
    x, anchors = joined(x, anchors, groups)
    of = lookup_vjp(weights, detect(x, anchors, epsilon), dy, accumulate, groups)
    of_x = detect_vjp(x, anchors, of["margin"], accumulate)
    return {"weights": of["weights"], "x": of_x.map(lambda a: a.reshape(shape))}


def sparse_lut(
    x: Any,
    weights: Any,
    anchors: Any,
    targets: Any,
    n_outputs: int,
    epsilon: float = 0.0,
    accumulate: float | None = None,
    groups: int | None = None,
) -> Sum:
    """``sparse_lookup(weights, detect(x, anchors), targets, n_outputs)``."""
    d = detect(*joined(x, anchors, groups), epsilon)
    return sparse_lookup(weights, d, targets, n_outputs, accumulate, groups)


def sparse_lut_vjp(
    x: Any,
    weights: Any,
    anchors: Any,
    targets: Any,
    dy: Any,
    epsilon: float = 0.0,
    accumulate: float | None = None,
    groups: int | None = None,
) -> dict[str, Sum]:
    shape = np.shape(x)
    x, anchors = joined(x, anchors, groups)
    of = sparse_lookup_vjp(weights, detect(x, anchors, epsilon), targets, dy, accumulate, groups)
    of_x = detect_vjp(x, anchors, of["margin"], accumulate)
    return {"weights": of["weights"], "x": of_x.map(lambda a: a.reshape(shape))}


def _at_places(images: Any, anchors: Any, windows: Any, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Images as values ``[B, I + 1]``, the last one 0, and the anchors of every place as ids of these, ``[P, T, C, 2]``.

    The window at place ``(p, q)`` begins at row ``p * stride - padding``, and so columns; what lies around the image is 0.
    """
    height, width, n_channels = windows.image
    columns, n_values = windows.size[1], math.prod(windows.size) * windows.channels
    starts = [
        range(-around, n + around - k + 1, step)
        for n, k, step, around in zip(
            (height, width), windows.size, windows.stride, windows.padding, strict=True
        )
    ]
    n_inputs = height * width * n_channels
    ids = np.full((len(starts[0]) * len(starts[1]), *np.shape(anchors)), n_inputs)
    # Windows have all channels, or each group its own.
    of = groups_of(len(anchors), groups) if windows.channels < n_channels else np.zeros(len(anchors), int)
    for at, (top, left) in enumerate(itertools.product(*starts)):
        for t, r, end in np.ndindex(np.shape(anchors)):
            pixel, channel = divmod(int(clamped(anchors[t, r, end], n_values)), windows.channels)
            row, column = top + pixel // columns, left + pixel % columns
            if 0 <= row < height and 0 <= column < width:
                channel += int(of[t]) * windows.channels
                ids[at, t, r, end] = (row * width + column) * n_channels + channel
    values = np.reshape(images, (math.prod(np.shape(images)[:-3]), n_inputs))
    return np.concatenate([values, np.zeros((len(values), 1), values.dtype)], 1), ids


def lut_at_places(
    images: Any,
    weights: Any,
    anchors: Any,
    targets: Any = None,
    n_outputs: int | None = None,
    *,
    windows: Any,
    groups: int = 1,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> Sum:
    """Sums of the rows that the detectors of a group address at every place: side by side, or added to targets."""
    d = _detect_at_places(*_at_places(images, anchors, windows, groups), epsilon)
    if targets is not None:
        of_tables = np.asarray(targets)[groups_of(len(anchors), groups)][:, None]
        y = sparse_lookup(weights, d, of_tables, n_outputs, accumulate)
    else:
        y = lookup(weights, d, accumulate, groups)
    shape = (*np.shape(images)[:-3], *windows.places, math.prod(y.value.shape[2:]))
    return y.map(lambda a: a.reshape(shape))


def lut_at_places_vjp(
    images: Any,
    weights: Any,
    anchors: Any,
    targets: Any,
    dy: Any,
    *,
    windows: Any,
    groups: int = 1,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    """Cotangents of a look-up whose samples are all places; a value of the image adds up what all places give it."""
    x, ids = _at_places(images, anchors, windows, groups)
    d = _detect_at_places(x, ids, epsilon)
    n_samples, n_places, _ = d.index.shape
    if targets is not None:
        of_tables = np.asarray(targets)[groups_of(len(anchors), groups)][:, None]
        dy = np.reshape(dy, (n_samples, n_places, np.shape(dy)[-1]))
        of = sparse_lookup_vjp(weights, d, of_tables, dy, accumulate)
    else:
        of = lookup_vjp(weights, d, _dy_of_groups(dy, d, groups, np.shape(weights)[2]), accumulate, groups)
    d_margin = of["margin"].map(lambda a: a.reshape(n_samples, n_places * len(anchors)))
    of_x = detect_vjp(x, _side_by_side(ids), d_margin, accumulate)
    return {"weights": of["weights"], "images": of_x.map(lambda a: a[:, :-1].reshape(np.shape(images)))}


def _dy_of_groups(dy: Any, d: Any, groups: int, n_outputs: int) -> np.ndarray:
    """The cotangent of outputs of groups side by side, ``[B, P, G, O]``."""
    return np.reshape(dy, (*np.shape(d.index)[:2], groups, n_outputs))


def _side_by_side(ids: np.ndarray) -> np.ndarray:
    """Anchors of detectors at all places as those of as many detectors."""
    return ids.reshape(ids.shape[0] * ids.shape[1], *ids.shape[2:])


def _detect_at_places(x: np.ndarray, ids: np.ndarray, epsilon: float) -> Detection:
    d = detect(x, _side_by_side(ids), epsilon)
    return Detection(*(np.reshape(a, (len(x), *ids.shape[:2])) for a in d[:3]), d.bits)


def conv_lut(
    images: Any,
    weights: Any,
    anchors: Any,
    *,
    windows: Any,
    read: str | None = None,
    scalars: dict[str, float] | None = None,
    n_ways: int = 2,
    groups: int = 1,
    keep: Any = None,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> Sum:
    """`lut_at_places`; with a read `scored_lut` of the window at each place, and `keep` ``[..., T]`` of an image at all of them."""
    if read is None:
        options: dict[str, Any] = {"windows": windows, "groups": groups, "epsilon": epsilon}
        return lut_at_places(images, weights, anchors, **options, accumulate=accumulate)
    ways = _ways_at_places(*_at_places(images, anchors, windows, groups), read, scalars or {}, n_ways)
    y = scored_lut(ways, weights, read, groups, False, _keep_at_places(keep, ways), accumulate)
    shape = (*np.shape(images)[:-3], *windows.places, math.prod(y.value.shape[2:]))
    return y.map(lambda a: a.reshape(shape))


def conv_lut_vjp(
    images: Any,
    weights: Any,
    anchors: Any,
    dy: Any,
    *,
    windows: Any,
    read: str | None = None,
    scalars: dict[str, float] | None = None,
    n_ways: int = 2,
    groups: int = 1,
    keep: Any = None,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    if read is None:
        options: dict[str, Any] = {"windows": windows, "groups": groups, "epsilon": epsilon}
        return lut_at_places_vjp(images, weights, anchors, None, dy, **options, accumulate=accumulate)
    x, ids = _at_places(images, anchors, windows, groups)
    ways = _ways_at_places(x, ids, read, scalars or {}, n_ways)
    dy = _dy_of_groups(dy, ways[0], groups, _shape_of(weights)[2])
    of = scored_vjp(ways, weights, dy, read, groups, False, _keep_at_places(keep, ways), accumulate)
    at_places = _side_by_side(ids)
    du = of.pop("margins").map(lambda a: a.reshape(len(x), *at_places.shape[:2]))
    of_x = margins_vjp(x[:, None], at_places, du, 1, accumulate)
    of["images"] = of_x.map(lambda a: a[:, 0, :-1].reshape(np.shape(images)))
    of_keep = of.pop("keep")
    of_images = Sum(
        of_keep.value.sum(1), of_keep.size.sum(1), of_keep.depth.max(1) + len(ids), of_keep.error.sum(1)
    )
    of["keep"] = of_images.map(lambda a: a.reshape(*np.shape(images)[:-3], len(anchors)))
    return of


def _ways_at_places(
    x: np.ndarray, ids: np.ndarray, read: str, scalars: dict[str, float], n_ways: int
) -> list[Way]:
    u = margins(x[:, None], _side_by_side(ids))
    return ways_of(read, u.reshape(len(x), *ids.shape[:3]), scalars, n_ways)


def _keep_at_places(keep: Any, ways: list[Way]) -> Any:
    n_samples, n_places, n_tables = ways[0].index.shape
    if keep is None:
        return None
    each = np.reshape(keep, (n_samples, 1, n_tables))
    return np.broadcast_to(each, (n_samples, n_places, n_tables))


def lut_attention(
    x: Any,
    weights: Any,
    anchors: Any,
    positions: Any = None,
    where: Where = EVERY_PAIR,
    *,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> Sum:
    """``lookup_attention(weights, d, d, detect_signs(positions))`` with ``d = detect(x, anchors)``."""
    d = detect(x, anchors, epsilon)
    e = None if positions is None else detect_signs(positions)
    return lookup_attention(weights, d, d, e, where, accumulate)


def lut_attention_vjp(
    x: Any,
    weights: Any,
    anchors: Any,
    positions: Any,
    dy: Any,
    where: Where = EVERY_PAIR,
    *,
    epsilon: float = 0.0,
    accumulate: float | None = None,
) -> dict[str, Sum]:
    """Return the sum of both cotangents of the margin of a detection that is query and key."""
    d = detect(x, anchors, epsilon)
    e = None if positions is None else detect_signs(positions)
    of = lookup_attention_vjp(weights, d, d, e, dy, where, accumulate)
    both = added(of["query"], of["key"])
    cotangents = {"weights": of["weights"], "x": detect_vjp(x, anchors, both, accumulate)}
    if positions is not None:
        cotangents["positions"] = detect_signs_vjp(positions, of["position"])
    return cotangents


# ------------------------------------------------------------------------------------- logic
# Gate g of inputs a, b answers bit 3 - (2 a + b) of g: its truth table, read most significant bit first over ab = 00, 01, 10, 11.
TRUTH = np.array([[g >> 3 - address & 1 for address in range(4)] for g in range(16)], np.float64)
# Coefficients of 1, a, b, ab of the polynomial through (f00, f01, f10, f11).
GATES = TRUTH @ np.array([[1, 0, 0, 0], [-1, 0, 1, 0], [-1, 1, 0, 0], [1, -1, -1, 1]], np.float64).T


def softmax(logits: np.ndarray) -> np.ndarray:
    """``exp(logits) / sum(exp(logits))`` over the last axis."""
    z = wide(logits)
    e = np.exp(z - np.max(z, -1, keepdims=True, initial=-np.inf))
    return e / np.sum(e, -1, keepdims=True)


LOGITS_DEPTH = (
    64  # softmax of 16 (a difference, the exponential: 2 units; a sum, a quotient) and a sum of 16 products
)


def gate_coefficients(logits: np.ndarray, hard: bool = False) -> Sum:
    """``c = softmax(logits) @ M``, ``[G, 16]`` to ``[4, G]``; hard: the row of M of the (first) largest logit."""
    if hard:
        return exactly(GATES[np.argmax(wide(logits), -1)].T)
    p = softmax(logits)
    value, size = (p @ GATES).T, (p @ np.abs(GATES)).T
    # The exponential of a difference has the relative error of the difference's rounding.
    spread = np.ptp(wide(logits), -1) if logits.size else np.zeros(logits.shape[:1])
    return Sum(value, size, np.broadcast_to(LOGITS_DEPTH + 2 * spread, value.shape), np.zeros(value.shape))


def gate_coefficients_vjp(logits: np.ndarray, s: Sum, hard: bool = False) -> Sum:
    """``u = M s;  d logits_i = p_i (u_i - p . u)``; 0 where the gate is chosen. s: ``[4, G]``, of the coefficients."""
    if hard:
        return exactly(np.zeros(logits.shape))
    p = softmax(logits)
    u, size = s.value.T @ GATES.T, s.size.T @ np.abs(GATES).T
    spread = np.ptp(wide(logits), -1) if logits.size else np.zeros(len(logits))
    depth = (LOGITS_DEPTH + 2 * spread + 4 + np.max(s.depth, 0, initial=0))[:, None]
    value = p * (u - np.sum(p * u, -1, keepdims=True))
    size = p * (size + np.sum(p * size, -1, keepdims=True))
    return Sum(value, size, np.broadcast_to(depth, value.shape), np.zeros(value.shape))


def read(x: np.ndarray, wires: np.ndarray) -> np.ndarray:
    """The inputs of each gate: ``[..., I]`` and ``[G, n]`` to ``[..., G, n]``."""
    if np.size(wires) == 0:
        return np.zeros((*np.shape(x)[:-1], *np.shape(wires)))
    return wide(x)[..., clamped(wires, np.shape(x)[-1])]


def write(x: np.ndarray, wires: np.ndarray, addends: Sum) -> Sum:
    """The reverse of `read`: each input receives the sum over the places that read it."""
    totals = Totals(np.shape(x))
    *batch, _, _ = np.indices(addends.value.shape, sparse=True)
    if np.size(wires):
        totals.add((*batch, clamped(wires, np.shape(x)[-1])), addends)
    return totals.sum()


def over_samples(addends: Sum, rank: int = 1) -> Sum:
    """The sum over all leading axes of ``[..., G]``, or of what has another rank."""
    shape = addends.value.shape[addends.value.ndim - rank :]
    totals = Totals(shape)
    totals.add(tuple(np.indices(addends.value.shape, sparse=True)[addends.value.ndim - rank :]), addends)
    return totals.sum()


def _rounded(value: np.ndarray, size: np.ndarray, depth: float) -> Sum:
    value, size = np.broadcast_arrays(value, size)
    return Sum(value, size, np.full(value.shape, float(depth)), np.zeros(value.shape))


class InIntegers:
    """Gates in fixed point: products as the dtype rounds them, from the left, each of which is an addend.

    Args:
      arrays: the wider dtype of these is that of products.
    """

    def __init__(self, x: np.ndarray, parameter: np.ndarray, wires: np.ndarray, accumulate: float):
        self.dtype = np.result_type(accumulator(x.dtype), accumulator(parameter.dtype))
        self.shape, self.ids, self.scale = np.shape(x), clamped(wires, np.shape(x)[-1]), accumulate
        self.parameter = np.asarray(parameter).astype(self.dtype)
        n_read = (*self.shape[:-1], *np.shape(wires))
        self.read = (
            np.asarray(x).astype(self.dtype)[..., self.ids]
            if np.size(wires)
            else np.zeros(n_read, self.dtype)
        )

    def product(self, *factors: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return functools.reduce(operator.mul, (np.asarray(f).astype(self.dtype) for f in factors))

    def share(self, inputs: np.ndarray, slot: int, without: int | None = None) -> np.ndarray:
        of_wires = np.moveaxis(inputs, -1, 0)
        factors = [a if slot >> i & 1 else 1 - a for i, a in enumerate(of_wires) if i != without]
        return self.product(*factors) if factors else np.ones(inputs.shape[:-1], self.dtype)

    def outputs(self, products: Sequence[np.ndarray]) -> Sum:
        shape = self.read.shape[:-1]
        totals = Totals(shape, self.scale, self.dtype)
        for product in products:
            totals.add(tuple(np.indices(shape, sparse=True)), product)
        return totals.sum()

    def inputs(self, by_wire: Sequence[Sequence[np.ndarray]]) -> Sum:
        totals = Totals(self.shape, self.scale, self.dtype)
        *batch, _ = np.indices(self.read.shape[:-1], sparse=True)
        for place, products in enumerate(by_wire):
            for product in products if self.ids.size else ():
                totals.add((*batch, self.ids[:, place]), product)
        return totals.sum()

    def parameters(self, products: Sequence[np.ndarray], axis: int) -> Sum:
        n_gates = len(self.ids)
        found = []
        for product in products:
            totals = Totals((n_gates,), self.scale, self.dtype)
            totals.add((np.arange(n_gates),), product)
            found.append(totals.sum())
        return Sum(*(np.stack(parts, axis) for parts in zip(*found, strict=True)))

    def slopes(self, dy: np.ndarray, inputs: np.ndarray) -> Sum:
        """Cotangents of inputs, of which each slot of a table has an addend."""
        n, t = self.ids.shape[1], self.parameter
        each = [
            [
                self.product(dy, self.product(t[:, k] if k >> i & 1 else -t[:, k], self.share(inputs, k, i)))
                for k in range(2**n)
            ]
            for i in range(n)
        ]
        return self.inputs(each)


def bilinear_gates(
    x: np.ndarray, coefficients: np.ndarray, wires: np.ndarray, accumulate: float | None = None
) -> Sum:
    """``y = c0 + c1 a + c2 b + c3 a b`` with ``a, b = x[wires]``."""
    if accumulate is not None:
        of = InIntegers(x, coefficients, wires, accumulate)
        (a, b), (c0, c1, c2, c3) = np.moveaxis(of.read, -1, 0), of.parameter
        return of.outputs([c0, of.product(c1, a), of.product(c2, b), of.product(c3, a, b)])
    c, (a, b) = wide(coefficients), np.moveaxis(read(x, wires), -1, 0)
    terms = [c[0] + 0 * a, c[1] * a, c[2] * b, c[3] * a * b]
    return _rounded(c[0] + c[1] * a + c[2] * b + c[3] * a * b, sum(np.abs(t) for t in terms), 8)


def bilinear_gates_vjp(
    x: np.ndarray, coefficients: np.ndarray, wires: np.ndarray, dy: Any, accumulate: float | None = None
) -> dict[str, Sum]:
    """``d a = g (c1 + c3 b)``, ``d b = g (c2 + c3 a)``; ``d c`` = sums over samples of ``g, g a, g b, g a b``."""
    if accumulate is not None:
        of = InIntegers(x, coefficients, wires, accumulate)
        (a, b), (_, c1, c2, c3) = np.moveaxis(of.read, -1, 0), of.parameter
        ends = [[of.product(dy, c1), of.product(dy, c3, b)], [of.product(dy, c2), of.product(dy, c3, a)]]
        sums = [of.product(dy), of.product(dy, a), of.product(dy, b), of.product(dy, a, b)]
        return {"x": of.inputs(ends), "coefficients": of.parameters(sums, 0)}
    c, g, (a, b) = wide(coefficients), wide(dy), np.moveaxis(read(x, wires), -1, 0)
    ends = np.stack([g * (c[1] + c[3] * b), g * (c[2] + c[3] * a)], -1)
    size = np.stack(
        [np.abs(g) * (np.abs(c[1]) + np.abs(c[3] * b)), np.abs(g) * (np.abs(c[2]) + np.abs(c[3] * a))], -1
    )
    of_coefficients = [over_samples(_rounded(v, np.abs(v), 3)) for v in (g, g * a, g * b, g * a * b)]
    stacked = Sum(*(np.stack(parts) for parts in zip(*of_coefficients, strict=True)))
    return {"x": write(x, wires, _rounded(ends, size, 6)), "coefficients": stacked}


class _Layers(NamedTuple):
    """Outputs of every layer of a network of gates, the inputs first, and sums of the magnitudes that they are made of."""

    values: list[np.ndarray]
    sizes: list[np.ndarray]

    @classmethod
    def of(
        cls, x: np.ndarray, coefficients: np.ndarray, wires: np.ndarray, sizes: Sequence[int]
    ) -> "_Layers":
        values, magnitudes, first = [wide(x)], [np.abs(wide(x))], 0
        for size in sizes:
            c, own = wide(coefficients)[:, first : first + size], np.asarray(wires)[first : first + size]
            for found, terms in ((values, c), (magnitudes, np.abs(c))):
                a, b = np.moveaxis(read(found[-1], own), -1, 0)
                found.append(terms[0] + terms[1] * a + terms[2] * b + terms[3] * a * b)
            first += size
        return cls(values, magnitudes)


_ROUNDINGS = 8  # of a gate


def gate_network(x: np.ndarray, coefficients: np.ndarray, wires: np.ndarray, sizes: Sequence[int]) -> Sum:
    """Layers of `bilinear_gates`, each of which reads the one before."""
    layers = _Layers.of(x, coefficients, wires, sizes)
    return _rounded(layers.values[-1], layers.sizes[-1], _ROUNDINGS * len(sizes))


def gate_network_vjp(
    x: np.ndarray, coefficients: np.ndarray, wires: np.ndarray, sizes: Sequence[int], dy: Any
) -> dict[str, Sum]:
    """The formulas of `bilinear_gates_vjp` for each layer, from the last to the first."""
    layers, last = _Layers.of(x, coefficients, wires, sizes), len(wires)
    g, of_coefficients = exactly(dy), []
    for layer in reversed(range(len(sizes))):
        c, own = (
            wide(coefficients)[:, last - sizes[layer] : last],
            np.asarray(wires)[last - sizes[layer] : last],
        )
        last -= sizes[layer]
        depth = np.max(g.depth, initial=0) + _ROUNDINGS * layer + 6
        a, b = np.moveaxis(read(layers.values[layer], own), -1, 0)
        of_a, of_b = np.moveaxis(read(layers.sizes[layer], own), -1, 0)
        addends = [(g.value, g.size), (g.value * a, g.size * of_a), (g.value * b, g.size * of_b)]
        addends.append((g.value * a * b, g.size * of_a * of_b))
        found = [over_samples(_rounded(value, size, depth)) for value, size in addends]
        of_coefficients.append(Sum(*(np.stack(parts) for parts in zip(*found, strict=True))))
        ends = np.stack([g.value * (c[1] + c[3] * b), g.value * (c[2] + c[3] * a)], -1)
        c = np.abs(c)
        size = np.stack([g.size * (c[1] + c[3] * of_b), g.size * (c[2] + c[3] * of_a)], -1)
        g = write(layers.values[layer], own, _rounded(ends, size, depth))
    parts = zip(*reversed(of_coefficients), strict=True)
    return {"x": g, "coefficients": Sum(*(np.concatenate(part, 1) for part in parts))}


class _Trees:
    """Values of trees at all places, and the place that each group chose.

    Attributes:
      ids: of the value of the image that each leaf is at each place: ``[K, leaves, rows, columns]``; -1: zero, around the image.
      nodes: of each leaf, then of each node above, values ``[K, rows, columns, B]``; the root last.
      y: ``[K, groups, B]``. chosen: the row and column of the place that it is from, ``[K, groups, B, 2]``.
    """

    def __init__(self, x: np.ndarray, coefficients: np.ndarray, leaves: np.ndarray, places: Any):
        (height, width), (kernel_rows, kernel_columns) = places.image, places.kernel
        x, c, leaves = wide(x), wide(coefficients), np.asarray(leaves)
        n_channels = len(x) // (height * width)
        rows, columns = (
            len(range(0, n + 2 * p - k + 1, s))
            for n, p, k, s in zip(places.image, places.padding, places.kernel, places.stride, strict=True)
        )
        self.ids = np.full((*leaves.shape, rows, columns), -1)
        for k, leaf, r, q in np.ndindex(self.ids.shape):
            value = min(max(int(leaves[k, leaf]), 0), kernel_rows * kernel_columns * n_channels - 1)
            pixel, channel = divmod(value, n_channels)
            row = r * places.stride[0] - places.padding[0] + pixel // kernel_columns
            column = q * places.stride[1] - places.padding[1] + pixel % kernel_columns
            if 0 <= row < height and 0 <= column < width:
                self.ids[k, leaf, r, q] = (channel * height + row) * width + column
        padded = np.concatenate([x, np.zeros((1, x.shape[1]))])
        self.nodes = list(np.moveaxis(padded[self.ids], 1, 0))
        self.c = c[..., None, None, None]
        for node in range(c.shape[2]):
            a, b, of = self.nodes[2 * node], self.nodes[2 * node + 1], self.c[:, :, node]
            self.nodes.append(of[0] + of[1] * a + of[2] * b + of[3] * a * b)
        self._choose(places, rows, columns)

    def _choose(self, places: Any, rows: int, columns: int) -> None:
        of_rows, of_columns = (
            [[i for i in range(start, start + k) if 0 <= i < n] for start in range(-p, n + p - k + 1, k)]
            for n, k, p in zip((rows, columns), places.pool, places.pool_padding, strict=True)
        )
        groups = [[(r, q) for r in one for q in other] for one in of_rows for other in of_columns]
        root = self.nodes[-1]
        self.y = np.zeros((len(root), len(groups), root.shape[-1]))
        self.chosen = np.zeros((*self.y.shape, 2), int)
        for k, g, b in np.ndindex(self.y.shape):
            best = groups[g][0]
            for place in groups[g][1:]:  # the first of the largest; the last NaN
                if root[k, *place, b] > root[k, *best, b] or np.isnan(root[k, *place, b]):
                    best = place
            self.y[k, g, b], self.chosen[k, g, b] = root[k, *best, b], best

    def at_chosen(self, values: np.ndarray) -> np.ndarray:
        """Return the values ``[K, rows, columns, B]`` at the places that were chosen: ``[K, groups, B]``."""
        k, _, b = np.indices(self.y.shape)
        return values[k, self.chosen[..., 0], self.chosen[..., 1], b]

    def cotangents(self, dy: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the cotangents of all nodes at the chosen places, in their order, and their values there: ``[K, groups, B]`` each."""
        values = [self.at_chosen(node) for node in self.nodes]
        g: list[Any] = [None] * len(values)
        g[-1] = wide(dy)
        n_leaves = self.ids.shape[1]
        for node in reversed(range(n_leaves - 1)):
            of = self.c[:, :, node, ..., 0]
            a, b = values[2 * node], values[2 * node + 1]
            g[2 * node] = g[n_leaves + node] * (of[1] + of[3] * b)
            g[2 * node + 1] = g[n_leaves + node] * (of[2] + of[3] * a)
        return g, values


def logic_trees(x: np.ndarray, coefficients: np.ndarray, leaves: np.ndarray, places: Any) -> Sum:
    """Trees of gates at all places of a window, and the largest of each group of places; samples last."""
    of, magnitudes = _Trees(x, coefficients, leaves, places), _magnitudes(x, coefficients, leaves, places)
    return _rounded(of.y, _like(of, magnitudes).at_chosen(magnitudes.nodes[-1]), 8 * leaves.shape[1])


def logic_trees_vjp(
    x: np.ndarray, coefficients: np.ndarray, leaves: np.ndarray, places: Any, dy: np.ndarray
) -> dict[str, Sum]:
    """Cotangents from the root to the leaves of the place that a group chose: for each node as `bilinear_gates_vjp` says."""
    of = _Trees(x, coefficients, leaves, places)
    g, values = of.cotangents(dy)
    sizes, magnitudes = _like(of, _magnitudes(x, coefficients, leaves, places)).cotangents(np.abs(wide(dy)))
    n_leaves = leaves.shape[1]
    depth = 8 * n_leaves
    of_x = Totals(np.shape(x))
    k, _, sample = np.indices(of.y.shape)
    for leaf in range(n_leaves):
        ids = of.ids[k, leaf, of.chosen[..., 0], of.chosen[..., 1]]
        inside = ids >= 0
        of_x.add((ids[inside], sample[inside]), _rounded(g[leaf][inside], sizes[leaf][inside], depth))
    of_coefficients = Totals(np.shape(coefficients))
    for node in range(n_leaves - 1):
        up, size = g[n_leaves + node], sizes[n_leaves + node]
        a, b = values[2 * node : 2 * node + 2]
        size_a, size_b = magnitudes[2 * node : 2 * node + 2]
        terms = (
            (up, size),
            (up * a, size * size_a),
            (up * b, size * size_b),
            (up * a * b, size * size_a * size_b),
        )
        for number, (value, of_size) in enumerate(terms):
            of_coefficients.add((number, k, node), _rounded(value, of_size, depth))
    return {"x": of_x.sum(), "coefficients": of_coefficients.sum()}


def _magnitudes(x: np.ndarray, coefficients: np.ndarray, leaves: np.ndarray, places: Any) -> _Trees:
    return _Trees(np.abs(wide(x)), np.abs(wide(coefficients)), leaves, places)


def _like(of: _Trees, other: _Trees) -> _Trees:
    """The other trees, with the places that these chose."""
    other.chosen = of.chosen
    return other


def logic_gates(x: np.ndarray, logits: np.ndarray, wires: np.ndarray, hard: bool = False) -> Sum:
    """``bilinear_gates(x, gate_coefficients(logits), wires)``."""
    c = gate_coefficients(logits, hard)
    y = bilinear_gates(x, c.value, wires)
    a, b = np.moveaxis(np.abs(read(x, wires)), -1, 0)
    size = c.size[0] + c.size[1] * a + c.size[2] * b + c.size[3] * a * b
    return Sum(y.value, size, y.depth + np.max(c.depth, 0), y.error)


def logic_gates_vjp(
    x: np.ndarray, logits: np.ndarray, wires: np.ndarray, dy: Any, hard: bool = False
) -> dict[str, Sum]:
    c = gate_coefficients(logits, hard)
    of = bilinear_gates_vjp(x, c.value, wires, dy)
    sizes = bilinear_gates_vjp(np.abs(wide(x)), c.size, wires, np.abs(wide(dy)))["x"].size
    depth = of["x"].depth + np.max(c.depth, initial=0)
    return {
        "x": Sum(of["x"].value, sizes, depth, of["x"].error),
        "logits": gate_coefficients_vjp(logits, of["coefficients"], hard),
    }


def soft_lut(x: np.ndarray, table: np.ndarray, wires: np.ndarray, accumulate: float | None = None) -> Sum:
    """``y[g] = sum_k table[g, k] prod_l (x_l if bit l of k else 1 - x_l)`` with ``x_l = x[wires[g, l]]``."""
    if accumulate is not None:
        of = InIntegers(x, table, wires, accumulate)
        slots = range(table.shape[1])
        return of.outputs([of.product(of.parameter[:, k], of.share(of.read, k)) for k in slots])
    inputs, t = read(x, wires), wide(table)
    n = np.shape(wires)[1]
    value = sum(t[:, k] * share(inputs, k) for k in range(2**n))
    size = sum(np.abs(t[:, k]) for k in range(2**n)) * np.prod(1 + 2 * np.abs(inputs), -1)
    return _rounded(value, size, 2**n + 4 * n)


def share(inputs: np.ndarray, k: int, without: int | None = None) -> np.ndarray:
    """``prod over l of (x_l if bit l of k else 1 - x_l)``; `without` leaves one l out."""
    n = inputs.shape[-1]
    factors = [inputs[..., i] if k >> i & 1 else 1 - inputs[..., i] for i in range(n) if i != without]
    return np.prod(np.stack(factors, -1), -1) if factors else np.ones(inputs.shape[:-1])


def soft_lut_vjp(
    x: np.ndarray, table: np.ndarray, wires: np.ndarray, dy: Any, accumulate: float | None = None
) -> dict[str, Sum]:
    """The derivatives of the formula:

    d table[g, k] = sum over samples of dy * prod_l (...)
    d x_l        += dy * sum_k table[g, k] * (+1 if bit l of k else -1) * prod over the others (...)
    """
    if accumulate is not None:
        of = InIntegers(x, table, wires, accumulate)
        sums = [of.product(dy, of.share(of.read, k)) for k in range(table.shape[1])]
        return {"x": of.slopes(dy, of.read), "table": of.parameters(sums, 1)}
    inputs, t, g = read(x, wires), wide(table), wide(dy)
    n = np.shape(wires)[1]
    shares = np.stack([g * share(inputs, k) for k in range(2**n)], -1)
    largest = np.prod(1 + np.abs(inputs), -1)[..., None]
    of_table = over_samples(_rounded(shares, np.abs(g)[..., None] * largest, 3 * n + 1), rank=2)
    ends, sizes = [], []
    for i in range(n):
        signed = [t[:, k] * (1 if k >> i & 1 else -1) * share(inputs, k, i) for k in range(2**n)]
        ends.append(g * sum(signed))
        others = np.prod(1 + 2 * np.abs(np.delete(inputs, i, -1)), -1)
        sizes.append(np.abs(g) * np.sum(np.abs(t), -1) * others)
    of_x = _rounded(np.stack(ends, -1), np.stack(sizes, -1), 2**n + 4 * n)
    return {"x": write(x, wires, of_x), "table": of_table}


def address(x: np.ndarray, wires: np.ndarray) -> np.ndarray:
    """Bit l is ``x[wires[g, l]] > 0``, wire 0 the least significant: ``[..., G]``."""
    bits = read(x, wires) > 0
    return np.sum(bits.astype(np.int64) << np.arange(np.shape(wires)[1]), -1)


def binary_lut(x: np.ndarray, table: np.ndarray, wires: np.ndarray, accumulate: float | None = None) -> Sum:
    """``y[g] = table[g, address]``: no sum."""
    return exactly(wide(table)[np.arange(len(table)), address(x, wires)])


def binary_lut_vjp(
    x: np.ndarray, table: np.ndarray, wires: np.ndarray, dy: Any, accumulate: float | None = None
) -> dict[str, Sum]:
    """The extended finite difference:

    d table[g, address] += dy
    d x_l += dy * alpha * sum_k beta**H(k, address; not counting l) * (+1 if bit l of k else -1) * table[g, k]
    with alpha = 0.5 * 0.75**(n - 1), beta = 1/3, H the number of bits that differ
    """
    if accumulate is not None:
        of, at = InIntegers(x, table, wires, accumulate), address(x, wires)
        sums = [np.where(at == k, of.product(dy), 0) for k in range(table.shape[1])]
        softened = np.where(of.read > 0, 0.75, 0.25).astype(of.dtype)
        return {"x": of.slopes(of.product(0.5, dy), softened), "table": of.parameters(sums, 1)}
    g, t, at = wide(dy), wide(table), address(x, wires)
    n = np.shape(wires)[1]
    hit = at[..., None] == np.arange(2**n)
    of_table = over_samples(_rounded(np.where(hit, g[..., None], 0), np.abs(g)[..., None] * hit, 1), rank=2)
    ends, sizes = [], []
    for i in range(n):
        total, size = np.zeros(g.shape), np.zeros(g.shape)
        for k in range(2**n):
            differing = np.bitwise_count((k ^ at) & ~(1 << i))
            addend = 0.5 * 0.75 ** (n - 1) * (1 / 3) ** differing * (1 if k >> i & 1 else -1) * t[:, k]
            total, size = total + addend, size + np.abs(addend)
        ends.append(g * total)
        sizes.append(np.abs(g) * size)
    of_x = _rounded(np.stack(ends, -1), np.stack(sizes, -1), 2**n + 4)
    return {"x": write(x, wires, of_x), "table": of_table}


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """Sample ``32 w + j`` is bit j of word w, what is not 0 is 1: ``[F, B]`` to uint32 ``[F, ceil(B / 32)]``."""
    n_features, n_samples = bits.shape
    words = np.zeros((n_features, -(-n_samples // 32)), np.uint32)
    for feature, sample in np.ndindex(bits.shape):
        if bits[feature, sample] != 0:
            words[feature, sample // 32] |= np.uint32(1 << sample % 32)
    return words


def unpack_bits(words: np.ndarray, n_samples: int) -> np.ndarray:
    """The reverse: bool ``[F, n_samples]``."""
    bits = np.zeros((len(words), n_samples), bool)
    for feature, sample in np.ndindex(bits.shape):
        bits[feature, sample] = int(words[feature, sample // 32]) >> sample % 32 & 1
    return bits


def packed_lut(words: np.ndarray, truth: np.ndarray, wires: np.ndarray) -> np.ndarray:
    """Bit j of ``[I, ...]`` words: ``y[g] = truth[g, address]``, bit l of the address from ``words[wires[g, l]]``."""
    y = np.zeros((len(truth), *words.shape[1:]), np.uint32)
    ids = clamped(wires, len(words))
    for g, at in itertools.product(range(len(truth)), np.ndindex(words.shape[1:])):
        read_words = [int(words[(i, *at)]) for i in ids[g]]
        for j in range(32):
            slot = sum((w >> j & 1) << place for place, w in enumerate(read_words))
            y[(g, *at)] |= np.uint32(int(truth[g, slot]) << j)
    return y


# ------------------------------------------------------------------------------------- around the ops
def scale_gradient_vjp(dy: Any, factor: float) -> Sum:
    """The identity, its cotangent times `factor`."""
    return exactly(dy).times(factor)


def readers(wires: np.ndarray, n_inputs: int, fan_out: int | None = None) -> np.ndarray:
    """Readers of each input, as ids ``n * gate + wire``, ascending, padded with -1."""
    places: list[list[int]] = [[] for _ in range(n_inputs)]
    for place, i in enumerate(np.ravel(wires)):
        places[int(i)].append(place)
    fan_out = max(map(len, places), default=0) if fan_out is None else fan_out
    return np.array([p + [-1] * (fan_out - len(p)) for p in places], int).reshape(n_inputs, fan_out)


def ordered_pairs(candidates: Any) -> set[tuple[int, int]]:
    """The ``n (n - 1)`` ordered pairs of distinct candidates that an anchor pair is drawn from, uniformly."""
    return set(itertools.permutations([int(c) for c in candidates if c >= 0], 2))


# ------------------------------------------------------------------------------------- updates of tables
def touched_by_lookup(n_rows: int, d: Detection) -> np.ndarray:
    """Return a mask of the rows that were looked up: bool ``[T, R]``."""
    touched = np.zeros((d.index.shape[-1], n_rows), bool)
    touched[np.arange(d.index.shape[-1]), clamped(d.index, n_rows)] = True
    return touched


def touched_by_attention(
    weights: np.ndarray,
    query: Detection,
    key: Detection,
    position: Detection | None,
    where: Where = EVERY_PAIR,
) -> np.ndarray:
    """Return a mask of the rows that a pair that counts has looked up."""
    touched = np.zeros(weights.shape[:2], bool)
    for *_, row in Meetings(query, key, position, where):
        touched[np.arange(len(touched)), row] = True
    return touched


def updated(
    weights: np.ndarray,
    gradient: np.ndarray,
    touched: np.ndarray,
    rate: float,
    rule: str,
    state: dict[str, np.ndarray],
    *,
    weight_decay: float = 0.0,
    eps: float = 0.0,
    momentum: float = 0.0,
    b1: float = 0.0,
    b2: float = 0.0,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A table ``[T, R, O]`` and the state of its rows after a step of a rule; rows that were not touched stay.

    row -= rate * (direction + weight_decay * row), with the gradient g of a row summed over all its look-ups:

    SGD          direction = g
    RowAdagrad   s += mean(g**2);                                 direction = g / sqrt(s + eps)
    RowMomentum  v = momentum * v + g;                            direction = v
    RowAdam      n += 1; v = b2 * v + (1 - b2) * mean(g**2); m = b1 * m + (1 - b1) * g
                 direction = m / (1 - b1**n) / (sqrt(v / (1 - b2**n)) + eps)
    """
    w, g = wide(weights), wide(gradient)
    s = {name: wide(a) for name, a in state.items()}
    square = np.mean(g**2, -1, keepdims=True) if g.shape[-1] else np.zeros((*g.shape[:-1], 1))
    if rule == "SGD":
        direction, new = g, {}
    elif rule == "RowAdagrad":
        new = {"sum_of_squares": s["sum_of_squares"] + square}
        direction = g / np.sqrt(new["sum_of_squares"] + eps)
    elif rule == "RowMomentum":
        new = {"velocity": momentum * s["velocity"] + g}
        direction = new["velocity"]
    elif rule == "RowAdam":
        n = s["count"] + 1
        new = {"count": n, "second_moment": b2 * s["second_moment"] + (1 - b2) * square}
        first = g
        if b1:
            new["first_moment"] = b1 * s["first_moment"] + (1 - b1) * g
            first = new["first_moment"] / (1 - b1**n)
        direction = first / (np.sqrt(new["second_moment"] / (1 - b2**n)) + eps)
    else:
        raise ValueError(f"updated: rule is {rule!r}; expected SGD, RowAdagrad, RowMomentum or RowAdam.")
    moved = w - rate * (direction + weight_decay * w)
    where = touched[..., None]
    return np.where(where, moved, w), {name: np.where(where, a, s[name]) for name, a in new.items()}

"""Sums over addressed rows."""

import dataclasses

import jax
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups, _nan
from lutjax.values._detection import Detection
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup(Call, op="lookup", table="weights", output="go"):
    """The call of `lutjax.lookup`.

    Attributes:
      weights: ``[T, R, O]`` floats.
      detection: arrays ``[B, T]``; ids may be out of range.
      groups: ``G``; each group's detectors are contiguous. accumulate: see the op.

    Output and its cotangent: ``[B, G * O]``. Differentiable: `weights`, `detection`.
    """

    weights: jax.Array = shared("t r o")
    detection: Detection = batched(1, "t")
    groups: int = static(default=1)
    accumulate: FixedPoint | None = static(default=None)


def lookup(
    weights: Float[Array, "detectors rows outputs"],
    detection: Detection,
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any outputs"]:
    """Sum the rows addressed by detectors: ``y[b] = sum_t weights[t, index[b, t]]``.

    The output is piecewise constant, so margins receive a *surrogate gradient*: the loss in the sum
    if the closest comparison flipped, times a slope that grows as the comparison gets closer.

    Definition for one sample. ``dy`` is the output cotangent, ``dmargin`` the margin cotangent, and
    ``groups=None`` means 1::

        t, index, margin = np.arange(len(weights)), detection.index, detection.margin
        row, flipped = weights[t, index], weights[t, index ^ detection.flip]
        y = row.reshape(groups, len(t) // groups, -1).sum(axis=1)

        surrogate_derivative = 0.5 * np.where(margin > 0, 1, -1) / (1 + np.abs(margin)) ** 2
        dy = dy[t // (len(t) // groups)]
        dmargin = surrogate_derivative * ((row - flipped) * dy).sum(axis=1)
        dweights = np.zeros_like(weights)
        dweights[t, index] = dy  # summed over samples

    Args:
      weights: ``[T, R, O]`` float32, bfloat16, float16 or float64, with ``R == 2**detection.bits``.
      detection: arrays ``[..., T]``. Out-of-range indices are clamped, traced or not.
      groups: number of groups ``G``. The first ``T / G`` tables are summed to the first output, and
        so on. None sums all tables to one output without a group axis.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[..., G, O]`` with `groups`; dtype ``weights.dtype``. 16-bit tables
      are accumulated in float32.

    Large rows are safe on CPUs and GPUs: both rows are subtracted, in at least float32, before
    multiplication by `dy`. The error is a rounding error in ``sum(|dy| |row - flipped row|)``, and
    only a difference beyond the dtype's range gives an infinity or NaN. On TPUs this holds for
    tables with more than 512 rows in vector memory or with gathered rows. For other tables the
    products of `dy` with all rows are subtracted: the error is about
    ``2**-20 * sum(|dy| (|row| + |flipped row|))``, and each of these sums must be finite.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, rows that do not fit the detection's bits, or
        groups that do not divide the detectors.

    Source: docs/semantics.md, sections 2 and 3.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> lutjax.lookup(jnp.array([[[1.0], [7.0]]]), d)
      Array([7.], dtype=float32)
    """
    detection = _checks.detection("lookup", "detection", detection, 1, "[..., detectors]")
    _checks.table("lookup", weights, detection.shape[-1], detection.bits, "detection")
    call = Lookup(
        as_jax(weights),
        detection,
        groups=_groups.number("lookup", groups, weights.shape[0]),
        accumulate=_checks.accumulation("lookup", accumulate),
    )
    y = _groups.split_groups(apply(call, implementation=implementation), groups)
    return _nan.propagate_nan(y, detection.margin)

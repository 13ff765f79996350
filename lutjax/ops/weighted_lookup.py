"""Weighted row sums."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedLookup(Call, op="weighted_lookup", table="weights", output="g o"):
    """The call of `lutjax.weighted_lookup`.

    Attributes:
      weights: ``[T, R, O]`` floats.
      index: int32 ``[B, T, K]``, ids, possibly out of range.
      coefficients: ``[B, T, K]`` floats.
      groups: ``G``. valued: number of leading ways with a value, at most ``K``. accumulate: see the
        op.

    Output and its cotangent: ``[B, G, O]``. Differentiable: `weights`, `coefficients`.
    """

    weights: jax.Array = shared("t r o")
    index: jax.Array = batched(2, "t k")
    coefficients: jax.Array = batched(2, "t k")
    groups: int = static(default=1)
    valued: int = static()
    accumulate: FixedPoint | None = static(default=None)


def weighted_lookup(
    weights: Float[Array, "detectors rows outputs"],
    index: Int[Array, "*batch detectors ways"],
    coefficients: Float[Array, "*batch detectors ways"],
    *,
    groups: int | None = None,
    valued: int | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any outputs"]:
    """Sum weighted rows: ``y[b] = sum_tk coefficients[b, t, k] * weights[t, index[b, t, k]]``.

    The primitive behind scored reads (`lutjax.reads`), product-key memories, hashed n-gram tables
    and top-k row mixtures. A coefficient equal to 0 reads and adds nothing, even if its row is NaN
    or infinite.

    Definition for one sample. ``dy`` is the output cotangent, ``groups=None`` means 1, and
    ``valued=None`` means ``K``::

        t = np.arange(len(weights))[:, None]
        rows = weights[t, index]  # [T, K, O]
        reads = (coefficients != 0) & (np.arange(index.shape[1]) < valued)
        weighted = np.where(reads, coefficients, 0)[..., None] * np.where(reads[..., None], rows, 0)
        y = weighted.reshape(groups, len(t) // groups * index.shape[1], -1).sum(axis=1)

        dy = dy[t // (len(t) // groups)]  # [T, 1, O]
        dcoefficients = (rows * dy).sum(axis=2)
        dweights = np.zeros_like(weights)  # summed over samples
        np.add.at(dweights, (t, index), np.where(reads, coefficients, 0)[..., None] * dy)

    Args:
      weights: ``[T, R, O]`` float32, bfloat16, float16 or float64.
      index: int32 ``[..., T, K]``, ``K`` rows per table. Out-of-range ids are clamped, traced or
        not.
      coefficients: ``[..., T, K]`` floats.
      groups: number of groups ``G``. The first ``T / G`` tables are summed to the first output, and
        so on. None sums all tables to one output without a group axis.
      valued: number of leading ways with a value. The remaining ways are not read in the forward
        pass and add nothing to table gradients. Their coefficients count as 0 but have a gradient.
        None means all.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[..., G, O]`` with `groups`; dtype ``weights.dtype``. 16-bit tables
      are accumulated in float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or groups that do not divide the tables.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> weights = jnp.array([[[1.0], [7.0]], [[2.0], [5.0]]])
      >>> index, coefficients = jnp.array([[0, 1], [1, 0]]), jnp.array([[0.5, 0.5], [1.0, 0.0]])
      >>> lutjax.weighted_lookup(weights, index, coefficients)
      Array([9.], dtype=float32)
      >>> lutjax.weighted_lookup(weights, index, coefficients, groups=2)
      Array([[4.],
             [5.]], dtype=float32)
    """
    op = "weighted_lookup"
    _checks.floats(op, "weights", weights, 3, "[detectors, rows, outputs]")
    n_detectors, n_rows, _ = weights.shape
    check_reads(op, n_detectors, index, coefficients)
    _checks.require(
        n_rows > 0 or not index.size, op, "weights", weights, "a table needs at least one row"
    )
    n_groups = _groups.number(op, groups, n_detectors)
    call = WeightedLookup(
        as_jax(weights),
        as_int32(index),
        as_jax(coefficients),
        groups=n_groups,
        valued=_validate_valued(valued, index.shape[-1]),
        accumulate=_checks.accumulation(op, accumulate),
    )
    y: jax.Array = apply(call, implementation=implementation)
    return y.reshape(*y.shape[:-2], y.shape[-1]) if groups is None else y


def check_reads(op: str, n_detectors: int, index: Any, coefficients: Any) -> None:
    """Check ids and coefficients ``[..., T, K]``."""
    _checks.integers(op, "index", index, -2, "[..., detectors, ways]")
    rule = f"its last axis but one must have size {n_detectors}, the number of tables"
    _checks.require(index.shape[-2] == n_detectors, op, "index", index, rule)
    _checks.floats(op, "coefficients", coefficients, -2, "[..., detectors, ways]")
    rule = f"index is {_checks.describe(index)}, and both must have the same shape"
    _checks.require(coefficients.shape == index.shape, op, "coefficients", coefficients, rule)


def _validate_valued(valued: Any, n_ways: int) -> int:
    if valued is None:
        return n_ways
    n = _checks.optional_integer("weighted_lookup", "valued", valued)
    rule = f"it must be from 0 to {n_ways}, the number of ways"
    _checks.require(0 <= n <= n_ways, "weighted_lookup", "valued", n, rule)
    return n

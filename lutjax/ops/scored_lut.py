"""Lookup tables with rows weighted by comparison scores."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lutjax._typing import Array, Scalar
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups
from lutjax.reads import Read
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax
from lutjax.values._quantized import QuantizedTables, exponents


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredLut(Call, op="scored_lut", table="weights", output="g o"):
    """The call of `lutjax.scored_lut`.

    Attributes:
      x: ``[B, H, I]`` floats; ``H`` is ``G``, or 1 if all groups share the input.
      weights: ``[T, R, O]`` floats, or int8 with `exponents`.
      anchors: int32 ``[T, C, 2]``, or ``[T, C]`` for single probes; ids may be out of range.
      scalars: ``[S]``, the read's scalars in `Read.initial` order and the score dtype.
      keep: ``[B, T]``, coefficient factors; None: 1.
      exponents: int32 ``[G, O]``, scales for rounding tables to int8 on read; None: no rounding.
      read: see the op. groups: ``G``. sum_groups: whether outputs are summed over groups.
      accumulate: see the op.

    Output and its cotangent: ``[B, G, O]``, or ``[B, 1, O]`` with `sum_groups`. Differentiable:
    `x`, floating-point `weights`, `scalars`, `keep`.
    """

    x: jax.Array = batched(2, "h i")
    weights: jax.Array = shared("t r o")
    anchors: jax.Array = shared("t c w")
    scalars: jax.Array = shared("s")
    keep: jax.Array | None = batched(1, "t", default=None)
    exponents: jax.Array | None = shared("g o", default=None)
    read: Read = static()
    groups: int = static(default=1)
    sum_groups: bool = static(default=False)
    accumulate: FixedPoint | None = static(default=None)

    def prepare(self) -> "ScoredLut":
        if not self.read.rounds_tables or self.exponents is not None:
            return self
        return self.replace(exponents=exponents(self.weights, self.groups))


def scored_lut(
    x: Float[Array, "*batch inputs"],
    weights: Float[Array, "detectors rows outputs"] | QuantizedTables,
    anchors: Int[Array, "detectors comparisons *pair"],
    scalars: Mapping[str, Scalar],
    *,
    read: Read,
    groups: int | None = None,
    sum_groups: bool = False,
    keep: Float[Array, "*leading detectors"] | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any outputs"]:
    """Apply a lookup-table layer with rows weighted by the comparisons' confidence.

    A replacement for dense layers: `lutjax.margins`, a read, and `lutjax.weighted_lookup` in one
    kernel per direction.

    Definition. Tables rounded to int8 have a straight-through gradient::

        if read.rounds_tables:
            tables = lutjax.quantize_tables(weights, groups=groups)
            exponents = tables.exponents.repeat(len(weights) // len(tables.exponents), axis=0)
            rounded = tables.values * 2.0 ** exponents[:, None]
            weights = lutjax.reads.straight_through(rounded, weights)
        index, coefficients = read(lutjax.margins(x, anchors, groups=groups), scalars)
        if keep is not None:
            coefficients = keep[..., None] * coefficients
        y = lutjax.weighted_lookup(weights, index, coefficients, groups=groups, valued=read.valued)
        if sum_groups:
            y = y.sum(axis=-2, keepdims=True)

    Args:
      x: ``[..., I]`` floats; with `groups` ``[..., G, I]``, or ``[..., 1, I]`` if all groups share
        the input.
      weights: ``[T, 2**C, O]`` floats, or `lutjax.QuantizedTables` for integer accumulation without
        a gradient.
      anchors: int32 ``[T, C, 2]`` input pairs, or ``[T, C]`` single inputs to compare with 0.
      scalars: the read's learned scalars by name, as returned by ``read.initial()``.
      read: one of `lutjax.reads`, or a custom read.
      groups: number of groups ``G``. Each group's tables are contiguous. None means one group
        without a group axis.
      sum_groups: sum the outputs over groups.
      keep: ``[..., T]``, coefficient factors per table, for table dropout: 0, or 1 divided by the
        kept fraction. It has a gradient.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``; with `groups` ``[..., G, O]``, or ``[..., 1, O]`` with `sum_groups`. The dtype
      is ``weights.dtype``, or the score dtype for integers. Scores and sums are at least float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, integer tables without a scale, groups that do
        not divide the tables, or missing or non-finite scalars.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> read = lutjax.reads.Confidence()
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=4, n_anchors=3)
      >>> weights, x = jnp.ones((4, 2**3, 5)), jnp.ones((6, 2, 8))
      >>> lutjax.scored_lut(x, weights, anchors, read.initial(), read=read, groups=2).shape
      (6, 2, 5)
    """
    op = "scored_lut"
    if not isinstance(read, Read):
        raise TypeError(
            f"{op}: read is {_checks.describe(read)}; expected one of lutjax.reads, such as "
            "Confidence()."
        )
    x, n_groups = _groups.inputs(op, x, anchors, groups)
    n_detectors, n_comparisons = anchors.shape[:2]
    _checks.require(
        n_comparisons > 0, op, "anchors", anchors, "a score needs at least one comparison"
    )
    scale = None
    if isinstance(weights, QuantizedTables):
        weights, scale = _integers(op, weights, read, n_groups, keep, accumulate)
        rule = f"anchors need {n_detectors} tables of 2**{n_comparisons} rows"
        _checks.require(
            weights.shape[:2] == (n_detectors, 2**n_comparisons), op, "weights", weights, rule
        )
    else:
        if getattr(weights, "dtype", None) == np.int8:
            raise TypeError(
                f"{op}: weights is {_checks.describe(weights)}; tables of integers need their "
                "scale: pass the lutjax.QuantizedTables that lutjax.quantize_tables returns."
            )
        _checks.table(op, weights, n_detectors, n_comparisons, "anchors")
        weights = as_jax(weights)
    if keep is not None:
        _checks.floats(op, "keep", keep, -1, "[..., detectors]")
        rule = f"its last axis must have size {n_detectors}, the number of tables"
        _checks.require(keep.shape[-1] == n_detectors, op, "keep", keep, rule)
        keep = as_jax(keep)
    call = ScoredLut(
        x,
        weights,
        as_int32(anchors),
        _scalars(op, scalars, read, accumulator(x.dtype)),
        keep,
        scale,
        read=read,
        groups=n_groups,
        sum_groups=_checks.flag(op, "sum_groups", sum_groups),
        accumulate=_checks.accumulation(op, accumulate),
    )
    y: jax.Array = apply(call, implementation=implementation)
    # Without groups the call has one, whose axis is dropped.
    return y.reshape(*y.shape[:-2], y.shape[-1]) if groups is None else y


def _integers(
    op: str, tables: QuantizedTables, read: Read, n_groups: int, keep: Any, accumulate: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the values and exponents from quantized tables."""
    values, scale = tables.values, tables.exponents
    for name, a, dtype in (("values", values, np.int8), ("exponents", scale, np.int32)):
        if getattr(a, "dtype", None) != dtype:
            raise TypeError(
                f"{op}: weights.{name} is {_checks.describe(a)}; its dtype must be "
                f"{np.dtype(dtype)}."
            )
    _checks.require(
        values.ndim == 3, op, "weights.values", values, "expected shape [detectors, rows, outputs]"
    )
    wanted = (n_groups, values.shape[2])
    rule = f"expected a power for each group and output, {list(wanted)}"
    _checks.require(scale.shape == wanted, op, "weights.exponents", scale, rule)
    rule = "tables of integers are read by lutjax.reads.PowersOfTwo, whose coefficients are shifts"
    _checks.require(read.rounds_tables, op, "read", read, rule)
    _checks.require(
        keep is None, op, "keep", keep, "tables of integers are not trained, so nothing is dropped"
    )
    rule = "sums of integers are exact already, so it must be None"
    _checks.require(accumulate is None, op, "accumulate", accumulate, rule)
    return as_jax(values), as_jax(scale)


def _scalars(op: str, scalars: Any, read: Read, dtype: Any) -> jax.Array:
    """Return a read's scalars ``[S]`` in `Read.initial` order."""
    names = _names(read)
    if not isinstance(scalars, Mapping) or set(scalars) != set(names):
        found = sorted(scalars) if isinstance(scalars, Mapping) else _checks.describe(scalars)
        raise ValueError(
            f"{op}: scalars is {found}; {read} needs {list(names)}, as its method initial returns "
            "them."
        )
    values = []
    for name in names:
        value = scalars[name]
        rule = "expected one number, of shape []"
        _checks.require(jnp.shape(value) == (), op, f"scalars[{name!r}]", value, rule)
        if not isinstance(value, jax.core.Tracer) and not np.isfinite(
            np.asarray(value, np.float64)
        ):
            raise ValueError(f"{op}: scalars[{name!r}] is {float(value)}; it must be finite.")
        values.append(jnp.asarray(value))
    stacked: jax.Array = _stack_values(values, dtype)
    return stacked


@functools.cache
def _names(read: Read) -> tuple[str, ...]:
    return tuple(read.initial())


# One dispatch for all scalars instead of one for each; inlined in traced functions.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _stack_values(values: list[jax.Array], dtype: Any) -> jax.Array:
    return jnp.stack([a.astype(dtype) for a in values]) if values else jnp.zeros((0,), dtype)

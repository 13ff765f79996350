"""`lutjax.scored_lut` in plain JAX: margins, the read, and weighted rows.

Nothing is saved: the backward pass compares and scores again. The gradient of the read is that of its elementwise function, of
any read. Margins, ids and coefficients are detector-major, ``[T, B]``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lutjax import _quantised
from lutjax._compat import zeros_varying
from lutjax._fixed_point import addend_dtype, addends, result
from lutjax._row_rules import RowState
from lutjax.kernels._xla import _row_updates, _weighted_rows, margins
from lutjax.kernels._xla.weighted_lookup import hits_of_ways
from lutjax.kernels.contract import Step
from lutjax.kernels.registry import Device
from lutjax.ops.scored_lut import ScoredLut
from lutjax.reads import Read

_SHIFT = 6  # the least coefficient of an integer read is 2**-6


def forward(call: ScoredLut, *, device: Device, rows: Any = _weighted_rows) -> jax.Array:
    """Return the output; `rows` has the functions of `_weighted_rows`, those of another platform for its rows."""
    ways = ways_of(call)
    if call.weights.dtype == jnp.int8:
        return _sum_of_integers(call, ways, device, rows)
    y = rows.sum_rows(tables(call), ways, call.groups, device, call.accumulate)
    if call.sum_groups:
        y = jnp.sum(y, 1, keepdims=True, dtype=y.dtype)
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: ScoredLut,
    cotangent: jax.Array,
    needs: frozenset[str],
    *,
    device: Device,
    rows: Any = _weighted_rows,
) -> dict[str, jax.Array]:
    if call.weights.dtype == jnp.int8:
        raise TypeError("scored_lut: tables of integers have no gradient; train tables of floats.")
    u = margins.comparisons(call.x, call.anchors, call.groups)
    keep = None if call.keep is None else call.keep.T
    scalars = [jnp.broadcast_to(s, u[0].shape) for s in call.scalars]
    coefficients, of_coefficients, index = linearised(call.read, u, scalars, keep)
    dy = of_every_group(call, cotangent)
    found = {}
    if "weights" in needs:
        zeros = zeros_varying(
            call.weights, call.weights.shape, addend_dtype(call.weights.dtype, call.accumulate)
        )
        ways = list(zip(index, coefficients, strict=True))[: call.read.valued]
        found["weights"] = rows.add_rows(zeros, ways, dy, call.groups, device, call.accumulate)
    if needs - {"weights"}:
        products = rows.products(tables(call), index, dy, call.groups, device, call.accumulate)
        du, d_scalars, d_keep = of_coefficients(
            [p.astype(c.dtype) for p, c in zip(products, coefficients, strict=True)]
        )
        if "x" in needs:
            found["x"] = margins.cotangent_of_inputs(
                du, call.anchors, call.groups, call.x.shape, call.accumulate
            )
        if "scalars" in needs:
            found["scalars"] = (
                jnp.stack(
                    [
                        jnp.sum(addends(s, call.accumulate), dtype=addend_dtype(s.dtype, call.accumulate))
                        for s in d_scalars
                    ]
                )
                if d_scalars
                else zeros_varying(cotangent, (0,), call.scalars.dtype)
            )
        if "keep" in needs:
            found["keep"] = d_keep.T
    return found


def update(
    call: ScoredLut, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)


def hits(call: ScoredLut, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return how the hits of a call are visited, and how many a detector has at most."""
    return hits_of_ways(call.weights, ways_of(call), of_every_group(call, cotangent), call.groups)


def ways_of(call: ScoredLut) -> list[_weighted_rows.Way]:
    """Return row ids and coefficients of every way that has values, ``[T, n]``."""
    u = margins.comparisons(call.x, call.anchors, call.groups)
    ways = call.read.select(u, named(call.read, list(call.scalars)))[: call.read.valued]
    return ways if call.keep is None else [(i, call.keep.T.astype(c.dtype) * c) for i, c in ways]


def linearised(
    read: Read, u: list[jax.Array], scalars: list[jax.Array], keep: jax.Array | None
) -> tuple[
    list[jax.Array],
    Callable[[list[jax.Array]], tuple[list[jax.Array], list[jax.Array], Any]],
    list[jax.Array],
]:
    """Return the coefficients, the function from their cotangents to those of margins, scalars and keep, and row ids.

    Args:
      scalars: of each element, as margins are, and so are their cotangents: sums of addends are made of them.
    """

    def coefficients(u: list[jax.Array], scalars: list[jax.Array], keep: Any) -> Any:
        ways = read.select(u, named(read, scalars))
        index = [i for i, _ in ways]
        if keep is None:
            return [c for _, c in ways], index
        return [keep.astype(c.dtype) * c for _, c in ways], index

    values, pull, index = jax.vjp(coefficients, u, scalars, keep, has_aux=True)
    return values, pull, index


def named(read: Read, scalars: list[jax.Array]) -> dict[str, jax.Array]:
    """Return the scalars of a read by name."""
    return dict(zip(read.initial(), scalars, strict=True))


def tables(call: ScoredLut) -> jax.Array:
    """Return the tables that are read: rounded ones where the read rounds them."""
    if call.exponents is None:
        return call.weights
    scale = jnp.repeat(call.exponents, call.weights.shape[0] // call.groups, axis=0)[:, None]
    return jnp.ldexp(_quantised.rounded(call.weights, call.exponents), scale).astype(call.weights.dtype)


def of_every_group(call: ScoredLut, cotangent: jax.Array) -> jax.Array:
    """Return the cotangent of each group's output, ``[n, G, O]``."""
    n, _, n_outputs = cotangent.shape
    return jnp.broadcast_to(cotangent, (n, call.groups, n_outputs))


def _sum_of_integers(call: ScoredLut, ways: list[_weighted_rows.Way], device: Device, rows: Any) -> jax.Array:
    """The sum of integers, each times its coefficient in units of the smallest one, times the scale of the output."""
    shifted = [(i, in_units(c)) for i, c in ways]
    total = rows.sum_rows(call.weights, shifted, call.groups, device, None)
    unknown = jnp.isnan(ways[0][1]).reshape(call.groups, -1, call.x.shape[0]).any(1).T
    return in_floats(call, total, unknown, ways[0][1].dtype)


def in_units(coefficient: jax.Array) -> jax.Array:
    """Return coefficients in units of the smallest one of an integer read, int32; 0 for NaN."""
    return jnp.where(jnp.isnan(coefficient), 0, coefficient * 2**_SHIFT).astype(jnp.int32)


def in_floats(call: ScoredLut, total: jax.Array, unknown: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the output of sums of integers ``[n, G, O]``; NaN where ``unknown [n, G]``."""
    assert call.exponents is not None
    y = jnp.where(
        unknown[..., None], jnp.nan, jnp.ldexp(total.astype(dtype), (call.exponents - _SHIFT)[None])
    )
    return jnp.sum(y, 1, keepdims=True, dtype=dtype) if call.sum_groups else y

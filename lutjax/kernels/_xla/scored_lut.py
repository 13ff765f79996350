"""`lutjax.scored_lut` in plain JAX: margins, read, and weighted rows in one op.

Formula for sample ``b``, group ``g``, tables ``t`` of the group::

    u[t, c] = margins of x[b, g], see `margins`
    i[t, k], c[t, k] = read.select(u[t], scalars), times keep[b, t]
    y[b, g] = sum over t, k of c[t, k] * weights[t, i[t, k]]

The gradient of the read is the VJP of its elementwise function, for any read. Nothing is saved: the
backward pass computes margins and scores again.

Work: CPUs process a block of tables of one group before the next one: margins, scores and sums stay
in the cache, and no array over all tables and samples exists. Accelerators compute each step for
all tables. `kernels` is a module with the row loops of `_row_gathers`.

Layout: margins, ids and coefficients are detector-major, ``[T, B]``.

Numerics: see `_row_gathers`. int8 tables multiply integer coefficients in units of ``2**-SHIFT``
and sum int32 (or `WideSum`); the scale of the table is applied to the sum. In fixed point,
`make_reproducible` makes the floats of the read equal in every program, because they are rounded to
integers.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _row_gathers as rows, _row_updates, margins
from lutjax.kernels._xla.weighted_lookup import Way, hits_of_ways, side_by_side
from lutjax.ops.scored_lut import ScoredLut
from lutjax.reads import Read
from lutjax.values import _quantized
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.values._reproducible import make_reproducible
from lutjax.values._row_rules import RowState


def forward_by(kernels: ModuleType, call: ScoredLut, *, device: Device) -> jax.Array:
    """Return the output; `kernels` reads the rows, like `_row_gathers`."""
    n, dtype = call.x.shape[0], call.scalars.dtype
    in_integers = call.weights.dtype == jnp.int8
    if call.read.valued == 0:
        y = zeros_varying(call.x, (n, call.groups, call.weights.shape[2]), call.weights.dtype)
        return jnp.sum(y, 1, keepdims=True) if call.sum_groups else y
    if kernels is rows and rows.in_sequence(device):
        total, unknown = _sums_in_blocks(call)
    else:
        ways, each = ways_of(call), len(call.weights) // call.groups
        if in_integers:
            ways, wrong = _in_units(ways)
            unknown = wrong.reshape(call.groups, each, n).any(1).T
            kernels = kernels if sums_fit_int32(call) else rows  # supports wider sums
        total = kernels.sum_ways(tables(call), ways, device, call.accumulate, call.groups)
        total = jax.tree.map(lambda a: a.reshape(n, call.groups, call.weights.shape[2]), total)
    if in_integers:
        return in_floats(call, total, unknown, dtype)
    if call.sum_groups:
        total = jnp.sum(total, 1, keepdims=True, dtype=total.dtype)
    return result(total, call.weights.dtype, call.accumulate)


def backward_by(
    kernels: ModuleType,
    call: ScoredLut,
    cotangent: jax.Array,
    needs: frozenset[str],
    *,
    device: Device,
) -> dict[str, jax.Array]:
    """Return the needed cotangents; `kernels` as in `forward_by`."""
    if call.weights.dtype == jnp.int8:
        # Quantized tables are inference-only: rounding has no gradient.
        raise TypeError("scored_lut: tables of integers have no gradient; train tables of floats.")
    zeros = None
    if "weights" in needs:
        dtype = addend_dtype(call.weights.dtype, call.accumulate)
        zeros = zeros_varying(call.weights, call.weights.shape, dtype)
    of_read = bool(needs - {"weights"})
    if kernels is rows and rows.in_sequence(device):
        cotangents = _cotangents_in_blocks(call, cotangent, zeros, of_read)
    else:
        cotangents = _cotangents(call, cotangent, zeros, of_read, device, kernels)
    return {name: cotangents[name] for name in needs}


def forward(call: ScoredLut, *, device: Device) -> jax.Array:
    return forward_by(rows, call, device=device)


def backward(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    return backward_by(rows, call, cotangent, needs, device=device)


def update(
    call: ScoredLut, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    scale = _row_updates.scale_of_additions(call, step)
    if scale is None:
        return _row_updates.update(call, step, *hits(call, cotangent, device=device), device=device)
    if rows.in_sequence(device):
        cotangents = _cotangents_in_blocks(call, scale * cotangent, call.weights, False)
    else:
        cotangents = _cotangents(call, scale * cotangent, call.weights, False, device, rows)
    return cotangents["weights"], step.state


def hits(call: ScoredLut, cotangent: jax.Array, *, device: Device) -> _row_updates.Hits:
    """Return the hits of a call and their maximum per detector."""
    return hits_of_ways(call.weights, ways_of(call), broadcast_to_groups(call, cotangent), device)


# ------------------------------------------------------------------------------- all tables at once
def ways_of(call: ScoredLut) -> list[Way]:
    """Return row ids and coefficients for every way with a value, ``[T, n]``."""
    u = margins.comparisons(call.x, call.anchors, call.groups)
    ways = _masked_ways(call, u, list(call.scalars), None if call.keep is None else call.keep.T)
    return ways[: call.read.valued]


def _cotangents(
    call: ScoredLut,
    cotangent: jax.Array,
    total: jax.Array | None,
    of_read: bool,
    device: Device,
    kernels: ModuleType,
) -> dict[str, Any]:
    """Return the cotangents of the read's arguments, and `total` plus the table gradient."""
    u = margins.comparisons(call.x, call.anchors, call.groups)
    # Scalars per element: their cotangents are then addends, summed in the accumulation mode of the
    # call.
    scalars = [jnp.broadcast_to(s, u[0].shape) for s in call.scalars]
    keep = None if call.keep is None else call.keep.T
    coefficients, of_coefficients, index = linearize_read(
        call.read, u, scalars, keep, call.accumulate
    )
    dy = side_by_side(broadcast_to_groups(call, cotangent))
    gradients = {}
    if total is not None:
        ways = list(zip(index, coefficients, strict=True))[: call.read.valued]
        gradients["weights"] = total
        if ways:
            gradients["weights"] = kernels.add_ways(
                total, ways, dy, device, call.accumulate, call.groups
            )
    if of_read:
        each = kernels.products(
            tables(call), tuple(index), dy, device, call.accumulate, call.groups
        )
        # A VJP needs cotangents in the dtypes of its outputs; products use the accumulator.
        du, d_scalars, d_keep = of_coefficients(_like(each, coefficients))
        gradients["x"] = margins.cotangent_of_inputs(
            du, call.anchors, call.groups, call.x.shape, call.accumulate, device
        )
        sums = [_sum_of_addends(call, s) for s in d_scalars]
        gradients["scalars"] = (
            jnp.stack(sums) if sums else zeros_varying(cotangent, (0,), call.scalars.dtype)
        )
        if d_keep is not None:
            gradients["keep"] = d_keep.T
    return gradients


# ----------------------------------------------------------------------------------- block by block
_IN_BLOCK = 2**13  # samples times tables per block
_FEWEST = 4  # minimum tables per block: scores of a single table are recomputed per gradients


def _over_blocks(
    call: ScoredLut, body: Any, carry: Any, first: jax.Array, of_tables: Any
) -> tuple[Any, Any]:
    """Pass a carry through ``body(carry, (first table, of_tables))`` for a group's blocks.

    Return the carry, and the result of `body` per table.
    """
    n, each = call.x.shape[0], call.anchors.shape[0] // call.groups
    # A symbolic batch in an export uses the smallest block.
    most = _IN_BLOCK // max(n, 1) if isinstance(n, int) else 0
    size = max(min(each, max(most, _FEWEST)), 1)
    whole = each // size * size
    parts = jax.tree.map(lambda a: a[:whole].reshape(whole // size, size, *a.shape[1:]), of_tables)
    starts = first + jnp.arange(0, whole, size, dtype=jnp.int32)
    carry, output = jax.lax.scan(body, carry, (starts, parts))
    output = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), output)
    # A scan requires equal shapes, so tables after the last whole block use a separate call.
    if whole < each:
        carry, rest = body(carry, (first + whole, jax.tree.map(lambda a: a[whole:], of_tables)))
        output = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), output, rest)
    return carry, output


def _table_inputs(call: ScoredLut) -> tuple[jax.Array, Any]:
    """Return each group's first table, and input ids and factors per table, for all groups."""
    keep = None if call.keep is None else call.keep.T
    ids = margins.ids_of(call.anchors, call.groups, call.x.shape)
    each = call.anchors.shape[0] // call.groups
    return rows.first_tables(call.groups, each), rows.in_groups((ids, keep), call.groups)


def _margins_of_block(by_input: jax.Array, ids: jax.Array) -> list[jax.Array]:
    # A gather fused into a score expression would prevent vectorization.
    u: list[jax.Array] = jax.lax.optimization_barrier(margins.margins_at(by_input, ids))
    return u


def _sums_in_blocks(call: ScoredLut) -> tuple[Any, jax.Array]:
    """Sum addends ``[n, G, O]``; flag NaN scores, ``[n, G]``. See `_row_gathers.sum_ways`."""
    by_input, read_tables, scalars = margins.inputs_first(call.x), tables(call), list(call.scalars)
    n, in_integers = call.x.shape[0], call.weights.dtype == jnp.int8
    dtype = (
        jnp.dtype(jnp.int32) if in_integers else addend_dtype(call.weights.dtype, call.accumulate)
    )

    def over_block(carry: Any, xs: Any) -> tuple[Any, None]:
        (y, unknown), (first, (ids, keep)) = carry, xs
        ways = _masked_ways(call, _margins_of_block(by_input, ids), scalars, keep)[
            : call.read.valued
        ]
        if in_integers:
            ways, wrong = _in_units(ways)
            # An integer has no NaN: a flag per sample carries it.
            unknown |= wrong.any(0)
        ways = [(rows.clamp_rows(read_tables, i), c) for i, c in ways]

        def over_table(y: Any, xs: Any) -> tuple[Any, None]:
            t, ways = xs
            return y + rows.sum_of_table(read_tables, t, ways, call.accumulate), None

        y, _ = jax.lax.scan(over_table, y, (first + rows.table_positions(len(ids)), ways))
        return (y, unknown), None

    def over_group(_: None, xs: Any) -> tuple[None, Any]:
        start: Any = zeros_varying(call.x, (n, call.weights.shape[2]), dtype)
        if in_integers and not sums_fit_int32(call):
            # Sums that may exceed int32 use two int32 parts.
            start = _quantized.WideSum(start, start)
        return None, _over_blocks(
            call, over_block, (start, zeros_varying(call.x, (n,), jnp.bool_)), *xs
        )[0]

    _, (y, unknown) = rows.over_groups(over_group, None, _table_inputs(call))
    return jax.tree.map(lambda y: y.transpose(1, 0, 2), y), unknown.T


def _cotangents_in_blocks(
    call: ScoredLut, cotangent: jax.Array, total: jax.Array | None, of_read: bool
) -> dict[str, Any]:
    """Return the cotangents of the read's arguments, and `total` plus the table gradient."""
    by_input, read_tables = margins.inputs_first(call.x), tables(call)
    dtype = call.scalars.dtype
    dx = zeros_varying(by_input, by_input.shape, addend_dtype(dtype, call.accumulate))
    sums = [zeros_varying(by_input, (), dx.dtype) for _ in range(len(call.scalars))]

    def over_block(dy: jax.Array, carry: Any, xs: Any) -> tuple[Any, Any]:
        (total, dx, sums), (first, (ids, keep)) = carry, xs
        u = _margins_of_block(by_input, ids)
        each = [jnp.broadcast_to(s, u[0].shape) for s in call.scalars]
        coefficients, of_coefficients, index = linearize_read(
            call.read, u, each, keep, call.accumulate
        )
        coefficients = jax.lax.optimization_barrier(coefficients)
        index = [rows.clamp_rows(read_tables, i) for i in index]

        def over_table(total: Any, xs: Any) -> tuple[Any, Any]:
            t, index, coefficients = xs
            gradients = None
            if of_read:
                gradients = rows.products_of_table(read_tables, t, index, dy, call.accumulate)
            if total is not None:
                ways = list(zip(index, coefficients, strict=True))[: call.read.valued]
                total = rows.add_to_table(total, t, ways, dy, call.accumulate)
            return total, gradients

        total, products = jax.lax.scan(
            over_table, total, (first + rows.table_positions(len(ids)), index, coefficients)
        )
        d_keep = None
        if of_read:
            products = jax.lax.optimization_barrier(_like(products, coefficients))
            du, d_scalars, d_keep = of_coefficients(products)
            # The inputs of a group accumulate across blocks in the carry; no array of all margin
            # cotangents exists.
            dx = margins.add_margins(dx, ids, [addends(d, call.accumulate) for d in du])
            sums = [s + _sum_of_addends(call, d) for s, d in zip(sums, d_scalars, strict=True)]
        return (total, dx, sums), d_keep

    def over_group(carry: Any, xs: Any) -> tuple[Any, Any]:
        of_tables, dy = xs
        return _over_blocks(call, functools.partial(over_block, dy), carry, *of_tables)

    dy = (
        broadcast_to_groups(call, cotangent)
        .astype(accumulator(call.weights.dtype))
        .transpose(1, 0, 2)
    )
    (total, dx, sums), d_keep = rows.over_groups(
        over_group, (total, dx, sums), (_table_inputs(call), dy)
    )
    scalars = jnp.stack(sums) if sums else zeros_varying(cotangent, (0,), dtype)
    gradients = {
        "weights": total,
        "x": margins.transpose_to_samples(dx, call.x.shape),
        "scalars": scalars,
    }
    if d_keep is not None:
        gradients["keep"] = d_keep.reshape(call.weights.shape[0], call.x.shape[0]).T
    return gradients


# ------------------------------------------------------------------------------------- reads
def _masked_ways(
    call: ScoredLut, u: list[jax.Array], scalars: list[jax.Array], keep: jax.Array | None
) -> list[Way]:
    """Return row ids and coefficients for every way, multiplied by `keep`."""
    select = functools.partial(_read_ways, call.read)
    return (select if call.accumulate is None else make_reproducible(select))(u, scalars, keep)


def _read_ways(
    read: Read, u: list[jax.Array], scalars: list[jax.Array], keep: jax.Array | None
) -> list[Way]:
    ways = read.select(u, name_scalars(read, scalars))
    return ways if keep is None else [(i, keep.astype(c.dtype) * c) for i, c in ways]


def linearize_read(
    read: Read,
    u: list[jax.Array],
    scalars: list[jax.Array],
    keep: jax.Array | None,
    accumulate: FixedPoint | None = None,
) -> tuple[
    list[jax.Array],
    Callable[[list[jax.Array]], tuple[list[jax.Array], list[jax.Array], Any]],
    list[jax.Array],
]:
    """Return coefficients, a VJP to the cotangents of margins, scalars and keep, and row ids.

    Args:
      scalars: per element, like margins; so are their cotangents, which are then summed as addends.
      accumulate: makes all these floats equal in every program, as they are rounded to integers.
    """

    def coefficients(u: list[jax.Array], scalars: list[jax.Array], keep: Any) -> Any:
        ways = _read_ways(read, u, scalars, keep)
        return [c for _, c in ways], [i for i, _ in ways]

    if accumulate is None:
        # Row ids are auxiliary: they are integers without a gradient.
        values, pull, index = jax.vjp(coefficients, u, scalars, keep, has_aux=True)
        return values, pull, index

    def pull_back(u: Any, scalars: Any, keep: Any, cotangents: Any) -> Any:
        return jax.vjp(coefficients, u, scalars, keep, has_aux=True)[1](cotangents)

    # Forward and backward are wrapped apart, because `make_reproducible` takes a function of arrays
    # and cannot return the VJP closure.
    values, index = make_reproducible(coefficients)(u, scalars, keep)
    return values, functools.partial(make_reproducible(pull_back), u, scalars, keep), index


def n_ways(call: ScoredLut) -> int:
    # Only shapes are evaluated: a read may return any number of ways.
    one = jax.ShapeDtypeStruct((), call.scalars.dtype)
    u, scalars = [one] * call.anchors.shape[1], [one] * len(call.scalars)
    return len(jax.eval_shape(functools.partial(_read_ways, call.read), u, scalars, None))


def sums_fit_int32(call: ScoredLut) -> bool:
    """Return True if int32 holds the sums of a call with integer tables."""
    return _quantized.fits_int32(len(call.weights) // call.groups * n_ways(call))


def name_scalars(read: Read, scalars: list[jax.Array]) -> dict[str, jax.Array]:
    return dict(zip(read.initial(), scalars, strict=True))


def _like(products: Sequence[jax.Array], coefficients: Sequence[jax.Array]) -> list[jax.Array]:
    """Cast products to the dtypes of their coefficients."""
    return [p.astype(c.dtype) for p, c in zip(products, coefficients, strict=True)]


def _sum_of_addends(call: ScoredLut, values: jax.Array) -> jax.Array:
    return jnp.sum(
        addends(values, call.accumulate), dtype=addend_dtype(values.dtype, call.accumulate)
    )


# ------------------------------------------------------------------------------- tables and outputs
def tables(call: ScoredLut) -> jax.Array:
    """Return the tables, rounded if the read requires it."""
    if call.exponents is None or call.weights.dtype == jnp.int8:
        return call.weights
    whole = _quantized.round_to_scale(call.weights, call.exponents)
    scaled = _quantized.in_groups(whole, call.groups) * _quantized.power(
        call.exponents[:, None], whole.dtype
    )
    return scaled.reshape(call.weights.shape).astype(call.weights.dtype)


def _in_units(ways: Sequence[Way]) -> tuple[list[Way], jax.Array]:
    """Convert coefficients to integer units; flag coefficients outside the integer range or NaN."""
    units = [_quantized.in_units(c) for _, c in ways]
    ways_in_units = [(i, c) for (i, _), (c, _) in zip(ways, units, strict=True)]
    return ways_in_units, functools.reduce(jnp.logical_or, [wrong for _, wrong in units])


def in_floats(
    call: ScoredLut, total: jax.Array | _quantized.WideSum, unknown: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Convert integer sums ``[n, G, O]`` to the output; NaN where ``unknown [n, G]``."""
    assert call.exponents is not None
    scaled = total.astype(dtype) * _quantized.power(call.exponents - _quantized.SHIFT, dtype)[None]
    # The scale is a power of two, so this product is exact.
    y = jnp.where(unknown[..., None], jnp.nan, scaled)
    return jnp.sum(y, 1, keepdims=True, dtype=dtype) if call.sum_groups else y


def broadcast_to_groups(call: ScoredLut, cotangent: jax.Array) -> jax.Array:
    """Broadcast the cotangent to each group's output, ``[n, G, O]``."""
    n, _, n_outputs = cotangent.shape
    return jnp.broadcast_to(cotangent, (n, call.groups, n_outputs))

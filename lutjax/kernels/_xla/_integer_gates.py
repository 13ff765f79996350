"""Gates and tables over bits in fixed point.

Formula: as in `bilinear_gates`, `soft_lut` and `binary_lut`, where every product is an addend
``round(product / scale)`` and every sum is a sum of int32 addends::

    y = c0 + c1 a + c2 b + c3 a b
    y = sum over slots s of table[s] * product over wires l of (x_l if bit l of s else 1 - x_l)

Work: arrays are features first, ``[G, B]``. Tables loop over slots with `jax.lax.scan`, so that no
array has an axis of slots and of samples.

Numerics: products are multiplied from the left, ``(c3 a) b``. No float is added to a product before
it is rounded, so no compiler can contract the two to a fused multiply-add: results are equal on all
devices and in every run. Sums wrap like int32 if the scale is too small.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _wire_gathers
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint

Call = Any
"""Gate op call with `accumulate`, from `lutjax.ops._gates.in_integers`."""


def are_in(call: Any) -> bool:
    return call.accumulate is not None


def forward_of_gates(call: Call, *, device: Device) -> jax.Array:
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    a, b = _wire_gathers.rows(call.x, call.wires, dtype)
    c0, c1, c2, c3 = (c[:, None] for c in call.coefficients.astype(dtype))
    # Four separate addends, not Horner's form of the float kernel: its float sums would round
    # differently per compiler.
    return _output(call, [jnp.broadcast_to(c0, a.shape), c1 * a, c2 * b, c3 * a * b])


def backward_of_gates(
    call: Call, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    dy, (a, b) = cotangent.astype(dtype), _wire_gathers.rows(call.x, call.wires, dtype)
    cotangents = {}
    if "coefficients" in needs:
        # Each sample is an addend, so the sum is the same for every split of a batch.
        cotangents["coefficients"] = jnp.stack(
            [_over_samples(call, v) for v in (dy, dy * a, dy * b, dy * a * b)]
        )
    if "x" in needs:
        _, c1, c2, c3 = (c[:, None] for c in call.coefficients.astype(dtype))
        by_wire = [[dy * c1, dy * c3 * b], [dy * c2, dy * c3 * a]]
        cotangents["x"] = _to_inputs(call, [_sum(call, products) for products in by_wire])
    return cotangents


def forward_of_soft_lut(call: Call, *, device: Device) -> jax.Array:
    table, read = _table_and_reads(call)

    # One slot per step bounds memory; integer addition makes the order irrelevant.
    def add(total: jax.Array, xs: Slot) -> tuple[jax.Array, None]:
        values, bits = xs
        return total + _scale(call).quantize(values[:, None] * _share(read, bits)), None

    zeros = zeros_varying(read[0], read[0].shape, jnp.int32)
    total, _ = jax.lax.scan(add, zeros, _slots(table, len(read)))
    return FixedPoint.total(_scale(call), total, call.x.dtype)


def backward_of_soft_lut(
    call: Call, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    table, read = _table_and_reads(call)
    dy = cotangent.astype(table.dtype)

    def slot_cotangent(bits: jax.Array) -> jax.Array:
        return _over_samples(call, dy * _share(read, bits))

    cotangents = {}
    if "table" in needs:
        cotangents["table"] = jax.lax.map(slot_cotangent, _slots(table, len(read))[1]).T
    if "x" in needs:
        cotangents["x"] = _slopes_to_inputs(call, table, dy, read)
    return cotangents


def backward_of_binary_lut(
    call: Call, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    table, read = _table_and_reads(call)
    dy, is_set = cotangent.astype(table.dtype), [a > 0 for a in read]

    def slot_cotangent(bits: jax.Array) -> jax.Array:
        # The addressed slot receives dy itself; a product with a share of 0 would make NaN of an
        # infinite dy elsewhere.
        addressed = functools.reduce(operator.and_, (a == bits[n] for n, a in enumerate(is_set)))
        return _over_samples(call, jnp.where(addressed, dy, 0))

    cotangents = {}
    if "table" in needs:
        cotangents["table"] = jax.lax.map(slot_cotangent, _slots(table, len(read))[1]).T
    if "x" in needs:
        # The surrogate gradient: the slope of soft_lut at 1/4 and 3/4, halved.
        softened = [jnp.where(a, 0.75, 0.25).astype(table.dtype) for a in is_set]
        cotangents["x"] = _slopes_to_inputs(call, table, 0.5 * dy, softened)
    return cotangents


Slot = tuple[jax.Array, jax.Array]
"""Slot values for all tables ``[G]``, and slot bits ``[n]``."""


def _table_and_reads(call: Call) -> tuple[jax.Array, list[jax.Array]]:
    dtype = accumulator(call.x.dtype, call.table.dtype)
    return call.table.astype(dtype), _wire_gathers.rows(call.x, call.wires, dtype)


def _slots(table: jax.Array, n: int) -> Slot:
    """Return the values and bits for each slot, ``[2**n, ...]``."""
    slot = jnp.arange(2**n, dtype=jnp.int32)[:, None]
    return table.T, (slot >> jnp.arange(n, dtype=jnp.int32)[None] & 1) == 1


def _share(read: Sequence[jax.Array], bits: jax.Array, without: int | None = None) -> jax.Array:
    """Return the product over wires, except `without`, of ``x`` for set bits, else ``1 - x``."""
    factors = [jnp.where(bits[n], a, 1 - a) for n, a in enumerate(read) if n != without]
    return functools.reduce(operator.mul, factors) if factors else jnp.ones_like(read[0])


def _slopes_to_inputs(
    call: Call, table: jax.Array, dy: jax.Array, read: list[jax.Array]
) -> jax.Array:
    """Return the input cotangents, with one addend per slot."""

    def add(totals: list[jax.Array], xs: Slot) -> tuple[list[jax.Array], None]:
        values, bits = xs
        by_wire = (
            jnp.where(bits[n], values, -values)[:, None] * _share(read, bits, n)
            for n in range(len(read))
        )
        new = [
            total + _scale(call).quantize(dy * slope)
            for total, slope in zip(totals, by_wire, strict=True)
        ]
        return new, None

    zeros = [zeros_varying(dy, dy.shape, jnp.int32)] * len(read)
    return _to_inputs(call, jax.lax.scan(add, zeros, _slots(table, len(read)))[0])


def _scale(call: Call) -> FixedPoint:
    accumulate: FixedPoint = call.accumulate
    return accumulate


def _sum(call: Call, products: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, map(_scale(call).quantize, products))


def _output(call: Call, products: Sequence[jax.Array]) -> jax.Array:
    """Sum products to a float output."""
    # `total` converts to float: an output is complete, unlike gradients, which devices may still
    # add.
    return FixedPoint.total(_scale(call), _sum(call, products), call.x.dtype)


def _over_samples(call: Call, products: jax.Array) -> jax.Array:
    return jnp.sum(_scale(call).quantize(products), -1, dtype=jnp.int32)


def _to_inputs(call: Call, by_wire: list[jax.Array]) -> jax.Array:
    """Add the wires' integer cotangents to their inputs."""
    # The matrix product in `to_inputs` uses floats.
    return _wire_gathers.scatter_to_inputs(by_wire, call.wires, call.x.shape[0])

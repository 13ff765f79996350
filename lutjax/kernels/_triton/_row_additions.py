"""Row additions: to zeros (a gradient), to tables in place, or to sums that then update tables.

Formula for one step, with a row's summed gradient ``g`` over all its lookups::

    row = row - rate * (factor * g + weight_decay * row)

`rate` and `factor` may differ by table, row and output.

Work: float32 and float64 tables are updated in place, with one ``-rate * factor * dy`` addition per
read, if all rows have one rate, without weight decay and fixed point. Otherwise the gradients for a
table group are summed first, and `_move_rows` updates the marked rows; a program owns a row tile
with all outputs.

Layout: sums and tables are ``[tables, R, O]``, marks ``[tables, R]``. A group has at most 2**23
elements (32 MiB), so its sums stay in the L2 cache between the kernels.

Numerics: additions use atomics, so their last bits differ between runs, except in fixed point. Rows
updated from sums round once per step. Rows without a read are not touched.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla._row_updates import scale_of_additions
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype
from lutjax.values._row_rules import RowState

# Most elements in the sums of a group of detectors, which have to stay in the L2 cache.
_SUMS = 2**23
_TILE = 1024  # elements of a tile of updated rows


@dataclasses.dataclass(frozen=True)
class Addition:
    """Destination tables for a kernel's additions, and their detectors.

    After its own inputs a kernel has the parameters ``step, first, unused, unused, total,
    touched``. Its constants are ``n_tables``, the number of tables in `total`, and ``TOUCH``,
    whether rows are marked.

    Attributes:
      total: ``[tables, R, O]``; a shape stands for zeros.
      step: scale factor for `dy`.
      first: first table's detector.
      touched: int32 ``[tables, R]``, set to 1 for updated rows; None marks no rows.
    """

    total: jax.Array | jax.ShapeDtypeStruct
    step: jax.Array
    first: jax.Array
    touched: jax.Array | None = None

    def __call__(self, kernel: Any, *inputs: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
        """Run a kernel with `launch` arguments; return `total` and `touched`."""
        touched = jnp.zeros((1,), jnp.int32) if self.touched is None else self.touched
        step, first = self.step.reshape(1), self.first.reshape(1)
        arguments |= {"n_tables": self.total.shape[0], "TOUCH": self.touched is not None}
        if isinstance(self.total, jax.ShapeDtypeStruct):
            # Arrays in place have two parameters each, and zeroed ones only one: placeholders keep
            # the parameters of a kernel the same.
            zeroed = [self.total, jax.ShapeDtypeStruct((1,), "int32")]
            return launch(kernel, *inputs, step, first, first, first, zeroed=zeroed, **arguments)
        return launch(kernel, *inputs, step, first, in_place=[self.total, touched], **arguments)


AddRows = Callable[[Addition], tuple[jax.Array, ...]]
"""Adds the output cotangent to every row a call reads; returns `total`, and `touched`."""


def gradient(call: _row_tiles.TableCall, add: AddRows) -> jax.Array:
    """Return the table gradient, ``[T, R, O]``."""
    weights = call.weights
    shape = jax.ShapeDtypeStruct(weights.shape, addend_dtype(weights.dtype, call.accumulate))
    return add(Addition(shape, jnp.ones((), accumulator(weights.dtype)), jnp.zeros((), jnp.int32)))[
        0
    ]


def cotangents(
    call: _row_tiles.TableCall,
    needs: frozenset[str],
    add: AddRows,
    margins: Callable[[], jax.Array],
) -> dict[str, jax.Array]:
    """Return the needed table and detection gradients."""
    of = {"weights": lambda: gradient(call, add), "detection": margins}
    return {name: cotangent() for name, cotangent in of.items() if name in needs}


def update(
    call: _row_tiles.TableCall, step: Step, add: AddRows, *, device: Device
) -> tuple[jax.Array, RowState]:
    """Return the tables ``[T, R, O]`` after one SGD step, which has no state."""
    weights, dtype = call.weights, accumulator(call.weights.dtype)
    n_detectors, n_rows, n_outputs = weights.shape
    scale = scale_of_additions(call, step)
    # Rows are updated by single additions, so no sums are needed.
    if scale is not None:
        return add(Addition(weights, scale, jnp.zeros((), jnp.int32)))[0], step.state

    # 16-bit rows, weight decay and fixed point update a row once, by the sum over its lookups. Sums
    # exist for one group of detectors at a time.
    size = max(min(_SUMS // max(n_rows * n_outputs, 1), n_detectors), 1)
    factor = jnp.ones((), dtype) if step.factor is None else step.factor
    scales = {"RATE": step.rate.astype(dtype), "FACTOR": factor.astype(dtype)}
    strides: dict[str, Any] = {
        f"{name}_{axis}": n for name, a in scales.items() for axis, n in _strides(a).items()
    }
    sums = zeros_varying(weights, (size, n_rows, n_outputs), addend_dtype(dtype, call.accumulate))
    touched = zeros_varying(weights, (size, n_rows), jnp.int32)
    # A tile has a fixed number of elements: wide rows mean few of them.
    outputs = _row_tiles.fit_size(_TILE, n_outputs)
    rows = max(_TILE // outputs, 1)

    def move(first: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Sum a group, then update the marked rows and clear their sums and marks."""
        weights, sums, touched = arrays
        sums, touched = add(Addition(sums, jnp.ones((), dtype), first, touched))
        n_sums = touched.size
        return launch(
            _move_rows,
            *(a.reshape(-1) for a in scales.values()),
            first.reshape(1),
            in_place=[weights, sums, touched],
            programs=triton.cdiv(n_sums, rows) if sums.size else 0,
            device=device,
            warps=4,
            n_sums=n_sums,
            n_outputs=n_outputs,
            ROWS=rows,
            OUTPUTS=outputs,
            WEIGHT_DECAY=step.rule.weight_decay,
            **strides,
            **_row_tiles.arithmetic(call),
        )

    whole, rest = divmod(n_detectors, size)
    arrays: tuple[jax.Array, ...] = (weights, sums, touched)
    arrays = jax.lax.fori_loop(
        0, whole, lambda n, a: move(jnp.asarray(n * size, jnp.int32), a), arrays
    )
    # A smaller last group, with slices of the sums.
    if rest:
        weights, sums, touched = arrays
        arrays = move(jnp.int32(whole * size), (weights, sums[:rest], touched[:rest]))
    return arrays[0], step.state


def _strides(scales: jax.Array) -> dict[str, int]:
    """Return strides over tables, rows and outputs for scales; 0 for an axis with length 1.

    Scales are a scalar or ``[T or 1, R or 1, O or 1]``.
    """
    shape = scales.shape or (1, 1, 1)
    steps = (shape[1] * shape[2], shape[2], 1)
    return {axis: step if n > 1 else 0 for axis, n, step in zip("TRO", shape, steps, strict=True)}


@kernel
def _move_rows(
    rates, factors, first, unused0, unused1, unused2, weights, sums, touched, c: tl.constexpr
):
    row, exists = _row_tiles.block(c.ROWS, c.n_sums, tl.program_id(0))
    moves = tl.load(touched + row, mask=exists, other=0) != 0
    # All warps read the marks before any of them clears one.
    tl.debug_barrier()
    tl.store(touched + row, tl.zeros((c.ROWS,), tl.int32), mask=moves)
    table, of_table = tl.load(first).to(tl.int64) + row // c.n_rows, row % c.n_rows
    weights += tl.load(first).to(tl.int64) * c.n_rows * c.n_outputs
    # Cleared sums and marks are ready for the next group, without a kernel that zeroes all of them.
    for o in range(0, c.n_outputs, c.OUTPUTS):
        output = o + tl.arange(0, c.OUTPUTS)
        mask = moves[:, None] & (output < c.n_outputs)[None, :]
        at = row[:, None] * c.n_outputs + output[None, :]
        rate = _scale(rates, table, of_table, output, mask, c.RATE_T, c.RATE_R, c.RATE_O)
        factor = _scale(factors, table, of_table, output, mask, c.FACTOR_T, c.FACTOR_R, c.FACTOR_O)
        direction = _row_tiles.number(tl.load(sums + at, mask=mask, other=0), c) * factor
        old = tl.load(weights + at, mask=mask, other=0).to(c.ACC)
        if c.WEIGHT_DECAY != 0:
            direction += c.WEIGHT_DECAY * old
        # The only rounding to 16 bits in a step.
        tl.store(weights + at, (old - rate * direction).to(weights.dtype.element_ty), mask=mask)
        tl.store(sums + at, tl.zeros((c.ROWS, c.OUTPUTS), c.SUM), mask=mask)


@kernel
def _scale(
    scales,
    table,
    row,
    output,
    mask,
    T: tl.constexpr,
    R: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
):
    """Return rates or factors by row and output; a scalar if all are equal."""
    if T == 0 and R == 0 and O == 0:
        return tl.load(scales)
    else:
        return tl.load(
            scales + (table * T + row * R)[:, None] + (output * O)[None, :], mask=mask, other=0
        )

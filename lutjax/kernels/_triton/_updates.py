"""Adding to rows: of an array of zeros, of tables in their own memory, or of sums from which tables then move."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from lutjax._compat import zeros_varying
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._triton import _rows
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels.registry import Device

_SUMS = 2**23  # most numbers in the sums of a group of detectors: they stay in the cache
_TILE = 1024  # numbers of a tile of rows that move


@dataclasses.dataclass(frozen=True)
class Addition:
    """To what a kernel adds, and of which detectors.

    Its parameters after its own inputs: ``step, first, unused, unused, total, touched``; its constants: ``n_tables``,
    how many tables `total` has, and ``TOUCH``, whether rows are marked.

    Attributes:
      total: ``[tables, R, O]``; only a shape for an array of zeros.
      step: what `dy` is multiplied by. first: the detector of the first table.
      touched: int32 ``[tables, R]``, set to 1 for rows that are added to; none: rows are not marked.
    """

    total: jax.Array | jax.ShapeDtypeStruct
    step: jax.Array
    first: jax.Array
    touched: jax.Array | None = None

    def __call__(self, kernel: Any, *inputs: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
        """Runs a kernel, with the arguments of `launch`; returns `total`, and `touched`."""
        touched = jnp.zeros((1,), jnp.int32) if self.touched is None else self.touched
        step, first = self.step.reshape(1), self.first.reshape(1)
        constants: dict[str, Any] = {"n_tables": self.total.shape[0], "TOUCH": self.touched is not None}
        if isinstance(self.total, jax.ShapeDtypeStruct):
            zeroed = [self.total, jax.ShapeDtypeStruct((1,), "int32")]
            return launch(kernel, *inputs, step, first, first, first, zeroed=zeroed, **constants, **arguments)
        changed = [self.total, touched]
        return launch(kernel, *inputs, step, first, in_place=changed, **constants, **arguments)


def gradient(weights: jax.Array, accumulate: FixedPoint | None) -> Addition:
    """Adds to an array of zeros like the tables."""
    shape = jax.ShapeDtypeStruct(weights.shape, addend_dtype(weights.dtype, accumulate))
    return Addition(shape, jnp.ones((), accumulator(weights.dtype)), jnp.zeros((), jnp.int32))


def update(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    add: Callable[[Addition, FixedPoint | None], tuple[jax.Array, ...]],
    *,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    """Tables ``[T, R, O]`` after one step of SGD; its state is empty.

    Args:
      factor: of the gradient; None: 1. add: adds `dy` to the rows of every look-up.
    """
    dtype = accumulator(weights.dtype)
    rate = rate.astype(dtype)
    n_detectors, n_rows, n_outputs = weights.shape
    if rule.additive and accumulate is None and dtype == weights.dtype:
        step = -rate if factor is None else -rate * factor.astype(dtype)
        return add(Addition(weights, step, jnp.zeros((), jnp.int32)), None)[0], state

    # A row moves by the sum over all its look-ups, rounded once. Sums are made for a group of detectors at a time.
    size = max(min(_SUMS // max(n_rows * n_outputs, 1), n_detectors), 1)
    scales = jnp.stack([rate, jnp.ones_like(rate) if factor is None else factor.astype(dtype)])
    sums = zeros_varying(weights, (size, n_rows, n_outputs), addend_dtype(dtype, accumulate))
    touched = zeros_varying(weights, (size, n_rows), jnp.int32)

    def move(first: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights, sums, touched = arrays
        one = jnp.ones((), dtype)
        sums, touched = add(Addition(sums, one, first, touched), accumulate)
        return _move(weights, sums, touched, first, scales, rule.weight_decay, accumulate, device)

    whole, rest = divmod(n_detectors, size)
    arrays: tuple[jax.Array, ...] = (weights, sums, touched)
    arrays = jax.lax.fori_loop(0, whole, lambda n, a: move(jnp.asarray(n * size, jnp.int32), a), arrays)
    if rest:
        weights, sums, touched = arrays
        arrays = move(jnp.int32(whole * size), (weights, sums[:rest], touched[:rest]))
    return arrays[0], state


def _move(
    weights: jax.Array,
    sums: jax.Array,
    touched: jax.Array,
    first: jax.Array,
    scales: jax.Array,
    weight_decay: float,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, ...]:
    """Moves the rows that are marked, and clears their sums and marks."""
    size, n_rows, n_outputs = sums.shape
    outputs = min(triton.next_power_of_2(max(n_outputs, 1)), _TILE)
    rows = max(_TILE // outputs, 1)
    return launch(
        _move_rows,
        scales,
        first.reshape(1),
        in_place=[weights, sums, touched],
        programs=triton.cdiv(size * n_rows, rows) if sums.size else 0,
        device=device,
        warps=4,
        n_sums=size * n_rows,
        n_rows=n_rows,
        n_outputs=n_outputs,
        ROWS=rows,
        OUTPUTS=outputs,
        WEIGHT_DECAY=weight_decay,
        **_rows.arithmetic(weights, accumulate),
    )


@kernel
def _move_rows(
    scales,
    first,
    unused0,
    unused1,
    unused2,
    weights,
    sums,
    touched,
    n_sums: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    row, exists = _rows.block(ROWS, n_sums, tl.program_id(0))
    moves = tl.load(touched + row, mask=exists, other=0) != 0
    tl.store(touched + row, tl.zeros((ROWS,), tl.int32), mask=moves)
    rate, factor = tl.load(scales), tl.load(scales + 1)
    weights += tl.load(first).to(tl.int64) * n_rows * n_outputs
    for o in range(0, n_outputs, OUTPUTS):
        output = o + tl.arange(0, OUTPUTS)
        mask = moves[:, None] & (output < n_outputs)[None, :]
        at = row[:, None] * n_outputs + output[None, :]
        direction = _rows.number(tl.load(sums + at, mask=mask, other=0), ACC, SCALE) * factor
        old = tl.load(weights + at, mask=mask, other=0).to(ACC)
        if WEIGHT_DECAY != 0:
            direction += WEIGHT_DECAY * old
        tl.store(weights + at, (old - rate * direction).to(weights.dtype.element_ty), mask=mask)
        tl.store(sums + at, tl.zeros((ROWS, OUTPUTS), SUM), mask=mask)

"""`lutjax.lookup` in Triton.

Detector-major: ids and margins are ``[T, B]``, so that the samples of a program lie side by side.
"""

from typing import Any

import jax
import triton.language as tl

from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype, result
from lutjax.kernels._triton import _rows, _updates
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels._xla._rows import slope
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of


def forward(
    weights: jax.Array, detection: Detection, *, accumulate: FixedPoint | None, device: Device
) -> jax.Array:
    n_detectors, _, n_outputs = weights.shape
    n_samples = detection.index.shape[0]
    how = launch_of("lookup.forward", _sizes(weights, n_samples), device, _forward_rule)
    tile = _rows.Tile(how, n_samples, n_outputs, n_detectors, device)
    # Several programs for one sum write a part of it each.
    dtype = (
        weights.dtype if tile.groups == 1 and accumulate is None else addend_dtype(weights.dtype, accumulate)
    )
    (parts,) = launch(
        _sum_rows,
        weights,
        detection.index.T,
        outputs=[jax.ShapeDtypeStruct((tile.groups, n_samples, n_outputs), dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=n_samples,
        n_rows=weights.shape[1],
        **_rows.arithmetic(weights, accumulate),
        **tile.constants,
    )
    return result(_rows.sum_of_parts(parts), weights.dtype, accumulate)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    weights, d = saved
    d_weights = d_margin = None
    if needs[0]:
        addition = _updates.gradient(weights, accumulate)
        d_weights, _ = add_rows(addition, accumulate, weights, d, dy, device)
    if needs[1]:
        d_margin = _margins(weights, d, dy, accumulate, device)
    return d_weights, d_margin


def _margins(
    weights: jax.Array, d: Detection, dy: jax.Array, accumulate: FixedPoint | None, device: Device
) -> jax.Array:
    n_detectors, _, n_outputs = weights.shape
    n_samples = len(dy)
    how = launch_of("lookup.margins", _sizes(weights, n_samples), device, _margins_rule)
    tile = _rows.Tile(how, n_samples, n_outputs, n_detectors, device)
    # Programs of different outputs write a part each.
    shape = (tile.output_blocks, n_detectors, n_samples)
    (products,) = launch(
        _multiply_rows,
        weights,
        d.index.T,
        d.flip.T,
        dy,
        outputs=[jax.ShapeDtypeStruct(shape, addend_dtype(weights.dtype, accumulate))],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=n_samples,
        n_rows=weights.shape[1],
        **_rows.arithmetic(weights, accumulate),
        **tile.constants,
    )
    products = _rows.sum_of_parts(products)
    difference = result(products.T, accumulator(weights.dtype), accumulate)
    return slope(d.margin) * difference.astype(d.margin.dtype)


def add_rows(
    addition: _updates.Addition,
    accumulate: FixedPoint | None,
    weights: jax.Array,
    d: Detection,
    dy: jax.Array,
    device: Device,
) -> tuple[jax.Array, ...]:
    """Adds `dy` to every row that was read."""
    n_samples, n_outputs = dy.shape
    how = launch_of("lookup.table", _sizes(weights, n_samples), device, _table_rule)
    tile = _rows.Tile(how, n_samples, n_outputs, addition.total.shape[0], device)
    return addition(
        _add_rows,
        d.index.T,
        dy,
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=n_samples,
        n_rows=weights.shape[1],
        **_rows.arithmetic(weights, accumulate),
        **tile.constants,
    )


# ------------------------------------------------------------------------------------- launches
def _sizes(weights: jax.Array, n_samples: int) -> Sizes:
    detectors, rows, outputs = weights.shape
    return {
        "samples": n_samples,
        "detectors": detectors,
        "rows": rows,
        "outputs": outputs,
        "bits": 8 * weights.dtype.itemsize,
    }


def _forward_rule(sizes: Sizes) -> Launch:
    programs = sizes["samples"] * sizes["outputs"] // 256
    return Launch(rows=8, outputs=32, detectors=_rows.split(programs, sizes["detectors"]), warps=1)


def _margins_rule(sizes: Sizes) -> Launch:
    detectors = _rows.split(sizes["samples"] * sizes["outputs"] // 1024, sizes["detectors"])
    return Launch(rows=32, outputs=32, detectors=min(detectors, 16), warps=1)


def _table_rule(sizes: Sizes) -> Launch:
    if sizes["outputs"] <= 64:
        return Launch(rows=16, outputs=32, detectors=1, warps=1)
    detectors = _rows.split(sizes["samples"] * sizes["outputs"] // 4096, sizes["detectors"])
    return Launch(rows=32, outputs=128, detectors=min(detectors, 16), warps=4)


# ------------------------------------------------------------------------------------- kernels
# Programs: samples first, then outputs, then groups of detectors, so that what runs at the same time reads the same
# part of the same tables.
@kernel
def _sum_rows(
    weights,
    index,
    parts,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, sample_exists, output, output_exists, group = _rows.place(n_samples, n_outputs, ROWS, OUTPUTS)
    last = tl.minimum((group + 1) * DETECTORS, n_detectors)
    total = tl.zeros((ROWS, OUTPUTS), SUM)
    for t0 in range(group * DETECTORS, last, 4):
        for u in tl.static_range(4):
            t = t0 + u
            exists = sample_exists & (t < last)
            row = tl.load(index + t.to(tl.int64) * n_samples + sample, mask=exists, other=0)
            at = _rows.offset(row, n_rows, n_outputs)[:, None] + output[None, :]
            table = _rows.table(weights, t, n_rows, n_outputs)
            value = tl.load(table + at, mask=exists[:, None] & output_exists[None, :], other=0)
            total += _rows.addend(value.to(ACC), SCALE)
    at = (group.to(tl.int64) * n_samples + sample)[:, None] * n_outputs + output[None, :]
    exists = sample_exists[:, None] & output_exists[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=exists)


@kernel
def _multiply_rows(
    weights,
    index,
    flip,
    dy,
    products,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, sample_exists, output, output_exists, group = _rows.place(n_samples, n_outputs, ROWS, OUTPUTS)
    part = (tl.program_id(0) // ((n_samples + ROWS - 1) // ROWS)) % ((n_outputs + OUTPUTS - 1) // OUTPUTS)
    products += part.to(tl.int64) * n_detectors * n_samples
    exists = sample_exists[:, None] & output_exists[None, :]
    cotangent = tl.load(dy + sample[:, None] * n_outputs + output[None, :], mask=exists, other=0).to(ACC)
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        table = _rows.table(weights, t, n_rows, n_outputs)
        here = t.to(tl.int64) * n_samples + sample
        main = tl.load(index + here, mask=sample_exists, other=0)
        other = main ^ tl.load(flip + here, mask=sample_exists, other=0)
        row = _rows.read(table, _rows.offset(main, n_rows, n_outputs), output, n_outputs, OUTPUTS).to(ACC)
        row -= _rows.read(table, _rows.offset(other, n_rows, n_outputs), output, n_outputs, OUTPUTS).to(ACC)
        tl.store(products + here, tl.sum(_rows.addend(row * cotangent, SCALE), 1), mask=sample_exists)


@kernel
def _add_rows(
    index,
    dy,
    step,
    first,
    unused0,
    unused1,
    total,
    touched,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_tables: tl.constexpr,
    TOUCH: tl.constexpr,
    n_rows: tl.constexpr,
    n_outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, sample_exists, output, output_exists, group = _rows.place(n_samples, n_outputs, ROWS, OUTPUTS)
    exists = sample_exists[:, None] & output_exists[None, :]
    value = tl.load(dy + sample[:, None] * n_outputs + output[None, :], mask=exists, other=0).to(ACC)
    value = _rows.addend(value * tl.load(step), SCALE)
    index += tl.load(first).to(tl.int64) * n_samples
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_tables)):
        row = tl.load(index + t.to(tl.int64) * n_samples + sample, mask=sample_exists, other=0)
        at = _rows.offset(row, n_rows, n_outputs)[:, None] + output[None, :]
        table = _rows.table(total, t, n_rows, n_outputs)
        if TOUCH:
            _rows.touch(touched, t, row, sample_exists, n_rows)
        tl.atomic_add(table + at, value, mask=exists, sem="relaxed")

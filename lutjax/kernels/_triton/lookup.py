"""`lutjax.lookup` in Triton.

For sample ``b``, with ``i = index[b, t]`` and ``j = i ^ flip[b, t]``::

    y[b] = sum over t of weights[t, i]
    dmargin[b, t] = slope(margin[b, t]) * <dy[b], weights[t, i] - weights[t, j]>
    dweights[t, i] += dy[b]

Programs own tiles of samples and outputs, of a group of detectors: samples first, then outputs, then groups, so that
programs that run at the same time read the same part of the same tables.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax._fixed_point import addend_dtype, result
from lutjax._row_rules import RowState
from lutjax.kernels._triton import _row_additions, _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla._row_gathers import slope
from lutjax.kernels.contract import Step
from lutjax.kernels.registry import Device
from lutjax.ops.lookup import Lookup
from lutjax.tuning import Launch, Sizes, launch_of


def forward(call: Lookup, *, device: Device) -> jax.Array:
    tile = _tile("forward", _forward_rule, call, device)
    index = call.detection.index
    return _row_tiles.sum_rows(_sum_rows, call, tile, index.shape[:1], index.T, **_arguments(tile, call))


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    margins = functools.partial(_margins, call, cotangent, device)
    return _row_additions.cotangents(call, needs, add, margins)


def update(call: Lookup, cotangent: jax.Array, step: Step, *, device: Device) -> tuple[jax.Array, RowState]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    return _row_additions.update(call, step, add, device=device)


def _margins(call: Lookup, dy: jax.Array, device: Device) -> jax.Array:
    d, weights = call.detection, call.weights
    tile = _tile("margins", _margins_rule, call, device)
    # Programs of different outputs write a part each.
    shape = (tile.output_blocks, tile.n_detectors, tile.n_reads)
    (products,) = launch(
        _multiply_rows,
        weights,
        d.index.T,
        d.flip.T,
        dy,
        outputs=[jax.ShapeDtypeStruct(shape, addend_dtype(weights.dtype, call.accumulate))],
        **_arguments(tile, call),
    )
    products = _row_tiles.sum_of_parts(products)
    difference = result(products.T, accumulator(weights.dtype), call.accumulate)
    return slope(d.margin) * difference.astype(d.margin.dtype)


def _add_to_rows(
    call: Lookup, dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    tile = _tile("table", _table_rule, call, device, addition.total.shape[0])
    return addition(_add_rows, call.detection.index.T, dy, **_arguments(tile, call))


# ------------------------------------------------------------------------------------- launches
def _tile(
    kernel: str,
    rule: Callable[[Sizes], Launch],
    call: Lookup,
    device: Device,
    n_tables: int | None = None,
) -> _row_tiles.RowTile:
    n_detectors, _, n_outputs = call.weights.shape
    n_samples = len(call.detection.index)
    how = launch_of(f"lookup.{kernel}", _row_tiles.sizes(call.weights, samples=n_samples), device, rule)
    return _row_tiles.RowTile(how, n_samples, n_outputs, n_tables or n_detectors, device)


def _arguments(tile: _row_tiles.RowTile, call: Lookup) -> dict[str, Any]:
    return {**tile.arguments, **_row_tiles.arithmetic(call), "n_samples": tile.n_reads}


def _forward_rule(sizes: Sizes) -> Launch:
    programs = sizes["samples"] * sizes["outputs"] // 256
    return Launch(rows=8, outputs=32, detectors=_row_tiles.split(programs, sizes["detectors"]), warps=1)


def _margins_rule(sizes: Sizes) -> Launch:
    detectors = _row_tiles.split(sizes["samples"] * sizes["outputs"] // 1024, sizes["detectors"])
    return Launch(rows=32, outputs=32, detectors=min(detectors, 16), warps=1)


def _table_rule(sizes: Sizes) -> Launch:
    if sizes["outputs"] <= 64:
        return Launch(rows=16, outputs=32, detectors=1, warps=1)
    detectors = _row_tiles.split(sizes["samples"] * sizes["outputs"] // 4096, sizes["detectors"])
    return Launch(rows=32, outputs=128, detectors=min(detectors, 16), warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sum_rows(weights, index, parts, c: tl.constexpr):
    sample, sample_exists, output, output_exists, group = _row_tiles.place(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    last = tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)
    total = tl.zeros((c.ROWS, c.OUTPUTS), c.SUM)
    for t0 in range(group * c.DETECTORS, last, 4):
        for u in tl.static_range(4):
            t = t0 + u
            exists = sample_exists & (t < last)
            row = tl.load(index + t.to(tl.int64) * c.n_samples + sample, mask=exists, other=0)
            at = _row_tiles.offset(row, c)[:, None] + output[None, :]
            table = _row_tiles.table(weights, t, c)
            value = tl.load(table + at, mask=exists[:, None] & output_exists[None, :], other=0)
            total += _row_tiles.addend(value.to(c.ACC), c)
    at = (group.to(tl.int64) * c.n_samples + sample)[:, None] * c.n_outputs + output[None, :]
    exists = sample_exists[:, None] & output_exists[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=exists)


@kernel
def _multiply_rows(weights, index, flip, dy, products, c: tl.constexpr):
    sample, sample_exists, output, output_exists, group = _row_tiles.place(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    part = (tl.program_id(0) // ((c.n_samples + c.ROWS - 1) // c.ROWS)) % (
        (c.n_outputs + c.OUTPUTS - 1) // c.OUTPUTS
    )
    products += part.to(tl.int64) * c.n_detectors * c.n_samples
    exists = sample_exists[:, None] & output_exists[None, :]
    cotangent = tl.load(dy + sample[:, None] * c.n_outputs + output[None, :], mask=exists, other=0).to(c.ACC)
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        table = _row_tiles.table(weights, t, c)
        here = t.to(tl.int64) * c.n_samples + sample
        main = tl.load(index + here, mask=sample_exists, other=0)
        other = main ^ tl.load(flip + here, mask=sample_exists, other=0)
        row = _row_tiles.read(table, _row_tiles.offset(main, c), output, c).to(c.ACC)
        row -= _row_tiles.read(table, _row_tiles.offset(other, c), output, c).to(c.ACC)
        tl.store(products + here, tl.sum(_row_tiles.addend(row * cotangent, c), 1), mask=sample_exists)


@kernel
def _add_rows(index, dy, step, first, unused0, unused1, total, touched, c: tl.constexpr):
    sample, sample_exists, output, output_exists, group = _row_tiles.place(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    exists = sample_exists[:, None] & output_exists[None, :]
    value = tl.load(dy + sample[:, None] * c.n_outputs + output[None, :], mask=exists, other=0).to(c.ACC)
    value = _row_tiles.addend(value * tl.load(step), c)
    index += tl.load(first).to(tl.int64) * c.n_samples
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_tables)):
        row = tl.load(index + t.to(tl.int64) * c.n_samples + sample, mask=sample_exists, other=0)
        at = _row_tiles.offset(row, c)[:, None] + output[None, :]
        table = _row_tiles.table(total, t, c)
        if c.TOUCH:
            _row_tiles.touch(touched, t, row, sample_exists, c)
        tl.atomic_add(table + at, value, mask=exists, sem="relaxed")

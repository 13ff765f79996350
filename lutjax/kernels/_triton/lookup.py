"""`lutjax.lookup` in Triton.

Formula for sample ``b``, group ``g`` and detectors ``t`` of the group::

    i = index[b, t];  j = i ^ flip[b, t]
    y[b, g] = sum over t of weights[t, i]
    dmargin[b, t] = slope(margin[b, t]) * <dy[b, g], weights[t, i] - weights[t, j]>
    dweights[t, i] += dy[b, g]

Work, layout and numerics: see `_weighted_rows`, which sums and adds rows in one way without
coefficients. The margin kernel reads both rows for a tile of samples and outputs, and writes a
part for each output block; the parts are added in a fixed order. Table gradients use atomics, so
their last bits differ between runs, except in fixed point. Ids are clamped.
"""

import functools
from collections.abc import Callable

import jax

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _row_additions, _row_tiles, _weighted_rows
from lutjax.kernels._triton._language import tl
from lutjax.kernels._triton._rules import few_additions, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.lookup import Lookup
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype, result
from lutjax.values._row_rules import RowState


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, Lookup)
    n_reads = call.detection.index.shape[0] * call.weights.shape[0]
    return unsupported_arguments(request) or few_additions(request, n_reads)


SPEC = Declaration(_supports, launches=("lookup.forward", "lookup.margins", "lookup.table"))


def forward(call: Lookup, *, device: Device) -> jax.Array:
    config = _launch("forward", _weighted_rows.forward_rule, call, device)
    y = _weighted_rows.sums(call.weights, _reads(call), config, device, call.accumulate)
    return y.reshape(len(y), y.shape[1] * y.shape[2])


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    margins = functools.partial(_margins, call, cotangent, device)
    return _row_additions.cotangents(call, needs, add, margins)


def update(
    call: Lookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    return _row_additions.update(call, step, add, device=device)


def _margins(call: Lookup, dy: jax.Array, device: Device) -> jax.Array:
    d, weights, reads = call.detection, call.weights, _reads(call)
    config = _launch("margins", _margins_rule, call, device)
    tile = reads.tile(config, weights.shape[2], device)
    # Blocks of outputs write separate parts.
    shape = (tile.output_blocks, tile.n_detectors, tile.n_reads)
    (products,) = launch(
        _multiply_rows,
        weights,
        d.index.T,
        d.flip.T,
        dy,
        outputs=[jax.ShapeDtypeStruct(shape, addend_dtype(weights.dtype, call.accumulate))],
        **reads.arguments(tile, weights.shape[1], accumulator(weights.dtype), call.accumulate),
    )
    products = _row_tiles.sum_of_parts(products)
    difference = result(products.T, accumulator(weights.dtype), call.accumulate)
    # The slope multiplies the complete sum, so XLA applies it after the parts are added.
    return slope(d.margin) * difference.astype(d.margin.dtype)


def _add_to_rows(
    call: Lookup, dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    config = _launch("table", _weighted_rows.table_rule, call, device)
    return _weighted_rows.add(addition, _reads(call), dy, config, device, call.accumulate)


def _reads(call: Lookup) -> _weighted_rows.Reads:
    return _weighted_rows.Reads(call.detection.index.T[:, None], None, call.groups)


# ------------------------------------------------------------------------------------- launches
def _launch(kernel: str, rule: Callable[[Sizes], Launch], call: Lookup, device: Device) -> Launch:
    return launch_of(f"lookup.{kernel}", _reads(call).sizes(call.weights), device, rule)


def _margins_rule(sizes: Sizes) -> Launch:
    # Tiles of 32 x 32 elements, for one warp: 32 registers per thread for the gradient.
    return Launch(
        rows=32, outputs=32, detectors=min(_weighted_rows.split(sizes, 1024), 16), warps=1
    )


# ------------------------------------------------------------------------------------- kernels
@kernel
def _multiply_rows(weights, index, flip, dy, products, c: tl.constexpr):
    sample, sample_exists, output, output_exists, block = _row_tiles.locate_program(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    group, _, first, last = _weighted_rows.detectors(block, c)
    products += _weighted_rows.part_of_outputs(c).to(tl.int64) * c.n_detectors * c.n_samples
    exists = sample_exists[:, None] & output_exists[None, :]
    at = _weighted_rows.group_offset(sample, group, c)[:, None] + output[None, :]
    # The gradient stays in registers for all tables of the program.
    cotangent = tl.load(dy + at, mask=exists, other=0).to(c.ACC)
    for t in range(first, last):
        table = _row_tiles.table(weights, t, c)
        here = t.to(tl.int64) * c.n_samples + sample
        main = tl.load(index + here, mask=sample_exists, other=0)
        other = main ^ tl.load(flip + here, mask=sample_exists, other=0)
        row = _row_tiles.read(table, _row_tiles.offset(main, c), output, c).to(c.ACC)
        # Rows are subtracted before the product: a difference of two products would lose digits.
        row -= _row_tiles.read(table, _row_tiles.offset(other, c), output, c).to(c.ACC)
        tl.store(
            products + here, tl.sum(_row_tiles.addend(row * cotangent, c), 1), mask=sample_exists
        )

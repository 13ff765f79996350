"""`lutjax.sparse_lookup` in Triton.

Formula for sample ``b`` and the outputs ``o`` of the slots ``k`` of rows::

    i = index[b, t];  j = i ^ flip[b, t]
    y[b, o] = sum over t and k with targets[t, i, k] == o of weights[t, i, k]
    dmargin[b, t] = slope(margin[b, t])
                    * (sum over k of weights[t, i, k] * dy[b, targets[t, i, k]]
                       - weights[t, j, k] * dy[b, targets[t, j, k]])
    dweights[t, i, k] += dy[b, targets[t, i, k]]

Work: a program owns a tile of samples and slots, and a detector block. The grid is
one-dimensional: samples change fastest, then slots, then detector blocks. With few slots and
outputs, a forward program owns a tile of samples and outputs instead, and compares every output
with every target.

Layout: ids and margins are ``[T, B]``, so samples are contiguous; the slots of a row are
contiguous.

Numerics: the accumulator dtype, or int32 in fixed point. Compared outputs are summed in a fixed
order. Otherwise outputs, and always table gradients, use atomics, and their last bits differ
between runs, except in fixed point. Negative targets mark unused slots; ids and targets beyond the
end are clamped.
"""

import functools
from typing import Any

import jax

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _row_additions, _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import few_additions, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._fixed_point import addend_dtype, result
from lutjax.values._row_rules import RowState

# Most comparisons of slots with outputs per sample that cost less than atomics.
_COMPARED = 2**13


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, SparseLookup)
    n_reads = call.detection.index.shape[0] * call.weights.shape[0]
    return unsupported_arguments(request) or few_additions(request, n_reads)


SPEC = Declaration(
    _supports, launches=("sparse_lookup.forward", "sparse_lookup.margins", "sparse_lookup.table")
)


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    weights, n_outputs = call.weights, call.n_outputs
    n_detectors, _, n_slots = weights.shape
    n_samples = len(call.detection.index)
    compared = n_detectors * n_slots * n_outputs <= _COMPARED
    config = launch_of("sparse_lookup.forward", _sizes(call), device, _forward_rule)
    tile = _row_tiles.RowTile(
        config, n_samples, n_outputs if compared else n_slots, n_detectors, device
    )
    dtype = addend_dtype(weights.dtype, call.accumulate)
    changed: dict[str, Any] = {"zeroed": [jax.ShapeDtypeStruct((n_samples, n_outputs), dtype)]}
    if compared:
        changed = {
            "outputs": [jax.ShapeDtypeStruct((tile.detector_blocks, n_outputs, n_samples), dtype)]
        }
    (y,) = launch(
        _collect if compared else _scatter,
        weights,
        call.detection.index.T,
        call.targets,
        **changed,
        **_arguments(tile, call),
    )
    return result(_row_tiles.sum_of_parts(y).T if compared else y, weights.dtype, call.accumulate)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    margins = functools.partial(_margins, call, cotangent, device)
    return _row_additions.cotangents(call, needs, add, margins)


def update(
    call: SparseLookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    add = functools.partial(_add_to_rows, call, cotangent, device)
    return _row_additions.update(call, step, add, device=device)


def _margins(call: SparseLookup, dy: jax.Array, device: Device) -> jax.Array:
    n_detectors, _, n_slots = call.weights.shape
    d = call.detection
    config = launch_of("sparse_lookup.margins", _sizes(call), device, _rule)
    # A program visits all slots of a row, so it writes a complete inner product.
    tile = _row_tiles.RowTile(config, len(dy), n_slots, n_detectors, device, all_outputs=True)
    (d_margin,) = launch(
        _multiply_rows,
        call.weights,
        d.index.T,
        d.flip.T,
        d.margin.T,
        call.targets,
        dy,
        outputs=[jax.ShapeDtypeStruct(d.margin.T.shape, d.margin.dtype)],
        **_arguments(tile, call),
    )
    return d_margin.T


def _add_to_rows(
    call: SparseLookup, dy: jax.Array, device: Device, addition: _row_additions.Addition
) -> tuple[jax.Array, ...]:
    config = launch_of("sparse_lookup.table", _sizes(call), device, _rule)
    tile = _row_tiles.RowTile(
        config, len(dy), call.weights.shape[2], addition.total.shape[0], device
    )
    return addition(_add_rows, call.detection.index.T, call.targets, dy, **_arguments(tile, call))


# ------------------------------------------------------------------------------------- launches
def _sizes(call: SparseLookup) -> Sizes:
    n_samples, n_slots = len(call.detection.index), call.weights.shape[2]
    return _row_tiles.sizes(call.weights, samples=n_samples, slots=n_slots, outputs=call.n_outputs)


def _arguments(tile: _row_tiles.RowTile, call: SparseLookup) -> dict[str, Any]:
    return {
        **tile.arguments,
        **_row_tiles.arithmetic(call),
        "programs": tile.programs if call.weights.size else 0,
        "n_samples": tile.n_reads,
        "n_slots": call.weights.shape[2],
        "n_outputs": call.n_outputs,
        "LIST_PER_TABLE": call.targets.shape[0] > 1,
        "LIST_PER_ROW": call.targets.shape[1] > 1,
    }


def _forward_rule(sizes: Sizes) -> Launch:
    if sizes["detectors"] * sizes["slots"] * sizes["outputs"] > _COMPARED:
        return _rule(sizes)
    programs = sizes["samples"] // 32 * triton.cdiv(sizes["outputs"], 32)
    # Each further detector block writes a part, which is read once more.
    detectors = max(_row_tiles.split(programs, sizes["detectors"], enough=512), 4)
    return Launch(rows=32, outputs=32, detectors=detectors, warps=1)


def _rule(sizes: Sizes) -> Launch:
    slots = _row_tiles.fit_size(32, sizes["slots"])
    # Tiles of 512 elements: four per thread.
    rows = 512 // slots
    detectors = _row_tiles.split(sizes["samples"] // rows, sizes["detectors"])
    return Launch(rows=rows, outputs=slots, detectors=detectors, warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _collect(weights, index, targets, parts, c: tl.constexpr):
    """Sum outputs in a fixed order, by comparing every output with every target."""
    UNROLL: tl.constexpr = min(c.n_slots, 4)
    sample, exists, output, output_exists, group = _row_tiles.locate_program(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    total = tl.zeros((c.OUTPUTS, c.ROWS), parts.dtype.element_ty)
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        row = _row(index, t, sample, exists, c)
        slots = _list(row, t, c) * c.n_slots
        values = weights + row * c.n_slots
        for k0 in range(0, c.n_slots, UNROLL):
            # The loads of several slots are independent, and unrolling lets them overlap.
            for u in tl.static_range(UNROLL):
                k = k0 + u
                slot_exists = exists & (k < c.n_slots)
                target = _row_tiles.target(targets, slots + k, slot_exists, c.n_outputs)
                value = _row_tiles.addend(
                    tl.load(values + k, mask=target >= 0, other=0).to(c.ACC), c
                )
                # A sum over a one-hot selection needs no atomics and no address.
                total += tl.where(output[:, None] == target[None, :], value[None, :], 0)
    # Parts are ``[detector blocks, outputs, B]``: samples are contiguous.
    at = (group.to(tl.int64) * c.n_outputs + output)[:, None] * c.n_samples + sample[None, :]
    tl.store(parts + at, total, mask=output_exists[:, None] & exists[None, :])


@kernel
def _scatter(weights, index, targets, y, c: tl.constexpr):
    sample, exists, slot, slot_exists, group = _row_tiles.locate_program(
        c.n_samples, c.n_slots, c.ROWS, c.OUTPUTS
    )
    of_sample = y + sample[:, None] * c.n_outputs
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        row = _row(index, t, sample, exists, c)
        inside = exists[:, None] & slot_exists[None, :]
        target = _slot_targets(targets, row, t, slot, inside, c)
        value = _slot_values(weights, row, slot, target, c)
        # Slots of one row, and other programs, may reach the same output.
        tl.atomic_add(
            of_sample + target, _row_tiles.addend(value, c), mask=target >= 0, sem="relaxed"
        )


@kernel
def _multiply_rows(weights, index, flip, margin, targets, dy, d_margin, c: tl.constexpr):
    """Write the margin gradients: ``slope * (<dy, row> - <dy, flipped row>)``."""
    sample, exists, _, _, group = _row_tiles.locate_program(
        c.n_samples, c.OUTPUTS, c.ROWS, c.OUTPUTS
    )
    of_sample = dy + sample[:, None] * c.n_outputs
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        here = t.to(tl.int64) * c.n_samples + sample
        address = tl.load(index + here, mask=exists, other=0)
        flipped_address = address ^ tl.load(flip + here, mask=exists, other=0)
        row = _row_tiles.clamp_row(address, t, c)
        flipped_row = _row_tiles.clamp_row(flipped_address, t, c)
        difference = tl.zeros((c.ROWS,), c.SUM)
        for first in range(0, c.n_slots, c.OUTPUTS):
            slot = first + tl.arange(0, c.OUTPUTS)
            slot_exists = exists[:, None] & (slot < c.n_slots)[None, :]
            target = _slot_targets(targets, row, t, slot, slot_exists, c)
            value = _slot_values(weights, row, slot, target, c)
            received = tl.load(of_sample + target, mask=target >= 0, other=0).to(c.ACC)
            if c.LIST_PER_ROW:
                flipped_target = _slot_targets(targets, flipped_row, t, slot, slot_exists, c)
                flipped_value = _slot_values(weights, flipped_row, slot, flipped_target, c)
                flipped_received = tl.load(
                    of_sample + flipped_target, mask=flipped_target >= 0, other=0
                ).to(c.ACC)
                apart = _row_tiles.addend(value * received, c)
                apart -= _row_tiles.addend(flipped_value * flipped_received, c)
            else:
                # Both rows share one target list.
                flipped_target = target
                flipped_value = _slot_values(weights, flipped_row, slot, target, c)
            # If both slots reach one output, the values are subtracted before the product, which
            # keeps the digits of their difference.
            change = _row_tiles.addend((value - flipped_value) * received, c)
            if c.LIST_PER_ROW:
                change = tl.where(flipped_target == target, change, apart)
            difference += tl.sum(change, 1)
        slope = _row_tiles.slope(tl.load(margin + here, mask=exists, other=0))
        gradient = slope * _row_tiles.number(difference, c).to(slope.dtype)
        tl.store(d_margin + here, gradient.to(d_margin.dtype.element_ty), mask=exists)


@kernel
def _add_rows(index, targets, dy, step, first, unused0, unused1, total, touched, c: tl.constexpr):
    sample, exists, slot, slot_exists, group = _row_tiles.locate_program(
        c.n_samples, c.n_slots, c.ROWS, c.OUTPUTS
    )
    of_sample = dy + sample[:, None] * c.n_outputs
    factor = tl.load(step)
    first_detector = tl.load(first)
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_tables)):
        row = _row(index, first_detector + t, sample, exists, c)
        inside = exists[:, None] & slot_exists[None, :]
        target = _slot_targets(targets, row, first_detector + t, slot, inside, c)
        value = tl.load(of_sample + target, mask=target >= 0, other=0).to(c.ACC) * factor
        # `total` begins with the table of the first detector.
        row -= first_detector.to(tl.int64) * c.n_rows
        if c.TOUCH:
            tl.store(touched + row, tl.full((c.ROWS,), 1, tl.int32), mask=exists)
        at = row[:, None] * c.n_slots + slot[None, :]
        # Unused slots add 0: additions to whole rows take one instruction for four elements.
        tl.atomic_add(total + at, _row_tiles.addend(value, c), mask=inside, sem="relaxed")


@kernel
def _row(index, t, sample, exists, c: tl.constexpr):
    """Return each sample's addressed row, counted from the first table's first row."""
    row = tl.load(index + t.to(tl.int64) * c.n_samples + sample, mask=exists, other=0)
    return _row_tiles.clamp_row(row, t, c)


@kernel
def _list(row, t, c: tl.constexpr):
    """Return each row's target list, counted from the first table's first row."""
    return _row_tiles.list_of(row - t.to(tl.int64) * c.n_rows, t, c)


@kernel
def _slot_targets(targets, row, t, slot, exists, c: tl.constexpr):
    """Return the outputs that rows' slots reach, ``[rows, slots]``; -1 for unused slots."""
    at = _list(row, t, c)[:, None] * c.n_slots + slot[None, :]
    return _row_tiles.target(targets, at, exists, c.n_outputs)


@kernel
def _slot_values(weights, row, slot, target, c: tl.constexpr):
    """Return the values of rows' slots, ``[rows, slots]``; 0 for unused slots."""
    at = row[:, None] * c.n_slots + slot[None, :]
    # An unused slot may hold anything, such as NaN.
    return tl.load(weights + at, mask=target >= 0, other=0).to(c.ACC)

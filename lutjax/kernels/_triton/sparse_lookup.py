"""`lutjax.sparse_lookup` in Triton. Detector-major, as `lutjax.lookup`."""

from typing import Any

import jax
import triton
import triton.language as tl

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint, addend_dtype, result
from lutjax.kernels._triton import _rows, _updates
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

_COMPARED = 2**13  # most slots times outputs of a sample at which comparing them costs less than atomics


def forward(
    weights: jax.Array,
    detection: Detection,
    targets: jax.Array,
    *,
    n_outputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    n_detectors, _, n_slots = weights.shape
    n_samples = len(detection.index)
    how = launch_of("sparse_lookup.forward", _sizes(weights, n_samples, n_outputs), device, _forward_rule)
    compared = n_detectors * n_slots * n_outputs <= _COMPARED
    tile = _rows.Tile(how, n_samples, n_outputs if compared else n_slots, n_detectors, device)
    dtype = addend_dtype(weights.dtype, accumulate)
    changed: dict[str, Any] = {"zeroed": [jax.ShapeDtypeStruct((n_samples, n_outputs), dtype)]}
    if compared:
        changed = {"outputs": [jax.ShapeDtypeStruct((tile.groups, n_outputs, n_samples), dtype)]}
    (y,) = launch(
        _collect if compared else _scatter,
        weights,
        detection.index.T,
        targets,
        **changed,
        programs=tile.programs if weights.size else 0,
        device=device,
        warps=how.warps,
        **_constants(tile, weights, targets, n_outputs, accumulate),
    )
    return result(_rows.sum_of_parts(y).T if compared else y, weights.dtype, accumulate)


def backward(
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    n_outputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    weights, d, targets = saved
    d_weights = d_margin = None
    if needs[0]:
        addition = _updates.gradient(weights, accumulate)
        d_weights, _ = add_rows(addition, accumulate, weights, d, targets, dy, device)
    if needs[1]:
        d_margin = _margins(weights, d, targets, dy, accumulate, device)
    return d_weights, d_margin, None


def _margins(
    weights: jax.Array,
    d: Detection,
    targets: jax.Array,
    dy: jax.Array,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    n_detectors, _, n_slots = weights.shape
    n_samples, n_outputs = dy.shape
    how = launch_of("sparse_lookup.margins", _sizes(weights, n_samples, n_outputs), device, _margins_rule)
    tile = _rows.Tile(how, n_samples, n_slots, n_detectors, device, all_outputs=True)
    (d_margin,) = launch(
        _multiply_rows,
        weights,
        d.index.T,
        d.flip.T,
        d.margin.T,
        targets,
        dy,
        outputs=[jax.ShapeDtypeStruct((n_detectors, n_samples), d.margin.dtype)],
        programs=tile.programs if weights.size else 0,
        device=device,
        warps=how.warps,
        **_constants(tile, weights, targets, n_outputs, accumulate),
    )
    return d_margin.T


def add_rows(
    addition: _updates.Addition,
    accumulate: FixedPoint | None,
    weights: jax.Array,
    d: Detection,
    targets: jax.Array,
    dy: jax.Array,
    device: Device,
) -> tuple[jax.Array, ...]:
    """Adds `dy` of their targets to the slots that were read."""
    n_samples, n_outputs = dy.shape
    how = launch_of("sparse_lookup.table", _sizes(weights, n_samples, n_outputs), device, _table_rule)
    tile = _rows.Tile(how, n_samples, weights.shape[2], addition.total.shape[0], device)
    return addition(
        _add_rows,
        d.index.T,
        targets,
        dy,
        programs=tile.programs if weights.size else 0,
        device=device,
        warps=how.warps,
        **_constants(tile, weights, targets, n_outputs, accumulate),
    )


# ------------------------------------------------------------------------------------- launches
def _sizes(weights: jax.Array, n_samples: int, n_outputs: int) -> Sizes:
    detectors, rows, slots = weights.shape
    return {
        "samples": n_samples,
        "detectors": detectors,
        "rows": rows,
        "slots": slots,
        "outputs": n_outputs,
        "bits": 8 * weights.dtype.itemsize,
    }


def _constants(
    tile: _rows.Tile, weights: jax.Array, targets: jax.Array, n_outputs: int, accumulate: FixedPoint | None
) -> dict[str, Any]:
    return {
        **_rows.arithmetic(weights, accumulate),
        **tile.constants,
        "n_samples": tile.n_rows,
        "n_rows": weights.shape[1],
        "n_slots": weights.shape[2],
        "n_outputs": n_outputs,
        "LIST_PER_TABLE": targets.shape[0] > 1,
        "LIST_PER_ROW": targets.shape[1] > 1,
    }


def _forward_rule(sizes: Sizes) -> Launch:
    if sizes["detectors"] * sizes["slots"] * sizes["outputs"] > _COMPARED:
        return _rule(sizes)
    programs = sizes["samples"] // 32 * triton.cdiv(sizes["outputs"], 32)
    # Each further part is written and read once more.
    detectors = max(_rows.split(programs, sizes["detectors"], enough=512), 4)
    return Launch(rows=32, outputs=32, detectors=detectors, warps=1)


def _margins_rule(sizes: Sizes) -> Launch:
    return _rule(sizes)


def _table_rule(sizes: Sizes) -> Launch:
    return _rule(sizes)


def _rule(sizes: Sizes) -> Launch:
    slots = min(triton.next_power_of_2(max(sizes["slots"], 1)), 32)
    rows = 512 // slots
    detectors = _rows.split(sizes["samples"] // rows, sizes["detectors"])
    return Launch(rows=rows, outputs=slots, detectors=detectors, warps=4)


# ------------------------------------------------------------------------------------- kernels
# Programs: samples first, then outputs or slots, then groups of detectors.
@kernel
def _collect(
    weights,
    index,
    targets,
    parts,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_slots: tl.constexpr,
    n_outputs: tl.constexpr,
    LIST_PER_TABLE: tl.constexpr,
    LIST_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Sums in a fixed order: every output is compared with every target."""
    UNROLL: tl.constexpr = min(n_slots, 4)
    sample, exists, output, output_exists, group = _rows.place(n_samples, n_outputs, ROWS, OUTPUTS)
    total = tl.zeros((OUTPUTS, ROWS), parts.dtype.element_ty)
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        row = _row(index, t, sample, exists, n_samples, n_rows)
        slots = targets + _list(row, t, n_rows, LIST_PER_TABLE, LIST_PER_ROW) * n_slots
        values = weights + row * n_slots
        for k0 in range(0, n_slots, UNROLL):
            for u in tl.static_range(UNROLL):
                k = k0 + u
                slot_exists = exists & (k < n_slots)
                target = _target(slots + k, slot_exists, n_outputs)
                value = _rows.addend(tl.load(values + k, mask=target >= 0, other=0).to(ACC), SCALE)
                total += tl.where(output[:, None] == target[None, :], value[None, :], 0)
    at = (group.to(tl.int64) * n_outputs + output)[:, None] * n_samples + sample[None, :]
    tl.store(parts + at, total, mask=output_exists[:, None] & exists[None, :])


@kernel
def _scatter(
    weights,
    index,
    targets,
    y,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_slots: tl.constexpr,
    n_outputs: tl.constexpr,
    LIST_PER_TABLE: tl.constexpr,
    LIST_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, exists, slot, slot_exists, group = _rows.place(n_samples, n_slots, ROWS, OUTPUTS)
    of_sample = y + sample[:, None] * n_outputs
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        row = _row(index, t, sample, exists, n_samples, n_rows)
        slots = _list(row, t, n_rows, LIST_PER_TABLE, LIST_PER_ROW)[:, None] * n_slots + slot[None, :]
        target = _target(targets + slots, exists[:, None] & slot_exists[None, :], n_outputs)
        at = row[:, None] * n_slots + slot[None, :]
        value = tl.load(weights + at, mask=target >= 0, other=0).to(ACC)
        tl.atomic_add(of_sample + target, _rows.addend(value, SCALE), mask=target >= 0, sem="relaxed")


@kernel
def _multiply_rows(
    weights,
    index,
    flip,
    margin,
    targets,
    dy,
    d_margin,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_rows: tl.constexpr,
    n_slots: tl.constexpr,
    n_outputs: tl.constexpr,
    LIST_PER_TABLE: tl.constexpr,
    LIST_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, exists, _, _, group = _rows.place(n_samples, OUTPUTS, ROWS, OUTPUTS)
    of_sample = dy + sample[:, None] * n_outputs
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        here = t.to(tl.int64) * n_samples + sample
        main = tl.load(index + here, mask=exists, other=0)
        flipped = _rows.clamped(main ^ tl.load(flip + here, mask=exists, other=0), t, n_rows)
        main = _rows.clamped(main, t, n_rows)
        main_list = _list(main, t, n_rows, LIST_PER_TABLE, LIST_PER_ROW)
        flipped_list = _list(flipped, t, n_rows, LIST_PER_TABLE, LIST_PER_ROW)
        difference = tl.zeros((ROWS,), SUM)
        for first in range(0, n_slots, OUTPUTS):
            slot = first + tl.arange(0, OUTPUTS)
            slot_exists = exists[:, None] & (slot < n_slots)[None, :]
            target = _target(targets + main_list[:, None] * n_slots + slot[None, :], slot_exists, n_outputs)
            used = target >= 0
            cotangent = tl.load(of_sample + target, mask=used, other=0).to(ACC)
            value = tl.load(weights + main[:, None] * n_slots + slot[None, :], mask=used, other=0).to(ACC)
            of_flipped = weights + flipped[:, None] * n_slots + slot[None, :]
            # Where both rows reach one output, values are subtracted before they are multiplied.
            if LIST_PER_ROW:
                to = _target(
                    targets + flipped_list[:, None] * n_slots + slot[None, :], slot_exists, n_outputs
                )
                other = tl.load(of_flipped, mask=to >= 0, other=0).to(ACC)
                apart = _rows.addend(value * cotangent, SCALE)
                of_other = tl.load(of_sample + to, mask=to >= 0, other=0).to(ACC)
                apart -= _rows.addend(other * of_other, SCALE)
                change = tl.where(to == target, _rows.addend((value - other) * cotangent, SCALE), apart)
            else:
                other = tl.load(of_flipped, mask=used, other=0).to(ACC)
                change = _rows.addend((value - other) * cotangent, SCALE)
            difference += tl.sum(change, 1)
        of_margin = _rows.slope(tl.load(margin + here, mask=exists, other=0))
        value = of_margin * _rows.number(difference, ACC, SCALE).to(of_margin.dtype)
        tl.store(d_margin + here, value.to(d_margin.dtype.element_ty), mask=exists)


@kernel
def _add_rows(
    index,
    targets,
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
    n_slots: tl.constexpr,
    n_outputs: tl.constexpr,
    LIST_PER_TABLE: tl.constexpr,
    LIST_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, exists, slot, slot_exists, group = _rows.place(n_samples, n_slots, ROWS, OUTPUTS)
    of_sample = dy + sample[:, None] * n_outputs
    factor = tl.load(step)
    first_detector = tl.load(first)
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_tables)):
        row = _row(index, first_detector + t, sample, exists, n_samples, n_rows)
        slots = (
            _list(row, first_detector + t, n_rows, LIST_PER_TABLE, LIST_PER_ROW)[:, None] * n_slots
            + slot[None, :]
        )
        target = _target(targets + slots, exists[:, None] & slot_exists[None, :], n_outputs)
        value = tl.load(of_sample + target, mask=target >= 0, other=0).to(ACC) * factor
        row -= first_detector.to(tl.int64) * n_rows
        if TOUCH:
            tl.store(touched + row, tl.full((ROWS,), 1, tl.int32), mask=exists)
        at = row[:, None] * n_slots + slot[None, :]
        tl.atomic_add(total + at, _rows.addend(value, SCALE), mask=target >= 0, sem="relaxed")


@kernel
def _row(index, t, sample, exists, n_samples: tl.constexpr, n_rows: tl.constexpr):
    """The row that each sample addresses, counted from the first row of the first table."""
    row = tl.load(index + t.to(tl.int64) * n_samples + sample, mask=exists, other=0)
    return _rows.clamped(row, t, n_rows)


@kernel
def _list(row, t, n_rows: tl.constexpr, LIST_PER_TABLE: tl.constexpr, LIST_PER_ROW: tl.constexpr):
    """The list of targets of each row."""
    if LIST_PER_ROW:
        return row if LIST_PER_TABLE else row - t.to(tl.int64) * n_rows
    else:
        return tl.zeros_like(row) + (t if LIST_PER_TABLE else 0)


@kernel
def _target(slot, exists, n_outputs: tl.constexpr):
    """The output that slots reach; -1 if none."""
    return tl.maximum(tl.minimum(tl.load(slot, mask=exists, other=-1), n_outputs - 1), -1)

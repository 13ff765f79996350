"""`lutjax.bilinear_gates` in Triton."""

import dataclasses
from typing import Any

import jax
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _rows, _wires
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of


def forward(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    how = launch_of("bilinear_gates.forward", _wires.sizes(x, wires), device, _forward_rule)
    tile = _wires.Tile(how, x.shape[1], len(wires))
    (y,) = launch(
        _apply,
        x,
        coefficients,
        wires,
        outputs=[jax.ShapeDtypeStruct((len(wires), x.shape[1]), x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        **_wires.constants(tile, x, coefficients, wires),
    )
    return y


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, coefficients, wires, readers = saved
    if needs[0] and readers is not None and wires.size:
        dx, parts = _by_inputs(x, coefficients, wires, readers, dy, needs[1], device)
    else:
        dx, parts = _by_gates(x, coefficients, wires, dy, needs, device)
    return dx if needs[0] else None, _rows.sum_of_parts(parts) if needs[1] else None, None, None


def _by_gates(
    x: jax.Array,
    coefficients: jax.Array,
    wires: jax.Array,
    dy: jax.Array,
    needs: tuple[bool, ...],
    device: Device,
) -> tuple[jax.Array, ...]:
    """The cotangent of the inputs, by atomics, and parts of that of the coefficients."""
    how = launch_of("bilinear_gates.gates", _wires.sizes(x, wires), device, _gates_rule)
    tile = _wires.Tile(how, x.shape[1], len(wires))
    dtype = accumulator(x.dtype, coefficients.dtype)
    parts, dx = launch(
        _reduce,
        x,
        coefficients,
        wires,
        dy,
        outputs=[jax.ShapeDtypeStruct((tile.parts, 4, len(wires)) if needs[1] else (1,), dtype)],
        zeroed=[jax.ShapeDtypeStruct(x.shape if needs[0] else (1,), dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        SUMS=needs[1],
        SCATTER=needs[0],
        **_wires.constants(tile, x, coefficients, wires),
    )
    return dx, parts


def _by_inputs(
    x: jax.Array,
    coefficients: jax.Array,
    wires: jax.Array,
    readers: jax.Array,
    dy: jax.Array,
    sums: bool,
    device: Device,
) -> tuple[jax.Array, ...]:
    """The cotangent of the inputs, from their readers, and parts of that of the coefficients."""
    how = launch_of("bilinear_gates.inputs", _wires.sizes(x, wires), device, _inputs_rule)
    tile = _wires.Tile(dataclasses.replace(how, detectors=1), x.shape[1], len(x))
    dtype = accumulator(x.dtype, coefficients.dtype)
    # Zeros: a wire that is not in the list of readers writes nothing.
    dx, parts = launch(
        _gather,
        x,
        coefficients,
        wires,
        readers,
        _wires.used_readers(readers),
        dy,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        zeroed=[jax.ShapeDtypeStruct((tile.parts, 4, len(wires)) if sums else (1,), dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        fan_out=readers.shape[1],
        UNROLLED=_wires.UNROLLED,
        SUMS=sums,
        **_wires.constants(tile, x, coefficients, wires),
    )
    return dx, parts


# ------------------------------------------------------------------------------------- launches
def _forward_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=2048)


def _gates_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=1024)


def _inputs_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=256, arrays=2, warps=1, samples=256)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _apply(
    x,
    coefficients,
    wires,
    y,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_gates: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
):
    gate, exists, part = _wires.place(n_gates, FEATURES)
    of_a = _wires.input_of(wires, 2 * gate, n_inputs)
    of_b = _wires.input_of(wires, 2 * gate + 1, n_inputs)
    c0 = _coefficient(coefficients, 0, gate, None, n_gates, ACC)
    c1 = _coefficient(coefficients, 1, gate, None, n_gates, ACC)
    c2 = _coefficient(coefficients, 2, gate, None, n_gates, ACC)
    c3 = _coefficient(coefficients, 3, gate, None, n_gates, ACC)
    for block in range(part * BLOCKS, _wires.last_block(part, n_samples, SAMPLES, BLOCKS)):
        sample, _ = _rows.block(SAMPLES, n_samples, block)
        a = _wires.read(x, of_a, sample, n_samples, SAMPLES, ACC)
        b = _wires.read(x, of_b, sample, n_samples, SAMPLES, ACC)
        _wires.write(y, gate, exists, sample, (c0 + c1 * a) + (c2 + c3 * a) * b, n_samples)


@kernel
def _reduce(
    x,
    coefficients,
    wires,
    dy,
    parts,
    dx,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_gates: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    SUMS: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """Programs of gates: the sums of each, and what its inputs receive."""
    gate, exists, part = _wires.place(n_gates, FEATURES)
    of_a = _wires.input_of(wires, 2 * gate, n_inputs)
    of_b = _wires.input_of(wires, 2 * gate + 1, n_inputs)
    c1 = _coefficient(coefficients, 1, gate, None, n_gates, ACC)
    c2 = _coefficient(coefficients, 2, gate, None, n_gates, ACC)
    c3 = _coefficient(coefficients, 3, gate, None, n_gates, ACC)
    of_1 = tl.zeros((FEATURES, SAMPLES), ACC)
    of_a_alone = tl.zeros((FEATURES, SAMPLES), ACC)
    of_b_alone = tl.zeros((FEATURES, SAMPLES), ACC)
    of_both = tl.zeros((FEATURES, SAMPLES), ACC)
    for block in range(part * BLOCKS, _wires.last_block(part, n_samples, SAMPLES, BLOCKS)):
        sample, sample_exists = _rows.block(SAMPLES, n_samples, block)
        g = _wires.read(dy, gate, sample, n_samples, SAMPLES, ACC)
        a = _wires.read(x, of_a, sample, n_samples, SAMPLES, ACC)
        b = _wires.read(x, of_b, sample, n_samples, SAMPLES, ACC)
        if SUMS:
            of_1 += g
            of_a_alone += g * a
            of_b_alone += g * b
            of_both += g * a * b
        if SCATTER:
            both_exist = exists[:, None] & sample_exists[None, :]
            to_a = dx + _wires.at(of_a, sample, n_samples)
            to_b = dx + _wires.at(of_b, sample, n_samples)
            tl.atomic_add(to_a, g * (c1 + c3 * b), mask=both_exist, sem="relaxed")
            tl.atomic_add(to_b, g * (c2 + c3 * a), mask=both_exist, sem="relaxed")
    if SUMS:
        to = parts + part.to(tl.int64) * 4 * n_gates + gate
        tl.store(to, tl.sum(of_1, 1), mask=exists)
        tl.store(to + n_gates, tl.sum(of_a_alone, 1), mask=exists)
        tl.store(to + 2 * n_gates, tl.sum(of_b_alone, 1), mask=exists)
        tl.store(to + 3 * n_gates, tl.sum(of_both, 1), mask=exists)


@kernel
def _gather(
    x,
    coefficients,
    wires,
    readers,
    used,
    dy,
    dx,
    parts,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_gates: tl.constexpr,
    fan_out: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    UNROLLED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Programs of inputs: what each receives from its readers.

    A reader has what it takes for two of the four sums of its gate: as input a, those of ``g`` and ``g a``; as input
    b, those of ``g b`` and ``g a b``.
    """
    feature, exists, block = _wires.place(n_inputs, FEATURES)
    sample, _ = _rows.block(SAMPLES, n_samples, block)
    own = tl.zeros((FEATURES, SAMPLES), ACC)
    if SUMS:
        own = _wires.read(x, feature, sample, n_samples, SAMPLES, ACC)
    parts += block.to(tl.int64) * 4 * n_gates
    total = tl.zeros((FEATURES, SAMPLES), ACC)
    for first in range(0, _wires.last_use(used, feature, fan_out, UNROLLED), UNROLLED):
        # Everything is read before anything is computed, so that all is under way at the same time.
        numbers, others = _wires.nothing(), _wires.nothing()
        gs, bs = _wires.nothing(), _wires.nothing()
        for u in tl.static_range(UNROLLED):
            numbers += (_wires.reader(readers, feature, first + u, exists, fan_out),)
        for u in tl.static_range(UNROLLED):
            others += (_wires.input_of(wires, _wires.wire_of(numbers[u], 2 * n_gates) ^ 1, n_inputs),)
        for u in tl.static_range(UNROLLED):
            gate = _wires.wire_of(numbers[u], 2 * n_gates) // 2
            gs += (_wires.read_some(dy, gate, numbers[u] >= 0, sample, n_samples, ACC),)
            bs += (_wires.read_some(x, others[u], numbers[u] >= 0, sample, n_samples, ACC),)
        for u in tl.static_range(UNROLLED):
            wire = _wires.wire_of(numbers[u], 2 * n_gates)
            gate, second = wire // 2, wire % 2
            # 0 for readers that do not exist, whose gate may hold NaN.
            slope = _coefficient(coefficients, 1 + second, gate, numbers[u] >= 0, n_gates, ACC)
            cross = _coefficient(coefficients, 3, gate, numbers[u] >= 0, n_gates, ACC)
            total += gs[u] * (slope + cross * bs[u])
            if SUMS:
                of_own = gs[u] * own
                of_pair = tl.where((second == 0)[:, None], gs[u], of_own * bs[u])
                tl.store(parts + (1 + second) * n_gates + gate, tl.sum(of_own, 1), mask=numbers[u] >= 0)
                tl.store(parts + 3 * second * n_gates + gate, tl.sum(of_pair, 1), mask=numbers[u] >= 0)
    _wires.write(dx, feature, exists, sample, total, n_samples)


@kernel
def _coefficient(coefficients, number, gate, exists, n_gates: tl.constexpr, ACC: tl.constexpr):
    """A coefficient of each gate, beside its samples; `exists`: None, or where it is not 0."""
    found = tl.load(
        coefficients + number * n_gates + gate, mask=exists, other=0 if exists is not None else None
    )
    return found.to(ACC)[:, None]

"""`lutjax.bilinear_gates` in Triton."""

import dataclasses
from typing import Any

import jax
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of


def forward(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    how = launch_of("bilinear_gates.forward", _gate_tiles.sizes(x, wires), device, _forward_rule)
    tile = _gate_tiles.Tile(how, x.shape[1], len(wires))
    (y,) = launch(
        _apply,
        x,
        coefficients,
        wires,
        outputs=[jax.ShapeDtypeStruct((len(wires), x.shape[1]), x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        **_gate_tiles.constants(tile, x, coefficients, wires),
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
    return dx if needs[0] else None, _row_tiles.sum_of_parts(parts) if needs[1] else None, None, None


def _by_gates(
    x: jax.Array,
    coefficients: jax.Array,
    wires: jax.Array,
    dy: jax.Array,
    needs: tuple[bool, ...],
    device: Device,
) -> tuple[jax.Array, ...]:
    """The cotangent of the inputs, by atomics, and parts of that of the coefficients."""
    how = launch_of("bilinear_gates.gates", _gate_tiles.sizes(x, wires), device, _gates_rule)
    tile = _gate_tiles.Tile(how, x.shape[1], len(wires))
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
        **_gate_tiles.constants(tile, x, coefficients, wires),
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
    how = launch_of("bilinear_gates.inputs", _gate_tiles.sizes(x, wires), device, _inputs_rule)
    tile = _gate_tiles.Tile(dataclasses.replace(how, detectors=1), x.shape[1], len(x))
    dtype = accumulator(x.dtype, coefficients.dtype)
    # Zeros: a wire that is not in the list of readers writes nothing.
    dx, parts = launch(
        _gather,
        x,
        coefficients,
        wires,
        readers,
        _gate_tiles.used_readers(readers),
        dy,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        zeroed=[jax.ShapeDtypeStruct((tile.parts, 4, len(wires)) if sums else (1,), dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        fan_out=readers.shape[1],
        UNROLLED=_gate_tiles.UNROLLED,
        SUMS=sums,
        **_gate_tiles.constants(tile, x, coefficients, wires),
    )
    return dx, parts


# ------------------------------------------------------------------------------------- launches
def _forward_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=2048)


def _gates_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=1024)


def _inputs_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=256, arrays=2, warps=1, samples=256)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _apply(x, coefficients, wires, y, c: tl.constexpr):
    gate, exists, part = _gate_tiles.place(c.n_gates, c)
    of_a = _gate_tiles.input_of(wires, 2 * gate, c)
    of_b = _gate_tiles.input_of(wires, 2 * gate + 1, c)
    c0 = _coefficient(coefficients, 0, gate, None, c)
    c1 = _coefficient(coefficients, 1, gate, None, c)
    c2 = _coefficient(coefficients, 2, gate, None, c)
    c3 = _coefficient(coefficients, 3, gate, None, c)
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        a = _gate_tiles.read(x, of_a, sample, c)
        b = _gate_tiles.read(x, of_b, sample, c)
        _gate_tiles.write(y, gate, exists, sample, (c0 + c1 * a) + (c2 + c3 * a) * b, c)


@kernel
def _reduce(x, coefficients, wires, dy, parts, dx, c: tl.constexpr):
    """Programs of gates: the sums of each, and what its inputs receive."""
    gate, exists, part = _gate_tiles.place(c.n_gates, c)
    of_a = _gate_tiles.input_of(wires, 2 * gate, c)
    of_b = _gate_tiles.input_of(wires, 2 * gate + 1, c)
    c1 = _coefficient(coefficients, 1, gate, None, c)
    c2 = _coefficient(coefficients, 2, gate, None, c)
    c3 = _coefficient(coefficients, 3, gate, None, c)
    of_1 = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    of_a_alone = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    of_b_alone = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    of_both = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        g = _gate_tiles.read(dy, gate, sample, c)
        a = _gate_tiles.read(x, of_a, sample, c)
        b = _gate_tiles.read(x, of_b, sample, c)
        if c.SUMS:
            of_1 += g
            of_a_alone += g * a
            of_b_alone += g * b
            of_both += g * a * b
        if c.SCATTER:
            both_exist = exists[:, None] & sample_exists[None, :]
            to_a = dx + _gate_tiles.at(of_a, sample, c.n_samples)
            to_b = dx + _gate_tiles.at(of_b, sample, c.n_samples)
            tl.atomic_add(to_a, g * (c1 + c3 * b), mask=both_exist, sem="relaxed")
            tl.atomic_add(to_b, g * (c2 + c3 * a), mask=both_exist, sem="relaxed")
    if c.SUMS:
        to = parts + part.to(tl.int64) * 4 * c.n_gates + gate
        tl.store(to, tl.sum(of_1, 1), mask=exists)
        tl.store(to + c.n_gates, tl.sum(of_a_alone, 1), mask=exists)
        tl.store(to + 2 * c.n_gates, tl.sum(of_b_alone, 1), mask=exists)
        tl.store(to + 3 * c.n_gates, tl.sum(of_both, 1), mask=exists)


@kernel
def _gather(x, coefficients, wires, readers, used, dy, dx, parts, c: tl.constexpr):
    """Programs of inputs: what each receives from its readers.

    A reader has what it takes for two of the four sums of its gate: as input a, those of ``g`` and ``g a``; as input
    b, those of ``g b`` and ``g a b``.
    """
    feature, exists, block = _gate_tiles.place(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    own = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    if c.SUMS:
        own = _gate_tiles.read(x, feature, sample, c)
    parts += block.to(tl.int64) * 4 * c.n_gates
    total = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        # Everything is read before anything is computed, so that all is under way at the same time.
        numbers, others = _gate_tiles.nothing(), _gate_tiles.nothing()
        gs, bs = _gate_tiles.nothing(), _gate_tiles.nothing()
        for u in tl.static_range(c.UNROLLED):
            numbers += (_gate_tiles.reader(readers, feature, first + u, exists, c),)
        for u in tl.static_range(c.UNROLLED):
            others += (_gate_tiles.input_of(wires, _gate_tiles.wire_of(numbers[u], 2 * c.n_gates) ^ 1, c),)
        for u in tl.static_range(c.UNROLLED):
            gate = _gate_tiles.wire_of(numbers[u], 2 * c.n_gates) // 2
            gs += (_gate_tiles.read_some(dy, gate, numbers[u] >= 0, sample, c),)
            bs += (_gate_tiles.read_some(x, others[u], numbers[u] >= 0, sample, c),)
        for u in tl.static_range(c.UNROLLED):
            wire = _gate_tiles.wire_of(numbers[u], 2 * c.n_gates)
            gate, second = wire // 2, wire % 2
            # 0 for readers that do not exist, whose gate may hold NaN.
            slope = _coefficient(coefficients, 1 + second, gate, numbers[u] >= 0, c)
            cross = _coefficient(coefficients, 3, gate, numbers[u] >= 0, c)
            total += gs[u] * (slope + cross * bs[u])
            if c.SUMS:
                of_own = gs[u] * own
                of_pair = tl.where((second == 0)[:, None], gs[u], of_own * bs[u])
                tl.store(parts + (1 + second) * c.n_gates + gate, tl.sum(of_own, 1), mask=numbers[u] >= 0)
                tl.store(parts + 3 * second * c.n_gates + gate, tl.sum(of_pair, 1), mask=numbers[u] >= 0)
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _coefficient(coefficients, number, gate, exists, c: tl.constexpr):
    """A coefficient of each gate, beside its samples; `exists`: None, or where it is not 0."""
    found = tl.load(
        coefficients + number * c.n_gates + gate, mask=exists, other=0 if exists is not None else None
    )
    return found.to(c.ACC)[:, None]

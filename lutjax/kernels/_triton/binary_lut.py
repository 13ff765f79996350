"""`lutjax.binary_lut` in Triton.

Formula for gate ``g`` with wire inputs ``x[0] ... x[n - 1]``::

    address = sum_k 2**k * [x[k] > 0];  y = table[address];  dtable[address] += dy
    dx[k] += dy * slopes[k, address]    (`_xla._slot_polynomials.slopes_at_addresses`)

Work: `_pack` turns signs into bits, 32 samples per word. `_look_up` owns a gate and a sample tile.
The backward pass first stores addresses, one byte per gate and sample; then input programs gather
from the fan-out lists, and gate programs sum ``dy`` by slot. An input gradient is ``dy`` times one
slope out of ``2**n`` per wire, so no array over all wires is stored.

Layout: words are ``[inputs, samples / 32]`` and addresses ``[gates, samples / 4]`` int32, so small
that gates read them from the caches (159 us forward, compared with 253 us for unpacked inputs).
Each address word holds four samples.

Numerics: NaN inputs give bit 0. Sums use the accumulator dtype. Table gradients are partial sums
per program, and gathered input gradients have a fixed order. Without fan-out lists input gradients
use atomics, and their last bits differ between runs. Wire ids are clamped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import few_values, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla import _slot_polynomials
from lutjax.ops.binary_lut import BinaryLut
from lutjax.tuning import Launch, Sizes
from lutjax.values._dtypes import accumulator

_BITS = 32  # samples in a word
_UNROLLED = 8  # most readers of an input whose loads are issued together


def _supports(request: Request) -> str | None:
    assert isinstance(request.call, BinaryLut)
    return unsupported_arguments(request) or few_values(request.call)


SPEC = Declaration(
    _supports,
    launches=(
        "binary_lut.forward",
        "binary_lut.wires",
        "binary_lut.words",
        "binary_lut.addresses",
        "binary_lut.inputs",
        "binary_lut.table",
    ),
)


def forward(call: BinaryLut, *, device: Device) -> jax.Array:
    (y,) = launch(
        _look_up,
        _pack_inputs(call, device),
        call.table,
        call.wires,
        outputs=[_gate_tiles.output(call)],
        **_arguments("forward", _forward_rule, call, device),
    )
    return y


def backward(
    call: BinaryLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    addresses, cotangents = _addresses(call, device), {}
    if "x" in needs:
        cotangents["x"] = _input_gradient(addresses, call, cotangent, device)
    if "table" in needs:
        cotangents["table"] = _gate_tiles.cotangent_of_table(
            "binary_lut.table", _table_rule, _sum_chosen, call, device, addresses, cotangent
        )
    return cotangents


def _pack_inputs(call: BinaryLut, device: Device) -> jax.Array:
    """Return the inputs' sign bits, ``[inputs, words]``."""
    n_inputs, n_samples = call.x.shape
    arguments = _arguments("words", _words_rule, call, device, of_inputs=True)
    (words,) = launch(
        _pack,
        call.x,
        outputs=[jax.ShapeDtypeStruct((n_inputs, triton.cdiv(n_samples, _BITS)), jnp.int32)],
        **{**arguments, "ACC": _row_tiles.TYPES[accumulator(call.x.dtype).name]},
    )
    return words


def _addresses(call: BinaryLut, device: Device) -> jax.Array:
    """Return the addressed slots, four samples per word: ``[gates, samples / 4]``."""
    shape = (len(call.wires), _BITS // 4 * triton.cdiv(call.x.shape[1], _BITS))
    (addresses,) = launch(
        _address,
        _pack_inputs(call, device),
        call.wires,
        outputs=[jax.ShapeDtypeStruct(shape, jnp.int32)],
        **_arguments("addresses", _words_rule, call, device),
    )
    return addresses


def _input_gradient(
    addresses: jax.Array, call: BinaryLut, dy: jax.Array, device: Device
) -> jax.Array:
    x, wires, readers = call.x, call.wires, call.readers
    slopes = _slot_polynomials.slopes_at_addresses(
        call.table.astype(accumulator(x.dtype, call.table.dtype))
    )
    # Without fan-out lists, atomics add wire gradients to the inputs.
    if readers is None or not wires.size:
        (dx,) = launch(
            _scatter,
            addresses,
            slopes,
            wires,
            dy,
            zeroed=[jax.ShapeDtypeStruct(x.shape, slopes.dtype)],
            **_arguments("wires", _wires_rule, call, device),
        )
        return dx
    unrolled = max(min(readers.shape[1], _UNROLLED), 1)
    arguments = _arguments("inputs", _inputs_rule, call, device, of_inputs=True)
    (dx,) = launch(
        _collect,
        addresses,
        slopes,
        readers,
        _gate_tiles.used_readers(readers, unrolled),
        dy,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        **{**arguments, "UNROLLED": unrolled},
    )
    return dx


# ------------------------------------------------------------------------------------- launches
def _arguments(
    kernel: str,
    rule: Callable[[Sizes], Launch],
    call: BinaryLut,
    device: Device,
    of_inputs: bool = False,
) -> dict[str, Any]:
    tile = _gate_tiles.GateTile.for_call(
        f"binary_lut.{kernel}", rule, call, device, of_inputs=of_inputs
    )
    # A word holds 32 samples, also if there are fewer.
    config = dataclasses.replace(tile.config, rows=max(tile.config.rows, _BITS), detectors=1)
    n_samples = max(tile.n_samples, _BITS) if tile.n_samples else 0
    return dataclasses.replace(tile, config=config, n_samples=n_samples).arguments(call, call.table)


def _words_rule(sizes: Sizes) -> Launch:
    return Launch(rows=4096, outputs=1, detectors=1, warps=4)


def _forward_rule(sizes: Sizes) -> Launch:
    return Launch(rows=2048, outputs=1, detectors=1, warps=4)


def _wires_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=512)


def _inputs_rule(sizes: Sizes) -> Launch:
    # Four samples per thread: the slopes of a word of addresses then have the layout of `dy`.
    samples = max(_gate_tiles.rule(sizes, values=256, arrays=2, samples=256).rows, 128)
    return Launch(rows=samples, outputs=1, detectors=1, warps=samples // 128)


def _table_rule(sizes: Sizes) -> Launch:
    # As many sums as the registers of a thread hold.
    samples = min(32 * max(_gate_tiles.SLOTS >> sizes["places"], 1), 128)
    return Launch(rows=samples, outputs=4, detectors=4096 // samples, warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _pack(x, words, c: tl.constexpr):
    """Set the bits for samples above 0; NaN sets no bit."""
    feature, exists, block = _gate_tiles.locate_program(c.n_inputs, c)
    word = block.to(tl.int64) * (c.SAMPLES // 32) + tl.arange(0, c.SAMPLES // 32)
    bit = tl.arange(0, 32)[None, None, :]
    sample = word[None, :, None] * 32 + bit
    value = tl.load(
        x + feature[:, None, None] * c.n_samples + sample, mask=sample < c.n_samples, other=0
    )
    # Each bit occurs once, so the sum is a bitwise OR.
    packed = tl.sum((value.to(c.ACC) > 0).to(tl.int32) << bit, 2)
    n_words: tl.constexpr = (c.n_samples + 31) // 32
    both_exist = exists[:, None] & (word < n_words)[None, :]
    tl.store(words + _gate_tiles.sample_offsets(feature, word, n_words), packed, mask=both_exist)


@kernel
def _look_up(words, table, wires, y, c: tl.constexpr):
    gate, exists, block = _gate_tiles.locate_program(c.n_gates, c)
    four = _fours(block, c.SAMPLES)
    addresses = _read_bits(words, wires, gate, four, c)
    value = _select_slot(table + gate * c.n_slots, addresses, True)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    _gate_tiles.write(y, gate, exists, sample, value, c)


@kernel
def _address(words, wires, addresses, c: tl.constexpr):
    gate, exists, block = _gate_tiles.locate_program(c.n_gates, c)
    four = _fours(block, c.SAMPLES)
    value = _read_bits(words, wires, gate, four, c)
    n_fours: tl.constexpr = 8 * ((c.n_samples + 31) // 32)
    tl.store(
        addresses + _gate_tiles.sample_offsets(gate, four, n_fours),
        value,
        mask=exists[:, None] & (four < n_fours)[None, :],
    )


@kernel
def _collect(addresses, slopes, readers, used, dy, dx, c: tl.constexpr):
    """Sum each input's gradients over its readers."""
    feature, exists, block = _gate_tiles.locate_program(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    total = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        # All loads are issued before anything is computed, so that their latencies overlap.
        of_wires, used_wires = _gate_tiles.empty_tuple(), _gate_tiles.empty_tuple()
        gs, read = _gate_tiles.empty_tuple(), _gate_tiles.empty_tuple()
        for u in tl.static_range(c.UNROLLED):
            number = _gate_tiles.reader(readers, feature, first + u, exists, c)
            wire = _gate_tiles.wire_of(number, c.n_gates * c.PLACES)
            gate = wire // c.PLACES
            gs += (_gate_tiles.read_some(dy, gate, number >= 0, sample, c),)
            read += (_read_addresses(addresses, gate, block, c),)
            of_wires += (slopes + wire * c.n_slots,)
            used_wires += (number >= 0,)
        for u in tl.static_range(c.UNROLLED):
            # Unused entries select 0 in place of the slope of another gate, which may be NaN.
            slope = _select_slot(of_wires[u], read[u], used_wires[u])
            total += gs[u] * slope
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _scatter(addresses, slopes, wires, dy, dx, c: tl.constexpr):
    gate, exists, block = _gate_tiles.locate_program(c.n_gates, c)
    sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    both_exist = exists[:, None] & sample_exists[None, :]
    g = _gate_tiles.read_some(dy, gate, exists, sample, c)
    address = _read_addresses(addresses, gate, block, c)
    for place in tl.static_range(c.PLACES):
        wire = gate * c.PLACES + place
        slope = _select_slot(slopes + wire * c.n_slots, address, True)
        to = dx + _gate_tiles.sample_offsets(
            _gate_tiles.input_of(wires, wire, c), sample, c.n_samples
        )
        # Several gates may read the same input.
        tl.atomic_add(to, g * slope, mask=both_exist, sem="relaxed")


@kernel
def _sum_chosen(addresses, dy, parts, c: tl.constexpr):
    """Sum ``dy`` by addressed slot; each of a gate's programs handles some slots."""
    n_fours: tl.constexpr = 8 * ((c.n_samples + 31) // 32)
    gate, exists, slot, part = _gate_tiles.locate_slots(c)
    total = tl.zeros((c.SLOTS, c.FEATURES, c.SAMPLES), c.ACC)
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        # Loaded in the layout of the sums, ``[slots, gates, samples]``, so that no values move
        # between threads.
        row, sample, sample_exists = (
            gate[None, :, None],
            sample[None, None, :],
            sample_exists[None, None, :],
        )
        g = tl.load(dy + row * c.n_samples + sample, mask=sample_exists, other=0).to(c.ACC)
        # Four threads read the same word and select their byte.
        four = tl.load(addresses + row * n_fours + sample // 4, mask=sample_exists, other=0)
        address = (four >> ((sample % 4) * 8).to(tl.int32)) & 255
        # A selection, not a product with a one-hot vector: an infinite `dy` must not reach other
        # slots.
        total += tl.where(slot[:, None, None] == address, g, 0)
    _gate_tiles.write_sums(parts, part, gate, exists, slot, total, c)


@kernel
def _fours(block, SAMPLES: tl.constexpr):
    """Return word numbers, each word with four samples' addresses."""
    return block.to(tl.int64) * (SAMPLES // 4) + tl.arange(0, SAMPLES // 4)


@kernel
def _read_bits(words, wires, gate, four, c: tl.constexpr):
    """Return four samples' addresses per word, from input bits."""
    n_words: tl.constexpr = (c.n_samples + 31) // 32
    exists = (four < 8 * n_words)[None, :]
    shift = ((four % 8) * 4).to(tl.int32)[None, :]
    addresses = tl.zeros((gate.shape[0], four.shape[0]), tl.int32)
    for place in tl.static_range(c.PLACES):
        row = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
        bits = (
            tl.load(
                words + _gate_tiles.sample_offsets(row, four // 8, n_words), mask=exists, other=0
            )
            >> shift
        )
        # Spreads four bits to one byte each: the multiplication copies them to shifts of 0, 7, 14
        # and 21, where bit ``k`` meets byte ``k``, and the mask keeps one bit per byte.
        addresses |= (((bits & 15) * 0x00204081) & 0x01010101) << place
    return addresses


@kernel
def _read_addresses(addresses, gate, block, c: tl.constexpr):
    n_fours: tl.constexpr = 8 * ((c.n_samples + 31) // 32)
    four = _fours(block, c.SAMPLES)
    return tl.load(
        addresses + _gate_tiles.sample_offsets(gate, four, n_fours),
        mask=(four < n_fours)[None, :],
        other=0,
    )


@kernel
def _select_slot(slots, addresses, used):
    """Return the values at addresses, ``[gates, words]`` -> ``[gates, 4 * words]``."""
    if used is True:
        v0 = tl.load(slots[:, None] + (addresses & 255))
        v1 = tl.load(slots[:, None] + ((addresses >> 8) & 255))
        v2 = tl.load(slots[:, None] + ((addresses >> 16) & 255))
        v3 = tl.load(slots[:, None] + ((addresses >> 24) & 255))
    else:
        v0 = tl.load(slots[:, None] + (addresses & 255), mask=used[:, None], other=0)
        v1 = tl.load(slots[:, None] + ((addresses >> 8) & 255), mask=used[:, None], other=0)
        v2 = tl.load(slots[:, None] + ((addresses >> 16) & 255), mask=used[:, None], other=0)
        v3 = tl.load(slots[:, None] + ((addresses >> 24) & 255), mask=used[:, None], other=0)
    # `tl.join` adds a last axis: joining 0 with 2 and 1 with 3 first gives the order 0, 1, 2, 3.
    return tl.reshape(
        tl.join(tl.join(v0, v2), tl.join(v1, v3)), (addresses.shape[0], 4 * addresses.shape[1])
    )

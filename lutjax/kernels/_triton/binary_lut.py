"""`lutjax.binary_lut` in Triton.

Only the signs of inputs count: they are read once, and packed 32 samples to a word, an array so small that what gates read
comes from caches. The gradient reads addresses, a byte for each gate and sample: what an input receives for one is a
number that each table has `n` of for each of its slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla import _slots
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

_BITS = 32  # samples in a word
_UNROLLED = 8  # most readers of an input that are read together
_SLOTS = 64  # most slots whose sums a program holds


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    how = launch_of("binary_lut.forward", _gate_tiles.sizes(x, wires), device, _forward_rule)
    tile = _tile(how, x.shape[1], len(wires))
    (y,) = launch(
        _look_up,
        _words(x, wires, device),
        table,
        wires,
        outputs=[jax.ShapeDtypeStruct((len(wires), x.shape[1]), x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_slots=table.shape[1],
        **_constants(tile, x, wires),
    )
    return y


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, readers = saved
    addresses = _addresses(x, wires, device)
    dx = d_table = None
    if needs[0]:
        dx = _of_inputs(addresses, x, table, wires, readers, dy, device)
    if needs[1]:
        d_table = _of_table(addresses, x, table, wires, dy, device)
    return dx, d_table, None, None


def _words(x: jax.Array, wires: jax.Array, device: Device) -> jax.Array:
    """Bits of inputs, ``[inputs, words]``."""
    how = launch_of("binary_lut.words", _gate_tiles.sizes(x, wires), device, _words_rule)
    tile = _tile(how, x.shape[1], len(x))
    (words,) = launch(
        _pack,
        x,
        outputs=[jax.ShapeDtypeStruct((len(x), triton.cdiv(x.shape[1], _BITS)), jnp.int32)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=x.shape[1],
        n_inputs=len(x),
        SAMPLES=tile.samples,
        FEATURES=tile.features,
        ACC=_row_tiles.TYPES[accumulator(x.dtype).name],
    )
    return words


def _addresses(x: jax.Array, wires: jax.Array, device: Device) -> jax.Array:
    """Slots that samples address, those of four samples in a word: ``[gates, fours]``."""
    how = launch_of("binary_lut.addresses", _gate_tiles.sizes(x, wires), device, _addresses_rule)
    tile = _tile(how, x.shape[1], len(wires))
    shape = (len(wires), _BITS // 4 * triton.cdiv(x.shape[1], _BITS))
    (addresses,) = launch(
        _address,
        _words(x, wires, device),
        wires,
        outputs=[jax.ShapeDtypeStruct(shape, jnp.int32)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        **_constants(tile, x, wires),
    )
    return addresses


def _of_inputs(
    addresses: jax.Array,
    x: jax.Array,
    table: jax.Array,
    wires: jax.Array,
    readers: jax.Array | None,
    dy: jax.Array,
    device: Device,
) -> jax.Array:
    slopes = _slots.slopes_at_addresses(table.astype(accumulator(x.dtype, table.dtype)))
    if readers is None or not wires.size:
        return _scattered(addresses, slopes, x, wires, dy, device)
    how = launch_of("binary_lut.inputs", _gate_tiles.sizes(x, wires), device, _inputs_rule)
    tile = _tile(how, x.shape[1], len(x))
    unrolled = max(min(readers.shape[1], _UNROLLED), 1)
    (dx,) = launch(
        _collect,
        addresses,
        slopes,
        readers,
        _gate_tiles.used_readers(readers, unrolled),
        dy,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=x.shape[1],
        n_inputs=len(x),
        n_gates=len(wires),
        n_slots=table.shape[1],
        fan_out=readers.shape[1],
        PLACES=wires.shape[1],
        SAMPLES=tile.samples,
        FEATURES=tile.features,
        UNROLLED=unrolled,
    )
    return dx


def _scattered(
    addresses: jax.Array, slopes: jax.Array, x: jax.Array, wires: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    """What inputs receive, by atomics."""
    how = launch_of("binary_lut.wires", _gate_tiles.sizes(x, wires), device, _wires_rule)
    tile = _tile(how, x.shape[1], len(wires))
    (dx,) = launch(
        _scatter,
        addresses,
        slopes,
        wires,
        dy,
        zeroed=[jax.ShapeDtypeStruct(x.shape, slopes.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_slots=slopes.shape[1],
        **_constants(tile, x, wires),
    )
    return dx


def _of_table(
    addresses: jax.Array, x: jax.Array, table: jax.Array, wires: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    how = launch_of("binary_lut.table", _gate_tiles.sizes(x, wires), device, _table_rule)
    n_slots = table.shape[1]
    slots = min(n_slots, _SLOTS)
    tile = _gate_tiles.Tile(how, x.shape[1], len(wires), n_groups=n_slots // slots)
    dtype = accumulator(x.dtype, table.dtype)
    (parts,) = launch(
        _sum_chosen,
        addresses,
        dy,
        outputs=[jax.ShapeDtypeStruct((tile.parts, len(wires), n_slots), dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=x.shape[1],
        n_gates=len(wires),
        n_slots=n_slots,
        SAMPLES=tile.samples,
        FEATURES=tile.features,
        BLOCKS=tile.blocks,
        SLOTS=slots,
        ACC=_row_tiles.TYPES[dtype.name],
    )
    return _row_tiles.sum_of_parts(parts)


# ------------------------------------------------------------------------------------- launches
def _tile(how: Launch, n_samples: int, n_features: int) -> _gate_tiles.Tile:
    """Tiles of whole words, one for each program."""
    how = dataclasses.replace(how, rows=max(how.rows, _BITS), detectors=1)
    return _gate_tiles.Tile(how, max(n_samples, _BITS) if n_samples else 0, n_features)


def _constants(tile: _gate_tiles.Tile, x: jax.Array, wires: jax.Array) -> dict[str, Any]:
    return {
        "n_samples": x.shape[1],
        "n_inputs": x.shape[0],
        "n_gates": wires.shape[0],
        "SAMPLES": tile.samples,
        "FEATURES": tile.features,
        "PLACES": wires.shape[1],
    }


def _words_rule(sizes: Sizes) -> Launch:
    return Launch(rows=4096, outputs=1, detectors=1, warps=4)


def _forward_rule(sizes: Sizes) -> Launch:
    return Launch(rows=2048, outputs=1, detectors=1, warps=4)


def _addresses_rule(sizes: Sizes) -> Launch:
    return Launch(rows=4096, outputs=1, detectors=1, warps=4)


def _wires_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=512)


def _inputs_rule(sizes: Sizes) -> Launch:
    # Four samples for each thread: what is chosen for them then lies as cotangents do.
    samples = max(_gate_tiles.rule(sizes, values=256, arrays=2, samples=256).rows, 128)
    return Launch(rows=samples, outputs=1, detectors=1, warps=samples // 128)


def _table_rule(sizes: Sizes) -> Launch:
    # As many sums as a thread has registers for.
    samples = min(32 * max(_SLOTS >> sizes["places"], 1), 128)
    return Launch(rows=samples, outputs=4, detectors=4096 // samples, warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _pack(
    x,
    words,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    ACC: tl.constexpr,
):
    """NaN is no set bit."""
    feature, exists, block = _gate_tiles.place(n_inputs, FEATURES)
    word = block.to(tl.int64) * (SAMPLES // 32) + tl.arange(0, SAMPLES // 32)
    bit = tl.arange(0, 32)[None, None, :]
    sample = word[None, :, None] * 32 + bit
    value = tl.load(x + feature[:, None, None] * n_samples + sample, mask=sample < n_samples, other=0)
    packed = tl.sum((value.to(ACC) > 0).to(tl.int32) << bit, 2)
    n_words: tl.constexpr = (n_samples + 31) // 32
    both_exist = exists[:, None] & (word < n_words)[None, :]
    tl.store(words + _gate_tiles.at(feature, word, n_words), packed, mask=both_exist)


@kernel
def _look_up(words, table, wires, y, c: tl.constexpr):
    gate, exists, block = _gate_tiles.place(c.n_gates, c)
    four = _fours(block, c.SAMPLES)
    addresses = _read_bits(words, wires, gate, four, c)
    value = _chosen(table + gate * c.n_slots, addresses, True)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    _gate_tiles.write(y, gate, exists, sample, value, c)


@kernel
def _address(words, wires, addresses, c: tl.constexpr):
    gate, exists, block = _gate_tiles.place(c.n_gates, c)
    four = _fours(block, c.SAMPLES)
    value = _read_bits(words, wires, gate, four, c)
    n_fours: tl.constexpr = 8 * ((c.n_samples + 31) // 32)
    tl.store(
        addresses + _gate_tiles.at(gate, four, n_fours),
        value,
        mask=exists[:, None] & (four < n_fours)[None, :],
    )


@kernel
def _collect(addresses, slopes, readers, used, dy, dx, c: tl.constexpr):
    """For each input the sum of what its readers receive."""
    feature, exists, block = _gate_tiles.place(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    ACC: tl.constexpr = slopes.dtype.element_ty
    total = tl.zeros((c.FEATURES, c.SAMPLES), ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        # Everything is read before anything is computed, so that all is under way at the same time.
        of_wires, used_wires = _gate_tiles.nothing(), _gate_tiles.nothing()
        gs, read = _gate_tiles.nothing(), _gate_tiles.nothing()
        for u in tl.static_range(c.UNROLLED):
            number = _gate_tiles.reader(readers, feature, first + u, exists, c)
            wire = _gate_tiles.wire_of(number, c.n_gates * c.PLACES)
            gate = wire // c.PLACES
            gs += (_gate_tiles.read_some(dy, gate, number >= 0, sample, c),)
            read += (_read_addresses(addresses, gate, block, c),)
            of_wires += (slopes + wire * c.n_slots,)
            used_wires += (number >= 0,)
        for u in tl.static_range(c.UNROLLED):
            slope = _chosen(of_wires[u], read[u], used_wires[u])
            total += gs[u] * slope
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _scatter(addresses, slopes, wires, dy, dx, c: tl.constexpr):
    """What each wire receives, added to its input."""
    gate, exists, block = _gate_tiles.place(c.n_gates, c)
    sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    ACC: tl.constexpr = slopes.dtype.element_ty
    both_exist = exists[:, None] & sample_exists[None, :]
    g = _gate_tiles.read_some(dy, gate, exists, sample, c)
    address = _read_addresses(addresses, gate, block, c)
    for place in tl.static_range(c.PLACES):
        wire = gate * c.PLACES + place
        slope = _chosen(slopes + wire * c.n_slots, address, True)
        to = dx + _gate_tiles.at(_gate_tiles.input_of(wires, wire, c), sample, c.n_samples)
        tl.atomic_add(to, g * slope, mask=both_exist, sem="relaxed")


@kernel
def _sum_chosen(addresses, dy, parts, c: tl.constexpr):
    """For each slot the sum of `dy` where it is addressed; programs of the same gates take some slots each."""
    groups: tl.constexpr = c.n_slots // c.SLOTS
    n_fours: tl.constexpr = 8 * ((c.n_samples + 31) // 32)
    gate, exists, part = _gate_tiles.place(c.n_gates, c)
    slot = (part % groups) * c.SLOTS + tl.arange(0, c.SLOTS)
    part = part // groups
    total = tl.zeros((c.SLOTS, c.FEATURES, c.SAMPLES), c.ACC)
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        # Read as what is summed lies in the threads: [slots, gates, samples].
        row, sample, sample_exists = gate[None, :, None], sample[None, None, :], sample_exists[None, None, :]
        g = tl.load(dy + row * c.n_samples + sample, mask=sample_exists, other=0).to(c.ACC)
        four = tl.load(addresses + row * n_fours + sample // 4, mask=sample_exists, other=0)
        address = (four >> ((sample % 4) * 8).to(tl.int32)) & 255
        total += tl.where(slot[:, None, None] == address, g, 0)
    to = (part.to(tl.int64) * c.n_gates + gate)[None, :] * c.n_slots + slot[:, None]
    tl.store(parts + to, tl.sum(total, 2), mask=exists[None, :] & (slot >= 0)[:, None])


@kernel
def _fours(block, SAMPLES: tl.constexpr):
    """The numbers of four samples each of a tile."""
    return block.to(tl.int64) * (SAMPLES // 4) + tl.arange(0, SAMPLES // 4)


@kernel
def _read_bits(words, wires, gate, four, c: tl.constexpr):
    """The addresses of four samples in a word, from the bits of inputs."""
    n_words: tl.constexpr = (c.n_samples + 31) // 32
    exists = (four < 8 * n_words)[None, :]
    shift = ((four % 8) * 4).to(tl.int32)[None, :]
    addresses = tl.zeros((gate.shape[0], four.shape[0]), tl.int32)
    for place in tl.static_range(c.PLACES):
        row = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
        bits = tl.load(words + _gate_tiles.at(row, four // 8, n_words), mask=exists, other=0) >> shift
        # Each of four bits to a byte of its own.
        addresses |= (((bits & 15) * 0x00204081) & 0x01010101) << place
    return addresses


@kernel
def _read_addresses(addresses, gate, block, c: tl.constexpr):
    n_fours: tl.constexpr = 8 * ((c.n_samples + 31) // 32)
    four = _fours(block, c.SAMPLES)
    return tl.load(addresses + _gate_tiles.at(gate, four, n_fours), mask=(four < n_fours)[None, :], other=0)


@kernel
def _chosen(slots, addresses, used):
    """What stands at addresses, four of which are in a word: ``[gates]``, ``[gates, fours]`` -> ``[gates, samples]``."""
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
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (addresses.shape[0], 4 * addresses.shape[1]))

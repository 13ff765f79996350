"""`lutjax.soft_lut` in Triton."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _gate_tiles, _row_tiles, bilinear_gates
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

_LOW_BITS = 4  # of an address: their slots are written out, a loop visits the values of the others
# Most bits with which it is faster to compute what a wire receives where it is added than to write and read it.
_GATHERED = 4
_SLOTS = 64  # most slots whose sums a program holds


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    how = launch_of("soft_lut.forward", _gate_tiles.sizes(x, wires), device, _forward_rule)
    tile = _gate_tiles.Tile(how, x.shape[1], len(wires))
    (y,) = launch(
        _interpolate,
        x,
        table,
        wires,
        outputs=[jax.ShapeDtypeStruct((len(wires), x.shape[1]), x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        **_constants(tile, x, table, wires),
    )
    return y


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, readers = saved
    if wires.shape[1] == 2:
        dx, d_table = _of_gates(x, table, wires, readers, dy, needs, device)
    else:
        dx = _of_inputs(x, table, wires, readers, dy, device) if needs[0] else None
        d_table = _of_table(x, table, wires, dy, device) if needs[1] else None
    return dx, d_table, None, None


def _of_gates(
    x: jax.Array,
    table: jax.Array,
    wires: jax.Array,
    readers: jax.Array | None,
    dy: jax.Array,
    needs: tuple[bool, ...],
    device: Device,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Tables over two bits are gates, whose one kernel reads everything once."""
    t0, t1, t2, t3 = table.astype(accumulator(x.dtype, table.dtype)).T
    coefficients = jnp.stack([t0, t1 - t0, t2 - t0, t0 - t1 - t2 + t3])
    dx, sums, _, _ = bilinear_gates.backward((x, coefficients, wires, readers), dy, needs, device=device)
    if sums is None:
        return dx, None
    of_1, of_a, of_b, of_both = sums
    return dx, jnp.stack([of_1 - of_a - of_b + of_both, of_a - of_both, of_b - of_both, of_both], 1)


def _of_inputs(
    x: jax.Array,
    table: jax.Array,
    wires: jax.Array,
    readers: jax.Array | None,
    dy: jax.Array,
    device: Device,
) -> jax.Array:
    if readers is not None and wires.size and wires.shape[1] <= _GATHERED:
        return _gathered(x, table, wires, readers, dy, device)
    how = launch_of("soft_lut.wires", _gate_tiles.sizes(x, wires), device, _wires_rule)
    tile = _gate_tiles.Tile(how, x.shape[1], len(wires))
    dtype = accumulator(x.dtype, table.dtype)
    scatter = readers is None
    changed: dict[str, Any] = {"zeroed": [jax.ShapeDtypeStruct(x.shape, dtype)]}
    if not scatter:
        changed = {"outputs": [jax.ShapeDtypeStruct((wires.size, x.shape[1]), dtype)]}
    (received,) = launch(
        _differentiate,
        x,
        table,
        wires,
        dy,
        **changed,
        programs=tile.programs,
        device=device,
        warps=how.warps,
        SCATTER=scatter,
        **_constants(tile, x, table, wires),
    )
    return received if readers is None else _collected(x, wires, readers, received, device)


def _gathered(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    """For each input the sum of what its readers receive, which is computed where it is added."""
    how = launch_of("soft_lut.readers", _gate_tiles.sizes(x, wires), device, _readers_rule)
    tile = _gate_tiles.Tile(dataclasses.replace(how, detectors=1), x.shape[1], len(x))
    (dx,) = launch(
        _gather,
        x,
        _differences(table.astype(accumulator(x.dtype, table.dtype))),
        wires,
        readers,
        _gate_tiles.used_readers(readers),
        dy,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=tile.n_samples,
        n_inputs=len(x),
        n_gates=len(wires),
        fan_out=readers.shape[1],
        PLACES=wires.shape[1],
        SAMPLES=tile.samples,
        FEATURES=tile.features,
        UNROLLED=_gate_tiles.UNROLLED,
    )
    return dx


def _differences(table: jax.Array) -> jax.Array:
    """Slots with a bit less those without, by the bit, then by the other bits, those after it first: ``[G * n, 2**(n - 1)]``."""
    n = table.shape[1].bit_length() - 1
    place, k = np.arange(n)[:, None, None], np.arange(n - 1)
    others = np.arange(table.shape[1] // 2)[:, None]
    without = np.sum((others >> k & 1) << (place + 1 + k) % n, -1)
    with_bit = without | 1 << place[..., 0]
    return (table[:, with_bit] - table[:, without]).reshape(len(table) * n, len(others))


def _collected(
    x: jax.Array, wires: jax.Array, readers: jax.Array, by_wire: jax.Array, device: Device
) -> jax.Array:
    """For each input the sum of what its readers received."""
    how = launch_of("soft_lut.inputs", _gate_tiles.sizes(x, wires), device, _inputs_rule)
    tile = _gate_tiles.Tile(dataclasses.replace(how, detectors=1), x.shape[1], len(x))
    (dx,) = launch(
        _collect,
        by_wire,
        readers,
        _gate_tiles.used_readers(readers),
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_samples=tile.n_samples,
        n_inputs=len(x),
        n_wires=wires.size,
        fan_out=readers.shape[1],
        SAMPLES=tile.samples,
        FEATURES=tile.features,
        UNROLLED=_gate_tiles.UNROLLED,
    )
    return dx


def _of_table(x: jax.Array, table: jax.Array, wires: jax.Array, dy: jax.Array, device: Device) -> jax.Array:
    how = launch_of("soft_lut.table", _gate_tiles.sizes(x, wires), device, _table_rule)
    n_slots = table.shape[1]
    slots = min(n_slots, _SLOTS)
    tile = _gate_tiles.Tile(how, x.shape[1], len(wires), n_groups=n_slots // slots)
    (parts,) = launch(
        _sum_shares,
        x,
        wires,
        dy,
        outputs=[jax.ShapeDtypeStruct((tile.parts, len(wires), n_slots), accumulator(x.dtype, table.dtype))],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        SLOTS=slots,
        **_constants(tile, x, table, wires),
    )
    return _row_tiles.sum_of_parts(parts)


# ------------------------------------------------------------------------------------- launches
def _constants(tile: _gate_tiles.Tile, x: jax.Array, table: jax.Array, wires: jax.Array) -> dict[str, Any]:
    places = wires.shape[1]
    return {
        **_gate_tiles.constants(tile, x, table, wires),
        "n_slots": table.shape[1],
        "PLACES": places,
        "LOW": min(places, _LOW_BITS),
    }


def _forward_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=1024)


def _wires_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=512)


def _readers_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=256, arrays=2, warps=1)


def _inputs_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=1024)


def _table_rule(sizes: Sizes) -> Launch:
    # As many sums as a thread has registers for.
    slots = min(2 ** sizes["places"], _SLOTS)
    samples = min(32 * max(_SLOTS // slots, 1), 128)
    return Launch(rows=samples, outputs=4, detectors=512 // samples, warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _interpolate(x, table, wires, y, c: tl.constexpr):
    gate, exists, part = _gate_tiles.place(c.n_gates, c)
    slots = table + gate * c.n_slots
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        bits = _read(x, wires, gate, sample, c)
        if c.PLACES == c.LOW:
            value = _value(slots, bits, c.LOW, c.ACC)
        else:
            value = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
            for high in range(0, c.n_slots >> c.LOW):
                share = _share(bits, high, c.LOW, c.PLACES, c.PLACES)
                value += share * _value(slots + (high << c.LOW), bits, c.LOW, c.ACC)
        _gate_tiles.write(y, gate, exists, sample, value, c)


@kernel
def _differentiate(x, table, wires, dy, received, c: tl.constexpr):
    """What each wire receives: written, or added to its input."""
    gate, exists, part = _gate_tiles.place(c.n_gates, c)
    slots = table + gate * c.n_slots
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        g = _gate_tiles.read(dy, gate, sample, c)
        bits = _read(x, wires, gate, sample, c)
        if c.PLACES == c.LOW:
            slopes = _value_and_slopes(slots, bits, c.LOW, c.ACC)[1:]
        else:
            slopes = _gate_tiles.nothing()
            for _ in tl.static_range(c.PLACES):
                slopes += (tl.zeros((c.FEATURES, c.SAMPLES), c.ACC),)
            for high in range(0, c.n_slots >> c.LOW):
                of_low = _value_and_slopes(slots + (high << c.LOW), bits, c.LOW, c.ACC)
                share = _share(bits, high, c.LOW, c.PLACES, c.PLACES)
                added = _gate_tiles.nothing()
                for place in tl.static_range(c.LOW):
                    added += (slopes[place] + share * of_low[1 + place],)
                for place in tl.static_range(c.LOW, c.PLACES):
                    slope = _share(bits, high, c.LOW, c.PLACES, place) * of_low[0]
                    added += (slopes[place] + tl.where(_is_set(high, place - c.LOW), slope, -slope),)
                slopes = added
        for place in tl.static_range(c.PLACES):
            if c.SCATTER:
                to = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
                both_exist = exists[:, None] & sample_exists[None, :]
                to = received + _gate_tiles.at(to, sample, c.n_samples)
                tl.atomic_add(to, g * slopes[place], mask=both_exist, sem="relaxed")
            else:
                to = gate * c.PLACES + place
                _gate_tiles.write(received, to, exists, sample, g * slopes[place], c)


@kernel
def _collect(by_wire, readers, used, dx, c: tl.constexpr):
    feature, exists, block = _gate_tiles.place(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    ACC: tl.constexpr = by_wire.dtype.element_ty
    total = tl.zeros((c.FEATURES, c.SAMPLES), ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        for u in tl.static_range(c.UNROLLED):
            number = _gate_tiles.reader(readers, feature, first + u, exists, c)
            wire = _gate_tiles.wire_of(number, c.n_wires)
            total += _gate_tiles.read_some(by_wire, wire, number >= 0, sample, c)
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _gather(x, differences, wires, readers, used, dy, dx, c: tl.constexpr):
    feature, exists, block = _gate_tiles.place(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    ACC: tl.constexpr = differences.dtype.element_ty
    total = tl.zeros((c.FEATURES, c.SAMPLES), ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        # Everything is read before anything is computed, so that all is under way at the same time.
        of_wires, gs, others = _gate_tiles.nothing(), _gate_tiles.nothing(), _gate_tiles.nothing()
        for u in tl.static_range(c.UNROLLED):
            number = _gate_tiles.reader(readers, feature, first + u, exists, c)
            wire = _gate_tiles.wire_of(number, c.n_gates * c.PLACES)
            gate, place = wire // c.PLACES, wire % c.PLACES
            gs += (_gate_tiles.read_some(dy, gate, number >= 0, sample, c),)
            bits = _gate_tiles.nothing()
            for k in tl.static_range(1, c.PLACES):
                row = _gate_tiles.input_of(wires, gate * c.PLACES + (place + k) % c.PLACES, c)
                bits += (_gate_tiles.read_some(x, row, number >= 0, sample, c),)
            others += (bits,)
            of_wires += (differences + (wire << (c.PLACES - 1)),)
        for u in tl.static_range(c.UNROLLED):
            total += gs[u] * _value(of_wires[u], others[u], c.PLACES - 1, ACC)
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _sum_shares(x, wires, dy, parts, c: tl.constexpr):
    """For each slot the sum of `dy` times its share; programs of the same gates take some slots each."""
    groups: tl.constexpr = c.n_slots // c.SLOTS
    gate, exists, part = _gate_tiles.place(c.n_gates, c)
    slot = (part % groups) * c.SLOTS + tl.arange(0, c.SLOTS)
    part = part // groups
    total = tl.zeros((c.SLOTS, c.FEATURES, c.SAMPLES), c.ACC)
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        # Read as what is summed lies in the threads: [slots, gates, samples].
        g = _read_for_slots(dy, gate, sample, c)
        # From the most significant bit: the compiler finds that slots share the first factors.
        share = g
        for n in tl.static_range(c.PLACES):
            place = c.PLACES - 1 - n
            row = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
            bit = _read_for_slots(x, row, sample, c)
            share = share * tl.where(_is_set(slot, place)[:, None, None], bit, 1 - bit)
        total += share
    to = (part.to(tl.int64) * c.n_gates + gate)[None, :] * c.n_slots + slot[:, None]
    tl.store(parts + to, tl.sum(total, 2), mask=exists[None, :] & (slot >= 0)[:, None])


@kernel
def _read(x, wires, gate, sample, c: tl.constexpr):
    """What the wires of gates read, the least significant bit first."""
    bits = _gate_tiles.nothing()
    for place in tl.static_range(c.PLACES):
        row = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
        bits += (_gate_tiles.read(x, row, sample, c),)
    return bits


@kernel
def _read_for_slots(x, row, sample, c: tl.constexpr):
    """``[1, rows, samples]``, 0 for samples that do not exist."""
    at = row[None, :, None] * c.n_samples + sample[None, None, :]
    return tl.load(x + at, mask=(sample < c.n_samples)[None, None, :], other=0).to(c.ACC)


@kernel
def _is_set(number, place: tl.constexpr):
    return ((number >> place) & 1) == 1


@kernel
def _share(bits, high, LOW: tl.constexpr, PLACES: tl.constexpr, EXCEPT: tl.constexpr):
    """The share of slots whose high bits are `high`, without the factor of one place."""
    share = tl.zeros_like(bits[0]) + 1
    for place in tl.static_range(LOW, PLACES):
        if place != EXCEPT:
            share *= tl.where(_is_set(high, place - LOW), bits[place], 1 - bits[place])
    return share


@kernel
def _value(slots, bits, N: tl.constexpr, ACC: tl.constexpr):
    """The interpolation of ``2**N`` slots."""
    if N == 0:
        return tl.load(slots).to(ACC)[:, None]
    else:
        low = _value(slots, bits, N - 1, ACC)
        high = _value(slots + (1 << (N - 1)), bits, N - 1, ACC)
        return low + bits[N - 1] * (high - low)


@kernel
def _value_and_slopes(slots, bits, N: tl.constexpr, ACC: tl.constexpr):
    """The same, and its derivative in each of the bits."""
    if N == 0:
        return (tl.load(slots).to(ACC)[:, None],)
    else:
        low = _value_and_slopes(slots, bits, N - 1, ACC)
        high = _value_and_slopes(slots + (1 << (N - 1)), bits, N - 1, ACC)
        bit = bits[N - 1]
        difference = high[0] - low[0]
        results = _gate_tiles.nothing()
        results += (low[0] + bit * difference,)
        for place in tl.static_range(N - 1):
            results += (low[1 + place] + bit * (high[1 + place] - low[1 + place]),)
        results += (difference,)
        return results

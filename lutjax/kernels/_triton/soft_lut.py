"""`lutjax.soft_lut` in Triton; the gradient of `lutjax.binary_lut` is that of softened inputs, so its kernels are here too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _rows, _wires, bilinear_gates
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

_LOW_BITS = 4  # of an address: their slots are written out, a loop visits the values of the others
_SLOTS = 64  # most slots whose sums a program holds


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    how = launch_of("soft_lut.forward", _wires.sizes(x, wires), device, _forward_rule)
    tile = _wires.Tile(how, x.shape[1], len(wires))
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
        dx, d_table = gradients(x, table, wires, readers, dy, needs, device)
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


def gradients(
    x: jax.Array,
    table: jax.Array,
    wires: jax.Array,
    readers: jax.Array | None,
    dy: jax.Array,
    needs: tuple[bool, ...],
    device: Device,
    binary: bool = False,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Cotangents of inputs and table.

    Args:
      binary: of `lutjax.binary_lut`.
    """
    dx = _of_inputs(x, table, wires, readers, dy, device, binary) if needs[0] else None
    return dx, _of_table(x, table, wires, dy, device, binary) if needs[1] else None


def _of_inputs(
    x: jax.Array,
    table: jax.Array,
    wires: jax.Array,
    readers: jax.Array | None,
    dy: jax.Array,
    device: Device,
    binary: bool,
) -> jax.Array:
    how = launch_of("soft_lut.wires", _wires.sizes(x, wires), device, _wires_rule)
    tile = _wires.Tile(how, x.shape[1], len(wires))
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
        BINARY=binary,
        SCATTER=scatter,
        **_constants(tile, x, table, wires),
    )
    return received if readers is None else _collected(x, wires, readers, received, device)


def _collected(
    x: jax.Array, wires: jax.Array, readers: jax.Array, by_wire: jax.Array, device: Device
) -> jax.Array:
    """For each input the sum of what its readers received."""
    how = launch_of("soft_lut.inputs", _wires.sizes(x, wires), device, _inputs_rule)
    tile = _wires.Tile(dataclasses.replace(how, detectors=1), x.shape[1], len(x))
    (dx,) = launch(
        _collect,
        by_wire,
        readers,
        _wires.used_readers(readers),
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
        UNROLLED=_wires.UNROLLED,
    )
    return dx


def _of_table(
    x: jax.Array, table: jax.Array, wires: jax.Array, dy: jax.Array, device: Device, binary: bool
) -> jax.Array:
    how = launch_of("soft_lut.table", _wires.sizes(x, wires), device, _table_rule)
    n_slots = table.shape[1]
    slots = min(n_slots, _SLOTS)
    tile = _wires.Tile(how, x.shape[1], len(wires), n_groups=n_slots // slots)
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
        BINARY=binary,
        **_constants(tile, x, table, wires),
    )
    return _rows.sum_of_parts(parts)


# ------------------------------------------------------------------------------------- launches
def _constants(tile: _wires.Tile, x: jax.Array, table: jax.Array, wires: jax.Array) -> dict[str, Any]:
    places = wires.shape[1]
    return {
        **_wires.constants(tile, x, table, wires),
        "n_slots": table.shape[1],
        "PLACES": places,
        "LOW": min(places, _LOW_BITS),
    }


def _forward_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=1024)


def _wires_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=512)


def _inputs_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=1024)


def _table_rule(sizes: Sizes) -> Launch:
    # As many sums as a thread has registers for.
    slots = min(2 ** sizes["places"], _SLOTS)
    samples = min(32 * max(_SLOTS // slots, 1), 128)
    return Launch(rows=samples, outputs=4, detectors=512 // samples, warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _interpolate(
    x,
    table,
    wires,
    y,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_gates: tl.constexpr,
    n_slots: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
    LOW: tl.constexpr,
    ACC: tl.constexpr,
):
    gate, exists, part = _wires.place(n_gates, FEATURES)
    slots = table + gate * n_slots
    for block in range(part * BLOCKS, _wires.last_block(part, n_samples, SAMPLES, BLOCKS)):
        sample, _ = _rows.block(SAMPLES, n_samples, block)
        bits = read(x, wires, gate, sample, n_samples, n_inputs, SAMPLES, PLACES, ACC)
        if PLACES == LOW:
            value = _value(slots, bits, LOW, ACC)
        else:
            value = tl.zeros((FEATURES, SAMPLES), ACC)
            for high in range(0, n_slots >> LOW):
                share = _share(bits, high, LOW, PLACES, PLACES)
                value += share * _value(slots + (high << LOW), bits, LOW, ACC)
        _wires.write(y, gate, exists, sample, value, n_samples)


@kernel
def _differentiate(
    x,
    table,
    wires,
    dy,
    received,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_gates: tl.constexpr,
    n_slots: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
    LOW: tl.constexpr,
    ACC: tl.constexpr,
    BINARY: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """What each wire receives: written, or added to its input."""
    gate, exists, part = _wires.place(n_gates, FEATURES)
    slots = table + gate * n_slots
    for block in range(part * BLOCKS, _wires.last_block(part, n_samples, SAMPLES, BLOCKS)):
        sample, sample_exists = _rows.block(SAMPLES, n_samples, block)
        g = _wires.read(dy, gate, sample, n_samples, SAMPLES, ACC)
        bits = read(x, wires, gate, sample, n_samples, n_inputs, SAMPLES, PLACES, ACC)
        if BINARY:
            g *= 0.5
            bits = _softened(bits, PLACES, ACC)
        if PLACES == LOW:
            slopes = _value_and_slopes(slots, bits, LOW, ACC)[1:]
        else:
            slopes = _wires.nothing()
            for _ in tl.static_range(PLACES):
                slopes += (tl.zeros((FEATURES, SAMPLES), ACC),)
            for high in range(0, n_slots >> LOW):
                of_low = _value_and_slopes(slots + (high << LOW), bits, LOW, ACC)
                share = _share(bits, high, LOW, PLACES, PLACES)
                added = _wires.nothing()
                for place in tl.static_range(LOW):
                    added += (slopes[place] + share * of_low[1 + place],)
                for place in tl.static_range(LOW, PLACES):
                    slope = _share(bits, high, LOW, PLACES, place) * of_low[0]
                    added += (slopes[place] + tl.where(_is_set(high, place - LOW), slope, -slope),)
                slopes = added
        for place in tl.static_range(PLACES):
            if SCATTER:
                to = _wires.input_of(wires, gate * PLACES + place, n_inputs)
                both_exist = exists[:, None] & sample_exists[None, :]
                to = received + _wires.at(to, sample, n_samples)
                tl.atomic_add(to, g * slopes[place], mask=both_exist, sem="relaxed")
            else:
                to = gate * PLACES + place
                _wires.write(received, to, exists, sample, g * slopes[place], n_samples)


@kernel
def _collect(
    by_wire,
    readers,
    used,
    dx,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_wires: tl.constexpr,
    fan_out: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    feature, exists, block = _wires.place(n_inputs, FEATURES)
    sample, _ = _rows.block(SAMPLES, n_samples, block)
    ACC: tl.constexpr = by_wire.dtype.element_ty
    total = tl.zeros((FEATURES, SAMPLES), ACC)
    for first in range(0, _wires.last_use(used, feature, fan_out, UNROLLED), UNROLLED):
        for u in tl.static_range(UNROLLED):
            number = _wires.reader(readers, feature, first + u, exists, fan_out)
            wire = _wires.wire_of(number, n_wires)
            total += _wires.read_some(by_wire, wire, number >= 0, sample, n_samples, ACC)
    _wires.write(dx, feature, exists, sample, total, n_samples)


@kernel
def _sum_shares(
    x,
    wires,
    dy,
    parts,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    n_gates: tl.constexpr,
    n_slots: tl.constexpr,
    SAMPLES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
    LOW: tl.constexpr,
    ACC: tl.constexpr,
    SLOTS: tl.constexpr,
    BINARY: tl.constexpr,
):
    """For each slot the sum of `dy` times its share; programs of the same gates take some slots each."""
    groups: tl.constexpr = n_slots // SLOTS
    gate, exists, part = _wires.place(n_gates, FEATURES)
    slot = (part % groups) * SLOTS + tl.arange(0, SLOTS)
    part = part // groups
    total = tl.zeros((SLOTS, FEATURES, SAMPLES), ACC)
    for block in range(part * BLOCKS, _wires.last_block(part, n_samples, SAMPLES, BLOCKS)):
        sample, _ = _rows.block(SAMPLES, n_samples, block)
        # Read as what is summed lies in the threads: [slots, gates, samples].
        g = _read_for_slots(dy, gate, sample, n_samples, ACC)
        if BINARY:
            address = tl.zeros((1, FEATURES, SAMPLES), tl.int32)
            for place in tl.static_range(PLACES):
                row = _wires.input_of(wires, gate * PLACES + place, n_inputs)
                is_set = _read_for_slots(x, row, sample, n_samples, ACC) > 0
                address |= is_set.to(tl.int32) << place
            total += tl.where(slot[:, None, None] == address, g, 0)
        else:
            # From the most significant bit: the compiler finds that slots share the first factors.
            share = g
            for n in tl.static_range(PLACES):
                place = PLACES - 1 - n
                row = _wires.input_of(wires, gate * PLACES + place, n_inputs)
                bit = _read_for_slots(x, row, sample, n_samples, ACC)
                share = share * tl.where(_is_set(slot, place)[:, None, None], bit, 1 - bit)
            total += share
    to = (part.to(tl.int64) * n_gates + gate)[None, :] * n_slots + slot[:, None]
    tl.store(parts + to, tl.sum(total, 2), mask=exists[None, :] & (slot >= 0)[:, None])


@kernel
def read(
    x,
    wires,
    gate,
    sample,
    n_samples: tl.constexpr,
    n_inputs: tl.constexpr,
    SAMPLES: tl.constexpr,
    PLACES: tl.constexpr,
    ACC: tl.constexpr,
):
    """What the wires of gates read, the least significant bit first."""
    bits = _wires.nothing()
    for place in tl.static_range(PLACES):
        row = _wires.input_of(wires, gate * PLACES + place, n_inputs)
        bits += (_wires.read(x, row, sample, n_samples, SAMPLES, ACC),)
    return bits


@kernel
def _read_for_slots(x, row, sample, n_samples: tl.constexpr, ACC: tl.constexpr):
    """``[1, rows, samples]``, 0 for samples that do not exist."""
    at = row[None, :, None] * n_samples + sample[None, None, :]
    return tl.load(x + at, mask=(sample < n_samples)[None, None, :], other=0).to(ACC)


@kernel
def _softened(bits, PLACES: tl.constexpr, ACC: tl.constexpr):
    """Inputs at which the slope of the interpolation, halved, is the difference that `lutjax.binary_lut` takes."""
    soft = _wires.nothing()
    for place in tl.static_range(PLACES):
        soft += (tl.where(bits[place] > 0, 0.75, 0.25).to(ACC),)
    return soft


@kernel
def address(bits, PLACES: tl.constexpr):
    """The slot that bits address; NaN is no set bit."""
    address = (bits[0] > 0).to(tl.int32)
    for place in tl.static_range(1, PLACES):
        address |= (bits[place] > 0).to(tl.int32) << place
    return address


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
        results = _wires.nothing()
        results += (low[0] + bit * difference,)
        for place in tl.static_range(N - 1):
            results += (low[1 + place] + bit * (high[1 + place] - low[1 + place]),)
        results += (difference,)
        return results

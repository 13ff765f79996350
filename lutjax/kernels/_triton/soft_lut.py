"""`lutjax.soft_lut` in Triton.

Formula for gate ``g`` with wire bits ``x[0] ... x[n - 1]`` and table slots ``a``::

    share[a] = prod_k (x[k] if bit k in a is set else 1 - x[k])
    y = sum_a table[a] * share[a];  dtable[a] = sum over samples: dy * share[a]
    dx[k] += dy * (sum over a with bit k: (table[a] - table[a without bit k])
                   * share over the other bits)

Work: a program owns a gate and sample tile; where inputs gather from their readers, an input and
sample tile. Backward, tables over two bits are bilinear gates, whose kernel reads everything once.
An address's low four bits are unrolled as nested linear interpolations; a loop visits the high-bit
values, so code size does not grow with ``2**n``.

Layout: ``[features, samples]``, see `_gate_tiles`. A gate's slots are contiguous.

Numerics: the accumulator dtype. With fan-out lists input gradients have a fixed order: up to four
bits they are recomputed for each reader, with more they are stored per wire and then gathered.
Without lists they use atomics, and their last bits differ between runs. Table gradients are partial
sums per program, added in a fixed order. Wire ids are clamped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _gate_tiles, _row_tiles, bilinear_gates
from lutjax.kernels._triton._language import tl
from lutjax.kernels._triton._rules import few_values, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.soft_lut import SoftLut
from lutjax.tuning import Launch, Sizes
from lutjax.values._dtypes import accumulator

# Low bits of an address, whose 16 slots are unrolled. A loop visits the values of the high bits.
_LOW_BITS = 4
# Most bits for which recomputing a wire gradient is faster than storing it: on an H200 540 us in
# place of 856 us, with half the memory.
_GATHERED = 4


def _supports(request: Request) -> str | None:
    assert isinstance(request.call, SoftLut)
    return unsupported_arguments(request) or few_values(request.call)


SPEC = Declaration(
    _supports,
    launches=(
        "soft_lut.forward",
        "soft_lut.wires",
        "soft_lut.readers",
        "soft_lut.inputs",
        "soft_lut.table",
    ),
)


def forward(call: SoftLut, *, device: Device) -> jax.Array:
    tile = _gate_tiles.GateTile.for_call("soft_lut.forward", _forward_rule, call, device)
    (y,) = launch(
        _interpolate,
        call.x,
        call.table,
        call.wires,
        outputs=[_gate_tiles.output(call)],
        **_arguments(tile, call),
    )
    return y


def backward(
    call: SoftLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if call.wires.shape[1] == 2:
        return _bilinear_gradients(call, cotangent, needs, device)
    cotangents = {}
    if "x" in needs:
        cotangents["x"] = _input_gradient(call, cotangent, device)
    if "table" in needs:
        cotangents["table"] = _gate_tiles.cotangent_of_table(
            "soft_lut.table", _table_rule, _sum_shares, call, device, call.x, call.wires, cotangent
        )
    return cotangents


def _bilinear_gradients(
    call: SoftLut, dy: jax.Array, needs: frozenset[str], device: Device
) -> dict[str, jax.Array]:
    """Return the gradients for two-bit tables, which are bilinear gates."""
    t0, t1, t2, t3 = call.table.astype(accumulator(call.x.dtype, call.table.dtype)).T
    # The polynomial ``t0 + (t1 - t0) a + (t2 - t0) b + (t0 - t1 - t2 + t3) a b``; the table
    # gradient below is its transpose.
    coefficients = jnp.stack([t0, t1 - t0, t2 - t0, t0 - t1 - t2 + t3])
    gates = BilinearGates(call.x, coefficients, call.wires, call.readers)
    of_gates = frozenset("coefficients" if name == "table" else name for name in needs)
    cotangents = bilinear_gates.backward(gates, dy, of_gates, device=device)
    if "table" in needs:
        of_1, of_a, of_b, of_both = cotangents.pop("coefficients")
        d_table = [of_1 - of_a - of_b + of_both, of_a - of_both, of_b - of_both, of_both]
        cotangents["table"] = jnp.stack(d_table, 1)
    return cotangents


def _input_gradient(call: SoftLut, dy: jax.Array, device: Device) -> jax.Array:
    x, wires, readers = call.x, call.wires, call.readers
    if readers is not None and wires.size and wires.shape[1] <= _GATHERED:
        return _gather_recomputed(call, readers, dy, device)
    tile = _gate_tiles.GateTile.for_call("soft_lut.wires", _wires_rule, call, device)
    dtype = accumulator(x.dtype, call.table.dtype)
    # Without fan-out lists, atomics add wire gradients to the inputs.
    scatter = readers is None
    changed: dict[str, Any] = {"zeroed": [jax.ShapeDtypeStruct(x.shape, dtype)]}
    if not scatter:
        changed = {"outputs": [jax.ShapeDtypeStruct((wires.size, x.shape[1]), dtype)]}
    (received,) = launch(
        _differentiate,
        x,
        call.table,
        wires,
        dy,
        **changed,
        SCATTER=scatter,
        **_arguments(tile, call),
    )
    return received if readers is None else _gather_stored(call, readers, received, device)


def _gather_recomputed(
    call: SoftLut, readers: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    """Return each input's summed wire gradients, recomputed for each reader."""
    tile = _gate_tiles.GateTile.for_call(
        "soft_lut.readers", _readers_rule, call, device, of_inputs=True
    )
    (dx,) = launch(
        _gather,
        call.x,
        _differences(call.table.astype(accumulator(call.x.dtype, call.table.dtype))),
        call.wires,
        readers,
        _gate_tiles.used_readers(readers),
        dy,
        outputs=[jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)],
        **_arguments(tile, call),
    )
    return dx


def _differences(table: jax.Array) -> jax.Array:
    """Return slots with a bit minus slots without it, ``[G * n, 2**(n - 1)]``.

    The first axis is the bit, the second one the other bits, starting with the one after it.
    """
    n = table.shape[1].bit_length() - 1
    place, k = np.arange(n)[:, None, None], np.arange(n - 1)
    others = np.arange(table.shape[1] // 2)[:, None]
    # The bits are rotated so that a wire always interpolates over the bits after its own, in the
    # same code for every wire.
    without = np.sum((others >> k & 1) << (place + 1 + k) % n, -1)
    with_bit = without | 1 << place[..., 0]
    return (table[:, with_bit] - table[:, without]).reshape(len(table) * n, len(others))


def _gather_stored(
    call: SoftLut, readers: jax.Array, by_wire: jax.Array, device: Device
) -> jax.Array:
    """Return each input's summed stored wire gradients."""
    tile = _gate_tiles.GateTile.for_call(
        "soft_lut.inputs", _inputs_rule, call, device, of_inputs=True
    )
    (dx,) = launch(
        _collect,
        by_wire,
        readers,
        _gate_tiles.used_readers(readers),
        outputs=[jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)],
        **_arguments(tile, call),
    )
    return dx


# ------------------------------------------------------------------------------------- launches
def _arguments(tile: _gate_tiles.GateTile, call: SoftLut) -> dict[str, Any]:
    return {**tile.arguments(call, call.table), "LOW": min(call.wires.shape[1], _LOW_BITS)}


def _forward_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=1024)


def _wires_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=512)


def _readers_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=256, arrays=2, warps=1)


def _inputs_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=1024)


def _table_rule(sizes: Sizes) -> Launch:
    # As many sums as the registers of a thread hold.
    slots = min(2 ** sizes["places"], _gate_tiles.SLOTS)
    samples = min(32 * max(_gate_tiles.SLOTS // slots, 1), 128)
    return Launch(rows=samples, outputs=4, detectors=512 // samples, warps=4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _interpolate(x, table, wires, y, c: tl.constexpr):
    gate, exists, part = _gate_tiles.locate_program(c.n_gates, c)
    slots = table + gate * c.n_slots
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        bits = _read(x, wires, gate, sample, c)
        if c.PLACES == c.LOW:
            value = _value(slots, bits, c.LOW, c.ACC)
        else:
            value = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
            # Each value of the high bits selects 16 consecutive slots.
            for high in range(0, c.n_slots >> c.LOW):
                share = _share(bits, high, c.LOW, c.PLACES, c.PLACES)
                value += share * _value(slots + (high << c.LOW), bits, c.LOW, c.ACC)
        _gate_tiles.write(y, gate, exists, sample, value, c)


@kernel
def _differentiate(x, table, wires, dy, received, c: tl.constexpr):
    """Store each wire's gradient, or add it to its input gradient."""
    gate, exists, part = _gate_tiles.locate_program(c.n_gates, c)
    slots = table + gate * c.n_slots
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, sample_exists = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        g = _gate_tiles.read(dy, gate, sample, c)
        bits = _read(x, wires, gate, sample, c)
        if c.PLACES == c.LOW:
            slopes = _value_and_slopes(slots, bits, c.LOW, c.ACC)[1:]
        else:
            slopes = _gate_tiles.empty_tuple()
            for _ in tl.static_range(c.PLACES):
                slopes += (tl.zeros((c.FEATURES, c.SAMPLES), c.ACC),)
            for high in range(0, c.n_slots >> c.LOW):
                of_low = _value_and_slopes(slots + (high << c.LOW), bits, c.LOW, c.ACC)
                # The product rule: low bits differentiate the interpolation, high bits its share.
                share = _share(bits, high, c.LOW, c.PLACES, c.PLACES)
                added = _gate_tiles.empty_tuple()
                for place in tl.static_range(c.LOW):
                    added += (slopes[place] + share * of_low[1 + place],)
                for place in tl.static_range(c.LOW, c.PLACES):
                    slope = _share(bits, high, c.LOW, c.PLACES, place) * of_low[0]
                    added += (
                        slopes[place] + tl.where(_is_set(high, place - c.LOW), slope, -slope),
                    )
                slopes = added
        for place in tl.static_range(c.PLACES):
            if c.SCATTER:
                to = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
                both_exist = exists[:, None] & sample_exists[None, :]
                to = received + _gate_tiles.sample_offsets(to, sample, c.n_samples)
                # Several gates may read the same input.
                tl.atomic_add(to, g * slopes[place], mask=both_exist, sem="relaxed")
            else:
                to = gate * c.PLACES + place
                _gate_tiles.write(received, to, exists, sample, g * slopes[place], c)


@kernel
def _collect(by_wire, readers, used, dx, c: tl.constexpr):
    feature, exists, block = _gate_tiles.locate_program(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    total = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        for u in tl.static_range(c.UNROLLED):
            number = _gate_tiles.reader(readers, feature, first + u, exists, c)
            wire = _gate_tiles.wire_of(number, c.n_gates * c.PLACES)
            # Unused entries read 0.
            total += _gate_tiles.read_some(by_wire, wire, number >= 0, sample, c)
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _gather(x, differences, wires, readers, used, dy, dx, c: tl.constexpr):
    feature, exists, block = _gate_tiles.locate_program(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    total = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        # All loads are issued before anything is computed, so that their latencies overlap.
        of_wires, gs, others = (
            _gate_tiles.empty_tuple(),
            _gate_tiles.empty_tuple(),
            _gate_tiles.empty_tuple(),
        )
        for u in tl.static_range(c.UNROLLED):
            number = _gate_tiles.reader(readers, feature, first + u, exists, c)
            wire = _gate_tiles.wire_of(number, c.n_gates * c.PLACES)
            gate, place = wire // c.PLACES, wire % c.PLACES
            gs += (_gate_tiles.read_some(dy, gate, number >= 0, sample, c),)
            bits = _gate_tiles.empty_tuple()
            for k in tl.static_range(1, c.PLACES):
                # The other bits of the gate, in the rotated order of `_differences`.
                row = _gate_tiles.input_of(wires, gate * c.PLACES + (place + k) % c.PLACES, c)
                bits += (_gate_tiles.read_some(x, row, number >= 0, sample, c),)
            others += (bits,)
            of_wires += (differences + (wire << (c.PLACES - 1)),)
        for u in tl.static_range(c.UNROLLED):
            total += gs[u] * _value(of_wires[u], others[u], c.PLACES - 1, c.ACC)
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _sum_shares(x, wires, dy, parts, c: tl.constexpr):
    """Sum ``dy`` times each slot's share; each of a gate's programs handles some slots."""
    gate, exists, slot, part = _gate_tiles.locate_slots(c)
    total = tl.zeros((c.SLOTS, c.FEATURES, c.SAMPLES), c.ACC)
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        # Loaded in the layout of the sums, ``[slots, gates, samples]``, so that no values move
        # between threads.
        g = _read_for_slots(dy, gate, sample, c)
        # From the most significant bit, so that the compiler shares the first factors between
        # slots.
        share = g
        for n in tl.static_range(c.PLACES):
            place = c.PLACES - 1 - n
            row = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
            bit = _read_for_slots(x, row, sample, c)
            share = share * tl.where(_is_set(slot, place)[:, None, None], bit, 1 - bit)
        total += share
    _gate_tiles.write_sums(parts, part, gate, exists, slot, total, c)


@kernel
def _read(x, wires, gate, sample, c: tl.constexpr):
    """Return the gates' wire values, least significant bit first."""
    bits = _gate_tiles.empty_tuple()
    for place in tl.static_range(c.PLACES):
        row = _gate_tiles.input_of(wires, gate * c.PLACES + place, c)
        bits += (_gate_tiles.read(x, row, sample, c),)
    return bits


@kernel
def _read_for_slots(x, row, sample, c: tl.constexpr):
    """Return ``[1, rows, samples]``; missing samples are 0."""
    at = row[None, :, None] * c.n_samples + sample[None, None, :]
    return tl.load(x + at, mask=(sample < c.n_samples)[None, None, :], other=0).to(c.ACC)


@kernel
def _is_set(number, place: tl.constexpr):
    return ((number >> place) & 1) == 1


@kernel
def _share(bits, high, LOW: tl.constexpr, PLACES: tl.constexpr, EXCEPT: tl.constexpr):
    """Return the product of the high-bit factors, without the factor at position `EXCEPT`."""
    share = tl.zeros_like(bits[0]) + 1
    for place in tl.static_range(LOW, PLACES):
        if place != EXCEPT:
            share *= tl.where(_is_set(high, place - LOW), bits[place], 1 - bits[place])
    return share


@kernel
def _value(slots, bits, N: tl.constexpr, ACC: tl.constexpr):
    """Interpolate ``2**N`` slots."""
    if N == 0:
        return tl.load(slots).to(ACC)[:, None]
    else:
        # Recursion at compile time: the halves of the table differ in the highest bit.
        low = _value(slots, bits, N - 1, ACC)
        high = _value(slots + (1 << (N - 1)), bits, N - 1, ACC)
        return low + bits[N - 1] * (high - low)


@kernel
def _value_and_slopes(slots, bits, N: tl.constexpr, ACC: tl.constexpr):
    """Interpolate ``2**N`` slots; return the value and its derivative in each bit."""
    if N == 0:
        return (tl.load(slots).to(ACC)[:, None],)
    else:
        low = _value_and_slopes(slots, bits, N - 1, ACC)
        high = _value_and_slopes(slots + (1 << (N - 1)), bits, N - 1, ACC)
        bit = bits[N - 1]
        difference = high[0] - low[0]
        results = _gate_tiles.empty_tuple()
        results += (low[0] + bit * difference,)
        for place in tl.static_range(N - 1):
            results += (low[1 + place] + bit * (high[1 + place] - low[1 + place]),)
        results += (difference,)
        return results

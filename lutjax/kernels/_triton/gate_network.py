"""`lutjax.ops.gate_network` in Triton: all layers in one kernel per pass.

Formula for a layer's gate ``g`` with inputs ``a`` and ``b``, coefficients ``c`` and output gradient
``dy``::

    y = c[0] + c[1] * a + c[2] * b + c[3] * a * b
    passed[g, 0] = dy * (c[1] + c[3] * b);  passed[g, 1] = dy * (c[2] + c[3] * a)
    dc = dy, dy * a, dy * b, dy * a * b, each summed over samples
    a value's dy = the gradients passed on by its readers, summed in list order

Work: a program owns consecutive sample blocks and computes all layers for one block after the
other. Samples are independent, so programs never wait for each other; within a program a barrier
separates the layers. The backward pass evaluates all layers but the last again, and then walks
back. Calls with an axis in front (networks side by side) have consecutive programs.

Layout: each program has scratch rows with `SAMPLES` elements in global memory, few enough for all
concurrent programs' scratch to stay in the L2 cache. Forward it holds two layers in turn; backward,
all layers' values but the last, and two layers' passed gradients in turn.

Numerics: the accumulator dtype. Coefficient gradients are sums per program, added over programs in
a fixed order. There are no atomics: results are the same in every run. Wire ids are clamped.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.dispatch.registry import Declaration, Deferral, Device, Request
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops.gate_network import GateNetwork
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._dtypes import accumulator

# Most values of a sample that a backward pass keeps. With four samples in each of 256 programs they
# fill 32 MiB of the L2 cache. On an H200, a step with 6800 values took 37 us in one kernel and 48
# us layer by layer (400 samples); with 10000 values it took 346 and 195 us (4096 samples).
_MOST_KEPT = 2**13


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, GateNetwork)
    if why := unsupported_arguments(request):
        return why
    if len(call.sizes) == 1:
        return Deferral("has one layer, which is bilinear_gates")
    # Outputs of all gates, and passed gradients of the two wires per gate of two layers.
    kept = sum(call.sizes) + 4 * max(call.sizes)
    # Wider layers do not fit the caches anyway and are faster as single layers.
    if kept > _MOST_KEPT:
        return Deferral(
            f"keeps values of all gates in the caches, at most {_MOST_KEPT} of a sample, here "
            f"{kept}"
        )
    return None


SPEC = Declaration(
    _supports, launches=("gate_network.forward", "gate_network.backward"), stacks=True
)


def forward(call: GateNetwork, *, device: Device) -> jax.Array:
    if call.x.ndim == 2:
        return forward(_add_leading_axis(call), device=device)[0]
    n_calls, _, n_samples = call.x.shape
    shape = jax.ShapeDtypeStruct((n_calls, call.sizes[-1], n_samples), call.x.dtype)
    config = launch_of("gate_network.forward", _sizes(call), device, _forward_rule)
    arguments = _arguments(call, config, device)
    # Layers write the two halves in turn; a single layer needs no scratch.
    rows = 2 * arguments["WIDEST"] if len(call.sizes) > 1 else 0
    y, _ = launch(
        _apply,
        call.x,
        call.coefficients,
        call.wires,
        _bounds(call),
        outputs=[shape, _scratch(call, arguments, rows)],
        **arguments,
    )
    return y


def backward(
    call: GateNetwork, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if call.x.ndim == 2:
        cotangents = backward(_add_leading_axis(call), cotangent[None], needs, device=device)
        return {name: a[0] for name, a in cotangents.items()}
    config = launch_of("gate_network.backward", _sizes(call), device, _backward_rule)
    arguments = _arguments(call, config, device)
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    n_programs, n_gates = arguments["programs"], call.wires.shape[1]
    if not n_programs:
        given = {"x": call.x, "coefficients": call.coefficients}
        return {name: jnp.zeros_like(given[name]) for name in needs}
    sums, passed = "coefficients" in needs, "x" in needs
    # The outputs of the last layer are not needed for any gradient.
    kept = n_gates - call.sizes[-1]
    order, starts, counts, most = _readers(call)
    parts, dx, _ = launch(
        _reduce,
        call.x,
        call.coefficients,
        call.wires,
        _bounds(call),
        order,
        starts,
        counts,
        cotangent,
        outputs=[
            jax.ShapeDtypeStruct((n_programs, n_gates, 4) if sums else (1,), dtype),
            jax.ShapeDtypeStruct(call.x.shape if passed else (1,), call.x.dtype),
            _scratch(call, arguments, kept + 4 * arguments["WIDEST"]),
        ],
        N_ORDER=order.shape[1],
        KEPT=kept,
        MOST_READERS=most,
        SUMS=sums,
        PASSED=passed,
        **arguments,
    )
    cotangents = {"x": dx, "coefficients": parts}
    if sums:
        of_calls = parts.reshape(len(call.x), arguments["PROGRAMS"], n_gates, 4)
        cotangents["coefficients"] = jax.vmap(_row_tiles.sum_of_parts)(of_calls).swapaxes(1, 2)
    return {name: cotangents[name] for name in needs}


def _add_leading_axis(call: GateNetwork) -> GateNetwork:
    """Return the call with a leading axis, of length 1, on all arrays."""
    stacked: GateNetwork = jax.tree.map(lambda a: a[None], call)
    return stacked


# Most readers per value whose number is not looked up: short lists are read to the end.
_FEW_READERS = 4


def _readers(call: GateNetwork) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Return the fan-out lists for inputs and gates.

    Without lists for all layers, the wires are sorted by their input value.

    Returns:
      Wire numbers within their layer; each value's list start and list length; and the maximum
      length, or 0 to look it up. The arrays have a call axis.
    """
    n_calls, n_inputs = call.x.shape[:2]
    read, lists = (n_inputs, *call.sizes[:-1]), call.readers or ()
    given = [r for r in lists if r is not None]
    if len(given) == len(read) and all(r.size for r in given):
        fan_outs = [r.shape[2] for r in given]
        order = jnp.concatenate([r.reshape(n_calls, -1) for r in given], 1)
        room = np.repeat(fan_outs, read).astype(np.int32)
        starts = _repeat_per_call(np.cumsum(room) - room, n_calls)
        if max(fan_outs) <= _FEW_READERS:
            return order, starts, _repeat_per_call(room, n_calls), max(fan_outs)
        used = jax.vmap(functools.partial(_gate_tiles.used_readers, unrolled=0))
        return order, starts, jnp.concatenate([used(r) for r in given], 1), 0
    # Kernels number the wires of a layer from 0.
    first_wires = np.concatenate(
        [np.full(2 * (stop - start), 2 * start) for start, stop in call.bounds()]
    )

    def sorted_wires(call: GateNetwork) -> tuple[jax.Array, jax.Array, jax.Array]:
        sources = call.sources().reshape(-1)
        # A stable sort gives each list a fixed order, and so each sum.
        order = jnp.argsort(sources, stable=True)
        counts = jnp.bincount(sources, length=sum(read)).astype(jnp.int32)
        starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
        return (order - jnp.asarray(first_wires)[order]).astype(jnp.int32), starts, counts

    return *jax.vmap(sorted_wires)(call), 0


def _repeat_per_call(numbers: np.ndarray, n_calls: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (n_calls, len(numbers)))


def _bounds(call: GateNetwork) -> jax.Array:
    """Return each layer's first gate and the number of gates: int32 ``[layers + 1]``."""
    return jnp.asarray([0, *(stop for _, stop in call.bounds())], jnp.int32)


def _scratch(call: GateNetwork, arguments: dict[str, Any], rows: int) -> jax.ShapeDtypeStruct:
    size = arguments["programs"] * rows * arguments["SAMPLES"]
    return jax.ShapeDtypeStruct((max(size, 1),), accumulator(call.x.dtype, call.coefficients.dtype))


# ------------------------------------------------------------------------------------- launches
def _sizes(call: GateNetwork) -> Sizes:
    return {
        "samples": call.x.shape[0] * call.x.shape[2],  # of all calls
        "inputs": call.x.shape[1],
        "outputs": max(call.sizes),
        "places": call.wires.shape[2],
        "gates": call.wires.shape[1],
        "layers": len(call.sizes),
        "bits": 8 * call.x.dtype.itemsize,
    }


_MULTIPROCESSORS = 132  # of an H200
_ENOUGH = 256  # programs
# At most so many gates per layer, and at least so many samples: larger blocks were measured faster.
_NARROW, _MANY = 64, 2**18
_CACHED = 2**25  # bytes of scratch of concurrent programs, which have to stay in the L2 cache
_MOST_BYTES = 2**28  # bytes of scratch of all programs


def _forward_rule(sizes: Sizes) -> Launch:
    return _rule(sizes, 2 * sizes["outputs"], most=4096)


def _backward_rule(sizes: Sizes) -> Launch:
    # Each program writes four sums for all gates, which are read again: at most as many bytes as
    # the cache holds.
    return _rule(
        sizes, sizes["gates"] + 4 * sizes["outputs"], most=_CACHED // (16 * sizes["gates"])
    )


def _rule(sizes: Sizes, rows: int, most: int) -> Launch:
    """Return a config whose programs fill the device, with `rows`-row scratch in the L2 cache."""
    narrow = sizes["outputs"] <= _NARROW and sizes["samples"] >= _MANY
    samples = 128 if narrow else 32
    while samples > 4 and (
        triton.cdiv(sizes["samples"], samples) < _ENOUGH
        or _ENOUGH * rows * samples * 4 > 2 * _CACHED
    ):
        samples //= 2
    own = rows * samples * 4
    programs = max(min(max(_CACHED // own, _ENOUGH), _MOST_BYTES // own, most), 1)
    n_blocks = triton.cdiv(sizes["samples"], samples)
    # Blocks per program: as few as the bound on programs allows.
    fewest = max(n_blocks // programs, 1)

    def turns(blocks: int) -> int:
        # Time in blocks: rounds of programs on all multiprocessors times blocks per program. An
        # uneven last round can make one more block per program faster.
        return triton.cdiv(triton.cdiv(n_blocks, blocks), _MULTIPROCESSORS) * blocks

    # At most one gate per thread, or a row for each thread: values of gates (ids, coefficients)
    # then need no exchange between threads.
    gates = (
        16
        if narrow
        else 128
        if samples > 8
        else 256
        if samples > 4 or sizes["outputs"] <= 256
        else 512
    )
    return Launch(
        rows=samples,
        outputs=gates,
        detectors=min((fewest, fewest + 1), key=turns),
        warps=max(gates // 16 if samples == 8 else gates // 32, 8),
    )


def _arguments(call: GateNetwork, config: Launch, device: Device) -> dict[str, Any]:
    """Return `launch` arguments and kernel constants.

    In the config, `rows` are samples, `detectors` sample blocks, and `outputs` gates per tile.
    """
    n_calls, n_inputs, n_samples = call.x.shape
    # Scratch and tiles have one size for all layers, because `layer` is a run-time loop variable.
    widest = max(call.sizes)
    samples, gates = (
        _row_tiles.fit_size(config.rows, n_samples),
        _row_tiles.fit_size(config.outputs, widest),
    )
    n_blocks = triton.cdiv(n_samples, samples)
    blocks = min(config.detectors or n_blocks, max(n_blocks, 1))
    runs = n_inputs and n_samples and call.sizes[-1]
    programs = triton.cdiv(n_blocks, blocks) if runs else 0
    return {
        "programs": n_calls * programs,
        "PROGRAMS": programs,
        "device": device,
        # No more warps than a tile has work for: 128 elements or 32 gates each.
        "warps": min(config.warps, max(samples * gates // 128, gates // 32, 1)),
        "n_samples": n_samples,
        "n_inputs": n_inputs,
        "n_gates": call.wires.shape[1],
        "n_outputs": call.sizes[-1],
        "LAYERS": len(call.sizes),
        "WIDEST": widest,
        "SAMPLES": samples,
        "GATES": gates,
        "BLOCKS": blocks,
        "UNROLLED": _gate_tiles.UNROLLED,
        "ACC": _row_tiles.TYPES[accumulator(call.x.dtype, call.coefficients.dtype).name],
    }


# ------------------------------------------------------------------------------------- kernels
@kernel
def _apply(x, coefficients, wires, bounds, y, scratch, c: tl.constexpr):
    x, coefficients, wires, y = _offset_to_call(x, coefficients, wires, y, c)
    # 64 bits: the scratch of all programs may exceed 2**31 elements.
    own = scratch + tl.program_id(0).to(tl.int64) * (2 * c.WIDEST * c.SAMPLES)
    place = tl.arange(0, c.SAMPLES)
    for block in range(_first_block(c), _gate_tiles.last_block(_number(c), c)):
        sample, there = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        # The first layer reads `x`, the last one writes `y`, all others use scratch. The three
        # cases are separate because row strides and columns differ at compile time.
        if c.LAYERS == 1:
            _evaluate(
                x, c.n_samples, sample, coefficients, wires, 0, c.n_gates, c.n_inputs,
                y, c.n_samples, sample, there, c,
            )  # fmt: skip
        else:
            begin, end = 0, tl.load(bounds + 1)
            _evaluate(
                x, c.n_samples, sample, coefficients, wires, begin, end, c.n_inputs,
                own, c.SAMPLES, place, there, c,
            )  # fmt: skip
            # Other threads of the program read what this layer wrote.
            tl.debug_barrier()
            for layer in range(1, c.LAYERS - 1):
                before, begin, end = _layer(bounds, layer)
                _evaluate(
                    _half(own, layer - 1, c.WIDEST, c), c.SAMPLES, place, coefficients, wires,
                    begin, end, begin - before,
                    _half(own, layer, c.WIDEST, c), c.SAMPLES, place, there, c,
                )  # fmt: skip
                tl.debug_barrier()
            before, begin, end = _layer(bounds, c.LAYERS - 1)
            _evaluate(
                _half(own, c.LAYERS - 2, c.WIDEST, c), c.SAMPLES, place, coefficients, wires,
                begin, end, begin - before, y, c.n_samples, sample, there, c,
            )  # fmt: skip
            # The next block overwrites rows that the last layer may still read.
            tl.debug_barrier()


@kernel
def _reduce(
    x, coefficients, wires, bounds, order, starts, counts, dy, parts, dx, scratch, c: tl.constexpr
):  # fmt: skip
    x, coefficients, wires, dy = _offset_to_call(x, coefficients, wires, dy, c)
    call, program = (tl.program_id(0) // c.PROGRAMS).to(tl.int64), tl.program_id(0).to(tl.int64)
    order += call * c.N_ORDER
    starts += call * (c.n_inputs + c.KEPT)
    counts += call * (c.n_inputs + c.KEPT)
    dx += call * (c.n_inputs * c.n_samples)
    # Scratch: `KEPT` rows of values, then twice ``2 * WIDEST`` rows of passed gradients.
    values = scratch + program * ((c.KEPT + 4 * c.WIDEST) * c.SAMPLES)
    passed = values + c.KEPT * c.SAMPLES
    parts += program * (4 * c.n_gates)
    place = tl.arange(0, c.SAMPLES)
    for block in range(_first_block(c), _gate_tiles.last_block(_number(c), c)):
        sample, there = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        if c.LAYERS > 1:
            _evaluate(
                x, c.n_samples, sample, coefficients, wires, 0, tl.load(bounds + 1), c.n_inputs,
                values, c.SAMPLES, place, there, c,
            )  # fmt: skip
            # Layers read what other threads of the program wrote, in both directions.
            tl.debug_barrier()
            for layer in range(1, c.LAYERS - 1):
                before, begin, end = _layer(bounds, layer)
                _evaluate(
                    values + before * c.SAMPLES, c.SAMPLES, place, coefficients, wires, begin, end,
                    begin - before, values + begin * c.SAMPLES, c.SAMPLES, place, there, c,
                )  # fmt: skip
                tl.debug_barrier()
            before, begin, end = _layer(bounds, c.LAYERS - 1)
            _go_back(
                values + before * c.SAMPLES, c.SAMPLES, place, coefficients, wires, begin, end,
                begin - before, dy, 0, order, starts, counts, sample,
                _half(passed, c.LAYERS - 1, 2 * c.WIDEST, c), parts, block, place, there,
                True, False, c,
            )  # fmt: skip
            tl.debug_barrier()
            # Layer ``l`` reads the half that layer ``l + 1`` wrote and writes the other one.
            for back in range(1, c.LAYERS - 1):
                layer = c.LAYERS - 1 - back
                before, begin, end = _layer(bounds, layer)
                n_wires = 2 * (tl.load(bounds + layer + 2) - end)
                _go_back(
                    values + before * c.SAMPLES, c.SAMPLES, place, coefficients, wires, begin, end,
                    begin - before, _half(passed, layer + 1, 2 * c.WIDEST, c), n_wires,
                    order, starts, counts, place,
                    _half(passed, layer, 2 * c.WIDEST, c), parts, block, place, there,
                    False, False, c,
                )  # fmt: skip
                tl.debug_barrier()
            end = tl.load(bounds + 1)
            _go_back(
                x, c.n_samples, sample, coefficients, wires, 0, end, c.n_inputs,
                _half(passed, 1, 2 * c.WIDEST, c), 2 * (tl.load(bounds + 2) - end),
                order, starts, counts, place,
                passed, parts, block, place, there, False, True, c,
            )  # fmt: skip
        else:
            _go_back(
                x, c.n_samples, sample, coefficients, wires, 0, c.n_gates, c.n_inputs,
                dy, 0, order, starts, counts, sample,
                passed, parts, block, place, there, True, True, c,
            )  # fmt: skip
        tl.debug_barrier()
        # The first layer passed its gradients on into half 0, with rows for both wires of its
        # gates.
        if c.PASSED:
            n_wires = 2 * tl.load(bounds + 1)
            for first in range(0, c.n_inputs, c.GATES):
                value, exists = _tile(first, c.n_inputs, c)
                total = _gather(
                    passed, n_wires, order, starts, counts, value, exists, place, there, c
                )
                _write(dx, c.n_samples, value, exists, sample, there, total)
            tl.debug_barrier()


@kernel
def _evaluate(
    source, STRIDE: tl.constexpr, column, coefficients, wires, begin, end, n_read,
    to, TO: tl.constexpr, to_column, there, c: tl.constexpr,
):  # fmt: skip
    """Store a layer's outputs; the layer reads `n_read` rows from `source`.

    Args:
      STRIDE, TO: elements between two rows in `source` and in `to`.
      column, to_column: sample positions within a row in `source` and in `to`.
    """
    for first in range(begin, end, c.GATES):
        gate, exists = _tile(first, end, c)
        # Missing gates repeat the last one, so rows need no mask.
        a = _read(source, STRIDE, _input_of(wires, 2 * gate, n_read), column, None, there, c)
        b = _read(source, STRIDE, _input_of(wires, 2 * gate + 1, n_read), column, None, there, c)
        c0 = _coefficient(coefficients, 0, gate, c)
        c1 = _coefficient(coefficients, 1, gate, c)
        c2 = _coefficient(coefficients, 2, gate, c)
        c3 = _coefficient(coefficients, 3, gate, c)
        _write(to, TO, gate - begin, exists, to_column, there, (c0 + c1 * a) + (c2 + c3 * a) * b)


@kernel
def _go_back(
    source, STRIDE: tl.constexpr, column, coefficients, wires, begin, end, n_read,
    behind, n_wires, order, starts, counts, behind_column,
    passed, parts, block, place, there, LAST: tl.constexpr, FIRST: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Pass gradients on from a layer, and add to its gates' sums.

    Args:
      behind: for the last layer the output gradient; for other layers the gradients passed on by
        the following layer's `n_wires` wires.
    """
    for first in range(begin, end, c.GATES):
        gate, exists = _tile(first, end, c)
        a = _read(source, STRIDE, _input_of(wires, 2 * gate, n_read), column, None, there, c)
        b = _read(source, STRIDE, _input_of(wires, 2 * gate + 1, n_read), column, None, there, c)
        if LAST:
            g = _read(behind, c.n_samples, gate - begin, behind_column, None, there, c)
        else:
            value = c.n_inputs + gate
            g = _gather(
                behind, n_wires, order, starts, counts, value, exists, behind_column, there, c
            )
        if c.SUMS:
            _add(parts, gate, exists, g, a, b, block, c)
        # The first layer passes on only if the `x` gradient is needed.
        if c.PASSED or not FIRST:
            c1 = _coefficient(coefficients, 1, gate, c)
            c2 = _coefficient(coefficients, 2, gate, c)
            c3 = _coefficient(coefficients, 3, gate, c)
            # The two wires of a gate are rows ``2 g`` and ``2 g + 1``, the wire numbers of the
            # lists.
            row = 2 * (gate - begin)
            _write(passed, c.SAMPLES, row, exists, place, there, g * (c1 + c3 * b))
            _write(passed, c.SAMPLES, row + 1, exists, place, there, g * (c2 + c3 * a))


@kernel
def _gather(passed, n_wires, order, starts, counts, value, exists, place, there, c: tl.constexpr):
    """Sum the gradients passed on by the values' readers."""
    start = tl.load(starts + value)
    count = tl.load(counts + value, mask=exists, other=0)
    # A known bound avoids a reduction over the tile and its latency.
    most = c.MOST_READERS if c.MOST_READERS > 0 else tl.max(count, 0)
    total = tl.zeros((c.GATES, c.SAMPLES), c.ACC)
    for first in range(0, most, c.UNROLLED):
        # All loads are issued before anything is added, so that their latencies overlap.
        numbers, found = _gate_tiles.empty_tuple(), _gate_tiles.empty_tuple()
        for u in tl.static_range(c.UNROLLED):
            at = first + u
            numbers += (tl.load(order + start + at, mask=at < count, other=-1),)
        for u in tl.static_range(c.UNROLLED):
            # Entries that are unused read nothing, but their address is formed anyway.
            row = tl.minimum(tl.maximum(numbers[u], 0), n_wires - 1)
            found += (_read(passed, c.SAMPLES, row, place, numbers[u] >= 0, there, c),)
        for u in tl.static_range(c.UNROLLED):
            total += found[u]
    return total


@kernel
def _add(parts, gate, exists, g, a, b, block, c: tl.constexpr):
    """Add to each gate's four sums, or store them for the first block."""
    with_a = g * a
    alone, both = (
        tl.join(tl.sum(g, 1), tl.sum(g * b, 1)),
        tl.join(tl.sum(with_a, 1), tl.sum(with_a * b, 1)),
    )
    # The four sums of a gate are contiguous, so they are stored with one instruction.
    total = tl.reshape(tl.join(alone, both), (c.GATES, 4))
    to = parts + (4 * gate[:, None] + tl.arange(0, 4)[None, :])
    # The sums belong to the program: it reads back its own stores and needs no atomics.
    if c.BLOCKS > 1:
        total += tl.load(to, mask=exists[:, None] & (block > _first_block(c)), other=0)
    tl.store(to, total, mask=exists[:, None])


@kernel
def _offset_to_call(x, coefficients, wires, y, c: tl.constexpr):
    """Offset the arrays to this program's call; `y` holds outputs or their gradients."""
    call = (tl.program_id(0) // c.PROGRAMS).to(tl.int64)
    return (
        x + call * (c.n_inputs * c.n_samples),
        coefficients + call * (4 * c.n_gates),
        wires + call * (2 * c.n_gates),
        y + call * (c.n_outputs * c.n_samples),
    )


@kernel
def _number(c: tl.constexpr):
    return tl.program_id(0) % c.PROGRAMS


@kernel
def _first_block(c: tl.constexpr):
    return _number(c) * c.BLOCKS


@kernel
def _layer(bounds, layer):
    """Return the first gate in the previous, this, and the next layer."""
    return tl.load(bounds + layer - 1), tl.load(bounds + layer), tl.load(bounds + layer + 1)


@kernel
def _half(scratch, layer, rows: tl.constexpr, c: tl.constexpr):
    """Return the scratch memory half for this layer; layers alternate."""
    return scratch + (layer % 2) * (rows * c.SAMPLES)


@kernel
def _tile(first, end, c: tl.constexpr):
    """Return a tile's gates or inputs, and whether they exist; missing ones repeat the last."""
    number = first + tl.arange(0, c.GATES)
    return tl.minimum(number, end - 1), number < end


@kernel
def _input_of(wires, number, n_read):
    """Return a wire's input value; out-of-range ids are clamped."""
    return tl.minimum(tl.maximum(tl.load(wires + number), 0), n_read - 1)


@kernel
def _coefficient(coefficients, number: tl.constexpr, gate, c: tl.constexpr):
    return tl.load(coefficients + number * c.n_gates + gate).to(c.ACC)[:, None]


@kernel
def _read(source, STRIDE: tl.constexpr, row, column, exists, there, c: tl.constexpr):
    """Read row samples; missing samples are 0. `exists` is None if all rows exist."""
    at = source + _row_offsets(row, STRIDE, column)
    if exists is not None:
        return tl.load(at, mask=exists[:, None] & there[None, :], other=0).to(c.ACC)
    elif c.n_samples % c.SAMPLES == 0:
        return tl.load(at).to(c.ACC)
    else:
        return tl.load(at, mask=there[None, :], other=0).to(c.ACC)


@kernel
def _write(to, STRIDE: tl.constexpr, row, exists, column, there, value):
    at = to + _row_offsets(row, STRIDE, column)
    tl.store(at, value.to(to.dtype.element_ty), mask=exists[:, None] & there[None, :])


@kernel
def _row_offsets(row, STRIDE: tl.constexpr, column):
    """Return offsets in rows, with as many bits as `column` has."""
    # Columns of scratch are int32, columns of `x` and `y` int64: scratch of one program is small.
    return row.to(column.dtype)[:, None] * STRIDE + column[None, :]

"""`lutjax.bilinear_gates` in Triton.

Formula for gate ``g`` with wire inputs ``a`` and ``b``, coefficients ``c`` and output gradient
``dy``::

    y = c[0] + c[1] * a + c[2] * b + c[3] * a * b
    da += dy * (c[1] + c[3] * b);  db += dy * (c[2] + c[3] * a)
    dc = dy, dy * a, dy * b, dy * a * b, each summed over samples

Work: a program owns a gate and sample tile. With fan-out lists (`readers`), a backward program owns
an input and sample tile instead, and gathers from the reading gates; the same pass sums the
coefficient gradients (435 us forward and backward, 616 us with atomics).

Layout: ``[features, samples]``, see `_gate_tiles`; coefficients are ``[4, gates]``.

Numerics: the accumulator dtype. Coefficient gradients are partial sums per program, added in a
fixed order. Without fan-out lists input gradients use atomics and their last bits differ between
runs; with them every sum has a fixed order. Wire ids are clamped.
"""

import jax

from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._language import tl
from lutjax.kernels._triton._rules import few_values, unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.tuning import Launch, Sizes
from lutjax.values._dtypes import accumulator


def _supports(request: Request) -> str | None:
    assert isinstance(request.call, BilinearGates)
    return unsupported_arguments(request) or few_values(request.call)


SPEC = Declaration(
    _supports, launches=("bilinear_gates.forward", "bilinear_gates.gates", "bilinear_gates.inputs")
)


def forward(call: BilinearGates, *, device: Device) -> jax.Array:
    tile = _gate_tiles.GateTile.for_call("bilinear_gates.forward", _forward_rule, call, device)
    (y,) = launch(
        _apply,
        call.x,
        call.coefficients,
        call.wires,
        outputs=[_gate_tiles.output(call)],
        **tile.arguments(call, call.coefficients),
    )
    return y


def backward(
    call: BilinearGates, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    # A gather sums in a fixed order; without lists or gates, programs of gates scatter.
    if "x" in needs and call.readers is not None and call.wires.size:
        dx, parts = _gather_gradients(
            call, call.readers, cotangent, "coefficients" in needs, device
        )
    else:
        dx, parts = _scatter_gradients(call, cotangent, needs, device)
    cotangents = {"x": dx, "coefficients": parts}
    if "coefficients" in needs:
        cotangents["coefficients"] = _row_tiles.sum_of_parts(parts)
    return {name: cotangents[name] for name in needs}


def _scatter_gradients(
    call: BilinearGates, dy: jax.Array, needs: frozenset[str], device: Device
) -> tuple[jax.Array, ...]:
    """Return the input gradient, by atomics, and partial coefficient gradients."""
    tile = _gate_tiles.GateTile.for_call("bilinear_gates.gates", _gates_rule, call, device)
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    sums, scatter = "coefficients" in needs, "x" in needs
    parts, dx = launch(
        _reduce,
        call.x,
        call.coefficients,
        call.wires,
        dy,
        outputs=[
            jax.ShapeDtypeStruct((tile.n_partial_sums, 4, len(call.wires)) if sums else (1,), dtype)
        ],
        zeroed=[jax.ShapeDtypeStruct(call.x.shape if scatter else (1,), dtype)],
        SUMS=sums,
        SCATTER=scatter,
        **tile.arguments(call, call.coefficients),
    )
    return dx, parts


def _gather_gradients(
    call: BilinearGates, readers: jax.Array, dy: jax.Array, sums: bool, device: Device
) -> tuple[jax.Array, ...]:
    """Return the input gradient, from fan-out lists, and partial coefficient gradients."""
    tile = _gate_tiles.GateTile.for_call(
        "bilinear_gates.inputs", _inputs_rule, call, device, of_inputs=True
    )
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    # Zeros, because a wire that is missing in the fan-out lists writes nothing.
    return launch(
        _gather,
        call.x,
        call.coefficients,
        call.wires,
        readers,
        _gate_tiles.used_readers(readers),
        dy,
        outputs=[jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)],
        zeroed=[
            jax.ShapeDtypeStruct((tile.n_partial_sums, 4, len(call.wires)) if sums else (1,), dtype)
        ],
        SUMS=sums,
        **tile.arguments(call, call.coefficients),
    )


# ------------------------------------------------------------------------------------- launches
def _forward_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=2048)


def _gates_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=1024)


# Gathers read `x` and `dy` of any gate, so both arrays have to stay in the L2 cache.
def _inputs_rule(sizes: Sizes) -> Launch:
    return _gate_tiles.rule(sizes, values=256, arrays=2, warps=1, samples=256)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _apply(x, coefficients, wires, y, c: tl.constexpr):
    gate, exists, part = _gate_tiles.locate_program(c.n_gates, c)
    of_a = _gate_tiles.input_of(wires, 2 * gate, c)
    of_b = _gate_tiles.input_of(wires, 2 * gate + 1, c)
    c0 = _coefficient(coefficients, 0, gate, None, c)
    c1 = _coefficient(coefficients, 1, gate, None, c)
    c2 = _coefficient(coefficients, 2, gate, None, c)
    c3 = _coefficient(coefficients, 3, gate, None, c)
    # Coefficients are loaded once and serve all sample tiles of the program.
    for block in range(part * c.BLOCKS, _gate_tiles.last_block(part, c)):
        sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
        a = _gate_tiles.read(x, of_a, sample, c)
        b = _gate_tiles.read(x, of_b, sample, c)
        _gate_tiles.write(y, gate, exists, sample, (c0 + c1 * a) + (c2 + c3 * a) * b, c)


@kernel
def _reduce(x, coefficients, wires, dy, parts, dx, c: tl.constexpr):
    """Sum each gate's four products, and add its input gradients."""
    gate, exists, part = _gate_tiles.locate_program(c.n_gates, c)
    of_a = _gate_tiles.input_of(wires, 2 * gate, c)
    of_b = _gate_tiles.input_of(wires, 2 * gate + 1, c)
    c1 = _coefficient(coefficients, 1, gate, None, c)
    c2 = _coefficient(coefficients, 2, gate, None, c)
    c3 = _coefficient(coefficients, 3, gate, None, c)
    # Sums stay elementwise over sample tiles; samples are reduced once at the end.
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
            # Several gates may read the same input.
            to_a = dx + _gate_tiles.sample_offsets(of_a, sample, c.n_samples)
            to_b = dx + _gate_tiles.sample_offsets(of_b, sample, c.n_samples)
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
    """Sum each input's gradients over its readers.

    A fan-out list entry is a wire number, ``2 * gate + end``. It computes two of its gate's four
    sums: ``g`` and ``g a`` as first input, ``g b`` and ``g a b`` as second input.
    """
    feature, exists, block = _gate_tiles.locate_program(c.n_inputs, c)
    sample, _ = _row_tiles.block(c.SAMPLES, c.n_samples, block)
    # Only the sums of coefficients need the input itself; its gradient needs the other one.
    own = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    if c.SUMS:
        own = _gate_tiles.read(x, feature, sample, c)
    parts += block.to(tl.int64) * 4 * c.n_gates
    total = tl.zeros((c.FEATURES, c.SAMPLES), c.ACC)
    for first in range(0, _gate_tiles.last_use(used, feature, c), c.UNROLLED):
        # All loads are issued before anything is computed, so that their latencies overlap.
        numbers, others = _gate_tiles.empty_tuple(), _gate_tiles.empty_tuple()
        gs, bs = _gate_tiles.empty_tuple(), _gate_tiles.empty_tuple()
        for u in tl.static_range(c.UNROLLED):
            numbers += (_gate_tiles.reader(readers, feature, first + u, exists, c),)
        for u in tl.static_range(c.UNROLLED):
            # The two wires of a gate differ in the last bit.
            others += (
                _gate_tiles.input_of(wires, _gate_tiles.wire_of(numbers[u], 2 * c.n_gates) ^ 1, c),
            )
        for u in tl.static_range(c.UNROLLED):
            gate = _gate_tiles.wire_of(numbers[u], 2 * c.n_gates) // 2
            gs += (_gate_tiles.read_some(dy, gate, numbers[u] >= 0, sample, c),)
            bs += (_gate_tiles.read_some(x, others[u], numbers[u] >= 0, sample, c),)
        for u in tl.static_range(c.UNROLLED):
            wire = _gate_tiles.wire_of(numbers[u], 2 * c.n_gates)
            gate, second = wire // 2, wire % 2
            # 0 for unused entries, whose gate may hold NaN.
            slope = _coefficient(coefficients, 1 + second, gate, numbers[u] >= 0, c)
            cross = _coefficient(coefficients, 3, gate, numbers[u] >= 0, c)
            total += gs[u] * (slope + cross * bs[u])
            if c.SUMS:
                of_own = gs[u] * own
                # Sum 0 (``g``) for the first wire, sum 3 (``g a b``) for the second one: index ``3
                # * second``.
                of_pair = tl.where((second == 0)[:, None], gs[u], of_own * bs[u])
                # Each wire has one entry in all lists, so no two programs store the same sum.
                tl.store(
                    parts + (1 + second) * c.n_gates + gate, tl.sum(of_own, 1), mask=numbers[u] >= 0
                )
                tl.store(
                    parts + 3 * second * c.n_gates + gate, tl.sum(of_pair, 1), mask=numbers[u] >= 0
                )
    _gate_tiles.write(dx, feature, exists, sample, total, c)


@kernel
def _coefficient(coefficients, number, gate, exists, c: tl.constexpr):
    """Return coefficients as a column; 0 where not `exists`, None if every gate exists."""
    found = tl.load(
        coefficients + number * c.n_gates + gate,
        mask=exists,
        other=0 if exists is not None else None,
    )
    return found.to(c.ACC)[:, None]

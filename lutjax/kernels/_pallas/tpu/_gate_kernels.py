"""TensorCore gate kernels, built from a gate formula on tiles.

Formula for gate ``g``, sample ``s``: ``y[g, s] = value(parameter[g], x[wires[g], s])``; backward,
the cotangents for ``parameter`` (summed over samples) and ``x`` (summed over the wires that read an
input).

Work: grid (sample blocks, gate blocks). A step copies the rows read by its wires next to each
other, then computes on tiles with 16 gates x 128 samples, then adds wire cotangents to input
cotangents.

Layout: features first, ``[features, samples]``, samples in lanes: a wire reads one row, with an id
in scalar memory. Vector memory holds all inputs for a sample block and their cotangents. Parameters
are spread over 128 lanes once per block. Sums over samples stay 128 lanes wide until the end,
because moving data between lanes is slow.

Numerics: float32 (or 32-bit integers). One core adds cotangents in wire order, so results are equal
in every run; fan-out lists are not used. Wire ids are clamped.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu._gate_blocks import TILE, Blocks, blocks
from lutjax.kernels._pallas.tpu._limits import LANES, SUBLANES
from lutjax.kernels._xla._wire_gathers import clamp_wires

# On tiles ``[gates, samples]``: from the numbers of each gate, K of them, and what each wire reads,
# n of them, the outputs.
Value = Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]
# From these and the cotangent of the outputs: the cotangent of every number, sample by sample, or
# of what every wire reads.
Gradient = Callable[[Sequence[jax.Array], Sequence[jax.Array], jax.Array], Sequence[jax.Array]]

_ADDED = 16  # rows at the same time
_WRITTEN_OUT = 4  # tiles at most: as many as are under way at the same time


@dataclasses.dataclass(frozen=True)
class GateKernels:
    """Forward and backward pass for a gate op, as functions that take its call.

    Attributes:
      plain: the op's module in plain JAX, for calls without inputs or gates.
      parameter: name of the parameter array, ``[G, K]``; ``[K, G]`` with `slots_first`.
      value: gate outputs, on tiles.
      of_parameter, of_inputs: `parameter` and input cotangents, on tiles.
    """

    plain: ModuleType
    parameter: str
    value: Value
    of_parameter: Gradient
    of_inputs: Gradient
    slots_first: bool = False

    def forward(self, call: Any, *, device: Device) -> jax.Array:
        if 0 in (call.x.size, call.wires.size):
            y: jax.Array = self.plain.forward(call, device=device)
            return y
        of_gates = self._gates_first(getattr(call, self.parameter))
        return apply(
            self.value,
            call.x,
            of_gates,
            call.wires,
            dtype=call.x.dtype,
            name=call.op,
            device=device,
        )

    def backward(
        self, call: Any, cotangent: jax.Array, needs: frozenset[str], *, device: Device
    ) -> dict[str, jax.Array]:
        if 0 in (call.x.size, call.wires.size):
            cotangents: dict[str, jax.Array] = self.plain.backward(
                call, cotangent, needs, device=device
            )
            return cotangents
        dx, sums = differentiate(
            self.of_parameter if self.parameter in needs else None,
            self.of_inputs if "x" in needs else None,
            call.x,
            self._gates_first(getattr(call, self.parameter)),
            call.wires,
            cotangent,
            name=f"{call.op}_backward",
            device=device,
        )
        cotangents = {} if dx is None else {"x": dx}
        return (
            cotangents if sums is None else {**cotangents, self.parameter: self._gates_first(sums)}
        )

    def _gates_first(self, a: jax.Array) -> jax.Array:
        """Transpose parameters, or their cotangents, if gates are not the first axis.

        Its own inverse.
        """
        return a.T if self.slots_first else a


def apply(
    value: Value,
    x: jax.Array,
    parameter: jax.Array,
    wires: jax.Array,
    *,
    dtype: jnp.dtype,
    name: str,
    device: Device,
) -> jax.Array:
    """Return gate outputs: ``[I, B]``, ``[G, K]``, ``[G, n]`` -> ``[G, B]``.

    `value` computes with 32-bit elements.
    """
    tiling = _blocks(x, parameter, wires, device, backward=False)

    def kernel(
        wires_ref: Any, x_ref: Any, parameter_ref: Any, y_ref: Any, read_ref: Any, spread_ref: Any
    ) -> None:
        _read(wires_ref, x_ref, read_ref)
        _spread(parameter_ref, spread_ref)

        def visit_tiles(k: jax.Array, tiles: list[Any]) -> None:
            numbers = _spread_values(spread_ref, k)
            for lanes in tiles:
                y_ref[_gates(k), lanes] = value(numbers, _tiles(read_ref, k, lanes)).astype(
                    y_ref.dtype
                )

        _over_tiles(tiling, visit_tiles)

    (y,) = _launch(
        kernel,
        tiling,
        x,
        parameter,
        wires,
        outputs=[(jax.ShapeDtypeStruct((len(wires), x.shape[1]), dtype), _gate_spec(tiling))],
        n_spread=1,
        name=name,
    )
    return y


def differentiate(
    of_parameter: Gradient | None,
    of_inputs: Gradient | None,
    x: jax.Array,
    parameter: jax.Array,
    wires: jax.Array,
    dy: jax.Array,
    *,
    name: str,
    device: Device,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return float32 cotangents for ``[I, B]`` and ``[G, K]``; None where the function is None."""
    tiling = _blocks(x, parameter, wires, device, backward=True)
    (n_gates, n_slots), (n_inputs, n_samples) = parameter.shape, x.shape

    def kernel(
        wires_ref: Any, x_ref: Any, parameter_ref: Any, apart_ref: Any, dy_ref: Any, *refs: Any
    ) -> None:
        *results, read_ref, spread_ref, wide_ref = refs
        dx_ref = results.pop(0) if of_inputs else None
        sums_ref = results.pop(0) if of_parameter else None
        sample_block, gate_block = pl.program_id(0), pl.program_id(1)
        _read(wires_ref, x_ref, read_ref)
        _spread(parameter_ref, spread_ref)
        if of_parameter:
            _clear(wide_ref)

        def visit_tiles(k: jax.Array, tiles: list[Any]) -> None:
            numbers = _spread_values(spread_ref, k)
            sums = [jnp.zeros((TILE, LANES), jnp.float32)] * n_slots
            for lanes in tiles:
                read = _tiles(read_ref, k, lanes)
                g = dy_ref[_gates(k), lanes].astype(jnp.float32)
                if of_parameter:
                    # The last block reads beyond the samples, where x and dy may hold NaN: mask
                    # before the sum.
                    first = sample_block * tiling.samples + lanes.start
                    inside = [_if_inside(a, first, n_samples, tiling.samples) for a in (g, *read)]
                    addends = of_parameter(numbers, inside[1:], inside[0])
                    sums = [s + a for s, a in zip(sums, addends, strict=True)]
                if of_inputs:
                    for place, d in enumerate(of_inputs(numbers, read, g)):
                        # The cotangent of a wire replaces the value it read, which this tile no
                        # longer needs.
                        read_ref[place, pl.ds(2 * k, 2), :, lanes] = d.reshape(2, SUBLANES, LANES)
            if of_parameter:
                for slot, s in enumerate(sums):
                    wide_ref[slot, _gates(k), :] += s

        _over_tiles(tiling, visit_tiles)
        if sums_ref is not None:
            _sum_lanes(wide_ref, sums_ref)
        if dx_ref is not None:
            # Gates are the inner axis: the sum of a block of samples stays in vector memory over
            # all gates.
            pl.when(gate_block == 0)(lambda: _clear(dx_ref))
            # Padding gates may hold NaN.
            left = (
                tiling.gates if n_gates % tiling.gates == 0 else n_gates - gate_block * tiling.gates
            )
            _add(wires_ref, apart_ref, read_ref, dx_ref, left)

    outputs = []
    if of_inputs:
        # All blocks of gates add to one block of inputs.
        dx = jax.ShapeDtypeStruct((n_inputs, n_samples), jnp.float32)
        outputs.append((dx, pl.BlockSpec((n_inputs, tiling.samples), lambda b, g: (0, b))))
    if of_parameter:
        steps = pl.cdiv(n_samples, tiling.samples)
        # One part per block of samples, added by XLA: blocks of samples may run on different cores.
        sums = jax.ShapeDtypeStruct((steps, n_gates, n_slots), jnp.float32)
        outputs.append((sums, pl.BlockSpec((1, tiling.gates, n_slots), lambda b, g: (b, g, 0))))
    of_block = tiling.gates // _gates_per_addition(wires.shape[1])
    apart = _reads_different_rows(_ids(tiling, wires, n_inputs), n_gates).reshape(-1, 1, of_block)
    more = [
        (apart, pl.BlockSpec((1, 1, of_block), lambda b, g: (g, 0, 0), memory_space=pltpu.SMEM)),
        (dy, _gate_spec(tiling)),
    ]
    results = list(
        _launch(kernel, tiling, x, parameter, wires, *more, outputs=outputs, n_spread=2, name=name)
    )
    return results.pop(0) if of_inputs else None, results.pop(0).sum(0) if of_parameter else None


def _blocks(
    x: jax.Array, parameter: jax.Array, wires: jax.Array, device: Device, backward: bool
) -> Blocks:
    tiling = blocks(x, parameter, wires, device, backward)
    assert tiling is not None  # `_gate_blocks.unsupported` has asked
    return tiling


def _launch(
    kernel: Callable[..., None],
    tiling: Blocks,
    x: jax.Array,
    parameter: jax.Array,
    wires: jax.Array,
    *more: tuple[jax.Array, pl.BlockSpec],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    n_spread: int,
    name: str,
) -> tuple[jax.Array, ...]:
    (n_inputs, n_samples), (n_gates, n_slots), places = x.shape, parameter.shape, wires.shape[1]
    steps = pl.cdiv(n_gates, tiling.gates)
    # Rows of 16 bits cannot be read one by one.
    wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    return _call.call(
        kernel,
        # Ids in scalar memory: they are addresses, read one by one.
        _ids(tiling, wires, n_inputs).reshape(steps, 1, tiling.gates * places),
        x.astype(wide),
        parameter.astype(wide),
        *(a for a, _ in more),
        outputs=[shape for shape, _ in outputs],
        name=name,
        grid=(pl.cdiv(n_samples, tiling.samples), steps),
        in_specs=[
            pl.BlockSpec(
                (1, 1, tiling.gates * places), lambda b, g: (g, 0, 0), memory_space=pltpu.SMEM
            ),
            pl.BlockSpec(
                (n_inputs, tiling.samples),
                lambda b, g: (0, b),
                pipeline_mode=pl.Buffered(tiling.buffers),
            ),
            pl.BlockSpec((tiling.gates, n_slots), lambda b, g: (g, 0)),
            *(block for _, block in more),
        ],
        out_specs=[block for _, block in outputs],
        scratch_shapes=[
            # A leading axis for groups of eight gates: rows are stored at any sublane, and tiles
            # are read as whole registers.
            pltpu.VMEM((places, tiling.gates // SUBLANES, SUBLANES, tiling.samples), wide),
            *[pltpu.VMEM((n_slots, tiling.gates, LANES), wide)] * n_spread,
        ],
        compiler_params=pltpu.CompilerParams(
            # Blocks of samples are independent; blocks of gates add to the same cotangents.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=tiling.limit,
        ),
    )


def _ids(tiling: Blocks, wires: jax.Array, n_inputs: int) -> jax.Array:
    """Return the wires' input ids, ``[G, n]``, padded to whole gate blocks."""
    return jnp.pad(clamp_wires(wires, n_inputs), ((0, -len(wires) % tiling.gates), (0, 0)))


def _reads_different_rows(ids: jax.Array, n_gates: int) -> jax.Array:
    """Return 1 for each complete gate group whose wires all read different rows, else 0."""
    together = _gates_per_addition(ids.shape[1])
    rows = ids.reshape(-1, together * ids.shape[1])
    n = rows.shape[1]
    # Compare each pair of wires of a group once, in XLA; the kernel keeps one branch per group.
    equal = (rows[:, :, None] == rows[:, None, :]) & np.tri(n, k=-1, dtype=bool)[None]
    # Padding gates read input 0 and would add to it.
    last = (jnp.arange(len(rows), dtype=jnp.int32) + 1) * together
    return ((last <= n_gates) & ~equal.any((1, 2))).astype(jnp.int32)


def _gate_spec(tiling: Blocks) -> pl.BlockSpec:
    return pl.BlockSpec((tiling.gates, tiling.samples), lambda b, g: (g, b))


# ------------------------------------------------------------------------------------- in kernels
def _read(wires_ref: Any, x_ref: Any, read_ref: Any) -> None:
    """Copy the rows read by wires, to ``[places, gates / 8, 8, samples]``."""
    places, n = read_ref.shape[:2]

    # Eight gates per iteration: they fill the sublanes of one register row.
    def copy(k: jax.Array, _: None) -> None:
        for u in range(SUBLANES):
            for place in range(places):
                row = wires_ref[0, 0, (k * SUBLANES + u) * places + place]
                read_ref[place, k, pl.ds(u, 1), :] = x_ref[pl.ds(row, 1), :]

    jax.lax.fori_loop(0, n, copy, None)


def _add(wires_ref: Any, apart_ref: Any, read_ref: Any, dx_ref: Any, n_gates: Any) -> None:
    """Add each wire's cotangent to its row, for `n_gates` gates in the block."""
    places, n = read_ref.shape[:2]
    together = _gates_per_addition(places)

    def add_all(k: jax.Array, _: None) -> None:
        for group in range(SUBLANES // together):
            gates = range(group * together, (group + 1) * together)
            # Where all rows of a group differ, their reads precede all writes and overlap;
            # otherwise wires that share a row add one after the other.
            apart = apart_ref[0, 0, k * (SUBLANES // together) + group] == 1

            @pl.when(apart)
            def _(gates: range = gates) -> None:
                of = [(row(k, u, place), place, u) for u in gates for place in range(places)]
                sums = [dx_ref[to, :] + read_ref[place, k, pl.ds(u, 1), :] for to, place, u in of]
                for (to, _, _), total in zip(of, sums, strict=True):
                    dx_ref[to, :] = total

            @pl.when(jnp.logical_not(apart))
            def _(gates: range = gates) -> None:
                for u in gates:
                    pl.when(k * SUBLANES + u < n_gates)(functools.partial(add, k, u))

    def row(k: jax.Array, u: int, place: int) -> Any:
        return pl.ds(wires_ref[0, 0, (k * SUBLANES + u) * places + place], 1)

    def add(k: jax.Array, u: int) -> None:
        for place in range(places):
            dx_ref[row(k, u, place), :] += read_ref[place, k, pl.ds(u, 1), :]

    jax.lax.fori_loop(0, n, add_all, None)


def _gates_per_addition(places: int) -> int:
    """Return the number of gates to add at a time, provided their wires read different rows."""
    return next(n for n in (8, 4, 2, 1) if n * places <= _ADDED)


def _clear(ref: Any) -> None:
    """Clear an array in a loop over its second to last axis; a single store would be unrolled."""
    # Eight rows per store; the number of inputs need not be a multiple of 8.
    n, rest = divmod(ref.shape[-2], SUBLANES)
    lead = (slice(None),) * (len(ref.shape) - 2)

    def clear(rows: Any, size: int) -> None:
        ref[(*lead, rows, slice(None))] = jnp.zeros(
            (*ref.shape[:-2], size, ref.shape[-1]), ref.dtype
        )

    def clear_some(k: jax.Array, _: None) -> None:
        clear(pl.ds(pl.multiple_of(k * SUBLANES, SUBLANES), SUBLANES), SUBLANES)

    jax.lax.fori_loop(0, n, clear_some, None)
    if rest:
        clear(pl.ds(n * SUBLANES, rest), rest)


def _over_tiles(tiling: Blocks, visit_tiles: Callable[[jax.Array, list[Any]], None]) -> None:
    """Call a function for every gate tile, several sample tiles at a time."""
    n = tiling.samples // LANES
    # Independent tiles hide the latency of each other; gates with many slots fill the registers by
    # themselves.
    together = min(n, max(_WRITTEN_OUT * 4 // tiling.slots, 1), _WRITTEN_OUT)

    def visit_gates(k: jax.Array, _: None) -> None:
        def visit_samples(c: jax.Array, _: None) -> None:
            first = [pl.multiple_of((c * together + u) * LANES, LANES) for u in range(together)]
            visit_tiles(k, [pl.ds(f, LANES) for f in first])

        jax.lax.fori_loop(0, n // together, visit_samples, None)

    jax.lax.fori_loop(0, tiling.gates // TILE, visit_gates, None)


def _spread(parameter_ref: Any, spread_ref: Any) -> None:
    """Spread each gate's elements over all lanes: ``[gates, K]`` -> ``[K, gates, 128]``."""

    def spread(k: jax.Array, _: None) -> None:
        numbers = parameter_ref[_gates(k), :]
        for slot in range(spread_ref.shape[0]):
            # A broadcast over lanes per gate and block, not per tile of samples.
            spread_ref[slot, _gates(k), :] = jnp.broadcast_to(
                numbers[:, slot : slot + 1], (TILE, LANES)
            )

    jax.lax.fori_loop(0, spread_ref.shape[1] // TILE, spread, None)


def _sum_lanes(wide_ref: Any, sums_ref: Any) -> None:
    """Sum over lanes: ``[K, gates, 128]`` -> ``[1, gates, K]``."""
    n_slots, n_gates, _ = wide_ref.shape

    def add(k: jax.Array, _: None) -> None:
        lane = jax.lax.broadcasted_iota(jnp.int32, (TILE, n_slots), 1)
        # Sums of different slots are placed in different lanes by selects: single lanes cannot be
        # stored.
        sums = jnp.zeros((TILE, n_slots), jnp.float32)
        for slot in range(n_slots):
            total = jnp.sum(wide_ref[slot, _gates(k), :], 1, keepdims=True)
            sums = jnp.where(lane == slot, total, sums)
        sums_ref[0, _gates(k), :] = sums

    jax.lax.fori_loop(0, n_gates // TILE, add, None)


def _gates(k: jax.Array) -> Any:
    # The promise of alignment spares the compiler unaligned accesses.
    return pl.ds(pl.multiple_of(k * TILE, TILE), TILE)


def _spread_values(spread_ref: Any, k: jax.Array) -> list[jax.Array]:
    return [spread_ref[slot, _gates(k), :] for slot in range(spread_ref.shape[0])]


def _tiles(read_ref: Any, k: jax.Array, lanes: Any) -> list[jax.Array]:
    return [
        read_ref[place, pl.ds(2 * k, 2), :, lanes].reshape(TILE, LANES)
        for place in range(read_ref.shape[0])
    ]


def _if_inside(a: jax.Array, first: jax.Array, n_samples: int, block: int) -> jax.Array:
    """Replace samples beyond the batch, if the last block has some, by 0."""
    if n_samples % block == 0:
        return a
    return jnp.where(first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 1) < n_samples, a, 0)

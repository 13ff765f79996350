"""What kernels of gates share: what wires read, computations on it, and cotangents given back to what was read.

Arrays are features first, ``[features, samples]``. A block of samples of all inputs is in vector memory. What the wires of
a block of gates read is first copied beside each other, row by row; everything else is then computed on tiles of gates and
samples, where a number of each gate is one column. The cotangents of what was read take its place, and are added
row by row to those of the inputs, which are in vector memory too: one core adds in the order of the wires, so the sum is
the same at every run, and a list of readers is not needed: it is not read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu._gate_blocks import TILE, Blocks, blocks
from lutjax.kernels._xla import _wires as plain
from lutjax.kernels.registry import Device

# The outputs of a tile of gates: from the numbers of each gate, K times [gates, 1], and what each wire reads, n times
# [gates, samples].
Value = Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]
# Cotangents of the same from that of the outputs.
Gradient = Callable[[Sequence[jax.Array], Sequence[jax.Array], jax.Array], Sequence[jax.Array]]

_SUBLANES = 8  # rows of a register; loops over rows are written out that often


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
    """What gates answer: ``[I, B]``, ``[G, K]``, ``[G, n]`` -> ``[G, B]`` of a dtype. Numbers have 32 bits in `value`."""
    how = _blocks(x, parameter, wires, device, backward=False)

    def kernel(wires_ref: Any, x_ref: Any, parameter_ref: Any, y_ref: Any, read_ref: Any) -> None:
        _read(wires_ref, x_ref, read_ref)

        def tile(k: jax.Array, lanes: Any, _: None) -> None:
            y = value(_columns(parameter_ref, k), _tiles(read_ref, k, lanes))
            y_ref[_gates(k), lanes] = y.astype(y_ref.dtype)

        def gates(k: jax.Array, _: None) -> None:
            _over_lanes(how, lambda lanes, _: tile(k, lanes, _), None)

        jax.lax.fori_loop(0, how.gates // TILE, gates, None)

    (y,) = _launch(
        kernel,
        how,
        x,
        parameter,
        wires,
        outputs=[(jax.ShapeDtypeStruct((len(wires), x.shape[1]), dtype), _of_gates(how))],
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
    """Cotangents of ``[I, B]`` and of ``[G, K]``, float32; None of those whose function is None."""
    how = _blocks(x, parameter, wires, device, backward=True)
    (n_gates, n_slots), (n_inputs, n_samples) = parameter.shape, x.shape
    n_steps = pl.cdiv(n_samples, how.samples)

    def kernel(wires_ref: Any, x_ref: Any, parameter_ref: Any, dy_ref: Any, *refs: Any) -> None:
        *results, read_ref = refs
        dx_ref = results.pop(0) if of_inputs else None
        sums_ref = results.pop(0) if of_parameter else None
        sample_block, gate_block = pl.program_id(0), pl.program_id(1)
        _read(wires_ref, x_ref, read_ref)

        def tile(k: jax.Array, lanes: Any, sums: jax.Array | None) -> jax.Array | None:
            columns, read = _columns(parameter_ref, k), _tiles(read_ref, k, lanes)
            g = dy_ref[_gates(k), lanes].astype(jnp.float32)
            if sums is not None:
                assert of_parameter is not None
                inside = [
                    _if_inside(a, sample_block * how.samples + lanes.start, n_samples, how.samples)
                    for a in (g, *read)
                ]
                sums = sums + _side_by_side(of_parameter(columns, inside[1:], inside[0]), n_slots)
            if of_inputs:
                for place, d in enumerate(of_inputs(columns, read, g)):
                    read_ref[place, pl.ds(2 * k, 2), :, lanes] = d.reshape(2, _SUBLANES, how.lanes)
            return sums

        def gates(k: jax.Array, _: None) -> None:
            sums = jnp.zeros((TILE, n_slots), jnp.float32) if of_parameter else None
            sums = _over_lanes(how, lambda lanes, sums: tile(k, lanes, sums), sums)
            if sums_ref is not None:
                sums_ref[0, _gates(k), :] = sums

        jax.lax.fori_loop(0, how.gates // TILE, gates, None)
        if dx_ref is not None:

            @pl.when(gate_block == 0)
            def _() -> None:
                dx_ref[...] = jnp.zeros_like(dx_ref)

            exist = how.gates
            if n_gates % how.gates:  # what the others hold is no number
                exist = jnp.minimum(how.gates, n_gates - gate_block * how.gates)
            _add(wires_ref, read_ref, dx_ref, exist)

    outputs = []
    if of_inputs:
        dx = jax.ShapeDtypeStruct((n_inputs, n_samples), jnp.float32)
        outputs.append((dx, pl.BlockSpec((n_inputs, how.samples), lambda b, g: (0, b))))
    if of_parameter:
        sums = jax.ShapeDtypeStruct((n_steps, n_gates, n_slots), jnp.float32)
        outputs.append((sums, pl.BlockSpec((1, how.gates, n_slots), lambda b, g: (b, g, 0))))
    results = list(_launch(kernel, how, x, parameter, wires, dy, outputs=outputs, name=name))
    return results.pop(0) if of_inputs else None, results.pop(0).sum(0) if of_parameter else None


def _blocks(
    x: jax.Array, parameter: jax.Array, wires: jax.Array, device: Device, backward: bool
) -> Blocks:
    how = blocks(x, parameter, wires, device, backward)
    assert how is not None  # `_support` has asked
    return how


def _launch(
    kernel: Callable[..., None],
    how: Blocks,
    x: jax.Array,
    parameter: jax.Array,
    wires: jax.Array,
    *of_gates: jax.Array,
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    name: str,
) -> tuple[jax.Array, ...]:
    (n_inputs, n_samples), (n_gates, n_slots), places = x.shape, parameter.shape, wires.shape[1]
    steps = pl.cdiv(n_gates, how.gates)
    ids = jnp.pad(plain.clamped(wires, n_inputs), ((0, steps * how.gates - n_gates), (0, 0)))
    wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32  # rows of 16 bits cannot be read alone
    return _call.call(
        kernel,
        ids.reshape(steps, 1, how.gates * places),
        x.astype(wide),
        parameter.astype(wide),
        *of_gates,
        outputs=[shape for shape, _ in outputs],
        name=name,
        grid=(pl.cdiv(n_samples, how.samples), steps),
        in_specs=[
            pl.BlockSpec((1, 1, how.gates * places), lambda b, g: (g, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(
                (n_inputs, how.samples), lambda b, g: (0, b), pipeline_mode=pl.Buffered(how.buffers)
            ),
            pl.BlockSpec((how.gates, n_slots), lambda b, g: (g, 0)),
            *(_of_gates(how) for _ in of_gates),
        ],
        out_specs=[block for _, block in outputs],
        scratch_shapes=[pltpu.VMEM((places, how.gates // _SUBLANES, _SUBLANES, how.samples), wide)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=how.limit
        ),
    )


def _of_gates(how: Blocks) -> pl.BlockSpec:
    return pl.BlockSpec((how.gates, how.samples), lambda b, g: (g, b))


# ------------------------------------------------------------------------------------- in kernels
def _read(wires_ref: Any, x_ref: Any, read_ref: Any) -> None:
    """Copies the rows that wires read, to ``[places, gates / 8, 8, samples]``."""
    places, n = read_ref.shape[:2]

    def copy(k: jax.Array, _: None) -> None:
        for u in range(_SUBLANES):
            for place in range(places):
                row = wires_ref[0, 0, (k * _SUBLANES + u) * places + place]
                read_ref[place, k, pl.ds(u, 1), :] = x_ref[pl.ds(row, 1), :]

    jax.lax.fori_loop(0, n, copy, None)


def _add(wires_ref: Any, read_ref: Any, dx_ref: Any, n_gates: jax.Array | int) -> None:
    """Adds what each wire of the first gates receives to the row that it read."""
    places = read_ref.shape[0]

    def add(k: jax.Array, u: jax.Array | int) -> None:
        for place in range(places):
            row = pl.ds(wires_ref[0, 0, (k * _SUBLANES + u) * places + place], 1)
            dx_ref[row, :] += read_ref[place, k, pl.ds(u, 1), :]

    def add_all(k: jax.Array, _: None) -> None:
        for u in range(_SUBLANES):
            add(k, u)

    full = n_gates // _SUBLANES
    jax.lax.fori_loop(0, full, add_all, None)
    if not isinstance(n_gates, int):
        jax.lax.fori_loop(0, n_gates % _SUBLANES, lambda u, _: add(full, u), None)


def _over_lanes(how: Blocks, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Calls it for all samples of a block, some at a time."""

    def at(n: jax.Array, carry: Any) -> Any:
        return step(pl.ds(pl.multiple_of(n * how.lanes, how.lanes), how.lanes), carry)

    return jax.lax.fori_loop(0, how.samples // how.lanes, at, carry)


def _gates(k: jax.Array) -> Any:
    return pl.ds(pl.multiple_of(k * TILE, TILE), TILE)


def _columns(parameter_ref: Any, k: jax.Array) -> list[jax.Array]:
    numbers = parameter_ref[_gates(k), :]
    return [numbers[:, n : n + 1] for n in range(numbers.shape[1])]


def _tiles(read_ref: Any, k: jax.Array, lanes: Any) -> list[jax.Array]:
    return [
        read_ref[place, pl.ds(2 * k, 2), :, lanes].reshape(TILE, lanes.size)
        for place in range(read_ref.shape[0])
    ]


def _if_inside(a: jax.Array, first: jax.Array, n_samples: int, block: int) -> jax.Array:
    """0 for samples that do not exist, of which there are some if blocks do not divide them."""
    if n_samples % block == 0:
        return a
    return jnp.where(first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 1) < n_samples, a, 0)


def _side_by_side(columns: Sequence[jax.Array], n: int) -> jax.Array:
    lane = jax.lax.broadcasted_iota(jnp.int32, (TILE, n), 1)
    result = jnp.zeros((TILE, n), jnp.float32)
    for number, column in enumerate(columns):
        result = jnp.where(lane == number, column, result)
    return result

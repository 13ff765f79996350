"""`lutjax.binary_lut` in Triton."""

from typing import Any

import jax
import triton.language as tl

from lutjax.kernels._triton import _rows, _wires, soft_lut
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of


def forward(
    x: jax.Array, table: jax.Array, wires: jax.Array, readers: jax.Array | None, *, device: Device
) -> jax.Array:
    how = launch_of("binary_lut.forward", _wires.sizes(x, wires), device, _forward_rule)
    tile = _wires.Tile(how, x.shape[1], len(wires))
    (y,) = launch(
        _look_up,
        x,
        table,
        wires,
        outputs=[jax.ShapeDtypeStruct((len(wires), x.shape[1]), x.dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        n_slots=table.shape[1],
        PLACES=wires.shape[1],
        **_wires.constants(tile, x, table, wires),
    )
    return y


def backward(
    saved: tuple[Any, ...], dy: jax.Array, needs: tuple[bool, ...], *, device: Device
) -> tuple[jax.Array | None, ...]:
    x, table, wires, readers = saved
    dx, d_table = soft_lut.gradients(x, table, wires, readers, dy, needs, device, binary=True)
    return dx, d_table, None, None


def _forward_rule(sizes: Sizes) -> Launch:
    return _wires.rule(sizes, values=1024)


@kernel
def _look_up(
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
    ACC: tl.constexpr,
):
    gate, exists, part = _wires.place(n_gates, FEATURES)
    slots = table + gate * n_slots
    for block in range(part * BLOCKS, _wires.last_block(part, n_samples, SAMPLES, BLOCKS)):
        sample, _ = _rows.block(SAMPLES, n_samples, block)
        bits = soft_lut.read(x, wires, gate, sample, n_samples, n_inputs, SAMPLES, PLACES, ACC)
        value = tl.load(slots[:, None] + soft_lut.address(bits, PLACES))
        _wires.write(y, gate, exists, sample, value, n_samples)

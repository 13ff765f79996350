"""`lutjax.detect_signs` on TensorCores: values in lanes, one register after the other compared."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lutjax._detection import Detection
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _lanes
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.kernels._xla import detect, detect_signs as plain
from lutjax.kernels.registry import Device

_BLOCK = 2**21  # bytes: at most 31 values


def forward(positions: jax.Array, *, epsilon: float, device: Device) -> Detection:
    batch, n_bits = positions.shape
    if 0 in (batch, n_bits):
        return plain.forward(positions, epsilon=epsilon, device=device)

    def kernel(values_ref: Any, index_ref: Any, flip_ref: Any, margin_ref: Any) -> None:
        deltas = [values_ref[r] for r in range(n_bits)]
        d = detect.closest(deltas, deltas[0].shape, deltas[0].dtype, epsilon)
        index_ref[...], flip_ref[...], margin_ref[...] = d.index, d.flip, d.margin

    grid, of_values, of_detections = _blocks(batch, n_bits)
    shape = (_lanes.groups(batch), LANES)
    outputs = _call.call(
        kernel,
        _lanes.in_lanes(positions.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.int32, jnp.float32)],
        name="detect_signs",
        grid=grid,
        in_specs=[of_values],
        out_specs=[of_detections] * 3,
    )
    index, flip, margin = (a.ravel()[:batch] for a in outputs)
    return Detection(index, flip, margin, n_bits)


def backward(
    saved: tuple[Detection], d_margin: jax.Array, needs: tuple[bool, ...], *, epsilon: float, device: Device
) -> tuple[jax.Array]:
    (d,) = saved
    (batch,) = d_margin.shape
    if 0 in (batch, d.bits):
        return plain.backward(saved, d_margin, needs, epsilon=epsilon, device=device)

    def kernel(flip_ref: Any, d_margin_ref: Any, values_ref: Any) -> None:
        closest = detect.closest_pair(flip_ref[...])
        for r in range(d.bits):
            values_ref[r] = jnp.where(closest == r, d_margin_ref[...], 0)

    grid, of_values, of_detections = _blocks(batch, d.bits)
    (values,) = _call.call(
        kernel,
        _lanes.in_lanes(d.flip[:, None])[0],
        _lanes.in_lanes(d_margin.astype(jnp.float32)[:, None])[0],
        outputs=[jax.ShapeDtypeStruct((d.bits, _lanes.groups(batch), LANES), jnp.float32)],
        name="detect_signs_backward",
        grid=grid,
        in_specs=[of_detections] * 2,
        out_specs=[of_values],
    )
    return (_lanes.batch_first(values, batch),)


def _blocks(batch: int, n_bits: int) -> tuple[tuple[int], pl.BlockSpec, pl.BlockSpec]:
    """The grid, and the blocks of values and of detections."""
    groups = _lanes.block_of(batch, n_bits * LANES * 4, _BLOCK)
    return (
        (pl.cdiv(_lanes.groups(batch), groups),),
        pl.BlockSpec((n_bits, groups, LANES), lambda b: (0, b, 0)),
        pl.BlockSpec((groups, LANES), lambda b: (b, 0)),
    )

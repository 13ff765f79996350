"""`lutjax.detect_signs` on TensorCores.

Formula: index, flip and margin for ``delta[r] = positions[b, r]``; the margin cotangent goes to the
closest value. Work: a step owns a sample block. Layout: samples in lanes, values in leading rows,
so that comparisons are elementwise on full registers. Numerics: float32; nothing is summed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _lanes
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import detect, detect_signs as plain
from lutjax.ops.detect_signs import DetectSigns
from lutjax.values._detection import Detection

_BLOCK = 2**21  # bytes: at most 31 values

SPEC = Declaration(tensorcore_rule())


def forward(call: DetectSigns, *, device: Device) -> Detection:
    assert call.positions is not None
    batch, n_bits = call.positions.shape
    if 0 in (batch, n_bits):
        return plain.forward(call, device=device)

    def kernel(values_ref: Any, index_ref: Any, flip_ref: Any, margin_ref: Any) -> None:
        # The loop over values is written out: at most 31, one per bit of an id.
        deltas = [values_ref[r] for r in range(n_bits)]
        d = detect.detect_closest(deltas, deltas[0].shape, deltas[0].dtype, call.epsilon)
        index_ref[...], flip_ref[...], margin_ref[...] = d.index, d.flip, d.margin

    grid, of_values, of_detections = _blocks(batch, n_bits)
    shape = (_lanes.groups(batch), LANES)
    outputs = _call.call(
        kernel,
        _lanes.in_lanes(call.positions.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.int32, jnp.float32)],
        name="detect_signs",
        grid=grid,
        in_specs=[of_values],
        out_specs=[of_detections] * 3,
    )
    # Lanes of the padding hold detections of zeros.
    index, flip, margin = (a.ravel()[:batch] for a in outputs)
    return Detection(index, flip, margin, n_bits)


def backward(
    call: DetectSigns, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    assert call.flip is not None
    (batch,), n_bits = cotangent.shape, call.n_bits
    if 0 in (batch, n_bits):
        return plain.backward(call, cotangent, needs, device=device)

    def kernel(flip_ref: Any, d_margin_ref: Any, values_ref: Any) -> None:
        # The flip mask names the closest value, so positions are not read again.
        closest = detect.closest_pair(flip_ref[...])
        for r in range(n_bits):
            # Every value is written, so that the output needs no clearing.
            values_ref[r] = jnp.where(closest == r, d_margin_ref[...], 0)

    grid, of_values, of_detections = _blocks(batch, n_bits)
    (values,) = _call.call(
        kernel,
        _lanes.in_lanes(call.flip[:, None])[0],
        _lanes.in_lanes(cotangent.astype(jnp.float32)[:, None])[0],
        outputs=[jax.ShapeDtypeStruct((n_bits, _lanes.groups(batch), LANES), jnp.float32)],
        name="detect_signs_backward",
        grid=grid,
        in_specs=[of_detections] * 2,
        out_specs=[of_values],
    )
    return {"positions": _lanes.batch_first(values, batch)}


def _blocks(batch: int, n_bits: int) -> tuple[tuple[int], pl.BlockSpec, pl.BlockSpec]:
    groups = _lanes.block_of(batch, n_bits * LANES * 4, _BLOCK)
    return (
        (pl.cdiv(_lanes.groups(batch), groups),),
        pl.BlockSpec((n_bits, groups, LANES), lambda b: (0, b, 0)),
        pl.BlockSpec((groups, LANES), lambda b: (b, 0)),
    )

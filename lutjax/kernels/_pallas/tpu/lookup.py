"""`lutjax.lookup` on TensorCores: rows of ones and zeros times the table, on the matrix unit."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas import _call
from lutjax.kernels._xla import lookup as plain
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array, detection: Detection, *, accumulate: FixedPoint | None, device: Device
) -> jax.Array:
    n_detectors, n_rows, n_outputs = weights.shape
    batch = detection.index.shape[0]
    if 0 in (batch, n_detectors):
        return plain.forward(weights, detection, accumulate=accumulate, device=device)
    block = 128
    index = jnp.clip(detection.index, 0, n_rows - 1).T[:, None]
    (y,) = _call.call(
        _forward,
        index,
        weights,
        outputs=[jax.ShapeDtypeStruct((batch, n_outputs), jnp.float32)],
        name="lookup",
        grid=(pl.cdiv(batch, block), n_detectors),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda b, t: (t, 0, b)),
            pl.BlockSpec((1, n_rows, n_outputs), lambda b, t: (t, 0, 0)),
        ],
        out_specs=[pl.BlockSpec((block, n_outputs), lambda b, t: (b, 0))],
    )
    return y.astype(weights.dtype)


def _forward(index_ref: Any, weights_ref: Any, y_ref: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    index = index_ref[0, 0, :]
    row = jax.lax.broadcasted_iota(jnp.int32, (index.shape[0], weights_ref.shape[1]), 1)
    one_hot = (row == index[:, None]).astype(jnp.float32)
    rows = weights_ref[0].astype(jnp.float32)
    y_ref[...] += jnp.dot(one_hot, rows, precision="highest", preferred_element_type=jnp.float32)


backward = plain.backward

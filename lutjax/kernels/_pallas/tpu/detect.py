"""`lutjax.detect` on TensorCores: rows of the inputs, one for each input, read and added to by scalar ids."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _lanes
from lutjax.kernels._pallas.tpu._limits import LANES, params, vmem_budget
from lutjax.kernels._xla import detect as plain
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array,
    anchors: jax.Array,
    *,
    epsilon: float,
    n_inputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> Detection:
    batch = x.shape[0]
    n_detectors, n_pairs, _ = anchors.shape
    if 0 in (batch, n_detectors, n_pairs):
        return plain.forward(
            x, anchors, epsilon=epsilon, n_inputs=n_inputs, accumulate=accumulate, device=device
        )

    def kernel(anchors_ref: Any, x_ref: Any, index_ref: Any, flip_ref: Any, margin_ref: Any) -> None:
        def detector(t: Any, _: None) -> None:
            def end(r: int, side: int) -> jax.Array:
                return x_ref[anchors_ref[0, 0, (t * n_pairs + r) * 2 + side]]

            deltas = [end(r, 0) - end(r, 1) for r in range(n_pairs)]
            d = plain.closest(deltas, deltas[0].shape, deltas[0].dtype, epsilon)
            index_ref[t], flip_ref[t], margin_ref[t] = d.index, d.flip, d.margin

        jax.lax.fori_loop(0, tile.detectors_here(), detector, None)

    tile = _Tile(batch, n_inputs, n_detectors, device)
    shape = (n_detectors, _lanes.groups(batch), LANES)
    outputs = _call.call(
        kernel,
        tile.listed(anchors),
        _lanes.in_lanes(x.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.int32, jnp.float32)],
        name="detect",
        grid=tile.grid,
        in_specs=[tile.of_anchors(n_pairs), tile.of_inputs],
        out_specs=[tile.of_detectors] * 3,
        compiler_params=params(device),
    )
    index, flip, margin = (_lanes.batch_first(a, batch) for a in outputs)
    return Detection(index, flip, margin, n_pairs)


def backward(
    saved: tuple[jax.Array, jax.Array],
    d_margin: jax.Array,
    needs: tuple[bool, ...],
    *,
    epsilon: float,
    n_inputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, None]:
    anchors, flip = saved
    batch = flip.shape[0]
    n_detectors, n_pairs, _ = anchors.shape
    if 0 in (batch, n_detectors, n_pairs):
        return plain.backward(
            saved, d_margin, needs, epsilon=epsilon, n_inputs=n_inputs, accumulate=accumulate, device=device
        )

    def kernel(anchors_ref: Any, flip_ref: Any, d_margin_ref: Any, dx_ref: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            dx_ref[...] = jnp.zeros_like(dx_ref)

        def detector(t: Any, _: None) -> None:
            flip, value = flip_ref[t], d_margin_ref[t]
            for r in range(n_pairs):
                of_pair = jnp.where(flip == np.int32(1 << r), value, 0)
                for side, addend in ((0, of_pair), (1, -of_pair)):
                    at = anchors_ref[0, 0, (t * n_pairs + r) * 2 + side]
                    dx_ref[at] += addend

        jax.lax.fori_loop(0, tile.detectors_here(), detector, None)

    tile = _Tile(batch, n_inputs, n_detectors, device)
    (dx,) = _call.call(
        kernel,
        tile.listed(anchors),
        _lanes.in_lanes(flip),
        _lanes.in_lanes(d_margin.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct((n_inputs, _lanes.groups(batch), LANES), jnp.float32)],
        name="detect_backward",
        grid=tile.grid,
        in_specs=[tile.of_anchors(n_pairs), tile.of_detectors, tile.of_detectors],
        out_specs=[tile.of_inputs],
        compiler_params=params(device),
    )
    return _lanes.batch_first(dx, batch), None


class _Tile:
    """How a call is cut: blocks of samples, and for each of them blocks of detectors."""

    def __init__(self, batch: int, n_inputs: int, n_detectors: int, device: Device):
        budget = vmem_budget(device)
        groups = _lanes.of_detect(batch, n_inputs, device) or _lanes.block_of(batch, 1, 0)
        # Index, flip and margin of each detector, all twice: one block is computed while another one travels.
        fitting = budget // 4 // (groups * LANES * 4 * 6)
        self._n_inputs, self._n_detectors = n_inputs, n_detectors
        self._detectors = max(min(n_detectors, fitting, 128), 1)
        self.grid = (pl.cdiv(_lanes.groups(batch), groups), pl.cdiv(n_detectors, self._detectors))
        self.of_inputs = pl.BlockSpec((n_inputs, groups, LANES), lambda b, t: (0, b, 0))
        self.of_detectors = pl.BlockSpec((self._detectors, groups, LANES), lambda b, t: (t, b, 0))

    def detectors_here(self) -> jax.Array:
        """How many detectors the block has that runs."""
        return jnp.minimum(self._detectors, self._n_detectors - pl.program_id(1) * self._detectors)

    def listed(self, anchors: jax.Array) -> jax.Array:
        """Ids that exist, a row for each block of detectors."""
        ids = jnp.clip(anchors, 0, self._n_inputs - 1)
        ids = jnp.pad(ids, ((0, self.grid[1] * self._detectors - len(ids)), (0, 0), (0, 0)))
        return ids.reshape(self.grid[1], 1, ids.size // self.grid[1])

    def of_anchors(self, n_pairs: int) -> pl.BlockSpec:
        shape = (1, 1, self._detectors * n_pairs * 2)
        return pl.BlockSpec(shape, lambda b, t: (t, 0, 0), memory_space=pltpu.SMEM)

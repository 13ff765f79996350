"""`lutjax.detect` on TensorCores.

Formula for detector ``t``: ``delta[r] = x[anchors[t, r, 0]] - x[anchors[t, r, 1]]`` gives index,
flip and margin as in `lutjax.kernels._xla.detect`; the margin cotangent is added to one end of the
closest pair and subtracted from the other end.

Work: grid (sample blocks, blocks with up to 128 detectors). A step has its samples' inputs in
vector memory and visits its detectors one after the other.

Layout: samples in lanes (`_lanes`), one register row per input, addressed by ids in scalar memory.

Numerics: float32. Detectors add in ascending order, so gradients are equal in every run. Ids are
clamped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _lanes
from lutjax.kernels._pallas.tpu._limits import LANES, params, vmem_budget
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import detect as plain
from lutjax.ops.detect import Detect
from lutjax.values._detection import Detection

SPEC = Declaration(tensorcore_rule(_lanes.unsupported))


def forward(call: Detect, *, device: Device) -> Detection:
    x = call.x
    assert x is not None
    if 0 in (len(x), *call.anchors.shape):
        return plain.forward(call, device=device)
    n_detectors, n_pairs, _ = call.anchors.shape
    blocks = _Blocks(call, len(x), device)

    def kernel(
        anchors_ref: Any, x_ref: Any, index_ref: Any, flip_ref: Any, margin_ref: Any
    ) -> None:
        def detector(t: Any, _: None) -> None:
            def end(r: int, side: int) -> jax.Array:
                # A leading index is an address: any id at run time.
                return x_ref[anchors_ref[0, 0, (t * n_pairs + r) * 2 + side]]

            deltas = [end(r, 0) - end(r, 1) for r in range(n_pairs)]
            d = plain.detect_closest(deltas, deltas[0].shape, deltas[0].dtype, call.epsilon)
            index_ref[t], flip_ref[t], margin_ref[t] = d.index, d.flip, d.margin

        jax.lax.fori_loop(0, blocks.detectors_here(), detector, None)

    shape = (n_detectors, _lanes.groups(len(x)), LANES)
    outputs = _call.call(
        kernel,
        blocks.anchors,
        _lanes.in_lanes(x.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct(shape, d) for d in (jnp.int32, jnp.int32, jnp.float32)],
        name="detect",
        grid=blocks.grid,
        in_specs=[blocks.of_anchors, blocks.of_inputs],
        out_specs=[blocks.split_detectors] * 3,
        compiler_params=params(device),
    )
    index, flip, margin = (_lanes.batch_first(a, len(x)) for a in outputs)
    return Detection(index, flip, margin, n_pairs)


def backward(
    call: Detect, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    assert call.flip is not None
    if 0 in (len(cotangent), *call.anchors.shape):
        return plain.backward(call, cotangent, needs, device=device)
    batch, n_pairs = len(cotangent), call.anchors.shape[1]
    blocks = _Blocks(call, batch, device)

    def kernel(anchors_ref: Any, flip_ref: Any, d_margin_ref: Any, dx_ref: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            # Blocks of detectors are the inner axis and add to the same inputs.
            dx_ref[...] = jnp.zeros_like(dx_ref)

        def detector(t: Any, _: None) -> None:
            # Flip masks are saved by the forward pass, so inputs are not compared again.
            flip, value = flip_ref[t], d_margin_ref[t]
            for r in range(n_pairs):
                # The closest pair differs by sample, so each pair adds a masked row: there is no
                # scatter by lane.
                of_pair = jnp.where(flip == np.int32(1 << r), value, 0)
                for side, addend in ((0, of_pair), (1, -of_pair)):
                    at = anchors_ref[0, 0, (t * n_pairs + r) * 2 + side]
                    dx_ref[at] += addend

        jax.lax.fori_loop(0, blocks.detectors_here(), detector, None)

    (dx,) = _call.call(
        kernel,
        blocks.anchors,
        # Padding lanes have flip 0, which is no pair: they add nothing.
        _lanes.in_lanes(call.flip),
        _lanes.in_lanes(cotangent.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct((call.n_inputs, _lanes.groups(batch), LANES), jnp.float32)],
        name="detect_backward",
        grid=blocks.grid,
        in_specs=[blocks.of_anchors, blocks.split_detectors, blocks.split_detectors],
        out_specs=[blocks.of_inputs],
        compiler_params=params(device),
    )
    return {"x": _lanes.batch_first(dx, batch)}


class _Blocks:
    """Grid and blocks for a call: sample blocks, each with detector blocks.

    Attributes:
      grid: numbers of sample and detector blocks. anchors: clamped ids, a row per detector block.
      of_inputs, of_detectors, of_anchors: block specs.
    """

    def __init__(self, call: Detect, batch: int, device: Device):
        self._n_detectors, n_pairs, _ = call.anchors.shape
        groups = _lanes.detect_groups(batch, call.n_inputs, device) or _lanes.block_of(batch, 1, 0)
        # Index, flip and margin of each detector, all twice: one block is computed while another
        # one travels.
        fitting = vmem_budget(device) // 4 // (groups * LANES * 4 * 6)
        self._detectors = size = max(min(self._n_detectors, fitting, 128), 1)
        n_blocks = pl.cdiv(self._n_detectors, size)
        self.grid = (pl.cdiv(_lanes.groups(batch), groups), n_blocks)
        ids = jnp.clip(call.anchors, 0, call.n_inputs - 1)
        # Padding detectors are never visited, see `detectors_here`.
        ids = jnp.pad(ids, ((0, n_blocks * size - len(ids)), (0, 0), (0, 0)))
        self.anchors = ids.reshape(n_blocks, 1, size * n_pairs * 2)
        self.of_inputs = pl.BlockSpec((call.n_inputs, groups, LANES), lambda b, t: (0, b, 0))
        self.split_detectors = pl.BlockSpec((size, groups, LANES), lambda b, t: (t, b, 0))
        of_block = (1, 1, size * n_pairs * 2)
        # Scalar memory is small: it holds the anchors of one block of detectors.
        self.of_anchors = pl.BlockSpec(of_block, lambda b, t: (t, 0, 0), memory_space=pltpu.SMEM)

    def detectors_here(self) -> jax.Array:
        """Return the number of detectors in this grid step's block."""
        return jnp.minimum(self._detectors, self._n_detectors - pl.program_id(1) * self._detectors)

"""Updates after `lutjax.lut_pair_attention` on TensorCores: rows are counted, and move in the table's own memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import RowRule, RowState
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu._limits import params
from lutjax.kernels._pallas.tpu.lut_pair_attention import Pairs, Step, count_rows, dot
from lutjax.kernels._xla import lut_pair_attention_update as plain
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    state: RowState,
    rate: jax.Array,
    factor: jax.Array | None,
    dy: jax.Array,
    x: jax.Array,
    keys: jax.Array,
    anchors: jax.Array,
    positions: jax.Array | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    interleave: bool,
    window: int | None,
    epsilon: float,
    rule: RowRule,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, RowState]:
    pairs = Pairs(
        x, keys, weights, anchors, positions, start, query_segments, key_segments,
        interleave=interleave, window=window, epsilon=epsilon, device=device,
    )  # fmt: skip
    if pairs.empty:
        return plain.forward(
            weights, state, rate, factor, dy, x, keys, anchors, positions, start, query_segments, key_segments,
            interleave=interleave, window=window, epsilon=epsilon, rule=rule, accumulate=accumulate, device=device,
        )  # fmt: skip
    n_detectors, n_rows, n_outputs = weights.shape
    shifts = pairs.shifts

    def kernel(*refs: Any) -> None:
        inputs, (scales, weights_ref, dy_ref, new_ref, counts, total, *touched) = pairs.split(refs)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            for ref in (total, *touched):
                ref[...] = jnp.zeros_like(ref)

        counts[...] = jnp.zeros_like(counts)

        def count(steps: list[Step], _: None) -> None:
            count_rows(counts, steps)

        pairs.for_each_shift(inputs, count, None)
        total[...] += dot(counts[...], dy_ref[...], contract_lanes=True)
        for ref in touched:
            ref[...] += jnp.sum(counts[...], 1, keepdims=True)

        @pl.when(pl.program_id(1) == shifts.n_blocks - 1)
        def _() -> None:
            rows = weights_ref[0].astype(jnp.float32)
            moved = rows - scales[0] * total[...]
            for ref in touched:
                moved = jnp.where(ref[...] > 0, moved - scales[1] * rows, rows)
            new_ref[0] = moved.astype(new_ref.dtype)

    rate = rate.astype(jnp.float32)
    scales = jnp.stack(
        [rate if factor is None else rate * factor.astype(jnp.float32), rate * rule.weight_decay]
    )
    table = pl.BlockSpec((1, n_rows, n_outputs), lambda t, b: (t, 0, 0))
    # Only decay moves a row whose gradient is zero, and only if it was read.
    touched = [pltpu.VMEM((n_rows, 1), jnp.float32)] if rule.weight_decay else []
    (new,) = _call.call(
        kernel,
        *pairs.inputs,
        scales,
        weights,
        shifts.in_lanes(jnp.moveaxis(dy.astype(jnp.float32), -1, 0)),
        outputs=[jax.ShapeDtypeStruct(weights.shape, weights.dtype)],
        name="lut_pair_attention_update",
        grid=(n_detectors, shifts.n_blocks),
        in_specs=[
            *pairs.blocks(lambda t, b: (t, b)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            table,
            pl.BlockSpec((n_outputs, shifts.lanes), lambda t, b: (0, b)),
        ],
        out_specs=[table],
        scratch_shapes=[
            pltpu.VMEM((n_rows, shifts.lanes), jnp.float32),
            pltpu.VMEM((n_rows, n_outputs), jnp.float32),
            *touched,
        ],
        input_output_aliases={len(pairs.inputs) + 1: 0},
        compiler_params=params(device),
    )
    return new, state

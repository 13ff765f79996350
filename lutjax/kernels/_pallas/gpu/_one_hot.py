"""Table gradients for small tables: one-hot matrices times cotangents on tensor cores.

Formula: ``sums[t, r] = sum_b [index[t, b] == r] * dy[b]`` for ``index [T, n]``, ``dy [n, O]``.

Work: grid (128-output blocks, 4-table blocks, sample chunks). A warpgroup accumulates two 64-row
tables; a step is 64 samples. Larger tables are split into 64-row pieces. XLA adds the sample
chunks.

Layout: the one-hot matrix is built in registers as the first wgmma operand. Cotangents are stored
in shared memory as 8 x 64 bfloat16 tiles with a 128-byte swizzle, as wgmma requires for its second
operand. Accumulators stay in registers for all steps.

Numerics: tensor cores multiply bfloat16 and accumulate float32. A float32 cotangent is the exact
sum of three bfloat16 terms, so products are exact (tf32 would drop 13 bits). Tensor cores truncate
sums where other units round, so errors add up: a chunk has at most `_LONGEST` samples, and chunks
are added with rounding. No atomics: results are equal in every run. Ids are clamped. An infinite
cotangent makes all rows NaN, because 0 times infinity is NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lutjax.kernels._pallas.gpu import _mosaic_launch
from lutjax.kernels._xla._row_gathers import terms

_ROWS = 64  # of a product of tensor cores
_OUTPUTS = 128
_SAMPLES = 64  # of a step
_EACH = 2  # products of a warpgroup: more reuse of the cotangents, which come from the L2 cache
_TABLES = _EACH * _mosaic_launch.WARPGROUPS
_STAGES = 4
_PROGRAMS = 132  # that run at the same time on an H100 or H200
_LONGEST = 2**13  # samples that a program sums over
# Layout of the second operand of wgmma in shared memory.
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def add_rows(index: jax.Array, dy: jax.Array, n_rows: int) -> jax.Array:
    """Return the table gradient in float32: ``[T, n]``, ``[n, O]`` -> ``[T, R, O]``.

    An infinite cotangent makes NaN of every row, where a sum over readers affects only the accessed
    rows.
    """
    n_detectors, n_samples = index.shape
    n_outputs = dy.shape[1]
    # Split each table into chunks of 64 rows; ids outside a chunk add nothing to it.
    pieces = -(-n_rows // _ROWS)
    first = _ROWS * jnp.arange(pieces, dtype=index.dtype)
    # Ids relative to the chunk: ids of other chunks are outside of [0, 64) and match no row.
    index = jnp.clip(index, 0, n_rows - 1)[:, None] - first[None, :, None]
    n_tables = -(-n_detectors * pieces // _TABLES) * _TABLES
    all_outputs = -(-n_outputs // _OUTPUTS) * _OUTPUTS
    tiles = n_tables // _TABLES * (all_outputs // _OUTPUTS)
    n_steps = -(-n_samples // _SAMPLES)
    # Enough parts to occupy all multiprocessors, and for the limit of samples per sum.
    parts = min(max(_PROGRAMS // tiles, -(-n_samples // _LONGEST)), n_steps)
    n_steps = -(-n_steps // parts)
    index = index.reshape(n_detectors * pieces, n_samples)
    # -1 matches no row: padding adds nothing.
    index = _mosaic_launch.pad_to(index, n_tables, parts * n_steps * _SAMPLES, value=-1)
    dy = _mosaic_launch.pad_to(dy, parts * n_steps * _SAMPLES, all_outputs)
    (sums,) = _mosaic_launch.launch(
        lambda *references: _kernel(*references, n_steps=n_steps),
        index,
        *terms(dy),
        outputs=[jax.ShapeDtypeStruct((parts, n_tables, _ROWS, all_outputs), jnp.float32)],
        name="lookup_table",
        grid={"outputs": all_outputs // _OUTPUTS, "tables": n_tables // _TABLES, "parts": parts},
    )
    tables = jnp.sum(sums, 0)[: n_detectors * pieces].reshape(
        n_detectors, pieces * _ROWS, all_outputs
    )
    return tables[:, :n_rows, :n_outputs]


def _kernel(index: Any, *references: Any, n_steps: int) -> None:
    *terms, sums = references
    outputs, tables, part, warpgroup = (
        lax.axis_index(a) for a in ("outputs", "tables", "parts", "warpgroup")
    )

    def step(_: Any, index: Any, *blocks: Any) -> Any:
        *terms, totals = blocks
        for i, total in enumerate(totals):
            # Ids vary along the contracted axis, rows along the other: the matrix is transposed in
            # place, without a copy.
            ids = lax.broadcast_in_dim(index[warpgroup * _EACH + i], (_ROWS, _SAMPLES), (1,))
            row = plgpu.broadcasted_iota(jnp.int32, (_ROWS, _SAMPLES), 0)
            one_hot = jnp.where(ids == row, 1.0, 0.0).astype(jnp.bfloat16)
            # One accumulator for all terms: their sum is the float32 product.
            for term in terms:
                plgpu.wgmma(total, one_hot, term)
        # The pipeline frees the blocks after the step, so their products must be complete.
        plgpu.wgmma_wait(0)
        return totals

    def compute_context(run: Any) -> None:
        def with_totals(*totals: Any) -> None:
            run(totals)
            for i, total in enumerate(totals):
                table = tables * _TABLES + warpgroup * _EACH + i
                sums[part, table, :, pl.ds(outputs * _OUTPUTS, _OUTPUTS)] = total[...]

        # Accumulators are allocated around the pipeline, not per step.
        pl.run_scoped(with_totals, *[plgpu.ACC((_ROWS, _OUTPUTS), jnp.float32)] * _EACH)

    ids = plgpu.BlockSpec(
        (_TABLES, _SAMPLES), lambda k: (tables, part * n_steps + k), memory_space=plgpu.SMEM
    )
    cotangents = plgpu.BlockSpec(
        (_SAMPLES, _OUTPUTS),
        lambda k: (part * n_steps + k, outputs),
        transforms=_TRANSFORMS,
        memory_space=plgpu.SMEM,
    )
    _mosaic_launch.pipeline(
        step,
        compute_context,
        index,
        *terms,
        blocks=[ids, *[cotangents] * len(terms)],
        steps=n_steps,
        stages=_STAGES,
    )

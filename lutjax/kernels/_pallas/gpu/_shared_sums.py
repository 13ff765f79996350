"""Integer table gradients for lookups, summed in shared memory.

Formula: ``sums[t, r] = sum_b [index[t, b] == r] * addends[b]`` in int32.

Work: grid (tables, 8-output blocks, sample chunks). A program is one warpgroup and owns eight table
columns and a sample chunk; a step adds `_SAMPLES` samples, `_TOGETHER` elements per thread. XLA
adds the chunks.

Layout: the columns are stored in shared memory as ``[rows, 8]``. Eight neighboring threads read one
sample's eight outputs: 32 bytes, the size of a memory sector.

Numerics: integers, so atomic additions may run in any order, and results are equal in every run.
Ids exist (the caller clamps them). The hardware adds integers to shared memory in one instruction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from lutjax.kernels._pallas.gpu import _mosaic_launch, _mosaic_values as mlir

_THREADS = _mosaic_launch.THREADS
_COLUMNS = 8  # of a program: 32 bytes, what memory is read by
_TOGETHER = 16  # numbers that a thread reads at the same time
_SAMPLES = _THREADS * _TOGETHER // _COLUMNS  # of a step
_PROGRAMS = 264  # two for each processor of an H100 or H200


def add_rows(index: jax.Array, addends: jax.Array, n_rows: int) -> jax.Array:
    """Return int32 table gradients: ``[T, n]``, ``[n, O]`` -> ``[T, R, O]``.

    The row ids in `index` must exist.
    """
    n_detectors, n_samples = index.shape
    n_outputs = addends.shape[1]
    n_blocks = -(-n_outputs // _COLUMNS)
    n_steps = -(-n_samples // _SAMPLES)
    # Few tables and outputs leave multiprocessors idle unless samples are split.
    parts = min(max(_PROGRAMS // (n_detectors * n_blocks), 1), n_steps)
    n_steps = -(-n_steps // parts)
    # Samples beyond the last add 0 to the first row.
    index = _mosaic_launch.pad_to(index, parts * n_steps * _SAMPLES)
    addends = _mosaic_launch.pad_to(addends, index.shape[1], n_blocks * _COLUMNS)
    # Whole elements for every thread when the columns are cleared and written.
    size = -(-n_rows * _COLUMNS // _THREADS) * _THREADS

    def kernel(index: Any, addends: Any, sums: Any) -> None:
        t, block, part = (lax.axis_index(name) for name in ("tables", "outputs", "parts"))

        def with_table(table: Any) -> None:
            layout = mlir.layout_of_all(size)
            # Shared memory starts undefined. The commit below makes the zeros visible to all
            # threads before any of them adds.
            table[...] = plgpu.layout_cast(jnp.zeros((size,), jnp.int32), layout)
            plgpu.commit_smem()

            @pl.loop(0, n_steps)
            def _(step: jax.Array) -> None:
                first = (part * n_steps + step) * _SAMPLES
                here = (
                    index.at[t, pl.ds(first, _SAMPLES)],
                    addends.at[pl.ds(first, _SAMPLES)],
                    table,
                )
                _add(*here, block * _COLUMNS + mlir.iota(0, _TOGETHER) % _COLUMNS)

            plgpu.commit_smem()
            # The commit above orders the additions of all threads before this read.
            sums[part, t, block] = _mosaic_launch.load(table, layout)

        pl.run_scoped(with_table, plgpu.SMEM((size,), jnp.int32), collective_axes="warpgroup")

    (sums,) = _mosaic_launch.launch(
        kernel,
        index,
        addends,
        outputs=[jax.ShapeDtypeStruct((parts, n_detectors, n_blocks, size), jnp.int32)],
        name="lookup_integers",
        grid={"tables": n_detectors, "outputs": n_blocks, "parts": parts},
        by_lanes=True,
        warpgroups=1,
    )
    # int32 also under x64, where jnp.sum would widen.
    tables = jnp.sum(sums[..., : n_rows * _COLUMNS], 0, dtype=jnp.int32)
    tables = tables.reshape(n_detectors, n_blocks, n_rows, _COLUMNS)
    return jnp.moveaxis(tables, 1, 2).reshape(n_detectors, n_rows, n_blocks * _COLUMNS)[
        ..., :n_outputs
    ]


def _add(index: Any, addends: Any, table: Any, columns: jax.Array) -> None:
    """Add one step's elements to their rows.

    `columns` contains the output id for each of a thread's elements.
    """

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, mlir.one_each(_TOGETHER)))
    def add(_: Any, index: Any, addends: Any, table: Any, columns: Any) -> None:
        base, read = mlir.address(table), []
        for place, register in enumerate(columns.registers.flat):
            column = mlir.only_element(register)
            sample = arith.divui(mlir.thread(), mlir.integer(_COLUMNS))
            sample = arith.addi(sample, mlir.integer(place * (_THREADS // _COLUMNS)))
            read.append(
                (
                    column,
                    mlir.load_element(index, sample),
                    mlir.load_element(addends, sample, column),
                )
            )
        # All loads are issued before the first addition, so that their latencies overlap.
        for column, row, value in read:
            own = arith.remui(column, mlir.integer(_COLUMNS))
            cell = arith.addi(arith.muli(row, mlir.integer(_COLUMNS)), own)
            mlir.add_in_shared_memory(base, cell, value)

    add(index, addends, table, columns)

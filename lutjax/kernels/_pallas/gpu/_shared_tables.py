"""Row sums and margin products for lookups with small tables in shared memory.

Formula for tables ``weights [T, R, O]``, ids ``index [T, n]``::

    sum_rows:     y[b] = sum_t weights[t, index[t, b]]
    differences:  d[b, t] = <dy[b], weights[t, index[t, b]] - weights[t, other[t, b]]>

Work: grid (blocks with 128 or 256 outputs, blocks with 128 samples). A program visits the tables
one after the other while the next ones are copied; each of its two warpgroups handles 64 samples
and reads whole rows.

Layout: one table block ``[R, width]`` per pipeline stage in shared memory; a row is contiguous, so
a warpgroup reads it without bank conflicts. Sums (or cotangents) for 64 samples stay in registers.
Four 8-bit ids are packed in a word, because reading an id costs as much as a quarter row.

Numerics: float32, tables in ascending order, no atomics: results are equal in every run. Rows are
subtracted before the product. Ids are clamped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from lutjax.kernels._pallas.gpu import _mosaic_launch, _mosaic_values as mlir
from lutjax.kernels._pallas.gpu._rules import MAX_ROWS

_SAMPLES = 64  # of a warpgroup
_OF_PROGRAM = _SAMPLES * _mosaic_launch.WARPGROUPS
_LANES = 32
_PACKED = 4  # ids in a word
_BITS = 32 // _PACKED
_STAGE_BYTES = 2**16  # of one table at most
_STAGES = 3
assert MAX_ROWS <= 2**_BITS


def sum_rows(weights: jax.Array, index: jax.Array) -> jax.Array:
    """Sum the addressed rows in float32: ``[T, R, O]``, ``[T, n]`` -> ``[n, O]``."""
    n_samples, n_outputs = index.shape[1], weights.shape[2]
    width, weights, (words,) = _pad_tables(weights, index)
    n_detectors, n_rows, _ = weights.shape

    def kernel(words: Any, weights: Any, y: Any) -> None:
        first, outputs = _locate_block(width)

        def step(
            _: Any, words: Any, table: Any, sums: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, ...]:
            # All reads precede the additions: the loads of 64 rows overlap.
            rows = [table[0, row].astype(jnp.float32) for row in _ids(words, 0, _SAMPLES)]
            return tuple(total + row for total, row in zip(sums, rows, strict=True))

        def compute_context(run: Any) -> None:
            layout = plgpu.Layout.WG_STRIDED((width,), width // _mosaic_launch.THREADS)
            zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
            # The sums are the carry of the pipeline: 64 arrays of one or two registers per thread.
            for i, total in enumerate(run((zero,) * _SAMPLES)):
                y[first + i, outputs] = total

        _mosaic_launch.pipeline(
            step,
            compute_context,
            words,
            weights,
            blocks=[_words_block(), _table_block(n_rows, width)],
            steps=n_detectors,
            stages=_STAGES,
        )

    n_words, all_outputs = words.shape[1], weights.shape[2]
    (y,) = _mosaic_launch.launch(
        kernel,
        words,
        weights,
        outputs=[jax.ShapeDtypeStruct((n_words * _PACKED, all_outputs), jnp.float32)],
        name="lookup",
        grid={"outputs": all_outputs // width, "samples": n_words * _PACKED // _OF_PROGRAM},
        by_lanes=True,
    )
    return y[:n_samples, :n_outputs]


def differences(weights: jax.Array, index: jax.Array, other: jax.Array, dy: jax.Array) -> jax.Array:
    """Return ``<dy, row - other row>``, ``[n, T]``, for ids ``[T, n]`` and ``dy [n, O]``."""
    n_samples = index.shape[1]
    width, weights, (words, others) = _pad_tables(weights, index, other)
    n_detectors, n_rows, n_outputs = weights.shape
    n_words = words.shape[1]
    n_groups = n_words * _PACKED // _LANES
    dy = _mosaic_launch.pad_to(dy.astype(jnp.float32), n_words * _PACKED, n_outputs)

    def kernel(words: Any, others: Any, weights: Any, dy: Any, sums: Any) -> None:
        first, outputs = _locate_block(width)

        def step(number: Any, words: Any, others: Any, table: Any, dy: Any) -> Any:
            # 32 samples at a time, as many as the exchange below sums over 32 lanes.
            for group in range(_SAMPLES // _LANES):
                at = group * _LANES
                pairs = zip(_ids(words, at, _LANES), _ids(others, at, _LANES), strict=True)
                products = [
                    (table[0, row].astype(jnp.float32) - table[0, o].astype(jnp.float32))
                    * dy[at + i]
                    for i, (row, o) in enumerate(pairs)
                ]
                sums[lax.axis_index("outputs"), first // _LANES + group, number[0]] = (
                    _sums_of_warps(products)
                )
            return dy

        def compute_context(run: Any) -> None:
            run(tuple(dy[first + i, outputs] for i in range(_SAMPLES)))

        _mosaic_launch.pipeline(
            step,
            compute_context,
            words,
            others,
            weights,
            blocks=[_words_block(), _words_block(), _table_block(n_rows, width)],
            steps=n_detectors,
            stages=_STAGES,
        )

    n_blocks, n_warps = n_outputs // width, _mosaic_launch.THREADS // _LANES
    (sums,) = _mosaic_launch.launch(
        kernel,
        words,
        others,
        weights,
        dy,
        outputs=[
            jax.ShapeDtypeStruct(
                (n_blocks, n_groups, n_detectors, _mosaic_launch.THREADS), jnp.float32
            )
        ],
        name="lookup_margins",
        grid={"outputs": n_blocks, "samples": n_words * _PACKED // _OF_PROGRAM},
        by_lanes=True,
    )
    # Kernels write one part per warp and block of outputs; XLA adds them in a fixed order, so no
    # atomics are needed.
    sums = jnp.sum(sums.reshape(n_blocks, n_groups, n_detectors, n_warps, _LANES), (0, 3))
    return jnp.swapaxes(sums, 1, 2).reshape(n_groups * _LANES, n_detectors)[:n_samples]


def _pad_tables(weights: jax.Array, *index: jax.Array) -> tuple[int, jax.Array, list[jax.Array]]:
    """Return the output block width, padded tables, and packed padded ids."""
    _, n_rows, n_outputs = weights.shape
    two = 2 * _mosaic_launch.THREADS
    fits = n_rows * two * weights.dtype.itemsize <= _STAGE_BYTES
    # 256 outputs read two elements per instruction, unless a table then exceeds a stage or half of
    # the block would be padding.
    width = two if fits and -n_outputs % two < _mosaic_launch.THREADS else _mosaic_launch.THREADS
    weights = _mosaic_launch.pad_to(weights, -(-n_outputs // width) * width)
    n = -(-index[0].shape[1] // _OF_PROGRAM) * _OF_PROGRAM
    words = []
    for ids in index:
        # Padding samples read row 0, and their results are cut off.
        by_word = _mosaic_launch.pad_to(jnp.clip(ids, 0, n_rows - 1), n).reshape(
            len(ids), n // _PACKED, _PACKED
        )
        shifted = [by_word[..., i] << (_BITS * i) for i in range(_PACKED)]
        words.append(shifted[0] | shifted[1] | shifted[2] | shifted[3])
    return width, weights, words


# ------------------------------------------------------------------------------------- in kernels
def _words_block() -> plgpu.BlockSpec:
    return plgpu.BlockSpec(
        (1, _OF_PROGRAM // _PACKED),
        lambda t: (t, lax.axis_index("samples")),
        memory_space=plgpu.SMEM,
    )


def _table_block(n_rows: int, width: int) -> plgpu.BlockSpec:
    return plgpu.BlockSpec(
        (1, n_rows, width), lambda t: (t, 0, lax.axis_index("outputs")), memory_space=plgpu.SMEM
    )


def _locate_block(width: int) -> tuple[Any, Any]:
    """Return this warpgroup's first sample and output slice."""
    group = lax.axis_index("samples") * _mosaic_launch.WARPGROUPS + lax.axis_index("warpgroup")
    return group * _SAMPLES, pl.ds(lax.axis_index("outputs") * width, width)


def _ids(words: Any, first: int, count: int) -> list[jax.Array]:
    """Unpack this warpgroup's sample ids from the program's words."""
    start = lax.axis_index("warpgroup") * (_SAMPLES // _PACKED) + first // _PACKED
    ids = []
    for i in range(count // _PACKED):
        # All threads read the same word: a broadcast from shared memory.
        word = words[0, start + i]
        ids += [lax.shift_right_logical(word, _BITS * j) & (2**_BITS - 1) for j in range(_PACKED)]
    return ids


def _sums_of_warps(arrays: list[jax.Array]) -> jax.Array:
    """Sum 32 arrays over each warp: lane ``l`` receives the sum of array ``l``, ``[128]``.

    Five rounds halve the number of arrays: 31 exchanges in total, compared with 160 for 32 separate
    sums.
    """
    width = arrays[0].shape[0]
    layout = plgpu.Layout.WG_STRIDED((width,), width // _mosaic_launch.THREADS)
    of_lanes = plgpu.Layout.WG_STRIDED((_mosaic_launch.THREADS,), 1)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * _LANES,
        return_type=plgpu.ShapeDtypeStruct((_mosaic_launch.THREADS,), jnp.float32, layout=of_lanes),
    )
    def exchange(_: Any, *arrays: Any) -> Any:
        total = mlir.sums_over_lanes([_sum_of_thread(a) for a in arrays])
        register = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), total)
        return mosaic.FragmentedArray(
            _registers=np.array([register], dtype=object),
            _layout=mosaic.WGStridedFragLayout((_mosaic_launch.THREADS,), 1),
            _is_signed=None,
        )

    total: jax.Array = exchange(*arrays)
    return total


def _sum_of_thread(array: Any) -> Any:
    # Elements of a thread first, without communication; then the exchange over lanes.
    elements = [
        mlir.element(r, i)
        for r in array.registers.flat
        for i in range(ir.VectorType(r.type).shape[0])
    ]
    total = elements[0]
    for e in elements[1:]:
        total = arith.addf(total, e)
    return total

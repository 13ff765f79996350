"""Row counts per attention query, as histograms in shared memory.

Formula for detector ``t``, query ``j`` and row ``r`` under the query's id::

    counts[t, j, r] = number of counted earlier keys i
                      with (key id of i | position id of distance) == r

A key counts if ``low <= i < high`` (causality and window) and its segment is the query's.

Work: grid (detectors, samples, blocks with 4 queries). A program is one warpgroup that handles one
query at a time; each thread handles one pair, and adds 1 at its pair's row id. A step visits up to
512 keys.

Layout: each query's histogram resides in shared memory; keys are read coalesced. Positions are
stored backwards, by ``n_queries + key - query``, so that adjacent keys read adjacent positions.

Numerics: integers, so atomic additions may run in any order. Ids are clamped.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas.gpu import _mosaic_launch, _mosaic_values as mlir
from lutjax.kernels._triton._detected_pairs import DetectedPairs
from lutjax.kernels._triton._histograms import Counter, dtype_of_counts

_QUERIES = 4  # of a program, one after the other
_KEYS = 512  # of a step
_ONE = plgpu.Layout.WG_STRIDED


def _count(pairs: DetectedPairs, first: jax.Array, group: int, device: Device) -> jax.Array:
    """Count each query's row reads: ``[detectors of a group, queries, rows per query id]``."""
    n_samples, n_queries = pairs.queries
    n_keys = pairs.key.shape[2]
    n_cells = 1 << pairs.query_shift
    # Every thread clears and writes at least one element.
    n_counts = max(n_cells, _mosaic_launch.THREADS)
    step = min(_KEYS, _mosaic_launch.THREADS * -(-n_keys // _mosaic_launch.THREADS))

    start = jnp.zeros((), jnp.int32) if pairs.start is None else pairs.start.astype(jnp.int32)
    place = jnp.arange(n_queries, dtype=jnp.int32) + start
    low = jnp.zeros_like(place) if pairs.window is None else place - pairs.window
    # First and last key of each query, computed once by XLA.
    bounds = jnp.clip(jnp.stack([low, place]), 0, n_keys)

    def pad_keys(a: jax.Array) -> jax.Array:
        # A step begins at any key, so its last one reads up to a step behind the keys.
        return _mosaic_launch.pad_to(a, a.shape[-1] + step)

    key = pad_keys(
        _clamp_bits(
            lax.dynamic_slice_in_dim(pairs.key, first, group), pairs.key_shift, pairs.query_shift
        )
    )
    inputs = [bounds, key]
    has_distances = pairs.position is not None and pairs.position.shape[1] > 0
    if pairs.position is not None and has_distances:
        # Backwards: keys side by side have distances side by side.
        distance = start + (n_queries - 2) - jnp.arange(n_queries + n_keys, dtype=jnp.int32)
        shared = len(pairs.position) == 1
        position = (
            pairs.position if shared else lax.dynamic_slice_in_dim(pairs.position, first, group)
        )
        distance = jnp.clip(distance, 0, position.shape[1] - 1)
        inputs.append(
            pad_keys(_clamp_bits(jnp.take(position, distance, axis=1), 0, pairs.key_shift))
        )
    of_queries, of_keys = pairs.segments
    if of_queries is not None and of_keys is not None:
        inputs += [of_queries, pad_keys(of_keys)]

    def kernel(bounds: Any, key: Any, *references: Any) -> None:
        *others, counts = references
        position = others.pop(0) if has_distances else None
        t, b = lax.axis_index("detectors"), lax.axis_index("samples")
        # Late queries have the most keys: they start first, so that the last programs to finish are
        # short.
        block = n_blocks - 1 - lax.axis_index("queries")
        of_table = 0 if position is None or position.shape[0] == 1 else t

        def one(table: Any, j: jax.Array) -> None:
            low, high = bounds[0, j], bounds[1, j]
            own = others[0][b, j] if others else None
            layout = _ONE((n_counts,), n_counts // _mosaic_launch.THREADS)
            # The table still holds the counts of the previous query.
            table[...] = plgpu.layout_cast(jnp.zeros((n_counts,), jnp.int32), layout)
            plgpu.commit_smem()

            # Only keys within the bounds are visited.
            @pl.loop(0, (high - low + step - 1) // step)
            def _(number: jax.Array) -> None:
                begin = low + number * step
                here = pl.ds(begin, step)
                cell = _read(key.at[t, b, here], step)
                if position is not None:
                    cell |= _read(
                        position.at[of_table, pl.ds(begin + n_queries - 1 - j, step)], step
                    )
                i = begin + plgpu.broadcasted_iota(jnp.int32, (step,), 0, layout=_ONE((step,), 1))
                counted = i < high
                if others:
                    counted &= _read(others[1].at[b, here], step) == own
                # Negative cells add nothing: a mask without a branch.
                _add_ones(table, jnp.where(counted, cell, -1))

            plgpu.commit_smem()
            # The commit above completes the additions of all threads, the one below the reads
            # before the table is cleared again.
            counts[t, b * n_queries + j] = _mosaic_launch.load(table, layout).astype(counts.dtype)
            plgpu.commit_smem()

        def with_table(table: Any) -> None:
            first = block * _QUERIES

            # The last block may have fewer queries.
            @pl.loop(0, jnp.minimum(_QUERIES, n_queries - first))
            def _(number: jax.Array) -> None:
                one(table, first + number)

        pl.run_scoped(with_table, plgpu.SMEM((n_counts,), jnp.int32), collective_axes="warpgroup")

    # Several queries per program spread the cost of a launch and of the scratch table.
    n_blocks = -(-n_queries // _QUERIES)
    (counts,) = _mosaic_launch.launch(
        kernel,
        *inputs,
        outputs=[
            jax.ShapeDtypeStruct((group, n_samples * n_queries, n_counts), dtype_of_counts(pairs))
        ],
        name="lookup_attention_counts",
        grid={"detectors": group, "samples": n_samples, "queries": n_blocks},
        by_lanes=True,
        warpgroups=1,
    )
    return counts[..., :n_cells]


COUNTER = Counter(_count, keys_last=False)


def _clamp_bits(bits: jax.Array, low: int, high: int) -> jax.Array:
    """Clamp the id in bits `low` to `high`."""
    # Bits of a clamped id stay in their field: an id out of range cannot change the others.
    return jnp.clip(bits >> low, 0, (1 << (high - low)) - 1) << low


# ------------------------------------------------------------------------------------- in kernels
def _read(reference: Any, size: int) -> jax.Array:
    """Read elements with neighboring threads on neighboring elements."""
    return _mosaic_launch.load(reference, _ONE((size,), 1))


def _add_ones(table: Any, cells: jax.Array) -> None:
    """Add 1 to a table in shared memory at each non-negative cell, with multiplicity."""

    # One hardware addition per pair, which Triton lacks. Measured on an H200 when it was
    # introduced, 1 x 4096: forward 7.1 ms in Triton and 1.2 ms here, table gradient 18.8 and 1.5
    # ms.
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ONE(cells.shape, 1)))
    def add(_: Any, table: Any, cells: Any) -> None:
        base = mlir.address(table)
        for register in cells.registers.flat:
            mlir.add_in_shared_memory(base, mlir.only_element(register), mlir.integer(1))

    add(table, cells)

"""Table rows in host memory, read by a GPU through an address cell.

Formula: ``rows[t, n * K + k] = table[t, index[n, t, k]]``; ids are clamped.

A program is compiled with a cell address: eight bytes in host memory that live as long as the
process (`lutjax.tables._registered`). When the kernel runs, the cell holds the row address, or 0 if
there are no rows; the result is then NaN. So a compiled program never reads freed memory.

Work: programs are one warp and process every ``PROGRAMS``-th tile of reads and elements. There are
at most 64: each reads the cell first, and a GPU serves reads from one host address by different
programs one after the other, a microsecond each. One tile holds all rows for a token.

Layout: ids are ``[n, T, K]``, results ``[T, n * K, O]``. A warp reads consecutive row elements over
the bus. Results are exact copies, the same in every run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch

_TILE = 1024  # elements of a tile
_NUMBERS = 512  # most elements of a row in a tile
_MOST_PROGRAMS = 64  # enough pending loads to saturate the bus


def read(
    cell: int, index: jax.Array, shape: tuple[int, int, int], dtype: Any, device: Device
) -> jax.Array:
    """Return the addressed rows, ``[T, n * K, O]``; out-of-range ids are clamped.

    Args:
      cell: address of the cell with the row address.
      index: int32, ``[n, T, K]``.
    """
    n_tables, n_rows, width = shape
    # The address is a constant of the program and so part of its key in a compilation cache: a
    # program for another address is another program. Two int32, because 64-bit integers may be
    # disabled.
    address = np.array([cell], np.uint64).view(np.int32)

    @custom_vmap
    def rows_of(index: jax.Array) -> jax.Array:
        n, _, ways = index.shape
        numbers = min(triton.next_power_of_2(width), _NUMBERS)
        n_reads = n_tables * n * ways
        reads = min(triton.next_power_of_2(max(n_reads, 1)), _TILE // numbers)
        parts = triton.cdiv(width, numbers)
        tiles = triton.cdiv(n_reads, reads) * parts
        programs = min(tiles, _MOST_PROGRAMS)
        (rows,) = launch(
            _copy_rows,
            jnp.asarray(address),
            index,
            outputs=[jax.ShapeDtypeStruct((n_tables, n * ways, width), dtype)],
            programs=programs,
            device=device,
            warps=1,
            n_tables=n_tables,
            n_rows=n_rows,
            n_numbers=width,
            n_ways=ways,
            n_of_table=n * ways,
            TILES=tiles,
            PROGRAMS=programs,
            PARTS=parts,
            READS=reads,
            NUMBERS=numbers,
        )
        return rows

    @rows_of.def_vmap
    def batched(size: int, _: Any, index: jax.Array) -> tuple[jax.Array, bool]:
        rows = rows_of(index.reshape(-1, *index.shape[2:]))
        return jnp.moveaxis(rows.reshape(n_tables, size, -1, width), 1, 0), True

    return rows_of(index)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _copy_rows(cell, index, rows, c: tl.constexpr):
    # Volatile: the CPU may have changed the cell after a GPU cache stored it.
    first = tl.load(_word(cell).to(tl.pointer_type(tl.uint64)), volatile=True)
    # Tables are aligned to 16 bytes, which permits vector loads.
    rows_of_host = tl.multiple_of(first.to(tl.pointer_type(rows.dtype.element_ty)), 16)
    for tile in range(tl.program_id(0), c.TILES, c.PROGRAMS):
        read = (tile // c.PARTS).to(tl.int64) * c.READS + tl.arange(0, c.READS)
        number = tile % c.PARTS * c.NUMBERS + tl.arange(0, c.NUMBERS)
        table = read // c.n_of_table
        of_table = read % c.n_of_table
        read_exists = table < c.n_tables
        at = (of_table // c.n_ways * c.n_tables + table) * c.n_ways + of_table % c.n_ways
        row = tl.load(index + at, mask=read_exists, other=0).to(tl.int64)
        row = tl.minimum(tl.maximum(row, 0), c.n_rows - 1)
        exists = read_exists[:, None] & (number < c.n_numbers)[None, :]
        start = ((table * c.n_rows + row) * c.n_numbers)[:, None] + number[None, :]
        # `first` is 0 without a table: nothing is read, and the rows are NaN.
        value = tl.load(rows_of_host + start, mask=exists & (first != 0), other=float("nan"))
        tl.store(rows + read[:, None] * c.n_numbers + number[None, :], value, mask=exists)


@kernel
def _word(halves):
    """Return the 64-bit number in two int32, lower half first."""
    low = tl.load(halves).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(halves + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return low | (high << 32)

"""Rows of a table in the memory of the host, read by a GPU through the address that a cell holds.

A program has the address of the cell, eight bytes of the host that are always there, see `lutjax.tables._registered`; the rows begin at the address that is
in the cell when the kernel runs. Where it is 0 there are none, and the kernel returns NaN. So no program reads memory that is gone.

Of ids ``[n, T, K]`` the rows are ``[T, n * K, O]``, of each table those of all ways of the first element, then of the next. Programs of one warp own every so
many-th tile of reads and numbers of rows. There are few: each looks into the cell, and a GPU reads one address of the host for one program after the other,
a microsecond each. One tile holds all rows of a token.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch

_TILE = 1024  # numbers
_NUMBERS = 512  # of a row in one tile
_MOST_PROGRAMS = 64  # whose tiles on their way fill the bus


def read(cell: int, index: jax.Array, shape: tuple[int, int, int], dtype: Any, device: Device) -> jax.Array:
    """Return the rows that ids address, ``[T, n * K, O]``; ids out of range are clamped.

    Args:
      cell: address of the cell that holds the address of the rows.
      index: int32, ``[n, T, K]``.
      shape: of the table, ``(T, rows, O)``.
    """
    n_tables, n_rows, width = shape
    # A number of the program, and so a part of its key in a cache of compiled programs: what was compiled for another address is another program.
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
    # Volatile: as the CPU wrote it before, whatever a cache of the GPU holds.
    first = tl.load(_word(cell).to(tl.pointer_type(tl.uint64)), volatile=True)
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
        value = tl.load(rows_of_host + start, mask=exists & (first != 0), other=float("nan"))
        tl.store(rows + read[:, None] * c.n_numbers + number[None, :], value, mask=exists)


@kernel
def _word(halves):
    """Number of 64 bits in two of 32, the lower one first."""
    low = tl.load(halves).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(halves + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return low | (high << 32)

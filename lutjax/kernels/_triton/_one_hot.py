"""Sums into rows of tables as products: of a matrix that says which sample reads which row, with what factor, with the cotangents."""

import jax
import triton
import triton.language as tl

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch

ROWS, SAMPLES, WARPS, STAGES = 128, 64, 4, 3


def sums(
    rows: jax.Array,
    factors: jax.Array,
    dy: jax.Array,
    shape: tuple[int, int, int],
    groups: int,
    device: Device,
    *,
    parts: int = 1,
    tile: tuple[int, int, int, int] | None = None,
) -> jax.Array:
    """As `_owned_columns.sums`, with factors and cotangents rounded to bfloat16."""
    n_tables, n_rows, n_outputs = shape
    n = rows.shape[1]
    of_rows, samples, warps, stages = tile or (ROWS, SAMPLES, WARPS, STAGES)
    of_rows = min(of_rows, max(triton.next_power_of_2(n_rows), 64))
    row_blocks = triton.cdiv(n_rows, of_rows)
    blocks = triton.cdiv(n, samples)
    (totals,) = launch(
        _multiply,
        rows,
        factors,
        dy.astype("bfloat16"),
        outputs=[jax.ShapeDtypeStruct((parts, *shape), "float32")],
        programs=parts * n_tables * row_blocks,
        device=device,
        warps=warps,
        stages=stages,
        n_samples=n,
        n_tables=n_tables,
        n_each=n_tables // groups,
        n_rows=n_rows,
        n_outputs=n_outputs,
        n_dy_groups=dy.shape[1],
        ROW_BLOCKS=row_blocks,
        ROWS=of_rows,
        OUTPUTS=max(triton.next_power_of_2(n_outputs), 16),
        SAMPLES=samples,
        PART=triton.cdiv(blocks, parts) * samples,
        WAYS=len(factors),
    )
    return _row_tiles.sum_of_parts(totals)


@kernel
def _multiply(rows, factors, dy, totals, c: tl.constexpr):
    program = tl.program_id(0)
    row_block = program % c.ROW_BLOCKS
    rest = program // c.ROW_BLOCKS
    table, part = rest % c.n_tables, (rest // c.n_tables).to(tl.int64)
    group = (table // c.n_each) % c.n_dy_groups
    row = row_block * c.ROWS + tl.arange(0, c.ROWS)
    output = tl.arange(0, c.OUTPUTS)
    total = tl.zeros((c.ROWS, c.OUTPUTS), tl.float32)
    rows += table.to(tl.int64) * c.n_samples
    factors += table.to(tl.int64) * c.n_samples
    first = part * c.PART
    for start in range(first, tl.minimum(first + c.PART, c.n_samples), c.SAMPLES):
        sample = start + tl.arange(0, c.SAMPLES)
        exists = sample < c.n_samples
        both = tl.load(rows + sample, mask=exists, other=0)
        a = tl.load(factors + sample, mask=exists, other=0).to(tl.bfloat16)
        zero = tl.zeros((c.SAMPLES,), tl.bfloat16)
        one_hot = tl.where(row[:, None] == ((both & 65535) >> 7)[None, :], a[None, :], zero[None, :])
        if c.WAYS == 2:
            b = tl.load(factors + c.n_tables * c.n_samples + sample, mask=exists, other=0).to(tl.bfloat16)
            one_hot = tl.where(row[:, None] == (both >> 23)[None, :], b[None, :], one_hot)
        at = (sample.to(tl.int64) * c.n_dy_groups + group) * c.n_outputs
        value = tl.load(
            dy + at[:, None] + output[None, :],
            mask=exists[:, None] & (output < c.n_outputs)[None, :],
            other=0,
        )
        total = tl.dot(one_hot, value, total)
    to = totals + ((part * c.n_tables + table) * c.n_rows + row)[:, None] * c.n_outputs + output[None, :]
    tl.store(to, total, mask=(row < c.n_rows)[:, None] & (output < c.n_outputs)[None, :])

"""Sums into table rows without atomics: a warp owns columns of tables in shared memory.

Formula: ``totals[t, r, o]`` is the sum over samples and ways of ``factor * dy[sample, o]`` where
the way reads row ``r`` of table ``t``.

Work: a program is one warp. It owns ``WIDTH`` outputs (columns) of all rows of ``32 / WIDTH``
tables of one group, and adds blocks of ``WIDTH`` samples in order. If there are few tables,
several warps share the samples of the same columns, and their sums are added in a fixed order.
Lane ``i`` of a table adds sample ``i`` to one column after the other: in step ``j`` to column
``i ^ j``. No two lanes ever add to the same sum. `_rotate` first brings the gradients into the
order of these steps.

Layout of shared memory: a row of 32 float32 sums, 128 bytes, for each table row, so that a lane's
column is a bank and lanes never conflict; behind it a ring of sample blocks. A block holds its
gradients and, per lane, the row pair and the factors of the next block. cp.async copies blocks
ahead of their use.

Two samples whose numbers differ in the last bit form a pair: the steps ``j`` and ``j ^ 1`` of both
are the same two columns. Each of the two lanes takes one column for both samples, so reads and
writes of up to four rows overlap. If both samples read the same row, one addition serves both.

Numerics: float32 with fused multiply-adds, in sample order; the bits are the same in every run. A
factor of 0 adds nothing. Triton has no shared-memory sums, so they are PTX (`_owned_ptx`).
"""

import itertools
import math

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _owned_ptx
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch

WIDTH = _owned_ptx.WIDTH
_LANES = 32
# Bytes of static shared memory that every GPU allows.
_MOST_SHARED = 48 * 1024
# Blocks of samples in the ring, by whether gradients are pairs of bfloat16. As many as fit without
# reducing the number of concurrent warps.
_STAGES = {True: 5, False: 3}
_TOGETHER = 8  # blocks of samples of a `_rotate` program

# With few tables, warps share the samples, so that enough of them run. The constants model the time
# of a number of shares, see `_shares`.
_AT_ONCE = 792  # concurrent warps on an H100
_SECONDS_OF_SAMPLE = 1.9e-8  # of a warp, for two rows and float32 gradients
_BYTES_PER_SECOND = 2.5e12
_FEWEST_OF_SHARE = 1024  # samples of a warp
_FEWEST_WARPS = 256
_MOST_SCRATCH = 2**29  # bytes of rows and factors at a time


def fits(tables: tuple[int, ...], groups: int, n_samples: int) -> bool:
    """Return True if tables fit shared memory and enough warps have enough work.

    On an H100, atomics were not faster for any number of tables, from 1024 samples on.
    """
    shared = 4 * _LANES * tables[1] + max(_STAGES[packed] * _stage(packed) for packed in _STAGES)
    warps = _warps(tables, groups) * _shares(tables, groups, n_samples)
    return shared <= _MOST_SHARED and n_samples >= _FEWEST_OF_SHARE and warps >= _FEWEST_WARPS


def count_parts(tables: tuple[int, ...], groups: int, ways: int, n_samples: int) -> int:
    """Return the number of sample parts to sum one after the other, to bound memory.

    0 stands for atomics: tables do not fit, or there is too little work.
    """
    n_parts = max(triton.cdiv(4 * (1 + ways) * tables[0] * n_samples, _MOST_SCRATCH), 1)
    return n_parts if fits(tables, groups, n_samples // n_parts) else 0


def _shares(tables: tuple[int, ...], groups: int, n_samples: int) -> int:
    """Return the number of warps that share samples for the same columns.

    Warps run in rounds of at most `_AT_ONCE`, and a partly filled round takes as long as a full
    one. More shares fill the last round, and cost the traffic of their partial sums.
    """
    warps, most = max(_warps(tables, groups), 1), max(n_samples // _FEWEST_OF_SHARE, 1)

    def seconds(shares: int) -> float:
        rounds = triton.cdiv(warps * shares, _AT_ONCE)
        partial = 4 * math.prod(tables) * (shares + 1) if shares > 1 else 0
        return rounds * n_samples / shares * _SECONDS_OF_SAMPLE + partial / _BYTES_PER_SECOND

    return min(itertools.takewhile(lambda n: n <= most, itertools.count(1)), key=seconds)


def _warps(tables: tuple[int, ...], groups: int) -> int:
    n_tables, _, n_outputs = tables
    return groups * triton.cdiv(n_tables // groups, _LANES // WIDTH) * triton.cdiv(n_outputs, WIDTH)


def _stage(packed: bool) -> int:
    """Return the bytes of a block: gradients, and a row pair and two factors per lane."""
    return WIDTH * WIDTH * (2 if packed else 4) + 3 * 4 * _LANES


def order_by_step(dy: jax.Array, device: Device) -> jax.Array:
    """Return gradients ``dy [n, G, O]`` in the order of steps, 0 beyond the end.

    The result is ``[G, column blocks, sample blocks, step // E, lane, step % E]``. ``E`` elements
    are the 16 bytes that a lane reads at once.
    """
    n, n_groups, n_outputs = dy.shape
    columns, blocks = triton.cdiv(n_outputs, WIDTH), triton.cdiv(n, WIDTH)
    dtype = jnp.dtype(dy.dtype if dy.dtype == jnp.bfloat16 else jnp.float32)
    (found,) = launch(
        _rotate,
        dy,
        outputs=[jax.ShapeDtypeStruct((n_groups, columns, blocks, WIDTH * WIDTH), dtype)],
        programs=n_groups * triton.cdiv(blocks, _TOGETHER),
        device=device,
        warps=4,
        n_samples=n,
        n_groups=n_groups,
        n_outputs=n_outputs,
        n_blocks=blocks,
        COLUMNS=columns,
        WIDTH=WIDTH,
        TOGETHER=_TOGETHER,
        EACH=16 // dtype.itemsize,
    )
    return found


@kernel
def _rotate(dy, found, c: tl.constexpr):
    blocks: tl.constexpr = (c.n_blocks + c.TOGETHER - 1) // c.TOGETHER
    group = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.arange(0, c.WIDTH * c.WIDTH)
    # Element ``place`` of the result belongs to this step and lane, see `order_by_step`.
    step = place // (c.WIDTH * c.EACH) * c.EACH + place % c.EACH
    lane = place // c.EACH % c.WIDTH
    # Paired samples: the last bit of the step selects the sample, its other bits the column. So an
    # even step is the lane's own sample in its column, and the odd step after it is its neighbor's.
    of_sample, of_column = lane ^ (step & 1), lane ^ (step & (c.WIDTH - 2))
    for n in range(c.TOGETHER):
        block = (tl.program_id(0) % blocks) * c.TOGETHER + n
        sample = block.to(tl.int64) * c.WIDTH + of_sample
        for column in tl.static_range(c.COLUMNS):
            output = column * c.WIDTH + of_column
            at = (sample * c.n_groups + group) * c.n_outputs + output
            value = tl.load(dy + at, mask=(sample < c.n_samples) & (output < c.n_outputs), other=0)
            to = ((group * c.COLUMNS + column) * c.n_blocks + block) * (c.WIDTH * c.WIDTH) + place
            there = place < tl.where(block < c.n_blocks, c.WIDTH * c.WIDTH, 0)
            tl.store(found + to, value.to(found.dtype.element_ty), mask=there)


def sums(
    rows: jax.Array,
    factors: jax.Array,
    dy: jax.Array,
    tables: tuple[int, ...],
    groups: int,
    device: Device,
) -> jax.Array:
    """Return the sums over samples of ``factor * dy``, float32 ``[T, R, O]``.

    Args:
      rows: int32 ``[T, n]``, packed by `pack_offsets`.
      factors: float32 ``[K, T, n]`` of one or two ways with different rows; 0 adds nothing.
      dy: ``[n, G, O]``, or ``[n, 1, O]`` for all groups.
    """
    n_tables, n_rows, n_outputs = tables
    n, each, ways = rows.shape[1], n_tables // groups, len(factors)
    found = order_by_step(dy, device)
    packed = found.dtype == jnp.bfloat16
    stages, stage = _STAGES[packed], _stage(packed)
    warps, shares, n_blocks = (
        _warps(tables, groups),
        _shares(tables, groups, n),
        triton.cdiv(n, WIDTH),
    )
    (totals,) = launch(
        _add_owned,
        rows,
        factors,
        found,
        outputs=[jax.ShapeDtypeStruct((shares, *tables), "float32")],
        programs=warps * shares,
        device=device,
        # One warp per program: barriers are warp-wide, and registers of lanes are exchanged
        # directly.
        warps=1,
        n_samples=n,
        n_tables=n_tables,
        n_each=each,
        n_rows=n_rows,
        n_outputs=n_outputs,
        n_blocks=n_blocks,
        n_dy_groups=dy.shape[1],
        TOGETHER=triton.cdiv(each, _LANES // WIDTH),
        COLUMNS=triton.cdiv(n_outputs, WIDTH),
        WIDTH=WIDTH,
        WAYS=ways,
        BASE=_owned_ptx.base("owned_sums", 4 * _LANES * n_rows + stages * stage),
        CLEAR=_owned_ptx.CLEAR,
        READ=_owned_ptx.READ,
        SWAP=_owned_ptx.SWAP,
        COPY=_owned_ptx.copy_of_block(ways, packed),
        # In the loop, `stages - 1` copies are under way; the oldest one has to be complete.
        WAIT=_owned_ptx.wait(stages - 2),
        ADD=_owned_ptx.add_of_block(ways, packed),
        STAGES=stages,
        STAGE=stage,
        SUMS=4 * _LANES * n_rows,
        SIZE=found.dtype.itemsize,
        WARPS=warps,
        OF_SHARE=triton.cdiv(n_blocks, shares),
    )
    return jnp.sum(totals, 0) if shares > 1 else totals[0]


@kernel
def pack_offsets(first, second):
    """Pack the offsets of two rows among the sums of a warp, 16 bits each, for at most 256 rows."""
    # A row has 128 bytes; offsets are below ``256 * 128 = 2**15``.
    return (first << 7) | (second << 23)


@kernel
def _add_owned(rows, factors, dy, totals, c: tl.constexpr):
    program = tl.program_id(0) % c.WARPS
    share = tl.program_id(0) // c.WARPS
    column = program % c.COLUMNS
    of_group = program // c.COLUMNS % c.TOGETHER
    group = program // (c.COLUMNS * c.TOGETHER)
    lane = tl.arange(0, 32)
    i = lane % c.WIDTH
    number = of_group * (32 // c.WIDTH) + lane // c.WIDTH
    # An odd number of tables per group leaves the second half of a warp without a table. It repeats
    # the last one with factors of 0.
    has_table = number < c.n_each
    table = (group * c.n_each + tl.minimum(number, c.n_each - 1)).to(tl.int64)
    at = tl.inline_asm_elementwise(c.BASE, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)
    for r in range(c.n_rows):
        tl.inline_asm_elementwise(
            c.CLEAR, "=r,r", [at + 128 * r], dtype=tl.int32, is_pure=False, pack=1
        )
    # The gradient of a sum over groups serves every group.
    of_dy = group if c.n_dy_groups > 1 else 0
    dy += ((of_dy * c.COLUMNS + column).to(tl.int64) * c.n_blocks) * (c.WIDTH * c.WIDTH) + lane * (
        16 // c.SIZE
    )
    rows += table * c.n_samples + i
    factors += table * c.n_samples + i
    # The ring of sample blocks behind the sums.
    begin = at + c.SUMS
    end = begin + c.STAGES * c.STAGE
    start = share * c.OF_SHARE
    # Start all but one copy; the loop starts the copy of block ``STAGES - 1`` ahead in each step.
    for k in tl.static_range(c.STAGES - 1):
        _copy(begin + k * c.STAGE, rows, factors, dy, start + k, lane, has_table, c)
    now, then = begin, begin + (c.STAGES - 1) * c.STAGE
    # Rows and factors of a block arrive with the gradients of the previous block, so that lanes can
    # exchange them with their neighbors while that block is added. The first ones are loaded here.
    exists = has_table & (start * c.WIDTH + i < c.n_samples)
    row = tl.load(rows + start * c.WIDTH, mask=exists, other=0)
    a = tl.load(factors + start * c.WIDTH, mask=exists, other=0)
    b = tl.zeros((32,), tl.float32)
    if c.WAYS == 2:
        b = tl.load(factors + c.n_tables * c.n_samples + start * c.WIDTH, mask=exists, other=0)
    row, a, b, of_row, of_a, of_b = _swap(row, a, b, c)
    for block in range(start, tl.minimum(start + c.OF_SHARE, c.n_blocks)):
        # Waits for the oldest copy, and for all lanes: each lane reads bytes that others copied.
        tl.inline_asm_elementwise(c.WAIT, "=r,r", [now], dtype=tl.int32, is_pure=False, pack=1)
        # The copy overwrites the block that the previous step finished, after that barrier.
        _copy(then, rows, factors, dy, block + (c.STAGES - 1), lane, has_table, c)
        # `now` is this lane's 4 bytes; its gradients begin at 16 bytes times its number in the
        # table. Lanes of both tables read the same gradients.
        row, a, b, of_row, of_a, of_b = tl.inline_asm_elementwise(
            c.ADD,
            "=r,=f,=f,=r,=f,=f,r,r,r,r,f,f,r,f,f",
            [at, now, now + (16 * i - 4 * lane), row, a, b, of_row, of_a, of_b],
            dtype=(tl.int32, tl.float32, tl.float32, tl.int32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
        now = tl.where(now + c.STAGE == end, begin, now + c.STAGE)
        then = tl.where(then + c.STAGE == end, begin, then + c.STAGE)
    output = column * c.WIDTH + i
    to = totals + (share * c.n_tables + table) * (c.n_rows * c.n_outputs) + output
    for r in range(c.n_rows):
        value = tl.inline_asm_elementwise(
            c.READ, "=f,r", [at + 128 * r], dtype=tl.float32, is_pure=False, pack=1
        )
        tl.store(to + r * c.n_outputs, value, mask=has_table & (output < c.n_outputs))


@kernel
def _swap(row, a, b, c: tl.constexpr):
    """Return the row pair and factors of each lane and of its neighbor."""
    return tl.inline_asm_elementwise(
        c.SWAP,
        "=r,=f,=f,=r,=f,=f,r,f,f",
        [row, a, b],
        dtype=(tl.int32, tl.float32, tl.float32, tl.int32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@kernel
def _copy(to, rows, factors, dy, block, lane, has_table, c: tl.constexpr):
    """Start copies to shared memory: gradients of a block, and rows and factors of the next block.

    Args:
      to: address of the 4-byte elements of each lane in the block.
    """
    following = (block + 1) * c.WIDTH
    # Rows and factors beyond the samples are filled with zeros, so additions there do nothing.
    # Every step starts a copy, also beyond the end, so that the number of pending copies is
    # constant.
    exists = has_table & (following + lane % c.WIDTH < c.n_samples)
    at = tl.where(exists, following, 0)
    b = factors + at
    if c.WAYS == 2:
        b += c.n_tables * c.n_samples
    # Beyond the end the last block is copied again; its factors are 0.
    of_block = dy + tl.minimum(block, c.n_blocks - 1).to(tl.int64) * (c.WIDTH * c.WIDTH)
    size = tl.where(exists, 4, 0)
    copied = [
        to,
        # 4 bytes per lane plus 12 are 16 bytes per lane: all lanes together copy the gradients.
        to + 12 * lane,
        (rows + at).to(tl.int64),
        (factors + at).to(tl.int64),
        b.to(tl.int64),
        of_block.to(tl.int64),
        size,
    ]
    tl.inline_asm_elementwise(
        c.COPY, "=r,r,r,l,l,l,l,r", copied, dtype=tl.int32, is_pure=False, pack=1
    )

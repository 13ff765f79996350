"""Sums into rows of tables without atomics: a warp keeps columns of tables in shared memory, and adds to them by itself.

A warp owns ``WIDTH`` outputs of all rows of ``32 / WIDTH`` tables of one group, with sums of 4 bytes in a bank of shared memory for each
of its lanes, and walks through the samples in their order, ``WIDTH`` at a time. Lane ``i`` of a table adds what sample ``i`` adds, to one
column after the other: in step ``j`` to column ``i ^ j``. So no two lanes meet at a sum, nor at a bank, whatever the rows are; nothing
is exchanged between lanes; sums have the same bits in every run, and leave the chip once.

Cotangents are brought into the order of these steps first (`rotated`), so that lanes read them side by side.

Two samples whose numbers differ in the last bit are taken together (``PAIRS``): step ``j`` and ``j ^ 1`` of both are the same two columns,
of which each of the two lanes takes one, for both samples. Reads and writes of up to four rows are then under way at once. If samples
of a pair share a row, the first adds what the second does, and the second does not.
"""

import functools


import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch

WIDTH = 16
_LANES = 32
_MOST = 48 * 1024  # bytes of shared memory that a kernel declares by name


def fits(n_rows: int) -> bool:
    """Return whether the sums of a warp fit the shared memory, and starts of rows 16 bits."""
    return 4 * _LANES * n_rows <= _MOST


def rotated(dy: jax.Array, device: Device, *, pairs: bool = True) -> jax.Array:
    """Return ``[G, column blocks, sample blocks, step, lane]`` of ``dy [n, G, O]``, with 0 where there is none."""
    n, n_groups, n_outputs = dy.shape
    columns, blocks = triton.cdiv(n_outputs, WIDTH), triton.cdiv(n, WIDTH)
    (found,) = launch(
        _rotate,
        dy,
        outputs=[jax.ShapeDtypeStruct((n_groups, columns, blocks, WIDTH, WIDTH), dy.dtype)],
        programs=n_groups * triton.cdiv(blocks, 8) if dy.size else 0,
        device=device,
        warps=4,
        n_samples=n,
        n_groups=n_groups,
        n_outputs=n_outputs,
        n_blocks=blocks,
        COLUMNS=columns,
        WIDTH=WIDTH,
        PAIRS=pairs,
        TOGETHER=8,
    )
    return found


@kernel
def _rotate(dy, found, c: tl.constexpr):
    blocks: tl.constexpr = (c.n_blocks + c.TOGETHER - 1) // c.TOGETHER
    group = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.arange(0, c.WIDTH * c.WIDTH)
    step, lane = place // c.WIDTH, place % c.WIDTH
    if c.PAIRS:
        of_sample, of_column = lane ^ (step & 1), lane ^ (step & (c.WIDTH - 2))
    else:
        of_sample, of_column = lane, lane ^ step
    for n in range(c.TOGETHER):
        block = (tl.program_id(0) % blocks) * c.TOGETHER + n
        sample = block.to(tl.int64) * c.WIDTH + of_sample
        for column in tl.static_range(c.COLUMNS):
            output = column * c.WIDTH + of_column
            at = (sample * c.n_groups + group) * c.n_outputs + output
            value = tl.load(dy + at, mask=(sample < c.n_samples) & (output < c.n_outputs), other=0)
            to = ((group * c.COLUMNS + column) * c.n_blocks + block) * (c.WIDTH * c.WIDTH) + place
            tl.store(found + to, value, mask=place < tl.where(block < c.n_blocks, c.WIDTH * c.WIDTH, 0))


def sums(
    rows: jax.Array,
    factors: jax.Array,
    dy: jax.Array,
    shape: tuple[int, int, int],
    groups: int,
    device: Device,
    *,
    pairs: bool = True,
    parts: int = 1,
    sync: bool = False,
) -> jax.Array:
    """Return the sums over samples of ``factor * dy``, float32 ``[T, R, O]``.

    Args:
      rows: int32 ``[T, n]``: 128 times the row of the first way, plus 2**23 times that of the second.
      factors: float32 ``[K, T, n]`` of one or two ways, whose rows differ; 0 adds nothing.
      dy: ``[n, G, O]``. shape: of the tables. pairs: take samples two by two. parts: of the samples, with sums of their own.
    """
    n_tables, n_rows, n_outputs = shape
    n = rows.shape[1]
    each = n_tables // groups
    of_warp = _LANES // WIDTH
    blocks, columns = triton.cdiv(n, WIDTH), triton.cdiv(n_outputs, WIDTH)
    together = triton.cdiv(each, of_warp)
    found = rotated(dy, device, pairs=pairs)
    (totals,) = launch(
        _add_owned,
        rows,
        factors,
        found,
        outputs=[jax.ShapeDtypeStruct((parts, *shape), "float32")],
        programs=parts * groups * together * columns if n_tables * n_rows * n_outputs else 0,
        device=device,
        warps=1,
        n_samples=n,
        n_tables=n_tables,
        n_each=each,
        n_rows=n_rows,
        n_outputs=n_outputs,
        n_groups=groups,
        n_blocks=blocks,
        n_dy_groups=dy.shape[1],
        TOGETHER=together,
        COLUMNS=columns,
        PARTS=parts,
        PART=triton.cdiv(blocks, parts),
        WIDTH=WIDTH,
        WAYS=len(factors),
        BASE=base("owned_sums", 4 * _LANES * n_rows),
        CLEAR=CLEAR,
        READ=READ,
        ADD=add_of_block(len(factors), pairs, sync),
        CONSTRAINTS=",".join(["=r", "r", "r"] + ["f"] * (2 + WIDTH)),
    )
    return _row_tiles.sum_of_parts(totals)


@kernel
def _add_owned(rows, factors, dy, totals, c: tl.constexpr):
    program = tl.program_id(0)
    column = program % c.COLUMNS
    rest = program // c.COLUMNS
    of_group = rest % c.TOGETHER
    rest = rest // c.TOGETHER
    group, part = rest % c.n_groups, rest // c.n_groups
    lane = tl.arange(0, 32)
    i = lane % c.WIDTH
    number = of_group * (32 // c.WIDTH) + lane // c.WIDTH
    has_table = number < c.n_each
    table = (group * c.n_each + tl.minimum(number, c.n_each - 1)).to(tl.int64)
    at = tl.inline_asm_elementwise(c.BASE, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)
    for r in range(c.n_rows):
        tl.inline_asm_elementwise(
            c.CLEAR, "=r,r", [at + 128 * r], dtype=tl.int32, is_pure=False, pack=1
        )
    first = part * c.PART
    last = tl.minimum(first + c.PART, c.n_blocks)
    of_dy = group if c.n_dy_groups > 1 else 0
    dy += ((of_dy * c.COLUMNS + column).to(tl.int64) * c.n_blocks) * (c.WIDTH * c.WIDTH) + i
    rows += table * c.n_samples + i
    factors += table * c.n_samples + i
    row, a, b, d = _block(rows, factors, dy, first, last, i, has_table, c)
    for block in range(first, last):
        # What the next block needs is on its way while this one is added.
        next_row, next_a, next_b, next_d = _block(rows, factors, dy, block + 1, last, i, has_table, c)
        tl.inline_asm_elementwise(
            c.ADD,
            c.CONSTRAINTS,
            [at, row, a, b, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        row, a, b, d = next_row, next_a, next_b, next_d
    output = column * c.WIDTH + i
    to = totals + (part.to(tl.int64) * c.n_tables + table) * (c.n_rows * c.n_outputs) + output
    for r in range(c.n_rows):
        value = tl.inline_asm_elementwise(
            c.READ, "=f,r", [at + 128 * r], dtype=tl.float32, is_pure=False, pack=1
        )
        tl.store(to + r * c.n_outputs, value, mask=has_table & (output < c.n_outputs))


@kernel
def _block(rows, factors, dy, block, last, i, has_table, c: tl.constexpr):
    """Rows, factors and cotangents of a block of samples; factors are 0 where there is none."""
    exists = has_table & (block * c.WIDTH + i < c.n_samples) & (block < last)
    at = block * c.WIDTH
    row = tl.load(rows + at, mask=exists, other=0)
    a = tl.load(factors + at, mask=exists, other=0)
    b = a
    if c.WAYS == 2:
        b = tl.load(factors + c.n_tables * c.n_samples + at, mask=exists, other=0)
    of_block = dy + tl.minimum(block, c.n_blocks - 1).to(tl.int64) * (c.WIDTH * c.WIDTH)
    d0 = tl.load(of_block).to(tl.float32)
    d1 = tl.load(of_block + 16).to(tl.float32)
    d2 = tl.load(of_block + 32).to(tl.float32)
    d3 = tl.load(of_block + 48).to(tl.float32)
    d4 = tl.load(of_block + 64).to(tl.float32)
    d5 = tl.load(of_block + 80).to(tl.float32)
    d6 = tl.load(of_block + 96).to(tl.float32)
    d7 = tl.load(of_block + 112).to(tl.float32)
    d8 = tl.load(of_block + 128).to(tl.float32)
    d9 = tl.load(of_block + 144).to(tl.float32)
    d10 = tl.load(of_block + 160).to(tl.float32)
    d11 = tl.load(of_block + 176).to(tl.float32)
    d12 = tl.load(of_block + 192).to(tl.float32)
    d13 = tl.load(of_block + 208).to(tl.float32)
    d14 = tl.load(of_block + 224).to(tl.float32)
    d15 = tl.load(of_block + 240).to(tl.float32)
    return row, a, b, (d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13, d14, d15)


# ------------------------------------------------------------------------------------- PTX
def base(name: str, size: int) -> str:
    """PTX that reserves so many bytes of shared memory; returns where those of a thread begin."""
    return (
        f"{{ .shared .align 128 .b8 {name}[{size}]; .reg .b32 start; mov.u32 start, {name}; "
        "mad.lo.u32 $0, $1, 4, start; }"
    )


CLEAR = "{ st.volatile.shared.f32 [$1], 0f00000000; mov.u32 $0, 0; }"
READ = "ld.volatile.shared.f32 $0, [$1];"
ADD = (
    "{ .reg .f32 s; ld.volatile.shared.f32 s, [$1]; add.f32 s, s, $2; st.volatile.shared.f32 [$1], s; mov.u32 $0, 0; }"
)
# One end, and its negative to the other, which may be the same.
ADD_DIFFERENCE = (
    "{ .reg .f32 s, t; .reg .pred e; ld.volatile.shared.f32 s, [$1]; ld.volatile.shared.f32 t, [$2]; "
    "setp.eq.u32 e, $1, $2; add.f32 s, s, $3; selp.f32 t, s, t, e; sub.f32 t, t, $3; "
    "st.volatile.shared.f32 [$1], s; st.volatile.shared.f32 [$2], t; mov.u32 $0, 0; }"
)


@functools.cache
def add_of_block(ways: int, pairs: bool, sync: bool) -> str:
    """Return PTX that adds a block of samples.

    Its arguments: $1 where the sums of the lane begin; $2 starts of the two rows, in 16 bits each; $3, $4 their factors; then the
    cotangents of the steps.

    Reads and writes of shared memory are volatile: lanes read what others wrote in an earlier step, so none may move to another step.
    """
    two = ways == 2
    lines = [
        ".reg .b32 a, b, u, v, other, ta, tb, tu, tv;",
        ".reg .f32 sa, sb, su, sv, fu, fv, ea, eb;",
        ".reg .pred pa, pb, pu, pv, qu, qv, ma, mb, e, f;",
        "and.b32 a, $2, 65535;",
        "add.u32 a, a, $1;",
        "setp.neu.f32 pa, $3, 0f00000000;",
    ]
    if two:
        lines += ["shr.u32 b, $2, 16;", "add.u32 b, b, $1;", "setp.neu.f32 pb, $4, 0f00000000;"]
    if pairs:
        lines += [
            "shfl.sync.bfly.b32 other, $2, 1, 31, -1;",
            "shfl.sync.bfly.b32 fu, $3, 1, 31, -1;",
            "and.b32 u, other, 65535;",
            "add.u32 u, u, $1;",
            "setp.neu.f32 qu, fu, 0f00000000;",
            # The first row of the other sample: ma, if it is this one's first, which then adds both; then pu: add it alone.
            "setp.eq.and.u32 e, u, a, qu;",
            "and.pred ma, e, pa;",
            "not.pred e, ma;",
            "and.pred pu, qu, e;",
            "mov.f32 ea, fu;",
        ]
        if two:
            lines += [
                "shfl.sync.bfly.b32 fv, $4, 1, 31, -1;",
                "shr.u32 v, other, 16;",
                "add.u32 v, v, $1;",
                "setp.neu.f32 qv, fv, 0f00000000;",
                "setp.eq.and.u32 e, u, b, qu;",
                "and.pred mb, e, pb;",  # the first is this one's second
                "not.pred e, mb;",
                "and.pred pu, pu, e;",
                "selp.f32 eb, fu, fv, mb;",
                "setp.eq.and.u32 e, v, a, qv;",
                "and.pred e, e, pa;",  # the second is this one's first
                "selp.f32 ea, fv, ea, e;",
                "or.pred ma, ma, e;",
                "not.pred f, e;",
                "and.pred pv, qv, f;",
                "setp.eq.and.u32 e, v, b, qv;",
                "and.pred e, e, pb;",  # the second is this one's second
                "or.pred mb, mb, e;",
                "not.pred f, e;",
                "and.pred pv, pv, f;",
            ]
    names = [("a", "pa")] + [("b", "pb")] * two
    if pairs:
        names += [("u", "pu")] + [("v", "pv")] * two
    factor = {"a": "$3", "b": "$4", "u": "fu", "v": "fv"}
    for j in range(0, WIDTH, 2 if pairs else 1):
        own, other = f"${5 + j}", f"${6 + j}"
        if sync:
            lines += ["bar.warp.sync -1;"]
        lines += [f"xor.b32 t{n}, {n}, {4 * j};" for n, _ in names]
        lines += [f"ld.volatile.shared.f32 s{n}, [t{n}];" for n, _ in names]
        lines += [f"fma.rn.f32 s{n}, {factor[n]}, {own if n in 'ab' else other}, s{n};" for n, _ in names]
        if pairs:
            lines += [f"@m{n} fma.rn.f32 s{n}, e{n}, {other}, s{n};" for n, _ in names if n in "ab"]
        lines += [f"@{p} st.volatile.shared.f32 [t{n}], s{n};" for n, p in names]
    return "{ " + " ".join([*lines, "mov.u32 $0, 0;"]) + " }"



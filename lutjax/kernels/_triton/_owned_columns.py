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
from lutjax.kernels._triton import _gate_tiles, _row_tiles
from lutjax.kernels._triton._triton_launch import kernel, launch

WIDTH = 16
_LANES = 32
_MOST = 48 * 1024  # bytes of shared memory that a kernel declares by name


def fits(n_rows: int) -> bool:
    """Return whether the sums of a warp fit the shared memory, and starts of rows 16 bits."""
    return 4 * _LANES * n_rows <= _MOST


def rotated(dy: jax.Array, device: Device) -> jax.Array:
    """Return ``[G, column blocks, sample blocks, step // E, lane, step % E]`` of ``dy [n, G, O]``, with 0 where there is none.

    ``E`` numbers are the 16 bytes that a lane reads at once.
    """
    n, n_groups, n_outputs = dy.shape
    columns, blocks = triton.cdiv(n_outputs, WIDTH), triton.cdiv(n, WIDTH)
    dtype = jnp.dtype(dy.dtype if dy.dtype == jnp.bfloat16 else jnp.float32)
    (found,) = launch(
        _rotate,
        dy,
        outputs=[jax.ShapeDtypeStruct((n_groups, columns, blocks, WIDTH * WIDTH), dtype)],
        programs=n_groups * triton.cdiv(blocks, 8) if dy.size else 0,
        device=device,
        warps=4,
        n_samples=n,
        n_groups=n_groups,
        n_outputs=n_outputs,
        n_blocks=blocks,
        COLUMNS=columns,
        WIDTH=WIDTH,
        TOGETHER=8,
        EACH=16 // dtype.itemsize,
    )
    return found


@kernel
def _rotate(dy, found, c: tl.constexpr):
    blocks: tl.constexpr = (c.n_blocks + c.TOGETHER - 1) // c.TOGETHER
    group = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.arange(0, c.WIDTH * c.WIDTH)
    step = place // (c.WIDTH * c.EACH) * c.EACH + place % c.EACH
    lane = place // c.EACH % c.WIDTH
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
    shape: tuple[int, int, int],
    groups: int,
    device: Device,
    *,
    parts: int = 1,
    stages: int | None = None,
) -> jax.Array:
    """Return the sums over samples of ``factor * dy``, float32 ``[T, R, O]``.

    Args:
      rows: int32 ``[T, n]``: 128 times the row of the first way, plus 2**23 times that of the second.
      factors: float32 ``[K, T, n]`` of one or two ways, whose rows differ; 0 adds nothing.
      dy: ``[n, G, O]``. shape: of the tables. parts: of the samples, with sums of their own.
      stages: blocks of samples in shared memory, one that is added and others on their way; None: as many as cost no warp.
    """
    n_tables, n_rows, n_outputs = shape
    n = rows.shape[1]
    each = n_tables // groups
    of_warp = _LANES // WIDTH
    blocks, columns = triton.cdiv(n, WIDTH), triton.cdiv(n_outputs, WIDTH)
    together = triton.cdiv(each, of_warp)
    found = rotated(dy, device)
    packed = found.dtype == jnp.bfloat16
    stage = WIDTH * WIDTH * found.dtype.itemsize + 3 * 4 * _LANES
    stages = stages or (5 if packed else 3)
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
        BASE=base("owned_sums", 4 * _LANES * n_rows + stages * stage),
        CLEAR=CLEAR,
        READ=READ,
        SWAP=SWAP,
        COPY=copy_of_block(len(factors), packed),
        WAIT=f"{{ cp.async.wait_group {stages - 2}; bar.warp.sync -1; mov.u32 $0, 0; }}",
        ADD=add_of_block(len(factors), packed),
        STAGES=stages,
        STAGE=stage,
        SUMS=4 * _LANES * n_rows,
        SIZE=found.dtype.itemsize,
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
    dy += ((of_dy * c.COLUMNS + column).to(tl.int64) * c.n_blocks) * (c.WIDTH * c.WIDTH) + lane * (16 // c.SIZE)
    rows += table * c.n_samples + i
    factors += table * c.n_samples + i
    # Blocks of samples arrive in turn at one of a few places behind the sums.
    begin = at + c.SUMS
    end = begin + c.STAGES * c.STAGE
    for k in tl.static_range(c.STAGES - 1):
        _copy(begin + k * c.STAGE, rows, factors, dy, first + k, last, lane, has_table, c)
    now, then = begin, begin + (c.STAGES - 1) * c.STAGE
    # The rows and factors of a block come with the cotangents of the one before, and to their neighbours while that is added.
    exists = has_table & (first * c.WIDTH + i < c.n_samples) & (first < last)
    row = tl.load(rows + first * c.WIDTH, mask=exists, other=0)
    a = tl.load(factors + first * c.WIDTH, mask=exists, other=0)
    b = tl.zeros((32,), tl.float32)
    if c.WAYS == 2:
        b = tl.load(factors + c.n_tables * c.n_samples + first * c.WIDTH, mask=exists, other=0)
    row, a, b, of_row, of_a, of_b = _swap(row, a, b, c)
    for block in range(first, last):
        tl.inline_asm_elementwise(c.WAIT, "=r,r", [now], dtype=tl.int32, is_pure=False, pack=1)
        _copy(then, rows, factors, dy, block + (c.STAGES - 1), last, lane, has_table, c)
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
    to = totals + (part.to(tl.int64) * c.n_tables + table) * (c.n_rows * c.n_outputs) + output
    for r in range(c.n_rows):
        value = tl.inline_asm_elementwise(
            c.READ, "=f,r", [at + 128 * r], dtype=tl.float32, is_pure=False, pack=1
        )
        tl.store(to + r * c.n_outputs, value, mask=has_table & (output < c.n_outputs))


@kernel
def _swap(row, a, b, c: tl.constexpr):
    """Row and factors of each lane, and those of its neighbour."""
    return tl.inline_asm_elementwise(
        c.SWAP,
        "=r,=f,=f,=r,=f,=f,r,f,f",
        [row, a, b],
        dtype=(tl.int32, tl.float32, tl.float32, tl.int32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@kernel
def _copy(to, rows, factors, dy, block, last, lane, has_table, c: tl.constexpr):
    """Begin to copy to shared memory the cotangents of a block of samples, and the rows and factors of the next.

    `to`: where the words of the lanes begin. There is nothing but zeros beyond the samples.
    """
    following = (block + 1) * c.WIDTH
    exists = has_table & (following + lane % c.WIDTH < c.n_samples) & (block + 1 < last)
    at = tl.where(exists, following, 0)
    b = factors + at
    if c.WAYS == 2:
        b += c.n_tables * c.n_samples
    of_block = dy + tl.minimum(block, c.n_blocks - 1).to(tl.int64) * (c.WIDTH * c.WIDTH)
    size = tl.where(exists, 4, 0)
    copied = [
        to,
        to + 12 * lane,
        (rows + at).to(tl.int64),
        (factors + at).to(tl.int64),
        b.to(tl.int64),
        of_block.to(tl.int64),
        size,
    ]
    tl.inline_asm_elementwise(c.COPY, "=r,r,r,l,l,l,l,r", copied, dtype=tl.int32, is_pure=False, pack=1)


# ------------------------------------------------------------------------------------- PTX
def base(name: str, size: int) -> str:
    """PTX that reserves so many bytes of shared memory; returns where those of a thread begin."""
    return (
        f"{{ .shared .align 128 .b8 {name}[{size}]; .reg .b32 start; mov.u32 start, {name}; "
        "mad.lo.u32 $0, $1, 4, start; }"
    )


CLEAR = "{ st.volatile.shared.f32 [$1], 0f00000000; mov.u32 $0, 0; }"
# Results are written last: their registers may be those of arguments.
_RESULTS = [f"mov.b32 ${n}, next{n};" for n in range(6)]
_SHUFFLED = [f"shfl.sync.bfly.b32 next{n + 3}, next{n}, 1, 31, -1;" for n in range(3)]
SWAP = " ".join(["{ .reg .b32 next<6>;", *(f"mov.b32 next{n}, ${n + 6};" for n in range(3)), *_SHUFFLED, *_RESULTS, "}"])
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
def copy_of_block(ways: int, packed: bool) -> str:
    """Return PTX that begins copies of a block of samples: its rows, factors and cotangents.

    Its arguments: $1 where the words of the lane begin, $2 its 16 bytes of cotangents; $3 to $6 addresses of its row, its factors and its
    cotangents; $7 bytes of the row and the factors, of which others are 0.
    """
    d = WIDTH * WIDTH * (2 if packed else 4)
    lines = ["cp.async.cg.shared.global [$2], [$6], 16;"]
    if not packed:
        lines += ["cp.async.cg.shared.global [$2+512], [$6+512], 16;"]
    for n in range(1 + ways):
        lines += [f"cp.async.ca.shared.global [$1+{d + 128 * n}], [${3 + n}], 4, $7;"]
    return "{ " + " ".join([*lines, "cp.async.commit_group;", "mov.u32 $0, 0;"]) + " }"


@functools.cache
def add_of_block(ways: int, packed: bool) -> str:
    """Return PTX that adds a block of samples.

    Its results: rows and factors of the next block, of the lane and of its neighbour. Its arguments: where the sums of the lane begin,
    its words (see `copy_of_block`), and its cotangents, 16 bytes at a time: float32, or two of bfloat16 in each 4, of which the first is
    the lower half; then the starts of two rows in 16 bits each and their factors, of the lane and of its neighbour.

    Reads and writes of shared memory are volatile: lanes read what others wrote in an earlier step, so none may move to another step.
    """
    at, words, of_d, rows, fa, fb, other, fu, fv = (f"${n}" for n in range(6, 15))
    two, n_d = ways == 2, WIDTH // 2 if packed else WIDTH
    here = 64 * n_d  # where words begin, behind the cotangents
    lines = [
        ".reg .b32 a, b, u, v, ta, tb, tu, tv;",
        ".reg .f32 sa, sb, su, sv, ea, eb, own, beside;",
        ".reg .b32 next<6>;",
        ".reg .pred pa, pb, pu, pv, qu, qv, ma, mb, e, f;",
        f".reg .b32 d<{n_d}>;",
        *(f"ld.volatile.shared.v4.b32 {{d{n}, d{n + 1}, d{n + 2}, d{n + 3}}}, [{of_d}+{64 * n}];" for n in range(0, n_d, 4)),
        f"and.b32 a, {rows}, 65535;",
        f"add.u32 a, a, {at};",
        f"setp.neu.f32 pa, {fa}, 0f00000000;",
        f"and.b32 u, {other}, 65535;",
        f"add.u32 u, u, {at};",
        f"setp.neu.f32 qu, {fu}, 0f00000000;",
        # The first row of the neighbour: ma, if it is this one's first, which then adds both; pu: add it alone.
        "setp.eq.and.u32 e, u, a, qu;",
        "and.pred ma, e, pa;",
        "not.pred e, ma;",
        "and.pred pu, qu, e;",
        f"mov.f32 ea, {fu};",
    ]
    if two:
        lines += [
            f"shr.u32 b, {rows}, 16;",
            f"add.u32 b, b, {at};",
            f"setp.neu.f32 pb, {fb}, 0f00000000;",
            f"shr.u32 v, {other}, 16;",
            f"add.u32 v, v, {at};",
            f"setp.neu.f32 qv, {fv}, 0f00000000;",
            "setp.eq.and.u32 e, u, b, qu;",
            "and.pred mb, e, pb;",  # the first is this one's second
            "not.pred e, mb;",
            "and.pred pu, pu, e;",
            f"selp.f32 eb, {fu}, {fv}, mb;",
            "setp.eq.and.u32 e, v, a, qv;",
            "and.pred e, e, pa;",  # the second is this one's first
            f"selp.f32 ea, {fv}, ea, e;",
            "or.pred ma, ma, e;",
            "not.pred f, e;",
            "and.pred pv, qv, f;",
            "setp.eq.and.u32 e, v, b, qv;",
            "and.pred e, e, pb;",  # the second is this one's second
            "or.pred mb, mb, e;",
            "not.pred f, e;",
            "and.pred pv, pv, f;",
        ]
    names = ["a", "b", "u", "v"] if two else ["a", "u"]
    factor = {"a": fa, "b": fb, "u": fu, "v": fv}
    for j in range(0, WIDTH, 2):
        if packed:
            lines += [f"shl.b32 ta, d{j // 2}, 16;", "mov.b32 own, ta;"]
            lines += [f"and.b32 ta, d{j // 2}, -65536;", "mov.b32 beside, ta;"]
        else:
            lines += [f"mov.b32 own, d{j};", f"mov.b32 beside, d{j + 1};"]
        lines += [f"xor.b32 t{n}, {n}, {4 * j};" for n in names]
        lines += [f"ld.volatile.shared.f32 s{n}, [t{n}];" for n in names]
        if j == 2:
            lines += [f"ld.volatile.shared.b32 next{n}, [{words}+{here + 128 * n}];" for n in range(1 + ways)]
            lines += [] if two else ["mov.b32 next2, 0;"]
        if j == 8:
            lines += _SHUFFLED
        for n in names:
            lines += [f"fma.rn.f32 s{n}, {factor[n]}, {'own' if n in 'ab' else 'beside'}, s{n};"]
        lines += [f"@m{n} fma.rn.f32 s{n}, e{n}, beside, s{n};" for n in names if n in "ab"]
        lines += [f"@p{n} st.volatile.shared.f32 [t{n}], s{n};" for n in names]
    return "{ " + " ".join([*lines, *_RESULTS]) + " }"

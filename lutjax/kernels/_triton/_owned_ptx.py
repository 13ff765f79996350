"""PTX of the kernel in `_owned_columns`: sums in shared memory, and asynchronous copies to it.

Work: each snippet runs in all lanes of one warp. Operands ``$0`` and up are results, then
arguments, in the order of the call.

Layout: sums are rows of 128 bytes, one float32 per lane. The array is aligned to 128 bytes, so an
XOR of an address with ``4 * j``, ``j < 16``, moves from column ``i`` to column ``i ^ j`` of the
same table.

Numerics: fused multiply-adds in float32, in a fixed order. All accesses to sums are volatile:
lanes read what other lanes wrote in an earlier step, and the order of the steps of a warp must not
change.
"""

import functools

WIDTH = 16  # outputs of a warp, samples of a block


def base(name: str, size: int) -> str:
    """Return PTX that reserves `size` bytes of shared memory and computes each lane's address."""
    # Lane ``n`` begins 4 bytes after lane ``n - 1``. Braces make register names local, because
    # Triton may emit the snippet several times.
    return (
        f"{{ .shared .align 128 .b8 {name}[{size}]; .reg .b32 start; mov.u32 start, {name}; "
        "mad.lo.u32 $0, $1, 4, start; }"
    )


def wait(n_left: int) -> str:
    """Return PTX that waits for all copies but the last `n_left`, and for all lanes."""
    # wait_group covers the copies of one lane; the barrier makes those of the other lanes visible.
    return f"{{ cp.async.wait_group {n_left}; bar.warp.sync -1; mov.u32 $0, 0; }}"


# Triton requires a result; snippets without one return 0.
CLEAR = "{ st.volatile.shared.f32 [$1], 0f00000000; mov.u32 $0, 0; }"
# Results are written last, because their registers may be those of arguments.
_RESULTS = [f"mov.b32 ${n}, next{n};" for n in range(6)]
# A butterfly shuffle with mask 1 exchanges the values of lanes 2 n and 2 n + 1.
_SHUFFLED = [f"shfl.sync.bfly.b32 next{n + 3}, next{n}, 1, 31, -1;" for n in range(3)]
SWAP = " ".join(
    [
        "{ .reg .b32 next<6>;",
        *(f"mov.b32 next{n}, ${n + 6};" for n in range(3)),
        *_SHUFFLED,
        *_RESULTS,
        "}",
    ]
)
# Plain read, addition and write: the address belongs to the lane.
ADD = (
    "{ .reg .f32 sum; ld.volatile.shared.f32 sum, [$1]; add.f32 sum, sum, $2; "
    "st.volatile.shared.f32 [$1], sum; mov.u32 $0, 0; }"
)
# For elements that no other thread writes. The last argument is the result, so later loads depend
# on the store.
STORE = "{ st.shared.f32 [$1], $2; mov.u32 $0, $3; }"
LOAD = "ld.shared.f32 $0, [$1];"
READ = "ld.volatile.shared.f32 $0, [$1];"


@functools.cache
def copy_of_block(ways: int, packed: bool) -> str:
    """Return PTX that starts the copies of a sample block.

    Its arguments: $1 address of the lane's 4-byte elements, $2 of its 16 bytes of gradients; $3 to
    $6 addresses of its row pair, its two factors and the gradients; $7 the bytes to copy of each
    row pair and factor: 4, or 0 for zeros.
    """
    d = WIDTH * WIDTH * (2 if packed else 4)
    # 16 bytes per lane bypass the L1 cache (.cg): each gradient is used once. 32 lanes copy 512
    # bytes, half of a float32 block.
    lines = ["cp.async.cg.shared.global [$2], [$6], 16;"]
    if not packed:
        lines += ["cp.async.cg.shared.global [$2+512], [$6+512], 16;"]
    for n in range(1 + ways):
        # 4-byte copies exist only with .ca. Elements of rows and factors follow the gradients, 128
        # bytes each.
        lines += [f"cp.async.ca.shared.global [$1+{d + 128 * n}], [${3 + n}], 4, $7;"]
    # One group per block, which `wait` counts.
    return "{ " + " ".join([*lines, "cp.async.commit_group;", "mov.u32 $0, 0;"]) + " }"


@functools.cache
def add_of_block(ways: int, packed: bool) -> str:
    """Return PTX that adds a sample block to the sums of the warp.

    Its results: row pair and factors of the next block, of the lane and of its neighbor. Its
    arguments: addresses of the lane's sums, of its 4-byte elements (see `copy_of_block`) and of
    its gradients, float32 or pairs of bfloat16 with the first one in the lower half; then the row
    pair and two factors of the lane, and of its neighbor.

    Names: a and b are the lane's rows, u and v its neighbor's rows, s* their sums, t* the addresses
    in a step, own and beside the gradients for the lane's sample and its neighbor's sample.
    """
    at, words, of_d, rows, fa, fb, other, fu, fv = (f"${n}" for n in range(6, 15))
    two, n_d = ways == 2, WIDTH // 2 if packed else WIDTH
    # 4-byte elements begin behind the gradients: 16 lanes times 4 bytes for each register.
    here = 64 * n_d
    lines = [
        ".reg .b32 a, b, u, v, ta, tb, tu, tv;",
        ".reg .f32 sa, sb, su, sv, ea, eb, own, beside;",
        ".reg .b32 next<6>;",
        ".reg .pred pa, pb, pu, pv, qu, qv, ma, mb, e, f;",
        f".reg .b32 d<{n_d}>;",
        # All gradients of the block first, 16 bytes per load, so that their latency overlaps.
        *(
            f"ld.volatile.shared.v4.b32 {{d{n}, d{n + 1}, d{n + 2}, d{n + 3}}}, [{of_d}+{64 * n}];"
            for n in range(0, n_d, 4)
        ),
        # The lower 16 bits are the offset of the first row, the upper ones that of the second.
        f"and.b32 a, {rows}, 65535;",
        f"add.u32 a, a, {at};",
        f"setp.neu.f32 pa, {fa}, 0f00000000;",
        f"and.b32 u, {other}, 65535;",
        f"add.u32 u, u, {at};",
        f"setp.neu.f32 qu, {fu}, 0f00000000;",
        # First row of the neighbor: ma is set if the lane adds to the same row (its first one) and
        # then adds both; pu is set if the neighbor's row needs an addition of its own. Without
        # this, two reads of one sum before its write would lose an addition.
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
    # A step covers two gradients: the lane's column for its own sample and for its neighbor's.
    for j in range(0, WIDTH, 2):
        if packed:
            # bfloat16 is the upper half of a float32.
            lines += [f"shl.b32 ta, d{j // 2}, 16;", "mov.b32 own, ta;"]
            lines += [f"and.b32 ta, d{j // 2}, -65536;", "mov.b32 beside, ta;"]
        else:
            lines += [f"mov.b32 own, d{j};", f"mov.b32 beside, d{j + 1};"]
        lines += [f"xor.b32 t{n}, {n}, {4 * j};" for n in names]
        # All sums are read before any is written: the rows of a step differ, or are merged.
        lines += [f"ld.volatile.shared.f32 s{n}, [t{n}];" for n in names]
        # The next block's rows are read and exchanged between steps, so that their latency overlaps
        # with additions.
        if j == 2:
            lines += [
                f"ld.volatile.shared.b32 next{n}, [{words}+{here + 128 * n}];"
                for n in range(1 + ways)
            ]
            lines += [] if two else ["mov.b32 next2, 0;"]
        if j == 8:
            lines += _SHUFFLED
        for n in names:
            lines += [f"fma.rn.f32 s{n}, {factor[n]}, {'own' if n in 'ab' else 'beside'}, s{n};"]
        lines += [f"@m{n} fma.rn.f32 s{n}, e{n}, beside, s{n};" for n in names if n in "ab"]
        # Predicates skip factors of 0 and merged rows.
        lines += [f"@p{n} st.volatile.shared.f32 [t{n}], s{n};" for n in names]
    return "{ " + " ".join([*lines, *_RESULTS]) + " }"

"""PTX of the kernel of `_owned_columns`: sums in shared memory, and copies to it that go on while others are added."""

import functools

WIDTH = 16  # outputs of a warp, samples of a block


def base(name: str, size: int) -> str:
    """PTX that reserves so many bytes of shared memory; returns where those of a thread begin."""
    return (
        f"{{ .shared .align 128 .b8 {name}[{size}]; .reg .b32 start; mov.u32 start, {name}; "
        "mad.lo.u32 $0, $1, 4, start; }"
    )


def wait(n_left: int) -> str:
    """PTX that waits until all copies but the last ones that began have come, for all lanes."""
    return f"{{ cp.async.wait_group {n_left}; bar.warp.sync -1; mov.u32 $0, 0; }}"


CLEAR = "{ st.volatile.shared.f32 [$1], 0f00000000; mov.u32 $0, 0; }"
# Results are written last: their registers may be those of arguments.
_RESULTS = [f"mov.b32 ${n}, next{n};" for n in range(6)]
_SHUFFLED = [f"shfl.sync.bfly.b32 next{n + 3}, next{n}, 1, 31, -1;" for n in range(3)]
SWAP = " ".join(
    ["{ .reg .b32 next<6>;", *(f"mov.b32 next{n}, ${n + 6};" for n in range(3)), *_SHUFFLED, *_RESULTS, "}"]
)
ADD = "{ .reg .f32 sum; ld.volatile.shared.f32 sum, [$1]; add.f32 sum, sum, $2; st.volatile.shared.f32 [$1], sum; mov.u32 $0, 0; }"
# For numbers that no other thread writes; the last argument is the result, on which reads then depend.
STORE = "{ st.shared.f32 [$1], $2; mov.u32 $0, $3; }"
LOAD = "ld.shared.f32 $0, [$1];"
READ = "ld.volatile.shared.f32 $0, [$1];"


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

    Its results: rows and factors of the next block, of the lane and of its neighbor. Its arguments: where the sums of the lane begin,
    its words (see `copy_of_block`), and its cotangents, 16 bytes at a time: float32, or two of bfloat16 in each 4, of which the first is
    the lower half; then the starts of two rows in 16 bits each and their factors, of the lane and of its neighbor.

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
        *(
            f"ld.volatile.shared.v4.b32 {{d{n}, d{n + 1}, d{n + 2}, d{n + 3}}}, [{of_d}+{64 * n}];"
            for n in range(0, n_d, 4)
        ),
        f"and.b32 a, {rows}, 65535;",
        f"add.u32 a, a, {at};",
        f"setp.neu.f32 pa, {fa}, 0f00000000;",
        f"and.b32 u, {other}, 65535;",
        f"add.u32 u, u, {at};",
        f"setp.neu.f32 qu, {fu}, 0f00000000;",
        # The first row of the neighbor: ma, if it is this one's first, which then adds both; pu: add it alone.
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

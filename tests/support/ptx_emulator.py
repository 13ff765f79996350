"""Inline PTX in Triton's interpreter: the lanes in a warp run in lock-step, with separate shared memory.

All lanes finish an instruction before the next one begins. Copies arrive when they are waited for, no earlier. Two lanes writing
to one element, or one bank, at once raise an error, as do unaligned copies.
"""

import ctypes
import functools
import re
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_LANES = 32
_START = 256  # bytes before what a program declares

# Bits of registers, uint32 or bool, to bits.
_PURE = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mov.f32": lambda a: a,
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "add.u32": np.add,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "setp.eq.u32": np.equal,
    "setp.eq.and.u32": lambda a, b, p: (a == b) & p,
    "setp.neu.f32": lambda a, b: ~(_floats(a) == _floats(b)),
    "and.pred": np.logical_and,
    "or.pred": np.logical_or,
    "not.pred": np.logical_not,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "add.f32": lambda a, b: (_floats(a) + _floats(b)).view(np.uint32),
    "fma.rn.f32": lambda a, b, c: _fused(a, b, c).view(np.uint32),
    "shfl.sync.bfly.b32": lambda a, mask, *_: a[np.arange(_LANES) ^ mask],
}


def _exp2(a):
    result = np.exp2(a.astype(np.float64)).astype(np.float32)
    return np.where(np.abs(result) < np.finfo(np.float32).tiny, np.float32(0), result)


# Instructions of single elements, of arrays of any shape.
_OF_ELEMENTS = {"ex2.approx.ftz.f32 $0, $1;": _exp2}


def _floats(bits):
    return bits.view(np.float32)


def _fused(a, b, c):
    a, b, c = (_floats(v).astype(np.float64) for v in (a, b, c))
    return (a * b + c).astype(np.float32)


class Memory:
    """Shared memory for the running program, with pending copies in groups."""

    def __init__(self):
        self.declare(0)

    def declare(self, size):
        self.words = np.full(
            (_START + size) // 4, np.uint32(0x7FC00000)
        )  # NaN: what was not written is not read
        self.groups = [[]]

    def load(self, at):
        assert np.all(at >= _START), "before what was declared"
        return self.words[at // 4]

    def store(self, at, bits):
        at = at // 4
        assert len(set(at)) == len(at), "two lanes write one number"
        assert len(set(at % 32)) == len(at), "two lanes write one bank"
        self.words[at] = bits

    def copy(self, to, of, size, exists):
        assert np.all(to % size == 0), "not aligned"
        assert np.all(of % size == 0), "not aligned"

        def arrive():
            there = self.words.view(np.uint8)
            for t, o, n in zip(to, of, exists, strict=True):
                there[t : t + size] = np.frombuffer(
                    ctypes.string_at(int(o), int(n)).ljust(size, b"\0"), np.uint8
                )

        self.groups[-1].append(arrive)

    def wait(self, n_left):
        """Complete all groups except the last ones; the open group does not count."""
        n = max(len(self.groups) - 1 - n_left, 0)
        for group in self.groups[:n]:
            for arrive in group:
                arrive()
        self.groups = self.groups[n:]


@functools.cache
def _instructions(asm):
    """Return predicate, name and operands for each instruction."""
    body = asm.strip().removeprefix("{").removesuffix("}")
    result = []
    for text in filter(None, (part.strip() for part in body.split(";"))):
        match = re.fullmatch(r"(?:@(\w+)\s+)?(\S+)\s*(.*)", text)
        assert match, text
        predicate, name, operands = match.groups()
        result.append(
            (predicate or "", name, [o.strip() for o in re.findall(r"\{[^}]*\}|[^,]+", operands)])
        )
    return result


def run(asm, constraints, arguments, memory):
    """Run a PTX block and return its results per lane; arguments are per lane as well, with addresses as held by Python."""
    kinds = constraints.split(",")
    n_results = sum(kind.startswith("=") for kind in kinds)
    registers = {}
    for n, (kind, value) in enumerate(zip(kinds[n_results:], arguments, strict=True), n_results):
        bits = value.astype(np.int64) if kind == "l" else value.view(np.uint32)
        registers[f"${n}"] = np.broadcast_to(bits.ravel(), (_LANES,)).copy()

    def value(operand):
        if operand in registers:
            return registers[operand]
        return np.uint32(int(operand[2:], 16) if operand.startswith("0f") else int(operand) % 2**32)

    def address(operand):
        match = re.fullmatch(r"\[(\$?\w+)(?:\+(\d+))?\]", operand)
        assert match, operand
        return registers[match[1]].astype(np.int64) + int(match[2] or 0)

    for predicate, name, operands in _instructions(asm):
        runs = registers[predicate] if predicate else np.ones(_LANES, bool)

        def put(register, bits, runs=runs):
            bits = np.broadcast_to(bits, (_LANES,))
            registers[register] = bits if runs.all() else np.where(runs, bits, registers[register])

        if name == ".shared":
            match = re.search(r"(\w+)\[(\d+)\]", operands[0])
            assert match, operands
            memory.declare(int(match[2]))
            registers[match[1]] = np.full(_LANES, _START, np.uint32)
        elif name in _PURE:
            put(operands[0], _PURE[name](*map(value, operands[1:])))
        elif name.startswith(("ld.volatile.shared", "ld.shared")):
            at = address(operands[1])
            for n, register in enumerate(operands[0].strip("{}").split(",")):
                put(register.strip(), memory.load(at + 4 * n))
        elif name.startswith(("st.volatile.shared", "st.shared")):
            memory.store(
                address(operands[0])[runs], np.broadcast_to(value(operands[1]), (_LANES,))[runs]
            )
        elif name in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
            to, of, size = address(operands[0]), address(operands[1]), int(operands[2])
            exists = value(operands[3]) if len(operands) > 3 else np.full(_LANES, size)
            memory.copy(to, of, size, exists)
        elif name == "cp.async.commit_group":
            memory.groups.append([])
        elif name == "cp.async.wait_group":
            memory.wait(int(operands[0]))
        else:
            assert name in (".reg", "bar.warp.sync"), name
    results = [registers[f"${n}"] for n in range(n_results)]
    return [
        r.view(np.float32 if kind == "=f" else np.int32)
        for r, kind in zip(results, kinds, strict=False)
    ]


def create_inline_asm(memory):
    """Return the method missing from Triton's interpreter."""

    def create(_, asm, constraints, handles, *_others):
        with np.errstate(all="ignore"):
            if asm in _OF_ELEMENTS:
                result = _OF_ELEMENTS[asm](*(h.data for h in handles))
                return SimpleNamespace(
                    get_result=[interpreter.TensorHandle(result, tl.float32)].__getitem__
                )
            actual = run(asm, constraints, [h.data for h in handles], memory)
        types = (tl.float32 if bits.dtype == np.float32 else tl.int32 for bits in actual)
        results = [
            interpreter.TensorHandle(bits, kind) for bits, kind in zip(actual, types, strict=True)
        ]
        return SimpleNamespace(get_result=results.__getitem__)

    return create

"""MLIR building blocks for Mosaic GPU kernels with data-dependent addresses.

Pallas has no vector gather and no shared-memory addition, so kernels inline MLIR through
`plgpu.inline_mgpu`. Here every value is one thread's register.

Layouts: `one_each` gives thread ``t`` elements ``t, t + 128, ...``, so that neighboring threads
touch neighboring addresses (coalesced). `layout_of_all` gives each thread up to four contiguous
elements.

Numerics: integer additions in shared memory are exact in any order. Float additions are atomic, but
their order, and thus a sum's last bits, varies between runs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from lutjax.kernels._pallas.gpu import _mosaic_launch

_THREADS = _mosaic_launch.THREADS


# ------------------------------------------------------------------------------------- arrays
def one_each(together: int) -> Any:
    """Return the layout with neighboring elements in neighboring threads, `together` per thread."""
    return plgpu.Layout.WG_STRIDED((together * _THREADS,), 1)


def iota(first: Any, together: int) -> jax.Array:
    """Return consecutive numbers from `first`, in the layout `one_each`."""
    return first + plgpu.broadcasted_iota(
        jnp.int32, (together * _THREADS,), 0, layout=one_each(together)
    )


def layout_of_all(size: int) -> Any:
    """Return the layout to clear and read shared memory: up to four contiguous elements."""
    each = size // _THREADS
    # Four 32-bit elements are one 128-bit access; the size must be a multiple of threads times
    # width.
    return plgpu.Layout.WG_STRIDED((size,), next(n for n in (4, 2, 1) if each % n == 0))


# ------------------------------------------------------------------------------------- values
def int32() -> Any:
    return ir.IntegerType.get_signless(32)


def integer(number: int) -> Any:
    return mosaic.c(number, int32())


def zero() -> Any:
    return mosaic.c(0.0, ir.F32Type.get())


def thread() -> Any:
    """Return the thread's number within its program, int32."""
    return mosaic.utils.thread_idx()


def element(register: Any, place: int) -> Any:
    return vector.extract(
        register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place])
    )


def only_element(register: Any) -> Any:
    return element(register, 0)


def sums_over_lanes(values: list[Any]) -> Any:
    """Sum each of ``2**n`` values over ``2**n`` neighboring lanes.

    Lane ``l`` receives the sum of value ``l``.

    In each exchange a lane sends half its partial sums and receives its partner's sums for its own
    half.
    """
    lane = thread()
    # Values and lanes halve together: n - 1 shuffles in all, where one butterfly per value would
    # take n log n.
    while len(values) > 1:
        distance = len(values) // 2
        bit = arith.andi(lane, integer(distance))
        upper = arith.cmpi(arith.CmpIPredicate.ne, bit, integer(0))
        halves = zip(values[:distance], values[distance:], strict=True)
        values = [
            arith.addf(
                arith.select(upper, b, a),
                mosaic.utils.shfl_bfly(arith.select(upper, a, b), distance),
            )
            for a, b in halves
        ]
    return values[0]


# ------------------------------------------------------------------------------------- memory
def to_index(number: Any) -> Any:
    """Convert a non-negative int32 to an index."""
    # Unsigned: numbers are not negative, and a zero extension is one instruction.
    return arith.index_castui(ir.IndexType.get(), number)


def load_element(array: Any, *numbers: Any) -> Any:
    return memref.load(array, [to_index(number) for number in numbers])


def address(array: Any) -> Any:
    """Return an array's int32 address in shared memory."""
    # Addresses in the shared window have 32 bits; 64-bit arithmetic would cost two registers each.
    return llvm.ptrtoint(int32(), mosaic.utils.memref_ptr(array))


def add_in_shared_memory(base: Any, cell: Any, value: Any) -> None:
    """Add a 32-bit value to a cell in the array at address `base`.

    Do nothing if the cell is negative.
    """
    instruction, constraint = ("f32", "f") if value.type == ir.F32Type.get() else ("u32", "r")
    # `red` returns no value, unlike `atom`, so a thread does not wait for it. The predicate
    # replaces a branch: masked elements have negative cells and add nothing.
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [arith.addi(base, arith.muli(cell, integer(4))), cell, value],
        f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p red.shared.add.{instruction} [$0], $2; }}",
        f"r,r,{constraint}",
        # Without a result the compiler would otherwise delete the instruction.
        has_side_effects=True,
    )

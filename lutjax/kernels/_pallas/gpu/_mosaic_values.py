"""MLIR of the kernels whose threads read and add where addresses say: Pallas has no gather of a vector, and no addition to shared memory."""

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
    """Return the layout of an array of which each thread has one number, then further ones: neighbors have neighbors."""
    return plgpu.Layout.WG_STRIDED((together * _THREADS,), 1)


def numbers(first: Any, together: int) -> jax.Array:
    """Return the numbers from `first` on, in the layout `one_each`."""
    return first + plgpu.broadcasted_iota(jnp.int32, (together * _THREADS,), 0, layout=one_each(together))


def layout_of_all(size: int) -> Any:
    """Return the layout in which an array in shared memory is cleared and read: at most four contiguous numbers in a register."""
    each = size // _THREADS
    return plgpu.Layout.WG_STRIDED((size,), next(n for n in (4, 2, 1) if each % n == 0))


# ------------------------------------------------------------------------------------- values
def int32() -> Any:
    return ir.IntegerType.get_signless(32)


def integer(number: int) -> Any:
    return mosaic.c(number, int32())


def zero() -> Any:
    return mosaic.c(0.0, ir.F32Type.get())


def thread() -> Any:
    """Return the number of the thread in its program, int32."""
    return mosaic.utils.thread_idx()


def element(register: Any, place: int) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))


def only(register: Any) -> Any:
    """Return the one number that a register holds."""
    return element(register, 0)


def sums_over_lanes(values: list[Any]) -> Any:
    """Return the sums over neighboring lanes, as many as values, a power of two: lane l of these gets that of value l.

    In each exchange a lane gives half of the values it has sums of and gets the other lane's sums of the other half.
    """
    lane = thread()
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
def place(number: Any) -> Any:
    """Return an int32, which is not negative, as an index."""
    return arith.index_castui(ir.IndexType.get(), number)


def at(array: Any, *numbers: Any) -> Any:
    """Return the number at a place of an array."""
    return memref.load(array, [place(number) for number in numbers])


def address(array: Any) -> Any:
    """Return the address of an array in shared memory, int32."""
    return llvm.ptrtoint(int32(), mosaic.utils.memref_ptr(array))


def add_in_shared_memory(base: Any, cell: Any, value: Any) -> None:
    """Add a number of 32 bits at a cell from the address `base` on; nothing if the cell is negative."""
    instruction, constraint = ("f32", "f") if value.type == ir.F32Type.get() else ("u32", "r")
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [arith.addi(base, arith.muli(cell, integer(4))), cell, value],
        f"{{ .reg .pred p; setp.ge.s32 p, $1, 0; @p red.shared.add.{instruction} [$0], $2; }}",
        f"r,r,{constraint}",
        has_side_effects=True,
    )

"""Gradients of lookup tables addressed by bits: per-thread gathers and additions.

Formula for gate ``g``, sample ``s`` and ``address[g, s]`` with bit ``l`` equal to ``x[wires[g, l],
s] > 0``::

    sum_over_readers:  dx[i, s] = dy[g, s] * slopes[g, l, address], summed
                                  over the wires (g, l) that read i
    sum_by_address:    dtable[g, k] = sum_s dy[g, s] * [address == k]

Work: each program is one warpgroup and owns 512 samples for one gate or input, four contiguous
samples per thread. For `sum_by_address` a program owns one gate and a sample chunk; XLA adds the
chunks.

Layout: features first, ``[features, samples]``. Four 8-bit addresses are packed in a word, so that
a thread loads one word for its four samples, and 16 bytes of cotangents.

Numerics: float32 sums. Readers add in listed order. `sum_by_address` has one sum per slot and
thread, in shared memory, so nothing is added concurrently and results are equal in every run. NaN
is an unset bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from lutjax.kernels._pallas.gpu import _mosaic_launch, _mosaic_values as mlir
from lutjax.kernels._xla import _wire_gathers

_FOUR = 4  # addresses in a word
_THREADS = _mosaic_launch.THREADS
_BLOCK = _FOUR * _THREADS  # samples that a program has at a time
_TOGETHER = 8  # readers of an input that are read at the same time
_PROGRAMS = 132 * 8  # enough for an H100 or H200


def pack_addresses(x: jax.Array, wires: jax.Array) -> jax.Array:
    """Return the addressed slots, int32 ``[G, samples / 4]``, padded to whole sample blocks.

    Bits are packed first, 32 samples to a word.
    """
    n_samples = -(-x.shape[1] // _BLOCK) * _BLOCK
    bits = _mosaic_launch.pad_to((x > 0).astype(jnp.int32), n_samples).reshape(
        len(x), n_samples // 32, 32
    )
    # 32 samples to a word: the bits of all inputs then fit the caches, from which every wire reads
    # them.
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.int32)[None, None], -1, dtype=jnp.int32)
    shift = _FOUR * jnp.arange(32 // _FOUR, dtype=jnp.int32)[None, None]
    addresses = jnp.zeros((len(wires), n_samples // 32, 32 // _FOUR), jnp.int32)
    for place, bits in enumerate(_wire_gathers.rows(words, wires, words.dtype)):
        four = (bits[..., None] >> shift) & 15
        # Each of four bits to a byte of its own.
        addresses |= ((four * 0x00204081) & 0x01010101) << place
    return addresses.reshape(len(wires), n_samples // _FOUR)


def sum_over_readers(
    addresses: jax.Array, slopes: jax.Array, readers: jax.Array, dy: jax.Array, n_places: int
) -> jax.Array:
    """Sum dy times slope over each input's readers, float32 ``[I, n]``.

    Args:
      slopes: by wire and address, float32 ``[G * n_places, 2**n_places]``.
    """
    n_samples, n_wires = dy.shape[1], len(slopes)
    rounds = max(-(-readers.shape[1] // _TOGETHER), 1)
    # Equal rounds: no round reads mostly padding.
    together = -(-readers.shape[1] // rounds)
    # -1 is no reader: its addend is masked below.
    readers = _mosaic_launch.pad_to(readers, rounds * together, value=-1)
    dy = _mosaic_launch.pad_to(dy, _FOUR * addresses.shape[1])

    def kernel(addresses: Any, slopes: Any, readers: Any, dy: Any, dx: Any) -> None:
        feature = lax.axis_index("rows")

        def add(first: Any, total: jax.Array) -> jax.Array:
            read = []
            for u in range(together):
                number = readers[feature, first * together + u]
                # Absent readers read wire 0: loads need a valid address.
                wire = jnp.clip(number, 0, n_wires - 1)
                gate = lax.div(wire, jnp.int32(n_places))
                read.append(
                    (
                        number,
                        wire,
                        _load(dy, gate, _sample_slice(), _FOUR),
                        addresses[gate, _word_slice()],
                    )
                )
            # Loads of all readers of a round are issued before the first use, so that their
            # latencies overlap.
            for number, wire, g, address in read:
                received = g * _gather(slopes.at[wire], address)
                # A select, not a factor: the cotangent of wire 0 may be NaN.
                total += jnp.where(number >= 0, received, 0.0)
            return total

        total = plgpu.layout_cast(jnp.zeros((_BLOCK,), jnp.float32), _layout(_FOUR))
        dx[feature, _sample_slice()] = (
            add(0, total) if rounds == 1 else lax.fori_loop(0, rounds, add, total)
        )

    dx = _launch_by_block(
        kernel, addresses, slopes, readers, dy, rows=len(readers), name="binary_lut_inputs"
    )
    return dx[:, :n_samples]


def sum_by_address(addresses: jax.Array, dy: jax.Array, n_slots: int) -> jax.Array:
    """Sum dy over the samples that address each slot, float32 ``[G, n_slots]``.

    Every thread has its own sum for each slot, a column in shared memory.
    """
    n_gates = len(dy)
    n_blocks = addresses.shape[1] // _THREADS
    parts = min(max(_PROGRAMS // n_gates, 1), n_blocks)
    n_blocks = -(-n_blocks // parts)
    # Padding samples address slot 0 with a cotangent of 0.
    addresses = _mosaic_launch.pad_to(addresses, parts * n_blocks * _THREADS)
    dy = _mosaic_launch.pad_to(dy, parts * n_blocks * _BLOCK)
    # A thread sums a slot over as many columns as there are slots, or a few slots over all.
    each = min(n_slots, _THREADS)
    rounds = n_slots // each

    def kernel(addresses: Any, dy: Any, sums: Any) -> None:
        part, gate = lax.axis_index("samples"), lax.axis_index("rows")

        def with_columns(columns: Any) -> None:
            _clear(columns)

            @pl.loop(0, n_blocks)
            def _(i: Any) -> None:
                block = part * n_blocks + i
                g = _load(dy, gate, pl.ds(block * _BLOCK, _BLOCK), _FOUR)
                _add(columns, addresses[gate, pl.ds(block * _THREADS, _THREADS)], g)

            for i in range(rounds):
                sums[part, gate, i] = _sum_columns(columns, i * each, each)

        # Slot-major: thread t always touches bank t % 32, whatever slot it addresses, so there are
        # no bank conflicts.
        columns = plgpu.SMEM((n_slots, _THREADS), jnp.float32)
        pl.run_scoped(with_columns, columns, collective_axes="warpgroup")

    (sums,) = _mosaic_launch.launch(
        kernel,
        addresses,
        dy,
        outputs=[jax.ShapeDtypeStruct((parts, n_gates, rounds, _THREADS), jnp.float32)],
        name="binary_lut_table",
        grid={"samples": parts, "rows": n_gates},
        by_lanes=True,
        warpgroups=1,
    )
    # Threads of a round that sum the same slot are `each` apart.
    return jnp.sum(sums.reshape(parts, n_gates, rounds, _THREADS // each, each), (0, 3)).reshape(
        n_gates, n_slots
    )


def _launch_by_block(
    kernel: Any, addresses: jax.Array, *inputs: jax.Array, rows: int, name: str
) -> jax.Array:
    """Run a kernel whose programs each write one row's sample block: ``[rows, samples]``."""
    n_blocks = addresses.shape[1] // _THREADS
    (y,) = _mosaic_launch.launch(
        kernel,
        addresses,
        *inputs,
        outputs=[jax.ShapeDtypeStruct((rows, n_blocks * _BLOCK), jnp.float32)],
        name=name,
        grid={"samples": n_blocks, "rows": rows},
        by_lanes=True,
        warpgroups=1,
    )
    return y


# ------------------------------------------------------------------------------------- in kernels
def _sample_slice() -> Any:
    return pl.ds(lax.axis_index("samples") * _BLOCK, _BLOCK)


def _word_slice() -> Any:
    return pl.ds(lax.axis_index("samples") * _THREADS, _THREADS)


def _layout(each: int) -> Any:
    """Return the layout with `each` contiguous elements per thread."""
    return plgpu.Layout.WG_STRIDED((each * _THREADS,), each)


def _load(a: Any, row: Any, samples: Any, each: int) -> jax.Array:
    """Load one row's samples as float32, `each` contiguous samples per thread."""
    return plgpu.layout_cast(a[row, samples], _layout(each)).astype(jnp.float32)


def _gather(row: Any, addresses: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _layout(1)),
        return_type=plgpu.ShapeDtypeStruct((_BLOCK,), jnp.float32, layout=_layout(_FOUR)),
    )
    def load(_: Any, row: Any, addresses: Any) -> Any:
        values = [memref.load(row, [slot]) for slot in _unpack_addresses(addresses)]
        return _array(values)

    value: jax.Array = load(row, addresses)
    return value


def _clear(columns: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def clear(_: Any, columns: Any) -> None:
        # A thread clears only its own column, which it alone adds to: no barrier is needed.
        for slot in range(columns.type.shape[0]):
            memref.store(mlir.zero(), columns, [_index(slot), _thread()])

    clear(columns)


def _add(columns: Any, addresses: jax.Array, values: jax.Array) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(1), _layout(_FOUR)))
    def add(_: Any, columns: Any, addresses: Any, values: Any) -> None:
        thread, (register,) = _thread(), values.registers.flat
        for i, slot in enumerate(_unpack_addresses(addresses)):
            # Not atomic: the column belongs to this thread. Samples of one thread may address one
            # slot, so they are added one after the other.
            total = arith.addf(memref.load(columns, [slot, thread]), mlir.element(register, i))
            memref.store(total, columns, [slot, thread])

    add(columns, addresses, values)


def _sum_columns(columns: Any, first: int, each: int) -> jax.Array:
    """Sum the columns starting with slot `first`.

    Thread ``t`` sums slot ``first + t % each`` over `each` columns, starting with column ``t //
    each * each``.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((_THREADS,), jnp.float32, layout=_layout(1)),
    )
    def sum_columns(_: Any, columns: Any) -> Any:
        # From here on threads read columns of other threads.
        mosaic.utils.warpgroup_barrier()
        thread, total = _thread(), mlir.zero()
        slot = arith.remui(thread, _index(each))
        start = arith.subi(thread, slot)
        for i in range(each):
            # Each thread begins elsewhere, so that they read different banks of the memory.
            column = arith.addi(start, arith.remui(arith.addi(slot, _index(i)), _index(each)))
            total = arith.addf(
                total, memref.load(columns, [arith.addi(slot, _index(first)), column])
            )
        return _array([total])

    total: jax.Array = sum_columns(columns)
    return total


def _unpack_addresses(addresses: Any) -> list[Any]:
    (register,) = addresses.registers.flat
    # Logical shifts: the highest address of a word may set the sign bit.
    word, bits = mlir.only_element(register), 32 // _FOUR
    slots = [
        arith.andi(arith.shrui(word, mlir.integer(bits * i)), mlir.integer(2**bits - 1))
        for i in range(_FOUR)
    ]
    return [mlir.to_index(slot) for slot in slots]


def _array(values: list[Any]) -> Any:
    """Return an array with the given elements in this thread."""
    register = vector.from_elements(ir.VectorType.get((len(values),), ir.F32Type.get()), values)
    return mosaic.FragmentedArray(
        _registers=np.array([register], dtype=object),
        _layout=mosaic.WGStridedFragLayout((len(values) * _THREADS,), len(values)),
        _is_signed=None,
    )


def _thread() -> Any:
    return mlir.to_index(mlir.thread())


def _index(number: int) -> Any:
    return mosaic.c(number, ir.IndexType.get())

"""Weighted reads from small tables in shared memory, for `lutjax.scored_lut`.

Formula for sample ``n``, group ``g``, the group's tables ``t`` and ways ``k`` (one or two)::

    sum_rows:  y[n, g] = sum_{t, k} factors[k, t, n] * weights[t, row[k, t, n]]
    products:  p[k, t, n] = <dy[n, g], weights[t, row[k, t, n]]>

Work: grid (groups, sample blocks with `SAMPLES` samples). A program keeps its samples' sums, or
cotangents, in registers while it visits the group's tables; copies of the next tables overlap.
Eight lanes handle one sample; a warp handles four samples at a time, 64 samples in total.

Layout: eight lanes read 32 outputs (128 bytes) in one instruction. A remainder with 16 outputs is
*narrow*: four lanes read 16 outputs of the first way's row, four lanes the second way's row. The
two row numbers differ in one bit, so one has even and one odd parity. Narrow rows are permuted by
parity, so that the two rows reside in different halves of the banks.

Numerics: float32 with contracted multiply-adds, tables in ascending order, no atomics: results are
equal in every run. Rows are not clamped here: built-in reads address existing rows. `sum_rows`
flags samples with non-finite sums, and the caller recomputes them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from lutjax.kernels._pallas.gpu import _mosaic_launch, _mosaic_values as mlir

WIDE, NARROW = 32, 16  # outputs that the lanes of a sample read of one row, and of each of two
_OF_SAMPLE = 8  # lanes
_OF_WARP = 4  # samples that a warp reads at the same time
_WARPS = _mosaic_launch.WARPGROUPS * _mosaic_launch.THREADS // 32
_NUMBERS = 4  # that a lane reads at once
_TOGETHER = (
    16  # samples that eight lanes have; of at most 64 outputs, their numbers fit the registers
)
SAMPLES_OF_WARP = _TOGETHER * _OF_WARP
"""Samples per warp, which share their flags."""
SAMPLES = SAMPLES_OF_WARP * _WARPS
"""Samples per program."""
_OF_COPY = (
    SAMPLES // 128,
    128,
)  # shape of numbers of the samples: copies are of at most 256 along each axis
_MOST_SHARED = 225 * 2**10  # bytes of shared memory for blocks of arrays; barriers take some more


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Outputs padded to whole reads: `wide` 32-output blocks and `narrow` 16-output blocks."""

    wide: int
    narrow: int

    @classmethod
    def for_outputs(cls, n_outputs: int) -> "_Columns":
        blocks = -(-n_outputs // NARROW)
        return cls(blocks // 2, blocks % 2)

    @property
    def outputs(self) -> int:
        return self.wide * WIDE + self.narrow * NARROW

    @property
    def pieces(self) -> int:
        """Four-element reads per lane and row; a narrow read serves both rows."""
        return self.wide + self.narrow


def sum_rows(
    weights: jax.Array, rows: jax.Array, factors: jax.Array, groups: int
) -> tuple[jax.Array, jax.Array]:
    """Sum each group's rows times factors, float32.

    Shapes: ``[T, R, O]``, ``[T, n]``, ``[K, T, n]`` -> ``[n, G, O]``.

    Args:
      rows: packed starts of two rows, see `lutjax.kernels._triton._owned_columns.places`.
      factors: one or two ways; ``n`` must be a multiple of `SAMPLES`.

    Returns:
      The sums, and int32 flags ``[G, n / SAMPLES_OF_WARP, 32]``. A nonzero flag marks non-finite
        sums.
    """
    call = _Call.for_reads(weights, rows, factors.shape[0], groups)

    def kernel(rows: Any, factors: Any, *rest: Any) -> None:
        *tables, y, strange = rest
        block, group = lax.axis_index("samples"), lax.axis_index("groups")

        def step(_: Any, *blocks: Any) -> Any:
            *references, sums = blocks
            return _plus_rows(call, references, sums)

        def compute_context(run: Any) -> None:
            zero = jnp.zeros((call.n_sums,), jnp.float32)
            sums = run(plgpu.layout_cast(zero, call.layout))
            _write(call, sums, y.at[block, :, group], strange.at[group, block])

        blocks = [call.words_block(), call.factors_block(), *call.table_blocks()]
        call.pipeline(step, compute_context, [rows, factors, *tables], blocks)

    n = rows.shape[1]
    y, strange = call.launch(
        kernel,
        [call.split_by_program(rows), call.split_by_program(factors), *call.tables(weights)],
        [
            jax.ShapeDtypeStruct(
                (n // SAMPLES, SAMPLES, groups, call.columns.outputs), jnp.float32
            ),
            jax.ShapeDtypeStruct((groups, n // SAMPLES, _WARPS * 32), jnp.int32),
        ],
        "scored_rows",
    )
    return y.reshape(n, groups, -1)[..., : weights.shape[2]], strange.reshape(groups, -1, 32)


def products(
    weights: jax.Array, rows: jax.Array, dy: jax.Array, ways: int, groups: int
) -> jax.Array:
    """Return ``<dy, row>`` for each way's rows, float32.

    Shapes: ``[T, R, O]``, ``[T, n]``, ``[n, G, O]`` -> ``[K, T, n]``.

    Args:
      rows: see `sum_rows`.
    """
    call = _Call.for_reads(weights, rows, ways, groups)
    n_tables, n = rows.shape
    dy = _mosaic_launch.pad_to(dy.astype(jnp.float32), call.columns.outputs)
    dy = dy.reshape(n // SAMPLES, SAMPLES, *dy.shape[1:])

    def kernel(rows: Any, *rest: Any) -> None:
        *tables, dy, output = rest
        block, group = lax.axis_index("samples"), lax.axis_index("groups")
        here = dy.at[block, :, 0 if dy.shape[2] == 1 else group]

        def step(number: Any, *blocks: Any) -> Any:
            *references, cotangents = blocks
            table = group * call.n_each + number[0]
            _multiply(call, references, cotangents, output.at[:, table, block])
            return cotangents

        def compute_context(run: Any) -> None:
            run(_cotangents(call, here))

        call.pipeline(
            step, compute_context, [rows, *tables], [call.words_block(), *call.table_blocks()]
        )

    (output,) = call.launch(
        kernel,
        [call.split_by_program(rows), *call.tables(weights), dy],
        [jax.ShapeDtypeStruct((ways, n_tables, n // SAMPLES, SAMPLES), jnp.float32)],
        "scored_products",
    )
    return output.reshape(ways, n_tables, n)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Call sizes and kernel launches."""

    columns: _Columns
    ways: int
    n_groups: int
    n_each: int
    n_rows: int
    n_samples: int

    @classmethod
    def for_reads(cls, weights: jax.Array, rows: jax.Array, ways: int, groups: int) -> "_Call":
        n_tables, n_rows, n_outputs = weights.shape
        return cls(
            _Columns.for_outputs(n_outputs), ways, groups, n_tables // groups, n_rows, rows.shape[1]
        )

    def split_by_program(self, numbers: jax.Array) -> jax.Array:
        """Split elements ``[..., n]`` by program."""
        return numbers.reshape(*numbers.shape[:-1], -1, *_OF_COPY)

    @property
    def n_sums(self) -> int:
        """Number of sums or cotangents in a warpgroup's registers."""
        return _TOGETHER * self.columns.pieces * _NUMBERS * _mosaic_launch.THREADS

    @property
    def layout(self) -> Any:
        """Layout with four-element vectors per thread, sample after sample."""
        return plgpu.Layout.WG_STRIDED((self.n_sums,), _NUMBERS)

    def tables(self, weights: jax.Array) -> list[jax.Array]:
        """Return wide columns, and narrow ones with even and odd rows in different banks."""
        weights = _mosaic_launch.pad_to(weights.astype(jnp.float32), self.columns.outputs)
        blocks = [weights] if self.columns.wide else []
        if self.columns.narrow:
            number = np.arange(self.n_rows)
            odd = np.bitwise_count(number) % 2
            place = (number & ~1) | odd
            assert self.n_rows % 2 == 0
            # Row r goes to place (r & ~1) | parity(r): a permutation within each pair of neighbors,
            # so 64-byte rows of odd parity occupy the upper half of 128 bytes.
            blocks.append(weights[:, np.argsort(place), self.columns.wide * WIDE :])
        return blocks

    def words_block(self) -> plgpu.BlockSpec:
        return plgpu.BlockSpec(
            (1, 1, *_OF_COPY),
            lambda t: (self._table(t), lax.axis_index("samples"), 0, 0),
            memory_space=plgpu.SMEM,
        )

    def factors_block(self) -> plgpu.BlockSpec:
        return plgpu.BlockSpec(
            (self.ways, 1, 1, *_OF_COPY),
            lambda t: (0, self._table(t), lax.axis_index("samples"), 0, 0),
            memory_space=plgpu.SMEM,
        )

    def table_blocks(self) -> list[plgpu.BlockSpec]:
        widths = [self.columns.wide * WIDE, self.columns.narrow * NARROW]
        return [
            plgpu.BlockSpec(
                (1, self.n_rows, width), lambda t: (self._table(t), 0, 0), memory_space=plgpu.SMEM
            )
            for width in widths
            if width
        ]

    def _table(self, t: Any) -> Any:
        return lax.axis_index("groups") * self.n_each + t

    def pipeline(
        self, step: Any, around: Any, inputs: list[Any], blocks: list[plgpu.BlockSpec]
    ) -> None:
        # As many stages as fit shared memory; two overlap copies and reads, more hide their
        # latency.
        stage = 4 * (self.n_rows * self.columns.outputs + (1 + self.ways) * SAMPLES)
        _mosaic_launch.pipeline(
            step,
            around,
            *inputs,
            blocks=blocks,
            steps=self.n_each,
            stages=min(_MOST_SHARED // stage, 4),
        )

    def launch(
        self, kernel: Any, inputs: list[jax.Array], outputs: list[jax.ShapeDtypeStruct], name: str
    ) -> tuple[jax.Array, ...]:
        return _mosaic_launch.launch(
            kernel,
            *inputs,
            outputs=outputs,
            name=name,
            grid={"groups": self.n_groups, "samples": self.n_samples // SAMPLES},
            by_lanes=True,
        )


# ------------------------------------------------------------------------------------- in kernels
class _Lane:
    """Thread position: its lane among eight, and its first sample in the program, int32."""

    def __init__(self, call: _Call):
        thread = mlir.thread()
        warp = arith.shrui(thread, mlir.integer(5))
        self.number = arith.andi(thread, mlir.integer(_OF_SAMPLE - 1))
        of_warp = arith.andi(arith.shrui(thread, mlir.integer(3)), mlir.integer(_OF_WARP - 1))
        # A warp owns 64 contiguous samples; its groups of eight lanes own every fourth of them.
        self.first = arith.addi(arith.muli(warp, mlir.integer(_OF_WARP * _TOGETHER)), of_warp)
        self.of_four = arith.andi(self.number, mlir.integer(3))
        # The first four lanes have the first way.
        self.is_first = arith.cmpi(arith.CmpIPredicate.ult, self.number, mlir.integer(4))


def _vector_type() -> Any:
    return ir.VectorType.get((_NUMBERS,), ir.F32Type.get())


def _plus(base: Any, number: Any) -> Any:
    return arith.addi(base, mlir.integer(number) if isinstance(number, int) else number)


def _times(number: Any, by: int) -> Any:
    return arith.muli(number, mlir.integer(by))


def _read(kind: Any, address: Any, alignment: int) -> Any:
    return llvm.load(kind, llvm.inttoptr(llvm.PointerType.get(3), address), alignment=alignment)


def _multiply_contracted(a: Any, b: Any) -> Any:
    # `contract` lets the compiler form one multiply-add of a product and a sum.
    return arith.mulf(a, b, fastmath=arith.FastMathFlags.contract)


def _add_contracted(a: Any, b: Any) -> Any:
    return arith.addf(a, b, fastmath=arith.FastMathFlags.contract)


class _Rows:
    """Table rows read by a lane's samples."""

    def __init__(self, call: _Call, lane: _Lane, words: Any, tables: list[Any]):
        self._call, self._lane = call, lane
        self._words = _plus(mlir.address(words), _times(lane.first, 4))
        tables = [mlir.address(table) for table in tables]
        of_lane = _times(lane.number, 4 * _NUMBERS)
        self._wide = _plus(tables[0], of_lane) if call.columns.wide else None
        of_lane = _times(lane.of_four, 4 * _NUMBERS)
        self._narrow = _plus(tables[-1], of_lane) if call.columns.narrow else None

    def load(self, i: int) -> tuple[list[list[Any]], Any]:
        """Return the i-th sample's elements.

        For each wide block these are the rows of all ways; for the narrow block, one row.
        """
        columns, ways = self._call.columns, self._call.ways
        word = _read(mlir.int32(), _plus(self._words, 4 * _OF_WARP * i), 4)
        # Two starts of 16 bits in one word: one load serves both ways.
        starts = [arith.andi(word, mlir.integer(65535)), arith.shrui(word, mlir.integer(16))][:ways]
        wide = [
            [
                _read(
                    _vector_type(),
                    _plus(_plus(self._wide, _times(start, columns.wide)), 4 * WIDE * b),
                    16,
                )
                for start in starts
            ]
            for b in range(columns.wide)
        ]
        if not columns.narrow:
            return wide, None
        # Each half of the lanes reads its way: both rows in one instruction without bank conflicts.
        start = arith.select(self._lane.is_first, starts[0], starts[-1])  # 128 times the row
        # The parity of the start is that of the row number, as 128 is a power of two. It selects
        # the upper 64 bytes of the pair, (start >> 1) & ~127 the pair.
        odd = arith.shli(arith.andi(llvm.intr_ctpop(start), mlir.integer(1)), mlir.integer(6))
        even = arith.andi(arith.shrui(start, mlir.integer(1)), mlir.integer(~127))
        return wide, _read(_vector_type(), _plus(self._narrow, arith.ori(even, odd)), 16)


def _array(call: _Call, registers: list[Any]) -> Any:
    return mosaic.FragmentedArray(
        _registers=np.array(registers, dtype=object),
        _layout=mosaic.WGStridedFragLayout((call.n_sums,), _NUMBERS),
        _is_signed=None,
    )


def _like(call: _Call) -> Any:
    return plgpu.ShapeDtypeStruct((call.n_sums,), jnp.float32, layout=call.layout)


def _plus_rows(call: _Call, references: list[Any], sums: jax.Array) -> jax.Array:
    words, factors, *tables = references
    arg_types = (plgpu.RefType(), plgpu.RefType(), [plgpu.RefType()] * len(tables), call.layout)

    @plgpu.inline_mgpu(arg_types=arg_types, return_type=_like(call))
    def add(_: Any, words: Any, factors: Any, tables: list[Any], sums: Any) -> Any:
        lane = _Lane(call)
        rows = _Rows(call, lane, words, tables)
        factors = _plus(mlir.address(factors), _times(lane.first, 4))
        totals = list(sums.registers.flat)
        for i in range(_TOGETHER):
            wide, narrow = rows.load(i)
            of_ways = [
                _read(ir.F32Type.get(), _plus(factors, 4 * (SAMPLES * way + _OF_WARP * i)), 4)
                for way in range(call.ways)
            ]
            # Registers are sample-major: wide pieces, then the narrow piece.
            at = i * call.columns.pieces
            for b, of_rows in enumerate(wide):
                for factor, row in zip(of_ways, of_rows, strict=True):
                    product = _multiply_contracted(vector.broadcast(_vector_type(), factor), row)
                    totals[at + b] = _add_contracted(totals[at + b], product)
            if narrow is not None:
                factor = arith.select(lane.is_first, of_ways[0], of_ways[-1])
                at += call.columns.wide
                totals[at] = _add_contracted(
                    totals[at],
                    _multiply_contracted(vector.broadcast(_vector_type(), factor), narrow),
                )
        return _array(call, totals)

    return add(words.at[0, 0], factors, [t.at[0] for t in tables], sums)


def _pointer(array: Any, *places: tuple[Any, int]) -> Any:
    """Return a pointer to a global-memory element, offset by the summed ``place * stride``."""
    offset: Any = None
    for place, stride in places:
        number = _times(place, stride)
        offset = number if offset is None else arith.addi(offset, number)
    base = mosaic.utils.memref_ptr(array)
    # Addresses in global memory have 64 bits; offsets in elements fit 32 bits (see `too_many`).
    i64 = ir.IntegerType.get_signless(64)
    wide = arith.muli(arith.extui(i64, offset), mosaic.c(4, i64))
    return llvm.inttoptr(
        base.type,
        llvm.add(llvm.ptrtoint(i64, base), wide, overflow_flags=llvm.IntegerOverflowFlags.none),
    )


def _strides(array: Any) -> list[int]:
    strides, _ = ir.MemRefType(array.type).get_strides_and_offset()
    return list(strides)


def _write(call: _Call, sums: jax.Array, y: Any, strange: Any) -> None:
    """Write sums to outputs ``[samples, O]``, and flag threads with non-finite sums."""

    @plgpu.inline_mgpu(arg_types=(call.layout, plgpu.RefType(), plgpu.RefType()))
    def write(_: Any, sums: Any, y: Any, strange: Any) -> None:
        lane, columns = _Lane(call), call.columns
        stride, _ = _strides(y)
        to = _pointer(y, (lane.first, stride), (lane.number, _NUMBERS))
        to_narrow = _pointer(y, (lane.first, stride), (lane.of_four, _NUMBERS))
        totals = list(sums.registers.flat)
        # 0 times what is no finite number is none.
        zero = vector.broadcast(_vector_type(), mlir.zero())
        # Products with 0 add up to 0, or to NaN if any sum is infinite or NaN: one test for all.
        none = zero
        for total in totals:
            none = _add_contracted(none, arith.mulf(total, zero))
        total_none = _sum_of_four(none)
        is_none = arith.cmpf(arith.CmpFPredicate.UNO, total_none, total_none)
        flag = arith.extui(mlir.int32(), is_none)
        llvm.store(flag, _pointer(strange, (mlir.thread(), 1)), alignment=4)
        for i in range(_TOGETHER):
            at = i * columns.pieces
            for b in range(columns.wide):
                _store(totals[at + b], to, _OF_WARP * i * stride + WIDE * b)
            if columns.narrow:
                narrow = totals[at + columns.wide]
                # Lanes 4 to 7 hold the other way of the same outputs: exchange across a distance of
                # 4 and add.
                if call.ways > 1:
                    numbers = [mlir.element(narrow, k) for k in range(_NUMBERS)]
                    numbers = [arith.addf(n, mosaic.utils.shfl_bfly(n, 4)) for n in numbers]
                    narrow = vector.from_elements(_vector_type(), numbers)
                # Lanes of both ways write the same.
                _store(narrow, to_narrow, _OF_WARP * i * stride + WIDE * columns.wide)

    write(sums, y, strange)


def _store(value: Any, pointer: Any, offset: int) -> None:
    """Store four elements at an offset in elements."""
    llvm.store(value, _offset_pointer(pointer, offset), alignment=16)


def _offset_pointer(pointer: Any, offset: int) -> Any:
    return llvm.getelementptr(
        pointer.type,
        pointer,
        [],
        ir.DenseI32ArrayAttr.get([offset]),
        ir.F32Type.get(),
        llvm.GEPNoWrapFlags.none,
    )


def _cotangents(call: _Call, dy: Any) -> jax.Array:
    """Load each thread's cotangents ``[samples, O]``.

    Lanes for both ways share the narrow block.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_like(call))
    def read(_: Any, dy: Any) -> Any:
        lane, columns = _Lane(call), call.columns
        stride, _ = _strides(dy)
        wide = _pointer(dy, (lane.first, stride), (lane.number, _NUMBERS))
        narrow = _pointer(dy, (lane.first, stride), (lane.of_four, _NUMBERS))
        registers = []
        for i in range(_TOGETHER):
            start = _OF_WARP * i * stride
            places = [(wide, start + WIDE * b) for b in range(columns.wide)]
            places += [(narrow, start + WIDE * columns.wide)] * columns.narrow
            registers += [
                llvm.load(_vector_type(), _offset_pointer(*place), alignment=16) for place in places
            ]
        return _array(call, registers)

    output: jax.Array = read(dy)
    return output


def _multiply(call: _Call, references: list[Any], cotangents: jax.Array, found: Any) -> None:
    """Write the products between a table's rows and the cotangents, ``[K, samples]``."""
    words, *tables = references
    arg_types = (plgpu.RefType(), [plgpu.RefType()] * len(tables), call.layout, plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=arg_types)
    def multiply(_: Any, words: Any, tables: list[Any], cotangents: Any, found: Any) -> None:
        lane = _Lane(call)
        rows = _Rows(call, lane, words, tables)
        dy = list(cotangents.registers.flat)
        of_way, _ = _strides(found)
        # After the exchanges a lane has one way of one of four samples.
        way = arith.shrui(lane.number, mlir.integer(2))
        sample = arith.addi(lane.first, _times(lane.of_four, _OF_WARP))
        to = _pointer(found, (way if call.ways > 1 else mlir.integer(0), of_way), (sample, 1))
        # Four samples at a time: their four partial sums are reduced over four lanes in three
        # exchanges, and every lane stores one result.
        for first in range(0, _TOGETHER, 4):
            sums = []
            for i in range(first, first + 4):
                wide, narrow = rows.load(i)
                of_sample = dy[i * call.columns.pieces : (i + 1) * call.columns.pieces]
                sums.append(_products_of(call, lane, wide, narrow, of_sample))
            llvm.store(
                mlir.sums_over_lanes(sums), _offset_pointer(to, _OF_WARP * first), alignment=4
            )

    multiply(words.at[0, 0], [t.at[0] for t in tables], cotangents, found)


def _products_of(
    call: _Call, lane: _Lane, wide: list[list[Any]], narrow: Any, dy: list[Any]
) -> Any:
    """Return a sample's partial products.

    The first four lanes hold products for the first way, the other lanes for the second way.
    """
    of_ways: list[Any] = [None] * call.ways
    for of_rows, d in zip(wide, dy, strict=False):
        for way, row in enumerate(of_rows):
            product = _multiply_contracted(row, d)
            of_ways[way] = (
                product if of_ways[way] is None else _add_contracted(of_ways[way], product)
            )
    of_narrow = None if narrow is None else _sum_of_four(_multiply_contracted(narrow, dy[-1]))
    if not wide:
        return of_narrow
    totals = [_sum_of_four(numbers) for numbers in of_ways]
    # The other four lanes get what they have of these four lanes' way.
    # One exchange instead of two: each half sends the partial sum of the other half's way.
    own, other = (
        (
            arith.select(lane.is_first, totals[0], totals[1]),
            arith.select(lane.is_first, totals[1], totals[0]),
        )
        if call.ways > 1
        else (totals[0], totals[0])
    )
    total = arith.addf(own, mosaic.utils.shfl_bfly(other, 4))
    return total if of_narrow is None else arith.addf(total, of_narrow)


def _sum_of_four(numbers: Any) -> Any:
    a, b, c, d = (mlir.element(numbers, k) for k in range(_NUMBERS))
    return _add_contracted(_add_contracted(a, b), _add_contracted(c, d))

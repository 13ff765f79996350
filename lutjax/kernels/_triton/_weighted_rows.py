"""Weighted row sums by ways and groups, their inner products, and weighted row additions.

Formula for sample ``n``, group ``g``, its tables ``t`` and ways ``k``, with ``i = index[t, k,
n]``::

    y[n, g] = sum_{t, k} coefficients[t, k, n] * weights[t, i]
    products[t, k, n] = <dy[n, g], weights[t, i]>
    total[t, i] += coefficients[t, k, n] * dy[n, g]

A lookup is one way without coefficients.

Work: a program owns a sample and output tile, and one group's detector block. The grid is
one-dimensional: samples change fastest, then outputs, then blocks, so concurrent programs read the
same part of the same tables.

Layout: ids and coefficients are ``[T, K, n]``, so tile samples are contiguous.

Numerics: the accumulator dtype; int32 in fixed point and for integer coefficients. Sums over
detector and output blocks are partial sums in a fixed order. In sums and additions a 0 coefficient
masks its row, which is neither read nor added to. Additions use atomics, so their last bits differ
between runs, except for integers. Ids are clamped.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_additions, _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla.weighted_lookup import Way
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addend_dtype, result

# Bytes of tables that concurrent programs add to. They stay in the L2 cache, and with several
# tables fewer additions meet at one row.
_TOGETHER = 2**25
_FEW_READS = 32  # row reads of a program that are too few to divide further


@dataclasses.dataclass(frozen=True)
class Reads:
    """Rows to read.

    Attributes:
      index: row ids ``[T, K, n]``, possibly out of range.
      coefficients: same shape; None stands for ones.
      groups: number of consecutive table groups with separate outputs.
    """

    index: jax.Array
    coefficients: jax.Array | None = None
    groups: int = 1

    @classmethod
    def from_ways(cls, ways: Sequence[Way], groups: int) -> "Reads":
        index, coefficients = (jnp.stack(arrays, 1) for arrays in zip(*ways, strict=True))
        return cls(index, coefficients, groups)

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """Kernel input arrays; ids stand in for missing coefficients."""
        return self.index, self.index if self.coefficients is None else self.coefficients

    @property
    def in_integers(self) -> bool:
        """Whether integer rows and coefficients are multiplied and summed as integers."""
        return self.coefficients is not None and jnp.issubdtype(
            self.coefficients.dtype, jnp.integer
        )

    def sizes(self, weights: jax.Array | jax.ShapeDtypeStruct) -> Sizes:
        groups = {"groups": self.groups} if self.groups > 1 else {}
        ways = {} if self.coefficients is None else {"ways": self.index.shape[1]}
        return _row_tiles.sizes(weights, samples=self.index.shape[2], **ways, **groups)

    def tile(
        self, config: Launch, n_outputs: int, device: Device, *, n_tables: int | None = None
    ) -> _row_tiles.RowTile:
        """Return detector tiles for each group, or for `n_tables` tables from any groups."""
        n_detectors, _, n_samples = self.index.shape
        n, groups = (n_detectors, self.groups) if n_tables is None else (n_tables, 1)
        return _row_tiles.RowTile(config, n_samples, n_outputs, n, device, n_groups=groups)

    def arguments(
        self, tile: _row_tiles.RowTile, n_rows: int, dtype: Any, accumulate: FixedPoint | None
    ) -> dict[str, Any]:
        """Return `launch` arguments and constants for kernels that compute in `dtype`."""
        n_detectors, n_ways, n_samples = self.index.shape
        return {
            **tile.arguments,
            # Without reads no kernel runs, and sums are zeros.
            "programs": tile.programs if self.index.size else 0,
            **_row_tiles.arithmetic_of(n_rows, jnp.dtype(dtype), accumulate),
            "n_samples": n_samples,
            "n_ways": n_ways,
            "n_groups": self.groups,
            "n_of_group": max(n_detectors // self.groups, 1),
            "WEIGHTED": self.coefficients is not None,
        }


# ------------------------------------------------------------------------------------- of reads
def sums(
    weights: jax.Array,
    reads: Reads,
    config: Launch,
    device: Device,
    accumulate: FixedPoint | None,
    *,
    finished: bool = True,
) -> jax.Array:
    """Return weighted row sums ``[n, G, O]``, or addend sums with ``finished=False``."""
    _, n_rows, n_outputs = weights.shape
    # Integer rows times integer coefficients stay exact in int32.
    dtype = jnp.dtype(jnp.int32) if reads.in_integers else accumulator(weights.dtype)
    tile = reads.tile(config, n_outputs, device)
    # With several programs per sum, each writes a part, in the sum dtype.
    whole = finished and tile.detector_blocks == 1 and accumulate is None
    shape = (tile.detector_blocks, tile.n_reads, reads.groups, n_outputs)
    (parts,) = launch(
        _sum_rows,
        weights,
        *reads.arrays,
        outputs=[
            jax.ShapeDtypeStruct(shape, weights.dtype if whole else addend_dtype(dtype, accumulate))
        ],
        **reads.arguments(tile, n_rows, dtype, accumulate),
    )
    total = _row_tiles.sum_of_parts(parts)
    return result(total, weights.dtype, accumulate) if finished else total


def weighted_sums(
    weights: jax.Array,
    reads: Reads,
    device: Device,
    accumulate: FixedPoint | None,
    *,
    finished: bool = True,
) -> jax.Array:
    """Return `sums` with the kernel config for weighted reads."""
    config = launch_of("weighted_lookup.forward", reads.sizes(weights), device, forward_rule)
    return sums(weights, reads, config, device, accumulate, finished=finished)


def products_of(
    weights: jax.Array,
    index: jax.Array,
    dy: jax.Array,
    groups: int,
    device: Device,
    accumulate: FixedPoint | None,
) -> jax.Array:
    """Return every read's ``<dy, row>``, ``[T, K, n]``, for ``dy [n, G, O]``."""
    n_detectors, n_ways, n_samples = index.shape
    # Every way has a product of its own, so programs divide reads as if each way were a detector.
    reads = Reads(index.reshape(n_detectors * n_ways, 1, n_samples), None, groups)
    _, n_rows, n_outputs = weights.shape
    dtype = accumulator(weights.dtype)
    sizes = {**reads.sizes(weights), "detectors": n_detectors * n_ways}
    config = launch_of("weighted_lookup.products", sizes, device, _products_rule)
    tile = reads.tile(config, n_outputs, device)
    # Blocks of outputs write separate parts.
    shape = (tile.output_blocks, *index.shape)
    (parts,) = launch(
        _multiply_rows,
        weights,
        index,
        dy,
        outputs=[jax.ShapeDtypeStruct(shape, addend_dtype(dtype, accumulate))],
        **reads.arguments(tile, n_rows, dtype, accumulate) | {"n_ways": n_ways},
    )
    return result(_row_tiles.sum_of_parts(parts), dtype, accumulate)


def add(
    addition: _row_additions.Addition,
    reads: Reads,
    dy: jax.Array,
    config: Launch,
    device: Device,
    accumulate: FixedPoint | None,
) -> tuple[jax.Array, ...]:
    """Add ``coefficient * dy`` to every read's row, for ``dy [n, G, O]``."""
    n_tables, n_rows, n_outputs = addition.total.shape
    # Blocks of `total` may span groups, since `total` holds some tables at a time.
    tile = reads.tile(config, n_outputs, device, n_tables=n_tables)
    arguments = reads.arguments(tile, n_rows, accumulator(dy.dtype), accumulate)
    # Programs interleave so many blocks of detectors that the tables of concurrent programs just
    # fit the cache. The number of blocks is rounded up; those beyond the tables do nothing.
    size = tile.detectors * n_rows * n_outputs * addition.total.dtype.itemsize
    together = min(max(_TOGETHER // max(size, 1), 1), tile.detector_blocks)
    blocks = triton.cdiv(tile.detector_blocks, together) * together
    arguments["programs"] = arguments["programs"] // tile.detector_blocks * blocks
    return addition(_add_rows, *reads.arrays, dy, TOGETHER=together, **arguments)


def weighted_add(
    weights: jax.Array | jax.ShapeDtypeStruct,
    addition: _row_additions.Addition,
    reads: Reads,
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
) -> tuple[jax.Array, ...]:
    """Run `add` with the kernel config for weighted reads from these tables."""
    config = launch_of("weighted_lookup.table", reads.sizes(weights), device, table_rule)
    return add(addition, reads, dy, config, device, accumulate)


# ------------------------------------------------------- ways, the interface of `_row_gathers`
def sum_ways(
    weights: jax.Array,
    ways: Sequence[Way],
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> jax.Array:
    """Sum ``coefficient * row`` over the tables of each group and all ways: ``[n, G * O]``.

    There is at least one way. Integer coefficients are multiplied and summed as integers.
    """
    y = weighted_sums(weights, Reads.from_ways(ways, groups), device, accumulate, finished=False)
    return y.reshape(len(y), groups * weights.shape[2])


def products(
    weights: jax.Array,
    index: tuple[jax.Array, ...],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> tuple[jax.Array, ...]:
    """Return each way's ``<dy, row>``, ``[T, n]``, for ``dy [n, G * O]``."""
    if not index:
        return ()
    output = products_of(weights, jnp.stack(index, 1), dy, groups, device, accumulate)
    return tuple(jnp.unstack(output, axis=1))


def add_ways(
    total: jax.Array,
    ways: Sequence[Way],
    dy: jax.Array,
    device: Device,
    accumulate: FixedPoint | None,
    groups: int = 1,
) -> jax.Array:
    """Add every read's ``coefficient * dy`` to row sums, for ``dy [n, G * O]``."""
    if not ways:
        return total
    addition = _row_additions.Addition(
        total, jnp.ones((), accumulator(dy.dtype)), jnp.zeros((), jnp.int32)
    )
    weights = jax.ShapeDtypeStruct(total.shape, dy.dtype)
    return weighted_add(weights, addition, Reads.from_ways(ways, groups), dy, device, accumulate)[0]


# ------------------------------------------------------------------------------------- launches
def forward_rule(sizes: Sizes) -> Launch:
    rows = _rows(sizes, 8, 32)
    # A program of few reads would end before the separate kernel that adds the parts starts.
    detectors = max(split(sizes, rows * 32), _FEW_READS // max(sizes.get("ways", 1), 1))
    return Launch(rows=rows, outputs=32, detectors=detectors, warps=1)


def _products_rule(sizes: Sizes) -> Launch:
    rows = _rows(sizes, 32, 64)
    return Launch(
        rows=rows, outputs=64, detectors=min(split(sizes, rows * 64), _FEW_READS), warps=1
    )


def table_rule(sizes: Sizes) -> Launch:
    if sizes["outputs"] <= 64:
        rows = _rows(sizes, 16, 64)
        return Launch(rows=rows, outputs=64, detectors=min(split(sizes, rows * 64), 4), warps=1)
    rows = _rows(sizes, 32, 128)
    return Launch(rows=rows, outputs=128, detectors=min(split(sizes, rows * 128), 16), warps=4)


def split(sizes: Sizes, tile: int) -> int:
    """Return the detectors per program at which tiles with `tile` elements fill a device."""
    groups = sizes.get("groups", 1)
    programs = sizes["samples"] * sizes["outputs"] * groups // tile
    return _row_tiles.split(programs, sizes["detectors"] // groups)


def _rows(sizes: Sizes, rows: int, outputs: int) -> int:
    """Return `rows`, or fewer if programs with one detector each would not fill a device."""
    numbers = sizes["samples"] * sizes["outputs"] * sizes["detectors"]
    # 1024 programs fill a device.
    while rows > 1 and numbers < 1024 * rows * outputs:
        rows //= 2
    return rows


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sum_rows(weights, index, coefficients, parts, c: tl.constexpr):
    sample, sample_exists, output, output_exists, block = _row_tiles.locate_program(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    group, part, first, last = detectors(block, c)
    total = tl.zeros((c.ROWS, c.OUTPUTS), c.SUM)
    for r0 in range(first * c.n_ways, last * c.n_ways, 4):
        # The loads of four reads are independent, and unrolling lets them overlap. The last step
        # may have fewer reads.
        for u in tl.static_range(4):
            r = r0 + u
            reads = sample_exists & (r < last * c.n_ways)
            at = r.to(tl.int64) * c.n_samples + sample
            row = tl.load(index + at, mask=reads, other=0)
            if c.WEIGHTED:
                coefficient = tl.load(coefficients + at, mask=reads, other=0).to(c.ACC)
                # Rows with coefficient 0 are not read: this saves traffic, and keeps 0 * infinity
                # out of the sum.
                reads = coefficient != 0
            at = _row_tiles.offset(row, c)[:, None] + output[None, :]
            table = _row_tiles.table(weights, r // c.n_ways, c)
            value = tl.load(table + at, mask=reads[:, None] & output_exists[None, :], other=0).to(
                c.ACC
            )
            if c.WEIGHTED:
                value = coefficient[:, None] * value
            total += _row_tiles.addend(value, c)
    # Parts are ``[detector blocks, n, G, O]``.
    at = group_offset(part.to(tl.int64) * c.n_samples + sample, group, c)[:, None] + output[None, :]
    exists = sample_exists[:, None] & output_exists[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=exists)


@kernel
def _multiply_rows(weights, index, dy, products, c: tl.constexpr):
    sample, sample_exists, output, output_exists, block = _row_tiles.locate_program(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    group, _, first, last = detectors(block, c)
    # Each output block writes its own part ``[T, n]``.
    products += part_of_outputs(c).to(tl.int64) * c.n_detectors * c.n_samples
    exists = sample_exists[:, None] & output_exists[None, :]
    at = group_offset(sample, group, c)[:, None] + output[None, :]
    # The gradient is loaded once for all tables; missing samples and outputs are 0.
    cotangent = tl.load(dy + at, mask=exists, other=0).to(c.ACC)
    for r in range(first, last):
        here = r.to(tl.int64) * c.n_samples + sample
        row = _row_tiles.offset(tl.load(index + here, mask=sample_exists, other=0), c)
        value = _row_tiles.read(_row_tiles.table(weights, r // c.n_ways, c), row, output, c).to(
            c.ACC
        )
        tl.store(
            products + here, tl.sum(_row_tiles.addend(value * cotangent, c), 1), mask=sample_exists
        )


@kernel
def _add_rows(
    index, coefficients, dy, step, first, unused0, unused1, total, touched, c: tl.constexpr
):
    sample, sample_exists, output, output_exists, block = _row_tiles.locate_program(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS, c.TOGETHER
    )
    exists = sample_exists[:, None] & output_exists[None, :]
    factor = tl.load(step)
    first_detector = tl.load(first)
    # A block may have detectors of several groups, because `total` may begin at any detector.
    if c.n_groups == 1:
        value = _cotangent(dy, sample, 0, output, exists, factor, c)
    for t in range(block * c.DETECTORS, tl.minimum((block + 1) * c.DETECTORS, c.n_tables)):
        if c.n_groups > 1:
            value = _cotangent(
                dy, sample, (first_detector + t) // c.n_of_group, output, exists, factor, c
            )
        table = _row_tiles.table(total, t, c)
        for k in range(c.n_ways):
            here = ((first_detector + t).to(tl.int64) * c.n_ways + k) * c.n_samples + sample
            row = tl.load(index + here, mask=sample_exists, other=0)
            reads = sample_exists
            weighted = value
            if c.WEIGHTED:
                coefficient = tl.load(coefficients + here, mask=sample_exists, other=0).to(c.ACC)
                reads = coefficient != 0
                weighted = _row_tiles.addend(coefficient[:, None] * value, c)
            at = _row_tiles.offset(row, c)[:, None] + output[None, :]
            if c.TOUCH:
                _row_tiles.touch(touched, t, row, reads, c)
            # Relaxed order suffices: nothing reads the tables before the kernel ends.
            tl.atomic_add(
                table + at, weighted, mask=reads[:, None] & output_exists[None, :], sem="relaxed"
            )


@kernel
def _cotangent(dy, sample, group, output, exists, factor, c: tl.constexpr):
    """Return a group's output gradient times a factor; an addend unless a coefficient follows."""
    at = group_offset(sample, group, c)[:, None] + output[None, :]
    value = tl.load(dy + at, mask=exists, other=0).to(c.ACC) * factor
    return value if c.WEIGHTED else _row_tiles.addend(value, c)


@kernel
def detectors(block, c: tl.constexpr):
    """Return a detector block's group, its number in the group, first detector and end."""
    # One group needs no division at run time.
    if c.n_groups == 1:
        first = block * c.DETECTORS
        return 0, block, first, tl.minimum(first + c.DETECTORS, c.n_detectors)
    else:
        blocks: tl.constexpr = (c.n_of_group + c.DETECTORS - 1) // c.DETECTORS
        group = block // blocks
        part = block % blocks
        first = group * c.n_of_group + part * c.DETECTORS
        return group, part, first, tl.minimum(first + c.DETECTORS, (group + 1) * c.n_of_group)


@kernel
def group_offset(sample, group, c: tl.constexpr):
    """Return a group's output offset in arrays ``[n, G, O]``."""
    if c.n_groups == 1:
        return sample * c.n_outputs
    else:
        return (sample * c.n_groups + group) * c.n_outputs


@kernel
def part_of_outputs(c: tl.constexpr):
    sample_blocks: tl.constexpr = (c.n_samples + c.ROWS - 1) // c.ROWS
    output_blocks: tl.constexpr = (c.n_outputs + c.OUTPUTS - 1) // c.OUTPUTS
    return (tl.program_id(0) // sample_blocks) % output_blocks

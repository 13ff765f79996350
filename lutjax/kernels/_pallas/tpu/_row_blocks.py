"""Table, sample and output blocks for products with coefficient matrices. Imports no Pallas.

Layout: a group's tables are cut into blocks with several whole tables, or large tables into blocks
with up to `_ROWS` rows (`parts`). Arrays with an element per table and sample are ``[blocks, lines,
samples]``, with samples in lanes. All arrays are padded to whole blocks, with zeros or, for ids,
-1: out-of-bounds elements may be NaN in a kernel and would poison every sum.

Sizes: a product has up to 512 rows, 512 samples and 512 outputs, several times the matrix unit's
size. Sample blocks shrink until double-buffered blocks fit the vector memory.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device, Request
from lutjax.kernels._pallas.tpu._limits import LANES, SUBLANES, vmem_budget
from lutjax.ops.scored_lut import ScoredLut
from lutjax.ops.weighted_lookup import WeightedLookup

_ROWS = 512  # of one product, over its tables
_SAMPLES = 512
_OUTPUTS = 512
_EXACT = 128
_WAYS = 4  # of a read, which are known when it is called


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """A call's blocks: several whole tables from one group, or some rows from one large table.

    Attributes:
      groups: number of groups. each: tables per group.
      together: tables per product. tables: tables per block.
      lines: `tables`, rounded up to whole registers if needed.
      rows: rows per table and block. parts: blocks per table.
      samples, outputs: block size. batch, n_outputs: call size.
    """

    groups: int
    each: int
    together: int
    tables: int
    lines: int
    rows: int
    parts: int
    samples: int
    outputs: int
    batch: int
    n_outputs: int

    @classmethod
    def for_tables(
        cls,
        shape: tuple[int, ...],
        batch: int,
        groups: int = 1,
        *,
        in_registers: bool = False,
        together: int = _ROWS,
        samples: int = 0,
    ) -> "RowBlocks":
        """Return the blocks for a table shape.

        Args:
          in_registers: kernels compute per-table elements in whole registers, so blocks have at
            least
            8 tables if possible.
          together: maximum tables per product. samples: maximum samples per block; 0: the default.
        """
        n_detectors, n_rows, n_outputs = shape
        each, rows = n_detectors // groups, min(n_rows, _ROWS)
        # Small tables share a product, so that its contracted axis fills the matrix unit.
        together = _even_block_size(each, max(min(_ROWS // rows, together), 1))
        # Elements computed in a kernel are [tables, samples]: eight tables fill the sublanes of a
        # register.
        tables = (
            round_up(_even_block_size(each, max(SUBLANES, together)), together)
            if in_registers
            else together
        )
        # Blocks of many rows get fewer outputs: the bytes of a table block stay bounded.
        outputs = max(min(_OUTPUTS, _ROWS * _OUTPUTS // (tables * rows)), LANES)
        return cls(
            groups,
            each,
            together,
            tables,
            round_up(tables, SUBLANES) if in_registers else tables,
            rows,
            -(-n_rows // rows),
            min(samples or _SAMPLES, round_up(batch, LANES)),
            round_up(_even_block_size(n_outputs, outputs), LANES),
            batch,
            n_outputs,
        )

    def bytes(self, n_ways: int) -> int:
        """Return the size of double-buffered blocks and one product in bytes."""
        # Three bfloat16 terms have 6 bytes per element; two buffers of each block.
        of_table = 2 * 6 * self.tables * self.rows * self.outputs
        of_sums = 2 * 6 * self.samples * self.outputs
        # The coefficient matrix in float32, its terms, and temporaries of comparisons.
        of_product = 18 * self.together * self.rows * self.samples
        return of_table + of_sums + of_product + 20 * n_ways * self.lines * self.samples

    # ---- numbers of blocks
    @property
    def blocks_per_group(self) -> int:
        return -(-self.each // self.tables)

    @property
    def n_tables(self) -> int:
        return self.groups * self.blocks_per_group

    @property
    def n_rows(self) -> int:
        """Number of row blocks, over all table blocks and their parts."""
        return self.n_tables * self.parts

    @property
    def n_samples(self) -> int:
        return -(-self.batch // self.samples)

    @property
    def n_of_outputs(self) -> int:
        return -(-self.n_outputs // self.outputs)

    # ---- layouts
    def split_tables(self, a: jax.Array) -> jax.Array:
        """``[..., T, R, O]`` -> ``[..., blocks of rows, rows of a block, O]``, zeros beyond."""
        *front, _, n_rows, n_outputs = a.shape
        # Blocks do not straddle groups: each group is padded on its own.
        tables = self.blocks_per_group * self.tables
        a = a.reshape(*front, self.groups, self.each, n_rows, n_outputs)
        wanted = (
            *front,
            self.groups,
            tables,
            self.parts * self.rows,
            self.n_of_outputs * self.outputs,
        )
        return pad_to_shape(a, wanted).reshape(
            *front, self.n_rows, self.tables * self.rows, wanted[-1]
        )

    def to_tables(self, a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        a = a.reshape(self.groups, self.blocks_per_group * self.tables, self.parts * self.rows, -1)
        return a[:, : self.each, : shape[1], : shape[2]].reshape(shape)

    def split_elements(self, a: jax.Array, fill: int = 0) -> jax.Array:
        """``[..., B, T]`` -> ``[..., blocks of tables, lines, B]``."""
        *front, _, n_detectors = a.shape
        # With fill -1, padding samples read no row.
        a = pad_to_shape(a, (*front, self.n_samples * self.samples, n_detectors), fill)
        return jnp.moveaxis(self.split_detectors(jnp.moveaxis(a, -1, 0), fill), (0, 1), (-3, -2))

    def split_detectors(self, a: jax.Array, fill: int = 0) -> jax.Array:
        """``[T, ...]`` -> ``[blocks of tables, lines, ...]``."""
        a = a.reshape(self.groups, self.each, *a.shape[1:])
        a = pad_to_shape(a, (self.groups, self.blocks_per_group * self.tables, *a.shape[2:]), fill)
        a = a.reshape(self.n_tables, self.tables, *a.shape[2:])
        return pad_to_shape(a, (self.n_tables, self.lines, *a.shape[2:]), fill)

    def to_elements(self, a: jax.Array) -> jax.Array:
        """``[..., blocks of tables, lines, B]`` -> ``[..., B, T]``."""
        front = a.shape[:-3]
        a = a[..., : self.tables, : self.batch].reshape(*front, self.groups, -1, self.batch)
        return jnp.swapaxes(a[..., : self.each, :].reshape(*front, -1, self.batch), -1, -2)

    def split_samples(self, a: jax.Array) -> jax.Array:
        """``[..., B, groups or 1, O]`` -> ``[..., groups or 1, B, O]``, zeros beyond."""
        a = jnp.swapaxes(a, -2, -3)
        wanted = self.n_samples * self.samples, self.n_of_outputs * self.outputs
        return pad_to_shape(a, (*a.shape[:-2], *wanted))

    def to_samples(self, a: jax.Array) -> jax.Array:
        return jnp.swapaxes(a[..., : self.batch, : self.n_outputs], -2, -3)


def blocks_for_weighted(call: WeightedLookup, device: Device) -> RowBlocks | None:
    """Return the blocks for a call with arrays or shapes, or None if the smallest do not fit."""
    batch, _, n_ways = call.index.shape
    # Fewer samples per block need less memory, but read the tables more often.
    for samples in (_SAMPLES, _SAMPLES // 2, LANES):
        blocks = RowBlocks.for_tables(call.weights.shape, batch, call.groups, samples=samples)
        if blocks.bytes(n_ways) <= vmem_budget(device):
            return blocks
    return None


def blocks_for_scored(call: ScoredLut, device: Device) -> RowBlocks | None:
    """Return the blocks for a call with arrays or shapes, or None if the smallest do not fit."""
    batch, _, n_inputs = call.x.shape
    n_comparisons, ends = call.anchors.shape[1], math.prod(call.anchors.shape[1:])
    # Sums of a product of integers are exact in float32: at most 128 addends, two of each table, of
    # 2**7 times a coefficient of 2**10.
    together = _EXACT // 2 if call.weights.dtype == jnp.int8 else _ROWS
    for samples in (_SAMPLES // 2, LANES):  # a block has several products, all written out
        blocks = RowBlocks.for_tables(
            call.weights.shape,
            batch,
            call.groups,
            in_registers=True,
            together=together,
            samples=samples,
        )
        of_inputs = 24 * n_inputs * blocks.samples + 6 * n_inputs * ends * blocks.lines
        of_scores = 4 * (ends + 16 * n_comparisons) * blocks.lines * blocks.samples
        if blocks.bytes(_WAYS) + of_inputs + of_scores <= vmem_budget(device):
            return blocks
    return None


def unsupported(request: Request) -> str | None:
    """Return the reason that a call is unsupported, or None."""
    call = request.call
    if isinstance(call, ScoredLut):
        n_rows = call.weights.shape[1]
        if n_rows > _ROWS:
            return (
                f"weights has {n_rows} rows: each coefficient is compared with every row, up to "
                f"{_ROWS}"
            )
        if (
            0 in (*call.weights.shape, *call.x.shape)
            or blocks_for_scored(call, request.device) is not None
        ):
            return None
        return (
            f"x has {call.x.shape[2]} inputs: a block of samples with all of them does not fit "
            "the memory of the chip"
        )
    assert isinstance(call, WeightedLookup)
    if (
        0 in (*call.weights.shape, *call.index.shape)
        or blocks_for_weighted(call, request.device) is not None
    ):
        return None
    return (
        f"index has {call.index.shape[2]} ways: a block of samples with all of them does not fit "
        "the memory of the chip"
    )


def slower(request: Request) -> str | None:
    """Return the reason that the next implementation comes first, or None."""
    call = request.call
    assert isinstance(call, ScoredLut | WeightedLookup)
    n_rows = call.weights.shape[1]
    if n_rows <= _ROWS:
        return None
    return f"gathers are faster: matrices of coefficients of {n_rows} rows are slow"


def round_up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def _even_block_size(n: int, most: int) -> int:
    """Return the size for equal blocks with at most `most` elements each."""
    return -(-n // -(-n // most))


def pad_to_shape(a: jax.Array, shape: tuple[int, ...], fill: int = 0) -> jax.Array:
    """Return an array with `fill` beyond its ends."""
    if a.shape == shape:
        return a
    pads = [(0, wanted - size, 0) for wanted, size in zip(shape, a.shape, strict=True)]
    return jax.lax.pad(a, jnp.asarray(fill, a.dtype), pads)

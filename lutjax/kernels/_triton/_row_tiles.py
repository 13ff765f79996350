"""Tiles for row-reading and row-adding kernels, and their shared device functions.

Work: a program computes a tile with ``ROWS`` reads (lookup samples, attention keys) times
``OUTPUTS`` outputs, for ``DETECTORS`` detectors one after the other. The grid is one-dimensional:
reads change fastest, then outputs, then detector blocks, so concurrent programs read the same part
of the same tables, which stays in the L2 cache.

Layout: detection arrays are detector-major, ``[T, B]``, so a tile's reads are contiguous. Tables
are ``[T, R, O]``, so a row's outputs are contiguous.

Numerics: sums use the accumulator dtype, or int32 in fixed point, where addends saturate and NaN is
0. Detector blocks write partial sums, which are added in a fixed order. Row ids are clamped.
Surrogate slopes are divided with correct rounding, so they match other implementations.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.dispatch.registry import Device
from lutjax.kernels._nvidia import shared_memory
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.tuning import Launch, Sizes
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addend_dtype, result

TYPES = {"float32": tl.float32, "float64": tl.float64, "int32": tl.int32}


@runtime_checkable
class TableCall(Protocol):
    """Op call that reads rows from tables ``[T, R, O]``."""

    @property
    def weights(self) -> jax.Array: ...
    @property
    def accumulate(self) -> FixedPoint | None: ...


@dataclasses.dataclass(frozen=True)
class RowTile:
    """Tiles for a call: the config's sizes, but no larger than the arrays.

    Attributes:
      n_reads, n_outputs, n_detectors: reads per detector, outputs, and detectors.
      all_outputs: whether a program visits all outputs, block by block.
      n_groups: number of detector groups with separate outputs; a block lies in one group.

    Raises:
      ValueError: a tile does not fit the device's shared memory.
    """

    config: Launch
    n_reads: int
    n_outputs: int
    n_detectors: int
    device: Device
    all_outputs: bool = False
    n_groups: int = 1

    def __post_init__(self) -> None:
        # A tile that changes its layout passes through shared memory, 4 bytes per element.
        size, most = 4 * self.rows * self.outputs, shared_memory(self.device)
        if size > most:
            raise ValueError(
                f"{self.config}: a tile of {self.rows} rows and {self.outputs} outputs takes "
                f"{size} bytes; the shared memory of {self.device.kind} holds {most}. Choose fewer "
                "rows or outputs."
            )

    @property
    def rows(self) -> int:
        return fit_size(self.config.rows, self.n_reads)

    @property
    def outputs(self) -> int:
        return fit_size(self.config.outputs, self.n_outputs)

    @property
    def detectors(self) -> int:
        of_group = self.n_detectors // self.n_groups
        return max(min(self.config.detectors or of_group, of_group), 1)

    @property
    def detector_blocks(self) -> int:
        """Detector blocks per output, over all groups."""
        return max(triton.cdiv(self.n_detectors // self.n_groups, self.detectors), 1)

    @property
    def output_blocks(self) -> int:
        return 1 if self.all_outputs else triton.cdiv(self.n_outputs, self.outputs)

    @property
    def programs(self) -> int:
        """Number of programs, located by `locate_program`."""
        blocks = self.output_blocks * self.detector_blocks * self.n_groups
        return triton.cdiv(self.n_reads, self.rows) * blocks

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "programs": self.programs,
            "device": self.device,
            "warps": self.config.warps,
            "n_detectors": self.n_detectors,
            "n_outputs": self.n_outputs,
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "DETECTORS": self.detectors,
        }


def fit_size(size: int, n: int) -> int:
    """Return `size`, or the smallest power of two that holds `n` if it is smaller."""
    return min(size, triton.next_power_of_2(max(n, 1)))


def split(programs: int, n_detectors: int, enough: int = 1024) -> int:
    """Return the detectors per program for about `enough` programs."""
    groups = min(max(enough // max(programs, 1), 1), max(n_detectors, 1))
    return triton.cdiv(n_detectors, groups)


def sizes(weights: jax.Array | jax.ShapeDtypeStruct, **others: int) -> Sizes:
    """Return the sizes that select kernel configs: the table sizes and `others`."""
    detectors, rows, outputs = weights.shape
    bits = 8 * weights.dtype.itemsize
    return {"detectors": detectors, "rows": rows, "outputs": outputs, "bits": bits, **others}


def arithmetic(call: TableCall) -> dict[str, Any]:
    """Return kernel constants: number of table rows, dtypes, and addend scale (0 for floats)."""
    return arithmetic_of(call.weights.shape[1], accumulator(call.weights.dtype), call.accumulate)


def arithmetic_of(n_rows: int, dtype: np.dtype, accumulate: FixedPoint | None) -> dict[str, Any]:
    """Return the `arithmetic` constants for kernels that compute in this dtype."""
    number = TYPES[dtype.name]
    return {
        "n_rows": n_rows,
        "ACC": number,
        "SUM": number if accumulate is None else tl.int32,
        "SCALE": 0.0 if accumulate is None else accumulate.scale,
    }


def sum_of_parts(parts: jax.Array) -> jax.Array:
    """Return the sum over the first axis, in a fixed order."""
    # XLA reduces the axis of parts without atomics.
    return (
        parts.reshape(parts.shape[1:]) if len(parts) == 1 else jnp.sum(parts, 0, dtype=parts.dtype)
    )


def sum_rows(
    kernel: Any,
    call: TableCall,
    tile: RowTile,
    batch: tuple[int, ...],
    *inputs: jax.Array,
    **arguments: Any,
) -> jax.Array:
    """Return outputs ``[*batch, O]`` from a kernel that reads the tables and `inputs`."""
    dtype = call.weights.dtype
    # With several programs per sum, each writes a part, in the sum dtype. A single program
    # writes the rounded result.
    if tile.detector_blocks > 1 or call.accumulate is not None:
        dtype = addend_dtype(dtype, call.accumulate)
    parts = jax.ShapeDtypeStruct((tile.detector_blocks, *batch, tile.n_outputs), dtype)
    (total,) = launch(kernel, call.weights, *inputs, outputs=[parts], **arguments)
    return result(sum_of_parts(total), call.weights.dtype, call.accumulate)


# ------------------------------------------------------------------------------------- in kernels
@kernel
def block(size: tl.constexpr, n: tl.constexpr, number):
    """Return a block's positions, and whether they exist."""
    # 64 bits: positions are multiplied by row lengths.
    at = number.to(tl.int64) * size + tl.arange(0, size)
    return at, at < n


@kernel
def locate_program(
    n_samples: tl.constexpr,
    n_outputs: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOGETHER: tl.constexpr = 1,
):
    """Locate this program.

    Returns:
      Samples, whether they exist, outputs (or inputs, or slots), whether they exist, and the block
      of detectors. Samples change fastest, for `TOGETHER` detector blocks at a time.
    """
    sample_blocks: tl.constexpr = (n_samples + ROWS - 1) // ROWS
    output_blocks: tl.constexpr = (n_outputs + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    # Concurrent programs of several detector blocks add to different tables, so fewer additions
    # meet at a row.
    of_together = program % TOGETHER
    program = program // TOGETHER
    sample, sample_exists = block(ROWS, n_samples, program % sample_blocks)
    rest = program // sample_blocks
    output, output_exists = block(OUTPUTS, n_outputs, rest % output_blocks)
    return (
        sample,
        sample_exists,
        output,
        output_exists,
        rest // output_blocks * TOGETHER + of_together,
    )


@kernel
def locate_query(
    n_queries: tl.constexpr, n_outputs: tl.constexpr, c: tl.constexpr, QUERIES: tl.constexpr = 1
):
    """Locate an attention program.

    Returns:
      Query block, sample, outputs, whether they exist, and detector block.
    """
    query_blocks: tl.constexpr = (n_queries + QUERIES - 1) // QUERIES
    output_blocks: tl.constexpr = (n_outputs + c.OUTPUTS - 1) // c.OUTPUTS
    program = tl.program_id(0)
    # Late queries have most keys. They start first, so that the last programs are short.
    j = query_blocks - 1 - program % query_blocks
    rest = program // query_blocks
    b = (rest % c.n_samples).to(tl.int64)
    rest = rest // c.n_samples
    output, output_exists = block(c.OUTPUTS, n_outputs, rest % output_blocks)
    return j, b, output, output_exists, rest // output_blocks


@kernel
def table(weights, t, c: tl.constexpr):
    return weights + t.to(tl.int64) * c.n_rows * c.n_outputs


@kernel
def offset(row, c: tl.constexpr):
    """Return a row's offset in its table; out-of-range ids are clamped."""
    row = tl.minimum(tl.maximum(row, 0), c.n_rows - 1)
    # 32-bit offsets, where a table allows them, save registers and instructions.
    if c.n_rows * c.n_outputs < 2**31:
        return row * c.n_outputs
    else:
        return row.to(tl.int64) * c.n_outputs


@kernel
def clamp_row(row, t, c: tl.constexpr):
    """Return a clamped row id, counted from the first table's first row."""
    return t.to(tl.int64) * c.n_rows + tl.minimum(tl.maximum(row, 0), c.n_rows - 1)


@kernel
def read(table, row, output, c: tl.constexpr):
    """Read an output block from rows at these offsets; all rows exist."""
    # Clamped offsets are valid for missing reads as well, so only a remainder of outputs needs a
    # mask.
    if c.n_outputs % c.OUTPUTS == 0:
        return tl.load(table + (row[:, None] + output[None, :]))
    else:
        return tl.load(
            table + (row[:, None] + output[None, :]), mask=(output < c.n_outputs)[None, :], other=0
        )


@kernel
def list_of(row, t, c: tl.constexpr):
    """Return each row's target list; out-of-range row ids are clamped."""
    number = tl.zeros_like(row).to(tl.int64)
    if c.LIST_PER_ROW:
        number += tl.minimum(tl.maximum(row, 0), c.n_rows - 1)
    if c.LIST_PER_TABLE:
        number += t.to(tl.int64) * (c.n_rows if c.LIST_PER_ROW else 1)
    return number


@kernel
def target(targets, slot, exists, n_outputs: tl.constexpr):
    """Return the slots' output ids; -1 for none."""
    # Targets beyond the outputs are clamped to the last one; every negative target is unused.
    return tl.maximum(tl.minimum(tl.load(targets + slot, mask=exists, other=-1), n_outputs - 1), -1)


@kernel
def addend(value, c: tl.constexpr):
    """Return a value, or in fixed point its `lutjax.FixedPoint` integer."""
    if c.SCALE == 0:
        return value
    else:
        # The largest numbers below 2**31 in float32 and below 2**31 after truncation in float64:
        # the conversion of larger ones is undefined.
        LIMIT: tl.constexpr = 2147483520.0 if value.dtype == tl.float32 else 2147483647.9999998
        scaled = tl.minimum(tl.maximum(value * c.SCALE, -LIMIT), LIMIT)
        # A NaN counts as 0, because its conversion is undefined.
        return tl.where(value != value, 0.0, scaled).to(tl.int32)


@kernel
def quotient(a, b):
    # Triton's float32 `/` is an approximate division.
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@kernel
def number(total, c: tl.constexpr):
    """Convert a sum of addends to a float."""
    if c.SCALE == 0:
        return total
    else:
        return quotient(total.to(c.ACC), tl.full(total.shape, c.SCALE, c.ACC))


@kernel
def slope(margin):
    """Return the surrogate gradient at a margin (semantics, section 2)."""
    wide = margin if margin.dtype == tl.float64 else margin.to(tl.float32)
    # A margin of 0 gives bit 0, so its slope has the sign of the negative side.
    half = tl.where(wide > 0, 0.5, -0.5).to(wide.dtype)
    distance = 1 + tl.abs(wide)
    return quotient(half, distance * distance)


@kernel
def cotangent(margin, difference, c: tl.constexpr):
    """Return the margin gradient addend for ``<dy, row - flipped row>``."""
    of_margin = slope(margin)
    return addend(of_margin * number(difference, c).to(of_margin.dtype), c)


@kernel
def touch(touched, t, row, exists, c: tl.constexpr):
    # Several programs may store the same 1; no atomic is needed.
    tl.store(touched + clamp_row(row, t, c), tl.full(row.shape, 1, tl.int32), mask=exists)


@kernel
def prefetch(address):
    """Prefetch the cache lines at these addresses into L2 for later additions."""
    # Triton has no prefetch. The unused result satisfies its interface, and an impure snippet is
    # not removed.
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

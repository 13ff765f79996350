"""What the kernels that read and add rows of tables share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._nvidia import shared_memory
from lutjax.kernels._triton._launch import kernel
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch

TYPES = {"float32": tl.float32, "float64": tl.float64}


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tiles of a call: what `Launch` says, no larger than the arrays.

    Attributes:
      n_rows, n_outputs, n_detectors: how many reads of each detector, outputs and detectors there are.
      all_outputs: a program visits all outputs, block by block.

    Raises:
      ValueError: a tile does not fit the shared memory of the device.
    """

    how: Launch
    n_rows: int
    n_outputs: int
    n_detectors: int
    device: Device
    all_outputs: bool = False

    def __post_init__(self) -> None:
        size, most = 4 * self.rows * self.outputs, shared_memory(self.device)
        if size > most:
            raise ValueError(
                f"{self.how}: a tile of {self.rows} rows and {self.outputs} outputs takes {size} bytes; the shared "
                f"memory of {self.device.kind} holds {most}. Choose fewer rows or outputs."
            )

    @property
    def rows(self) -> int:
        return min(self.how.rows, triton.next_power_of_2(max(self.n_rows, 1)))

    @property
    def outputs(self) -> int:
        return min(self.how.outputs, triton.next_power_of_2(max(self.n_outputs, 1)))

    @property
    def detectors(self) -> int:
        """Detectors of one program."""
        return max(min(self.how.detectors or self.n_detectors, self.n_detectors), 1)

    @property
    def groups(self) -> int:
        """Groups of detectors."""
        return max(triton.cdiv(self.n_detectors, self.detectors), 1)

    @property
    def output_blocks(self) -> int:
        return 1 if self.all_outputs else triton.cdiv(self.n_outputs, self.outputs)

    @property
    def programs(self) -> int:
        """Of a kernel whose programs are places of `place`."""
        return triton.cdiv(self.n_rows, self.rows) * self.output_blocks * self.groups

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of kernels."""
        return {
            "n_detectors": self.n_detectors,
            "n_outputs": self.n_outputs,
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "DETECTORS": self.detectors,
        }


def split(programs: int, n_detectors: int, enough: int = 1024) -> int:
    """Detectors for one program, so that there are enough programs to fill a device."""
    groups = min(max(enough // max(programs, 1), 1), max(n_detectors, 1))
    return triton.cdiv(n_detectors, groups)


def arithmetic(weights: jax.Array, accumulate: FixedPoint | None) -> dict[str, Any]:
    """Constants of kernels: the types of numbers and of their sums, and the scale of addends, 0 for sums of numbers."""
    number = TYPES[accumulator(weights.dtype).name]
    return {
        "ACC": number,
        "SUM": number if accumulate is None else tl.int32,
        "SCALE": 0.0 if accumulate is None else accumulate.scale,
    }


def sum_of_parts(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, in a fixed order."""
    return parts.reshape(parts.shape[1:]) if len(parts) == 1 else jnp.sum(parts, 0, dtype=parts.dtype)


# ------------------------------------------------------------------------------------- in kernels
@kernel
def block(size: tl.constexpr, n: tl.constexpr, number):
    """The places of a block and whether they exist."""
    at = number.to(tl.int64) * size + tl.arange(0, size)
    return at, at < n


@kernel
def place(n_samples: tl.constexpr, n_outputs: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Samples, outputs (or inputs, or slots) and group of detectors of this program: samples first."""
    sample_blocks: tl.constexpr = (n_samples + ROWS - 1) // ROWS
    output_blocks: tl.constexpr = (n_outputs + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    sample, sample_exists = block(ROWS, n_samples, program % sample_blocks)
    rest = program // sample_blocks
    output, output_exists = block(OUTPUTS, n_outputs, rest % output_blocks)
    return sample, sample_exists, output, output_exists, rest // output_blocks


@kernel
def table(weights, t, n_rows: tl.constexpr, n_outputs: tl.constexpr):
    """Where the table of a detector begins."""
    return weights + t.to(tl.int64) * n_rows * n_outputs


@kernel
def offset(row, n_rows: tl.constexpr, n_outputs: tl.constexpr):
    """Where a row begins in its table; ids that do not exist count as the nearest that does."""
    row = tl.minimum(tl.maximum(row, 0), n_rows - 1)
    if n_rows * n_outputs < 2**31:
        return row * n_outputs
    else:
        return row.to(tl.int64) * n_outputs


@kernel
def clamped(row, t, n_rows: tl.constexpr):
    """A row that exists, counted from the first row of the first table."""
    return t.to(tl.int64) * n_rows + tl.minimum(tl.maximum(row, 0), n_rows - 1)


@kernel
def read(table, row, output, n_outputs: tl.constexpr, OUTPUTS: tl.constexpr):
    """A block of the outputs of rows at the given offsets, all of which exist."""
    if n_outputs % OUTPUTS == 0:
        return tl.load(table + (row[:, None] + output[None, :]))
    else:
        return tl.load(table + (row[:, None] + output[None, :]), mask=(output < n_outputs)[None, :], other=0)


@kernel
def addend(value, SCALE: tl.constexpr):
    """What is added for a value: itself, or an integer as `lutjax.FixedPoint` says."""
    if SCALE == 0:
        return value
    else:
        LIMIT: tl.constexpr = 2147483520.0 if value.dtype == tl.float32 else 2147483647.9999998
        scaled = tl.minimum(tl.maximum(value * SCALE, -LIMIT), LIMIT)
        return tl.where(value != value, 0.0, scaled).to(tl.int32)


@kernel
def quotient(a, b):
    """Correctly rounded; the plain operator is not in float32."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@kernel
def number(total, ACC: tl.constexpr, SCALE: tl.constexpr):
    """A sum of addends as a number."""
    if SCALE == 0:
        return total
    else:
        return quotient(total.to(ACC), tl.full(total.shape, SCALE, ACC))


@kernel
def slope(margin):
    """The surrogate derivative, section 2 of the semantics."""
    wide = margin if margin.dtype == tl.float64 else margin.to(tl.float32)
    half = tl.where(wide > 0, 0.5, -0.5).to(wide.dtype)
    distance = 1 + tl.abs(wide)
    return quotient(half, distance * distance)


@kernel
def cotangent(margin, difference, ACC: tl.constexpr, SCALE: tl.constexpr):
    """Cotangent of a margin, as it is added, from the sum of ``<dy, row - flipped row>``."""
    of_margin = slope(margin)
    return addend(of_margin * number(difference, ACC, SCALE).to(of_margin.dtype), SCALE)


@kernel
def touch(touched, t, row, exists, n_rows: tl.constexpr):
    """Marks the rows of a table that are added to."""
    tl.store(touched + clamped(row, t, n_rows), tl.full(row.shape, 1, tl.int32), mask=exists)


@kernel
def prefetch(address):
    """Asks for the lines that hold these addresses: additions then find them in the cache."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

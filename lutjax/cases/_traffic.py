"""Bytes that a measured size has to move, and how such sizes are written.

"Has to move" counts every row once for every use, as if nothing was cached, and every other array once where it is
written and once where it is read. Caches can beat it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from lutjax.cases._case import Size, Sizes, Tag
from lutjax.names import BENCHMARK_ROWS

ROWS = FORWARD, DENSE, IN_PLACE, UPDATE = BENCHMARK_ROWS
"""Rows of a shape. `FORWARD`: outputs. `DENSE`: outputs and all cotangents, that of the tables as an
array; of gates those of their parameters. `IN_PLACE`: outputs, the other cotangents, and the tables after a step of SGD in their own memory. `UPDATE`: this
step alone."""

DETECTION_BYTES = 12  # index, flip and margin
ID_BYTES = 4  # of an index, a target, an anchor and a float32


@runtime_checkable
class Traffic(Protocol):
    """Traffic of a measured size, in bytes."""

    def table_bytes(self, itemsize: int) -> int:
        """Bytes of the parameters."""
        ...

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Bytes that have to move for one of `ROWS`.

        Args:
          itemsize: bytes of a number in the case's dtype.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LookUpTraffic:
    """Traffic of a detection and a lookup, in bytes.

    Attributes:
      table: table shape: ``(detectors, rows, outputs per row)``.
      uses: rows added in a forward pass: for each detector one per sample, or per pair of
          positions.
      detections: detections stored as arrays between detection and lookup.
      numbers_in: elements with a cotangent, in addition to the tables: `x` and positions.
      numbers_out: elements in the output.
      anchor_pairs: anchor pairs of all detectors.
      targets: output ids read with every row.
    """

    table: tuple[int, int, int]
    uses: int
    detections: int
    numbers_in: int
    numbers_out: int
    anchor_pairs: int
    targets: int = 0

    def table_bytes(self, itemsize: int) -> int:
        """Table bytes."""
        return math.prod(self.table) * itemsize

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Bytes that have to move for one of `ROWS`.

        Forward reads a row for each use. Backward reads it again, and the flipped row, for the cotangent of
        the margin; a position's flipped row is not counted. A gradient, or an update in place, reads and writes a
        row for each use; a gradient is an array of zeros before that.

        Args:
          itemsize: bytes of a number in tables and outputs. Inputs and margins are float32.
        """
        inputs = self.numbers_in * ID_BYTES + self.anchor_pairs * 2 * ID_BYTES
        outputs = self.numbers_out * itemsize
        of_row = self.table[2] * itemsize
        read = self.uses * (of_row + self.targets * ID_BYTES)
        moved = 2 * self.uses * of_row
        if row == FORWARD:  # the index is written and read
            return inputs + self.detections * 2 * ID_BYTES + read + outputs
        if row == UPDATE:  # without stored detections it has to detect again
            address = self.detections * ID_BYTES if self.detections else inputs
            return address + outputs + self.uses * self.targets * ID_BYTES + moved
        # Written once; the index is read in both directions; the margin's cotangent is written and read.
        detections = self.detections * (2 * DETECTION_BYTES + ID_BYTES + 2 * ID_BYTES)
        both = inputs + detections + 3 * read + 2 * outputs + self.numbers_in * ID_BYTES + moved
        return both + (self.table_bytes(itemsize) if row == DENSE else 0)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Kind of measured shapes, and their notation: ``fc:4096,32,32,16,10``.

    Attributes:
      name: prefix before the colon.
      sizes: names of the sizes in the op's case module, in written order.
      words: user-facing names for sizes with different ones.
      optional: number of trailing sizes that may be omitted.
      least: least value of sizes that may not be 1, or may be less.
      fixed: unwritten sizes, the same in all shapes of the kind.
      rows: the `ROWS` that can be measured, if the op has the directions for them.
      problem: returns the problem with individually valid sizes, or None.
    """

    name: str
    sizes: tuple[str, ...]
    words: dict[str, str] = dataclasses.field(default_factory=dict)
    optional: int = 0
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    fixed: dict[str, int] = dataclasses.field(default_factory=dict)
    rows: tuple[str, ...] = ROWS
    problem: Callable[[Sizes], str | None] | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def usage(self) -> str:
        """Names of the sizes in the order in which they are written.

        Example:
          >>> from lutjax.cases import Kind
          >>> Kind("fc", ("batch", "bits", "window"), words={"bits": "anchors"}, optional=1).usage
          'fc:batch,anchors[,window]'
        """
        names = [self.words.get(name, name) for name in self.sizes]
        required, optional = names[: self.n_required], names[self.n_required :]
        text = f"{self.name}:{','.join(required)}{''.join(f'[,{name}]' for name in optional)}"
        return text.replace(":[,", ":[")

    @property
    def n_required(self) -> int:
        """Sizes that have to be written."""
        return len(self.sizes) - self.optional

    def text(self, sizes: Sizes) -> str:
        """Sizes as they are written."""
        return f"{self.name}:{','.join(str(sizes[name]) for name in self.sizes if name in sizes)}"

    def size(self, *values: int, tags: tuple[Tag, ...] = (Tag.BENCH, Tag.TUNE)) -> Size:
        """Return the size of values in the order in which they are written.

        Raises:
          ValueError: a value breaks its rule.
        """
        sizes = {**dict(zip(self.sizes, values, strict=False)), **self.fixed}
        for name in self.sizes:
            least = self.least.get(name, 1)
            if name in sizes and sizes[name] < least:
                raise ValueError(
                    f"{self.words.get(name, name)} is {sizes[name]}; it must be at least {least}"
                )
            if name in sizes and sizes[name] >= 2**31:  # which no shape of XLA has
                raise ValueError(f"{self.words.get(name, name)} is {sizes[name]}; it must be below 2^31")
        problem = None if self.problem is None else self.problem(sizes)
        if problem is not None:
            raise ValueError(problem)
        return Size(*tags, **sizes)

"""Required memory traffic and notation for measured sizes.

Required traffic counts a row once per use, as without caches, and every other array once per write
and once per read. Caches can beat it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from lutjax.cases._case import Size, Sizes, Tag
from lutjax.names import BENCHMARK_ROWS

ROWS = FORWARD, DENSE, IN_PLACE, UPDATE = BENCHMARK_ROWS
"""Measured rows.

`FORWARD`: outputs. `DENSE`: outputs and all cotangents, with a dense table or parameter gradient.
`IN_PLACE`: outputs, other cotangents, and an in-place SGD step. `UPDATE`: only this step.
"""

DETECTION_BYTES = 12  # index, flip and margin
ID_BYTES = 4  # index, target, anchor or float32


@runtime_checkable
class Traffic(Protocol):
    """Memory traffic for a measured size, in bytes."""

    def table_bytes(self, itemsize: int) -> int:
        """Return parameter bytes."""
        ...

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Return required traffic in bytes.

        Args:
          row: one of `ROWS`.
          itemsize: bytes per element in the case's dtype.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LookUpTraffic:
    """Detection and lookup traffic, in bytes.

    Attributes:
      table: table shape: ``(detectors, rows, outputs per row)``.
      uses: rows added in a forward pass: one per detector and sample, or position pair.
      detections: detections stored as arrays between detection and lookup.
      numbers_in: differentiated elements in addition to tables: `x` and positions.
      numbers_out: output elements.
      anchor_pairs: anchor pairs in all detectors.
      targets: output ids per row.
    """

    table: tuple[int, int, int]
    uses: int
    detections: int
    numbers_in: int
    numbers_out: int
    anchor_pairs: int
    targets: int = 0

    def table_bytes(self, itemsize: int) -> int:
        """Return table bytes."""
        return math.prod(self.table) * itemsize

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Return required traffic in bytes.

        Forward reads one row per use. Backward reads it again, and the flipped row, for the margin
        cotangent; flipped position rows are not counted. A gradient or an in-place update reads and
        writes one row per use; a dense gradient is zeroed first.

        Args:
          row: one of `ROWS`.
          itemsize: bytes per table and output element. Inputs and margins are float32.
        """
        # Both inputs of an anchor pair have an id.
        inputs = self.numbers_in * ID_BYTES + self.anchor_pairs * 2 * ID_BYTES
        outputs = self.numbers_out * itemsize
        of_row = self.table[2] * itemsize
        read = self.uses * (of_row + self.targets * ID_BYTES)
        # An update reads and writes the row of each use.
        moved = 2 * self.uses * of_row
        if row == FORWARD:  # the index is written and read
            return inputs + self.detections * 2 * ID_BYTES + read + outputs
        if row == UPDATE:  # detects again without stored detections
            address = self.detections * ID_BYTES if self.detections else inputs
            return address + outputs + self.uses * self.targets * ID_BYTES + moved
        # One write; both directions read the index; the margin cotangent is written and read.
        detections = self.detections * (2 * DETECTION_BYTES + ID_BYTES + 2 * ID_BYTES)
        both = inputs + detections + 3 * read + 2 * outputs + self.numbers_in * ID_BYTES + moved
        return both + (self.table_bytes(itemsize) if row == DENSE else 0)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Traffic as elements in the case's dtype, and bytes of all other arrays.

    Attributes:
      table: elements and bytes of the parameters.
      rows: elements and bytes moved, by row; `DENSE` also stands for `IN_PLACE`.
    """

    table: tuple[int, int]
    rows: Mapping[str, tuple[int, int]]

    def table_bytes(self, itemsize: int) -> int:
        """Return parameter bytes."""
        return self.table[0] * itemsize + self.table[1]

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Return required traffic in bytes."""
        elements, n_bytes = self.rows.get(row) or self.rows[DENSE]
        return elements * itemsize + n_bytes


@dataclasses.dataclass(frozen=True)
class Kind:
    """Shape kind with a notation: ``fc:4096,32,32,16,10``.

    Attributes:
      name: prefix before the colon.
      sizes: size names in written order.
      words: user-facing names, if different.
      optional: number of optional trailing sizes.
      least: minimum values, if not 1.
      fixed: constant, unwritten sizes.
      rows: measurable `ROWS`, if the op has their directions.
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
        # Fields with dictionaries are not hashable, and names are unique.
        return hash(self.name)

    @property
    def usage(self) -> str:
        """Size names in written order.

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
        """Number of required sizes."""
        return len(self.sizes) - self.optional

    def text(self, sizes: Sizes) -> str:
        """Return written sizes."""
        return f"{self.name}:{','.join(str(sizes[name]) for name in self.sizes if name in sizes)}"

    def size(self, *values: int, tags: tuple[Tag, ...] = (Tag.BENCH, Tag.TUNE)) -> Size:
        """Return a size from values in written order.

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
                raise ValueError(
                    f"{self.words.get(name, name)} is {sizes[name]}; it must be below 2^31"
                )
        problem = None if self.problem is None else self.problem(sizes)
        if problem is not None:
            raise ValueError(problem)
        return Size(*tags, **sizes)

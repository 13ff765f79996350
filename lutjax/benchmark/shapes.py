"""The shapes that are measured, and the bytes that each has to move.

"Has to move" counts every row once for every use, as if nothing was cached, and every other array once where it is
written and once where it is read. Caches can beat it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

FORWARD = "forward"
DENSE = "dense"
IN_PLACE = "in-place"
UPDATE = "update"
ROWS = (FORWARD, DENSE, IN_PLACE, UPDATE)
"""What is measured of a shape. `FORWARD`: outputs. `DENSE`: outputs and all cotangents, that of the tables as an
array; of gates those of their parameters. `IN_PLACE`: outputs, the other cotangents, and the tables after a step of SGD in their own memory. `UPDATE`: this
step alone."""

_DETECTION = 12  # bytes: index, flip and margin
_ID = 4  # bytes of an index, a target, an anchor and a float32


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one look-up.

    Attributes:
      detectors: tables.
      anchors: anchor pairs of a detector.
    """

    kind: ClassVar[str]
    at_least: ClassVar[dict[str, int]] = {"inputs": 2, "position_bits": 0, "window": 0, "length": 2}
    max_bits: ClassVar[int] = 30

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least = self.at_least.get(name, 1)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.bits > self.max_bits:
            raise ValueError(f"a row has {self.bits} address bits; it can have at most {self.max_bits}")

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(str(v) for v in dataclasses.astuple(self) if v is not None)}"

    @property
    def bits(self) -> int:
        """Bits of a row's address."""
        raise NotImplementedError

    @property
    def table(self) -> tuple[int, int, int]:
        """Shape of the tables: ``(detectors, rows, outputs of a row)``."""
        raise NotImplementedError

    @property
    def uses(self) -> int:
        """Rows that a forward pass adds up: for each detector one per sample, or per pair of places."""
        raise NotImplementedError

    @property
    def detections(self) -> int:
        """Detections that are arrays between detection and look-up."""
        raise NotImplementedError

    @property
    def numbers_in(self) -> int:
        """Numbers that have a cotangent, beside the tables: `x` and positions."""
        raise NotImplementedError

    @property
    def numbers_out(self) -> int:
        """Numbers of the output."""
        raise NotImplementedError

    @property
    def anchor_pairs(self) -> int:
        """Anchor pairs of all detectors."""
        raise NotImplementedError

    @property
    def targets(self) -> int:
        """Ids of outputs that are read with every row."""
        return 0

    def table_bytes(self, itemsize: int) -> int:
        """Bytes of the tables."""
        return math.prod(self.table) * itemsize

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Bytes that have to move for one of `ROWS`.

        Forward reads a row for each use. Backward reads it again, and the flipped row, for the cotangent of
        the margin; a position's flipped row is not counted. A gradient, or an update in place, reads and writes a
        row for each use; a gradient is an array of zeros before that.

        Args:
          itemsize: bytes of a number in tables and outputs. Inputs and margins are float32.
        """
        inputs = self.numbers_in * _ID + self.anchor_pairs * 2 * _ID
        outputs = self.numbers_out * itemsize
        of_row = self.table[2] * itemsize
        read = self.uses * (of_row + self.targets * _ID)
        moved = 2 * self.uses * of_row
        if row == FORWARD:  # the index is written and read
            return inputs + self.detections * 2 * _ID + read + outputs
        if row == UPDATE:  # without stored detections it has to detect again
            address = self.detections * _ID if self.detections else inputs
            return address + outputs + self.uses * self.targets * _ID + moved
        # Written once; the index is read in both directions; the margin's cotangent is written and read.
        detections = self.detections * (2 * _DETECTION + _ID + 2 * _ID)
        both = inputs + detections + 3 * read + 2 * outputs + self.numbers_in * _ID + moved
        return both + (self.table_bytes(itemsize) if row == DENSE else 0)


@dataclasses.dataclass(frozen=True)
class FullyConnected(Shape):
    """`lutjax.lut` of ``x[batch, inputs]``."""

    kind = "fc"
    batch: int
    inputs: int
    outputs: int
    detectors: int
    anchors: int

    @property
    def bits(self) -> int:
        return self.anchors

    @property
    def table(self) -> tuple[int, int, int]:
        return self.detectors, 2**self.anchors, self.outputs

    @property
    def uses(self) -> int:
        return self.batch * self.detectors

    @property
    def detections(self) -> int:
        return self.batch * self.detectors

    @property
    def numbers_in(self) -> int:
        return self.batch * self.inputs

    @property
    def numbers_out(self) -> int:
        return self.batch * self.outputs

    @property
    def anchor_pairs(self) -> int:
        return self.detectors * self.anchors


@dataclasses.dataclass(frozen=True)
class Sparse(FullyConnected):
    """`lutjax.sparse_lut` of ``x[batch, inputs]``, with a list of targets for every row."""

    kind = "sparse"
    slots: int

    @property
    def table(self) -> tuple[int, int, int]:
        return self.detectors, 2**self.anchors, self.slots

    @property
    def targets(self) -> int:
        return self.slots


@dataclasses.dataclass(frozen=True)
class Sequence(Shape):
    """`lutjax.lut_attention` of ``x[batch, length, inputs]``, with as many outputs as inputs."""

    kind = "seq"
    batch: int
    length: int
    inputs: int
    detectors: int
    anchors: int
    position_bits: int
    window: int | None = None

    @property
    def bits(self) -> int:
        return 2 * self.anchors + self.position_bits

    @property
    def table(self) -> tuple[int, int, int]:
        return self.detectors, 2**self.bits, self.inputs

    @property
    def distances(self) -> int:
        """Distances that occur: positions that are needed."""
        return self.length - 1 if self.window is None else min(self.length - 1, self.window)

    @property
    def uses(self) -> int:
        pairs = sum(min(query, self.distances) for query in range(self.length))
        return self.batch * pairs * self.detectors

    @property
    def detections(self) -> int:
        return (self.batch * self.length + self._position_detections) * self.detectors

    @property
    def _position_detections(self) -> int:
        return self.distances if self.position_bits else 0

    @property
    def numbers_in(self) -> int:
        positions = self.distances * self.detectors * self.position_bits
        return self.batch * self.length * self.inputs + positions

    @property
    def numbers_out(self) -> int:
        return self.batch * self.length * self.inputs

    @property
    def anchor_pairs(self) -> int:
        return self.detectors * self.anchors


@dataclasses.dataclass(frozen=True)
class Pair(Sequence):
    """`lutjax.lut_pair_attention`, which detects every pair anew: no detections are stored."""

    kind = "pair"
    interleave: ClassVar[bool] = False

    @property
    def bits(self) -> int:
        return self.anchors

    @property
    def detections(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class InterleavedPair(Pair):
    """The same with interleaved inputs, which needs as many position bits as inputs."""

    kind = "pair-interleaved"
    interleave = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position_bits != self.inputs:
            raise ValueError(
                f"position_bits is {self.position_bits}; interleaved it must be that of inputs, {self.inputs}"
            )


@dataclasses.dataclass(frozen=True)
class Gates:
    """`lutjax.bilinear_gates` of ``x[inputs, batch]``, features first, with lists of readers.

    Wires are random, every input is read about equally often. Of `ROWS` it has `FORWARD` and `DENSE`.
    """

    kind: ClassVar[str] = "gates"
    op: ClassVar[str] = "bilinear_gates"
    batch: int
    inputs: int
    gates: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.bits > 8:
            raise ValueError(f"places is {self.bits}; a table can have at most 8")

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, dataclasses.astuple(self)))}"

    @property
    def bits(self) -> int:
        """Inputs of a gate."""
        return 2

    @property
    def parameter(self) -> tuple[str, tuple[int, int]]:
        """Name and shape of what the gates are made of: float32."""
        return "coefficients", (4, self.gates)

    @property
    def fan_out(self) -> int:
        """Readers of the most read input."""
        return -(-self.gates * self.bits // self.inputs)

    def table_bytes(self, itemsize: int) -> int:
        """Bytes of the parameters."""
        return math.prod(self.parameter[1]) * 4

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Bytes that have to move if inputs that are read again come from a cache.

        Forward reads the inputs and writes the outputs. Backward reads the inputs and the outputs' cotangent, and
        writes that of the inputs.

        Args:
          itemsize: bytes of a number in inputs and outputs.
        """
        inputs, outputs = (n * self.batch * itemsize for n in (self.inputs, self.gates))
        wires = self.gates * self.bits * _ID
        forward = inputs + outputs + wires + self.table_bytes(itemsize)
        if row == FORWARD:
            return forward
        readers = self.inputs * self.fan_out * _ID
        return forward + 2 * inputs + outputs + wires + readers + 2 * self.table_bytes(itemsize)


@dataclasses.dataclass(frozen=True)
class SoftTables(Gates):
    """`lutjax.soft_lut` likewise, each table with `places` inputs."""

    kind = "soft_lut"
    op = "soft_lut"
    places: int

    @property
    def bits(self) -> int:
        return self.places

    @property
    def parameter(self) -> tuple[str, tuple[int, int]]:
        return "table", (self.gates, 2**self.places)


@dataclasses.dataclass(frozen=True)
class BinaryTables(SoftTables):
    """`lutjax.binary_lut` likewise."""

    kind = "binary_lut"
    op = "binary_lut"


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A training step of the published language model, in the state's own memory.

    Attributes:
      batch: windows of the text in a step.
    """

    kind: ClassVar[str] = "lm"
    batch: int = 128

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}; it must be at least 1")

    def __str__(self) -> str:
        return f"lm:{self.batch}"


OfOp = Shape | Gates
"""Sizes of one op."""

Measured = OfOp | LanguageModel

_CLASSES: tuple[type[Measured], ...] = (
    FullyConnected,
    Sequence,
    Pair,
    InterleavedPair,
    Sparse,
    Gates,
    SoftTables,
    BinaryTables,
    LanguageModel,
)
KINDS: dict[str, type[Measured]] = {shape.kind: shape for shape in _CLASSES}

NAMED: dict[str, Measured] = {
    "ffn": FullyConnected(4096, 32, 32, 16, 10),
    "unembed": FullyConnected(4096, 32, 256, 16, 10),
    "mid": FullyConnected(16384, 512, 512, 64, 6),
    "big": FullyConnected(4096, 1024, 1024, 256, 8),
    "sparse": Sparse(4096, 512, 512, 64, 6, 32),
    # Longer and longer sequences side by side.
    "seq-4x32": Sequence(4, 32, 32, 64, 6, 4),
    "seq-128x32": Sequence(128, 32, 32, 64, 6, 4),
    "seq-16x256": Sequence(16, 256, 32, 64, 6, 4),
    "seq-4x1024": Sequence(4, 1024, 32, 64, 6, 4),
    "seq-4x1024-window": Sequence(4, 1024, 32, 64, 6, 4, 256),
    "seq-1x4096": Sequence(1, 4096, 32, 64, 6, 4),
    "seq-1x4096-window": Sequence(1, 4096, 32, 64, 6, 4, 256),
    "pair": Pair(32, 32, 32, 64, 6, 4),
    "pair-interleaved": InterleavedPair(32, 32, 32, 64, 6, 32),
    "gates": Gates(4096, 16384, 16384),
    "soft-lut": SoftTables(4096, 16384, 16384, 4),
    "binary-lut": BinaryTables(4096, 16384, 16384, 6),
    "gates-2000": Gates(100, 2000, 2000),
    "lm": LanguageModel(),
}
"""Shapes with a name."""

ON_CPU = ("ffn", "unembed", "seq-4x32", "gates-2000")
"""What is measured on a CPU if no shape is asked for."""


def name_of(shape: Measured) -> str:
    """Its name, or its sizes if it has none."""
    return next((name for name, named in NAMED.items() if named == shape), str(shape))


def parse(text: str, named: Mapping[str, Measured] = NAMED) -> Measured:
    """The shape of a name, or of sizes: ``fc:4096,32,32,16,10``.

    Raises:
      ValueError: neither; the message says what was expected.

    Example:
      >>> from lutjax.benchmark.shapes import parse
      >>> parse("seq:2,8,4,3,2,1,5").window
      5
    """
    if text in named:
        return named[text]
    kind, colon, sizes = text.partition(":")
    if not colon or kind not in KINDS:
        raise ValueError(
            f"{text!r} is no shape; it must be one of {', '.join(named)}, or sizes: {'; '.join(map(usage, KINDS))}."
        )
    try:
        numbers = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} has sizes that are not whole numbers; expected {usage(kind)}.") from None
    fields = dataclasses.fields(KINDS[kind])
    least = sum(field.default is dataclasses.MISSING for field in fields)
    if not least <= len(numbers) <= len(fields) or not numbers:
        raise ValueError(f"{text!r} has {len(numbers)} sizes; expected {usage(kind)}.")
    try:
        return KINDS[kind](*numbers)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; the sizes are {usage(kind)}.") from None


def usage(kind: str) -> str:
    """How a shape of this kind is written.

    Example:
      >>> from lutjax.benchmark.shapes import usage
      >>> usage("fc")
      'fc:batch,inputs,outputs,detectors,anchors'
    """
    fields = dataclasses.fields(KINDS[kind])
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    optional = [f"[,{field.name}]" for field in fields if field.default is not dataclasses.MISSING]
    return f"{kind}:{','.join(required)}{''.join(optional)}".replace(":[,", ":[")

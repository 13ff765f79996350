"""Measured shapes: ops at measured sizes, and the language model."""

import dataclasses
from collections.abc import Mapping

from lutjax import cases
from lutjax.cases import DENSE, FORWARD, IN_PLACE, ROWS, UPDATE, Kind, Size, Tag, Traffic
from lutjax.dispatch.registry import kernel_registry
from lutjax.values import FixedPoint

__all__ = [
    "DENSE",
    "FORWARD",
    "IN_PLACE",
    "ROWS",
    "UPDATE",
    "LanguageModel",
    "Measured",
    "OfOp",
    "kinds",
    "name_of",
    "named_shapes",
    "parse",
]


@dataclasses.dataclass(frozen=True)
class OfOp:
    """Op sizes.

    Attributes:
      kind: notation. values: sizes by name.
      accumulate: fixed-point accumulation; None: floating point.
    """

    op: str
    kind: Kind
    values: tuple[tuple[str, int], ...]
    accumulate: FixedPoint | None = None

    def __str__(self) -> str:
        return self.kind.text(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(self.values)

    @property
    def traffic(self) -> Traffic:
        """Required memory traffic."""
        return cases.find_module(self.op).traffic(self.sizes)

    @property
    def rows(self) -> tuple[str, ...]:
        """Supported rows."""
        directions = kernel_registry.directions(self.op)
        if "update" in directions:
            return self.kind.rows
        possible = (FORWARD, DENSE) if "backward" in directions else (FORWARD,)
        return tuple(row for row in self.kind.rows if row in possible)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """In-place training step for the published language model.

    Attributes:
      batch: windows per step.
    """

    batch: int = 128

    def __str__(self) -> str:
        return f"lm:{self.batch}"


Measured = OfOp | LanguageModel

_LANGUAGE_MODEL = Kind("lm", ("batch",), optional=1)


def kinds() -> dict[str, tuple[str | None, Kind]]:
    """Return op and kind by kind name. The language model has no op."""
    found: dict[str, tuple[str | None, Kind]] = {
        kind.name: (op, kind) for op, module in _modules() for kind in module.kinds
    }
    return {**found, _LANGUAGE_MODEL.name: (None, _LANGUAGE_MODEL)}


def named_shapes(tag: Tag = Tag.BENCH) -> dict[str, Measured]:
    """Return named shapes with a tag."""
    found: dict[str, Measured] = {
        name: OfOp(op, module.kind(size), tuple(size.items()))
        for op, module in _modules()
        for name, size in module.measured_sizes.items()
        if tag in size.tags
    }
    return found if tag == Tag.CPU else {**found, "lm": LanguageModel()}


def _modules() -> list[tuple[str, cases.CaseModule]]:
    return [
        (op, cases.find_module(op)) for op in kernel_registry.ops() if kernel_registry.cases(op)
    ]


def op_shape(kind: str, *values: int) -> OfOp:
    """Return a shape from sizes in written order.

    Example:
      >>> from lutjax.benchmark import shapes
      >>> str(shapes.op_shape("fc", 4096, 32, 32, 16, 10))
      'fc:4096,32,32,16,10'
    """
    op, how = kinds()[kind]
    assert op is not None
    return OfOp(op, how, tuple(how.size(*values).items()))


def name_of(shape: Measured) -> str:
    """Return the shape name or sizes, with any fixed-point scale."""
    floats = dataclasses.replace(shape, accumulate=None) if isinstance(shape, OfOp) else shape
    name = next((name for name, known in named_shapes().items() if known == floats), str(shape))
    in_floats = floats is shape or floats == shape
    scale = None if in_floats else shape.accumulate.scale  # type: ignore[union-attr]
    return name if scale is None else f"{name} at {scale:g}"


def parse(text: str, known: Mapping[str, Measured] | None = None) -> Measured:
    """Return a shape from its name or its sizes, such as ``fc:4096,32,32,16,10``.

    Raises:
      ValueError: invalid text; the message lists valid ones.

    Example:
      >>> from lutjax.benchmark.shapes import parse
      >>> parse("seq:2,8,4,3,2,1,5").sizes["window"]
      5
    """
    known = named_shapes() if known is None else known
    if text in known:
        return known[text]
    name, colon, sizes = text.partition(":")
    if not colon or name not in kinds():
        usages = "; ".join(kind.usage for _, kind in kinds().values())
        raise ValueError(
            f"{text!r} is not a shape; it must be one of {', '.join(known)}, or sizes: {usages}."
        )
    op, kind = kinds()[name]
    try:
        numbers = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ValueError(
            f"{text!r} has sizes that are not whole numbers; expected {kind.usage}."
        ) from None
    if not kind.n_required <= len(numbers) <= len(kind.sizes):
        raise ValueError(f"{text!r} has {len(numbers)} sizes; expected {kind.usage}.")
    try:
        size: Size = kind.size(*numbers)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; the sizes are {kind.usage}.") from None
    return LanguageModel(**size) if op is None else OfOp(op, kind, tuple(size.items()))

"""Circuit ports and their number formats."""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Shaped, UInt

from lutjax.circuits import _names
from lutjax.files.messages import in_a_line
from lutjax.ops import describe

_FORMAT = re.compile(r"(u?)(int|fixed)(\d{1,3})(?:\.(\d{1,3}))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Format:
    """Fixed-point format: an integer with some bits, divided by a power of two.

    Attributes:
      bits: total bits, 1 to 64; negative values use two's complement.
      fraction: fraction bits; a value is its integer over ``2**fraction``. At most `bits`, and
        nonzero only up to 53 bits, which float64 represents exactly.
      signed: whether the highest bit is a sign bit.

    Raises:
      ValueError: sizes out of range.

    Example:
      >>> from lutjax.circuits import Format
      >>> Format.parse("uint8"), Format.parse("fixed12.4")
      (Format(bits=8, fraction=0, signed=False), Format(bits=12, fraction=4, signed=True))
    """

    bits: int = 1
    fraction: int = 0
    signed: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 64:
            raise ValueError(
                f"Format: bits is {self.bits!r}; it must be a whole number from 1 to 64."
            )
        if type(self.fraction) is not int or not 0 <= self.fraction <= self.bits:
            raise ValueError(
                f"Format: fraction is {self.fraction!r}; expected an integer from 0 to {self.bits}."
            )
        if type(self.signed) is not bool:
            raise ValueError(f"Format: signed is {self.signed!r}; it must be True or False.")
        if self.fraction and self.bits > 53:
            raise ValueError(
                f"Format: bits is {self.bits} and fraction is {self.fraction}; "
                "numbers with a fraction have at most 53 bits, which float64 holds."
            )

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Parse a format name: ``uint8``, ``int12``, ``ufixed8.4`` or ``fixed12.4``.

        The first number counts all bits, the second the fraction bits.

        Raises:
          ValueError: any other name.

        Example:
          >>> from lutjax.circuits import Format
          >>> Format.parse("ufixed8.4").range
          (0.0, 15.9375)
        """
        match = _FORMAT.fullmatch(text) if isinstance(text, str) else None
        if match is None or (match[2] == "fixed") != (match[4] is not None):
            raise ValueError(
                f"Format.parse: text is {in_a_line(repr(text), 60)}; "
                "expected a name such as 'uint8', 'int8', 'ufixed8.4' or 'fixed8.4': total bits, "
                "then fraction bits."
            )
        return cls(int(match[3]), int(match[4] or 0), signed=not match[1])

    def __str__(self) -> str:
        kind = ("" if self.signed else "u") + ("fixed" if self.fraction else "int")
        return f"{kind}{self.bits}" + (f".{self.fraction}" if self.fraction else "")

    @property
    def range(self) -> tuple[int | float, int | float]:
        """Smallest and largest value; integers if the format has no fraction."""
        least, largest = whole_range(self)
        if not self.fraction:
            return least, largest
        return least / 2**self.fraction, largest / 2**self.fraction

    def encode(self, numbers: Shaped[np.ndarray, "..."]) -> UInt[np.ndarray, "..."]:
        """Return the bits as uint64 integers, negative values in two's complement.

        Args:
          numbers: any real dtype.

        Raises:
          TypeError: unsupported dtype.
          ValueError: a value is not representable.

        Example:
          >>> import numpy as np
          >>> from lutjax.circuits import Format
          >>> Format.parse("fixed8.4").encode(np.array([0.5, -0.0625]))
          array([  8, 255], dtype=uint64)
        """
        numbers = np.asarray(numbers)
        if numbers.dtype.kind not in "buif":
            try:
                # Formats of JAX, such as bfloat16, have another kind.
                numbers = numbers.astype(np.float64, casting="safe")
            except TypeError:
                raise TypeError(
                    f"Format.encode: numbers is {describe(numbers)}; "
                    "expected integers, floating-point numbers or bool."
                ) from None
        least, largest = whole_range(self)
        if numbers.dtype.kind == "f":
            # float64 holds all numbers of smaller types; longdouble keeps its own precision.
            wide = numbers if numbers.dtype.itemsize > 8 else numbers.astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                whole = np.ldexp(wide, self.fraction)
                # The limits of 64 bits are powers of two, which floats hold; one below is not.
                in_range = (whole >= float(least)) & (whole < float(largest + 1))
                good = (np.floor(whole) == whole) & in_range
            whole = np.where(good, whole, 0)
            # Converting negative floats to uint64, or large ones to int64, is undefined.
            codes = (
                whole.astype(np.int64).view(np.uint64) if self.signed else whole.astype(np.uint64)
            )
        else:
            if numbers.dtype.kind == "b":
                numbers = numbers.astype(np.uint8)
            # Integers are compared in their own dtype, so only with limits that this dtype holds.
            low, high = -(-least >> self.fraction), largest >> self.fraction
            limits = np.iinfo(numbers.dtype)
            good = np.ones(numbers.shape, bool)
            if limits.min < low:
                good &= numbers >= low
            if limits.max > high:
                good &= numbers <= high
            codes = np.where(good, numbers, 0).astype(np.uint64) << np.uint64(self.fraction)
        if not good.all():
            at = tuple(int(i) for i in np.argwhere(~good)[0])
            first, last = self.range
            steps = f"multiples of 1/{2**self.fraction}" if self.fraction else "whole numbers"
            raise ValueError(
                f"Format.encode: numbers[{', '.join(map(str, at))}] is {numbers[at]}; "
                f"{self} has {steps} from {first} to {last}. "
                "Round and clip the numbers first, or choose another format."
            )
        return codes & np.uint64((1 << self.bits) - 1)

    def decode(self, codes: UInt[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Return the values for bits, the inverse of `encode`.

        Returns:
          int64; uint64 for 64 unsigned bits, float64 with a fraction.

        Example:
          >>> import numpy as np
          >>> from lutjax.circuits import Format
          >>> Format.parse("fixed8.4").decode(np.array([8, 255], np.uint64))
          array([ 0.5   , -0.0625])
        """
        codes = np.asarray(codes).astype(np.uint64)
        whole = whole_numbers(self, codes)
        return np.ldexp(whole.astype(np.float64), -self.fraction) if self.fraction else whole


def bit_ranges(ports: Iterable["Port"]) -> Iterator[tuple["Port", range]]:
    """Yield each port with the range of its bits among the bits of all ports."""
    start = 0
    for port in ports:
        yield port, range(start, start + port.n_bits)
        start += port.n_bits


def whole_range(format: Format) -> tuple[int, int]:
    """Return the smallest and largest integer code in a format."""
    if not format.signed:
        return 0, (1 << format.bits) - 1
    return -(1 << format.bits - 1), (1 << format.bits - 1) - 1


def whole_numbers(format: Format, codes: UInt[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Return the integers for bits, before division: int64, or uint64 for 64 unsigned bits."""
    if not format.signed:
        return codes if format.bits == 64 else codes.astype(np.int64)
    # Shifting up and down again repeats the sign in the higher bits.
    unread = 64 - format.bits
    return codes.astype(np.int64) << unread >> unread


def levels_of(thresholds: Shaped[np.ndarray, "..."], format: Format) -> Shaped[np.ndarray, "..."]:
    """Return the largest format integer not above each threshold, or the minimum minus one."""
    lowest, highest = whole_range(format)
    # Thresholds may be infinite, or too large to be scaled. No format reaches 2**80.
    scaled = np.ldexp(np.clip(thresholds, -(2.0**80), 2.0**80), format.fraction)
    levels: np.ndarray = np.clip(np.floor(scaled), lowest - 1, highest).astype(np.int64)
    return levels


@dataclasses.dataclass(frozen=True)
class Port:
    """Elements that enter or leave a circuit in parallel.

    Attributes:
      name: a word with letters, digits and underscores, not a keyword in Verilog, VHDL or C.
      count: number of elements, at least 1.
      format: element format. Bits are stored lowest first, element by element.

    Raises:
      ValueError: invalid name or count.
    """

    name: str
    count: int = 1
    format: Format = Format()

    def __post_init__(self) -> None:
        if why := _names.explain_bad_port(self.name):
            raise ValueError(f"Port: name is {in_a_line(repr(self.name), 60)}; {why}.")
        if type(self.count) is not int or self.count < 1:
            raise ValueError(
                f"Port: count is {self.count!r}; it must be a whole number of at least 1."
            )
        if not isinstance(self.format, Format):
            raise TypeError(
                f"Port: format is {self.format!r}; "
                "expected a Format, such as Format.parse('uint8')."
            )

    @property
    def n_bits(self) -> int:
        """Total bits of the port."""
        return self.count * self.format.bits

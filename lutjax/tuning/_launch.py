"""Kernel config as a frozen value, and the sizes it applies to."""

import dataclasses

Sizes = dict[str, int]
"""Named sizes of a call that select its config, e.g.

``{"samples": 4096, "detectors": 16, ...}``.
"""

Bucket = tuple[tuple[str, int], ...]
"""Rounded sizes, sorted by name."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Kernel config: the sizes of its programs.

    A program works on a tile of `rows` reads (lookup samples, attention keys) times `outputs`, for
    `detectors` detectors one after the other.

    Attributes:
      rows: power of two; the kernel takes fewer if there are fewer.
      outputs: power of two; the kernel takes fewer if there are fewer.
      detectors: detectors per program; 0: all.
      warps: warps per program, with 32 threads each: a power of two up to 32.

    Raises:
      ValueError: a value breaks its rule.

    Example:
      >>> from lutjax import tuning
      >>> tuning.Launch(rows=32, outputs=64, detectors=4, warps=2)
      Launch(rows=32, outputs=64, detectors=4, warps=2)
    """

    rows: int
    outputs: int
    detectors: int = 0
    warps: int = 4

    def __post_init__(self) -> None:
        for name, most in (("rows", 2**16), ("outputs", 2**16), ("warps", 32)):
            value = getattr(self, name)
            if not _is_whole(value) or not 1 <= value <= most or value & (value - 1):
                raise ValueError(
                    f"Launch: {name} is {value!r}; expected a power of two from 1 to {most}."
                )
        if not _is_whole(self.detectors) or self.detectors < 0:
            raise ValueError(
                f"Launch: detectors is {self.detectors!r}; expected a whole number, 0 for all."
            )
        # Triton has no larger tiles.
        if self.rows * self.outputs > 2**20:
            raise ValueError(
                f"Launch: a tile of rows * outputs = {self.rows} * {self.outputs} values; at most "
                "2**20."
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def bucket(sizes: Sizes) -> Bucket:
    """Round each size to the nearest power of two: one measurement covers all sizes in a bucket."""
    return tuple((name, round_to_power(size)) for name, size in sorted(sizes.items()))


def round_to_power(size: int) -> int:
    """Return the nearest power of two, the larger on ties; 0 for 0."""
    if size <= 0:
        return 0
    # Compared in integers: a logarithm would round large sizes to the wrong side.
    below = 1 << (size.bit_length() - 1)
    return below if size - below < 2 * below - size else 2 * below

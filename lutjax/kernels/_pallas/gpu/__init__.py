"""Pallas kernels for NVIDIA GPUs (Mosaic GPU): Hopper and newer.

Kernel modules import Pallas inside their launch functions, so Triton calls do not import it.
"""

import dataclasses

from lutjax.dispatch.registry import Request
from lutjax.kernels import _triton
from lutjax.kernels._nvidia import unsupported_generation


@dataclasses.dataclass(frozen=True)
class Measured:
    """A reason based on an H200 measurement of Triton, recorded in ``docs/benchmarks/h200.csv``.

    Attributes:
      shape, row: record key. microseconds: median call time.
      limit: memory traffic divided by copy bandwidth, in microseconds.
    """

    shape: str
    row: str
    microseconds: int
    limit: int

    def __str__(self) -> str:
        return (
            f"little to gain: for {self.shape} ({self.row}) on an H200, Triton takes "
            f"{self.microseconds} us, and the memory traffic at least {self.limit} us"
        )


_ATOMICS = (
    "adds single values with atomics, which were no faster in shared memory than in the L2 cache"
)

ABSENT: dict[str, str | Measured] = {
    **_triton.ABSENT,
    "detect forward": "nothing to gain: Triton transfers only x and the detections",
    "detect backward": _ATOMICS,
    "weighted_lookup": _ATOMICS,
    "lut_pair_attention forward": Measured("pair", "forward", 40, 32),
    "lut_pair_attention": Measured("pair", "dense", 205, 158),
    "scored_lut update": _ATOMICS,
    "sparse_lookup update": _ATOMICS,
    "binary_lut forward": "was slower than Triton",
    "bilinear_gates forward": "was no faster than Triton",
    "bilinear_gates backward": Measured("gates", "dense", 435, 324),
    "logic_trees": "bound by leaf reads from the caches, as in Triton",
    "lut_at_places forward": "reads single values and rows from the caches, as Triton does",
    "lut_at_places backward": _ATOMICS,
    "soft_lut": "bound by wire reads from the L2 cache, which Triton performs at full bandwidth",
}
"""Reasons for deliberately missing kernels, by op, or by op and direction."""


def supports(request: Request) -> str | None:
    """Return the reason that a device runs no Mosaic GPU kernel, or None."""
    # Warp-specialized pipelines need the asynchronous copies of Hopper.
    return unsupported_generation(request.device, 90)

"""Reasons for deliberately missing kernels."""

import dataclasses

_FEW_COMPARISONS = "a few comparisons per distance, which XLA compiles to one small loop"
_WORDS = "bitwise operations on words, which XLA compiles to one memory-bound loop"
_ONE_PRODUCT = "comparisons and one product, which XLA computes; before tables, scored_lut computes them in its own kernel"
_TREES = "runs by its parts: gates level by level, which have kernels"
_PLACES = "runs by its parts: a detection and a lookup, which have kernels"
_LAYERS = "runs by its parts: layer by layer"
_ATOMICS = "adds single values with atomics, which were no faster in shared memory than in the L2 cache"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A reason that is a measurement of Triton on an H200, recorded in ``docs/benchmarks/h200.csv``.

    Attributes:
      shape, row: of the record. microseconds: median time of a call. limit: what its bytes need at the bandwidth of a copy.
    """

    shape: str
    row: str
    microseconds: int
    limit: int

    def __str__(self) -> str:
        return (
            f"little to gain: for {self.shape} ({self.row}) on an H200, Triton takes {self.microseconds} us, and the "
            f"memory traffic at least {self.limit} us"
        )


_PAIRS = Measured("pair", "dense", 205, 158)

# By column, then by op and direction, by op or by direction.
ABSENT: dict[str, dict[str, str | Measured]] = {
    "triton/gpu": {
        "detect_signs": _FEW_COMPARISONS,
        "margins": _ONE_PRODUCT,
        "packed_lut": _WORDS,
    },
    "pallas/gpu": {
        "detect forward": "nothing to gain: Triton transfers only x and the detections",
        "detect backward": _ATOMICS,
        "detect_signs": _FEW_COMPARISONS,
        "margins": _ONE_PRODUCT,
        "weighted_lookup": _ATOMICS,
        "scored_lut": _ATOMICS,
        "packed_lut": _WORDS,
        "sparse_lookup": _ATOMICS,
        "lut_pair_attention forward": Measured("pair", "forward", 40, 32),
        "lut_pair_attention": _PAIRS,
        "bilinear_gates forward": "was no faster than Triton",
        "bilinear_gates backward": Measured("gates", "dense", 435, 324),
        "gate_network": _LAYERS,
        "logic_trees": "bound by leaf reads from the caches, as in Triton",
        "lut_at_places forward": "reads single values and rows from the caches, as Triton does",
        "lut_at_places backward": _ATOMICS,
        "soft_lut": "bound by wire reads from the L2 cache, which Triton performs at full bandwidth",
    },
    "native/cpu": {"logic_trees": _TREES, "lut_at_places": _PLACES},
    "pallas/tpu": {
        "margins": _ONE_PRODUCT,
        "gate_network": _LAYERS,
        "logic_trees": _TREES,
        "lut_at_places": _PLACES,
    },
}


def why_absent(op: str, direction: str, column: str) -> str | None:
    """Return the reason, or None: then the kernel is missing."""
    of_column = ABSENT.get(column, {})
    found = (of_column.get(key) for key in (f"{op} {direction}", op, direction))
    return next((str(reason) for reason in found if reason is not None), None)

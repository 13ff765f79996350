"""Why an op has no kernel somewhere, of those that have none on purpose."""

from lutjax import testing

_FEW_COMPARISONS = "a few comparisons of each distance, which XLA makes one small loop of"
_WORDS = "exclusive ors and ands of words, which XLA makes one loop of, bound by memory"
_NO_ROWS = "gathers no rows of tables: comparisons and logic are work for the vector units of TensorCores"
_NO_ADDING = "SparseCores refuse to add to rows in HBM: XLA moves them"
_ATOMICS = (
    "adds single numbers by atomics, which were no faster in shared memory than in the L2 cache: 16.9 against 18.8 ms for "
    "the tables of attention over 4096 positions on an H200"
)
_PAIRS = "no more to gain: on an H200 Triton takes 40 us of 32 that its bytes need, forward and backward 205 us of 158"

# By column, then by op or by op and direction.
_ABSENT: dict[str, dict[str, str]] = {
    "triton/gpu": {"detect_signs": _FEW_COMPARISONS, "packed_lut": _WORDS},
    "pallas/gpu": {
        "detect forward": "no more to gain: on an H200 Triton takes 10.7 us, and to copy the bytes takes 11.1",
        "detect backward": _ATOMICS,
        "detect_signs": _FEW_COMPARISONS,
        "packed_lut": _WORDS,
        "sparse_lookup": _ATOMICS,
        "lut_pair_attention": _PAIRS,
        "bilinear_gates forward": "no faster than Triton: 155 against 153 us for 16384 gates and 4096 samples on an H200",
        "bilinear_gates backward": "Triton takes 1.34 times what the bytes of forward and backward take to copy, and the forward was "
        "no faster here",
        "soft_lut": "bound by reads of wires from the L2 cache, 7 to 8 TB/s in Triton (189 us forward, 540 for the inputs' cotangent, on "
        "an H200); the like reads of binary_lut take 463 us here and 392 in Triton",
    },
    "pallas/sparsecore": {
        **dict.fromkeys(
            ("detect", "detect_signs", "bilinear_gates", "soft_lut", "binary_lut", "packed_lut"), _NO_ROWS
        ),
        **{f"{op} update": _NO_ADDING for op in testing.LOOK_UPS},
    },
}


def why_absent(op: str, direction: str, column: str) -> str | None:
    """The reason, or None: then the kernel is missing."""
    of_column = _ABSENT.get(column, {})
    return of_column.get(f"{op} {direction}") or of_column.get(op)

"""Why an op has no kernel somewhere, of those that have none on purpose."""

# By column, then by op or by op and direction.
_ABSENT: dict[str, dict[str, str]] = {
    "triton/gpu": {
        "detect_signs": "a few comparisons of each distance, which XLA makes one small loop of",
        "packed_lut": "exclusive ors and ands of words, which XLA makes one loop of, bound by memory",
    },
}


def why_absent(op: str, direction: str, column: str) -> str | None:
    """The reason, or None: then the kernel is missing."""
    of_column = _ABSENT.get(column, {})
    return of_column.get(f"{op} {direction}") or of_column.get(op)

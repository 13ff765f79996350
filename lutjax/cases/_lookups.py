"""Shared size rules for lookups."""

from lutjax.cases._case import Sizes

MAX_BITS = 30
WORDS = {"queries": "length", "bits": "anchors"}
LEAST = {"inputs": 2, "position_bits": 0, "window": 0, "queries": 2}


def too_many_bits(bits: int) -> str | None:
    """Return the problem with too many address bits, or None."""
    return (
        f"a row has {bits} address bits; it can have at most {MAX_BITS}"
        if bits > MAX_BITS
        else None
    )


def address_bits(sizes: Sizes) -> str | None:
    """Return the problem with too many detector bits, or None."""
    return too_many_bits(sizes["bits"])

"""Parts that the cases of all look-ups share."""

from lutjax.cases._case import Sizes

MAX_BITS = 30
WORDS = {"queries": "length", "bits": "anchors"}
LEAST = {"inputs": 2, "position_bits": 0, "window": 0, "queries": 2}


def too_many_bits(bits: int) -> str | None:
    """Return the error of rows with this many address bits; None if there is none."""
    return f"a row has {bits} address bits; it can have at most {MAX_BITS}" if bits > MAX_BITS else None


def address_bits(sizes: Sizes) -> str | None:
    """Return the error of detectors whose bits alone address rows; None if there is none."""
    return too_many_bits(sizes["bits"])

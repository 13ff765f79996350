"""Cases of `lutjax.detect_signs`."""

from lutjax.cases._case import Axes, Case, Draw, Size, Sizes, Tag, outputs_of_detection

SIZES = {
    "one": Size(batch=1, bits=1),
    "split": Size(Tag.FAST, batch=4, bits=3),
    "primes": Size(Tag.DTYPES, batch=31, bits=3),
    "ties": Size(Tag.DTYPES, batch=24, bits=5),
    "no_bits": Size(batch=3, bits=0),
    "empty_batch": Size(batch=0, bits=2),
}


def case(draw: Draw, s: Sizes) -> Case:
    axes = Axes(0, 0)
    return draw.case(
        {"positions": draw.inputs((s["batch"], s["bits"]))},
        {},
        {"positions": axes},
        {"index": axes, "flip": axes, "margin": axes},
        lambda op, a: outputs_of_detection(
            op(a["positions"], epsilon=s.get("dead_zone", 0) / 4)  # in quarters
        ),
    )

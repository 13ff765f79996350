"""Cases of `lutjax.gained_square`."""

from lutjax.cases._case import Axes, Case, Draw, Size, Sizes, Tag

SIZES = {
    "one": Size(batch=1, inputs=1),
    "split": Size(Tag.FAST, batch=4, inputs=3),
    "primes": Size(Tag.DTYPES, batch=31, inputs=7),
    "empty_batch": Size(batch=0, inputs=2),
}


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case of some sizes."""
    return draw.case(
        {"x": draw.inputs((s["batch"], s["inputs"])), "gain": draw.weights((s["inputs"],))},
        {},
        {"x": Axes(0), "gain": Axes()},
        {"y": Axes(0)},
        lambda op, a: {"y": op(a["x"], a["gain"])},
    )

"""Cases of `lutjax.packed_lut`, without gradients."""

from lutjax.cases._case import Axes, Case, Draw, Size, Sizes, Tag

DTYPES = ("uint32",)

SIZES = {
    "one": Size(batch=1, inputs=1, gates=1, bits=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, gates=4, bits=2),
    "primes": Size(Tag.DTYPES, batch=5, inputs=7, gates=11, bits=3),
    "eight_inputs": Size(batch=3, inputs=11, gates=5, bits=8),
    "empty_batch": Size(batch=0, inputs=5, gates=3, bits=3),
    "no_gates": Size(batch=3, inputs=5, gates=0, bits=2),
}


def case(draw: Draw, s: Sizes) -> Case:
    """Return a case with a batch of words."""
    n_inputs, n_gates, bits = s["inputs"], s["gates"], s["bits"]
    return draw.case(
        {"words": draw.uint32((n_inputs, s["batch"]))},
        {
            "truth": draw.ids((n_gates, 2**bits), 0, 2) > 0,
            "wires": draw.ids((n_gates, bits), 0, n_inputs),
        },
        {"words": Axes(1), "truth": Axes(detector=0), "wires": Axes(detector=0)},
        {"y": Axes(1, 0)},
        lambda op, a: {"y": op(a["words"], a["truth"], a["wires"])},
    )

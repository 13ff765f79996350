"""Cases of `lutjax.margins`."""

import jax

from lutjax.cases._case import Axes, Case, Draw, Size, Sizes, Tag

SIZES = {
    "one": Size(Tag.SLOW, batch=1, inputs=2, detectors=1, bits=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, detectors=4, bits=2),
    "primes": Size(Tag.DTYPES, batch=13, inputs=11, detectors=5, bits=3),
    "ties": Size(batch=7, inputs=5, detectors=5, bits=3),
    "no_comparison": Size(batch=3, inputs=2, detectors=2, bits=0),
    "empty_batch": Size(batch=0, inputs=4, detectors=3, bits=2),
    "single": Size(batch=7, inputs=5, detectors=3, bits=3, single=1),
    "groups": Size(batch=5, inputs=3, detectors=6, bits=2, groups=3),
    "shared_input": Size(batch=5, inputs=3, detectors=6, bits=2, groups=3, shared=1),
}


def anchors_of(draw: Draw, s: Sizes) -> jax.Array:
    """Return pairs or single probes in a group."""
    pairs = draw.anchors(s["inputs"], s["detectors"], s["bits"])
    return pairs[..., 0] if s.get("single") else pairs


def inputs_of(draw: Draw, s: Sizes) -> jax.Array:
    """Return inputs per group."""
    groups = s.get("groups")
    shape = () if groups is None else (1 if s.get("shared") else groups,)
    return draw.inputs((s["batch"], *shape, s["inputs"]))


def case(draw: Draw, s: Sizes) -> Case:
    return draw.case(
        {"x": inputs_of(draw, s)},
        {"anchors": anchors_of(draw, s)},
        {"x": Axes(0), "anchors": Axes(detector=0)},
        {"u": Axes(0, 1)},
        lambda op, a: {"u": op(a["x"], a["anchors"], groups=s.get("groups"))},
    )

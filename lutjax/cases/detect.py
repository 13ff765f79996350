"""Cases of `lutjax.detect`."""

from lutjax.cases._case import Axes, Case, Draw, Size, Sizes, Tag, outputs_of_detection

SIZES = {
    "one": Size(batch=1, inputs=2, detectors=1, bits=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, detectors=4, bits=2),
    "primes": Size(Tag.DTYPES, batch=13, inputs=7, detectors=5, bits=3),
    "ties": Size(Tag.DTYPES, batch=24, inputs=3, detectors=6, bits=5),
    "no_pairs": Size(batch=3, inputs=4, detectors=2, bits=0),
    "empty_batch": Size(batch=0, inputs=5, detectors=3, bits=2),
    "many_detectors": Size(batch=3, inputs=33, detectors=37, bits=9),
}


def case(draw: Draw, s: Sizes) -> Case:
    axes = Axes(0, 1)
    return draw.case(
        {"x": draw.inputs((s["batch"], s["inputs"]))},
        {"anchors": draw.anchors(s["inputs"], s["detectors"], s["bits"])},
        {"x": Axes(0), "anchors": Axes(detector=0)},
        {"index": axes, "flip": axes, "margin": axes},
        lambda op, a: outputs_of_detection(
            op(a["x"], a["anchors"], epsilon=s.get("dead_zone", 0) / 4)  # in quarters
        ),
    )

"""Cases of `lutjax.weighted_lookup`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag

SIZES = {
    "one": Size(Tag.SLOW, batch=1, detectors=1, rows=1, outputs=1, ways=1),
    "split": Size(Tag.FAST, batch=4, detectors=4, rows=3, outputs=3, ways=2),
    "primes": Size(batch=13, detectors=5, rows=7, outputs=7, ways=3),
    "groups": Size(Tag.DTYPES, batch=5, detectors=6, rows=4, outputs=5, ways=2, groups=3),
    "valued": Size(batch=7, detectors=3, rows=4, outputs=3, ways=2, valued=1),
    "no_value": Size(batch=3, detectors=2, rows=2, outputs=3, ways=2, valued=0),
    "no_way": Size(batch=3, detectors=2, rows=2, outputs=3, ways=0),
    "empty_batch": Size(batch=0, detectors=3, rows=4, outputs=4, ways=2),
    "repeats": Size(batch=64, detectors=2, rows=2, outputs=3, ways=2),
    "many_detectors": Size(batch=5, detectors=37, rows=16, outputs=33, ways=1),
}


def case(draw: Draw, s: Sizes) -> Case:
    """Return a case with about one zero in nine coefficients."""
    reads = (s["batch"], s["detectors"], s["ways"])
    options = {"groups": s.get("groups"), "valued": s.get("valued")}

    def addresses(reference: Any, a: Arrays) -> jax.Array:
        # Coefficients of two reads of a row may cancel, and yet it is looked up.
        y: jax.Array = reference.weighted_lookup(
            a["weights"], a["index"], jnp.abs(a["coefficients"]), **options
        )
        return y

    return draw.case(
        {
            "weights": draw.weights((s["detectors"], s["rows"], s["outputs"])),
            "coefficients": draw.grid(reads, 4),
        },
        {"index": draw.ids(reads, 0, s["rows"])},
        {"weights": Axes(detector=0), "coefficients": Axes(0, 1), "index": Axes(0, 1)},
        {"y": Axes(0)},
        lambda op, a: {"y": op(a["weights"], a["index"], a["coefficients"], **options)},
        table="weights",
        addresses=addresses,
    )

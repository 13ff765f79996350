"""Cases of `lutjax.scored_lut`, of every read."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax import reads
from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases.margins import anchors_of, inputs_of

READS: tuple[reads.Read, ...] = (
    reads.Confidence(ways=2),
    reads.Confidence(ways=1),
    reads.Hard(),
    reads.Blend(),
    reads.SoftSign(),
    reads.SoftSign(hard=True),
    reads.PowersOfTwo(ways=2),
    reads.PowersOfTwo(ways=1),
)
"""Reads by the size ``read``; 0 is the default."""

SIZES = {
    "one": Size(batch=1, inputs=2, detectors=1, bits=1, outputs=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, detectors=4, bits=2, outputs=3),
    "primes": Size(Tag.DTYPES, batch=13, inputs=11, detectors=5, bits=3, outputs=7),
    "ties": Size(batch=7, inputs=5, detectors=5, bits=3, outputs=3),
    "groups": Size(Tag.DTYPES, batch=5, inputs=4, detectors=6, bits=2, outputs=5, groups=3),
    "shared_input": Size(batch=5, inputs=4, detectors=6, bits=2, outputs=5, groups=3, shared=1, read=1),
    "sum_groups": Size(batch=5, inputs=4, detectors=6, bits=2, outputs=5, groups=3, sum_groups=1, keep=1),
    "single": Size(batch=5, inputs=6, detectors=3, bits=3, outputs=4, single=1, read=1),
    "hard": Size(batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=2, keep=1),
    "blend": Size(batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=3),
    "soft_sign": Size(batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=4),
    "hard_soft_sign": Size(batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=5),
    "powers": Size(batch=7, inputs=5, detectors=4, bits=3, outputs=4, read=6, groups=2),
    "powers_one_way": Size(batch=7, inputs=5, detectors=4, bits=3, outputs=4, read=7, keep=1),
    "empty_batch": Size(batch=0, inputs=3, detectors=3, bits=2, outputs=4),
}


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case of some sizes."""
    read = READS[s.get("read", 0)]
    names = tuple(read.initial())
    differentiable = {
        "x": inputs_of(draw, s),
        "weights": draw.weights((s["detectors"], 2 ** s["bits"], s["outputs"])),
        **{name: jnp.asarray(value, draw.dtype) for name, value in read.initial().items()},
    }
    axes = {"x": Axes(0), "weights": Axes(detector=0), "anchors": Axes(detector=0)}
    axes |= {name: Axes() for name in names}
    if s.get("keep"):
        differentiable["keep"] = draw.ids((s["batch"], s["detectors"]), 0, 3).astype(draw.dtype)
        axes["keep"] = Axes(0, 1)

    def call(op: Any, a: Arrays) -> Arrays:
        y: jax.Array = op(
            a["x"],
            a["weights"],
            a["anchors"],
            {name: a[name] for name in names},
            read=read,
            groups=s.get("groups"),
            sum_groups=bool(s.get("sum_groups")),
            keep=a.get("keep"),
        )
        return {"y": y}

    return draw.case(
        differentiable, {"anchors": anchors_of(draw, s)}, axes, {"y": Axes(0)}, call, table="weights"
    )

"""Cases of `lutjax.ops.lut_at_places`."""

import math

import jax

from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases._lookups import WORDS, address_bits
from lutjax.cases._traffic import Kind, LookUpTraffic
from lutjax.ops.lut_at_places import Windows

CONVOLUTION = Kind(
    "conv_lut",
    ("batch", "height", "channels", "outputs", "detectors", "bits"),
    words=WORDS,
    fixed={"kernel": 3, "padding": 1},
    problem=address_bits,
)
KINDS = (CONVOLUTION,)
SLOW = True

# Sizes of rows; where those of columns differ, they have names of their own. Dead zones are in quarters.
SIZES = {
    "one": Size(Tag.SLOW, batch=1, height=1, channels=1, detectors=1, bits=1, outputs=1),
    "split": Size(
        Tag.FAST,
        Tag.DTYPES,
        batch=4,
        height=1,
        channels=2,
        detectors=4,
        bits=2,
        outputs=3,
        kernel=2,
        padding=1,
    ),
    "apart": Size(  # strides beyond the window, channels of each group
        batch=2,
        height=5,
        width=10,
        channels=4,
        of_group=2,
        detectors=4,
        bits=3,
        outputs=3,
        groups=2,
        kernel=2,
        kernel_width=3,
        stride=3,
        stride_width=4,
        padding=1,
        padding_width=2,
        dead_zone=2,
    ),
    "whole": Size(Tag.SLOW, batch=5, height=1, channels=7, detectors=6, bits=3, outputs=4, groups=2),
    "padded": Size(
        Tag.SLOW,
        batch=3,
        height=4,
        width=3,
        channels=2,
        detectors=3,
        bits=2,
        outputs=5,
        kernel=3,
        kernel_width=2,
        padding=1,
    ),
    "wide": Size(
        Tag.SLOW,
        batch=2,
        height=5,
        width=6,
        channels=3,
        detectors=4,
        bits=1,
        outputs=2,
        kernel=5,
        kernel_width=3,
        stride_width=2,
        padding=4,
        padding_width=0,
    ),
    "many_outputs": Size(
        Tag.SLOW,
        batch=2,
        height=4,
        width=3,
        channels=2,
        detectors=2,
        bits=2,
        outputs=70,
        groups=2,
        kernel=2,
        padding=1,
    ),
    "targets": Size(
        Tag.SLOW, batch=6, height=1, channels=7, detectors=6, bits=2, outputs=3, groups=3, reached=4
    ),
    "targets_of_places": Size(
        Tag.SLOW,
        batch=3,
        height=3,
        channels=4,
        of_group=2,
        detectors=10,
        bits=2,
        outputs=3,
        groups=2,
        reached=5,
        kernel=2,
    ),
    "primes": Size(
        Tag.SLOW, batch=13, height=3, channels=1, detectors=5, bits=3, outputs=7, kernel=2, padding=1
    ),
    "empty_batch": Size(Tag.SLOW, batch=0, height=3, channels=1, detectors=2, bits=2, outputs=2, kernel=2),
    "no_detectors": Size(Tag.SLOW, batch=3, height=3, channels=2, detectors=0, bits=2, outputs=3, kernel=2),
    "conv_lut": CONVOLUTION.size(64, 32, 16, 64, 16, 6),
}


def windows_of(s: Sizes) -> Windows:
    """Return where the detectors of some sizes are."""

    def pair(name: str, default: int) -> tuple[int, int]:
        size = s.get(name, default)
        return size, s.get(f"{name}_width", size)

    return Windows(
        (s["height"], s.get("width", s["height"]), s["channels"]),
        pair("kernel", 1),
        pair("stride", 1),
        pair("padding", 0),
        s.get("of_group", s["channels"]),
    )


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case of some sizes: pairs of a detector are equally close often, and some compare a value with itself."""
    windows, groups = windows_of(s), s.get("groups", 1)
    n_values = math.prod(windows.size) * windows.channels
    images = draw.grid((s["batch"], *windows.image), 8)
    fixed: Arrays = {"anchors": draw.ids((s["detectors"], s["bits"], 2), 0, n_values)}
    if "reached" in s:
        fixed["targets"] = draw.ids((groups, s["outputs"]), -1, s["reached"] + 1)
    return _case(draw, s, images, fixed)


def measured(draw: Draw, s: Sizes) -> Case:
    """Return pairs of different values of a window."""
    windows = windows_of(s)
    n_values = math.prod(windows.size) * windows.channels
    images = draw.inputs((s["batch"], *windows.image))
    return _case(draw, s, images, {"anchors": draw.anchors(n_values, s["detectors"], s["bits"])})


def _case(draw: Draw, s: Sizes, images: jax.Array, fixed: Arrays) -> Case:
    options = {"windows": windows_of(s), "groups": s.get("groups", 1), "epsilon": s.get("dead_zone", 0) / 4}
    weights = draw.weights((s["detectors"], 2 ** s["bits"], s["outputs"]))
    return draw.case(
        {"images": images, "weights": weights},
        fixed,
        {"images": Axes(0), "weights": Axes(detector=0), "anchors": Axes(detector=0), "targets": Axes()},
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(a["images"], a["weights"], a["anchors"], a.get("targets"), s.get("reached"), **options)
        },
    )


def traffic(s: Sizes) -> LookUpTraffic:
    """Return the bytes that `measured` has to move."""
    windows = windows_of(s)
    n_places = s["batch"] * math.prod(windows.places)
    return LookUpTraffic(
        table=(s["detectors"], 2 ** s["bits"], s["outputs"]),
        uses=n_places * s["detectors"],
        detections=0,
        numbers_in=s["batch"] * math.prod(windows.image),
        numbers_out=n_places * s["outputs"],
        anchor_pairs=s["detectors"] * s["bits"],
    )

"""Cases of `lutjax.ops.lut_at_places`."""

import math

import jax

from lutjax.cases._case import Arrays, Axes, Case, Draw, Sizes, Tag, sizes_by
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

# Sizes of rows; where those of columns differ, they have names of their own. Dead zones are in
# quarters.
_size = sizes_by("batch", "height", "channels", "detectors", "bits", "outputs")
SIZES = {
    "one": _size(1, 1, 1, 1, 1, 1, Tag.SLOW),
    "split": _size(4, 1, 2, 4, 2, 3, Tag.FAST, Tag.DTYPES, kernel=2, padding=1),
    "apart": _size(  # strides beyond the window, channels of each group
        2, 5, 4, 4, 3, 3,
        width=10, of_group=2, groups=2, kernel=2, kernel_width=3, stride=3, stride_width=4,
        padding=1, padding_width=2, dead_zone=2,
    ),
    "whole": _size(5, 1, 7, 6, 3, 4, Tag.SLOW, groups=2),
    "padded": _size(3, 4, 2, 3, 2, 5, Tag.SLOW, width=3, kernel=3, kernel_width=2, padding=1),
    "wide": _size(
        2, 5, 3, 4, 1, 2, Tag.SLOW,
        width=6, kernel=5, kernel_width=3, stride_width=2, padding=4, padding_width=0,
    ),
    "many_outputs": _size(2, 4, 2, 2, 2, 70, Tag.SLOW, width=3, groups=2, kernel=2, padding=1),
    "targets": _size(6, 1, 7, 6, 2, 3, Tag.SLOW, groups=3, reached=4),
    "targets_of_places": _size(
        3, 3, 4, 10, 2, 3, Tag.SLOW, of_group=2, groups=2, reached=5, kernel=2
    ),
    "primes": _size(13, 3, 1, 5, 3, 7, Tag.SLOW, kernel=2, padding=1),
    "empty_batch": _size(0, 3, 1, 2, 2, 2, Tag.SLOW, kernel=2),
    "no_detectors": _size(3, 3, 2, 0, 2, 3, Tag.SLOW, kernel=2),
    "conv_lut": CONVOLUTION.size(64, 32, 16, 64, 16, 6),
}  # fmt: skip


def windows_of(s: Sizes) -> Windows:
    """Return the detector windows for some sizes."""

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
    """Return a case with frequent ties, and some values compared with themselves."""
    windows, groups = windows_of(s), s.get("groups", 1)
    n_values = math.prod(windows.size) * windows.channels
    images = draw.grid((s["batch"], *windows.image), 8)
    fixed: Arrays = {"anchors": draw.ids((s["detectors"], s["bits"], 2), 0, n_values)}
    if "reached" in s:
        fixed["targets"] = draw.ids((groups, s["outputs"]), -1, s["reached"])
    return _case(draw, s, images, fixed)


def measured(draw: Draw, s: Sizes) -> Case:
    """Return pairs with different window values."""
    windows = windows_of(s)
    n_values = math.prod(windows.size) * windows.channels
    images = draw.inputs((s["batch"], *windows.image))
    return _case(draw, s, images, {"anchors": draw.anchors(n_values, s["detectors"], s["bits"])})


def _case(draw: Draw, s: Sizes, images: jax.Array, fixed: Arrays) -> Case:
    options = {
        "windows": windows_of(s),
        "groups": s.get("groups", 1),
        "epsilon": s.get("dead_zone", 0) / 4,
    }
    weights = draw.weights((s["detectors"], 2 ** s["bits"], s["outputs"]))
    return draw.case(
        {"images": images, "weights": weights},
        fixed,
        {
            "images": Axes(0),
            "weights": Axes(detector=0),
            "anchors": Axes(detector=0),
            "targets": Axes(),
        },
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["images"],
                a["weights"],
                a["anchors"],
                a.get("targets"),
                s.get("reached"),
                **options,
            )
        },
    )


def traffic(s: Sizes) -> LookUpTraffic:
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

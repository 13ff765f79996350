"""Cases of `lutjax.ops.logic_trees`."""

import math

import jax.numpy as jnp

import lutjax
from lutjax.cases._case import Arrays, Axes, Case, Draw, Sizes, Tag, sizes_by
from lutjax.cases._gates import bytes_of_gates
from lutjax.cases._traffic import Bytes, Kind
from lutjax.ops.logic_trees import Places

TREES = Kind(
    "logic_trees",
    ("batch", "height", "channels", "trees", "leaves"),
    fixed={"kernel": 3, "padding": 1, "pool": 2},
)
KINDS = (TREES,)

# Sizes of rows; where those of columns differ, they have names of their own.
_size = sizes_by("batch", "height", "channels", "trees", "leaves")
SIZES = {
    "one": _size(1, 1, 1, 1, 2, Tag.SLOW),
    "split": _size(4, 2, 2, 4, 4, Tag.FAST, kernel=2, padding=1),
    "pools": _size(
        5, 4, 2, 3, 4, Tag.DTYPES,
        width=5, kernel=3, padding=1, pool=2, pool_width=1, readers=1,
    ),
    "apart": _size(
        37, 7, 1, 2, 2, Tag.SLOW,
        width=9, kernel=2, kernel_width=3, stride=3, stride_width=2, pool_width=2,
    ),
    "around": _size(3, 5, 3, 2, 4, Tag.SLOW, width=3, kernel=2, pool=3, around=1),
    "deep": _size(2, 3, 1, 2, 16, Tag.SLOW, width=5, kernel=2, pool=2, readers=1),
    "uneven_pools": _size(3, 6, 1, 2, 2, Tag.SLOW, kernel=2, pool=2, pool_width=3, readers=1),
    "empty_batch": _size(0, 3, 2, 3, 2, kernel=2, readers=1),
    "no_trees": _size(3, 3, 2, 0, 2, Tag.SLOW, kernel=2),
    "trees": TREES.size(128, 16, 32, 128, 8, tags=(Tag.BENCH,)),
}  # fmt: skip


def places_of(s: Sizes) -> Places:
    """Return the tree positions for some sizes."""

    def pair(name: str, default: int) -> tuple[int, int]:
        size = s.get(name, default)
        return size, s.get(f"{name}_width", size)

    return Places(
        (s["height"], s.get("width", s["height"])),
        pair("kernel", 1),
        pair("stride", 1),
        pair("padding", 0),
        pair("pool", 1),
        pair("around", 0),
    )


def case(draw: Draw, s: Sizes) -> Case:
    """Return a case with many equal values at different positions."""
    places, n_leaves = places_of(s), s["leaves"]
    leaves = draw.ids((s["trees"], n_leaves), 0, math.prod(places.kernel) * s["channels"])
    fixed: Arrays = {"leaves": leaves}
    if s.get("readers"):
        fixed["readers"] = lutjax.readers(leaves % s["channels"], s["channels"])
    x = draw.grid((math.prod(places.image) * s["channels"], s["batch"]), 4)
    return _case(draw, places, x, draw.grid((4, s["trees"], n_leaves - 1), 4), fixed)


def measured(draw: Draw, s: Sizes) -> Case:
    """Return trees with balanced channels and fan-out lists."""
    places, n_wires = places_of(s), s["trees"] * s["leaves"]
    leaves = (draw.permutation(n_wires) % (math.prod(places.kernel) * s["channels"])).reshape(
        -1, s["leaves"]
    )
    readers = lutjax.readers(leaves % s["channels"], s["channels"], fan_out=_fan_out(s))
    x = draw.uniform((math.prod(places.image) * s["channels"], s["batch"]), 0.0, 1.0)
    coefficients = draw.normal((4, s["trees"], s["leaves"] - 1))
    return _case(draw, places, x, coefficients, {"leaves": leaves, "readers": readers})


def _case(
    draw: Draw, places: Places, x: jnp.ndarray, coefficients: jnp.ndarray, fixed: Arrays
) -> Case:
    return draw.case(
        {"x": x, "coefficients": coefficients},
        fixed,
        {
            "x": Axes(1),
            "coefficients": Axes(detector=1),
            "leaves": Axes(detector=0),
            "readers": Axes(),
        },
        {"y": Axes(2, 0)},
        lambda op, a: {
            "y": op(a["x"], a["coefficients"], a["leaves"], places=places, readers=a.get("readers"))
        },
    )


def _fan_out(s: Sizes) -> int:
    """Return an upper bound for the fan-out."""
    values = math.prod(places_of(s).kernel)
    return values * -(-s["trees"] * s["leaves"] // (values * s["channels"]))


def traffic(s: Sizes) -> Bytes:
    places = places_of(s)
    return bytes_of_gates(
        inputs=math.prod(places.image) * s["channels"] * s["batch"],
        outputs=math.prod(places.groups) * s["trees"] * s["batch"],
        parameters=4 * s["trees"] * (s["leaves"] - 1),
        wires=s["trees"] * s["leaves"],
        readers=s["channels"] * _fan_out(s),
    )

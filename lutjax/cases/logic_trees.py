"""Cases of `lutjax.ops.logic_trees`."""

import dataclasses
import math

import jax.numpy as jnp

import lutjax
from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases._traffic import FORWARD, ID_BYTES, Kind
from lutjax.ops.logic_trees import Places

TREES = Kind(
    "logic_trees",
    ("batch", "height", "channels", "trees", "leaves"),
    fixed={"kernel": 3, "padding": 1, "pool": 2},
)
KINDS = (TREES,)

# Sizes of rows; where those of columns differ, they have names of their own.
SIZES = {
    "one": Size(Tag.SLOW, batch=1, height=1, channels=1, trees=1, leaves=2),
    "split": Size(Tag.FAST, batch=4, height=2, channels=2, trees=4, leaves=4, kernel=2, padding=1),
    "pools": Size(
        Tag.DTYPES,
        batch=5,
        height=4,
        width=5,
        channels=2,
        trees=3,
        leaves=4,
        kernel=3,
        padding=1,
        pool=2,
        pool_width=1,
        readers=1,
    ),
    "apart": Size(
        Tag.SLOW,
        batch=37,
        height=7,
        width=9,
        channels=1,
        trees=2,
        leaves=2,
        kernel=2,
        kernel_width=3,
        stride=3,
        stride_width=2,
        pool_width=2,
    ),
    "around": Size(
        Tag.SLOW, batch=3, height=5, width=3, channels=3, trees=2, leaves=4, kernel=2, pool=3, around=1
    ),
    "deep": Size(
        Tag.SLOW, batch=2, height=3, width=5, channels=1, trees=2, leaves=16, kernel=2, pool=2, readers=1
    ),
    "uneven_pools": Size(
        Tag.SLOW, batch=3, height=6, channels=1, trees=2, leaves=2, kernel=2, pool=2, pool_width=3, readers=1
    ),
    "empty_batch": Size(batch=0, height=3, channels=2, trees=3, leaves=2, kernel=2, readers=1),
    "no_trees": Size(Tag.SLOW, batch=3, height=3, channels=2, trees=0, leaves=2, kernel=2),
    "trees": TREES.size(128, 16, 32, 128, 8, tags=(Tag.BENCH,)),
}


def places_of(s: Sizes) -> Places:
    """Return where the trees of some sizes are."""

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
    """Return the case of some sizes: values of places are equal often."""
    places, n_leaves = places_of(s), s["leaves"]
    leaves = draw.ids((s["trees"], n_leaves), 0, math.prod(places.kernel) * s["channels"])
    fixed: Arrays = {"leaves": leaves}
    if s.get("readers"):
        fixed["readers"] = lutjax.readers(leaves % s["channels"], s["channels"])
    x = draw.grid((math.prod(places.image) * s["channels"], s["batch"]), 4)
    return _case(draw, places, x, draw.grid((4, s["trees"], n_leaves - 1), 4), fixed)


def measured(draw: Draw, s: Sizes) -> Case:
    """Return trees that read all channels about equally often, with lists of readers."""
    places, n_wires = places_of(s), s["trees"] * s["leaves"]
    leaves = (draw.permutation(n_wires) % (math.prod(places.kernel) * s["channels"])).reshape(-1, s["leaves"])
    readers = lutjax.readers(leaves % s["channels"], s["channels"], fan_out=_fan_out(s))
    x = draw.uniform((math.prod(places.image) * s["channels"], s["batch"]), 0.0, 1.0)
    coefficients = draw.normal((4, s["trees"], s["leaves"] - 1))
    return _case(draw, places, x, coefficients, {"leaves": leaves, "readers": readers})


def _case(draw: Draw, places: Places, x: jnp.ndarray, coefficients: jnp.ndarray, fixed: Arrays) -> Case:
    return draw.case(
        {"x": x, "coefficients": coefficients},
        fixed,
        {"x": Axes(1), "coefficients": Axes(detector=1), "leaves": Axes(detector=0), "readers": Axes()},
        {"y": Axes(2, 0)},
        lambda op, a: {
            "y": op(a["x"], a["coefficients"], a["leaves"], places=places, readers=a.get("readers"))
        },
    )


def _fan_out(s: Sizes) -> int:
    """Return a bound of the readers of a channel."""
    values = math.prod(places_of(s).kernel)
    return values * -(-s["trees"] * s["leaves"] // (values * s["channels"]))


@dataclasses.dataclass(frozen=True)
class TreeTraffic:
    """Bytes of trees on an image that comes from a cache where it is read again."""

    sizes: Sizes

    def table_bytes(self, itemsize: int) -> int:
        """Bytes of the coefficients, which are float32."""
        return 4 * self.sizes["trees"] * (self.sizes["leaves"] - 1) * 4

    def bytes_moved(self, row: str, itemsize: int) -> int:
        """Bytes that have to move for a row.

        Forward reads the image and writes the outputs. Backward reads the image and the outputs' cotangent, and
        writes that of the image.

        Args:
          itemsize: bytes of a number in inputs and outputs.
        """
        s, places = self.sizes, places_of(self.sizes)
        inputs = math.prod(places.image) * s["channels"] * s["batch"] * itemsize
        outputs = math.prod(places.groups) * s["trees"] * s["batch"] * itemsize
        leaves = s["trees"] * s["leaves"] * ID_BYTES
        forward = inputs + outputs + leaves + self.table_bytes(itemsize)
        if row == FORWARD:
            return forward
        readers = s["channels"] * _fan_out(s) * ID_BYTES
        return forward + 2 * inputs + outputs + leaves + readers + 2 * self.table_bytes(itemsize)


def traffic(s: Sizes) -> TreeTraffic:
    """Return the bytes that `measured` has to move."""
    return TreeTraffic(s)

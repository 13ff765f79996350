"""Cases of `lutjax.soft_lut`."""

from lutjax.cases import _gates
from lutjax.cases._case import Case, Draw, Sizes
from lutjax.cases._traffic import Kind

SOFT = Kind(
    "soft_lut",
    ("batch", "inputs", "gates", "bits"),
    words={"bits": "places"},
    problem=_gates.too_many_places,
)
KINDS = (SOFT,)

SIZES = {**_gates.TESTED, "soft-lut": SOFT.size(4096, 16384, 16384, 4)}


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case for some sizes."""
    return _gates.case(draw, s, _gates.TABLE)


def measured(draw: Draw, s: Sizes) -> Case:
    """Return the measured case for some sizes."""
    return _gates.measured(draw, s, _gates.TABLE)


def traffic(s: Sizes) -> _gates.GateTraffic:
    """Return the bytes moved by `measured`."""
    return _gates.traffic(s, _gates.TABLE)

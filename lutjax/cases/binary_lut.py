"""Cases of `lutjax.binary_lut`."""

from lutjax.cases import _gates
from lutjax.cases._case import Case, Draw, Sizes
from lutjax.cases._traffic import Kind

BINARY = Kind(
    "binary_lut",
    ("batch", "inputs", "gates", "bits"),
    words={"bits": "places"},
    problem=_gates.too_many_places,
)
KINDS = (BINARY,)

SIZES = {**_gates.TESTED, "binary-lut": BINARY.size(4096, 16384, 16384, 6)}


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case for some sizes."""
    return _gates.case(draw, s, _gates.TABLE)


def measured(draw: Draw, s: Sizes) -> Case:
    """Return the measured case for some sizes."""
    return _gates.measured(draw, s, _gates.TABLE, -1.0)  # the sign of an input is a bit


def traffic(s: Sizes) -> _gates.GateTraffic:
    """Return the bytes moved by `measured`."""
    return _gates.traffic(s, _gates.TABLE)

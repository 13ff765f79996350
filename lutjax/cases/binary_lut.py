"""Cases of `lutjax.binary_lut`."""

from lutjax.cases import _gates
from lutjax.cases._traffic import Kind

BINARY = Kind(
    "binary_lut",
    ("batch", "inputs", "gates", "bits"),
    words={"bits": "places"},
    problem=_gates.too_many_places,
)
KINDS = (BINARY,)

SIZES = {**_gates.TESTED, "binary-lut": BINARY.size(4096, 16384, 16384, 6)}

case, measured, traffic = _gates.functions(_gates.TABLE, low=-1.0)  # the sign of an input is a bit

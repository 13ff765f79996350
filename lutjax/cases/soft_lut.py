"""Cases of `lutjax.soft_lut`."""

from lutjax.cases import _gates
from lutjax.cases._traffic import Kind

SOFT = Kind(
    "soft_lut",
    ("batch", "inputs", "gates", "bits"),
    words={"bits": "places"},
    problem=_gates.too_many_places,
)
KINDS = (SOFT,)

SIZES = {**_gates.TESTED, "soft-lut": SOFT.size(4096, 16384, 16384, 4)}

case, measured, traffic = _gates.functions(_gates.TABLE)

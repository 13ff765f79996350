"""Cases of `lutjax.bilinear_gates`."""

from lutjax.cases import _gates
from lutjax.cases._case import Size, Tag
from lutjax.cases._traffic import Kind

GATES = Kind("gates", ("batch", "inputs", "gates"))
KINDS = (GATES,)

SIZES = {
    "one": Size(batch=1, inputs=1, gates=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, gates=4),
    "primes": Size(Tag.DTYPES, batch=13, inputs=7, gates=11),
    "readers": Size(Tag.DTYPES, batch=37, inputs=17, gates=29, readers=1),
    "features_first": Size(batch=5, inputs=7, gates=3, readers=1, features_first=1),
    "large_fan_out": Size(batch=3, inputs=3, gates=67, readers=1, features_first=1),
    "scattered": Size(batch=3, inputs=67, gates=131),
    "empty_batch": Size(batch=0, inputs=5, gates=3, readers=1),
    "no_gates": Size(batch=3, inputs=5, gates=0),
    "gates": GATES.size(4096, 16384, 16384),
    "gates-2000": GATES.size(100, 2000, 2000, tags=(Tag.BENCH, Tag.TUNE, Tag.CPU)),
}

case, measured, traffic = _gates.functions(_gates.COEFFICIENTS)

"""Cases of `lutjax.lookup`, measured with detection as `lutjax.lut`."""

from lutjax.cases._case import Axes, Case, Detections, Draw, Size, Sizes, Tag
from lutjax.cases._lookups import LEAST, WORDS, address_bits
from lutjax.cases._traffic import Kind, LookUpTraffic

FULLY_CONNECTED = Kind(
    "fc",
    ("batch", "inputs", "outputs", "detectors", "bits"),
    words=WORDS,
    least=LEAST,
    problem=address_bits,
)
KINDS = (FULLY_CONNECTED,)

_ON_CPU = (Tag.BENCH, Tag.TUNE, Tag.CPU)
SIZES = {
    "one": Size(batch=1, detectors=1, bits=1, outputs=1),
    "split": Size(Tag.FAST, batch=4, detectors=4, bits=2, outputs=3),
    "primes": Size(Tag.DTYPES, batch=13, detectors=5, bits=3, outputs=7),
    "one_row": Size(batch=3, detectors=2, bits=0, outputs=5),
    "empty_batch": Size(batch=0, detectors=3, bits=2, outputs=4),
    "repeats": Size(Tag.DTYPES, batch=64, detectors=2, bits=1, outputs=3),
    "many_detectors": Size(batch=5, detectors=37, bits=4, outputs=33),
    "groups": Size(batch=5, detectors=6, bits=2, outputs=5, groups=3),
    "ffn": FULLY_CONNECTED.size(4096, 32, 32, 16, 10, tags=_ON_CPU),
    "unembed": FULLY_CONNECTED.size(4096, 32, 256, 16, 10, tags=_ON_CPU),
    "mid": FULLY_CONNECTED.size(16384, 512, 512, 64, 6),
    "big": FULLY_CONNECTED.size(4096, 1024, 1024, 256, 8),
}


def case(draw: Draw, s: Sizes) -> Case:
    d = Detections()
    d.add("detection", draw.detection((s["batch"], s["detectors"]), s["bits"]), Axes(0, 1))
    return draw.case(
        {"weights": draw.weights((s["detectors"], 2 ** s["bits"], s["outputs"])), **d.margins},
        d.ids,
        {"weights": Axes(detector=0), **d.axes},
        {"y": Axes(0)},
        lambda op, a: {"y": op(a["weights"], d.detection("detection", a), groups=s.get("groups"))},
        table="weights",
    )


def measured(draw: Draw, s: Sizes) -> Case:
    return draw.case(
        {
            "weights": draw.weights((s["detectors"], 2 ** s["bits"], s["outputs"])),
            "x": draw.inputs((s["batch"], s["inputs"])),
        },
        {"anchors": draw.anchors(s["inputs"], s["detectors"], s["bits"])},
        {"weights": Axes(detector=0), "x": Axes(0), "anchors": Axes(detector=0)},
        {"y": Axes(0)},
        lambda lut, a: {"y": lut(a["x"], a["weights"], a["anchors"])},
        table="weights",
        function="lut",
    )


def traffic(s: Sizes) -> LookUpTraffic:
    uses = s["batch"] * s["detectors"]
    return LookUpTraffic(
        table=(s["detectors"], 2 ** s["bits"], s["outputs"]),
        uses=uses,
        detections=uses,
        numbers_in=s["batch"] * s["inputs"],
        numbers_out=s["batch"] * s["outputs"],
        anchor_pairs=s["detectors"] * s["bits"],
    )

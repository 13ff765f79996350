"""Cases of `lutjax.lookup_attention`; measured together with the detections in front, as `lutjax.lut_attention`."""

from lutjax.cases import _sequences
from lutjax.cases._case import Axes, Case, Detections, Draw, Size, Sizes, Tag
from lutjax.cases._lookups import LEAST, WORDS, too_many_bits
from lutjax.cases._traffic import Kind, LookUpTraffic


def _address_bits(s: Sizes) -> int:
    return 2 * s["bits"] + s["position_bits"]


SEQUENCE = Kind(
    "seq",
    _sequences.KIND,
    words=WORDS,
    optional=1,
    least=LEAST,
    problem=lambda s: too_many_bits(_address_bits(s)),
)
KINDS = (SEQUENCE,)

SIZES = {
    "one": Size(batch=1, queries=1, detectors=1, bits=1, position_bits=1, outputs=1),
    "two": Size(batch=1, queries=2, detectors=1, bits=1, position_bits=1, outputs=1),
    "split": Size(Tag.FAST, batch=2, queries=5, detectors=2, bits=2, position_bits=1, outputs=3, segments=2),
    "primes": Size(batch=3, queries=7, detectors=5, bits=2, position_bits=3, outputs=11),
    "no_positions": Size(Tag.SLOW, batch=2, queries=6, detectors=3, bits=2, position_bits=0, outputs=4),
    "no_bits": Size(batch=2, queries=5, detectors=2, bits=0, position_bits=2, outputs=3),
    "ties": Size(Tag.DTYPES, batch=2, queries=9, detectors=4, bits=3, position_bits=2, outputs=3),
    "empty_batch": Size(batch=0, queries=4, detectors=2, bits=1, position_bits=1, outputs=3),
    "empty_sequence": Size(batch=2, queries=0, detectors=2, bits=1, position_bits=1, outputs=3),
    "shared_positions": Size(batch=2, queries=7, detectors=3, bits=2, position_bits=2, outputs=5, shared=1),
    "capacity": Size(
        Tag.SLOW, batch=2, queries=5, detectors=3, bits=1, position_bits=2, outputs=3, distances=9
    ),
    "window": Size(Tag.SLOW, batch=2, queries=11, detectors=3, bits=2, position_bits=2, outputs=3, window=3),
    "segments": Size(batch=3, queries=13, detectors=3, bits=2, position_bits=1, outputs=3, segments=4),
    "cross": Size(
        batch=2,
        queries=5,
        keys=8,
        detectors=3,
        bits=2,
        key_bits=3,
        position_bits=2,
        outputs=3,
        query_start=4,
        key_start=1,
    ),
    "few_keys": Size(Tag.SLOW, batch=2, queries=7, keys=3, detectors=3, bits=2, position_bits=2, outputs=3),
    "decode": Size(
        batch=3, queries=1, keys=9, detectors=3, bits=2, position_bits=2, outputs=3, query_start=9
    ),
    "every_key": Size(batch=2, queries=4, keys=3, detectors=3, bits=2, position_bits=2, outputs=3, causal=0),
    "tiles": Size(
        Tag.DTYPES, Tag.SLOW, batch=2, queries=101, detectors=3, bits=2, position_bits=2, outputs=5
    ),
    "tiles_window": Size(
        Tag.SLOW, batch=1, queries=131, detectors=2, bits=2, position_bits=2, outputs=3, window=37
    ),
    "tiles_cross": Size(
        Tag.SLOW,
        batch=2,
        queries=67,
        keys=45,
        detectors=2,
        bits=1,
        position_bits=1,
        outputs=3,
        query_start=3,
        key_start=40,
        window=20,
        segments=3,
    ),
    # Longer and longer sequences side by side.
    "seq-4x32": SEQUENCE.size(4, 32, 32, 64, 6, 4, tags=(Tag.BENCH, Tag.TUNE, Tag.CPU)),
    "seq-128x32": SEQUENCE.size(128, 32, 32, 64, 6, 4),
    "seq-16x256": SEQUENCE.size(16, 256, 32, 64, 6, 4),
    "seq-4x1024": SEQUENCE.size(4, 1024, 32, 64, 6, 4),
    "seq-4x1024-window": SEQUENCE.size(4, 1024, 32, 64, 6, 4, 256),
    "seq-1x4096": SEQUENCE.size(1, 4096, 32, 64, 6, 4),
    "seq-1x4096-window": SEQUENCE.size(1, 4096, 32, 64, 6, 4, 256),
}


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case of some sizes."""
    n_detectors, n_keys = s["detectors"], s.get("keys", s["queries"])
    q_bits, k_bits, p_bits = s["bits"], s.get("key_bits", s["bits"]), s["position_bits"]
    options, segments = _sequences.pair_options(draw, s, n_keys)
    weights = draw.weights((n_detectors, 2 ** (q_bits + k_bits + p_bits), s["outputs"]))
    of_position = 1 if s.get("shared") else n_detectors
    d = Detections()
    d.add("query", draw.detection((s["batch"], s["queries"], n_detectors), q_bits), Axes(0, 2))
    d.add("key", draw.detection((s["batch"], n_keys, n_detectors), k_bits), Axes(0, 2))
    d.add(
        "position",
        draw.detection((_sequences.n_distances(s, n_keys), of_position), p_bits),
        Axes(detector=None if of_position == 1 else 1),
    )
    return draw.case(
        {"weights": weights, **d.margins},
        {**segments, **d.ids},
        {"weights": Axes(detector=0), **dict.fromkeys(segments, Axes(0)), **d.axes},
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["weights"],
                *(d.of(name, a) for name in ("query", "key", "position")),
                **options,
                **{name: a[name] for name in segments},
            )
        },
        table="weights",
    )


def measured(draw: Draw, s: Sizes) -> Case:
    """Return `lutjax.lut_attention` at some sizes."""
    return _sequences.measured(draw, s, _address_bits(s), compared=s["inputs"], function="lut_attention")


def traffic(s: Sizes) -> LookUpTraffic:
    """Return the bytes that `measured` has to move."""
    return _sequences.traffic(s, _address_bits(s), stores_detections=True)

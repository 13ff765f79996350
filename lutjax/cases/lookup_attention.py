"""Cases of `lutjax.lookup_attention`, measured with detections as `lutjax.lut_attention`."""

from typing import Any

from lutjax.cases import _sequences
from lutjax.cases._case import Arrays, Axes, Case, Detections, Draw, Sizes, Tag, sizes_by
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
SPARSE_SEQUENCE = Kind(
    "seq-sparse",
    ("batch", "queries", "inputs", "outputs", "detectors", "bits", "position_bits", "slots"),
    words=WORDS,
    least=LEAST,
    problem=lambda s: too_many_bits(_address_bits(s)),
)
KINDS = (SEQUENCE, SPARSE_SEQUENCE)

_size = sizes_by("batch", "queries", "detectors", "bits", "position_bits", "outputs")
SIZES = {
    "one": _size(1, 1, 1, 1, 1, 1),
    "two": _size(1, 2, 1, 1, 1, 1),
    "split": _size(2, 5, 2, 2, 1, 3, Tag.FAST, segments=2),
    "primes": _size(3, 7, 5, 2, 3, 11),
    "no_positions": _size(2, 6, 3, 2, 0, 4, Tag.SLOW),
    "no_bits": _size(2, 5, 2, 0, 2, 3),
    "ties": _size(2, 9, 4, 3, 2, 3, Tag.DTYPES),
    "empty_batch": _size(0, 4, 2, 1, 1, 3),
    "empty_sequence": _size(2, 0, 2, 1, 1, 3),
    "shared_positions": _size(2, 7, 3, 2, 2, 5, shared=1),
    "capacity": _size(2, 5, 3, 1, 2, 3, Tag.SLOW, distances=9),
    "window": _size(2, 11, 3, 2, 2, 3, Tag.SLOW, window=3),
    "segments": _size(3, 13, 3, 2, 1, 3, segments=4),
    "cross": _size(2, 5, 3, 2, 2, 3, keys=8, key_bits=3, query_start=4, key_start=1),
    "few_keys": _size(2, 7, 3, 2, 2, 3, Tag.SLOW, keys=3),
    "decode": _size(3, 1, 3, 2, 2, 3, keys=9, query_start=9),
    "every_key": _size(2, 4, 3, 2, 2, 3, keys=3, causal=0),
    "targets": _size(3, 7, 5, 2, 1, 11, Tag.NOT_PALLAS, slots=3),
    "targets_of_tables": _size(
        2, 5, 3, 1, 2, 4, Tag.NOT_PALLAS, Tag.SLOW, Tag.DTYPES, slots=70, row_lists=0
    ),
    "blocks": _size(2, 23, 3, 2, 2, 3, Tag.NOT_PALLAS, blocks=4, key_blocks=3),
    "each_start": _size(3, 5, 3, 2, 2, 3, Tag.NOT_PALLAS, keys=8, each_start=7),
    "blocks_and_all": _size(
        2, 19, 3, 1, 2, 5, Tag.NOT_PALLAS, Tag.SLOW,
        keys=23, each_start=9, blocks=5, window=17, segments=3, slots=2,
    ),
    "tiles": _size(2, 101, 3, 2, 2, 5, Tag.DTYPES, Tag.SLOW),
    "tiles_window": _size(1, 131, 2, 2, 2, 3, Tag.SLOW, window=37),
    "tiles_cross": _size(
        2, 67, 2, 1, 1, 3, Tag.SLOW, keys=45, query_start=3, key_start=40, window=20, segments=3
    ),
    # Longer and longer sequences side by side.
    "seq-4x32": SEQUENCE.size(4, 32, 32, 64, 6, 4, tags=(Tag.BENCH, Tag.TUNE, Tag.CPU)),
    "seq-128x32": SEQUENCE.size(128, 32, 32, 64, 6, 4),
    "seq-16x256": SEQUENCE.size(16, 256, 32, 64, 6, 4),
    "seq-4x1024": SEQUENCE.size(4, 1024, 32, 64, 6, 4),
    "seq-4x1024-window": SEQUENCE.size(4, 1024, 32, 64, 6, 4, 256),
    "seq-1x4096": SEQUENCE.size(1, 4096, 32, 64, 6, 4),
    "seq-1x4096-window": SEQUENCE.size(1, 4096, 32, 64, 6, 4, 256),
    "seq-sparse": SPARSE_SEQUENCE.size(4, 32, 32, 128, 64, 6, 4, 8, tags=(Tag.BENCH, Tag.CPU)),
}  # fmt: skip


def case(draw: Draw, s: Sizes) -> Case:
    n_detectors, n_keys = s["detectors"], s.get("keys", s["queries"])
    q_bits, k_bits, p_bits = s["bits"], s.get("key_bits", s["bits"]), s["position_bits"]
    n_rows = 2 ** (q_bits + k_bits + p_bits)
    options, arrays, axes = _sequences.pair_options(draw, s, n_keys)
    reached, targets, of_targets = _sequences.targets(draw, s, n_rows)
    weights = draw.weights((n_detectors, n_rows, s.get("slots", s["outputs"])))
    of_position = 1 if s.get("shared") else n_detectors
    d = Detections()
    d.add("query", draw.detection((s["batch"], s["queries"], n_detectors), q_bits), Axes(0, 2))
    d.add("key", draw.detection((s["batch"], n_keys, n_detectors), k_bits), Axes(0, 2))
    d.add(
        "position",
        draw.detection((_sequences.n_distances(s, n_keys), of_position), p_bits),
        Axes(detector=None if of_position == 1 else 1),
    )

    def attend(op: Any, a: Arrays, **more: Any) -> Any:
        detections = (d.detection(name, a) for name in ("query", "key", "position"))
        return op(
            a["weights"], *detections, **options, **{name: a[name] for name in arrays}, **more
        )

    return draw.case(
        {"weights": weights, **d.margins},
        {**arrays, **targets, **d.ids},
        {"weights": Axes(detector=0), **axes, **of_targets, **d.axes},
        {"y": Axes(0)},
        lambda op, a: {"y": attend(op, a, **reached, **{name: a[name] for name in targets})},
        table="weights",
        addresses=lambda reference, a: attend(reference.lookup_attention, a),
    )


def measured(draw: Draw, s: Sizes) -> Case:
    return _sequences.measured(
        draw, s, _address_bits(s), compared=s["inputs"], function="lut_attention"
    )


def traffic(s: Sizes) -> LookUpTraffic:
    return _sequences.traffic(s, _address_bits(s), stores_detections=True)

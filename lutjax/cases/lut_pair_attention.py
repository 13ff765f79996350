"""Cases of `lutjax.lut_pair_attention`, which detects every pair anew."""

from lutjax.cases import _sequences
from lutjax.cases._case import Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases._lookups import LEAST, WORDS, address_bits
from lutjax.cases._traffic import Kind, LookUpTraffic

SLOW = True


def _interleaved_problem(s: Sizes) -> str | None:
    if s["position_bits"] != s["inputs"]:
        return f"position_bits is {s['position_bits']}; interleaved it must be that of inputs, {s['inputs']}"
    return address_bits(s)


PAIR = Kind("pair", _sequences.KIND, words=WORDS, optional=1, least=LEAST, problem=address_bits)
INTERLEAVED = Kind(
    "pair-interleaved",
    _sequences.KIND,
    words=WORDS,
    optional=1,
    least=LEAST,
    fixed={"interleave": 1},
    problem=_interleaved_problem,
)
KINDS = (PAIR, INTERLEAVED)

SIZES = {
    "one": Size(batch=1, queries=1, inputs=2, detectors=1, bits=1, position_bits=0, outputs=1),
    "two": Size(batch=1, queries=2, inputs=2, detectors=1, bits=2, position_bits=1, outputs=1),
    "split": Size(
        Tag.FAST, Tag.DTYPES, batch=2, queries=3, inputs=3, detectors=2, bits=2, position_bits=1, outputs=3
    ),
    "primes": Size(batch=3, queries=7, inputs=5, detectors=5, bits=3, position_bits=3, outputs=11),
    "no_positions": Size(
        Tag.SLOW, batch=2, queries=6, inputs=4, detectors=3, bits=2, position_bits=0, outputs=4
    ),
    "no_bits": Size(Tag.SLOW, batch=2, queries=4, inputs=3, detectors=2, bits=0, position_bits=1, outputs=3),
    "ties": Size(
        Tag.DTYPES, Tag.SLOW, batch=2, queries=9, inputs=3, detectors=4, bits=4, position_bits=2, outputs=3
    ),
    "interleaved": Size(
        batch=2, queries=6, inputs=4, detectors=3, bits=4, position_bits=4, outputs=3, interleave=1
    ),
    "empty_batch": Size(batch=0, queries=4, inputs=3, detectors=2, bits=1, position_bits=1, outputs=3),
    "empty_sequence": Size(batch=2, queries=0, inputs=3, detectors=2, bits=1, position_bits=1, outputs=3),
    "shared_positions": Size(
        Tag.SLOW, batch=2, queries=7, inputs=3, detectors=3, bits=2, position_bits=4, outputs=5, shared=1
    ),
    "window_segments": Size(
        Tag.SLOW,
        batch=2,
        queries=11,
        inputs=3,
        detectors=3,
        bits=2,
        position_bits=2,
        outputs=3,
        window=4,
        segments=3,
    ),
    "cross": Size(
        Tag.SLOW,
        batch=2,
        queries=5,
        keys=8,
        inputs=3,
        detectors=3,
        bits=2,
        position_bits=2,
        outputs=3,
        query_start=4,
        key_start=1,
    ),
    "few_keys": Size(batch=2, queries=7, keys=3, inputs=3, detectors=3, bits=2, position_bits=2, outputs=3),
    "every_key": Size(
        batch=2, queries=4, keys=3, inputs=3, detectors=3, bits=2, position_bits=2, outputs=3, causal=0
    ),
    "tiles": Size(
        Tag.DTYPES, Tag.SLOW, batch=2, queries=101, inputs=3, detectors=2, bits=2, position_bits=2, outputs=3
    ),
    "pair": PAIR.size(32, 32, 32, 64, 6, 4),
    "pair-interleaved": INTERLEAVED.size(32, 32, 32, 64, 6, 32),
}


def case(draw: Draw, s: Sizes) -> Case:
    """Return the case of some sizes."""
    n_detectors, n_inputs, p_bits = s["detectors"], s["inputs"], s["position_bits"]
    n_keys = s.get("keys", s["queries"])
    options, segments = _sequences.pair_options(draw, s, n_keys)
    if segments:
        segments = {"segments": segments["query_segments"], "key_segments": segments["key_segments"]}
    of_position = 1 if s.get("shared") else n_detectors
    differentiable = {
        "x": draw.inputs((s["batch"], s["queries"], n_inputs)),
        "weights": draw.weights((n_detectors, 2 ** s["bits"], s["outputs"])),
    }
    axes = {
        "x": Axes(0),
        "keys": Axes(0),
        "weights": Axes(detector=0),
        "anchors": Axes(detector=0),
        "positions": Axes(detector=None if of_position == 1 else 1),
        **dict.fromkeys(segments, Axes(0)),
    }
    if p_bits:
        shape = (_sequences.n_distances(s, n_keys), of_position, p_bits)
        differentiable["positions"] = draw.inputs(shape)
    if "keys" in s:
        differentiable["keys"] = draw.inputs((s["batch"], n_keys, n_inputs))
    return draw.case(
        differentiable,
        {"anchors": draw.anchors(2 * n_inputs + p_bits, n_detectors, s["bits"]), **segments},
        axes,
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["x"],
                a["weights"],
                a["anchors"],
                a.get("positions"),
                interleave=bool(s.get("interleave")),
                keys=a.get("keys"),
                **options,
                **{name: a[name] for name in segments},
            )
        },
        table="weights",
    )


def measured(draw: Draw, s: Sizes) -> Case:
    """Return the op at some sizes, with as many outputs as inputs."""
    compared = 2 * s["inputs"] + s["position_bits"]
    interleave = bool(s.get("interleave"))
    return _sequences.measured(draw, s, s["bits"], compared=compared, interleave=interleave)


def traffic(s: Sizes) -> LookUpTraffic:
    """Return the bytes that `measured` has to move."""
    return _sequences.traffic(s, s["bits"], stores_detections=False)

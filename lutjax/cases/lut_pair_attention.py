"""Cases of `lutjax.lut_pair_attention`, with one detection per pair."""

from typing import Any

from lutjax.cases import _sequences
from lutjax.cases._case import Arrays, Axes, Case, Draw, Sizes, Tag, sizes_by
from lutjax.cases._lookups import LEAST, WORDS, address_bits
from lutjax.cases._traffic import Kind, LookUpTraffic

SLOW = True


def _interleaved_problem(s: Sizes) -> str | None:
    if s["position_bits"] != s["inputs"]:
        return (
            f"position_bits is {s['position_bits']}; interleaved it must be that of inputs, "
            f"{s['inputs']}"
        )
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

_size = sizes_by("batch", "queries", "inputs", "detectors", "bits", "position_bits", "outputs")
SIZES = {
    "one": _size(1, 1, 2, 1, 1, 0, 1),
    "two": _size(1, 2, 2, 1, 2, 1, 1),
    "split": _size(2, 3, 3, 2, 2, 1, 3, Tag.FAST, Tag.DTYPES),
    "primes": _size(3, 7, 5, 5, 3, 3, 11),
    "no_positions": _size(2, 6, 4, 3, 2, 0, 4, Tag.SLOW),
    "no_bits": _size(2, 4, 3, 2, 0, 1, 3, Tag.SLOW),
    "ties": _size(2, 9, 3, 4, 4, 2, 3, Tag.DTYPES, Tag.SLOW),
    "interleaved": _size(2, 6, 4, 3, 4, 4, 3, interleave=1),
    "empty_batch": _size(0, 4, 3, 2, 1, 1, 3),
    "empty_sequence": _size(2, 0, 3, 2, 1, 1, 3),
    "shared_positions": _size(2, 7, 3, 3, 2, 4, 5, Tag.SLOW, shared=1),
    "window_segments": _size(2, 11, 3, 3, 2, 2, 3, Tag.SLOW, window=4, segments=3),
    "cross": _size(2, 5, 3, 3, 2, 2, 3, Tag.SLOW, keys=8, query_start=4, key_start=1),
    "few_keys": _size(2, 7, 3, 3, 2, 2, 3, keys=3),
    "every_key": _size(2, 4, 3, 3, 2, 2, 3, keys=3, causal=0),
    "targets": _size(2, 5, 3, 3, 3, 1, 5, Tag.PLAIN, slots=2),
    "blocks_and_starts": _size(
        2, 11, 3, 3, 2, 2, 3, Tag.PLAIN, blocks=4, key_blocks=3, each_start=5
    ),
    "tiles": _size(2, 101, 3, 2, 2, 2, 3, Tag.DTYPES, Tag.SLOW),
    "pair": PAIR.size(32, 32, 32, 64, 6, 4),
    "pair-interleaved": INTERLEAVED.size(32, 32, 32, 64, 6, 32),
}  # fmt: skip


def case(draw: Draw, s: Sizes) -> Case:
    n_detectors, n_inputs, p_bits = s["detectors"], s["inputs"], s["position_bits"]
    n_keys = s.get("keys", s["queries"])
    options, arrays, axes = _sequences.pair_options(draw, s, n_keys)
    reached, targets, of_targets = _sequences.targets(draw, s, 2 ** s["bits"])
    of_position = 1 if s.get("shared") else n_detectors
    differentiable = {
        "x": draw.inputs((s["batch"], s["queries"], n_inputs)),
        "weights": draw.weights((n_detectors, 2 ** s["bits"], s.get("slots", s["outputs"]))),
    }
    axes |= {
        "x": Axes(0),
        "keys": Axes(0),
        "weights": Axes(detector=0),
        "anchors": Axes(detector=0),
        "positions": Axes(detector=None if of_position == 1 else 1),
        **of_targets,
    }
    if p_bits:
        shape = (_sequences.n_distances(s, n_keys), of_position, p_bits)
        differentiable["positions"] = draw.inputs(shape)
    if "keys" in s:
        differentiable["keys"] = draw.inputs((s["batch"], n_keys, n_inputs))

    def attend(op: Any, a: Arrays, **more: Any) -> Any:
        of_pairs = {name.replace("query_segments", "segments"): a[name] for name in arrays}
        return op(
            a["x"],
            a["weights"],
            a["anchors"],
            a.get("positions"),
            interleave=bool(s.get("interleave")),
            keys=a.get("keys"),
            epsilon=s.get("dead_zone", 0) / 4,  # in quarters
            **options,
            **of_pairs,
            **more,
        )

    return draw.case(
        differentiable,
        {
            "anchors": draw.anchors(2 * n_inputs + p_bits, n_detectors, s["bits"]),
            **arrays,
            **targets,
        },
        axes,
        {"y": Axes(0)},
        lambda op, a: {"y": attend(op, a, **reached, **{name: a[name] for name in targets})},
        table="weights",
        addresses=lambda reference, a: attend(reference.lut_pair_attention, a),
    )


def measured(draw: Draw, s: Sizes) -> Case:
    """Return the op at some sizes, with as many outputs as inputs."""
    compared = 2 * s["inputs"] + s["position_bits"]
    interleave = bool(s.get("interleave"))
    return _sequences.measured(draw, s, s["bits"], compared=compared, interleave=interleave)


def traffic(s: Sizes) -> LookUpTraffic:
    return _sequences.traffic(s, s["bits"], stores_detections=False)

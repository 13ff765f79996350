"""Shared arguments and traffic for attention ops."""

from typing import Any

import jax.numpy as jnp

from lutjax.cases._case import Arrays, Axes, Case, Draw, Sizes
from lutjax.cases._traffic import LookUpTraffic

KIND = ("batch", "queries", "inputs", "detectors", "bits", "position_bits", "window")


def pair_options(
    draw: Draw, s: Sizes, n_keys: int
) -> tuple[dict[str, Any], Arrays, dict[str, Axes]]:
    """Return pair selection: static options, arrays by argument name, and their axes.

    Sizes: `window`, `query_start`, `key_start`, ``causal=0``; `segments` per sequence;
    `each_start`, an upper bound for sequence starts; `blocks` and `key_blocks`, mask block sizes.
    """
    options: dict[str, Any] = {
        "window": s.get("window"),
        "query_start": s.get("query_start", 0),
        "key_start": s.get("key_start", 0),
    }
    if not s.get("causal", 1):
        options["causal"] = False
    arrays: Arrays = {}
    if "segments" in s:
        # Sorted: a segment is a run of neighboring positions, as in packed sequences.
        for name, length in (("query_segments", s["queries"]), ("key_segments", n_keys)):
            arrays[name] = jnp.sort(draw.ids((s["batch"], length), 0, s["segments"]), -1)
    if "each_start" in s:
        # From -1 on: a sequence may start before the first key, where queries see none.
        del options["query_start"]
        arrays["query_start"] = draw.ids((s["batch"],), -1, s["each_start"])
    axes = dict.fromkeys(arrays, Axes(0))
    if "blocks" in s:
        options["block_sizes"] = sizes = s["blocks"], s.get("key_blocks", s["blocks"])
        shape = -(-s["queries"] // sizes[0]), -(-n_keys // sizes[1])
        arrays["block_mask"], axes["block_mask"] = draw.ids(shape, 0, 2) > 0, Axes()
    return options, arrays, axes


def targets(draw: Draw, s: Sizes, n_rows: int) -> tuple[dict[str, Any], Arrays, dict[str, Axes]]:
    """Return options, arrays and axes for targets, per row or with ``row_lists=0`` per table."""
    if "slots" not in s:
        return {}, {}, {}
    shape = s["detectors"], n_rows if s.get("row_lists", 1) else 1, s["slots"]
    found = {"targets": draw.ids(shape, -1, s["outputs"])}
    return {"n_outputs": s["outputs"]}, found, {"targets": Axes(detector=0)}


def n_distances(s: Sizes, n_keys: int) -> int:
    """Return the number of position distances: `distances`, or all occurring ones."""
    if not s.get("causal", 1):
        return s["queries"] + n_keys - 1
    farthest = max(
        s.get("query_start", s.get("each_start", 1) - 1) + s["queries"] - 1 - s.get("key_start", 0),
        0,
    )
    return s.get("distances", min(farthest, s.get("window", farthest)) if n_keys else 0)


def measured(
    draw: Draw,
    s: Sizes,
    address_bits: int,
    *,
    compared: int,
    function: str | None = None,
    **options: Any,
) -> Case:
    """Return a self-attention case with equally many inputs and outputs, or `outputs` with `slots`.

    Args:
      compared: number of anchor candidates.
      function: see `Case`. options: call options in addition to the window.
    """
    reached, lists, of_targets = targets(draw, s, 2**address_bits)
    arrays = {
        "weights": draw.weights((s["detectors"], 2**address_bits, s.get("slots", s["inputs"]))),
        "x": draw.inputs((s["batch"], s["queries"], s["inputs"])),
    }
    if s["position_bits"]:
        distances = n_distances(s, s["queries"])
        arrays["positions"] = draw.inputs((distances, s["detectors"], s["position_bits"]))
    return draw.case(
        arrays,
        {"anchors": draw.anchors(compared, s["detectors"], s["bits"]), **lists},
        {
            **of_targets,
            "weights": Axes(detector=0),
            "x": Axes(0),
            "positions": Axes(detector=1),
            "anchors": Axes(detector=0),
        },
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["x"],
                a["weights"],
                a["anchors"],
                a.get("positions"),
                window=s.get("window"),
                **options,
                **reached,
                **{name: a[name] for name in lists},
            )
        },
        table="weights",
        function=function,
    )


def traffic(s: Sizes, address_bits: int, *, stores_detections: bool) -> LookUpTraffic:
    """Return the required memory traffic for a measured sequence."""
    distances = n_distances(s, s["queries"])
    # Causal: query `j` sees `j` earlier keys, at most as many as there are distances.
    pairs = sum(min(query, distances) for query in range(s["queries"]))
    places = s["batch"] * s["queries"]
    detections = (places + (distances if s["position_bits"] else 0)) * s["detectors"]
    return LookUpTraffic(
        table=(s["detectors"], 2**address_bits, s.get("slots", s["inputs"])),
        uses=s["batch"] * pairs * s["detectors"],
        detections=detections if stores_detections else 0,
        numbers_in=places * s["inputs"] + distances * s["detectors"] * s["position_bits"],
        numbers_out=places * s.get("outputs", s["inputs"]),
        anchor_pairs=s["detectors"] * s["bits"],
        targets=s.get("slots", 0),
    )

"""Arguments and bytes that the cases of both attentions share."""

from typing import Any

import jax.numpy as jnp

from lutjax.cases._case import Arrays, Axes, Case, Draw, Sizes
from lutjax.cases._traffic import LookUpTraffic

KIND = ("batch", "queries", "inputs", "detectors", "bits", "position_bits", "window")


def pair_options(draw: Draw, s: Sizes, n_keys: int) -> tuple[dict[str, Any], Arrays]:
    """Return static options of the pairs that count, and the segments, if any."""
    options = {
        "window": s.get("window"),
        "query_start": s.get("query_start", 0),
        "key_start": s.get("key_start", 0),
    }
    if not s.get("causal", 1):
        options["causal"] = False
    segments: Arrays = {}
    if "segments" in s:
        for name, length in (("query_segments", s["queries"]), ("key_segments", n_keys)):
            segments[name] = jnp.sort(draw.ids((s["batch"], length), 0, s["segments"]), -1)
    return options, segments


def n_distances(s: Sizes, n_keys: int) -> int:
    """Return the number of distances that positions are made for: those that occur, unless a size says another."""
    if not s.get("causal", 1):
        return s["queries"] + n_keys - 1
    farthest = max(s.get("query_start", 0) + s["queries"] - 1 - s.get("key_start", 0), 0)
    return s.get("distances", min(farthest, s.get("window", farthest)) if n_keys else 0)


def measured(
    draw: Draw, s: Sizes, address_bits: int, *, compared: int, function: str | None = None, **options: Any
) -> Case:
    """Return the case of a measured sequence, which attends to itself and has as many outputs as inputs.

    Args:
      compared: numbers among which anchors choose.
      function: see `Case`. options: of its call, beside the window.
    """
    arrays = {
        "weights": draw.weights((s["detectors"], 2**address_bits, s["inputs"])),
        "x": draw.inputs((s["batch"], s["queries"], s["inputs"])),
    }
    if s["position_bits"]:
        distances = n_distances(s, s["queries"])
        arrays["positions"] = draw.inputs((distances, s["detectors"], s["position_bits"]))
    return draw.case(
        arrays,
        {"anchors": draw.anchors(compared, s["detectors"], s["bits"])},
        {
            "weights": Axes(detector=0),
            "x": Axes(0),
            "positions": Axes(detector=1),
            "anchors": Axes(detector=0),
        },
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(a["x"], a["weights"], a["anchors"], a.get("positions"), window=s.get("window"), **options)
        },
        table="weights",
        function=function,
    )


def traffic(s: Sizes, address_bits: int, *, stores_detections: bool) -> LookUpTraffic:
    """Return the bytes that a measured sequence has to move."""
    distances = n_distances(s, s["queries"])
    pairs = sum(min(query, distances) for query in range(s["queries"]))
    places = s["batch"] * s["queries"]
    detections = (places + (distances if s["position_bits"] else 0)) * s["detectors"]
    return LookUpTraffic(
        table=(s["detectors"], 2**address_bits, s["inputs"]),
        uses=s["batch"] * pairs * s["detectors"],
        detections=detections if stores_detections else 0,
        numbers_in=places * s["inputs"] + distances * s["detectors"] * s["position_bits"],
        numbers_out=places * s["inputs"],
        anchor_pairs=s["detectors"] * s["bits"],
    )

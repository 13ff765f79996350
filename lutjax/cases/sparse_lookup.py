"""Cases of `lutjax.sparse_lookup`, measured with detection as `lutjax.sparse_lut`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.cases import lookup
from lutjax.cases._case import Arrays, Axes, Case, Detections, Draw, Size, Sizes, Tag
from lutjax.cases._lookups import LEAST, WORDS, address_bits
from lutjax.cases._traffic import Kind, LookUpTraffic
from lutjax.wiring import from_edges

SPARSE = Kind(
    "sparse",
    ("batch", "inputs", "outputs", "detectors", "bits", "slots"),
    words=WORDS,
    least=LEAST,
    problem=address_bits,
)
KINDS = (SPARSE,)

# Lists: one for each table (and row), or one for all. With `longest` a list of edges: of rows up to
# `slots`, and of one row so many.
SIZES = {
    "one": Size(batch=1, detectors=1, bits=1, slots=1, outputs=1),
    "split": Size(Tag.FAST, batch=4, detectors=4, bits=2, slots=2, outputs=3),
    "primes": Size(Tag.DTYPES, batch=13, detectors=5, bits=3, slots=3, outputs=11),
    "list_per_table": Size(batch=7, detectors=3, bits=2, slots=2, outputs=5, row_lists=0),
    "one_list": Size(
        Tag.DTYPES, batch=7, detectors=3, bits=2, slots=4, outputs=5, table_lists=0, row_lists=0
    ),
    "no_slots": Size(batch=2, detectors=2, bits=1, slots=0, outputs=3),
    "empty_batch": Size(batch=0, detectors=3, bits=2, slots=2, outputs=4),
    "more_slots_than_outputs": Size(batch=5, detectors=2, bits=2, slots=7, outputs=3),
    "groups": Size(batch=5, detectors=6, bits=2, slots=2, outputs=5, groups=3, table_lists=0),
    "edges": Size(Tag.PLAIN, batch=7, detectors=3, bits=2, slots=3, outputs=5, longest=19),
    "no_edges": Size(
        Tag.PLAIN, Tag.SLOW, batch=2, detectors=2, bits=1, slots=0, outputs=3, longest=0
    ),
    "edges_of_groups": Size(
        Tag.PLAIN, Tag.SLOW, batch=5, detectors=4, bits=1, slots=2, outputs=3, longest=7, groups=2
    ),
    "sparse": SPARSE.size(4096, 512, 512, 64, 6, 32),
}


def case(draw: Draw, s: Sizes) -> Case:
    if "longest" in s:
        return _edge_case(draw, s)
    n_rows, n_outputs = 2 ** s["bits"], s["outputs"]
    lists = (
        s["detectors"] if s.get("table_lists", 1) else 1,
        n_rows if s.get("row_lists", 1) else 1,
    )
    weights = draw.weights((s["detectors"], n_rows, s["slots"]))
    d = Detections()
    d.add("detection", draw.detection((s["batch"], s["detectors"]), s["bits"]), Axes(0, 1))

    def addresses(reference: Any, a: Arrays) -> jax.Array:
        # Slots that are not used pass no cotangent on, and yet their rows are looked up.
        y: jax.Array = reference.lookup(
            a["weights"], d.detection("detection", a), groups=s.get("groups")
        )
        return y

    return draw.case(
        {"weights": weights, **d.margins},
        {**d.ids, "targets": draw.ids((*lists, s["slots"]), -1, n_outputs)},
        {
            "weights": Axes(detector=0),
            "targets": Axes(detector=0 if lists[0] > 1 else None),
            **d.axes,
        },
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["weights"],
                d.detection("detection", a),
                a["targets"],
                n_outputs,
                groups=s.get("groups"),
            )
        },
        table="weights",
        addresses=addresses,
    )


def _edge_case(draw: Draw, s: Sizes) -> Case:
    """Return an edge-list case. Edge lists are replicated, so detectors are not divided."""
    n_detectors, n_rows = s["detectors"], 2 ** s["bits"]
    counts = np.array(draw.ids((n_detectors * n_rows,), 0, s["slots"] + 1))
    counts[n_rows // 2] = s["longest"]
    detector, row = np.divmod(np.repeat(np.arange(counts.size), counts), n_rows)
    target = draw.ids(detector.shape, 0, s["outputs"])
    edges = from_edges(
        detector, row, target, n_detectors=n_detectors, n_rows=n_rows, n_outputs=s["outputs"]
    )
    d = Detections()
    d.add("detection", draw.detection((s["batch"], n_detectors), s["bits"]), Axes(0))
    return draw.case(
        {"weights": draw.weights((edges.size,)), **d.margins},
        {**d.ids, "first": jnp.asarray(edges.first), "targets": jnp.asarray(edges.target)},
        {"weights": Axes(), "first": Axes(), "targets": Axes(), **d.axes},
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["weights"],
                d.detection("detection", a),
                dataclasses.replace(edges, first=a["first"], target=a["targets"]),
                groups=s.get("groups"),
            )
        },
        table="weights",
    )


def measured(draw: Draw, s: Sizes) -> Case:
    """Return a `lutjax.sparse_lut` case with targets for every row."""
    shape = (s["detectors"], 2 ** s["bits"], s["slots"])
    return draw.case(
        {"weights": draw.weights(shape), "x": draw.inputs((s["batch"], s["inputs"]))},
        {
            "anchors": draw.anchors(s["inputs"], s["detectors"], s["bits"]),
            "targets": draw.ids(shape, 0, s["outputs"]),
        },
        {
            "weights": Axes(detector=0),
            "x": Axes(0),
            "anchors": Axes(detector=0),
            "targets": Axes(detector=0),
        },
        {"y": Axes(0)},
        lambda lut, a: {"y": lut(a["x"], a["weights"], a["anchors"], a["targets"], s["outputs"])},
        table="weights",
        function="sparse_lut",
    )


def traffic(s: Sizes) -> LookUpTraffic:
    dense = lookup.traffic(s)
    return dataclasses.replace(dense, table=(*dense.table[:2], s["slots"]), targets=s["slots"])

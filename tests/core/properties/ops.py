"""The ops as members, each with its definition on one element."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import lutjax
from lutjax.ops.gate_network import gate_network
from lutjax.ops.logic_trees import Places, logic_trees
from lutjax.ops.lut_at_places import Windows, lut_at_places
from lutjax.wiring import Edges
from properties import definitions
from properties.members import (
    FINE,
    FINITE,
    READS,
    SCALARS,
    Arrays,
    Op,
    Pullback,
    Source,
    exponentials,
    given,
    lists_of,
    lost_of,
    tables,
    value_of,
    values_of,
)


def _detection(a: Arrays, name: str, bits: int) -> lutjax.Detection:
    return lutjax.Detection(a[f"{name}.index"], a[f"{name}.flip"], a[f"{name}.margin"], bits)


def _parts(d: lutjax.Detection) -> Arrays:
    return {"index": d.index, "flip": d.flip, "margin": d.margin}


_ACCUMULATE = {"accumulate": (None, FINE)}
_EPSILON = {"epsilon": (0.0, 0.5)}
_GROUPS = {"groups": (False, True)}
_SHARED = {**_GROUPS, "shared_input": (False, True)}
_LISTS = ("row", "table", "all")
_EDGES = ("edges",)
_PAIRS = {
    "window": (None, 1, 2),
    "segments": (False, True),
    "positions": (True, False),
    "causal": (True, False),
    "targets": (None, *_LISTS),
    "blocks": (False, True),
}
_STARTS = {"starts": ("none", "known", "traced", "each"), "keys": ("same", "more", "fewer")}
_X_LENGTH = {"x": 0}


def groups_of(z: Mapping[str, int], o: Mapping[str, Any]) -> int | None:
    return z["groups"] if o.get("groups") else None


def _in_groups(o: Mapping[str, Any]) -> dict[str, int]:
    groups = groups_of(o["sizes"], o)
    return {} if groups is None else {"groups": groups}


# ------------------------------------------------------------------------------------- arguments and calls
def _inputs(s: Source, z: Mapping[str, int], o: Mapping[str, Any], steps: int = 40) -> np.ndarray:
    """Inputs, of each group or shared by all."""
    groups = groups_of(z, o)
    of_groups = () if groups is None else (1 if o.get("shared_input") else groups,)
    return s.grid(z["batch"], *of_groups, z["inputs"], steps=steps)


def _detect_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    return {"x": _inputs(s, z, o), "anchors": s.anchors(z["inputs"], z["detectors"], z["bits"])}


def _lookup_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    return {
        "weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"]),
        **s.detection("detection", z["bits"], z["batch"], z["detectors"]),
    }


def _slots(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    tables, rows = z["detectors"], 2 ** z["bits"]
    if o.get("lists") == "edges":  # up to as many as slots, and of one row many more
        counts = np.arange(tables * rows) % (z["slots"] + 1)
        counts[1:2] = 11
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return {"weights": s.grid(first[-1]), "first": first, "targets": s.ids(0, z["outputs"], first[-1])}
    return {
        "weights": s.grid(tables, rows, z["slots"]),
        "targets": lists_of(s, tables, rows, z["slots"], z["outputs"], o.get("lists", "row")),
    }


def _blocks(s: Source, z: Mapping[str, int], o: Mapping[str, Any], n_keys: int) -> Arrays:
    """A mask of blocks of two queries and one key, some of which count."""
    if not o.get("blocks"):
        return {}
    mask = np.arange(-(-z["length"] // 2))[:, None] + np.arange(n_keys)[None, :]
    return {"block_mask": mask % 3 > 0}


def _starts(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    if o.get("starts") == "each" and o.get("causal", True):
        return {"query_start": s.ids(-1, 3, z["batch"])}
    traced = o.get("starts") == "traced" and o.get("causal", True)
    return {"query_start": np.int32(2), "key_start": np.int32(1)} if traced else {}


def _start_axis(o: Mapping[str, Any]) -> dict[str, int]:
    return {"query_start": 0} if o.get("starts") == "each" else {}


def _known_starts(o: Mapping[str, Any], a: Arrays) -> Arrays:
    known = o.get("starts") == "known" and o.get("causal", True)
    starts: Arrays = {"query_start": 2, "key_start": 1} if known else {}
    return {**starts, **{n: a[n] for n in ("query_start", "key_start") if n in a}}


def _sight(o: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an op that say which keys a query sees."""
    blocks = {"block_sizes": (2, 1)} if o.get("blocks") else {}
    return {**(given(o, "window") if o.get("causal", True) else {"causal": False}), **blocks}


def _targets(a: Arrays, o: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return targets and the number of outputs, or the list of edges."""
    z = o["sizes"]
    if "first" not in a:
        return a["targets"], z["outputs"]
    return (Edges(a["first"], a["targets"], z["detectors"], 2 ** z["bits"], z["outputs"], width=3),)


def _edges(a: Arrays, o: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an op that say which outputs rows reach."""
    return {"targets": a["targets"], "n_outputs": o["sizes"]["outputs"]} if "targets" in a else {}


def _rows(s: Source, n_rows: int, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    """Tables, with their targets if they have any."""
    tables, lists = z["detectors"], o.get("targets")
    if lists is None:
        return {"weights": s.grid(tables, n_rows, z["outputs"])}
    targets = lists_of(s, tables, n_rows, z["slots"], z["outputs"], lists)
    # Slots of one list that are not used take part with a cotangent of 0.
    weights = (s.finite if lists == "all" else s.grid)(tables, n_rows, z["slots"])
    return {"weights": weights, "targets": targets}


def _distances(z: Mapping[str, int], o: Mapping[str, Any], spare: int) -> int:
    """Number of distances between positions, and where they are causal some more."""
    return z["length"] + spare if o.get("causal", True) else z["length"] + _n_keys(z, o) - 1


def _n_keys(z: Mapping[str, int], o: Mapping[str, Any]) -> int:
    return z["length"] + {"same": 0, "more": 1, "fewer": -2}[o.get("keys", "same")]


def _attention_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    B, L, T, C = z["batch"], z["length"], z["detectors"], z["pairs"]
    N = z["position_bits"] if o.get("positions", True) else 0
    keys = _n_keys(z, o)
    arrays = {
        **_rows(s, 2 ** (2 * C + N), z, o),
        **s.detection("query", C, B, L, T),
        **s.detection("key", C, B, keys, T),
        **(s.detection("position", N, _distances(z, o, 1), T) if N else {}),
        **_starts(s, z, o),
        **_blocks(s, z, o, keys),
    }
    if o.get("segments"):
        arrays |= {"query_segments": s.ids(0, 2, B, L), "key_segments": s.ids(0, 2, B, keys)}
    return arrays


def _call_attention(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    z = o["sizes"]
    return {
        "y": module.lookup_attention(
            a["weights"],
            _detection(a, "query", z["pairs"]),
            _detection(a, "key", z["pairs"]),
            _detection(a, "position", z["position_bits"]) if "position.index" in a else None,
            **given(o, "accumulate"),
            **_sight(o),
            **_edges(a, o),
            **_known_starts(o, a),
            **{n: a[n] for n in ("query_segments", "key_segments", "block_mask") if n in a},
        )
    }


def _lut_attention_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    B, L, T, C, n_inputs = z["batch"], z["length"], z["detectors"], z["pairs"], z["inputs"]
    N = z["position_bits"] if o.get("positions", True) else 0
    return {
        "x": s.grid(B, L, n_inputs, steps=40),
        **_rows(s, 2 ** (2 * C + N), z, o),
        "anchors": s.anchors(n_inputs, T, C),
        **({"positions": s.grid(_distances(z, o, -1), 1, N)} if N else {}),
        **({"segments": s.ids(0, 2, B, L)} if o.get("segments") else {}),
        **_blocks(s, z, o, L),
    }


def _pair_attention_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    B, L, T, C, n_inputs = z["batch"], z["length"], z["detectors"], z["bits"], z["inputs"]
    N = n_inputs if o.get("interleave") else z["position_bits"] if o.get("positions", True) else 0
    keys = _n_keys(z, o)
    arrays = {
        "x": s.grid(B, L, n_inputs),
        **_rows(s, 2**C, z, o),
        "anchors": s.anchors(2 * n_inputs + N, T, C),
        **({"positions": s.grid(_distances(z, o, 1), T, N)} if N else {}),
        **({"keys": s.grid(B, keys, n_inputs)} if "keys" in o else {}),
        **_starts(s, z, o),
        **_blocks(s, z, o, keys),
    }
    if o.get("segments"):
        arrays["segments"] = s.ids(0, 2, B, L)
        if "keys" in o:
            arrays["key_segments"] = s.ids(0, 2, B, keys)
    return arrays


def _call_pair_attention(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    return {
        "y": module.lut_pair_attention(
            a["x"],
            a["weights"],
            a["anchors"],
            a.get("positions"),
            **given(o, "accumulate", "epsilon", "interleave"),
            **_sight(o),
            **_edges(a, o),
            **_known_starts(o, a),
            **{n: a[n] for n in ("segments", "keys", "key_segments", "block_mask") if n in a},
        )
    }


def wires_of(s: Source, n_inputs: int, shape: tuple[int, ...], o: Mapping[str, Any]) -> Arrays:
    """Wires, and perhaps the list of who reads each input, with room for any wires."""
    if not o.get("readers"):
        return {"wires": s.ids(0, n_inputs, *shape)}
    wires = s.numbers(0, n_inputs, *shape)  # those of the list exist
    return {"wires": wires, "readers": definitions.readers(wires, n_inputs, wires.size).astype(np.int32)}


def _gates(name: str, parameter: str) -> Op:
    def arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
        G, n = z["outputs"], z["wires"] if parameter == "table" else 2
        shape = {"coefficients": (4, G), "logits": (G, 16), "table": (G, 2**n)}[parameter]
        x = s.grid(z["batch"], z["inputs"])
        return {
            "x": np.ascontiguousarray(x.T) if o.get("feature_axis") == 0 else x,
            parameter: s.grid(*shape),
            **wires_of(s, z["inputs"], (G, n), o),
        }

    def call(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
        op = getattr(module, name)
        options = given(o, "feature_axis", "hard", "accumulate")
        return {"y": op(a["x"], a[parameter], a["wires"], readers=a.get("readers"), **options)}

    options: dict[str, tuple[Any, ...]] = {"feature_axis": (-1, 0), "readers": (False, True)}
    options |= {"hard": (False, True)} if parameter == "logits" else _ACCUMULATE
    return Op(
        arrays,
        call,
        ("x", parameter),
        options,
        batch=lambda o: {"x": 1 if o.get("feature_axis") == 0 else 0},
        recurrent=True,
        values=(*FINITE, "wild", "nan"),  # with infinities the order of additions decides what is NaN
        define=_of_gates(name, parameter),
    )


def _sizes(o: Mapping[str, Any]) -> tuple[int, ...]:
    return (o["sizes"]["outputs"],) * o.get("layers", 2)


def _network_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    x, n_gates, n_layers = s.grid(z["batch"], z["inputs"]), z["outputs"], o.get("layers", 2)
    read = (z["inputs"], *(n_gates,) * (n_layers - 1))  # by each layer
    of_layers = [wires_of(s, n, (n_gates, 2), o) for n in read]
    readers = {f"readers{i}": of["readers"] for i, of in enumerate(of_layers) if "readers" in of}
    return {
        "x": np.ascontiguousarray(x.T) if o.get("feature_axis") == 0 else x,
        "coefficients": s.grid(4, n_gates * n_layers),
        "wires": np.concatenate([of["wires"] for of in of_layers]),
        **readers,
    }


def _call_network(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    op = gate_network if module is lutjax else module.gate_network  # that one is for models
    readers = [a[f"readers{i}"] for i in range(len(_sizes(o)))] if o.get("readers") else None
    options = {"sizes": _sizes(o), "readers": readers, **given(o, "feature_axis")}
    return {"y": op(a["x"], a["coefficients"], a["wires"], **options)}


def _places(o: Mapping[str, Any]) -> Places:
    return {
        "padding": Places((3, 2), (2, 2), (1, 1), (1, 0), (2, 1)),
        "strides": Places((5, 3), (2, 1), (2, 2)),
        "pool padding": Places((4, 3), (2, 2), (1, 1), (0, 0), (2, 3), (1, 1)),
    }[o.get("places", "padding")]


def _tree_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    places, n_channels, n_leaves = _places(o), z["slots"], o.get("leaves", 4)
    window = math.prod(places.kernel) * n_channels
    leaves = (s.numbers if o.get("readers") else s.ids)(0, window, z["outputs"], n_leaves)
    readers = definitions.readers(np.clip(leaves, 0, window - 1) % n_channels, n_channels, leaves.size)
    # The largest of several places: rounding must not choose another one.
    return {
        "x": s.grid(math.prod(places.image) * n_channels, z["batch"], steps=4),
        "coefficients": s.grid(4, z["outputs"], n_leaves - 1, steps=4),
        "leaves": leaves,
        **({"readers": readers.astype(np.int32)} if o.get("readers") else {}),
    }


def _call_trees(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    op = logic_trees if module is lutjax else module.logic_trees  # that one is for layers
    return {"y": op(a["x"], a["coefficients"], a["leaves"], places=_places(o), readers=a.get("readers"))}


def _windows(z: Mapping[str, int], o: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the op: groups have channels of their own, or share those of a window."""
    groups, channels = groups_of(z, o) or 1, z["slots"]
    own = 1 if o.get("shared_input") else groups
    stride, padding = ((2, 1), (1, 0)) if o.get("strides") else ((1, 1), (0, 1))
    windows = Windows((2, 3, channels * own), (2, 2), stride, padding, channels)
    options: dict[str, Any] = {"windows": windows, "groups": groups, **given(o, "epsilon", "accumulate")}
    return options | {"n_outputs": z["outputs"]} if o.get("targets") else options


def _places_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    n_detectors, n_outputs = z["detectors"], z["outputs"]
    options = _windows(z, o)
    targets = {"targets": s.ids(-1, n_outputs, options["groups"], n_outputs)} if o.get("targets") else {}
    return {
        "images": s.grid(z["batch"], *options["windows"].image, steps=40),
        "weights": s.grid(n_detectors, 2 ** z["bits"], n_outputs),
        "anchors": s.anchors(4 * z["slots"], n_detectors, z["bits"]),
        **targets,
    }


def _call_places(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    op = lut_at_places if module is lutjax else module.lut_at_places  # that one is for layers
    return {"y": op(a["images"], a["weights"], a["anchors"], a.get("targets"), **_windows(o["sizes"], o))}


def _weighted_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    reads = z["batch"], z["detectors"], o.get("ways", 2)
    return {
        "weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"]),
        "index": s.ids(0, 2 ** z["bits"], *reads),
        "coefficients": s.grid(*reads, steps=4),
    }


def _valued(o: Mapping[str, Any]) -> dict[str, int]:
    return {} if o.get("valued") is None else {"valued": min(o["valued"], o.get("ways", 2))}


def _margins_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    shape = z["detectors"], z["bits"]
    anchors = s.ids(0, z["inputs"], *shape) if o.get("single") else s.anchors(z["inputs"], *shape)
    return {"x": _inputs(s, z, o, steps=8), "anchors": anchors}


def tables_of(s: Source, shape: tuple[int, ...], groups: int, read: str | None) -> Arrays:
    """Tables of floats, or of integers for the read of that name."""
    if read != "integers":
        return {"weights": s.grid(*shape)}
    whole = s.numbers(-128, 128, *shape).astype(np.int8)
    return {"weights": whole, "exponents": s.numbers(-8, -4, groups, shape[2])}


def scalars_of(s: Source, read: Any) -> Arrays:
    """Scalars of a read, logarithms from -1 to 1."""
    return {name: np.clip(s.grid(steps=4), -1, 1).astype(s.dtype) for name in jax.eval_shape(read.initial)}


def _scored_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    name = o.get("read", "confidence")
    shape = z["detectors"], 2 ** z["bits"], z["outputs"]
    keep = o.get("keep") and name != "integers"
    return {
        **_margins_arrays(s, z, o),
        **tables_of(s, shape, groups_of(z, o) or 1, name),
        **scalars_of(s, READS[name][1]),
        **({"keep": s.numbers(0, 3, z["batch"], z["detectors"]).astype(s.dtype)} if keep else {}),
    }


def _read_of(a: Arrays, o: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the read of that name and its options; integers are added exactly without one."""
    sums = {} if name == "integers" else given(o, "accumulate")
    return {"read": READS[name][1], "keep": a.get("keep"), **sums}


def _tables(a: Arrays) -> Any:
    return lutjax.QuantizedTables(a["weights"], a["exponents"]) if "exponents" in a else a["weights"]


def _call_scored(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    options = _read_of(a, o, o.get("read", "confidence"))
    scalars = {name: a[name] for name in options["read"].initial()}
    sums = {"sum_groups": True} if o.get("groups") and o.get("sum_groups") else {}
    return {
        "y": module.scored_lut(a["x"], _tables(a), a["anchors"], scalars, **options, **sums, **_in_groups(o))
    }


def _conv_windows(z: Mapping[str, int], o: Mapping[str, Any]) -> Windows:
    windows: Windows = _windows(z, {**o, "shared_input": False})["windows"]
    return windows


def _conv_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    windows, groups, name = _conv_windows(z, o), groups_of(z, o) or 1, o.get("read")
    keep = o.get("keep") and name not in (None, "integers")
    return {
        "images": s.grid(z["batch"], *windows.image, steps=8),
        "anchors": s.anchors(4 * z["slots"], z["detectors"], z["bits"]),
        **tables_of(s, (z["detectors"], 2 ** z["bits"], z["outputs"]), groups, name),
        **({} if name is None else scalars_of(s, READS[name][1])),
        **({"keep": s.numbers(0, 3, z["batch"], z["detectors"]).astype(s.dtype)} if keep else {}),
    }


def _call_conv(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    windows, name = _conv_windows(o["sizes"], o), o.get("read")
    how: dict[str, Any] = given(o, "epsilon", "accumulate")
    if name is not None:
        how = _read_of(a, o, name)
        how["scalars"] = {n: a[n] for n in how["read"].initial()}
    sizes = {"kernel": windows.size, "stride": windows.stride, "padding": windows.padding}
    return {"y": module.conv_lut(a["images"], _tables(a), a["anchors"], **sizes, **how, **_in_groups(o))}


# ------------------------------------------------------------------------------------- definitions
def _scale(o: Mapping[str, Any]) -> float | None:
    return None if o.get("accumulate") is None else o["accumulate"].scale


def _detected(a: Arrays, name: str, bits: int) -> definitions.Detection:
    return definitions.Detection(
        *(a[f"{name}.{part}"].astype(np.int64) for part in ("index", "flip")), a[f"{name}.margin"], bits
    )


def _where(a: Arrays, o: Mapping[str, Any], segments: tuple[str, str], n_keys: int) -> definitions.Where:
    of_queries, of_keys = (a.get(n) for n in segments)
    of_keys = of_queries if of_keys is None else of_keys
    blocks = (a["block_mask"], (2, 1)) if "block_mask" in a else (None, None)
    if not o.get("causal", True):
        return definitions.Where(None, n_keys, 0, of_queries, of_keys, *blocks)
    starts = _known_starts(o, a)
    return definitions.Where(
        o.get("window"),
        starts.get("query_start", 0),
        starts.get("key_start", 0),
        of_queries,
        of_keys,
        *blocks,
    )


def _of_detect(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    d = definitions.detect(a["x"], a["anchors"], o.get("epsilon", 0.0))
    outputs = {"index": d.index, "flip": d.flip, "margin": d.margin}
    return outputs, lambda ct: {
        "x": value_of(definitions.detect_vjp(a["x"], a["anchors"], definitions.exactly(ct), _scale(o)))
    }


def _of_detect_signs(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    d = definitions.detect_signs(a["positions"], o.get("epsilon", 0.0))
    outputs = {"index": d.index, "flip": d.flip, "margin": d.margin}
    return outputs, lambda ct: {
        "positions": definitions.detect_signs_vjp(a["positions"], definitions.exactly(ct)).value
    }


def _of_lookup(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    w, d = a["weights"], _detected(a, "detection", o["sizes"]["bits"])
    names, how = {"margin": "detection.margin"}, (_scale(o), groups_of(o["sizes"], o))
    return {"y": value_of(definitions.lookup(w, d, *how))}, lambda ct: values_of(
        definitions.lookup_vjp(w, d, ct, *how), names
    )


def _of_weighted_lookup(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    given, groups = (a["weights"], a["index"], a["coefficients"]), _in_groups(o).get("groups")
    how: Any = {"groups": groups or 1, "accumulate": _scale(o), **_valued(o)}
    y = value_of(definitions.weighted_lookup(*given, **how))

    def pull(ct: np.ndarray) -> Arrays:
        return values_of(definitions.weighted_lookup_vjp(*given, ct if groups else ct[..., None, :], **how))

    return {"y": y if groups else y[..., 0, :]}, pull


def _of_margins(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    groups = _in_groups(o).get("groups")
    x = a["x"] if groups else a["x"][..., None, :]

    def pull(ct: np.ndarray) -> Arrays:
        of_u = definitions.exactly(ct)
        dx = value_of(definitions.margins_vjp(x, a["anchors"], of_u, groups or 1, _scale(o)))
        return {"x": dx if groups else dx[..., 0, :]}

    return {"y": definitions.margins(x, a["anchors"], groups or 1)}, pull


def _of_scored_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    groups, (read, how) = groups_of(o["sizes"], o), READS[o.get("read", "confidence")]
    x, n = a["x"] if groups else a["x"][..., None, :], groups or 1
    scalars = exponentials(a)
    u = definitions.margins(x, a["anchors"], n)
    ways = definitions.ways_of(read, u, scalars, getattr(how, "ways", 2))
    rest = (read, n, bool(groups and o.get("sum_groups")), a.get("keep"), _scale(o))
    total = definitions.scored_lut(ways, tables(a), *rest)
    y = value_of(total)

    def pull(ct: np.ndarray) -> Arrays:
        ct = ct if groups else ct[..., None, :]
        found = definitions.scored_lut_vjp(x, ways, a["weights"], a["anchors"], ct, *rest)
        names = {name: f"log_{name}" for name in scalars}
        of = {**values_of(found, names), **lost_of(total, found, names)}
        return of if groups else {**of, "x": of["x"][..., 0, :]}

    return {"y": y if groups else y[..., 0, :]}, pull


def _of_conv_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    options: dict[str, Any] = {
        "windows": _conv_windows(o["sizes"], o),
        "groups": groups_of(o["sizes"], o) or 1,
    }
    if o.get("read") is None:
        options |= {"epsilon": o.get("epsilon", 0.0)}
    else:
        name, how = READS[o["read"]]
        ways = {"n_ways": getattr(how, "ways", 2)}
        options |= {"read": name, "scalars": exponentials(a), "keep": a.get("keep"), **ways}
    options["accumulate"] = _scale(o)
    given = a["images"], tables(a), a["anchors"]
    total = definitions.conv_lut(*given, **options)
    names = {name: f"log_{name}" for name in options.get("scalars", {})}

    def pull(ct: np.ndarray) -> Arrays:
        found = definitions.conv_lut_vjp(*given, ct, **options)
        lost = {} if o.get("read") is None else lost_of(total, found, names)
        return {**values_of(found, names), **lost}

    return {"y": value_of(total)}, pull


def _of_sparse_lookup(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    z = o["sizes"]
    weights, targets, of_weights = _as_slots(a, z)
    given = weights, _detected(a, "detection", z["bits"]), targets
    names, how = {"margin": "detection.margin"}, (_scale(o), groups_of(z, o))
    return {"y": value_of(definitions.sparse_lookup(*given, z["outputs"], *how))}, lambda ct: values_of(
        of_weights(definitions.sparse_lookup_vjp(*given, ct, *how)), names
    )


def _as_slots(a: Arrays, z: Mapping[str, int]) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return weights and targets of slots, and what takes the cotangent of weights back to what they were."""
    if "first" not in a:
        return a["weights"], a["targets"], lambda found: found
    slots = definitions.EdgesAsSlots(a["first"], 2 ** z["bits"])
    return *slots.given(a["weights"], a["targets"]), lambda found: {
        **found,
        "weights": slots.of_edges(found["weights"]),
    }


def _of_rows(a: Arrays, o: Mapping[str, Any], attend: Any, pulled: Any) -> tuple[Arrays, Pullback]:
    """An attention whose rows may reach some outputs: `attend` and `pulled` are of whole tables."""
    targets = a.get("targets")
    table = definitions.spread(a["weights"], targets, o["sizes"]["outputs"])

    def pull(ct: np.ndarray) -> Arrays:
        of = pulled(table, ct)
        return {**of, "weights": definitions.spread_vjp(of["weights"], targets, a["weights"].shape)}

    return {"y": value_of(attend(table))}, lambda ct: values_of(pull(ct))


def _of_lookup_attention(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    z, where = o["sizes"], _where(a, o, ("query_segments", "key_segments"), a["key.index"].shape[-2])
    given = (
        _detected(a, "query", z["pairs"]),
        _detected(a, "key", z["pairs"]),
        _detected(a, "position", z["position_bits"]) if "position.index" in a else None,
    )

    def pulled(table: np.ndarray, ct: np.ndarray) -> Any:
        of = definitions.lookup_attention_vjp(table, *given, ct, where, _scale(o))
        return {n if n == "weights" else f"{n}.margin": s for n, s in of.items()}

    return _of_rows(a, o, lambda table: definitions.lookup_attention(table, *given, where, _scale(o)), pulled)


def _of_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    given, how = (
        (a["x"], a["weights"], a["anchors"]),
        (o.get("epsilon", 0.0), _scale(o), groups_of(o["sizes"], o)),
    )
    return {"y": value_of(definitions.lut(*given, *how))}, lambda ct: values_of(
        definitions.lut_vjp(*given, ct, *how)
    )


def _of_sparse_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    weights, targets, of_weights = _as_slots(a, o["sizes"])
    given = a["x"], weights, a["anchors"], targets
    how = o.get("epsilon", 0.0), _scale(o), groups_of(o["sizes"], o)
    y = definitions.sparse_lut(*given, o["sizes"]["outputs"], *how)
    return {"y": value_of(y)}, lambda ct: values_of(of_weights(definitions.sparse_lut_vjp(*given, ct, *how)))


def _of_lut_attention(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    where = _where(a, o, ("segments", "segments"), a["x"].shape[-2])
    x, rest = a["x"], (a["anchors"], a.get("positions"))
    options: Any = {"epsilon": o.get("epsilon", 0.0), "accumulate": _scale(o)}
    return _of_rows(
        a,
        o,
        lambda table: definitions.lut_attention(x, table, *rest, where, **options),
        lambda table, ct: definitions.lut_attention_vjp(x, table, *rest, ct, where, **options),
    )


def _of_lut_pair_attention(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    x, keys = a["x"], a.get("keys", a["x"])
    where = _where(a, o, ("segments", "key_segments"), keys.shape[-2])
    rest = a["anchors"], a.get("positions")
    options: Any = {
        "epsilon": o.get("epsilon", 0.0),
        "accumulate": _scale(o),
        "interleave": o.get("interleave", False),
    }

    def pulled(table: np.ndarray, ct: np.ndarray) -> Any:
        cotangents = definitions.lut_pair_attention_vjp(x, keys, table, *rest, ct, where, **options)
        if "keys" not in a:
            cotangents["x"] = definitions.added(cotangents["x"], cotangents["keys"])
        return cotangents

    return _of_rows(
        a, o, lambda table: definitions.lut_pair_attention(x, keys, table, *rest, where, **options), pulled
    )


def _of_gates(name: str, parameter: str) -> Callable[..., tuple[Arrays, Pullback]]:
    forward, backward = getattr(definitions, name), getattr(definitions, f"{name}_vjp")

    def define(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
        x = np.moveaxis(a["x"], o.get("feature_axis", -1), -1)
        options = given(o, "hard")
        if _scale(o) is not None:
            options["accumulate"] = _scale(o)

        def placed(y: np.ndarray) -> np.ndarray:
            return np.moveaxis(y, -1, o.get("feature_axis", -1))

        def pull(ct: np.ndarray) -> Arrays:
            of = values_of(
                backward(
                    x, a[parameter], a["wires"], np.moveaxis(ct, o.get("feature_axis", -1), -1), **options
                )
            )
            return {**of, "x": placed(of["x"])}

        return {"y": placed(value_of(forward(x, a[parameter], a["wires"], **options)))}, pull

    return define


def _of_network(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    axis = o.get("feature_axis", -1)
    given_arrays = np.moveaxis(a["x"], axis, -1), a["coefficients"], a["wires"], _sizes(o)

    def pull(ct: np.ndarray) -> Arrays:
        of = values_of(definitions.gate_network_vjp(*given_arrays, np.moveaxis(ct, axis, -1)))
        return {**of, "x": np.moveaxis(of["x"], -1, axis)}

    return {"y": np.moveaxis(value_of(definitions.gate_network(*given_arrays)), -1, axis)}, pull


def _of_trees(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    given = a["x"], a["coefficients"], a["leaves"], _places(o)
    return {"y": value_of(definitions.logic_trees(*given))}, lambda ct: values_of(
        definitions.logic_trees_vjp(*given, ct)
    )


def _of_places(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    options = {**_windows(o["sizes"], o), "accumulate": _scale(o)}
    given, n_outputs = (
        (a["images"], a["weights"], a["anchors"], a.get("targets")),
        options.pop("n_outputs", None),
    )
    return {"y": value_of(definitions.lut_at_places(*given, n_outputs, **options))}, lambda ct: values_of(
        definitions.lut_at_places_vjp(*given, ct, **options)
    )


def _of_coefficients(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    first, hard = o.get("axis") == 0, o.get("hard", False)
    logits = a["logits"].T if first else a["logits"]

    def pull(ct: np.ndarray) -> Arrays:
        of = value_of(definitions.gate_coefficients_vjp(logits, definitions.exactly(ct), hard))
        return {"logits": of.T if first else of}

    return {"y": value_of(definitions.gate_coefficients(logits, hard))}, pull


def _n_samples(o: Mapping[str, Any]) -> int:
    most = 32 * o["sizes"]["batch"]
    return most if o.get("n_samples", "all") == "all" else max(most - 5, 0)


def _no_gradient(ct: np.ndarray) -> Arrays:
    return {}


# ------------------------------------------------------------------------------------- the table
OPS: dict[str, Op] = {
    "detect": Op(
        _detect_arrays,
        lambda m, a, o: _parts(m.detect(a["x"], a["anchors"], **given(o, "epsilon", "accumulate"))),
        ("x",),
        {**_EPSILON, **_ACCUMULATE},
        output="margin",
        batch=lambda o: _X_LENGTH,
        define=_of_detect,
    ),
    "detect_signs": Op(
        lambda s, z, o: {"positions": s.grid(z["batch"], z["bits"])},
        lambda m, a, o: _parts(m.detect_signs(a["positions"], **given(o, "epsilon"))),
        ("positions",),
        _EPSILON,
        output="margin",
        batch=lambda o: {"positions": 0},
        define=_of_detect_signs,
    ),
    "lookup": Op(
        _lookup_arrays,
        lambda m, a, o: {
            "y": m.lookup(
                a["weights"],
                _detection(a, "detection", o["sizes"]["bits"]),
                **given(o, "accumulate"),
                **_in_groups(o),
            )
        },
        ("weights", "detection.margin"),
        {**_ACCUMULATE, **_GROUPS},
        batch=lambda o: {f"detection.{n}": 0 for n in ("index", "flip", "margin")},
        factored=True,
        define=_of_lookup,
    ),
    "weighted_lookup": Op(
        _weighted_arrays,
        lambda m, a, o: {
            "y": m.weighted_lookup(
                a["weights"],
                a["index"],
                a["coefficients"],
                **given(o, "accumulate"),
                **_valued(o),
                **_in_groups(o),
            )
        },
        ("weights", "coefficients"),
        {**_ACCUMULATE, **_GROUPS, "ways": (2, 0, 1, 3), "valued": (None, 0, 1)},
        batch=lambda o: {"index": 0, "coefficients": 0},
        factored=True,
        define=_of_weighted_lookup,
    ),
    "scored_lut": Op(
        _scored_arrays,
        _call_scored,
        ("x", "weights", "keep", *SCALARS),
        {
            "read": tuple(READS),
            **_SHARED,
            "sum_groups": (False, True),
            "keep": (False, True),
            "single": (False, True),
            **_ACCUMULATE,
        },
        batch=lambda o: {"x": 0, "keep": 0},
        values=(*FINITE, "wild"),
        factored=True,
        constant=lambda o: o.get("read") == "integers",
        define=_of_scored_lut,
    ),
    "conv_lut": Op(
        _conv_arrays,
        _call_conv,
        ("images", "weights", "keep", *SCALARS),
        {
            "read": (None, *READS),
            **_GROUPS,
            "keep": (False, True),
            "strides": (False, True),
            **_EPSILON,
            **_ACCUMULATE,
        },
        batch=lambda o: {"images": 0, "keep": 0},
        values=(*FINITE, "wild"),
        factored=True,
        constant=lambda o: o.get("read") == "integers",
        define=_of_conv_lut,
    ),
    "margins": Op(
        _margins_arrays,
        lambda m, a, o: {"y": m.margins(a["x"], a["anchors"], **given(o, "accumulate"), **_in_groups(o))},
        ("x",),
        {**_ACCUMULATE, **_SHARED, "single": (False, True)},
        batch=lambda o: _X_LENGTH,
        define=_of_margins,
    ),
    "sparse_lookup": Op(
        lambda s, z, o: {**_lookup_arrays(s, z, o), **_slots(s, z, o)},
        lambda m, a, o: {
            "y": m.sparse_lookup(
                a["weights"],
                _detection(a, "detection", o["sizes"]["bits"]),
                *_targets(a, o),
                **given(o, "accumulate"),
                **_in_groups(o),
            )
        },
        ("weights", "detection.margin"),
        {"lists": (*_LISTS, *_EDGES), **_ACCUMULATE, **_GROUPS},
        batch=lambda o: {f"detection.{n}": 0 for n in ("index", "flip", "margin")},
        factored=True,
        define=_of_sparse_lookup,
    ),
    "lookup_attention": Op(
        _attention_arrays,
        _call_attention,
        ("weights", "query.margin", "key.margin", "position.margin"),
        {**_PAIRS, **_STARTS, **_ACCUMULATE},
        batch=lambda o: {
            **{f"{d}.{n}": 0 for d in ("query", "key") for n in ("index", "flip", "margin")},
            **{f"{d}_segments": 0 for d in ("query", "key")},
            **_start_axis(o),
        },
        factored=True,
        define=_of_lookup_attention,
    ),
    "lut": Op(
        lambda s, z, o: {**_detect_arrays(s, z, o), "weights": _lookup_arrays(s, z, o)["weights"]},
        lambda m, a, o: {
            "y": m.lut(
                a["x"], a["weights"], a["anchors"], **given(o, "epsilon", "accumulate"), **_in_groups(o)
            )
        },
        ("x", "weights"),
        {**_EPSILON, **_ACCUMULATE, **_SHARED},
        batch=lambda o: _X_LENGTH,
        recurrent=True,
        factored=True,
        define=_of_lut,
    ),
    "sparse_lut": Op(
        lambda s, z, o: {**_detect_arrays(s, z, o), **_slots(s, z, o)},
        lambda m, a, o: {
            "y": m.sparse_lut(
                a["x"],
                a["weights"],
                a["anchors"],
                *_targets(a, o),
                **given(o, "epsilon", "accumulate"),
                **_in_groups(o),
            )
        },
        ("x", "weights"),
        {"lists": (*_LISTS, *_EDGES), **_EPSILON, **_ACCUMULATE, **_SHARED},
        batch=lambda o: _X_LENGTH,
        recurrent=True,
        factored=True,
        define=_of_sparse_lut,
    ),
    "lut_attention": Op(
        _lut_attention_arrays,
        lambda m, a, o: {
            "y": m.lut_attention(
                a["x"],
                a["weights"],
                a["anchors"],
                a.get("positions"),
                segments=a.get("segments"),
                block_mask=a.get("block_mask"),
                **given(o, "epsilon", "accumulate"),
                **_sight(o),
                **_edges(a, o),
            )
        },
        ("x", "weights", "positions"),
        {**_PAIRS, **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"x": 0, "segments": 0},
        recurrent=True,
        factored=True,
        define=_of_lut_attention,
    ),
    "lut_pair_attention": Op(
        _pair_attention_arrays,
        _call_pair_attention,
        ("x", "weights", "positions", "keys"),
        {**_PAIRS, **_STARTS, "interleave": (False, True), **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"x": 0, "segments": 0, "keys": 0, "key_segments": 0, **_start_axis(o)},
        recurrent=True,
        factored=True,
        define=_of_lut_pair_attention,
    ),
    "bilinear_gates": _gates("bilinear_gates", "coefficients"),
    "gate_network": Op(
        _network_arrays,
        _call_network,
        ("x", "coefficients"),
        {"feature_axis": (-1, 0), "readers": (False, True), "layers": (2, 3)},
        batch=lambda o: {"x": 1 if o.get("feature_axis") == 0 else 0},
        values=(*FINITE, "wild", "nan"),  # as those of gates
        define=_of_network,
    ),
    "logic_gates": _gates("logic_gates", "logits"),
    "logic_trees": Op(
        _tree_arrays,
        _call_trees,
        ("x", "coefficients"),
        {"readers": (False, True), "places": ("padding", "strides", "pool padding"), "leaves": (4, 2, 8)},
        batch=lambda o: {"x": 1},
        values=("grid", "ties", "wild"),
        define=_of_trees,
    ),
    "lut_at_places": Op(
        _places_arrays,
        _call_places,
        ("images", "weights"),
        {"targets": (False, True), **_SHARED, "strides": (False, True), **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"images": 0},
        define=_of_places,
    ),
    "cell_total_variation": Op(
        lambda s, z, o: {"weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"])},
        lambda m, a, o: {"y": m.cell_total_variation(a["weights"])},
        ("weights",),
        batch=lambda o: {},
        values=FINITE,
        dtype=lambda a, o: definitions.accumulator(a["weights"].dtype),
        define=lambda a, o: (
            {"y": value_of(definitions.cell_total_variation(a["weights"]))},
            lambda ct: {"weights": value_of(definitions.cell_total_variation_vjp(a["weights"], ct))},
        ),
    ),
    "gate_coefficients": Op(
        lambda s, z, o: {
            "logits": s.grid(*((16, z["outputs"]) if o.get("axis") == 0 else (z["outputs"], 16)))
        },
        lambda m, a, o: {"y": m.gate_coefficients(a["logits"], **given(o, "hard", "axis"))},
        ("logits",),
        {"hard": (False, True), "axis": (-1, 0)},
        values=FINITE,
        dtype=lambda a, o: definitions.accumulator(a["logits"].dtype),
        define=_of_coefficients,
    ),
    "quantize_tables": Op(
        lambda s, z, o: {"weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"])},
        lambda m, a, o: vars(m.quantize_tables(a["weights"], **_in_groups(o))),
        (),
        _GROUPS,
        output="values",
        values=FINITE,
        reference=False,
        define=lambda a, o: (
            dict(
                zip(
                    ("values", "exponents"),
                    definitions.quantized(a["weights"], groups_of(o["sizes"], o) or 1),
                    strict=True,
                )
            ),
            _no_gradient,
        ),
    ),
    "packed_lut": Op(
        lambda s, z, o: {
            "words": s.words(z["inputs"], z["batch"]),
            "truth": s.numbers(0, 2, z["outputs"], 2 ** z["wires"]).astype(bool),
            "wires": s.ids(0, z["inputs"], z["outputs"], z["wires"]),
        },
        lambda m, a, o: {"y": m.packed_lut(a["words"], a["truth"], a["wires"])},
        (),
        batch=lambda o: {"words": 1},
        values=("grid", "wild"),
        reference=False,
        define=lambda a, o: ({"y": definitions.packed_lut(a["words"], a["truth"], a["wires"])}, _no_gradient),
    ),
    "pack_bits": Op(
        lambda s, z, o: {"bits": s.numbers(0, 2, z["inputs"], 11 * z["batch"])},
        lambda m, a, o: {"y": m.pack_bits(a["bits"])},
        (),
        values=("grid",),
        reference=False,
        define=lambda a, o: ({"y": definitions.pack_bits(a["bits"])}, _no_gradient),
    ),
    "unpack_bits": Op(
        lambda s, z, o: {"words": s.words(z["inputs"], z["batch"])},
        lambda m, a, o: {"y": m.unpack_bits(a["words"], _n_samples(o))},
        (),
        {"n_samples": ("all", "some")},
        values=("grid",),
        reference=False,
        define=lambda a, o: ({"y": definitions.unpack_bits(a["words"], _n_samples(o))}, _no_gradient),
    ),
    "soft_lut": _gates("soft_lut", "table"),
    "binary_lut": _gates("binary_lut", "table"),
    "scale_gradient": Op(
        lambda s, z, o: {"x": s.grid(z["batch"], z["inputs"]), "factor": s.grid()},
        lambda m, a, o: {"y": m.scale_gradient(a["x"], a["factor"])},
        ("x",),
        batch=lambda o: _X_LENGTH,
        define=lambda a, o: (
            {"y": a["x"]},
            lambda ct: {"x": definitions.scale_gradient_vjp(ct, a["factor"]).value},
        ),
    ),
}

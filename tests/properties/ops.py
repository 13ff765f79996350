"""The ops as members, each with its definition on one element."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import lutjax
from lutjax.ops.logic_trees import Places, logic_trees
from lutjax.ops.lut_at_places import Windows, lut_at_places
from properties import definitions
from properties.members import FINE, Arrays, Op, Pullback, Source, given


def _detection(a: Arrays, name: str, bits: int) -> lutjax.Detection:
    return lutjax.Detection(a[f"{name}.index"], a[f"{name}.flip"], a[f"{name}.margin"], bits)


def _parts(d: lutjax.Detection) -> Arrays:
    return {"index": d.index, "flip": d.flip, "margin": d.margin}


# ------------------------------------------------------------------------------------- arguments and calls
def _detect_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    return {
        "x": s.grid(z["batch"], z["inputs"], steps=40),
        "anchors": s.anchors(z["inputs"], z["detectors"], z["bits"]),
    }


def _lookup_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    return {
        "weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"]),
        **s.detection("detection", z["bits"], z["batch"], z["detectors"]),
    }


def _slots(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    tables, rows = z["detectors"], 2 ** z["bits"]
    lists = {"all": (1, 1), "table": (tables, 1), "row": (tables, rows)}[o.get("lists", "row")]
    return {
        "weights": s.grid(tables, rows, z["slots"]),
        "targets": s.ids(-1, z["outputs"], *lists, z["slots"]),
    }


def _starts(o: Mapping[str, Any]) -> Arrays:
    return {"query_start": np.int32(2), "key_start": np.int32(1)} if o.get("starts") == "traced" else {}


def _known_starts(o: Mapping[str, Any], a: Arrays) -> Arrays:
    starts: Arrays = {"query_start": 2, "key_start": 1} if o.get("starts") == "known" else {}
    return {**starts, **{n: a[n] for n in ("query_start", "key_start") if n in a}}


def _n_keys(z: Mapping[str, int], o: Mapping[str, Any]) -> int:
    return z["length"] + {"same": 0, "more": 1, "fewer": -2}[o.get("keys", "same")]


def _attention_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    B, L, T, C = z["batch"], z["length"], z["detectors"], z["pairs"]
    N = z["position_bits"] if o.get("positions", True) else 0
    keys = _n_keys(z, o)
    arrays = {
        "weights": s.grid(T, 2 ** (2 * C + N), z["outputs"]),
        **s.detection("query", C, B, L, T),
        **s.detection("key", C, B, keys, T),
        **(s.detection("position", N, L + 1, T) if N else {}),
        **_starts(o),
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
            **given(o, "window", "accumulate"),
            **_known_starts(o, a),
            **{n: a[n] for n in ("query_segments", "key_segments") if n in a},
        )
    }


def _lut_attention_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    B, L, T, C, n_inputs = z["batch"], z["length"], z["detectors"], z["pairs"], z["inputs"]
    N = z["position_bits"] if o.get("positions", True) else 0
    return {
        "x": s.grid(B, L, n_inputs, steps=40),
        "weights": s.grid(T, 2 ** (2 * C + N), z["outputs"]),
        "anchors": s.anchors(n_inputs, T, C),
        **({"positions": s.grid(L - 1, 1, N)} if N else {}),
        **({"segments": s.ids(0, 2, B, L)} if o.get("segments") else {}),
    }


def _pair_attention_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    B, L, T, C, n_inputs = z["batch"], z["length"], z["detectors"], z["bits"], z["inputs"]
    N = n_inputs if o.get("interleave") else z["position_bits"] if o.get("positions", True) else 0
    keys = _n_keys(z, o)
    arrays = {
        "x": s.grid(B, L, n_inputs),
        "weights": s.grid(T, 2**C, z["outputs"]),
        "anchors": s.anchors(2 * n_inputs + N, T, C),
        **({"positions": s.grid(L + 1, T, N)} if N else {}),
        **({"keys": s.grid(B, keys, n_inputs)} if "keys" in o else {}),
        **_starts(o),
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
            **given(o, "window", "accumulate", "epsilon", "interleave"),
            **_known_starts(o, a),
            **{n: a[n] for n in ("segments", "keys", "key_segments") if n in a},
        )
    }


def _gates(name: str, parameter: str) -> Op:
    def arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
        G, n = z["outputs"], z["wires"] if parameter == "table" else 2
        shape = {"coefficients": (4, G), "logits": (G, 16), "table": (G, 2**n)}[parameter]
        x, wires = s.grid(z["batch"], z["inputs"]), s.ids(0, z["inputs"], G, n)
        readers = definitions.readers(wires, z["inputs"], wires.size).astype(np.int32)
        return {
            "x": np.ascontiguousarray(x.T) if o.get("feature_axis") == 0 else x,
            parameter: s.grid(*shape),
            "wires": wires,
            **({"readers": readers} if o.get("readers") else {}),
        }

    def call(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
        op = getattr(module, name)
        options = given(o, "feature_axis", "hard")
        return {"y": op(a["x"], a[parameter], a["wires"], readers=a.get("readers"), **options)}

    options: dict[str, tuple[Any, ...]] = {"feature_axis": (-1, 0), "readers": (False, True)}
    if parameter == "logits":
        options["hard"] = (False, True)
    return Op(
        arrays,
        call,
        ("x", parameter),
        options,
        batch=lambda o: {"x": 1 if o.get("feature_axis") == 0 else 0},
        recurrent=True,
        define=_of_gates(name, parameter),
    )


_PLACES = Places((3, 2), (2, 2), (1, 1), (1, 0), (2, 1))


def _tree_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    leaves = s.ids(0, 4 * z["slots"], z["outputs"], 4)
    readers = definitions.readers(leaves % z["slots"], z["slots"], leaves.size).astype(np.int32)
    return {
        "x": s.grid(6 * z["slots"], z["batch"], steps=4),
        "coefficients": s.grid(4, z["outputs"], 3, steps=4),
        "leaves": leaves,
        **({"readers": readers} if o.get("readers") else {}),
    }


def _call_trees(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    op = logic_trees if module is lutjax else module.logic_trees  # that one is for layers
    return {"y": op(a["x"], a["coefficients"], a["leaves"], places=_PLACES, readers=a.get("readers"))}


def _windows(z: Mapping[str, int], o: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the op; with targets each table is a group."""
    windows = Windows((2, 3, z["slots"]), (2, 2), (1, 1), (0, 1), z["slots"])
    options: dict[str, Any] = {"windows": windows, **given(o, "epsilon")}
    if o.get("targets"):
        options |= {"groups": z["detectors"], "n_outputs": z["outputs"]}
    return options


def _places_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    n_detectors, n_outputs = z["detectors"], z["outputs"]
    targets = {"targets": s.ids(-1, n_outputs, n_detectors, n_outputs)} if o.get("targets") else {}
    return {
        "images": s.grid(z["batch"], 2, 3, z["slots"], steps=40),
        "weights": s.grid(n_detectors, 2 ** z["bits"], n_outputs),
        "anchors": s.anchors(4 * z["slots"], n_detectors, z["bits"]),
        **targets,
    }


def _call_places(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    op = lut_at_places if module is lutjax else module.lut_at_places  # that one is for layers
    return {"y": op(a["images"], a["weights"], a["anchors"], a.get("targets"), **_windows(o["sizes"], o))}


_ACCUMULATE = {"accumulate": (None, FINE)}
_EPSILON = {"epsilon": (0.0, 0.5)}
_PAIRS = {
    "window": (None, 1, 2),
    "segments": (False, True),
    "positions": (True, False),
}
_STARTS = {"starts": ("none", "known", "traced"), "keys": ("same", "more", "fewer")}
_X_LENGTH = {"x": 0}
_GROUPS = {"groups": (False, True)}


def _in_groups(o: Mapping[str, Any]) -> dict[str, int]:
    """A group for each detector."""
    return {"groups": o["sizes"]["detectors"]} if o.get("groups") else {}


def _weighted_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    reads = z["batch"], z["detectors"], 2
    return {
        "weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"]),
        "index": s.ids(0, 2 ** z["bits"], *reads),
        "coefficients": s.grid(*reads, steps=4),
    }


def _margins_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    return {
        "x": s.grid(z["batch"], *((z["detectors"],) if o.get("groups") else ()), z["inputs"], steps=8),
        "anchors": s.anchors(z["inputs"], z["detectors"], z["bits"]),
    }


def _scored_arrays(s: Source, z: Mapping[str, int], o: Mapping[str, Any]) -> Arrays:
    return {
        **_margins_arrays(s, z, o),
        "weights": s.grid(z["detectors"], 2 ** z["bits"], z["outputs"]),
        "log_beta": np.asarray(0.5, s.dtype),
        "log_gamma": np.asarray(0.25, s.dtype),
        **({"log_tau": np.asarray(-0.5, s.dtype)} if o.get("ways") == 2 else {}),
    }


def _call_scored(module: Any, a: Arrays, o: Mapping[str, Any]) -> Arrays:
    read = lutjax.reads.Confidence(ways=o.get("ways", 1))
    scalars = {name: a[name] for name in read.initial()}
    arguments = (a["x"], a["weights"], a["anchors"], scalars)
    return {"y": module.scored_lut(*arguments, read=read, **_in_groups(o))}


# ------------------------------------------------------------------------------------- definitions
def _values(sums: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Arrays:
    return {(names or {}).get(n, n): s.value for n, s in sums.items()}


def _scale(o: Mapping[str, Any]) -> float | None:
    return None if o.get("accumulate") is None else o["accumulate"].scale


def _detected(a: Arrays, name: str, bits: int) -> definitions.Detection:
    return definitions.Detection(
        *(a[f"{name}.{part}"].astype(np.int64) for part in ("index", "flip")), a[f"{name}.margin"], bits
    )


def _where(a: Arrays, o: Mapping[str, Any], segments: tuple[str, str]) -> definitions.Where:
    starts = {n: int(v) for n, v in _known_starts(o, a).items()}
    of_queries, of_keys = (a.get(n) for n in segments)
    return definitions.Where(
        o.get("window"),
        starts.get("query_start", 0),
        starts.get("key_start", 0),
        of_queries,
        of_queries if of_keys is None else of_keys,
    )


def _of_detect(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    d = definitions.detect(a["x"], a["anchors"], o.get("epsilon", 0.0))
    outputs = {"index": d.index, "flip": d.flip, "margin": d.margin}
    return outputs, lambda ct: {
        "x": definitions.detect_vjp(a["x"], a["anchors"], definitions.exactly(ct), _scale(o)).value
    }


def _of_detect_signs(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    d = definitions.detect_signs(a["positions"], o.get("epsilon", 0.0))
    outputs = {"index": d.index, "flip": d.flip, "margin": d.margin}
    return outputs, lambda ct: {
        "positions": definitions.detect_signs_vjp(a["positions"], definitions.exactly(ct)).value
    }


def _of_lookup(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    w, d = a["weights"], _detected(a, "detection", o["sizes"]["bits"])
    names = {"margin": "detection.margin"}
    if not o.get("groups"):
        return {"y": definitions.lookup(w, d, _scale(o)).value}, lambda ct: _values(
            definitions.lookup_vjp(w, d, ct, _scale(o)), names
        )

    def of_detector(t: int) -> Any:
        at = np.s_[..., t : t + 1]
        return w[t : t + 1], definitions.Detection(d.index[at], d.flip[at], d.margin[at], d.bits)

    def pull(ct: np.ndarray) -> Arrays:
        each = [definitions.lookup_vjp(*of_detector(t), ct[..., t, :], _scale(o)) for t in range(len(w))]
        return {
            "weights": np.concatenate([e["weights"].value for e in each]),
            "detection.margin": np.concatenate([e["margin"].value for e in each], -1),
        }

    y = [definitions.lookup(*of_detector(t), _scale(o)).value for t in range(len(w))]
    return {"y": np.stack(y, -2)}, pull


def _of_weighted_lookup(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    given, groups = (a["weights"], a["index"], a["coefficients"]), _in_groups(o).get("groups")
    y = definitions.weighted_lookup(*given, groups or 1, _scale(o)).value

    def pull(ct: np.ndarray) -> Arrays:
        ct = ct if groups else ct[..., None, :]
        return _values(definitions.weighted_lookup_vjp(*given, ct, groups or 1, _scale(o)))

    return {"y": y if groups else y[..., 0, :]}, pull


def _of_margins(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    groups = _in_groups(o).get("groups")
    x = a["x"] if groups else a["x"][..., None, :]

    def pull(ct: np.ndarray) -> Arrays:
        of_u = definitions.exactly(ct)
        dx = definitions.margins_vjp(x, a["anchors"], of_u, groups or 1, _scale(o)).value
        return {"x": dx if groups else dx[..., 0, :]}

    return {"y": definitions.margins(x, a["anchors"], groups or 1)}, pull


def _of_scored_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    """Confidence in one way or two."""
    groups = _in_groups(o).get("groups")
    x, n = a["x"] if groups else a["x"][..., None, :], groups or 1
    scalars = {
        name: np.exp(np.float64(a[f"log_{name}"]))
        for name in ("beta", "gamma", "tau")[: o.get("ways", 1) + 1]
    }
    u = definitions.margins(x, a["anchors"], n)
    ways = definitions.ways_of("confidence", u, scalars, o.get("ways", 1))
    y = definitions.scored_lut(ways, a["weights"], "confidence", n).value

    def pull(ct: np.ndarray) -> Arrays:
        ct = ct if groups else ct[..., None, :]
        found = definitions.scored_lut_vjp(x, ways, a["weights"], a["anchors"], ct, "confidence", n)
        of = _values(found, {name: f"log_{name}" for name in scalars})
        return of if groups else {**of, "x": of["x"][..., 0, :]}

    return {"y": y if groups else y[..., 0, :]}, pull


def _of_sparse_lookup(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    z = o["sizes"]
    given = a["weights"], _detected(a, "detection", z["bits"]), a["targets"]
    names = {"margin": "detection.margin"}
    return {"y": definitions.sparse_lookup(*given, z["outputs"], _scale(o)).value}, lambda ct: _values(
        definitions.sparse_lookup_vjp(*given, ct, _scale(o)), names
    )


def _of_lookup_attention(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    z, where = o["sizes"], _where(a, o, ("query_segments", "key_segments"))
    given = (
        a["weights"],
        _detected(a, "query", z["pairs"]),
        _detected(a, "key", z["pairs"]),
        _detected(a, "position", z["position_bits"]) if "position.index" in a else None,
    )
    names = {n: f"{n}.margin" for n in ("query", "key", "position")}
    return {"y": definitions.lookup_attention(*given, where, _scale(o)).value}, lambda ct: _values(
        definitions.lookup_attention_vjp(*given, ct, where, _scale(o)), names
    )


def _of_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    d = definitions.detect(a["x"], a["anchors"], o.get("epsilon", 0.0))
    return {"y": definitions.lookup(a["weights"], d, _scale(o)).value}, lambda ct: _values(
        definitions.lut_vjp(a["x"], a["weights"], a["anchors"], ct, o.get("epsilon", 0.0), _scale(o))
    )


def _of_sparse_lut(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    d, n_outputs = definitions.detect(a["x"], a["anchors"], o.get("epsilon", 0.0)), o["sizes"]["outputs"]
    y = definitions.sparse_lookup(a["weights"], d, a["targets"], n_outputs, _scale(o))
    given = a["x"], a["weights"], a["anchors"], a["targets"]
    return {"y": y.value}, lambda ct: _values(
        definitions.sparse_lut_vjp(*given, ct, o.get("epsilon", 0.0), _scale(o))
    )


def _of_lut_attention(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    where = _where(a, o, ("segments", "segments"))
    given = a["x"], a["weights"], a["anchors"], a.get("positions")
    options: Any = {"epsilon": o.get("epsilon", 0.0), "accumulate": _scale(o)}
    return {"y": definitions.lut_attention(*given, where, **options).value}, lambda ct: _values(
        definitions.lut_attention_vjp(*given, ct, where, **options)
    )


def _of_lut_pair_attention(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    where = _where(a, o, ("segments", "key_segments"))
    given = a["x"], a.get("keys", a["x"]), a["weights"], a["anchors"], a.get("positions")
    options: Any = {
        "epsilon": o.get("epsilon", 0.0),
        "accumulate": _scale(o),
        "interleave": o.get("interleave", False),
    }

    def pull(ct: np.ndarray) -> Arrays:
        cotangents = _values(definitions.lut_pair_attention_vjp(*given, ct, where, **options))
        if "keys" not in a:
            cotangents["x"] = cotangents["x"] + cotangents["keys"]
        return cotangents

    return {"y": definitions.lut_pair_attention(*given, where, **options).value}, pull


def _of_gates(name: str, parameter: str) -> Callable[..., tuple[Arrays, Pullback]]:
    forward, backward = getattr(definitions, name), getattr(definitions, f"{name}_vjp")

    def define(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
        x = np.moveaxis(a["x"], o.get("feature_axis", -1), -1)
        options = given(o, "hard")

        def placed(y: np.ndarray) -> np.ndarray:
            return np.moveaxis(y, -1, o.get("feature_axis", -1))

        def pull(ct: np.ndarray) -> Arrays:
            of = _values(
                backward(
                    x, a[parameter], a["wires"], np.moveaxis(ct, o.get("feature_axis", -1), -1), **options
                )
            )
            return {**of, "x": placed(of["x"])}

        return {"y": placed(forward(x, a[parameter], a["wires"], **options).value)}, pull

    return define


def _of_trees(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    given = a["x"], a["coefficients"], a["leaves"], _PLACES
    return {"y": definitions.logic_trees(*given).value}, lambda ct: _values(
        definitions.logic_trees_vjp(*given, ct)
    )


def _of_places(a: Arrays, o: Mapping[str, Any]) -> tuple[Arrays, Pullback]:
    options = _windows(o["sizes"], o)
    given, n_outputs = (
        (a["images"], a["weights"], a["anchors"], a.get("targets")),
        options.pop("n_outputs", None),
    )
    return {"y": definitions.lut_at_places(*given, n_outputs, **options).value}, lambda ct: _values(
        definitions.lut_at_places_vjp(*given, ct, **options)
    )


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
        define=_of_lookup,
    ),
    "weighted_lookup": Op(
        _weighted_arrays,
        lambda m, a, o: {
            "y": m.weighted_lookup(
                a["weights"], a["index"], a["coefficients"], **given(o, "accumulate"), **_in_groups(o)
            )
        },
        ("weights", "coefficients"),
        {**_ACCUMULATE, **_GROUPS},
        batch=lambda o: {"index": 0, "coefficients": 0},
        define=_of_weighted_lookup,
    ),
    "scored_lut": Op(
        _scored_arrays,
        _call_scored,
        ("x", "weights", "log_beta", "log_tau"),
        {**_GROUPS, "ways": (1, 2)},
        batch=lambda o: _X_LENGTH,
        define=_of_scored_lut,
    ),
    "margins": Op(
        _margins_arrays,
        lambda m, a, o: {"y": m.margins(a["x"], a["anchors"], **given(o, "accumulate"), **_in_groups(o))},
        ("x",),
        {**_ACCUMULATE, **_GROUPS},
        batch=lambda o: _X_LENGTH,
        define=_of_margins,
    ),
    "sparse_lookup": Op(
        lambda s, z, o: {**_lookup_arrays(s, z, o), **_slots(s, z, o)},
        lambda m, a, o: {
            "y": m.sparse_lookup(
                a["weights"],
                _detection(a, "detection", o["sizes"]["bits"]),
                a["targets"],
                o["sizes"]["outputs"],
                **given(o, "accumulate"),
            )
        },
        ("weights", "detection.margin"),
        {"lists": ("row", "table", "all"), **_ACCUMULATE},
        batch=lambda o: {f"detection.{n}": 0 for n in ("index", "flip", "margin")},
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
        },
        define=_of_lookup_attention,
    ),
    "lut": Op(
        lambda s, z, o: {**_detect_arrays(s, z, o), "weights": _lookup_arrays(s, z, o)["weights"]},
        lambda m, a, o: {"y": m.lut(a["x"], a["weights"], a["anchors"], **given(o, "epsilon", "accumulate"))},
        ("x", "weights"),
        {**_EPSILON, **_ACCUMULATE},
        batch=lambda o: _X_LENGTH,
        recurrent=True,
        define=_of_lut,
    ),
    "sparse_lut": Op(
        lambda s, z, o: {**_detect_arrays(s, z, o), **_slots(s, z, o)},
        lambda m, a, o: {
            "y": m.sparse_lut(
                a["x"],
                a["weights"],
                a["anchors"],
                a["targets"],
                o["sizes"]["outputs"],
                **given(o, "epsilon", "accumulate"),
            )
        },
        ("x", "weights"),
        {"lists": ("row", "table", "all"), **_EPSILON, **_ACCUMULATE},
        batch=lambda o: _X_LENGTH,
        recurrent=True,
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
                **given(o, "window", "epsilon", "accumulate"),
            )
        },
        ("x", "weights", "positions"),
        {**_PAIRS, **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"x": 0, "segments": 0},
        recurrent=True,
        define=_of_lut_attention,
    ),
    "lut_pair_attention": Op(
        _pair_attention_arrays,
        _call_pair_attention,
        ("x", "weights", "positions", "keys"),
        {**_PAIRS, **_STARTS, "interleave": (False, True), **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"x": 0, "segments": 0, "keys": 0, "key_segments": 0},
        recurrent=True,
        define=_of_lut_pair_attention,
    ),
    "bilinear_gates": _gates("bilinear_gates", "coefficients"),
    "logic_gates": _gates("logic_gates", "logits"),
    "logic_trees": Op(
        _tree_arrays,
        _call_trees,
        ("x", "coefficients"),
        {"readers": (False, True)},
        batch=lambda o: {"x": 1},
        define=_of_trees,
    ),
    "lut_at_places": Op(
        _places_arrays,
        _call_places,
        ("images", "weights"),
        {"targets": (False, True), **_EPSILON},
        batch=lambda o: {"images": 0},
        define=_of_places,
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

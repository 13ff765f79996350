"""Calls of the ops as data: they are drawn, printed, replayed, run under any stack of transformations, and compared
with what the definitions say of each element.

    PYTHONPATH=tests python -m properties.calls "Call('lut', wanted=('weights',))" "Call('lut', wanted=('x',))"

replays calls one after the other in a process of their own, and says which is the first that is wrong.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lutjax
from lutjax import FixedPoint, _compat
from lutjax.ops.logic_trees import Places, logic_trees
from lutjax.ops.lut_at_places import Windows, lut_at_places
from lutjax.testing import assert_close
from lutjax.training.tables import value_and_grad as value_and_factored_grad
from properties import definitions

Arrays = dict[str, Any]


# ------------------------------------------------------------------------------------- data
@dataclasses.dataclass(frozen=True)
class Map:
    """A transformation that adds an axis to some arguments: ``vmap``, ``scan`` or ``shard_map``.

    axes: where the axis is, by argument; the others are shared. Only ``vmap`` has other axes than 0.
    """

    how: str
    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        return 2 if self.how == "shard_map" else 3

    def __repr__(self) -> str:
        return f"Map({self.how!r}, {dict(self.axes)!r})"


Layer = str | Map  # "jit", "remat", "cond" or a map


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Call:
    """A call of an op, and of its gradient.

    Attributes:
      op, size, dtype, options, seed: which op on which arguments.
      wanted: the arguments that are differentiated; none: only the op is called.
      inner: layers around the op, within the gradient, the outermost first.
      outer: layers around the gradient.
      contexts: managers around all of it, names of `CONTEXTS`.
      steps: more than 1: a scan of so many steps ``x = x + op(x, ...)`` takes the place of the op.
      how: ``"vjp"``, or ``"grad"`` of a scalar.
      reference: whether it is the function of `lutjax.reference`.
    """

    op: str
    _: dataclasses.KW_ONLY
    size: str = "a"
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    inner: tuple[Layer, ...] = ()
    outer: tuple[Layer, ...] = ()
    contexts: tuple[str, ...] = ()
    steps: int = 1
    how: str = "vjp"
    seed: int = 0
    reference: bool = False

    def __repr__(self) -> str:
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)[1:]
            if getattr(self, f.name) != (f.default_factory() if f.name == "options" else f.default)
        }
        return f"Call({', '.join([repr(self.op), *(f'{n}={v!r}' for n, v in changed.items())])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # as hypothesis prints it
        printer.text(repr(self))

    @property
    def function_key(self) -> str:
        """Key that calls share which are the same function of other numbers."""
        return repr(dataclasses.replace(self, seed=0))

    @property
    def maps(self) -> list[Map]:
        """The maps of all layers, the outermost first."""
        return [layer for layer in (*self.outer, *self.inner) if isinstance(layer, Map)]


@dataclasses.dataclass(frozen=True)
class Op:
    """Properties of an op that a call needs.

    Attributes:
      arrays: draws the arguments without mapped axes: from a `Source`, sizes and options.
      call: the op of a module (`lutjax`, `lutjax.reference`) on these; returns its outputs by name.
      differentiable: names of arguments with a gradient.
      output: the output that has one.
      options: for each option the values that are drawn; the first is the default.
      batch: the axis of each argument that a mesh can split.
      recurrent: the output can be the next `x`.
    """

    arrays: Callable[..., Arrays]
    call: Callable[[Any, Arrays, Mapping[str, Any]], Arrays]
    differentiable: tuple[str, ...]
    options: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    output: str = "y"
    batch: Callable[[Mapping[str, Any]], dict[str, int]] = lambda options: {}
    recurrent: bool = False


SIZES = {
    "a": {
        "batch": 2, "inputs": 3, "detectors": 2, "bits": 2, "pairs": 1, "position_bits": 1, "outputs": 3,
        "length": 3, "slots": 2, "wires": 2,
    },
    "b": {
        "batch": 2, "inputs": 4, "detectors": 3, "bits": 3, "pairs": 2, "position_bits": 2, "outputs": 4,
        "length": 4, "slots": 1, "wires": 3,
    },
}  # fmt: skip

FINE = FixedPoint(2.0**20)


class Source:
    """Random arrays on coarse grids: sums are exact, ties and zeros are common."""

    def __init__(self, dtype: str, *seed: Any):
        self.dtype = jnp.dtype(dtype)
        self._rng = np.random.default_rng([len(seed), *"/".join(map(str, seed)).encode()])

    def grid(self, *shape: int, steps: int = 8) -> np.ndarray:
        """Multiples of 1/4."""
        return np.asarray(np.asarray(self._rng.integers(-steps, steps + 1, shape) / 4), self.dtype)

    def ids(self, low: int, high: int, *shape: int) -> np.ndarray:
        return np.asarray(self._rng.integers(low, high, shape), np.int32)

    def anchors(self, inputs: int, *shape: int) -> np.ndarray:
        a = self.ids(0, inputs, *shape)
        return np.stack([a, (a + self.ids(1, inputs, *shape)) % inputs], -1).astype(np.int32)

    def detection(self, name: str, bits: int, *shape: int) -> Arrays:
        margin = self.grid(*shape).astype(np.float64 if self.dtype == np.float64 else np.float32)
        return {
            f"{name}.index": self.ids(0, 2**bits, *shape),
            f"{name}.flip": np.int32(1) << self.ids(0, bits, *shape),
            f"{name}.margin": margin,
        }


def _detection(a: Arrays, name: str, bits: int) -> lutjax.Detection:
    return lutjax.Detection(a[f"{name}.index"], a[f"{name}.flip"], a[f"{name}.margin"], bits)


def _parts(d: lutjax.Detection) -> Arrays:
    return {"index": d.index, "flip": d.flip, "margin": d.margin}


def _given(o: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The options of a call that the op takes as they are."""
    return {name: o[name] for name in names if name in o}


# ------------------------------------------------------------------------------------- the ops
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
            **_given(o, "window", "accumulate"),
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
            **_given(o, "window", "accumulate", "epsilon", "interleave"),
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
        options = _given(o, "feature_axis", "hard")
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
    options: dict[str, Any] = {"windows": windows, **_given(o, "epsilon")}
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


OPS: dict[str, Op] = {
    "detect": Op(
        _detect_arrays,
        lambda m, a, o: _parts(m.detect(a["x"], a["anchors"], **_given(o, "epsilon", "accumulate"))),
        ("x",),
        {**_EPSILON, **_ACCUMULATE},
        output="margin",
        batch=lambda o: _X_LENGTH,
    ),
    "detect_signs": Op(
        lambda s, z, o: {"positions": s.grid(z["batch"], z["bits"])},
        lambda m, a, o: _parts(m.detect_signs(a["positions"], **_given(o, "epsilon"))),
        ("positions",),
        _EPSILON,
        output="margin",
        batch=lambda o: {"positions": 0},
    ),
    "lookup": Op(
        _lookup_arrays,
        lambda m, a, o: {
            "y": m.lookup(
                a["weights"],
                _detection(a, "detection", o["sizes"]["bits"]),
                **_given(o, "accumulate"),
                **_in_groups(o),
            )
        },
        ("weights", "detection.margin"),
        {**_ACCUMULATE, **_GROUPS},
        batch=lambda o: {f"detection.{n}": 0 for n in ("index", "flip", "margin")},
    ),
    "weighted_lookup": Op(
        _weighted_arrays,
        lambda m, a, o: {
            "y": m.weighted_lookup(
                a["weights"], a["index"], a["coefficients"], **_given(o, "accumulate"), **_in_groups(o)
            )
        },
        ("weights", "coefficients"),
        {**_ACCUMULATE, **_GROUPS},
        batch=lambda o: {"index": 0, "coefficients": 0},
    ),
    "scored_lut": Op(
        _scored_arrays,
        _call_scored,
        ("x", "weights", "log_beta", "log_tau"),
        {**_GROUPS, "ways": (1, 2)},
        batch=lambda o: _X_LENGTH,
    ),
    "margins": Op(
        _margins_arrays,
        lambda m, a, o: {"y": m.margins(a["x"], a["anchors"], **_given(o, "accumulate"), **_in_groups(o))},
        ("x",),
        {**_ACCUMULATE, **_GROUPS},
        batch=lambda o: _X_LENGTH,
    ),
    "sparse_lookup": Op(
        lambda s, z, o: {**_lookup_arrays(s, z, o), **_slots(s, z, o)},
        lambda m, a, o: {
            "y": m.sparse_lookup(
                a["weights"],
                _detection(a, "detection", o["sizes"]["bits"]),
                a["targets"],
                o["sizes"]["outputs"],
                **_given(o, "accumulate"),
            )
        },
        ("weights", "detection.margin"),
        {"lists": ("row", "table", "all"), **_ACCUMULATE},
        batch=lambda o: {f"detection.{n}": 0 for n in ("index", "flip", "margin")},
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
    ),
    "lut": Op(
        lambda s, z, o: {**_detect_arrays(s, z, o), "weights": _lookup_arrays(s, z, o)["weights"]},
        lambda m, a, o: {
            "y": m.lut(a["x"], a["weights"], a["anchors"], **_given(o, "epsilon", "accumulate"))
        },
        ("x", "weights"),
        {**_EPSILON, **_ACCUMULATE},
        batch=lambda o: _X_LENGTH,
        recurrent=True,
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
                **_given(o, "epsilon", "accumulate"),
            )
        },
        ("x", "weights"),
        {"lists": ("row", "table", "all"), **_EPSILON, **_ACCUMULATE},
        batch=lambda o: _X_LENGTH,
        recurrent=True,
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
                **_given(o, "window", "epsilon", "accumulate"),
            )
        },
        ("x", "weights", "positions"),
        {**_PAIRS, **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"x": 0, "segments": 0},
        recurrent=True,
    ),
    "lut_pair_attention": Op(
        _pair_attention_arrays,
        _call_pair_attention,
        ("x", "weights", "positions", "keys"),
        {**_PAIRS, **_STARTS, "interleave": (False, True), **_EPSILON, **_ACCUMULATE},
        batch=lambda o: {"x": 0, "segments": 0, "keys": 0, "key_segments": 0},
        recurrent=True,
    ),
    "bilinear_gates": _gates("bilinear_gates", "coefficients"),
    "logic_gates": _gates("logic_gates", "logits"),
    "logic_trees": Op(
        _tree_arrays,
        _call_trees,
        ("x", "coefficients"),
        {"readers": (False, True)},
        batch=lambda o: {"x": 1},
    ),
    "lut_at_places": Op(
        _places_arrays,
        _call_places,
        ("images", "weights"),
        {"targets": (False, True), **_EPSILON},
        batch=lambda o: {"images": 0},
    ),
    "soft_lut": _gates("soft_lut", "table"),
    "binary_lut": _gates("binary_lut", "table"),
    "scale_gradient": Op(
        lambda s, z, o: {"x": s.grid(z["batch"], z["inputs"]), "factor": s.grid()},
        lambda m, a, o: {"y": m.scale_gradient(a["x"], a["factor"])},
        ("x",),
        batch=lambda o: _X_LENGTH,
    ),
}


# ------------------------------------------------------------------------------------- arguments
def _sizes_and_options(call: Call) -> dict[str, Any]:
    return {**call.options, "sizes": SIZES[call.size]}


def _stacked(draw: Callable[[int], np.ndarray], sizes: list[int]) -> np.ndarray:
    """An array for each index of some axes, which come first."""
    elements = [draw(i) for i in range(int(np.prod(sizes, dtype=int)))]
    return np.stack(elements).reshape((*sizes, *elements[0].shape))


def arguments(call: Call) -> Arrays:
    """The arguments of a call; in front of each the axes of the maps that map it, the outermost first."""
    op, z = OPS[call.op], SIZES[call.size]

    @functools.cache
    def element(i: int) -> Arrays:
        return op.arrays(Source(call.dtype, call.op, call.size, call.seed, i), z, call.options)

    return {
        name: _stacked(lambda i, name=name: element(i)[name], [m.size for m in call.maps if name in m.axes])
        for name in element(0)
    }


def cotangent(call: Call, y: np.ndarray, seed: int = 0) -> np.ndarray:
    """A cotangent of an output, with the axes of all maps in front."""
    return Source(y.dtype.name, "cotangent", call.op, call.seed, seed).grid(*y.shape)


def _element(call: Call, arrays: Arrays, at: tuple[int, ...]) -> Arrays:
    """The arguments of one element."""
    return {
        name: a[tuple(i for i, m in zip(at, call.maps, strict=True) if name in m.axes)]
        for name, a in arrays.items()
    }


def _moved(a: np.ndarray, axes: list[int], first: int = 0) -> np.ndarray:
    """An array whose mapped axes, from `first` on, are where the maps look for them."""
    for i, axis in reversed(list(enumerate(axes, first))):
        a = np.moveaxis(a, i, i + axis)
    return a


def _axes_of(name: str, call: Call) -> list[int]:
    return [m.axes[name] for m in call.maps if name in m.axes]


def _batch_axis(name: str, call: Call, ndim: int) -> int | None:
    """The axis of an argument that a mesh splits, when its mapped axes are where the maps look for them."""
    core = OPS[call.op].batch(call.options).get(name)
    if core is None:
        return None
    axes = _axes_of(name, call)
    # The shape tells where an axis of size 2 went among axes of size 1.
    shape = [2 if i == core + len(axes) else 1 for i in range(ndim)]
    return _moved(np.empty(shape), axes).shape.index(2)


# ------------------------------------------------------------------------------------- what is right
def expected(
    call: Call, arrays: Arrays, of_outputs: Callable[[Arrays], np.ndarray | None]
) -> tuple[Arrays, Arrays]:
    """Outputs and cotangents, from the definition of each element.

    of_outputs: the cotangent of all outputs, given them; with the axes of all maps in front.
    """
    sizes = [m.size for m in call.maps]
    indices = list(itertools.product(*map(range, sizes)))
    found = {at: define(call, _element(call, arrays, at)) for at in indices}
    outputs = {
        name: np.stack([found[at][0][name] for at in indices]).reshape(
            (*sizes, *found[indices[0]][0][name].shape)
        )
        for name in found[indices[0]][0]
    }
    if not call.wanted:
        return outputs, {}
    ct = of_outputs(outputs)
    of_elements = {at: found[at][1](ct[at]) for at in indices}
    n_outer = sum(isinstance(layer, Map) for layer in call.outer)
    cotangents = {}
    for name in call.wanted:
        # Where a map shares an argument, its cotangent is a sum if the map is within the gradient, or if the
        # devices of a mesh share it.
        kept = [name in m.axes or (i < n_outer and m.how != "shard_map") for i, m in enumerate(call.maps)]
        core = of_elements[indices[0]][name].shape
        all_of_them = np.stack([of_elements[at][name] for at in indices]).reshape((*sizes, *core))
        total = all_of_them.sum(axis=tuple(i for i, k in enumerate(kept) if not k))
        within = [m.axes[name] for m in call.maps[n_outer:] if name in m.axes]
        cotangents[name] = _moved(total, within, sum(kept[:n_outer]))
    return outputs, cotangents


Pullback = Callable[[np.ndarray], Arrays]


def define(call: Call, a: Arrays) -> tuple[Arrays, Pullback]:
    """Outputs of one element, and its cotangents given that of the output."""
    if call.steps == 1:
        return _definition(call, a)
    x, pullbacks = a["x"], []
    for _ in range(call.steps):
        outputs, pullback = _definition(call, {**a, "x": x})
        x = (x + outputs["y"]).astype(x.dtype)
        pullbacks.append(pullback)

    def pull(ct: np.ndarray) -> Arrays:
        total: Arrays = {}
        for pullback in reversed(pullbacks):
            cotangents = pullback(ct)
            ct = ct + cotangents.pop("x")
            total = {n: total.get(n, 0) + c for n, c in cotangents.items()}
        return {**total, "x": ct}

    return {"y": x}, pull


def _definition(call: Call, a: Arrays) -> tuple[Arrays, Pullback]:
    with np.errstate(all="ignore"):
        outputs, pullback = _DEFINITIONS[call.op](a, _sizes_and_options(call))
    if "y" in outputs:
        outputs["y"] = outputs["y"].astype((a["weights"] if "weights" in a else a["x"]).dtype)
    return outputs, pullback


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
        options = _given(o, "hard")

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


_DEFINITIONS: dict[str, Callable[[Arrays, Mapping[str, Any]], tuple[Arrays, Pullback]]] = {
    "detect": _of_detect,
    "detect_signs": _of_detect_signs,
    "lookup": _of_lookup,
    "weighted_lookup": _of_weighted_lookup,
    "scored_lut": _of_scored_lut,
    "margins": _of_margins,
    "sparse_lookup": _of_sparse_lookup,
    "lookup_attention": _of_lookup_attention,
    "lut": _of_lut,
    "sparse_lut": _of_sparse_lut,
    "lut_attention": _of_lut_attention,
    "lut_pair_attention": _of_lut_pair_attention,
    "bilinear_gates": _of_gates("bilinear_gates", "coefficients"),
    "logic_gates": _of_gates("logic_gates", "logits"),
    "logic_trees": _of_trees,
    "lut_at_places": _of_places,
    "soft_lut": _of_gates("soft_lut", "table"),
    "binary_lut": _of_gates("binary_lut", "table"),
    "scale_gradient": lambda a, o: (
        {"y": a["x"]},
        lambda ct: {"x": definitions.scale_gradient_vjp(ct, a["factor"]).value},
    ),
}


# ------------------------------------------------------------------------------------- what is run
CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "standard": lambda: jax.numpy_dtype_promotion("standard"),
    "auto mesh": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "explicit mesh": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "xla": lambda: lutjax.use_implementation("xla"),
}


def mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])


@contextlib.contextmanager
def within(call: Call) -> Iterator[None]:
    """The contexts of a call."""
    with contextlib.ExitStack() as stack:
        for name in call.contexts:
            stack.enter_context(CONTEXTS[name]())
        yield


def placed(call: Call, arrays: Arrays) -> Arrays:
    """The arguments as the call takes them: mapped axes in their places, split over a mesh if there is one."""
    arrays = {name: _moved(a, _axes_of(name, call)) for name, a in arrays.items()}
    if not any("mesh" in name for name in call.contexts):
        return {name: jax.device_put(a) for name, a in arrays.items()}
    of = mesh(AxisType.Explicit if "explicit mesh" in call.contexts else AxisType.Auto)

    def put(name: str, a: np.ndarray) -> jax.Array:
        axis = _batch_axis(name, call, a.ndim)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")
        return jax.device_put(a, NamedSharding(of, spec))

    return {name: put(name, a) for name, a in arrays.items()}


def function(call: Call) -> Callable[[Arrays], tuple[Any, Arrays]]:
    """The op with its inner layers: of the arguments, returns the output with a gradient, and the others."""
    op, options = OPS[call.op], _sizes_and_options(call)

    def base(a: Arrays) -> Arrays:
        return op.call(lutjax.reference if call.reference else lutjax, a, options)

    def repeated(a: Arrays) -> Arrays:
        def step(x: Any, _: None) -> tuple[Any, None]:
            return x + base({**a, "x": x})["y"], None

        axes = frozenset[str]().union(*map(_compat.varying_axes, a.values()))
        return {"y": jax.lax.scan(step, _compat.cast_varying(a["x"], axes), None, length=call.steps)[0]}

    f: Callable[[Arrays], Arrays] = base if call.steps == 1 else repeated
    for layer in reversed(call.inner):
        f = _with_layer(layer, f)

    def split(a: Arrays) -> tuple[Any, Arrays]:
        outputs = f(a)
        return outputs[op.output], {n: y for n, y in outputs.items() if n != op.output}

    return split


def gradient(call: Call) -> Callable[..., tuple[Any, Arrays, Arrays]]:
    """The function of a call: of arguments and, if some are differentiated, a cotangent.

    It returns the output with a gradient, the other outputs, and cotangents.
    """
    f = function(call)

    def g(a: Arrays, ct: Any = None) -> tuple[Any, Arrays, Arrays]:
        if not call.wanted:
            return *f(a), {}
        rest = {n: v for n, v in a.items() if n not in call.wanted}
        wanted = {n: a[n] for n in call.wanted}
        if call.how == "vjp":
            y, pull, others = jax.vjp(lambda w: f({**rest, **w}), wanted, has_aux=True)
            return y, others, pull(ct)[0]

        def scalar(w: Arrays) -> tuple[Any, Any]:
            y, others = f({**rest, **w})
            return jnp.sum(y * ct), (y, others)

        cotangents, (y, others) = jax.grad(scalar, has_aux=True)(wanted)
        return y, others, cotangents

    for layer in reversed(call.outer):
        g = _with_layer(layer, g, call.wanted)
    return g


def _with_layer(layer: Layer, f: Callable[..., Any], wanted: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A function with one more transformation around it: of arguments by name and perhaps a cotangent of the output."""
    if layer == "jit":
        return jax.jit(f)
    if layer == "remat":
        return jax.checkpoint(f)
    if layer == "cond":
        return lambda *a: jax.lax.cond(_true(), f, f, *a)
    assert isinstance(layer, Map)
    if layer.how == "shard_map":
        return _sharded(layer, f, wanted)
    return _vmapped(layer, f) if layer.how == "vmap" else _scanned(layer, f)


def _true() -> jax.Array:
    return jax.lax.optimization_barrier(jnp.asarray(True))


def _vmapped(layer: Map, f: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Arrays, *ct: Any) -> Any:
        return jax.vmap(f, in_axes=({name: layer.axes.get(name) for name in a}, *(0 for _ in ct)))(a, *ct)

    return call


def _scanned(layer: Map, f: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Arrays, *ct: Any) -> Any:
        shared = {name: v for name, v in a.items() if name not in layer.axes}
        mapped = {name: a[name] for name in a if name in layer.axes}

        def step(_: None, slices: tuple[Any, ...]) -> tuple[None, Any]:
            of_a, *of_ct = slices
            return None, f({**shared, **of_a}, *of_ct)

        return jax.lax.scan(step, None, (mapped, *ct))[1]

    return call


def _sharded(layer: Map, f: Callable[..., Any], wanted: tuple[str, ...]) -> Callable[..., Any]:
    def call(a: Arrays, *ct: Any) -> Any:
        def shard(a: Arrays, *ct: Any) -> Any:
            result = f({n: v[0] if n in layer.axes else v for n, v in a.items()}, *(c[0] for c in ct))
            if not ct:
                return jax.tree.map(lambda y: y[None], result)
            y, others, cotangents = result
            y, others = jax.tree.map(lambda y: y[None], (y, others))
            return y, others, {n: c[None] if n in layer.axes else c for n, c in cotangents.items()}

        split = PartitionSpec("shards")
        of_arguments = {n: split if n in layer.axes else PartitionSpec() for n in a}
        # Cotangents of shared arguments are the same on all devices: they are sums.
        out: Any = (
            (split, split, {n: split if n in layer.axes else PartitionSpec() for n in wanted})
            if ct
            else split
        )
        return jax.shard_map(
            shard,
            mesh=jax.make_mesh((2,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]),
            in_specs=(of_arguments, *(split for _ in ct)),
            out_specs=out,
        )(a, *ct)

    return call


# ------------------------------------------------------------------------------------- comparison
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-9}


class Wrong(AssertionError):
    """A call returned something else than its definition."""


def compare(what: Any, actual: Arrays, wanted: Arrays) -> None:
    """Raises Wrong if arrays differ by more than rounding."""
    if set(actual) != set(wanted):
        raise Wrong(f"{what}: {sorted(actual)}, expected {sorted(wanted)}")
    for name, e in wanted.items():
        a = np.asarray(actual[name])
        try:
            assert_close(f"{what}: {name}", a, e.astype(a.dtype), TOLERANCE.get(a.dtype.name))
        except AssertionError as error:
            raise Wrong(str(error)) from None


def check(call: Call, functions: dict[str, Any] | None = None) -> None:
    """Runs a call and compares it with its definition.

    functions: those of earlier calls, so that one that was there before is called again.
    """
    with within(call):
        arrays = arguments(call)
        given = placed(call, arrays)
        ct: np.ndarray | None = None

        def of_outputs(outputs: Arrays) -> np.ndarray:
            nonlocal ct
            ct = cotangent(call, outputs[OPS[call.op].output])
            return ct

        outputs, cotangents = expected(call, arrays, of_outputs)
        functions = {} if functions is None else functions
        g = functions.setdefault(call.function_key, gradient(call))
        y, others, of_wanted = g(given) if ct is None else g(given, ct)
    compare(call, {OPS[call.op].output: y, **others, **of_wanted}, {**outputs, **cotangents})


WATCHED = (
    "lookup",
    "weighted_lookup",
    "scored_lut",
    "sparse_lookup",
    "lookup_attention",
    "lut",
    "sparse_lut",
    "lut_attention",
    "lut_pair_attention",
)
"""The ops whose table can have a gradient in factors."""


def check_factored(call: Call) -> None:
    """Check a call as `check` does without transformations or contexts, with the gradient of the table in factors."""
    arrays = arguments(call)
    call = dataclasses.replace(call, wanted=tuple(n for n in OPS[call.op].differentiable if n in arrays))
    f = function(call)
    outputs, pull = define(call, arrays)
    ct = cotangent(call, outputs["y"])
    rest = {n: jnp.asarray(a) for n, a in arrays.items() if n not in call.wanted}

    def loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        y, _ = f({**rest, **params})
        return jnp.sum(y * ct), y

    value_and_grad = value_and_factored_grad(loss, has_aux=True)
    (_, y), gradients = value_and_grad({n: jnp.asarray(arrays[n]) for n in call.wanted})
    actual = {**gradients, "weights": gradients["weights"].to_dense()}
    of_all = pull(ct)
    compare(
        f"{call}, factored", {"y": y, **actual}, {"y": outputs["y"], **{n: of_all[n] for n in call.wanted}}
    )


class Late:
    """A gradient of which the forward pass is made, and the backward pass comes later."""

    def __init__(self, call: Call):
        self.call = call
        f = function(call)
        with within(call):
            self._arrays = arguments(call)

            def forward(a: Arrays) -> tuple[Any, Any]:
                rest = {n: v for n, v in a.items() if n not in call.wanted}
                y, pull, _ = jax.vjp(lambda w: f({**rest, **w}), {n: a[n] for n in call.wanted}, has_aux=True)
                return y, pull

            for layer in reversed(call.outer):
                forward = _with_layer(layer, forward)
            self._y, self._pull = forward(placed(call, self._arrays))

    def pull(self, how: str, seed: int = 0) -> None:
        """Makes the backward pass and compares it.

        how: ``"plain"``, in a ``"jit"`` as its argument or in the ``"closure"`` of one, or for several cotangents by
        ``"vmap"`` or ``"scan"``.
        """
        call, output = self.call, OPS[self.call.op].output
        n_cotangents = 3 if how in ("vmap", "scan") else 1
        with within(call):
            cts: list[np.ndarray] = []
            of_each = []
            for i in range(n_cotangents):

                def of_outputs(outputs: Arrays, i: int = i) -> np.ndarray:
                    cts.append(cotangent(call, outputs[output], 10 * seed + i))
                    return cts[-1]

                outputs, cotangents = expected(call, self._arrays, of_outputs)
                of_each.append(cotangents)

            def pull_one(pull: Any, ct: Any) -> Any:
                return pull(ct)[0]

            pull = pull_one
            for layer in reversed(call.outer):
                if isinstance(layer, Map):  # the pullback itself is mapped
                    pull = {"vmap": jax.vmap, "scan": _mapped_by_scan}[layer.how](pull)
            if how == "plain":
                actual = pull(self._pull, cts[0])
            elif how == "jit":
                actual = jax.jit(pull)(self._pull, cts[0])
            elif how == "closure":
                actual = jax.jit(lambda ct: pull(self._pull, ct))(cts[0])
            else:
                over = jax.vmap if how == "vmap" else _mapped_by_scan
                actual = over(lambda ct: pull(self._pull, ct))(np.stack(cts))
        of_all = {
            n: np.stack([c[n] for c in of_each]) if n_cotangents > 1 else of_each[0][n] for n in call.wanted
        }
        what = f"{call}, pulled {how}"
        compare(what, {output: self._y, **actual}, {output: outputs[output], **of_all})


def _mapped_by_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *a: jax.lax.scan(lambda _, slices: (None, f(*slices)), None, a)[1]


# ------------------------------------------------------------------------------------- replay
def main(calls: list[str]) -> None:
    """Runs calls one after the other."""
    names = {"Call": Call, "Map": Map, "FixedPoint": FixedPoint}
    for text in calls:
        check(eval(text, names))
        print(f"right: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])

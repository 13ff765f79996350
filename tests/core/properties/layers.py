"""The layers as members, each with its definition on one element: their specs, and the layers of each library."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from layer_libraries import spec_type_of

from lutjax import wiring
from lutjax.layers import haiku as of_haiku, linen as of_linen, nnx as of_nnx
from lutjax.layers._spec import QUANTIZED, arguments as arguments_of
from lutjax.models import LogicTreeNet, LogicTreeNetConfig
from properties import definitions, layer_definitions as L
from properties.members import FINE, FINITE, READS, SCALARS, Arrays, Op, Pullback, Source, given

Options = Mapping[str, Any]
Sizes = Mapping[str, int]
LIBRARIES = ("spec", "nnx", "linen", "haiku")
FIXED_POINT = {"accumulate": (None, FINE)}
EPSILON = {"epsilon": (0.0, 0.5)}
DTYPE = {"dtype": (None, "float32", "bfloat16")}
LIBRARY = {"library": LIBRARIES}
OF_TABLES = ("grid", "ties", "general", "nan", "infinite")  # a layer has checked its ids
OF_READS = FINITE
SHARE = 0.5
"""Share of tables that are dropped."""


# ------------------------------------------------------------------------------------- layers as functions
def in_library(library: str, layer: str, options: Options, a: Arrays, *inputs: Any, **how: Any) -> Any:
    """Call a layer of a library with the arrays of its variables; ``"spec"``: without one."""
    spec_type, options = spec_type_of(layer), dict(options)
    spec = spec_type(**options)
    arrays = {v.name: a[v.name] for v in spec.variables() if v.name in a}
    if library == "spec" or "key" in how:
        return spec(arrays, *inputs, **how)
    options = {n: v for n, v in options.items() if n in arguments_of(spec_type)}
    if options.get("has_widths", spec.__dict__.get("has_widths")):
        options["widths"] = np.ones(spec.in_features, np.float32)
    kinds: dict[str, Arrays] = {}
    for v in spec.variables():
        if v.name in arrays:
            kinds.setdefault(v.collection, {})[v.name] = arrays[v.name]
    if library == "linen":
        return getattr(of_linen, layer)(**options).apply(kinds, *inputs, **how)
    if library == "haiku":
        f = hk.transform_with_state(
            lambda *inputs: getattr(of_haiku, layer)(**options, name="layer")(*inputs, **how)
        )
        state = {n: array for kind, part in kinds.items() if kind != "params" for n, array in part.items()}
        return f.apply({"layer": kinds.get("params", {})}, {"layer": state}, None, *inputs)[0]
    module = _merged(*_nnx_parts(layer, _Frozen(options)))
    for name, array in arrays.items():
        getattr(module, name).set_value(array)
    return module(*inputs, **how)


class _Frozen(dict[str, Any]):
    """Options as a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))

    def __eq__(self, other: Any) -> bool:
        return repr(self) == repr(other)


@functools.cache
def _nnx_parts(layer: str, options: _Frozen) -> Any:
    with jax.ensure_compile_time_eval():
        rngs = {} if layer in ("GroupSum", "Thermometer") else {"rngs": nnx.Rngs(0)}
        return nnx.split(getattr(of_nnx, layer)(**options, **rngs))


def _merged(graph: Any, state: Any) -> Any:
    """Merge a copy of the state: its variables are then of the trace that sets them."""
    return nnx.merge(graph, jax.tree.map(lambda a: a, state))


def variables_of(s: Source, layer: str, options: Options, o: Options) -> Arrays:
    """Draw the variables of a layer, by their kinds."""
    spec = spec_type_of(layer)(**options)
    found: Arrays = {}
    for v in spec.variables():
        found[v.name] = _variable(s, spec, v, found, o)
    if not o.get("readers", True) and o.get("library", "spec") == "spec":  # layers of libraries hold theirs
        found.pop("readers", None)
    return found


def _variable(s: Source, spec: Any, v: Any, before: Arrays, o: Options) -> np.ndarray:
    if v.name == "readers":
        wires, n = before["wires"], spec._n_readable
        if hasattr(spec, "kernel"):  # of trees, by channel
            wires, n = wires % spec.in_shape[2], spec.in_shape[2]
        flat = wires.reshape(-1, wires.shape[-1])
        return definitions.readers(flat, n, wires.size).astype(np.int32)
    if v.kind == "anchors":
        n = spec.width if hasattr(spec, "width") else spec.n_inputs
        return s.anchors(n, *v.shape[:-1])
    if v.kind == "targets":
        return s.ids(-1, spec.n_outputs, *v.shape)
    if v.kind == "wires":
        return s.numbers(0, spec._n_readable, *v.shape)
    if v.kind == "scalars":
        return np.clip(s.finite(*v.shape, steps=4), -1, 1).astype(s.dtype)
    if v.name == "weights" and v.kind == QUANTIZED:
        return s.numbers(-128, 128, *v.shape).astype(np.int8)
    if v.name == "exponents":
        return s.numbers(-8, -4, *v.shape)
    if v.name == "widths":
        return np.asarray(s.numbers(1, 5, *v.shape) / 2, s.dtype)
    # Slots of one list for all rows that are not used take part with a cotangent of 0.
    one_list = v.name == "weights" and o.get("targets") == "layer"
    return (s.finite if one_list else s.grid)(*v.shape, steps=4 if "press" in v.name else 8)


class Layer(NamedTuple):
    """A layer as a member.

    Attributes:
      name: of the layer. arguments: those of its constructor, of sizes and options.
      inputs: draws the inputs of a call. call: names of those that are keywords.
      define: the definition, of sizes, options, arrays and the input; the arrays are cast as the layer casts them.
      cast: names of the variables that it casts. how: keywords of its call, of options.
      fitted: options without those that do not go with the others.
    """

    name: str
    arguments: Callable[[Sizes, Options], dict[str, Any]]
    inputs: Callable[[Source, Sizes, Options], Arrays]
    define: Callable[[Sizes, Options, Arrays, np.ndarray], L.Defined]
    call: tuple[str, ...] = ()
    cast: tuple[str, ...] = ("weights", "positions")
    how: Callable[[Options], dict[str, Any]] = lambda o: {}
    fitted: Callable[[Options], Options] = lambda o: o

    def options_of(self, z: Sizes, o: Options, dtype: Any) -> dict[str, Any]:
        options = {**self.arguments(z, o), **given(o, "accumulate", "epsilon", "dtype")}
        return {**options, "param_dtype": dtype} if self.name != "GroupSum" else options

    def arrays(self, s: Source, z: Sizes, o: Options) -> Arrays:
        o = self.fitted(o)
        key = {"key": s.numbers(0, 2**31 - 1, 2).astype(np.uint32)} if draws(o) else {}
        variables = variables_of(s, self.name, self.options_of(z, o, np.float32), o)
        return {**variables, **self.inputs(s, z, o), **key}

    def run(self, module: Any, a: Arrays, o: Options) -> Arrays:
        o = self.fitted(o)
        options = self.options_of(o["sizes"], o, a["x"].dtype)
        if o.get("decode"):
            return {"y": decoded(self.name, options, a)}
        how = {**self.how(o), **{n: a[n] for n in (*self.call, "key") if n in a}}
        inputs = [a[n] for n in ("x", "keys") if n in a]
        return {"y": in_library(o.get("library", "spec"), self.name, options, a, *inputs, **how)}

    def defined(self, a: Arrays, o: Options) -> tuple[Arrays, Pullback]:
        o = self.fitted(o)
        dtype = o.get("dtype")
        casts = (*self.cast, "x", "keys")
        cast = a if dtype is None else {n: v.astype(dtype) if n in casts else v for n, v in a.items()}
        y, pull = self.define(o["sizes"], o, cast, cast["x"])
        return {"y": y}, pull

    def member(self, trained: tuple[str, ...], options: Mapping[str, tuple[Any, ...]], **more: Any) -> Op:
        return Op(
            self.arrays,
            self.run,
            ("x", *trained),
            options,
            batch=more.pop("batch", lambda o: {"x": 0, "keys": 0, "segments": 0, "key_segments": 0}),
            reference=False,
            dtype=more.pop("dtype", lambda a, o: np.dtype(o.get("dtype") or a["x"].dtype)),
            define=self.defined,
            **more,
        )


def draws(o: Options) -> bool:
    """Return whether a call draws random numbers."""
    noisy = o.get("estimator") == "gumbel" or (
        o.get("table_dropout") and o.get("read") not in (None, "integers")
    )
    return bool(noisy and not o.get("deterministic"))


def training(o: Options, a: Arrays) -> L.Training:
    temperature = float(a["temperature"]) if "temperature" in a else o.get("temperature", 1.0)
    return L.Training(o.get("estimator", "soft"), temperature, o.get("deterministic", False), a.get("key"))


def of_constructor(o: Options) -> dict[str, Any]:
    """Return the temperature that a layer is made with, if calls do not bring one."""
    return {} if o.get("temperature") == "traced" else given(o, "temperature")


def of_call(s: Source, o: Options) -> Arrays:
    """Draw the temperature that a call brings."""
    traced = o.get("temperature") == "traced"
    return {"temperature": np.asarray(2.0 ** s.numbers(-1, 2), np.float32)} if traced else {}


def _switch(o: Options) -> dict[str, Any]:
    return given(o, "deterministic")


def _vectors(s: Source, z: Sizes, o: Options) -> Arrays:
    return {"x": s.grid(z["batch"], z["inputs"], steps=40)}


def _scale(o: Options) -> float | None:
    return None if o.get("accumulate") is None else o["accumulate"].scale


# ------------------------------------------------------------------------------------- options that go together
def _without(o: Options, *names: str) -> Options:
    return {n: v for n, v in o.items() if n not in names}


def _fits_read(o: Options) -> Options:
    """Return options that fit a read: it has no dead zone, and integers no fixed point."""
    if o.get("read") is None:
        return _without(o, "table_dropout")
    return _without(o, "epsilon", *(("accumulate",) if o["read"] == "integers" else ()))


def _adds_floats(o: Options) -> Options:
    """Return options without fixed point where outputs of groups are added as floats."""
    return _fits_read(o if o.get("read") is None else _without(o, "accumulate"))


def _fits_numbers(o: Options) -> Options:
    """Return options that fit tables without logits."""
    return _without(o, "temperature", *_gumbel(o)) if o.get("parameterization") == "raw" else o


def _gumbel(o: Options) -> tuple[str, ...]:
    return ("estimator",) if o.get("estimator") == "gumbel" else ()


# ------------------------------------------------------------------------------------- tables
def _in_groups(z: Sizes, o: Options) -> tuple[int | None, dict[str, Any]]:
    """Return the number of groups, and sizes that these divide."""
    n = z["groups"] if o.get("groups") else 1
    sizes = {"in_features": n * z["inputs"], "out_features": n * z["outputs"]}
    rest = {"n_detectors": z["detectors"], "n_anchors": z["bits"]}
    return (n, {**sizes, **rest, "groups": n}) if o.get("groups") else (None, {**sizes, **rest})


def _group_inputs(s: Source, z: Sizes, o: Options) -> Arrays:
    return {"x": s.grid(z["batch"], _in_groups(z, o)[1]["in_features"], steps=40)}


LUT = Layer(
    "LUT",
    lambda z, o: _in_groups(z, o)[1],
    _group_inputs,
    lambda z, o, a, x: L.lut(
        a, x, groups=_in_groups(z, o)[0], epsilon=o.get("epsilon", 0.0), scale=_scale(o)
    ),
)

SPARSE_LUT = Layer(
    "SparseLUT",
    lambda z, o: {
        **_in_groups(z, o)[1],
        "n_targets": min(z["slots"], z["outputs"]),
        "targets_per": o.get("lists", "row"),
    },
    _group_inputs,
    lambda z, o, a, x: L.sparse_lut(
        a,
        x,
        z["outputs"],
        groups=_in_groups(z, o)[0],
        epsilon=o.get("epsilon", 0.0),
        scale=_scale(o),
    ),
)


def _sequences(s: Source, z: Sizes, o: Options) -> Arrays:
    shape = z["batch"], z["length"]
    n_keys = z["length"] + {"same": 0, "more": 1, "fewer": -1}[o.get("keys", "same")]
    found = {"x": s.grid(*shape, z["inputs"], steps=40)}
    if o.get("segments"):
        found["segments"] = s.numbers(0, 2, *shape)
    if o.get("blocks"):
        mask = np.arange(-(-z["length"] // BLOCKS[0]))[:, None] + np.arange(n_keys)[None, :]
        found["block_mask"] = mask % 3 > 0
    if "keys" not in o:
        return found
    found["keys"] = s.grid(z["batch"], n_keys, z["inputs"], steps=40)
    if o.get("segments"):
        found["key_segments"] = s.numbers(0, 2, z["batch"], n_keys)
    if o.get("starts") and o.get("causal", True):
        found |= {"query_start": np.int32(2), "key_start": np.int32(1)}
    return found


def _attention(z: Sizes, o: Options) -> dict[str, Any]:
    causal, lists = o.get("causal", True), o.get("targets")
    found = {
        "in_features": z["inputs"],
        "out_features": z["outputs"],
        "n_detectors": z["detectors"],
        "n_anchors": z["pairs"],
        "n_positions": z["length"] + 2,
        "n_position_bits": z["position_bits"] if o.get("positions", True) else 0,
        **given(o, "causal", "shared_positions", "pool"),
        **(given(o, "window") if causal else {}),
    }
    if o.get("interleave"):
        found["n_position_bits"] = z["inputs"]
    if lists is not None:
        found |= {"n_targets": min(z["slots"], z["outputs"]), "targets_per": lists}
    return found


def _sight(o: Options, a: Arrays) -> L.Sight:
    starts = {n: int(a[n]) for n in ("query_start", "key_start") if n in a}
    segments = {n: a.get(n) for n in ("segments", "key_segments")}
    blocks = (a["block_mask"], BLOCKS) if "block_mask" in a else (None, None)
    return L.Sight(
        o.get("causal", True),
        o.get("window"),
        **starts,
        **segments,
        block_mask=blocks[0],
        block_sizes=blocks[1],
    )


BLOCKS = 2, 1
"""Queries and keys of a block of a mask."""


def _blocks(o: Options) -> dict[str, Any]:
    return {"block_sizes": BLOCKS} if o.get("blocks") else {}


SIGHT = {
    "positions": (True, False),
    "shared_positions": (True, False),
    "window": (None, 1, 2),
    "segments": (False, True),
    "blocks": (False, True),
    "causal": (True, False),
    "targets": (None, "row", "table", "layer"),
    "keys": ("same", "more", "fewer"),
    "starts": (False, True),
    "decode": (False, True),
    "pool": (None, 2),
}


def _fits_decoding(o: Options) -> Options:
    """Return options that fit calls with a cache: keys are those that it has."""
    o = _without(o, "keys", "starts", "segments", "blocks", "causal", "pool") if o.get("decode") else o
    return _without(o, "blocks", "causal", "accumulate") if o.get("pool") else o


def _attended(o: Options, a: Arrays, x: np.ndarray, define: Callable[..., L.Defined]) -> L.Defined:
    """The definition of a layer of attention, over blocks of keys if these are pooled."""
    keys, sight = a.get("keys"), _sight(o, a)
    return define(keys, sight) if o.get("pool") is None else L.over_blocks(define, o["pool"], x, keys, sight)


def decoded(layer: str, options: Options, a: Arrays) -> Any:
    """Call a layer of attention or a memory on one position after the other, and then on those that are left."""
    spec = spec_type_of(layer)(**options)
    if hasattr(spec, "history"):
        return _remembered(spec, a)
    x, cache = a["x"], spec.empty_cache(a["x"].shape, a["x"].dtype)
    found = []
    for part in (x[..., :1, :], x[..., 1:2, :], x[..., 2:, :]):
        y, cache = spec.attend_with_cache({v.name: a[v.name] for v in spec.variables()}, cache, part)
        found.append(y)
    return jnp.concatenate(found, -2)


def _remembered(spec: Any, a: Arrays) -> Any:
    arrays = {v.name: a[v.name] for v in spec.variables()}
    history, found = spec.history(a["x"].shape[:1], a["x"].dtype), []
    for part in (slice(0, 1), slice(1, 2), slice(2, None)):
        ids = {n: a[n][:, part] for n in ("tokens", "segments") if n in a}
        y, history = spec(arrays, a["x"][:, part], **ids, history=history)
        found.append(y)
    return jnp.concatenate(found, -2)


ATTENTION = Layer(
    "LUTAttention",
    _attention,
    _sequences,
    lambda z, o, a, x: _attended(
        o,
        a,
        x,
        lambda keys, sight: L.attention(
            a, x, keys, z["outputs"], sight, epsilon=o.get("epsilon", 0.0), scale=_scale(o)
        ),
    ),
    ("segments", "key_segments", "query_start", "key_start", "block_mask"),
    how=_blocks,
    fitted=_fits_decoding,
)

PAIR_ATTENTION = Layer(
    "LUTPairAttention",
    lambda z, o: {**_attention(z, o), "n_anchors": z["bits"], **given(o, "interleave")},
    _sequences,
    lambda z, o, a, x: _attended(
        o,
        a,
        x,
        lambda keys, sight: L.pair_attention(
            a,
            x,
            keys,
            z["outputs"],
            sight,
            interleave=o.get("interleave", False),
            epsilon=o.get("epsilon", 0.0),
            scale=_scale(o),
        ),
    ),
    ("segments", "key_segments", "query_start", "key_start", "block_mask"),
    how=_blocks,
    fitted=_fits_decoding,
)


# ------------------------------------------------------------------------------------- memories
def _ngrams(z: Sizes, o: Options) -> dict[str, Any]:
    return {
        "features": z["inputs"],
        "orders": o.get("orders", (2, 3)),
        "rows": 5,
        "heads": z["groups"],
        "width": z["slots"],
        "kernel": o.get("kernel", 2),
        **given(o, "seed"),
    }


def _texts(s: Source, z: Sizes, o: Options) -> Arrays:
    shape = z["batch"], z["length"]
    ids = {"segments": s.numbers(0, 2, *shape)} if o.get("segments") else {}
    return {"x": s.grid(*shape, z["inputs"]), "tokens": s.numbers(0, 4, *shape), **ids}


def _ngram_memory(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    sizes = {n: v for n, v in _ngrams(z, o).items() if n in ("orders", "heads", "kernel")}
    return L.ngram_memory(
        a, x, a["tokens"], a.get("segments"), seed=o.get("seed", 0), scale=_scale(o), **sizes
    )


NGRAMS = Layer("NgramMemory", _ngrams, _texts, _ngram_memory, ("tokens", "segments"), cast=())
NGRAM_PARAMETERS = (
    "weights", "key_kernel", "value_kernel", "query_scale", "key_scale", "conv_scale", "conv_kernel"
)  # fmt: skip


def _keys(z: Sizes, o: Options) -> dict[str, Any]:
    return {
        "in_features": z["inputs"],
        "out_features": z["outputs"],
        "n_keys": 3,
        "heads": z["groups"],
        "k": 2,
        "key_size": z["bits"]
        + 1,  # one number would be 1 or -1 when it is normalized, and its gradient rounding alone
    }


PRODUCT_KEYS = Layer(
    "ProductKeyMemory",
    _keys,
    _vectors,
    lambda z, o, a, x: L.product_key_memory(a, x, 2, _scale(o)),
    cast=(),
)
EXPERTS = Layer(
    "ProductKeyExperts",
    lambda z, o: {**_keys(z, o), "activation": jnp.sin},
    _vectors,
    lambda z, o, a, x: L.product_key_experts(a, x, 2),
    cast=(),
)
KEY_PARAMETERS = ("query_kernel", "query_scale", "half_keys")
DECIDED = ("general",)  # among others there are ties of sums


# ------------------------------------------------------------------------------------- scored tables
def _read(o: Options) -> dict[str, Any]:
    """Arguments of a layer whose tables are read with scores."""
    name = o.get("read")
    if name is None:
        return {}
    dropout = {"table_dropout": SHARE} if o.get("table_dropout") else {}
    return {"read": READS[name][1], "quantized": name == "integers", **dropout}


def _keep(a: Arrays, x: np.ndarray, rank: int, n_tables: int, dtype: Any) -> Any:
    return None if "key" not in a else L.kept(a["key"], SHARE, (*x.shape[: x.ndim - rank], n_tables), dtype)


def _projection(z: Sizes, o: Options) -> dict[str, Any]:
    heads, o = z["groups"], {"read": "confidence", **o}
    n_inputs = 1 if o.get("share_input") else heads
    n_outputs = 1 if o.get("sum_heads") else heads
    plain_in, plain_out = o.get("projections") == "last", o.get("projections") == "first"
    return {
        "in_features": n_inputs * 3 if plain_in else z["inputs"],
        "out_features": n_outputs * 2 if plain_out else z["outputs"],
        "heads": heads,
        "tables": z["detectors"] // z["groups"] or 1,
        "bits": z["bits"],
        "width": 3,
        "outputs": 2,
        "compress": not plain_in,
        "decompress": not plain_out,
        **given(o, "share_input", "sum_heads"),
        **_read(o),
    }


def _projection_of(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    sizes = _projection(z, o)
    inner = definitions.accumulator(
        next(v for n, v in a.items() if n in ("log_beta", "decompress_bias", "compress_bias")).dtype
    )
    return L.projection(
        a,
        x,
        o.get("read", "confidence"),
        heads=sizes["heads"],
        share_input=o.get("share_input", False),
        sum_heads=o.get("sum_heads", False),
        inner=inner,
        keep=_keep(a, x, 1, sizes["heads"] * sizes["tables"], inner),
        scale=_scale(o),
    )


PROJECTION = Layer(
    "ProjectionLUT",
    _projection,
    lambda s, z, o: {"x": s.grid(z["batch"], _projection(z, o)["in_features"])},
    _projection_of,
    cast=(),
    how=_switch,
    fitted=_fits_read,
)
DENSE = ("compress_kernel", "compress_bias", "decompress_kernel", "decompress_bias")

SCORED = {"read": (None, *READS), "table_dropout": (False, True), "deterministic": (False, True)}


def _n_tables(z: Sizes) -> dict[str, int]:
    return {"n_detectors": max(z["detectors"] // z["groups"], 1), "n_anchors": z["bits"]}


IMAGE = (3, 2)


def _image(z: Sizes, o: Options) -> tuple[int, ...]:
    return (*IMAGE, z["slots"]) if o.get("channels", True) else IMAGE


def _images(s: Source, z: Sizes, o: Options) -> Arrays:
    return {"x": s.grid(z["batch"], *_image(z, o), steps=8)}


@functools.cache
def _fields(image: tuple[int, ...], how: str) -> Any:
    if how == "full":
        return wiring.full(image, (2, 2))
    if how == "windows":
        return wiring.window_groups(image, 2, outputs=2)
    return wiring.projections(None, image, (2, 3), groups=(2, 1), receptive=2, projective=2)


def _spatial(z: Sizes, o: Options) -> dict[str, Any]:
    return {"connectivity": _fields(_image(z, o), o.get("fields", "projections")), **_n_tables(z), **_read(o)}


def _spatial_of(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    rank = len(_image(z, o))
    fields = _spatial(z, o)["connectivity"]
    y, pull = L.spatial(
        a,
        x,
        fields.n_outputs,
        o.get("read"),
        rank=rank,
        keep=_keep(a, x, rank, len(a["weights"]), definitions.accumulator(x.dtype)),
        epsilon=o.get("epsilon", 0.0),
        scale=_scale(o),
    )
    return y.reshape(*y.shape[:-1], *fields.out_shape), pull


def _window(z: Sizes, o: Options) -> dict[str, Any]:
    geometry = {"stride": (2, 1), "padding": (1, 0)} if o.get("strides") else {}
    return {
        "in_shape": _image(z, o),
        "out_features": z["outputs"],
        "kernel": 2,
        **geometry,
        **_n_tables(z),
        **_read(o),
    }


def _window_of(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    rank, sizes = len(_image(z, o)), _window(z, o)
    rows, columns = _counts(sizes)
    y, pull = L.windows(
        a,
        x,
        rows * columns,
        o.get("read"),
        rank=rank,
        keep=_keep(a, x, rank, len(a["weights"]), definitions.accumulator(x.dtype)),
        epsilon=o.get("epsilon", 0.0),
        scale=_scale(o),
    )
    return y.reshape(*y.shape[:-2], rows, columns, y.shape[-1]), pull


def _counts(sizes: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of places."""
    steps, around = (_pair(sizes.get(n, d)) for n, d in (("stride", 1), ("padding", 0)))
    kernel = _pair(sizes["kernel"])
    rows, columns = (
        (n + 2 * p - k) // s + 1
        for n, p, k, s in zip(sizes["in_shape"][:2], around, kernel, steps, strict=True)
    )
    return rows, columns


def _pair(n: Any) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else n


class Windows(NamedTuple):
    """Windows as the definitions read them."""

    image: tuple[int, int, int]
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    channels: int
    places: tuple[int, int]


def _conv(z: Sizes, o: Options) -> dict[str, Any]:
    groups = z["groups"] if o.get("groups") and o.get("channels", True) else 1
    image = (*IMAGE, groups * z["slots"]) if o.get("channels", True) else IMAGE
    return {
        **_window(z, o),
        "in_shape": image,
        "groups": groups,
        "n_detectors": z["detectors"],
        "out_channels": groups * z["outputs"],
        **given(o, "pool"),
    }


def _conv_arguments(z: Sizes, o: Options) -> dict[str, Any]:
    return {n: v for n, v in _conv(z, o).items() if n != "out_features"}


def _conv_of(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    sizes = _conv(z, o)
    places, pool = _counts(sizes), o.get("pool")
    image = (*sizes["in_shape"], 1)[:3]
    windows = Windows(
        image,
        _pair(sizes["kernel"]),
        _pair(sizes.get("stride", 1)),
        _pair(sizes.get("padding", 0)),
        image[2] // sizes["groups"],
        places,
    )
    y, pull = L.convolution(
        a,
        x,
        o.get("read"),
        places if pool == "all" else _pair(pool or 1),
        windows=windows,
        groups=sizes["groups"],
        keep=_keep(a, x, len(sizes["in_shape"]), len(a["weights"]), definitions.accumulator(x.dtype)),
        epsilon=o.get("epsilon", 0.0),
        scale=_scale(o),
    )
    return (y[..., 0, 0, :] if pool == "all" else y), pull


SPATIAL = Layer("SpatialLUT", _spatial, _images, _spatial_of, how=_switch, fitted=_adds_floats)
WINDOW = Layer("WindowLUT", _window, _images, _window_of, how=_switch, fitted=_fits_read)
CONV = Layer(
    "ConvLUT",
    _conv_arguments,
    lambda s, z, o: {"x": s.grid(z["batch"], *_conv(z, o)["in_shape"], steps=8)},
    _conv_of,
    how=_switch,
    fitted=_fits_read,
)


# ------------------------------------------------------------------------------------- logic
FEATURES = {"feature_axis": (-1, 0)}
ESTIMATORS = {
    "estimator": ("soft", "straight_through", "gumbel"),
    "temperature": (1.0, 0.5, 2.0, "traced"),
    "deterministic": (False, True),
}
WIRED = {"wiring": ("balanced", *wiring.LEARNED), "readers": (True, False), **FEATURES, **ESTIMATORS}
CANDIDATES = 4


def _wired(z: Sizes, o: Options, *names: str) -> dict[str, Any]:
    return {
        "in_features": z["inputs"],
        "out_features": z["outputs"],
        "candidates": CANDIDATES,
        **given(o, "wiring", "feature_axis", "estimator", *names),
        **of_constructor(o),
    }


def _features(s: Source, z: Sizes, o: Options) -> Arrays:
    """Inputs with features last or first."""
    x = s.grid(z["batch"], 2, z["inputs"])
    x = np.ascontiguousarray(np.moveaxis(x, -1, 0)) if o.get("feature_axis") == 0 else x
    return {"x": x, **of_call(s, o)}


def _axis(define: Callable[..., L.Defined], n: int = 1) -> Callable[..., L.Defined]:
    """A definition for features that may come first, `n` axes of them: channels, then rows and columns."""

    def moved(a: np.ndarray, back: bool) -> np.ndarray:
        last, first = ((-1,), (0,)) if n == 1 else ((-1, -3, -2), (0, 1, 2))
        return np.moveaxis(a, last, first) if back else np.moveaxis(a, first, last)

    def defined(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
        if o.get("feature_axis") != 0:
            return define(z, o, a, x)
        y, pull = define(z, o, a, moved(x, False))

        def pull_moved(dy: np.ndarray) -> Arrays:
            of = pull(moved(dy, False))
            return {**of, "x": moved(of["x"], True)}

        return moved(y, True), pull_moved

    return defined


def _logic(layer: str, *names: str) -> Layer:
    def define(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
        how = training({"estimator": _DEFAULTS.get(layer, "soft"), **o}, a)
        return L.wired(layer, a, x, o.get("wiring", "balanced"), how, o.get("parameterization", "light"))

    def arguments(z: Sizes, o: Options) -> dict[str, Any]:
        sizes = {"n_inputs": z["wires"]} if layer != "LogicGates" else {}
        return {**_wired(z, o, *names), **sizes}

    return Layer(layer, arguments, _features, _axis(define), OF_CALL, (), _switch, _fits_numbers)


OF_CALL = ("temperature",)


def _recurrent_inputs(s: Source, z: Sizes, o: Options) -> Arrays:
    """Two steps; with features first they follow."""
    x = s.grid(z["batch"], 2, z["inputs"], steps=4)
    state = s.grid(z["batch"], z["outputs"], steps=4)
    if o.get("feature_axis") == 0:
        x, state = np.ascontiguousarray(x.transpose(2, 1, 0)), np.ascontiguousarray(state.T)
    return {"x": x, **({"state": state} if o.get("state") else {}), **of_call(s, o)}


def _recurrent_of(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    first = o.get("feature_axis") == 0
    x = x.transpose(2, 1, 0) if first else x
    state = a.get("state", np.zeros((z["outputs"], len(x)) if first else (len(x), z["outputs"]), x.dtype))
    y, pull = L.recurrent(a, x, state.T if first else state, o.get("wiring", "balanced"), training(o, a))

    def moved(dy: np.ndarray) -> Arrays:
        found = pull(dy.transpose(2, 1, 0) if first else dy)
        return {**found, "x": found["x"].transpose(2, 1, 0), "state": found["state"].T} if first else found

    return (y.transpose(2, 1, 0) if first else y), moved


RNN = Layer(
    "LogicRNN",
    lambda z, o: _wired(z, o),
    _recurrent_inputs,
    _recurrent_of,
    (*OF_CALL, "state"),
    ("state",),
    _switch,
    _fits_numbers,
)


_DEFAULTS = {"BinaryLUT": "straight_through"}


def _trees(z: Sizes, o: Options) -> dict[str, Any]:
    arity = o.get("n_inputs", 2) if o.get("parameterization", "gates") != "gates" else 2
    geometry = {
        "none": {},
        "padding": {"padding": (1, 0), "pool": (2, 1), "kernel": (3, 2)},
        "strides": {"stride": (1, 2), "kernel": (2, 1)},
        "pool padding": {"pool": (2, 2), "pool_padding": (1, 0), "padding": (0, 1), "kernel": (1, 3)},
    }[o.get("geometry", "none")]
    return {
        "in_shape": (4, 2, z["slots"]),
        "n_kernels": z["outputs"],
        "kernel": 2,
        "n_inputs": arity,
        **given(o, "depth", "feature_axis", "estimator", "parameterization", "wiring"),
        **of_constructor(o),
        **({"channels_per_kernel": 1} if o.get("channels_per_kernel") else {}),
        "depth": o.get("depth", 2),
        **geometry,
    }


def _trees_of(z: Sizes, o: Options, a: Arrays, x: np.ndarray) -> L.Defined:
    sizes = _trees(z, o)
    names = {"kernel": 2, "stride": 1, "padding": 0, "pool": 1, "pool_padding": 0}
    geometry = L.Geometry(*(_pair(sizes.get(n, d)) for n, d in names.items()))
    return L.trees(a, x, sizes.get("parameterization", "gates"), geometry, z["outputs"], training(o, a))


def _tree_images(s: Source, z: Sizes, o: Options) -> Arrays:
    x = s.grid(z["batch"], *_trees(z, o)["in_shape"], steps=4)
    if o.get("feature_axis") == 0:
        x = np.ascontiguousarray(np.moveaxis(x, (-1, -3, -2), (0, 1, 2)))
    return {"x": x, **of_call(s, o)}


TREES = Layer("LogicConv", _trees, _tree_images, _axis(_trees_of, 3), OF_CALL, (), _switch, _fits_numbers)

GROUP_SUM = Layer(
    "GroupSum",
    lambda z, o: {"k": z["outputs"], "tau": 4.0, **given(o, "feature_axis")},
    lambda s, z, o: _features(s, {**z, "inputs": 2 * z["outputs"]}, o),
    _axis(lambda z, o, a, x: L.group_sum(x, z["outputs"], 4.0)),
    cast=(),
)

THERMOMETER = Layer(
    "Thermometer",
    lambda z, o: {
        "in_features": z["inputs"],
        "n_thresholds": z["bits"],
        **given(o, "learnable", "gradient", "temperature", "feature_axis"),
        **({"has_widths": True} if o.get("widths") and o.get("learnable", True) else {}),
        "learnable": o.get("learnable", True),
    },
    _features,
    _axis(
        lambda z, o, a, x: L.thermometer(
            a,
            x,
            learnable=o.get("learnable", True),
            **given(o, "gradient", "temperature", "deterministic"),
        )
    ),
    cast=(),
    how=_switch,
)


def _of_features(o: Options) -> dict[str, int]:
    return {"x": 1 if o.get("feature_axis") == 0 else 0}


def _of_recurrent(o: Options) -> dict[str, int]:
    return {"x": 2, "state": 1} if o.get("feature_axis") == 0 else {"x": 0, "state": 0}


def _of_channels(o: Options) -> dict[str, int]:
    return {"x": 3 if o.get("feature_axis") == 0 else 0}


def _of_weights(a: Arrays, o: Options) -> Any:
    """Dtype of the output of tables; of integers that of their scores."""
    dtype = o.get("dtype")
    if "exponents" in a:
        return definitions.accumulator(np.dtype(dtype or a["x"].dtype))
    return np.dtype(dtype or a["weights"].dtype)


def _of_numbers(o: Options) -> tuple[str, ...]:
    """Tables without logits are clipped."""
    return ("table",) if o.get("parameterization") == "raw" else ()


def _integers(o: Options) -> bool:
    return o.get("read") == "integers"


_DENSE_OPTIONS = {**EPSILON, **FIXED_POINT, **DTYPE, **LIBRARY}
_TABLES: dict[str, Any] = {"values": OF_TABLES, "factored": True, "dtype": _of_weights}
_IMAGES: dict[str, Any] = {"values": OF_READS, "factored": True, "constant": _integers, "dtype": _of_weights}

LAYERS: dict[str, Op] = {
    "LUT": LUT.member(("weights",), {"groups": (False, True), **_DENSE_OPTIONS}, **_TABLES),
    "SparseLUT": SPARSE_LUT.member(
        ("weights",),
        {"groups": (False, True), "lists": ("row", "table", "layer"), **_DENSE_OPTIONS},
        **_TABLES,
    ),
    "LUTAttention": ATTENTION.member(
        ("weights", "positions", "keys"), {**SIGHT, **_DENSE_OPTIONS}, **_TABLES
    ),
    "LUTPairAttention": PAIR_ATTENTION.member(
        ("weights", "positions", "keys"),
        {**SIGHT, "interleave": (False, True), **_DENSE_OPTIONS},
        **_TABLES,
    ),
    "ProjectionLUT": PROJECTION.member(
        ("weights", *DENSE, *SCALARS),
        {
            **SCORED,
            "read": tuple(READS),
            "projections": ("both", "first", "last"),
            "share_input": (False, True),
            "sum_heads": (False, True),
            **FIXED_POINT,
            **DTYPE,
            **LIBRARY,
        },
        chain=3,
        values=("grid", "ties"),  # rounding in the first projection would decide comparisons
        factored=True,
        constant=_integers,
    ),
    "NgramMemory": NGRAMS.member(
        NGRAM_PARAMETERS,
        {
            "segments": (False, True),
            "decode": (False, True),
            "orders": ((2, 3), (1,), (3, 2)),
            "kernel": (2, 0, 3),
            "seed": (0, 7),
            **FIXED_POINT,
            **DTYPE,
            **LIBRARY,
        },
        chain=6,
        values=FINITE,
        factored=True,
        batch=lambda o: {"x": 0, "tokens": 0, "segments": 0},
    ),
    "ProductKeyMemory": PRODUCT_KEYS.member(
        ("weights", *KEY_PARAMETERS),
        {**FIXED_POINT, **DTYPE, **LIBRARY},
        chain=6,
        values=DECIDED,
        factored=True,
    ),
    "ProductKeyExperts": EXPERTS.member(
        ("down", "up", *KEY_PARAMETERS),
        {**FIXED_POINT, **DTYPE, **LIBRARY},
        chain=6,
        values=DECIDED,
    ),
    "SpatialLUT": SPATIAL.member(
        ("weights", *SCALARS),
        {
            **SCORED,
            "fields": ("projections", "full", "windows"),
            "channels": (True, False),
            **_DENSE_OPTIONS,
        },
        **_IMAGES,
    ),
    "WindowLUT": WINDOW.member(
        ("weights", *SCALARS),
        {**SCORED, "strides": (False, True), "channels": (True, False), **_DENSE_OPTIONS},
        **_IMAGES,
    ),
    "ConvLUT": CONV.member(
        ("weights", *SCALARS),
        {
            **SCORED,
            "groups": (False, True),
            "strides": (False, True),
            "channels": (True, False),
            "pool": (None, (2, 1), "all"),
            **_DENSE_OPTIONS,
        },
        **_IMAGES,
    ),
    "LogicGates": _logic("LogicGates").member(
        ("logits", "scores"), {**WIRED, **DTYPE, **LIBRARY}, values=FINITE, chain=2, batch=_of_features
    ),
    "LogicRNN": RNN.member(
        ("state", "logits", "scores"),
        {**WIRED, "state": (False, True), **DTYPE, **LIBRARY},
        values=FINITE,
        chain=4,
        batch=_of_recurrent,
    ),
    "SoftLUT": _logic("SoftLUT", "parameterization").member(
        ("table", "scores"),
        {**WIRED, "parameterization": ("light", "walsh", "raw"), **DTYPE, **LIBRARY},
        values=FINITE,
        clipped=_of_numbers,
        chain=2,
        batch=_of_features,
    ),
    "BinaryLUT": _logic("BinaryLUT").member(
        ("table", "scores"),
        {**WIRED, "estimator": ("straight_through", "soft"), **DTYPE, **LIBRARY},
        values=FINITE,
        clipped=lambda o: ("table",),
        chain=2,
        batch=_of_features,
    ),
    "LogicConv": TREES.member(
        ("logits", "table"),
        {
            **ESTIMATORS,
            "readers": (True, False),
            "geometry": ("none", "padding", "strides", "pool padding"),
            "parameterization": ("gates", "light", "walsh", "raw"),
            "n_inputs": (2, 3),
            "depth": (2, 1, 3),
            "channels_per_kernel": (False, True),
            "wiring": ("balanced", "random"),
            **FEATURES,
            **DTYPE,
            **LIBRARY,
        },
        values=FINITE,
        clipped=_of_numbers,
        chain=4,
        batch=_of_channels,
    ),
    "GroupSum": GROUP_SUM.member((), {**FEATURES, **LIBRARY}, batch=_of_features),
    "Thermometer": THERMOMETER.member(
        ("thresholds",),
        {
            "learnable": (True, False),
            "gradient": ("straight_through", "soft"),
            "temperature": (1.0, 0.5),
            "widths": (False, True),
            "deterministic": (False, True),
            **FEATURES,
            **DTYPE,
            **LIBRARY,
        },
        values=(*FINITE, "nan", "infinite"),
        batch=_of_features,
    ),
}


# ------------------------------------------------------------------------------------- a model of trees
def _net(z: Sizes, o: Options) -> LogicTreeNetConfig:
    given_thresholds = o.get("n_thresholds", 1)
    needs = ("edges", "learned_thresholds", "threshold_gradient") if given_thresholds else ()
    arity = ("n_inputs",) if o.get("tables", "gates") != "gates" else ()
    return LogicTreeNetConfig(
        (4, 3, 1),
        2,
        kernels=(z["slots"], z["outputs"]) if o.get("two_layers") else (z["outputs"],),
        layers=(z["inputs"], 4),
        n_thresholds=given_thresholds,
        depth=2,
        kernel=2,
        padding=(1, 0) if o.get("two_layers") else 0,
        pool=1,
        candidates=CANDIDATES,
        tau=2.0,
        **given(o, *needs, *arity, "tables", "wiring", "estimator", "leaves"),
    )


@functools.cache
def _net_parts(config: LogicTreeNetConfig) -> Any:
    with jax.ensure_compile_time_eval():
        return nnx.split(LogicTreeNet(config, rngs=nnx.Rngs(0)))


def _parts_of(config: LogicTreeNetConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """Layers of the model by the names of its parts, with their arguments."""
    parts: dict[str, tuple[str, dict[str, Any]]] = {}
    if config.n_thresholds:
        learned = config.learned_thresholds
        sizes = {"in_features": config.n_maps, "n_thresholds": config.n_thresholds}
        sizes |= {"gradient": config.threshold_gradient}
        parts["encoder"] = "Thermometer", {**sizes, "learnable": learned, "has_widths": learned}
    gates = "LogicGates" if config.tables == "gates" else "SoftLUT"
    parts |= {f"trees/{i}": ("LogicConv", a) for i, a in enumerate(config.tree_arguments())}
    return parts | {f"gates/{i}": (gates, a) for i, a in enumerate(config.gate_arguments())}


def _net_arrays(s: Source, z: Sizes, o: Options) -> Arrays:
    o = _fits_net(o)
    config = _net(z, o)
    found: Arrays = {"x": s.grid(z["batch"], *config.in_shape, steps=4), **of_call(s, o)}
    for part, (layer, arguments) in _parts_of(config).items():
        variables = variables_of(s, layer, {**arguments, "param_dtype": np.float32}, o)
        found |= {f"{part}/{name}": array for name, array in variables.items()}
    return found


def _fits_net(o: Options) -> Options:
    """Return options that fit: tables without logits have no temperature."""
    return _without(o, "temperature") if o.get("tables") == "raw" else o


def _call_net(module: Any, a: Arrays, o: Options) -> Arrays:
    model = _merged(*_net_parts(_net(o["sizes"], o)))
    for path, array in a.items():
        if path not in ("x", "temperature"):
            *parts, name = path.split("/")
            part = functools.reduce(lambda m, p: m[int(p)] if p.isdigit() else getattr(m, p), parts, model)
            getattr(part, name).set_value(array)
    return {"y": model(a["x"], **given(o, "deterministic"), **given(a, "temperature"))}


def _of_net(a: Arrays, o: Options) -> tuple[Arrays, Pullback]:
    config, how = _net(o["sizes"], o), training(o, a)
    kind = "LogicGates" if config.tables == "gates" else "SoftLUT"

    def part(name: str) -> Arrays:
        return {n.removeprefix(f"{name}/"): v for n, v in a.items() if n.startswith(f"{name}/")}

    steps: list[tuple[str, Callable[[np.ndarray], L.Defined]]] = []
    if config.edges:
        steps.append(("edges", L.with_edges))
    if config.n_thresholds:
        learned = config.learned_thresholds
        ways = {"gradient": config.threshold_gradient, "deterministic": o.get("deterministic", False)}
        steps.append(("encoder", lambda x: L.thermometer(part("encoder"), x, learnable=learned, **ways)))
    for i, spec in enumerate(config.tree_specs()):
        geometry = L.Geometry(*spec.geometry, *spec.pooling)

        def of_trees(
            x: np.ndarray, i: int = i, geometry: L.Geometry = geometry, n: int = spec.n_kernels
        ) -> L.Defined:
            y, pull = L.trees(part(f"trees/{i}"), x, config.tables, geometry, n, how)
            return y.astype(x.dtype), pull

        steps.append((f"trees/{i}", of_trees))
    steps.append(("", L.channels_joined))
    for i in range(len(config.layers)):
        name = f"gates/{i}"
        steps.append((name, lambda x, n=name: L.wired(kind, part(n), x, config.wiring, how, config.tables)))
    steps.append(("votes", lambda x: L.group_sum(x, config.n_classes, config.tau)))
    y, pull = L.chained(*steps)(a["x"])
    return {"y": y}, pull


NET_TABLES = tuple(f"{part}/table" for part in ("trees/0", "trees/1", "gates/0", "gates/1"))

NETS: dict[str, Op] = {
    "LogicTreeNet": Op(
        _net_arrays,
        _call_net,
        (
            "x",
            "encoder/thresholds",
            *(
                f"{part}/{name}"
                for part in ("trees/0", "trees/1", "gates/0", "gates/1")
                for name in ("logits", "table", "scores")
            ),
        ),
        {
            "n_thresholds": (1, 0, 2),
            "edges": (False, True),
            "learned_thresholds": (False, True),
            "threshold_gradient": ("straight_through", "soft"),
            "leaves": ("balanced", "random"),
            "n_inputs": (2, 3),
            "two_layers": (False, True),
            "tables": ("gates", "light", "walsh", "raw"),
            "wiring": ("balanced", *wiring.LEARNED),
            "estimator": ("soft", "straight_through"),
            "temperature": (1.0, "traced"),
            "deterministic": (False, True),
        },
        batch=lambda o: {"x": 0},
        values=FINITE,
        clipped=lambda o: NET_TABLES if o.get("tables") == "raw" else (),
        chain=6,
        reference=False,
        dtype=lambda a, o: a["x"].dtype,
        define=_of_net,
    ),
}
"""Models of layers for images."""

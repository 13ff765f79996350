"""Runs a drawn call and compares its output and every cotangent, by name, with the definition."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import lutjax
from lutjax.dispatch import _meshes
from lutjax.ops.gate_network import gate_network
from lutjax.ops.logic_trees import logic_trees
from lutjax.ops.lut_at_places import lut_at_places
from lutjax.wiring import Edges
from properties import definitions as D
from properties.members import READS, tables
from properties.strategies import Call

Sums = dict[str, D.Sum]
OF_LAYERS = {"gate_network": gate_network, "logic_trees": logic_trees, "lut_at_places": lut_at_places}
"""Ops that layers alone call."""
SELF_ATTENTION = ("lut_attention", "lut_pair_attention")


# ------------------------------------------------------------------------------------- what the package computes
def _detection(arguments: dict[str, Any], options: dict[str, Any], name: str) -> Any:
    bits = options.pop(f"{name}.bits", None)
    parts = [arguments.pop(f"{name}.{part}", None) for part in ("index", "flip", "margin")]
    return None if bits is None else lutjax.Detection(*parts, bits)


def invoke(op: str, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """The op's output for arguments by name, see `Call`."""
    arguments, options = dict(arguments), dict(options)
    if options.get("accumulate"):
        options["accumulate"] = lutjax.FixedPoint(options["accumulate"])
    if op in ("lookup", "sparse_lookup"):
        arguments["detection"] = _detection(arguments, options, "detection")
    if "first" in arguments:
        detection = arguments["detection"]
        sizes = detection.shape[-1], 2**detection.bits, options.pop("n_outputs")
        arguments["targets"] = Edges(arguments.pop("first"), arguments["targets"], *sizes, width=4)
    if op == "lookup_attention":
        arguments |= {name: _detection(arguments, options, name) for name in ("query", "key", "position")}
    if options.get("read"):
        arguments["scalars"] = {n.removeprefix("scalars."): arguments.pop(n) for n in _scalars(arguments)}
        options["read"] = READS[options["read"]][1]
    if "exponents" in arguments:
        arguments["weights"] = lutjax.QuantizedTables(arguments["weights"], arguments.pop("exponents"))
    if op == "conv_lut":
        windows = options.pop("windows")
        options |= {"kernel": windows.size, "stride": windows.stride, "padding": windows.padding}
    function = OF_LAYERS[op] if op in OF_LAYERS else getattr(lutjax, op)
    return function(**arguments, **options)


def _scalars(arguments: dict[str, Any]) -> list[str]:
    return [n for n in arguments if n.startswith("scalars.")]


@functools.cache
def _jitted(
    op: str, options: tuple[tuple[str, Any], ...], differentiated: tuple[str, ...], formulation: str
) -> Any:
    """Output and cotangents as one program. `formulation` is what the rest of the suite has patched it to be."""

    def run(primals: dict[str, Any], others: dict[str, Any], dy: Any) -> Any:
        def f(primals: dict[str, Any]) -> Any:
            y = invoke(op, {**primals, **others}, dict(options))
            is_detection = isinstance(y, lutjax.Detection)
            return (y.margin, (y.index, y.flip)) if is_detection else (y, ())

        if dy is None:
            return *f(primals), {}
        y, pullback, rest = jax.vjp(f, primals, has_aux=True)
        if _meshes.explicit_axes(y):
            dy = _meshes.laid_out(dy, _meshes.spec_of(y))
        return y, rest, pullback(dy)[0]

    return jax.jit(run)


def computed(call: Call, formulation: str = "cpu") -> dict[str, np.ndarray]:
    """``"y"``, for a detection ``"index"`` and ``"flip"`` too, and ``"d name"`` for each differentiated argument."""
    primals = {n: call.arguments[n] for n in call.differentiated}
    others = {n: a for n, a in call.arguments.items() if n not in primals}
    run = _jitted(call.op, tuple(sorted(call.options.items())), call.differentiated, formulation)
    y, rest, cotangents = run(primals, others, call.dy)
    named = dict(zip(("index", "flip"), rest, strict=False))
    found = {"y": y, **named, **{f"d {n}": a for n, a in cotangents.items()}}
    return {n: np.asarray(a) for n, a in found.items()}


# ------------------------------------------------------------------------------------- what is defined
def _defined_detection(call: Call, name: str) -> Any:
    if f"{name}.bits" not in call.options:
        return None
    index, flip, margin = (call.arguments[f"{name}.{part}"] for part in ("index", "flip", "margin"))
    return D.Detection(index.astype(np.int64), flip.astype(np.int64), margin, call.options[f"{name}.bits"])


def _where(call: Call) -> D.Where:
    a, o = call.arguments, call.options
    query = a.get("query_segments", a.get("segments"))
    return D.Where(
        o.get("window"),
        a.get("query_start", o.get("query_start", 0)),
        a.get("key_start", o.get("key_start", 0)),
        query,
        query if call.op in SELF_ATTENTION and "key_segments" not in a else a.get("key_segments"),
        a.get("block_mask"),
        o.get("block_sizes"),
    )


def defined(call: Call) -> Sums:
    """Return the expected result of `computed`."""
    with np.errstate(all="ignore"):
        y, cotangents = DEFINED[call.op](call)
    found = {f"d {n}": cotangents[n] for n in call.differentiated} if call.dy is not None else {}
    return {**(y if isinstance(y, dict) else {"y": y}), **found}


def _detect(call: Call, of: str) -> Any:
    a, epsilon = call.arguments, call.options.get("epsilon", 0.0)
    ct = D.exactly(call.dy)
    if of == "positions":
        d, cotangents = D.detect_signs(a[of], epsilon), {of: D.detect_signs_vjp(a[of], ct)}
    else:
        d = D.detect(a[of], a["anchors"], epsilon)
        cotangents = {of: D.detect_vjp(a[of], a["anchors"], ct, call.options.get("accumulate"))}
    return {"y": D.exactly(d.margin), "index": D.exactly(d.index), "flip": D.exactly(d.flip)}, cotangents


def _lookup(call: Call) -> Any:
    w, d, scale = (
        call.arguments["weights"],
        _defined_detection(call, "detection"),
        call.options.get("accumulate"),
    )
    of = D.lookup_vjp(w, d, call.dy, scale)
    return D.lookup(w, d, scale), {"weights": of["weights"], "detection.margin": of["margin"]}


def _sparse_lookup(call: Call) -> Any:
    a, d, scale = call.arguments, _defined_detection(call, "detection"), call.options.get("accumulate")
    weights, targets = a["weights"], a["targets"]
    if "first" in a:
        slots = D.EdgesAsSlots(a["first"], 2**d.bits)
        weights, targets = slots.given(weights, targets)
    of = D.sparse_lookup_vjp(weights, d, targets, call.dy, scale)
    y = D.sparse_lookup(weights, d, targets, call.options["n_outputs"], scale)
    of_weights = slots.of_edges(of["weights"]) if "first" in a else of["weights"]
    return y, {"weights": of_weights, "detection.margin": of["margin"]}


def _grouped(call: Call, a: np.ndarray) -> np.ndarray:
    """An array ``[..., G, n]``: without groups there is one."""
    return a if "groups" in call.options else a[..., None, :]


def _ungrouped(call: Call, a: D.Sum) -> D.Sum:
    return a if "groups" in call.options else a.map(lambda a: a.reshape(*a.shape[:-2], a.shape[-1]))


def _margins(call: Call) -> Any:
    x, anchors, groups = (
        _grouped(call, call.arguments["x"]),
        call.arguments["anchors"],
        call.options.get("groups", 1),
    )
    of = D.margins_vjp(x, anchors, D.exactly(call.dy), groups, call.options.get("accumulate"))
    return D.exactly(D.margins(x, anchors, groups)), {"x": _ungrouped(call, of)}


def _weighted_lookup(call: Call) -> Any:
    given = [call.arguments[n] for n in ("weights", "index", "coefficients")]
    o = {n: call.options[n] for n in ("groups", "accumulate", "valued") if n in call.options}
    y = D.weighted_lookup(*given, **o)
    return _ungrouped(call, y), D.weighted_lookup_vjp(*given, _grouped(call, call.dy), **o)


def _scored_lut(call: Call) -> Any:
    a, (read, how) = call.arguments, READS[call.options["read"]]
    groups, sum_groups = call.options.get("groups", 1), call.options.get("sum_groups", False)
    x, names = _grouped(call, a["x"]), {n.removeprefix("scalars.log_"): n for n in _scalars(a)}
    s = {short: float(np.exp(np.float64(a[n]))) for short, n in names.items()}
    ways = D.ways_of(read, D.margins(x, a["anchors"], groups), s, getattr(how, "ways", 2))
    rest = (read, groups, sum_groups, a.get("keep"))
    y = D.scored_lut(ways, tables(a), *rest)
    if call.dy is None:
        return _ungrouped(call, y), {}
    of = D.scored_lut_vjp(x, ways, a["weights"], a["anchors"], _grouped(call, call.dy), *rest)
    of = {names.get(n, n): cotangent for n, cotangent in of.items()}
    return _ungrouped(call, y), {**of, "x": _ungrouped(call, of["x"])}


def _conv_lut(call: Call) -> Any:
    a, o = call.arguments, dict(call.options)
    names = {n.removeprefix("scalars.log_"): n for n in _scalars(a)}
    if o.get("read"):
        name, how = READS[o.pop("read")]
        scalars = {short: float(np.exp(np.float64(a[n]))) for short, n in names.items()}
        o |= {"read": name, "scalars": scalars, "n_ways": getattr(how, "ways", 2), "keep": a.get("keep")}
    given = a["images"], tables(a), a["anchors"]
    y = D.conv_lut(*given, **o)
    of = {} if call.dy is None else D.conv_lut_vjp(*given, call.dy, **o)
    return y, {names.get(n, n): cotangent for n, cotangent in of.items()}


def _lut(call: Call) -> Any:
    x, w, anchors = (call.arguments[n] for n in ("x", "weights", "anchors"))
    o = (call.options.get("epsilon", 0.0), call.options.get("accumulate"))
    return D.lookup(w, D.detect(x, anchors, o[0]), o[1]), D.lut_vjp(x, w, anchors, call.dy, *o)


def _lut_at_places(call: Call) -> Any:
    a, o = call.arguments, dict(call.options)
    given, n_outputs = (a["images"], a["weights"], a["anchors"], a.get("targets")), o.pop("n_outputs", None)
    return D.lut_at_places(*given, n_outputs, **o), D.lut_at_places_vjp(*given, call.dy, **o)


def _sparse_lut(call: Call) -> Any:
    x, w, anchors, targets = (call.arguments[n] for n in ("x", "weights", "anchors", "targets"))
    o = (call.options.get("epsilon", 0.0), call.options.get("accumulate"))
    y = D.sparse_lookup(w, D.detect(x, anchors, o[0]), targets, call.options["n_outputs"], o[1])
    return y, D.sparse_lut_vjp(x, w, anchors, targets, call.dy, *o)


def _lookup_attention(call: Call) -> Any:
    detections = [_defined_detection(call, n) for n in ("query", "key", "position")]
    w, scale = call.arguments["weights"], call.options.get("accumulate")
    of = D.lookup_attention_vjp(w, *detections, call.dy, _where(call), scale)
    margins = {f"{n}.margin": of[n] for n in ("query", "key", "position")}
    return D.lookup_attention(w, *detections, _where(call), scale), {"weights": of["weights"], **margins}


def _lut_attention(call: Call) -> Any:
    a = call.arguments
    args = a["x"], a["weights"], a["anchors"], a.get("positions")
    o = {n: call.options[n] for n in ("epsilon", "accumulate") if n in call.options}
    return D.lut_attention(*args, _where(call), **o), D.lut_attention_vjp(*args, call.dy, _where(call), **o)


def _lut_pair_attention(call: Call) -> Any:
    a = call.arguments
    args = a["x"], a.get("keys", a["x"]), a["weights"], a["anchors"], a.get("positions")
    o = {n: call.options[n] for n in ("epsilon", "accumulate", "interleave") if n in call.options}
    of = D.lut_pair_attention_vjp(*args, call.dy, _where(call), **o)
    if "keys" not in a:
        of["x"] = _rounded_apart(of["x"], of["keys"], a["x"].dtype)
    return of["y"], of


def _rounded_apart(a: D.Sum, b: D.Sum, dtype: Any) -> D.Sum:
    """The sum of two cotangents of one array, an argument twice: each is rounded to its dtype before JAX adds them."""
    info = ml_dtypes.finfo(dtype)
    sizes = np.abs(a.value) + np.abs(b.value)
    overflows = np.isfinite(sizes) & (sizes > float(info.max))
    error = np.where(overflows, np.inf, np.where(np.isfinite(sizes), float(info.eps) / 2 * sizes, 0))
    total = D.added(a, b)
    return total._replace(error=total.error + error)


def _gates(call: Call, name: str) -> Any:
    a, first = call.arguments, call.options.get("feature_axis") == 0
    hard = {"hard": True} if call.options.get("hard") else {}

    def last(array: Any) -> Any:
        return np.moveaxis(array, 0, -1) if first else array

    args = last(a["x"]), a[name], a["wires"], *((call.options["sizes"],) if "sizes" in call.options else ())
    how = {**hard, **({"accumulate": call.options["accumulate"]} if "accumulate" in call.options else {})}
    y = getattr(D, call.op)(*args, **how)
    of = getattr(D, f"{call.op}_vjp")(*args, last(call.dy), **how)
    if first:
        y, of["x"] = (s.map(lambda array: np.moveaxis(array, -1, 0)) for s in (y, of["x"]))
    return y, of


def _logic_trees(call: Call) -> Any:
    a, places = call.arguments, call.options["places"]
    batch = a["x"].shape[1:]

    def folded(array: Any) -> Any:
        return array.reshape(*array.shape[: array.ndim - len(batch)], math.prod(batch))

    args = folded(a["x"]), a["coefficients"], a["leaves"], places
    y, of = D.logic_trees(*args), D.logic_trees_vjp(*args, folded(call.dy))
    of["x"] = of["x"].map(lambda array: array.reshape(a["x"].shape))
    return y.map(lambda array: array.reshape(call.dy.shape)), of


def _gate_coefficients(call: Call) -> Any:
    hard, first = call.options.get("hard", False), call.options.get("axis") == 0
    logits = call.arguments["logits"].T if first else call.arguments["logits"]
    of = D.gate_coefficients_vjp(logits, D.exactly(call.dy), hard)
    return D.gate_coefficients(logits, hard), {"logits": of.map(np.transpose) if first else of}


DEFINED = {
    "detect": functools.partial(_detect, of="x"),
    "detect_signs": functools.partial(_detect, of="positions"),
    "margins": _margins,
    "lookup": _lookup,
    "weighted_lookup": _weighted_lookup,
    "scored_lut": _scored_lut,
    "cell_total_variation": lambda call: (
        D.cell_total_variation(call.arguments["weights"]),
        {"weights": D.cell_total_variation_vjp(call.arguments["weights"], call.dy)},
    ),
    "conv_lut": _conv_lut,
    "lut": _lut,
    "sparse_lookup": _sparse_lookup,
    "sparse_lut": _sparse_lut,
    "lookup_attention": _lookup_attention,
    "lut_attention": _lut_attention,
    "lut_pair_attention": _lut_pair_attention,
    "bilinear_gates": functools.partial(_gates, name="coefficients"),
    "gate_network": functools.partial(_gates, name="coefficients"),
    "logic_gates": functools.partial(_gates, name="logits"),
    "logic_trees": _logic_trees,
    "lut_at_places": _lut_at_places,
    "soft_lut": functools.partial(_gates, name="table"),
    "binary_lut": functools.partial(_gates, name="table"),
    "gate_coefficients": _gate_coefficients,
    "packed_lut": lambda call: (D.exactly(D.packed_lut(**call.arguments)), {}),
    "scale_gradient": lambda call: (
        D.exactly(call.arguments["x"]),
        {"x": D.scale_gradient_vjp(call.dy, call.arguments["factor"])},
    ),
}


# ------------------------------------------------------------------------------------- comparing
# On a grid these are sums of whole numbers of quarters, and sixteenths where they are products: nothing rounds.
EXACT = {
    "y": ("detect", "margins", "lookup", "weighted_lookup", "lut", "sparse_lookup", "sparse_lut", "lut_at_places", "lookup_attention", "lut_attention",
          "lut_pair_attention", "bilinear_gates", "logic_trees", "binary_lut", "soft_lut"),
    "d weights": ("lookup", "weighted_lookup", "lut", "sparse_lookup", "sparse_lut", "lut_at_places", "lookup_attention", "lut_attention", "lut_pair_attention"),
    "d x": ("detect", "margins", "bilinear_gates"),
    "d coefficients": ("weighted_lookup", "bilinear_gates"),
}  # fmt: skip


def check(call: Call, formulation: str = "cpu") -> None:
    """Raises AssertionError where the package and the definition differ by more than rounding."""
    compare(call, computed(call, formulation))


def compare(call: Call, found: dict[str, np.ndarray], parts: int = 1) -> None:
    """Raises AssertionError where what `computed` found of a call and the definition differ by more than rounding.

    Args:
      parts: how many devices may each have a part of a sum, which is rounded to a
        result of 16 bits before these are added.
    """
    wanted = defined(call)
    assert set(found) == set(wanted), (set(found), set(wanted))
    dtypes = [a.dtype for a in call.arguments.values() if not np.issubdtype(a.dtype, np.integer)]
    narrowest = np.float64 if all(d == np.float64 for d in dtypes) else np.float32
    problems = [
        problem
        for name, want in wanted.items()
        if (
            problem := differs(
                name, found[name], want, narrowest, parts, exact=call.exact and call.op in EXACT.get(name, ())
            )
        )
    ]
    assert not problems, "\n".join([*problems, call.code()])


def differs(
    name: str, got: np.ndarray, want: D.Sum, dtype: Any, parts: int = 1, *, exact: bool = False
) -> str:
    """Describe the elements that are not within the bound; empty if all are.

    NaN has to be where the definition has NaN, and an infinity where it has that infinity. The bound is that of `Sum.bound`
    with roundings of `dtype`, and one rounding to the dtype of the result; exact: only the latter. Where the magnitudes
    of the addends together overflow `dtype`, nothing is said.
    """
    if got.shape != want.value.shape:
        return f"{name} has shape {got.shape}, and is defined with {want.value.shape}"
    with np.errstate(all="ignore"):
        result = np.asarray(got).astype(np.float64)
        nearest = want.value.astype(got.dtype).astype(np.float64)
        if np.issubdtype(got.dtype, np.integer) or got.dtype == bool:
            info_eps = smallest = 0.0
        else:
            info = ml_dtypes.finfo(got.dtype)
            info_eps, smallest = float(info.eps), float(info.tiny)
        bound = want.bound(dtype)
        if parts > 1 and info_eps > ml_dtypes.finfo(dtype).eps:  # each is rounded, and so is each sum of two
            bound = bound + parts * info_eps * want.size
        if exact:
            bound = want.error
        off = np.abs(result - want.value)
        slack = np.where(bound == 0, 0, bound * (1 + info_eps) + info_eps * np.abs(want.value) + smallest)
        right = (result == nearest) | (np.isnan(result) & np.isnan(want.value)) | (off <= slack)
        right |= np.isinf(want.error)  # not defined
        # A result that the dtype cannot hold becomes infinite, perhaps already just below.
        if info_eps:
            beyond = np.abs(want.value) + bound > float(info.max)
            right |= beyond & np.isfinite(want.value) & np.isinf(result)
        if np.all(right):
            return ""
        wrong = np.argwhere(~right)
        lines = [
            f"  {tuple(map(int, at))}: {result[tuple(at)]!r}, defined as {want.value[tuple(at)]!r} +- {slack[tuple(at)]:.3g}"
            for at in wrong[:5]
        ]
    return "\n".join([f"{name} differs in {len(wrong)} of {result.size} elements", *lines])


# ------------------------------------------------------------------------------------- updates of tables
@functools.cache
def _jitted_update(op: str, options: tuple[tuple[str, Any], ...], rule: Any) -> Any:
    from lutjax.training import tables

    def run(weights: Any, others: dict[str, Any], dy: Any, rate: Any, state: Any) -> Any:
        def loss(params: dict[str, Any]) -> Any:
            return jnp.sum(invoke(op, {**params, **others}, dict(options)) * dy)

        _, gradients = tables.value_and_grad(loss)({"weights": weights})
        new, state = lutjax.update_table(weights, gradients["weights"], rate, rule, state)
        return new, state, gradients["weights"].to_dense()

    return jax.jit(run)


def _touched(call: Call, gradient: D.Sum) -> np.ndarray:
    weights = call.arguments["weights"]
    if "first" in call.arguments:
        d = _defined_detection(call, "detection")
        of_rows = D.touched_by_lookup(2**d.bits, d).ravel()
        return np.repeat(of_rows, np.diff(call.arguments["first"]))
    if call.op in ("lookup", "sparse_lookup"):
        return D.touched_by_lookup(weights.shape[1], _defined_detection(call, "detection"))
    if call.op == "lookup_attention":
        detections = (_defined_detection(call, n) for n in ("query", "key", "position"))
        return D.touched_by_attention(weights, *detections, _where(call))
    return (gradient.depth > 0).any(-1)  # something was added to each output of every row that was looked up


def _as_rows(arrays: Any, touched: np.ndarray) -> Any:
    """Return arrays of rows; edges as rows of one number."""
    return jax.tree.map(lambda a: a[:, None] if np.ndim(a) == touched.ndim else a, arrays)


def check_update(
    call: Call, rule_name: str, hyperparameters: dict[str, float], rng: np.random.Generator
) -> None:
    """Check one step of a rule from a drawn state, on a grid: the gradients are exact."""
    from lutjax.training import tables

    rule = getattr(tables, rule_name)(**hyperparameters)
    weights = call.arguments["weights"]
    others = {n: a for n, a in call.arguments.items() if n != "weights"}
    state = {
        n: rng.integers(0, 4, a.shape).astype(a.dtype) for n, a in jax.eval_shape(rule.init, weights).items()
    }
    rate = np.float32(0.5)
    run = _jitted_update(call.op, tuple(sorted(call.options.items())), rule)
    new, new_state, dense = run(weights, others, call.dy, rate, state)
    with np.errstate(all="ignore"):
        gradient = defined(call)["d weights"]
        touched = _touched(call, gradient)
        wanted, wanted_state = D.updated(
            *_as_rows((weights, gradient.value), touched),
            touched,
            rate,
            rule_name,
            _as_rows(state, touched),
            **hyperparameters,
        )
        if weights.ndim == 1:
            wanted, wanted_state = wanted[:, 0], {n: a[:, 0] for n, a in wanted_state.items()}
    assert set(new_state) == set(wanted_state)
    assert (problem := differs("gradient", dense, gradient, np.float32, exact=True)) == "", problem
    # A step is a chain of about twenty operations, of which powers and roots take a few units.
    start = {"weights": weights, **state}
    results = {"weights": wanted, **wanted_state}
    for name, want in results.items():
        size = np.abs(want) + np.abs(D.wide(start[name])) + np.abs(want - D.wide(start[name]))
        moved = touched if weights.ndim == 1 else touched[..., None]
        sums = D.Sum(want, size, np.where(moved, 32.0, 0) + 0 * want, 0 * want)
        problem = differs(name, {"weights": new, **new_state}[name], sums, np.float32)
        assert problem == "", problem

"""Calls of ops, drawn: sizes and options from a pool or freely, values from kinds that are known to be hard.

Compilation takes a thousand times as long as a call, so what a program depends on (`sizes`: shapes, dtypes, options) is
kept apart from what it does not. `CALLS[op](draw, sizes)` draws the values of a `Call`; `POOLS[op]` has sizes by name for
runs of a bounded length, and `SIZES[op]` is a strategy of free ones.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from lutjax.ops.logic_trees import Places
from lutjax.ops.lut_at_places import Windows
from properties.definitions import INT32
from properties.members import READS

Sizes = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclasses.dataclass(repr=False)
class Call:
    """An op, its arguments by name, and the cotangent of its output.

    Attributes:
      arguments: NumPy arrays; none has the value None. A `lutjax.Detection` is three arrays, ``"query.index"`` and so on.
      differentiated: names of the arguments whose cotangents are wanted.
      options: what is static; ``"query.bits"`` is of a detection.
      dy: cotangent of the output, or of the margin where that is a detection; None where there is none.
      exact: whether all values are small whole numbers of quarters, on which sums and products do not round.
    """

    op: str
    arguments: dict[str, np.ndarray]
    differentiated: tuple[str, ...]
    options: dict[str, Any]
    dy: np.ndarray | None
    exact: bool

    def __repr__(self) -> str:
        """Short; a failed comparison prints `code`."""
        arrays = {n: f"{a.dtype}{list(a.shape)}" for n, a in self.arguments.items()}
        return f"<{self.op} of {arrays}, {self.options}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis would print every field
        printer.text(repr(self))

    def code(self) -> str:
        """Return code that makes the same call again, where ``nan``, ``inf`` and `np` are defined."""
        fields = ("op", "arguments", "differentiated", "options", "dy", "exact")

        def text(value: Any) -> str:
            if isinstance(value, np.ndarray):
                return f"np.array({value.tolist()}, '{value.dtype}').reshape({value.shape})"
            if isinstance(value, dict):
                return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in value.items()) + "}"
            return repr(value)

        return "Call(" + ", ".join(f"{f}={text(getattr(self, f))}" for f in fields) + ")"


# ------------------------------------------------------------------------------------- values
GRID = "grid"  # quarters from -2 to 2: ties, zeros of both signs, sums that are exact
TIES = "ties"  # -1, -0, 0, 1
GENERAL = "general"  # normal
LARGE = "large"  # beside normal values those that swallow them, and the largest there are
SPECIAL = "special"  # infinities and NaN among quarters
NAN = "nan"  # NaN among quarters

FINITE = (GRID, TIES, GENERAL)
EVERY = (GRID, TIES, GENERAL, LARGE, SPECIAL)


class Values:
    """Draws arrays: hypothesis draws the kind and a seed, which shrink well; the rest is NumPy's, which is fast."""

    def __init__(self, draw: Draw, kinds: tuple[str, ...]):
        self._draw = draw
        # Where finite numbers overflow, what an infinity beside them makes depends on the order of additions.
        if LARGE in kinds and SPECIAL in kinds:
            left_out = draw(st.sampled_from((LARGE, SPECIAL)))
            kinds = tuple(k for k in kinds if k != left_out)
        self._kinds = kinds
        self._rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        # A quarter of the calls is on grids throughout, where sums are exact; in another one all tables are large.
        theme = draw(st.sampled_from((GRID, LARGE, None, None)))
        self._common = GRID if theme == GRID else None
        self._large_tables = theme == LARGE and LARGE in kinds
        self.exact = True

    def floats(self, shape: tuple[int, ...], dtype: str, kinds: tuple[str, ...] | None = None) -> np.ndarray:
        kind = self._common or self._draw(st.sampled_from(kinds or self._kinds))
        self.exact &= kind in (GRID, TIES)
        return self._of_kind(kind, shape, np.dtype(dtype))

    def table(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self.floats(shape, dtype, (LARGE,) if self._large_tables else None)

    def _of_kind(self, kind: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        rng = self._rng
        quarters = rng.integers(-8, 9, shape) / 4
        quarters = np.where(quarters == 0, rng.choice([0.0, -0.0], shape), quarters)
        if kind == GRID:
            values = quarters
        elif kind == TIES:
            values = rng.choice([-1.0, -0.0, 0.0, 1.0], shape)
        elif kind == GENERAL:
            values = rng.normal(size=shape)
        elif kind == LARGE:
            largest = float(ml_dtypes.finfo(dtype).max)
            scale = min(1e8, largest / 8)
            palette = [scale, -scale, scale * 1.0625]
            if self._draw(st.booleans()):
                palette += [min(3e38, largest), -min(3e38, largest)]
            values = np.where(rng.random(shape) < 0.5, rng.choice(palette, shape), rng.normal(size=shape))
        elif kind == SPECIAL:
            palette = self._draw(st.sampled_from(([np.nan], [np.inf], [-np.inf, np.inf], [np.inf, np.nan])))
            values = np.where(rng.random(shape) < 0.25, rng.choice(palette, shape), quarters)
        elif kind == NAN:
            values = np.where(rng.random(shape) < 0.25, np.nan, quarters)
        else:
            raise ValueError(kind)
        return np.asarray(values).astype(dtype)

    def unit(self, shape: tuple[int, ...], dtype: str, kinds: tuple[str, ...]) -> np.ndarray:
        """Bits and what lies between them; other kinds as they are."""
        kind = self._common or self._draw(st.sampled_from(kinds))
        self.exact &= kind in (GRID, TIES)
        if kind == GRID:
            return (self._rng.integers(0, 5, shape) / 4).astype(dtype)
        if kind == TIES:
            return self._rng.integers(0, 2, shape).astype(dtype)
        return self._of_kind(kind, shape, np.dtype(dtype))

    def ids(self, shape: tuple[int, ...], n: int, *, wild: bool = True) -> np.ndarray:
        """int32 ids of n things, with repetitions; `wild` in a quarter of the calls: some of them are out of range."""
        ids = self._rng.integers(0, max(n, 1), shape)
        if wild and self._draw(st.integers(0, 3)) == 3:
            out = [-1, -2, n, n + 1, INT32.min, INT32.max, INT32.min + 1, -(2**16)]
            ids = np.where(self._rng.random(shape) < 0.4, self._rng.choice(out, shape), ids)
        return ids.astype(np.int32)

    def far_ids(self, shape: tuple[int, ...], n: int) -> np.ndarray:
        """int64 ids of n things, some of them far out of range."""
        out = [
            -1,
            n,
            INT32.min,
            INT32.max,
            -(2**31) - 1,
            2**31,
            2**32,
            2**32 + 1,
            -(2**32),
            2**63 - 1,
            -(2**63),
        ]
        ids = self._rng.integers(0, max(n, 1), shape)
        return np.where(self._rng.random(shape) < 0.5, self._rng.choice(np.array(out), shape), ids)

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> np.ndarray:
        return self._rng.integers(low, high + 1, shape).astype(np.int32)

    def detection(
        self, name: str, shape: tuple[int, ...], bits: int, dtype: str, *, wild: bool = False
    ) -> dict[str, np.ndarray]:
        """The three arrays of a detection, by name."""
        dtype = dtype if dtype == "float64" else "float32"
        if bits == 0:
            zeros = np.zeros(shape, np.int32)
            return {
                f"{name}.index": zeros,
                f"{name}.flip": zeros,
                f"{name}.margin": np.full(shape, np.inf, dtype),
            }
        return {
            f"{name}.index": self.ids(shape, 2**bits, wild=wild),
            f"{name}.flip": (1 << self._rng.integers(0, bits, shape)).astype(np.int32),
            f"{name}.margin": self.floats(shape, dtype),
        }


def _call(
    v: Values, op: str, arguments: Any, differentiated: Any, sizes: Sizes, options: Any, dy: Any
) -> Call:
    not_taken = {
        "detect_signs": "accumulate",
        **dict.fromkeys(("lookup", "sparse_lookup", "lookup_attention"), "epsilon"),
    }
    static = {n: sizes[n] for n in ("epsilon", "accumulate") if sizes.get(n) and not_taken.get(op) != n}
    given = {n: a for n, a in arguments.items() if a is not None}
    return Call(op, given, tuple(n for n in differentiated if n in given), {**static, **options}, dy, v.exact)


def _kinds(sizes: Sizes) -> tuple[str, ...]:
    return tuple(sizes.get("kinds", EVERY))


def _dtypes(sizes: Sizes) -> tuple[str, str]:
    """Return the dtypes of inputs and of tables."""
    return sizes.get("x_dtype", "float32"), sizes.get("dtype", sizes.get("x_dtype", "float32"))


# ------------------------------------------------------------------------------------- look-ups
def detect(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, _) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, n, t, c = sizes["batch"], sizes["inputs"], sizes["detectors"], sizes["bits"]
    arguments = {"x": v.floats((*batch, n), x_dtype), "anchors": v.ids((t, c, 2), n)}
    margin = "float64" if x_dtype == "float64" else "float32"
    return _call(v, "detect", arguments, ("x",), sizes, {}, v.floats((*batch, t), margin))


def detect_signs(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, _) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, c = sizes["batch"], sizes["bits"]
    margin = "float64" if x_dtype == "float64" else "float32"
    arguments = {"positions": v.floats((*batch, c), x_dtype)}
    return _call(v, "detect_signs", arguments, ("positions",), sizes, {}, v.floats(batch, margin))


def lookup(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, t, c, o = sizes["batch"], sizes["detectors"], sizes["bits"], sizes["outputs"]
    arguments = {
        "weights": v.table((t, 2**c, o), dtype),
        **v.detection("detection", (*batch, t), c, x_dtype, wild=True),
    }
    names, options = ("weights", "detection.margin"), {"detection.bits": c}
    return _call(v, "lookup", arguments, names, sizes, options, v.floats((*batch, o), dtype))


def lut(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, n, t, c, o = (sizes[name] for name in ("batch", "inputs", "detectors", "bits", "outputs"))
    arguments = {
        "x": v.floats((*batch, n), x_dtype),
        "weights": v.table((t, 2**c, o), dtype),
        "anchors": v.ids((t, c, 2), n),
    }
    return _call(v, "lut", arguments, ("x", "weights"), sizes, {}, v.floats((*batch, o), dtype))


def _targets(v: Values, sizes: Sizes) -> np.ndarray:
    t = sizes["detectors"] if sizes.get("table_lists", True) else 1
    r = 2 ** sizes["bits"] if sizes.get("row_lists", True) else 1
    return v.ids((t, r, sizes["slots"]), sizes["outputs"] + 1) - np.int32(1)


def _edges_of(v: Values, sizes: Sizes) -> dict[str, np.ndarray]:
    """Rows of up to `slots` edges, and one of many more."""
    counts = v.integers(0, sizes["slots"], (sizes["detectors"] * 2 ** sizes["bits"],))
    counts[len(counts) // 2 : len(counts) // 2 + 1] = sizes["longest"]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return {"first": first, "targets": v.ids((int(first[-1]),), sizes["outputs"])}


def sparse_lookup(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, t, c, o = sizes["batch"], sizes["detectors"], sizes["bits"], sizes["outputs"]
    names, options = ("weights", "detection.margin"), {"detection.bits": c, "n_outputs": o}
    of_edges = _edges_of(v, sizes) if sizes.get("edges") else {}
    weights = (of_edges["targets"].size,) if of_edges else (t, 2**c, sizes["slots"])
    arguments = {
        "weights": v.table(weights, dtype),
        **v.detection("detection", (*batch, t), c, x_dtype, wild=True),
        **(of_edges or {"targets": _targets(v, sizes)}),
    }
    return _call(v, "sparse_lookup", arguments, names, sizes, options, v.floats((*batch, o), dtype))


def sparse_lut(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, n, t, c, o = (sizes[name] for name in ("batch", "inputs", "detectors", "bits", "outputs"))
    arguments = {
        "x": v.floats((*batch, n), x_dtype),
        "weights": v.table((t, 2**c, sizes["slots"]), dtype),
        "anchors": v.ids((t, c, 2), n),
        "targets": _targets(v, sizes),
    }
    options = {"n_outputs": o}
    return _call(v, "sparse_lut", arguments, ("x", "weights"), sizes, options, v.floats((*batch, o), dtype))


def lut_at_places(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    windows, batch, t, c, o = (sizes[name] for name in ("windows", "batch", "detectors", "bits", "outputs"))
    groups, reached = sizes.get("groups", 1), sizes.get("reached")
    arguments = {
        "images": v.floats((*batch, *windows.image), x_dtype),
        "weights": v.table((t, 2**c, o), dtype),
        "anchors": v.ids((t, c, 2), math.prod(windows.size) * windows.channels),
        "targets": None if reached is None else v.ids((groups, o), reached + 1) - np.int32(1),
    }
    options = {"windows": windows, "groups": groups, **({} if reached is None else {"n_outputs": reached})}
    dy = v.floats((*batch, *windows.places, groups * o if reached is None else reached), dtype)
    return _call(v, "lut_at_places", arguments, ("images", "weights"), sizes, options, dy)


# ------------------------------------------------------------------------------------- scored reads
def _inputs_in_groups(v: Values, sizes: Sizes) -> dict[str, np.ndarray]:
    n, t, c, groups = (sizes.get(name) for name in ("inputs", "detectors", "bits", "groups"))
    of_groups = () if groups is None else (1 if sizes.get("shared_input") else groups,)
    return {
        "x": v.floats((*sizes["batch"], *of_groups, n), _dtypes(sizes)[0]),
        "anchors": v.ids((t, c) if sizes.get("single") else (t, c, 2), n),
    }


def _given(sizes: Sizes, *names: str) -> dict[str, Any]:
    return {n: sizes[n] for n in names if n in sizes}


def margins(draw: Draw, sizes: Sizes) -> Call:
    v = Values(draw, _kinds(sizes))
    arguments = _inputs_in_groups(v, sizes)
    dtype = "float64" if _dtypes(sizes)[0] == "float64" else "float32"
    dy = v.floats((*sizes["batch"], sizes["detectors"], sizes["bits"]), dtype)
    return _call(v, "margins", arguments, ("x",), {**sizes, "epsilon": None}, _given(sizes, "groups"), dy)


def weighted_lookup(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, t, o, rows = (sizes[name] for name in ("batch", "detectors", "outputs", "rows"))
    reads, groups = (*batch, t, sizes["ways"]), sizes.get("groups")
    arguments = {
        "weights": v.table((t, rows, o), dtype),
        "index": v.ids(reads, rows),
        "coefficients": v.floats(reads, x_dtype),
    }
    dy = v.floats((*batch, o) if groups is None else (*batch, groups, o), dtype)
    options = _given(sizes, "groups", "valued")
    return _call(v, "weighted_lookup", arguments, ("weights", "coefficients"), sizes, options, dy)


def _read(
    draw: Draw, v: Values, sizes: Sizes, name: str, x_dtype: str, dtype: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return tables, scalars and factors of a scored read, and the names of what is differentiated."""
    batch, t, c, o = (sizes[n] for n in ("batch", "detectors", "bits", "outputs"))
    scalar = np.dtype("float64" if x_dtype == "float64" else "float32")
    names = tuple(f"scalars.{n}" for n in READS[name][1].initial())
    found: dict[str, Any] = {n: scalar.type(draw(st.integers(-8, 8)) / 8) for n in names}
    if name == "integers":
        found["weights"] = v.integers(-128, 127, (t, 2**c, o)).astype(np.int8)
        found["exponents"] = v.integers(-9, -5, (sizes.get("groups") or 1, o))
        return found, ()
    found["weights"] = v.table((t, 2**c, o), dtype)
    if sizes.get("keep"):
        found["keep"] = v.integers(0, 2, (*batch, t)).astype(scalar)
    return found, ("weights", "keep", *names)


def scored_lut(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, FINITE), _dtypes(sizes)
    batch, o, groups = sizes["batch"], sizes["outputs"], sizes.get("groups")
    of_read, trained = _read(draw, v, sizes, sizes["read"], x_dtype, dtype)
    arguments = {**_inputs_in_groups(v, sizes), **of_read}
    of_groups = () if groups is None else (1 if sizes.get("sum_groups") else groups,)
    options = {"read": sizes["read"], **_given(sizes, "groups", "sum_groups")}
    dy = v.floats((*batch, *of_groups, o), dtype) if trained else None
    return _call(v, "scored_lut", arguments, ("x", *trained) if trained else (), {}, options, dy)


def conv_lut(draw: Draw, sizes: Sizes) -> Call:
    (x_dtype, dtype), name = _dtypes(sizes), sizes.get("read")
    v = Values(draw, _kinds(sizes) if name is None else FINITE)
    windows, batch, t, c, o = (sizes[n] for n in ("windows", "batch", "detectors", "bits", "outputs"))
    groups = sizes.get("groups", 1)
    if name is None:
        of_read: dict[str, Any] = {"weights": v.table((t, 2**c, o), dtype)}
        trained: tuple[str, ...] = ("weights",)
    else:
        of_read, trained = _read(draw, v, sizes, name, x_dtype, dtype)
    arguments = {
        "images": v.floats((*batch, *windows.image), x_dtype),
        "anchors": v.ids((t, c, 2), math.prod(windows.size) * windows.channels),
        **of_read,
    }
    options = {"windows": windows, "groups": groups, **({} if name is None else {"read": name})}
    dy = v.floats((*batch, *windows.places, groups * o), dtype) if trained else None
    static = _given(sizes, "epsilon", "accumulate") if name is None else {}
    return _call(v, "conv_lut", arguments, ("images", *trained) if trained else (), static, options, dy)


def cell_total_variation(draw: Draw, sizes: Sizes) -> Call:
    v, dtype = Values(draw, _kinds(sizes)), _dtypes(sizes)[1]
    arguments = {"weights": v.table((sizes["detectors"], 2 ** sizes["bits"], sizes["outputs"]), dtype)}
    dy = v.floats((), "float64" if dtype == "float64" else "float32", FINITE)
    return _call(v, "cell_total_variation", arguments, ("weights",), {}, {}, dy)


# ------------------------------------------------------------------------------------- attention
def distances_needed(sizes: Sizes) -> int:
    """Return the number of distances between these queries and keys; with traced starts it is not known."""
    starts = sizes.get("starts", (0, 0))
    queries, keys = sizes["queries"], sizes.get("keys", sizes["queries"])
    if starts in ("traced", "each"):
        return 1
    farthest = max(starts[0] + queries - 1 - starts[1], 0) if queries and keys else 0
    return farthest if sizes.get("window") is None else min(farthest, sizes["window"])


def _pairs_of(v: Values, sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and options that say which pairs count."""
    batch, queries = sizes["batch"], sizes["queries"]
    keys = sizes.get("keys", queries)
    arguments: dict[str, Any] = {}
    options: dict[str, Any] = {} if sizes.get("window") is None else {"window": sizes["window"]}
    starts = sizes.get("starts")
    if starts == "traced":
        arguments["query_start"] = v.integers(-3, keys + 4)
        arguments["key_start"] = v.integers(-3, 4)
    elif starts == "each":  # sample its own
        arguments["query_start"] = v.integers(-3, keys + 4, batch)
    elif starts is not None:
        options["query_start"], options["key_start"] = starts
    if "blocks" in sizes:
        options["block_sizes"] = of_queries, of_keys = sizes["blocks"]
        shape = -(-queries // of_queries), -(-keys // of_keys)
        arguments["block_mask"] = v.integers(0, 1, shape).astype(bool)
    segments = sizes.get("segments")  # None, "each" sample its own or "shared" by all
    if segments:
        leading = batch if segments == "each" else (1,) * len(batch)
        arguments["query_segments"] = np.sort(v.integers(0, 2, (*leading, queries)), -1)
        same = keys == queries and "keys" not in sizes
        arguments["key_segments"] = (
            arguments["query_segments"] if same else np.sort(v.integers(0, 2, (*leading, keys)), -1)
        )
    return arguments, options


def _capacity(sizes: Sizes) -> int:
    return distances_needed(sizes) + sizes.get("spare_distances", 0)


def lookup_attention(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, t, o, c = sizes["batch"], sizes["detectors"], sizes["outputs"], sizes["bits"]
    queries, keys = sizes["queries"], sizes.get("keys", sizes["queries"])
    key_bits, n = sizes.get("key_bits", c), sizes.get("position_bits")
    where, options = _pairs_of(v, sizes)
    arguments = {
        "weights": v.table((t, 2 ** (c + key_bits + (n or 0)), o), dtype),
        **v.detection("query", (*batch, queries, t), c, x_dtype, wild=True),
        **v.detection("key", (*batch, keys, t), key_bits, x_dtype, wild=True),
        **where,
    }
    options |= {"query.bits": c, "key.bits": key_bits}
    if n is not None:
        columns = 1 if sizes.get("shared") else t
        arguments |= v.detection("position", (_capacity(sizes), columns), n, x_dtype, wild=True)
        options["position.bits"] = n
    names = ("weights", "query.margin", "key.margin", "position.margin")
    dy = v.floats((*batch, queries, o), dtype)
    return _call(v, "lookup_attention", arguments, names, sizes, options, dy)


def _positions(v: Values, sizes: Sizes) -> np.ndarray | None:
    n = sizes.get("position_bits")
    if n is None:
        return None
    columns = 1 if sizes.get("shared") else sizes["detectors"]
    return v.floats((_capacity(sizes), columns, n), sizes.get("position_dtype", _dtypes(sizes)[0]))


def lut_attention(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, i, t, c, o = (sizes[name] for name in ("batch", "inputs", "detectors", "bits", "outputs"))
    where, options = _pairs_of(v, sizes)
    arguments = {
        "x": v.floats((*batch, sizes["queries"], i), x_dtype),
        "weights": v.table((t, 2 ** (2 * c + sizes.get("position_bits", 0)), o), dtype),
        "anchors": v.ids((t, c, 2), i),
        "positions": _positions(v, sizes),
        "segments": where.get("query_segments"),
    }
    dy = v.floats((*batch, sizes["queries"], o), dtype)
    return _call(v, "lut_attention", arguments, ("x", "weights", "positions"), sizes, options, dy)


def lut_pair_attention(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, dtype) = Values(draw, _kinds(sizes)), _dtypes(sizes)
    batch, i, t, c, o = (sizes[name] for name in ("batch", "inputs", "detectors", "bits", "outputs"))
    where, options = _pairs_of(v, sizes)
    if "query_segments" in where:
        where["segments"] = where.pop("query_segments")
        if "keys" not in sizes:
            where.pop("key_segments")
    positions = _positions(v, sizes)
    elements = 2 * i + (0 if positions is None else positions.shape[-1])
    arguments = {
        "x": v.floats((*batch, sizes["queries"], i), x_dtype),
        "weights": v.table((t, 2**c, o), dtype),
        "anchors": v.ids((t, c, 2), elements),
        "positions": positions,
        "keys": v.floats((*batch, sizes["keys"], i), x_dtype) if "keys" in sizes else None,
        **where,
    }
    if sizes.get("interleave"):
        options["interleave"] = True
    names = ("x", "weights", "positions", "keys")
    dy = v.floats((*batch, sizes["queries"], o), dtype)
    return _call(v, "lut_pair_attention", arguments, names, sizes, options, dy)


# ------------------------------------------------------------------------------------- logic
_OF_GATES = (GRID, TIES, GENERAL, NAN)  # with infinities the order of additions decides what is NaN


def _wires(v: Values, sizes: Sizes) -> dict[str, np.ndarray]:
    from properties import definitions

    inputs, wild = sizes["inputs"], not sizes.get("readers")
    wires = v.ids((sizes["gates"], sizes.get("bits", 2)), inputs, wild=wild)
    if not sizes.get("readers"):
        return {"wires": wires}
    room = wires.size  # of any wires: the shape does not depend on them
    return {"wires": wires, "readers": definitions.readers(wires, inputs, room).astype(np.int32)}


def _gates(draw: Draw, sizes: Sizes, op: str, name: str, shape: tuple[int, ...], options: Any) -> Call:
    kinds = tuple(k for k in _kinds(sizes) if k in _OF_GATES) + ((NAN,) if "kinds" not in sizes else ())
    v, (x_dtype, dtype) = Values(draw, kinds), _dtypes(sizes)
    batch, inputs, gates = sizes["batch"], sizes["inputs"], sizes["gates"]
    first = sizes.get("features_first", False)
    finite = tuple(k for k in kinds if k != NAN)
    arguments = {
        "x": v.unit((inputs, *batch) if first else (*batch, inputs), x_dtype, kinds),
        name: v.floats(shape, dtype, finite),
        **_wires(v, sizes),
    }
    if first:
        options = {**options, "feature_axis": 0}
    dy = v.floats((gates, *batch) if first else (*batch, gates), x_dtype, finite)
    return _call(v, op, arguments, ("x", name), sizes, options, dy)


def bilinear_gates(draw: Draw, sizes: Sizes) -> Call:
    return _gates(draw, sizes, "bilinear_gates", "coefficients", (4, sizes["gates"]), {})


def gate_network(draw: Draw, sizes: Sizes) -> Call:
    of_layers = sizes["layers"]
    made = _gates(
        draw, {**sizes, "gates": sum(of_layers)}, "gate_network", "coefficients", (4, sum(of_layers)), {}
    )
    first = 0 if sizes.get("features_first") else -1
    options = {**made.options, "sizes": of_layers}
    return dataclasses.replace(made, options=options, dy=np.take(made.dy, range(of_layers[-1]), axis=first))


def logic_gates(draw: Draw, sizes: Sizes) -> Call:
    options = {"hard": True} if sizes.get("hard") else {}
    return _gates(draw, sizes, "logic_gates", "logits", (sizes["gates"], 16), options)


def logic_trees(draw: Draw, sizes: Sizes) -> Call:
    places, channels, trees, n_leaves = (sizes[name] for name in ("places", "channels", "trees", "leaves"))
    # Rounding may make another place the largest, so values of places are exact where there are several.
    kinds = (GRID, TIES) if math.prod(places.pool) > 1 else (GRID, TIES, GENERAL, NAN)
    v, (x_dtype, dtype) = Values(draw, kinds), _dtypes(sizes)
    values = math.prod(places.kernel) * channels
    leaves = v.ids((trees, n_leaves), values, wild=not sizes.get("readers"))
    arguments = {
        "x": v.unit((math.prod(places.image) * channels, *sizes["batch"]), x_dtype, kinds),
        "coefficients": v.floats((4, trees, n_leaves - 1), dtype, tuple(k for k in kinds if k != NAN)),
        "leaves": leaves,
    }
    if sizes.get("readers"):
        from properties import definitions

        arguments["readers"] = definitions.readers(leaves % channels, channels, leaves.size).astype(np.int32)
    dy = v.floats((trees, math.prod(places.groups), *sizes["batch"]), x_dtype, (GRID, TIES))
    return _call(v, "logic_trees", arguments, ("x", "coefficients"), sizes, {"places": places}, dy)


def soft_lut(draw: Draw, sizes: Sizes) -> Call:
    return _gates(draw, sizes, "soft_lut", "table", (sizes["gates"], 2 ** sizes["bits"]), {})


def binary_lut(draw: Draw, sizes: Sizes) -> Call:
    return _gates(draw, sizes, "binary_lut", "table", (sizes["gates"], 2 ** sizes["bits"]), {})


def gate_coefficients(draw: Draw, sizes: Sizes) -> Call:
    v, (_, dtype) = Values(draw, FINITE), _dtypes(sizes)
    g, axis = sizes["gates"], sizes.get("axis", -1)
    logits = v.floats((16, g) if axis == 0 else (g, 16), dtype) * np.dtype(dtype).type(sizes.get("spread", 1))
    options = {n: sizes[n] for n in ("hard", "axis") if n in sizes}
    dy = v.floats((4, g), "float64" if dtype == "float64" else "float32")
    return _call(v, "gate_coefficients", {"logits": logits}, ("logits",), sizes, options, dy)


def packed_lut(draw: Draw, sizes: Sizes) -> Call:
    v = Values(draw, FINITE)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    words = rng.integers(0, 2**32, (sizes["inputs"], *sizes["batch"]), dtype=np.uint32)
    truth = rng.integers(0, 2, (sizes["gates"], 2 ** sizes["bits"])).astype(bool)
    arguments = {"words": words, "truth": truth, "wires": v.ids((sizes["gates"], sizes["bits"]), len(words))}
    return _call(v, "packed_lut", arguments, (), sizes, {}, None)


def scale_gradient(draw: Draw, sizes: Sizes) -> Call:
    v, (x_dtype, _) = Values(draw, EVERY), _dtypes(sizes)
    arguments = {
        "x": v.floats(sizes["batch"], x_dtype),
        "factor": np.asarray(draw(st.sampled_from((0.0, -1.0, 0.5, 3.0, 1e4))), "float32"),
    }
    return _call(v, "scale_gradient", arguments, ("x",), sizes, {}, v.floats(sizes["batch"], x_dtype))


CALLS: dict[str, Callable[[Draw, Sizes], Call]] = {
    f.__name__: f
    for f in (
        detect, detect_signs, margins, lookup, weighted_lookup, lut, scored_lut, sparse_lookup, sparse_lut, lut_at_places, conv_lut,
        cell_total_variation, lookup_attention, lut_attention, lut_pair_attention, bilinear_gates, gate_network, logic_gates, logic_trees, soft_lut, binary_lut, gate_coefficients, packed_lut,
        scale_gradient,
    )
}  # fmt: skip


def calls(op: str, sizes: Sizes | st.SearchStrategy[Sizes]) -> st.SearchStrategy[Call]:
    """Strategy that draws calls of an op, of given sizes or of drawn ones."""
    strategy = sizes if isinstance(sizes, st.SearchStrategy) else st.just(sizes)

    @st.composite
    def drawn(draw: Draw) -> Call:
        return CALLS[op](draw, draw(strategy))

    return drawn()


# ------------------------------------------------------------------------------------- sizes, by name
_LUT = {"batch": (3,), "inputs": 5, "detectors": 3, "bits": 3, "outputs": 5}
_WEIGHTED = {"batch": (3,), "detectors": 3, "rows": 5, "ways": 2, "outputs": 5}
_SPARSE = {**_LUT, "slots": 3}
_ATTENTION = {**_LUT, "batch": (2,), "bits": 1, "detectors": 2, "queries": 5, "outputs": 3}
_GATES = {"batch": (5,), "inputs": 5, "gates": 7}
_TREES = {"batch": (3,), "channels": 2, "trees": 3, "leaves": 4}
_PLACES = {"batch": (2,), "detectors": 3, "bits": 2, "outputs": 3}
_TABLES = {**_GATES, "bits": 3}
_CONV = {**_PLACES, "detectors": 4, "windows": Windows((3, 4, 4), (2, 3), (1, 2), (1, 0), 2), "groups": 2}

_BF16, _F16, _F64 = ({"x_dtype": d} for d in ("bfloat16", "float16", "float64"))

_LOOK_UPS: dict[str, Sizes] = {
    "primes": _LUT,
    "several leading axes, one of 1": {**_LUT, "batch": (2, 1, 3)},
    "no leading axes, dead zone": {**_LUT, "batch": (), "bits": 5, "epsilon": 0.75},
    "empty batch": {**_LUT, "batch": (2, 0)},
    "no comparisons": {**_LUT, "bits": 0},
    "no detectors": {**_LUT, "detectors": 0},
    "no inputs, no detectors": {**_LUT, "inputs": 0, "detectors": 0},
    "one of each": {"batch": (1,), "inputs": 1, "detectors": 1, "bits": 1, "outputs": 1},
    "more samples than rows": {**_LUT, "batch": (5,), "bits": 2},
    "beyond a block": {"batch": (17,), "inputs": 3, "detectors": 19, "bits": 2, "outputs": 37},
    "bfloat16": {**_LUT, **_BF16, "batch": (13,), "bits": 1},  # rows that are read often
    "float16 inputs": {**_LUT, **_F16, "dtype": "float32"},
    "float16 tables": {**_LUT, "batch": (13,), "bits": 1, "dtype": "float16"},
    "float64": {**_LUT, **_F64},
    "float64 tables": {**_LUT, "dtype": "float64"},
    "fixed point": {**_LUT, "accumulate": 2.0**10},
    "fixed point of bfloat16": {**_LUT, **_BF16, "accumulate": 2.0**4},
}

_PAIRS: dict[str, Sizes] = {
    "self, positions": {**_ATTENTION, "position_bits": 2},
    "no positions": _ATTENTION,
    "positions without bits": {**_ATTENTION, "position_bits": 0, "spare_distances": 2},
    "shared positions, more than needed": {
        **_ATTENTION, "position_bits": 1, "shared": True, "spare_distances": 3,
    },
    "window": {**_ATTENTION, "queries": 7, "window": 2, "position_bits": 1},
    "window of 0": {**_ATTENTION, "window": 0, "position_bits": 1},
    "window beyond all": {**_ATTENTION, "window": 11, "position_bits": 1},
    "segments": {**_ATTENTION, "queries": 7, "segments": "each"},
    "segments shared, window": {**_ATTENTION, "segments": "shared", "window": 3, "position_bits": 1},
    "one place": {**_ATTENTION, "queries": 1, "position_bits": 1},
    "no places": {**_ATTENTION, "queries": 0, "position_bits": 1},
    "empty batch": {**_ATTENTION, "batch": (0,)},
    "several leading axes": {**_ATTENTION, "batch": (2, 1, 2), "queries": 3, "segments": "each"},
    "no leading axes": {**_ATTENTION, "batch": (), "queries": 4},
    "no comparisons": {**_ATTENTION, "bits": 0, "position_bits": 2},
    "no detectors": {**_ATTENTION, "detectors": 0},
    "bfloat16": {**_ATTENTION, **_BF16, "position_bits": 1},
    "float16 inputs": {**_ATTENTION, **_F16, "dtype": "float32", "position_dtype": "float32", "position_bits": 1},
    "float64": {**_ATTENTION, **_F64, "position_bits": 1},
    "fixed point": {**_ATTENTION, "position_bits": 1, "accumulate": 2.0**8},
}  # fmt: skip

_CROSS: dict[str, Sizes] = {
    "fewer keys": {**_ATTENTION, "queries": 7, "keys": 3, "position_bits": 1},
    "fewer keys, window": {**_ATTENTION, "queries": 7, "keys": 2, "window": 4},
    "one key": {**_ATTENTION, "queries": 5, "keys": 1},
    "more keys": {**_ATTENTION, "queries": 3, "keys": 7, "position_bits": 1},
    "more keys, segments": {**_ATTENTION, "queries": 3, "keys": 5, "segments": "each"},
    "no keys": {**_ATTENTION, "keys": 0},
    "no keys, a start": {**_ATTENTION, "queries": 3, "keys": 0, "starts": (4, 0), "position_bits": 1},
    "equal starts": {**_ATTENTION, "queries": 5, "keys": 3, "starts": (3, 3), "position_bits": 1},
    "queries later": {**_ATTENTION, "queries": 3, "keys": 5, "starts": (6, 2), "position_bits": 1},
    "queries earlier": {**_ATTENTION, "queries": 5, "keys": 4, "starts": (1, 3), "window": 1, "position_bits": 1},
    "queries before all keys": {**_ATTENTION, "queries": 3, "keys": 3, "starts": (-2, 5), "position_bits": 1},
    "decoding": {**_ATTENTION, "queries": 1, "keys": 7, "starts": "traced", "position_bits": 2, "spare_distances": 5},
    "traced, window, segments": {
        **_ATTENTION, "queries": 4, "keys": 5, "starts": "traced", "window": 3, "segments": "each",
    },
    "ragged": {**_ATTENTION, "queries": 3, "keys": 5, "starts": "each", "position_bits": 1},
    "blocks": {**_ATTENTION, "queries": 7, "keys": 7, "blocks": (2, 3), "position_bits": 1, "starts": (2, 0)},
    "blocks, ragged": {**_ATTENTION, "queries": 3, "keys": 5, "blocks": (2, 2), "starts": "each", "window": 3},
    "ragged, window, segments": {
        **_ATTENTION, "queries": 4, "keys": 5, "starts": "each", "window": 3, "segments": "each",
    },
    "traced, float64": {**_ATTENTION, **_F64, "queries": 3, "keys": 4, "starts": "traced", "position_bits": 1},
    "traced, fixed point": {**_ATTENTION, "queries": 3, "keys": 4, "starts": "traced", "accumulate": 2.0**8},
}  # fmt: skip

_LOGIC: dict[str, Sizes] = {
    "primes": _GATES,
    "readers": {**_GATES, "readers": True},
    "features first, readers": {**_GATES, "features_first": True, "readers": True},
    "several leading axes": {**_GATES, "batch": (2, 3)},
    "empty batch": {**_GATES, "batch": (0,)},
    "no gates": {**_GATES, "gates": 0},
    "no inputs, no gates": {**_GATES, "inputs": 0, "gates": 0},
    "one input": {**_GATES, "inputs": 1, "gates": 1},
    "bfloat16": {**_GATES, **_BF16},
    "float16, float32 parameters": {**_GATES, **_F16, "dtype": "float32"},
    "float64": {**_GATES, **_F64},
    "beyond a block": {**_GATES, "batch": (37,), "inputs": 33, "gates": 131},
}
_NO_GATES_NOR_INPUTS = "no inputs, no gates"


def _with(pool: dict[str, Sizes], names: str = "", **changes: Any) -> dict[str, Sizes]:
    """Some sizes of a pool (separated by ``;``; all if none is named), changed."""
    chosen = [n.strip() for n in names.split(";")] if names else list(pool)
    return {n: {**pool[n], **changes} for n in chosen}


POOLS: dict[str, dict[str, Sizes]] = {
    "detect": _with(_LOOK_UPS, outputs=0),
    "detect_signs": _with(
        _LOOK_UPS,
        "primes; several leading axes, one of 1; no leading axes, dead zone; empty batch; no comparisons;"
        "bfloat16; float64",
    ),
    "lookup": {
        **_with(_LOOK_UPS),
        "no outputs": {**_LUT, "outputs": 0},
    },
    "margins": {
        "primes": _LUT,
        "groups, fixed point": {**_LUT, "detectors": 4, "groups": 2, "accumulate": 2.0**10},
        "a shared input, bfloat16": {**_LUT, **_BF16, "detectors": 4, "groups": 2, "shared_input": True},
        "single probes": {**_LUT, "single": True, "batch": (2, 1, 3)},
        "empty batch": {**_LUT, "batch": (0,)},
    },
    "weighted_lookup": {
        "primes": _WEIGHTED,
        "groups": {**_WEIGHTED, "detectors": 6, "groups": 3, "batch": (2, 3)},
        "some ways have values": {**_WEIGHTED, "ways": 3, "valued": 1},
        "bfloat16": {**_WEIGHTED, **_BF16, "batch": (13,), "rows": 2},  # rows that are read often
        "float64, no leading axes": {**_WEIGHTED, **_F64, "batch": ()},
        "fixed point": {**_WEIGHTED, "accumulate": 2.0**10},
        "no ways": {**_WEIGHTED, "ways": 0},
    },
    "scored_lut": {
        "confidence, groups": {**_LUT, "detectors": 4, "read": "confidence", "groups": 2},
        "one way, a shared input, sums of groups": {
            **_LUT,
            "detectors": 4,
            "read": "confidence_1",
            "groups": 2,
            "shared_input": True,
            "sum_groups": True,
        },
        "hard, single probes, factors": {**_LUT, "read": "hard", "single": True, "keep": True},
        "soft sign, bfloat16": {**_LUT, **_BF16, "read": "soft_sign"},
        "powers, float64": {**_LUT, **_F64, "detectors": 4, "read": "powers", "groups": 2, "keep": True},
        "hard sign, factors": {**_LUT, "read": "hard_sign", "keep": True},
        "integers, groups": {**_LUT, "detectors": 4, "read": "integers", "groups": 2},
    },
    "conv_lut": {
        "groups, fixed point": {**_CONV, "accumulate": 2.0**10},
        "confidence, factors": {**_CONV, "read": "confidence", "keep": True},
        "powers": {**_CONV, "read": "powers"},
        "integers, groups": {**_CONV, "read": "integers"},
        "soft sign, no samples, float64": {**_CONV, **_F64, "read": "soft_sign", "batch": (0,)},
    },
    "cell_total_variation": {
        "primes": _LUT,
        "one row": {**_LUT, "bits": 0},
        "bfloat16": {**_LUT, "dtype": "bfloat16"},
    },
    "lut": _with(_LOOK_UPS, "primes; bfloat16; float64; fixed point; no leading axes, dead zone"),
    "sparse_lookup": {
        **_with(
            _LOOK_UPS,
            "primes; several leading axes, one of 1; empty batch; no comparisons; no detectors; bfloat16; float64;"
            "float16 inputs; fixed point; fixed point of bfloat16",
            slots=3,
        ),
        "edges": {**_SPARSE, "edges": True, "longest": 19},
        "edges, fixed point": {**_SPARSE, "edges": True, "longest": 3, "accumulate": 2.0**8},
        "edges, bfloat16, no outputs": {
            **_SPARSE,
            "edges": True,
            "longest": 2,
            "outputs": 0,
            "dtype": "bfloat16",
        },
        "no edges": {**_SPARSE, "edges": True, "longest": 0, "slots": 0},
        "a list for each table": {**_SPARSE, "row_lists": False},
        "one list": {**_SPARSE, "row_lists": False, "table_lists": False},
        "no slots": {**_SPARSE, "slots": 0},
        "no outputs": {**_SPARSE, "outputs": 0},
        "more slots than outputs": {**_SPARSE, "slots": 7, "outputs": 2},
    },
    "sparse_lut": _with(_LOOK_UPS, "primes; fixed point", slots=3),
    "lookup_attention": {
        **_with(_PAIRS),
        **_CROSS,
        "other bits of keys": {**_ATTENTION, "keys": 4, "key_bits": 2, "position_bits": 1},
    },
    "lut_attention": _with(
        _PAIRS,
        "self, positions; shared positions, more than needed; window; segments; float16 inputs; fixed point",
    ),
    "lut_pair_attention": {
        **_with(
            _PAIRS,
            "self, positions; shared positions, more than needed; window; segments; no places; no leading axes;"
            "no comparisons; no detectors; bfloat16; float16 inputs; float64; fixed point",
            bits=2,
        ),
        **_with(
            _CROSS,
            "fewer keys; fewer keys, window; more keys, segments; no keys; equal starts; queries before all keys; queries earlier; decoding;"
            "traced, window, segments; ragged; blocks; traced, float64",
            bits=2,
        ),
        "interleaved": {**_ATTENTION, "bits": 3, "interleave": True, "position_bits": 5},
        "dead zone": {**_ATTENTION, "bits": 3, "epsilon": 0.75},
    },
    "bilinear_gates": {**_LOGIC, "fixed point": {**_GATES, "readers": True, "accumulate": 2.0**10}},
    "logic_gates": {
        **_with(_LOGIC, "primes; features first, readers; float64"),
        "hard": {**_GATES, "hard": True},
        "hard, bfloat16": {**_GATES, **_BF16, "hard": True},
    },
    "gate_network": {
        "three layers": {**_GATES, "layers": (5, 3, 4)},
        "features first": {**_GATES, "layers": (3, 7), "features_first": True},
        "several leading axes": {**_GATES, "batch": (2, 3), "layers": (4, 2)},
        "one layer, empty batch": {**_GATES, "batch": (0,), "layers": (6,)},
        "no outputs": {**_GATES, "layers": (6, 0)},
        "float64": {**_GATES, **_F64, "layers": (2, 5, 1)},
        "deep, beyond a block": {**_GATES, "batch": (67,), "inputs": 5, "layers": (9, 9, 9, 9, 2)},
    },
    "logic_trees": {
        "pools, padding, readers": {
            **_TREES,
            "places": Places((5, 4), (2, 3), (1, 1), (1, 1), (2, 2)),
            "readers": True,
        },
        "strides, no samples": {**_TREES, "batch": (0,), "places": Places((5, 7), (2, 1), (3, 2))},
        "one place": {**_TREES, "trees": 5, "batch": (2, 3), "places": Places((2, 3), (2, 3))},
        "groups beyond the places, bfloat16": {
            **_TREES,
            **_BF16,
            "leaves": 2,
            "places": Places((4, 3), (2, 2), (1, 1), (0, 0), (2, 3), (1, 1)),
        },
        "float64": {
            **_TREES,
            **_F64,
            "places": Places((3, 3), (2, 2), (1, 1), (0, 1), (1, 2)),
            "readers": True,
        },
        "no trees": {**_TREES, "trees": 0, "places": Places((3, 3), (2, 2))},
    },
    "lut_at_places": {
        "padding, groups with channels of their own": {
            **_PLACES,
            "windows": Windows((3, 4, 4), (2, 3), (1, 2), (1, 0), 2),
            "groups": 2,
            "detectors": 4,
        },
        "targets": {**_PLACES, "windows": Windows.whole(5), "groups": 3, "reached": 4},
        "places, groups, targets, dead zone": {
            **_PLACES,
            "windows": Windows((3, 2, 3), (2, 2), (1, 1), (0, 1), 1),
            "groups": 3,
            "reached": 2,
            "epsilon": 0.75,
        },
        "strides, no samples": {
            **_PLACES,
            "batch": (2, 0),
            "windows": Windows((5, 7, 1), (2, 1), (3, 2), (0, 0), 1),
        },
        "bfloat16, groups share windows": {
            **_PLACES,
            **_BF16,
            "windows": Windows((2, 3, 2), (2, 2), (1, 1), (1, 1), 2),
            "groups": 3,
        },
        "float64": {**_PLACES, **_F64, "windows": Windows((3, 2, 2), (2, 1), (1, 1), (1, 0), 2)},
        "no detectors": {**_PLACES, "detectors": 0, "windows": Windows((3, 3, 1), (2, 2), (1, 1), (0, 0), 1)},
    },
    "soft_lut": {
        **_with(_LOGIC, bits=3),
        "one bit": {**_TABLES, "bits": 1},
        "no gates, six bits": {**_TABLES, "bits": 6, "gates": 0},
        "eight bits": {**_TABLES, "bits": 8, "gates": 3},
        "five bits, readers": {**_TABLES, "bits": 5, "gates": 3, "readers": True},
        "fixed point": {**_TABLES, "bits": 3, "accumulate": 2.0**10},
    },
    "binary_lut": {
        **_with(_LOGIC, bits=3),
        "one bit": {**_TABLES, "bits": 1},
        "no gates, six bits": {**_TABLES, "bits": 6, "gates": 0},
        "eight bits": {**_TABLES, "bits": 8, "gates": 3},
        "fixed point": {**_TABLES, "bits": 3, "accumulate": 2.0**10},
    },
    "gate_coefficients": {
        "soft": {"gates": 7, "spread": 4},
        "sixteen first": {"gates": 5, "axis": 0},
        "hard": {"gates": 7, "hard": True},
        "no gates": {"gates": 0},
        "bfloat16": {"gates": 3, "dtype": "bfloat16"},
        "float64": {"gates": 3, "dtype": "float64"},
    },
    "packed_lut": {
        "primes": {"inputs": 5, "gates": 7, "bits": 3, "batch": (3,)},
        "several axes": {"inputs": 3, "gates": 2, "bits": 1, "batch": (2, 2)},
        "eight bits": {"inputs": 9, "gates": 1, "bits": 8, "batch": (1,)},
        "no words": {"inputs": 3, "gates": 2, "bits": 2, "batch": (0,)},
        "no gates": {"inputs": 0, "gates": 0, "bits": 2, "batch": (2,)},
    },
    "scale_gradient": {
        "float32": {"batch": (2, 3)},
        "bfloat16": {"batch": (5,), **_BF16},
        "scalar": {"batch": ()},
        "nothing": {"batch": (0,)},
        "float64": {"batch": (3,), **_F64},
    },
}


def is_float64(sizes: Sizes) -> bool:
    """Return whether JAX has to know float64 for these sizes."""
    return "float64" in _dtypes(sizes)


def several(op: str, sizes: st.SearchStrategy[Sizes], n: int) -> st.SearchStrategy[tuple[Sizes, list[Call]]]:
    """Strategy that draws sizes, and n calls of them, which share one compiled program."""

    @st.composite
    def drawn(draw: Draw) -> tuple[Sizes, list[Call]]:
        of = draw(sizes)
        return of, [CALLS[op](draw, of) for _ in range(n)]

    return drawn()


# ------------------------------------------------------------------------------------- sizes, free
_SIZE = st.sampled_from((0, 1, 2, 3, 5, 7, 13))
_SOME = st.sampled_from((1, 2, 3, 5, 7, 13))
_BATCH = st.sampled_from(((), (0,), (1,), (3,), (2, 3), (1, 0, 2), (33,)))
_DTYPE = st.sampled_from(("float32", "float32", "bfloat16", "float16", "float64"))
_SCALE = st.sampled_from((None, None, 2.0**4, 2.0**10))


@st.composite
def _free_lut(draw: Draw) -> Sizes:
    detectors = draw(_SIZE)
    bits = draw(st.integers(0, 6))
    sizes = {
        "batch": draw(_BATCH),
        "inputs": draw(_SOME if detectors * bits else _SIZE),
        "detectors": detectors,
        "bits": bits,
        "outputs": draw(_SIZE),
        "slots": draw(_SIZE),
        "row_lists": draw(st.booleans()),
        "table_lists": draw(st.booleans()),
        "epsilon": draw(st.sampled_from((0.0, 0.0, 0.75))),
        "accumulate": draw(_SCALE),
        "x_dtype": draw(_DTYPE),
        "dtype": draw(_DTYPE),
    }
    if math.prod(sizes["batch"]) * detectors * max(sizes["outputs"], sizes["slots"]) > 2000:
        sizes |= {"batch": (2,)}
    return sizes


@st.composite
def _free_scored(draw: Draw) -> Sizes:
    groups = draw(st.sampled_from((None, 1, 2, 3)))
    dtype = draw(_DTYPE)
    sizes = {
        "batch": draw(_BATCH),
        "inputs": draw(_SOME),
        "detectors": (groups or 1) * draw(st.integers(1, 3)),
        "bits": draw(st.integers(1, 4)),
        "outputs": draw(_SIZE),
        "rows": draw(_SOME),
        "ways": draw(st.integers(0, 3)),
        "read": draw(st.sampled_from(tuple(READS))),
        "keep": draw(st.booleans()),
        "single": draw(st.booleans()),
        "x_dtype": dtype,
        "dtype": dtype,
        "accumulate": draw(_SCALE),
    }
    if sizes["ways"] and draw(st.booleans()):
        sizes["valued"] = draw(st.integers(0, sizes["ways"]))
    if groups is not None:
        sizes |= {"groups": groups, "shared_input": draw(st.booleans()), "sum_groups": draw(st.booleans())}
    return sizes


@st.composite
def _free_attention(draw: Draw, cross: bool, pairs: bool) -> Sizes:
    inputs, bits = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    sizes = {
        "batch": draw(st.sampled_from(((), (0,), (1,), (3,), (2, 1, 2)))),
        "queries": draw(st.sampled_from((0, 1, 2, 3, 5, 7))),
        "inputs": inputs,
        "detectors": draw(st.integers(0, 3)),
        "bits": bits,
        "outputs": draw(st.sampled_from((0, 1, 3, 5))),
        "window": draw(st.sampled_from((None, None, 0, 1, 2, 3, 11))),
        "segments": draw(st.sampled_from((None, None, "each", "shared"))),
        "position_bits": draw(st.sampled_from((None, 0, 1, 2))),
        "shared": draw(st.booleans()),
        "spare_distances": draw(st.integers(0, 3)),
        "x_dtype": draw(_DTYPE),
        "dtype": draw(_DTYPE),
        "accumulate": draw(_SCALE),
    }
    if pairs and draw(st.integers(0, 4)) == 4:
        sizes |= {"interleave": True, "position_bits": inputs}
    if pairs:
        sizes["epsilon"] = draw(st.sampled_from((0.0, 0.0, 0.75)))
    if cross:
        if draw(st.booleans()):
            sizes["keys"] = draw(st.sampled_from((0, 1, 2, 3, 5, 7)))
        if not pairs:
            sizes["key_bits"] = draw(st.integers(0, 2))
        sizes["starts"] = draw(
            st.sampled_from((None, "traced", "each", (0, 0), (2, 2), (5, 1), (1, 4), (-3, -1)))
        )
        if sizes["starts"] is None:
            del sizes["starts"]
    if sizes["position_bits"] is None:
        del sizes["position_bits"]
    return sizes


@st.composite
def _free_gates(draw: Draw, tables: bool) -> Sizes:
    gates = draw(_SIZE)
    return {
        "batch": draw(_BATCH),
        "inputs": draw(_SOME if gates else _SIZE),
        "gates": gates,
        "bits": draw(st.integers(1, 6)) if tables else 2,
        "readers": draw(st.booleans()),
        "features_first": draw(st.booleans()),
        "hard": draw(st.booleans()),
        "x_dtype": draw(_DTYPE),
        "dtype": draw(_DTYPE),
    }


def _free_window(draw: Draw) -> Any:
    """Return image, size, stride and padding of a window, in rows and columns."""

    def pairs(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    image, padding = pairs(1, 6), pairs(0, 2)
    most = [n + 2 * p for n, p in zip(image, padding, strict=True)]
    size = tuple(min(k, n) for k, n in zip(pairs(1, 3), most, strict=True))
    return image, size, pairs(1, 3), padding


@st.composite
def _free_places(draw: Draw) -> Sizes:
    image, *window = _free_window(draw)
    groups, channels, own = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    return {
        "batch": draw(_BATCH),
        "windows": Windows((*image, channels * groups if own else channels), *window, channels),
        "groups": groups,
        "detectors": groups * draw(st.integers(0, 3)),
        "bits": draw(st.integers(1, 3)),
        "outputs": draw(st.integers(1, 3)),
        "reached": draw(st.sampled_from((None, 1, 4))),
        "epsilon": draw(st.sampled_from((0.0, 0.5))),
        "x_dtype": draw(_DTYPE),
        "dtype": draw(_DTYPE),
    }


@st.composite
def _free_conv(draw: Draw) -> Sizes:
    sizes = draw(_free_places())
    windows, groups = sizes["windows"], sizes["groups"]
    own = dataclasses.replace(
        windows,
        image=(*windows.image[:2], windows.channels * groups),
        padding=tuple(min(p, k - 1) for p, k in zip(windows.padding, windows.size, strict=True)),
    )
    read = draw(st.sampled_from((None, *READS)))
    more = {"windows": own, "detectors": groups * draw(st.integers(1, 3)), "keep": draw(st.booleans())}
    return {
        **sizes,
        **more,
        "read": read,
        "dtype": sizes["x_dtype"] if read else sizes["dtype"],
        "accumulate": draw(_SCALE),
    }


@st.composite
def _free_trees(draw: Draw) -> Sizes:
    def pairs(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    image, kernel, stride, padding = _free_window(draw)
    places = Places(image, kernel, stride, padding)
    pool = tuple(min(k, n) for k, n in zip(pairs(1, 3), places.counts, strict=True))
    around = tuple(min(p, k - 1) for p, k in zip(pairs(0, 1), pool, strict=True))
    return {
        "batch": draw(_BATCH),
        "channels": draw(st.integers(1, 3)),
        "trees": draw(st.integers(0, 5)),
        "leaves": draw(st.sampled_from((2, 4))),
        "readers": draw(st.booleans()),
        "places": dataclasses.replace(places, pool=pool, pool_padding=around),
        "x_dtype": draw(_DTYPE),
        "dtype": draw(_DTYPE),
    }


@st.composite
def _free_network(draw: Draw) -> Sizes:
    of = draw(_DTYPE)
    layers = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    sizes = draw(_free_gates(tables=False))
    return {
        **sizes,
        "inputs": max(sizes["inputs"], 1),
        "readers": False,
        "layers": tuple(layers),
        "x_dtype": of,
        "dtype": of,
    }


SIZES: dict[str, st.SearchStrategy[Sizes]] = {
    "gate_coefficients": st.fixed_dictionaries(
        {"gates": _SIZE, "axis": st.sampled_from((-1, 0)), "hard": st.booleans(), "dtype": _DTYPE}
    ),
    "scale_gradient": st.fixed_dictionaries({"batch": _BATCH, "x_dtype": _DTYPE}),
    **dict.fromkeys(("detect", "detect_signs", "lookup", "lut", "sparse_lookup", "sparse_lut"), _free_lut()),
    **dict.fromkeys(("margins", "weighted_lookup", "scored_lut", "cell_total_variation"), _free_scored()),
    "lookup_attention": _free_attention(cross=True, pairs=False),
    "lut_attention": _free_attention(cross=False, pairs=False),
    "lut_pair_attention": _free_attention(cross=True, pairs=True),
    **dict.fromkeys(("bilinear_gates", "logic_gates"), _free_gates(tables=False)),
    "gate_network": _free_network(),
    "logic_trees": _free_trees(),
    "lut_at_places": _free_places(),
    "conv_lut": _free_conv(),
    **dict.fromkeys(("soft_lut", "binary_lut", "packed_lut"), _free_gates(tables=True)),
}

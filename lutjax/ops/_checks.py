"""Argument checks with errors naming the argument, its value and the rule."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.arguments import format_value
from lutjax.values._detection import Detection
from lutjax.values._dtypes import FLOATS
from lutjax.values._edges import Edges, check_bounds
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import are_trusted, as_int32, check_once, difference, is_known

MAX_BITS = 30  # row ids are int32

# Used by every op call outside jit, so built once.
_FLOATS = frozenset(map(jnp.dtype, FLOATS))
_INT32 = np.dtype(np.int32)
_ARRAYS = (jax.Array, np.ndarray)


def describe(value: Any) -> str:
    """Return ``float32[4, 8]`` for an array, and type and value otherwise."""
    if isinstance(value, Detection):
        return f"a Detection of shape {list(value.shape)} and {value.bits} bits"
    text = format_value(value)
    return (
        text
        if hasattr(value, "dtype") or text.startswith("a ")
        else f"{type(value).__name__} {text}"
    )


def require(holds: bool, op: str, name: str, value: Any, rule: str) -> None:
    """Raise ValueError about an argument unless a rule holds."""
    if not holds:
        raise ValueError(f"{op}: {name} is {describe(value)}; {rule}.")


def floats(op: str, name: str, a: Any, rank: int | None, shape: str) -> None:
    """Check a float array with rank `rank`, at least ``-rank`` if negative, or any (None)."""
    _array(op, name, a)
    if a.dtype not in _FLOATS:
        raise TypeError(
            f"{op}: {name} is {describe(a)}; its dtype must be one of {', '.join(FLOATS)}."
        )
    _rank(op, name, a, rank, shape)


def integers(op: str, name: str, a: Any, rank: int | None, shape: str) -> None:
    """Check an integer array with rank `rank`, at least ``-rank`` if negative, or any (None)."""
    _array(op, name, a)
    if a.dtype != _INT32 and not jnp.issubdtype(a.dtype, np.integer):
        raise TypeError(f"{op}: {name} is {describe(a)}; its dtype must be int32.")
    _rank(op, name, a, rank, shape)


_MOST_CHECKED = 2**22
"""Size limit for value checks: copying this many ids from a device takes about one call."""


def ids(op: str, name: str, a: Any, n: int, of: str, *, unused: bool = False) -> None:
    """Check that known ids are nonnegative and below `n`.

    JAX arrays are checked on first use. NumPy arrays are mutable and checked in every call. Traced
    and very large arrays are not checked; kernels clamp their ids.

    Args:
      of: noun phrase for the indexed items, such as ``"inputs of x"``.
      unused: whether -1 marks an unused slot.
    """
    if not are_trusted():
        check_once(a, (n, unused), lambda: _check_ids(op, name, a, n, of, unused=unused))


def _check_ids(op: str, name: str, a: Any, n: int, of: str, *, unused: bool) -> None:
    if not 0 < a.size <= _MOST_CHECKED or not n:  # nothing to check
        return
    # `jax.transfer_guard("disallow")` allows explicit transfers.
    known = a if isinstance(a, np.ndarray) else jax.device_get(a)
    low, high = int(known.min()), int(known.max())
    if low < -int(unused) or high >= n:
        slot = ", and -1 marks an unused slot" if unused else ""
        raise ValueError(
            f"{op}: {name} holds ids from {low} to {high}; {of} are 0 to {n - 1}{slot}."
        )


def ids_of_layers(op: str, wires: Any, n_inputs: int, sizes: tuple[int, ...]) -> None:
    """Check known wires in stacked gate layers."""

    def check() -> None:
        if wires.size > _MOST_CHECKED:
            return
        known, first, before = jax.device_get(wires), 0, n_inputs
        for layer, size in enumerate(sizes):
            of_layer = known[first : first + size]
            of = f"inputs of layer {layer}"
            _check_ids(op, "wires", of_layer, before, of, unused=False)
            first, before = first + size, size

    if not are_trusted():
        check_once(wires, ("layers", n_inputs, sizes), check)


def edges(op: str, edges: Edges) -> None:
    """Check an edge list with known values."""
    first, n_edges = edges.first, edges.size

    def check() -> None:
        if first.size <= _MOST_CHECKED:
            check_bounds(f"{op}: targets", jax.device_get(first), n_edges)

    if not are_trusted():
        check_once(first, ("bounds", n_edges), check)
    ids(op, "targets.target", edges.target, edges.n_outputs, "outputs")


def bits(op: str, name: str, a: Any) -> None:
    """Check a bit array ``[features, samples]``: known values are 0 or 1."""
    _array(op, name, a)
    _rank(op, name, a, 2, "[features, samples]")
    if a.dtype != bool:
        check_once(a, "bits", lambda: _check_bits(op, name, np.asarray(a)))


def _check_bits(op: str, name: str, a: np.ndarray) -> None:
    others = a[(a != 0) & (a != 1)]
    if others.size:
        rule = (
            f"{others.size} of its numbers are neither 0 nor 1, such as {others[0]}: compare it "
            "with a threshold first, as in x > 0"
        )
        require(False, op, name, a, rule)


def _array(op: str, name: str, a: Any) -> None:
    if not isinstance(a, _ARRAYS):
        raise TypeError(f"{op}: {name} is {describe(a)}; expected a JAX or numpy array.")
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(
            f"{op}: {name} is a masked array, {describe(a)}; expected values everywhere. Fill the "
            "masked elements, as in a.filled(0)."
        )


def _rank(op: str, name: str, a: Any, rank: int | None, shape: str) -> None:
    if rank is None:
        return
    fits = a.ndim == rank if rank >= 0 else a.ndim >= -rank
    require(fits, op, name, a, f"expected shape {shape}")


def detection(op: str, name: str, d: Any, rank: int, shape: str) -> Detection:
    """Check a detection and return it with int32 ids."""
    if not isinstance(d, Detection):
        raise TypeError(
            f"{op}: {name} is {describe(d)}; expected a lutjax.Detection, as lutjax.detect returns."
        )
    for part in ("index", "flip"):
        integers(op, f"{name}.{part}", getattr(d, part), -rank, shape)
    floats(op, f"{name}.margin", d.margin, -rank, shape)
    if not d.index.shape == d.flip.shape == d.margin.shape:
        raise ValueError(
            f"{op}: {name} has index {describe(d.index)}, flip {describe(d.flip)} and margin "
            f"{describe(d.margin)}; the three must have the same shape."
        )
    if d.index.dtype == d.flip.dtype == _INT32:
        return d
    return dataclasses.replace(d, index=as_int32(d.index), flip=as_int32(d.flip))


def table(op: str, weights: Any, n_detectors: int, bits: int, whose: str) -> None:
    """Check for one table per detector and one row per address."""
    floats(op, "weights", weights, 3, "[detectors, rows, outputs]")
    rule = f"its first axis must have size {n_detectors}, the number of detectors of {whose}"
    require(weights.shape[0] == n_detectors, op, "weights", weights, rule)
    rule = f"{whose} has {bits} bits, and rows have at most {MAX_BITS}"
    require(bits <= MAX_BITS, op, "weights", weights, rule)
    rule = f"{whose} has {bits} bits, so each table must have 2**{bits} = {2**bits} rows"
    require(weights.shape[1] == 2**bits, op, "weights", weights, rule)


def anchors(op: str, a: Any) -> None:
    integers(op, "anchors", a, 3, "[detectors, pairs, 2]")
    require(
        a.shape[2] == 2, op, "anchors", a, "its last axis must have size 2, the inputs of a pair"
    )
    require(a.shape[1] <= MAX_BITS, op, "anchors", a, f"a detector has at most {MAX_BITS} pairs")


def probes(op: str, a: Any) -> None:
    """Check anchor pairs or single anchors."""
    if getattr(a, "ndim", 3) == 2:
        integers(op, "anchors", a, 2, "[detectors, comparisons]")
        rule = f"a detector has at most {MAX_BITS} comparisons"
        require(a.shape[1] <= MAX_BITS, op, "anchors", a, rule)
    else:
        anchors(op, a)


def positions(op: str, p: Any, n_detectors: int) -> None:
    floats(op, "positions", p, 3, "[distances, detectors or 1, position bits]")
    rule = (
        f"its second axis must have size {n_detectors}, the number of detectors, or 1 to share "
        "the parameters"
    )
    require(p.shape[1] in (1, n_detectors), op, "positions", p, rule)


def integer(op: str, name: str, value: Any, expected: str = "a Python int") -> int:
    """Return an integer, or raise TypeError for an integer argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {describe(value)}; expected {expected}.") from None


def optional_integer(op: str, name: str, value: Any) -> int:
    """Return an integer, or raise TypeError for an optional-integer argument."""
    return integer(op, name, value, "None or a Python int")


def flag(op: str, name: str, value: Any) -> bool:
    """Return a Python bool, or raise TypeError for an argument that is not True or False."""
    if not isinstance(value, int | np.integer | np.bool_):
        raise TypeError(f"{op}: {name} is {describe(value)}; expected True or False.")
    return bool(value)


def window(op: str, value: Any) -> int | None:
    if value is None:
        return None
    distances = optional_integer(op, "window", value)
    require(distances >= 0, op, "window", distances, "it must not be negative")
    return distances


def blocks(
    op: str, mask: Any, sizes: Any, n_queries: int, n_keys: int, sequence_axis: Any
) -> tuple[jax.Array | None, tuple[int, int] | None]:
    """Return a block mask as int32 ``[Bq, Bk]``, and the block sizes."""
    if (mask is None) != (sizes is None):
        raise ValueError(f"{op}: block_mask and block_sizes go together; pass both, or neither.")
    if mask is None:
        return None, None
    _array(op, "block_mask", mask)
    if mask.dtype != bool:
        raise TypeError(f"{op}: block_mask is {describe(mask)}; its dtype must be bool.")
    pair = sizes if isinstance(sizes, tuple | list) else (sizes, sizes)
    rule = "expected one number, or those of queries and of keys"
    require(len(pair) == 2, op, "block_sizes", sizes, rule)
    of_queries, of_keys = (optional_integer(op, "block_sizes", size) for size in pair)
    require(
        min(of_queries, of_keys) >= 1, op, "block_sizes", sizes, "blocks have at least 1 position"
    )
    wanted = -(-n_queries // of_queries), -(-n_keys // of_keys)
    rule = (
        f"{n_queries} queries and {n_keys} keys in blocks of {of_queries} and {of_keys} need "
        f"{list(wanted)}"
    )
    require(mask.shape == wanted, op, "block_mask", mask, rule)
    rule = "blocks are those of whole sequences: leave one out"
    require(sequence_axis is None, op, "sequence_axis", sequence_axis, rule)
    return jnp.asarray(mask, jnp.int32), (of_queries, of_keys)


def starts(
    op: str, query_start: Any, key_start: Any, batch: tuple[int, ...]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the first query position minus the first key position, shared and per sequence.

    At least one is None; both are None for a known difference of 0.

    Args:
      batch: batch dimensions.
    """
    for name, value in (("query_start", query_start), ("key_start", key_start)):
        if isinstance(value, jax.Array | np.ndarray):
            integers(op, name, value, None, "")
            leading = ", ".join(map(str, batch))
            rule = f"expected [], one integer for all sequences, or [{leading}], one for each"
            require(_broadcasts(value.shape, batch), op, name, value, rule)
        elif not isinstance(value, int | np.integer):
            raise TypeError(f"{op}: {name} is {describe(value)}; expected an integer.")
    start = difference(query_start, key_start)
    return (None, start) if start is not None and start.ndim else (start, None)


def resolve_starts(
    op: str, causal: Any, window: int | None, query_start: Any, key_start: Any, n_keys: int
) -> tuple[Any, Any]:
    """Return the start positions. Non-causal attention places all queries after all keys."""
    if causal:
        return query_start, key_start
    for name, value, rule in (
        ("window", window, "with causal=False every query sees every key, so it must be None"),
        ("query_start", query_start, "with causal=False positions do not count, so it must be 0"),
        ("key_start", key_start, "with causal=False positions do not count, so it must be 0"),
    ):
        fits = value is None or (isinstance(value, int | np.integer) and value == 0)
        require(fits, op, name, value, rule)
    return n_keys, 0


def capacity(
    op: str,
    p: Any,
    n_queries: int,
    n_keys: int,
    window: int | None,
    query_start: Any,
    key_start: Any,
) -> None:
    """Check for position parameters at every known distance."""
    held = p.shape[0]
    if is_known(query_start) and is_known(key_start):
        farthest = max(int(query_start) + n_queries - 1 - int(key_start), 0)
    else:  # clamped to the last, so at least one must exist
        farthest = 1
    if n_keys == 0 or n_queries == 0:
        farthest = 0
    needed = farthest if window is None else min(farthest, window)
    fits = needed <= held
    rule = (
        f"it holds {held} distances, but these lengths need {needed}; pass position parameters for "
        "all of them, a shorter sequence, or a window"
    )
    require(fits, op, "positions" if not isinstance(p, Detection) else "position", p, rule)


def some_distance(p: Any) -> Any:
    """Pad position parameters to one distance or more: kernels read one even without pairs."""
    return jax.tree.map(lambda a: a if a.shape[0] else jnp.zeros((1, *a.shape[1:]), a.dtype), p)


def segments(
    op: str,
    query_segments: Any,
    key_segments: Any,
    batch: tuple[int, ...],
    n_queries: int,
    n_keys: int,
    names: tuple[str, str] = ("query_segments", "key_segments"),
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return segment ids as int32."""
    if (query_segments is None) != (key_segments is None):
        raise ValueError(f"{op}: {names[0]} and {names[1]} go together; pass both, or neither.")
    if query_segments is None:
        return None, None
    for name, s, length in (
        (names[0], query_segments, n_queries),
        (names[1], key_segments, n_keys),
    ):
        integers(op, name, s, -1, "[..., length]")
        leading = s.shape[:-1]
        fits = s.shape[-1] == length and _broadcasts(leading, batch)
        require(fits, op, name, s, f"expected [{', '.join(map(str, (*batch, length)))}]")
        # Saturated segment ids would merge.
        known = s if isinstance(s, np.ndarray) and s.size else np.zeros(1, np.int32)
        fits = np.iinfo(np.int32).min <= known.min() and known.max() <= np.iinfo(np.int32).max
        rule = f"its ids from {known.min()} to {known.max()} do not fit in int32"
        require(bool(fits), op, name, s, rule)
    return as_int32(query_segments), as_int32(key_segments)


def _broadcasts(leading: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    if len(leading) > len(batch):
        return False
    return all(a in (1, b) for a, b in zip(reversed(leading), reversed(batch), strict=False))


def finite_epsilon(op: str, epsilon: Any) -> float:
    if not isinstance(epsilon, int | float | np.floating) or not 0 <= float(epsilon) < float("inf"):
        raise ValueError(
            f"{op}: epsilon is {describe(epsilon)}; expected a finite Python number >= 0."
        )
    return float(epsilon)


def accumulation(op: str, value: Any) -> FixedPoint | None:
    if value is not None and not isinstance(value, FixedPoint):
        raise TypeError(
            f"{op}: accumulate is {describe(value)}; expected None or a lutjax.FixedPoint."
        )
    return value


MAX_WIRES = 8  # per bit-addressed table


def wires_of_tables(op: str, n_inputs: int, wires: Any) -> None:
    """Check for 1 to 8 wires per table, and at least one input."""
    integers(op, "wires", wires, 2, "[gates, inputs of a gate]")
    rule = f"a gate has 1 to {MAX_WIRES} inputs; use more gates instead"
    require(1 <= wires.shape[1] <= MAX_WIRES, op, "wires", wires, rule)
    require(n_inputs > 0 or not wires.size, op, "x", wires, "gates need at least one input to read")


def check_gate_arguments(
    op: str, x: Any, wires: Any, readers: Any, feature_axis: Any, *, in_layers: bool = False
) -> None:
    """Check arguments shared by all gate ops.

    Args:
      in_layers: whether wires cover several layers.
    """
    if not is_known(feature_axis) or feature_axis not in (-1, 0):
        raise ValueError(
            f"{op}: feature_axis is {describe(feature_axis)}; expected -1 (last) or 0 (first)."
        )
    floats(op, "x", x, -1, "[..., inputs]" if feature_axis else "[inputs, ...]")
    wires_of_tables(op, x.shape[feature_axis], wires)
    if not in_layers:
        ids(op, "wires", wires, x.shape[feature_axis], "inputs of x")
    if readers is not None:
        integers(op, "readers", readers, 2, "[inputs, fan-out]")
        rule = (
            f"x has {x.shape[feature_axis]} inputs, so its first axis must have size "
            f"{x.shape[feature_axis]}"
        )
        require(readers.shape[0] == x.shape[feature_axis], op, "readers", readers, rule)
        ids(op, "readers", readers, wires.size, "entries of wires", unused=True)


def gates(op: str, coefficients: Any, wires: Any) -> None:
    """Check two-input wires and their coefficients."""
    require(
        wires.shape[1] == 2, op, "wires", wires, "expected shape [gates, 2]: a gate has two inputs"
    )
    floats(op, "coefficients", coefficients, 2, "[4, gates]")
    rule = f"expected [4, {wires.shape[0]}]: 1, a, b and ab for each gate of the wires"
    require(coefficients.shape == (4, wires.shape[0]), op, "coefficients", coefficients, rule)


def slots(op: str, name: str, table: Any, wires: Any) -> None:
    """Check for one slot per address."""
    G, n = wires.shape
    rule = f"wires is {describe(wires)}: {G} gates of {n} inputs, so expected [{G}, {2**n}]"
    require(table.shape == (G, 2**n), op, name, table, rule)


def tables_of_bits(
    op: str, x: Any, table: Any, wires: Any, readers: Any, feature_axis: Any
) -> None:
    check_gate_arguments(op, x, wires, readers, feature_axis)
    floats(op, "table", table, 2, "[gates, slots]")
    slots(op, "table", table, wires)


def logits(op: str, a: Any, axis: Any) -> None:
    if not is_known(axis) or axis not in (-1, 0):
        raise ValueError(f"{op}: axis is {describe(axis)}; expected -1 (last) or 0 (first).")
    shape = "[gates, 16]" if axis else "[16, gates]"
    floats(op, "logits", a, 2, shape)
    require(
        a.shape[axis] == 16, op, "logits", a, f"expected {shape}: there are 16 gates of two inputs"
    )


def require_words(op: str, name: str, a: Any) -> None:
    if not (isinstance(a, jax.Array | np.ndarray) and a.dtype == np.uint32):
        raise TypeError(f"{op}: {name} is {describe(a)}; its dtype must be uint32.")
    _rank(op, name, a, -1, "[features, ...]")

"""Reference implementations for all ops in plain `jax.numpy`, used as the test oracle.

They support any autodiff mode but are neither fast nor lean: attention materializes every pair. The
`lutjax` ops compute the same values and cotangents; if they disagree, the op is wrong.

Every function has the same arguments as its op, except ``implementation``; ``readers`` are ignored.
With ``accumulate`` values match fixed-point sums bit for bit. Derivatives come from floating-point
sums in any autodiff mode, so an op's cotangents differ by up to one resolution per addend.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Num, UInt32

from lutjax import _meshes
from lutjax._typing import Anchors, Array, Integer, Positions, Scalar
from lutjax.ops.logic_trees import Places
from lutjax.ops.lut_at_places import Windows
from lutjax.ops.quantize_tables import quantize_tables
from lutjax.reads import Read, straight_through
from lutjax.values._derivatives import match_mapped_axes, with_derivative_of
from lutjax.values._detection import Detection, clamp_detection, is_above_zero
from lutjax.values._dtypes import accumulator
from lutjax.values._edges import Edges
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, difference
from lutjax.values._quantized import QuantizedTables, power
from lutjax.values._reproducible import make_reproducible
from lutjax.wiring._images import window_sizes, windows
from lutjax.wiring._sizes import Size

__all__ = [
    "bilinear_gates",
    "binary_lut",
    "conv_lut",
    "detect",
    "detect_signs",
    "gate_coefficients",
    "gate_network",
    "logic_gates",
    "logic_trees",
    "lookup",
    "lookup_attention",
    "lut",
    "lut_at_places",
    "lut_attention",
    "lut_pair_attention",
    "margins",
    "pack_bits",
    "packed_lut",
    "scale_gradient",
    "scored_lut",
    "soft_lut",
    "sparse_lookup",
    "sparse_lut",
    "unpack_bits",
    "weighted_lookup",
]


# ------------------------------------------------------------------------------------- meshes
Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = Mapping[str, Any]


def _shard_outputs(spec: Callable[[Arguments], PartitionSpec]) -> Callable[[Function], Function]:
    """Return a decorator to support arrays on meshes with explicit axes.

    The compiler shards the function, and outputs have the sharding returned by `spec` for the named
    arguments.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, options))
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
            if not any(_meshes.explicit_axes(leaves[i]) for i in at):
                return function(*args, **options)

            def call_arrays(*arrays: jax.Array) -> Any:
                own = dict(zip(at, arrays, strict=True))
                given = (own.get(i, leaf) for i, leaf in enumerate(leaves))
                args, options = jax.tree.unflatten(structure, given)
                return function(*args, **options)

            outputs = spec(signature.bind(*args, **options).arguments)
            divided = _meshes.shard_by_compiler(call_arrays, lambda *_: outputs)
            return divided(*(leaves[i] for i in at))

        return cast(Function, call)

    return decorate


def _leading_spec(name: str, n_axes: int) -> Callable[[Arguments], PartitionSpec]:
    """Shard outputs like an argument's axes before its last `n_axes` (and its group axis)."""

    def spec(given: Arguments) -> PartitionSpec:
        a = given[name]
        a = a.index if isinstance(a, Detection) else jnp.asarray(a)
        # Inputs have a group axis; detections do not.
        last = n_axes + (given.get("groups") is not None and name == "x")
        return PartitionSpec(*_meshes.spec_of(a)[: a.ndim - last])

    return spec


def _image_spec(given: Arguments) -> PartitionSpec:
    return PartitionSpec(*_meshes.spec_of(given["images"])[:-3])


def _feature_spec(given: Arguments) -> PartitionSpec:
    """Shard samples like the inputs; features are unsharded."""
    first = given.get("feature_axis", -1) == 0
    spec = _meshes.spec_of(given["x"])
    return PartitionSpec(None, *spec[1:]) if first else PartitionSpec(*spec[:-1])


def _replicated_spec(given: Arguments) -> PartitionSpec:
    return PartitionSpec()


# ------------------------------------------------------------------------------------- detection
def _detect_deltas(delta: Float[jax.Array, "*batch bits"], epsilon: float) -> Detection:
    bits = delta.shape[-1]
    batch = delta.shape[:-1]
    if bits == 0:
        zero = jnp.zeros(batch, jnp.int32)
        return Detection(zero, zero, jnp.full(batch, jnp.inf, delta.dtype), bits)
    bit = is_above_zero(delta) & ~(jnp.abs(delta) < epsilon)
    place = jax.lax.broadcasted_iota(jnp.int32, delta.shape, delta.ndim - 1)
    index = jnp.sum(bit.astype(jnp.int32) << place, -1, dtype=jnp.int32)
    # NaN is smallest. Compilers may pick any NaN, so map all to -1.
    distance = jnp.where(jnp.isnan(delta), -1, jnp.abs(delta))
    closest = jnp.argmin(distance, -1).astype(jnp.int32)  # the first
    margin = jnp.take_along_axis(delta, closest[..., None], -1)[..., 0]
    return Detection(index, jnp.left_shift(jnp.int32(1), closest), margin, bits)


def _clamp_ids(ids: Array, n: int) -> jax.Array:
    return jnp.clip(as_int32(ids), 0, max(n - 1, 0))


def _take(x: jax.Array, ids: Array, axis: int = -1) -> jax.Array:
    axis %= x.ndim
    if x.shape[axis] == 0:  # no ids either
        return jnp.zeros((*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :]), x.dtype)
    return jnp.take(x, _clamp_ids(ids, x.shape[axis]), axis=axis, mode="clip")


@_shard_outputs(_leading_spec("x", 1))
def detect(
    x: Float[Array, "*batch inputs"],
    anchors: Anchors,
    *,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,  # only the op's gradient is a sum
) -> Detection:
    x = jnp.asarray(x).astype(accumulator(x.dtype))
    return _detect_deltas(_take(x, anchors[..., 0]) - _take(x, anchors[..., 1]), epsilon)


@_shard_outputs(_leading_spec("positions", 1))
def detect_signs(positions: Float[Array, "*batch bits"], *, epsilon: float = 0.0) -> Detection:
    return _detect_deltas(jnp.asarray(positions).astype(accumulator(positions.dtype)), epsilon)


# ------------------------------------------------------------------------------------- surrogate
@jax.custom_jvp
def _surrogate(margin: jax.Array, difference: jax.Array) -> jax.Array:
    """Return zero; its `margin` derivative is the surrogate gradient times `difference`."""
    zeros = jnp.zeros(jnp.broadcast_shapes(margin.shape, difference.shape), difference.dtype)
    return match_mapped_axes(zeros, margin, difference)


@_surrogate.defjvp
def _surrogate_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    margin, difference = primals
    sign = jnp.where(margin > 0, 1, -1).astype(margin.dtype)
    slope = 0.5 * sign / jnp.square(1 + jnp.abs(margin))
    return _surrogate(*primals), (slope * tangents[0]).astype(difference.dtype) * difference


def _read(
    weights: jax.Array,
    row: jax.Array,
    margins_and_flips: list[tuple[jax.Array, jax.Array]],
    targets: Any = None,
    n_outputs: int | None = None,
) -> jax.Array:
    """Read each detector's row, with the surrogate gradient for each margin.

    ``weights [T, R, O]``, ``row [..., T]`` -> ``[..., T, O]``; with targets ``weights [T, R, K]``
    -> ``[..., T * K, n_outputs]``: slots scattered to their outputs.
    """
    weights = jnp.asarray(weights)
    detector = jax.lax.broadcasted_iota(jnp.int32, row.shape, row.ndim - 1)
    table = weights.astype(accumulator(weights.dtype))

    def read(a: jax.Array, row: jax.Array) -> jax.Array:
        return a[detector, _clamp_ids(row, table.shape[1])]

    def change(margin: jax.Array, difference: jax.Array) -> jax.Array:
        return _surrogate(margin[..., None], jax.lax.stop_gradient(difference))

    if targets is None:
        value = read(table, row)
        for margin, flip in margins_and_flips:
            value = value + change(margin, read(table, row) - read(table, row ^ flip))
        return value
    assert n_outputs is not None
    to = jnp.clip(jnp.broadcast_to(as_int32(targets), weights.shape), -1, n_outputs - 1)
    table = jnp.where(to < 0, 0, table)
    main, to_main = read(table, row), read(to, row)
    value = _scatter_to_outputs(main, to_main, n_outputs)
    for margin, flip in margins_and_flips:
        flipped, to_flipped = read(table, row ^ flip), read(to, row ^ flip)
        same = to_flipped == to_main
        value = value + _scatter_to_outputs(
            change(margin, jnp.where(same, main - flipped, main)), to_main, n_outputs
        )
        value = value + _scatter_to_outputs(
            change(margin, jnp.where(same, 0, -flipped)), jnp.where(same, -1, to_flipped), n_outputs
        )
    return value


def _scatter_to_outputs(values: jax.Array, targets: jax.Array, n_outputs: int) -> jax.Array:
    """Scatter slots to their targets: ``[..., T, K]`` -> ``[..., T * K, n_outputs]``."""
    output = jax.lax.broadcasted_iota(jnp.int32, (*targets.shape, n_outputs), targets.ndim)
    found = jnp.where(targets[..., None] == output, values[..., None], 0)
    *batch, n_detectors, n_slots = targets.shape
    return found.reshape(*batch, n_detectors * n_slots, n_outputs)


# ------------------------------------------------------------------------------------- sums
def _sum(
    values: jax.Array, axis: int | tuple[int, ...], dtype: Any, accumulate: FixedPoint | None
) -> jax.Array:
    """Sum addends (section 7) in the given dtype."""
    total = jnp.sum(values, axis).astype(dtype)
    if accumulate is None:
        return total
    integers = jnp.sum(accumulate.quantize(jax.lax.stop_gradient(values)), axis, dtype=jnp.int32)
    return with_derivative_of(accumulate.total(integers, dtype), total)


# ------------------------------------------------------------------------------------- lookups
@_shard_outputs(_leading_spec("detection", 1))
def lookup(
    weights: Float[Array, "detectors rows outputs"],
    detection: Detection,
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*any outputs"]:
    weights, d = jnp.asarray(weights), detection
    return _sum_groups(
        _read(weights, d.index, [(d.margin, d.flip)]), groups, weights.dtype, accumulate
    )


def _sum_groups(
    values: jax.Array, groups: int | None, dtype: Any, accumulate: FixedPoint | None
) -> jax.Array:
    """Sum over each group's detectors, ``[..., T, O]`` -> ``[..., G, O]``, or ``[..., O]``."""
    if groups is None:
        return _sum(values, -2, dtype, accumulate)
    *batch, n_detectors, n_outputs = values.shape
    return _sum(
        values.reshape(*batch, groups, n_detectors // groups, n_outputs), -2, dtype, accumulate
    )


@_shard_outputs(_leading_spec("detection", 1))
def sparse_lookup(
    weights: Float[Array, "detectors rows slots"] | Float[Array, " edges"],
    detection: Detection,
    targets: Int[Array, "#detectors #rows slots"] | Edges,
    n_outputs: int | None = None,
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*any outputs"]:
    weights, d = jnp.asarray(weights), detection
    if isinstance(targets, Edges):
        return _sum_edges(weights, d, targets, groups, accumulate)
    value = _read(weights, d.index, [(d.margin, d.flip)], targets, n_outputs)
    return _sum_groups(value, groups, weights.dtype, accumulate)


def _sum_edges(
    weights: jax.Array,
    d: Detection,
    edges: Edges,
    groups: int | None,
    accumulate: FixedPoint | None,
) -> jax.Array:
    """Evaluate every edge for every sample: its weight if the sample reads its row."""
    n_detectors, n_rows, n_outputs = edges.n_detectors, edges.n_rows, edges.n_outputs
    number = jnp.arange(edges.size, dtype=jnp.int32)
    place = jnp.searchsorted(jnp.asarray(edges.first), number, side="right") - 1
    detector, row = place // max(n_rows, 1), place % max(n_rows, 1)
    table = weights.astype(accumulator(weights.dtype))

    def read(index: jax.Array) -> jax.Array:
        read_rows = _take(_clamp_ids(index, n_rows), detector)
        return jnp.where(read_rows == _align(row, read_rows.ndim), _align(table, read_rows.ndim), 0)

    main = read(d.index)
    margin = _take(d.margin, detector)
    # Products for both rows are separate addends.
    parts = [
        main,
        *(_surrogate(margin, jax.lax.stop_gradient(a)) for a in (main, -read(d.index ^ d.flip))),
    ]
    group = detector * (groups or 1) // max(n_detectors, 1)
    output = jnp.clip(as_int32(jnp.asarray(edges.target)), 0, n_outputs - 1) + group * n_outputs
    to = jnp.broadcast_to(_align(output, main.ndim), main.shape)[..., None]
    values = [_scatter_to_outputs(a[..., None], to, (groups or 1) * n_outputs) for a in parts]
    y = _sum(values[0] + values[1] + values[2], -2, weights.dtype, accumulate)
    return y if groups is None else y.reshape(*y.shape[:-1], groups, n_outputs)


# ----------------------------------------------------------------------------------- weighted reads
@_shard_outputs(_leading_spec("index", 2))
def weighted_lookup(
    weights: Float[Array, "detectors rows outputs"],
    index: Int[Array, "*batch detectors ways"],
    coefficients: Float[Array, "*batch detectors ways"],
    *,
    groups: int | None = None,
    valued: int | None = None,
    accumulate: FixedPoint | None = None,
) -> Float[jax.Array, "*any outputs"]:
    weights, coefficients = jnp.asarray(weights), jnp.asarray(coefficients)
    dtype = accumulator(weights.dtype)
    t = jax.lax.broadcasted_iota(jnp.int32, index.shape, index.ndim - 2)
    rows = weights.astype(dtype)[t, _clamp_ids(index, weights.shape[1])]  # [..., T, K, O]
    way = jax.lax.broadcasted_iota(jnp.int32, (*index.shape, 1), index.ndim - 1)
    c = coefficients.astype(dtype)[..., None]
    value = _weight_rows(
        c, rows, (c != 0) & (way < (index.shape[-1] if valued is None else valued))
    )
    *batch, n_detectors, n_ways, n_outputs = value.shape
    value = value.reshape(*batch, n_detectors * n_ways, n_outputs)
    return _sum_groups(value, groups, weights.dtype, accumulate)


@jax.custom_jvp
def _weight_rows(c: jax.Array, rows: jax.Array, reads: jax.Array) -> jax.Array:
    """Return rows times coefficients, 0 if unread, always with coefficient derivatives."""
    return jnp.where(reads, c, 0) * jnp.where(reads, rows, 0)


@_weight_rows.defjvp
def _weighted_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    c, rows, reads = primals
    of_rows = jnp.where(reads, c, 0) * jnp.where(reads, tangents[1], 0)
    return _weight_rows(c, rows, reads), tangents[0] * rows + of_rows


@_shard_outputs(_leading_spec("x", 1))
def margins(
    x: Float[Array, "*batch inputs"],
    anchors: Int[Array, "detectors comparisons *pair"],
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,  # only the op's gradient is a sum
) -> Float[jax.Array, "*any detectors comparisons"]:
    x = jnp.asarray(x).astype(accumulator(x.dtype))
    x = x[..., None, :] if groups is None else x
    ends = anchors[..., None] if anchors.ndim == 2 else anchors
    ends = ends.reshape(groups or 1, anchors.shape[0] // (groups or 1), *ends.shape[1:])
    each = [_take(x[..., g % x.shape[-2], :], of_group) for g, of_group in enumerate(ends)]
    values = jnp.concatenate(each, -3)
    return values[..., 0] - values[..., 1] if values.shape[-1] == 2 else values[..., 0]


@_shard_outputs(_leading_spec("x", 1))
def scored_lut(
    x: Float[Array, "*batch inputs"],
    weights: Float[Array, "detectors rows outputs"] | QuantizedTables,
    anchors: Int[Array, "detectors comparisons *pair"],
    scalars: Mapping[str, Scalar],
    *,
    read: Read,
    groups: int | None = None,
    sum_groups: bool = False,
    keep: Float[Array, "*leading detectors"] | None = None,
    accumulate: FixedPoint | None = None,
) -> Float[jax.Array, "*any outputs"]:
    u = margins(x, anchors, groups=groups)
    dtype = u.dtype
    if isinstance(weights, QuantizedTables):
        tables = _scale_tables(weights).astype(dtype)
    else:
        tables = jnp.asarray(weights)
        dtype = tables.dtype
        if read.rounds_tables:
            quantized = quantize_tables(jax.lax.stop_gradient(tables), groups=groups)
            tables = straight_through(_scale_tables(quantized).astype(dtype), tables)
    index, coefficients = read(u, scalars)
    if keep is not None:
        keep = jnp.asarray(keep)[..., None].astype(coefficients.dtype)
        coefficients = keep * coefficients
    if accumulate is not None:
        coefficients = with_derivative_of(
            _to_the_bit(read, u, scalars, keep, accumulate), coefficients
        )
    if not sum_groups:
        y = weighted_lookup(
            tables, index, coefficients, groups=groups, valued=read.valued, accumulate=accumulate
        )
        return y.astype(dtype)
    y = weighted_lookup(tables, index, coefficients, valued=read.valued, accumulate=accumulate)
    return (y if groups is None else y[..., None, :]).astype(dtype)


def _to_the_bit(read: Read, u: Any, scalars: Any, keep: Any, accumulate: FixedPoint) -> jax.Array:
    """Return a read's bitwise-defined coefficients for addends (section 7)."""
    u, scalars, keep = jax.lax.stop_gradient((u, dict(scalars), keep))
    coefficients = read(u, scalars, accumulate=accumulate)[1]
    return coefficients if keep is None else make_reproducible(jnp.multiply)(keep, coefficients)


def _scale_tables(tables: QuantizedTables) -> jax.Array:
    scale = jnp.repeat(tables.exponents, tables.shape[0] // tables.exponents.shape[0], axis=0)
    return jnp.asarray(tables.values, jnp.float32) * power(scale[:, None], jnp.float32)


# ------------------------------------------------------------------------------------- attention
def _pairs(
    n_queries: int,
    n_keys: int,
    window: int | None,
    query_start: Any,
    key_start: Any,
    query_segments: Any,
    key_segments: Any,
    block_mask: Any,
    block_sizes: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return each pair's distance and mask, ``[..., Lq, Lk]``, shared or per sequence."""
    start = jnp.asarray(
        0 if (start := difference(query_start, key_start)) is None else start, jnp.int32
    )
    place = (
        jnp.arange(n_queries, dtype=jnp.int32)[:, None]
        - jnp.arange(n_keys, dtype=jnp.int32)[None, :]
        - 1
    )
    distance = _align(place, start.ndim + 2) + start[..., None, None]
    counts = distance >= 0
    if window is not None:
        counts &= distance < window
    if block_mask is not None:
        of_queries, of_keys = (
            (block_sizes, block_sizes) if isinstance(block_sizes, int) else block_sizes
        )
        query, key = jnp.arange(n_queries) // of_queries, jnp.arange(n_keys) // of_keys
        counts &= _align(jnp.asarray(block_mask)[query[:, None], key[None, :]], counts.ndim)
    if query_segments is not None:
        same = jnp.expand_dims(jnp.asarray(query_segments), -1) == jnp.expand_dims(
            jnp.asarray(key_segments), -2
        )
        shape = jnp.broadcast_shapes(same.shape, counts.shape)
        counts = jnp.broadcast_to(same, shape) & jnp.broadcast_to(counts, shape)
    return distance, counts


def _take_distances(values: jax.Array, distance: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gather ``values [distances, ...]`` at clamped distances, in the given shape."""
    return jnp.broadcast_to(_align(_take(values, distance, axis=0), len(shape)), shape)


def _align(a: jax.Array, ndim: int) -> jax.Array:
    """Prepend size-1 axes up to `ndim`."""
    return a.reshape((1,) * (ndim - a.ndim) + a.shape)


@_shard_outputs(_leading_spec("query", 1))
def lookup_attention(
    weights: Float[Array, "detectors rows slots"],
    query: Detection,
    key: Detection,
    position: Detection | None = None,
    *,
    targets: Int[Array, "#detectors #rows slots"] | None = None,
    n_outputs: int | None = None,
    causal: bool = True,
    window: int | None = None,
    block_mask: Bool[Array, "_ _"] | None = None,
    block_sizes: tuple[int, int] | int | None = None,
    query_start: Integer | Int[Array, "*#batch"] = 0,
    key_start: Integer | Int[Array, "*#batch"] = 0,
    query_segments: Int[Array, "*#batch queries"] | None = None,
    key_segments: Int[Array, "*#batch keys"] | None = None,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*batch queries outputs"]:
    weights = jnp.asarray(weights)
    *batch, n_queries, _ = query.shape
    n_keys = key.shape[-2]
    if n_queries == 0 or n_keys == 0 or (position is not None and position.shape[0] == 0):
        return jnp.zeros(
            (*batch, n_queries, weights.shape[-1] if n_outputs is None else n_outputs),
            weights.dtype,
        )
    query_start, key_start = (query_start, key_start) if causal else (n_keys, 0)
    blocks = block_mask, block_sizes
    places = query_start, key_start, query_segments, key_segments
    distance, counts = _pairs(n_queries, n_keys, window, *places, *blocks)
    q = jax.tree.map(lambda a: a[..., :, None, :], clamp_detection(query))
    k = jax.tree.map(lambda a: a[..., None, :, :], clamp_detection(key))
    p_bits = 0 if position is None else position.bits
    row = (q.index << (k.bits + p_bits)) | (k.index << p_bits)

    query_is_closer = jnp.abs(q.margin) < jnp.abs(k.margin)
    margin = jnp.where(query_is_closer, q.margin, k.margin)
    flip = jnp.where(query_is_closer, q.flip << (k.bits + p_bits), k.flip << p_bits)
    flips = [(margin, flip)]
    if position is not None and p_bits:
        p = jax.tree.map(
            lambda a: _take_distances(a, distance, row.shape), clamp_detection(position)
        )
        row = row | p.index
        p_margin = p.margin.astype(margin.dtype)
        position_is_closest = jnp.abs(p_margin) < jnp.minimum(jnp.abs(q.margin), jnp.abs(k.margin))
        # Elsewhere, flip 0 gives a zero difference; margin 1 replaces NaN, so the product is 0.
        p_margin = jnp.where(position_is_closest, p_margin, 1)
        flips.append((p_margin, jnp.where(position_is_closest, p.flip, 0)))

    flips = [(_mask_margins(counts, margin), flip) for margin, flip in flips]
    return _sum_pairs(
        _read(weights, row, flips, targets, n_outputs), counts, weights.dtype, accumulate
    )


def _mask_margins(counts: jax.Array, margin: jax.Array) -> jax.Array:
    """Mask ``margin [..., Lq, Lk, T]`` outside `counts`, where NaN times 0 would be a gradient."""
    return jnp.where(_align(counts[..., None], margin.ndim), margin, 1)


def _sum_pairs(
    value: jax.Array, counts: jax.Array, dtype: Any, accumulate: FixedPoint | None
) -> jax.Array:
    """Sum ``value [..., Lq, Lk, T, O]`` over detectors and counted keys -> ``[..., Lq, O]``."""
    value = jnp.where(_align(counts[..., None, None], value.ndim), value, 0)
    return _sum(value, (-3, -2), dtype, accumulate)


@_shard_outputs(_leading_spec("x", 1))
def lut_pair_attention(
    x: Float[Array, "*batch queries inputs"],
    weights: Float[Array, "detectors rows slots"],
    anchors: Anchors,
    positions: Positions | None = None,
    *,
    targets: Int[Array, "#detectors #rows slots"] | None = None,
    n_outputs: int | None = None,
    interleave: bool = False,
    causal: bool = True,
    window: int | None = None,
    block_mask: Bool[Array, "_ _"] | None = None,
    block_sizes: tuple[int, int] | int | None = None,
    segments: Int[Array, "*#batch queries"] | None = None,
    keys: Float[Array, "*batch keys inputs"] | None = None,
    query_start: Integer | Int[Array, "*#batch"] = 0,
    key_start: Integer | Int[Array, "*#batch"] = 0,
    key_segments: Int[Array, "*#batch keys"] | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*batch queries outputs"]:
    x, weights = jnp.asarray(x), jnp.asarray(weights)
    dtype = accumulator(*(a.dtype for a in (x, positions) if a is not None))
    x = x.astype(dtype)
    keys = x if keys is None else jnp.asarray(keys).astype(dtype)
    key_segments = segments if key_segments is None else key_segments
    n_detectors = anchors.shape[0]
    *batch, n_queries, _ = x.shape
    n_keys = keys.shape[-2]
    if n_queries == 0 or n_keys == 0 or (positions is not None and positions.shape[0] == 0):
        return jnp.zeros(
            (*batch, n_queries, weights.shape[-1] if n_outputs is None else n_outputs),
            weights.dtype,
        )
    query_start, key_start = (query_start, key_start) if causal else (n_keys, 0)
    places = query_start, key_start, segments, key_segments
    distance, counts = _pairs(n_queries, n_keys, window, *places, block_mask, block_sizes)

    shape = (*batch, n_queries, n_keys, n_detectors)
    parts = [
        jnp.broadcast_to(jnp.expand_dims(keys, (-4, -2)), (*shape, x.shape[-1])),
        jnp.broadcast_to(jnp.expand_dims(x, (-3, -2)), (*shape, x.shape[-1])),
    ]
    if positions is not None:
        parts.append(
            _take_distances(jnp.asarray(positions, dtype), distance, (*shape, positions.shape[-1]))
        )
    z = jnp.stack(parts, -1).reshape(*shape, -1) if interleave else jnp.concatenate(parts, -1)

    def end(side: int) -> jax.Array:
        ids = _align(_clamp_ids(anchors[..., side], z.shape[-1]), z.ndim)
        return jnp.take_along_axis(z, jnp.broadcast_to(ids, (*shape, ids.shape[-1])), -1)

    d = _detect_deltas(end(0) - end(1), epsilon)
    flips = [(_mask_margins(counts, d.margin), d.flip)]
    value = _read(weights, d.index, flips, targets, n_outputs)
    return _sum_pairs(value, counts, weights.dtype, accumulate)


# ------------------------------------------------------------------------------------- compositions
@_shard_outputs(_leading_spec("x", 1))
def lut(
    x: Float[Array, "*batch inputs"],
    weights: Float[Array, "detectors rows outputs"],
    anchors: Anchors,
    *,
    groups: int | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*any outputs"]:
    d = _detect_deltas(margins(x, anchors, groups=groups), epsilon)
    return lookup(weights, d, groups=groups, accumulate=accumulate)


@_shard_outputs(_leading_spec("x", 1))
def sparse_lut(
    x: Float[Array, "*batch inputs"],
    weights: Float[Array, "detectors rows slots"] | Float[Array, " edges"],
    anchors: Anchors,
    targets: Int[Array, "#detectors #rows slots"] | Edges,
    n_outputs: int | None = None,
    *,
    groups: int | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*any outputs"]:
    d = _detect_deltas(margins(x, anchors, groups=groups), epsilon)
    return sparse_lookup(weights, d, targets, n_outputs, groups=groups, accumulate=accumulate)


@_shard_outputs(_image_spec)
def conv_lut(
    images: Float[Array, "*batch height width channels"],
    weights: Float[Array, "detectors rows outputs"],
    anchors: Anchors,
    scalars: Mapping[str, Scalar] | None = None,
    *,
    kernel: Size,
    stride: Size = 1,
    padding: Size = 0,
    groups: int = 1,
    read: Read | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*any place_rows place_columns out_channels"]:
    images = jnp.asarray(images).astype(accumulator(images.dtype))
    patches = _patches(
        images, *window_sizes("conv_lut", images.shape[-3:], kernel, stride, padding), groups
    )
    if read is None:
        y = lut(patches, weights, anchors, groups=groups, epsilon=epsilon, accumulate=accumulate)
    else:
        y = scored_lut(
            patches,
            weights,
            anchors,
            scalars or {},
            read=read,
            groups=groups,
            accumulate=accumulate,
        )
    return y.reshape(*y.shape[:-2], math.prod(y.shape[-2:]))


def _patches(
    images: Any, size: tuple[int, int], step: tuple[int, int], around: tuple[int, int], n_parts: int
) -> jax.Array:
    """Return windows ``[..., rows, columns, parts, values]``; parts are contiguous channels."""
    lead, channels = images.shape[:-3], images.shape[-1]
    padded = jnp.pad(images, [(0, 0)] * len(lead) + [(n, n) for n in (*around, 0)])
    ids = windows(padded.shape[-3:], size, step)
    ids = np.moveaxis(ids.reshape(*ids.shape[:2], -1, n_parts, channels // n_parts), 3, 2)
    patches: jax.Array = padded.reshape(*lead, math.prod(padded.shape[-3:]))[
        ..., ids.reshape(*ids.shape[:3], -1)
    ]
    return patches


@_shard_outputs(_image_spec)
def lut_at_places(
    images: Float[Array, "*batch height width channels"],
    weights: Float[Array, "detectors rows outputs"],
    anchors: Anchors,
    targets: Int[Array, "groups outputs"] | None = None,
    n_outputs: int | None = None,
    *,
    windows: Windows,
    groups: int = 1,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*any place_rows place_columns out_channels"]:
    images = jnp.asarray(images).astype(accumulator(images.dtype))
    patches = _patches(
        images, windows.size, windows.stride, windows.padding, windows.image[2] // windows.channels
    )
    d = _detect_deltas(margins(patches, anchors, groups=groups), epsilon)
    if targets is None:
        y = lookup(weights, d, groups=groups, accumulate=accumulate)
        return y.reshape(*y.shape[:-2], math.prod(y.shape[-2:]))
    assert n_outputs is not None
    of_tables = jnp.repeat(as_int32(targets), len(anchors) // groups, 0)
    return sparse_lookup(weights, d, of_tables[:, None], n_outputs, accumulate=accumulate)


@_shard_outputs(_leading_spec("x", 1))
def lut_attention(
    x: Float[Array, "*batch length inputs"],
    weights: Float[Array, "detectors rows slots"],
    anchors: Anchors,
    positions: Positions | None = None,
    *,
    targets: Int[Array, "#detectors #rows slots"] | None = None,
    n_outputs: int | None = None,
    causal: bool = True,
    window: int | None = None,
    block_mask: Bool[Array, "_ _"] | None = None,
    block_sizes: tuple[int, int] | int | None = None,
    segments: Int[Array, "*#batch length"] | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "*batch length outputs"]:
    d = detect(x, anchors, epsilon=epsilon)
    e = None if positions is None else detect_signs(positions)
    return lookup_attention(
        weights,
        d,
        d,
        e,
        targets=targets,
        n_outputs=n_outputs,
        causal=causal,
        window=window,
        block_mask=block_mask,
        block_sizes=block_sizes,
        query_segments=segments,
        key_segments=segments,
        accumulate=accumulate,
    )


# ----------------------------------------------------------------------------- differentiable logic
GATES = np.array(
    [
        [0, 0, 0, 0],  # 0 false
        [0, 0, 0, 1],  # 1 a and b
        [0, 1, 0, -1],  # 2 a and not b
        [0, 1, 0, 0],  # 3 a
        [0, 0, 1, -1],  # 4 not a and b
        [0, 0, 1, 0],  # 5 b
        [0, 1, 1, -2],  # 6 xor
        [0, 1, 1, -1],  # 7 or
        [1, -1, -1, 1],  # 8 nor
        [1, -1, -1, 2],  # 9 equal
        [1, 0, -1, 0],  # 10 not b
        [1, 0, -1, 1],  # 11 a or not b
        [1, -1, 0, 0],  # 12 not a
        [1, -1, 0, 1],  # 13 not a or b
        [1, 0, 0, -1],  # 14 nand
        [1, 0, 0, 0],  # 15 true
    ],
    np.float32,
)
"""Gate coefficients for 1, a, b and ab; bit 3 in a gate number is its output for ab = 00."""


@_shard_outputs(_replicated_spec)
def gate_coefficients(
    logits: Float[Array, "..."], *, hard: bool = False, axis: int = -1
) -> Float[Array, "4 gates"]:
    logits = jnp.asarray(logits)
    logits = logits.astype(accumulator(logits.dtype))
    if hard:
        chosen = jax.nn.one_hot(jnp.argmax(logits, axis), 16, axis=axis, dtype=logits.dtype)
        return jnp.einsum("gk,kc->cg" if axis else "kg,kc->cg", chosen, GATES.astype(logits.dtype))
    p = jax.nn.softmax(logits, axis)
    return jnp.einsum(
        "gk,kc->cg" if axis else "kg,kc->cg", p, GATES.astype(p.dtype), precision="highest"
    )


def _gather_wires(x: jax.Array, wires: Array, feature_axis: int, dtype: Any) -> list[jax.Array]:
    """Gather inputs ``[..., G]`` for each wire, features last."""
    x = jnp.moveaxis(x, feature_axis, -1).astype(dtype)
    return [_take(x, wires[:, place]) for place in range(wires.shape[1])]


def _restore_feature_axis(y: jax.Array, feature_axis: int, dtype: Any) -> jax.Array:
    return jnp.moveaxis(y, -1, feature_axis).astype(dtype)


def _over_samples(a: jax.Array, rank: int) -> jax.Array:
    """Prepend size-1 sample axes to ``[G, ...]``."""
    return a.reshape(*(1,) * (rank - 1), *a.shape)


@_shard_outputs(_feature_spec)
def bilinear_gates(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 gates"],
    wires: Int[Array, "gates 2"],
    *,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "..."]:
    x, coefficients = jnp.asarray(x), jnp.asarray(coefficients)
    dtype = accumulator(x.dtype, coefficients.dtype)
    a, b = _gather_wires(x, wires, feature_axis, dtype)
    c0, c1, c2, c3 = (_over_samples(c, x.ndim) for c in coefficients.astype(dtype))
    if accumulate is not None:
        products = jnp.stack(jnp.broadcast_arrays(c0, c1 * a, c2 * b, c3 * a * b))
        return _restore_feature_axis(_sum(products, 0, x.dtype, accumulate), feature_axis, x.dtype)
    return _restore_feature_axis(c0 + c1 * a + (c2 + c3 * a) * b, feature_axis, x.dtype)


@_shard_outputs(_feature_spec)
def gate_network(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 gates"],
    wires: Int[Array, "gates 2"],
    *,
    sizes: Sequence[int],
    readers: Sequence[Int[Array, "_ _"] | None] | None = None,
    feature_axis: int = -1,
) -> Float[Array, "..."]:
    x, coefficients, first = jnp.asarray(x), jnp.asarray(coefficients), 0
    dtype = accumulator(x.dtype, coefficients.dtype)
    coefficients = coefficients.astype(dtype)
    values: Array = x.astype(dtype)
    for size in sizes:
        own = slice(first, first + size)
        values = bilinear_gates(values, coefficients[:, own], wires[own], feature_axis=feature_axis)
        first += size
    return values.astype(x.dtype)


@_shard_outputs(_feature_spec)
def logic_gates(
    x: Float[Array, "..."],
    logits: Float[Array, "gates 16"],
    wires: Int[Array, "gates 2"],
    *,
    hard: bool = False,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "..."]:
    coefficients = gate_coefficients(logits, hard=hard)
    return bilinear_gates(x, coefficients, wires, feature_axis=feature_axis, accumulate=accumulate)


@_shard_outputs(lambda given: PartitionSpec(None, None, *_meshes.spec_of(given["x"])[1:]))
def logic_trees(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 trees nodes"],
    leaves: Int[Array, "trees leaves"],
    *,
    places: Places,
    readers: Int[Array, "channels fan_out"] | None = None,
) -> Float[Array, "..."]:
    x, coefficients = jnp.asarray(x), jnp.asarray(coefficients)
    dtype = accumulator(x.dtype, coefficients.dtype)
    batch, n_pixels = x.shape[1:], math.prod(places.image)
    n_channels = x.shape[0] // n_pixels
    values = jnp.moveaxis(x.astype(dtype).reshape(n_channels, n_pixels, *batch), 0, 1).reshape(
        x.shape
    )
    values = jnp.concatenate([values, jnp.zeros((1, *batch), dtype)])  # the last row pads the image
    ids = windows((*places.image, n_channels), places.kernel, places.stride, padding=places.padding)
    of_leaves = _take(jnp.asarray(ids).reshape(*places.counts, ids.shape[-1]), leaves)
    at_places = jnp.moveaxis(
        values[of_leaves], (2, 3), (1, 0)
    )  # [leaves, trees, rows, columns, ...]
    c = coefficients.astype(dtype).reshape(*coefficients.shape, *(1,) * (2 + len(batch)))

    def root(nodes: list[jax.Array]) -> jax.Array:
        node = 0
        while len(nodes) > 1:
            above = []
            for a, b in zip(nodes[::2], nodes[1::2], strict=True):
                c0, c1, c2, c3 = c[:, :, node]
                above.append(c0 + c1 * a + (c2 + c3 * a) * b)
                node += 1
            nodes = above
        return nodes[0]

    # Select the first position with the largest value and read only its leaves.
    around = ((0, 0), (0, 0), *((p, p) for p in places.pool_padding), *((0, 0),) * len(batch))
    (down, right), (rows, columns) = places.pool, places.groups

    def in_groups(a: jax.Array, row: int, column: int) -> jax.Array:
        return jnp.pad(a, around)[:, :, row::down, column::right][:, :, :rows, :columns]

    chosen = in_groups(at_places, 0, 0)
    best, found = root(list(chosen)), jnp.zeros(chosen.shape[1:], bool)
    for row, column in np.ndindex(*places.pool):
        read = in_groups(at_places, row, column)
        exists = in_groups(jnp.ones_like(at_places, bool), row, column)[0]
        value = root(list(read))
        better = exists & ((value > best) | jnp.isnan(value) | ~found)
        best, chosen, found = (
            jnp.where(better, value, best),
            jnp.where(better, read, chosen),
            found | exists,
        )
    y = root(list(chosen))
    return y.reshape(len(leaves), math.prod(places.groups), *batch).astype(x.dtype)


@_shard_outputs(_feature_spec)
def soft_lut(
    x: Float[Array, "..."],
    table: Float[Array, "gates slots"],
    wires: Int[Array, "gates bits"],
    *,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,
) -> Float[Array, "..."]:
    x, table = jnp.asarray(x), jnp.asarray(table)
    dtype = accumulator(x.dtype, table.dtype)
    share = jnp.ones((), dtype)  # per slot, [..., G, 2**n]
    for place, of_wire in enumerate(_gather_wires(x, wires, feature_axis, dtype)):
        bit = (jnp.arange(table.shape[1]) >> place & 1).astype(dtype)
        bit = _over_samples(bit[None], x.ndim)
        share = share * (bit * of_wire[..., None] + (1 - bit) * (1 - of_wire[..., None]))
    y = _sum(share * _over_samples(table.astype(dtype), x.ndim), -1, dtype, accumulate)
    return _restore_feature_axis(y, feature_axis, x.dtype)


@_shard_outputs(_feature_spec)
def binary_lut(
    x: Float[Array, "..."],
    table: Float[Array, "gates slots"],
    wires: Int[Array, "gates bits"],
    *,
    readers: Int[Array, "inputs fan_out"] | None = None,
    feature_axis: int = -1,
    accumulate: FixedPoint | None = None,  # only the op's gradient is a sum
) -> Float[Array, "..."]:
    x, table = jnp.asarray(x), jnp.asarray(table)
    dtype = accumulator(x.dtype, table.dtype)
    n = wires.shape[1]
    read = _gather_wires(x, wires, feature_axis, dtype)
    address = jnp.zeros(read[0].shape, jnp.int32)
    for place, of_wire in enumerate(read):
        address = address + ((of_wire > 0).astype(jnp.int32) << place)
    gate = jax.lax.broadcasted_iota(jnp.int32, address.shape, address.ndim - 1)
    value = table.astype(dtype)[gate, address]
    # Per wire, a zero-valued term with the extended finite difference as derivative.
    smooth = value
    slot = _over_samples(jnp.arange(2**n, dtype=jnp.int32)[None], x.ndim)
    for place, of_wire in enumerate(read):
        others = (slot ^ address[..., None]) & ~(1 << place)
        distance = jax.lax.population_count(others).astype(dtype)
        sign = jnp.where(slot >> place & 1 == 1, 1, -1).astype(dtype)
        alpha = jnp.asarray(0.5 * 0.75 ** (n - 1), dtype)
        terms = (
            sign
            * jnp.asarray(1 / 3, dtype) ** distance
            * _over_samples(table.astype(dtype), x.ndim)
        )
        smooth = smooth + jax.lax.stop_gradient(alpha * jnp.sum(terms, -1)) * of_wire
    return _restore_feature_axis(with_derivative_of(value, smooth), feature_axis, x.dtype)


@_shard_outputs(_replicated_spec)
def pack_bits(bits: Array) -> UInt32[Array, "features words"]:
    bits = jnp.asarray(bits).astype(bool)
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    bits = bits.reshape(bits.shape[0], bits.shape[1] // 32, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None, None], -1, dtype=jnp.uint32)


@_shard_outputs(_replicated_spec)
def unpack_bits(
    words: UInt32[Array, "features words"], n_samples: int
) -> Bool[Array, "features {n_samples}"]:
    bits = jnp.asarray(words)[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    return bits.reshape(words.shape[0], 32 * words.shape[1])[:, :n_samples] != 0


@_shard_outputs(lambda given: PartitionSpec(None, *_meshes.spec_of(given["words"])[1:]))
def packed_lut(
    words: UInt32[Array, " inputs *batch"],
    truth: Bool[Array, "gates slots"],
    wires: Int[Array, "gates bits"],
) -> UInt32[Array, " gates *batch"]:
    batch = words.shape[1:]
    flat = jnp.asarray(words).reshape(words.shape[0], -1)
    bits = unpack_bits(flat, 32 * flat.shape[1]).T.astype(jnp.float32)
    y = soft_lut(bits, jnp.asarray(truth).astype(jnp.float32), wires)
    return pack_bits(y.T).reshape(wires.shape[0], *batch)


# ------------------------------------------------------------------------------------- gradients
@jax.custom_jvp
def _scale_gradient(x: jax.Array, factor: jax.Array) -> jax.Array:
    return match_mapped_axes(x, factor)


@_scale_gradient.defjvp
def _scale_gradient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _scale_gradient(*primals), tangents[0] * primals[1]


@_shard_outputs(lambda given: _meshes.spec_of(given["x"]))
def scale_gradient(
    x: Float[Array, "*shape"], factor: Scalar | Num[Array, "..."]
) -> Float[Array, "*shape"]:
    x = jnp.asarray(x)
    return _scale_gradient(x, jax.lax.stop_gradient(jnp.asarray(factor, x.dtype)))

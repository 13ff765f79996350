"""Attention without multiplications: rows addressed by a query, a key and their distance."""

import dataclasses
import functools
from typing import ClassVar

import jax
from jaxtyping import Bool, Float, Int

from lutjax._typing import Array, Integer
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _edges, _nan, _sequences
from lutjax.values._detection import Detection, clamp_detection
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class LookupAttention(Call, op="lookup_attention", table="weights", output="q o"):
    """The call of `lutjax.lookup_attention`.

    Attributes:
      weights: ``[T, R, O]`` floats.
      query: arrays ``[B, Lq, T]``. key: arrays ``[B, Lk, T]``. Kernels get each id already clamped.
      position: arrays ``[distances, T or 1]`` with at least one bit and one distance; None: no
        bits.
      start: int32 scalar, the first query position minus the first key position; None: 0.
      starts: int32 ``[B]``, `start` per sequence; None: all sequences share `start`.
      query_segments, key_segments: int32 ``[B, Lq]`` and ``[B, Lk]``, or both None.
      window: exclusive distance limit; None: no limit.
      block_mask: int32 ``[Bq, Bk]``, 1 for attended blocks; None: all. block_sizes: query and key
        block sizes.
      sequence_axis: mesh axis that shards queries, or None. Keys are never sharded.
      accumulate: see the op.

    Output and its cotangent: ``[B, Lq, O]``. Differentiable: `weights`, `query`, `key`, `position`.
    """

    also: ClassVar[tuple[str, ...]] = ("native", "triton")

    weights: jax.Array = shared("t r o")
    query: Detection = batched(2, "q t")
    key: Detection = batched(2, "k t")
    position: Detection | None = shared("p t", default=None)
    start: jax.Array | None = shared(default=None)
    query_segments: jax.Array | None = batched(1, "q", default=None)
    key_segments: jax.Array | None = batched(1, "k", default=None)
    starts: jax.Array | None = batched(0, default=None)
    block_mask: jax.Array | None = shared(default=None)
    block_sizes: tuple[int, int] | None = static(default=None)
    window: int | None = static(default=None)
    sequence_axis: str | None = static(default=None)
    accumulate: FixedPoint | None = static(default=None)

    def prepare(self) -> "LookupAttention":
        # Ids are packed side by side: an out-of-range id would overwrite its neighbor's bits.
        position = None if self.position is None else clamp_detection(self.position)
        return self.replace(
            query=clamp_detection(self.query), key=clamp_detection(self.key), position=position
        )

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.weights.shape[2]

    @property
    def plain(self) -> str | None:
        return _sequences.plain_reason(self)

    @property
    def query_places(self) -> jax.Array:
        """An array ``[B, Lq, ...]``."""
        return self.query.index

    @property
    def key_places(self) -> jax.Array:
        """An array ``[B, Lk, ...]``."""
        return self.key.index


@dataclasses.dataclass(frozen=True, eq=False)
class SparseLookupAttention(LookupAttention, op="lookup_attention", table="weights", output="q o"):
    """The call of `lutjax.lookup_attention` with per-row targets.

    Attributes:
      weights: ``[T, R, K]`` floats.
      targets: int32 ``[T or 1, R or 1, K]``; negative ids mark unused slots, and other ids may be
        out of range.
      n_outputs: ``O``.
    """

    weights: jax.Array = shared("t r k")
    targets: jax.Array = shared("t r k", default=None)
    n_outputs: int = static()

    @property
    def plain(self) -> str | None:
        return _edges.NOT_READ

    @property
    def width(self) -> int:
        return self.n_outputs


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
    sequence_axis: str | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*batch queries outputs"]:
    """Sum one row per earlier key and detector for each query.

    A pair at distance ``d = query position - key position - 1`` addresses the row
    ``query.index << (key.bits + N) | key.index << N | position.index[d]``, and
    ``y[j] = sum over keys i before j, and over detectors t, of weights[t, row]``: a sum, not a
    mean. In each pair, the closer margin among query and key receives the gradient (the key on
    ties). The position receives a gradient as well if strictly closer than both. No pair-sized
    arrays are stored.

    Definition for one sequence. ``dy`` is the output cotangent, and ``dquery``, ``dkey`` and
    ``dposition`` are the margin cotangents. Without `position` its index has 0 bits. See below for
    `targets`::

        def surrogate_derivative(margin):
            return 0.5 * (1 if margin > 0 else -1) / (1 + abs(margin)) ** 2

        if not causal:
            query_start, key_start = len(key.index), 0
        y = np.zeros((len(query.index), weights.shape[-1]))
        dquery, dkey, dposition = (np.zeros_like(d.margin) for d in (query, key, position))
        dweights = np.zeros_like(weights)
        for j, i, t in np.ndindex(len(query.index), *key.index.shape):
            d = (query_start + j) - (key_start + i) - 1
            if d < 0 or (window is not None and d >= window):
                continue
            if query_segments is not None and query_segments[j] != key_segments[i]:
                continue
            if block_mask is not None and not block_mask[j // block_sizes[0], i // block_sizes[1]]:
                continue
            p = min(d, len(position.index) - 1), t % position.index.shape[1]
            shift = key.bits + position.bits
            row = query.index[j, t] << shift | key.index[i, t] << position.bits | position.index[p]
            y[j] += weights[t, row]

            dweights[t, row] += dy[j]
            of_query, of_key, of_position = query.margin[j, t], key.margin[i, t], position.margin[p]
            if abs(of_query) < abs(of_key):
                lost = weights[t, row] - weights[t, row ^ query.flip[j, t] << shift]
                dquery[j, t] += surrogate_derivative(of_query) * (lost @ dy[j])
            else:
                lost = weights[t, row] - weights[t, row ^ key.flip[i, t] << position.bits]
                dkey[i, t] += surrogate_derivative(of_key) * (lost @ dy[j])
            if abs(of_position) < np.minimum(abs(of_query), abs(of_key)):
                lost = weights[t, row] - weights[t, row ^ position.flip[p]]
                dposition[p] += surrogate_derivative(of_position) * (lost @ dy[j])

    Args:
      weights: ``[T, R, O]`` float32, bfloat16, float16 or float64,
        ``R == 2**(query.bits + key.bits + N)``.
      query: arrays ``[..., Lq, T]``.
      key: arrays ``[..., Lk, T]`` with the same batch dimensions; in self-attention the same
        detection. Out-of-range indices are clamped before packing.
      position: arrays ``[distances, T or 1]`` with ``N`` bits, from `lutjax.detect_signs`; None:
        ``N = 0``.
      targets: int32 ``[T or 1, R or 1, K]``, -1 for an unused slot. Weights are then ``[T, R, K]``,
        and slot ``k`` only contributes to output ``targets[t, row, k]``, as in
        `lutjax.sparse_lookup`. Equal to a dense table with zeros elsewhere, without materializing
        it. Per-row targets are supported by plain JAX, native kernels and Triton.
      n_outputs: number of outputs, with targets.
      causal: whether queries attend to earlier keys only. If False, every query attends to every
        key, and the distance between query ``j`` and key ``i`` is ``d = j - i + Lk - 1``, from 0 to
        ``Lq + Lk - 2``, so `position` needs ``Lq + Lk - 1`` entries. Requires no `window` and zero
        starts.
      window: attend only to pairs with ``d < window``, at cost ``Lq * window``.
      block_mask: bool ``[Bq, Bk]``. Query ``j`` attends to key ``i`` only if
        ``block_mask[j // block_sizes[0], i // block_sizes[1]]``. Fully masked tiles cost nothing.
        Supported by plain JAX, native and Triton kernels.
      block_sizes: queries and keys per block, or one number for both. Required with `block_mask`.
      query_start: first query position, an integer, possibly traced. Or int32 ``[...]``, one per
        sequence, for sequences with different lengths in one call. Supported by plain JAX, native
        and Triton kernels.
      key_start: first key position, like `query_start`.
      query_segments: int32 ``[..., Lq]``. Queries attend only within their segment.
      key_segments: int32 ``[..., Lk]``, key segments.
      sequence_axis: inside a `jax.shard_map`, mesh axis that shards sequences. `query`, `key` and
        segments are equal-length shards, and `query_start` is for the first device. Devices
        exchange keys, and each reads tables for its own queries. With a window a device receives
        only keys within reach; otherwise keys travel around a ring. Fixed point, 16-bit tables and
        sparse gradients gather all keys.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., Lq, O]`` with dtype ``weights.dtype``. 16-bit tables are accumulated in float32.
      Queries without earlier keys give 0.

    Large rows are safe as for `lutjax.lookup` on CPUs and, with at most 511 keys or a smaller
    window, on GPUs. On TPUs, and on GPUs for longer sequences with counted reads, products of `dy`
    with rows are subtracted: the error is about
    ``2**-20 * sum(|dy| (|row| + |row with that flip|))``, and each of these sums must be finite.

    Distances beyond `position` raise an error if known; otherwise they are clamped to the last.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or rows that do not fit the bits.

    Source: docs/semantics.md, section 5.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect(jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), jnp.array([[[0, 1]]]))
      >>> table = jnp.array([[[1.0], [10.0], [100.0], [1000.0]]])  # row = 2 * query bit + key bit
      >>> lutjax.lookup_attention(table, d, d)[:, 0]
      Array([ 0., 10., 11.], dtype=float32)
    """
    op = "lookup_attention"
    edges, finish = _edges.split_row_targets(op, weights, targets, n_outputs)
    query = _checks.detection(op, "query", query, 2, "[..., queries, detectors]")
    key = _checks.detection(op, "key", key, 2, "[..., keys, detectors]")
    *batch, n_queries, n_detectors = query.shape
    n_keys = key.shape[-2]
    rule = (
        f"expected shape [{', '.join(map(str, batch))}{', ' if batch else ''}keys, {n_detectors}] "
        "like query's"
    )
    _checks.require(key.shape == (*batch, n_keys, n_detectors), op, "key", key, rule)
    rule = f"its dtype must be that of query.margin, {query.margin.dtype}"
    _checks.require(key.margin.dtype == query.margin.dtype, op, "key.margin", key.margin, rule)
    window, causal = _checks.window(op, window), _checks.flag(op, "causal", causal)
    seen = _sequences.keys_seen(
        op, key, key_segments, sequence_axis, n_queries, weights,
        window=window, causal=causal, starts=(query_start, key_start), accumulate=accumulate,
    )  # fmt: skip
    key, key_segments = seen.keys, seen.segments
    n_keys = key.shape[-2]
    query_start, key_start = _checks.resolve_starts(
        op, causal, window, query_start, key_start, seen.n_all
    )
    n_all, first = _sequences.global_queries(sequence_axis, n_queries, query_start)
    blocks, block_sizes = _checks.blocks(
        op, block_mask, block_sizes, n_queries, n_keys, sequence_axis
    )
    bits, whose = query.bits + key.bits, "a query with its key"
    if position is not None:
        position = _checks.detection(op, "position", position, 2, "[distances, detectors or 1]")
        fits = len(position.shape) == 2 and position.shape[1] in (1, n_detectors)
        rule = f"expected shape [distances, {n_detectors} or 1]"
        _checks.require(fits, op, "position", position, rule)
        bits, whose = bits + position.bits, "a query with its key and position"
        if position.bits:
            _checks.capacity(op, position, n_all, n_keys, window, query_start, key_start)
            position = _checks.some_distance(position)
        else:
            position = None
    _checks.table(op, weights, n_detectors, bits, whose)
    segments = _checks.segments(op, query_segments, key_segments, tuple(batch), n_queries, n_keys)
    start, starts = _checks.starts(op, first, seen.first_position(key_start), tuple(batch))
    accumulate = _checks.accumulation(op, accumulate)
    kind = SparseLookupAttention if edges else LookupAttention
    call = kind(
        as_jax(weights),
        query,
        key,
        position,
        start,
        *segments,
        starts,
        window=window,
        block_mask=blocks,
        block_sizes=block_sizes,
        sequence_axis=sequence_axis,
        accumulate=accumulate,
        **edges,
    )
    run = functools.partial(apply, implementation=implementation)
    y = finish(_sequences.sum_key_shards(call, ("key", "key_segments"), seen.ring, run))
    return _nan.propagate_nan(y, *(d.margin for d in (query, key, position) if d is not None))

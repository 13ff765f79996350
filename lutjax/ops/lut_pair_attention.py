"""Attention with detectors over query, key and position values."""

import dataclasses
import functools
from typing import ClassVar

import jax
from jaxtyping import Bool, Float, Int

from lutjax._typing import Anchors, Array, Integer, Positions
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _edges, _nan, _sequences
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class LutPairAttention(Call, op="lut_pair_attention", table="weights", output="q o"):
    """The call of `lutjax.lut_pair_attention`.

    Attributes:
      x: ``[B, Lq, I]`` floats. keys: ``[B, Lk, I]`` with the same dtype; in self-attention the same
        array.
      weights: ``[T, R, O]`` floats.
      anchors: int32 ``[T, C, 2]``, ids in ``z``, possibly out of range.
      positions: floats ``[distances, T or 1, N]`` with at least one distance; None: ``N = 0``.
      start, starts, block_mask, block_sizes, query_segments, key_segments, window, accumulate: see
        `lutjax.ops.lookup_attention.LookupAttention`.
      sequence_axis: see there. interleave, epsilon: see the op.

    Output and its cotangent: ``[B, Lq, O]``. Differentiable: `x`, `keys`, `weights`, `positions`.
    """

    also: ClassVar[tuple[str, ...]] = ("native",)

    x: jax.Array = batched(2, "q i")
    keys: jax.Array = batched(2, "k i")
    weights: jax.Array = shared("t r o")
    anchors: jax.Array = shared("t c w")
    positions: jax.Array | None = shared("p t n", default=None)
    start: jax.Array | None = shared(default=None)
    query_segments: jax.Array | None = batched(1, "q", default=None)
    key_segments: jax.Array | None = batched(1, "k", default=None)
    starts: jax.Array | None = batched(0, default=None)
    block_mask: jax.Array | None = shared(default=None)
    block_sizes: tuple[int, int] | None = static(default=None)
    interleave: bool = static(default=False)
    window: int | None = static(default=None)
    sequence_axis: str | None = static(default=None)
    epsilon: float = static(default=0.0)
    accumulate: FixedPoint | None = static(default=None)

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
        return self.x

    @property
    def key_places(self) -> jax.Array:
        """An array ``[B, Lk, ...]``."""
        return self.keys


@dataclasses.dataclass(frozen=True, eq=False)
class SparseLutPairAttention(
    LutPairAttention, op="lut_pair_attention", table="weights", output="q o"
):
    """The call of `lutjax.lut_pair_attention` with per-row targets.

    Attributes:
      weights, targets, n_outputs: see `lutjax.ops.lookup_attention.SparseLookupAttention`.
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
    sequence_axis: str | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*batch queries outputs"]:
    """Detect every pair with an earlier key, and sum the addressed rows for each query.

    For a query ``j``, an earlier key ``i`` and detector ``t``, the vector
    ``z = [x[i], x[j], positions[d, t]]`` with ``d = j - i - 1`` is detected as in `lutjax.detect`,
    and ``y[j] += weights[t, index]``. The backward pass recomputes detections, and no pair-sized
    arrays are stored.

    Definition for one sequence. ``dy`` is the output cotangent. In self-attention ``keys`` is
    ``x``, with cotangent ``dx + dkeys``, and ``key_segments`` defaults to ``segments``. Without
    `positions` each position has 0 values::

        if not causal:
            query_start, key_start = len(keys), 0
        y = np.zeros((len(x), weights.shape[-1]))
        dx, dkeys, dpositions, dweights = (np.zeros_like(a) for a in (x, keys, positions, weights))
        for j, i, t in np.ndindex(len(x), len(keys), len(weights)):
            d = (query_start + j) - (key_start + i) - 1
            if d < 0 or (window is not None and d >= window):
                continue
            if segments is not None and segments[j] != key_segments[i]:
                continue
            if block_mask is not None and not block_mask[j // block_sizes[0], i // block_sizes[1]]:
                continue
            p = min(d, len(positions) - 1), t % positions.shape[1]
            parts = keys[i], x[j], positions[p]
            z = np.stack(parts, axis=-1).ravel() if interleave else np.concatenate(parts)
            delta = z[anchors[t, :, 0]] - z[anchors[t, :, 1]]
            bit = (delta > 0) & ~(np.abs(delta) < epsilon)
            row, closest = (bit << np.arange(len(delta))).sum(), np.abs(delta).argmin()
            y[j] += weights[t, row]

            dweights[t, row] += dy[j]
            margin, lost = delta[closest], weights[t, row] - weights[t, row ^ 1 << closest]
            surrogate_derivative = 0.5 * (1 if margin > 0 else -1) / (1 + abs(margin)) ** 2
            a, b = anchors[t, closest]
            dz = np.zeros_like(z)
            dz[a] += surrogate_derivative * (lost @ dy[j])
            dz[b] -= surrogate_derivative * (lost @ dy[j])
            ends = [len(x[j]), 2 * len(x[j])]
            of_parts = dz.reshape(-1, 3).T if interleave else np.split(dz, ends)
            dkeys[i] += of_parts[0]
            dx[j] += of_parts[1]
            dpositions[p] += of_parts[2]

    Args:
      x: ``[..., L, I]`` float32, bfloat16, float16 or float64.
      weights: ``[T, 2**C, O]``.
      anchors: int32 ``[T, C, 2]``, ids in `z`: the key's inputs first, then the query's, then the
        positions. Out-of-range traced ids are clamped.
      positions: ``[distances, T or 1, N]``; None: ``N = 0``.
      targets: see `lutjax.lookup_attention`.
      n_outputs: see `lutjax.lookup_attention`.
      interleave: ``z[3s], z[3s + 1], z[3s + 2] = x[i][s], x[j][s], positions[d, t, s]`` instead;
        needs ``N == I``.
      causal: see `lutjax.lookup_attention`.
      window: see `lutjax.lookup_attention`.
      block_mask: see `lutjax.lookup_attention`.
      block_sizes: see `lutjax.lookup_attention`.
      segments: int32 ``[..., L]``. Queries attend only within their segment.
      keys: ``[..., Lk, I]``, key inputs if different from the queries, as in decoding.
      query_start: see `lutjax.lookup_attention`.
      key_start: see `lutjax.lookup_attention`.
      key_segments: int32 ``[..., Lk]``, key segments; in self-attention by default `segments`.
      sequence_axis: mesh axis that shards sequences; see `lutjax.lookup_attention`.
      epsilon: dead zone, see `lutjax.detect`.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., L, O]`` with dtype ``weights.dtype``. 16-bit tables are accumulated in float32.

    Large rows are safe as for `lutjax.lookup` on CPUs and GPUs. On TPUs products of `dy` with rows
    are subtracted: the error is about ``2**-20 * sum(|dy| (|row| + |flipped row|))``, and each of
    these sums must be finite.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or rows that do not fit the anchors.

    Source: docs/semantics.md, section 6.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> x = jnp.array([[0.0], [2.0], [1.0]])
      >>> table = jnp.array([[[1.0], [10.0]]])  # row 1 where the earlier value is greater
      >>> lutjax.lut_pair_attention(x, table, jnp.array([[[0, 1]]]))[:, 0]
      Array([ 0.,  1., 11.], dtype=float32)
    """
    op = "lut_pair_attention"
    edges, finish = _edges.split_row_targets(op, weights, targets, n_outputs)
    _checks.floats(op, "x", x, -2, "[..., length, inputs]")
    *batch, n_queries, n_inputs = x.shape
    if keys is None:
        # Query and key cotangents are added before rounding.
        keys = x = as_jax(x).astype(accumulator(x.dtype))
        key_segments = segments if key_segments is None else key_segments
    _checks.floats(op, "keys", keys, -2, "[..., keys, inputs]")
    n_keys = keys.shape[-2]
    fits = keys.shape == (*batch, n_keys, n_inputs) and keys.dtype == x.dtype
    rule = (
        f"expected {x.dtype}[{', '.join(map(str, batch))}{', ' if batch else ''}keys, {n_inputs}] "
        "like x"
    )
    _checks.require(fits, op, "keys", keys, rule)
    _checks.anchors(op, anchors)
    n_detectors, n_pairs, _ = anchors.shape
    _checks.table(op, weights, n_detectors, n_pairs, "anchors")
    if positions is not None:
        _checks.positions(op, positions, n_detectors)
    n_position_bits = 0 if positions is None else positions.shape[-1]
    rule = "detectors need inputs or position bits to compare"
    _checks.require(n_inputs + n_position_bits > 0 or not anchors.size, op, "x", x, rule)
    _checks.ids(op, "anchors", anchors, 2 * n_inputs + n_position_bits, "values of a pair")
    window, causal = _checks.window(op, window), _checks.flag(op, "causal", causal)
    interleave = _checks.flag(op, "interleave", interleave)
    seen = _sequences.keys_seen(
        op, keys, key_segments, sequence_axis, n_queries, weights,
        window=window, causal=causal, starts=(query_start, key_start), accumulate=accumulate,
    )  # fmt: skip
    keys, key_segments = seen.keys, seen.segments
    n_keys = keys.shape[-2]
    query_start, key_start = _checks.resolve_starts(
        op, causal, window, query_start, key_start, seen.n_all
    )
    n_all, first = _sequences.global_queries(sequence_axis, n_queries, query_start)
    blocks, block_sizes = _checks.blocks(
        op, block_mask, block_sizes, n_queries, n_keys, sequence_axis
    )
    if positions is not None:
        if positions.shape[-1]:
            _checks.capacity(op, positions, n_all, n_keys, window, query_start, key_start)
            positions = _checks.some_distance(positions)
        elif not interleave:
            positions = None
    if interleave:
        fits = positions is not None and positions.shape[-1] == n_inputs
        rule = f"interleave=True needs as many position bits as inputs, {n_inputs}"
        _checks.require(fits, op, "positions", positions, rule)
    segments, key_segments = _checks.segments(
        op,
        segments,
        key_segments,
        tuple(batch),
        n_queries,
        n_keys,
        names=("segments", "key_segments"),
    )
    start, starts = _checks.starts(op, first, seen.first_position(key_start), tuple(batch))
    kind = SparseLutPairAttention if edges else LutPairAttention
    call = kind(
        as_jax(x),
        as_jax(keys),
        as_jax(weights),
        as_int32(anchors),
        None if positions is None else as_jax(positions),
        start,
        segments,
        key_segments,
        starts,
        interleave=interleave,
        window=window,
        block_mask=blocks,
        block_sizes=block_sizes,
        sequence_axis=sequence_axis,
        epsilon=_checks.finite_epsilon(op, epsilon),
        accumulate=_checks.accumulation(op, accumulate),
        **edges,
    )
    run = functools.partial(apply, implementation=implementation)
    y = finish(_sequences.sum_key_shards(call, ("keys", "key_segments"), seen.ring, run))
    return _nan.propagate_nan(y, *(a for a in (x, keys, positions) if a is not None))

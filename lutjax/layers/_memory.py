"""N-gram memory for all libraries: arguments, variables, forward pass and decoding state."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int

import lutjax
from lutjax import _compat, _meshes, sharding
from lutjax._typing import Array
from lutjax.arguments import format_value, require_array, set_decided_fields
from lutjax.dispatch.registry import Implementation
from lutjax.layers._spec import Arrays, Example, Initializer, Op, Spec, Variable, names_layer
from lutjax.layers.initializers import LecunNormal
from lutjax.names import PLACEMENTS
from lutjax.ops._checks import accumulation
from lutjax.tables.host import HostTable, Normal
from lutjax.tables.host_tables import KEY, HostTables
from lutjax.values._dtypes import accumulator
from lutjax.values._ngram_layouts import NgramLayout
from lutjax.values._ngrams import check_hashes, rows_at, segment_positions

NORMAL_ROWS = Normal(0.02)
"""Initializer for memory rows."""

MATRIX = LecunNormal()
"""Initializer for memory projections."""

ABSENT_SEGMENT = np.iinfo(np.int32).min
"""Segment before the first token."""

_EPSILON = 1e-6

_LEAST_SCORE = 1e-6
"""Smallest magnitude of which the root is taken."""

GATES = ("sigmoid", "root")


class History(NamedTuple):
    """Decoding state of an n-gram memory: a pytree made by `NgramMemory.history`."""

    tokens: Int[Array, "*batch _"]  # latest tokens, one fewer than the longest n-gram
    segments: Int[Array, "*batch _"]  # of `tokens` and the convolution's reach
    values: Float[Array, "*batch _ features"]  # gated rows for the convolution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayoutHistory:
    """Decoding state of a layer with a layout: a `History` with the digest of the layout."""

    tokens: Any
    segments: Any
    values: Any
    layout: str = dataclasses.field(metadata={"static": True})


def memory_call(
    self: Any, x: Float[Array, "*vectors"], tokens: Int[Array, "*batch length"], *,
    segments: Int[Array, "*#batch length"] | None = None,
    history: History | LayoutHistory | None = None,
) -> Any:  # fmt: skip
    """Return the update to add to token vectors `x`; with a `history` also the next history."""
    return self._run(x, tokens=tokens, segments=segments, history=history)


@dataclasses.dataclass(unsafe_hash=True)
class NgramMemorySpec(Spec):
    """Hashed n-gram tables next to attention: the last tokens address rows, and a gate reads them.

    Published by Cheng et al., Conditional Memory via Scalable Lookup, 2026, without merged tokens.
    Add ``y = memory(x, tokens)`` to the token vectors `x`. Each n-gram that ends at a token has a
    row in ``n = len(orders) * heads`` tables. The concatenated rows are projected to a key and a
    value. The gate is ``sigmoid(<query, key> / sqrt(features))`` with the query `x`, both divided
    by their root mean square and scaled. A causal depthwise convolution over gated values, with
    SiLU, is added. N-grams and convolution stay within a segment; negative ids mark missing tokens.

    Variables:
      weights: tables, trained, ``[n, rows, width]`` (with a layout ``[1, rows, width]``),
          normal(0.02).
      key_kernel: trained, ``[n * width, streams * features]``, LeCun normal.
      value_kernel: trained, ``[n * width, features]``, LeCun normal.
      query_scale, key_scale, conv_scale: trained, ``[features]``, or ``[streams, features]``, ones.
      conv_kernel: trained, ``[kernel, (streams,) features]``, zeros; the last row is the token's.

    Args:
      features: size of token vectors and outputs.
      orders: n-gram lengths; 2 is a token and its predecessor.
      rows: rows per table; required without a layout.
      width: row size; by default all rows for a token together have `features` values, rounded up.
      kernel: number of tokens read by the convolution, spaced by the longest n-gram; may be 0.
      heads, seed: tables for each order, and their hash seed.
      dtype, param_dtype: dtypes of the output (by default promoted), and of tables and projections.
      weights_init, kernel_init: initializers of tables and projections.
      row_axis: mesh axis of table rows and the batch; see `lutjax.sharding.lookup_in_blocks`.
      accumulate, implementation: as in `lutjax.weighted_lookup`.
      placement: ``"device"``, ``"host"`` or a host table; see docs/host-memory.md.
      layout: a published `lutjax.NgramLayout`; replaces `orders`, `rows`, `heads` and `seed`.
      streams: residual streams, vectors ``[..., length, streams, features]`` with shared values.
      gate: ``"sigmoid"`` of the score, or ``"root"``: of its signed root, with magnitudes of at
          least 1e-3 (for a score of 0, 0.5 with a Qwen layout, and otherwise the sign of 0).
      eps: added to mean squares before the root.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 14.
    """

    features: int
    orders: tuple[int, ...] = (2, 3)
    _: dataclasses.KW_ONLY
    rows: int | None = None
    heads: int = 4
    width: int | None = None
    kernel: int = 4
    seed: int = 0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = NORMAL_ROWS
    kernel_init: Initializer = MATRIX
    row_axis: str | None = None
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    placement: str | HostTable | HostTables = "device"
    layout: NgramLayout | None = None
    streams: int = 1
    gate: str = "sigmoid"
    eps: float = _EPSILON

    example: ClassVar[Example] = ("16, rows=1000", (4, 32, 16), (4, 32, 16))
    op = staticmethod(lutjax.weighted_lookup)
    call: ClassVar[Callable[..., Any]] = memory_call
    methods: ClassVar[tuple[str, ...]] = ("row_ids", "history")

    def __post_init__(self) -> None:
        self.orders = tuple(self.orders)
        self._require_sizes(1, "features", "streams")
        self._require_sizes(0, "kernel")
        self._require_one_of("gate", GATES)
        self._require_positive("eps")
        if self.layout is None:
            check_hashes(
                self.layer, rows=self.rows, orders=self.orders, heads=self.heads, seed=self.seed
            )
        else:
            take_layout(self)
        if self.width is None:
            self.width = -(-self.features // self.n_tables)
        self._require_sizes(1, "width")
        accumulation(self.layer, self.accumulate)
        self._normalize_dtypes()
        check_placement(self)

    @property
    def n_tables(self) -> int:
        return len(self.orders) * self.heads

    @property
    def reach(self) -> int:
        return max(self.kernel - 1, 0) * max(self.orders)

    @property
    def row_size(self) -> int:
        assert self.width is not None
        return self.n_tables * self.width

    def variables(self) -> tuple[Variable, ...]:
        ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
        vector = self._vector
        assert self.rows is not None
        assert self.width is not None
        n_tables = self.n_tables if self.layout is None else 1
        tables = (n_tables, rows_here(self, self.rows), self.width)
        weights = self._trained_variable("weights", tables, self.weights_init, "tables")
        keys, values = (self.row_size, self.streams * self.features), (self.row_size, self.features)
        variables = [
            *table_variables(self, weights),
            self._trained_variable("key_kernel", keys, self.kernel_init),
            self._trained_variable("value_kernel", values, self.kernel_init),
            self._trained_variable("query_scale", vector, ones),
            self._trained_variable("key_scale", vector, ones),
        ]
        if self.kernel:
            variables.append(self._trained_variable("conv_scale", vector, ones))
            variables.append(self._trained_variable("conv_kernel", (self.kernel, *vector), zeros))
        return tuple(variables)

    @property
    def _vector(self) -> tuple[int, ...]:
        return (self.features,) if self.streams == 1 else (self.streams, self.features)

    def history(
        self, batch_shape: tuple[int, ...], dtype: DTypeLike | None = None
    ) -> History | LayoutHistory:
        """Return the state before the first token of a batch, with the dtype of its inputs."""
        promoted = jnp.promote_types(self.param_dtype if dtype is None else dtype, self.param_dtype)
        # Segments reach further back than tokens if the convolution does.
        before = max(self.orders) - 1
        history = History(
            jnp.zeros((*batch_shape, before), jnp.int32),
            jnp.full((*batch_shape, max(before, self.reach)), ABSENT_SEGMENT, jnp.int32),
            jnp.zeros((*batch_shape, self.reach, *self._vector), self.dtype or promoted),
        )
        return history if self.layout is None else LayoutHistory(*history, self.layout.digest)

    @names_layer
    def row_ids(self, tokens: Any, segments: Any = None, history: Any = None) -> Any:
        """Return row ids ``[..., length, tables]`` for token ids; see `lutjax.ngram_rows`."""
        check_history(self, history)
        if self.layout is not None:
            return layout_rows(self.layout, tokens, segments, history)
        if history is None:
            return lutjax.ngram_rows(tokens, segments=segments, **self._hashes)
        self._check_tokens(tokens, segments)
        place = self._locate_tokens(tokens, segments, history)
        return self._row_ids(jnp.asarray(tokens), place, history)

    @property
    def _hashes(self) -> dict[str, Any]:
        return {"rows": self.rows, "orders": self.orders, "heads": self.heads, "seed": self.seed}

    def _check_tokens(self, tokens: Any, segments: Any) -> None:
        for name, ids in (("tokens", tokens), ("segments", segments)):
            if ids is None and name == "segments":
                continue
            require_array(self.layer, name, ids)
            if not jnp.issubdtype(ids.dtype, jnp.integer) or not ids.ndim:
                raise TypeError(
                    f"{self.layer}: {name} is {format_value(ids)}; "
                    "expected integer ids [..., length]."
                )
        if segments is not None and segments.shape[-1] != tokens.shape[-1]:
            raise self._error(
                f"segments is {format_value(segments)} and tokens {format_value(tokens)}; "
                "expected one id for each token."
            )

    def _locate_tokens(self, tokens: Any, segments: Any, history: Any) -> jax.Array:
        """Return each token's position in its run, which may begin in the history."""
        length = tokens.shape[-1]
        if history is None and segments is None:
            return jnp.asarray(segment_positions(jnp, None, length))
        # Tokens without segments belong to segment 0.
        if segments is None:
            segments = jnp.zeros(tokens.shape, jnp.int32)
        segments = jnp.broadcast_to(jnp.asarray(segments).astype(jnp.int32), tokens.shape)
        if history is not None:
            segments = jnp.concatenate([jnp.asarray(history.segments), segments], -1)
        place: jax.Array = segment_positions(jnp, segments, segments.shape[-1])
        return place[..., segments.shape[-1] - length :]

    def _row_ids(self, tokens: jax.Array, place: jax.Array, history: Any) -> jax.Array:
        every = tokens.astype(jnp.int32)
        before = 0
        if history is not None:
            before = history.tokens.shape[-1]
            every = jnp.concatenate([jnp.asarray(history.tokens), every], -1)
            lead = [(0, 0)] * (place.ndim - 1)
            place = jnp.pad(place, [*lead, (before, 0)])
        rows: jax.Array = rows_at(jnp, every, place, **self._hashes)
        return rows[..., before:, :]

    @names_layer
    def run(
        self,
        op: Op,
        x: Any,
        tokens: Any,
        *,
        segments: Any = None,
        history: Any = None,
        weights: Any,
        **others: Any,
    ) -> Any:
        """Gather rows by an op, and fuse them with `x`."""
        n_vector_axes = len(self._vector)
        self._require_features(x, self.features, rank=1 + n_vector_axes)
        self._check_tokens(tokens, segments)
        check_history(self, history)
        check_table(self, weights)
        if x.shape[x.ndim - n_vector_axes :] != self._vector:
            raise self._error(
                f"x has shape {list(x.shape)}; expected [..., length, {self.streams}, "
                f"{self.features}]."
            )
        check_one_token_each(self, tokens, x, n_vector_axes)
        dtype = self._resolve_dtype(x)

        def address(tokens: jax.Array, segments: Any, history: Any) -> tuple[jax.Array, jax.Array]:
            place = self._locate_tokens(tokens, segments, history)
            if self.layout is not None:
                index = layout_rows(self.layout, tokens, segments, history)
            else:
                index = self._row_ids(tokens, place, history)
            return index, jnp.broadcast_to(place, tokens.shape)

        divided = _meshes.shard_by_compiler(
            address, lambda tokens, *_: (_meshes.spec_of(tokens),) * 2
        )
        index, place = divided(jnp.asarray(tokens), segments, history)
        rows = gather_rows(self, op, weights, index)
        live = None if self.layout is None else jnp.asarray(tokens) >= 0
        fuse = _meshes.shard_by_compiler(
            functools.partial(self._fuse_rows, dtype=dtype),
            lambda _, rows, x, *others: (_meshes.spec_of(x),) * 2,
        )
        before = None if history is None else jnp.asarray(history.values)
        y, values = fuse(others, rows, jnp.asarray(x), place, before, live)
        if history is None:
            return y
        return y, self._next_history(jnp.asarray(tokens), segments, values, history)

    def _fuse_rows(
        self,
        arrays: Arrays,
        rows: jax.Array,
        x: jax.Array,
        place: jax.Array,
        before: Any,
        live: Any,
        *,
        dtype: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output for gathered rows ``[..., tables, width]``, and the gated rows."""
        rows = rows.astype(dtype).reshape(*rows.shape[:-2], self.row_size)
        key, value = (
            jnp.dot(rows, arrays[f"{name}_kernel"].astype(dtype)) for name in ("key", "value")
        )
        # All streams share the values, and have keys and gates of their own.
        if self.streams > 1:
            key, value = key.reshape(x.shape), value[..., None, :]
        query = rms_normalize(x, arrays["query_scale"], self.eps)
        key = rms_normalize(key, arrays["key_scale"], self.eps)
        score = jnp.sum(query * key, -1, keepdims=True) / math.sqrt(self.features)
        gate = jax.nn.sigmoid(self._sigmoid_argument(score))
        value = (gate * value.astype(score.dtype)).astype(dtype)
        # Padding tokens add nothing, also through the convolution.
        if live is not None:
            live = live[(..., *(None,) * len(self._vector))]
            value = jnp.where(live, value, jnp.zeros_like(value))
        if not self.kernel:
            return value, value
        read = rms_normalize(value, arrays["conv_scale"], self.eps).astype(dtype)
        sums = self._convolve_values(arrays["conv_kernel"].astype(dtype), read, place, before)
        y = value + jax.nn.silu(sums)
        return y if live is None else jnp.where(live, y, jnp.zeros_like(y)), read

    def _sigmoid_argument(self, score: jax.Array) -> jax.Array:
        if self.gate == "sigmoid":
            return score
        root = jnp.sqrt(jnp.maximum(jnp.abs(score), jnp.asarray(_LEAST_SCORE, score.dtype)))
        # The published layers differ at a score of 0: Qwen's stays 0, the others keep the sign bit.
        if self.layout is not None and self.layout.family == "qwen":
            return jnp.sign(score) * root
        return jnp.where(jnp.signbit(score), -root, root)

    def _convolve_values(
        self, kernel: jax.Array, values: jax.Array, place: jax.Array, before: jax.Array | None
    ) -> jax.Array:
        axis = values.ndim - 1 - len(self._vector)
        length, step = values.shape[axis], max(self.orders)
        if before is None:
            before = jnp.zeros((*values.shape[:axis], self.reach, *self._vector), values.dtype)
        every = jnp.concatenate([before.astype(values.dtype), values], axis)
        place = place[(..., *(None,) * len(self._vector))]
        total = values * lead_axes(kernel[self.kernel - 1], values.ndim)
        for i in range(1, self.kernel):
            first = self.reach - i * step
            earlier = jax.lax.slice_in_dim(every, first, first + length, axis=axis)
            earlier = jnp.where(place >= i * step, earlier, jnp.zeros_like(earlier))
            total = total + earlier * lead_axes(kernel[self.kernel - 1 - i], values.ndim)
        return total

    def _next_history(
        self, tokens: jax.Array, segments: Any, values: jax.Array, history: Any
    ) -> Any:
        ids = jnp.zeros(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
        ids = jnp.broadcast_to(ids, tokens.shape)
        latest_history = History(
            latest(history.tokens, tokens, -1),
            latest(history.segments, ids, -1),
            latest(history.values, values, -1 - len(self._vector)),
        )
        if self.layout is None:
            return latest_history
        return LayoutHistory(*latest_history, self.layout.digest)


def latest(old: Any, new: jax.Array, axis: int) -> jax.Array:
    """Return the last elements of two arrays along a negative axis, as many as `old` has."""
    old = jnp.asarray(old)
    size, axis = old.shape[axis], new.ndim + axis
    every = jnp.concatenate([old, new.astype(old.dtype)], axis)
    return jax.lax.slice_in_dim(every, every.shape[axis] - size, every.shape[axis], axis=axis)


def take_layout(spec: Any) -> None:
    """Set the fields of a spec that its layout decides, unless given with other values."""
    layout = spec.layout
    if not isinstance(layout, NgramLayout):
        raise spec._error(f"layout is {format_value(layout)}; expected a lutjax.NgramLayout.")

    def conflict(name: str, value: Any) -> ValueError:
        error: ValueError = spec._error(
            f"{name} is {format_value(getattr(spec, name))}, but the layout has {value}; "
            "leave it out."
        )
        return error

    fields = {"rows": layout.n_rows, "orders": layout.orders, "heads": layout.heads, "seed": 0}
    set_decided_fields(spec, fields, conflict)
    if spec.width is None:
        spec.width = layout.width


def layout_rows(layout: NgramLayout, tokens: Any, segments: Any, history: Any) -> Any:
    """Return row ids of a layout, with the history of an earlier call."""
    if history is None:
        return layout.rows(tokens, segments=segments)
    before = jnp.asarray(history.tokens)
    first = jnp.zeros_like(tokens[..., :1]) if segments is None else jnp.asarray(segments)[..., :1]
    first = jnp.broadcast_to(first.astype(jnp.int32), (*before.shape[:-1], first.shape[-1]))
    if not first.shape[-1]:
        return layout.rows(jnp.asarray(tokens))
    segments_before = jnp.asarray(history.segments)
    segments_before = segments_before[..., segments_before.shape[-1] - before.shape[-1] :]
    # Tokens of other segments are hidden: the layout knows only the segments of new tokens.
    before = jnp.where(segments_before == first, before, jnp.full_like(before, -1))
    return layout.rows(jnp.asarray(tokens), before, segments)


def check_history(spec: Any, history: Any) -> None:
    if history is None:
        return
    own = None if spec.layout is None else spec.layout.digest
    other = getattr(history, "layout", None)
    if own != other:
        raise spec._error(
            f"history has layout {other}, and the layer {own}; use the layer's history()."
        )


def check_one_token_each(spec: Any, tokens: Any, x: Any, n_vector_axes: int = 1) -> None:
    """Raise ValueError unless there is one token for each vector, the last axes of `x`."""
    if tokens.shape != x.shape[: x.ndim - n_vector_axes]:
        raise spec._error(
            f"tokens has shape {list(tokens.shape)} and x {list(x.shape)}; "
            "expected one token per vector."
        )


def check_table(spec: Any, weights: Any) -> None:
    other = getattr(weights, "layout", None) if isinstance(weights, HostTable) else None
    own = None if spec.layout is None else spec.layout.digest
    if other is not None and own != other:
        raise spec._error(
            f"the rows have layout {other}, and the layer {own}; use the same layout for both."
        )


def gather_rows(spec: Any, op: Op, weights: Any, index: jax.Array) -> jax.Array:
    """Return rows for ids ``[..., columns]``: of a table each, or with a layout of one table."""
    ones = jnp.ones((*index.shape, 1), accumulator(jnp.dtype(weights.dtype)))
    if spec.layout is None:
        return read_rows(spec, op, weights, index[..., None], ones, groups=spec.n_tables)
    return read_rows(spec, op, weights, index[..., None, None], ones[..., None])


def check_placement(spec: Any) -> None:
    spec._require_one_of("placement", PLACEMENTS)
    if spec.placement == "host" and spec.row_axis is not None:
        raise ValueError(
            f"{spec.layer}: placement is 'host' and row_axis {spec.row_axis!r}; "
            "host tables are not sharded."
        )


def table_variables(spec: Any, *tables: Variable) -> tuple[Variable, ...]:
    """Return table variables, or the PRNG keys of host-resident tables."""
    if spec.placement == "device":
        return tables
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return tuple(
        Variable(KEY.format(v.name), "keys", words.shape, words.dtype, jax.random.key_data, drawn=v)
        for v in tables
    )


def rows_here(spec: Any, n_rows: int) -> int:
    """Return the number of rows on this device: a block inside `jax.shard_map`, else all."""
    if spec.row_axis not in jax.sharding.get_abstract_mesh().manual_axes:
        return n_rows
    n_devices = jax.lax.axis_size(spec.row_axis)
    if n_rows % n_devices:
        raise ValueError(
            f"{spec.layer}: a table has {n_rows} rows, which the {n_devices} devices "
            f"of the mesh axis {spec.row_axis!r} cannot share evenly; choose a multiple."
        )
    return n_rows // n_devices


def read_rows(
    spec: Any,
    op: Op,
    weights: Any,
    index: jax.Array,
    coefficients: jax.Array,
    groups: int | None = None,
) -> jax.Array:
    """Run `lutjax.weighted_lookup` on whole tables, host-resident tables, or a device's block."""
    options = {
        "groups": groups,
        "accumulate": spec.accumulate,
        "implementation": spec.implementation,
    }
    if isinstance(weights, HostTable):
        return weights.weighted_lookup(index, coefficients, **options)
    if spec.row_axis is None:
        return op(weights, index, coefficients, **options)
    # Coefficients must vary like the table blocks, or their gradient would be counted once per
    # device.
    coefficients = _compat.cast_varying(coefficients, frozenset({spec.row_axis}))
    return sharding.lookup_in_blocks(weights, index, coefficients, axis=spec.row_axis, **options)


def rms_normalize(x: jax.Array, scale: jax.Array, eps: float = _EPSILON) -> jax.Array:
    """Return vectors divided by their root mean square and scaled, in at least float32."""
    dtype = accumulator(x.dtype, jnp.dtype(scale.dtype))
    x = x.astype(dtype)
    square = jnp.mean(jnp.square(x), -1, keepdims=True)
    normalized = x * jax.lax.rsqrt(square + jnp.asarray(eps, dtype))
    return normalized * lead_axes(scale.astype(dtype), x.ndim)


def lead_axes(a: jax.Array, rank: int) -> jax.Array:
    return a.reshape((1,) * (rank - a.ndim) + a.shape)

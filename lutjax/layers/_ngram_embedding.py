"""N-gram embedding for all libraries: the mean of token vectors and projected table rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int

import lutjax
from lutjax import _meshes
from lutjax._typing import Array
from lutjax.arguments import format_value
from lutjax.dispatch.registry import Implementation
from lutjax.layers._memory import (
    ABSENT_SEGMENT,
    MATRIX,
    NORMAL_ROWS,
    LayoutHistory,
    NgramMemorySpec,
    check_history,
    check_one_token_each,
    check_placement,
    check_table,
    gather_rows,
    latest,
    layout_rows,
    rows_here,
    table_variables,
)
from lutjax.layers._spec import Example, Initializer, Op, Spec, Variable, names_layer
from lutjax.ops._checks import accumulation
from lutjax.tables.host import HostTable
from lutjax.tables.host_tables import HostTables
from lutjax.values._ngram_layouts import NgramLayout


def embedding_call(
    self: Any, x: Float[Array, "*batch length features"], tokens: Int[Array, "*batch length"], *,
    segments: Int[Array, "*#batch length"] | None = None, history: LayoutHistory | None = None,
) -> Any:  # fmt: skip
    """Return the embeddings of tokens with vectors `x`; with a `history` also the next history.

    N-grams of `tokens` stay within a segment.
    """
    return self._run(x, tokens=tokens, segments=segments, history=history)


@dataclasses.dataclass(unsafe_hash=True)
class NgramEmbeddingSpec(Spec):
    """Mean of token vectors and projected n-gram rows, as in LongCat-Flash-Lite.

    ``y = (x + sum of row_i kernel_i) / (1 + columns)`` for the rows that a `lutjax.NgramLayout`
    addresses. There is no gate, normalization or convolution.

    Variables:
      weights: table, trained, ``[1, layout.n_rows, width]``, normal(0.02).
      kernel: trained, ``[layout.columns, width, features]``, LeCun normal.

    Args:
      features: size of token vectors and outputs.
      layout: row layout, which also sets the number of rows.
      width: row size; by default the layout's, or else `features` over the columns, rounded up.
      dtype: dtype of projections and output; by default promoted from inputs and parameters.
      param_dtype: dtype of table and projections: float32, bfloat16, float16 or float64.
      weights_init, kernel_init: initializers of table and projections.
      row_axis, accumulate, implementation, placement: as in `NgramMemory`.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 14.

    Published: LongCat-Flash-Lite.
    """

    features: int
    layout: NgramLayout
    _: dataclasses.KW_ONLY
    width: int | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = NORMAL_ROWS
    kernel_init: Initializer = MATRIX
    row_axis: str | None = None
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    placement: str | HostTable | HostTables = "device"

    example: ClassVar[Example] = ("16, lutjax.NgramLayout.hash(1000)", (4, 32, 16), (4, 32, 16))
    op = staticmethod(lutjax.weighted_lookup)
    call: ClassVar[Callable[..., Any]] = embedding_call
    methods: ClassVar[tuple[str, ...]] = ("row_ids", "history")

    def __post_init__(self) -> None:
        self._require_sizes(1, "features")
        if not isinstance(self.layout, NgramLayout):
            raise self._error(
                f"layout is {format_value(self.layout)}; expected a lutjax.NgramLayout."
            )
        if self.width is None:
            self.width = self.layout.width or -(-self.features // self.layout.columns)
        self._require_sizes(1, "width")
        accumulation(self.layer, self.accumulate)
        self._normalize_dtypes()
        check_placement(self)

    def variables(self) -> tuple[Variable, ...]:
        assert self.width is not None
        table = (1, rows_here(self, self.layout.n_rows), self.width)
        kernel = (self.layout.columns, self.width, self.features)
        weights = self._trained_variable("weights", table, self.weights_init, "tables")
        return (
            *table_variables(self, weights),
            self._trained_variable("kernel", kernel, self.kernel_init),
        )

    def history(
        self, batch_shape: tuple[int, ...], dtype: DTypeLike | None = None
    ) -> LayoutHistory:
        """Return the state before the first token of a batch; it does not depend on `dtype`."""
        shape = (*batch_shape, self.layout.reach)
        segments = jnp.full(shape, ABSENT_SEGMENT, jnp.int32)
        values = jnp.zeros((*batch_shape, 0, self.features), self.param_dtype)
        return LayoutHistory(jnp.zeros(shape, jnp.int32), segments, values, self.layout.digest)

    _check_tokens: ClassVar[Callable[..., None]] = NgramMemorySpec._check_tokens

    @names_layer
    def row_ids(self, tokens: Any, segments: Any = None, history: Any = None) -> Any:
        """Return row ids ``[..., length, columns]`` for ids; see `lutjax.NgramLayout.rows`."""
        check_history(self, history)
        return layout_rows(self.layout, tokens, segments, history)

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
        kernel: Any,
        **_: Any,
    ) -> Any:
        """Gather rows by an op, project them, and average them with `x`."""
        self._require_features(x, self.features, rank=2)
        self._check_tokens(tokens, segments)
        check_history(self, history)
        check_table(self, weights)
        check_one_token_each(self, tokens, x)
        dtype = self._resolve_dtype(x)
        address = _meshes.shard_by_compiler(
            lambda tokens, segments, history: layout_rows(self.layout, tokens, segments, history),
            lambda tokens, *_: _meshes.spec_of(tokens),
        )
        rows = gather_rows(self, op, weights, address(jnp.asarray(tokens), segments, history))
        mean = _meshes.shard_by_compiler(self._average_rows, lambda x, *_: _meshes.spec_of(x))
        arrays = (jnp.asarray(a).astype(dtype) for a in (x, rows, kernel))
        y = mean(*arrays)
        if history is None:
            return y
        tokens = jnp.asarray(tokens)
        ids = jnp.zeros(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
        ids = jnp.broadcast_to(ids, tokens.shape)
        tokens, segments = latest(history.tokens, tokens, -1), latest(history.segments, ids, -1)
        return y, LayoutHistory(tokens, segments, history.values, self.layout.digest)

    def _average_rows(self, x: jax.Array, rows: jax.Array, kernel: jax.Array) -> jax.Array:
        assert self.width is not None
        flat = rows.reshape(*x.shape[:-1], self.layout.columns * self.width)
        projected = jnp.dot(flat, kernel.reshape(flat.shape[-1], self.features))
        return (x + projected) / (1 + self.layout.columns)

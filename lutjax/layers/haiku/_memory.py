"""Memory layers for Haiku; `lutjax.layers._memory` has the arguments of the layers."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Int

import lutjax
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _memory
from lutjax.layers._memory import MATRIX, NORMAL_ROWS, History
from lutjax.layers._spec import Initializer
from lutjax.layers.haiku._layer import Layer


class NgramMemory(Layer):
    """Layer of hashed n-gram tables beside attention: the last tokens address rows, and a gate reads them.

    ``y = memory(x, tokens)`` is to be added to `x`, the vectors of the tokens at some depth of a model. Each n-gram that ends at a token has a row in
    `heads` tables for each of the `orders`: `row_ids` of the layer says which, from token ids alone, so they are known before the model runs. The
    rows, one after the other, are projected to a key and a value. The gate is ``sigmoid(<query, key> / sqrt(features))``, where the query is `x`; both are
    divided by the root of their mean square, and scaled. To the gated value is added what a short causal convolution makes of
    it and earlier ones, each channel by itself, with SiLU. At first the convolution adds nothing.

    Variables:
      weights: tables, trained, ``[len(orders) * heads, rows, width]``, normal(0.02) at first.
      key_kernel, value_kernel: trained, ``[len(orders) * heads * width, features]``, normal with a variance of one over the inputs.
      query_scale, key_scale, conv_scale: trained, ``[features]``, ones.
      conv_kernel: trained, ``[kernel, features]``, zeros; the last row is of the token itself. Only with a `kernel`.

    Args:
      features: size of a token's vector, and of the output.
      orders: lengths of the n-grams; 2 is a token and the one before it.
      rows: rows of each table; any number.
      heads: tables for each order, each with a hash of its own.
      width: numbers of a row; by default all rows of a token together have as many as `features`, rounded up.
      kernel: tokens that the convolution reads, each as far from the next as the longest n-gram; 0: there is none.
      seed: of the hashes; layers of a model with other seeds have other collisions.
      dtype: dtype of the projections and of the output; by default that of inputs and parameters together. Rows keep their
        own.
      param_dtype: dtype of tables and projections: float32, bfloat16, float16 or float64.
      weights_init, kernel_init: draw tables and projections, as in `jax.nn.initializers`.
      accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the look-up; see `lutjax.weighted_lookup`.
      name: of the module.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 14; Cheng et al., Conditional Memory via Scalable Lookup, 2026 (Engram), without the merging of
    tokens of equal meaning and with one branch.

    In Haiku a trained variable is a parameter, and the others are state, so a layer needs `haiku.transform_with_state`: see
    `lutjax.layers.haiku`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import NgramMemory
      >>> f = hk.transform(lambda x, tokens: NgramMemory(16, rows=1000)(x, tokens))
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> params = f.init(jax.random.key(0), x, tokens)
      >>> f.apply(params, None, x, tokens).shape
      (4, 32, 16)
    """

    spec_type = _memory.NgramMemorySpec

    def __init__(
        self,
        features: int,
        orders: tuple[int, ...] = (2, 3),
        *,
        rows: int,
        heads: int = 4,
        width: int | None = None,
        kernel: int = 4,
        seed: int = 0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = NORMAL_ROWS,
        kernel_init: Initializer = MATRIX,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        name: str | None = None,
    ) -> None:
        """Layer of hashed n-gram tables beside attention: the last tokens address rows, and a gate reads them.

        Args:
          features: size of a token's vector, and of the output.
          orders: lengths of the n-grams; 2 is a token and the one before it.
          rows: rows of each table; any number.
          heads: tables for each order, each with a hash of its own.
          width: numbers of a row; by default all rows of a token together have as many as `features`, rounded up.
          kernel: tokens that the convolution reads, each as far from the next as the longest n-gram; 0: there is none.
          seed: of the hashes; layers of a model with other seeds have other collisions.
          dtype: dtype of the projections and of the output; by default that of inputs and parameters together. Rows keep their
            own.
          param_dtype: dtype of tables and projections: float32, bfloat16, float16 or float64.
          weights_init, kernel_init: draw tables and projections, as in `jax.nn.initializers`.
          accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
          implementation: which implementation runs the look-up; see `lutjax.weighted_lookup`.
          name: of the module.

        Raises:
          ValueError: a size is impossible.
        """
        super().__init__(name)
        self._make(locals())

    __call__ = _memory.memory_call

    def _remember(self, x: Any, tokens: Any, **others: Any) -> Any:
        return self.spec(self._held(), x, tokens, **others)

    def row_ids(self, tokens: Int[Array, "*batch length"], segments: Any = None) -> Any:
        """Return the rows that tokens read, int32 ``[..., length, tables]``, from ids alone; see `lutjax.ngram_rows`."""
        return self.spec.row_ids(tokens, segments)

    def history(self, batch_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> History:
        """Return what the layer keeps before the first token of texts of this batch shape, for calls that continue them.

        Args:
          dtype: of the inputs, where the layer has no `dtype`; by default that of the parameters.
        """
        found: History = self.spec.history(batch_shape, dtype)
        return found

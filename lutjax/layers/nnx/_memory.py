"""Memory layers for Flax NNX; `lutjax.layers._memory` has the arguments of the layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Int

import lutjax
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _memory, _product_keys
from lutjax.layers._memory import MATRIX, NORMAL_ROWS, History
from lutjax.layers._product_keys import uniform_keys, unit_rows
from lutjax.layers._spec import Initializer
from lutjax.layers.nnx._layer import Layer
from lutjax.tables.host_tables import HostTables


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
      row_axis: name of a mesh axis over which the rows of the tables are divided, and the samples of a call: inside of a
        `jax.shard_map` whose `weights` are a block, see `lutjax.sharding.lookup_in_blocks`. None: the tables are whole.
      accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the look-up; see `lutjax.weighted_lookup`.
      placement: ``"device"``, or the memory of the host, where `weights` is a `lutjax.training.host.HostTable` and the layer
        keeps the key of which its rows are drawn, `weights_key`: in Flax NNX ``"host"``, and elsewhere a
        `lutjax.training.host.HostTables`, which has the table. See docs/host-memory.md.
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 14.

    Published: Cheng et al., Conditional Memory via Scalable Lookup, 2026 (Engram), without the merging of
    tokens of equal meaning and with one branch.

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import NgramMemory
      >>> layer = NgramMemory(16, rows=1000, rngs=nnx.Rngs(0))
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> layer(x, tokens).shape, layer.row_ids(tokens).shape
      ((4, 32, 16), (4, 32, 8))

    Token by token, with what the layer keeps of those before::

      >>> history = layer.history((4,))
      >>> for t in range(3):
      ...     y, history = layer(x[:, t : t + 1], tokens[:, t : t + 1], history=history)
      >>> bool(jnp.allclose(y[:, 0], layer(x, tokens)[:, 2], atol=1e-6))
      True
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
        row_axis: str | None = None,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        placement: str | HostTables = "device",
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())

    __call__ = _memory.memory_call  # type: ignore[assignment]

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


class _Keyed(Layer):
    """Base of layers whose rows are addressed by products of keys."""

    def reads(
        self, x: Float[Array, "*batch inputs"]
    ) -> tuple[Int[jax.Array, "*batch reads"], Float[jax.Array, "*batch reads"]]:
        """Return the ids of the rows that inputs read, ``[..., heads * k]``, those of each head one after the other, and their weights."""
        found: tuple[jax.Array, jax.Array] = self.spec.reads(self._held(), x)
        return found


class ProductKeyMemory(_Keyed):
    """Layer of one large table whose rows are addressed by products of keys: a memory of ``n_keys**2`` rows.

    A projection makes two queries for each head, each divided by the root of its mean square and scaled. Each is compared with a set of
    `n_keys` keys by inner products. Row ``i * n_keys + j`` of the table has the sum of the scores of key ``i`` of the first set and key ``j`` of the
    second; each head reads the `k` rows with the largest sums, weighted by their softmax. They are among the pairs of the
    `k` best keys of both sets, so ``2 * n_keys`` scores stand for ``n_keys**2``. The rows of all heads are added.

    Variables:
      query_kernel: trained, ``[in_features, heads * 2 * key_size]``, normal with a variance of one over the inputs.
      query_scale: trained, ``[heads, 2, key_size]``, ones.
      half_keys: trained, ``[heads, 2, n_keys, key_size]``, uniform(-1, 1) / sqrt(key_size).
      weights: the table, trained, ``[1, n_keys**2, out_features]``, normal(1 / sqrt(out_features)).

    Args:
      in_features: inputs.
      out_features: outputs.
      n_keys: keys of each of the two sets of a head; the table has ``n_keys**2`` rows, which all heads share.
      heads: pairs of queries, with keys of their own.
      k: rows that each head reads.
      key_size: numbers of a key; by default half as many as inputs, rounded up.
      dtype: dtype of the projection and of the output; by default that of inputs and parameters together. The table keeps its
        own, and scores are at least float32.
      param_dtype: dtype of the parameters: float32, bfloat16, float16 or float64.
      weights_init, keys_init, kernel_init: draw the table, the keys and the projection, as in `jax.nn.initializers`.
      row_axis: name of a mesh axis over which the rows of the table are divided, and the samples of a call, by their first
        axis: inside of a `jax.shard_map` whose table is a block, see `lutjax.sharding.lookup_in_blocks`. None: the table is
        whole.
      accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the look-up; see `lutjax.weighted_lookup`.
      placement: ``"device"``, or the memory of the host, where `weights` is a `lutjax.training.host.HostTable` and the layer
        keeps the key of which its rows are drawn, `weights_key`: in Flax NNX ``"host"``, and elsewhere a
        `lutjax.training.host.HostTables`, which has the table. See docs/host-memory.md.
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 15.

    Published: Lample et al., Large Memory Layers with Product Keys, 2019, with the normalization of each query by
    itself in place of that over the batch (Berges et al., Memory Layers at Scale, 2024).

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ProductKeyMemory
      >>> layer = ProductKeyMemory(16, 8, n_keys=32, k=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((32, 16))).shape
      (32, 8)
    """

    spec_type = _product_keys.ProductKeyMemorySpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_keys: int,
        heads: int = 4,
        k: int = 32,
        key_size: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = unit_rows,
        keys_init: Initializer = uniform_keys,
        kernel_init: Initializer = MATRIX,
        row_axis: str | None = None,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        placement: str | HostTables = "device",
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())


class ProductKeyExperts(_Keyed):
    """Layer of ``n_keys**2`` experts of one neuron each, of which products of keys choose a few for each input.

    Experts are chosen and weighted as the rows of a `ProductKeyMemory`. Expert ``i`` adds ``activation(<x, down[i]>) * up[i]``, times its
    weight: two rows are read for it.

    Variables:
      query_kernel, query_scale, half_keys: as in `ProductKeyMemory`.
      down: first weights of the experts, a table, trained, ``[1, n_keys**2, in_features]``, normal(1 / sqrt(in_features)).
      up: second weights, a table, trained, ``[1, n_keys**2, out_features]``, normal(1 / sqrt(out_features)).

    Args:
      in_features: inputs.
      out_features: outputs.
      heads: pairs of queries, with keys of their own.
      key_size: numbers of a key; by default half as many as inputs, rounded up.
      dtype: dtype of the projection and of the output; by default that of inputs and parameters together. The table keeps its
        own, and scores are at least float32.
      param_dtype: dtype of the parameters: float32, bfloat16, float16 or float64.
      keys_init: draw the table, the keys and the projection, as in `jax.nn.initializers`.
      kernel_init: draw the table, the keys and the projection, as in `jax.nn.initializers`.
      row_axis: name of a mesh axis over which the rows of the table are divided, and the samples of a call, by their first
        axis: inside of a `jax.shard_map` whose table is a block, see `lutjax.sharding.lookup_in_blocks`. None: the table is
        whole.
      accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the look-up; see `lutjax.weighted_lookup`.
      placement: ``"device"``, or the memory of the host, where `weights` is a `lutjax.training.host.HostTable` and the layer
        keeps the key of which its rows are drawn, `weights_key`: in Flax NNX ``"host"``, and elsewhere a
        `lutjax.training.host.HostTables`, which has the table. See docs/host-memory.md.
      n_keys: keys of each of the two sets of a head; there are ``n_keys**2`` experts, which all heads share.
      k: experts that each head asks.
      weights_init: draws both tables, as in `jax.nn.initializers`.
      activation: of the neurons, a function of arrays.
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 15.

    Published: He, Mixture of A Million Experts, 2024 (PEER).

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ProductKeyExperts
      >>> layer = ProductKeyExperts(16, 8, n_keys=32, k=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((32, 16))).shape
      (32, 8)
    """

    spec_type = _product_keys.ProductKeyExpertsSpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_keys: int,
        heads: int = 8,
        k: int = 16,
        key_size: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = unit_rows,
        keys_init: Initializer = uniform_keys,
        kernel_init: Initializer = MATRIX,
        row_axis: str | None = None,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        placement: str | HostTables = "device",
        activation: Callable[..., Any] = jax.nn.gelu,
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())

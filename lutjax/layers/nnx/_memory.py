"""Memory layers for Flax NNX; `lutjax.layers._memory` documents the arguments."""

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
from lutjax.layers import _memory, _ngram_embedding, _product_keys
from lutjax.layers._memory import MATRIX, NORMAL_ROWS, LayoutHistory
from lutjax.layers._product_keys import uniform_keys, unit_rows
from lutjax.layers._spec import Initializer
from lutjax.layers.nnx._layer import Layer, builds
from lutjax.layers.nnx._variables import Keys, Param, Tables
from lutjax.tables.host import HostTable
from lutjax.tables.host_tables import HostTables


class NgramMemory(Layer):
    """Hashed n-gram tables: `lutjax.weighted_lookup` of `lutjax.ngram_rows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import NgramMemory
      >>> layer = NgramMemory(16, rows=1000, rngs=nnx.Rngs(0))
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> layer(x, tokens).shape, layer.row_ids(tokens).shape
      ((4, 32, 16), (4, 32, 8))
    """

    spec_type = _memory.NgramMemorySpec

    features: int
    orders: tuple[int, ...]
    rows: int
    heads: int
    width: int

    weights: Tables | HostTable
    weights_key: Keys  # of a `HostTable`
    key_kernel: Param
    value_kernel: Param
    query_scale: Param
    key_scale: Param
    conv_scale: Param  # with a `kernel`
    conv_kernel: Param

    @builds
    def __init__(
        self, features: int, orders: tuple[int, ...] = (2, 3), *, rows: int | None = None,
        heads: int = 4, width: int | None = None, kernel: int = 4, seed: int = 0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = NORMAL_ROWS, kernel_init: Initializer = MATRIX,
        row_axis: str | None = None, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, placement: str | HostTable | HostTables = "device",
        layout: lutjax.NgramLayout | None = None, streams: int = 1, gate: str = "sigmoid",
        eps: float = 1e-6, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    __call__ = _memory.memory_call  # `_run`, with the history of decoding

    def _run(self, x: Any, **options: Any) -> Any:
        spec, arrays = self._bind_arrays()
        return spec.run(lutjax.weighted_lookup, x, **options, **arrays)

    def row_ids(self, tokens: Int[Array, "*batch length"], segments: Any = None) -> Any:
        """Return `lutjax.ngram_rows` of token ids: int32 ``[..., length, tables]``."""
        return self.spec.row_ids(tokens, segments)

    def history(self, batch_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Any:
        """Return the state before the first token of a batch, with the dtype of its inputs."""
        return self.spec.history(batch_shape, dtype)


class NgramEmbedding(Layer):
    """Mean of token vectors and n-gram rows: `lutjax.weighted_lookup` of `lutjax.NgramLayout.rows`.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import NgramEmbedding
      >>> layer = NgramEmbedding(16, lutjax.NgramLayout.hash(1000), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)).shape, layer.weights.shape
      ((4, 32, 16), (1, 8000, 2))
    """

    spec_type = _ngram_embedding.NgramEmbeddingSpec

    features: int
    layout: lutjax.NgramLayout
    width: int

    weights: Tables | HostTable
    weights_key: Keys  # of a `HostTable`
    kernel: Param

    @builds
    def __init__(
        self, features: int, layout: lutjax.NgramLayout, *, width: int | None = None,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = NORMAL_ROWS, kernel_init: Initializer = MATRIX,
        row_axis: str | None = None, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, placement: str | HostTable | HostTables = "device",
        rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    __call__ = _ngram_embedding.embedding_call
    _run = NgramMemory._run

    def row_ids(self, tokens: Int[Array, "*batch length"], segments: Any = None) -> Any:
        """Return `lutjax.NgramLayout.rows` of token ids: int32 ``[..., length, columns]``."""
        return self.spec.row_ids(tokens, segments)

    def history(
        self, batch_shape: tuple[int, ...], dtype: DTypeLike | None = None
    ) -> LayoutHistory:
        """Return the state before the first token of a batch."""
        history: LayoutHistory = self.spec.history(batch_shape, dtype)
        return history


class _Keyed(Layer):
    in_features: int
    out_features: int
    n_keys: int
    heads: int
    k: int
    key_size: int

    query_kernel: Param
    query_scale: Param
    half_keys: Param

    def reads(
        self, x: Float[Array, "*batch inputs"]
    ) -> tuple[Int[jax.Array, "*batch reads"], Float[jax.Array, "*batch reads"]]:
        """Return row ids ``[..., heads * k]``, head by head, and their weights."""
        spec, arrays = self._bind_arrays()
        reads: tuple[jax.Array, jax.Array] = spec.reads(arrays, x)
        return reads


class ProductKeyMemory(_Keyed):
    """Table with rows addressed by product keys: `lutjax.weighted_lookup`."""

    spec_type = _product_keys.ProductKeyMemorySpec

    weights: Tables | HostTable
    weights_key: Keys  # of a `HostTable`

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, n_keys: int, heads: int = 4, k: int = 32,
        key_size: int | None = None, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = unit_rows,
        keys_init: Initializer = uniform_keys, kernel_init: Initializer = MATRIX,
        row_axis: str | None = None, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, placement: str | HostTables = "device",
        rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        return self._call().run(lutjax.weighted_lookup, x)


class ProductKeyExperts(_Keyed):
    """Experts with one neuron each, selected by product keys."""

    spec_type = _product_keys.ProductKeyExpertsSpec

    down: Tables | HostTable
    up: Tables | HostTable
    down_key: Keys  # of a `HostTable`
    up_key: Keys

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, n_keys: int, heads: int = 8, k: int = 16,
        key_size: int | None = None, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = unit_rows,
        keys_init: Initializer = uniform_keys, kernel_init: Initializer = MATRIX,
        row_axis: str | None = None, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, placement: str | HostTables = "device",
        activation: Callable[..., Any] = jax.nn.gelu, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        # Of `down`, then of `up`.
        return self._call().run(lutjax.weighted_lookup, x)

"""Causal language model built from lookup tables."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Implementation
from lutjax.extras import require_optional
from lutjax.layers.nnx import LUT, LUTAttention, LUTPairAttention
from lutjax.models._config import require_arguments
from lutjax.models._decoder import Decoder
from lutjax.models._language_configs import (
    ATTENTION as ATTENTION,
    LUTTransformerConfig as LUTTransformerConfig,
)
from lutjax.models._pages import n_entries
from lutjax.values import Array, accumulator

with require_optional("lutjax.models.transformer"):
    from flax import nnx


class Embedding(nnx.Variable):
    """Token embeddings, stored with the tables and never trained."""


class _Branch(nnx.Module):
    """Residual layer with dropout and optional batch normalization."""

    def __init__(self, layer: Any, config: LUTTransformerConfig, *, rngs: nnx.Rngs):
        self.layer = layer
        self.dropout = nnx.Dropout(config.dropout)
        self.norm = nnx.data(None)
        if config.batch_norm:
            dtype = accumulator(config.param_dtype)
            self.norm = nnx.BatchNorm(
                config.features, momentum=0.9, dtype=dtype, param_dtype=dtype, rngs=rngs
            )
            for average in (self.norm.mean, self.norm.var):  # Flax initializes them in float32
                average.set_value(average[...].astype(dtype))

    def __call__(
        self, z: Any, *, deterministic: bool | None, rngs: nnx.Rngs | None, **options: Any
    ) -> Any:
        y = self.layer(z, **options).astype(z.dtype)
        y = self.dropout(y, deterministic=deterministic, rngs=rngs)
        if self.norm is not None:
            with jax.numpy_dtype_promotion("standard"):  # Flax promotes to float32 implicitly
                y = self.norm(y, use_running_average=deterministic).astype(z.dtype)
        return z + y


class _Block(nnx.Module):
    """Attention, then tables."""

    def __init__(self, config: LUTTransformerConfig, *, implementation: Any, rngs: nnx.Rngs):
        kind = LUTAttention if config.attention == "concatenated" else LUTPairAttention
        options: dict[str, Any] = {"implementation": implementation, "rngs": rngs}
        attention = kind(**config.attention_options(), **options)
        self.attention = _Branch(attention, config, rngs=rngs)
        self.ffn = nnx.data(None)
        if config.ffn:
            self.ffn = _Branch(LUT(**config.ffn_options(), **options), config, rngs=rngs)

    def __call__(self, z: Any, *, places: Mapping[str, Any], **mode: Any) -> Any:
        z = self.attention(z, **places, **mode)
        return z if self.ffn is None else self.ffn(z, **mode)


class LUTTransformer(Decoder):
    """Causal language model built from lookup tables, without matrix products.

    ``z = embedding[token]``, then in each layer ``z += attention(z)`` and ``z += tables(z)``, with
    dropout and optional batch normalization on each added term; the logits are ``tables(z)``.
    Sequences longer than the context use a sliding window: each token attends to ``context - 1``
    earlier positions. The memory ``"counts"`` attends to the whole sequence instead.

    State: `nnx.Param` holds the tables and positions of the layers (and the batch normalization
    scales); `Embedding`, `Anchors` and, with batch normalization, `nnx.BatchStat` are stored with
    them, untrained. Tables start at zero.

    Args:
      config: model configuration.
      implementation: selects the implementation of the ops; see `lutjax.lut`.
      rngs: the ``params`` stream initializes the model.

    Source: docs/semantics.md, section 9.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.models import LUTTransformer, LUTTransformerConfig
      >>> config = LUTTransformerConfig(vocab_size=10, features=4, context=8, ffn_anchors=3)
      >>> model = LUTTransformer(config, rngs=nnx.Rngs(0))
      >>> tokens = jnp.asarray([[1, 2, 3]])
      >>> model(tokens, deterministic=True).shape
      (1, 3, 10)
      >>> model.generate(tokens, 5, key=jax.random.key(0)).shape
      (1, 5)
    """

    def __init__(
        self, config: LUTTransformerConfig, *, implementation: Implementation = None, rngs: nnx.Rngs
    ):
        require_arguments(self, config, LUTTransformerConfig, rngs)
        self.config = config
        shape = (config.vocab_size, config.features)
        dtype = jnp.dtype(config.param_dtype)
        self.embedding = Embedding(jax.random.uniform(rngs.params(), shape, dtype, -1, 1))
        self.layers = nnx.List(
            _Block(config, implementation=implementation, rngs=rngs) for _ in range(config.n_layers)
        )
        self.unembed = LUT(**config.unembed_options(), implementation=implementation, rngs=rngs)
        self.block_tables: Any = nnx.data(None)
        self.cached_lengths: Any = nnx.data(None)
        if config.table_dtype is not None:
            for path, part in nnx.iter_graph(self):
                if path and path[-1] == "weights" and isinstance(part, nnx.Param):
                    part.set_value(part[...].astype(config.table_dtype))

    def _vectors(self) -> Any:
        return self.embedding[...]

    def _hidden_states(
        self, z: jax.Array, _: Any, decode: bool | None, segments: Any, **mode: Any
    ) -> jax.Array:
        places = {"decode": decode, "segments": segments}
        if decode and self.block_tables is not None:
            lengths = self.cached_lengths[...]
            places |= {"block_tables": self.block_tables[...], "lengths": lengths}
            new = z.shape[-2] if segments is None else jnp.sum(segments >= 0, -1, dtype=jnp.int32)
            self.cached_lengths[...] = lengths + new
        for layer in self.layers:
            z = layer(z, places=places, **mode)
        return z

    def take_in(self, one: "LUTTransformer", slot: Array) -> None:
        """Copy the caches of a model with a single sequence into a slot of ``[slots]`` caches."""
        for own, other in zip(self.layers, one.layers, strict=True):
            layer, of_one = own.attention.layer, other.attention.layer
            for name in layer.spec.cache_names:
                if getattr(layer, name) is None:
                    continue
                cache, taken = getattr(layer, name), getattr(of_one, name)[...]
                if taken.ndim:
                    cache[...] = cache[...].at[slot].set(taken[0])
                else:  # the position after all cached tokens, common to all sequences
                    cache[...] = jnp.maximum(cache[...], taken)

    def copy_block(self, source: Array, target: Array) -> None:
        """Copy a block in the paged caches of all layers."""
        for layer in self.layers:
            for name in layer.attention.layer.spec.cache_names:
                cache = getattr(layer.attention.layer, name)
                if cache is not None:
                    cache[...] = cache[...].at[target].set(cache[...][source])

    def init_cache(
        self, batch_shape: tuple[int, ...], *, blocks: tuple[int, int] | None = None
    ) -> None:
        """Create empty caches (`nnx.Cache`) for this batch shape, as ``decode=True`` requires.

        Where attention is ``"concatenated"``, caches store the row ids of earlier tokens: one byte
        per detector with up to 8 anchor pairs. With the memory ``"counts"`` they store the number
        of tokens per row.

        Args:
          batch_shape: batch dimensions.
          blocks: number and size of the blocks in a shared pool, which stores the tokens of all
            sequences. ``block_tables``, ``[*batch_shape, entries]``, initially -1, then lists the
            blocks of each sequence, and ``cached_lengths`` counts its cached tokens; see
            `lutjax.layers.nnx.LUTAttention`. `Slots` manages both.
        """
        stored = {"counts": True} if self.config.memory == "counts" else {"ids": True}
        for layer in self.layers:
            layer.attention.layer.init_cache(
                (*batch_shape, 1, self.config.features),
                jnp.dtype(self.config.param_dtype),
                blocks=blocks,
                **stored,
            )
        tables: Any = {"block_tables": None, "cached_lengths": None}
        if blocks is not None:
            entries = n_entries(self.config.context, blocks[1])
            tables = {
                "block_tables": nnx.Cache(jnp.full((*batch_shape, entries), -1, jnp.int32)),
                "cached_lengths": nnx.Cache(jnp.zeros(batch_shape, jnp.int32)),
            }
        for name, value in tables.items():
            delattr(self, name)
            setattr(self, name, nnx.data(None) if value is None else value)

"""Causal language model with softmax attention and dense or table-based feed-forward layers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from lutjax import sharding
from lutjax.dispatch.registry import Implementation
from lutjax.extras import require_optional
from lutjax.layers.nnx import LUT, NgramMemory, ProjectionLUT
from lutjax.models._attention import attend
from lutjax.models._config import require_arguments
from lutjax.models._decoder import Decoder
from lutjax.models._gpt_parts import READS as READS, STANDARD_DEVIATION, MatrixNormal
from lutjax.models._language_configs import (
    FEED_FORWARD as FEED_FORWARD,
    SCORED as SCORED,
    GPTConfig as GPTConfig,
)
from lutjax.values import Array, accumulator

with require_optional("lutjax.models.gpt"):
    from flax import nnx

_ROTARY_BASE = 10000.0


def feed_forward(config: GPTConfig, *, implementation: Any, rngs: nnx.Rngs) -> Any:
    """Return the feed-forward module for a block; calls accept `deterministic` and `rngs`."""
    if config.feed_forward == "dense":
        return _Dense(config, rngs=rngs)
    if config.feed_forward == "lut":
        return _Tables(**config.lut_options(), implementation=implementation, rngs=rngs)
    rngs = nnx.Rngs(params=rngs.params(), dropout=0)
    layer = ProjectionLUT(
        **config.projection_lut_options(), implementation=implementation, rngs=rngs
    )
    layer.rngs = nnx.data(None)  # calls pass the rngs, as for all dropout in the model
    return layer


class GPT(Decoder):
    """Causal language model with softmax attention and dense or table-based feed-forward layers.

    ``z = embedding[token]``, then in each layer ``z += attention(norm(z))`` and ``z +=
    feed_forward(norm(z))``; the logits are ``norm(z)`` times a matrix. Norms divide by the root
    mean square. Rotary position embeddings make attention depend on relative distances. Sequences
    longer than the context use a sliding window: each token attends to ``context - 1`` earlier
    positions. An n-gram memory adds its reads to `z` before a layer. Dropout applies to the
    embeddings and to each term added by a layer or memory.

    All variables except table anchors are `nnx.Param`. Matrices are initialized with standard
    deviation 0.02. Matrices whose product is added to `z` use ``0.02 / sqrt(2 * n_layers)``, or
    zeros after tables.

    Args:
      config: model configuration.
      implementation: selects the implementation of the table ops; see `lutjax.lut`.
      rngs: the ``params`` stream initializes the model.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.models import GPT, GPTConfig
      >>> config = GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2)
      >>> model = GPT(config, rngs=nnx.Rngs(0))
      >>> tokens = jnp.asarray([[1, 2, 3]])
      >>> model(tokens, deterministic=True).shape
      (1, 3, 10)
      >>> model.generate(tokens, 5, key=jax.random.key(0)).shape
      (1, 5)
    """

    def __init__(self, config: GPTConfig, *, implementation: Implementation = None, rngs: nnx.Rngs):
        require_arguments(self, config, GPTConfig, rngs)
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.features,
            embedding_init=MatrixNormal(STANDARD_DEVIATION),
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(config.dropout)
        self.layers = nnx.List(
            _Block(config, place, implementation=implementation, rngs=rngs)
            for place in range(config.n_layers)
        )
        self.norm = _norm(config, rngs)
        self.unembed = _make_linear(
            config, config.features, config.vocab_size, use_bias=False, rngs=rngs
        )
        self.cache_index: Any = nnx.data(None)
        self.cached_lengths: Any = nnx.data(None)
        self.cached_segments: Any = nnx.data(None)
        self.cached_turns: Any = nnx.data(None)

    def _vectors(self) -> Any:
        return self.embedding.embedding[...]

    def _hidden_states(
        self,
        z: Array,
        tokens: Array | None,
        decode: bool | None,
        segments: Array | None,
        *,
        deterministic: bool | None,
        rngs: nnx.Rngs | None,
    ) -> Any:
        *batch, length, _ = z.shape
        if self.config.memory:
            if tokens is None:
                raise ValueError(
                    "GPT: vectors alone do not say which rows of the memory to read; "
                    "give their tokens."
                )
            tokens = jnp.clip(jnp.asarray(tokens), 0, self.config.vocab_size - 1)
        if decode and self.cache_index is None:
            raise ValueError("GPT: there is no cache to decode with; call init_cache first.")
        if decode and segments is None:
            segments = jnp.zeros((length,), jnp.int32)
        if segments is not None:
            segments = jnp.broadcast_to(segments, (*batch, length))
            segments = segments.reshape(math.prod(batch), length)
        cached: Any = None
        turns: Array
        if segments is None:
            turns = _turns(self.config, jnp.arange(length)[None])
        elif decode:
            cached, turns = self._continuation(segments)
        else:
            turns = _turns(self.config, _places_in_segments(segments))

        def run(layer: "_Block", z: Array, rngs: nnx.Rngs | None) -> Array:
            places = {"turns": turns, "segments": segments, "cached": cached}
            return layer(z, places=places, deterministic=deterministic, rngs=rngs)

        if self.config.remat and not decode:
            run = nnx.remat(run)
        # The residual sum keeps the parameter dtype; only layers compute in `config.dtype`.
        z = self.dropout(z, deterministic=deterministic, rngs=rngs)
        for layer in self.layers:
            if layer.memory is not None:
                assert tokens is not None
                # Not inside `run`: tables read within a checkpoint have no sparse gradient.
                y = layer.memory.read(z, tokens, segments, decode)
                z = z + self.dropout(y.astype(z.dtype), deterministic=deterministic, rngs=rngs)
            z = run(layer, z, rngs)
        return self.norm(z)

    def _continuation(self, segments: Array) -> tuple[tuple[Array, Array], Array]:
        """Return the cache position of the first new token, cached segments, and rotary angles.

        All sequences in a batch share one cache position. Rotary positions exclude padding, so each
        sequence gets the same angles as on its own.
        """
        length = segments.shape[-1]
        first, cached_segments = self.cache_index[...], self.cached_segments[...]
        before, is_token = self.cached_lengths[...], (segments >= 0).astype(jnp.int32)
        turns = self.cached_turns[...]
        if length != 1:
            turns = _turns(self.config, before[:, None] + jnp.cumsum(is_token, 1) - is_token)
        after = before + jnp.sum(is_token, 1, dtype=jnp.int32)
        place, context = first + length, self.config.context
        # Count up to twice the context only, which is sufficient: a continuous batch never ends.
        self.cache_index[...] = jnp.where(place < 2 * context, place, place % context + context)
        self.cached_lengths[...] = after
        self.cached_turns[...] = _turns(self.config, after[:, None])
        # The cache is a ring: a longer prompt leaves only its latest tokens.
        latest = (first + jnp.arange(length, dtype=jnp.int32))[-context:] % context
        self.cached_segments[...] = cached_segments.at[:, latest].set(segments[:, -context:])
        return (first, cached_segments), turns

    def take_in(self, one: "GPT", slot: Array) -> None:
        """Copy the caches of a model with a single sequence into a slot of ``[slots]`` caches."""
        # All sequences in a ring share a position: rotate the new ones to it.
        shift = self.cache_index[...] - one.cache_index[...]

        def take(name: str, own: Any, other: Any, axis: int = 0, along: int | None = None) -> None:
            cache, taken = getattr(own, name), getattr(other, name)[...]
            taken = taken if along is None else jnp.roll(taken, shift, along)
            start = slot * taken.shape[axis]
            cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], taken, start, axis)

        take("cached_lengths", self, one)
        take("cached_segments", self, one, along=1)
        take("cached_turns", self, one, axis=1)
        for own, other in zip(self.layers, one.layers, strict=True):
            take("cached_key", own.attention, other.attention, along=2)
            take("cached_value", own.attention, other.attention, along=1)
            if own.memory is not None:
                for name in own.memory.cache_names:
                    take(name, own.memory, other.memory)

    def init_cache(self, batch_shape: tuple[int, ...]) -> None:
        """Create empty caches (`nnx.Cache`) for this batch shape, as ``decode=True`` requires."""
        n = math.prod(batch_shape)
        self.cache_index = nnx.Cache(jnp.int32(0))
        self.cached_lengths = nnx.Cache(jnp.zeros((n,), jnp.int32))
        self.cached_segments = nnx.Cache(jnp.full((n, self.config.context), -1, jnp.int32))
        # Angles of the next position: a loop carries them, so each step computes them once, not in
        # every layer.
        self.cached_turns = nnx.Cache(_turns(self.config, jnp.zeros((n, 1), jnp.int32)))
        for layer in self.layers:
            layer.attention.init_cache(batch_shape)
            if layer.memory is not None:
                layer.memory.init_cache(n)


class _Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward, with an optional memory read first."""

    def __init__(self, config: GPTConfig, place: int, *, implementation: Any, rngs: nnx.Rngs):
        self.memory = nnx.data(None)
        if place in config.memory_places:
            options = config.memory_options(place)
            if config.memory_base is not None:
                from lutjax.convert._memories import open_memory_table

                options["placement"] = open_memory_table(config.memory_base, trains=True)
            self.memory = _Memory(**options, implementation=implementation, rngs=rngs)
        self.attention_norm = _norm(config, rngs)
        self.attention = _Attention(config, rngs=rngs)
        self.feed_forward_norm = _norm(config, rngs)
        self.feed_forward = feed_forward(config, implementation=implementation, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, z: Array, *, places: dict[str, Any], **mode: Any) -> Array:
        y = self.attention(self.attention_norm(z), **places)
        z = z + self.dropout(y.astype(z.dtype), **mode)
        y = self.feed_forward(self.feed_forward_norm(z), **mode)
        return z + self.dropout(y.astype(z.dtype), **mode)


class _Attention(nnx.Module):
    """Causal softmax attention with rotary positions."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.project = _make_linear(
            config, config.features, 3 * config.features, use_bias=False, rngs=rngs
        )
        self.merge = _make_linear(
            config, config.features, config.features, use_bias=False, residual=True, rngs=rngs
        )
        self.cached_key: Any = nnx.data(None)
        self.cached_value: Any = nnx.data(None)

    def __call__(
        self, x: Array, *, turns: Array, segments: Array | None, cached: tuple[Array, Array] | None
    ) -> Array:
        *batch, length, features = x.shape
        window = self.config.context - 1
        heads = (math.prod(batch), length, 3 * self.config.n_heads, features // self.config.n_heads)
        query, key, value = jnp.split(self.project(x).reshape(heads), 3, 2)
        query, key = _rotate(query, turns), _rotate(key, turns)
        if cached is not None:
            y = self._decode(query, key, value, segments, *cached)
        else:
            same = None
            if segments is not None:
                same = segments[:, None, :, None] == segments[:, None, None, :]
            # Shorter inputs need no window: every earlier token lies in it.
            y = attend(query, key, value, mask=same, window=window if length > window + 1 else None)
        return self.merge(y.reshape(*batch, length, features))

    def _decode(self, query: Array, key: Array, value: Array, *places: Array | None) -> jax.Array:
        """Attend to cached and new keys, and store the latest keys.

        Caches are ring buffers: a position is stored at its remainder modulo the context. They are
        direct operands of a matrix product per sequence and head, so a step writes one column and
        one row and copies nothing else.
        """
        decode = sharding.shard_by_compiler(
            functools.partial(_decode_attention, self.config.context),
            lambda keys, values, query, *rest: tuple(map(sharding.spec_of, (query, keys, values))),
        )
        y: jax.Array
        y, self.cached_key[...], self.cached_value[...] = decode(
            self.cached_key[...], self.cached_value[...], query, key, value, *places
        )
        return y

    def init_cache(self, batch_shape: tuple[int, ...]) -> None:
        config, n = self.config, math.prod(batch_shape)
        heads, size = config.n_heads, config.features // config.n_heads
        self.cached_key = nnx.Cache(jnp.zeros((n * heads, size, config.context), config.dtype))
        self.cached_value = nnx.Cache(jnp.zeros((n * heads, config.context, size), config.dtype))


class _Memory(NgramMemory):
    """N-gram memory with a cache of the latest tokens."""

    cache_names = ("cached_tokens", "cached_segments", "cached_values")

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for name in self.cache_names:
            setattr(self, name, nnx.data(None))

    def read(
        self, z: Array, tokens: Array, segments: Array | None, decode: bool | None
    ) -> jax.Array:
        """Return the memory output for token vectors; decoding continues the cached tokens."""
        y: jax.Array
        if not decode:
            if segments is not None:
                segments = segments.reshape(tokens.shape)
            y = self(z, tokens, segments=segments)
            return y
        *batch, length, features = z.shape
        n = math.prod(batch)
        caches = [getattr(self, name) for name in self.cache_names]
        kind = jax.tree.structure(self.history((n,)))
        history = jax.tree.unflatten(kind, [cache[...] for cache in caches])
        z_of_batch, tokens = z.reshape(n, length, features), tokens.reshape(n, length)
        y, history = self(z_of_batch, tokens, segments=segments, history=history)
        for cache, value in zip(caches, jax.tree.leaves(history), strict=True):
            cache[...] = value
        return y.reshape(z.shape)

    def init_cache(self, n: int) -> None:
        for name, value in zip(self.cache_names, jax.tree.leaves(self.history((n,))), strict=True):
            setattr(self, name, nnx.Cache(value))


class _Dense(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.up = _make_linear(config, config.features, 4 * config.features, rngs=rngs)
        self.down = _make_linear(
            config, 4 * config.features, config.features, residual=True, rngs=rngs
        )

    def __call__(
        self, x: Array, *, deterministic: bool | None = None, rngs: nnx.Rngs | None = None
    ) -> Array:
        dtype, up = jnp.dtype(self.config.dtype), self.up
        product = jnp.dot(jnp.asarray(x).astype(dtype), up.kernel[...].astype(dtype))
        # Memory bandwidth limits half precision: recomputing the GELU in the backward pass is
        # cheaper than storing its tanh.
        activation = jax.checkpoint(_biased_gelu) if dtype.itemsize == 2 else _biased_gelu
        return self.down(activation(product, up.bias[...].astype(dtype)))


def _biased_gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    return nnx.gelu(x + jnp.broadcast_to(bias, x.shape))


class _Tables(LUT):
    """Tables without their own dropout."""

    def __call__(
        self, x: Array, *, deterministic: bool | None = None, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        return super().__call__(x)


def _make_linear(
    config: GPTConfig, n_inputs: int, n_outputs: int, *, residual: bool = False, **options: Any
) -> Any:
    """Return a linear layer in the model's dtypes; `residual` scales it for the residual stream."""
    deviation = (
        STANDARD_DEVIATION / (2 * config.n_layers) ** 0.5 if residual else STANDARD_DEVIATION
    )
    return nnx.Linear(
        n_inputs,
        n_outputs,
        kernel_init=MatrixNormal(deviation),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        **options,
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.features, dtype=config.param_dtype, param_dtype=config.param_dtype, rngs=rngs
    )


def _decode_attention(
    context: int,
    keys: jax.Array,
    values: jax.Array,
    query: Array,
    key: Array,
    value: Array,
    segments: Array,
    first: Array,
    cached_segments: Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the attention output and the updated key and value caches; see `_Attention._decode`.

    Negative segments mark padding. `first` is the cache position of the first new key per sequence,
    and `cached_segments` has the segments of the cached keys, ``[n, context]``.
    """
    n, length, n_heads, size = query.shape
    slots, position = jnp.arange(context), first + jnp.arange(length)

    def fold_heads(x: Array, axes: tuple[int, ...]) -> jax.Array:
        y = jnp.transpose(x, axes)
        return y.reshape(n * n_heads, *y.shape[2:])

    query = fold_heads(query, (0, 2, 1, 3))
    new_keys, new_values = fold_heads(key, (0, 2, 3, 1)), fold_heads(value, (0, 2, 1, 3))
    if length == 1:
        # The overwritten slot holds a key outside every query's window.
        slot = first % context
        keys = jax.lax.dynamic_update_slice_in_dim(keys, new_keys, slot, 2)
        values = jax.lax.dynamic_update_slice_in_dim(values, new_values, slot, 1)
        cached_segments = jax.lax.dynamic_update_slice_in_dim(cached_segments, segments, slot, 1)
        y = _attend_to_cache(query, keys, values, _same_segment(segments, cached_segments), n_heads)
    else:
        # New keys would overwrite cached ones that the first new queries still see.
        every_key = jnp.concatenate([keys, new_keys], 2)
        every_value = jnp.concatenate([values, new_values], 1)
        # A slot holds the latest position before `first` with its remainder; negative: none yet.
        key_position = jnp.concatenate([first - 1 - (first - 1 - slots) % context, position])
        distance = position[:, None] - key_position[None, :]
        seen = (key_position[None, :] >= 0) & (distance >= 0) & (distance < context)
        same = _same_segment(segments, jnp.concatenate([cached_segments, segments], 1))
        y = _attend_to_cache(query, every_key, every_value, seen[None] & same, n_heads)
        latest = position[-context:] % context
        keys = jnp.asarray(keys).at[:, :, latest].set(new_keys[:, :, -context:])
        values = jnp.asarray(values).at[:, latest].set(new_values[:, -context:])
    return y.reshape(n, n_heads, length, size).transpose(0, 2, 1, 3), keys, values


def _attend_to_cache(
    query: Float[Array, "heads length size"],
    keys: Float[Array, "heads size slots"],
    values: Float[Array, "heads slots size"],
    seen: Bool[Array, "n length slots"],
    n_heads: int,
) -> jax.Array:
    dtype = accumulator(query.dtype)
    scale = jnp.asarray(query.shape[-1] ** -0.5, dtype)
    scores = jnp.matmul(query, keys, preferred_element_type=dtype) * scale
    by_sequence = scores.reshape(seen.shape[0], n_heads, *seen.shape[1:])
    # The smallest number, not -inf: a row of padding sees nothing, and -inf would give NaN.
    by_sequence = jnp.where(seen[:, None], by_sequence, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(by_sequence).reshape(scores.shape).astype(values.dtype)
    return jnp.matmul(weights, values)


def _same_segment(of_queries: Array, of_keys: Array) -> jax.Array:
    """Return the mask ``[n, queries, keys]`` for pairs in the same segment, excluding padding."""
    queries = of_queries[:, :, None]
    return (queries == of_keys[:, None, :]) & (queries >= 0)


def _places_in_segments(segments: Array) -> jax.Array:
    """Return the position of each token within its contiguous segment, ``[n, length]``."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


def _turns(
    config: GPTConfig, position: Int[Array, "n length"]
) -> Float[jax.Array, "2 n length half"]:
    """Return the cosines and sines of the rotary angles, which grow with the position."""
    size, dtype = config.features // config.n_heads, accumulator(config.dtype)
    rate = _ROTARY_BASE ** (-jnp.arange(0, size, 2, dtype=dtype) / size)
    angle = position.astype(dtype)[:, :, None] * rate[None, None, :]
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def _rotate(
    x: Float[Array, "n length heads size"], turns: Float[Array, "2 #n length half"]
) -> Float[jax.Array, "n length heads size"]:
    cos, sin = turns[..., None, :]
    a, b = jnp.split(x.astype(turns.dtype), 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)

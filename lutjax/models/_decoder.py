"""Causal language models with cached generation."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from lutjax import ops, sharding
from lutjax.arguments import require_array
from lutjax.values import Array, as_int32, is_concrete


class Decoder(nnx.Module):
    """Base class for causal language models, with cached generation.

    Subclasses define ``_vectors()``, which returns all token embeddings, ``_hidden(z, tokens,
    decode, segments, deterministic=, rngs=)``, ``unembed(hidden)``, ``init_cache(batch_shape)``,
    ``take_in(one, slot)`` (used by `Slots`), and a ``config`` with ``vocab_size`` and ``context``.
    """

    config: Any
    unembed: Any
    init_cache: Any
    take_in: Any
    _vectors: Any
    _hidden_states: Any

    def __call__(
        self,
        tokens: Int[Array, "*batch length"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
        segments: Int[Array, "*#batch length"] | None = None,
    ) -> Float[jax.Array, "*batch length vocab"]:
        """Return logits for the token after each position.

        Args:
          tokens: token ids, any length. Out-of-range ids are clamped.
          deterministic: disable dropout, and use running averages in batch normalization. Overrides
            the mode of the model, which is training unless `nnx.view` or `eval` changed it.
          rngs: random source for dropout: an `nnx.Rngs` with a ``dropout`` stream, or a key, which
            makes a training step a pure function of its arguments.
          decode: `tokens` continue the cached tokens; see `init_cache`.
          segments: ids ``[*batch, length]``: a token attends only to its own segment, so that
            training sequences can be packed into one row. While decoding, ids are 0 (the default)
            or above; negative ids mark padding, which neither attends nor is attended to.

        Raises:
          ValueError: `tokens` is not an array of integers with at least one axis.
        """
        mode: dict[str, Any] = {"deterministic": deterministic, "rngs": rngs, "decode": decode}
        return self.from_embedded(self.embed(tokens), segments=segments, tokens=tokens, **mode)

    def from_embedded(
        self,
        z: Float[Array, "*batch length features"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
        segments: Int[Array, "*#batch length"] | None = None,
        tokens: Int[Array, "*batch length"] | None = None,
    ) -> Float[jax.Array, "*batch length vocab"]:
        """Return logits for embeddings instead of tokens, otherwise like a call.

        A model with a memory requires the matching `tokens`.
        """
        hidden = self.hidden(
            z,
            deterministic=deterministic,
            rngs=rngs,
            decode=decode,
            segments=segments,
            tokens=tokens,
        )
        return self.unembed(hidden).astype(hidden.dtype)

    def embed(
        self, tokens: Int[Array, "*batch length"]
    ) -> Float[jax.Array, "*batch length features"]:
        """Return token embeddings."""
        _check_tokens(type(self).__name__, tokens)
        return sharding.rows(self._vectors(), jnp.asarray(tokens))

    def hidden(
        self,
        z: Float[Array, "*batch length features"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
        segments: Int[Array, "*#batch length"] | None = None,
        tokens: Int[Array, "*batch length"] | None = None,
    ) -> Float[jax.Array, "*batch length features"]:
        """Return the final hidden states for embeddings, the input to `unembed`."""
        if rngs is not None and not isinstance(rngs, nnx.Rngs):
            # A stream: each layer samples a separate mask.
            rngs = nnx.Rngs(dropout=jnp.asarray(rngs))
        z = jnp.asarray(z)
        if segments is not None:
            lengths = z.shape[:-2], z.shape[-2], z.shape[-2]
            segments, _ = ops.segments(
                type(self).__name__, segments, segments, *lengths, ("segments",) * 2
            )
        y: jax.Array = self._hidden_states(
            z, tokens, decode, segments, deterministic=deterministic, rngs=rngs
        )
        return y

    def generate(
        self,
        prompt_tokens: Int[Array, "*batch prompt"] | Sequence[Int[Array, " _"]],
        n_tokens: int,
        *,
        key: Array,
        temperature: float | int = 1.0,
        top_k: int | None = None,
        lengths: Int[Array, "*batch"] | None = None,
    ) -> Int[jax.Array, "*batch {n_tokens}"]:
        """Generate continuations of prompts.

        The prompt fills the caches in windows of at most ``config.context`` tokens, so memory and
        time per token are independent of its length. Each new token then costs a single row of
        pairs. The model is not modified. It compiles once for each shape, `n_tokens` and `top_k`.

        Args:
          prompt_tokens: prompts with at least one token each; they may exceed the context. Or a
            list of prompts with any lengths, ``[tokens]`` each.
          n_tokens: number of tokens to generate.
          key: a `jax.random` key; or one per sequence, ``[*batch]``: each sequence then continues
            as it does on its own with its key, up to rounding.
          temperature: divides the logits before sampling; 0 selects the likeliest token.
          top_k: sample among this many likeliest tokens only; all by default.
          lengths: number of tokens per sequence, ``[*batch]``, at least 1; later entries in
            `prompt_tokens` are padding and change no result: each sequence continues as it does on
            its own, up to rounding. None: sequences fill the array. One compilation covers all
            lengths.

        Returns:
          The new tokens, int32.

        Raises:
          ValueError: an argument is out of range, or a prompt is empty.

        Source: docs/semantics.md, section 5.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from flax import nnx
          >>> from lutjax.models import GPT, GPTConfig
          >>> config = GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2)
          >>> model = GPT(config, rngs=nnx.Rngs(0))
          >>> prompts = [jnp.asarray([1, 2, 3]), jnp.asarray([4])]
          >>> model.generate(prompts, 5, key=jax.random.key(0)).shape
          (2, 5)
        """
        prompt, lengths, key, warmth = self._validate_generation(
            prompt_tokens, lengths, n_tokens, key, temperature, top_k
        )
        if n_tokens == 0:
            return jnp.zeros((*prompt.shape[:-1], 0), jnp.int32)
        # The model stays as it is: caches live in the compiled function.
        graphdef, state = nnx.split(self)
        draw = functools.partial(_generate, graphdef, n_tokens=n_tokens, top_k=top_k)
        tokens: jax.Array = sharding.shard_by_compiler(
            draw, lambda _, prompt, *rest: sharding.spec_of(prompt)
        )(state, prompt, lengths, key, warmth)
        return tokens

    def stream(
        self,
        prompt_tokens: Int[Array, "*batch prompt"] | Sequence[Int[Array, " _"]],
        n_tokens: int,
        *,
        key: Array,
        temperature: float | int = 1.0,
        top_k: int | None = None,
        lengths: Int[Array, "*batch"] | None = None,
    ) -> Iterator[Int[jax.Array, "*batch _"]]:
        """Return an iterator over the tokens from `generate`, in parts as they are sampled.

        The first part has one token. The device samples the next part while the caller processes
        the previous one. Arguments and errors are the same as for `generate`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from flax import nnx
          >>> from lutjax.models import GPT, GPTConfig
          >>> config = GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2)
          >>> model = GPT(config, rngs=nnx.Rngs(0))
          >>> parts = model.stream(jnp.asarray([1, 2, 3]), 40, key=jax.random.key(0))
          >>> [part.shape for part in parts]
          [(1,), (32,), (7,)]
        """
        prompt, lengths, key, warmth = self._validate_generation(
            prompt_tokens, lengths, n_tokens, key, temperature, top_k
        )
        return self._generate_parts(prompt, lengths, n_tokens, key, warmth, top_k)

    def _generate_parts(
        self,
        prompt: jax.Array,
        lengths: jax.Array | None,
        n_tokens: int,
        key: Array,
        temperature: Array | None,
        top_k: int | None,
    ) -> Iterator[jax.Array]:
        if n_tokens == 0:
            return
        form, cache, others = open_caches(self, prompt.shape[:-1], top_k)

        def shard_function(function: Any) -> Any:
            # Caches stay whole on every device; only the sequences are divided.
            whole = [jax.sharding.PartitionSpec()] * len(cache)
            return sharding.shard_by_compiler(
                functools.partial(function, form=form), lambda *_: (whole, sharding.spec_of(prompt))
            )

        keys = _split(key, n_tokens)
        cache, part = shard_function(_begin_sequences)(
            cache, others, prompt, lengths, keys[0], temperature
        )
        done, last = 1, part
        while done < n_tokens:
            ahead = _fill_block(keys[done : done + _TOKENS_IN_BLOCK], _TOKENS_IN_BLOCK)
            cache, tokens = shard_function(_continue_sequences)(
                cache, others, last, ahead, temperature
            )
            last = tokens[..., -1:]
            # Only now, when the device already computes the part after this one.
            yield part
            part = tokens[..., : n_tokens - done]
            done += part.shape[-1]
        yield part

    def _validate_generation(
        self,
        prompt: Array | Sequence[Array],
        lengths: Array | None,
        n_tokens: int,
        key: Array,
        temperature: float | int,
        top_k: int | None,
    ) -> tuple[jax.Array, jax.Array | None, Array, Array | None]:
        """Validate the arguments of `generate`; return prompt, lengths, keys and temperature."""
        prompt, lengths = _pad_prompts(prompt, lengths)
        _check_tokens("generate", prompt)
        vocab, texts = self.config.vocab_size, prompt.shape[:-1]
        if prompt.shape[-1] == 0:
            raise ValueError("generate: the prompt is empty; give at least one token to continue.")
        if lengths is not None:
            _check_lengths(prompt, lengths)
            lengths = as_int32(lengths)
        if n_tokens < 0:
            raise ValueError(f"generate: n_tokens is {n_tokens}; it must not be negative.")
        check_temperature("generate", temperature)
        if top_k is not None and not 1 <= top_k <= vocab:
            raise ValueError(
                f"generate: top_k is {top_k}; it must be 1 to {vocab}, the vocabulary size."
            )
        key = typed_key("generate", key)
        if key.shape not in ((), texts):
            raise ValueError(
                f"generate: key has shape {list(key.shape)}; expected one key, or one per sequence "
                f"{list(texts)}."
            )
        # None selects the program without sampling; other temperatures share one program.
        warmth = None if temperature == 0 else jnp.float32(temperature)
        return jnp.asarray(prompt), lengths, key, warmth


def _check_tokens(where: str, tokens: Array) -> None:
    require_array(where, "tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim < 1:
        raise ValueError(
            f"{where}: tokens is {tokens.dtype}{list(tokens.shape)}; "
            "expected integer ids [..., length]."
        )


def check_temperature(where: str, temperature: float | int) -> None:
    if not temperature >= 0:
        raise ValueError(f"{where}: temperature is {temperature}; it must not be negative.")


def typed_key(where: str, key: Array) -> Array:
    """Return typed `jax.random` keys, from typed keys or key data."""
    require_array(where, "key", key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(jnp.asarray(key))


def _pad_prompts(
    prompt: Array | Sequence[Array], lengths: Array | None
) -> tuple[Array, Array | None]:
    """Return prompts as a single array, zero-padded, with lengths; None for equal lengths."""
    if not isinstance(prompt, list | tuple):
        return cast("Array", prompt), lengths
    if lengths is not None:
        raise ValueError("generate: lengths requires an array of prompts; prompt_tokens is a list.")
    if not prompt:
        raise ValueError("generate: prompt_tokens is an empty list; give at least one text.")
    texts = [np.asarray(text) for text in prompt]
    for k, text in enumerate(texts):
        if text.ndim != 1 or not text.size or not np.issubdtype(text.dtype, np.integer):
            raise ValueError(
                f"generate: prompt_tokens[{k}] is {text.dtype}{list(text.shape)}; "
                "expected integer ids [tokens], at least one."
            )
    sizes = np.asarray([text.size for text in texts], np.int32)
    padded = np.zeros((len(texts), sizes.max()), np.int32)
    for row, text in zip(padded, texts, strict=True):
        # Clipped, not wrapped: ids out of range are clamped to the vocabulary later.
        row[: text.size] = np.clip(text, *_INT32)
    return padded, None if np.all(sizes == sizes.max()) else sizes


_INT32 = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def _check_lengths(prompt: Array, lengths: Array) -> None:
    """Raise ValueError if the shape of lengths is wrong, or a known length is out of range."""
    ops.integers(
        "generate",
        "lengths",
        lengths,
        prompt.ndim - 1,
        f"{list(prompt.shape[:-1])}, one of each text",
    )
    ops.require(
        lengths.shape == prompt.shape[:-1],
        "generate",
        "lengths",
        lengths,
        f"prompt_tokens is {list(prompt.shape)}, so expected {list(prompt.shape[:-1])}, "
        "one of each text",
    )
    if is_concrete(lengths):
        for at, length in np.ndenumerate(np.asarray(lengths)):
            if not 1 <= length <= prompt.shape[-1]:
                raise ValueError(
                    f"generate: lengths{list(at)} is {length}; it must be 1 to the prompt length, "
                    f"{prompt.shape[-1]}."
                )


class Form(NamedTuple):
    """Static form of a model with caches, for compiled functions of its flat arrays."""

    graphdef: Any
    cache_treedef: Any
    others_treedef: Any
    n_candidates: int  # likeliest tokens to sample from: top-k, or the vocabulary

    def states(self, cache: list[jax.Array], others: list[Any]) -> tuple[Any, Any]:
        """Return the states of caches and of all other variables."""
        return (
            jax.tree.unflatten(self.cache_treedef, cache),
            jax.tree.unflatten(self.others_treedef, others),
        )


def open_caches(
    model: Decoder, batch_shape: tuple[int, ...], top_k: int | None = None, **options: Any
) -> tuple[Form, list[jax.Array], list[Any]]:
    """Return a model's form, empty caches, and all other arrays."""
    # Flat arrays, since flattening a model at each call takes longer than a step.
    own: Any = nnx.merge(*nnx.split(model))
    own.init_cache(batch_shape, **options)
    parts: Any = nnx.split(own, nnx.Cache, ...)
    graphdef, cache_state, other_state = parts
    cache, cache_treedef = jax.tree.flatten(cache_state)
    others, others_treedef = jax.tree.flatten(other_state)
    n_candidates = top_k or own.config.vocab_size
    return Form(graphdef, cache_treedef, others_treedef, n_candidates), cache, others


def feed_tokens(
    graphdef: Any, cache: Any, others: Any, tokens: Array, segments: Array | None = None
) -> tuple[Any, jax.Array]:
    """Continue sequences with tokens; return the caches, and the logits after the last token.

    The decoder with caches is split into graph, caches and other state.
    """
    model = nnx.merge(graphdef, cache, others)
    z = model.hidden(
        model.embed(tokens), deterministic=True, decode=True, segments=segments, tokens=tokens
    )
    return nnx.state(model, nnx.Cache), model.unembed(z[..., -1, :])


_TOKENS_IN_BLOCK = 32
"""Tokens whose noise is sampled together; bounds memory and does not change the tokens."""


def _prefill(
    graphdef: Any, cache: Any, others: Any, prompt: Array, lengths: Array | None
) -> tuple[Any, jax.Array]:
    """Continue sequences with prompts of any length, in windows up to the context."""
    window, length = nnx.merge(graphdef, cache, others).config.context, prompt.shape[-1]
    inputs: tuple[jax.Array, ...] = (jnp.asarray(prompt),)
    if lengths is not None:
        # Left padding, so that all sequences end together; segment -1 hides it.
        padding = (length - jnp.clip(lengths, 1, length))[..., None]
        place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), prompt.shape) - padding
        tokens = jnp.take_along_axis(inputs[0], jnp.maximum(place, 0), -1)
        inputs = tokens, jnp.where(place < 0, -1, 0)
    # The first window is the one that may be shorter: a scan needs equal lengths.
    first = (length - 1) % window + 1
    carry = feed_tokens(graphdef, cache, others, *(a[..., :first] for a in inputs))
    if first == length:
        return carry
    windows = [a[..., first:].reshape(*prompt.shape[:-1], -1, window) for a in inputs]

    def step(
        carry: tuple[Any, jax.Array], inputs: list[jax.Array]
    ) -> tuple[tuple[Any, jax.Array], None]:
        return feed_tokens(graphdef, carry[0], others, *inputs), None

    carry, _ = jax.lax.scan(step, carry, [jnp.moveaxis(a, -2, 0) for a in windows])
    return carry


def _split(key: Array, n: int) -> Array:
    """Split keys into `n`, ``[n]`` or, for keys per sequence, ``[n, *batch]``."""
    if key.shape == ():
        return jax.random.split(key, n)
    by_sequence = jax.vmap(lambda k: jax.random.split(k, n))(key.ravel())
    return jnp.moveaxis(by_sequence, 1, 0).reshape(n, *key.shape)


def _fill_block(keys: Array, size: int) -> Array:
    """Repeat a key to fill a block; surplus samples are discarded."""
    if len(keys) >= size:
        return keys
    return jnp.concatenate([keys, jnp.repeat(keys[:1], size - len(keys), 0)])


_LEAST_TEMPERATURE = 1e-6
"""Lower bound for the temperature, so that dividing logits by it cannot overflow."""


def sample_tokens(logits: Array, noise: Array, temperature: Array | None) -> jax.Array:
    """Sample a token per sequence from logits plus noise, as in `jax.random.categorical`.

    The noise is for all tokens, or for the likeliest ones in `top_k` sampling. A temperature of
    None, or of 0 for a sequence, adds no noise.
    """
    logits, n = logits.astype(jnp.float32), noise.shape[-1]
    if temperature is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    warmth = jnp.broadcast_to(temperature, logits.shape[:-1])[..., None]

    def choice_of(logits: Array) -> jax.Array:
        warm = noise + logits / jnp.maximum(warmth, _LEAST_TEMPERATURE)
        return jnp.argmax(jnp.where(warmth > 0, warm, logits), -1)

    if n == logits.shape[-1]:  # all tokens, and no need to sort them
        return choice_of(logits).astype(jnp.int32)
    likeliest, tokens = jax.lax.top_k(logits, n)
    choice = choice_of(likeliest)
    return jnp.take_along_axis(tokens, choice[..., None], -1)[..., 0].astype(jnp.int32)


def noise_of(keys: Array, texts: tuple[int, ...], n: int) -> jax.Array:
    """Return noise per sequence, ``[*texts, n]``, from a shared key or a key per sequence."""
    if keys.shape == ():
        return jax.random.gumbel(keys, (*texts, n), jnp.float32)
    each = jax.vmap(lambda key: jax.random.gumbel(key, (n,), jnp.float32))
    return each(keys.ravel()).reshape(*texts, n)


def _sample_first(
    graphdef: Any,
    cache: Any,
    others: Any,
    prompt: Array,
    lengths: Array | None,
    key: Array,
    temperature: Array | None,
    top_k: int,
) -> tuple[Any, jax.Array]:
    cache, logits = _prefill(graphdef, cache, others, prompt, lengths)
    return cache, sample_tokens(logits, noise_of(key, prompt.shape[:-1], top_k), temperature)


def block(
    graphdef: Any,
    cache: Any,
    others: Any,
    token: jax.Array,
    keys: Array,
    temperature: Array | None,
    top_k: int,
    segments: Array | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """Generate a block; return the caches, the last tokens, and all tokens ``[keys, *batch]``.

    There is one key per token, ``[keys]``, or per token and sequence, ``[keys, *batch]``.
    """

    def step(carry: tuple[Any, jax.Array], noise: Any) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, token = carry
        cache, logits = feed_tokens(graphdef, cache, others, token[..., None], segments)
        token = sample_tokens(logits, noise, temperature)
        return (cache, token), token

    # Sample noise for many tokens at once: per step it would take as long as everything else.
    noise = jax.vmap(lambda keys: noise_of(keys, token.shape, top_k))(keys)
    (cache, token), tokens = jax.lax.scan(step, (cache, token), noise)
    return cache, token, tokens


@functools.partial(jax.jit, static_argnames=("graphdef", "n_tokens", "top_k"))
def _generate(
    graphdef: Any,
    state: Any,
    prompt: Array,
    lengths: Array | None,
    key: Array,
    temperature: Array | None,
    *,
    n_tokens: int,
    top_k: int | None,
) -> jax.Array:
    """Return the new tokens, ``[*batch, n_tokens]``, at least one per sequence."""
    model = nnx.merge(graphdef, state)
    model.init_cache(prompt.shape[:-1])
    parts: Any = nnx.split(model, nnx.Cache, ...)
    graphdef, cache, others = parts
    n_candidates = top_k or model.config.vocab_size

    keys = _split(key, n_tokens)  # [n_tokens], or [n_tokens, *batch]
    cache, first = _sample_first(
        graphdef, cache, others, prompt, lengths, keys[0], temperature, n_candidates
    )

    # All later tokens come from whole blocks, so that the program has one copy of the decoder for
    # them; surplus tokens of the last block are cut off.
    n_later = n_tokens - 1
    block_size = min(max(n_later, 1), _TOKENS_IN_BLOCK)
    n_blocks = -(-n_later // block_size)
    later_keys = _fill_block(keys[1:], n_blocks * block_size)
    keys_of_blocks = later_keys.reshape(n_blocks, block_size, *keys.shape[1:])

    def sample_block(
        carry: tuple[Any, jax.Array], keys: Any
    ) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, last = carry
        cache, last, tokens = block(graphdef, cache, others, last, keys, temperature, n_candidates)
        return (cache, last), tokens

    _, blocks = jax.lax.scan(sample_block, (cache, first), keys_of_blocks)
    later = blocks.reshape(n_blocks * block_size, *first.shape)[:n_later]  # [n_later, *batch]
    return jnp.concatenate([first[..., None], jnp.moveaxis(later, 0, -1)], -1)


@functools.partial(jax.jit, static_argnames="form")
def _begin_sequences(
    cache: list[jax.Array],
    others: list[Any],
    prompt: Array,
    lengths: Array | None,
    key: Array,
    temperature: Array | None,
    *,
    form: Form,
) -> tuple[list[jax.Array], jax.Array]:
    """Return the caches after prompts, and the next tokens, ``[*batch, 1]``."""
    states = form.states(cache, others)
    new, token = _sample_first(
        form.graphdef, *states, prompt, lengths, key, temperature, form.n_candidates
    )
    return jax.tree.leaves(new), token[..., None]


@functools.partial(jax.jit, static_argnames="form")
def _continue_sequences(
    cache: list[jax.Array],
    others: list[Any],
    last: jax.Array,
    keys: Array,
    temperature: Array | None,
    *,
    form: Form,
) -> tuple[list[jax.Array], jax.Array]:
    """Continue from last tokens ``[*batch, 1]``; return caches and tokens ``[*batch, keys]``."""
    states = form.states(cache, others)
    new, _, tokens = block(
        form.graphdef, *states, last[..., 0], keys, temperature, form.n_candidates
    )
    return jax.tree.leaves(new), jnp.moveaxis(tokens, 0, -1)

"""Decoders: causal language models that generate with a cache."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from lutjax import ops, sharding
from lutjax.arguments import require_array
from lutjax.values import Array, as_int32, is_concrete


class Decoder(nnx.Module):
    """Base of causal language models, with what they generate.

    A decoder has the methods ``_vectors()``, the vectors of all tokens, ``_hidden(z, tokens, decode, segments, deterministic=, rngs=)``,
    ``unembed(hidden)``, ``init_cache(batch_shape)`` and ``take_in(one, slot)``, which is for `Slots`, and a ``config`` with ``vocab_size``
    and ``context``.
    """

    config: Any
    unembed: Any
    init_cache: Any
    take_in: Any
    _vectors: Any
    _hidden: Any

    def __call__(
        self,
        tokens: Int[Array, "*batch length"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
        segments: Int[Array, "*#batch length"] | None = None,
    ) -> Float[jax.Array, "*batch length vocab"]:
        """Logits of the token after each.

        Args:
          tokens: token ids, of any length. An id that does not exist is taken for the nearest that does.
          deterministic: no dropout, and the running averages in batch normalization. Takes precedence
            over the model's own mode: training, unless `nnx.view` or `eval` changed it.
          rngs: what dropout draws from: its ``dropout`` stream, or a key, with which a training step is a
            function of its arguments alone.
          decode: `tokens` continue what the caches hold; see `init_cache`.
          segments: ids ``[*batch, length]``: a token sees those of its own segment alone, as if each were a text of its own. So texts
            are packed one after the other for training. While decoding ids are 0 and above, 0 by default, and negative ones are
            padding, which sees nothing and is not seen.

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
        """Logits for vectors in place of tokens; the rest as in a call. A model with a memory reads it by the `tokens` of the vectors."""
        hidden = self.hidden(
            z, deterministic=deterministic, rngs=rngs, decode=decode, segments=segments, tokens=tokens
        )
        return self.unembed(hidden).astype(hidden.dtype)

    def embed(self, tokens: Int[Array, "*batch length"]) -> Float[jax.Array, "*batch length features"]:
        """Return the vectors of tokens."""
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
        """Return the output of the layers for vectors in place of tokens: the input of `unembed`; the rest as in `from_embedded`."""
        if rngs is not None and not isinstance(rngs, nnx.Rngs):
            rngs = nnx.Rngs(dropout=jnp.asarray(rngs))  # a stream, so that each layer draws another mask
        z = jnp.asarray(z)
        if segments is not None:
            lengths = z.shape[:-2], z.shape[-2], z.shape[-2]
            segments, _ = ops.segments(type(self).__name__, segments, segments, *lengths, ("segments",) * 2)
        y: jax.Array = self._hidden(z, tokens, decode, segments, deterministic=deterministic, rngs=rngs)
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
        """Continues texts.

        The prompt fills the caches of the layers, a window of at most ``config.context`` tokens at a time, so that memory and the time of a token
        do not grow with its length. Then each token costs one row of pairs. The model
        is not changed, and compiled once for each shape, `n_tokens` and `top_k`.

        Args:
          prompt_tokens: the texts so far, at least one token each; longer than the context is fine. Or a list of texts of any
            lengths, ``[tokens]`` each.
          n_tokens: how many tokens to add.
          key: a key of `jax.random`; or one for each text, ``[*batch]``, which then is continued as alone with its key, up to rounding.
          temperature: logits are divided by it before drawing; 0 takes the likeliest token.
          top_k: draws only from that many of the likeliest tokens; from all by default.
          lengths: number of tokens of each text, ``[*batch]``, from 1 on; what comes after them in `prompt_tokens` is padding, which
            changes no result: each text is continued as alone, up to rounding. None: texts are as long as the array. The model is
            compiled once for all lengths.

        Returns:
          The new tokens, int32.

        Raises:
          ValueError: an argument is out of range, or a prompt is empty.

        Source: docs/semantics.md, section 5.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from flax import nnx
          >>> from lutjax.models import GPT, GPTConfig
          >>> model = GPT(GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2), rngs=nnx.Rngs(0))
          >>> model.generate([jnp.asarray([1, 2, 3]), jnp.asarray([4])], 5, key=jax.random.key(0)).shape
          (2, 5)
        """
        prompt, lengths, key, warmth = self._checked(
            prompt_tokens, lengths, n_tokens, key, temperature, top_k
        )
        if n_tokens == 0:
            return jnp.zeros((*prompt.shape[:-1], 0), jnp.int32)
        graphdef, state = nnx.split(self)
        draw = functools.partial(_generate, graphdef, n_tokens=n_tokens, top_k=top_k)
        tokens: jax.Array = sharding.divided_by_compiler(
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
        """Return an iterator over the tokens that `generate` returns, some at a time, as soon as they are drawn.

        The first comes alone, and the device draws the next ones while the caller looks at those before. Arguments and errors are those of `generate`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from flax import nnx
          >>> from lutjax.models import GPT, GPTConfig
          >>> model = GPT(GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2), rngs=nnx.Rngs(0))
          >>> parts = model.stream(jnp.asarray([1, 2, 3]), 40, key=jax.random.key(0))
          >>> [part.shape for part in parts]
          [(1,), (32,), (7,)]
        """
        prompt, lengths, key, warmth = self._checked(
            prompt_tokens, lengths, n_tokens, key, temperature, top_k
        )
        return self._streamed(prompt, lengths, n_tokens, key, warmth, top_k)

    def _streamed(
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
        graphdef, state = nnx.split(self)
        model = nnx.merge(graphdef, state)
        model.init_cache(prompt.shape[:-1])
        parts: Any = nnx.split(model, nnx.Cache, ...)
        # Arrays alone go in and out: states are slow to take apart for each part.
        cache, caches = jax.tree.flatten(parts[1])
        kept, others = jax.tree.flatten(parts[2])
        static = {"graphdef": parts[0], "caches": caches, "others": others, "top_k": top_k}

        def divided(function: Any) -> Any:
            whole = [jax.sharding.PartitionSpec()] * len(cache)
            return sharding.divided_by_compiler(
                functools.partial(function, **static), lambda *_: (whole, sharding.spec_of(prompt))
            )

        keys = _split(key, n_tokens)
        cache, part = divided(_begun)(cache, kept, prompt, lengths, keys[0], temperature)
        done, last = 1, part
        while done < n_tokens:
            ahead = _of_block(keys[done : done + _TOKENS_IN_BLOCK], _TOKENS_IN_BLOCK)
            cache, tokens = divided(_went_on)(cache, kept, last, ahead, temperature)
            last = tokens[..., -1:]
            yield part
            part = tokens[..., : n_tokens - done]
            done += part.shape[-1]
        yield part

    def _checked(
        self,
        prompt: Array | Sequence[Array],
        lengths: Array | None,
        n_tokens: int,
        key: Array,
        temperature: float | int,
        top_k: int | None,
    ) -> tuple[jax.Array, jax.Array | None, Array, Array | None]:
        """Return the prompt, lengths, keys and the temperature, None for 0, of `generate`; raise its errors."""
        prompt, lengths = _padded(prompt, lengths)
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
                f"generate: top_k is {top_k}; it must be from 1 to the {vocab} tokens there are."
            )
        key = typed_key("generate", key)
        if key.shape not in ((), texts):
            raise ValueError(
                f"generate: key has shape {list(key.shape)}; give one key, or one for each text, {list(texts)}."
            )
        return jnp.asarray(prompt), lengths, key, None if temperature == 0 else jnp.float32(temperature)


def _check_tokens(where: str, tokens: Array) -> None:
    """Raise ValueError if tokens are not an array of integers with at least one axis."""
    require_array(where, "tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim < 1:
        raise ValueError(
            f"{where}: tokens is {tokens.dtype}{list(tokens.shape)}; expected integer ids [..., length]."
        )


def check_temperature(where: str, temperature: float | int) -> None:
    """Raise ValueError if a temperature is negative or NaN."""
    if not temperature >= 0:
        raise ValueError(
            f"{where}: temperature is {temperature}; it must not be negative (0: the likeliest token)."
        )


def typed_key(where: str, key: Array) -> Array:
    """Return a key of `jax.random`, or an array of keys, with its type, of a key or its data."""
    require_array(where, "key", key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(jnp.asarray(key))


def _padded(prompt: Array | Sequence[Array], lengths: Array | None) -> tuple[Array, Array | None]:
    """Return texts as one array and the length of each, None if they are equal; of a list of texts with zeros after them."""
    if not isinstance(prompt, list | tuple):
        return cast("Array", prompt), lengths
    if lengths is not None:
        raise ValueError(
            "generate: lengths goes with one array of prompts; a list has texts of their own lengths."
        )
    if not prompt:
        raise ValueError("generate: prompt_tokens is an empty list; give at least one text.")
    texts = [np.asarray(text) for text in prompt]
    for k, text in enumerate(texts):
        if text.ndim != 1 or not text.size or not np.issubdtype(text.dtype, np.integer):
            raise ValueError(
                f"generate: prompt_tokens[{k}] is {text.dtype}{list(text.shape)}; expected integer ids [tokens], at least one."
            )
    sizes = np.asarray([text.size for text in texts], np.int32)
    found = np.zeros((len(texts), sizes.max()), np.int32)
    for row, text in zip(found, texts, strict=True):
        row[: text.size] = np.clip(text, *_INT32)
    return found, None if np.all(sizes == sizes.max()) else sizes


_INT32 = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def _check_lengths(prompt: Array, lengths: Array) -> None:
    """Raise ValueError if there is not one length for each text, or one that is known is not possible."""
    ops.integers(
        "generate", "lengths", lengths, prompt.ndim - 1, f"{list(prompt.shape[:-1])}, one of each text"
    )
    ops.require(
        lengths.shape == prompt.shape[:-1],
        "generate",
        "lengths",
        lengths,
        f"prompt_tokens is {list(prompt.shape)}, so expected {list(prompt.shape[:-1])}, one of each text",
    )
    if is_concrete(lengths):
        for at, length in np.ndenumerate(np.asarray(lengths)):
            if not 1 <= length <= prompt.shape[-1]:
                raise ValueError(
                    f"generate: lengths{list(at)} is {length}; it must be from 1 to the {prompt.shape[-1]} tokens of a prompt."
                )


def fed(
    graphdef: Any, cache: Any, kept: Any, tokens: Array, segments: Array | None = None
) -> tuple[Any, jax.Array]:
    """Continue texts with tokens; return the caches, and the logits of the token after the last.

    Args:
      graphdef, cache, kept: parts of a decoder with caches, as ``nnx.split(model, nnx.Cache, ...)`` gives them.
      tokens: of each text, at least one.
      segments: of tokens, as a call of the model takes them.
    """
    model = nnx.merge(graphdef, cache, kept)
    z = model.hidden(model.embed(tokens), deterministic=True, decode=True, segments=segments, tokens=tokens)
    return nnx.state(model, nnx.Cache), model.unembed(z[..., -1, :])


_TOKENS_IN_BLOCK = 32
"""Tokens whose noise is drawn together; it bounds the memory and changes no token."""


def _prefilled(
    graphdef: Any, cache: Any, kept: Any, prompt: Array, lengths: Array | None
) -> tuple[Any, jax.Array]:
    """Continue texts with prompts of any length as `fed` does, a window of at most the context at a time."""
    window, length = nnx.merge(graphdef, cache, kept).config.context, prompt.shape[-1]
    given: tuple[jax.Array, ...] = (jnp.asarray(prompt),)
    if lengths is not None:  # all texts end at the same place, with padding before them
        padding = (length - jnp.clip(lengths, 1, length))[..., None]
        place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), prompt.shape) - padding
        tokens = jnp.take_along_axis(given[0], jnp.maximum(place, 0), -1)
        given = tokens, jnp.where(place < 0, -1, 0)
    first = (length - 1) % window + 1
    found = fed(graphdef, cache, kept, *(a[..., :first] for a in given))
    if first == length:
        return found
    windows = [a[..., first:].reshape(*prompt.shape[:-1], -1, window) for a in given]

    def step(carry: tuple[Any, jax.Array], given: list[jax.Array]) -> tuple[tuple[Any, jax.Array], None]:
        return fed(graphdef, carry[0], kept, *given), None

    found, _ = jax.lax.scan(step, found, [jnp.moveaxis(a, -2, 0) for a in windows])
    return found


def _split(key: Array, n: int) -> Array:
    """Return keys of `n` draws, ``[n]`` or, of keys of each text, ``[n, *batch]``."""
    if key.shape == ():
        return jax.random.split(key, n)
    return jnp.moveaxis(jax.vmap(lambda k: jax.random.split(k, n))(key.ravel()), 1, 0).reshape(n, *key.shape)


def _of_block(keys: Array, size: int) -> Array:
    """Return as many keys as a block has, by repeating one: more are drawn than are wanted."""
    return jnp.concatenate([keys, jnp.repeat(keys[:1], size - len(keys), 0)]) if len(keys) < size else keys


_LEAST_TEMPERATURE = 1e-6
"""Temperature below which all are alike, so that no logit that is divided by it overflows."""


def drawn(logits: Array, noise: Array, temperature: Array | None) -> jax.Array:
    """Draw a token of each text: the likeliest after noise is added, as `jax.random.categorical` does.

    Args:
      noise: for all tokens, or for so many of the likeliest.
      temperature: of all texts, or of each; None, or 0 of a text, adds no noise.
    """
    logits, n = logits.astype(jnp.float32), noise.shape[-1]
    if temperature is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    warmth = jnp.broadcast_to(temperature, logits.shape[:-1])[..., None]

    def choice_of(logits: Array) -> jax.Array:
        warm = noise + logits / jnp.maximum(warmth, _LEAST_TEMPERATURE)
        return jnp.argmax(jnp.where(warmth > 0, warm, logits), -1)

    if n == logits.shape[-1]:
        return choice_of(logits).astype(jnp.int32)
    likeliest, tokens = jax.lax.top_k(logits, n)
    choice = choice_of(likeliest)
    return jnp.take_along_axis(tokens, choice[..., None], -1)[..., 0].astype(jnp.int32)


def noise_of(keys: Array, texts: tuple[int, ...], n: int) -> jax.Array:
    """Return noise for a token of each text, ``[*texts, n]``, of one key or of those of the texts."""
    if keys.shape == ():
        return jax.random.gumbel(keys, (*texts, n), jnp.float32)
    each = jax.vmap(lambda key: jax.random.gumbel(key, (n,), jnp.float32))
    return each(keys.ravel()).reshape(*texts, n)


def _first(
    graphdef: Any,
    cache: Any,
    kept: Any,
    prompt: Array,
    lengths: Array | None,
    key: Array,
    temperature: Array | None,
    top_k: int,
) -> tuple[Any, jax.Array]:
    """Return the caches after prompts, and the token after each."""
    cache, logits = _prefilled(graphdef, cache, kept, prompt, lengths)
    return cache, drawn(logits, noise_of(key, prompt.shape[:-1], top_k), temperature)


def block(
    graphdef: Any,
    cache: Any,
    kept: Any,
    token: jax.Array,
    keys: Array,
    temperature: Array | None,
    top_k: int,
    segments: Array | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """Return the caches after a token of each text, the last one that follows it, and all, ``[keys, *batch]``.

    Args:
      graphdef, cache, kept, segments: as of `fed`.
      keys: of each token that is drawn, ``[keys]``, or of it and each text, ``[keys, *batch]``.
      temperature: as of `drawn`.
    """

    def step(carry: tuple[Any, jax.Array], noise: Any) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, token = carry
        cache, logits = fed(graphdef, cache, kept, token[..., None], segments)
        token = drawn(logits, noise, temperature)
        return (cache, token), token

    # The noise of many tokens at once: drawn in each step it takes as long as all else.
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
    model = nnx.merge(graphdef, state)
    model.init_cache(prompt.shape[:-1])
    parts: Any = nnx.split(model, nnx.Cache, ...)
    graphdef, cache, kept = parts
    among = top_k or model.config.vocab_size

    def steps(carry: tuple[Any, jax.Array], keys: Any) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, last, tokens = block(graphdef, carry[0], kept, carry[1], keys, temperature, among)
        return (cache, last), tokens

    keys = _split(key, n_tokens)
    cache, first = _first(graphdef, cache, kept, prompt, lengths, keys[0], temperature, among)
    size = min(max(n_tokens - 1, 1), _TOKENS_IN_BLOCK)
    later = _of_block(keys[1:], (n_tokens - 1 + size - 1) // size * size)
    _, others = jax.lax.scan(steps, (cache, first), later.reshape(-1, size, *keys.shape[1:]))
    others = others.reshape(-1, *first.shape)[: n_tokens - 1]
    return jnp.concatenate([first[..., None], jnp.moveaxis(others, 0, -1)], -1)


_STATIC = ("graphdef", "caches", "others", "top_k")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _begun(
    cache: list[jax.Array],
    kept: list[jax.Array],
    prompt: Array,
    lengths: Array | None,
    key: Array,
    temperature: Array | None,
    *,
    graphdef: Any,
    caches: Any,
    others: Any,
    top_k: int | None,
) -> tuple[list[jax.Array], jax.Array]:
    """Return the caches after prompts, and the token after each, ``[*batch, 1]``."""
    states = jax.tree.unflatten(caches, cache), jax.tree.unflatten(others, kept)
    among = top_k or nnx.merge(graphdef, *states).config.vocab_size
    new, token = _first(graphdef, *states, prompt, lengths, key, temperature, among)
    return jax.tree.leaves(new), token[..., None]


@functools.partial(jax.jit, static_argnames=_STATIC)
def _went_on(
    cache: list[jax.Array],
    kept: list[jax.Array],
    last: jax.Array,
    keys: Array,
    temperature: Array | None,
    *,
    graphdef: Any,
    caches: Any,
    others: Any,
    top_k: int | None,
) -> tuple[list[jax.Array], jax.Array]:
    """Return the caches after the last tokens, ``[*batch, 1]``, and those that follow, ``[*batch, keys]``."""
    states = jax.tree.unflatten(caches, cache), jax.tree.unflatten(others, kept)
    among = top_k or nnx.merge(graphdef, *states).config.vocab_size
    new, _, tokens = block(graphdef, *states, last[..., 0], keys, temperature, among)
    return jax.tree.leaves(new), jnp.moveaxis(tokens, 0, -1)

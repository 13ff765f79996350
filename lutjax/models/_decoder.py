"""Decoders: causal language models that generate with a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from lutjax import _meshes
from lutjax._typing import Array


class Decoder(nnx.Module):
    """Base of causal language models, with what they generate.

    A decoder has the methods ``_vectors()``, the vectors of all tokens, ``_hidden(z, decode, deterministic=, rngs=)``,
    ``unembed(hidden)`` and ``init_cache(batch_shape)``, and a ``config`` with ``vocab_size``.
    """

    config: Any
    unembed: Any
    init_cache: Any
    _vectors: Any
    _hidden: Any

    def __call__(
        self,
        tokens: Int[Array, "*batch length"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
    ) -> Float[jax.Array, "*batch length vocab"]:
        """Logits of the token after each.

        Args:
          tokens: token ids, of any length. An id that does not exist is taken for the nearest that does.
          deterministic: no dropout, and the running averages in batch normalisation. Takes precedence
            over the model's own mode: training, unless `nnx.view` or `eval` changed it.
          rngs: what dropout draws from: its ``dropout`` stream, or a key, with which a training step is a
            function of its arguments alone.
          decode: `tokens` continue what the caches hold; see `init_cache`.

        Raises:
          ValueError: `tokens` is not an array of integers with at least one axis.
        """
        return self.from_embedded(self.embed(tokens), deterministic=deterministic, rngs=rngs, decode=decode)

    def from_embedded(
        self,
        z: Float[Array, "*batch length features"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
    ) -> Float[jax.Array, "*batch length vocab"]:
        """Logits for vectors in place of tokens; the rest as in a call."""
        hidden = self.hidden(z, deterministic=deterministic, rngs=rngs, decode=decode)
        return self.unembed(hidden).astype(hidden.dtype)

    def embed(self, tokens: Int[Array, "*batch length"]) -> Float[jax.Array, "*batch length features"]:
        """The vectors of tokens."""
        _check_tokens(type(self).__name__, tokens)
        return _meshes.rows(self._vectors(), jnp.asarray(tokens))

    def hidden(
        self,
        z: Float[Array, "*batch length features"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
        decode: bool | None = None,
    ) -> Float[jax.Array, "*batch length features"]:
        """Return the output of the layers for vectors in place of tokens: the input of `unembed`; the rest as in a call."""
        if rngs is not None and not isinstance(rngs, nnx.Rngs):
            rngs = nnx.Rngs(dropout=jnp.asarray(rngs))  # a stream, so that each layer draws another mask
        y: jax.Array = self._hidden(jnp.asarray(z), decode, deterministic=deterministic, rngs=rngs)
        return y

    def generate(
        self,
        prompt_tokens: Int[Array, "*batch prompt"],
        n_tokens: int,
        *,
        key: Array,
        temperature: float | int = 1.0,
        top_k: int | None = None,
    ) -> Int[jax.Array, "*batch {n_tokens}"]:
        """Continues texts.

        The prompt fills the caches of the layers, and then each token costs one row of pairs. The model
        is not changed, and compiled once for each shape, `n_tokens` and `top_k`.

        Args:
          prompt_tokens: the texts so far, at least one token each; longer than the context is fine.
          n_tokens: how many tokens to add.
          key: a key of `jax.random`.
          temperature: logits are divided by it before drawing; 0 takes the likeliest token.
          top_k: draws only from that many of the likeliest tokens; from all by default.

        Returns:
          The new tokens, int32.

        Raises:
          ValueError: an argument is out of range, or a prompt is empty.
        """
        _check_tokens("generate", prompt_tokens)
        vocab = self.config.vocab_size
        if prompt_tokens.shape[-1] == 0:
            raise ValueError("generate: the prompt is empty; give at least one token to continue.")
        if n_tokens < 0:
            raise ValueError(f"generate: n_tokens is {n_tokens}; it must not be negative.")
        if not temperature >= 0:
            raise ValueError(
                f"generate: temperature is {temperature}; it must not be negative (0: the likeliest token)."
            )
        if top_k is not None and not 1 <= top_k <= vocab:
            raise ValueError(
                f"generate: top_k is {top_k}; it must be from 1 to the {vocab} tokens there are."
            )
        if n_tokens == 0:
            return jnp.zeros((*prompt_tokens.shape[:-1], 0), jnp.int32)
        graphdef, state = nnx.split(self)
        draw = functools.partial(_generate, graphdef, n_tokens=n_tokens, top_k=top_k)
        tokens: jax.Array = _meshes.divided_by_compiler(
            draw, lambda _, prompt, *rest: _meshes.spec_of(prompt)
        )(state, jnp.asarray(prompt_tokens), key, None if temperature == 0 else jnp.float32(temperature))
        return tokens


def _check_tokens(where: str, tokens: Array) -> None:
    """Raise ValueError if tokens are not an array of integers with at least one axis."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim < 1:
        raise ValueError(
            f"{where}: tokens is {tokens.dtype}{list(tokens.shape)}; expected integer ids [..., length]."
        )


def fed(graphdef: Any, cache: Any, kept: Any, tokens: Array) -> tuple[Any, jax.Array]:
    """Continue texts with tokens; return the caches, and the logits of the token after the last.

    Args:
      graphdef, cache, kept: parts of a decoder with caches, as ``nnx.split(model, nnx.Cache, ...)`` gives them.
      tokens: of each text, at least one.
    """
    model = nnx.merge(graphdef, cache, kept)
    z = model.hidden(model.embed(tokens), deterministic=True, decode=True)
    return nnx.state(model, nnx.Cache), model.unembed(z[..., -1, :])


_TOKENS_IN_BLOCK = 32
"""Tokens whose noise is drawn together; it bounds the memory and changes no token."""


@functools.partial(jax.jit, static_argnames=("graphdef", "n_tokens", "top_k"))
def _generate(
    graphdef: Any,
    state: Any,
    prompt: Array,
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

    def noise(key: Array) -> jax.Array:
        return jax.random.gumbel(key, (*prompt.shape[:-1], top_k or vocab), jnp.float32)

    def draw(logits: Array, noise: Array) -> jax.Array:
        """Draw a token: the likeliest after noise is added, as `jax.random.categorical` does."""
        logits = logits.astype(jnp.float32)
        if temperature is None:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        if top_k is None:
            return jnp.argmax(noise + logits / temperature, -1).astype(jnp.int32)
        likeliest, tokens = jax.lax.top_k(logits, top_k)
        choice = jnp.argmax(noise + likeliest / temperature, -1)
        return jnp.take_along_axis(tokens, choice[..., None], -1)[..., 0].astype(jnp.int32)

    def step(carry: tuple[Any, jax.Array], noise: Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, token = carry
        cache, logits = fed(graphdef, cache, kept, token[..., None])
        token = draw(logits, noise)
        return (cache, token), token

    def steps(carry: tuple[Any, jax.Array], keys: Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
        # The noise of many tokens at once: drawn in each step it takes as long as all else.
        return jax.lax.scan(step, carry, jax.vmap(noise)(keys))

    vocab = model.config.vocab_size
    keys = jax.random.split(key, n_tokens)
    cache, logits = fed(graphdef, cache, kept, prompt)
    first = draw(logits, noise(keys[0]))
    size = min(max(n_tokens - 1, 1), _TOKENS_IN_BLOCK)
    later = jnp.concatenate([keys[1:], jnp.repeat(keys[:1], (1 - n_tokens) % size, 0)])  # more than is wanted
    _, others = jax.lax.scan(steps, (cache, first), later.reshape(-1, size))
    others = others.reshape(-1, *first.shape)[: n_tokens - 1]
    return jnp.concatenate([first[..., None], jnp.moveaxis(others, 0, -1)], -1)

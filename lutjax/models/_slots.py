"""Slots of a running batch, which texts join and leave while the others go on."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from lutjax._typing import Array
from lutjax.models._decoder import Decoder, drawn, fed, noise_of, prefilled


class Slots:
    """Texts that are continued together, each from when it joins to when it leaves.

    There are as many places for texts as `n_slots`; each step draws a token of every text that is there. A text is continued as alone, up to
    rounding, whatever texts are beside it, and caches have the memory of `n_slots` texts. Nothing is compiled again when texts join and leave: a step is
    one program, and the reading of prompts one for each power of two of their lengths.

    Args:
      model: a `GPT` or `LUTTransformer`; later changes of it are not seen.
      n_slots: largest number of texts at a time.
      temperature, top_k: as in `generate`.

    Raises:
      ValueError: there is no slot, or an option is out of range.

    Source: docs/semantics.md, section 5.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from lutjax.models import GPT, GPTConfig, Slots
      >>> model = GPT(GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2), rngs=nnx.Rngs(0))
      >>> slots = Slots(model, 2, temperature=0)
      >>> first, _ = slots.join([1, 2, 3], key=jax.random.key(0))
      >>> second, _ = slots.join([4], key=jax.random.key(1))
      >>> sorted(slots.step()) == [first, second]
      True
      >>> slots.leave(first)
      >>> list(slots.step()) == [second]
      True
    """

    def __init__(
        self, model: Decoder, n_slots: int, *, temperature: float | int = 1.0, top_k: int | None = None
    ):
        if not isinstance(n_slots, int) or n_slots < 1:
            raise ValueError(f"Slots: n_slots is {n_slots!r}; there must be at least 1.")
        one_token = np.zeros((1,), np.int32)
        *_, warmth = model._checked(one_token, None, 0, jax.random.key(0), temperature, top_k)
        self.n_slots = n_slots
        self._among, self._temperature = top_k or model.config.vocab_size, warmth
        self._vocab_size, self._window = model.config.vocab_size, model.config.context
        many: Any = nnx.merge(*nnx.split(model))
        many.init_cache((n_slots,))
        parts: Any = nnx.split(many, nnx.Cache, ...)
        self._graphdef, self._cache, self._kept = parts
        self._last = jnp.zeros((n_slots,), jnp.int32)
        self._keys = jax.random.split(jax.random.key(0), n_slots)
        self._counts = np.zeros((n_slots,), np.int32)  # of tokens drawn of each text; 0 where there is none

    @property
    def free(self) -> int:
        """Number of slots without a text."""
        return int((self._counts == 0).sum())

    def join(self, prompt: Int[Array, " prompt"] | list[int], *, key: Array) -> tuple[int, int]:
        """Read a prompt into a slot; return the number of the slot and the first token that follows.

        Args:
          prompt: at least one token; longer than the context is fine.
          key: of the draws of this text.

        Raises:
          ValueError: there is no free slot, or the prompt is no list of tokens.
        """
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"Slots: prompt is {tokens.dtype}{list(tokens.shape)}; expected integer ids [tokens], at least one."
            )
        if not self.free:
            raise ValueError(f"Slots: all {self.n_slots} slots have a text; let one leave first.")
        slot = int(np.argmin(self._counts != 0))
        length = 1 << (tokens.size - 1).bit_length()
        padded = np.zeros((1, length), np.int32)
        padded[0, : tokens.size] = np.clip(tokens, 0, self._vocab_size - 1)
        self._cache, self._last, self._keys = _joined(
            self._cache,
            self._kept,
            self._last,
            self._keys,
            padded,
            np.asarray([tokens.size], np.int32),
            key,
            np.int32(slot),
            self._temperature,
            graphdef=self._graphdef,
            among=self._among,
        )
        self._counts[slot] = 1
        return slot, int(self._last[slot])

    def step(self) -> Mapping[int, int]:
        """Draw the next token of each text; return the tokens by the number of their slots."""
        self._cache, self._last = _stepped(
            self._cache,
            self._kept,
            self._last,
            self._keys,
            self._counts.copy(),
            self._temperature,
            graphdef=self._graphdef,
            among=self._among,
        )
        there = np.flatnonzero(self._counts)
        self._counts[there] += 1
        tokens = np.asarray(self._last)
        return {int(slot): int(tokens[slot]) for slot in there}

    def leave(self, slot: int) -> None:
        """Free the slot of a text.

        Raises:
          ValueError: there is no text in it.
        """
        if slot not in range(self.n_slots) or not self._counts[slot]:
            raise ValueError(
                f"Slots: slot is {slot}; the texts are in {np.flatnonzero(self._counts).tolist()}."
            )
        self._counts[slot] = 0


@functools.partial(jax.jit, static_argnames=("graphdef", "among"))
def _joined(
    cache: Any,
    kept: Any,
    last: jax.Array,
    keys: jax.Array,
    prompt: Array,
    lengths: Array,
    key: Array,
    slot: Array,
    temperature: Array | None,
    *,
    graphdef: Any,
    among: int,
) -> tuple[Any, jax.Array, jax.Array]:
    """Return caches, last tokens and keys with those of one more text."""
    many = nnx.merge(graphdef, cache, kept)
    one = nnx.merge(*nnx.split(many))
    one.init_cache((1,))
    parts: Any = nnx.split(one, nnx.Cache, ...)
    of_one, cache_of_one, kept_of_one = parts
    cache_of_one, logits = prefilled(of_one, cache_of_one, kept_of_one, prompt, jnp.asarray(lengths))
    many.take_in(nnx.merge(of_one, cache_of_one, kept_of_one), slot)
    token = drawn(logits, noise_of(_nth(key[None], jnp.zeros((1,), jnp.int32)), (1,), among), temperature)
    return nnx.state(many, nnx.Cache), last.at[slot].set(token[0]), keys.at[slot].set(key)


@functools.partial(jax.jit, static_argnames=("graphdef", "among"), donate_argnums=0)
def _stepped(
    cache: Any,
    kept: Any,
    last: jax.Array,
    keys: jax.Array,
    counts: Array,
    temperature: Array | None,
    *,
    graphdef: Any,
    among: int,
) -> tuple[Any, jax.Array]:
    """Return caches and tokens after one more token of each text; slots without one get padding."""
    counts = jnp.asarray(counts)
    segments = jnp.where(counts > 0, 0, -1)[:, None]
    cache, logits = fed(graphdef, cache, kept, last[:, None], segments)
    return cache, drawn(logits, noise_of(_nth(keys, counts), counts.shape, among), temperature)


def _nth(keys: Array, numbers: Array) -> jax.Array:
    """Return the keys of the tokens of these numbers, ``[n]`` each."""
    of_tokens: jax.Array = jax.vmap(jax.random.fold_in)(keys, numbers)
    return of_tokens

"""Continuous batching: sequences join and leave the slots of a running batch."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from lutjax.models._decoder import (
    Decoder,
    Form,
    block,
    check_temperature,
    feed_tokens,
    noise_of,
    open_caches,
    sample_tokens,
    typed_key,
)
from lutjax.models._pages import Pages, Text, n_entries
from lutjax.models.transformer import LUTTransformer
from lutjax.values import Array

_Places = tuple[Array, Array]  # block tables, and number of cached tokens per sequence


class Slots:
    """Continuous batch of sequences.

    A batch has `n_slots` slots, and each step samples tokens for every occupied slot. Each sequence
    continues as it does on its own, up to rounding: its tokens depend only on its prompt, key and
    temperature. Joining and leaving never recompiles. A step is one program per number of tokens,
    and prompts are processed in parts of few lengths, powers of two up to the context.

    Caches use memory for `n_slots` sequences, plus one for each prompt in progress; with
    `block_size`, for a block pool only.

    With `block_size`, a block pool stores the tokens of all sequences. Sequences with a common
    prefix share its blocks, which are computed and stored once, even if one sequence left before
    another joined. If a prefix ends within a block, the block is copied before it is written. When
    blocks run out, `begin`, `join`, `read` and `step` raise an error before anything runs: let a
    sequence leave, and call again.

    Args:
      model: a `GPT` or `LUTTransformer`; later model changes are ignored.
      n_slots: largest number of concurrent sequences.
      temperature, top_k: as in `generate`; each sequence may override the temperature.
      block_size: tokens per block in the pool, for a `LUTTransformer` with windowed attention.
        None: separate caches per sequence.
      n_blocks: number of blocks in the pool; by default enough for all slots.

    Raises:
      ValueError: n_slots is below 1, or an option is out of range or unsupported by the model.

    Source: docs/semantics.md, section 5.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from lutjax.models import GPT, GPTConfig, Slots
      >>> config = GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2)
      >>> model = GPT(config, rngs=nnx.Rngs(0))
      >>> slots = Slots(model, 2, temperature=0)
      >>> first, _ = slots.join([1, 2, 3], key=jax.random.key(0))
      >>> second, _ = slots.join([4], key=jax.random.key(1), temperature=0.7)
      >>> sorted(slots.step()) == [first, second]
      True
      >>> slots.leave(first)
      >>> {slot: tokens.shape for slot, tokens in slots.step(8).items()} == {second: (8,)}
      True
    """

    def __init__(
        self,
        model: Decoder,
        n_slots: int,
        *,
        temperature: float | int = 1.0,
        top_k: int | None = None,
        block_size: int | None = None,
        n_blocks: int | None = None,
    ):
        if not isinstance(n_slots, int) or n_slots < 1:
            raise ValueError(f"Slots: n_slots is {n_slots!r}; there must be at least 1.")
        model._validate_generation(
            np.zeros((1,), np.int32), None, 0, jax.random.key(0), temperature, top_k
        )
        self.n_slots = n_slots
        self._temperature = temperature
        self._vocab_size, self._context = model.config.vocab_size, model.config.context
        self._pages = _pages_of(model, n_slots, block_size, n_blocks)
        blocks = {"blocks": (self._pages.n_blocks, self._pages.size)} if self._pages else {}
        self._form, self._cache, self._others = open_caches(model, (n_slots,), top_k, **blocks)
        # A prompt is read into a cache of its own, which then moves into its slot.
        self._empty = [] if self._pages else open_caches(model, (1,))[1]
        self._last = jnp.zeros((n_slots,), jnp.int32)
        self._keys = jax.random.split(jax.random.key(0), n_slots)
        self._temperatures = np.zeros((n_slots,), np.float32)
        self._counts = np.zeros((n_slots,), np.int32)  # sampled tokens per slot; 0 if empty
        self._reading: dict[int, _Reading] = {}
        self._texts: dict[int, Text] = {}  # sequences in the block pool

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self.n_slots - len(self._used_slots)

    @property
    def reading(self) -> list[int]:
        """Slots with prompts in progress, in the order of their `begin` calls."""
        return list(self._reading)

    @property
    def _used_slots(self) -> list[int]:
        return sorted({*np.flatnonzero(self._counts).tolist(), *self._reading})

    def compile(self, count: int = 1) -> None:
        """Compile the programs for all prompt lengths and for steps, before any sequence joins.

        Args:
          count: number of tokens per step.

        Raises:
          ValueError: a slot is occupied.
        """
        if self._used_slots:
            raise ValueError(
                f"Slots: compile all before texts join; there are texts in {self._used_slots}."
            )
        powers = {1 << k for k in range((self._context - 1).bit_length())}
        for length in sorted({*powers, self._context}):
            slot, _ = self.join(np.zeros((length,), np.int32), key=jax.random.key(0))
            if length == 1:
                self.step(count)
            self.leave(slot)
            if self._pages:
                self._pages.forget()  # so that each prompt is processed in full
        if self._pages:
            self._cache = _copy_block(
                self._cache, self._others, np.int32(0), np.int32(0), form=self._form
            )

    def join(
        self,
        prompt: Int[Array, " prompt"] | list[int],
        *,
        key: Array,
        temperature: float | int | None = None,
    ) -> tuple[int, int]:
        """Process a prompt in a free slot; return the slot and the first generated token.

        Args:
          prompt: at least one token; may exceed the context.
          key: random key for this sequence.
          temperature: temperature of this sequence; by default the shared temperature.

        Raises:
          ValueError: no slot is free, the prompt is not a list of tokens, the temperature is
            negative, or the pool has too few free blocks.
        """
        slot = self.begin(prompt, key=key, temperature=temperature)
        try:
            while (token := self.read(slot)) is None:
                pass
        except ValueError:
            self.leave(slot)
            raise
        return slot, token

    def begin(
        self,
        prompt: Int[Array, " prompt"] | list[int],
        *,
        key: Array,
        temperature: float | int | None = None,
    ) -> int:
        """Reserve a slot for a prompt, which `read` then processes in parts; return the slot.

        Other sequences can continue between two parts, so a long prompt does not block them.
        Arguments and errors are the same as for `join`.

        Example:
          >>> import jax
          >>> from flax import nnx
          >>> from lutjax.models import GPT, GPTConfig, Slots
          >>> config = GPTConfig(vocab_size=10, features=8, context=8, n_layers=1, n_heads=2)
          >>> model = GPT(config, rngs=nnx.Rngs(0))
          >>> slots = Slots(model, 2)
          >>> slot = slots.begin([1, 2, 3] * 5, key=jax.random.key(0))
          >>> slots.reading == [slot], slots.read(slot)
          (True, None)
          >>> type(slots.read(slot)), slots.reading
          (<class 'int'>, [])
        """
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"Slots: prompt is {tokens.dtype}{list(tokens.shape)}; "
                "expected integer ids [tokens], at least one."
            )
        temperature = self._temperature if temperature is None else temperature
        check_temperature("Slots", temperature)
        key = typed_key("Slots", key)
        if key.shape != () or key.dtype != self._keys.dtype:
            raise ValueError(
                f"Slots: key is {key.dtype}{list(key.shape)}; "
                f"expected one key, {self._keys.dtype}[]."
            )
        if not self.free:
            raise ValueError(f"Slots: all {self.n_slots} slots have a text; let one leave first.")
        # The lowest one, so that the same calls give the same slots.
        slot = min(set(range(self.n_slots)).difference(self._used_slots))
        tokens = np.clip(tokens, 0, self._vocab_size - 1).astype(np.int32)
        if self._pages:
            self._pages.require(self._n_lacking(tokens), f"a prompt of {tokens.size} tokens needs")
            self._reading[slot], self._texts[slot] = _Reading([], key, []), Text(tokens.tolist())
        else:
            self._reading[slot] = _Reading(_split_prompt(tokens, self._context), key, self._empty)
        self._temperatures[slot] = temperature
        return slot

    def read(self, slot: int) -> int | None:
        """Process the next part of a prompt, at most as long as the context.

        Return the first generated token after the last part, else None.

        Raises:
          ValueError: the slot has no prompt in progress, or the pool has too few free blocks; the
            call may be repeated.
        """
        if slot not in self._reading:
            raise ValueError(f"Slots: slot is {slot}; prompts are being read in {self.reading}.")
        if self._pages:
            return self._read_pages(slot, self._pages)
        text = self._reading[slot]
        text.cache, logits = _read(text.cache, self._others, *text.parts.pop(0), form=self._form)
        if text.parts:
            return None
        batch = (self._cache, self._others, self._last, self._keys)
        sequence = (text.cache, logits, text.key, np.int32(slot), self._temperatures[slot])
        self._cache, self._last, self._keys = _join(*batch, *sequence, form=self._form)
        del self._reading[slot]
        self._counts[slot] = 1
        return int(self._last[slot])

    def step(self, count: int = 1) -> Mapping[int, Int[np.ndarray, " {count}"]]:
        """Sample the next tokens for all sequences with complete prompts; return them by slot.

        Args:
          count: number of tokens per sequence, in one program, compiled once for each count.

        Raises:
          ValueError: count is below 1, or the pool has too few free blocks: let a sequence leave,
            and call again.
        """
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"Slots: count is {count!r}; it must be at least 1.")
        occupied = np.flatnonzero(self._counts)
        if not occupied.size:
            return {}
        if self._pages and count > self._context:  # exceeds the block table
            first, second = self.step(self._context), self.step(count - self._context)
            return {slot: np.concatenate([first[slot], second[slot]]) for slot in first}
        places = self._extend_blocks(occupied, count)
        batch = (self._cache, self._others, self._last, self._keys)
        # Copies: a device may read a NumPy array after the call has returned.
        slots = (self._counts.copy(), self._temperatures.copy(), places)
        self._cache, self._last, sampled = _step_slots(*batch, *slots, count=count, form=self._form)
        self._counts[occupied] += count
        tokens = np.asarray(sampled)
        if self._pages:
            for slot in occupied.tolist():
                self._texts[slot].tokens += tokens[slot].tolist()
                self._pages.record_cached(self._texts[slot], count)
        return {int(slot): tokens[slot] for slot in occupied}

    def leave(self, slot: int) -> None:
        """Free a slot.

        Raises:
          ValueError: the slot is empty.
        """
        if slot not in self._used_slots:
            raise ValueError(f"Slots: slot is {slot}; the texts are in {self._used_slots}.")
        self._reading.pop(slot, None)
        self._counts[slot] = 0
        if self._pages:
            self._pages.leave(self._texts.pop(slot))

    @property
    def blocks(self) -> Mapping[str, int]:
        """Block counts for the pool: ``all``, ``free``, ``shared``; empty without `block_size`."""
        pages = self._pages
        if pages is None:
            return {}
        return {"all": pages.n_blocks, "free": pages.n_free, "shared": pages.n_shared}

    def _n_lacking(self, tokens: np.ndarray) -> int:
        """Return the required blocks for a prompt, or for the part in its window at a time."""
        assert self._pages is not None
        size = self._pages.size
        cached = self._pages.n_cached(tokens.tolist())
        return min(-(-tokens.size // size) - cached, n_entries(self._context, size))

    def _extend_blocks(self, occupied: np.ndarray, count: int) -> _Places | None:
        """Assign blocks for `count` more tokens; return all block tables, None without a pool."""
        if self._pages is None:
            return None
        texts = [self._texts[slot] for slot in occupied.tolist()]
        # Require the blocks of all sequences before any is assigned, so that an error changes
        # nothing.
        for text in texts:
            self._pages.slide(text)
        lacking = sum(self._pages.count_missing_blocks(text, count) for text in texts)
        self._pages.require(lacking, f"{count} more tokens of {len(texts)} texts need")
        for text in texts:
            self._pages.extend(text, count)
        return self._slot_places(range(self.n_slots))

    def _slot_places(self, slots: Sequence[int]) -> _Places:
        assert self._pages is not None
        texts = [self._texts.get(slot) for slot in slots]
        lengths = [0 if text is None else text.length for text in texts]
        return np.stack([self._pages.table(text) for text in texts]), np.asarray(lengths, np.int32)

    def _read_pages(self, slot: int, pages: Pages) -> int | None:
        text, reading = self._texts[slot], self._reading[slot]
        if not text.length:
            copied = pages.begin(text)
            if copied is not None:
                self._cache = _copy_block(
                    self._cache, self._others, *map(np.int32, copied), form=self._form
                )
        n = min(len(text.tokens) - text.length, self._context)
        pages.slide(text)
        pages.require(pages.count_missing_blocks(text, n), f"{n} more tokens of a prompt need")
        pages.extend(text, n)
        # Few lengths, so that few programs are compiled.
        padded = min(1 << (n - 1).bit_length(), self._context)
        part = np.zeros((1, padded), np.int32)
        part[0, :n] = text.tokens[text.length : text.length + n]
        self._cache, logits = _read_blocks(
            self._cache, self._others, part, np.int32(n), self._slot_places([slot]), form=self._form
        )
        pages.record_cached(text, n)
        if text.length < len(text.tokens):
            return None
        self._last, self._keys = _begin_slot(
            self._last,
            self._keys,
            logits,
            reading.key,
            np.int32(slot),
            self._temperatures[slot],
            n_candidates=self._form.n_candidates,
        )
        del self._reading[slot]
        self._counts[slot] = 1
        token = int(self._last[slot])
        text.tokens.append(token)
        return token


@dataclasses.dataclass
class _Reading:
    """Prompt in progress: remaining parts, sampling key, and current caches."""

    parts: list[tuple[np.ndarray, np.ndarray]]
    key: Array
    cache: list[jax.Array]


def _pages_of(model: Decoder, n_slots: int, block_size: Any, n_blocks: Any) -> Pages | None:
    """Return a block pool for the slots, or None without one; raise ValueError if unsupported."""
    for name, value in {"block_size": block_size, "n_blocks": n_blocks}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"Slots: {name} is {value!r}; there must be at least 1.")
    if block_size is None:
        if n_blocks is not None:
            raise ValueError(
                f"Slots: n_blocks is {n_blocks}, but block_size is not given; they go together."
            )
        return None
    if not isinstance(model, LUTTransformer) or model.config.memory != "window":
        what = "remembers counts" if isinstance(model, LUTTransformer) else "keeps keys and values"
        raise ValueError(
            f"Slots: block_size is {block_size}, but this {type(model).__name__} {what}; blocks "
            "require a LUTTransformer with memory='window'. Omit block_size."
        )
    context = model.config.context
    width = n_entries(context, block_size)
    return Pages(n_slots * width if n_blocks is None else n_blocks, block_size, context - 1, width)


def _set_places(model: Any, places: Any) -> None:
    tables, lengths = places
    model.block_tables.set_value(jnp.asarray(tables))
    model.cached_lengths.set_value(jnp.asarray(lengths))


def _split_prompt(tokens: np.ndarray, context: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split a prompt into parts; return their tokens and segments, ``[1, length]`` each.

    All parts have the length of the context, except the first, which starts with padding up to a
    power of two or the context.
    """
    first = (tokens.size - 1) % context + 1
    padding = min(1 << (first - 1).bit_length(), context) - first
    tokens = np.pad(tokens, (padding, 0))[None]
    segments = np.where(np.arange(tokens.size) < padding, -1, 0).astype(np.int32)[None]
    ends = range(padding + first, tokens.size + 1, context)
    parts = [slice(max(end - context, 0), end) for end in ends]
    return [(tokens[:, part], segments[:, part]) for part in parts]


@functools.partial(jax.jit, static_argnames="form")
def _read(
    cache: list[jax.Array], others: list[Any], tokens: Array, segments: Array, *, form: Form
) -> tuple[list[jax.Array], jax.Array]:
    """Process a part of a prompt; return the caches, and the logits for the next token."""
    new, logits = feed_tokens(form.graphdef, *form.states(cache, others), tokens, segments)
    return jax.tree.leaves(new), logits


@functools.partial(jax.jit, static_argnames="form", donate_argnums=0)
def _read_blocks(
    cache: list[jax.Array],
    others: list[Any],
    tokens: Array,
    n_tokens: Array,
    places: _Places,
    *,
    form: Form,
) -> tuple[list[jax.Array], jax.Array]:
    """Implement `_read` with a block pool: padding follows the tokens."""
    model: Any = nnx.merge(form.graphdef, *form.states(cache, others))
    all_places = model.block_tables[...], model.cached_lengths[...]
    _set_places(model, places)
    segments = jnp.where(jnp.arange(tokens.shape[1], dtype=jnp.int32) < n_tokens, 0, -1)[None]
    z = model.hidden(model.embed(tokens), deterministic=True, decode=True, segments=segments)
    logits = model.unembed(jax.lax.dynamic_index_in_dim(z, n_tokens - 1, 1, keepdims=False))
    _set_places(model, all_places)  # all slots, so that cache shapes are constant
    return jax.tree.leaves(nnx.state(model, nnx.Cache)), logits


@functools.partial(jax.jit, static_argnames="form", donate_argnums=0)
def _copy_block(
    cache: list[jax.Array], others: list[Any], source: Array, target: Array, *, form: Form
) -> list[jax.Array]:
    model: Any = nnx.merge(form.graphdef, *form.states(cache, others))
    model.copy_block(source, target)
    return jax.tree.leaves(nnx.state(model, nnx.Cache))


@functools.partial(jax.jit, static_argnames="n_candidates")
def _begin_slot(
    last: jax.Array,
    keys: jax.Array,
    logits: Array,
    key: Array,
    slot: Array,
    temperature: Array,
    *,
    n_candidates: int,
) -> tuple[jax.Array, jax.Array]:
    """Add a sequence to the last tokens and keys."""
    token = sample_tokens(
        logits, noise_of(jax.random.fold_in(key, 0), (1,), n_candidates), temperature
    )
    return last.at[slot].set(token[0]), keys.at[slot].set(key)


@functools.partial(jax.jit, static_argnames="form", donate_argnums=0)
def _join(
    cache: list[jax.Array],
    others: list[Any],
    last: jax.Array,
    keys: jax.Array,
    cache_of_one: list[jax.Array],
    logits: Array,
    key: Array,
    slot: Array,
    temperature: Array,
    *,
    form: Form,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    many: Any = nnx.merge(form.graphdef, *form.states(cache, others))
    many.take_in(nnx.merge(form.graphdef, *form.states(cache_of_one, others)), slot)
    begun = _begin_slot(last, keys, logits, key, slot, temperature, n_candidates=form.n_candidates)
    return jax.tree.leaves(nnx.state(many, nnx.Cache)), *begun


@functools.partial(jax.jit, static_argnames=("count", "form"), donate_argnums=0)
def _step_slots(
    cache: list[jax.Array],
    others: list[Any],
    last: jax.Array,
    keys: jax.Array,
    counts: Array,
    temperatures: Array,
    places: _Places | None,
    *,
    count: int,
    form: Form,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Sample more tokens; return caches, last tokens, and new tokens ``[slots, count]``.

    Empty slots receive padding.
    """
    counts = jnp.asarray(counts)
    segments = jnp.where(counts > 0, 0, -1)[:, None]
    # The key of a token follows from its number in the sequence, however steps divide it.
    numbers = counts[None] + jnp.arange(count, dtype=jnp.int32)[:, None]
    of_tokens = jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))(keys, numbers)
    states = form.states(cache, others)
    if places is not None:
        model = nnx.merge(form.graphdef, *states)
        _set_places(model, places)
        states = nnx.state(model, nnx.Cache), states[1]
    new, last, tokens = block(
        form.graphdef, *states, last, of_tokens, temperatures, form.n_candidates, segments
    )
    return jax.tree.leaves(new), last, tokens.T

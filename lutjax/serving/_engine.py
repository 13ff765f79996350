"""Continuous batching: texts that come and go are continued together, each as if it were alone."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax._extras import needed_by
from lutjax.models._decoder import Decoder, fed
from lutjax.serving._limits import Limits

with needed_by(__name__):
    from flax import nnx

BLOCK = 8
"""Tokens of each text that the device draws before the next look at requests."""


class FullError(Exception):
    """Too many requests wait."""


class StoppedError(Exception):
    """The engine takes no more requests."""


@dataclasses.dataclass(eq=False)
class Job:
    """A text that is continued.

    Attributes:
      prompt, n_tokens, temperature, seed: of the request.
      push: gets bytes as they are drawn, then None; or an exception if the engine has failed. It is called by the thread of the engine.
      cancelled: whether nobody waits for the text any more.
    """

    prompt: bytes
    n_tokens: int
    temperature: float
    seed: int
    push: Callable[[bytes | BaseException | None], None]
    cancelled: bool = False
    done: int = 0


class Engine:
    """Continues many texts at once: a thread with a fixed number of slots, each with the caches of one text.

    What is drawn for a text depends on its prompt, temperature and seed alone, up to the rounding of sums, and not on who else is there.

    Args:
      model: in the mode for evaluation, of bytes.
      limits: number of slots, and of texts that wait.

    Attributes:
      failed: the exception with which the thread has ended, if one has.
    """

    failed: BaseException | None = None

    def __init__(self, model: Decoder, limits: Limits):
        if model.config.vocab_size != 256:
            raise ValueError(
                f"the model has {model.config.vocab_size} tokens; text models of bytes have 256."
            )
        self._limits, self._context = limits, model.config.context
        graph, state = nnx.split(model)
        own = nnx.merge(graph, state)
        own.init_cache(())
        parts: Any = nnx.split(own, nnx.Cache, ...)
        graph, cache, kept = parts
        empty, caches = jax.tree.flatten(cache)
        self._kept, others = jax.tree.flatten(kept)

        def feed(cache: list[Any], kept: list[Any], tokens: Any) -> tuple[list[Any], Any]:
            new, logits = fed(
                graph, jax.tree.unflatten(caches, cache), jax.tree.unflatten(others, kept), tokens
            )
            return jax.tree.leaves(new), logits.astype(jnp.float32)

        def fill(
            kept: list[Any], cache: list[Any], slot: Any, first: Any, tokens: Any, key: Any, temperature: Any
        ) -> Any:
            """Feed a part of a prompt to a slot; return the caches, and the token that would follow."""
            held = [jnp.where(first, e, c[slot]) for e, c in zip(empty, cache, strict=True)]
            new, logits = feed(held, kept, tokens)
            cache = [c.at[slot].set(n) for c, n in zip(cache, new, strict=True)]
            return cache, _drawn(logits, key, jnp.int32(0), temperature)

        def advance(
            kept: list[Any],
            cache: list[Any],
            active: Any,
            tokens: Any,
            counts: Any,
            keys: Any,
            temperatures: Any,
        ) -> Any:
            """Draw a block of tokens of every active slot."""

            def step(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], Any]:
                cache, tokens, counts = carry
                new, logits = jax.vmap(feed, (0, None, 0))(cache, kept, tokens[:, None])
                tokens = jax.vmap(_drawn)(logits, keys, counts, temperatures)
                return (new, tokens, counts + 1), tokens

            (new, *_), drawn = jax.lax.scan(step, (cache, tokens, counts), None, length=BLOCK)
            held = [
                jnp.where(active.reshape(-1, *(1,) * (n.ndim - 1)), n, c)
                for n, c in zip(new, cache, strict=True)
            ]
            return held, drawn.T

        self._fill = jax.jit(fill, donate_argnums=1)
        self._advance = jax.jit(advance, donate_argnums=1)
        n = limits.slots
        self._cache = [jnp.repeat(e[None], n, 0) for e in empty]
        self._jobs: list[Job | None] = [None] * n
        self._left: list[list[np.ndarray]] = [[] for _ in range(n)]  # parts of prompts that were not fed yet
        self._begun = [False] * n
        self._tokens, self._counts = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self._keys, self._temperatures = np.zeros((n, 2), np.uint32), np.zeros(n, np.float32)
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lutjax-serving", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let a text be continued.

        Raises:
          FullError, StoppedError: it is not.
        """
        with self._changed:
            if self._stopping or self.failed is not None:
                raise StoppedError
            if len(self._waiting) >= self._limits.queue:
                raise FullError
            self._waiting.append(job)
            self._changed.notify()

    def warm(self) -> None:
        """Compile all programs: those of parts of prompts of all lengths, and that of a block."""
        lengths = [self._context, *(1 << k for k in range((self._context - 1).bit_length()))]
        for length in sorted({n for n in lengths if n <= self._context}):
            done = threading.Event()

            def push(part: bytes | BaseException | None, done: threading.Event = done) -> None:
                if not isinstance(part, bytes):
                    done.set()

            self.submit(Job(b" " * length, 2 if length == 1 else 1, 0.0, 0, push))
            done.wait()

    @property
    def n_active(self) -> int:
        """Number of texts in slots."""
        return sum(job is not None for job in self._jobs)

    @property
    def n_waiting(self) -> int:
        """Number of texts that wait for a slot."""
        return len(self._waiting)

    def stop(self) -> None:
        """Take no more texts, finish those that are there, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._admit():
                for slot, left in enumerate(self._left):
                    if left:
                        self._feed(slot)
                active = np.asarray(
                    [job is not None and not left for job, left in zip(self._jobs, self._left, strict=True)]
                )
                if active.any():
                    self._draw(active)
        except BaseException as error:  # noqa: BLE001 (whoever waits is told)
            with self._changed:
                self.failed = error
                jobs = [*(job for job in self._jobs if job is not None), *self._waiting]
                self._waiting.clear()
            for job in jobs:
                job.push(error)

    def _admit(self) -> bool:
        """Give free slots to texts that wait, and wait where there is none; return whether there is something to do."""
        with self._changed:
            while True:
                for slot, job in enumerate(self._jobs):
                    if job is not None and job.cancelled:
                        self._free(slot)
                    while self._jobs[slot] is None and self._waiting:
                        new = self._waiting.popleft()
                        if not new.cancelled:
                            self._take(slot, new)
                if self.n_active:
                    return True
                if self._stopping:
                    return False
                self._changed.wait()

    def _take(self, slot: int, job: Job) -> None:
        self._jobs[slot], self._begun[slot] = job, False
        self._left[slot] = parts_of(job.prompt, self._context)
        self._keys[slot] = (0, job.seed)
        self._temperatures[slot] = job.temperature

    def _free(self, slot: int) -> None:
        self._jobs[slot], self._left[slot] = None, []

    def _feed(self, slot: int) -> None:
        part = self._left[slot].pop(0)
        self._cache, token = self._fill(
            self._kept,
            self._cache,
            np.int32(slot),
            not self._begun[slot],
            part,
            self._keys[slot],
            self._temperatures[slot],
        )
        self._begun[slot] = True
        if not self._left[slot]:
            self._tokens[slot], self._counts[slot] = int(token), 1
            self._push(slot, np.asarray(token)[None])

    def _draw(self, active: np.ndarray) -> None:
        self._cache, drawn = self._advance(
            self._kept, self._cache, active, self._tokens, self._counts, self._keys, self._temperatures
        )
        found = np.asarray(drawn)
        for slot in np.flatnonzero(active):
            self._tokens[slot] = found[slot, -1]
            self._counts[slot] += BLOCK
            if self._jobs[slot] is not None:
                self._push(int(slot), found[slot])

    def _push(self, slot: int, tokens: np.ndarray) -> None:
        """Hand new tokens to a text, and free its slot after the last."""
        job = self._jobs[slot]
        assert job is not None
        part = tokens[: job.n_tokens - job.done].astype(np.uint8).tobytes()
        job.done += len(part)
        if part and not job.cancelled:
            job.push(part)
        if job.done >= job.n_tokens or job.cancelled:
            job.push(None)
            self._free(slot)


def parts_of(prompt: bytes, context: int) -> list[np.ndarray]:
    """Return parts of a prompt that are fed one after the other, of few different lengths: the context, and then powers of two.

    Example:
      >>> from lutjax.serving._engine import parts_of
      >>> [len(part) for part in parts_of(b"x" * 77, 32)]
      [32, 32, 8, 4, 1]
    """
    tokens, parts = np.frombuffer(prompt, np.uint8).astype(np.int32), []
    while len(tokens):
        n = context if len(tokens) >= context else 1 << (len(tokens).bit_length() - 1)
        parts.append(tokens[:n])
        tokens = tokens[n:]
    return parts


def _drawn(logits: jax.Array, key: jax.Array, count: jax.Array, temperature: jax.Array) -> jax.Array:
    """Draw a token, of noise of the key of a text and the number of its tokens so far."""
    noise = jax.random.gumbel(
        jax.random.fold_in(jax.random.wrap_key_data(key), count), logits.shape, jnp.float32
    )
    warm = jnp.argmax(logits / jnp.maximum(temperature, 1e-6) + noise, -1)
    return jnp.where(temperature > 0, warm, jnp.argmax(logits, -1)).astype(jnp.int32)

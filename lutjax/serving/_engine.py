"""Requests that wait, and the thread that continues their texts together."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable

import jax
import numpy as np

from lutjax.models import Slots
from lutjax.models._decoder import Decoder
from lutjax.serving._limits import Limits

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
    """Continues many texts at once: a thread that lets them join and leave `Slots`.

    What is drawn for a text depends on its prompt, temperature and seed alone, up to the rounding of sums, and not on who else is there.

    Args:
      model: of bytes.
      limits: number of slots, and of texts that wait; size of blocks.

    Attributes:
      slots: what the texts are in.
      failed: the exception with which the thread has ended, if one has.
    """

    failed: BaseException | None = None

    def __init__(self, model: Decoder, limits: Limits):
        if model.config.vocab_size != 256:
            raise ValueError(
                f"the model has {model.config.vocab_size} tokens; text models of bytes have 256."
            )
        self.slots = Slots(model, limits.slots, block_size=limits.block_size)
        self._limits = limits
        self._jobs: dict[int, Job] = {}  # by slot
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._compiled = threading.Event()
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
        """Wait until all programs are compiled; raise the error if that fails."""
        self._compiled.wait()
        if self.failed is not None:
            raise self.failed

    @property
    def n_active(self) -> int:
        """Number of texts in slots."""
        return len(self._jobs)

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
            self.slots.compile(BLOCK)
            self._compiled.set()
            while self._admit():
                for slot in self.slots.reading:
                    token = self.slots.read(slot)
                    if token is not None:
                        self._push(slot, np.asarray([token]))
                for slot, tokens in self.slots.step(BLOCK).items():
                    self._push(slot, tokens)
        except BaseException as error:  # noqa: BLE001 (whoever waits is told)
            with self._changed:
                self.failed = error
                jobs = [*self._jobs.values(), *self._waiting]
                self._waiting.clear()
            self._compiled.set()
            for job in jobs:
                job.push(error)

    def _admit(self) -> bool:
        """Give free slots to texts that wait, and wait where there is none; return whether there is something to do."""
        with self._changed:
            while True:
                for slot in [slot for slot, job in self._jobs.items() if job.cancelled]:
                    self._free(slot)
                while self.slots.free and self._waiting:
                    job = self._waiting[0]
                    if not job.cancelled:
                        self._take(job)
                    self._waiting.popleft()  # then alone: if it cannot be taken, it is told
                if self._jobs:
                    return True
                if self._stopping:
                    return False
                self._changed.wait()

    def _take(self, job: Job) -> None:
        prompt = np.frombuffer(job.prompt, np.uint8).astype(np.int32)
        slot = self.slots.begin(prompt, key=jax.random.key(job.seed), temperature=job.temperature)
        self._jobs[slot] = job

    def _free(self, slot: int) -> None:
        self.slots.leave(slot)
        del self._jobs[slot]

    def _push(self, slot: int, tokens: np.ndarray) -> None:
        """Hand new tokens to a text, and free its slot after the last."""
        job = self._jobs[slot]
        part = tokens[: job.n_tokens - job.done].astype(np.uint8).tobytes()
        job.done += len(part)
        if part and not job.cancelled:
            job.push(part)
        if job.done >= job.n_tokens or job.cancelled:
            job.push(None)
            self._free(slot)

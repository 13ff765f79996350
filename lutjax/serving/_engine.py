"""Request queue and continuous-batching worker."""

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
"""Tokens per sequence that the device samples before the next check for requests."""


class FullError(Exception):
    """The request queue is full."""


class StoppedError(Exception):
    """The engine no longer accepts requests."""


@dataclasses.dataclass(eq=False)
class Job:
    """A sequence being generated.

    Attributes:
      prompt, n_tokens, temperature, seed: request fields.
      push: receives bytes as they are sampled, then None; or an exception if the engine has failed.
        It is called by the engine thread.
      cancelled: whether the client no longer waits.
    """

    prompt: bytes
    n_tokens: int
    temperature: float
    seed: int
    push: Callable[[bytes | BaseException | None], None]
    cancelled: bool = False
    done: int = 0


class Engine:
    """Continuous batching: a thread adds sequences to `Slots` and removes finished ones.

    Each result depends only on its prompt, temperature and seed, up to rounding in sums, and not on
    concurrent sequences.

    Args:
      model: byte-level model.
      limits: number of slots, queue length, and block size.

    Attributes:
      slots: slots of the running sequences.
      failed: the exception that ended the thread, if any.
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
        # A daemon: a process that ends without `stop` must not wait for the device.
        self._thread = threading.Thread(target=self._run, name="lutjax-serving", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a sequence for generation.

        Raises:
          FullError, StoppedError: the job is not accepted.
        """
        with self._changed:
            if self._stopping or self.failed is not None:
                raise StoppedError
            if len(self._waiting) >= self._limits.queue:
                raise FullError
            self._waiting.append(job)
            self._changed.notify()

    def warm(self) -> None:
        """Wait until all programs are compiled; raise the error if compilation fails."""
        self._compiled.wait()
        if self.failed is not None:
            raise self.failed

    @property
    def n_active(self) -> int:
        """Number of sequences in slots."""
        return len(self._jobs)

    @property
    def n_waiting(self) -> int:
        """Number of queued sequences."""
        return len(self._waiting)

    def stop(self) -> None:
        """Accept no more jobs, finish the current ones, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.slots.compile(BLOCK)
            self._compiled.set()
            # One part of each new prompt between two blocks: a long prompt delays the others only
            # a little.
            while self._admit():
                for slot in self.slots.reading:
                    token = self.slots.read(slot)
                    if token is not None:
                        self._push(slot, np.asarray([token]))
                for slot, tokens in self.slots.step(BLOCK).items():
                    self._push(slot, tokens)
        except BaseException as error:  # noqa: BLE001 (whoever waits is told)
            # Under the lock, so that no job joins the queue of a dead thread.
            with self._changed:
                self.failed = error
                jobs = [*self._jobs.values(), *self._waiting]
                self._waiting.clear()
            self._compiled.set()
            for job in jobs:
                job.push(error)

    def _admit(self) -> bool:
        """Move queued jobs into free slots, or wait for jobs; return True if there is work."""
        with self._changed:
            while True:
                for slot in [slot for slot, job in self._jobs.items() if job.cancelled]:
                    self._free(slot)
                while self.slots.free and self._waiting:
                    job = self._waiting[0]
                    if not job.cancelled:
                        self._take(job)
                    self._waiting.popleft()  # only now: if it fails, it gets the error
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
        """Send new tokens to a job, and free its slot after the last one."""
        job = self._jobs[slot]
        part = tokens[: job.n_tokens - job.done].astype(np.uint8).tobytes()
        job.done += len(part)
        if part and not job.cancelled:
            job.push(part)
        if job.done >= job.n_tokens or job.cancelled:
            job.push(None)
            self._free(slot)

"""Limits of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of what a server takes, which bound its memory.

    Attributes:
      slots: texts that are continued at the same time.
      queue: requests that wait for a slot, or rows for a classifier, beyond which 429 is the answer.
      prompt: bytes of the longest prompt.
      tokens: bytes of the longest answer.
      rows: samples of a call of a classifier.
      body: bytes of the longest body of a request.
      block_size: bytes of a block in which the cached bytes of all texts are, so that what prompts begin with in common is read and stored once; for models
        of ``--model lut``. None: each text has a cache of its own.

    Raises:
      ValueError: one is below 1.
    """

    slots: int = 16
    queue: int = 256
    prompt: int = 16384
    tokens: int = 4096
    rows: int = 1024
    body: int = 1 << 20
    block_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name} is {value}; it must be at least 1.")

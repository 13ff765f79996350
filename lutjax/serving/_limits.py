"""Server limits."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Server limits, which bound its memory.

    Attributes:
      slots: sequences generated at the same time.
      queue: requests waiting for a slot, or rows for a classifier; more are answered with 429.
      prompt: maximum prompt length in bytes.
      tokens: maximum answer length in bytes.
      rows: maximum samples per classifier call.
      body: maximum request body in bytes.
      block_size: block length, in bytes of text, for the cache shared by all sequences. Common
        prompt prefixes are read and stored once; for models of ``--model lut``. None: each sequence
        has its own cache.

    Raises:
      ValueError: a limit is below 1.
    """

    slots: int = 16
    queue: int = 256
    prompt: int = 16384
    tokens: int = 4096
    rows: int = 1024
    body: int = 1 << 20
    block_size: int | None = None

    def __post_init__(self) -> None:
        # Names as the command line has them: its options are these fields.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name} is {value}; it must be at least 1.")

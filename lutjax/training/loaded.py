"""Record of the run that a model comes from."""

import dataclasses
from pathlib import Path
from typing import Any


# Equal to itself alone, because models are compared by their attributes.
@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """Record of the run that a model comes from.

    Fields of its checkpoint are attributes too: `model` and `training` decide the run, beside `text` of a language model,
    `samples` of a classifier or `target` of an automaton; `history` has the losses and tests so far; `options` is
    what the command remembers.

    Attributes:
      kind: the command that trained it: ``"lm"``, ``"classify"`` (``"digits"`` without data of its own) or ``"ca"`` of ``lutjax train``.
      folder: of the run.
      steps: steps done at the checkpoint.
      record: the checkpoint's record.
      results: what was measured at the end of the run, in lines.
    """

    kind: str
    folder: Path
    steps: int
    record: Any
    results: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "record" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.record, name)

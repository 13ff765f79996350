"""Run records attached to loaded models."""

import dataclasses
from pathlib import Path
from typing import Any


# Compare by identity, because models are compared by their attributes.
@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """Run record for a loaded model.

    Checkpoint fields are attributes too: `model` and `training` configure the run, together with
    `text` (language models), `samples` (classifiers) or `target` (automata); `history` contains the
    losses and tests; `options` contains the command's options.

    Attributes:
      kind: training command: ``"lm"``, ``"classify"`` (``"digits"`` for the default data) or
        ``"ca"`` of ``lutjax train``.
      folder: run folder.
      steps: completed steps at the checkpoint.
      record: the checkpoint's record.
      results: final measurements of the run, in lines.
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

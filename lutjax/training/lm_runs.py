"""Runs of language models: what decides how to go on, and the model of one."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.training import models, runs
from lutjax.training.lm import TrainingConfig, structure_of


@dataclasses.dataclass(frozen=True)
class TextIdentity:
    """Which text a run reads: the path given (None: Python's standard library), bytes, and SHA-256 of them."""

    path: str | None
    size: int
    digest: str


@dataclasses.dataclass
class Record(runs.Record):
    """What a checkpoint holds beside arrays.

    Attributes:
      model, training, text: what decides the run.
      bigram: loss of the baseline on the test part, in nats per byte.
      options: what the program that trains wants to remember and may change, such as intervals.
      history: losses so far, in nats per byte.
    """

    kind: ClassVar[str] = "lm"

    model: LUTTransformerConfig
    training: TrainingConfig
    text: TextIdentity
    bigram: float
    options: dict[str, Any]
    history: runs.History


def load_model(folder: Path) -> tuple[LUTTransformer, Record]:
    """The model of the latest checkpoint in the folder of a run, ready to generate.

    Raises:
      CheckpointError: there is none, it is damaged, or an anchor is not an input.
    """
    step, record = runs.read(folder, Record)
    return models.load(folder, step, structure_of(record.model)), record

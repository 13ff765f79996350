"""Runs of any model: what a checkpoint holds beside arrays, written and read field by field.

A kind of run says what decides it and what it remembers in one dataclass, its record, whose last field is a `History`.
"""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lutjax
from lutjax.training import checkpoints
from lutjax.training.checkpoints import CheckpointError

FOLDER = "checkpoints"
"""Where the checkpoints are in the folder of a run."""

R = TypeVar("R")


@dataclasses.dataclass
class History:
    """What was measured so far, each with the number of steps done: training losses, and what tests found."""

    train: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    test: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "History":
        """The history that `dataclasses.asdict` made these fields of."""
        return cls(**{name: [(s, x) for s, x in points] for name, points in fields.items()})


def exists(folder: Path) -> bool:
    """Whether the folder of a run holds a checkpoint."""
    return bool(checkpoints.steps(folder / FOLDER))


def save(folder: Path, step: int, trees: Mapping[str, Any], record: Any) -> None:
    """Writes a checkpoint into the folder of a run; see `checkpoints.save`.

    Args:
      record: a dataclass of what JSON can hold and of such dataclasses.
    """
    meta = {"lutjax": lutjax.__version__, **dataclasses.asdict(record)}
    checkpoints.save(folder / FOLDER, step, trees, meta)


def read(folder: Path, kind: type[R]) -> tuple[int, R]:
    """The steps done at the latest checkpoint, and its record.

    Args:
      kind: the record's class. A field that is a dataclass is made by its ``from_dict``, if there is one, else of its
        fields.

    Raises:
      CheckpointError: there is none, or it is damaged, or of a version with other fields, or of another kind of run.
    """
    step, meta = checkpoints.read_meta(folder / FOLDER)
    version = meta.pop("lutjax", None)
    try:
        return step, _made(kind, meta)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} was written by lutjax {version} and does not fit this command and "
            f"version, {lutjax.__version__}: {error}"
        ) from error


def restore(folder: Path, step: int, name: str, template: Any) -> Any:
    """One tree of the checkpoint of a run; see `checkpoints.restore`."""
    return checkpoints.restore(folder / FOLDER, step, name, template)


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    if hasattr(kind, "from_dict"):
        return kind.from_dict(fields)
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: _made(hints[name], value) if dataclasses.is_dataclass(hints.get(name)) else value
            for name, value in fields.items()
        }
    )

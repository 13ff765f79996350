"""Runs of any model: what a checkpoint holds beside arrays, written and read field by field.

A kind of run says what decides it and what it remembers in one dataclass, its record, whose last field is a `History`.
"""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import lutjax
from lutjax.training import checkpoints
from lutjax.training.checkpoints import CheckpointError

FOLDER = "checkpoints"
"""Where the checkpoints are in the folder of a run."""

KINDS = {"lm": "text", "digits": "samples", "ca": "target"}
"""Kinds of runs, named as ``lutjax train`` names them; each with the field by which records without a kind are known."""


@dataclasses.dataclass
class Record:
    """A base of dataclasses of what a checkpoint holds beside arrays: what decides the run, and its `History`."""

    kind: ClassVar[str]
    """One of `KINDS`."""


R = TypeVar("R", bound=Record)


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


def save(folder: Path, step: int, trees: Mapping[str, Any], record: Record) -> None:
    """Writes a checkpoint into the folder of a run; see `checkpoints.save`.

    Args:
      record: a dataclass of what JSON can hold and of such dataclasses, whose class attribute `kind` is one of `KINDS`.
    """
    meta = {"lutjax": lutjax.__version__, "kind": record.kind, **dataclasses.asdict(record)}
    checkpoints.save(folder / FOLDER, step, trees, meta)


def kind(folder: Path) -> str:
    """The kind of the run in a folder, one of `KINDS`.

    Raises:
      CheckpointError: there is no checkpoint, it is damaged, or of a kind that this version does not know.
    """
    return _kind(folder, checkpoints.read_meta(folder / FOLDER)[1])


def _kind(folder: Path, meta: Mapping[str, Any]) -> str:
    found = meta.get("kind") or next((name for name, field in KINDS.items() if field in meta), None)
    if found not in KINDS:
        raise CheckpointError(
            f"{folder} holds a run of the kind {found}; lutjax {lutjax.__version__} knows {', '.join(KINDS)}."
        )
    return found


def read(folder: Path, record: type[R]) -> tuple[int, R]:
    """The steps done at the latest checkpoint, and its record.

    Args:
      record: the record's class. A field that is a dataclass is made by its ``from_dict``, if there is one, else of its
        fields.

    Raises:
      CheckpointError: there is none, or it is damaged, or of a version with other fields, or of another kind of run.
    """
    step, meta = checkpoints.read_meta(folder / FOLDER)
    found, wanted = _kind(folder, meta), record.kind
    if found != wanted:
        raise CheckpointError(f"{folder} holds a run of train {found}, not of train {wanted}.")
    version = meta.pop("lutjax", None)
    meta.pop("kind", None)
    try:
        return step, _made(record, meta)
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

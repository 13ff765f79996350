"""Runs of any model, on a disk: the record that a checkpoint holds apart from arrays, and the other files of a run.

A kind of run says what decides it and what it remembers in one dataclass, its record, whose last field is a `History`.
"""

import csv
import dataclasses
import errno
import json
import math
import os
import platform
import re
import shlex
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

import lutjax
from lutjax.bundles._layout import is_bundle
from lutjax.files import strict_json
from lutjax.files.atomic import atomically as atomically, digest_of, replacing as replacing
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields
from lutjax.training import checkpoints, hosts
from lutjax.training.errors import CheckpointError, DamagedError, InUseError

try:
    import fcntl
except ImportError:  # Windows: two processes are not kept apart
    fcntl = None  # type: ignore[assignment]

FOLDER = "checkpoints"
"""Name of the folder of the checkpoints in the folder of a run."""

CURVES = "curves.csv"
"""All that was measured, in the folder of a run."""

LOCK = ".lock"
"""Locked by the process that writes into the folder of a run; holds its id."""

_FINISHED = "finished.json"

COMMANDS = {"lm": "train lm", "digits": "train classify", "ca": "train ca", "classify": "train classify"}
"""Kinds of runs, each with the command that trains them and goes on with them."""

KINDS = {"lm": "text", "digits": "samples", "ca": "target"}
"""Kinds of older records, which do not say theirs, each with the field by which they are known."""

USES = {"train lm": "generate {}", "train classify": "predict {} FILE", "train ca": "info {}"}
"""Commands that use a run, with a place for its folder, by those that train it."""


@dataclasses.dataclass
class Record:
    """A base of dataclasses of what a checkpoint holds beside arrays: what decides the run, and its `History`."""

    kind: ClassVar[str]
    """One of `COMMANDS`."""

    def own_kind(self) -> str:
        """Return the kind of this run: that of all of its class, where its data make no difference."""
        return self.kind


R = TypeVar("R", bound=Record)


@dataclasses.dataclass(frozen=True)
class Source:
    """The data of a run: the path given (None: the default data), their size and their SHA-256."""

    path: str | None
    size: int
    digest: str

    @classmethod
    def of(cls, path: Path | None, size: int, digest: str) -> "Source":
        """Return the source at a path, which is made absolute."""
        return cls(None if path is None else str(path.absolute()), size, digest)


@dataclasses.dataclass
class History:
    """Measurements so far, each with the number of steps done: training losses, and results of tests.

    `other` are results of a second test, for kinds of runs that have one. `lengths` are the steps in all with which the run was started or gone on with, if they were changed.
    """

    train: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    test: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    lengths: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    other: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "History":
        """Return the history that `dataclasses.asdict` made these fields of."""
        return cls(**{name: [(s, x) for s, x in points] for name, points in fields.items()})


@dataclasses.dataclass
class Finished:
    """Record of which parts of the work after the last step are done.

    Attributes:
      digest: of the checkpoint that they were done with.
      parts: for each by its name, whether there is a file of that name, and lines that were shown.
      why: why there was no further step, in words; empty until all is done.
      digests: SHA-256 of the files that were written, by their names.
    """

    digest: str
    parts: dict[str, tuple[bool, list[str]]] = dataclasses.field(default_factory=dict)
    why: str = ""
    digests: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Finished | None":
        """Return the record of finishing in the folder of a run; None if there is none for its latest checkpoint."""
        try:
            found = cls._of(folder)
            return found if found.digest == checkpoints.peek(folder / FOLDER)[2] else None
        except (FileNotFoundError, ValueError):  # none, or of another version
            return None

    @classmethod
    def _of(cls, folder: Path) -> "Finished":
        """Return the record of finishing in the folder of a run, of whatever checkpoint.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is damaged.
        """
        fields = Fields(_FINISHED)
        found = strict_json.loads((folder / _FINISHED).read_bytes())
        digest, why = (fields.field(found, name, str) for name in ("digest", "why"))
        parts = fields.field(found, "parts", dict)
        digests = fields.field({"digests": {}, **found}, "digests", dict)
        if not _fits(parts, dict[str, tuple[bool, list[str]]]) or not _fits(digests, dict[str, str]):
            raise ValueError(f"{_FINISHED}: 'parts' or 'digests' are not those of files.")
        for name in (*parts, *digests):
            if len(name.encode()) > 255 or {"/", "\0"} & set(name):
                raise ValueError(f"{_FINISHED}: no file has the name {strict_json.shown(name)}.")
        return cls(digest, {name: (file, lines) for name, (file, lines) in parts.items()}, why, digests)

    def write(self, folder: Path) -> None:
        """Record it in the folder of a run."""
        with written(folder / _FINISHED) as path:
            path.write_text(json.dumps(dataclasses.asdict(self)))

    def has(self, folder: Path, part: str) -> bool:
        """Return whether a part is done and its file, if it has one, is there."""
        return part in self.parts and (not self.parts[part][0] or (folder / part).is_file())

    def wrote(self, folder: Path, name: str) -> None:
        """Keep the digest of a file that was written, if it was."""
        if (digest := digest_of(folder / name)) is not None:
            self.digests[name] = digest

    def complete(self, folder: Path) -> bool:
        """Return whether everything is done."""
        return bool(self.why) and all(self.has(folder, part) for part in self.parts)


def finished(folder: Path) -> Finished:
    """Return the record of the latest checkpoint in the folder of a run."""
    return Finished.read(folder) or Finished(checkpoints.peek(folder / FOLDER)[2])


def results(folder: Path) -> tuple[str, ...]:
    """Return the lines in which a finished run has said its results, which come first of its parts; none before its end."""
    found = Finished.read(folder)
    first = next(iter(found.parts.values()), (False, [])) if found else (False, [])
    return tuple(first[1])


def changed(folder: Path) -> list[str]:
    """Return a line for each file in the folder of a finished run that is not as the run wrote it, beside its checkpoints."""
    try:
        found = Finished._of(folder)
        if found.digest != checkpoints.peek(folder / FOLDER)[2]:  # steps were taken since
            return []
    except (FileNotFoundError, CheckpointError):
        return []
    except ValueError as error:
        return [
            f"{folder / _FINISHED} is damaged ({in_a_line(error)}): delete it; --resume finishes the run again."
        ]
    lines = []
    for name, digest in found.digests.items():
        now = digest_of(folder / name)
        if now is None:
            lines.append(f"{folder / name} is missing: --resume writes it again.")
        elif now != digest:
            lines.append(
                f"{folder / name} has changed since the run wrote it: delete it; --resume writes it again."
            )
    return lines


def write_curves(path: Path, history: History, names: tuple[str, ...]) -> None:
    """Write all that was measured as a table: step, kind, value. `names` are those of the two or three kinds."""
    rows = [
        (step, name, repr(value))
        for name, points in zip(names, (history.train, history.test, history.other), strict=False)
        for step, value in points
    ]
    rows.sort(key=lambda row: row[0])
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("step", "kind", "value"), *rows])


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield the path at which to write a file of a run, as `atomically`. Only what the first process writes stays."""
    if hosts.is_first():
        with atomically(path) as unfinished:
            yield unfinished
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep other runs from writing into the folder of a run, which is made if it is missing.

    The first process holds it for all that train the run. The operating system takes it away from a process that ends, however it ends.

    Raises:
      InUseError: another process holds the lock.
      OSError: nothing can be written there.
    """
    with ExitStack() as stack:
        hosts.by_first(lambda: stack.enter_context(_locked(folder)))
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    if not is_lock(folder / LOCK):
        raise InUseError(
            f"{folder / LOCK} is no lock of lutjax, and would be written over: choose another folder, or move it away."
        )
    with (folder / LOCK).open("a+") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise InUseError(
                    f"{folder} is in use: process {file.read() or '?'} trains there. Wait until it has ended, or choose "
                    "another folder."
                ) from None
            except OSError as error:  # some file systems have no locks
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def others(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield what a run would write over in a folder that holds none.

    Args:
      folder: the folder.
      names: of the files that the run writes besides those of every run.
    """
    for name in (CURVES, _FINISHED, *names):
        if (folder / name).exists() or (folder / name).is_symlink():
            yield folder / name
    if not is_lock(folder / LOCK):
        yield folder / LOCK
    yield from checkpoints.others(folder / FOLDER)


def is_lock(path: Path) -> bool:
    """Return whether a file is one of `lock`, or not there."""
    if not path.exists():
        return not path.is_symlink()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return re.fullmatch(rb"\d{0,20}", file.read(32)) is not None


def check_space(folder: Path, n_bytes: int) -> None:
    """Refuses a disk without room for one checkpoint.

    Args:
      folder: folder of the run.
      n_bytes: of the arrays of a checkpoint.

    Raises:
      OSError: there is less.
    """
    free = hosts.by_first(lambda: shutil.disk_usage(folder).free)
    if free < n_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {n_bytes / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free",
            str(folder),
        )


def exists(folder: Path) -> bool:
    """Return whether the folder of a run holds a checkpoint."""
    return bool(checkpoints.steps(folder / FOLDER))


def check(folder: Path) -> None:
    """Refuses a folder that is none of a run, and says what it is.

    Raises:
      CheckpointError: it holds no checkpoint.
    """
    if exists(folder):
        return
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist.")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give the folder of a run.")
    if is_bundle(folder):
        raise CheckpointError(
            f"{folder} is a bundle, which holds a model and neither its optimizer nor its data; this command needs the folder of the run."
        )
    for outer in folder.absolute().parents:
        if exists(outer):
            given = outer if folder.is_absolute() else os.path.relpath(outer)
            raise CheckpointError(f"{folder} is a part of a run: give {given}.")
    if checkpoints.is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint without its run: put it into a folder RUN as RUN/{FOLDER}/STEP, and give RUN."
        )
    if _holds_checkpoints(folder):
        raise CheckpointError(
            f'{folder} holds checkpoints, but is not named "{FOLDER}": rename it so, and give the folder around it.'
        )
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [path for path in inner if exists(path)]
    if found:
        names = " or ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
        raise CheckpointError(f"{folder} is not the folder of a run, but holds {len(found)}: give {names}.")
    for path in inner:
        if _holds_checkpoints(path):
            raise CheckpointError(
                f"{folder} holds no checkpoint, but {path} does: rename that folder to {folder / FOLDER}."
                if path.name != FOLDER
                else f"{path} holds a checkpoint whose name is not its step: rename it to the number of its steps."
            )
    stopped = (folder / LOCK).exists()
    advice = (
        ": the run was stopped before its first one. Start it again, without --resume." if stopped else "."
    )
    raise CheckpointError(f"{folder} holds no checkpoint{advice}")


def _holds_checkpoints(folder: Path) -> bool:
    return any(checkpoints.is_checkpoint(path) for path in folder.iterdir() if path.is_dir())


def save(
    folder: Path,
    step: int,
    trees: Mapping[str, Any],
    record: Record,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint into the folder of a run; see `checkpoints.save`.

    Args:
      folder: folder of the run.
      step: number of steps done.
      trees: pytrees of arrays by name.
      record: a dataclass of what JSON can hold and of such dataclasses, whose `own_kind` is one of `COMMANDS`.
      beside: as for `checkpoints.save`.
    """
    meta = {
        "lutjax": lutjax.__version__,
        "versions": {"jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "kind": record.own_kind(),
        **dataclasses.asdict(record),
    }
    checkpoints.save(folder / FOLDER, step, trees, meta, beside)


def kind(folder: Path) -> str:
    """Return the kind of the run in a folder, one of `COMMANDS`.

    Raises:
      CheckpointError: there is no run, its checkpoints are damaged, or it is of a kind that this version does not know.
    """
    check(folder)
    try:
        meta = checkpoints.peek(folder / FOLDER)[1]
    except DamagedError:
        meta = checkpoints.read_meta(folder / FOLDER, on_damage=lambda message: None)[1]
    found = meta.get("kind") or next((name for name, field in KINDS.items() if field in meta), None)
    if not isinstance(found, str) or found not in COMMANDS:
        raise CheckpointError(
            f"{folder} holds a run of the kind {in_a_line(found, 40)}; lutjax {lutjax.__version__} knows {', '.join(COMMANDS)}."
        )
    return found


def resumption(kind: str, folder: Path) -> str:
    """Return the command that goes on with a run, as a shell takes it.

    Example:
      >>> from pathlib import Path
      >>> from lutjax.training.runs import resumption
      >>> resumption("digits", Path("my runs"))
      "lutjax train classify --resume --out 'my runs'"
    """
    return f"lutjax {COMMANDS[kind]} --resume --out {shlex.quote(str(folder))}"


def use(kind: str, folder: Path) -> str:
    """Return the command that uses the model of a run, without the name of the program, as a shell takes it.

    Example:
      >>> from pathlib import Path
      >>> from lutjax.training.runs import use
      >>> use("digits", Path("my runs"))
      "predict 'my runs' FILE"
    """
    return USES[COMMANDS[kind]].format(shlex.quote(str(folder)))


def check_kind(folder: Path, wanted: str, *, trains: bool = True) -> str:
    """Return the kind of the run in a folder, which the command trains that trains runs of the kind `wanted`.

    Args:
      folder: folder of the run.
      wanted: kind of the runs that the command trains.
      trains: whether the run is to go on, or to be used: an error names the command for that.

    Raises:
      CheckpointError: another command trains it, or as `kind`.
    """
    found = kind(folder)
    if COMMANDS[found] != COMMANDS[wanted]:
        advice = (
            f"continue it with {resumption(found, folder)}"
            if trains
            else f"use it by lutjax {use(found, folder)}"
        )
        raise CheckpointError(f"{folder} is a run of {COMMANDS[found]}, not of {COMMANDS[wanted]}: {advice}")
    return found


def read(
    folder: Path, record: type[R], *, on_damage: Callable[[str], None] = checkpoints.warn
) -> tuple[int, R]:
    """Return the steps done at the latest checkpoint that is whole, and its record.

    It takes at most 100 times the memory of the run.

    Args:
      folder: folder of the run.
      record: the record's class. A field that is a dataclass is made by its ``from_dict``, if there is one, else of its
        fields.
      on_damage: is told of every damaged checkpoint that was passed over.

    Raises:
      CheckpointError: there is none, or it is of a version with other fields, or of another kind of run.
    """
    found = check_kind(folder, record.kind, trains=False)
    step, meta = checkpoints.read_meta(folder / FOLDER, on_damage=on_damage)
    version = meta.pop("lutjax", None)
    for name in ("kind", "versions"):
        meta.pop(name, None)
    try:
        whole: R = made(record, meta)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} was written by lutjax {in_a_line(version, 40)} and does not fit this command and "
            f"version, {lutjax.__version__}: {in_a_line(error)}"
        ) from error
    if whole.own_kind() != found:
        raise CheckpointError(
            f"{folder} is recorded as a run of the kind {found}, but by its data it is of the kind {whole.own_kind()}: an earlier version of "
            "lutjax wrote it, which called all classifiers so. Train it again."
        )
    return step, whole


def set_aside_damaged(folder: Path, step: int) -> None:
    """Give the checkpoints after that of a step, which `read` has passed over, another name."""

    def set_aside() -> None:
        for later in checkpoints.steps(folder / FOLDER):
            if later > step:
                checkpoints.set_aside(folder / FOLDER, later)

    hosts.by_first(set_aside)


def restore(folder: Path, step: int, name: str, template: Any) -> Any:
    """Return one tree of the checkpoint of a run; see `checkpoints.restore`."""
    return checkpoints.restore(folder / FOLDER, step, name, template)


def made(kind: Any, fields: Any) -> Any:
    """Return the dataclass that fields of JSON make, each of which has a value that its annotation allows.

    Raises:
      KeyError, TypeError, ValueError: they make none.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"it has {strict_json.shown(fields)} where an object is expected")
    if isinstance(kind, UnionType):  # the class that has all these fields
        known = [(one, {field.name for field in dataclasses.fields(one)}) for one in typing.get_args(kind)]
        kind = next((one for one, names in known if names >= set(fields)), known[0][0])
    hints = typing.get_type_hints(kind)
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"its {name} is {strict_json.shown(value)}")
    if hasattr(kind, "from_dict"):
        return kind.from_dict(fields)
    inner = {
        name
        for name, hint in hints.items()
        if any(map(dataclasses.is_dataclass, typing.get_args(hint) or [hint]))
    }
    tuples = {name for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    values = {name: tuple(value) if name in tuples else value for name, value in fields.items()}
    return kind(
        **{name: made(hints[name], value) if name in inner else value for name, value in values.items()}
    )


_PLAIN: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    type(None): (type(None),),
}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON can be that of a field with this annotation."""
    if hint in _PLAIN:
        # Beyond these numbers there are no sizes, seeds, rates and losses.
        wild = type(value) in (int, float) and 2**32 <= abs(value) != math.inf
        return type(value) in _PLAIN[hint] and not (wild and (type(value) is int or abs(value) > 3.4e38))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, parts[1]) for one in value.values())
    if origin is tuple and parts[-1] is not ...:
        return isinstance(value, list) and len(value) == len(parts) and all(map(_fits, value, parts))
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    return not dataclasses.is_dataclass(hint) or isinstance(value, dict)

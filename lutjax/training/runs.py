"""Run folders on disk: checkpoint records and other files, for any model.

Each kind of run defines one dataclass, its record, for everything it depends on and remembers. The
last field is a `History`.
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

import numpy as np

import lutjax
from lutjax.bundles._layout import is_bundle
from lutjax.files import strict_json
from lutjax.files.atomic import (
    digest_of,
    replace_folder as replace_folder,
    write_atomically as write_atomically,
)
from lutjax.files.errors import FolderError
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields
from lutjax.training import checkpoints, hosts
from lutjax.training.errors import CheckpointError, DamagedError, InUseError

try:
    import fcntl
except ImportError:  # Windows: concurrent processes are not detected
    fcntl = None  # type: ignore[assignment]

FOLDER = "checkpoints"  # checkpoint folder name inside a run folder
CURVES = "curves.csv"  # file with all measurements, in a run folder
LOCK = ".lock"  # lock file for writing into a run folder; contains the writer's process id

_FINISHED = "finished.json"

COMMANDS = {
    "lm": "train lm",
    "digits": "train classify",
    "ca": "train ca",
    "classify": "train classify",
}
"""Run kinds, each with the command that trains and resumes them."""

KINDS = {"lm": "text", "digits": "samples", "ca": "target"}
"""Kinds of older records without a kind field, each with its identifying field."""

USES = {"train lm": "generate {}", "train classify": "predict {} FILE", "train ca": "info {}"}
"""Commands that use a run, with a placeholder for its folder, by training command."""


@dataclasses.dataclass
class Record:
    """Base dataclass for non-array checkpoint data: the run's settings and its `History`."""

    kind: ClassVar[str]  # one of `COMMANDS`

    def own_kind(self) -> str:
        """Return this run's kind: the kind of its class, unless its data make a difference."""
        return self.kind


R = TypeVar("R", bound=Record)


@dataclasses.dataclass(frozen=True)
class Source:
    """Run data: the given path (None for the default data), size and SHA-256."""

    path: str | None
    size: int
    digest: str

    @classmethod
    def create(cls, path: Path | None, size: int, digest: str) -> "Source":
        """Return a source with the path made absolute."""
        return cls(None if path is None else str(path.absolute()), size, digest)


@dataclasses.dataclass
class History:
    """Measurements, each with the number of completed steps: training losses and test results.

    `other` has results of a second test, for run kinds with one. `lengths` has the total step
    counts requested at the start and at each resumption, if they changed.
    """

    train: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    test: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    lengths: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    other: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "History":
        """Restore a history from the output of `dataclasses.asdict`."""
        return cls(**{name: [(s, x) for s, x in points] for name, points in fields.items()})


@dataclasses.dataclass
class Finished:
    """Completed parts of the work after the last step."""

    digest: str  # checkpoint digest
    # For each part by name, whether it has a file with that name, and the displayed lines
    parts: dict[str, tuple[bool, list[str]]] = dataclasses.field(default_factory=dict)
    why: str = ""  # reason why training stopped, in words; empty until everything is done
    # SHA-256 by written file name
    digests: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Finished | None":
        """Read the finishing record in a run folder; None if its latest checkpoint has none."""
        try:
            finished = cls._read(folder)
            return finished if finished.digest == checkpoints.peek(folder / FOLDER)[2] else None
        except (FileNotFoundError, ValueError):  # missing, or written by another version
            return None

    @classmethod
    def _read(cls, folder: Path) -> "Finished":
        """Read the finishing record in a run folder, for any checkpoint."""
        fields = Fields(_FINISHED)
        content = strict_json.loads((folder / _FINISHED).read_bytes())
        digest, why = (fields.field(content, name, str) for name in ("digest", "why"))
        parts = fields.field(content, "parts", dict)
        digests = fields.field({"digests": {}, **content}, "digests", dict)
        if not _fits(parts, dict[str, tuple[bool, list[str]]]) or not _fits(
            digests, dict[str, str]
        ):
            raise ValueError(f"{_FINISHED}: 'parts' or 'digests' are not those of files.")
        # The file may come from somebody else: a name must not lead out of the folder.
        for name in (*parts, *digests):
            if len(name.encode()) > 255 or {"/", "\0"} & set(name):
                raise ValueError(
                    f"{_FINISHED}: no file has the name {strict_json.format_value(name)}."
                )
        return cls(
            digest, {name: (file, lines) for name, (file, lines) in parts.items()}, why, digests
        )

    def write(self, folder: Path) -> None:
        """Write the record into a run folder."""
        with write_run_file(folder / _FINISHED) as path:
            path.write_text(json.dumps(dataclasses.asdict(self)))

    def has(self, folder: Path, part: str) -> bool:
        """Return True if a part is done and its file, if any, exists."""
        return part in self.parts and (not self.parts[part][0] or (folder / part).is_file())

    def record_file(self, folder: Path, name: str) -> None:
        """Store the digest of a file if it was written."""
        if (digest := digest_of(folder / name)) is not None:
            self.digests[name] = digest

    def is_complete(self, folder: Path) -> bool:
        """Return True if everything is done."""
        return bool(self.why) and all(self.has(folder, part) for part in self.parts)


def read_finishing_record(folder: Path) -> Finished:
    """Return the finishing record for the latest checkpoint in a run folder."""
    return Finished.read(folder) or Finished(checkpoints.peek(folder / FOLDER)[2])


def results(folder: Path) -> tuple[str, ...]:
    """Return a finished run's result lines, its first part; empty before the end."""
    finished = Finished.read(folder)
    first = next(iter(finished.parts.values()), (False, [])) if finished else (False, [])
    return tuple(first[1])


def list_changed_files(folder: Path) -> list[str]:
    """Return a line for each file of a finished run, except checkpoints, that has changed."""
    try:
        finished = Finished._read(folder)
        if finished.digest != checkpoints.peek(folder / FOLDER)[2]:  # more steps were taken since
            return []
    except (FileNotFoundError, CheckpointError):
        return []
    except ValueError as error:
        return [
            f"{folder / _FINISHED} is damaged ({in_a_line(error)}): delete it; "
            "--resume finishes the run again."
        ]
    lines = []
    for name, digest in finished.digests.items():
        now = digest_of(folder / name)
        if now is None:
            lines.append(f"{folder / name} is missing: --resume writes it again.")
        elif now != digest:
            lines.append(
                f"{folder / name} has changed since the run wrote it: delete it; "
                "--resume writes it again."
            )
    return lines


def write_curves(path: Path, history: History, names: tuple[str, ...]) -> None:
    """Write all measurements as a table: step, kind, value. `names` has the two or three kinds."""
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
def write_run_file(path: Path) -> Iterator[Path]:
    """Yield a path for a run file, as `write_atomically`; only the first process keeps the file."""
    if hosts.is_first():
        with write_atomically(path) as unfinished:
            yield unfinished
    else:
        # Other processes do the same work, since drawing and testing may run on all devices.
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a run folder against other runs; create it if missing.

    The first process holds the lock for all processes of the run. The operating system releases it
    when the process ends for any reason.

    Raises:
      InUseError: another process holds the lock.
    """
    with ExitStack() as stack:
        hosts.call_in_first(lambda: stack.enter_context(_lock_folder(folder)))
        yield


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    if not is_lock(folder / LOCK):
        raise InUseError(
            f"{folder / LOCK} is not a lutjax lock file, and would be overwritten: choose another "
            "folder, or move it away."
        )
    # Append mode creates the file, and keeps the id of a process that holds the lock.
    with (folder / LOCK).open("a+") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise InUseError(
                    f"{folder} is in use: process {file.read() or '?'} is training there. Wait "
                    "until it has ended, or choose another folder."
                ) from None
            except OSError as error:  # some file systems do not support locks
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def existing_outputs(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield paths in a folder without a run that a run writing these files would overwrite."""
    for name in (CURVES, _FINISHED, *names):
        if (folder / name).exists() or (folder / name).is_symlink():
            yield folder / name
    if not is_lock(folder / LOCK):
        yield folder / LOCK
    yield from checkpoints.foreign_entries(folder / FOLDER)


def is_lock(path: Path) -> bool:
    """Return True if a path is a file of `lock`, or does not exist."""
    if not path.exists():
        return not path.is_symlink()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return re.fullmatch(rb"\d{0,20}", file.read(32)) is not None


def check_space(folder: Path, n_bytes: int) -> None:
    """Raise OSError if the disk lacks space for one checkpoint."""
    free = hosts.call_in_first(lambda: shutil.disk_usage(folder).free)
    if free < n_bytes:
        reason = (
            f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {n_bytes / 1e6:,.1f} MB, "
            f"{free / 1e6:,.1f} MB are free"
        )
        raise OSError(errno.ENOSPC, reason, str(folder))


def exists(folder: Path) -> bool:
    """Return True if a run folder holds a checkpoint."""
    return bool(checkpoints.steps(folder / FOLDER))


def check(folder: Path) -> None:
    """Raise CheckpointError for a folder without a run, with a description of its content."""
    if exists(folder):
        return
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist.")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give the folder of a run.")
    if is_bundle(folder):
        raise CheckpointError(
            f"{folder} is a bundle, without the optimizer state and the data: give the run folder."
        )
    # The folder may be too deep, too high, or renamed; say which other folder has the run.
    for outer in folder.absolute().parents:
        if exists(outer):
            outer_path = outer if folder.is_absolute() else os.path.relpath(outer)
            raise CheckpointError(f"{folder} is a part of a run: give {outer_path}.")
    if checkpoints.is_checkpoint(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint without its run: move it to RUN/{FOLDER}/STEP, and give RUN."
        )
    if _holds_checkpoints(folder):
        raise CheckpointError(
            f"{folder} holds checkpoints, but is not named '{FOLDER}': rename it, and give the "
            "folder that contains it."
        )
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    runs_inside = [path for path in inner if exists(path)]
    if runs_inside:
        names = " or ".join(map(str, runs_inside[:5])) + (", ..." if len(runs_inside) > 5 else "")
        raise CheckpointError(
            f"{folder} is not the folder of a run, but holds {len(runs_inside)}: give {names}."
        )
    for path in inner:
        if not _holds_checkpoints(path):
            continue
        if path.name == FOLDER:
            raise CheckpointError(
                f"{path} holds a checkpoint whose name is not its step: "
                "rename it to the number of its steps."
            )
        raise CheckpointError(
            f"{folder} holds no checkpoint, but {path} does: "
            f"rename that folder to {folder / FOLDER}."
        )
    if (folder / LOCK).exists():
        raise CheckpointError(
            f"{folder} holds no checkpoint: the run was stopped before its first one. "
            "Start it again, without --resume."
        )
    raise CheckpointError(f"{folder} holds no checkpoint.")


def _holds_checkpoints(folder: Path) -> bool:
    return any(checkpoints.is_checkpoint(path) for path in folder.iterdir() if path.is_dir())


def save(
    folder: Path,
    step: int,
    trees: Mapping[str, Any],
    record: Record,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint into a run folder; see `checkpoints.save`."""
    import jax  # not at the top: reading a run's facts needs no JAX

    meta = {
        "lutjax": lutjax.__version__,
        "versions": {
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "kind": record.own_kind(),
        **dataclasses.asdict(record),
    }
    checkpoints.save(folder / FOLDER, step, trees, meta, beside)


def kind(folder: Path) -> str:
    """Return a folder's run kind, one of `COMMANDS`; raise CheckpointError for an unknown one."""
    check(folder)
    try:
        meta = checkpoints.peek(folder / FOLDER)[1]
    except DamagedError:
        meta = checkpoints.read_meta(folder / FOLDER, on_damage=lambda message: None)[1]
    run_kind = meta.get("kind") or next(
        (name for name, field in KINDS.items() if field in meta), None
    )
    if not isinstance(run_kind, str) or run_kind not in COMMANDS:
        raise CheckpointError(
            f"{folder} holds a run of the kind {in_a_line(run_kind, 40)}; "
            f"lutjax {lutjax.__version__} supports {', '.join(COMMANDS)}."
        )
    return run_kind


def resumption(kind: str, folder: Path) -> str:
    """Return the shell command for resuming a run.

    Example:
      >>> from pathlib import Path
      >>> from lutjax.training.runs import resumption
      >>> resumption("digits", Path("my runs"))
      "lutjax train classify --resume --out 'my runs'"
    """
    return f"lutjax {COMMANDS[kind]} --resume --out {shlex.quote(str(folder))}"


def use(kind: str, folder: Path) -> str:
    """Return the shell command for using a run's model, without the program name.

    Example:
      >>> from pathlib import Path
      >>> from lutjax.training.runs import use
      >>> use("digits", Path("my runs"))
      "predict 'my runs' FILE"
    """
    return USES[COMMANDS[kind]].format(shlex.quote(str(folder)))


def check_kind(folder: Path, wanted: str, *, trains: bool = True) -> str:
    """Return a folder's run kind; its training command must be the one for `wanted`.

    `trains`: whether the run is to be resumed, rather than used; an error names the matching
    command.

    Raises:
      CheckpointError: another command trains it, or as `kind`.
    """
    run_kind = kind(folder)
    if COMMANDS[run_kind] != COMMANDS[wanted]:
        advice = (
            f"continue it with {resumption(run_kind, folder)}"
            if trains
            else f"use it by lutjax {use(run_kind, folder)}"
        )
        raise CheckpointError(
            f"{folder} is a run of {COMMANDS[run_kind]}, not of {COMMANDS[wanted]}: {advice}"
        )
    return run_kind


def check_model(config: object, name: str | None, configs: Mapping[str, type]) -> None:
    """Check that a run's model config is of the class `configs` has for `name`, if not None.

    Raises:
      CheckpointError: the run trains another model.

    Example:
      >>> from lutjax.training.runs import check_model
      >>> check_model(3, "integer", {"integer": int, "text": str})
      >>> check_model(3, "text", {"integer": int, "text": str})
      Traceback (most recent call last):
      lutjax.training.errors.CheckpointError: the run trains another model: integer, not text.
    """
    if name is not None and not isinstance(config, configs[name]):
        actual = next(other for other, kind in configs.items() if isinstance(config, kind))
        raise CheckpointError(f"the run trains another model: {actual}, not {name}.")


def read(
    folder: Path, record: type[R], *, on_damage: Callable[[str], None] = checkpoints.warn
) -> tuple[int, R]:
    """Return the completed steps and the record at the latest intact checkpoint.

    It takes at most 100 times the memory of the run. A dataclass field is built by its
    ``from_dict`` if defined, else from its fields.

    Raises:
      CheckpointError: no checkpoint exists, or it has another version's fields or another run kind.
    """
    run_kind = check_kind(folder, record.kind, trains=False)
    step, meta = checkpoints.read_meta(folder / FOLDER, on_damage=on_damage)
    version = meta.pop("lutjax", None)
    for name in ("kind", "versions"):
        meta.pop(name, None)
    try:
        whole: R = build_fields(record, meta)
    except FolderError as error:  # of files beside the run, such as an imported memory
        raise CheckpointError(f"the run in {folder} cannot be read: {in_a_line(error)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} was written by lutjax {in_a_line(version, 40)} "
            f"and does not fit this command and version, {lutjax.__version__}: {in_a_line(error)}"
        ) from error
    if whole.own_kind() != run_kind:
        raise CheckpointError(
            f"{folder} is recorded as a run of the kind {run_kind}, but its data make it "
            f"{whole.own_kind()}: an earlier version of lutjax did not distinguish them. Train it "
            "again."
        )
    return step, whole


def set_aside_damaged(folder: Path, step: int) -> None:
    """Rename the checkpoints after the given step, which `read` has skipped."""

    def set_aside() -> None:
        for later in checkpoints.steps(folder / FOLDER):
            if later > step:
                checkpoints.set_aside(folder / FOLDER, later)

    hosts.call_in_first(set_aside)


def restore(folder: Path, step: int, name: str, template: Any) -> Any:
    """Return one tree from a run checkpoint; see `checkpoints.restore`."""
    return checkpoints.restore(folder / FOLDER, step, name, template)


def build_fields(kind: Any, fields: Any) -> Any:
    """Build a dataclass from JSON fields, checking each value against its annotation."""
    if not isinstance(fields, dict):
        raise ValueError(f"it has {strict_json.format_value(fields)} where an object is expected")
    if isinstance(kind, UnionType):  # the class with all these fields
        known = [
            (one, {field.name for field in dataclasses.fields(one)})
            for one in typing.get_args(kind)
        ]
        kind = next((one for one, names in known if names >= set(fields)), known[0][0])
    hints = typing.get_type_hints(kind)
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"its {name} is {strict_json.format_value(value)}")
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
        **{
            name: build_fields(hints[name], value) if name in inner else value
            for name, value in values.items()
        }
    )


_PLAIN: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    type(None): (type(None),),
}


def _fits(value: Any, hint: Any) -> bool:
    if hint in _PLAIN:
        # No size, seed, rate or loss exceeds these limits.
        wild = type(value) in (int, float) and 2**32 <= abs(value) != math.inf
        return type(value) in _PLAIN[hint] and not (
            wild and (type(value) is int or abs(value) > 3.4e38)
        )
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, parts[1]) for one in value.values())
    if origin is tuple and parts[-1] is not ...:
        return (
            isinstance(value, list) and len(value) == len(parts) and all(map(_fits, value, parts))
        )
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    return not dataclasses.is_dataclass(hint) or isinstance(value, dict)

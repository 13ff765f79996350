"""Checkpoints: arrays written by Orbax, and a JSON file with their metadata and checksums.

A checkpoint is the folder ``<directory>/<step>``: one Orbax folder for each tree, and
``checkpoint.json`` with the metadata, the shape and dtype of every array and the SHA-256 of every
file. It is written under a temporary name and renamed when complete, and renamed before deletion,
so a killed run leaves the previous checkpoint intact. Digests are verified before Orbax opens a
file, because Orbax returns some damaged arrays without an error. A damaged checkpoint is skipped in
favor of the previous one.

Several processes write and read a checkpoint together in a shared folder: each process writes its
addressable array shards and digests its share of the files. Only the first process writes
``checkpoint.json`` and renames.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from lutjax import extras
from lutjax.files import strict_json
from lutjax.files.atomic import digest_of
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields
from lutjax.training import hosts
from lutjax.training.errors import CheckpointError, DamagedError

# Orbax and JAX take seconds to import, and reading metadata needs neither. A run without Orbax must
# fail before its first step, not at its first checkpoint.
extras.require(__name__, "orbax")

FORMAT = 1  # version number for the layout described above
KEEP = 2  # checkpoints kept per directory; older ones are deleted after each save

_META = "checkpoint.json"
_DAMAGED = ".damaged"
_UNFINISHED = re.compile(r"\.\d+(\.damaged)?\.tmp")
_WRITTEN = re.compile(r"\d+(\.damaged)?")


def warn(message: str) -> None:
    """Warn about a damaged checkpoint, the default for `on_damage`."""
    warnings.warn(message, stacklevel=2)


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the checkpoint steps in a directory, ascending; empty if it does not exist."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder is a checkpoint, regardless of its name."""
    return (folder / _META).is_file()


def unsupported_reason(folder: Path) -> str | None:
    """Return a reason against checkpoints in a folder, or None."""
    path = folder.absolute().as_posix()
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"the name of {folder} is not UTF-8, which checkpoints need"
    if "\\" in path:  # TensorStore treats it as a slash and writes arrays elsewhere
        return f"the path of {folder} has a backslash, which checkpoints cannot have"
    return None


def foreign_entries(directory: Path) -> Iterator[Path]:
    """Yield the directory entries outside complete and partial checkpoints."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        yield directory
    elif directory.is_dir():
        for entry in sorted(directory.iterdir()):
            if not entry.is_dir() or not (
                _WRITTEN.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name)
            ):
                yield entry
            elif _WRITTEN.fullmatch(entry.name):
                yield from _foreign_files(entry)


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Yield foreign files in a checkpoint's folder; nothing if it has no file list."""
    try:
        files = {folder / name for name in (_META, *_content(folder)["files"])}
    except CheckpointError:
        if is_checkpoint(folder):
            return
        files = set()
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and path not in files:
            yield path


def save(
    directory: str | os.PathLike[str],
    step: int,
    trees: Mapping[str, Any],
    meta: Mapping[str, Any],
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint.

    Args:
      directory: one run's checkpoint directory; created if missing.
      step: completed steps.
      trees: pytrees of arrays by name.
      meta: JSON-compatible metadata.
      beside: writes additional files into the checkpoint's folder; called in all processes.

    Raises:
      CheckpointError: an undamaged checkpoint of this step exists.
      OSError: it cannot be written; partial files are removed, and earlier checkpoints remain.
    """
    directory = Path(directory)
    target = directory / str(step)
    temporary = directory.absolute() / f".{step}.tmp"
    if hosts.call_in_first(target.exists):
        try:
            read_meta(directory, step)
        except DamagedError:  # a run that resumed before it reaches this step again
            hosts.call_in_first(lambda: set_aside(directory, step))
        else:
            raise CheckpointError(f"{target} exists; a checkpoint is never overwritten.")

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for unfinished in directory.iterdir():
            if _UNFINISHED.fullmatch(unfinished.name):
                shutil.rmtree(unfinished)
        temporary.mkdir()

    def finish(content: Mapping[str, Any]) -> None:
        (temporary / _META).write_text(json.dumps(content))
        os.replace(temporary, target)
        # Delete only after the new checkpoint has its name. A rename comes first, since a killed
        # deletion would leave a folder that looks like a damaged checkpoint.
        damaged = directory.glob(f"[0-9]*{_DAMAGED}")
        for old in [*(directory / str(s) for s in steps(directory)[:-KEEP]), *damaged]:
            unfinished = directory / f".{old.name}.tmp"
            os.replace(old, unfinished)
            shutil.rmtree(unfinished)

    hosts.call_in_first(begin)
    try:
        if beside is not None:
            with hosts.run_together():
                beside(temporary)
        content = _write(temporary, step, trees, meta)
        hosts.call_in_first(lambda: finish(content))
    finally:
        if hosts.is_first():
            shutil.rmtree(temporary, ignore_errors=True)


def _write(
    folder: Path, step: int, trees: Mapping[str, Any], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the arrays, and return the `_META` content."""
    import orbax.checkpoint as ocp

    arrays = {name: _flat(tree) for name, tree in trees.items()}
    with _convert_write_errors(folder), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        for name, flat in arrays.items():
            writer.save(folder / name, args=ocp.args.StandardSave(flat))

    def list_files() -> list[str]:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return [path.relative_to(folder).as_posix() for path in files]

    names = hosts.call_in_first(list_files)
    content = {
        "format": FORMAT,
        "step": step,
        "meta": dict(meta),
        "arrays": {name: _signature(flat) for name, flat in arrays.items()},
        "files": _digests(folder, names),
    }
    return {**content, "digest": _content_digest(content)}


@contextmanager
def _convert_write_errors(folder: Path) -> Iterator[None]:
    """Convert Orbax's write errors to OSError.

    Suppress the additional tracebacks from its threads.
    """
    logger = logging.getLogger("absl")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    except ValueError as error:  # TensorStore has no other type for a full disk
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(folder.parent)) from error
    finally:
        logger.disabled = disabled


def set_aside(directory: Path, step: int) -> None:
    """Rename a checkpoint, and keep it until the next one is complete."""
    aside = directory / f"{step}{_DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(directory / str(step), aside)


def peek(directory: str | os.PathLike[str]) -> tuple[int, dict[str, Any], str]:
    """Return step, metadata and digest of the latest checkpoint, and verify only the metadata."""
    available = steps(directory)
    if not available:
        raise CheckpointError(f"{directory} holds no checkpoint.")
    content = _content(Path(directory) / str(available[-1]))
    return available[-1], content["meta"], _content_digest(content)


def read_meta(
    directory: str | os.PathLike[str],
    step: int | None = None,
    *,
    on_damage: Callable[[str], None] = warn,
) -> tuple[int, dict[str, Any]]:
    """Return step and metadata of the latest undamaged checkpoint, or of the one at `step`.

    It takes at most 100 times the memory of the checkpoint. `on_damage` gets a message for each
    skipped damaged checkpoint.

    Raises:
      CheckpointError: there is no checkpoint.
      DamagedError: all checkpoints are damaged, or the one at `step` is.
    """
    directory = Path(directory)
    available = hosts.call_in_first(lambda: steps(directory))
    if not available or (step is not None and step not in available):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{directory} holds {what}.")
    if step is not None:
        return step, _verify(directory / str(step))
    # Reported only when an older checkpoint is intact: otherwise the error names all of them.
    damaged: list[str] = []
    for step in reversed(available):
        try:
            meta = _verify(directory / str(step))
        except DamagedError as error:
            damaged.append(str(error))
            continue
        for message in damaged:
            on_damage(f"{message} The one of step {step} takes its place.")
        return step, meta
    if len(damaged) > 1:
        raise DamagedError(f"every checkpoint in {directory} is damaged: {' '.join(damaged)}")
    raise DamagedError(f"{damaged[0]} There is no other.")


def _verify(folder: Path) -> dict[str, Any]:
    """Verify all checkpoint files and return the metadata."""
    content = _content(folder)
    actual = _digests(folder, list(content["files"]))
    for name, digest in content["files"].items():
        if actual[name] is None:
            raise _damage_error(folder, f"{name} is missing")
        if actual[name] != digest:
            raise _damage_error(folder, f"{name} has changed since it was written")
    meta: dict[str, Any] = content["meta"]
    return meta


def restore(directory: str | os.PathLike[str], step: int, name: str, template: Any) -> Any:
    """Read one tree from a checkpoint verified by `read_meta`.

    Args:
      directory: checkpoint directory.
      step: checkpoint step.
      name: tree name.
      template: a pytree of arrays or `jax.ShapeDtypeStruct`; the result has its structure. Each
        array gets the template's ``sharding``, or else resides on the first device of this process,
        independent of the saved sharding.

    Raises:
      CheckpointError: the checkpoint's arrays differ from the template.
    """
    import jax
    import orbax.checkpoint as ocp

    folder = Path(directory) / str(step)
    if why := unsupported_reason(folder):
        raise CheckpointError(f"{why}: rename or move it.")
    flat = _flat(template)
    saved, expected = _content(folder)["arrays"].get(name, {}), _signature(flat)
    for key in sorted({*saved, *expected}):
        if saved.get(key) != expected.get(key):
            raise CheckpointError(
                f"the checkpoint {folder} does not fit this model: "
                f"its array {in_a_line(f'{name}/{key}')} is {_describe_signature(saved.get(key))}, "
                f"not {_describe_signature(expected.get(key))}."
            )
    # Without a sharding Orbax would require the devices of the run that saved.
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = {
        k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None) or device)
        for k, a in flat.items()
    }
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        arrays = reader.restore(folder.absolute() / name, args=ocp.args.StandardRestore(abstract))
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[key] for key in flat])


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return a phrase for every field of `wanted` whose value in `saved` differs or is missing."""
    return [
        f"{field} is {saved[field]!r} in the checkpoint, not {value!r}"
        if field in saved
        else f"the checkpoint has no {field}"
        for field, value in wanted.items()
        if field not in saved or saved[field] != value
    ]


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / _META).read_bytes())
        whole = isinstance(content, dict) and content.pop("digest", None) == _content_digest(
            content
        )
    except OSError as error:
        if not folder.exists():
            raise DamagedError(f"there is no checkpoint {folder}.") from error
        raise _damage_error(folder, f"{_META} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _damage_error(folder, f"{_META} is not JSON") from error
    if not whole:
        raise _damage_error(folder, f"{_META} has changed since it was written")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format "
            f"{strict_json.format_value(content.get('format'))}; this version reads {FORMAT}."
        )
    try:
        _check(content)
    except ValueError as error:
        raise _damage_error(folder, str(error).removesuffix(".")) from error
    # Older versions wrote no step; their folders are named by it.
    step = content.get("step", int(folder.name) if folder.name.isdecimal() else 0)
    if str(step) != folder.name:
        raise CheckpointError(
            f"the checkpoint {folder} is from step {step}: "
            f"rename it to {folder.with_name(str(step))}."
        )
    return dict(content)


def _check(content: Mapping[str, Any]) -> None:
    """Raise ValueError if `_META` lacks required fields: its digest does not prove its author."""
    fields = Fields(_META)
    fields.field(content, "meta", dict)
    if "step" in content and fields.field(content, "step", int) < 0:
        raise ValueError(
            f"{_META}: 'step' is {strict_json.format_value(content['step'])}; "
            "expected a number of steps."
        )
    for name, digest in fields.field(content, "files", dict).items():
        if not isinstance(digest, str) or not _is_inside(name):
            raise ValueError(
                f"{_META}: files has {strict_json.format_value(name)}; expected a checkpoint file "
                "with its digest."
            )
    for name, arrays in fields.field(content, "arrays", dict).items():
        for key, signature in Fields(f"{_META}: arrays").field({name: arrays}, name, dict).items():
            kind, shape = (
                signature if isinstance(signature, list) and len(signature) == 2 else (None, None)
            )
            if (
                not isinstance(kind, str)
                or not isinstance(shape, list)
                or any(type(size) is not int for size in shape)
            ):
                raise ValueError(
                    f"{_META}: the array {strict_json.format_value(f'{name}/{key}')} is "
                    f"{strict_json.format_value(signature)}; expected a dtype and a shape."
                )


def _is_inside(name: str) -> bool:
    """Return True if a name refers to a file in a checkpoint's folder."""
    path = PurePosixPath(name)
    try:
        lengths = [len(part.encode()) for part in path.parts]
    except UnicodeEncodeError:
        return False
    return (
        0 < max(lengths, default=0) < 256
        and len(name) < 1024
        and not path.is_absolute()
        and not {"..", "."} & set(path.parts)
        and "\0" not in name
    )


def _damage_error(folder: Path, why: str) -> DamagedError:
    return DamagedError(f"the checkpoint {folder} is damaged: {why}.")


def _flat(tree: Any) -> dict[str, Any]:
    import jax

    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _signature(flat: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [str(a.dtype), list(a.shape)] for key, a in flat.items()}


def _describe_signature(signature: list[Any] | None) -> str:
    return "missing" if signature is None else in_a_line(f"{signature[0]}{signature[1]}", 100)


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str | None]:
    """Return file digests, computed across processes; None for a missing file."""
    with ThreadPoolExecutor() as threads:
        own = list(
            threads.map(
                lambda name: digest_of(folder / name), names[hosts.index() :: hosts.count()]
            )
        )
    shares = hosts.gather(own)
    return {name: shares[i % len(shares)][i // len(shares)] for i, name in enumerate(names)}

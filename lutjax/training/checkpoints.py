"""Checkpoints: arrays written by Orbax, and a JSON file that says what they are and proves them whole.

A checkpoint is the folder ``<directory>/<step>``: one Orbax folder for each tree, and ``checkpoint.json`` with
the metadata, the shape and dtype of every array and the SHA-256 of every file. It is written under another name
and renamed when complete, so a run that is killed leaves the previous checkpoint, never half of one. The digests
are compared before Orbax opens anything, because Orbax returns some damaged arrays without an error.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lutjax._extras import needed_by

with needed_by(__name__):
    import orbax.checkpoint as ocp


FORMAT = 1
"""Version of the layout described above."""

KEEP = 2
"""Checkpoints that stay in a directory; older ones are deleted when a new one is complete."""

_META = "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint that does not exist, is damaged, or belongs to another configuration."""


def steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory, in ascending order; none if there is no such directory."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())


def save(directory: Path, step: int, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint.

    Args:
      directory: holds the checkpoints of one run; made if it is missing.
      trees: pytrees of arrays by name.
      meta: anything that JSON can hold.

    Raises:
      CheckpointError: there is a checkpoint of this step.
    """
    target = directory / str(step)
    if target.exists():
        raise CheckpointError(f"{target} exists; a checkpoint is never overwritten.")
    directory.mkdir(parents=True, exist_ok=True)
    for unfinished in directory.glob(".*.tmp"):
        shutil.rmtree(unfinished)
    temporary = directory.absolute() / f".{step}.tmp"
    temporary.mkdir()
    arrays = {name: _flat(tree) for name, tree in trees.items()}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        for name, flat in arrays.items():
            writer.save(temporary / name, args=ocp.args.StandardSave(flat))
    content = {
        "format": FORMAT,
        "meta": dict(meta),
        "arrays": {name: _signature(flat) for name, flat in arrays.items()},
        "files": {
            path.relative_to(temporary).as_posix(): _digest(path)
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        },
    }
    content["digest"] = _content_digest(content)
    (temporary / _META).write_text(json.dumps(content))
    os.replace(temporary, target)
    for old in steps(directory)[:-KEEP]:
        shutil.rmtree(directory / str(old))


def read_meta(directory: Path, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """The step and metadata of the latest checkpoint (or of that at `step`), every file of which is whole.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    found = steps(directory)
    if not found or (step is not None and step not in found):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{directory} holds {what}.")
    step = found[-1] if step is None else step
    folder = directory / str(step)
    content = _content(folder)
    for name, digest in content["files"].items():
        if not (folder / name).is_file():
            raise _damaged(folder, f"{name} is missing")
        if _digest(folder / name) != digest:
            raise _damaged(folder, f"{name} has changed since it was written")
    return step, content["meta"]


def restore(directory: Path, step: int, name: str, template: Any) -> Any:
    """Reads one tree of a checkpoint whose files `read_meta` has found whole.

    Args:
      template: a pytree of arrays or `jax.ShapeDtypeStruct`; the result has its structure.

    Raises:
      CheckpointError: the checkpoint has other arrays than the template.
    """
    folder = directory / str(step)
    flat = _flat(template)
    saved, wanted = _content(folder)["arrays"].get(name, {}), _signature(flat)
    for key in sorted({*saved, *wanted}):
        if saved.get(key) != wanted.get(key):
            raise CheckpointError(
                f"the checkpoint {folder} does not fit this model: its array {name}/{key} is "
                f"{_words(saved.get(key))}, not {_words(wanted.get(key))}."
            )
    # Without a sharding Orbax would ask for the devices of the run that saved.
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for k, a in flat.items()}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        arrays = reader.restore(folder.absolute() / name, args=ocp.args.StandardRestore(abstract))
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[key] for key in flat])


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """A phrase for every field of `wanted` that has another value in `saved`."""
    return [
        f"{field} is {saved.get(field)!r} in the checkpoint, not {value!r}"
        for field, value in wanted.items()
        if saved.get(field) != value
    ]


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / _META).read_bytes())
    except OSError as error:
        raise _damaged(folder, f"{_META} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _damaged(folder, f"{_META} is not JSON") from error
    if not isinstance(content, dict) or content.pop("digest", None) != _content_digest(content):
        raise _damaged(folder, f"{_META} has changed since it was written")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content.get('format')!r}; this version reads {FORMAT}."
        )
    return content


def _damaged(folder: Path, why: str) -> CheckpointError:
    earlier = [s for s in steps(folder.parent) if s < int(folder.name)]
    advice = f" Remove that folder to go on from step {earlier[-1]}." if earlier else ""
    return CheckpointError(f"the checkpoint {folder} is damaged: {why}.{advice}")


def _flat(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _signature(flat: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [str(a.dtype), list(a.shape)] for key, a in flat.items()}


def _words(signature: list[Any] | None) -> str:
    return "missing" if signature is None else f"{signature[0]}{signature[1]}"


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Overlays: folders with the updated rows of a mapped table."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.files import strict_json
from lutjax.files.atomic import digest_of
from lutjax.files.errors import FolderError
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields

ABOUT = "overlay.json"
"""File that describes an overlay."""


class OverlayError(FolderError):
    """Error for an overlay that is damaged, or belongs to another table."""


@dataclasses.dataclass(frozen=True, eq=False)
class Overlay:
    """Updated rows of a mapped table, from a folder.

    Attributes:
      folder: the folder.
      about: ``overlay.json``: base file description, layout digest, number of rows, rule, and
        digests for overlays below and for the other files.
      digest: SHA-256 of ``overlay.json``, in hexadecimal digits.
      ids: increasing row ids, int64.
      arrays: ``rows``, float32 ``[ids, elements]``, and the rule's state.
    """

    folder: Path
    about: dict[str, Any]
    digest: str
    ids: np.ndarray
    arrays: dict[str, np.ndarray]


def is_overlay(folder: str | os.PathLike[str]) -> bool:
    """Return True if a folder holds an overlay."""
    return (Path(folder) / ABOUT).is_file()


def write_overlay(
    folder: Path, ids: np.ndarray, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]
) -> None:
    """Write an overlay into an existing folder.

    Args:
      folder: the folder.
      ids: increasing row ids.
      arrays: ``rows`` and the rule's state, one row per id.
      about: further contents of ``overlay.json``.
    """
    for name, array in {"ids": ids, **arrays}.items():
        np.save(folder / f"{name}.npy", array)
    files = {f"{name}.npy": digest_of(folder / f"{name}.npy") for name in ("ids", *arrays)}
    facts_of_overlay = {"format": 1, **about, "updated": len(ids), "files": files}
    # The description comes last: a folder without it is no overlay, so an interrupted write is
    # noticed.
    (folder / ABOUT).write_text(json.dumps(facts_of_overlay, indent=1) + "\n")


def read_overlay(folder: str | os.PathLike[str]) -> Overlay:
    """Return the overlay in a folder; its arrays are mapped.

    Raises:
      OverlayError: there is none, or it is damaged.
    """
    folder = Path(folder)
    if not is_overlay(folder):
        raise OverlayError(f"{folder} is no overlay: it has no {ABOUT}.")
    text = (folder / ABOUT).read_bytes()
    try:
        about, fields = strict_json.loads(text), Fields(ABOUT)
        if fields.field(about, "format", int) != 1:
            raise ValueError(f"its format is {about['format']}; this version reads 1")
        for name, kind in (("base", dict), ("files", dict), ("updated", int)):
            fields.field(about, name, kind)
        arrays = {}
        for name, digest in about["files"].items():
            path = folder / name
            if path.parent != folder or path.suffix != ".npy" or digest_of(path) != digest:
                raise ValueError(f"{name} is missing, or has changed")
            # Small arrays are read: each map would hold a file open.
            arrays[path.stem] = np.load(
                path, mmap_mode="r" if path.stat().st_size > 4096 else None, allow_pickle=False
            )
        ids = np.asarray(arrays.pop("ids"))
        n_rows, width = about["base"]["rows"], about["base"]["width"]
        ordered = ids.dtype == np.int64 and ids.ndim == 1 and bool((np.diff(ids) > 0).all())
        if not ordered or (ids.size and not 0 <= ids[0] <= ids[-1] < n_rows):
            raise ValueError("ids.npy holds no increasing row ids of the table")
        if (arrays["rows"].shape, arrays["rows"].dtype) != ((len(ids), width), np.float32):
            raise ValueError(
                f"rows.npy is {arrays['rows'].dtype}{list(arrays['rows'].shape)}, "
                f"not float32{[len(ids), width]}"
            )
    except (ValueError, TypeError, KeyError, OSError, EOFError) as error:
        raise OverlayError(f"the overlay {folder} is damaged: {in_a_line(error)}.") from error
    return Overlay(folder, about, hashlib.sha256(text).hexdigest(), ids, arrays)


def facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return JSON-compatible facts about an overlay, and its base files.

    Raises:
      OverlayError: there is none, or it is damaged.
    """
    overlay = read_overlay(folder)
    files = [overlay.folder / name for name in (ABOUT, *overlay.about["files"])]
    return {
        "kind": "overlay",
        "folder": str(overlay.folder.absolute()),
        "digest": overlay.digest,
        "bytes": sum(path.stat().st_size for path in files),
        **overlay.about,
    }


def lines(about: Mapping[str, Any]) -> list[str]:
    """Return the facts about an overlay as text lines."""
    base = about["base"]
    return [
        f"{about['folder']}: an overlay of a mapped table, {about['bytes'] / 1e6:,.1f} MB",
        (
            f"rows: {about['updated']:,} of {base['rows']:,}, with {base['width']} elements each; "
            f"rule: {about.get('rule') or 'none'}"
        ),
        f"digest: {about['digest']}",
        f"layout: {about.get('layout') or 'not recorded'}",
        *(f"below: the overlay {digest}" for digest in about.get("below", ())),
        *(
            (
                f"base: {part['tensor']} in {part['file']}, {part['size']:,} bytes, "
                f"with the header {part['header']}"
            )
            for part in base["parts"]
        ),
    ]

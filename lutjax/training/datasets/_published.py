"""Identification of published data by checksum, with errors for partial matches."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from lutjax.training.samples import SamplesError


def md5(data: bytes) -> str:
    """Return an MD5 digest as published for data sets."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def identify(
    folder: Path, found: Mapping[str, str], published: Mapping[str, Mapping[str, str]]
) -> str | None:
    """Return the name of the published data set with these MD5 digests by file name, or None.

    Raises:
      SamplesError: only some files match a data set.
    """
    for name, sums in published.items():
        same = [file for file in found if sums.get(file) == found[file]]
        if not same:
            continue
        other = [file for file in found if file not in same]
        if other:
            raise SamplesError(
                f"{folder}: {', '.join(same)} of {len(found)} files match {name} by their "
                f"checksums, but {other[0]} has MD5 {found[other[0]]} and not "
                f"{sums.get(other[0])}: it is damaged, or from other data. Get {name} again, or "
                "save your own data as a .npz file."
            )
        return name
    return None

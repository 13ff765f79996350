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
    """Return the published data set's name for these checksums, or None.

    Args:
      found: MD5 by file name.
      published: MD5 by file name, for each data set.

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
                f"{folder}: {', '.join(same)} of {len(found)} files are those of {name} by their checksums, but {other[0]} has MD5 "
                f"{found[other[0]]} and not {sums.get(other[0])}: it is damaged, or of other data. Get the files of {name} again, "
                "or save data of your own as a .npz file."
            )
        return name
    return None

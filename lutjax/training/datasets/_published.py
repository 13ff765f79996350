"""Checksums by which published data are known, and what is said where files are only partly those."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from lutjax.training.samples import SamplesError


def md5(data: bytes) -> str:
    """Return the MD5 of some bytes, as data sets publish it."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def identify(
    folder: Path, found: Mapping[str, str], published: Mapping[str, Mapping[str, str]]
) -> str | None:
    """Return the name of the published data that files are, by their checksums; None where they are others.

    Args:
      found: the MD5 of each file, by its name.
      published: for each data set the MD5 of each of its files.

    Raises:
      SamplesError: some of the files are those of a data set, and others are not.
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

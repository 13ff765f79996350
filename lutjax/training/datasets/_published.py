"""Identification of published data by checksum, with errors for partial matches."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from lutjax.training.samples import SamplesError

_ALGORITHMS = {32: ("MD5", "md5"), 64: ("SHA-256", "sha256")}
"""Names of checksum algorithms, by number of hexadecimal digits."""


def identify(
    folder: Path, contents: Mapping[str, bytes], published: Mapping[str, Mapping[str, str]]
) -> str | None:
    """Return the published data set's name for these files, or None.

    Args:
      contents: content by file name.
      published: SHA-256, or MD5 where nothing else is published, by file name for each data set.

    Raises:
      SamplesError: only some files match a data set.
    """
    for name, sums in published.items():
        word, algorithm = _ALGORITHMS[len(next(iter(sums.values())))]
        checksums = {
            file: hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
            for file, data in contents.items()
        }
        same = [file for file in checksums if sums.get(file) == checksums[file]]
        if not same:
            continue
        other = [file for file in checksums if file not in same]
        if other:
            raise SamplesError(
                f"{folder}: {', '.join(same)} of {len(checksums)} files are those of {name} "
                f"by their checksums, but {other[0]} has {word} {checksums[other[0]]} "
                f"and not {sums.get(other[0])}: it is damaged, or of other data. "
                f"Get the files of {name} again, or save data of your own as a .npz file."
            )
        return name
    return None

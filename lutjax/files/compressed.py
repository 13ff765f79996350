"""Untrusted compressed files, unpacked only up to a plausible size."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 100
"""Maximum unpacked bytes per compressed byte.

Tables and images need less; repetitive data may reach a thousand.
"""

ALWAYS = 1 << 22  # unpacked bytes allowed for any compressed file


class PackedError(ValueError):
    """A compressed file that is damaged or unpacks to too much; the message names it."""


def check(path: Path, unpacked: int, advice: str) -> None:
    """Raise PackedError if a file unpacks to more than 100 times its size, and to more than 4 MiB.

    The message ends with advice for a legitimate file.
    """
    size = path.stat().st_size
    if unpacked > max(ALWAYS, MOST * size):
        raise PackedError(
            f"{path} has {size:,} bytes, which unpack to {unpacked:,} or more; at most {MOST} per "
            f"byte, or {ALWAYS:,} in all, are unpacked. If the file is right, {advice}."
        )


class _Gzip(io.RawIOBase):
    """A gzip file, unpacked incrementally with a byte count."""

    def __init__(self, path: Path):
        self._path, self._file, self._n_bytes = path, gzip.GzipFile(path), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            n = self._file.readinto(buffer)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PackedError(
                f"{self._path} is not a whole gzip file: {error}. Get it again."
            ) from error
        # The size in a gzip file is modulo 4 GiB and may be wrong: count what comes out.
        self._n_bytes += n
        check(self._path, self._n_bytes, f"unpack it yourself (gunzip {self._path.name})")
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def open_compressed(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes, unpacked if its name ends in ``.gz``.

    Reading raises PackedError as `check` does, or if the file is damaged.
    """
    packed = path.suffix.lower() == ".gz"
    opened: io.BufferedReader = (
        io.BufferedReader(_Gzip(path), 1 << 16) if packed else path.open("rb")
    )
    with opened as file:
        yield file

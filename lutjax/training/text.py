"""Byte texts: sources, splits, and the bigram baseline."""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

Bytes = UInt8[np.ndarray, "_"]

STANDARD_LIBRARY = "standard library"
"""Name of the default text: the source of the running Python's standard library."""

MAPPED_BYTES = 2**26
"""Larger files are memory-mapped, so only the parts in use occupy memory.

They must not change during a run.
"""

STANDARD_LIBRARY_BYTES = 4_000_000
"""Length limit for the default text, so that every Python version trains on the same amount."""

MOST_BYTES = 2**31 - 1  # maximum text length in bytes; positions are int32

# Tests, generated tables, demonstrations, and packages outside Python itself.
_EXCLUDED_FOLDERS = frozenset((
    "site-packages", "dist-packages", "__pycache__", "__phello__", "test", "tests", "idlelib",
    "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip",
))  # fmt: skip


class TextError(ValueError):
    """An unreadable text, or one too short or too long for training."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in three contiguous parts: the last 10 % for test, the 5 % before it for validation.

    Attributes:
      name: text description, for messages.
      train: training bytes.
      validation: bytes for choosing sizes and rates.
      test: bytes for the reported loss.
      digest: SHA-256 of all bytes, which lets a resumed run detect a different text.
    """

    name: str
    train: Bytes
    validation: Bytes
    test: Bytes
    digest: str

    @property
    def size(self) -> int:
        """Bytes in all three parts."""
        return self.train.size + self.validation.size + self.test.size


def load_text(path: str | Path | None = None, *, context: int = 1) -> Text:
    """Read and split a text. It takes at most 20 times the memory of the files.

    Args:
      path: a file; or a folder, whose UTF-8 files are joined in path order (hidden files and
        folders are skipped); or None for the source of Python's standard library.
      context: every part must hold more than this many bytes plus one.

    Raises:
      TextError: nothing can be read at `path`, or a part is too short.
    """
    if path is None:
        return split_text(_standard_library(), name=STANDARD_LIBRARY, context=context)
    path = Path(path)
    try:
        data: bytes | np.memmap
        if path.is_dir():
            data = b"\n".join(_folder(path))
        elif path.stat().st_size > MAPPED_BYTES:
            data = np.memmap(path, mode="r")
        else:
            data = path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read the text {path}: {error.strerror or error}.") from error
    return split_text(data, name=str(path), context=context)


def split_text(data: bytes | np.memmap, *, name: str, context: int = 1) -> Text:
    """Split `data` into training, validation and test part; see `Text`.

    Raises:
      TextError: a part has fewer than ``context + 2`` bytes, or positions in the text exceed int32.
    """
    if not len(data):
        raise TextError(f"the text {name} is empty.")
    if len(data) > MOST_BYTES:
        raise TextError(
            f"the text {name} has {len(data):,} bytes; the maximum is {MOST_BYTES:,}, as positions "
            "are int32. Give a part of it."
        )
    array = np.frombuffer(data, np.uint8)
    test, validation = len(data) // 10, len(data) // 20
    parts = np.split(array, [len(data) - test - validation, len(data) - test])
    for part, label in zip(parts, ("training", "validation", "test"), strict=True):
        if part.size < context + 2:
            raise TextError(
                f"the text {name} is too short: its {label} part has {part.size} of {len(data)} "
                f"bytes; a context of {context} needs at least {context + 2} bytes per part, "
                f"{20 * (context + 2)} in all."
            )
    return Text(name, parts[0], parts[1], parts[2], hashlib.sha256(array.data).hexdigest())


def bigram_loss(train: Bytes, test: Bytes, *, smoothing: float = 0.1) -> float:
    """Return the loss of a byte-pair table: the baseline for models with a longer context.

    The probability of a byte after another is ``(count + smoothing) / (total + 256 * smoothing)``,
    counted on `train`.

    Returns:
      mean nats per byte over all bytes of `test` except the first.
    """
    counts = np.zeros(256 * 256, np.int64)
    for first in range(0, len(train) - 1, 2**24):  # in chunks: pairs are eight times as large
        part = train[first : first + 2**24 + 1]
        counts += np.bincount(part[:-1].astype(np.int64) * 256 + part[1:], minlength=256 * 256)
    table = (smoothing + counts).reshape(256, 256)
    log_p = np.log(table) - np.log(table.sum(1, keepdims=True))
    return float(-log_p[test[:-1], test[1:]].mean())


def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    chunks, size = [], 0
    for path in _files(root, _EXCLUDED_FOLDERS):
        # _sysconfigdata has the paths of this machine, and would make texts differ.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            chunks.append(path.read_bytes())
            size += len(chunks[-1])
            if size >= STANDARD_LIBRARY_BYTES:
                break
    if not chunks:
        raise TextError(
            f"Python's standard library has no source in {root}: give a text (--text PATH)."
        )
    return b"".join(chunks)[:STANDARD_LIBRARY_BYTES]


def _files(root: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield files below `root` in an order independent of the file system."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in excluded and not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _folder(root: Path) -> list[bytes]:
    chunks = []
    for path in _files(root):
        if not path.is_file():
            continue  # reading a pipe would block
        data = path.read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue  # an image or an archive, not text
        chunks.append(data)
    if not chunks:
        raise TextError(f"the folder {root} holds no UTF-8 text.")
    return chunks

"""Files and folders that are whole or not there."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal digits, None if there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entries(folder: Path) -> set[str]:
    """Return the paths of all files and links in a folder, and with a slash at their end of empty folders, relative to it."""
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_dir():
            found.add(name)
        elif not any(path.iterdir()):
            found.add(f"{name}/")
    return found


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yield the path at which to write a file that moves to `path` when the block ends, if it was written.

    An error, or the end of the process, leaves what was there before.
    """
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        yield unfinished
        with contextlib.suppress(FileNotFoundError):
            os.replace(unfinished, path)
    except OSError as error:
        if error.filename == str(unfinished):
            error.filename = str(path)  # the name that was asked for
        raise
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield the path at which to make a folder that moves to `folder` when the block ends, in the place of what is there.

    An error, or the end of the process in the block, leaves what was there before.
    """
    unfinished, replaced = (folder.with_name(f".{what}-{folder.name}") for what in ("unfinished", "replaced"))
    if replaced.exists() and not folder.exists():  # a process was killed between two renames
        os.replace(replaced, folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(folder, replaced)
        os.replace(unfinished, folder)
    finally:
        if replaced.exists() and not folder.exists():
            os.replace(replaced, folder)
        for left in (unfinished, replaced):
            shutil.rmtree(left, ignore_errors=True)


def content(source: str | bytes | os.PathLike[str]) -> str | bytes:
    """Return the bytes of the file at a path; anything else, which is content, as it is."""
    return Path(source).read_bytes() if isinstance(source, os.PathLike) else source

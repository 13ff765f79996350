"""Files and folders written atomically."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal digits, or None if it does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entries(folder: Path) -> set[str]:
    """Return relative paths of all files, links and empty folders (with a slash) in a folder."""
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_dir():
            names.add(name)
        elif not any(path.iterdir()):
            names.add(f"{name}/")
    return names


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path for writing a file that moves to `path` when the block ends, if it was written.

    An error, or the end of the process, keeps the previous file.
    """
    # Beside the target: only a rename within one file system is atomic.
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        yield unfinished
        with contextlib.suppress(FileNotFoundError):
            os.replace(unfinished, path)
    except OSError as error:
        if error.filename == str(unfinished):
            error.filename = str(path)  # the requested name
        raise
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a path for building a folder that replaces `folder` when the block ends.

    An error, or the end of the process in the block, keeps the previous folder.
    """
    unfinished, replaced = (
        folder.with_name(f".{what}-{folder.name}") for what in ("unfinished", "replaced")
    )
    if replaced.exists() and not folder.exists():  # a process was killed between two renames
        os.replace(replaced, folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        # A rename cannot replace a folder that has entries, so the old one moves aside first.
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(folder, replaced)
        os.replace(unfinished, folder)
    finally:
        if replaced.exists() and not folder.exists():
            os.replace(replaced, folder)
        for path in (unfinished, replaced):
            shutil.rmtree(path, ignore_errors=True)


def content(source: str | bytes | os.PathLike[str]) -> str | bytes:
    """Return the bytes of the file at a path; return content unchanged."""
    return Path(source).read_bytes() if isinstance(source, os.PathLike) else source

"""The shared library, and the level of instructions that it uses."""

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lutjax
import lutjax_cpu

_SUFFIXES = (".so", ".dylib", ".dll")
_AGAIN = "install it again, in a checkout of lutjax: pip install --force-reinstall --no-deps ./native"
_NONE = "no_library.txt"  # says why the package was built without one


@functools.cache
def opened() -> ctypes.CDLL:
    """Return the library.

    Raises:
      ImportError: it was not built, not for this machine, or with other files of Python; or lutjax has another version.
    """
    if lutjax_cpu.__version__ != lutjax.__version__:
        raise ImportError(
            f"lutjax-cpu {lutjax_cpu.__version__} runs with lutjax {lutjax_cpu.__version__}, and this is lutjax {lutjax.__version__}; "
            "install one version of both, in a checkout of lutjax: pip install . ./native"
        )
    folder = Path(__file__).parent
    paths = [path for path in folder.glob("_library.*") if path.suffix in _SUFFIXES]
    if not paths:
        raise ImportError(
            f"lutjax-cpu {not_built()}" if not_built() else f"lutjax-cpu has no library in {folder}; {_AGAIN}"
        )
    try:
        library = ctypes.CDLL(str(paths[0]))
    except OSError as error:
        raise ImportError(f"lutjax-cpu cannot load its library ({error}); {_AGAIN}") from error
    _refuse_others(library, paths[0])
    for function in (library.lutjax_cpu_use_threads, library.lutjax_cpu_use_memory):
        function.argtypes = [ctypes.c_int64]
        function.restype = ctypes.c_int64
    return library


@functools.cache
def not_built() -> str | None:
    """Return why this package was built without a library, as it is where there is no compiler; None if it was not."""
    path = Path(__file__).parent / _NONE
    return f"{path.read_text(encoding='utf-8')}; then {_AGAIN}" if path.exists() else None


def _refuse_others(library: ctypes.CDLL, path: Path) -> None:
    """Raise an error if a library was built with other files of Python: its kernels might read arrays that nobody gives them."""
    folder = Path(__file__).parent
    function = "lutjax_cpu_of_python"
    if not hasattr(library, function) or _said(library, function) != digest(
        folder.parent, folder.rglob("*.py")
    ):
        raise ImportError(
            f"lutjax-cpu: {path} was built with other files of Python than those beside it; {_AGAIN}"
        )


def _said(library: ctypes.CDLL, function: str) -> str:
    """Return the text that a function of a library returns."""
    return _text(library[function])


def _text(ask: Any, *numbers: int) -> str:
    ask.restype = ctypes.c_char_p
    text: bytes | None = ask(*numbers)
    return (text or b"").decode()


def digest(root: Path, files: Iterable[Path]) -> str:
    """Return sixteen hexadecimal digits for files, as `CMakeLists.txt` makes them."""
    of_each = {f.relative_to(root).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    lines = "".join(f"{name} {of_each[name]}\n" for name in sorted(of_each))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def sources() -> str:
    """Return a digest of the sources of the library."""
    return _said(opened(), "lutjax_cpu_of_sources")


def highest_level() -> int:
    """Return the highest level of instructions that this CPU has, from 0 (x86-64-v2, v3, v4; elsewhere one); -1: not even that."""
    level: int = opened().lutjax_cpu_highest_level()
    return level


def levels_built() -> list[int]:
    """Return the levels of instructions that the library has: all, or that of the machine on which it was built."""
    found: int = opened().lutjax_cpu_levels()
    return [level for level in range(found.bit_length()) if found >> level & 1]


def levels() -> list[int]:
    """Return the levels of instructions that both the library and this CPU have. The last one is used."""
    return [level for level in levels_built() if level <= highest_level()]


def name_of(level: int) -> str:
    """Return a level's name, with instructions that it has."""
    return _text(opened().lutjax_cpu_level_name, level)


def about() -> str:
    """Return what runs here of the library: its level of instructions."""
    return name_of(levels()[-1])


def unsupported() -> str | None:
    """Return why this CPU runs no kernel of the library, or None."""
    if levels():
        return None
    lowest = levels_built()[0]
    why = f"needs the instructions of {name_of(lowest)}, which this CPU lacks"
    return f"{why}: it was built on another machine; {_AGAIN}" if lowest else why


@contextlib.contextmanager
def use_level(level: int) -> Iterator[None]:
    """Use the kernels of another level in this block, in all threads.

    Raises:
      ValueError: this CPU or the library lacks it.
    """
    before = opened().lutjax_cpu_use_level(level)
    if before < -1:
        raise ValueError(
            f"use_level: level is {level}; it must be one that this CPU and this library have: {', '.join(map(str, levels())) or 'none'}."
        )
    try:
        yield
    finally:
        opened().lutjax_cpu_use_level(before)


@contextlib.contextmanager
def use_threads(n: int) -> Iterator[None]:
    """Share work among ``n`` threads of XLA's pool in this block instead of all of them."""
    before = opened().lutjax_cpu_use_threads(n)
    try:
        yield
    finally:
        opened().lutjax_cpu_use_threads(before)


@contextlib.contextmanager
def use_memory(n_bytes: int) -> Iterator[None]:
    """Give each call of a kernel at most ``n_bytes`` of memory beside its arrays in this block."""
    before = opened().lutjax_cpu_use_memory(n_bytes)
    try:
        yield
    finally:
        opened().lutjax_cpu_use_memory(before)

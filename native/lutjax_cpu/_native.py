"""The shared library and its instruction level."""

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
_AGAIN = (
    "install it again, in a checkout of lutjax: pip install --force-reinstall --no-deps ./native"
)
_NONE = "no_library.txt"  # says why the package was built without one


@functools.cache
def opened() -> ctypes.CDLL:
    """Return the library.

    Raises:
      ImportError: the library was not built, was built for another machine or from other Python
        files, or lutjax has another version.
    """
    if lutjax_cpu.__version__ != lutjax.__version__:
        raise ImportError(
            f"lutjax-cpu {lutjax_cpu.__version__} runs with lutjax {lutjax_cpu.__version__}, "
            f"and this is lutjax {lutjax.__version__}; "
            "install one version of both, in a checkout of lutjax: pip install . ./native"
        )
    folder = Path(__file__).parent
    paths = [path for path in folder.glob("_library.*") if path.suffix in _SUFFIXES]
    if not paths:
        reason = not_built() or f"has no library in {folder}; {_AGAIN}"
        raise ImportError(f"lutjax-cpu {reason}")
    # For example, without the C++ runtime that the library was linked to.
    try:
        library = ctypes.CDLL(str(paths[0]))
    except OSError as error:
        raise ImportError(f"lutjax-cpu cannot load its library ({error}); {_AGAIN}") from error
    _check_sources(library, paths[0])
    for function in (library.lutjax_cpu_use_threads, library.lutjax_cpu_use_memory):
        function.argtypes = [ctypes.c_int64]
        function.restype = ctypes.c_int64
    return library


@functools.cache
def not_built() -> str | None:
    """Return the reason that this package was built without a library, or None.

    Without a compiler, the package builds without a library.
    """
    path = Path(__file__).parent / _NONE
    return f"{path.read_text(encoding='utf-8')}; then {_AGAIN}" if path.exists() else None


def _check_sources(library: ctypes.CDLL, path: Path) -> None:
    """Raise if the library was built from other Python files, whose arrays its kernels expect."""
    folder = Path(__file__).parent
    function = "lutjax_cpu_of_python"
    # Arrays and options of another version would be read as garbage, without an error.
    expected = digest(folder.parent, folder.rglob("*.py"))
    if not hasattr(library, function) or _text(library[function]) != expected:
        raise ImportError(
            f"lutjax-cpu: {path} was built with other files of Python than those beside it; "
            f"{_AGAIN}"
        )


def _text(ask: Any, *numbers: int) -> str:
    ask.restype = ctypes.c_char_p
    text: bytes | None = ask(*numbers)
    return (text or b"").decode()


def digest(root: Path, files: Iterable[Path]) -> str:
    """Return sixteen hexadecimal digits for files, as `CMakeLists.txt` makes them."""
    digests = {}
    for path in files:
        name = path.relative_to(root).as_posix()  # the same on every system
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def sources() -> str:
    """Return a digest for the library's sources."""
    return _text(opened()["lutjax_cpu_of_sources"])


def highest_level() -> int:
    """Return this CPU's highest instruction level.

    Levels count from 0 (x86-64-v2, v3, v4; one level on other architectures). -1 means that the CPU
    lacks even level 0.
    """
    level: int = opened().lutjax_cpu_highest_level()
    return level


def levels_built() -> list[int]:
    """Return the library's instruction levels: all, or only the build machine's level."""
    output: int = opened().lutjax_cpu_levels()
    return [level for level in range(output.bit_length()) if output >> level & 1]


def levels() -> list[int]:
    """Return the levels supported by both the library and this CPU. The last one is used."""
    return [level for level in levels_built() if level <= highest_level()]


def name_of(level: int) -> str:
    """Return an instruction level's name."""
    return _text(opened().lutjax_cpu_level_name, level)


def about() -> str:
    """Return the name of the instruction level in use."""
    return name_of(levels()[-1])


def unsupported() -> str | None:
    """Return the reason that this CPU runs no library kernel, or None."""
    if levels():
        return None
    lowest = levels_built()[0]
    why = f"needs the instructions of {name_of(lowest)}, which this CPU lacks"
    return f"{why}: it was built on another machine; {_AGAIN}" if lowest else why


@contextlib.contextmanager
def use_level(level: int) -> Iterator[None]:
    """Use another level's kernels in this block, in all threads.

    Raises:
      ValueError: this CPU or the library lacks the level.
    """
    # The library returns the level before, or less than -1 for one that it does not have.
    before = opened().lutjax_cpu_use_level(level)
    if before < -1:
        raise ValueError(
            f"use_level: level is {level}; it must be one that this CPU and this library have: "
            f"{', '.join(map(str, levels())) or 'none'}."
        )
    try:
        yield
    finally:
        opened().lutjax_cpu_use_level(before)


@contextlib.contextmanager
def use_threads(n: int) -> Iterator[None]:
    """Limit work in this block to ``n`` threads from XLA's pool."""
    before = opened().lutjax_cpu_use_threads(n)
    try:
        yield
    finally:
        opened().lutjax_cpu_use_threads(before)


@contextlib.contextmanager
def use_memory(n_bytes: int) -> Iterator[None]:
    """Limit each kernel call in this block to ``n_bytes`` of scratch memory."""
    before = opened().lutjax_cpu_use_memory(n_bytes)
    try:
        yield
    finally:
        opened().lutjax_cpu_use_memory(before)

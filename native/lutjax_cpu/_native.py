"""The shared library, and the level of instructions that it uses."""

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import lutjax
import lutjax_cpu

_SUFFIXES = (".so", ".dylib", ".dll")
_AGAIN = (
    'install it again: pip install --force-reinstall "lutjax[cpu]", or in a checkout pip install ./native'
)


@functools.cache
def opened() -> ctypes.CDLL:
    """Return the library.

    Raises:
      ImportError: it was not built, not for this machine, or with other files of Python; or lutjax has another version.
    """
    if lutjax_cpu.__version__ != lutjax.__version__:
        raise ImportError(
            f"lutjax-cpu {lutjax_cpu.__version__} runs with lutjax {lutjax_cpu.__version__}, and this is lutjax {lutjax.__version__}; "
            'install one version of both: pip install --upgrade "lutjax[cpu]", or in a checkout pip install . ./native'
        )
    folder = Path(__file__).parent
    paths = [path for path in folder.glob("_library.*") if path.suffix in _SUFFIXES]
    if not paths:
        raise ImportError(f"lutjax-cpu has no library in {folder}; install it with: pip install ./native")
    try:
        library = ctypes.CDLL(str(paths[0]))
    except OSError as error:
        raise ImportError(f"lutjax-cpu cannot load its library ({error}); {_AGAIN}") from error
    _refuse_others(library, paths[0])
    for function in (library.lutjax_cpu_use_threads, library.lutjax_cpu_use_memory):
        function.argtypes = [ctypes.c_int64]
        function.restype = ctypes.c_int64
    return library


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
    ask = library[function]
    ask.restype = ctypes.c_char_p
    text: bytes = ask()
    return text.decode()


def digest(root: Path, files: Iterable[Path]) -> str:
    """Return sixteen hexadecimal digits for files, as `CMakeLists.txt` makes them."""
    of_each = {f.relative_to(root).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    lines = "".join(f"{name} {of_each[name]}\n" for name in sorted(of_each))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def sources() -> str:
    """Return a digest of the sources of the library."""
    return _said(opened(), "lutjax_cpu_of_sources")


def highest_level() -> int:
    """Return the highest level of instructions that this CPU runs, from 0 (x86-64-v2, v3, v4; elsewhere one); -1: not even that."""
    level: int = opened().lutjax_cpu_highest_level()
    return level


def unsupported() -> str | None:
    """Return why this CPU runs no kernel of the library, or None."""
    return (
        None
        if highest_level() >= 0
        else "needs the instructions of x86-64-v2 (SSE4.2, POPCNT), which this CPU lacks"
    )


@contextlib.contextmanager
def use_level(level: int) -> Iterator[None]:
    """Use the kernels of another level in this block, in all threads.

    Raises:
      ValueError: this CPU does not run it.
    """
    before = opened().lutjax_cpu_use_level(level)
    if before < -1:
        raise ValueError(f"use_level: level is {level}; this CPU runs levels 0 to {highest_level()}.")
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

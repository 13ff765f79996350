"""The shared library, and the level of instructions that it uses."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

_SUFFIXES = (".so", ".dylib", ".dll")


@functools.cache
def opened() -> ctypes.CDLL:
    """Return the library.

    Raises:
      ImportError: it was not built.
    """
    folder = Path(__file__).parent
    paths = [path for path in folder.glob("_library.*") if path.suffix in _SUFFIXES]
    if not paths:
        raise ImportError(f"lutjax-cpu has no library in {folder}; install it with: pip install ./native")
    library = ctypes.CDLL(str(paths[0]))
    library.lutjax_cpu_use_threads.argtypes = [ctypes.c_int64]
    library.lutjax_cpu_use_threads.restype = ctypes.c_int64
    return library


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

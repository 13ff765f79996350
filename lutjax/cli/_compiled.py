"""Compilation cache shared by commands, in the user's cache directory."""

import hashlib
import os
import platform
import sys
from pathlib import Path

SWITCH = "LUTJAX_COMPILATION_CACHE"
"""Environment variable for another directory, or off."""

MOST_BYTES = 2 * 10**9
"""Maximum cache size; the oldest entries are deleted first."""


def keep_compiled() -> None:
    """Enable JAX's compilation cache in a writable home, unless set in JAX or off."""
    import jax

    asked = os.environ.get(SWITCH)
    own = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if own is not None or (asked or "").lower() in ("off", "0", "no", "false"):
        return
    try:
        root = Path(asked).expanduser() if asked else _cache_folder() / "lutjax" / "compiled"
        folder = root / _processor()
        # Cached programs are executed when loaded, so only the owner may write here.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(folder)
    except (OSError, RuntimeError):  # RuntimeError: no home directory, as in containers
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Commands start with many small programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


_INSTRUCTIONS = ("flags", "features")  # of /proc/cpuinfo on x86 and Arm


def _cache_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _processor() -> str:
    """Return a processor name for the cache key, because machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        # The instruction set decides the code of XLA's programs, also on processors of one name.
        named = (line for line in lines if line.split(":")[0].strip().lower() in _INSTRUCTIONS)
        features = next(named, "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine() or 'unknown'}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _make_room(folder: Path) -> None:
    """Delete the oldest programs down to half of `MOST_BYTES` if the cache is larger."""
    # Down to half, so that not every command has to delete something.
    files = sorted(
        (s.st_mtime, s.st_size, path) for path in folder.iterdir() for s in [path.stat()]
    )
    total = sum(size for _, size, _ in files)
    if total <= MOST_BYTES:
        return
    for _, size, path in files:
        path.unlink(missing_ok=True)
        total -= size
        if total <= MOST_BYTES // 2:
            return

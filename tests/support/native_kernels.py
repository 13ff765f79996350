"""Detection of lutjax-cpu for tests: it must be installed from the adjacent sources, or no test uses it.

``python tests/support/native_kernels.py`` prints the outcome and also returns it as exit status.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from folders import ROOT

SOURCES = ROOT / "native"


@functools.cache
def why_not():
    """Return the reason for not using native kernels in tests, or None if tests use them."""
    if not importlib.metadata.entry_points(group="lutjax.kernels", name="cpu"):
        return "lutjax-cpu is not installed: pip install ./native"
    spec = importlib.util.find_spec("lutjax_cpu")
    if spec is None or spec.origin is None:
        return "lutjax-cpu is not whole: it has no package; pip install --force-reinstall ./native"
    return difference(Path(spec.origin).parent, SOURCES)


def difference(folder, sources):
    """Return the difference between an installed package and these sources, or None if they match."""
    if not sources.exists():
        return None
    other = f"lutjax-cpu in {folder} is of other sources than these: pip install --force-reinstall ./native"
    files, theirs = (
        {file.relative_to(root): file.read_bytes() for file in root.rglob("*.py")}
        for root in (sources / "lutjax_cpu", folder)
    )
    if files != theirs:
        return other
    from lutjax_cpu import _native

    try:
        built = _native.sources()
    except ImportError as error:
        return str(error)
    return None if built == digest_of_sources(sources) else other


def digest_of_sources(native: Path) -> str:
    """Return the digest reported by a library built from these sources, see ``native/CMakeLists.txt``."""
    lines = []
    files = [p for kind in ("cc", "h", "def", "map") for p in (native / "src").rglob(f"*.{kind}")]
    for path in sorted(
        [native / "CMakeLists.txt", *files], key=lambda p: p.relative_to(native).as_posix()
    ):
        code = path.read_bytes()
        if path.suffix in (".cc", ".h", ".def"):  # without comments and blank lines
            code = re.sub(rb"\n[ \t\n]*", b"\n", re.sub(rb"[ \t]*//[^\n]*", b"", code))
        lines.append(f"{path.relative_to(native).as_posix()} {hashlib.sha256(code).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def hide():
    """Run lutjax in this process as if lutjax-cpu were not installed."""
    import lutjax
    from lutjax.dispatch import registry

    installed = registry._is_installed
    registry._is_installed = lambda name: name != "lutjax_cpu" and installed(name)
    lutjax.kernel_registry._entry_points = None


if __name__ == "__main__":
    print(f"native kernels: {why_not() or 'of these sources'}")
    sys.exit(why_not() is not None)

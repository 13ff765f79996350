"""lutjax-cpu as tests find it: installed from the sources beside them, or not used by any test.

``python tests/support/native_kernels.py`` says which, as its status, too.
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
    """Return why no test uses native kernels, None where tests do."""
    if not importlib.metadata.entry_points(group="lutjax.kernels", name="cpu"):
        return "lutjax-cpu is not installed: pip install ./native"
    spec = importlib.util.find_spec("lutjax_cpu")
    if spec is None or spec.origin is None:
        return "lutjax-cpu is not whole: it has no package; pip install --force-reinstall ./native"
    return difference(Path(spec.origin).parent, SOURCES)


def difference(folder, sources):
    """Return what tells an installed package from these sources, None where it is of them."""
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
    """Return the digest that a library built from these sources reports, see ``native/CMakeLists.txt``."""
    lines = []
    files = [p for kind in ("cc", "h", "def", "map") for p in (native / "src").rglob(f"*.{kind}")]
    for path in sorted([native / "CMakeLists.txt", *files], key=lambda p: p.relative_to(native).as_posix()):
        code = path.read_bytes()
        if path.suffix in (".cc", ".h", ".def"):  # without comments and blank lines
            code = re.sub(rb"\n[ \t\n]*", b"\n", re.sub(rb"[ \t]*//[^\n]*", b"", code))
        lines.append(f"{path.relative_to(native).as_posix()} {hashlib.sha256(code).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def hide():
    """Let lutjax in this process run as where lutjax-cpu is not installed."""
    import lutjax
    from lutjax.dispatch import registry

    installed = registry._installed
    registry._installed = lambda name: name != "lutjax_cpu" and installed(name)
    lutjax.kernel_registry._entry_points = None


if __name__ == "__main__":
    print(f"native kernels: {why_not() or 'of these sources'}")
    sys.exit(why_not() is not None)

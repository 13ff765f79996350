"""Which source a check was of: a digest of a kernel's module and of the kernels' modules that it imports."""

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path

_PACKAGE = "lutjax.kernels."


@functools.cache
def digest(target: str) -> str:
    """Sixteen hexadecimal digits for the source of a kernel."""
    found: dict[str, Path] = {}
    _collect(target, found)
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode() + b"\0" + found[name].read_bytes() + b"\0")
    return total.hexdigest()[:16]


def _collect(module: str, found: dict[str, Path]) -> None:
    path = _source(module)
    if module in found or path is None or not module.startswith(_PACKAGE) or module.endswith(".registry"):
        return
    found[module] = path
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            _collect(node.module, found)
            for alias in node.names:
                _collect(f"{node.module}.{alias.name}", found)


@functools.cache
def _source(module: str) -> Path | None:
    if not module.startswith(_PACKAGE):
        return None
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name in a module, not a module
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)

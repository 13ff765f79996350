"""Digest of the source that a check was of: a kernel's module and all modules of lutjax that it imports."""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import io
import tokenize
from pathlib import Path
from typing import TypeGuard

from lutjax.kernels.registry import KernelSpec

_PACKAGE = "lutjax."
# They choose a kernel, and compute nothing.
_CHOOSE = ("lutjax.kernels.registry", "lutjax.kernels.catalogue", "lutjax.kernels._records")


def digest_of(spec: KernelSpec) -> str:
    """Return sixteen hexadecimal digits for the source of an implementation, in Python and in other languages."""
    of_python = digest(spec.target)
    if spec.sources is None:
        return of_python
    return hashlib.sha256(f"{of_python} {spec.sources()}".encode()).hexdigest()[:16]


@functools.cache
def digest(target: str) -> str:
    """Return sixteen hexadecimal digits for the Python source of a kernel.

    They change with any module that the kernel imports, directly or not, unless it only chooses kernels; and not with
    docstrings, comments, blank lines or the version of Python.

    Args:
      target: name of the kernel's module, of lutjax or of another package.
    """
    found: dict[str, _Source] = {}
    packages = (_PACKAGE, f"{target.partition('.')[0]}.")
    todo = [target]
    while todo:
        module = todo.pop()
        if module in found or module in _CHOOSE or not (module == target or module.startswith(packages)):
            continue
        source = _source(module)
        if source is not None:
            found[module] = source
            todo += source.imports
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode() + b"\0" + found[name].code + b"\0")
    return total.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _Source:
    """Source of a module.

    Attributes:
      imports: names that may be modules.
    """

    code: bytes
    imports: tuple[str, ...]


@functools.cache
def _source(module: str) -> _Source | None:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # a name in a module, which another machine may have to import: no module
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    text = Path(spec.origin).read_text()
    imports: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return _Source(code_of(text), tuple(imports))


def code_of(text: str) -> bytes:
    """Return a module's source without docstrings, comments and blank lines.

    The text itself is kept, and only cut: what `ast` and `tokenize` make of it differs between versions of Python; where
    comments and strings begin and end does not.
    """
    lines = [line.encode() for line in io.StringIO(text)]
    cuts = [_place(node) for node in ast.walk(ast.parse(text)) if _is_docstring(node)]
    docstrings = {line for first, _, last, _ in cuts for line in range(first, last)}
    within: set[int] = set()  # lines that end within a string
    strings: list[int] = []  # first lines of the strings that are open
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (first, column), (last, _) = token.start, token.end
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            start = len(token.line[:column].encode())
            cuts.append((first, start, first, start + len(token.string.encode())))
        elif kind.endswith("STRING_START"):  # since Python 3.12, of strings with values in them
            strings.append(first)
        elif kind.endswith("STRING_END"):
            within.update(range(strings.pop(), last))
        elif kind == "STRING":
            within.update(range(first, last))
    for first, start, last, end in sorted(cuts, reverse=True):
        rest = lines[last - 1][end:]
        lines[first - 1 : last] = [lines[first - 1][:start] + rest, *[b""] * (last - first)]
    within -= docstrings
    return b"".join(
        line if number in within else line.rstrip() + b"\n"
        for number, line in enumerate(lines, 1)
        if number in within or line.strip()
    )


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Return whether it is a string that stands alone: documentation of a module, class, function or value."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _place(node: ast.Expr) -> tuple[int, int, int, int]:
    """First line and byte, last line and the byte after it."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset

"""Digest of what the results of a kernel depend on: its function for a direction, and every definition that this uses.

A record is of a kernel as it was. Whether that is what the kernel is now says the source: of the function, of the functions, classes and
constants of lutjax that it names, of those that these name, and so on, without documentation, comments and the words of errors. So a record
stays when a text, a check of another op or an unrelated module changes, and is old when a line changes that the kernel runs.

The program that JAX lowers would say exactly what runs. But it takes a third of a second for each of a thousand cells, and other versions
of JAX, Triton and Python write it in other words: a record could be compared by those alone that made it.

A name says what is used, wherever it stands: of a module that is passed on, everything is; of a class, all methods and the subclasses
beside it. What is found by other means, `getattr` and the like, is not seen: kernels have none.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from lutjax.dispatch.registry import KernelSpec

# They choose kernels and launches, hold arrays or refuse them: results do not depend on them.
_COMPUTE_NOTHING = (
    "lutjax.dispatch.catalog",
    "lutjax.dispatch.contract.Call",
    "lutjax.dispatch.registry",
    "lutjax.dispatch._records",
    "lutjax.ops._checks",
    "lutjax.tuning",
    "lutjax_cpu._native",
)
_CHECKOUT = Path(__file__).parents[2] / "native"  # sources of kernels that need not be installed


def digest_of(spec: KernelSpec, direction: str) -> str | None:
    """Return sixteen hexadecimal digits for the source of an implementation, in Python and in other languages; None if it is not here."""
    of_python = digest(spec.target, direction)
    if spec.sources is None and not spec.target.startswith("lutjax_cpu."):
        return of_python
    words = _sources_of_checkout() if spec.sources is None else spec.sources()
    if of_python is None or words is None:
        return None
    return hashlib.sha256(f"{of_python} {words}".encode()).hexdigest()[:16]


@functools.cache
def digest(target: str, direction: str) -> str | None:
    """Return sixteen hexadecimal digits for the Python source of a kernel: the same in every version of Python; None if it is not here.

    Args:
      target: name of the kernel's module, of lutjax or of another package.
    """
    found = _reached(target, direction)
    if not found:
        return None
    total = hashlib.sha256()
    for (module, name), code in sorted(found.items()):
        total.update(f"{module}.{name}".encode() + b"\0" + code + b"\0")
    return total.hexdigest()[:16]


def _reached(target: str, direction: str) -> dict[tuple[str, str], bytes]:
    """Return the code of every definition that a function of a module uses, by module and name."""
    found: dict[tuple[str, str], bytes] = {}
    seen, todo = set(), [(target, direction)]
    while todo:
        module, name = todo.pop()
        source = _source(module)
        excluded = any(f"{module}.{name}.".startswith(f"{left_out}.") for left_out in _COMPUTE_NOTHING)
        if source is None or excluded or (module, name) in seen:
            continue
        seen.add((module, name))
        if name in source.definitions:
            found[module, name] = b"".join(code_of(part.text) for part in source.definitions[name])
            todo += [(module, other) for other in source.subclasses(name)]
            for part in source.definitions[name]:
                todo += [place for chain in part.uses for place in _places(module, chain)]
        if name in source.imports:
            todo += _places(module, (name,))
    return found


def _places(module: str, chain: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Return module and name of the definitions that dotted names mean in a module."""
    source = _source(module)
    assert source is not None
    if chain[0] in source.definitions:
        yield module, chain[0]
    if chain[0] in source.imports:
        chain = (*source.imports[chain[0]].split("."), *chain[1:])
        n = next((n for n in range(len(chain), 0, -1) if _source(".".join(chain[:n])) is not None), 0)
        if 0 < n < len(chain):
            yield ".".join(chain[:n]), chain[n]
        elif n:  # the module itself: whatever is in it
            whole = _source(".".join(chain))
            assert whole is not None
            yield from ((".".join(chain), name) for name in whole.definitions)


# ------------------------------------------------------------------------------------- modules
@dataclasses.dataclass(frozen=True)
class _Part:
    """Statement of a module.

    Attributes:
      uses: names that it has, each with the attributes that follow it.
      bases: of a class.
    """

    text: str
    uses: frozenset[tuple[str, ...]]
    bases: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class _Source:
    """A module.

    Attributes:
      definitions: statements that bind a name, or do something with it.
      imports: what imported names stand for, of its own package and of lutjax.
    """

    definitions: dict[str, tuple[_Part, ...]]
    imports: dict[str, str]

    def subclasses(self, name: str) -> list[str]:
        """Return the names of the classes that have a class of this module as a base."""
        return [other for other, parts in self.definitions.items() if any(name in p.bases for p in parts)]


@functools.cache
def _source(module: str) -> _Source | None:
    """Return a module; None if it is none."""
    text = _text(module)
    if text is None:
        return None
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    definitions: dict[str, tuple[_Part, ...]] = {}
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        names = _Names()
        names.visit(node)
        bases = {base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)}
        part = _Part("".join(lines[first - 1 : node.end_lineno]), frozenset(names.found), frozenset(bases))
        alone = isinstance(node, ast.Expr)  # it does something with every name that it has
        for name in {chain[0] for chain in names.found} if alone else _bound(node):
            definitions[name] = (*definitions.get(name, ()), part)
    packages = "lutjax", module.partition(".")[0]
    imports = {name: full for name, full in _imports(tree).items() if full.partition(".")[0] in packages}
    return _Source(definitions, imports)


@functools.cache
def _text(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (
        ImportError
    ):  # a name in a module, which another machine may have to import, or of a package that is not installed
        spec = None
    if spec is not None and spec.has_location and spec.origin is not None:
        return Path(spec.origin).read_text(encoding="utf-8")
    place = _CHECKOUT.joinpath(*module.split("."))
    files = [f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()]
    return files[0].read_text(encoding="utf-8") if files else None


def _imports(tree: ast.Module) -> dict[str, str]:
    """Return the full names of all that a module imports, anywhere in it, by the names that it gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds, or of which it sets an element."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    if isinstance(node, ast.Expr):
        return set()
    inner = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
    targets = {_root(n) for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)} - {""}
    return targets.union(*map(_bound, inner))


def _root(node: ast.AST) -> str:
    """Return the name that an expression begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Names(ast.NodeVisitor):
    """Collects names with their attributes; of what an error says none."""

    def __init__(self) -> None:
        self.found: set[tuple[str, ...]] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            chain, inner = [inner.attr, *chain], inner.value
        if isinstance(inner, ast.Name):
            self.found.add((inner.id, *chain))
        else:
            self.visit(inner)

    def visit_Name(self, node: ast.Name) -> None:
        self.found.add((node.id,))

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)


# ------------------------------------------------------------------------------------- text
@functools.cache
def code_of(text: str) -> bytes:
    """Return source without docstrings, comments, blank lines, and what errors say.

    The text itself is kept, and only cut: what `ast` and `tokenize` make of it differs between versions of Python; where
    comments and strings begin and end does not.
    """
    lines = [line.encode() for line in io.StringIO(text)]
    tree = list(ast.walk(ast.parse(text)))
    cuts = [_place(node) for node in tree if _is_docstring(node)]
    docstrings = {line for first, _, last, _ in cuts for line in range(first, last)}
    said = [_place(words) for node in tree for words in _words(node)]
    cuts += said
    docstrings |= {line for first, _, last, _ in said for line in range(first, last)}
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


def _words(node: ast.AST) -> list[ast.expr]:
    """Return what a statement says when it fails."""
    said = node.exc if isinstance(node, ast.Raise) else node.msg if isinstance(node, ast.Assert) else None
    return [] if said is None else [said]


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Return whether it is a string that stands alone: documentation of a module, class, function or value."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _place(node: ast.expr | ast.Expr) -> tuple[int, int, int, int]:
    """First line and byte, last line and the byte after it."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


# ------------------------------------------------------------------------------------- C++
@functools.cache
def _sources_of_checkout() -> str | None:
    """Return what the library of native kernels says of its sources, of those in this checkout; None if there are none."""
    src = [p for kind in ("cc", "h", "def", "map") for p in (_CHECKOUT / "src").rglob(f"*.{kind}")]
    files = {
        p.relative_to(_CHECKOUT).as_posix(): p for p in (_CHECKOUT / "CMakeLists.txt", *src) if p.exists()
    }
    of_each = {name: hashlib.sha256(_without_words(path)).hexdigest() for name, path in files.items()}
    lines = "".join(f"{name} {of_each[name]}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()[:16] if src else None


def _without_words(path: Path) -> bytes:
    """Return a file without comments and blank lines, as ``native/CMakeLists.txt`` makes it."""
    text = path.read_bytes()
    if path.suffix in (".cc", ".h", ".def"):
        text = re.sub(rb"\n[ \t\n]*", b"\n", re.sub(rb"[ \t]*//[^\n]*", b"", text))
    return text

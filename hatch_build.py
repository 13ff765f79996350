"""Type stubs for the Linen and Haiku layers, added to the wheel by the build.

The classes are created at import, so editors and type checkers cannot see their constructors. The
stubs come from the specification sources, without importing them. In a checkout,
``python hatch_build.py`` writes them next to the modules, where git ignores them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script
    BuildHookInterface = object

LIBRARIES = ("linen", "haiku")
HEADER = '''"""Layers of {library}, written by hatch_build.py."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped, UInt32

import lutjax
from lutjax._typing import Array, Integer
from lutjax.dispatch.registry import Implementation
from lutjax.layers._declared import tables_of as tables_of
from lutjax.layers._memory import History
from lutjax.layers._spec import Arrays, Initializer, Inputs, Mode, Outputs, Scalar
from lutjax.layers.{library}._layer import Attention, Layer
from lutjax.reads import Read
from lutjax.tables.host_tables import HostTables
from lutjax.wiring import Connectivity
from lutjax.wiring._names import Wiring
from lutjax.wiring._sizes import Size

'''


class Sources:
    """Classes and functions in the specification modules, by module and name."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "lutjax" / "layers"
        self.trees = {
            p.stem: ast.parse(p.read_text(encoding="utf-8")) for p in self.folder.glob("_*.py")
        }

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
        """Return the definition for a name in a module, and its own module."""
        for node in self.trees[module].body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
                return self.find((node.module or "").rpartition(".")[2], name)
        raise KeyError(f"{module}.{name}")

    def ancestors(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class after its bases, the last base first; a class may occur twice."""
        module, node = self.find(module, name)
        assert isinstance(node, ast.ClassDef)
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                yield from self.ancestors(module, base.id)
        yield module, node

    def constant(
        self, classes: list[tuple[str, ast.ClassDef]], name: str
    ) -> tuple[str, ast.expr | None]:
        """Return a class attribute's value, and its module."""
        for module, node in reversed(classes):
            for line in node.body:
                if not isinstance(line, ast.Assign | ast.AnnAssign) or not line.value:
                    continue
                target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                if ast.unparse(target) == name:
                    return module, line.value
        return "", None

    def fields(self, classes: list[tuple[str, ast.ClassDef]]) -> dict[str, tuple[str, bool, bool]]:
        """Return a layer's arguments: annotation, has a default, is keyword-only."""
        _, implied = self.constant(classes, "implied")
        fields: dict[str, tuple[str, bool, bool]] = {}
        for _, node in classes:
            if not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                continue
            named = False
            for line in node.body:
                if not isinstance(line, ast.AnnAssign):
                    continue
                name, annotation = ast.unparse(line.target), ast.unparse(line.annotation)
                if "ClassVar" in annotation:
                    continue
                if name == "_":  # KW_ONLY
                    named = True
                else:
                    fields[name] = annotation, line.value is not None, named
        others = {"class_name", *(ast.literal_eval(implied) if implied else ())}
        return {name: field for name, field in fields.items() if name not in others}


def function(node: ast.FunctionDef, name: str, first: list[ast.arg] | None = None) -> str:
    """Return a stub method with a function's signature and docstring.

    Args:
      node: the function.
      name: method name.
      first: parameters in place of ``arrays``, if the function takes them.
    """
    arguments = ast.arguments(
        **{field: getattr(node.args, field) for field in ast.arguments._fields}
    )
    arguments.args = [ast.arg("self"), *node.args.args[1:]]
    if first is not None and arguments.args[1].arg == "arrays":
        arguments.args[1:2] = first
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(...) for d in arguments.kw_defaults]
    returns = ast.unparse(node.returns) if node.returns else "Any"
    doc = (ast.get_docstring(node) or "").replace("\n", "\n        ")
    return f'    def {name}({ast.unparse(arguments)}) -> {returns}:\n        """{doc}"""\n'


def layer(sources: Sources, library: str, module: str, spec: str) -> str:
    """Return a layer's class for a library's stub."""
    classes = list(sources.ancestors(module, spec))
    fields = sources.fields(classes)
    functions = [f for _, c in classes for f in c.body if isinstance(f, ast.FunctionDef)]
    base = "Attention" if any(f.name == "attend_with_cache" for f in functions) else "Layer"
    # These libraries infer the number of inputs at the first call.
    inferred = "in_features" in fields and not fields["in_features"][2]
    positional, keyword = [], []
    lines = []
    for name, (annotation, has_default, named) in fields.items():
        if inferred and not named and not has_default:
            annotation, has_default = f"{annotation} | None", True
        (keyword if named else positional).append(
            f"{name}: {annotation}{' = ...' if has_default else ''}"
        )
        lines.append(f"    {name}: {annotation}")
    parent = ["parent: Any = ..."] if library == "linen" else []
    signature = ", ".join(["self", *positional, "*", *keyword, *parent, "name: str | None = ..."])
    doc = (ast.get_docstring(classes[-1][1]) or "").replace("\n", "\n    ")
    body = [f'class {spec.removesuffix("Spec")}({base}):\n    """{doc}"""\n', *lines]
    body.append(f"\n    def __init__({signature}) -> None: ...\n")
    place, call = sources.constant(classes, "call")
    of_call = sources.find(place, ast.unparse(call))[1] if call else None
    assert isinstance(of_call, ast.FunctionDef)
    body.append(function(of_call, "__call__"))
    first = []
    if library == "linen":
        variables = ast.parse("Mapping[str, Any]", mode="eval").body
        first = [ast.arg("variables", variables)]
    _, methods = sources.constant(classes, "methods")
    for name in ast.literal_eval(methods) if methods else ():
        node = next(f for f in reversed(functions) if f.name == name)  # of the last class
        body.append(function(node, name, first))
    body.append("    def __getattr__(self, name: str) -> Any: ...\n")
    return "\n".join(body)


def stub(root: Path, library: str) -> str:
    """Return a library's stub."""
    sources = Sources(root)
    layers = []
    for module, tree in sorted(sources.trees.items()):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and sources.constant([(module, node)], "example")[1]:
                layers.append(layer(sources, library, module, node.name))
    return HEADER.format(library=library) + "\n\n".join(layers)


def write(root: Path, to: Path) -> dict[Path, str]:
    """Write the stubs below a folder, and return their files with their places in a wheel."""
    stubs = {}
    for library in LIBRARIES:
        place = f"lutjax/layers/{library}/__init__.pyi"
        path = to / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stub(root, library), encoding="utf-8")
        stubs[path] = place
    return stubs


class StubHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Build hook that adds the stubs to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the stubs into the build folder, and include them in non-editable wheels."""
        if version != "editable":
            written = write(Path(self.root), Path(self.directory) / "stubs")
            build_data["force_include"].update(
                {str(path): place for path, place in written.items()}
            )


if __name__ == "__main__":
    here = Path(__file__).parent
    write(here, Path(sys.argv[1]) if len(sys.argv) > 1 else here)

"""Tests for imports: applications and circuits use only public names from lower layers."""

import ast
import tomllib
from collections.abc import Iterator

import pytest
from folders import ROOT

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
LAYERS = next(contract["layers"] for contract in CONTRACTS if contract["id"] == "layers")
LEVELS = {
    name.strip(): level
    for level, layer in zip((2, 1), LAYERS, strict=False)
    for name in layer.split(":")
}  # of applications and circuits; all else is the core


def level(name: str) -> int:
    return LEVELS.get(name.split(".")[1], 0)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_uses(module: str, text: str) -> Iterator[str]:
    """Yield private modules and names imported or accessed from lower layers."""
    names, imported, attributes = set(), {}, []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            attributes.append(node)
        elif isinstance(node, ast.ImportFrom):
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            imported |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                for a in node.names
            }
            names |= {a.name for a in node.names}
    names |= set(imported.values())
    for node in attributes:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in imported:
            names.add(".".join([imported[node.id], *reversed(parts)]))
    for name in sorted(names):
        if name.startswith("lutjax.") and level(name) < level(module) and is_private(name):
            yield name


@pytest.mark.parametrize(("text", "found"), [
    ("from lutjax.values._ids import check", ["lutjax.values._ids.check"]),
    ("from lutjax.values import _ids, Edges", ["lutjax.values._ids"]),
    ("def f():\n  import lutjax.values._ids as ids", ["lutjax.values._ids"]),
    ("import lutjax.values\nlutjax.values._ids.check()",
        ["lutjax.values._ids", "lutjax.values._ids.check"]),
    ("from lutjax import values\nvalues._ids", ["lutjax.values._ids"]),
    ("from lutjax.circuits import _names", ["lutjax.circuits._names"]),
    ("from lutjax.cli import _main\nfrom lutjax import __version__\nfrom os import _exit", []),
])  # fmt: skip
def test_private_uses_are_found(text: str, found: list[str]) -> None:
    assert list(private_uses("lutjax.training.lm", text)) == found


def test_the_layers_use_only_public_names_of_lower_layers() -> None:
    result = []
    for path in (ROOT / "lutjax").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if level(module) > 0:
            result += [
                f"{module}: {name}"
                for name in private_uses(module, path.read_text(encoding="utf-8"))
            ]
    assert not result, "make these names public, or move them"

"""The package has three storeys, and imports go down: the core knows no circuits and no applications, circuits no applications.

Imports inside functions count, and modules that are imported by a name in a text.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CORE, CIRCUITS, APPLICATIONS = range(3)
STOREYS = {
    CORE: (
        *(
            "_arguments",
            "_compat",
            "_extras",
            "_jit_key",
            "_lazy",
            "_typing",
            "_version",
            "reads",
            "reference",
            "sharding",
        ),
        *("cases", "dispatch", "files", "kernels", "layers", "ops", "status", "tables", "testing", "tuning"),
        *("values", "wiring"),
        # Optimisers of tables for training loops of any kind.
        *("training.linen", "training.nnx", "training.parameters", "training.tables"),
    ),
    CIRCUITS: ("circuits",),
    APPLICATIONS: ("benchmark", "cli", "models", "training"),
}
DOORS = {
    "lutjax": "every name of the package is found here when it is first used",
    "lutjax.__main__": "python -m lutjax is the command",
}
# A circuit is made of a model that is given: its class is compared by name, and its module is not imported.
UPWARD = {
    ("lutjax.circuits.models", f"lutjax.models.{name}")
    for name in ("automaton", "classifier", "packed", "tree_net")
}


def names():
    """Every module of the package, with its file."""
    files = sorted((ROOT / "lutjax").rglob("*.py"))
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


MODULES = names()


def storey(module):
    """The storey of a module, by the longest name that stands for its room."""
    found = [
        (len(room), number)
        for number, rooms in STOREYS.items()
        for room in rooms
        if f"{module}.".startswith(f"lutjax.{room}.")
    ]
    assert found, f"{module} is in no storey: name its room in STOREYS"
    return max(found)[1]


def imported(path):
    """Modules of the package that a file names: in imports wherever they stand, and in texts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "_is")):
            found = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in found:
            while name.startswith("lutjax") and name not in MODULES:
                name = name.rpartition(".")[0]
            if name in MODULES and name != "lutjax":
                yield name


@pytest.mark.parametrize("module", [m for m in MODULES if m not in DOORS])
def test_imports_go_down(module):
    here = storey(module)
    above = {other for other in imported(MODULES[module]) if storey(other) > here}
    named = {other for importer, other in UPWARD if importer == module}
    assert not above - named, f"{module} imports what is above it"
    assert not named - above, f"{module} has exceptions that it does not need"

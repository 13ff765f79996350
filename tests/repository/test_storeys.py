"""The package has three storeys, and imports go down: the core knows no circuits and no applications, circuits no applications.

Inside a storey no module imports one that imports it, over any number of others. Imports inside functions count, those for types alone,
and modules that are imported by a name in a text.
"""

import ast
import graphlib

import pytest
from folders import ROOT

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
        # Optimizers of tables for training loops of any kind.
        *("training.linen", "training.nnx", "training.parameters", "training.tables"),
    ),
    CIRCUITS: ("circuits",),
    APPLICATIONS: ("benchmark", "bundles", "cli", "convert", "models", "serving", "training"),
}
DOORS = {
    "lutjax": "every name of the package is found here when it is first used",
    "lutjax.__main__": "python -m lutjax is the command",
}
# Rooms of circuits, from the ground up.
ROOMS = {
    "the netlist": ("truth", "_names", "ports", "columns", "_about", "_evaluation", "circuit"),
    "simplification": (
        "ands",
        "builder",
        "arithmetic",
        "_rows",
        "_joint_counts",
        "_operations",
        "_tabulation",
        "_resynthesis",
        "_formulas",
    ),
    "formats": (
        *("_netlists", "aiger", "alkaid", "blif", "c", "detectors", "dot", "language_model"),
        *("netlist_json", "page", "streams", "verilog", "_templates", "_c_rows", "_microcontroller"),
    ),
    "proofs": (
        *("_programs", "_elf", "abc", "boards", "deployment", "fpga", "mcu", "proofs", "simulate"),
        *("statistics", "yosys"),
    ),
    "pictures": ("drawing",),
    "models": ("_layers", "models"),
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
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
    assert not above, f"{module} imports what is above it"


def test_no_modules_import_each_other():
    graph = {module: set(imported(path)) - {module} for module, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_imports_of_circuits_go_down():
    floor = {f"lutjax.circuits.{name}": k for k, names in enumerate(ROOMS.values()) for name in names}
    assert floor.keys() == {module for module in MODULES if module.startswith("lutjax.circuits.")}
    wrong = [
        (module, other)
        for module, here in floor.items()
        for other in imported(MODULES[module])
        if floor.get(other, here) > here or other == "lutjax.circuits"
    ]
    assert not wrong, "a module of circuits imports what is above it"

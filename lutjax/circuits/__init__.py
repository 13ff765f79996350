"""Circuits: hard networks as netlists of tables, outside of JAX."""

import importlib.util
from typing import Any

from lutjax.circuits.aiger import from_aiger
from lutjax.circuits.blif import from_blif
from lutjax.circuits.builder import Builder
from lutjax.circuits.circuit import Circuit, Format, Port
from lutjax.circuits.drawing import draw
from lutjax.circuits.models import of, step_automaton
from lutjax.circuits.netlist_json import from_json

__all__ = [
    "Builder",
    "Circuit",
    "Format",
    "Port",
    "draw",
    "from_aiger",
    "from_blif",
    "from_json",
    "of",
    "step_automaton",
]


def __getattr__(name: str) -> Any:
    """Import a module of this package when it is first used."""
    module = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(module)

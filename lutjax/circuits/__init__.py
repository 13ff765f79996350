"""Circuits: hard networks as netlists of tables, outside of JAX."""

from lutjax._lazy import modules_of
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

__getattr__ = modules_of(__name__)

"""Circuits: hard networks as table netlists, independent of JAX.

`Circuit` is independent of file formats. Each format is a module with functions, such as
``circuits.verilog.write(circuit)`` and ``circuits.blif.read(path)``.
"""

from lutjax.circuits._tabulation import tabulate
from lutjax.circuits.builder import Builder, simplify
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.drawing import draw
from lutjax.circuits.models import from_model, step_automaton
from lutjax.circuits.ports import Format, Port
from lutjax.circuits.resynthesis import resynthesize
from lutjax.lazy import modules_of

__all__ = [
    "Builder",
    "Circuit",
    "Format",
    "Port",
    "draw",
    "from_model",
    "resynthesize",
    "simplify",
    "step_automaton",
    "tabulate",
]

__getattr__ = modules_of(__name__)

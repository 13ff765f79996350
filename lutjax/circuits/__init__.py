"""Circuits: hard networks as netlists of tables, outside of JAX."""

from lutjax.circuits.builder import Builder
from lutjax.circuits.circuit import Circuit, Format, Port
from lutjax.circuits.drawing import draw
from lutjax.circuits.models import of, step_automaton

__all__ = ["Builder", "Circuit", "Format", "Port", "draw", "of", "step_automaton"]

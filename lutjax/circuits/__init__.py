"""Circuits: hard networks as netlists of tables, outside of JAX."""

from lutjax.circuits.builder import Builder
from lutjax.circuits.circuit import Circuit, Format, Port

__all__ = ["Builder", "Circuit", "Format", "Port"]

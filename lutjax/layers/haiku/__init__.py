"""Layers for Haiku. Use `haiku.transform_with_state`: ids are state."""

from lutjax._extras import needed_by

with needed_by("lutjax.layers.haiku"):
    from lutjax.layers.haiku._logic import BinaryLUT, GroupSum, LogicGates, LogicTree, SoftLUT, Thermometer
    from lutjax.layers.haiku._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = [
    "LUT", "BinaryLUT", "GroupSum", "LUTAttention", "LUTPairAttention", "LogicGates", "LogicTree", "SoftLUT", "SparseLUT",
    "Thermometer",
]  # fmt: skip

"""Layers for Flax Linen."""

from lutjax._extras import needed_by

with needed_by("lutjax.layers.linen"):
    from lutjax.layers.linen._logic import BinaryLUT, GroupSum, LogicGates, LogicTree, SoftLUT, Thermometer
    from lutjax.layers.linen._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = [
    "LUT", "BinaryLUT", "GroupSum", "LUTAttention", "LUTPairAttention", "LogicGates", "LogicTree", "SoftLUT", "SparseLUT",
    "Thermometer",
]  # fmt: skip

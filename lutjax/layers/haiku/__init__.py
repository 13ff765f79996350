"""Layers for Haiku. Use `haiku.transform_with_state`: ids are state."""

from lutjax.layers.haiku._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = ["LUT", "LUTAttention", "LUTPairAttention", "SparseLUT"]

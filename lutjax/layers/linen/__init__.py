"""Layers for Flax Linen."""

from lutjax.layers.linen._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = ["LUT", "LUTAttention", "LUTPairAttention", "SparseLUT"]

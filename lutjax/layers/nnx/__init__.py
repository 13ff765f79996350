"""Layers for Flax NNX."""

from lutjax.layers.nnx._layer import Anchors, Targets, Thresholds, Wires, check
from lutjax.layers.nnx._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = [
    "LUT",
    "Anchors",
    "LUTAttention",
    "LUTPairAttention",
    "SparseLUT",
    "Targets",
    "Thresholds",
    "Wires",
    "check",
]

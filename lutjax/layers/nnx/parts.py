"""Parts of the NNX layers, for models with custom variables."""

from lutjax.layers.nnx._logic import in_sequence
from lutjax.layers.nnx._variables import KINDS, Param, check, link

__all__ = ["KINDS", "Param", "check", "in_sequence", "link"]

"""Layer specifications for configs, models and converters, shared by the layers of all libraries.

A specification holds the layer options, checks them, and defines the variables and outputs.
"""

from lutjax.layers._logic import (
    GRADIENTS,
    GroupSumSpec,
    LogicGatesSpec,
    LogicRNNSpec,
    SoftLUTSpec,
    ThermometerSpec,
    WiredSpec,
    truth_of,
)
from lutjax.layers._logic_images import LEAVES, LogicConvSpec
from lutjax.layers._memory import History, NgramMemorySpec
from lutjax.layers._projection import ProjectionLUTSpec
from lutjax.layers._spec import QUANTIZED, Initializer, Spec, arguments, missing_variable_error
from lutjax.layers._tables import LUTAttentionSpec, LUTPairAttentionSpec, LUTSpec

__all__ = [
    "GRADIENTS", "LEAVES", "QUANTIZED", "GroupSumSpec", "History", "Initializer",
    "LUTAttentionSpec", "LUTPairAttentionSpec", "LUTSpec", "LogicConvSpec", "LogicGatesSpec",
    "LogicRNNSpec", "NgramMemorySpec", "ProjectionLUTSpec", "SoftLUTSpec", "Spec",
    "ThermometerSpec", "WiredSpec", "arguments", "missing_variable_error", "truth_of",
]  # fmt: skip

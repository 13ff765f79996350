"""Layers for Flax NNX.

Trained variables are `nnx.Param`: positions, logits, scores, projections, and learnable thresholds.
Tables and the scalars of reads are `Tables` and `Scalars`, subclasses of `nnx.Param`. All other
variables, `Anchors`, `Targets`, `Wires`, `Thresholds`, `Quantized` and `Keys`, are saved and
restored with the model, and ignored by ``nnx.Optimizer(model, ..., wrt=nnx.Param)``. During
decoding, attention stores its latest keys in `nnx.Cache`.
"""

from lutjax.extras import require_optional

with require_optional("lutjax.layers.nnx"):
    from lutjax.layers.nnx._images import ConvLUT, SpatialLUT, WindowLUT
    from lutjax.layers.nnx._layer import check, host_tables_of, tables_of
    from lutjax.layers.nnx._logic import (
        BinaryLUT,
        GroupSum,
        LogicConv,
        LogicGates,
        LogicRNN,
        SoftLUT,
        Thermometer,
    )
    from lutjax.layers.nnx._memory import (
        NgramEmbedding,
        NgramMemory,
        ProductKeyExperts,
        ProductKeyMemory,
    )
    from lutjax.layers.nnx._projection import ProjectionLUT, quantize
    from lutjax.layers.nnx._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT
    from lutjax.layers.nnx._variables import (
        Anchors,
        Keys,
        Quantized,
        Scalars,
        Tables,
        Targets,
        Thresholds,
        Wires,
    )

__all__ = [
    "LUT", "Anchors", "BinaryLUT", "ConvLUT", "GroupSum", "Keys", "LUTAttention",
    "LUTPairAttention", "LogicConv", "LogicGates", "LogicRNN", "NgramEmbedding", "NgramMemory",
    "ProductKeyExperts", "ProductKeyMemory", "ProjectionLUT", "Quantized", "Scalars", "SoftLUT",
    "SparseLUT", "SpatialLUT", "Tables", "Targets", "Thermometer", "Thresholds", "WindowLUT",
    "Wires", "check", "host_tables_of", "quantize", "tables_of",
]  # fmt: skip

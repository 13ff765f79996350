"""Lookup-table networks and differentiable logic for JAX.

The ops take and return plain arrays and work under `jax.jit`, `jax.grad`, `jax.vmap` and
`jax.shard_map`. `lutjax.reference` defines them in plain `jax.numpy`. `lutjax.layers.nnx`, `.linen`
and `.haiku` have layers for Flax and Haiku, and `lutjax.models` has models.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lutjax._version import __version__

if TYPE_CHECKING:
    from lutjax import (
        bundles,
        circuits,
        convert,
        layers,
        models,
        optim,
        reads,
        reference,
        sharding,
        testing,
        training,
        tuning,
        wiring,
    )
    from lutjax.bundles.saving import save
    from lutjax.dispatch.registry import (
        Backend,
        NoImplementationError,
        Platform,
        explain,
        kernel_registry,
        use_implementation,
    )
    from lutjax.ops.bilinear_gates import bilinear_gates
    from lutjax.ops.binary_lut import binary_lut
    from lutjax.ops.cell_total_variation import cell_total_variation
    from lutjax.ops.conv_lut import conv_lut
    from lutjax.ops.detect import detect
    from lutjax.ops.detect_signs import detect_signs
    from lutjax.ops.logic_gates import gate_coefficients, logic_gates
    from lutjax.ops.lookup import lookup
    from lutjax.ops.lookup_attention import lookup_attention
    from lutjax.ops.lut import lut
    from lutjax.ops.lut_attention import lut_attention
    from lutjax.ops.lut_pair_attention import lut_pair_attention
    from lutjax.ops.margins import margins
    from lutjax.ops.packed_lut import pack_bits, packed_lut, unpack_bits
    from lutjax.ops.quantize_tables import quantize_tables
    from lutjax.ops.scale_gradient import scale_gradient
    from lutjax.ops.scored_lut import scored_lut
    from lutjax.ops.soft_lut import soft_lut
    from lutjax.ops.sparse_lookup import sparse_lookup
    from lutjax.ops.sparse_lut import sparse_lut
    from lutjax.ops.weighted_lookup import weighted_lookup
    from lutjax.tables._usage import Usage, usage
    from lutjax.tables.update import update_table
    from lutjax.training._load import load
    from lutjax.values._anchors import RepeatedInputsWarning, sample_anchors
    from lutjax.values._detection import Detection
    from lutjax.values._fixed_point import FixedPoint
    from lutjax.values._ngram_layouts import NgramLayout
    from lutjax.values._ngrams import ngram_rows
    from lutjax.values._quantized import QuantizedTables
    from lutjax.values._thermometer import thermometer_thresholds
    from lutjax.values._vocabularies import Vocabulary
    from lutjax.values._wires import readers

__all__ = [
    "Backend",
    "Detection",
    "FixedPoint",
    "NgramLayout",
    "NoImplementationError",
    "Platform",
    "QuantizedTables",
    "RepeatedInputsWarning",
    "Usage",
    "Vocabulary",
    "__version__",
    "bilinear_gates",
    "binary_lut",
    "bundles",
    "cell_total_variation",
    "circuits",
    "conv_lut",
    "convert",
    "detect",
    "detect_signs",
    "explain",
    "gate_coefficients",
    "kernel_registry",
    "layers",
    "load",
    "logic_gates",
    "lookup",
    "lookup_attention",
    "lut",
    "lut_attention",
    "lut_pair_attention",
    "margins",
    "models",
    "ngram_rows",
    "optim",
    "pack_bits",
    "packed_lut",
    "quantize_tables",
    "readers",
    "reads",
    "reference",
    "sample_anchors",
    "save",
    "scale_gradient",
    "scored_lut",
    "sharding",
    "soft_lut",
    "sparse_lookup",
    "sparse_lut",
    "testing",
    "thermometer_thresholds",
    "training",
    "tuning",
    "unpack_bits",
    "update_table",
    "usage",
    "use_implementation",
    "weighted_lookup",
    "wiring",
]

if "jax" in sys.modules:  # otherwise with the first op; the module says why early is better
    importlib.import_module("lutjax._jit_key")

# Names are imported on first use, from the (op) module with the same name or from these homes.
_HOMES = {
    "bundles.saving": ("save",),
    "values._anchors": ("RepeatedInputsWarning", "sample_anchors"),
    "values._detection": ("Detection",),
    "values._fixed_point": ("FixedPoint",),
    "values._ngram_layouts": ("NgramLayout",),
    "values._ngrams": ("ngram_rows",),
    "values._vocabularies": ("Vocabulary",),
    "training._load": ("load",),
    "values._quantized": ("QuantizedTables",),
    "values._thermometer": ("thermometer_thresholds",),
    "tables._usage": ("Usage", "usage"),
    "values._wires": ("readers",),
    "tables.update": ("update_table",),
    "dispatch.registry": (
        "Backend",
        "NoImplementationError",
        "Platform",
        "explain",
        "kernel_registry",
        "use_implementation",
    ),
    "ops.lut": ("lut",),
    "ops.lut_attention": ("lut_attention",),
    "ops.sparse_lut": ("sparse_lut",),
    "ops.logic_gates": ("gate_coefficients",),
    "ops.packed_lut": ("pack_bits", "unpack_bits"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = (
    "bundles", "circuits", "convert", "layers", "models", "optim", "reads", "reference", "sharding",
    "testing", "training", "tuning", "wiring",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lutjax' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"lutjax.{name}")
    home = importlib.import_module(f"lutjax.{_HOME.get(name, f'ops.{name}')}")
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})

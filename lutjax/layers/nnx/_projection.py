"""Scored tables between projections for Flax NNX.

`lutjax.layers._projection` documents the arguments.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _projection
from lutjax.layers._projection import CONFIDENCE, SMALL_MATRIX, ScoredSpec, small_tables
from lutjax.layers._spec import Initializer, Inputs, Mode, Outputs
from lutjax.layers.nnx._layer import Noise, Switched, builds
from lutjax.layers.nnx._variables import Anchors, Param, Quantized, Tables
from lutjax.reads import Read

M = TypeVar("M", bound=nnx.Module)


class ProjectionLUT(Switched):
    """Heads of lookup tables between two projections: `lutjax.scored_lut`.

    Example:
      >>> import flax.nnx as nnx, jax.numpy as jnp
      >>> from lutjax.layers.nnx import ProjectionLUT
      >>> rngs = nnx.Rngs(0)
      >>> layer = ProjectionLUT(16, 16, heads=4, tables=8, bits=3, table_dropout=0.1, rngs=rngs)
      >>> layer.compress_kernel.shape, layer.weights.shape
      ((16, 16), (32, 8, 4))
      >>> nnx.view(layer, deterministic=True)(jnp.ones((2, 16))).shape
      (2, 16)
    """

    spec_type = _projection.ProjectionLUTSpec

    in_features: int
    out_features: int
    heads: int
    tables: int
    bits: int
    width: int
    outputs: int
    read: Read
    quantized: bool

    compress_kernel: Param
    compress_bias: Param
    anchors: Anchors
    weights: Tables | Quantized
    exponents: Quantized  # with `quantized`
    decompress_kernel: Param
    decompress_bias: Param

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, heads: int = 8, tables: int = 64,
        bits: int = 8, width: int | None = None, outputs: int | None = None,
        read: Read = CONFIDENCE, share_input: bool = False, sum_heads: bool = False,
        compress: bool = True, decompress: bool = True, table_dropout: float | int = 0.0,
        deterministic: bool = False, quantized: bool = False, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = small_tables,
        compress_init: Initializer = SMALL_MATRIX,
        decompress_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Inputs, *, deterministic: Mode = None, rngs: Noise = None) -> Outputs:
        """Return outputs; other arguments take precedence over the layer's own."""
        return self._call(deterministic, rngs).run(lutjax.scored_lut, x)


def quantize(model: M) -> M:
    """Return a model with quantized scored tables, for deployment: a quarter of the memory.

    It quantizes `ProjectionLUT`, and each `SpatialLUT`, `WindowLUT` and `ConvLUT` trained with
    `lutjax.reads.PowersOfTwo`. The result shares all other arrays with the model. Its layers equal
    layers made with ``quantized=True``, which load its checkpoints.

    Args:
      model: model trained with `lutjax.reads.PowersOfTwo`.

    Raises:
      ValueError: there is no such layer, or a `ProjectionLUT` has another read.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ProjectionLUT, quantize
      >>> read = lutjax.reads.PowersOfTwo()
      >>> layer = ProjectionLUT(16, 16, heads=4, tables=8, bits=3, read=read, rngs=nnx.Rngs(0))
      >>> deployed = quantize(layer)
      >>> deployed.weights.dtype, deployed.exponents.shape, deployed(jnp.ones((2, 16))).shape
      (dtype('int8'), (4, 4), (2, 16))
    """
    # A copy, so that the trained model keeps its float tables.
    model = nnx.merge(*nnx.split(model))
    layers: list[Any] = [
        module for _, module in nnx.iter_modules(model) if isinstance(module, Switched)
    ]
    layers = [layer for layer in layers if issubclass(layer.spec_type, ScoredSpec)]
    rounded = [layer.read is not None and layer.read.rounds_tables for layer in layers]
    layers = [v for v, r in zip(layers, rounded, strict=True) if r or isinstance(v, ProjectionLUT)]
    if not layers:
        raise ValueError(
            f"quantize: {type(model).__name__} has no ProjectionLUT, "
            "and no layer of images with the read PowersOfTwo: the layers with a form of integers."
        )
    for layer in layers:
        if not layer.quantized:
            _quantize(layer)
    return model


def _quantize(layer: Any) -> None:
    spec, arrays = layer.spec.quantize(layer.weights.get_value())
    layer._declared = spec
    # Integer tables have no dropout, so the layer needs no noise.
    layer.rngs = nnx.data(None)
    for name, array in arrays.items():
        setattr(layer, name, Quantized(array))

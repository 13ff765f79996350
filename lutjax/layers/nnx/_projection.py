"""Scored tables between projections for Flax NNX; `lutjax.layers._projection` has the arguments of the layer."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _projection
from lutjax.layers._projection import CONFIDENCE, SMALL_MATRIX, ScoredSpec, small_tables
from lutjax.layers._spec import Initializer
from lutjax.layers.nnx._layer import Random
from lutjax.layers.nnx._variables import Quantized
from lutjax.reads import Read

M = TypeVar("M", bound=nnx.Module)


class ProjectionLUT(Random):
    """Layer of look-up tables to put in place of a feed-forward layer: a projection, heads of tables, a projection.

    The first projection makes the inputs of the heads, ``width`` for each. The tables of a head compare pairs of its inputs, and add
    the rows that they read, weighted by a score of how sure the comparisons are: see `lutjax.scored_lut`. The second
    projection starts at zero, so that a residual block with a new layer is the identity. Without both
    projections the layer is tables alone.

    Variables:
      compress_kernel, compress_bias: trained, ``[in_features, heads * width]``, normal(0.02), and zeros.
      anchors: int32 ids of a head's inputs ``[heads * tables, bits, 2]``, different pairs ``a < b`` as far as there are.
      weights: the tables, trained, ``[heads * tables, 2**bits, outputs]``, uniform(-0.001, 0.001) at first.
      log_beta, log_gamma, log_tau: trained scalars of the read, float32, by their names in ``read.initial()``.
      decompress_kernel, decompress_bias: trained, ``[heads * outputs, out_features]``, zeros.
      weights, exponents: int8 tables and their scale, int32 ``[heads, outputs]``, not trained, with ``quantized=True``.

    Args:
      in_features: inputs.
      out_features: outputs.
      heads: groups of tables.
      tables: tables of each head.
      bits: anchor pairs of each table.
      width: inputs of a head; by default heads share `in_features` out, rounded up, or each sees as many with `share_input`.
      outputs: outputs of a head; by default heads share `out_features` out, rounded up, or each has as many with `sum_heads`.
      read: how tables are read, one of `lutjax.reads` or your own.
      share_input: all heads read the same inputs.
      sum_heads: the outputs of all heads are added.
      compress: whether there is a first projection; without it the inputs are those of the heads, one after the other.
      decompress: whether there is a second projection.
      table_dropout: share of tables that a sample does not read in training; others count more.
      deterministic: no dropout.
      quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
      dtype: dtype of the projections and of the output; by default that of inputs and parameters together. Tables keep their
        own, and scores are at least float32.
      param_dtype: dtype of tables and projections: float32, bfloat16, float16 or float64.
      weights_init, compress_init, decompress_init: draw tables and projections, as in `jax.nn.initializers`.
      accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the look-up; see `lutjax.scored_lut`.
      anchors: int32 ``[heads * tables, bits, 2]``, instead of drawn ones.
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input of a head.

    Source: docs/semantics.md, section 12.

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Tables are `Tables` and the read's scalars `Scalars`, both kinds of `nnx.Param`, so that an optimizer can tell them from the
    projections. Masks of table dropout are drawn from the stream ``dropout``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ProjectionLUT
      >>> layer = ProjectionLUT(16, 16, heads=4, tables=8, bits=3, table_dropout=0.1, rngs=nnx.Rngs(0))
      >>> layer.compress_kernel.shape, layer.weights.shape, layer.log_beta.shape, layer.decompress_kernel.shape
      ((16, 16), (32, 8, 4), (), (16, 16))
      >>> layer(jnp.ones((2, 16))).shape
      (2, 16)
      >>> deterministic = nnx.view(layer, deterministic=True)
    """

    spec_type = _projection.ProjectionLUTSpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        heads: int = 8,
        tables: int = 64,
        bits: int = 8,
        width: int | None = None,
        outputs: int | None = None,
        read: Read = CONFIDENCE,
        share_input: bool = False,
        sum_heads: bool = False,
        compress: bool = True,
        decompress: bool = True,
        table_dropout: float | int = 0.0,
        deterministic: bool = False,
        quantized: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = small_tables,
        compress_init: Initializer = SMALL_MATRIX,
        decompress_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())


def quantize(model: M) -> M:
    """Return a model whose layers of scored tables have tables of integers, for deployment: a quarter of the memory.

    These are `ProjectionLUT`, and of `SpatialLUT`, `WindowLUT` and `ConvLUT` those that were trained with `lutjax.reads.PowersOfTwo`.

    It has no table of floats; all other arrays are shared with the model. Its layers are those that ``quantized=True`` makes,
    into which a checkpoint of it can be read.

    Args:
      model: trained with `lutjax.reads.PowersOfTwo`, whose values it keeps up to the rounding of float sums.

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
    model = nnx.merge(*nnx.split(model))
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Random)]
    layers = [
        layer
        for layer in layers
        if isinstance(layer, ProjectionLUT)
        or (issubclass(layer.spec_type, ScoredSpec) and layer.read is not None and layer.read.rounds_tables)
    ]
    if not layers:
        raise ValueError(
            f"quantize: {type(model).__name__} has no ProjectionLUT, and no layer of images with the read PowersOfTwo: the "
            "layers with a form of integers."
        )
    for layer in layers:
        if not layer.quantized:
            _quantize(layer)
    return model


def _quantize(layer: Random) -> None:
    """Replace the tables of a layer by tables of integers."""
    spec, arrays = layer.spec.quantize(layer.weights.get_value())
    layer._declared = spec
    layer.rngs = nnx.data(None)  # there is no dropout
    for name, array in arrays.items():
        setattr(layer, name, Quantized(array))

"""Scored tables between projections for Flax NNX; `lutjax.layers._projection` has the arguments of the layer."""

import dataclasses
from typing import TypeVar

from flax import nnx

from lutjax.layers import _projection
from lutjax.layers.nnx._layer import Scored

M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(eq=False, repr=False)
class ProjectionLUT(Scored, _projection.ProjectionLUTArguments):
    """Layer of look-up tables to put in place of a feed-forward layer.

    Tables are `Tables` and the read's scalars `Scalars`, both kinds of `nnx.Param`, so that an optimiser can tell them from the
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


def quantised(model: M) -> M:
    """Return a model whose layers of scored tables have tables of integers, for deployment: a quarter of the memory.

    These are `ProjectionLUT`, and of `SpatialLUT`, `WindowLUT` and `ConvLUT` those that were trained with `lutjax.reads.PowersOfTwo`.

    It has no table of floats; all other arrays are shared with the model. Its layers are those that ``quantised=True`` makes,
    into which a checkpoint of it can be read.

    Args:
      model: trained with `lutjax.reads.PowersOfTwo`, whose values it keeps up to the rounding of float sums.

    Raises:
      ValueError: there is no such layer, or a `ProjectionLUT` has another read.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ProjectionLUT, quantised
      >>> read = lutjax.reads.PowersOfTwo()
      >>> layer = ProjectionLUT(16, 16, heads=4, tables=8, bits=3, read=read, rngs=nnx.Rngs(0))
      >>> deployed = quantised(layer)
      >>> deployed.weights.dtype, deployed.exponents.shape, deployed(jnp.ones((2, 16))).shape
      (dtype('int8'), (4, 4), (2, 16))
    """
    model = nnx.merge(*nnx.split(model))
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Scored)]
    layers = [
        layer
        for layer in layers
        if isinstance(layer, ProjectionLUT) or (layer.read is not None and layer.read.rounds_tables)
    ]
    if not layers:
        raise ValueError(
            f"quantised: {type(model).__name__} has no ProjectionLUT, and no layer of images with the read PowersOfTwo: the "
            "layers with a form of integers."
        )
    for layer in layers:
        if not layer.quantised:
            layer._quantise()
    return model

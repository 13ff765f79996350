"""Scored tables between projections for Flax NNX; `lutjax.layers._projection` has the arguments of the layer."""

import dataclasses

from lutjax.layers import _projection
from lutjax.layers.nnx._layer import Random


@dataclasses.dataclass(eq=False, repr=False)
class ProjectionLUT(Random, _projection.ProjectionLUTArguments):
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

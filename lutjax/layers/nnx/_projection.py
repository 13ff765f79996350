"""Scored tables between projections for Flax NNX; `lutjax.layers._projection` has the arguments of the layer."""

import dataclasses
from typing import TypeVar

from flax import nnx

from lutjax.layers import _projection
from lutjax.layers.nnx._layer import Quantised, Random

M = TypeVar("M", bound=nnx.Module)


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

    def _quantise(self) -> None:
        """Replace the tables by tables of integers."""
        spec, arrays = self.spec.quantise(self.weights.get_value())
        self._declared = spec
        self.rngs = nnx.data(None)  # there is no dropout
        for name, array in arrays.items():
            setattr(self, name, Quantised(array))


def quantised(model: M) -> M:
    """Return a model whose `ProjectionLUT` layers have tables of integers, for deployment: a quarter of the memory.

    It has no table of floats; all other arrays are shared with the model. Its layers are those that ``quantised=True`` makes,
    into which a checkpoint of it can be read.

    Args:
      model: trained with `lutjax.reads.PowersOfTwo`, whose values it keeps up to the rounding of float sums.

    Raises:
      ValueError: there is no `ProjectionLUT`, or one has another read.

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
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, ProjectionLUT)]
    if not layers:
        raise ValueError(
            f"quantised: {type(model).__name__} has no ProjectionLUT, the layer with a form of integers."
        )
    for layer in layers:
        if not layer.quantised:
            layer._quantise()
    return model

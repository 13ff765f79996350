"""Tables with geometry for Flax NNX; `lutjax.layers._images` has the arguments of the layers."""

import dataclasses

from lutjax.layers import _images
from lutjax.layers.nnx._layer import Scored


@dataclasses.dataclass(eq=False, repr=False)
class SpatialLUT(Scored, _images.SpatialLUTArguments):
    """Layer of look-up tables between two maps.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax import wiring
      >>> from lutjax.layers.nnx import SpatialLUT
      >>> fields = wiring.projections(None, (28, 28), (14, 14), groups=9, receptive=6, projective=4)
      >>> layer = SpatialLUT(fields, n_detectors=2, n_anchors=4, rngs=nnx.Rngs(0))
      >>> layer.weights.shape, layer.targets.shape
      ((162, 16, 9), (81, 1, 9))
      >>> layer(jnp.ones((32, 28, 28))).shape
      (32, 14, 14)
    """


@dataclasses.dataclass(eq=False, repr=False)
class WindowLUT(Scored, _images.WindowLUTArguments):
    """Layer of look-up tables over windows of an image, each place with tables of its own."""


@dataclasses.dataclass(eq=False, repr=False)
class ConvLUT(Scored, _images.ConvLUTArguments):
    """Layer of look-up tables over windows of an image, with the same tables at all places.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ConvLUT
      >>> rngs, tables = nnx.Rngs(0), {"n_detectors": 16, "n_anchors": 5}
      >>> first = ConvLUT((28, 28), 12, kernel=3, pool=2, **tables, rngs=rngs)
      >>> first.weights.shape, first.anchors.shape, first.out_shape
      ((16, 32, 12), (16, 5, 2), (13, 13, 12))
      >>> classes = ConvLUT(first.out_shape, 10, kernel=3, stride=2, pool="all", **tables, rngs=rngs)
      >>> classes(first(jnp.ones((32, 28, 28)))).shape
      (32, 10)
    """

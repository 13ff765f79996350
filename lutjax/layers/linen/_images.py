"""Tables with geometry for Flax Linen; `lutjax.layers._images` has the arguments of the layers."""

from lutjax.layers import _images
from lutjax.layers.linen._layer import Switched


class SpatialLUT(Switched, _images.SpatialLUTArguments):
    """Layer of look-up tables between two maps.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> from lutjax.layers.linen import SpatialLUT
      >>> fields = wiring.projections(None, (8, 8), (4, 4), groups=3, receptive=3, projective=2)
      >>> layer = SpatialLUT(fields, n_detectors=2, n_anchors=4)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 8, 8)))
      >>> layer.apply(variables, jnp.ones((32, 8, 8))).shape
      (32, 4, 4)
    """


class WindowLUT(Switched, _images.WindowLUTArguments):
    """Layer of look-up tables over windows of an image, each place with tables of its own."""


class ConvLUT(Switched, _images.ConvLUTArguments):
    """Layer of look-up tables over windows of an image, with the same tables at all places."""

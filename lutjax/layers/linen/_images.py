"""Tables with geometry for Flax Linen; `lutjax.layers._images` has the arguments of the layers."""

import jax
from flax import linen as nn
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.layers import _images
from lutjax.layers.linen._layer import Layer


class _Image(Layer):
    """Base of layers over images."""

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return outputs for images."""
        spec, arrays = self._bound()
        y: jax.Array = spec(arrays, x)
        return y


class SpatialLUT(_Image, _images.SpatialLUTArguments):
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


class WindowLUT(_Image, _images.WindowLUTArguments):
    """Layer of look-up tables over windows of an image, each place with tables of its own."""


class ConvLUT(_Image, _images.ConvLUTArguments):
    """Layer of look-up tables over windows of an image, with the same tables at all places."""

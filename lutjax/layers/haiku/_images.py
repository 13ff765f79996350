"""Tables with geometry for Haiku; `lutjax.layers._images` has the arguments of the layers."""

import dataclasses

import jax
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.layers import _images
from lutjax.layers.haiku._layer import Layer


class _Image(Layer):
    """Base of layers over images."""

    def __call__(self, x: Float[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return outputs for images."""
        y: jax.Array = self.spec(self._arrays(), x)
        return y


@dataclasses.dataclass(eq=False, repr=False)
class SpatialLUT(_Image, _images.SpatialLUTArguments):
    """Layer of look-up tables between two maps.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> from lutjax.layers.haiku import SpatialLUT
      >>> fields = wiring.projections(None, (8, 8), (4, 4), groups=3, receptive=3, projective=2)
      >>> f = hk.transform_with_state(lambda x: SpatialLUT(fields, n_detectors=2, n_anchors=4)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8, 8)))
      >>> y, state = f.apply(params, state, None, jnp.ones((32, 8, 8)))
      >>> y.shape
      (32, 4, 4)
    """


@dataclasses.dataclass(eq=False, repr=False)
class WindowLUT(_Image, _images.WindowLUTArguments):
    """Layer of look-up tables over windows of an image, each place with tables of its own."""


@dataclasses.dataclass(eq=False, repr=False)
class ConvLUT(_Image, _images.ConvLUTArguments):
    """Layer of look-up tables over windows of an image, with the same tables at all places."""

"""Tables with geometry for Haiku; `lutjax.layers._images` has the arguments of the layers."""

import dataclasses

from lutjax.layers import _images
from lutjax.layers.haiku._layer import Switched


@dataclasses.dataclass(eq=False, repr=False)
class SpatialLUT(Switched, _images.SpatialLUTArguments):
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
class WindowLUT(Switched, _images.WindowLUTArguments):
    """Layer of look-up tables over windows of an image, each place with tables of its own."""


@dataclasses.dataclass(eq=False, repr=False)
class ConvLUT(Switched, _images.ConvLUTArguments):
    """Layer of look-up tables over windows of an image, with the same tables at all places."""

"""Tables with geometry for Flax NNX; `lutjax.layers._images` has the arguments of the layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _images
from lutjax.layers._spec import Initializer
from lutjax.layers.nnx._layer import Random
from lutjax.layers.nnx._variables import Anchors, Quantized, Tables, Targets
from lutjax.reads import Read
from lutjax.wiring import Connectivity
from lutjax.wiring._sizes import Size


class SpatialLUT(Random):
    """Lookup tables between two maps, in groups with receptive and projective fields.

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

    spec_type = _images.SpatialLUTSpec

    weights: Tables | Quantized
    exponents: Quantized  # with `quantized`
    anchors: Anchors
    targets: Targets

    def __init__(
        self, connectivity: Connectivity, *, n_detectors: int, n_anchors: int, epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, anchors: Any = None, read: Read | None = None,
        table_dropout: float | int = 0.0, deterministic: bool = False, quantized: bool = False, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self._build(
            rngs, connectivity=connectivity, n_detectors=n_detectors, n_anchors=n_anchors, epsilon=epsilon, dtype=dtype,
            param_dtype=param_dtype, weights_init=weights_init, accumulate=accumulate, implementation=implementation,
            anchors=anchors, read=read, table_dropout=table_dropout, deterministic=deterministic, quantized=quantized,
        )  # fmt: skip


class WindowLUT(Random):
    """Lookup tables over windows of an image, with separate tables for each window."""

    spec_type = _images.WindowLUTSpec

    weights: Tables | Quantized
    exponents: Quantized  # with `quantized`
    anchors: Anchors

    def __init__(
        self, in_shape: tuple[int, ...], out_features: int, *, n_detectors: int, n_anchors: int, epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, anchors: Any = None, read: Read | None = None,
        table_dropout: float | int = 0.0, deterministic: bool = False, quantized: bool = False, kernel: Size,
        stride: Size = 1, padding: Size = 0, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self._build(
            rngs, in_shape=in_shape, out_features=out_features, n_detectors=n_detectors, n_anchors=n_anchors,
            epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, weights_init=weights_init, accumulate=accumulate,
            implementation=implementation, anchors=anchors, read=read, table_dropout=table_dropout,
            deterministic=deterministic, quantized=quantized, kernel=kernel, stride=stride, padding=padding,
        )  # fmt: skip


class ConvLUT(Random):
    """Lookup tables over windows of an image, with shared tables: `lutjax.conv_lut`.

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

    spec_type = _images.ConvLUTSpec

    weights: Tables | Quantized
    exponents: Quantized  # with `quantized`
    anchors: Anchors

    def __init__(
        self, in_shape: tuple[int, ...], out_channels: int, *, n_detectors: int, n_anchors: int, epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros, accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None, anchors: Any = None, read: Read | None = None,
        table_dropout: float | int = 0.0, deterministic: bool = False, quantized: bool = False, kernel: Size,
        stride: Size = 1, padding: Size = 0, groups: int = 1, pool: Size | str | None = None, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self._build(
            rngs, in_shape=in_shape, out_channels=out_channels, n_detectors=n_detectors, n_anchors=n_anchors,
            epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, weights_init=weights_init, accumulate=accumulate,
            implementation=implementation, anchors=anchors, read=read, table_dropout=table_dropout,
            deterministic=deterministic, quantized=quantized, kernel=kernel, stride=stride, padding=padding, groups=groups,
            pool=pool,
        )  # fmt: skip

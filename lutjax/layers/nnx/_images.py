"""Tables with geometry for Flax NNX; `lutjax.layers._images` documents the arguments."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _images
from lutjax.layers._spec import Initializer, Inputs, Mode, Outputs
from lutjax.layers.nnx._layer import Noise, Switched, builds
from lutjax.layers.nnx._variables import Anchors, Quantized, Tables, Targets
from lutjax.reads import Read
from lutjax.wiring import Connectivity
from lutjax.wiring._sizes import Size


class _Images(Switched):
    n_detectors: int
    n_anchors: int
    read: Read | None
    connectivity: Connectivity
    quantized: bool

    weights: Tables | Quantized
    exponents: Quantized  # with `quantized`
    anchors: Anchors


class SpatialLUT(_Images):
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

    targets: Targets

    @builds
    def __init__(
        self, connectivity: Connectivity, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, read: Read | None = None, table_dropout: float | int = 0.0,
        deterministic: bool = False, quantized: bool = False, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Inputs, *, deterministic: Mode = None, rngs: Noise = None) -> Outputs:
        """Return maps ``[..., *out_shape]``; `rngs` replaces the layer's own noise."""
        # Without a read, the spec ignores the op and adds unscored rows.
        return self._call(deterministic, rngs).run(lutjax.scored_lut, x)


class WindowLUT(_Images):
    """Lookup tables over windows of an image, with separate tables for each window."""

    spec_type = _images.WindowLUTSpec

    in_shape: tuple[int, ...]
    out_features: int

    @builds
    def __init__(
        self, in_shape: tuple[int, ...], out_features: int, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, read: Read | None = None, table_dropout: float | int = 0.0,
        deterministic: bool = False, quantized: bool = False, kernel: Size, stride: Size = 1,
        padding: Size = 0, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Inputs, *, deterministic: Mode = None, rngs: Noise = None) -> Outputs:
        """Return outputs of all windows; `rngs` replaces the layer's own noise."""
        # Without a read, the spec ignores the op and adds unscored rows.
        return self._call(deterministic, rngs).run(lutjax.scored_lut, x)


class ConvLUT(_Images):
    """Lookup tables over windows of an image, with shared tables: `lutjax.conv_lut`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ConvLUT
      >>> rngs, tables = nnx.Rngs(0), {"n_detectors": 16, "n_anchors": 5}
      >>> first = ConvLUT((28, 28), 12, kernel=3, pool=2, **tables, rngs=rngs)
      >>> first.weights.shape, first.anchors.shape, first.out_shape
      ((16, 32, 12), (16, 5, 2), (13, 13, 12))
      >>> shape = {"kernel": 3, "stride": 2, "pool": "all"}
      >>> classes = ConvLUT(first.out_shape, 10, **shape, **tables, rngs=rngs)
      >>> classes(first(jnp.ones((32, 28, 28)))).shape
      (32, 10)
    """

    spec_type = _images.ConvLUTSpec

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    out_channels: int
    groups: int

    @builds
    def __init__(
        self, in_shape: tuple[int, ...], out_channels: int, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, read: Read | None = None, table_dropout: float | int = 0.0,
        deterministic: bool = False, quantized: bool = False, kernel: Size, stride: Size = 1,
        padding: Size = 0, groups: int = 1, pool: Size | str | None = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Inputs, *, deterministic: Mode = None, rngs: Noise = None) -> Outputs:
        """Return outputs ``[..., *out_shape]``; `rngs` replaces the layer's own noise."""
        return self._call(deterministic, rngs).run(lutjax.conv_lut, x)

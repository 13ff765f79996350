"""Lookup tables for Flax NNX; `lutjax.layers._tables` documents the arguments."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float

import lutjax
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _tables
from lutjax.layers._spec import Initializer
from lutjax.layers._tables import attention_call, uniform_positions
from lutjax.layers.nnx._layer import Layer, builds
from lutjax.layers.nnx._variables import Anchors, Param, Tables, Targets


class _Detectors(Layer):
    in_features: int
    out_features: int
    n_detectors: int
    n_anchors: int

    weights: Tables
    anchors: Anchors


class LUT(_Detectors):
    """Fully connected lookup tables: `lutjax.lut`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT
      >>> layer = LUT(8, 4, n_detectors=16, n_anchors=6, rngs=nnx.Rngs(0))
      >>> layer.weights.shape, layer.anchors.shape
      ((16, 64, 4), (16, 6, 2))
      >>> layer(jnp.ones((32, 8))).shape
      (32, 4)
    """

    spec_type = _tables.LUTSpec

    groups: int | None

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, groups: int | None = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        spec, arrays = self._bind_arrays()
        y: jax.Array = spec.run(lutjax.lut, x, arrays["weights"], arrays["anchors"])
        return y


class SparseLUT(_Detectors):
    """Lookup tables whose rows reach some of the outputs: `lutjax.sparse_lut`."""

    spec_type = _tables.SparseLUTSpec

    groups: int | None
    n_targets: int | None

    targets: Targets
    first_edges: Targets  # of an edge list

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, groups: int | None = None, n_targets: int | None = None,
        targets_per: str = "row", targets: Any = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        return self._call().run(lutjax.sparse_lut, x)


class _Attention(_Detectors):
    n_positions: int
    n_position_bits: int
    window: int | None
    causal: bool
    decode: bool

    targets: Targets  # with `n_targets` or `targets`
    positions: Param  # with `n_position_bits`

    def _build(self, rngs: nnx.Rngs | None, **arguments: Any) -> None:
        super()._build(rngs, **arguments)
        for name in self.spec.cache_names:
            setattr(self, name, nnx.data(None))

    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec, arrays = self._bind_arrays()
        if not (spec.decode if decode is None else decode):
            return spec(arrays, x, **others)
        cache = {name: getattr(self, name) for name in spec.cache_names}
        if all(array is None for array in cache.values()):
            raise ValueError(
                f"{spec.layer}: there is no cache to decode with; call init_cache first."
            )
        arrays_of_cache = {name: c[...] for name, c in cache.items() if c is not None}
        y, latest = spec.attend_with_cache(arrays, arrays_of_cache, x, **others)
        for name, value in latest.items():
            cache[name][...] = value
        return y

    def init_cache(
        self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, *, ids: bool = False,
        counts: bool = False, blocks: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Create an empty `nnx.Cache` for such inputs; options override `cached` and `blocks`."""
        if ids and counts:
            raise ValueError(
                f"{self.spec.layer}: a cache keeps either ids or counts; give one of them."
            )
        cached = "ids" if ids else "counts" if counts else None
        cache = self.spec.empty_cache(input_shape, dtype, cached=cached, blocks=blocks)
        for name in self.spec.cache_names:
            # Another kind of cache has other variables.
            delattr(self, name)
            setattr(self, name, nnx.Cache(cache[name]) if name in cache else nnx.data(None))

    def set_view(
        self, decode: bool | None = None, batch_size: int | tuple[int, ...] | None = None,
        cache_dtype: DTypeLike | None = None,
    ) -> None:  # fmt: skip
        """Change `decode`, or create an empty cache for a batch, for ``nnx.view``."""
        if decode is not None:
            self.decode = decode
        if batch_size is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, 1, self.spec.in_features), cache_dtype or jnp.float32)


class LUTAttention(_Attention):
    """Concatenated lookup-table attention: `lutjax.lut_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUTAttention
      >>> layer = LUTAttention(8, 8, n_detectors=16, n_anchors=3, window=5, rngs=nnx.Rngs(0))
      >>> decoder = nnx.view(layer, decode=True, batch_size=4)  # three positions, then one more
      >>> decoder(jnp.ones((4, 3, 8))).shape, decoder(jnp.ones((4, 1, 8))).shape
      ((4, 3, 8), (4, 1, 8))
    """

    spec_type = _tables.LUTAttentionSpec
    __call__ = attention_call  # runs lutjax.lut_attention, or attends to the cache

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, n_positions: int = 0, n_position_bits: int = 0,
        shared_positions: bool = True, positions_init: Initializer = uniform_positions,
        window: int | None = None, causal: bool = True, decode: bool = False, cached: str = "keys",
        blocks: tuple[int, int] | None = None, pool: int | None = None,
        n_targets: int | None = None, targets_per: str = "row", targets: Any = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip


class LUTPairAttention(_Attention):
    """Lookup-table attention over pairs of positions: `lutjax.lut_pair_attention`."""

    spec_type = _tables.LUTPairAttentionSpec
    __call__ = attention_call  # runs lutjax.lut_pair_attention, also to attend to the cache

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, n_detectors: int, n_anchors: int,
        epsilon: float | int = 0.0, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None, implementation: Implementation = None,
        anchors: Any = None, n_positions: int = 0, n_position_bits: int = 0,
        shared_positions: bool = True, positions_init: Initializer = uniform_positions,
        window: int | None = None, causal: bool = True, decode: bool = False, cached: str = "keys",
        blocks: tuple[int, int] | None = None, pool: int | None = None,
        n_targets: int | None = None, targets_per: str = "row", targets: Any = None,
        interleave: bool = False, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

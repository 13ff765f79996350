"""Look-up tables for Flax NNX; `lutjax.layers._tables` has their arguments."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lutjax.layers import _tables
from lutjax.layers.nnx._layer import Drawn


@dataclasses.dataclass(eq=False, repr=False)
class LUT(Drawn, _tables.LUTArguments):
    """Layer of fully connected look-up tables.

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


@dataclasses.dataclass(eq=False, repr=False)
class SparseLUT(Drawn, _tables.SparseLUTArguments):
    """Layer of look-up tables whose rows reach only some of the outputs."""


class _Attention(Drawn):
    """Base of the two kinds of attention: the call and the cache."""

    def __post_init__(self, rngs: nnx.Rngs | None = None) -> None:
        super().__post_init__(rngs)
        for name in self.spec.cache_names:
            setattr(self, name, nnx.data(None))

    __call__ = _tables.attention_call

    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec = self.spec
        if not (spec.decode if decode is None else decode):
            return spec(self._held(), x, **others)
        cache = {name: getattr(self, name) for name in spec.cache_names}
        if cache["cache_index"] is None:
            raise ValueError(f"{spec.layer}: there is no cache to decode with; call init_cache first.")
        held = {name: c[...] for name, c in cache.items()}
        y, latest = spec.attend_with_cache(self._held(), held, x, **others)
        for name, value in latest.items():
            cache[name][...] = value
        return y

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
        """Make an empty cache (`nnx.Cache`) for decoding inputs of this shape and dtype.

        The length in `input_shape` does not matter: the cache holds as many keys as a query can see,
        `window` or else `n_positions`, and any number of new positions can be decoded at once.
        """
        for name, value in self.spec.empty_cache(input_shape, dtype).items():
            setattr(self, name, nnx.Cache(value))

    def set_view(
        self,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        cache_dtype: DTypeLike | None = None,
    ) -> None:
        """Change the mode of the layer, for ``nnx.view``.

        Args:
          decode: whether calls decode with the cache.
          batch_size: makes an empty cache for this batch.
          cache_dtype: dtype of the inputs that are decoded; float32 by default.
        """
        if decode is not None:
            self.decode = decode
        if batch_size is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, 1, self.spec.in_features), cache_dtype or jnp.float32)


@dataclasses.dataclass(eq=False, repr=False)
class LUTAttention(_Attention, _tables.LUTAttentionArguments):
    """Layer of concatenated look-up-table attention.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUTAttention
      >>> layer = LUTAttention(
      ...     8, 8, n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2, rngs=nnx.Rngs(0)
      ... )
      >>> layer.weights.shape, layer.positions.shape
      ((16, 256, 8), (31, 1, 2))
      >>> layer(jnp.ones((4, 32, 8))).shape
      (4, 32, 8)

      Decoding, here three positions and then one more:

      >>> decoder = nnx.view(layer, decode=True, batch_size=4)
      >>> decoder(jnp.ones((4, 3, 8))).shape, decoder(jnp.ones((4, 1, 8))).shape
      ((4, 3, 8), (4, 1, 8))
      >>> int(decoder.cache_index[...])
      4
    """


@dataclasses.dataclass(eq=False, repr=False)
class LUTPairAttention(_Attention, _tables.LUTPairAttentionArguments):
    """Layer of look-up-table attention that detects each pair of positions as one vector."""

"""Look-up tables for Flax Linen; `lutjax.layers._tables` has their arguments."""

from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.layers import _tables
from lutjax.layers.linen._layer import Layer


class _Tables(Layer):
    """Base of layers without another call."""

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        spec, arrays = self._bound()
        y: jax.Array = spec(arrays, x)
        return y


class LUT(_Tables, _tables.LUTArguments):
    """Layer of fully connected look-up tables."""


class SparseLUT(_Tables, _tables.SparseLUTArguments):
    """Layer of look-up tables whose rows reach only some of the outputs."""


class _Attention(Layer):
    """Base of the two kinds of attention: the call and the cache."""

    __call__ = _tables.attention_call

    @nn.compact
    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec, arrays = self._bound()
        if not (spec.decode if decode is None else decode):
            return spec(arrays, x, **others)
        empty = spec.empty_cache(x.shape, x.dtype)
        cache = {
            name: self.variable("cache", name, lambda value: value, value) for name, value in empty.items()
        }
        y, latest = spec.attend_with_cache(arrays, {n: v.value for n, v in cache.items()}, x, **others)
        if not self.is_initializing():  # which leaves the cache empty
            for name, value in latest.items():
                cache[name].value = value
        return y


class LUTAttention(_Attention, _tables.LUTAttentionArguments):
    """Layer of concatenated look-up-table attention.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUTAttention
      >>> layer = LUTAttention(
      ...     8, 8, n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2, decode=True
      ... )
      >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 1, 8)))
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'positions': (31, 1, 2), 'weights': (16, 256, 8)}
      >>> y, new = layer.apply(variables, jnp.ones((4, 3, 8)), mutable=["cache"])
      >>> y.shape, int(new["cache"]["cache_index"])
      ((4, 3, 8), 3)
    """


class LUTPairAttention(_Attention, _tables.LUTPairAttentionArguments):
    """Layer of look-up-table attention that detects each pair of positions as one vector."""

"""Look-up tables for Haiku; `lutjax.layers._tables` has their arguments."""

import dataclasses
from typing import Any

import haiku as hk

from lutjax.layers import _tables
from lutjax.layers.haiku._layer import Layer


@dataclasses.dataclass(eq=False, repr=False)
class LUT(Layer, _tables.LUTArguments):
    """Layer of fully connected look-up tables."""


@dataclasses.dataclass(eq=False, repr=False)
class SparseLUT(Layer, _tables.SparseLUTArguments):
    """Layer of look-up tables whose rows reach only some of the outputs."""


class _Attention(Layer):
    """Base of the two kinds of attention: the call and the cache."""

    __call__ = _tables.attention_call

    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        if not (self.spec.decode if decode is None else decode):
            return self.spec(self._held(), x, **others)
        cache = {
            name: hk.get_state(name, value.shape, value.dtype, init=lambda *_, value=value: value)
            for name, value in self.spec.empty_cache(x.shape, x.dtype).items()
        }
        y, latest = self.spec.attend_with_cache(self._held(), cache, x, **others)
        for name, value in latest.items():
            hk.set_state(name, value)
        return y


@dataclasses.dataclass(eq=False, repr=False)
class LUTAttention(_Attention, _tables.LUTAttentionArguments):
    """Layer of concatenated look-up-table attention.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import LUTAttention
      >>> sizes = dict(n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2)
      >>> f = hk.transform_with_state(lambda x: LUTAttention(8, 8, decode=True, **sizes)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((4, 1, 8)))
      >>> jax.tree.map(jnp.shape, params)
      {'lut_attention': {'positions': (31, 1, 2), 'weights': (16, 256, 8)}}
      >>> y, state = f.apply(params, state, None, jnp.ones((4, 3, 8)))
      >>> y.shape, int(state["lut_attention"]["cache_index"])
      ((4, 3, 8), 3)
    """


@dataclasses.dataclass(eq=False, repr=False)
class LUTPairAttention(_Attention, _tables.LUTPairAttentionArguments):
    """Layer of look-up-table attention that detects each pair of positions as one vector."""

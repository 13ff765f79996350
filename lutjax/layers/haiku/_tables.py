"""Look-up tables for Haiku."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
from jaxtyping import Float, Int

from lutjax._typing import Array, Integer
from lutjax.layers import _tables
from lutjax.layers._spec import takes
from lutjax.layers.haiku._layer import Layer


def _constant(value: jax.Array) -> Callable[..., jax.Array]:
    return lambda shape, dtype: value


class LUT(Layer):
    """Fully connected look-up tables, with the options of `lutjax.layers.nnx.LUT`.

    Parameter: ``weights [n_detectors, 2**n_anchors, out_features]`` of `param_dtype`. State: ``anchors``
    int32 ``[n_detectors, n_anchors, 2]``.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input.

    Source: docs/semantics.md, section 3.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import LUT
      >>> f = hk.transform_with_state(lambda x: LUT(8, 4, n_detectors=16, n_anchors=6)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8)))
      >>> jax.tree.map(jnp.shape, (params, state))
      ({'lut': {'weights': (16, 64, 4)}}, {'lut': {'anchors': (16, 6, 2)}})
      >>> y, state = f.apply(params, state, None, jnp.ones((32, 8)))
      >>> y.shape
      (32, 4)
    """

    @takes(_tables.LUTSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self._build(_tables.LUTSpec, in_features, out_features, given={"anchors": anchors}, **options)


class SparseLUT(Layer):
    """Look-up tables whose rows reach only some outputs, with the options of `lutjax.layers.nnx.SparseLUT`.

    Parameter: ``weights [n_detectors, 2**n_anchors, n_targets]``. State: ``anchors`` int32
    ``[n_detectors, n_anchors, 2]``, ``targets`` int32 ``[n_detectors or 1, 2**n_anchors or 1, n_targets]``,
    -1 for an unused slot.

    Raises:
      ValueError: a size is impossible, an anchor is not an input or a target not an output.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import SparseLUT
      >>> sizes = dict(n_detectors=16, n_anchors=3, n_targets=5)
      >>> f = hk.transform_with_state(lambda x: SparseLUT(8, 100, **sizes)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8)))
      >>> f.apply(params, state, None, jnp.ones((32, 8)))[0].shape
      (32, 100)
    """

    @takes(_tables.SparseLUTSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        targets: Any = None,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self._build(
            _tables.SparseLUTSpec,
            in_features,
            out_features,
            given={"anchors": anchors, "targets": targets},
            **options,
        )


class _Attention(Layer):
    """What the two kinds of attention share: the call and the cache."""

    decode: bool

    def __call__(
        self,
        x: Float[Array, "*batch queries inputs"],
        keys: Float[Array, "*batch keys inputs"] | None = None,
        *,
        segments: Int[Array, "*#batch queries"] | None = None,
        key_segments: Int[Array, "*#batch keys"] | None = None,
        query_start: Integer | None = None,
        key_start: Integer | None = None,
    ) -> Float[jax.Array, "*batch queries outputs"]:
        """Outputs ``[..., length, out_features]``; arguments as in `lutjax.layers.nnx.LUTAttention`."""
        others = {
            "keys": keys,
            "segments": segments,
            "key_segments": key_segments,
            "query_start": query_start,
            "key_start": key_start,
        }
        if not self.decode:
            return self.spec(self._arrays(), x, **others)
        empty = self.spec.empty_cache(x.shape, x.dtype)
        cache = {
            name: hk.get_state(name, value.shape, value.dtype, init=_constant(value))
            for name, value in empty.items()
        }
        y, latest = self.spec.decode(self._arrays(), cache, x, **others)
        for name, value in latest.items():
            hk.set_state(name, value)
        return y


class LUTAttention(_Attention):
    """Concatenated look-up-table attention, with the options of `lutjax.layers.nnx.LUTAttention`.

    Parameters: ``weights [n_detectors, 2**(2 * n_anchors + n_position_bits), out_features]``, and
    ``positions [n_positions, 1 or n_detectors, n_position_bits]`` if there are positional bits. State:
    ``anchors`` int32 ``[n_detectors, n_anchors, 2]``. With ``decode=True``, also the keys so far: `init`
    makes an empty cache for the batch of its inputs, and each `apply` continues the text.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input.

    Source: docs/semantics.md, section 5.

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

    @takes(_tables.LUTAttentionSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        decode: bool = False,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self.decode = decode
        self._build(
            _tables.LUTAttentionSpec, in_features, out_features, given={"anchors": anchors}, **options
        )


class LUTPairAttention(_Attention):
    """Look-up-table attention over joint vectors, with the options of `lutjax.layers.nnx.LUTPairAttention`.

    Parameters: ``weights [n_detectors, 2**n_anchors, out_features]``, and ``positions
    [n_positions, 1 or n_detectors, n_position_bits]`` if there are positional bits. State: ``anchors``
    int32 ``[n_detectors, n_anchors, 2]``, ids of the joint vector; a cache as in `LUTAttention`.

    Raises:
      ValueError: a size is impossible, or an anchor is not a place in the joint vector.

    Source: docs/semantics.md, section 6.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import LUTPairAttention
      >>> sizes = dict(n_detectors=16, n_anchors=6, n_positions=31, n_position_bits=4)
      >>> f = hk.transform_with_state(lambda x: LUTPairAttention(8, 8, **sizes)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((4, 32, 8)))
      >>> f.apply(params, state, None, jnp.ones((4, 32, 8)))[0].shape
      (4, 32, 8)
    """

    @takes(_tables.LUTPairAttentionSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        decode: bool = False,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self.decode = decode
        self._build(
            _tables.LUTPairAttentionSpec, in_features, out_features, given={"anchors": anchors}, **options
        )

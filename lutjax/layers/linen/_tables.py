"""Look-up tables for Flax Linen."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from lutjax._fixed_point import FixedPoint
from lutjax._typing import Array, Integer
from lutjax.layers import _tables
from lutjax.layers._spec import Initializer
from lutjax.layers.linen._layer import Layer


class _Tables(Layer):
    """The options of every layer."""

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    n_detectors: int
    n_anchors: int
    epsilon: float | int = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    weights_init: Initializer = jax.nn.initializers.zeros
    accumulate: FixedPoint | None = None
    implementation: str | tuple[str, ...] | None = None
    anchors: Any = None

    spec_type = _tables.LUTSpec

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        spec, variables = self._spec_and_variables()
        return spec(self._arrays(variables), x)


class LUT(_Tables):
    """Fully connected look-up tables, with the options of `lutjax.layers.nnx.LUT`.

    Variables: ``params/weights [n_detectors, 2**n_anchors, out_features]`` of `param_dtype`, and
    ``anchors/anchors`` int32 ``[n_detectors, n_anchors, 2]``, a collection of its own that no optimiser
    sees. Both are drawn from the ``params`` stream.

    Raises:
      ValueError: on first use, a size is impossible or an anchor is not an input.

    Source: docs/semantics.md, section 3.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUT
      >>> layer = LUT(8, 4, n_detectors=16, n_anchors=6)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 8)))
      >>> jax.tree.map(jnp.shape, variables)
      {'anchors': {'anchors': (16, 6, 2)}, 'params': {'weights': (16, 64, 4)}}
      >>> layer.apply(variables, jnp.ones((32, 8))).shape
      (32, 4)
    """


class SparseLUT(_Tables):
    """Look-up tables whose rows reach only some outputs, with the options of `lutjax.layers.nnx.SparseLUT`.

    Variables: ``params/weights [n_detectors, 2**n_anchors, n_targets]``, ``anchors/anchors`` int32
    ``[n_detectors, n_anchors, 2]`` and ``targets/targets`` int32
    ``[n_detectors or 1, 2**n_anchors or 1, n_targets]``, -1 for an unused slot.

    Raises:
      ValueError: on first use, a size is impossible, an anchor is not an input or a target not an output.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import SparseLUT
      >>> layer = SparseLUT(8, 100, n_detectors=16, n_anchors=3, n_targets=5)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((32, 8)))
      >>> y.shape, variables["targets"]["targets"].shape
      ((32, 100), (16, 8, 5))
    """

    n_targets: int | None = None
    targets_per: str = "row"
    targets: Any = None

    spec_type = _tables.SparseLUTSpec


class _Attention(_Tables):
    """What the two kinds of attention share: the call and the cache."""

    n_positions: int = 0
    n_position_bits: int = 0
    shared_positions: bool = True
    positions_init: Initializer = _tables.uniform_positions
    window: int | None = None
    decode: bool = False

    @nn.compact
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
        spec, variables = self._spec_and_variables()
        arrays = self._arrays(variables)
        others = {
            "keys": keys,
            "segments": segments,
            "key_segments": key_segments,
            "query_start": query_start,
            "key_start": key_start,
        }
        if not self.decode:
            return spec(arrays, x, **others)
        exists = self.has_variable("cache", "cache_index")
        empty = spec.empty_cache(x.shape, x.dtype)
        cache = {
            name: self.variable("cache", name, lambda value: value, value) for name, value in empty.items()
        }
        y, latest = spec.decode(arrays, {name: v.value for name, v in cache.items()}, x, **others)
        if exists:  # initialising leaves the cache empty
            for name, value in latest.items():
                cache[name].value = value
        return y


class LUTAttention(_Attention):
    """Concatenated look-up-table attention, with the options of `lutjax.layers.nnx.LUTAttention`.

    Variables: ``params/weights [n_detectors, 2**(2 * n_anchors + n_position_bits), out_features]``,
    ``params/positions [n_positions, 1 or n_detectors, n_position_bits]`` if there are positional bits,
    ``anchors/anchors`` int32 ``[n_detectors, n_anchors, 2]``. With ``decode=True``, `init` makes a
    collection ``cache`` for the batch of its inputs, and `apply` with ``mutable=["cache"]`` continues a text.

    Raises:
      ValueError: on first use, a size is impossible or an anchor is not an input.

    Source: docs/semantics.md, section 5.

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

    spec_type = _tables.LUTAttentionSpec


class LUTPairAttention(_Attention):
    """Look-up-table attention over joint vectors, with the options of `lutjax.layers.nnx.LUTPairAttention`.

    Variables: ``params/weights [n_detectors, 2**n_anchors, out_features]``, ``params/positions
    [n_positions, 1 or n_detectors, n_position_bits]`` if there are positional bits, ``anchors/anchors``
    int32 ``[n_detectors, n_anchors, 2]``, ids of the joint vector. A ``cache`` as in `LUTAttention`.

    Raises:
      ValueError: on first use, a size is impossible or an anchor is not a place in the joint vector.

    Source: docs/semantics.md, section 6.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUTPairAttention
      >>> layer = LUTPairAttention(8, 8, n_detectors=16, n_anchors=6, n_positions=31, n_position_bits=4)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((4, 32, 8)))
      >>> y.shape, variables["params"]["weights"].shape
      ((4, 32, 8), (16, 64, 8))
    """

    interleave: bool = False

    spec_type = _tables.LUTPairAttentionSpec
